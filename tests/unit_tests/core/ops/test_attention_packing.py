# SPDX-License-Identifier: Apache-2.0
"""CPU attention on sequences long enough for packed keys and values."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.attention import attention, cpu
from tests.support.closeness import assert_close_by_metric


def math_attention(query, key, value):
    """Return causal attention [s, b, n, d] of fp64 tensors by PyTorch's math backend."""
    heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.permute(2, 0, 1, 3)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_attention_of_strided_qkv_matches_fp64(dtype, bound):
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(cpu._MIN_PACKED_QUERIES + 4, 2, 10, 16, generator=generator)
    grad = torch.randn(qkv.shape[0], 2, 6, 16, generator=generator).to(dtype)
    leaf = qkv.to(dtype).requires_grad_()
    out, _ = attention(*leaf.split([6, 2, 2], dim=2))
    out.backward(grad)
    fp64_leaf = leaf.detach().double().requires_grad_()
    expected = math_attention(*fp64_leaf.split([6, 2, 2], dim=2))
    expected.backward(grad.double())
    assert_close_by_metric("out", out, expected, bound=bound)
    for grad_slice, expected_slice in zip(
        leaf.grad.split([6, 2, 2], 2), fp64_leaf.grad.split([6, 2, 2], 2), strict=True
    ):
        assert_close_by_metric("gradient", grad_slice, expected_slice, bound=bound)


def test_keys_are_packed_only_for_many_queries():
    key = torch.randn(300, 2, 3, 8)
    packed = cpu._packed(key, torch.float32, key)
    assert packed.is_contiguous()
    assert torch.equal(packed.permute(2, 0, 1, 3), key)
    assert cpu._packed(key, torch.float32, key[:1]).data_ptr() == key.data_ptr()

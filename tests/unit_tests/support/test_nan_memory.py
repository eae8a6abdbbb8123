# SPDX-License-Identifier: Apache-2.0
"""nan_memory fills uninitialised memory, in backward as well, and only inside its context."""

import pytest
import torch

from tests.support.nan_memory import nan_memory

ALLOCATORS = {
    "empty": lambda like: torch.empty(like.shape, dtype=like.dtype),
    "empty_like": torch.empty_like,
    "empty_strided": lambda like: torch.empty_strided(like.shape, (1, 3), dtype=like.dtype),
    "new_empty": lambda like: like.new_empty(like.shape),
    "resize": lambda like: like.new_zeros(0).resize_(like.shape),
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_uninitialised_memory_is_filled(allocator, dtype):
    like = torch.zeros(3, 2, dtype=dtype)
    with nan_memory():
        allocated = ALLOCATORS[allocator](like)
    if dtype.is_floating_point:
        assert allocated.isnan().all()
    else:
        equal = bool((allocated == torch.iinfo(dtype).max).all())
        assert equal


class _OmitsLastRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        out[:-1] = 2 * grad[:-1]
        return out


def test_element_not_written_by_backward_is_nan():
    x = torch.ones(4, requires_grad=True)
    with nan_memory():
        _OmitsLastRow.apply(x).sum().backward()
    assert x.grad.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize("before", ["default", "warn", "error"])
def test_deterministic_debug_mode_is_restored(before):
    torch.set_deterministic_debug_mode(before)
    try:
        mode = torch.get_deterministic_debug_mode()
        with nan_memory():
            assert torch.get_deterministic_debug_mode() >= 1
        assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode("default")

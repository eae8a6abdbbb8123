# SPDX-License-Identifier: Apache-2.0
"""Kernels that pass over tokens once, at model shapes: no copies, uneven sizes, 64-bit offsets."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.core.ops.linear_cross_entropy import chunk_gradient_, chunk_statistics
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import HeadRotation, apply_rope, rotary_table, split_heads
from megatron.core.ops.swiglu import gated
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, DTYPES, agree, random_tensor, sized
from tests.support.launch_kernels import assert_launches

pytestmark = pytest.mark.gpu

SEQUENCE, BATCH = sized((1021, 3), (5, 2))
QUERIES, KEYS, FEATURES = sized((16, 2, 128), (3, 1, 20))
NORM = {"eps": 1e-6, "zero_centered": True}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", [False, True])
def test_norms_of_projected_heads_match_reference(device, dtype, gates):
    """Queries are next to keys and values, or each query is next to its gate."""
    width = 2 * FEATURES if gates else FEATURES
    mixed = random_tensor(device, SEQUENCE, BATCH, QUERIES + 2 * KEYS, width)

    def normed(mixed, w, v, **options):
        query, key, _ = mixed[..., -FEATURES:].split([QUERIES, KEYS, KEYS], dim=2)
        return rms_norm(query, w, **NORM, **options), rms_norm(key, v, **NORM, **options)

    agree(normed, (mixed, random_tensor(device, FEATURES), random_tensor(device, FEATURES)), dtype)
    x, w = mixed.to(dtype), random_tensor(device, FEATURES).to(dtype)
    assert_launches(
        lambda: normed(x, w, w, implementation="triton"), {"rms_norm_forward_kernel": 2}
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", sized([1, 96, 2560, 5120, 8192], [1, 24]))
def test_norms_of_any_width_match_reference(device, dtype, features):
    shapes = (SEQUENCE, features), (SEQUENCE, features), (features,)
    x, residual, w = (random_tensor(device, *shape) + 0.1 for shape in shapes)
    agree(
        lambda x, r, w, **options: rms_norm(x, w, eps=1e-5, residual=r, **options),
        (x, residual.flip(0), w),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [KEYS, QUERIES])
def test_partial_rope_in_a_projection_matches_reference(device, dtype, interleaved, heads):
    rotated, positions = FEATURES // 4 // 2 * 2, torch.arange(SEQUENCE, device=device)
    cos, sin = rotary_table(
        torch.stack([positions, *[positions + 3] * (BATCH - 1)], -1), dim=rotated
    )
    rotate = partial(apply_rope, cos=cos, sin=sin, interleaved=interleaved)
    x = random_tensor(device, SEQUENCE, BATCH, heads + 3, FEATURES)
    agree(lambda x, **options: rotate(x[:, :, 1:-2], **options), (x,), dtype)
    x = x.to(dtype)[:, :, 1:-2]
    assert_launches(lambda: rotate(x, implementation="triton"), {"rope_kernel": 1})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", [0, QUERIES])
def test_heads_of_a_projection_share_one_gradient(device, dtype, gates):
    sizes = [QUERIES, KEYS, KEYS] + [gates] * bool(gates)
    table = rotary_table(torch.arange(SEQUENCE, device=device), dim=FEATURES)
    split = partial(split_heads, sizes=sizes, rotation=HeadRotation(*table))
    x = random_tensor(device, SEQUENCE, BATCH, sum(sizes), FEATURES)
    agree(split, (x,), dtype)
    x = x.to(dtype).requires_grad_()
    grad_outputs = [torch.ones_like(head_block) for head_block in split(x.detach())]
    assert_launches(
        lambda: torch.autograd.grad(split(x, implementation="triton"), x, grad_outputs),
        {"rope_kernel": 1, "join_heads_kernel": 1},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copies", sized([1, 2, 8, 10], [3]))
@pytest.mark.parametrize("features", sized([2048, 1030], [37]))
def test_permutations_match_reference(device, dtype, copies, features):
    order = random_tensor(device, SEQUENCE * copies).argsort()
    permutation = Permutation.of(order[SEQUENCE // 5 :], SEQUENCE, copies)
    rows = len(permutation.sources)
    agree(
        lambda x, **options: take_rows(x, permutation, **options),
        (random_tensor(device, SEQUENCE, features),),
        dtype,
    )
    agree(
        lambda y, w, **options: sum_rows(y, permutation, weights=w, **options),
        (random_tensor(device, rows, features), random_tensor(device, SEQUENCE, copies)),
        dtype,
        fp32_inputs=(1,),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [0, 47])
def test_cross_entropy_ignores_padded_vocabulary(device, dtype, padding):
    vocabulary = sized(50257, 33)
    logits = random_tensor(device, SEQUENCE, vocabulary + padding).to(dtype)
    logits[:, vocabulary:] = torch.nan  # padding is never read
    targets = torch.arange(SEQUENCE, device=device) * 7 % vocabulary + 5
    weights = random_tensor(device, SEQUENCE).abs()
    columns = {"vocab_start": 5, "valid_columns": vocabulary}
    outputs = {}
    for name, kind in (("triton", dtype), ("reference", torch.float64)):
        x, shared = logits.to(kind, copy=True), {**columns, "implementation": name}
        maximum, sums, target = chunk_statistics(x, targets, **shared)
        lse = maximum + sums.log()
        row_weights = weights.to(lse.dtype)
        outputs[name] = (lse, target, chunk_gradient_(x, targets, lse, row_weights, **shared))
    for name_of_output, actual, expected in zip(
        ("lse", "target", "gradient"), *outputs.values(), strict=True
    ):
        assert_close_by_metric(name_of_output, actual, expected, bound=BOUND[dtype])


def test_offsets_beyond_32_bits_match_reference(device):
    """The last rows of tensors beyond 2^31 elements equal the rows computed separately."""
    dtype, num_rows = DTYPES[-1], 5
    rows, width = sized(((1 << 20) + 11, 2048), (11, 40))
    x, w = (
        torch.empty(rows, width, dtype=dtype, device=device),
        random_tensor(device, width).to(dtype),
    )
    x[-num_rows:] = random_tensor(device, num_rows, width).to(dtype)
    x[:-num_rows] = 1.0
    cos, sin = rotary_table(torch.arange(rows, device=device), dim=8)
    permutation = Permutation.of(torch.arange(rows, device=device), rows, 1)
    for name, function, num_compared in (
        ("norm", lambda x, **o: rms_norm(x, w, eps=1e-5, **o), num_rows),
        ("gate", lambda x, **o: gated(x, "silu", **o), num_rows),
        ("copy", lambda x, **o: take_rows(x, permutation, **o), num_rows),
        ("sum", lambda x, **o: sum_rows(x, permutation, **o), num_rows),
    ):
        actual = function(x, implementation="triton")[-num_compared:]
        if name in ("copy", "sum"):
            expected = x[-num_compared:]
        else:
            expected = function(x[-num_compared:].double(), implementation="reference")
        assert_close_by_metric(name, actual, expected, bound=BOUND[dtype])
        del actual
    heads = x.view(rows, 1, width // 8, 8)
    actual = apply_rope(heads, cos, sin, implementation="triton")[-num_rows:]
    expected = apply_rope(
        heads[-num_rows:].double(), cos[-num_rows:], sin[-num_rows:], implementation="reference"
    )
    assert_close_by_metric("rope", actual, expected, bound=BOUND[dtype])

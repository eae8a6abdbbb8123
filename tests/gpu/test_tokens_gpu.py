# SPDX-License-Identifier: Apache-2.0
"""Kernels that go over tokens once, at shapes that models have: no copies, odd sizes, 64 bits."""

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
def test_norms_of_heads_in_a_projection(device, dtype, gates):
    """Queries lie among keys and values, or each beside its gate."""
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
def test_norms_of_rows_of_any_width(device, dtype, features):
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
def test_rope_of_a_part_of_heads_in_a_projection(device, dtype, interleaved, heads):
    rotated, places = FEATURES // 4 // 2 * 2, torch.arange(SEQUENCE, device=device)
    cos, sin = rotary_table(torch.stack([places, *[places + 3] * (BATCH - 1)], -1), dim=rotated)
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
    pulls = [torch.ones_like(part) for part in split(x.detach())]
    assert_launches(
        lambda: torch.autograd.grad(split(x, implementation="triton"), x, pulls),
        {"rope_kernel": 1, "join_heads_kernel": 1},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copies", sized([1, 2, 8, 10], [3]))
@pytest.mark.parametrize("features", sized([2048, 1030], [37]))
def test_permutations(device, dtype, copies, features):
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
def test_chunks_of_a_padded_vocabulary(device, dtype, padding):
    vocabulary = sized(50257, 33)
    logits = random_tensor(device, SEQUENCE, vocabulary + padding).to(dtype)
    logits[:, vocabulary:] = torch.nan  # padding is never looked at
    targets = torch.arange(SEQUENCE, device=device) * 7 % vocabulary + 5
    weights = random_tensor(device, SEQUENCE).abs()
    columns = {"vocab_start": 5, "valid_columns": vocabulary}
    found = {}
    for name, kind in (("triton", dtype), ("reference", torch.float64)):
        x, shared = logits.to(kind, copy=True), {**columns, "implementation": name}
        maximum, sums, target = chunk_statistics(x, targets, **shared)
        lse = maximum + sums.log()
        wide = weights.to(lse.dtype)
        found[name] = (lse, target, chunk_gradient_(x, targets, lse, wide, **shared))
    for part, mine, true in zip(("lse", "target", "gradient"), *found.values(), strict=True):
        assert_close_by_metric(part, mine, true, bound=BOUND[dtype])


def test_places_beyond_32_bits(device):
    """The last rows of tensors of more than 2^31 elements are those of the rows by themselves."""
    dtype, last = DTYPES[-1], 5
    rows, width = sized(((1 << 20) + 11, 2048), (11, 40))
    x, w = (
        torch.empty(rows, width, dtype=dtype, device=device),
        random_tensor(device, width).to(dtype),
    )
    x[-last:] = random_tensor(device, last, width).to(dtype)
    x[:-last] = 1.0
    cos, sin = rotary_table(torch.arange(rows, device=device), dim=8)
    permutation = Permutation.of(torch.arange(rows, device=device), rows, 1)
    for name, function, kept in (
        ("norm", lambda x, **o: rms_norm(x, w, eps=1e-5, **o), last),
        ("gate", lambda x, **o: gated(x, "silu", **o), last),
        ("copy", lambda x, **o: take_rows(x, permutation, **o), last),
        ("sum", lambda x, **o: sum_rows(x, permutation, **o), last),
    ):
        found = function(x, implementation="triton")[-kept:]
        if name in ("copy", "sum"):
            true = x[-kept:]
        else:
            true = function(x[-kept:].double(), implementation="reference")
        assert_close_by_metric(name, found, true, bound=BOUND[dtype])
        del found
    heads = x.view(rows, 1, width // 8, 8)
    found = apply_rope(heads, cos, sin, implementation="triton")[-last:]
    true = apply_rope(heads[-last:].double(), cos[-last:], sin[-last:], implementation="reference")
    assert_close_by_metric("rope", found, true, bound=BOUND[dtype])

# SPDX-License-Identifier: Apache-2.0
"""Triton kernels in the interpreter against the fp64 formulas, on NaN-filled memory.

`test_triton.py` runs this file in a separate process, because TRITON_INTERPRET must be set before
the first import of Triton.
"""

import dataclasses
import math
import random

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.attention import Mask, attention, tile_kernels
from megatron.core.ops.attention import cpu as attention_cpu
from megatron.core.ops.attention import triton as attention_triton
from megatron.core.ops.attention.naive import attention as naive_attention
from megatron.core.ops.dropout import dropout
from megatron.core.ops.dropout import triton as dropout_triton
from megatron.core.ops.launches import Launches
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.layernorm import triton as layernorm_triton
from megatron.core.ops.linear_cross_entropy import (
    chunk_gradient_,
    chunk_statistics,
    linear_cross_entropy,
)
from megatron.core.ops.linear_cross_entropy import triton as loss_triton
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.permutation import triton as permutation_triton
from megatron.core.ops.permutation.naive import sum_rows as naive_sum_rows
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rmsnorm import triton as rmsnorm_triton
from megatron.core.ops.rmsnorm.naive import rms_norm as naive_rms
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.rope import triton as rope_triton
from megatron.core.ops.rope.naive import apply_rope as naive_rope
from megatron.core.ops.swiglu import gated
from megatron.core.ops.swiglu import triton as swiglu_triton
from megatron.core.ops.swiglu.naive import gated as naive_gated
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import (
    ATTENTION_CASES,
    PERMUTATIONS,
    assert_close,
    compare,
    compare_with_padding,
    head_splits,
    make_attention,
    make_permutation,
    maker,
)

FP32 = torch.float32


@pytest.fixture
def make():
    """Make fp64 tensors from a fixed seed."""
    return maker()


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


def few_programs(monkeypatch, module):
    """Use tiles of a few rows and fewer programs than tiles."""
    for name in ("FORWARD", "BACKWARD"):
        launch = getattr(module, name).default | {"TILE": 128, "num_warps": 1}
        launch |= {"PROGRAMS": 2} if "PROGRAMS" in launch else {}
        monkeypatch.setattr(module, name, Launches("few", launch))


def narrow_blocks(monkeypatch, module, *names, size=512):
    """Use blocks so small that a row has several."""
    for name in names:
        launch = {**getattr(module, name).default, "BLOCK": size}
        monkeypatch.setattr(module, name, Launches("narrow", launch))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_matches_formula(make, zero_centered, monkeypatch):
    few_programs(monkeypatch, rmsnorm_triton)
    offset = 1 if zero_centered else 0
    options = {"eps": 1e-5, "zero_centered": zero_centered, "implementation": "triton"}
    compare(
        lambda x, r, w: rms_norm(x, w, residual=r, **options),
        lambda x, r, w: (naive_rms(x + r, w + offset, eps=1e-5), x + r),
        (make(5, 3, 37), make(5, 3, 37), make(37)),
        FP32,
    )
    compare(
        lambda x, w: rms_norm(x, w, **options),
        lambda x, w: naive_rms(x, w + offset, eps=1e-5),
        (make(3, 130), make(130)),
        FP32,
    )


def test_rms_norm_of_strided_rows_matches_formula(make, monkeypatch):
    """Rows are addressed by two strides; other layouts and single rows work too."""
    few_programs(monkeypatch, rmsnorm_triton)
    options = {"eps": 1e-5, "implementation": "triton"}
    for shape, take_slice in (
        ((5, 3, 9, 20), lambda x: x[:, :, 2:6]),  # heads
        ((5, 3, 9, 40), lambda x: x[:, 1:, :, 20:]),  # a gate next to each head
        ((5, 3, 40), lambda x: x[..., :20]),
        ((5, 3, 20), lambda x: x.transpose(0, 1)),
        ((5, 1, 20), lambda x: x[3]),
        ((20, 7), lambda x: x.t()),
    ):
        compare(
            lambda x, w, take_slice=take_slice: rms_norm(take_slice(x), w, **options),
            lambda x, w, take_slice=take_slice: naive_rms(take_slice(x), w, eps=1e-5),
            (make(*shape), make(20)),
            FP32,
        )


def test_rms_norm_addresses_offsets_beyond_int32(tmp_path):
    """Offsets in x exceed 2^31; x is a sparse file."""
    shape, strides = (2, 3, 16), (16, 1_100_000_000, 1)
    size = 2 * strides[1] + 32
    x = torch.from_file(str(tmp_path / "x"), shared=True, size=size, dtype=FP32)
    x = x.as_strided(shape, strides).copy_(torch.randn(shape)).requires_grad_()
    weight, grad_out = torch.randn(16), torch.randn(shape)
    y = rms_norm(x, weight, eps=1e-5, implementation="triton")
    (grad,) = torch.autograd.grad(y, x, grad_out)
    dense_x = x.detach().clone(memory_format=torch.contiguous_format).double().requires_grad_()
    expected = rms_norm(dense_x, weight.double(), eps=1e-5, implementation="reference")
    assert relative_error(y, expected) < 1e-5
    assert relative_error(grad, *torch.autograd.grad(expected, dense_x, grad_out.double())) < 1e-5


@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm_matches_formula(make, with_bias, monkeypatch):
    few_programs(monkeypatch, layernorm_triton)
    compare(
        lambda x, r, w, b=None: layer_norm(
            x, w, b, eps=1e-5, residual=r, zero_centered=True, implementation="triton"
        ),
        lambda x, r, w, b=None: (F.layer_norm(x + r, (37,), w + 1, b, 1e-5), x + r),
        [make(5, 3, 37), make(5, 3, 37), make(37)] + [make(37)] * with_bias,
        FP32,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("features", "rotated"), [(6, 6), (10, 4)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rope_matches_formula(make, interleaved, features, rotated, per_sample, monkeypatch):
    # Each program rotates four tokens.
    launch = {**rope_triton.ROTATE.default, "TILE": 256 if features == 10 else 128}
    monkeypatch.setattr(rope_triton, "ROTATE", Launches("few", launch))
    tile = rope_triton.head_tile(launch["TILE"], 3, features, rotated // 2)
    assert tile["TOKENS"] == 4
    positions = torch.arange(7) + 3
    if per_sample:
        positions = torch.stack([positions, positions * 2], -1)
    cos, sin = rotary_table(positions, dim=rotated)
    angles = positions[..., None].double() * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    angles = angles[:, :, None] if per_sample else angles[:, None, None]
    compare(
        lambda x: apply_rope(x, cos, sin, interleaved=interleaved, implementation="triton"),
        lambda x: naive_rope(x, angles, interleaved),
        (make(7, 2, 3, features),),
        FP32,
    )


@pytest.mark.parametrize(
    ("features", "rotated", "interleaved", "gates"),
    [(6, 6, False, 0), (10, 4, True, 4), (6, 0, False, 4)],
)
def test_split_heads_matches_formula(make, interleaved, features, rotated, gates, monkeypatch):
    launch = {**rope_triton.ROTATE.default, "TILE": 128}
    monkeypatch.setattr(rope_triton, "ROTATE", Launches("few", launch))
    x = make(7, 2, 4 + 2 + 2 + gates, features)
    split, naive = head_splits(rotated, interleaved, gates, implementation="triton")
    compare(split, naive, (x,), FP32)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_activation_matches_formula(make, activation, monkeypatch):
    narrow_blocks(monkeypatch, swiglu_triton, "FORWARD", "BACKWARD")

    compare(
        lambda x: gated(x, activation, implementation="triton"),
        lambda x: naive_gated(x, activation),
        (make(2, 3, 2 * 1030),),
        FP32,
    )


@pytest.mark.parametrize("offset", [0, 5])
def test_dropout_matches_reference_bitwise(make, offset, monkeypatch):
    narrow_blocks(monkeypatch, dropout_triton, "DROP")
    x = make(6, 3, 1030).float()
    grad = make(6, 3, 1030).float()
    outputs_by_implementation = []
    for implementation in ("reference", "triton"):
        leaf = x.clone().requires_grad_()
        y = dropout(
            leaf,
            rate=0.3,
            key=-(1 << 61) + 5,
            sample_ids=torch.tensor([9, 0, 4]),
            position_ids=torch.arange(6) * 3,
            feature_offset=offset,
            implementation=implementation,
        )
        y.backward(grad)
        outputs_by_implementation.append((y.detach(), leaf.grad))
    for actual, expected in zip(*outputs_by_implementation, strict=True):
        assert torch.equal(actual, expected)


UNCOVERED = (
    "dropout",
    "dropout by position",
    "long",
    "long, before keys",
    "tiles within keys",
)  # no dropout in the kernel; too long


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, FP32) for name in ATTENTION_CASES if name not in UNCOVERED),
        *((name, torch.bfloat16) for name in ("tiles", "all", "bidirectional")),
    ],
)
def test_attention_matches_formula(make, name, dtype):
    inputs, options = make_attention(make, ATTENTION_CASES[name])
    lses = []

    def triton_attention(q, k, v, sinks=None):
        out, lse = attention(q, k, v, sinks=sinks, implementation="triton", **options)
        assert not lse.requires_grad
        lses.append(lse)
        return out

    def naive(q, k, v, sinks=None):
        mask_options = {x: y for x, y in options.items() if x != "document_ids"}
        documents = options.get("document_ids")
        out, lse = naive_attention(q, k, v, sinks, documents=documents, **mask_options)
        lses.append(lse)
        return out

    compare(triton_attention, naive, inputs, dtype)
    assert_close(lses[0], lses[1], dtype, "lse")


@pytest.mark.parametrize(("features", "head_dim_parts"), [(136, (128, 16)), (272, (256, 16))])
def test_attention_with_wide_heads_matches_formula(make, features, head_dim_parts):
    tile = attention_triton.tile_shape(attention_triton.FORWARD, features, FP32, Mask())
    rows = tile["BLOCK_Q"]
    assert (tile["FEATURES"], tile["TAIL"]) == head_dim_parts
    # More than two tiles of queries and of keys, partial last tiles, and a window across tiles.
    inputs = [make(rows * n + 5, 1, heads, features) for n, heads in ((2, 4), (3, 2), (3, 2))]
    compare(
        lambda *x: attention(*x, scale=0.1, window=rows + 7, implementation="triton")[0],
        lambda *x: naive_attention(*x, causal=True, scale=0.1, window=rows + 7)[0],
        inputs,
        FP32,
    )


def test_head_dim_splits_into_powers_of_two():
    head_dim_parts = {
        x: attention_triton.split_head_dim(x) for x in (1, 16, 17, 80, 96, 112, 128, 160, 192, 256)
    }
    assert head_dim_parts == {
        1: (16, 0),
        16: (16, 0),
        17: (32, 0),
        80: (64, 16),
        96: (64, 32),
        112: (128, 0),
        128: (128, 0),
        160: (128, 32),
        192: (128, 64),
        256: (256, 0),
    }


def document_ids(kind, length, seed=0):
    """Return document ids [length, 2], ascending or in any order."""
    generator = torch.Generator().manual_seed(length + seed)
    if kind == "any order":
        return torch.randint(-2, 2, (length, 2), generator=generator)
    starts = torch.randint(1, 60, (3, 2), generator=generator)
    starts[0] = torch.tensor([20, 38])  # earlier tiles lie within one document
    return (torch.arange(length)[:, None, None] >= starts).sum(1)


@dataclasses.dataclass
class Visibility:
    """An attention mask and the tile sizes of the kernels."""

    queries: int
    keys: int
    shift: int
    causal: bool = True
    window: int | None = None
    documents: str | None = None
    tile: tuple[int, int] = (16, 16)

    @property
    def mask(self):
        of_queries = of_keys = None
        if self.documents is not None:
            of_keys = document_ids(self.documents, self.keys)
            of_queries = document_ids(self.documents, self.queries, 1)
            if 0 <= self.shift <= self.keys - self.queries:
                of_queries = of_keys[self.shift :][: self.queries]
        return Mask(
            causal=self.causal,
            window=self.window,
            document_ids=of_keys,
            query_document_ids=of_queries,
            query_start=self.shift + 3,
            key_start=3,
        )

    def pairs(self, mask, sample):
        """Return the visible pairs as bool [s_q, s_k]."""
        pairs = (0, self.queries), (0, self.keys)
        hidden = mask.hidden(
            *pairs, shift=self.shift, documents=mask.query_document_ids, device=torch.device("cpu")
        )
        visible = torch.ones(1, 1, self.queries, self.keys, dtype=torch.bool)
        visible = visible if hidden is None else ~hidden
        return visible.expand(2, -1, -1, -1)[sample, 0]


VISIBILITIES = {
    "causal": Visibility(37, 53, 16),
    "window": Visibility(37, 60, 23, window=34),
    "documents": Visibility(52, 52, 0, documents="ascending", tile=(16, 32)),
    "documents in any order": Visibility(37, 53, 9, documents="any order", tile=(32, 16)),
    "all, queries later": Visibility(37, 33, 20, causal=False, window=34, documents="ascending"),
}
rng = random.Random(5)
RANDOM_VISIBILITIES = {
    f"random {number}": Visibility(
        rng.randint(1, 70),
        rng.randint(1, 70),
        rng.randint(-40, 60),
        causal=rng.random() < 0.6,
        window=rng.choice([None, 1, 7, 40, 60]),
        documents=rng.choice([None, "ascending", "any order"]),
        tile=rng.choice([(16, 16), (32, 16), (16, 32)]),
    )
    for number in range(24)
}
VISIBILITY_CASES = [
    *VISIBILITIES.items(),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in RANDOM_VISIBILITIES.items()),
]


@pytest.mark.parametrize(("name", "case"), VISIBILITY_CASES)
def test_tile_bounds_cover_all_visible_pairs(name, case):
    """Tile bounds cover all visible pairs, full tiles hide none; tight for ascending ids."""
    mask = case.mask
    zeros = (torch.zeros(n, 2, dtype=torch.int32) for n in (case.queries, case.keys))
    documents = (mask.query_document_ids, mask.document_ids) if case.documents else tuple(zeros)
    documents = [x.int().contiguous() for x in documents]
    for of_keys in (False, True):
        lengths, blocks = (case.queries, case.keys), case.tile
        if of_keys:
            lengths, blocks, documents = lengths[::-1], blocks[::-1], documents[::-1]
        count = -(-lengths[0] // blocks[0])
        bounds = torch.empty(2 * count, 4, dtype=torch.int32)
        tile_kernels.document_bounds_kernel[(2 * count,)](
            *documents,
            bounds,
            case.shift,
            case.queries,
            case.keys,
            2,
            case.window or 0,
            OF_KEYS=of_keys,
            CAUSAL=case.causal,
            HAS_WINDOW=case.window is not None,
            BLOCK_Q=case.tile[0],
            BLOCK_K=case.tile[1],
            TILES=2,
        )
        for program, (low, full_low, full_high, high) in enumerate(bounds.tolist()):
            pairs = case.pairs(mask, program // count)
            start = program % count * blocks[0]
            rows = (pairs.t() if of_keys else pairs)[start : start + blocks[0]]
            assert low <= full_low <= full_high <= high
            hidden = torch.cat([rows[:, :low], rows[:, high:]], 1)
            assert not hidden.any()
            assert rows[:, full_low:full_high].all()
            if name in ("causal", "window", "documents") and len(rows) == blocks[0]:
                starts = range(0, lengths[1], blocks[1])
                visible_tiles = [x for x in starts if rows[:, x : x + blocks[1]].any()]
                full_tiles = [x for x in starts if x + blocks[1] <= lengths[1]]
                full_tiles = [x for x in full_tiles if rows[:, x : x + blocks[1]].all()]
                assert visible_tiles == [*range(low, high, blocks[1])]
                assert full_tiles == [*range(full_low, full_high, blocks[1])]


@pytest.mark.parametrize(("name", "case"), VISIBILITY_CASES)
def test_attention_over_small_tiles_matches_reference(make, name, case, monkeypatch):
    """Full and masked tiles in fp32 and fp16, with dk and dv computed together or separately."""
    number = [*VISIBILITIES, *RANDOM_VISIBILITIES].index(name)
    dtype = (FP32, torch.float16)[number % 2]  # the interpreter has no bf16
    monkeypatch.setattr(attention_triton, "MAX_KEY_ACCUMULATORS", 0 if number % 3 else 1 << 20)
    queries, keys = case.tile
    blocks = {"FORWARD": (queries, keys), "QUERY_GRADIENT": (queries, keys)}
    for table, (block, step) in (blocks | {"KEY_GRADIENT": (keys, queries)}).items():
        tiles = {dtype.itemsize: {64: (block, step, step)}}
        monkeypatch.setattr(attention_triton, table, tiles)
    heads, groups = ((2, 1), (2, 2), (3, 1))[number % 3]
    features = (6, 40)[number // 2 % 2]  # 40 is split into 32 and 16
    scale = (0.3, -0.2, 0.0)[number % 3]
    query, grad = (make(case.queries, 2, heads, features).to(dtype) for _ in range(2))
    key, value = (make(case.keys, 2, groups, features).to(dtype) for _ in range(2))
    sinks = make(heads).float() if number % 2 else None
    mask = case.mask
    out, lse = attention_triton.attention_forward(query, key, value, sinks, scale, mask, dtype=FP32)
    fp64_qkv = [x.double() for x in (query, key, value)]
    expected, expected_lse = attention_cpu.attention_forward(
        *fp64_qkv, None if sinks is None else sinks.double(), scale, mask
    )
    actual_grads = attention_triton.attention_backward(
        grad, query, key, value, expected.to(dtype), expected_lse.float(), scale=scale, mask=mask
    )
    expected_grads = attention_cpu.attention_backward(
        grad.double(), *fp64_qkv, expected, expected_lse, scale=scale, mask=mask
    )
    empty, expected_empty = lse == -math.inf, expected_lse == -math.inf
    assert torch.equal(empty, expected_empty)
    lse, expected_lse = (x.masked_fill(empty, 0) for x in (lse, expected_lse))
    names = ("out", "lse", "dq", "dk", "dv")
    outputs = (out, lse, *actual_grads), (expected, expected_lse, *expected_grads)
    for name_of_output, x, y in zip(names, *outputs, strict=True):
        # With scale 0 or window 1 the exact gradients are zero and the actual ones are rounding.
        reference_with_floor = torch.cat([y.flatten(), y.new_tensor([0.3])])
        bound = 2e-5 if dtype == FP32 else 2**-8
        assert_close_by_metric(name_of_output, x, y, bound=bound, whole=reference_with_floor)


def test_attention_addresses_offsets_beyond_int32(tmp_path):
    """Offsets inside a tile exceed 2^31; the memory is a sparse file."""
    rows, stride = 5, 600_000_000
    memory = torch.from_file(str(tmp_path / "x"), shared=True, size=rows * stride, dtype=FP32)
    dense = [torch.randn(rows, 1, 1, 16) for _ in range(3)]
    strided = [
        memory[16 * i :].as_strided((rows, 1, 1, 16), (stride, 16, 16, 1)).copy_(x)
        for i, x in enumerate(dense)
    ]
    outputs = [
        attention_triton.attention_forward(*x, None, 0.3, Mask())[0] for x in (dense, strided)
    ]
    assert torch.equal(*outputs)
    grads = [
        attention_triton.attention_backward(
            dense[0], *x, outputs[0], torch.zeros(1, 1, rows), scale=0.3, mask=Mask()
        )
        for x in (dense, strided)
    ]
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


class GridRecorder:
    """A fake kernel that records the grids of its launches."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *arguments, **constants: None


def test_attention_grid_supports_over_65535_heads(monkeypatch):
    """Only the first dimension of a grid may exceed 65,535."""
    heads = 70_000
    names = ("document_bounds", "attention_forward", "query_gradient", "key_gradient", "row_dots")
    kernels = {f"{name}_kernel": GridRecorder() for name in names}
    for name, kernel in kernels.items():
        monkeypatch.setattr(attention_triton, name, kernel)
    query, key = torch.zeros(2, heads, 1, 1), torch.zeros(2, heads, 1, 1)
    mask = Mask(document_ids=torch.zeros(2, heads, dtype=torch.int32))
    out, lse = attention_triton.attention_forward(query, key, key, None, 1.0, mask)
    attention_triton.attention_backward(out, query, key, key, out, lse, scale=1.0, mask=mask)
    for name, kernel in kernels.items():
        assert kernel.grids, name
        for grid in kernel.grids:
            assert math.prod(grid) >= heads // 32
            assert all(size <= 65_535 for size in grid[1:])


def test_queries_without_keys_match_reference(make):
    query, grad = make(70, 1, 2, 6).float(), make(70, 1, 2, 6).float()
    key, value = make(70, 1, 1, 6).float(), make(70, 1, 1, 6).float()
    for start in (5, 100, 300):  # before some of the keys at 40 to 109, among them, after all
        mask = Mask(window=5, query_start=start, key_start=40)
        arguments = (query, key, value, None, 0.4, mask)
        actual = attention_triton.attention_forward(*arguments)
        expected = attention_cpu.attention_forward(*arguments)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        arguments = (grad, query, key, value, *actual)
        actual = attention_triton.attention_backward(*arguments, scale=0.4, mask=mask)
        expected = attention_cpu.attention_backward(*arguments, scale=0.4, mask=mask)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_bf16_attention_can_write_fp32_output(make):
    qkv = [make(20, 2, 4, 6).bfloat16() for _ in range(3)]
    out, _ = attention_triton.attention_forward(*qkv, None, 0.4, Mask(), dtype=FP32)
    expected, _ = naive_attention(*(x.double() for x in qkv), causal=True, scale=0.4)
    assert out.dtype == FP32
    assert not torch.equal(out, out.bfloat16().float())
    assert relative_error(out, expected) < 2**-7  # the weights are multiplied in bf16


def test_attention_of_fused_qkv_slices_matches_dense(make):
    fused = make(70, 2, 2, 3 * 24).float()
    qkv = fused.split(24, dim=-1)
    out, lse = attention(*qkv, implementation="triton")
    expected, expected_lse = attention(*(x.contiguous() for x in qkv))
    assert_close(out, expected, FP32, "out")
    assert_close(lse, expected_lse, FP32, "lse")


def test_attention_backward_uses_lse_over_more_keys(make):
    query, grad = make(5, 2, 4, 6).float(), make(5, 2, 4, 6).float()
    key, value = make(9, 2, 2, 6).float(), make(9, 2, 2, 6).float()
    out, lse = attention(query, key, value, causal=False)
    mask = Mask(causal=False)
    for keys in (slice(0, 4), slice(4, 9)):
        arguments = (grad, query, key[keys], value[keys], out, lse)
        actual = attention_triton.attention_backward(*arguments, scale=0.4, mask=mask)
        expected = attention_cpu.attention_backward(*arguments, scale=0.4, mask=mask)
        for x, y in zip(actual, expected, strict=True):
            assert_close(x, y, FP32, "gradient")


def test_vocabulary_shards_match_reference(make, monkeypatch):
    narrow_blocks(monkeypatch, loss_triton, "STATISTICS", "GRADIENT", size=16)
    full = make(6, 37).float()
    targets, weights = torch.tensor([0, 3, 4, 9, 7, 8]), torch.rand(6)
    for start, valid in ((0, 37), (4, 7), (3, 33), (0, 0)):
        logits = full.clone()
        logits[:, valid:] = float("nan")  # padding must be ignored
        columns = {"vocab_start": start, "valid_columns": valid}
        statistics = [
            chunk_statistics(logits, targets, **columns, implementation=name)
            for name in ("reference", "triton")
        ]
        for actual, expected in zip(*statistics, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        lse = full.logsumexp(-1)
        grads = [
            chunk_gradient_(logits.clone(), targets, lse, weights, **columns, implementation=name)
            for name in ("reference", "triton")
        ]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_linear_cross_entropy_matches_formula(make, monkeypatch):
    narrow_blocks(monkeypatch, loss_triton, "STATISTICS", "GRADIENT", size=16)
    targets, weights = torch.arange(11) * 5 % 19, torch.linspace(0, 2, 11)

    def triton_attention(h, w):
        return linear_cross_entropy(
            h, w, targets, weights, chunk_tokens=4, valid_columns=19, implementation="triton"
        )[0]

    def naive(h, w):
        return (F.cross_entropy(h @ w[:19].t(), targets, reduction="none") * weights).sum()

    compare(triton_attention, naive, (make(11, 7), make(2100, 7)[:23]), FP32)


@pytest.mark.parametrize(
    ("case", "features"),
    [*((case, 37) for case in PERMUTATIONS), ("two copies, dropped", 1030)],
)
def test_permutations_match_definition(make, case, features, monkeypatch):
    narrow_blocks(monkeypatch, permutation_triton, "TAKE")
    permutation = make_permutation(case)
    (tokens, copies), rows = permutation.slots.shape, len(permutation.sources)
    compare(
        lambda x: take_rows(x, permutation, implementation="triton"),
        lambda x: x[permutation.sources // copies],
        (make(tokens, features),),
        FP32,
    )
    for weights in ([], [make(tokens, copies)]):
        compare(
            lambda y, w=None: sum_rows(y, permutation, weights=w, implementation="triton"),
            lambda y, w=None: naive_sum_rows(y, permutation.slots, w),
            [make(rows, features), *weights],
            FP32,
        )


def test_permutations_with_padding_rows_match_definition(make):
    compare_with_padding(make, "triton")


@pytest.mark.parametrize("tokens", [0, 3])
def test_empty_permutation_gives_zeros(tokens):
    permutation = Permutation.of(torch.empty(0, dtype=torch.int64), tokens, 2)
    x = torch.ones(tokens, 5, requires_grad=True)
    weights = torch.ones(tokens, 2, requires_grad=True)
    rows = take_rows(x, permutation, implementation="triton")
    assert rows.shape == (0, 5)
    out = sum_rows(rows, permutation, weights=weights, implementation="triton")
    out.sum().backward()
    for tensor, shape in ((out, (tokens, 5)), (x.grad, (tokens, 5)), (weights.grad, (tokens, 2))):
        assert torch.equal(tensor, torch.zeros(shape))

# SPDX-License-Identifier: Apache-2.0
"""Attention against its equation: outputs, log-sum-exps and all gradients.

test_fused_attention_gpu.py tests the fused kernels of torch.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
import torch.nn.functional as F

from megatron.core.context_parallel import SequenceSharding, blockwise
from megatron.core.context_parallel.blockwise import attention_blocks
from megatron.core.ops.attention import Mask, attention, cpu, naive
from megatron.core.ops.dropout import AttentionDropout
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.gpu_agreement import (
    BOUND,
    DTYPES,
    REHEARSES,
    Backend,
    agree,
    assert_refused,
    random_tensor,
    sized,
)
from tests.support.launch_kernels import assert_launches
from tests.support.nan_memory import nan_memory

KERNELS = pytest.mark.gpu
FP32 = torch.float32


@pytest.fixture
def kernels():
    """The module of the kernels; uninitialised memory is NaN."""
    from megatron.core.ops.attention import triton

    with nan_memory():
        yield triton


ATTENTION_CASES = {
    "causal": {},
    "grouped": {"groups": 2},
    "one key head": {"groups": 1},
    "bidirectional": {"causal": False},
    "cross": {"causal": False, "queries": 9, "keys": 5},
    "cached": {"queries": 3, "keys": 11},
    "one query": {"queries": 1, "keys": 11, "groups": 2},
    "long": {"queries": 150, "keys": 301, "window": 40, "groups": 2},
    "tiles": {"queries": 70, "keys": 141, "window": 40, "groups": 2},
    "window": {"window": 3, "groups": 2},
    "window, bidirectional": {"window": 3, "causal": False},
    "documents": {"documents": True, "groups": 2},
    "documents, bidirectional": {"documents": True, "causal": False},
    "documents, cached": {"documents": True, "queries": 4, "keys": 11},
    "sinks": {"sinks": True, "groups": 2},
    "all": {"sinks": True, "groups": 2, "window": 5, "documents": True, "scale": 0.3},
    "dropout": {"dropout": True, "groups": 2, "queries": 5, "keys": 11},
    "soft cap": {"softcap": 0.7, "scale": 0.9, "groups": 2},
    "soft cap, bidirectional": {"softcap": 1.5, "causal": False, "queries": 9, "keys": 5},
    "soft cap and all": {
        "softcap": 0.7,
        "scale": -0.9,
        "sinks": True,
        "groups": 2,
        "window": 5,
        "documents": True,
    },
    "soft cap and dropout": {"softcap": 0.7, "dropout": True, "groups": 2},
    "soft cap, tiles": {"softcap": 1.5, "queries": 70, "keys": 141, "window": 40, "groups": 2},
    # Queries and keys at separate positions. Cases with queries that see no key have sinks.
    "queries within keys": {
        "queries": 5,
        "keys": 11,
        "query_start": 9,
        "key_start": 7,
        "groups": 2,
    },
    "equal lengths, queries later": {
        "queries": 11,
        "keys": 11,
        "query_start": 9,
        "key_start": 5,
        "groups": 2,
    },
    "queries before keys": {
        "queries": 7,
        "keys": 5,
        "query_start": 3,
        "key_start": 6,
        "sinks": True,
    },
    "beyond the window": {"queries": 7, "keys": 9, "query_start": 8, "window": 4, "sinks": True},
    "tiles within keys": {
        "queries": 70,
        "keys": 141,
        "query_start": 65,
        "key_start": 3,
        "window": 40,
    },
    "long, before keys": {
        "queries": 300,
        "keys": 150,
        "query_start": 10,
        "key_start": 150,
        "window": 20,
        "sinks": True,
        "groups": 2,
    },
    "query documents": {
        "queries": 6,
        "keys": 11,
        "query_start": 8,
        "documents": True,
        "query_documents": True,
        "sinks": True,
    },
    "documents within keys": {
        "queries": 6,
        "keys": 11,
        "query_start": 5,
        "key_start": 2,
        "documents": 1,
    },
    "dropout by position": {
        "dropout": True,
        "queries": 5,
        "keys": 11,
        "query_start": 29,
        "key_start": 9,
    },
}


def attention_inputs(backend, case):
    """Return (inputs, options) of a case."""
    case = dict(case)
    keys = case.pop("keys", 11)
    queries, groups = case.pop("queries", keys), case.pop("groups", 4)
    batch, heads, features = 2, 4, 6
    shapes = [
        (length, batch, n, features) for length, n in ((queries, heads), *[(keys, groups)] * 2)
    ]
    shapes += [(heads,)] * case.pop("sinks", False)
    options = {"causal": True, "scale": features**-0.5, **case}
    if options.pop("documents", False):
        rows = torch.arange(keys)
        options["document_ids"] = torch.stack([rows // 4, (rows + 1) // 3], -1)
    if options.pop("query_documents", False):
        rows = torch.arange(queries) + 4
        options["query_document_ids"] = torch.stack([rows // 4, (rows + 1) // 3], -1)
    if options.pop("dropout", False):
        options["dropout"] = AttentionDropout(
            rate=0.3, key=5, sample_ids=torch.tensor([8, 3]), head_offset=2
        )
    tensors = {name: x.to(backend.device) for name, x in options.items() if "ids" in name}
    return backend.random(*shapes), options | tensors


#: No kernel computes dropout.
DROPOUT = ("dropout", "dropout by position", "soft cap and dropout")
#: Too long for the interpreter.
LONG = ("long", "long, before keys", "tiles within keys")


def compare_with_equation(backend, name):
    """Compare a case; without a kernel for dropout, the op chooses an implementation."""
    inputs, options = attention_inputs(backend, ATTENTION_CASES[name])
    queries, keys = inputs[0].shape[0], inputs[1].shape[0]
    keep, choice = None, {}
    if name in DROPOUT:
        site, key_start = options["dropout"], options.get("key_start", 0)
        positions = torch.arange(queries) + options.get("query_start", keys - queries)
        keep = site.keep(4, positions, key_start, keys).double() * site.scale
        dropped = (keep == 0).double().mean().item()
        assert 0.1 < dropped < 0.5
        choice = {"implementation": None}
    lses = []

    def function(q, k, v, sinks=None, **implementation):
        out, lse = attention(q, k, v, sinks=sinks, **options, **implementation | choice)
        assert lse.shape == (2, 4, queries)
        assert not lse.requires_grad
        assert lse.dtype == torch.promote_types(q.dtype, FP32)
        lses.append(lse)
        return out

    def equation(q, k, v, sinks=None):
        mask_options = {x: y for x, y in options.items() if x not in ("document_ids", "dropout")}
        documents = options.get("document_ids")
        out, lse = naive.attention(q, k, v, sinks, documents=documents, keep=keep, **mask_options)
        lses.append(lse)
        return out

    backend.agree(function, equation, inputs)
    bound = backend.bounds[torch.float64 if backend.dtype == torch.float64 else FP32]
    if backend.implementation == "triton":
        bound = backend.bounds[backend.dtype]
    empty = lses[1].isneginf()
    assert torch.equal(lses[0].isneginf(), empty)
    assert_close_by_metric("lse", lses[0][~empty], lses[1][~empty], bound=bound)


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_matches_the_equation(backend, name):
    if REHEARSES and name in LONG:
        pytest.skip("too long for the interpreter")
    compare_with_equation(backend, name)


@KERNELS
@pytest.mark.parametrize("name", ["tiles", "all", "bidirectional"])
def test_bf16_kernels_match_the_equation(device, name):
    compare_with_equation(Backend("triton", device, torch.bfloat16), name)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16, torch.float64], ids=str)
def test_queries_without_keys_have_zero_output_and_gradient(dtype):
    backend = Backend("reference", torch.device("cpu"), dtype)
    inputs, options = attention_inputs(backend, {"queries": 300, "keys": 150, "window": 20})
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out, lse = attention(*leaves, query_start=0, key_start=150, **options)
    assert lse[..., :150].isneginf().all()
    assert not lse[..., 150:].isneginf().any()
    assert not out[:150].any()
    out.backward(torch.ones_like(out))
    assert not leaves[0].grad[:150].any()
    assert all(x.grad.isfinite().all() for x in leaves)


# --- plain torch: packed keys and values, chunks of queries


def math_attention(query, key, value):
    """Return causal attention [s, b, n, d] of fp64 tensors by PyTorch's math backend."""
    heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.permute(2, 0, 1, 3)


@pytest.mark.parametrize(("dtype", "bound"), [(FP32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_attention_of_strided_qkv_matches_fp64(dtype, bound):
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(cpu._MIN_PACKED_QUERIES + 4, 2, 10, 16, generator=generator)
    agree(
        lambda x, **options: attention(*x.split([6, 2, 2], dim=2), **options)[0],
        [qkv],
        dtype,
        equation=lambda x: math_attention(*x.split([6, 2, 2], dim=2)),
        implementation="reference",
        bounds={dtype: bound},
    )


def test_keys_are_packed_only_for_many_queries():
    key = torch.randn(300, 2, 3, 8)
    packed = cpu._packed(key, FP32, key)
    assert packed.is_contiguous()
    assert torch.equal(packed.permute(2, 0, 1, 3), key)
    assert cpu._packed(key, FP32, key[:1]).data_ptr() == key.data_ptr()


def test_chunked_attention_never_stores_all_logits(monkeypatch):
    queries, keys = 256, 256
    sizes = []
    bmm = torch.bmm

    def recording_bmm(*args, **kwargs):
        product = bmm(*args, **kwargs)
        sizes.append(product.shape)
        return product

    monkeypatch.setattr(torch, "bmm", recording_bmm)
    x = torch.randn(queries, 1, 2, 8, requires_grad=True)
    out, _ = attention(x, x, x, window=100)
    out.sum().backward()
    assert sizes
    limit = cpu.QUERIES_PER_CHUNK * keys
    assert max(size[1] * size[2] for size in sizes) <= limit
    # The window skips keys that no query of the chunk sees.
    assert max(size[2] for size in sizes) < keys


# --- tiles of the kernels


@KERNELS
@pytest.mark.parametrize(("features", "head_blocks"), [(136, (128, 16)), (272, (256, 16))])
def test_attention_with_wide_heads_matches_the_equation(device, kernels, features, head_blocks):
    tile = kernels.tile_shape(kernels.FORWARD, features, FP32, Mask())
    rows = tile["BLOCK_Q"]
    assert (tile["FEATURES"], tile["TAIL"]) == head_blocks
    # More than two tiles of queries and of keys, partial last tiles, and a window across tiles.
    shapes = [(rows * n + 5, 1, heads, features) for n, heads in ((2, 4), (3, 2), (3, 2))]
    backend = Backend("triton", device, FP32)
    backend.agree(
        lambda *x, **options: attention(*x, scale=0.1, window=rows + 7, **options)[0],
        lambda *x: naive.attention(*x, causal=True, scale=0.1, window=rows + 7)[0],
        backend.random(*shapes),
    )


@KERNELS
def test_head_dim_splits_into_powers_of_two(kernels):
    head_blocks = {
        x: kernels.split_head_dim(x) for x in (1, 16, 17, 80, 96, 112, 128, 160, 192, 256)
    }
    assert head_blocks == {
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

    def mask(self, device="cpu"):
        of_queries = of_keys = None
        if self.documents is not None:
            of_keys = document_ids(self.documents, self.keys)
            of_queries = document_ids(self.documents, self.queries, 1)
            if 0 <= self.shift <= self.keys - self.queries:
                of_queries = of_keys[self.shift :][: self.queries]
        return Mask(
            causal=self.causal,
            window=self.window,
            document_ids=None if of_keys is None else of_keys.to(device),
            query_document_ids=None if of_queries is None else of_queries.to(device),
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


@KERNELS
@pytest.mark.parametrize(("name", "case"), VISIBILITY_CASES)
def test_tile_bounds_cover_all_visible_pairs(device, name, case):
    """Tile bounds cover all visible pairs, full tiles hide none; tight for ascending ids."""
    from megatron.core.ops.attention.kernels import document_bounds_kernel

    mask = case.mask()
    zeros = (torch.zeros(n, 2, dtype=torch.int32) for n in (case.queries, case.keys))
    documents = (mask.query_document_ids, mask.document_ids) if case.documents else tuple(zeros)
    documents = [x.int().contiguous().to(device) for x in documents]
    for of_keys in (False, True):
        lengths, blocks = (case.queries, case.keys), case.tile
        if of_keys:
            lengths, blocks, documents = lengths[::-1], blocks[::-1], documents[::-1]
        count = -(-lengths[0] // blocks[0])
        bounds = torch.empty(2 * count, 4, dtype=torch.int32, device=device)
        document_bounds_kernel[(2 * count,)](
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


@KERNELS
@pytest.mark.parametrize(("name", "case"), VISIBILITY_CASES)
def test_attention_over_small_tiles_matches_reference(device, kernels, name, case, monkeypatch):
    """Full and masked tiles in fp32 and fp16, with dk and dv computed together or separately."""
    number = [*VISIBILITIES, *RANDOM_VISIBILITIES].index(name)
    dtype = (FP32, torch.float16)[number % 2]  # the interpreter has no bf16
    monkeypatch.setattr(kernels, "MAX_KEY_ACCUMULATORS", 0 if number % 3 else 1 << 20)
    queries, keys = case.tile
    blocks = {"FORWARD": (queries, keys), "QUERY_GRADIENT": (queries, keys)}
    for table, (block, step) in (blocks | {"KEY_GRADIENT": (keys, queries)}).items():
        tiles = {dtype.itemsize: {64: (block, step, step)}}
        monkeypatch.setattr(kernels, table, tiles)
    heads, groups = ((2, 1), (2, 2), (3, 1))[number % 3]
    features = (6, 40)[number // 2 % 2]  # 40 is split into 32 and 16
    scale = (0.3, -0.2, 0.0)[number % 3]
    of_queries, of_keys = (case.queries, 2, heads, features), (case.keys, 2, groups, features)
    tensors = Backend("triton", device, dtype).random(*[of_queries] * 2, *[of_keys] * 2, (heads,))
    query, grad, key, value = (x.to(dtype) for x in tensors[:4])
    sinks = tensors[4].float() if number % 2 else None
    mask = case.mask(device)
    out, lse = kernels.attention_forward(query, key, value, sinks, scale, mask, dtype=FP32)
    fp64_qkv = [x.double() for x in (query, key, value)]
    expected, expected_lse = cpu.attention_forward(
        *fp64_qkv, None if sinks is None else sinks.double(), scale, mask
    )
    actual_grads = kernels.attention_backward(
        grad, query, key, value, expected.to(dtype), expected_lse.float(), scale=scale, mask=mask
    )
    expected_grads = cpu.attention_backward(
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


@KERNELS
@pytest.mark.skipif(not REHEARSES, reason="the memory is a sparse file")
def test_attention_addresses_offsets_beyond_int32(kernels, tmp_path):
    """Offsets inside a tile exceed 2^31; the memory is a sparse file."""
    rows, stride = 5, 600_000_000
    memory = torch.from_file(str(tmp_path / "x"), shared=True, size=rows * stride, dtype=FP32)
    dense = [torch.randn(rows, 1, 1, 16) for _ in range(3)]
    strided = [
        memory[16 * i :].as_strided((rows, 1, 1, 16), (stride, 16, 16, 1)).copy_(x)
        for i, x in enumerate(dense)
    ]
    outputs = [kernels.attention_forward(*x, None, 0.3, Mask())[0] for x in (dense, strided)]
    assert torch.equal(*outputs)
    grads = [
        kernels.attention_backward(
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


@KERNELS
def test_attention_grid_supports_over_65535_heads(kernels, monkeypatch):
    """Only the first dimension of a grid may exceed 65,535."""
    heads = 70_000
    names = ("document_bounds", "attention_forward", "query_gradient", "key_gradient", "row_dots")
    recorders = {f"{name}_kernel": GridRecorder() for name in names}
    for name, kernel in recorders.items():
        monkeypatch.setattr(kernels, name, kernel)
    query, key = torch.zeros(2, heads, 1, 1), torch.zeros(2, heads, 1, 1)
    mask = Mask(document_ids=torch.zeros(2, heads, dtype=torch.int32))
    out, lse = kernels.attention_forward(query, key, key, None, 1.0, mask)
    kernels.attention_backward(out, query, key, key, out, lse, scale=1.0, mask=mask)
    for name, kernel in recorders.items():
        assert kernel.grids, name
        for grid in kernel.grids:
            assert math.prod(grid) >= heads // 32
            assert all(size <= 65_535 for size in grid[1:])


@KERNELS
def test_queries_without_keys_match_reference(device, kernels):
    shapes = [(70, 1, 2, 6)] * 2 + [(70, 1, 1, 6)] * 2
    query, grad, key, value = (x.float() for x in Backend("triton", device, FP32).random(*shapes))
    for start in (5, 100, 300):  # before some of the keys at 40 to 109, among them, after all
        mask = Mask(window=5, query_start=start, key_start=40)
        arguments = (query, key, value, None, 0.4, mask)
        actual = kernels.attention_forward(*arguments)
        for x, y in zip(actual, cpu.attention_forward(*arguments), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert_gradients_match(kernels, (grad, query, key, value, *actual), mask)


@KERNELS
def test_attention_backward_uses_lse_over_more_keys(device, kernels):
    shapes = [(5, 2, 4, 6)] * 2 + [(9, 2, 2, 6)] * 2
    query, grad, key, value = (x.float() for x in Backend("triton", device, FP32).random(*shapes))
    out, lse = attention(query, key, value, causal=False, implementation="reference")
    for keys in (slice(0, 4), slice(4, 9)):
        arguments = (grad, query, key[keys], value[keys], out, lse)
        assert_gradients_match(kernels, arguments, Mask(causal=False))


def assert_gradients_match(kernels, arguments, mask):
    """Compare the gradients of the kernels and of the CPU's code."""
    actual = kernels.attention_backward(*arguments, scale=0.4, mask=mask)
    expected = cpu.attention_backward(*arguments, scale=0.4, mask=mask)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@KERNELS
def test_bf16_attention_can_write_fp32_output(device, kernels):
    qkv = [x.bfloat16() for x in Backend("triton", device, FP32).random(*[(20, 2, 4, 6)] * 3)]
    out, _ = kernels.attention_forward(*qkv, None, 0.4, Mask(), dtype=FP32)
    expected, _ = attention(*(x.double() for x in qkv), scale=0.4, implementation="reference")
    assert out.dtype == FP32
    assert not torch.equal(out, out.bfloat16().float())
    assert relative_error(out, expected) < 2**-7  # the weights are multiplied in bf16


@KERNELS
def test_attention_of_fused_qkv_slices_matches_dense(device):
    (fused_qkv,) = Backend("triton", device, FP32).random((70, 2, 2, 3 * 24))
    qkv = fused_qkv.float().split(24, dim=-1)
    outputs = attention(*qkv, implementation="triton")
    dense = [x.double() for x in qkv]
    expected = attention(*dense, implementation="reference")
    for name, x, y in zip(("out", "lse"), outputs, expected, strict=True):
        assert_close_by_metric(name, x, y, bound=BOUND[FP32])


# --- sizes of models


SEQUENCE, BATCH, HEADS, GROUPS = sized((2048, 2, 16, 4), (72, 2, 4, 2))
FEATURES, WINDOW = sized((128, 300), (6, 11))
#: By name: (queries, keys, rows, heads, groups, features), attention options.
QKV = (SEQUENCE, SEQUENCE, BATCH, HEADS, GROUPS, FEATURES)
SHORT = sized(1000, 37)
MODELS = {
    "causal": (QKV, {}),
    "window": (QKV, {"window": WINDOW}),
    "documents": (QKV, {"documents": True}),
    "bidirectional": (QKV, {"causal": False}),
    "positions": (QKV, {"query_start": 3 * WINDOW, "key_start": WINDOW // 3, "window": WINDOW}),
    "ahead": (
        QKV,
        {"query_start": 0, "key_start": SEQUENCE // 4, "documents": True, "query_documents": True},
    ),
    "sinks": (QKV, {"sinks": True}),
    "sinks in a window": (QKV, {"sinks": True, "window": WINDOW}),
    # A grid has at most 65,535 programs in every dimension except the first.
    "more rows than the grid limit": ((3, 3, sized(70_000, 5), 1, 1, 16), {}),
    # Latent attention has head size 192, some models 256; 272 needs tiles of 512.
    **{
        f"head size {n}, window {window}": (
            (SHORT, SHORT, BATCH, HEADS, GROUPS, n),
            {"window": window},
        )
        for n in sized((64, 96, 192, 256, 272), (136,))
        for window in (None, WINDOW)
    },
    # Tiles of other documents are skipped in any order of documents.
    **{
        f"unsorted documents, {queries} of {keys}": (
            (queries, keys, BATCH, HEADS, GROUPS, FEATURES),
            {"unsorted": True},
        )
        for queries, keys in sized([(2049, 2049), (1000, 1777), (1, 700)], [(70, 70)])
    },
}


@KERNELS
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_attention_at_model_sizes_matches_reference(device, dtype, name):
    (queries, keys, rows, heads, groups, features), options = MODELS[name]
    options = dict(options)
    if options.pop("documents", False):
        position = torch.arange(keys, device=device)
        ids = [position // (keys // 3), (position + 9) // (keys // 7)]
        options["document_ids"] = torch.stack(ids, -1)
    if options.pop("query_documents", False):
        options["query_document_ids"] = options["document_ids"].flip(1)
    if options.pop("unsorted", False):
        ids = torch.randint(-2, 2, (keys, rows), generator=torch.Generator().manual_seed(keys))
        options["document_ids"] = ids.repeat_interleave(97, 0)[:keys].to(device)
    shapes = (queries, rows, heads), *[(keys, rows, groups)] * 2
    inputs = Backend("triton", device, dtype).random(*((*shape, features) for shape in shapes))
    if options.pop("sinks", False):
        inputs.append(torch.linspace(-1, 6, heads, device=device))

    def out(q, k, v, sinks=None, **implementation):
        return attention(q, k, v, sinks=sinks, **options, **implementation)[0]

    agree(out, inputs, dtype)


@KERNELS
def test_attention_is_one_forward_and_three_backward_kernels(device):
    heads, groups = sized((256, 1, 16, 128), (20, 1, 2, 6)), sized((256, 1, 4, 128), (20, 1, 1, 6))
    leaves = [random_tensor(device, *x).requires_grad_() for x in (heads, groups, groups)]
    grad_out = random_tensor(device, *heads)

    def gradients():
        out, _ = attention(*leaves, window=9, implementation="triton")
        return torch.autograd.grad(out, leaves, grad_out)

    backward = ("row_dots_kernel", "query_gradient_kernel", "key_gradient_kernel")
    assert_launches(gradients, dict.fromkeys(("attention_forward_kernel", *backward), 1))


@KERNELS
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_blockwise_attention_matches_reference(device, dtype, window):
    sharding = SequenceSharding.of(SEQUENCE, 2)
    documents = [
        [0, SEQUENCE // 3, 2 * SEQUENCE // 3, SEQUENCE],
        [0, SEQUENCE // 7 + 10, SEQUENCE],
    ]
    shapes = [(SEQUENCE, BATCH, n, FEATURES) for n in (HEADS, GROUPS, GROUPS, HEADS)]
    inputs = [random_tensor(device, *shape).to(dtype) for shape in shapes]
    row_indices = torch.tensor(sharding.row_indices(1), device=device)
    runs = []
    for kind in (dtype, torch.float64):  # the kernel, and the reference in fp64
        query, key, value, grad = (x.to(kind) for x in inputs)
        query, grad, state, plans = query[row_indices], grad[row_indices], None, []
        for key_rank in range(sharding.size):
            blocks = attention_blocks(
                sharding.runs(1),
                sharding.runs(key_rank),
                rows=BATCH,
                documents=documents,
                window=window,
            )
            key_rows = torch.tensor(sharding.row_indices(key_rank), device=device)
            plans.append((blocks, key[key_rows], value[key_rows]))
            state = blockwise.forward(
                query, *plans[-1][1:], blocks, scale=0.1, window=window, into=state
            )
        out, lse = blockwise.finish(*state, random_tensor(device, HEADS), dtype=kind)
        runs.append([out, lse])
        for blocks, *pair in plans:
            arguments = (grad, query, *pair, out, lse, blocks)
            runs[-1] += blockwise.backward(*arguments, scale=0.1, window=window)
    errors = [relative_error(actual, expected) for actual, expected in zip(*runs, strict=True)]
    assert max(errors) <= BOUND[dtype], errors


X = torch.ones(5, 2, 4, 6)
IDS = torch.zeros(5, 2, dtype=torch.int64)
BAD = {
    "heads": (lambda: attention(X, X[:, :, :3], X[:, :, :3]), "4 query heads must be a multiple"),
    "order": (lambda: attention(X, X[:3], X[:3]), "causal with 5 queries and only 3 keys"),
    "window": (lambda: attention(X, X, X, window=0), "window=0 must be at least 1"),
    "soft cap": (lambda: attention(X, X, X, softcap=0.0), "softcap=0.0"),
    "sinks": (lambda: attention(X, X, X, sinks=torch.ones(3)), r"sinks \(3,\)"),
    "documents": (lambda: attention(X, X, X, document_ids=torch.ones(5, 2)), "must be integers"),
    "documents of queries": (
        lambda: attention(X, X, X, document_ids=IDS, query_document_ids=IDS[:4]),
        r"query_document_ids \(4, 2\) torch.int64 must be integers of shape \[s_q, b\] = \(5, 2\)",
    ),
    "documents of keys": (
        lambda: attention(X, X, X, query_document_ids=IDS),
        "query_document_ids need document_ids",
    ),
    "queries elsewhere": (
        lambda: attention(X[:3], X, X, document_ids=IDS, query_start=5, key_start=2),
        "3 queries from position 5 on are not all among the 5 keys from position 2",
    ),
    "dtypes": (lambda: attention(X, X.bfloat16(), X), "one dtype"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_errors(name):
    assert_refused(*BAD[name])

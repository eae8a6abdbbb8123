# SPDX-License-Identifier: Apache-2.0
"""Paged attention and the writes of pages: against the equations, and in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.ops.attention.naive import attention as naive_attention
from megatron.core.ops.paged_attention import (
    JointPages,
    PagedBatch,
    naive,
    paged_attention,
    paged_latent_attention,
    write_and_attend,
    write_latents_to_pages,
    write_to_pages,
)
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.gpu_agreement import DTYPES, Backend, assert_refused, sized, use_launches
from tests.support.launch_kernels import assert_launches
from tests.support.nan_memory import nan_memory
from tests.support.paged_rows import PagedRows, moved, paged_rows

KERNELS = pytest.mark.gpu
FP64 = torch.float64
HEADS, FEATURES = sized((16, 2), (4, 2)), sized(128, 8)
#: New tokens and contexts of each row: decode batches and mixed batches. A context of 0 is padding.
DECODE = sized(
    ((1, 1, 1, 0, 1, 1, 1), (4096, 1, 1000, 77, 0, 513, 2047)), ((1, 1, 0, 1, 1), (50, 1, 7, 0, 33))
)
MIXED = sized(
    ((1, 700, 512, 5, 1, 0, 1), (3001, 700, 1900, 64, 0, 9, 256)),
    ((1, 18, 5, 1, 0), (20, 18, 37, 0, 9)),
)
#: Split into more pieces than one merge takes; each piece has keys.
LONG_DECODE = sized(((1, 1), (9001, 8192)), ((1, 0, 1), (150, 9, 70)))
#: Three splits with keys; the first of 16 queries, at position 126, must not see the last key of
#: its tile.
LONG_MIXED = ((1, 16, 2, 0), (37, 142, 66, 9))
#: Decode, draft tokens, a whole prompt, a chunk of a prompt, draft tokens, padding, a waiting row.
ALL_KINDS = ((1, 4, 37, 20, 3, 1, 0), (50, 23, 37, 61, 16, 0, 9))
#: By name: (new tokens, contexts), options; `splits` are forced in the interpreter only.
CASES = {
    "decode": (DECODE, {}),
    "split decode": (DECODE, {"heads": (6, 2), "features": 24, "padding": 3, "splits": 3}),
    "more splits than are merged at once": (
        LONG_DECODE,
        {"heads": sized(HEADS, (6, 2)), "features": sized(128, 24), "splits": 5},
    ),
    "decode with sinks": (
        DECODE,
        {"heads": (3, 1), "features": 16, "block_size": 64, "sinks": True, "splits": 2},
    ),
    "decode in a window": (
        DECODE,
        {"heads": (2, 2), "padding": 1, "window": sized(900, 9), "sinks": True, "splits": 2},
    ),
    "decode of many heads a group": (DECODE, {"heads": sized((71, 1), (40, 1)), "sinks": True}),
    "decode of wide heads": (DECODE, {"features": sized(256, 24)}),
    "mixed": (MIXED, {"heads": (6, 2), "features": sized(80, 24), "padding": 5}),
    "decode with a soft cap": (DECODE, {"heads": (4, 2), "softcap": 0.8, "sinks": True}),
    "mixed with a soft cap": (MIXED, {"heads": (4, 2), "softcap": 0.8, "window": 9, "splits": 2}),
    "mixed with sinks": (MIXED, {"heads": (4, 4), "block_size": 32, "sinks": True}),
    "split mixed": (
        LONG_MIXED,
        {"heads": (3, 1), "features": 16, "padding": 4, "sinks": True, "splits": 3},
    ),
    "mixed in a window": (MIXED, {"heads": (6, 2), "window": sized(300, 9)}),
    "split mixed in a window": (
        LONG_MIXED,
        {"block_size": 64, "padding": 2, "window": 20, "sinks": True, "splits": 2},
    ),
    "mixed of wide heads": (
        MIXED,
        {"features": sized(256, 24), "block_size": sized(256, 32), "heads": (2, 2)},
    ),
    "all kinds of rows": (ALL_KINDS, {"heads": (6, 2), "padding": 4}),
    "all kinds of rows in a window": (ALL_KINDS, {"heads": (6, 2), "window": 9, "sinks": True}),
    "more rows than one search step": (((0,) * 130 + (1, 1), (3,) * 132), {"heads": (2, 1)}),
}


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@pytest.fixture
def tiles_of_few_rows(monkeypatch):
    """Use tiles so small that rows need several, and pages hold half a tile or two."""
    for name, block in (("DECODE", 32), ("PREFILL", 16)):
        use_launches(monkeypatch, "paged_attention", (name,), ROWS=16, BLOCK=block, num_stages=1)
    use_launches(monkeypatch, "paged_attention", ("MERGE",), BLOCK=2)
    # fp32 uses a quarter of the tile.
    use_launches(monkeypatch, "paged_attention", ("LATENT",), ROWS=64, BLOCK=128, num_stages=1)


def force_splits(monkeypatch, backend, count):
    """Divide contexts into `count` pieces, in the interpreter."""
    if backend.implementation == "triton" and backend.device.type == "cpu":
        from megatron.core.ops.paged_attention import triton

        monkeypatch.setattr(triton, "num_splits", lambda *_: count)
        monkeypatch.setattr(triton, "MIN_SPLIT_TOKENS", 1 if count < 3 else 32)


def assert_matches_equation(backend, rows, sinks=None, **options):
    """Compare out and lse with the equation in fp64; on a GPU with the CPU's code in fp64."""
    rows = moved(rows, torch.device("cpu"), backend.dtype)
    sinks = None if sinks is None else sinks.to(backend.dtype)

    def attend(function, dtype, **arguments):
        moved_rows = moved(rows, backend.device, dtype)
        arguments |= {} if sinks is None else {"sinks": sinks.to(backend.device, dtype)}
        inputs = moved_rows.query, *moved_rows.caches
        return function(*inputs, batch=moved_rows.batch, **options, **arguments)

    out, lse = attend(paged_attention, backend.dtype, implementation=backend.implementation)
    if backend.device.type == "cuda":
        expected = attend(paged_attention, FP64, implementation="reference")
    else:
        expected = attend(naive.paged_attention, FP64)
    bound = backend.bounds.get(backend.dtype, 2**-9)
    assert_close_by_metric("out", out, expected[0], bound=bound)
    empty = expected[1].isneginf()
    assert torch.equal(lse.isneginf(), empty)
    # A CPU multiplies in bf16, a kernel sums the products in fp32.
    exact = backend.implementation == "reference" or backend.dtype == torch.float32
    bound = backend.bounds[backend.dtype if exact else torch.float32]
    assert_close_by_metric("lse", lse[~empty], expected[1][~empty], bound=bound)


def check_case(backend, case, monkeypatch):
    """Compare a case with its equation."""
    lengths, changes = CASES[case]
    options = {"heads": HEADS, "features": FEATURES, "block_size": sized(64, 16)} | changes
    force_splits(monkeypatch, backend, options.pop("splits", 1))
    sinks, window = options.pop("sinks", False), options.get("window")
    softcap = options.pop("softcap", None)
    logits = torch.linspace(-1, 3, options["heads"][0], dtype=FP64) if sinks else None
    rows = paged_rows(*lengths, **options)
    assert_matches_equation(backend, rows, logits, scale=0.3, softcap=softcap, window=window)


@pytest.mark.parametrize("case", CASES)
def test_paged_attention_matches_the_equation(backend, case, tiles_of_few_rows, monkeypatch):
    check_case(backend, case, monkeypatch)


@KERNELS
@pytest.mark.machine
@pytest.mark.parametrize("case", CASES)
def test_fp16_attention_matches_the_equation(device, case, monkeypatch):
    check_case(Backend("triton", device, torch.float16), case, monkeypatch)


# rows, heads, latent features, value features, block size, padding rows, splits
LATENT_CASES = {
    "decode": (DECODE, 3, 24, 16, 16, 0, 1),
    "split decode": (LONG_DECODE, 20, 21, 17, 16, 3, 5),
    "decode with more heads than tile rows": (DECODE, 40, 24, 16, 32, 0, 1),
    "mixed": (MIXED, 4, 30, 24, 64, 2, 1),
    "split mixed": (LONG_MIXED, 2, 16, 16, 16, 4, 3),
}


@pytest.mark.parametrize("case", LATENT_CASES)
def test_latent_attention_matches_the_equation(backend, case, tiles_of_few_rows, monkeypatch):
    lengths, heads, features, values, block_size, padding, count = LATENT_CASES[case]
    force_splits(monkeypatch, backend, count)
    options = {"heads": (heads, 1), "features": features, "block_size": block_size}
    rows = paged_rows(*lengths, padding=padding, **options)
    rows = moved(rows, backend.device, backend.dtype)
    latents = rows.caches[0]  # [blocks, size, 1, c]
    options = {"batch": rows.batch, "scale": 0.3}
    actual = paged_latent_attention(
        rows.query,
        latents[:, :, 0],
        value_features=values,
        implementation=backend.implementation,
        **options,
    )
    query, latents = rows.query.double(), latents.double()
    if backend.device.type == "cuda":
        options |= {"value_features": values, "implementation": "reference"}
        expected = paged_latent_attention(query, latents[:, :, 0], **options)
    else:
        expected, _ = naive.paged_attention(query, latents, latents[..., :values], **options)
    assert expected.shape == (rows.query.shape[0], heads, values)
    assert_close_by_metric("out", actual, expected, bound=backend.bounds[backend.dtype])


@pytest.mark.parametrize("max_query", [1, 64])
def test_larger_batch_bounds_do_not_change_the_output(backend, max_query):
    """A CUDA graph keeps the bounds of its capture, and so its number of tiles and splits."""
    bounds = (max_query, sized(8192, 600))
    rows = paged_rows(*DECODE, heads=(4, 2), features=8, bounds=bounds, padding=3)
    assert_matches_equation(backend, rows, scale=0.3)


def test_strided_queries_and_caches_match_the_equation(backend, tiles_of_few_rows):
    rows = paged_rows(*MIXED, heads=(4, 2), features=8)
    fused = torch.full((rows.query.shape[0], 4, 24), torch.nan, dtype=FP64)
    fused[..., 8:16] = rows.query
    keys = torch.stack(rows.caches, 2)[:, :, 0]  # next to the values, as in some engines
    values = rows.caches[1].transpose(1, 2).contiguous().transpose(1, 2)  # heads before positions
    table = torch.cat([torch.full_like(rows.batch.block_table, -1), rows.batch.block_table], 1)
    batch = replace(rows.batch, block_table=table[:, rows.batch.block_table.shape[1] :])
    rows = replace(rows, query=fused[..., 8:16], caches=(keys, values), batch=batch)
    assert_matches_equation(backend, rows, scale=0.3)


def test_empty_batch_matches_the_equation(backend):
    rows = paged_rows((0, 0), (3, 0), heads=(2, 1), features=8, bounds=(1, 16))
    assert_matches_equation(backend, rows, scale=0.3)


@KERNELS
@pytest.mark.parametrize("queries", [2, 3, 16])
def test_max_tiles_covers_any_rows(queries):
    """As in the kernel, the tiles of row i start at bounds[i] // queries + i."""
    from megatron.core.ops.paged_attention import triton

    source = torch.Generator().manual_seed(queries)
    for _ in range(50):
        new = torch.randint(0, 3 * queries, (7,), generator=source)
        bounds = [0, *new.cumsum(0).tolist()]
        starts = [bound // queries + i for i, bound in enumerate(bounds)]
        tokens = bounds[-1] + int(torch.randint(0, 40, (1,), generator=source))  # with padding
        starts.append(triton.max_tiles(tokens, 7, queries))
        lengths = [*new.tolist(), tokens - bounds[-1]]
        for length, start, following in zip(lengths, starts[:-1], starts[1:], strict=True):
            assert start + -(-length // queries) <= following


@pytest.mark.parametrize("page", [16, 64])
def test_writes_change_only_slots_of_the_mapping(backend, page, monkeypatch):
    """Keys and values are slices that are not dense; the values' cache has heads before positions.
    Latents are written like the keys of one head."""
    use_launches(monkeypatch, "paged_attention", ("WRITE",), BLOCK=16)
    (fused,) = backend.random((5, 3, 24))
    fused = fused.to(backend.dtype)
    key, value = fused[..., :8], fused[..., 8:16]
    slots = [2 * page + 5, -1, 0, 3 * page - 1, -1]
    options = {
        "slot_mapping": torch.tensor(slots, device=fused.device),
        "implementation": backend.implementation,
    }
    keys, latents = fused.new_zeros(4, page, 3, 8), fused.new_zeros(4, page, 8)
    values = fused.new_zeros(4, 3, page, 8).transpose(1, 2)
    write_to_pages(key, value, key_cache=keys, value_cache=values, **options)
    write_latents_to_pages(key[:, 0], latent_cache=latents, **options)
    for cache, x in ((keys, key), (values, value), (latents, key[:, 0])):
        expected = torch.zeros_like(cache)
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // page, slot % page] = x[token]
        assert torch.equal(cache, expected)


#: A context long enough to be split.
LONG_ROW = sized(DECODE, ((1, 0, 1, 1), (530, 5, 0, 20)))


@KERNELS
def test_paged_attention_launches_expected_kernels(device):
    """A decode step with split contexts is two kernels, a prefill of many rows one."""
    for new, contexts, expected in (
        (*LONG_ROW, {"paged_attention_kernel": 1, "merge_pieces_kernel": 1}),
        ((3,) * 3, (200, 30, 3), {"paged_attention_kernel": 1}),
    ):
        rows = paged_rows(new, contexts, heads=HEADS, features=FEATURES)
        rows = moved(rows, device, DTYPES[-1])
        assert_launches(
            lambda rows=rows: paged_attention(
                rows.query, *rows.caches, batch=rows.batch, implementation="triton"
            ),
            expected,
        )


@KERNELS
def test_write_to_pages_is_one_kernel(device):
    tokens, dtype = sized(100, 5), DTYPES[-1]
    caches = torch.zeros(2, tokens, 16, HEADS[1], FEATURES, device=device, dtype=dtype)
    key, value = torch.randn(tokens, HEADS[1], 2 * FEATURES, device=device).to(dtype).chunk(2, -1)
    slots = torch.arange(tokens, device=device) * 7
    assert_launches(
        lambda: write_to_pages(
            key,
            value,
            key_cache=caches[0],
            value_cache=caches[1],
            slot_mapping=slots,
            implementation="triton",
        ),
        {"write_to_pages_kernel": 1},
    )


@KERNELS
@pytest.mark.machine
def test_graph_serves_every_batch_within_its_bounds(device):
    """Capture once with the bounds of a bucket, replay with other lengths and block tables."""
    rows = 8
    bounds = {"heads": HEADS, "features": FEATURES, "bounds": (1, 4096), "block_size": 64}
    batches = [
        paged_rows((1,) * rows, (4096, 4000, 1, 17, 640, 64, 65, 3), **bounds),
        paged_rows((1,) * rows, (5, 1, 2048, 333, 3500, 0, 0, 0), **bounds),
    ]
    batches = [moved(rows_of_batch, device, torch.bfloat16) for rows_of_batch in batches]
    static = moved(batches[0], device, torch.bfloat16)
    tensors = [
        (x.query, *x.caches, x.batch.block_table, x.batch.query_bounds, x.batch.context_lengths)
        for x in (static, *batches)
    ]
    # `moved` does not copy tensors on the device: the graph needs separate buffers.
    buffers = tuple(x.clone() for x in tensors[0])
    static = _with_tensors(static, buffers)

    def step():
        return paged_attention(static.query, *static.caches, batch=static.batch)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for rows_of_batch, values in zip(batches, tensors[1:], strict=True):
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        direct = paged_attention(
            rows_of_batch.query, *rows_of_batch.caches, batch=rows_of_batch.batch
        )
        assert torch.equal(out, direct[0])
        assert torch.equal(lse, direct[1])


def _with_tensors(rows: PagedRows, tensors: tuple[torch.Tensor, ...]) -> PagedRows:
    """Return rows with `tensors` as query, caches, table, bounds and lengths."""
    query, keys, values, table, bounds, lengths = tensors
    batch = replace(rows.batch, block_table=table, query_bounds=bounds, context_lengths=lengths)
    return replace(rows, query=query, caches=(keys, values), batch=batch)


@pytest.mark.parametrize("window", [None, 5])
def test_zero_queries_give_the_mean_of_visible_values(window):
    rows = paged_rows([4, 1], [21, 18], heads=(2, 1), features=8, window=window)
    for with_sinks in (False, True):
        sinks = torch.zeros(2, dtype=FP64) if with_sinks else None
        out, lse = paged_attention(
            torch.zeros_like(rows.query),
            *rows.caches,
            batch=rows.batch,
            window=window,
            sinks=sinks,
        )
        for token, (row, end) in enumerate([(0, 18), (0, 19), (0, 20), (0, 21), (1, 18)]):
            begin = max(end - window, 0) if window else 0
            count = end - begin + with_sinks
            mean = rows.values[row][begin:end].sum(0) / count
            assert torch.allclose(out[token], mean.expand(2, 8), rtol=1e-12, atol=1e-14)
            assert torch.allclose(lse[token].exp(), torch.full((2,), count, dtype=FP64))


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7, 16, 1, 13, 3]])
def test_chunked_prefill_matches_whole_prompt(chunks):
    q, k, v = (torch.randn(40, 1, n, 8, dtype=FP64) for n in (6, 2, 2))
    expected, expected_lse = naive_attention(q, k, v, causal=True, scale=8**-0.5)
    key_cache, value_cache = (torch.full((9, 16, 2, 8), torch.nan, dtype=FP64) for _ in range(2))
    table = torch.tensor([[7, 2, 5]]).int()
    num_computed = 0
    for chunk in chunks:
        positions = torch.arange(num_computed, num_computed + chunk)
        num_computed += chunk
        slots = table[0, positions // 16].long() * 16 + positions % 16
        write_to_pages(
            k[positions, 0],
            v[positions, 0],
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=slots,
        )
        batch = PagedBatch(
            block_table=table,
            query_bounds=torch.tensor([0, chunk]).int(),
            context_lengths=torch.tensor([num_computed]).int(),
            max_query=64,
            max_context=48,
        )
        out, lse = paged_attention(q[positions, 0], key_cache, value_cache, batch=batch)
        assert relative_error(out, expected[positions, 0]) < 1e-12
        assert relative_error(lse, expected_lse[0].t()[positions]) < 1e-12


@pytest.mark.parametrize("table", [(2, 3, 4), (2, 0, 4)])
def test_decode_follows_the_block_table_in_any_order(table):
    # In the second table the first and last pages lie as in three consecutive pages.
    source, contexts = torch.Generator().manual_seed(3), torch.tensor([40], dtype=torch.int32)
    pages = torch.randn(6, 16, 4, 5, generator=source, dtype=torch.float64)
    query, new_latents = (
        torch.randn(1, 4, 5, generator=source, dtype=torch.float64) for _ in range(2)
    )
    actual = write_and_attend(
        query,
        new_latents,
        JointPages(pages),
        batch=PagedBatch(
            block_table=torch.tensor([table], dtype=torch.int32),
            query_bounds=torch.tensor([0, 1], dtype=torch.int32),
            context_lengths=contexts,
            max_query=1,
            max_context=40,
        ),
        slot_mapping=torch.tensor([table[2] * 16 + 7]),
        scale=0.4,
    )
    keys, values = pages[list(table)].flatten(0, 1)[:40].chunk(2, 1)  # [40, g, d] each
    weights = torch.einsum("ngd,kgd->gnk", query.view(2, 2, 5).transpose(0, 1), keys) * 0.4
    expected = torch.einsum("gnk,kgd->gnd", weights.softmax(-1), values)  # [g, n/g, d]
    torch.testing.assert_close(actual.view(2, 2, 5), expected, rtol=0, atol=1e-12)


def valid_arguments(**changes):
    """Return the arguments of a valid call with some changed."""
    rows = paged_rows([3, 1], [20, 5], heads=(4, 2), features=8)
    arguments = {
        "query": rows.query,
        "key_cache": rows.caches[0],
        "value_cache": rows.caches[1],
        "batch": rows.batch,
    }
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return arguments


BAD_CALLS = {
    "no heads": ({"query": lambda x: x[0]}, "must be .t, heads, d. and twice"),
    "another cache": ({"value_cache": lambda x: x[:1]}, "must be .t, heads, d. and twice"),
    "features": ({"query": lambda x: x[..., :4]}, "agree in the features of a head, at most 256"),
    "ratio": ({"query": lambda x: x[:, :3]}, "3 query heads must be a multiple of the cache's 2"),
    "dtype": ({"query": lambda x: x.float()}, "must have one dtype"),
    "strides": (
        {"key_cache": lambda x: x.mT.contiguous().mT},
        "contiguous in the caches, whose strides are .* make the last one 1",
    ),
    "gradient": ({"query": lambda x: x.clone().requires_grad_()}, "has no backward"),
    "window": ({"window": 0}, "window=0 must be at least 1, or None"),
    "sinks": ({"sinks": torch.zeros(3)}, "one logit for each of the 4 heads"),
    "table": (
        {"batch": lambda x: replace(x, max_context=33)},
        "max_context=33 is over the 32 slots",
    ),
    "too many new": ({"batch": lambda x: replace(x, max_query=2)}, "row 0 has 3 new .* raise"),
    "too long": ({"batch": lambda x: replace(x, max_context=19)}, "context of 20, over"),
    "too short": (
        {"batch": lambda x: replace(x, context_lengths=torch.tensor([2, 5]).int())},
        "3 new tokens but a context of only 2: context_lengths include the new",
    ),
    "bounds": (
        {"batch": lambda x: replace(x, query_bounds=torch.tensor([0, 3, 9]).int())},
        "never fall and end within the 4 tokens",
    ),
    "triton": ({"implementation": "triton"}, "has no float64"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_invalid_calls_name_the_problem(case):
    changes, message = BAD_CALLS[case]
    assert_refused(lambda: paged_attention(**valid_arguments(**changes)), message)


@pytest.mark.parametrize("size", [8, 24])
def test_block_size_must_be_a_power_of_two_from_16(size):
    caches = [torch.zeros(3, size, 2, 8, dtype=FP64) for _ in range(2)]
    arguments = valid_arguments(key_cache=caches[0], value_cache=caches[1])
    message = f"block_size {size} .* power of two from 16 on"
    assert_refused(lambda: paged_attention(**arguments), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.zeros(3, 2).int()}, r"block_table \(3, 2\) .* \[b, blocks\], b = 2"),
        ({"block_table": torch.zeros(2, 2)}, "float32 on cpu must be int32"),
        ({"query_bounds": torch.zeros(2).int()}, r"query_bounds \(2,\) .* \[b \+ 1\], b = 2"),
        ({"context_lengths": torch.zeros(1, 2).int()}, r"context_lengths \(1, 2\) .* \[b\]"),
        ({"max_query": 0}, "max_query=0 and max_context=20 must be at least 1"),
    ],
)
def test_inconsistent_batches_name_the_problem(changes, message):
    assert_refused(lambda: replace(valid_arguments()["batch"], **changes), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": torch.zeros(4, 2, 8)}, "must be .t, g, d. with the heads and features"),
        ({"value": torch.zeros(5, 2, 8, dtype=FP64)}, "must have one dtype"),
        ({"slot_mapping": torch.zeros(5).int()}, "must be int64 .t. = .5."),
    ],
)
def test_inconsistent_writes_name_the_problem(changes, message):
    key_cache, value_cache = torch.zeros(2, 3, 16, 2, 8)
    arguments = {
        "key": torch.zeros(5, 2, 8),
        "value": torch.zeros(5, 2, 8),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.zeros(5, dtype=torch.int64),
    } | changes
    assert_refused(lambda: write_to_pages(**arguments), message)


@pytest.mark.parametrize("programs", [1, 2, 3, 8, 40, 100, 131, 200, 263])
def test_few_rows_split_contexts_to_fill_the_device(programs):
    triton = pytest.importorskip("megatron.core.ops.paged_attention.triton")
    resident, context = 264, 1 << 15
    count = triton.num_splits(programs, context, resident)
    assert 2 <= count <= triton.MAX_SPLITS
    waves = -(-programs * count // resident)
    assert programs * count >= 0.7 * min(waves * resident, programs * triton.MAX_SPLITS)
    assert count * triton.MIN_SPLIT_TOKENS <= context


def test_context_is_split_only_if_long_or_rows_are_few():
    triton = pytest.importorskip("megatron.core.ops.paged_attention.triton")
    assert triton.num_splits(8, 2 * triton.MIN_SPLIT_TOKENS - 1, 264) == 1
    assert triton.num_splits(8, 2 * triton.MIN_SPLIT_TOKENS, 264) == 2
    assert triton.num_splits(264, triton.MAX_SPLIT_TOKENS, 264) == 1
    assert triton.num_splits(1000, triton.MAX_SPLIT_TOKENS + 1, 264) == 2
    assert triton.num_splits(1000, 5 * triton.MAX_SPLIT_TOKENS, 264) == 5
    assert triton.num_splits(0, 1 << 17, 264) == 1

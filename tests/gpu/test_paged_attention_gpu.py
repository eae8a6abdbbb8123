# SPDX-License-Identifier: Apache-2.0
"""Paged attention on the GPU against the reference in fp64, and in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.ops.paged_attention import paged_attention, write_to_pages
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, DTYPES, REHEARSES, sized
from tests.support.launch_kernels import assert_launches
from tests.support.nan_memory import nan_memory
from tests.support.paged_rows import PagedRows, moved, paged_rows

pytestmark = pytest.mark.gpu

HEADS, FEATURES = sized((16, 2), (4, 2)), sized(128, 16)
ROUNDED = {"half": torch.float16} if not REHEARSES else {}
#: New tokens and contexts: decode batches and mixed batches. Zero contexts are padding.
DECODE = sized(
    ((1, 1, 1, 0, 1, 1, 1), (4096, 1, 1000, 77, 0, 513, 2047)),
    ((1, 0, 1, 1), (530, 5, 0, 20)),
)
MIXED = sized(
    ((1, 700, 512, 5, 1, 0, 1), (3001, 700, 1900, 64, 0, 9, 256)),
    ((1, 19, 7, 1), (30, 19, 20, 0)),
)
#: Split into more pieces than one merge takes; each piece has keys.
LONG_DECODE = sized(((1, 1), (9001, 8192)), ((1,), (8192,)))
CASES = {
    "decode": (DECODE, {}),
    "decode of long contexts": (LONG_DECODE, {}),
    "decode with sinks": (DECODE, {"sinks": True}),
    "decode in a window": (DECODE, {"window": sized(900, 9)}),
    "decode of small pages": (DECODE, {"block_size": 16, "padding": 3}),
    "decode of one head a group": (DECODE, {"heads": sized((8, 8), (2, 2))}),
    "decode of many heads a group": (DECODE, {"heads": sized((71, 1), (18, 1))}),
    "decode of wide heads": (DECODE, {"features": sized(256, 24)}),
    "mixed": (MIXED, {"padding": 11}),
    "mixed with sinks": (MIXED, {"sinks": True, "features": sized(80, 8)}),
    "mixed in a window": (MIXED, {"window": sized(300, 9), "block_size": 16, "sinks": True}),
    "mixed of six heads a group": (MIXED, {"heads": sized((12, 2), (6, 2))}),
    "mixed of wide heads": (MIXED, {"features": sized(256, 24), "block_size": sized(256, 32)}),
}


def attend(rows: PagedRows, device, dtype, implementation, sinks, window):
    """Attend in `dtype` to rounded rows."""
    rows = moved(rows, device, dtype)
    sinks = sinks if sinks is None else sinks.to(device, dtype)
    return paged_attention(
        rows.query,
        *rows.caches,
        batch=rows.batch,
        window=window,
        sinks=sinks,
        implementation=implementation,
    )


@pytest.mark.parametrize("dtype", [*DTYPES, *ROUNDED.values()], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_paged_attention_matches_fp64(device, dtype, case):
    (new, contexts), changes = CASES[case]
    options = {"heads": HEADS, "features": FEATURES, "block_size": sized(64, 16)} | changes
    sinks, window = options.pop("sinks", False), options.get("window")
    rows = moved(paged_rows(new, contexts, **options), torch.device("cpu"), dtype)
    logits = torch.linspace(-1, 3, options["heads"][0]).to(dtype) if sinks else None
    with nan_memory():
        out, lse = attend(rows, device, dtype, "triton", logits, window)
    expected = attend(rows, device, torch.float64, "reference", logits, window)
    bound = BOUND.get(dtype, 2**-9)
    assert_close_by_metric("out", out, expected[0], bound=bound)
    empty = expected[1].isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert_close_by_metric("lse", lse[~empty], expected[1][~empty], bound=BOUND[torch.float32])


def test_paged_attention_launches_expected_kernels(device):
    """A decode step with split contexts is two kernels, a prefill of many rows one."""
    for new, contexts, expected in (
        (*DECODE, {"paged_attention_kernel": 1, "merge_pieces_kernel": 1}),
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_to_pages_matches_reference(device, dtype):
    tokens, groups, blocks = sized(777, 5), HEADS[1], sized(70, 4)
    fused = torch.randn(tokens, groups, 3 * FEATURES, device=device).to(dtype)
    slots = torch.randperm(blocks * 16, device=device)[:tokens]
    slots[1::3] = -1
    caches_of = []
    for implementation in ("triton", "reference"):
        caches = torch.zeros(2, blocks, 16, groups, FEATURES, device=device, dtype=dtype)
        write_to_pages(
            fused[..., :FEATURES],
            fused[..., FEATURES : 2 * FEATURES],
            key_cache=caches[0],
            value_cache=caches[1],
            slot_mapping=slots,
            implementation=implementation,
        )
        caches_of.append(caches)
    assert torch.equal(*caches_of)
    assert caches_of[0].any()


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

# SPDX-License-Identifier: Apache-2.0
"""Paged attention in Triton's interpreter, against the reference in fp64, on NaN-filled memory.

Run by `test_triton.py` in a process of its own: TRITON_INTERPRET must be set before the first
import of Triton.
"""

from dataclasses import replace

import pytest
import torch

from megatron.core.ops.launches import Launches
from megatron.core.ops.paged_attention import (
    paged_attention,
    paged_latent_attention,
    triton,
    write_latents_to_pages,
    write_to_pages,
)
from tests.support.closeness import assert_close_by_metric
from tests.support.nan_memory import nan_memory
from tests.support.paged_rows import paged_rows

DECODE = {"new": (1, 1, 0, 1, 1), "contexts": (50, 1, 7, 0, 33)}
MIXED = {"new": (1, 18, 5, 1, 0), "contexts": (20, 18, 37, 0, 9)}
#: As many tiles of keys as pieces: five of 32 keys, which are merged two at a time.
LONG_DECODE = {"new": (1, 0, 1), "contexts": (150, 9, 70)}
#: Three pieces with keys; and the first of 16 queries, at place 126, may not see the last key of
#: the tile that it is in.
LONG_MIXED = {"new": (1, 16, 2, 0), "contexts": (37, 142, 66, 9)}
# rows, heads, features, block size, padding behind the rows, window, sinks, pieces
CASES = {
    "decode": (DECODE, (4, 2), 8, 16, 0, None, False, 1),
    "decode in pieces": (DECODE, (6, 2), 24, 16, 3, None, False, 3),
    "decode in more pieces than are merged at once": (
        LONG_DECODE,
        (6, 2),
        24,
        16,
        0,
        None,
        False,
        5,
    ),
    "decode in pieces with sinks": (DECODE, (3, 1), 16, 64, 0, None, True, 2),
    "decode in a window in pieces": (DECODE, (2, 2), 8, 16, 1, 9, True, 2),
    "more heads than a tile has": (DECODE, (40, 1), 8, 16, 0, None, True, 1),
    "mixed": (MIXED, (6, 2), 24, 16, 5, None, False, 1),
    "mixed with sinks": (MIXED, (4, 4), 8, 32, 0, None, True, 1),
    "mixed in pieces": (LONG_MIXED, (3, 1), 16, 16, 4, None, True, 3),
    "mixed in a window": (MIXED, (6, 2), 8, 16, 0, 9, False, 1),
    "mixed in a window in pieces": (MIXED, (4, 2), 8, 64, 2, 20, True, 2),
    "more rows than are looked at at once": (
        {"new": (0,) * 130 + (1, 1), "contexts": (3,) * 132},
        (2, 1),
        8,
        16,
        0,
        None,
        False,
        1,
    ),
}


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Let rows need several tiles, and pages hold a half or two of them."""
    for name, block in (("DECODE", 32), ("PREFILL", 16)):
        small = {"ROWS": 16, "BLOCK": block, "num_warps": 4, "num_stages": 1}
        monkeypatch.setattr(triton, name, Launches(name, small))
    small = {"BLOCK": 2, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton, "MERGE", Launches("MERGE", small))


def agree(rows, **options):
    """Compare out and lse of the kernel in fp32 with the reference in fp64."""
    sinks = options.pop("sinks", None)
    expected = paged_attention(rows.query, *rows.caches, batch=rows.batch, sinks=sinks, **options)
    found = paged_attention(
        rows.query.float(),
        *(x.float() for x in rows.caches),
        batch=rows.batch,
        sinks=None if sinks is None else sinks.float(),
        implementation="triton",
        **options,
    )
    assert_close_by_metric("out", found[0], expected[0])
    empty = expected[1].isneginf()
    assert torch.equal(found[1].isneginf(), empty)
    assert_close_by_metric("lse", found[1][~empty], expected[1][~empty])


@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_reference(case, small_tiles, monkeypatch):
    lengths, heads, features, block_size, padding, window, with_sinks, count = CASES[case]
    monkeypatch.setattr(triton, "num_splits", lambda *_: count)
    monkeypatch.setattr(triton, "MIN_SPLIT_TOKENS", 1 if count < 3 else 32)
    rows = paged_rows(
        **lengths,
        heads=heads,
        features=features,
        block_size=block_size,
        padding=padding,
        window=window,
    )
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64) if with_sinks else None
    agree(rows, scale=0.3, window=window, sinks=sinks)


# rows, heads, features of latents, of those the values, block size, padding, pieces
LATENT_CASES = {
    "decode": (DECODE, 3, 24, 16, 16, 0, 1),
    "decode in pieces": (LONG_DECODE, 20, 21, 17, 16, 3, 5),
    "decode of more heads than a tile has": (DECODE, 40, 24, 16, 32, 0, 1),
    "mixed": (MIXED, 4, 30, 24, 64, 2, 1),
    "mixed in pieces": (LONG_MIXED, 2, 16, 16, 16, 4, 3),
}


@pytest.mark.parametrize("case", LATENT_CASES)
def test_latents_agree_with_the_reference(case, monkeypatch):
    lengths, heads, features, values, block_size, padding, count = LATENT_CASES[case]
    # Products of fp32 take a quarter.
    small = {"ROWS": 64, "BLOCK": 128, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton, "LATENT", Launches("LATENT", small))
    monkeypatch.setattr(triton, "num_splits", lambda *_: count)
    monkeypatch.setattr(triton, "MIN_SPLIT_TOKENS", 1 if count < 3 else 32)
    rows = paged_rows(
        **lengths, heads=(heads, 1), features=features, block_size=block_size, padding=padding
    )
    latents = rows.caches[0][:, :, 0]
    options = {"batch": rows.batch, "scale": 0.3, "value_features": values}
    expected = paged_latent_attention(rows.query, latents, **options)
    assert expected.shape == (rows.query.shape[0], heads, values)
    found = paged_latent_attention(
        rows.query.float(), latents.float(), implementation="triton", **options
    )
    assert_close_by_metric("out", found, expected)


def test_latents_are_written_as_by_the_reference():
    latents = torch.randn(5, 21, generator=torch.Generator().manual_seed(3))
    slots = torch.tensor([18, -1, 0, 35, 16])
    caches = {}
    for implementation in ("reference", "triton"):
        caches[implementation] = torch.zeros(3, 16, 21)
        write_latents_to_pages(
            latents,
            latent_cache=caches[implementation],
            slot_mapping=slots,
            implementation=implementation,
        )
    assert torch.equal(caches["triton"], caches["reference"])
    assert torch.equal(caches["triton"].flatten(0, 1)[35], latents[3])


@pytest.mark.parametrize("max_query", [1, 64])
def test_bounds_of_a_larger_batch_change_nothing(max_query):
    """A CUDA graph keeps the bounds it was captured with, and the tiles and pieces they gave."""
    rows = paged_rows(**DECODE, heads=(4, 2), features=8, bounds=(max_query, 600), padding=3)
    agree(rows)


def test_views_that_are_not_dense_are_read_where_they_lie(small_tiles):
    rows = paged_rows(**MIXED, heads=(4, 2), features=8)
    fused = torch.full((rows.query.shape[0], 4, 24), torch.nan, dtype=torch.float64)
    fused[..., 8:16] = rows.query
    keys = torch.stack(rows.caches, 2)[:, :, 0]  # beside the values, as some engines keep them
    values = rows.caches[1].transpose(1, 2).contiguous().transpose(1, 2)  # heads before places
    table = torch.cat([torch.full_like(rows.batch.block_table, -1), rows.batch.block_table], 1)
    batch = replace(rows.batch, block_table=table[:, rows.batch.block_table.shape[1] :])
    agree(replace(rows, query=fused[..., 8:16], caches=(keys, values), batch=batch))


def test_no_tokens():
    rows = paged_rows((0, 0), (3, 0), heads=(2, 1), features=8, bounds=(1, 16))
    agree(rows)


@pytest.mark.parametrize("queries", [2, 3, 16])
def test_tiles_are_enough_for_any_rows(queries):
    """As the kernel finds them: row i has its tiles from bounds[i] // queries + i on."""
    source = torch.Generator().manual_seed(queries)
    for _ in range(50):
        new = torch.randint(0, 3 * queries, (7,), generator=source)
        bounds = [0, *new.cumsum(0).tolist()]
        starts = [bound // queries + i for i, bound in enumerate(bounds)]
        tokens = bounds[-1] + int(torch.randint(0, 40, (1,), generator=source))  # and padding
        starts.append(triton.max_tiles(tokens, 7, queries))
        lengths = [*new.tolist(), tokens - bounds[-1]]
        for length, start, following in zip(lengths, starts[:-1], starts[1:], strict=True):
            assert start + -(-length // queries) <= following


@pytest.mark.parametrize("page", [16, 64])
def test_tokens_are_written_to_their_slots(page, monkeypatch):
    small = {"BLOCK": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton, "WRITE", Launches("WRITE", small))
    fused = torch.randn(5, 3, 24)
    key, value = fused[..., :8], fused[..., 8:16]
    slots = torch.tensor([2 * page + 5, -1, 0, 3 * page - 1, -1])
    mine, theirs = (
        {
            "key_cache": torch.zeros(4, page, 3, 8),
            "value_cache": torch.zeros(4, 3, page, 8).transpose(1, 2),
        }
        for _ in range(2)
    )
    write_to_pages(key, value, slot_mapping=slots, implementation="triton", **mine)
    write_to_pages(key, value, slot_mapping=slots, implementation="reference", **theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert mine["key_cache"].any(-1).sum() == 3 * 3

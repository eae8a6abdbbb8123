# SPDX-License-Identifier: Apache-2.0
"""Paged attention in Triton's interpreter against the fp64 reference, on NaN-filled memory.

`test_triton.py` runs this file in a separate process, because TRITON_INTERPRET must be set before
the first import of Triton.
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
#: As many key tiles as splits: five of 32 keys, merged two at a time.
LONG_DECODE = {"new": (1, 0, 1), "contexts": (150, 9, 70)}
#: Three splits with keys; the first of 16 queries, at position 126, must not see the last key of
#: its tile.
LONG_MIXED = {"new": (1, 16, 2, 0), "contexts": (37, 142, 66, 9)}
# rows, heads, features, block size, padding rows, window, sinks, splits
CASES = {
    "decode": (DECODE, (4, 2), 8, 16, 0, None, False, 1),
    "split decode": (DECODE, (6, 2), 24, 16, 3, None, False, 3),
    "decode with more splits than are merged at once": (
        LONG_DECODE,
        (6, 2),
        24,
        16,
        0,
        None,
        False,
        5,
    ),
    "split decode with sinks": (DECODE, (3, 1), 16, 64, 0, None, True, 2),
    "split decode with a window": (DECODE, (2, 2), 8, 16, 1, 9, True, 2),
    "more heads than tile rows": (DECODE, (40, 1), 8, 16, 0, None, True, 1),
    "mixed": (MIXED, (6, 2), 24, 16, 5, None, False, 1),
    "mixed with sinks": (MIXED, (4, 4), 8, 32, 0, None, True, 1),
    "split mixed": (LONG_MIXED, (3, 1), 16, 16, 4, None, True, 3),
    "mixed with a window": (MIXED, (6, 2), 8, 16, 0, 9, False, 1),
    "split mixed with a window": (MIXED, (4, 2), 8, 64, 2, 20, True, 2),
    "more rows than one search step": (
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
    """Use tiles so small that rows need several, and pages hold half a tile or two."""
    for name, block in (("DECODE", 32), ("PREFILL", 16)):
        launch = {"ROWS": 16, "BLOCK": block, "num_warps": 4, "num_stages": 1}
        monkeypatch.setattr(triton, name, Launches(name, launch))
    launch = {"BLOCK": 2, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton, "MERGE", Launches("MERGE", launch))


def assert_matches_reference(rows, **options):
    """Compare out and lse of the fp32 kernel with the fp64 reference."""
    sinks = options.pop("sinks", None)
    expected = paged_attention(rows.query, *rows.caches, batch=rows.batch, sinks=sinks, **options)
    actual = paged_attention(
        rows.query.float(),
        *(x.float() for x in rows.caches),
        batch=rows.batch,
        sinks=None if sinks is None else sinks.float(),
        implementation="triton",
        **options,
    )
    assert_close_by_metric("out", actual[0], expected[0])
    empty = expected[1].isneginf()
    assert torch.equal(actual[1].isneginf(), empty)
    assert_close_by_metric("lse", actual[1][~empty], expected[1][~empty])


@pytest.mark.parametrize("case", CASES)
def test_paged_attention_matches_reference(case, small_tiles, monkeypatch):
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
    assert_matches_reference(rows, scale=0.3, window=window, sinks=sinks)


# rows, heads, latent features, value features, block size, padding rows, splits
LATENT_CASES = {
    "decode": (DECODE, 3, 24, 16, 16, 0, 1),
    "split decode": (LONG_DECODE, 20, 21, 17, 16, 3, 5),
    "decode with more heads than tile rows": (DECODE, 40, 24, 16, 32, 0, 1),
    "mixed": (MIXED, 4, 30, 24, 64, 2, 1),
    "split mixed": (LONG_MIXED, 2, 16, 16, 16, 4, 3),
}


@pytest.mark.parametrize("case", LATENT_CASES)
def test_latent_attention_matches_reference(case, monkeypatch):
    lengths, heads, features, values, block_size, padding, count = LATENT_CASES[case]
    # fp32 uses a quarter of the tile.
    launch = {"ROWS": 64, "BLOCK": 128, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton, "LATENT", Launches("LATENT", launch))
    monkeypatch.setattr(triton, "num_splits", lambda *_: count)
    monkeypatch.setattr(triton, "MIN_SPLIT_TOKENS", 1 if count < 3 else 32)
    rows = paged_rows(
        **lengths, heads=(heads, 1), features=features, block_size=block_size, padding=padding
    )
    latents = rows.caches[0][:, :, 0]
    options = {"batch": rows.batch, "scale": 0.3, "value_features": values}
    expected = paged_latent_attention(rows.query, latents, **options)
    assert expected.shape == (rows.query.shape[0], heads, values)
    actual = paged_latent_attention(
        rows.query.float(), latents.float(), implementation="triton", **options
    )
    assert_close_by_metric("out", actual, expected)


def test_latent_writes_match_reference():
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
def test_larger_batch_bounds_do_not_change_the_output(max_query):
    """A CUDA graph keeps the bounds of its capture, and so its number of tiles and splits."""
    rows = paged_rows(**DECODE, heads=(4, 2), features=8, bounds=(max_query, 600), padding=3)
    assert_matches_reference(rows)


def test_strided_queries_and_caches_match_reference(small_tiles):
    rows = paged_rows(**MIXED, heads=(4, 2), features=8)
    fused = torch.full((rows.query.shape[0], 4, 24), torch.nan, dtype=torch.float64)
    fused[..., 8:16] = rows.query
    keys = torch.stack(rows.caches, 2)[:, :, 0]  # next to the values, as in some engines
    values = rows.caches[1].transpose(1, 2).contiguous().transpose(1, 2)  # heads before positions
    table = torch.cat([torch.full_like(rows.batch.block_table, -1), rows.batch.block_table], 1)
    batch = replace(rows.batch, block_table=table[:, rows.batch.block_table.shape[1] :])
    assert_matches_reference(
        replace(rows, query=fused[..., 8:16], caches=(keys, values), batch=batch)
    )


def test_empty_batch_matches_reference():
    rows = paged_rows((0, 0), (3, 0), heads=(2, 1), features=8, bounds=(1, 16))
    assert_matches_reference(rows)


@pytest.mark.parametrize("queries", [2, 3, 16])
def test_max_tiles_covers_any_rows(queries):
    """As in the kernel, the tiles of row i start at bounds[i] // queries + i."""
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
def test_page_writes_match_reference(page, monkeypatch):
    launch = {"BLOCK": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton, "WRITE", Launches("WRITE", launch))
    fused = torch.randn(5, 3, 24)
    key, value = fused[..., :8], fused[..., 8:16]
    slots = torch.tensor([2 * page + 5, -1, 0, 3 * page - 1, -1])
    actual, expected = (
        {
            "key_cache": torch.zeros(4, page, 3, 8),
            "value_cache": torch.zeros(4, 3, page, 8).transpose(1, 2),
        }
        for _ in range(2)
    )
    write_to_pages(key, value, slot_mapping=slots, implementation="triton", **actual)
    write_to_pages(key, value, slot_mapping=slots, implementation="reference", **expected)
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert actual["key_cache"].any(-1).sum() == 3 * 3

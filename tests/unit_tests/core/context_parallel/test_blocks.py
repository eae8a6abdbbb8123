# SPDX-License-Identifier: Apache-2.0
"""Attention blocks against a mask over every pair of tokens, and their number."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from megatron.core.context_parallel import SequenceSharding
from megatron.core.context_parallel.blockwise import AttentionBlock, Blocks, attention_blocks
from megatron.core.context_parallel.sequence_sharding import TokenRange
from tests.unit_tests.core.context_parallel.pair_count import pair_count
from tests.unit_tests.core.context_parallel.random_cuts import ShardingCase, random_case


@dataclass(frozen=True)
class AttentionCase:
    """Queries of one rank, keys of any layout, the documents of the rows, and the mask options."""

    sharding_case: ShardingCase
    query_rank: int
    keys: tuple[TokenRange, ...]
    key_row_indices: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...] | None
    rows: int
    causal: bool
    window: int | None
    joined: bool

    def blocks(self) -> tuple[AttentionBlock, ...]:
        """Return the blocks under test."""
        return attention_blocks(
            self.sharding_case.sharding().runs(self.query_rank),
            self.keys,
            rows=self.rows,
            documents=self.documents,
            causal=self.causal,
            window=self.window,
            joined=self.joined,
        )

    def row_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the row indices of the queries [s_q] and keys [s_k], -1 for padding."""
        return np.array(self.sharding_case.row_indices()[self.query_rank]), np.array(
            self.key_row_indices
        )

    def visible(self) -> np.ndarray:
        """Return the attention mask [b, s_q, s_k], straight from its definition."""
        query, key = self.row_indices()
        mask = (query[:, None] >= 0) & (key >= 0)
        mask = np.repeat(mask[None], self.rows, axis=0)
        if self.causal:
            mask &= key <= query[:, None]
        if self.window is not None:
            mask &= query[:, None] - key < self.window
        for row, bounds in enumerate(self.documents or ()):
            ids = np.zeros(self.sharding_case.total + 1, dtype=int)  # the last entry is for padding
            for bound in bounds[1:-1]:
                ids[bound : self.sharding_case.total] += 1
            mask[row] &= ids[query][:, None] == ids[key]
        return mask


def random_runs(rng: random.Random, total: int) -> tuple[TokenRange, ...]:
    """Draw spans of a row in any order, with gaps between them."""
    bounds = sorted({0, total, *(rng.randrange(total + 1) for _ in range(rng.choice([1, 3, 6])))})
    spans = list(itertools.pairwise(bounds))
    rng.shuffle(spans)
    ranges, start = [], 0
    for row_start, end in spans[: rng.randrange(1, len(spans) + 1)]:
        start += rng.choice([0, 0, 2])
        ranges.append(TokenRange(start, end - row_start, row_start))
        start += end - row_start
    return tuple(ranges)


def random_keys(rng: random.Random, case: ShardingCase) -> tuple[tuple[TokenRange, ...], list[int]]:
    """Draw the keys of a rank, of whole rows or of random spans, and their row indices."""
    kind = rng.choice(["rank", "rank", "whole", "any"])
    if kind == "rank":
        rank = rng.randrange(case.size)
        return case.sharding().runs(rank), case.row_indices()[rank]
    if kind == "whole":
        return (TokenRange(0, case.total, 0),), list(range(case.total))
    runs = random_runs(rng, case.total)
    row_indices = [-1] * runs[-1].stop
    for run in runs:
        row_indices[run.start : run.stop] = range(run.row_start, run.row_end)
    return runs, row_indices


def random_attention_case(rng: random.Random) -> AttentionCase:
    """Draw queries and keys of a random sharding, with equal, different or no documents in rows."""
    case = random_case(rng)
    total, rows = case.total, rng.choice([1, 2, 3, 4])
    documents: list[tuple[int, ...]] | None = []
    for _ in range(rows):
        bounds = [rng.randrange(total + 1) for _ in range(rng.choice([0, 1, 2, 5]))]
        if documents and rng.random() < 0.5:
            documents.append(documents[-1])
        else:
            documents.append((0, *sorted(bounds), total))
    if rng.random() < 0.2:
        documents = None
    keys, row_indices = random_keys(rng, case)
    window = rng.choice([None, None, 1, 2, total, rng.randrange(1, total + 1)])
    return AttentionCase(
        case,
        rng.randrange(case.size),
        keys,
        tuple(row_indices),
        None if documents is None else tuple(documents),
        rows,
        causal=rng.random() < 0.8,
        window=window,
        joined=window is None and rng.random() < 0.4,
    )


ATTENTION_CASES = [random_attention_case(random.Random(seed)) for seed in range(200)]


def visible_pairs(case: AttentionCase, block: AttentionBlock) -> np.ndarray:
    """Return the mask [q, k] of a block, as an op computes it from the block alone."""
    queries, keys = block.q1 - block.q0, block.k1 - block.k0
    query = np.arange(queries)[:, None] + block.q_row_start
    key = np.arange(keys) + block.k_row_start
    mask = np.ones((queries, keys), dtype=bool)
    if block.causal:
        assert (queries, block.q_row_start) == (keys, block.k_row_start), case
        mask &= key <= query
    if case.window is not None:
        mask &= query - key < case.window
    return mask


def test_every_visible_pair_is_in_exactly_one_block():
    coverage = Counter()
    for case in ATTENTION_CASES:
        expected = case.visible()
        count = np.zeros(expected.shape, dtype=int)
        for block in case.blocks():
            mask = visible_pairs(case, block)
            assert mask.any(), (case, block)
            count[block.row0 : block.row1, block.q0 : block.q1, block.k0 : block.k1] += mask
            coverage["squares" if block.causal else "rectangles"] += 1
            coverage["several rows"] += block.row1 - block.row0 > 1
        assert np.array_equal(count, expected.astype(int)), case
        coverage["invisible"] += not expected.any()
        coverage["windows"] += case.window is not None and not case.joined
        coverage["padded"] += case.sharding_case.lengths != case.sharding_case.padded
        coverage["documents"] += case.documents is not None and len(set(case.documents)) > 1
        coverage["joined"] += case.joined
    assert len(coverage) == 8, coverage
    assert min(coverage.values()) >= 15, coverage


def test_block_row_starts_match_its_tokens():
    checked = 0
    for case in ATTENTION_CASES:
        query, key = case.row_indices()
        for block in case.blocks():
            assert (query[block.q0], key[block.k0]) == (block.q_row_start, block.k_row_start), case
            if not case.joined:
                checked += 1
                row_indices = block.q_row_start + np.arange(block.q1 - block.q0)
                assert np.array_equal(query[block.q0 : block.q1], row_indices), case
                row_indices = block.k_row_start + np.arange(block.k1 - block.k0)
                assert np.array_equal(key[block.k0 : block.k1], row_indices), case
    assert checked > 300


def test_pair_count_matches_the_visible_pairs():
    windows = 0
    for case in ATTENTION_CASES:
        pairs = pair_count(case.blocks(), window=case.window)
        assert pairs == case.visible().sum(), case
        windows += case.window not in (None, 1)
    assert windows > 50


def test_adjacent_rectangles_are_merged():
    """Adjacent rectangles of the same rows are one larger block unless their row indices jump."""
    num_compared = 0
    for case in ATTENTION_CASES:
        if case.window is not None:
            continue
        blocks = case.blocks()
        blocks = [
            b for b in blocks if not b.causal or b.q1 - b.q0 == 1
        ]  # a square of one token is a rectangle
        for a, b in itertools.permutations(blocks, 2):
            if (a.row0, a.row1) != (b.row0, b.row1):
                continue
            num_compared += 1
            queries = a.q_row_start + a.q1 - a.q0 == b.q_row_start or case.joined
            keys = a.k_row_start + a.k1 - a.k0 == b.k_row_start or case.joined
            joins_queries = queries and (a.k0, a.k1, a.q1) == (b.k0, b.k1, b.q0)
            joins_keys = keys and (a.q0, a.q1, a.k1) == (b.q0, b.q1, b.k0)
            assert not joins_queries, (case, a, b)
            assert not joins_keys, (case, a, b)
    assert num_compared > 200


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("joined", [False, True])
def test_dense_zigzag_has_few_blocks(cp, joined):
    """Keys of the same rank: two squares and a rectangle. Keys of a lower rank: all queries see
    the first chunk. Keys of a higher rank: the second chunk of queries sees both chunks."""
    chunk = 4
    sharding = SequenceSharding.of(2 * cp * chunk, cp)
    for rank, key_rank in itertools.product(range(cp), repeat=2):
        blocks = attention_blocks(
            sharding.runs(rank), sharding.runs(key_rank), rows=2, joined=joined
        )
        squares = [block for block in blocks if block.causal]
        if rank == key_rank:
            on_final_rank = rank == cp - 1
            assert (len(squares), len(blocks)) == ((1, 1) if on_final_rank else (2, 3))
            continue
        # The chunks of the last rank are adjacent and form one token range.
        runs = len(sharding.runs(rank)) if key_rank < rank else len(sharding.runs(key_rank))
        assert (len(squares), len(blocks)) == (0, 1 if joined else runs)
        assert pair_count(blocks) == 2 * 2 * chunk * chunk


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_the_same_work(cp):
    length, rows = 2 * cp * 5, 3
    work = {
        order: [
            pair_count(
                block
                for key_rank in range(cp)
                for block in attention_blocks(
                    sharding.runs(rank),
                    sharding.runs(key_rank),
                    rows=rows,
                    documents=[[0, length]] * rows,
                )
            )
            for rank in range(cp)
        ]
        for order in ("zigzag", "contiguous")
        for sharding in [SequenceSharding.of(length, cp, order=order)]
    }
    pairs = rows * length * (length + 1) // 2
    assert work["zigzag"] == [pairs // cp] * cp
    assert sum(work["contiguous"]) == pairs
    assert sorted(set(work["contiguous"])) == work["contiguous"]  # a later rank has more work


def test_whole_row_keys_take_two_blocks_per_token_range():
    sharding = SequenceSharding.of(16, 2)
    whole = (TokenRange(0, 16, 0),)
    assert attention_blocks(sharding.runs(0), whole, rows=1) == (
        AttentionBlock(0, 1, 0, 4, 0, 4, 0, 0, True),
        AttentionBlock(0, 1, 4, 8, 0, 12, 12, 0, False),
        AttentionBlock(0, 1, 4, 8, 12, 16, 12, 12, True),
    )
    assert attention_blocks(whole, whole, rows=5) == (
        AttentionBlock(0, 5, 0, 16, 0, 16, 0, 0, True),
    )
    bidirectional = attention_blocks(whole, whole, rows=5, causal=False)
    assert bidirectional == (AttentionBlock(0, 5, 0, 16, 0, 16, 0, 0, False),)


def test_document_is_clipped_at_token_range_boundaries():
    """Documents 0-5 and 6-15 of 16 tokens; rank 0 of 2 holds tokens 0-3 and 12-15."""
    sharding = SequenceSharding.of(16, 2)
    blocks = attention_blocks(sharding.runs(0), sharding.runs(1), rows=1, documents=[[0, 6, 6, 16]])
    assert blocks == (AttentionBlock(0, 1, 4, 8, 2, 8, 12, 6, False),)
    blocks = attention_blocks(sharding.runs(1), sharding.runs(0), rows=1, documents=[[0, 6, 6, 16]])
    assert blocks == (AttentionBlock(0, 1, 0, 2, 0, 4, 4, 0, False),)


def test_adjacent_sequences_merge_unless_documents_split_them():
    runs = SequenceSharding.of(12, 1, cu_seqlens=[0, 5, 12]).runs(0)
    assert len(runs) == 2
    assert attention_blocks(runs, runs, rows=1) == (AttentionBlock(0, 1, 0, 12, 0, 12, 0, 0, True),)
    split_blocks = attention_blocks(runs, runs, rows=1, documents=[[0, 5, 12]])
    assert split_blocks == (
        AttentionBlock(0, 1, 0, 5, 0, 5, 0, 0, True),
        AttentionBlock(0, 1, 5, 12, 5, 12, 5, 5, True),
    )


def test_rows_with_equal_documents_share_blocks():
    run = (TokenRange(0, 12, 0),)
    documents, finer = [0, 5, 12], [0, 5, 9, 12]
    blocks = attention_blocks(
        run, run, rows=4, documents=[documents, [0, 5, 5, 12], finer, documents]
    )
    rows = {
        (b.q_row_start, b.q1): (b.row0, b.row1) for b in blocks if b.q_row_start == 0 or b.q1 == 9
    }
    # Only the first document is the same in all rows; an empty document changes nothing.
    assert rows == {(0, 5): (0, 4), (5, 9): (2, 3)}
    assert [(b.row0, b.row1) for b in blocks if (b.q0, b.q1) == (5, 12)] == [(0, 2), (3, 4)]
    assert len(blocks) == 5


def test_window_skips_keys_out_of_reach():
    sharding = SequenceSharding.of(64, 4)  # rank 0: 0-7 and 56-63, rank 1: 8-15 and 48-55
    keys = [
        attention_blocks(sharding.runs(0), sharding.runs(r), rows=1, window=4) for r in range(4)
    ]
    assert keys[1] == (AttentionBlock(0, 1, 8, 11, 13, 16, 56, 53, False),)
    assert keys[2:] == [(), ()]


def test_queries_may_extend_beyond_the_keys():
    query, key = (TokenRange(3, 10, 10),), (TokenRange(0, 4, 12),)  # queries 10-19, keys 12-15
    assert attention_blocks(query, key, rows=1) == (
        AttentionBlock(0, 1, 5, 9, 0, 4, 12, 12, True),
        AttentionBlock(0, 1, 9, 13, 0, 4, 16, 12, False),
    )
    assert attention_blocks(key, query, rows=1) == (  # keys 16-19 are after all queries
        AttentionBlock(0, 1, 0, 4, 3, 5, 12, 10, False),
        AttentionBlock(0, 1, 0, 4, 5, 9, 12, 12, True),
    )
    single_token = (TokenRange(0, 1, 12),)
    assert attention_blocks(single_token, query, rows=1) == (
        AttentionBlock(0, 1, 0, 1, 3, 6, 12, 10, False),
    )
    assert attention_blocks(query, single_token, rows=1) == (
        AttentionBlock(0, 1, 5, 13, 0, 1, 12, 12, False),
    )


def test_many_short_documents_take_one_block_each():
    bounds = list(range(0, 8193, 8))
    run = (TokenRange(0, 8192, 0),)
    blocks = attention_blocks(run, run, rows=1, documents=[bounds])
    assert len(blocks) == 1024
    assert pair_count(blocks) == 1024 * 36


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "attention of 0 rows: use at least 1"),
        ({"rows": 2, "documents": [[0, 8]]},
         "documents of 1 rows for 2 rows: give one entry per row"),
        ({"rows": 2, "documents": [[0, 8], [0, 7]]},
         "documents of row 1 are [0, 7]: they must ascend from 0 to the end"),
        ({"rows": 1, "documents": [[1, 8]]}, "documents of row 0 are [1, 8]"),
        ({"rows": 1, "documents": [[0, 6, 4, 8]]}, "documents of row 0 are [0, 6, 4, 8]"),
        ({"rows": 1, "documents": [[]]}, "documents of row 0 are []"),
        ({"rows": 1, "window": 0}, "window 0: use at least 1, or None for no window"),
        ({"rows": 1, "window": 3, "joined": True},
         "joined blocks do not support a window of 3: leave one of them out"),
    ],
)  # fmt: skip
def test_incompatible_options_are_reported(options, message):
    runs = SequenceSharding.of(8, 2).runs(0)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_blocks(runs, runs, **options)


def test_tile_lists_mark_the_first_block_of_each_tile():
    plan = Blocks(
        [
            AttentionBlock(0, 2, 0, 3, 0, 3, 0, 0, True),
            AttentionBlock(1, 2, 2, 5, 3, 5, 2, 0, False),
        ]
    )
    assert plan == tuple(plan)
    assert Blocks.of(plan) is plan
    queries, keys = plan.tile_list("query", 2, 5), plan.tile_list("key", 2, 5)
    assert queries == (((0, 2, 0, 3), (1, 2, 2, 5)), (True, False), False)
    assert keys == (((0, 2, 0, 3), (1, 2, 3, 5)), (True, True), False)
    assert plan.tile_list("key", 2, 5) is keys
    assert plan.num_tile_lists == 2
    assert (
        Blocks([*plan, AttentionBlock(0, 1, 0, 5, 3, 5, 0, 0, False)]).tile_list("key", 2, 5).covers
    )
    assert not Blocks().tile_list("query", 1, 1).covers

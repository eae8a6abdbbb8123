# SPDX-License-Identifier: Apache-2.0
"""Blocks of attention, against every pair of tokens looked at one by one; how many there are."""

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
from tests.unit_tests.core.context_parallel.random_cuts import CutCase, random_case


@dataclass(frozen=True)
class Question:
    """A rank's queries, another's keys or any, the documents of some rows, and what may be seen."""

    case: CutCase
    query_rank: int
    keys: tuple[TokenRange, ...]
    key_places: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...] | None
    rows: int
    causal: bool
    window: int | None
    joined: bool

    def blocks(self) -> tuple[AttentionBlock, ...]:
        """Return what is under test."""
        return attention_blocks(
            self.case.cut().runs(self.query_rank),
            self.keys,
            rows=self.rows,
            documents=self.documents,
            causal=self.causal,
            window=self.window,
            joined=self.joined,
        )

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the queries [s_q] and keys [s_k], -1 for padding."""
        return np.array(self.case.columns()[self.query_rank]), np.array(self.key_places)

    def visible(self) -> np.ndarray:
        """Return which queries see which keys, [b, s_q, s_k], by the rule itself."""
        query, key = self.places()
        seen = (query[:, None] >= 0) & (key >= 0)
        seen = np.repeat(seen[None], self.rows, axis=0)
        if self.causal:
            seen &= key <= query[:, None]
        if self.window is not None:
            seen &= query[:, None] - key < self.window
        for row, bounds in enumerate(self.documents or ()):
            ids = np.zeros(self.case.total + 1, dtype=int)  # the last is padding's
            for border in bounds[1:-1]:
                ids[border : self.case.total] += 1
            seen[row] &= ids[query][:, None] == ids[key]
        return seen


def random_runs(rng: random.Random, total: int) -> tuple[TokenRange, ...]:
    """Draw parts of a row that lie anyhow, with gaps between."""
    borders = sorted({0, total, *(rng.randrange(total + 1) for _ in range(rng.choice([1, 3, 6])))})
    parts = list(itertools.pairwise(borders))
    rng.shuffle(parts)
    found, start = [], 0
    for first, end in parts[: rng.randrange(1, len(parts) + 1)]:
        start += rng.choice([0, 0, 2])
        found.append(TokenRange(start, end - first, first))
        start += end - first
    return tuple(found)


def random_keys(rng: random.Random, case: CutCase) -> tuple[tuple[TokenRange, ...], list[int]]:
    """Draw keys: those of a rank, of whole rows, or some; with the place of each, -1 for none."""
    kind = rng.choice(["rank", "rank", "whole", "any"])
    if kind == "rank":
        rank = rng.randrange(case.size)
        return case.cut().runs(rank), case.columns()[rank]
    if kind == "whole":
        return (TokenRange(0, case.total, 0),), list(range(case.total))
    runs = random_runs(rng, case.total)
    places = [-1] * runs[-1].stop
    for run in runs:
        places[run.start : run.stop] = range(run.row_start, run.row_end)
    return runs, places


def random_question(rng: random.Random) -> Question:
    """Draw queries and keys of a random cut; rows with the same documents, others, or none."""
    case = random_case(rng)
    total, rows = case.total, rng.choice([1, 2, 3, 4])
    documents: list[tuple[int, ...]] | None = []
    for _ in range(rows):
        borders = [rng.randrange(total + 1) for _ in range(rng.choice([0, 1, 2, 5]))]
        if documents and rng.random() < 0.5:
            documents.append(documents[-1])
        else:
            documents.append((0, *sorted(borders), total))
    if rng.random() < 0.2:
        documents = None
    keys, places = random_keys(rng, case)
    window = rng.choice([None, None, 1, 2, total, rng.randrange(1, total + 1)])
    return Question(
        case,
        rng.randrange(case.size),
        keys,
        tuple(places),
        None if documents is None else tuple(documents),
        rows,
        causal=rng.random() < 0.8,
        window=window,
        joined=window is None and rng.random() < 0.4,
    )


QUESTIONS = [random_question(random.Random(seed)) for seed in range(200)]


def visible_pairs(question: Question, block: AttentionBlock) -> np.ndarray:
    """Return which pairs [q, k] of a block it shows, as an op that gets nothing but the block."""
    queries, keys = block.q1 - block.q0, block.k1 - block.k0
    query = np.arange(queries)[:, None] + block.q_row_start
    key = np.arange(keys) + block.k_row_start
    seen = np.ones((queries, keys), dtype=bool)
    if block.causal:
        assert (queries, block.q_row_start) == (keys, block.k_row_start), question
        seen &= key <= query
    if question.window is not None:
        seen &= query - key < question.window
    return seen


def test_every_visible_pair_is_in_one_block_and_no_other():
    met = Counter()
    for question in QUESTIONS:
        wanted = question.visible()
        count = np.zeros(wanted.shape, dtype=int)
        for block in question.blocks():
            seen = visible_pairs(question, block)
            assert seen.any(), (question, block)
            count[block.row0 : block.row1, block.q0 : block.q1, block.k0 : block.k1] += seen
            met["squares" if block.causal else "rectangles"] += 1
            met["several rows"] += block.row1 - block.row0 > 1
        assert np.array_equal(count, wanted.astype(int)), question
        met["invisible"] += not wanted.any()
        met["windows"] += question.window is not None and not question.joined
        met["padded"] += question.case.lengths != question.case.padded
        met["documents"] += question.documents is not None and len(set(question.documents)) > 1
        met["joined"] += question.joined
    assert len(met) == 8, met
    assert min(met.values()) >= 15, met


def test_places_of_a_block_are_those_of_its_tokens():
    checked = 0
    for question in QUESTIONS:
        query, key = question.places()
        for block in question.blocks():
            assert (query[block.q0], key[block.k0]) == (block.q_row_start, block.k_row_start), (
                question
            )
            if not question.joined:
                checked += 1
                places = block.q_row_start + np.arange(block.q1 - block.q0)
                assert np.array_equal(query[block.q0 : block.q1], places), question
                places = block.k_row_start + np.arange(block.k1 - block.k0)
                assert np.array_equal(key[block.k0 : block.k1], places), question
    assert checked > 300


def test_pairs_are_counted_without_looking_at_them():
    windows = 0
    for question in QUESTIONS:
        pairs = pair_count(question.blocks(), window=question.window)
        assert pairs == question.visible().sum(), question
        windows += question.window not in (None, 1)
    assert windows > 50


def test_no_two_rectangles_make_one():
    """Side by side, of the same rows: they are one larger block unless the places jump between."""
    looked = 0
    for question in QUESTIONS:
        if question.window is not None:
            continue
        blocks = question.blocks()
        blocks = [b for b in blocks if not b.causal or b.q1 - b.q0 == 1]  # of one token is none
        for a, b in itertools.permutations(blocks, 2):
            if (a.row0, a.row1) != (b.row0, b.row1):
                continue
            looked += 1
            queries = a.q_row_start + a.q1 - a.q0 == b.q_row_start or question.joined
            keys = a.k_row_start + a.k1 - a.k0 == b.k_row_start or question.joined
            tall = queries and (a.k0, a.k1, a.q1) == (b.k0, b.k1, b.q0)
            wide = keys and (a.q0, a.q1, a.k1) == (b.q0, b.q1, b.k0)
            assert not tall, (question, a, b)
            assert not wide, (question, a, b)
    assert looked > 200


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("joined", [False, True])
def test_dense_zigzag_has_few_blocks(cp, joined):
    """Own keys: two squares and what lies between. Keys before: all queries see the first chunk.
    Keys behind: the second chunk of queries sees both."""
    chunk = 4
    cut = SequenceSharding.of(2 * cp * chunk, cp)
    for rank, other in itertools.product(range(cp), repeat=2):
        blocks = attention_blocks(cut.runs(rank), cut.runs(other), rows=2, joined=joined)
        squares = [block for block in blocks if block.causal]
        if rank == other:
            last = rank == cp - 1
            assert (len(squares), len(blocks)) == ((1, 1) if last else (2, 3))
            continue
        # The last rank's chunks lie side by side, in one run.
        runs = len(cut.runs(rank)) if other < rank else len(cut.runs(other))
        assert (len(squares), len(blocks)) == (0, 1 if joined else runs)
        assert pair_count(blocks) == 2 * 2 * chunk * chunk


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_the_same_work(cp):
    length, rows = 2 * cp * 5, 3
    work = {
        order: [
            pair_count(
                block
                for other in range(cp)
                for block in attention_blocks(
                    cut.runs(rank), cut.runs(other), rows=rows, documents=[[0, length]] * rows
                )
            )
            for rank in range(cp)
        ]
        for order in ("zigzag", "contiguous")
        for cut in [SequenceSharding.of(length, cp, order=order)]
    }
    pairs = rows * length * (length + 1) // 2
    assert work["zigzag"] == [pairs // cp] * cp
    assert sum(work["contiguous"]) == pairs
    assert sorted(set(work["contiguous"])) == work["contiguous"]  # the later the more


def test_keys_of_whole_rows_cost_two_blocks_a_run():
    cut = SequenceSharding.of(16, 2)
    whole = (TokenRange(0, 16, 0),)
    assert attention_blocks(cut.runs(0), whole, rows=1) == (
        AttentionBlock(0, 1, 0, 4, 0, 4, 0, 0, True),
        AttentionBlock(0, 1, 4, 8, 0, 12, 12, 0, False),
        AttentionBlock(0, 1, 4, 8, 12, 16, 12, 12, True),
    )
    assert attention_blocks(whole, whole, rows=5) == (
        AttentionBlock(0, 5, 0, 16, 0, 16, 0, 0, True),
    )
    everything = attention_blocks(whole, whole, rows=5, causal=False)
    assert everything == (AttentionBlock(0, 5, 0, 16, 0, 16, 0, 0, False),)


def test_document_across_token_range_boundaries():
    """Documents 0-5 and 6-15 of 16 tokens; rank 0 of 2 holds places 0-3 and 12-15."""
    cut = SequenceSharding.of(16, 2)
    blocks = attention_blocks(cut.runs(0), cut.runs(1), rows=1, documents=[[0, 6, 6, 16]])
    assert blocks == (AttentionBlock(0, 1, 4, 8, 2, 8, 12, 6, False),)
    blocks = attention_blocks(cut.runs(1), cut.runs(0), rows=1, documents=[[0, 6, 6, 16]])
    assert blocks == (AttentionBlock(0, 1, 0, 2, 0, 4, 4, 0, False),)


def test_adjacent_sequences_merge_unless_documents_split_them():
    runs = SequenceSharding.of(12, 1, cu_seqlens=[0, 5, 12]).runs(0)
    assert len(runs) == 2
    assert attention_blocks(runs, runs, rows=1) == (AttentionBlock(0, 1, 0, 12, 0, 12, 0, 0, True),)
    parted = attention_blocks(runs, runs, rows=1, documents=[[0, 5, 12]])
    assert parted == (
        AttentionBlock(0, 1, 0, 5, 0, 5, 0, 0, True),
        AttentionBlock(0, 1, 5, 12, 5, 12, 5, 5, True),
    )


def test_rows_that_agree_share_blocks():
    run = (TokenRange(0, 12, 0),)
    same, other = [0, 5, 12], [0, 5, 9, 12]
    blocks = attention_blocks(run, run, rows=4, documents=[same, [0, 5, 5, 12], other, same])
    rows = {
        (b.q_row_start, b.q1): (b.row0, b.row1) for b in blocks if b.q_row_start == 0 or b.q1 == 9
    }
    # The first document is the same in all, the others are not; an empty one changes nothing.
    assert rows == {(0, 5): (0, 4), (5, 9): (2, 3)}
    assert [(b.row0, b.row1) for b in blocks if (b.q0, b.q1) == (5, 12)] == [(0, 2), (3, 4)]
    assert len(blocks) == 5


def test_a_window_leaves_out_what_it_does_not_reach():
    cut = SequenceSharding.of(64, 4)  # rank 0: 0-7 and 56-63, rank 1: 8-15 and 48-55
    keys = [attention_blocks(cut.runs(0), cut.runs(r), rows=1, window=4) for r in range(4)]
    assert keys[1] == (AttentionBlock(0, 1, 8, 11, 13, 16, 56, 53, False),)
    assert keys[2:] == [(), ()]


def test_queries_start_before_and_end_after_the_keys():
    query, key = (TokenRange(3, 10, 10),), (TokenRange(0, 4, 12),)  # queries 10-19, keys 12-15
    assert attention_blocks(query, key, rows=1) == (
        AttentionBlock(0, 1, 5, 9, 0, 4, 12, 12, True),
        AttentionBlock(0, 1, 9, 13, 0, 4, 16, 12, False),
    )
    assert attention_blocks(key, query, rows=1) == (  # keys of places 16-19 are behind all
        AttentionBlock(0, 1, 0, 4, 3, 5, 12, 10, False),
        AttentionBlock(0, 1, 0, 4, 5, 9, 12, 12, True),
    )
    one = (TokenRange(0, 1, 12),)
    assert attention_blocks(one, query, rows=1) == (
        AttentionBlock(0, 1, 0, 1, 3, 6, 12, 10, False),
    )
    assert attention_blocks(query, one, rows=1) == (
        AttentionBlock(0, 1, 5, 13, 0, 1, 12, 12, False),
    )


def test_many_short_documents_take_one_block_each():
    borders = list(range(0, 8193, 8))
    run = (TokenRange(0, 8192, 0),)
    blocks = attention_blocks(run, run, rows=1, documents=[borders])
    assert len(blocks) == 1024
    assert pair_count(blocks) == 1024 * 36


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "attention of 0 rows: use at least 1"),
        ({"rows": 2, "documents": [[0, 8]]},
         "documents of 1 rows for 2 rows: give one of each"),
        ({"rows": 2, "documents": [[0, 8], [0, 7]]},
         "documents of row 1 are [0, 7]: they must rise from 0 to the row's end, at least 8"),
        ({"rows": 1, "documents": [[1, 8]]}, "documents of row 0 are [1, 8]"),
        ({"rows": 1, "documents": [[0, 6, 4, 8]]}, "documents of row 0 are [0, 6, 4, 8]"),
        ({"rows": 1, "documents": [[]]}, "documents of row 0 are []"),
        ({"rows": 1, "window": 0}, "window 0: use at least 1, or None for no window"),
        ({"rows": 1, "window": 3, "joined": True},
         "joined blocks have no places for a window of 3: leave one out"),
    ],
)  # fmt: skip
def test_incompatible_options_are_reported(options, message):
    runs = SequenceSharding.of(8, 2).runs(0)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_blocks(runs, runs, **options)


def test_visits_say_where_blocks_lie_and_which_is_first_there():
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

# SPDX-License-Identifier: Apache-2.0
"""Sharding of rows, against chunks dealt to ranks, formulas and simulated halo exchanges."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from megatron.core.context_parallel import SequenceSharding
from megatron.core.context_parallel.sequence_sharding import TokenRange
from tests.unit_tests.core.context_parallel.random_cuts import SIZES, ShardingCase, random_case

CASES = [random_case(random.Random(seed)) for seed in range(200)]


def test_random_cases_cover_all_kinds_of_rows():
    assert {case.size for case in CASES} == set(SIZES)
    assert {case.order for case in CASES} == {"zigzag", "contiguous"}
    count = {
        "padded": sum(case.lengths != case.padded for case in CASES),
        "empty": sum(0 in case.lengths for case in CASES),
        "only padding": sum((0, True) in _lengths(case) for case in CASES),
        "uneven": sum(len(set(case.padded)) > 1 for case in CASES),
        "whole": sum(case.whole for case in CASES),
    }
    assert min(count.values()) >= 5, count


def _lengths(case: ShardingCase) -> list[tuple[int, bool]]:
    return [(n, m > 0) for n, m in zip(case.lengths, case.padded, strict=True)]


def test_row_indices_match_chunks_dealt_to_ranks():
    for case in CASES:
        sharding, expected = case.sharding(), case.row_indices()
        assert [sharding.row_indices(rank).tolist() for rank in range(case.size)] == expected, case
        assert {len(row_indices) for row_indices in expected} == {sharding.local_length}, case
        assert sharding.is_padded == (case.lengths != case.padded), case


def test_token_ranges_are_maximal_and_exclude_padding():
    for case in CASES:
        sharding = case.sharding()
        ends = [sum(case.lengths[: i + 1]) for i in range(len(case.lengths))]
        for rank in range(case.size):
            runs = sharding.runs(rank)
            expected = [
                (i, row_index)
                for i, row_index in enumerate(sharding.row_indices(rank))
                if row_index >= 0
            ]
            actual = [(r.start + i, r.row_start + i) for r in runs for i in range(r.length)]
            assert actual == expected, case
            for run in runs:
                assert sum(run.row_start >= end for end in ends) == run.sequence, case
                assert (run.stop, run.row_end) == (
                    run.start + run.length,
                    run.row_start + run.length,
                )
            for run, successor in pairwise(runs):
                follows = (run.stop, run.row_end) == (successor.start, successor.row_start)
                assert not (follows and run.sequence == successor.sequence), case


def test_one_rank_holds_each_sequence_in_one_run():
    sharding = SequenceSharding.of(
        12, 1, cu_seqlens=[0, 5, 5, 12]
    )  # odd lengths: one rank needs no chunks
    assert sharding.runs(0) == (TokenRange(0, 5, 0, 0), TokenRange(5, 7, 5, 2))
    assert sharding.inverse().tolist() == list(range(12))
    assert SequenceSharding.of(7, 1).runs(0) == (TokenRange(0, 7, 0),)


def test_last_zigzag_rank_joins_its_two_chunks():
    sharding = SequenceSharding.of(16, 4)
    assert [len(sharding.runs(rank)) for rank in range(4)] == [2, 2, 2, 1]
    assert sharding.runs(1) == (TokenRange(0, 2, 2), TokenRange(2, 2, 12))
    assert sharding.runs(3) == (TokenRange(0, 4, 6),)


def test_inverse_restores_row_order_of_gathered_ranks():
    for case in CASES:
        sharding = case.sharding()
        gathered = [row_index for row_indices in case.row_indices() for row_index in row_indices]
        assert [gathered[i] for i in sharding.inverse()] == list(range(case.total)), case


@pytest.mark.parametrize("cp", [2, 3, 4, 5])
def test_inverse_of_chunks_is_the_zigzag_order(cp):
    """With chunks of one token, chunk n is at index 2n if n < cp, and at 4cp - 2n - 1 otherwise."""
    expected = [*range(0, 2 * cp, 2), *range(2 * cp - 1, 0, -2)]
    assert SequenceSharding.of(2 * cp, cp).inverse().tolist() == expected


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_inverse_of_packed_sequences_matches_formula(cp):
    lengths = [2 * cp * n for n in (3, 1, 0, 5, 2)]
    cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    expected = []
    for start, end in pairwise(cu):
        chunk = (end - start) // (2 * cp)
        for offset in range(end - start):
            n, o = divmod(offset, chunk)
            rank, half = (n, 0) if n < cp else (2 * cp - 1 - n, 1)
            expected.append(rank * cu[-1] // cp + start // cp + half * chunk + o)
    assert SequenceSharding.of(cu[-1], cp, cu_seqlens=cu).inverse().tolist() == expected


def test_halo_provides_the_tokens_before_each_range():
    """Simulate the plan's messages and check the halo tokens of each token range."""
    num_remote = num_local = num_missing = 0
    for number, case in enumerate(CASES):
        sharding, row_indices = case.sharding(), case.row_indices()
        width = (0, 1, 3, 4, case.total)[number % 5]
        halo = sharding.halo(width)
        assert halo.width == width
        assert all(transfer.length > 0 for transfer in halo.transfers), case
        for target in range(case.size):
            runs = sharding.runs(target)
            rows: dict[tuple[int, int], int] = {}
            for transfer in halo.received(target):
                num_local += transfer.source == target
                num_remote += transfer.source != target
                for i in range(transfer.length):
                    assert (transfer.run, transfer.row + i) not in rows, (
                        case
                    )  # each token is sent once
                    row_index = row_indices[transfer.source][transfer.start + i]
                    rows[transfer.run, transfer.row + i] = row_index
            for index, run in enumerate(runs):
                start = sum(case.lengths[: run.sequence])
                for row in range(width):
                    row_index = run.row_start - width + row
                    expected = row_index if row_index >= start else None
                    num_missing += expected is None
                    assert rows.pop((index, row), None) == expected, (case, index, row)
            assert not rows, case
    assert min(num_remote, num_local, num_missing) > 100, (num_remote, num_local, num_missing)


def test_halo_messages_are_sorted_by_source_rank():
    sharding = SequenceSharding.of(48, 4, cu_seqlens=[0, 16, 48])
    for rank in range(4):
        sources = [transfer.source for transfer in sharding.halo(3).received(rank)]
        assert sources == sorted(sources)


def test_equal_shardings_have_equal_hashes():
    sharding = SequenceSharding.of(16, 2, cu_seqlens=[0, 4, 16])
    equal = SequenceSharding.of(16, 2, cu_seqlens=(0, 4, 16), padded_cu_seqlens=[0, 4, 16])
    assert {sharding: "x"}[equal] == "x"
    assert SequenceSharding.of(16, 2) == SequenceSharding.of(16, 2, cu_seqlens=[0, 16])
    different = [
        SequenceSharding.of(16, 2, cu_seqlens=[0, 8, 16]),
        SequenceSharding.of(16, 2, cu_seqlens=[0, 4, 16], padded_cu_seqlens=[0, 8, 20]),
        SequenceSharding.of(16, 2, order="contiguous", cu_seqlens=[0, 4, 16]),
        SequenceSharding.of(16, 1, cu_seqlens=[0, 4, 16]),
    ]
    assert len({sharding, *different}) == 5


@pytest.mark.parametrize(
    ("length", "size", "options", "message"),
    [
        (6, 2, {}, "sequence 0 has 6 tokens, which do not divide by 4 (2 x context-parallel-size, "
         "zigzag order): pad it to 8"),
        (7, 2, {"order": "contiguous"}, "sequence 0 has 7 tokens, which do not divide by 2 "
         "(context-parallel-size, contiguous order): pad it to 8"),
        (14, 2, {"cu_seqlens": [0, 8, 14]}, "sequence 1 has 6 tokens"),
        (7, 2, {"cu_seqlens": [0, 4, 7], "padded_cu_seqlens": [0, 4, 10]},
         "sequence 1 has 6 tokens"),
        (8, 2, {"cu_seqlens": [4, 8]}, "cu_seqlens starts at 4: it starts at 0"),
        (8, 2, {"cu_seqlens": [0, 8, 4, 8]}, "cu_seqlens decreases from 8 to 4 at sequence 1"),
        (8, 2, {"cu_seqlens": [0, 4]}, "cu_seqlens ends at 4, but the row has 8 tokens"),
        (8, 2, {"cu_seqlens": [0, 12]}, "cu_seqlens ends at 12, but the row has 8 tokens"),
        (8, 2, {"cu_seqlens": [0]}, "cu_seqlens [0]: give 0 and the end of each sequence"),
        (8, 2, {"cu_seqlens": []}, "cu_seqlens []: give 0"),
        (8, 2, {"padded_cu_seqlens": [4, 12]}, "padded_cu_seqlens starts at 4"),
        (8, 2, {"cu_seqlens": [0, 4, 8], "padded_cu_seqlens": [0, 12, 8]},
         "padded_cu_seqlens decreases from 12 to 8 at sequence 1"),
        (8, 2, {"padded_cu_seqlens": [0, 4, 8]},
         "padded_cu_seqlens has 3 entries, cu_seqlens 2: both need one entry"),
        (8, 2, {"cu_seqlens": [0, 4, 8], "padded_cu_seqlens": [0, 8, 8]},
         "padded_cu_seqlens gives sequence 1 0 positions, but it has 4 tokens: padding"),
        (8, 2, {"order": "spiral"}, "order 'spiral': use 'zigzag' or 'contiguous'"),
        (8, 0, {}, "context-parallel-size 0: use at least 1"),
        (0, 2, {}, "a row of 0 tokens cannot be sharded: use at least 1"),
    ],
)  # fmt: skip
def test_unsplittable_sequence_is_reported(length, size, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SequenceSharding.of(length, size, **options)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range_is_reported(rank):
    with pytest.raises(ValueError, match=f"rank {rank} of 2 context-parallel ranks"):
        SequenceSharding.of(8, 2).row_indices(rank)


def test_negative_halo_is_reported():
    with pytest.raises(ValueError, match="a halo of -1 tokens: use 0 or more"):
        SequenceSharding.of(8, 2).halo(-1)


def test_non_integer_cu_seqlens_are_reported():
    with pytest.raises(ValueError, match=r"cu_seqlens \[0, 4.9, 8\]"):
        SequenceSharding.of(8, 2, cu_seqlens=[0, 4.9, 8])

# SPDX-License-Identifier: Apache-2.0
"""Numbers of replicas against plain integers, and who is blamed for a difference."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing import TensorChunk
from megatron.training.failures import session_faults
from megatron.training.failures.session_faults import (
    Difference,
    differences,
    replica_sets,
    sum_weights,
    tensor_checksums,
    weighted_sums,
)


@pytest.fixture
def small_pieces(monkeypatch):
    """Have sums go over several pieces."""
    monkeypatch.setattr(session_faults, "CHUNK_ELEMENTS", 16)
    return sum_weights(torch.device("cpu"))


def signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sums_are_those_of_integers(small_pieces, dtype):
    values = torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)
    integers = values.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).tolist()
    join = session_faults._JOIN
    expected = []
    for weights in small_pieces:
        total = 0
        for start in range(0, 50, 16):
            pairs = zip(integers[start : start + 16], weights.tolist(), strict=False)
            total = total * join + sum(x * w for x, w in pairs)
        expected.append(signed(total))
    assert weighted_sums(values, small_pieces).tolist() == expected


def test_every_flipped_bit_and_every_swap_is_seen(small_pieces):
    values = torch.randn(40, generator=torch.Generator().manual_seed(2)).bfloat16()
    sound = weighted_sums(values, small_pieces)
    bits = values.view(torch.int16)
    for i in range(40):
        for bit in range(16):
            bits[i] ^= 1 << bit if bit < 15 else -(1 << 15)
            different = bool((weighted_sums(values, small_pieces) != sound).all())
            assert different, "both sums see it"
            bits[i] ^= 1 << bit if bit < 15 else -(1 << 15)
    for i in range(40):
        for j in range(i):
            if bits[i] != bits[j]:
                swapped = values.clone()
                swapped[[i, j]] = swapped[[j, i]]
                differs = bool((weighted_sums(swapped, small_pieces) != sound).any())
                assert differs
    equal = bool((weighted_sums(values, small_pieces) == sound).all())
    assert equal


def test_numbers_tell_minus_zero_and_shapes_of_nothing():
    zero = torch.zeros(3)
    minus, empty = -zero, torch.empty(0)
    numbers = tensor_checksums([zero, minus, zero.clone(), empty])
    assert numbers[0] == numbers[2]
    assert len(set(numbers)) == 3
    assert all(-(1 << 63) <= n < 1 << 63 for n in numbers)


def chunk(name, ranks, *, at=0, rows=2):
    return TensorChunk(
        name=name, shape=(4, 3), offsets=(at, 0), tensor=torch.zeros(rows, 3), replica_ranks=ranks
    )


def test_sets_are_in_one_order_whatever_else_a_rank_holds():
    mine = [chunk("b", (0, 1)), chunk("a", (0, 1), at=2), chunk("a", (0, 1)), chunk("c", (0, 2))]
    theirs = [chunk("a", (0, 1), at=2), chunk("x", (1,)), chunk("b", (0, 1)), chunk("a", (0, 1))]
    here, there = replica_sets(mine), replica_sets(theirs)
    assert [held.ranks for held in here] == [(0, 1), (0, 2)]
    assert [held.start for held in here] == [0, 3]
    assert [held.ranks for held in there] == [(0, 1)]
    assert here[0].key == there[0].key
    assert here[0].layout == there[0].layout
    assert here[0].layout != replica_sets([chunk("a", (0, 1)), chunk("b", (0, 1))])[0].layout
    assert here[0].key != here[1].key


def test_differences_name_parts_and_put_equal_parties_together():
    (held,) = replica_sets(
        [chunk("a", (0, 1, 2)), chunk("b", (0, 1, 2), rows=4), chunk("c", (0, 1, 2), rows=4)]
    )
    numbers = {0: [9, 1, 2, 3], 1: [1, 2, 3], 2: [9, 9, 7, 2, 8]}
    found = differences([held], numbers, {0: 1, 1: 0, 2: 2})
    assert found == [Difference(((0, 1), (2,)), ("a (2 x 3 at [0, 0])", "c"))]


@pytest.mark.parametrize(
    ("parties", "blamed", "text"),
    [
        (((0, 1, 3), (2,)), (2,), "rank 2 on h2 differs from ranks 0, 1, 3 in w"),
        (
            ((1, 2, 4), (0,), (3,)),
            (0, 3),
            "rank 0 on h0, rank 3 on h3 differ from ranks 1, 2, 4 in w",
        ),
        (
            ((0,), (1,)),
            (0, 1),
            "rank 0 on h0 against rank 1 on h1 differ in w: one of them is wrong",
        ),
        (
            ((0, 2), (1, 3)),
            (0, 1, 2, 3),
            "rank 0 on h0, rank 2 on h2 against rank 1 on h1, rank 3 on h3 differ in w: one of "
            "them is wrong",
        ),
    ],
)
def test_minority_is_blamed_and_a_tie_is_reported(parties, blamed, text):
    found = Difference(parties, ("w",))
    assert found.blamed == blamed
    assert found.text(lambda rank: f"h{rank}") == text

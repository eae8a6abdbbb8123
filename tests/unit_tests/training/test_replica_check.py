# SPDX-License-Identifier: Apache-2.0
"""Checksums of replicas against integer arithmetic, and the ranks blamed for a difference."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing import TensorChunk
from megatron.training.fault_tolerance import replica_check
from megatron.training.fault_tolerance.replica_check import (
    Difference,
    differences,
    replica_sets,
    sum_weights,
    tensor_checksums,
    weighted_sums,
)


@pytest.fixture
def sum_weights_of_16(monkeypatch):
    """Sum in chunks of 16 elements, so that tensors have several chunks."""
    monkeypatch.setattr(replica_check, "CHUNK_ELEMENTS", 16)
    return sum_weights(torch.device("cpu"))


def signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weighted_sums_match_integer_arithmetic(sum_weights_of_16, dtype):
    values = torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)
    integers = values.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).tolist()
    join = replica_check._JOIN
    expected = []
    for weights in sum_weights_of_16:
        total = 0
        for start in range(0, 50, 16):
            pairs = zip(integers[start : start + 16], weights.tolist(), strict=False)
            total = total * join + sum(x * w for x, w in pairs)
        expected.append(signed(total))
    assert weighted_sums(values, sum_weights_of_16).tolist() == expected


def test_weighted_sums_detect_every_bit_flip_and_swap(sum_weights_of_16):
    values = torch.randn(40, generator=torch.Generator().manual_seed(2)).bfloat16()
    original = weighted_sums(values, sum_weights_of_16)
    bits = values.view(torch.int16)
    for i in range(40):
        for bit in range(16):
            bits[i] ^= 1 << bit if bit < 15 else -(1 << 15)
            different = bool((weighted_sums(values, sum_weights_of_16) != original).all())
            assert different, "both sums change"
            bits[i] ^= 1 << bit if bit < 15 else -(1 << 15)
    for i in range(40):
        for j in range(i):
            if bits[i] != bits[j]:
                swapped = values.clone()
                swapped[[i, j]] = swapped[[j, i]]
                differs = bool((weighted_sums(swapped, sum_weights_of_16) != original).any())
                assert differs
    equal = bool((weighted_sums(values, sum_weights_of_16) == original).all())
    assert equal


def test_checksums_distinguish_minus_zero_and_empty_tensors():
    zero = torch.zeros(3)
    minus, empty = -zero, torch.empty(0)
    checksums = tensor_checksums([zero, minus, zero.clone(), empty])
    assert checksums[0] == checksums[2]
    assert len(set(checksums)) == 3
    assert all(-(1 << 63) <= n < 1 << 63 for n in checksums)


def chunk(name, ranks, *, at=0, rows=2):
    return TensorChunk(
        name=name, shape=(4, 3), offsets=(at, 0), tensor=torch.zeros(rows, 3), replica_ranks=ranks
    )


def test_replica_sets_have_the_same_order_on_every_rank():
    rank0_chunks = [
        chunk("b", (0, 1)),
        chunk("a", (0, 1), at=2),
        chunk("a", (0, 1)),
        chunk("c", (0, 2)),
    ]
    rank1_chunks = [
        chunk("a", (0, 1), at=2),
        chunk("x", (1,)),
        chunk("b", (0, 1)),
        chunk("a", (0, 1)),
    ]
    rank0_sets, rank1_sets = replica_sets(rank0_chunks), replica_sets(rank1_chunks)
    assert [replica_set.ranks for replica_set in rank0_sets] == [(0, 1), (0, 2)]
    assert [replica_set.start for replica_set in rank0_sets] == [0, 3]
    assert [replica_set.ranks for replica_set in rank1_sets] == [(0, 1)]
    assert rank0_sets[0].key == rank1_sets[0].key
    assert rank0_sets[0].layout == rank1_sets[0].layout
    assert rank0_sets[0].layout != replica_sets([chunk("a", (0, 1)), chunk("b", (0, 1))])[0].layout
    assert rank0_sets[0].key != rank0_sets[1].key


def test_differences_name_tensors_and_group_equal_ranks():
    (replica_set,) = replica_sets(
        [chunk("a", (0, 1, 2)), chunk("b", (0, 1, 2), rows=4), chunk("c", (0, 1, 2), rows=4)]
    )
    checksums = {0: [9, 1, 2, 3], 1: [1, 2, 3], 2: [9, 9, 7, 2, 8]}
    actual = differences([replica_set], checksums, {0: 1, 1: 0, 2: 2})
    assert actual == [Difference(((0, 1), (2,)), ("a (2 x 3 at [0, 0])", "c"))]


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
    difference = Difference(parties, ("w",))
    assert difference.blamed == blamed
    assert difference.text(lambda rank: f"h{rank}") == text

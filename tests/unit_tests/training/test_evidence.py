# SPDX-License-Identifier: Apache-2.0
"""What ranks keep of a computation: bits that see every flip, and the stage that began it."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.training.failures.replay import (
    Checksum,
    Digest,
    Evidence,
    StageChecksums,
    anomalous_ranks,
    differing_ranks,
)

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")


def bits_of(*flats: torch.Tensor) -> tuple[int, float]:
    checksum = Checksum(CPU)
    for flat in flats:
        checksum.show(flat)
    return int(checksum.sum), float(checksum.norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 12])
def test_every_flipped_bit_of_every_gradient_changes_the_sum(dtype, size):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(dtype)
    before, norm = bits_of(flat)
    assert norm == pytest.approx(float(flat.double().norm()), rel=1e-6)
    words = flat.view(torch.int32 if dtype is torch.float32 else torch.int16)
    width = 8 * flat.element_size()
    for index in range(size):
        for bit in range(width):
            mask = 1 << bit if bit < width - 1 else -(1 << bit)
            words[index] ^= mask
            assert bits_of(flat)[0] != before, (index, bit)
            words[index] ^= mask
            assert bits_of(flat)[0] == before


def test_gradient_checksum_adds_buckets_and_resets_each_step():
    one, other = torch.randn(5), torch.randn(8)
    both = bits_of(one)[0] + bits_of(other)[0]
    assert (bits_of(one, other)[0] - both) % 2**64 == 0
    checksum = Checksum(CPU)
    checksum.show(one)
    checksum.begin()
    checksum.show(other)
    assert (int(checksum.sum), float(checksum.norm)) == bits_of(other)


@pytest.mark.parametrize(("bad", "shown"), [(NAN, NAN), (INF, INF), (-INF, INF)])
def test_a_gradient_that_is_not_finite_shows(bad, shown):
    flat = torch.ones(9)
    flat[4] = bad
    norm = bits_of(torch.ones(3), flat, torch.ones(3))[1]
    assert norm == shown or (math.isnan(norm) and math.isnan(shown))


def test_what_is_gathered_is_read_again():
    checksum, stage = Checksum(CPU), StageChecksums(CPU, 2)
    checksum.show(torch.tensor([-3.0, 4.0]))
    checksum.show(torch.tensor([2.0]))
    stage.show(0, None, torch.full((2, 2), -3.0))
    stage.show(1, torch.ones(4), torch.tensor(7.0))
    row = torch.stack([torch.tensor(0.5).double(), *checksum.numbers(), *stage.numbers()]).tolist()
    found = Evidence.of(row)
    assert found.loss == 0.5
    assert found.gradients == Digest(int(checksum.sum), 7.0)
    assert [(a.norm, b.norm) for a, b in found.chunks] == [(0.0, 6.0), (2.0, 7.0)]
    assert found.chunks[0][0] == Digest()
    stage.begin()
    assert not any(float(number) for number in stage.numbers())


def chain(*ends: tuple[float, float], stages: int, loss: float = 1.0) -> list[Evidence]:
    """Return what the ranks of one pipeline have of its parts, given (received, sent) by part."""
    parts = [(Digest(hash(a), a), Digest(hash(b), b)) for a, b in ends]
    return [
        Evidence(loss if rank == stages - 1 else 0.0, Digest(5), tuple(parts[rank::stages]))
        for rank in range(stages)
    ]


GOOD = ((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0))


@pytest.mark.parametrize("stages", [4, 2])
@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (((0.0, 9.0), (9.0, 8.0), (8.0, 7.0), (7.0, 6.0)), 0),
        (((0.0, 1.0), (1.0, 9.0), (9.0, 7.0), (7.0, 6.0)), 1),
        (((0.0, 1.0), (1.0, 2.0), (2.0, 9.0), (9.0, 6.0)), 2),
        (((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 6.0)), 3),
    ],
)
def test_stage_with_different_activations_is_named(bad, part, stages):
    """Also one that comes again with its second chunk, whose input is wrong by then."""
    one, other = chain(*bad, stages=stages, loss=6.0), chain(*GOOD, stages=stages, loss=4.0)
    assert differing_ranks(one, other, pipelines=[range(stages)]) == (part % stages,)
    assert differing_ranks(one, other) == (stages - 1,), "the loss alone names the last"
    assert differing_ranks(one, one, pipelines=[range(stages)]) == ()


def test_transfer_error_names_both_stages_and_backward_names_all():
    other = chain(*GOOD, stages=4)
    lost = chain((0.0, 1.0), (1.0, 2.0), (9.0, 8.0), (8.0, 6.0), stages=4, loss=6.0)
    assert differing_ranks(lost, other, pipelines=[range(4)]) == (1, 2)
    backward = [*other[:1], Evidence(0.0, Digest(6), other[1].chunks), *other[2:]]
    assert differing_ranks(backward, other, pipelines=[range(4)]) == (0, 1, 2, 3)


def test_first_stage_sending_nan_is_named_per_pipeline():
    ranks = [[0, 2, 4], [1, 3, 5]]
    sound = chain((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), stages=3)
    nan = chain((0.0, 1.0), (1.0, NAN), (NAN, NAN), stages=3, loss=NAN)
    rows = [row for pair in zip(sound, nan, strict=True) for row in pair]
    assert anomalous_ranks(rows, INF, pipelines=ranks) == (3,)
    assert anomalous_ranks(rows, INF) == (5,)

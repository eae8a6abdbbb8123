# SPDX-License-Identifier: Apache-2.0
"""Evidence of a computation: checksums that detect every bit flip, and the stage at fault."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.training.fault_tolerance.replay import (
    Checksum,
    Digest,
    Evidence,
    StageChecksums,
    anomalous_ranks,
    differing_ranks,
)

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")


def checksum_of(*flats: torch.Tensor) -> tuple[int, float]:
    checksum = Checksum(CPU)
    for flat in flats:
        checksum.show(flat)
    return int(checksum.sum), float(checksum.norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 12])
def test_every_flipped_gradient_bit_changes_the_checksum(dtype, size):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(dtype)
    before, norm = checksum_of(flat)
    assert norm == pytest.approx(float(flat.double().norm()), rel=1e-6)
    words = flat.view(torch.int32 if dtype is torch.float32 else torch.int16)
    width = 8 * flat.element_size()
    for index in range(size):
        for bit in range(width):
            mask = 1 << bit if bit < width - 1 else -(1 << bit)
            words[index] ^= mask
            assert checksum_of(flat)[0] != before, (index, bit)
            words[index] ^= mask
            assert checksum_of(flat)[0] == before


def test_gradient_checksum_adds_buckets_and_resets_each_step():
    bucket0, bucket1 = torch.randn(5), torch.randn(8)
    total = checksum_of(bucket0)[0] + checksum_of(bucket1)[0]
    assert (checksum_of(bucket0, bucket1)[0] - total) % 2**64 == 0
    checksum = Checksum(CPU)
    checksum.show(bucket0)
    checksum.begin()
    checksum.show(bucket1)
    assert (int(checksum.sum), float(checksum.norm)) == checksum_of(bucket1)


@pytest.mark.parametrize(("gradient", "expected"), [(NAN, NAN), (INF, INF), (-INF, INF)])
def test_non_finite_gradient_makes_the_norm_non_finite(gradient, expected):
    flat = torch.ones(9)
    flat[4] = gradient
    norm = checksum_of(torch.ones(3), flat, torch.ones(3))[1]
    assert norm == expected or (math.isnan(norm) and math.isnan(expected))


def test_evidence_is_rebuilt_from_gathered_numbers():
    checksum, stage = Checksum(CPU), StageChecksums(CPU, 2)
    checksum.show(torch.tensor([-3.0, 4.0]))
    checksum.show(torch.tensor([2.0]))
    stage.show(0, None, torch.full((2, 2), -3.0))
    stage.show(1, torch.ones(4), torch.tensor(7.0))
    row = torch.stack([torch.tensor(0.5).double(), *checksum.numbers(), *stage.numbers()]).tolist()
    evidence = Evidence.of(row)
    assert evidence.loss == 0.5
    assert evidence.gradients == Digest(int(checksum.sum), 7.0)
    assert [(a.norm, b.norm) for a, b in evidence.chunks] == [(0.0, 6.0), (2.0, 7.0)]
    assert evidence.chunks[0][0] == Digest()
    stage.begin()
    assert not any(float(number) for number in stage.numbers())


def pipeline_evidence(*ends: tuple[float, float], stages: int, loss: float = 1.0) -> list[Evidence]:
    """Return the evidence of each rank of a pipeline, from (received, sent) norms by chunk."""
    chunks = [(Digest(hash(a), a), Digest(hash(b), b)) for a, b in ends]
    return [
        Evidence(loss if rank == stages - 1 else 0.0, Digest(5), tuple(chunks[rank::stages]))
        for rank in range(stages)
    ]


VALID_ENDS = ((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0))


@pytest.mark.parametrize("stages", [4, 2])
@pytest.mark.parametrize(
    ("ends", "chunk"),
    [
        (((0.0, 9.0), (9.0, 8.0), (8.0, 7.0), (7.0, 6.0)), 0),
        (((0.0, 1.0), (1.0, 9.0), (9.0, 7.0), (7.0, 6.0)), 1),
        (((0.0, 1.0), (1.0, 2.0), (2.0, 9.0), (9.0, 6.0)), 2),
        (((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 6.0)), 3),
    ],
)
def test_stage_with_different_activations_is_named(ends, chunk, stages):
    """Two stages hold two chunks each, so the stage's second chunk has a wrong input as well."""
    changed, valid = (
        pipeline_evidence(*ends, stages=stages, loss=6.0),
        pipeline_evidence(*VALID_ENDS, stages=stages, loss=4.0),
    )
    assert differing_ranks(changed, valid, pipelines=[range(stages)]) == (chunk % stages,)
    assert differing_ranks(changed, valid) == (stages - 1,), "the loss alone names the last stage"
    assert differing_ranks(changed, changed, pipelines=[range(stages)]) == ()


def test_transfer_error_names_both_stages_and_backward_names_all():
    valid = pipeline_evidence(*VALID_ENDS, stages=4)
    corrupted = pipeline_evidence(
        (0.0, 1.0), (1.0, 2.0), (9.0, 8.0), (8.0, 6.0), stages=4, loss=6.0
    )
    assert differing_ranks(corrupted, valid, pipelines=[range(4)]) == (1, 2)
    backward = [*valid[:1], Evidence(0.0, Digest(6), valid[1].chunks), *valid[2:]]
    assert differing_ranks(backward, valid, pipelines=[range(4)]) == (0, 1, 2, 3)


def test_first_stage_sending_nan_is_named_per_pipeline():
    ranks = [[0, 2, 4], [1, 3, 5]]
    valid = pipeline_evidence((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), stages=3)
    nan = pipeline_evidence((0.0, 1.0), (1.0, NAN), (NAN, NAN), stages=3, loss=NAN)
    rows = [row for pair in zip(valid, nan, strict=True) for row in pair]
    assert anomalous_ranks(rows, INF, pipelines=ranks) == (3,)
    assert anomalous_ranks(rows, INF) == (5,)

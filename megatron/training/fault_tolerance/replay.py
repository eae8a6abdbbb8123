# SPDX-License-Identifier: Apache-2.0
"""Reruns of anomalous steps from the same weights and data, with bitwise comparison.

Dropout has no state and the weights have not changed, so sound hardware reproduces every bit.
Counters that forwards advance are restored before a rerun. Every rank records evidence of each
computation (`Evidence`): its contribution to the loss, and a checksum of its gradients before the
reduction. A pipeline stage also records checksums of the activations that it received and sent,
which identify the stage where an error of the forward began. Evidence is gathered only after an
anomaly, or when steps are compared at an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.comm import all_gather
from megatron.core.distributed import DataParallel
from megatron.core.process_groups import Group
from megatron.training.hooks import AnomalyKind, StepAnomaly, Verdict


class Checksum:
    """Checksum of tensors' bits, and sum of their norms; without device synchronization.

    The checksum is a sum of integers modulo 2⁶⁴, so any single flipped bit changes it.
    """

    def __init__(self, device: torch.device) -> None:
        self.sum = torch.zeros((), dtype=torch.int64, device=device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)

    def begin(self) -> None:
        """Reset the checksum."""
        self.sum.zero_()
        self.norm.zero_()

    @torch.no_grad()
    def show(self, flat: torch.Tensor) -> None:
        """Add a flat tensor to the checksum."""
        per_word = 8 // flat.element_size()
        num_paired = flat.numel() // per_word * per_word
        # Summing 64-bit words avoids a wider copy; the tail has no full word.
        words = flat[:num_paired].view(torch.int64)
        tail = flat[num_paired:].view({4: torch.int32, 2: torch.int16}[flat.element_size()])
        self.sum += words.sum() + tail.sum()
        # A norm propagates NaN and Inf like a maximum, in an eighth of its time on a CPU.
        self.norm += torch.linalg.vector_norm(flat, dtype=torch.float32)

    def numbers(self) -> list[torch.Tensor]:
        """Return the fp64 scalars that `Digest.of` reads; each holds half a checksum exactly."""
        scalars = (self.sum >> 32, self.sum & 0xFFFFFFFF, self.norm)
        return [scalar.double() for scalar in scalars]


class StageChecksums:
    """Checksums of the activations that a pipeline stage receives and sends in the forward.

    Args:
        device: device of the activations.
        chunks: number of model chunks of this rank.
    """

    def __init__(self, device: torch.device, chunks: int) -> None:
        self._chunks = [(Checksum(device), Checksum(device)) for _ in range(chunks)]

    def begin(self) -> None:
        """Reset the checksums."""
        for checksum in (checksum for pair in self._chunks for checksum in pair):
            checksum.begin()

    def show(self, chunk: int, received: torch.Tensor | None, sent: torch.Tensor) -> None:
        """Add a microbatch's received and sent activation; the last stage sends the loss."""
        into, out = self._chunks[chunk]
        if received is not None:
            into.show(received.detach().reshape(-1))
        out.show(sent.detach().reshape(-1))

    def numbers(self) -> list[torch.Tensor]:
        """Return the scalars of every chunk, received and sent."""
        return [x for pair in self._chunks for checksum in pair for x in checksum.numbers()]


@dataclass(frozen=True)
class Digest:
    """Checksum of the bits and sum of the norms of some tensors."""

    checksum: int = 0
    norm: float = 0.0

    @staticmethod
    def of(numbers: Iterator[float]) -> Digest:
        """Parse the numbers of one `Checksum`."""
        return Digest((int(next(numbers)) << 32) + int(next(numbers)), next(numbers))

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return math.isfinite(self.norm)


@dataclass(frozen=True)
class Evidence:
    """Evidence of one rank on one computation of a step.

    Args:
        loss: the rank's contribution to the loss.
        gradients: digest of the rank's gradients before the reduction.
        chunks: digests of (received, sent) activations of each chunk of a pipeline stage.
    """

    loss: float
    gradients: Digest
    chunks: tuple[tuple[Digest, Digest], ...] = ()

    @staticmethod
    def of(row: Sequence[float]) -> Evidence:
        """Parse a loss and the numbers of each `Checksum`."""
        numbers = iter(row[1:])
        gradients, num_chunks = Digest.of(numbers), (len(row) - 4) // 6
        chunks = tuple((Digest.of(numbers), Digest.of(numbers)) for _ in range(num_chunks))
        return Evidence(row[0], gradients, chunks)


EvidenceByRank = Sequence[Evidence]


def _same(first_loss: float, second_loss: float) -> bool:
    return first_loss == second_loss or (math.isnan(first_loss) and math.isnan(second_loss))


def differing_ranks(
    before: EvidenceByRank, after: EvidenceByRank, *, pipelines: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Return the ranks that differ between two computations, in the loss or else in gradients.

    Args:
        pipelines: see `narrow_to_stages`.
    """
    pairs = list(enumerate(zip(before, after, strict=True)))
    ranks = [rank for rank, (a, b) in pairs if not _same(a.loss, b.loss)]
    ranks = ranks or [
        rank for rank, (a, b) in pairs if a.gradients.checksum != b.gradients.checksum
    ]

    def changed(rank: int, chunk: int, end: int) -> bool:
        return before[rank].chunks[chunk][end].checksum != after[rank].chunks[chunk][end].checksum

    return narrow_to_stages(ranks, pipelines, before, changed)


def anomalous_ranks(
    evidence: EvidenceByRank, loss_share: float, *, pipelines: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Return the ranks with the anomaly of a computation.

    The first of these rules that matches any rank applies: the rank's loss is not finite; its
    gradients are not finite; its loss is above `loss_share`. If none matches, the anomaly is only
    in sums over ranks, and all ranks are returned.

    Args:
        pipelines: see `narrow_to_stages`.
    """

    def bad(rank: int, chunk: int, end: int) -> bool:
        return not evidence[rank].chunks[chunk][end].is_finite

    tests: Sequence[Callable[[Evidence], bool]] = (
        lambda rank_evidence: not math.isfinite(rank_evidence.loss),
        lambda rank_evidence: not rank_evidence.gradients.is_finite,
        lambda rank_evidence: rank_evidence.loss > loss_share,
    )
    for test in tests:
        if ranks := [rank for rank, rank_evidence in enumerate(evidence) if test(rank_evidence)]:
            return narrow_to_stages(ranks, pipelines, evidence, bad)
    return tuple(range(len(evidence)))


def narrow_to_stages(
    ranks: Sequence[int],
    pipelines: Sequence[Sequence[int]],
    evidence: EvidenceByRank,
    wrong: Callable[[int, int, int], bool],
) -> tuple[int, ...]:
    """Replace ranks of a pipeline by the stage where the error began, or by all of its stages.

    All stages remain if the first wrong stage is unknown, as for an error in the backward.

    Args:
        pipelines: the ranks of each pipeline, by stage; empty with one stage.
        evidence: evidence by rank.
        wrong: whether the activation that a chunk of a rank received (0) or sent (1) is wrong.
    """
    if not pipelines:
        return tuple(ranks)
    suspects: set[int] = set()
    for stages in (stages for stages in pipelines if {*stages} & {*ranks}):
        # (rank, chunk) in the order of the forward.
        stage_chunks = [
            (r, chunk) for chunk in range(len(evidence[stages[0]].chunks)) for r in stages
        ]
        first_wrong = next(
            (i for i, stage_chunk in enumerate(stage_chunks) if wrong(*stage_chunk, 1)), None
        )
        if first_wrong is None:
            suspects |= {*stages}
            continue
        rank, chunk = stage_chunks[first_wrong]
        # If the received activation is wrong but the sent one was right, the error is in transit.
        suspects |= {rank, stage_chunks[first_wrong - 1][0]} if wrong(rank, chunk, 0) else {rank}
    return tuple(sorted(suspects))


@dataclass(frozen=True)
class RerunPolicy:
    """When and how a step is recomputed.

    Args:
        mode: never; after an anomaly; or after an anomaly and at an interval.
        interval: steps between comparisons, counted from the start of the process.
        counters: tensors that training forwards add to; a rerun must not count twice.
        stage: checksums of a pipeline stage's activations; None with one stage.
        forget: resets state that a computation leaves in the model, in addition to counters.
    """

    mode: Literal["disabled", "validate_results", "report_determinism_stats"] = "disabled"
    interval: int = 1
    counters: Sequence[torch.Tensor] = ()
    stage: StageChecksums | None = None
    forget: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class StepComputation:
    """The result of one computation of a step; only `local_loss` differs between ranks.

    Args:
        loss: mean loss of the step.
        control_flags: the ranks' control flags, summed.
        local_loss: this rank's contribution to the loss, fp64, including the loss scale.
        kind: the anomaly; None for a sound step.
        norm: gradient norm before clipping, including the loss scale; NaN if not computed.
    """

    loss: float
    control_flags: tuple[float, ...]
    local_loss: torch.Tensor
    kind: AnomalyKind | None = None
    norm: float = math.nan

    @property
    def value(self) -> float:
        """Return the value that `kind` refers to."""
        return self.norm if self.kind == "inf_norm" else self.loss


class Replayer:
    """Computes steps, and recomputes anomalous steps.

    Args:
        rerun_policy: when to recompute a step.
        engine: the data-parallel engine, whose gradients are digested.
        world: all ranks.
        pipelines: the ranks of each pipeline, by stage; empty with one stage.

    Attributes:
        compared, differed: number of steps that were recomputed without an anomaly, and number of
            these steps with different bits.
        checksum: checksum of this rank's gradients in the last computation.
    """

    def __init__(
        self,
        rerun_policy: RerunPolicy,
        *,
        engine: DataParallel,
        world: Group,
        pipelines: Sequence[Sequence[int]] = (),
    ) -> None:
        self.rerun_policy, self._world = rerun_policy, world
        self._pipelines = pipelines if rerun_policy.stage is not None else ()
        self.compared = self.differed = self._steps = 0
        self.checksum = Checksum(engine.store.device)
        if rerun_policy.mode != "disabled":
            engine.observe_gradients(self.checksum)

    def run(
        self, compute: Callable[[], StepComputation], *, loss_share: float = math.inf
    ) -> tuple[StepComputation, StepAnomaly | None]:
        """Return the last computation, which the step uses, and its anomaly, if any.

        Args:
            compute: runs forward and backward and classifies the result.
            loss_share: a rank's contribution to the loss above this is large.
        """
        mode = self.rerun_policy.mode
        saved_counters = (
            [counter.clone() for counter in self.rerun_policy.counters]
            if mode != "disabled"
            else []
        )
        self._steps += 1
        is_compared = (
            mode == "report_determinism_stats" and self._steps % self.rerun_policy.interval == 0
        )
        computations, evidence = [self._computed(compute)], []
        if not is_compared and computations[0].kind is None:
            return computations[0], None
        evidence.append(self._evidence(computations[0]))
        if mode == "disabled":
            return computations[0], self._find_anomaly(computations, evidence, loss_share)

        def recompute() -> None:
            for counter, before in zip(self.rerun_policy.counters, saved_counters, strict=True):
                counter.copy_(before)
            self.rerun_policy.forget()
            computations.append(self._computed(compute))
            evidence.append(self._evidence(computations[-1]))

        recompute()
        if is_compared and differing_ranks(*evidence):
            recompute()
        if is_compared:
            self.compared += 1
            self.differed += len(computations) > 2
        return computations[-1], self._find_anomaly(computations, evidence, loss_share)

    def stats(self) -> tuple[dict[str, float], str | None]:
        """Return the counts of compared and different steps, as numbers and as a line; empty unless
        the mode compares steps."""
        if self.rerun_policy.mode != "report_determinism_stats":
            return {}, None
        numbers = {"steps_compared": float(self.compared), "steps_differed": float(self.differed)}
        line = f"{self.compared} steps were computed twice, {self.differed} differed"
        return numbers, f"determinism: {line}"

    def _computed(self, compute: Callable[[], StepComputation]) -> StepComputation:
        if self.rerun_policy.stage is not None:
            self.rerun_policy.stage.begin()
        return compute()

    def _evidence(self, computation: StepComputation) -> list[Evidence]:
        """Gather the evidence of every rank on the last computation."""
        stage_numbers = [] if self.rerun_policy.stage is None else self.rerun_policy.stage.numbers()
        numbers = torch.stack([computation.local_loss, *self.checksum.numbers(), *stage_numbers])
        return [Evidence.of(row) for row in all_gather(numbers[None], self._world).tolist()]

    def _find_anomaly(
        self,
        computations: Sequence[StepComputation],
        evidence: Sequence[EvidenceByRank],
        loss_share: float,
    ) -> StepAnomaly | None:
        return find_anomaly(
            computations, evidence, loss_share=loss_share, pipelines=self._pipelines
        )


def find_anomaly(
    computations: Sequence[StepComputation],
    evidence: Sequence[EvidenceByRank],
    *,
    loss_share: float,
    pipelines: Sequence[Sequence[int]] = (),
) -> StepAnomaly | None:
    """Return the anomaly that the computations of a step show; the step uses the last one.

    Args:
        evidence: evidence of every rank, by computation.
        loss_share: a rank's contribution to the loss above this is large.
        pipelines: the ranks of each pipeline, by stage; empty with one stage.
    """
    last_computation, values = (
        computations[-1],
        tuple(computation.value for computation in computations),
    )
    kinds = [computation.kind for computation in computations if computation.kind is not None]
    if len(computations) == 1:
        assert last_computation.kind is not None
        return StepAnomaly(
            last_computation.kind,
            "unchecked",
            anomalous_ranks(evidence[0], loss_share, pipelines=pipelines),
            values,
        )
    agrees = not differing_ranks(evidence[-2], evidence[-1])
    if last_computation.kind is not None:
        first_suspicious = next(
            i for i, computation in enumerate(computations) if computation.kind is not None
        )
        ranks = anomalous_ranks(evidence[first_suspicious], loss_share, pipelines=pipelines)
        return StepAnomaly(kinds[0], "reproduced", ranks, values, same=agrees)
    if not kinds and len(computations) == 2:
        return None  # compared, and equal
    outlier = next(
        (i for i, by_rank in enumerate(evidence[:-1]) if differing_ranks(by_rank, evidence[-1])),
        0,
    )
    ranks = differing_ranks(
        evidence[outlier], evidence[-1], pipelines=pipelines
    ) or anomalous_ranks(evidence[outlier], loss_share, pipelines=pipelines)
    has_majority = len(computations) == 2 or any(
        not differing_ranks(by_rank, evidence[-1]) for by_rank in evidence[:-1]
    )
    verdict: Verdict = "transient" if has_majority else "undecided"
    return StepAnomaly(kinds[0] if kinds else "determinism", verdict, ranks, values, same=agrees)

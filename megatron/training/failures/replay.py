# SPDX-License-Identifier: Apache-2.0
"""A suspicious step is computed again from the same weights and data, and the bits are compared.

Dropout has no state and weights have not changed, so equal hardware gives equal bits; counters that
forwards advance are reset before. Every rank keeps evidence of each computation (`Evidence`), which
is gathered only when something is wrong, or when steps are compared anyway: its share of the loss
and the bits of its own gradients, before they are reduced. A pipeline stage also keeps the bits of
the activations that it received and sent, which separate the stage where an error of the forward
began from those that only passed it on.
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


class Bits:
    """Checksum of bits, and sum of norms, of tensors; without device synchronization.

    Any single flipped bit changes the sum, as it is taken modulo 2⁶⁴ over integers.
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
        # As 64-bit words no wider copy is made; the last ones have nothing to pair with.
        words = flat[:num_paired].view(torch.int64)
        tail = flat[num_paired:].view({4: torch.int32, 2: torch.int16}[flat.element_size()])
        self.sum += words.sum() + tail.sum()
        # Not the largest element: NaN or Inf shows as well, in an eighth of the time on a CPU.
        self.norm += torch.linalg.vector_norm(flat, dtype=torch.float32)

    def numbers(self) -> list[torch.Tensor]:
        """Return what `Digest.of` reads, as fp64 scalars, which hold half a sum exactly."""
        scalars = (self.sum >> 32, self.sum & 0xFFFFFFFF, self.norm)
        return [scalar.double() for scalar in scalars]


class StageBits:
    """The activations that a pipeline's stage receives and sends in the forward, by chunk.

    Args:
        device: where they are.
        chunks: of this rank.
    """

    def __init__(self, device: torch.device, chunks: int) -> None:
        self._chunks = [(Bits(device), Bits(device)) for _ in range(chunks)]

    def begin(self) -> None:
        """Reset the checksum."""
        for bits in (bits for pair in self._chunks for bits in pair):
            bits.begin()

    def show(self, chunk: int, received: torch.Tensor | None, sent: torch.Tensor) -> None:
        """Look at what a microbatch brings to a chunk and takes from it, at the end its loss."""
        into, out = self._chunks[chunk]
        if received is not None:
            into.show(received.detach().reshape(-1))
        out.show(sent.detach().reshape(-1))

    def numbers(self) -> list[torch.Tensor]:
        """Return those of every chunk, received and sent."""
        return [x for pair in self._chunks for bits in pair for x in bits.numbers()]


@dataclass(frozen=True)
class Digest:
    """Checksum of the bits and sum of the norms of some tensors."""

    bits: int = 0
    norm: float = 0.0

    @staticmethod
    def of(numbers: Iterator[float]) -> Digest:
        """Read one from numbers of `Bits`."""
        return Digest((int(next(numbers)) << 32) + int(next(numbers)), next(numbers))

    @property
    def sound(self) -> bool:
        """Whether all elements are finite."""
        return math.isfinite(self.norm)


@dataclass(frozen=True)
class Evidence:
    """Evidence of one rank on one computation of a step.

    Args:
        loss: its part.
        gradients: its own.
        chunks: (received, sent) activations of each chunk of a pipeline's stage.
    """

    loss: float
    gradients: Digest
    chunks: tuple[tuple[Digest, Digest], ...] = ()

    @staticmethod
    def of(row: Sequence[float]) -> Evidence:
        """Read one from a loss and the numbers of `Bits`."""
        left = iter(row[1:])
        gradients, pairs = Digest.of(left), (len(row) - 4) // 6
        chunks = tuple((Digest.of(left), Digest.of(left)) for _ in range(pairs))
        return Evidence(row[0], gradients, chunks)


Rows = Sequence[Evidence]


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def differing(
    one: Rows, other: Rows, *, pipelines: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Return the ranks whose part of two computations differs: those with other losses, or if
    there are none, those with other gradients.

    Args:
        pipelines: see `narrowed`.
    """
    pairs = list(enumerate(zip(one, other, strict=True)))
    ranks = [rank for rank, (a, b) in pairs if not _same(a.loss, b.loss)]
    ranks = ranks or [rank for rank, (a, b) in pairs if a.gradients.bits != b.gradients.bits]

    def changed(rank: int, chunk: int, end: int) -> bool:
        return one[rank].chunks[chunk][end].bits != other[rank].chunks[chunk][end].bits

    return narrowed(ranks, pipelines, one, changed)


def showing(
    found: Rows, share: float, *, pipelines: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Return the ranks where a suspicious computation shows: a part of the loss that is not
    finite, or else gradients that are not, or else a part of the loss above `share`, or else, as it
    may be in a sum over ranks, all.

    Args:
        pipelines: see `narrowed`.
    """

    def bad(rank: int, chunk: int, end: int) -> bool:
        return not found[rank].chunks[chunk][end].sound

    tests: Sequence[Callable[[Evidence], bool]] = (
        lambda one: not math.isfinite(one.loss),
        lambda one: not one.gradients.sound,
        lambda one: one.loss > share,
    )
    for test in tests:
        if ranks := [rank for rank, one in enumerate(found) if test(one)]:
            return narrowed(ranks, pipelines, found, bad)
    return tuple(range(len(found)))


def narrowed(
    ranks: Sequence[int],
    pipelines: Sequence[Sequence[int]],
    rows: Rows,
    wrong: Callable[[int, int, int], bool],
) -> tuple[int, ...]:
    """Return in place of ranks of a pipeline the stage where it began, or if that is unknown,
    as in the backward, all of its stages.

    Args:
        pipelines: the ranks of each pipeline, by stage; none if there is one stage.
        rows: by rank.
        wrong: of a rank and its chunk, whether what it received (0) or sent (1) is wrong.
    """
    if not pipelines:
        return tuple(ranks)
    suspects: set[int] = set()
    for stages in (stages for stages in pipelines if {*stages} & {*ranks}):
        # The parts of the model in the order in which activations go through them.
        stage_chunks = [(r, chunk) for chunk in range(len(rows[stages[0]].chunks)) for r in stages]
        first_wrong = next(
            (i for i, stage_chunk in enumerate(stage_chunks) if wrong(*stage_chunk, 1)), None
        )
        if first_wrong is None:
            suspects |= {*stages}
            continue
        rank, chunk = stage_chunks[first_wrong]
        # What arrives otherwise than it was sent went wrong on the way.
        suspects |= {rank, stage_chunks[first_wrong - 1][0]} if wrong(rank, chunk, 0) else {rank}
    return tuple(sorted(suspects))


Kind = Literal["nan", "spike", "inf_norm", "determinism"]
Verdict = Literal["transient", "reproduced", "unchecked", "undecided"]


@dataclass(frozen=True)
class Reruns:
    """When a step is recomputed.

    Args:
        mode: never; if it is suspicious; or then and every few steps anyway.
        interval: of the latter, counted from the start of the process.
        counters: tensors that training forwards add to: a step counts once.
        stage: what looks at the activations of a pipeline's stage; None if there is one stage.
        forget: makes the model forget what a computation of the step has left in it, in addition
            to counters.
    """

    mode: Literal["disabled", "validate_results", "report_determinism_stats"] = "disabled"
    interval: int = 1
    counters: Sequence[torch.Tensor] = ()
    stage: StageBits | None = None
    forget: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Computed:
    """What one computation of a step gave: gradients are whole, the rest is equal on all ranks.

    Args:
        loss: the step's mean.
        votes: of all ranks, summed.
        own: what this rank added to the loss, fp64, loss scale included; its own.
        kind: what is suspicious about it; None if nothing is.
        norm: of the gradients, before clipping, loss scale included; NaN if it was not asked.
    """

    loss: float
    votes: tuple[float, ...]
    own: torch.Tensor
    kind: Kind | None = None
    norm: float = math.nan

    @property
    def value(self) -> float:
        """Return what tells whether it is suspicious."""
        return self.norm if self.kind == "inf_norm" else self.loss


@dataclass(frozen=True)
class Doubt:
    """An anomaly of a step, equal on every rank.

    Args:
        kind: what first made it suspicious.
        verdict: `transient` (computed again it is sound, and that was used), `reproduced` (it is
            suspicious again), `unchecked` (it was not computed again) or `undecided` (sound, but
            no two of three computations are equal).
        ranks: where it showed; all if only in sums over them.
        values: the loss of each computation, or its gradient norm if that is not finite.
        same: the last two computations agree in every bit that was kept, on every rank.
    """

    kind: Kind
    verdict: Verdict
    ranks: tuple[int, ...]
    values: tuple[float, ...]
    same: bool = False


class Replayer:
    """Computes steps, and recomputes suspicious ones.

    Args:
        reruns: when.
        engine: whose gradients are looked at.
        world: all ranks.
        pipelines: the ranks of each pipeline, by stage; none if there is one stage.

    Attributes:
        compared, differed: how many steps were computed twice without a suspicion, and in how many
            of them bits differed.
        bits: of this rank's gradients in the last computation.
    """

    def __init__(
        self,
        reruns: Reruns,
        *,
        engine: DataParallel,
        world: Group,
        pipelines: Sequence[Sequence[int]] = (),
    ) -> None:
        self.reruns, self._world = reruns, world
        self._pipelines = pipelines if reruns.stage is not None else ()
        self.compared = self.differed = self._steps = 0
        self.bits = Bits(engine.store.device)
        if reruns.mode != "disabled":
            engine.observe_gradients(self.bits)

    def run(
        self, compute: Callable[[], Computed], *, share: float = math.inf
    ) -> tuple[Computed, Doubt | None]:
        """Return the computation to go on with, the last one, and what was wrong, if anything.

        Args:
            compute: runs forward and backward and judges the result.
            share: of the loss above which a rank's part is large.
        """
        mode = self.reruns.mode
        saved_counters = (
            [counter.clone() for counter in self.reruns.counters] if mode != "disabled" else []
        )
        self._steps += 1
        compares = mode == "report_determinism_stats" and self._steps % self.reruns.interval == 0
        tries, seen = [self._computed(compute)], []
        if not compares and tries[0].kind is None:
            return tries[0], None
        seen.append(self._evidence(tries[0]))
        if mode == "disabled":
            return tries[0], self._doubt(tries, seen, share)

        def recompute() -> None:
            for counter, before in zip(self.reruns.counters, saved_counters, strict=True):
                counter.copy_(before)
            self.reruns.forget()
            tries.append(self._computed(compute))
            seen.append(self._evidence(tries[-1]))

        recompute()
        if compares and differing(*seen):
            recompute()
        if compares:
            self.compared += 1
            self.differed += len(tries) > 2
        return tries[-1], self._doubt(tries, seen, share)

    def stats(self) -> tuple[dict[str, float], str | None]:
        """Return how many steps were compared and differed, as numbers and as a line, if any
        were to be."""
        if self.reruns.mode != "report_determinism_stats":
            return {}, None
        numbers = {"steps_compared": float(self.compared), "steps_differed": float(self.differed)}
        line = f"{self.compared} steps were computed twice, {self.differed} differed"
        return numbers, f"determinism: {line}"

    def _computed(self, compute: Callable[[], Computed]) -> Computed:
        if self.reruns.stage is not None:
            self.reruns.stage.begin()
        return compute()

    def _evidence(self, found: Computed) -> list[Evidence]:
        """Gather the evidence of every rank on the last computation."""
        stage_numbers = [] if self.reruns.stage is None else self.reruns.stage.numbers()
        numbers = torch.stack([found.own, *self.bits.numbers(), *stage_numbers])
        return [Evidence.of(row) for row in all_gather(numbers[None], self._world).tolist()]

    def _doubt(self, tries: Sequence[Computed], seen: Sequence[Rows], share: float) -> Doubt | None:
        return doubt_of(tries, seen, share=share, pipelines=self._pipelines)


def doubt_of(
    tries: Sequence[Computed],
    seen: Sequence[Rows],
    *,
    share: float,
    pipelines: Sequence[Sequence[int]] = (),
) -> Doubt | None:
    """Return what the computations of a step show of it, the last one being that to go on with.

    Args:
        seen: what every rank has of each.
        share: of the loss above which a rank's part is large.
        pipelines: the ranks of each pipeline, by stage; none if there is one stage.
    """
    last, values = tries[-1], tuple(one.value for one in tries)
    kinds = [one.kind for one in tries if one.kind is not None]
    if len(tries) == 1:
        assert last.kind is not None
        return Doubt(last.kind, "unchecked", showing(seen[0], share, pipelines=pipelines), values)
    agrees = not differing(seen[-2], seen[-1])
    if last.kind is not None:
        first_suspicious = next(i for i, one in enumerate(tries) if one.kind is not None)
        ranks = showing(seen[first_suspicious], share, pipelines=pipelines)
        return Doubt(kinds[0], "reproduced", ranks, values, same=agrees)
    if not kinds and len(tries) == 2:
        return None  # compared, and equal
    outlier = next((i for i, one in enumerate(seen[:-1]) if differing(one, seen[-1])), 0)
    ranks = differing(seen[outlier], seen[-1], pipelines=pipelines) or showing(
        seen[outlier], share, pipelines=pipelines
    )
    settled = len(tries) == 2 or any(not differing(one, seen[-1]) for one in seen[:-1])
    verdict: Verdict = "transient" if settled else "undecided"
    return Doubt(kinds[0] if kinds else "determinism", verdict, ranks, values, same=agrees)

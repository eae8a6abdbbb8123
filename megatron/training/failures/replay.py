# SPDX-License-Identifier: Apache-2.0
"""A suspicious step is computed once more from the same weights and data, and the bits compared.

Of each computation every rank keeps its part of the loss, and of its own gradients, before they are
summed with others', a sum of their bits and the largest element. These few numbers are gathered
only when something is wrong, or when steps are compared anyway. Dropout has no state and weights
have not changed, so equal hardware gives equal bits; what forwards count is put back before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.comm import all_gather
from megatron.core.distributed import DataParallel
from megatron.core.process_groups import Group

Kind = Literal["nan", "spike", "inf_norm", "determinism"]
Verdict = Literal["transient", "reproduced", "unchecked", "undecided"]


@dataclass(frozen=True)
class Reruns:
    """When a step is computed again.

    Args:
        mode: never; if it is suspicious; or then and every few steps anyway.
        interval: of the latter, counted from the start of the process.
        counters: tensors that training forwards add to: a step counts once.
    """

    mode: Literal["disabled", "validate_results", "report_determinism_stats"] = "disabled"
    interval: int = 1
    counters: Sequence[torch.Tensor] = ()


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
    """What was wrong with a step, equal on every rank.

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


class GradientBits:
    """Sums the bits of what it is shown, and keeps the largest element; it reads no number back.

    Any single flipped bit changes the sum, as it is taken modulo 2⁶⁴ over integers.
    """

    def __init__(self, device: torch.device) -> None:
        self.sum = torch.zeros((), dtype=torch.int64, device=device)
        self.largest = torch.zeros((), dtype=torch.float32, device=device)

    def begin(self) -> None:
        """Forget what was shown."""
        self.sum.zero_()
        self.largest.zero_()

    @torch.no_grad()
    def show(self, flat: torch.Tensor) -> None:
        """Look at one more flat tensor of gradients."""
        per_word = 8 // flat.element_size()
        whole = flat.numel() // per_word * per_word
        # As 64-bit words no wider copy is made; the last ones have nothing to pair with.
        words = flat[:whole].view(torch.int64)
        rest = flat[whole:].view({4: torch.int32, 2: torch.int16}[flat.element_size()])
        self.sum += words.sum() + rest.sum()
        largest = torch.linalg.vector_norm(flat, math.inf).float()  # NaN if one is
        self.largest.copy_(torch.maximum(self.largest, largest))


@dataclass(frozen=True)
class Evidence:
    """What one rank has of one computation: its part of the loss, and its own gradients."""

    loss: float
    bits: int
    largest: float

    def equals(self, other: Evidence) -> bool:
        """Return whether both are the same, NaN being NaN."""
        return self.bits == other.bits and _same(self.loss, other.loss)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def differing(one: Sequence[Evidence], other: Sequence[Evidence]) -> tuple[int, ...]:
    """Return the ranks whose part of two computations differs: those with other losses, or if
    there are none, those with other gradients."""
    both = list(zip(one, other, strict=True))
    losses = tuple(r for r, (a, b) in enumerate(both) if not _same(a.loss, b.loss))
    return losses or tuple(r for r, (a, b) in enumerate(both) if not a.equals(b))


def showing(found: Sequence[Evidence], share: float) -> tuple[int, ...]:
    """Return the ranks where a suspicious computation shows: a part of the loss that is not
    finite, or else gradients that are not, or else a part of the loss above `share`, or else, as it
    may be in a sum over ranks, all."""
    for bad in (
        lambda one: not math.isfinite(one.loss),
        lambda one: not math.isfinite(one.largest),
        lambda one: one.loss > share,
    ):
        if ranks := tuple(rank for rank, one in enumerate(found) if bad(one)):
            return ranks
    return tuple(range(len(found)))


class Replayer:
    """Computes steps, some of them again.

    Args:
        reruns: when.
        engine: whose gradients are looked at.
        world: all ranks.

    Attributes:
        compared, differed: how many steps were computed twice without a suspicion, and in how many
            of them bits differed.
        bits: of this rank's gradients in the last computation.
    """

    def __init__(self, reruns: Reruns, *, engine: DataParallel, world: Group) -> None:
        self.reruns, self._world = reruns, world
        self.compared = self.differed = self._steps = 0
        self.bits = GradientBits(engine.store.device)
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
        kept = [counter.clone() for counter in self.reruns.counters] if mode != "disabled" else []
        self._steps += 1
        compares = mode == "report_determinism_stats" and self._steps % self.reruns.interval == 0
        first = compute()
        if not compares and first.kind is None:
            return first, None
        tries, seen = [first], [self._evidence(first)]
        if mode == "disabled":
            return first, doubt_of(tries, seen, share)

        def again() -> None:
            for counter, before in zip(self.reruns.counters, kept, strict=True):
                counter.copy_(before)
            tries.append(compute())
            seen.append(self._evidence(tries[-1]))

        again()
        if compares and differing(*seen):
            again()
        if compares:
            self.compared += 1
            self.differed += len(tries) > 2
        return tries[-1], doubt_of(tries, seen, share)

    def stats(self) -> tuple[dict[str, float], str | None]:
        """Return how many steps were compared and differed, as numbers and as a line, if any
        were to be."""
        if self.reruns.mode != "report_determinism_stats":
            return {}, None
        numbers = {"steps_compared": float(self.compared), "steps_differed": float(self.differed)}
        line = f"{self.compared} steps were computed twice, {self.differed} differed"
        return numbers, f"determinism: {line}"

    def _evidence(self, found: Computed) -> list[Evidence]:
        """Return what every rank of the world has of the last computation."""
        high, low = self.bits.sum >> 32, self.bits.sum & 0xFFFFFFFF  # fp64 holds either
        numbers = torch.stack([found.own, high.double(), low.double(), self.bits.largest.double()])
        rows = all_gather(numbers.view(1, 4), self._world).tolist()
        return [
            Evidence(loss, (int(high) << 32) + int(low), largest)
            for loss, high, low, largest in rows
        ]


def doubt_of(
    tries: Sequence[Computed], seen: Sequence[Sequence[Evidence]], share: float
) -> Doubt | None:
    """Return what the computations of a step say of it, the last one being that to go on with."""
    last, values = tries[-1], tuple(one.value for one in tries)
    kinds = [one.kind for one in tries if one.kind is not None]
    if len(tries) == 1:
        assert last.kind is not None
        return Doubt(last.kind, "unchecked", showing(seen[0], share), values)
    agrees = not differing(seen[-2], seen[-1])
    if last.kind is not None:
        first = next(i for i, one in enumerate(tries) if one.kind is not None)
        return Doubt(kinds[0], "reproduced", showing(seen[first], share), values, same=agrees)
    if not kinds and len(tries) == 2:
        return None  # compared, and equal
    odd = next((i for i, one in enumerate(seen[:-1]) if differing(one, seen[-1])), 0)
    ranks = differing(seen[odd], seen[-1]) or showing(seen[odd], share)
    settled = len(tries) == 2 or any(not differing(one, seen[-1]) for one in seen[:-1])
    verdict: Verdict = "transient" if settled else "undecided"
    return Doubt(kinds[0] if kinds else "determinism", verdict, ranks, values, same=agrees)

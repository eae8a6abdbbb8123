# SPDX-License-Identifier: Apache-2.0
"""What every rank keeps of one computation of a step, and which ranks two of them tell apart.

A rank keeps its part of the loss and the bits of its own gradients, before they are summed with
others'; as a stage of a pipeline also the bits of the activations that it received and sent, which
tell the stage where an error of the forward began from those that only passed it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch


class Bits:
    """Sums the bits of what it is shown, and its norms; it reads no number back.

    Any single flipped bit changes the sum, as it is taken modulo 2⁶⁴ over integers.
    """

    def __init__(self, device: torch.device) -> None:
        self.sum = torch.zeros((), dtype=torch.int64, device=device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)

    def begin(self) -> None:
        """Forget what was shown."""
        self.sum.zero_()
        self.norm.zero_()

    @torch.no_grad()
    def show(self, flat: torch.Tensor) -> None:
        """Look at one more flat tensor."""
        per_word = 8 // flat.element_size()
        whole = flat.numel() // per_word * per_word
        # As 64-bit words no wider copy is made; the last ones have nothing to pair with.
        words = flat[:whole].view(torch.int64)
        rest = flat[whole:].view({4: torch.int32, 2: torch.int16}[flat.element_size()])
        self.sum += words.sum() + rest.sum()
        # Not the largest element: NaN or Inf shows as well, in an eighth of the time on a CPU.
        self.norm += torch.linalg.vector_norm(flat, dtype=torch.float32)

    def numbers(self) -> list[torch.Tensor]:
        """Return what `Digest.of` reads, as fp64 scalars, which hold half a sum exactly."""
        parts = (self.sum >> 32, self.sum & 0xFFFFFFFF, self.norm)
        return [part.double() for part in parts]


class StageBits:
    """The activations that a pipeline's stage receives and sends in the forward, by chunk.

    Args:
        device: where they are.
        chunks: of this rank.
    """

    def __init__(self, device: torch.device, chunks: int) -> None:
        self._chunks = [(Bits(device), Bits(device)) for _ in range(chunks)]

    def begin(self) -> None:
        """Forget what was shown."""
        for bits in (bits for both in self._chunks for bits in both):
            bits.begin()

    def show(self, chunk: int, received: torch.Tensor | None, sent: torch.Tensor) -> None:
        """Look at what a microbatch brings to a chunk and takes from it, at the end its loss."""
        into, out = self._chunks[chunk]
        if received is not None:
            into.show(received.detach().reshape(-1))
        out.show(sent.detach().reshape(-1))

    def numbers(self) -> list[torch.Tensor]:
        """Return those of every chunk, received and sent."""
        return [x for both in self._chunks for bits in both for x in bits.numbers()]


@dataclass(frozen=True)
class Digest:
    """What became of some tensors: the sum of their bits, and of their norms."""

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
    """What one rank has of one computation.

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
    both = list(enumerate(zip(one, other, strict=True)))
    found = [rank for rank, (a, b) in both if not _same(a.loss, b.loss)]
    found = found or [rank for rank, (a, b) in both if a.gradients.bits != b.gradients.bits]

    def changed(rank: int, chunk: int, end: int) -> bool:
        return one[rank].chunks[chunk][end].bits != other[rank].chunks[chunk][end].bits

    return narrowed(found, pipelines, one, changed)


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
    """Return in place of ranks of a pipeline the stage where it began, or if that cannot be told,
    as in the backward, all of its stages.

    Args:
        pipelines: the ranks of each pipeline, by stage; none if there is one stage.
        rows: by rank.
        wrong: of a rank and its chunk, whether what it received (0) or sent (1) is wrong.
    """
    if not pipelines:
        return tuple(ranks)
    found: set[int] = set()
    for stages in (stages for stages in pipelines if {*stages} & {*ranks}):
        # The parts of the model in the order in which activations go through them.
        parts = [(r, chunk) for chunk in range(len(rows[stages[0]].chunks)) for r in stages]
        first = next((i for i, part in enumerate(parts) if wrong(*part, 1)), None)
        if first is None:
            found |= {*stages}
            continue
        rank, chunk = parts[first]
        # What arrives otherwise than it was sent went wrong on the way.
        found |= {rank, parts[first - 1][0]} if wrong(rank, chunk, 0) else {rank}
    return tuple(sorted(found))

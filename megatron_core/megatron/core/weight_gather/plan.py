# SPDX-License-Identifier: Apache-2.0
"""The gather plan: which gathered weights are released and which gathers start at every use.

A block is a set of weights that is gathered together. A step is a program of segments ("forward",
"backward", ...), each with a trace of the blocks that it needs, known before the step starts. The
plan walks through the whole program once and gives, for each use, what to release and what to
start:

- blocks stay while they fit in the budget; the one evicted is the one needed furthest in the future
  (Belady 1966, "A study of replacement algorithms for a virtual-storage computer": the fewest loads
  for blocks of one size), so the turn from forward to backward keeps the last layers;
- the next block is always in flight while one is computed with, and more if their bytes allow it.

Release after forward, prefetch depth and "keep the head" are therefore one number, the budget. Pure
data: a plan is compiled, checked and counted without processes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

#: Block numbers of one segment in the order of first need, consecutive repeats removed.
Trace: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Consume:
    """What happens at the moment when `block` is needed.

    First the gathered weights of `release` are given back, then the gathers of `issue` start in
    order, then the block's own gather is waited for.
    """

    block: int
    release: tuple[int, ...]
    issue: tuple[int, ...]


@dataclass(frozen=True)
class GatherPlan:
    """The uses of one step in order.

    `prologue` lists the gathers that may start before the first use; `consumes[0]` does not repeat
    them. What is gathered at the end is for the runtime to release. `peak_bytes` is the most that
    is gathered or under way at any time, `gathers` how many gathers there are.
    """

    consumes: tuple[Consume, ...]
    prologue: tuple[int, ...]
    peak_bytes: int
    gathers: int


def compile_plan(
    traces: Mapping[str, Trace],
    program: Sequence[str],
    *,
    sizes: Sequence[int],
    budget: int,
    ahead: int,
    prefetch: bool = True,
) -> GatherPlan:
    """Plan the gathers of one step.

    A block needed twice in a row, also across a border of segments, is one use. Looking ahead at a
    use: the next distinct block, and further ones while the bytes beyond the next sum to at most
    `ahead`; nothing is released for a block that is needed later than itself.

    Args:
        traces: of each segment, the blocks in order of need.
        program: names of segments in the order in which they run.
        sizes: gathered bytes of each block; one of 0 bytes has storage of its own, so it is
            gathered once and never released.
        budget: bytes gathered or under way at any time; only a block in use may exceed it, alone.
        ahead: bytes under way beyond the next block.
        prefetch: False starts every gather at the block's own use.

    Raises:
        ValueError: a segment without a trace, a block without a size, a negative number of bytes.
    """
    needs = _needs(traces, program, sizes)
    if budget < 0 or ahead < 0 or min(sizes, default=0) < 0:
        raise ValueError(
            f"sizes {list(sizes)}, budget {budget}, ahead {ahead}: bytes of a gather plan are 0 "
            "or more"
        )
    residents = _Residents(needs, sizes, budget)
    consumes = tuple(
        residents.consume(position, ahead if prefetch else None) for position in range(len(needs))
    )
    prologue: tuple[int, ...] = ()
    if consumes and prefetch:
        prologue = consumes[0].issue
        consumes = (replace(consumes[0], issue=()), *consumes[1:])
    return GatherPlan(consumes, prologue, residents.peak_bytes, residents.gathers)


def bytes_of_neighbours(
    traces: Mapping[str, Trace], program: Sequence[str], *, sizes: Sequence[int]
) -> int:
    """Return the most bytes of two blocks that a program needs one after the other: a budget under
    which every gather can start while the block before it is in use."""
    found = [sizes[block] for block in _needs(traces, program, sizes)]
    return max((a + b for a, b in itertools.pairwise(found)), default=sum(found))


def check_plan(plan: GatherPlan, *, sizes: Sequence[int], budget: int) -> list[str]:
    """Replay a plan and list everything that is wrong with it; empty if it is fine.

    Shown to hold: a block is gathered before it is used and not released by its own use, none is
    gathered twice or released when it is not there or before it was used, none of 0 bytes is
    released, the bytes never exceed the budget (but for a single block in use), and the peak and
    the count of gathers are as stated.
    """
    problems: list[str] = []
    resident: set[int] = set()
    unused: set[int] = set()
    peak = gathers = 0
    steps = [(f"consume {i}", c.block, c.release, c.issue) for i, c in enumerate(plan.consumes)]
    if plan.prologue:
        steps.insert(0, ("prologue", plan.prologue[0], (), plan.prologue))
    for where, block, release, issue in steps:
        for gone in release:
            if gone not in resident:
                problems.append(f"{where}: releases block {gone}, which is not gathered")
            elif gone == block or gone in unused:
                problems.append(f"{where}: releases block {gone} before it is used")
            if sizes[gone] == 0:
                problems.append(f"{where}: releases block {gone}, whose storage is permanent")
            resident.discard(gone)
        for new in issue:
            if new in resident:
                problems.append(f"{where}: gathers block {new} again while it is there")
            resident.add(new)
            unused.add(new)
            gathers += 1
        if block not in resident:
            problems.append(f"{where}: block {block} is used but not gathered")
        if where != "prologue":
            unused.discard(block)
        total = sum(sizes[b] for b in resident)
        peak = max(peak, total)
        if total > max(budget, sizes[block]):
            problems.append(f"{where}: {total} bytes are gathered, the budget is {budget}")
    if (peak, gathers) != (plan.peak_bytes, plan.gathers):
        problems.append(
            f"the plan states {plan.peak_bytes} bytes and {plan.gathers} gathers; it has {peak} "
            f"and {gathers}"
        )
    return problems


def _needs(traces: Mapping[str, Trace], program: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """Return the blocks of the whole program in order of need, consecutive repeats removed."""
    for name in program:
        if name not in traces:
            raise ValueError(f"segment {name!r} has no trace: known are {', '.join(traces)}")
        for block in traces[name]:
            if not 0 <= block < len(sizes):
                raise ValueError(
                    f"segment {name!r} needs block {block}, but there are {len(sizes)} sizes"
                )
    flat = itertools.chain.from_iterable(traces[name] for name in program)
    return [block for block, _ in itertools.groupby(flat)]


class _Residents:
    """The blocks gathered or under way while a program is walked through.

    `upcoming[b]` is the position of the next use of block b after the one at hand, `end` if there
    is none. `order` is a heap of (-next use, block); an entry is stale once its block was released
    or its next use has moved on.
    """

    def __init__(self, needs: Sequence[int], sizes: Sequence[int], budget: int) -> None:
        self.needs, self.sizes, self.budget = needs, sizes, budget
        self.end = len(needs)
        self.following = [self.end] * self.end
        self.upcoming = [self.end] * len(sizes)
        for position in range(self.end - 1, -1, -1):
            self.following[position] = self.upcoming[needs[position]]
            self.upcoming[needs[position]] = position
        self.resident: set[int] = set()
        self.missing = sum(at < self.end for at in self.upcoming)
        self.order: list[tuple[int, int]] = []
        self.bytes = self.peak_bytes = self.gathers = 0

    def consume(self, position: int, ahead: int | None) -> Consume:
        """Go to one use; `ahead` None looks no further."""
        block = self.needs[position]
        release: list[int] = []
        issue: list[int] = []
        before = self.needs[position - 1] if position else block
        if self.upcoming[before] == self.end and self.sizes[before] and before != block:
            self._drop(before, release)
        if block not in self.resident:
            self._make_room(self.sizes[block], position, release)
            self._add(block, issue)
        elif self.bytes > self.budget:
            self._make_room(0, position, release)
        if ahead is not None:
            for other in self._window(position, ahead):
                if other in self.resident:
                    continue
                at = self.upcoming[other]
                if not self._make_room(self.sizes[other], at, release, whole=True):
                    break
                self._add(other, issue)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self.upcoming[block] = self.following[position]
        self._rank(block)
        return Consume(block, tuple(release), tuple(issue))

    def _window(self, position: int, ahead: int) -> Iterator[int]:
        """Yield the blocks to look ahead to, in order of need, while any needed one is missing."""
        block = self.needs[position]
        seen = {block}
        first, beyond = True, 0
        for at in range(position + 1, self.end):
            if not self.missing:
                return
            other = self.needs[at]
            if other in seen:
                continue
            seen.add(other)
            if self.sizes[other]:
                beyond += 0 if first else self.sizes[other]
                first = False
                if beyond > ahead:
                    return
            yield other

    def _make_room(self, size: int, need: int, release: list[int], *, whole: bool = False) -> bool:
        """Release what is needed furthest ahead, later than `need`, until `size` more bytes fit.

        The block in use is needed now, so it stays. With `whole`, nothing is released unless that
        makes them fit.
        """
        victims: list[tuple[int, int]] = []
        room = self.budget - self.bytes - size
        while room < 0 and self.order and -self.order[0][0] > need:
            entry = heapq.heappop(self.order)
            at, other = -entry[0], entry[1]
            if other in self.resident and self.upcoming[other] == at:
                victims.append(entry)
                room += self.sizes[other]
        if room < 0 and whole:
            for entry in victims:
                heapq.heappush(self.order, entry)
            return False
        for _, other in victims:
            self._drop(other, release)
        return True

    def _add(self, block: int, issue: list[int]) -> None:
        """Start a gather."""
        self.resident.add(block)
        self.missing -= 1
        self.bytes += self.sizes[block]
        self.gathers += 1
        issue.append(block)
        self._rank(block)

    def _drop(self, block: int, release: list[int]) -> None:
        """Give a block's bytes back."""
        self.resident.remove(block)
        self.missing += self.upcoming[block] < self.end
        self.bytes -= self.sizes[block]
        release.append(block)

    def _rank(self, block: int) -> None:
        """Enter a block's next use into the order of release."""
        if self.sizes[block]:
            heapq.heappush(self.order, (-self.upcoming[block], block))

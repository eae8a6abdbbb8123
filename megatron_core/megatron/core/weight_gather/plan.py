# SPDX-License-Identifier: Apache-2.0
"""The gather plan: the blocks to reshard and the all-gathers to start at every use of a block.

A block is a set of weights that are gathered together. A step is a program of segments ("forward",
"backward", ...). Each segment has a trace of the blocks that it uses, known before the step starts.
The plan is computed for the whole program. At each use it lists the blocks to reshard and the
all-gathers to start:

- Blocks stay unsharded while they fit in the budget. The block to evict is the block whose next use
  is furthest in the future (Belady 1966, "A study of replacement algorithms for a virtual-storage
  computer": the fewest loads for blocks of one size). So the last layers of forward stay unsharded
  for backward.
- The all-gather of the next block is always in flight while a block is in use, and further
  all-gathers if their bytes allow it.

Reshard-after-forward, prefetch depth and keeping the output layer unsharded all follow from one
number, the budget. A plan is plain data: it is compiled, checked and counted without processes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

#: Block numbers of one segment in the order of use, consecutive repeats removed.
Trace: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class PlannedUse:
    """The actions at one use of `block`, in this order.

    Args:
        block: the block in use. Its own all-gather is waited for last.
        reshard: blocks that are resharded first, so that their buffers can be reused.
        all_gather: blocks whose all-gathers start then, in this order.
    """

    block: int
    reshard: tuple[int, ...]
    all_gather: tuple[int, ...]


@dataclass(frozen=True)
class GatherPlan:
    """The uses of one step in order.

    Args:
        uses: the uses of blocks. Blocks that are unsharded after the last use are resharded by the
            runtime.
        prologue: blocks whose all-gathers may start before the first use; `uses[0]` does not repeat
            them.
        peak_bytes: maximum bytes that are unsharded or in flight at any time.
        gathers: number of all-gathers.
    """

    uses: tuple[PlannedUse, ...]
    prologue: tuple[int, ...]
    peak_bytes: int
    gathers: int


def compile_plan(
    traces: Mapping[str, Trace],
    program: Sequence[str],
    *,
    sizes: Sequence[int],
    budget: int,
    prefetch_bytes: int,
    prefetch: bool = True,
) -> GatherPlan:
    """Plan the all-gathers of one step.

    Consecutive uses of a block, also across a boundary of segments, are one use. At a use, the next
    distinct block is prefetched, and further blocks while their bytes sum to at most
    `prefetch_bytes`. A prefetch never evicts a block that is used before the prefetched one.

    Args:
        traces: the blocks of each segment in order of use.
        program: names of segments in the order in which they run.
        sizes: unsharded bytes of each block. A block of 0 bytes has permanent storage: it is
            gathered once and never resharded.
        budget: maximum bytes unsharded or in flight at any time; only a single block in use may
            exceed it.
        prefetch_bytes: maximum bytes in flight beyond the next block.
        prefetch: False starts every all-gather at the use of its block.

    Raises:
        ValueError: a segment without a trace, a block without a size, a negative number of bytes.
    """
    block_uses = _block_uses(traces, program, sizes)
    if budget < 0 or prefetch_bytes < 0 or min(sizes, default=0) < 0:
        raise ValueError(
            f"sizes {list(sizes)}, budget {budget}, prefetch_bytes {prefetch_bytes}: bytes of a "
            "gather plan are 0 or more"
        )
    residents = _Residents(block_uses, sizes, budget)
    limit = prefetch_bytes if prefetch else None
    uses = tuple(residents.plan_use(position, limit) for position in range(len(block_uses)))
    # The all-gathers of the first use may start before the step, as soon as the optimizer has
    # written the shards.
    prologue: tuple[int, ...] = ()
    if uses and prefetch:
        prologue = uses[0].all_gather
        uses = (replace(uses[0], all_gather=()), *uses[1:])
    return GatherPlan(uses, prologue, residents.peak_bytes, residents.gathers)


def max_adjacent_bytes(
    traces: Mapping[str, Trace], program: Sequence[str], *, sizes: Sequence[int]
) -> int:
    """Return the maximum bytes of two consecutively used blocks: with this budget every all-gather
    can start while the block before it is in use."""
    use_sizes = [sizes[block] for block in _block_uses(traces, program, sizes)]
    return max((a + b for a, b in itertools.pairwise(use_sizes)), default=sum(use_sizes))


def check_plan(plan: GatherPlan, *, sizes: Sequence[int], budget: int) -> list[str]:
    """Replay a plan and return a list of its errors, empty if there are none.

    The checks: a block is gathered before it is used and not resharded by its own use. No block is
    gathered twice, resharded while it is not gathered, or resharded before it was used. No block of
    0 bytes is resharded. The bytes never exceed the budget, except for a single block in use. The
    peak and the number of all-gathers are correct.
    """
    problems: list[str] = []
    resident: set[int] = set()
    unused: set[int] = set()
    peak = gathers = 0
    steps = [(f"use {i}", c.block, c.reshard, c.all_gather) for i, c in enumerate(plan.uses)]
    if plan.prologue:
        steps.insert(0, ("prologue", plan.prologue[0], (), plan.prologue))
    for where, block, reshards, all_gathers in steps:
        for freed in reshards:
            if freed not in resident:
                problems.append(f"{where}: reshards block {freed}, which is not gathered")
            elif freed == block or freed in unused:
                problems.append(f"{where}: reshards block {freed} before it is used")
            if sizes[freed] == 0:
                problems.append(f"{where}: reshards block {freed}, whose storage is permanent")
            resident.discard(freed)
        for started in all_gathers:
            if started in resident:
                problems.append(f"{where}: gathers block {started} again while it is gathered")
            resident.add(started)
            unused.add(started)
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
            f"the plan states {plan.peak_bytes} bytes and {plan.gathers} gathers, but needs "
            f"{peak} and {gathers}"
        )
    return problems


def _block_uses(
    traces: Mapping[str, Trace], program: Sequence[str], sizes: Sequence[int]
) -> list[int]:
    """Return the blocks of the whole program in order of use, consecutive repeats removed."""
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
    """The blocks that are unsharded or in flight at a position of the program.

    Attributes:
        block_uses: the block of every use.
        next_use: by block, the position of its next use after the current one, or `end`.
        use_after: by position, the position of the next use of the same block, or `end`.
        num_missing: blocks with a later use that are neither unsharded nor in flight.
        eviction_heap: heap of (-next use, block). An entry is stale once its block was resharded or
            used, and is skipped when it is popped.
    """

    def __init__(self, block_uses: Sequence[int], sizes: Sequence[int], budget: int) -> None:
        self.block_uses, self.sizes, self.budget = block_uses, sizes, budget
        self.end = len(block_uses)
        self.use_after = [self.end] * self.end
        self.next_use = [self.end] * len(sizes)
        for position in range(self.end - 1, -1, -1):
            self.use_after[position] = self.next_use[block_uses[position]]
            self.next_use[block_uses[position]] = position
        self.resident: set[int] = set()
        self.num_missing = sum(at < self.end for at in self.next_use)
        self.eviction_heap: list[tuple[int, int]] = []
        self.bytes = self.peak_bytes = self.gathers = 0

    def plan_use(self, position: int, prefetch_bytes: int | None) -> PlannedUse:
        """Advance to one use; `prefetch_bytes` None prefetches nothing."""
        block = self.block_uses[position]
        reshards: list[int] = []
        all_gathers: list[int] = []
        before = self.block_uses[position - 1] if position else block
        # Its last use is over: its bytes are free without an eviction.
        if self.next_use[before] == self.end and self.sizes[before] and before != block:
            self._drop(before, reshards)
        if block not in self.resident:
            self._make_room(self.sizes[block], position, reshards)
            self._add(block, all_gathers)
        elif self.bytes > self.budget:
            # A block larger than the budget was in use before. Its excess ends here.
            self._make_room(0, position, reshards)
        if prefetch_bytes is not None:
            for candidate in self._window(position, prefetch_bytes):
                if candidate in self.resident:
                    continue
                at = self.next_use[candidate]
                # Later candidates are used even later and may evict less. Stop at the first that
                # does not fit, so that all-gathers start in the order of use.
                if not self._make_room(self.sizes[candidate], at, reshards, all_or_nothing=True):
                    break
                self._add(candidate, all_gathers)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self.next_use[block] = self.use_after[position]
        self._push_next_use(block)
        return PlannedUse(block, tuple(reshards), tuple(all_gathers))

    def _window(self, position: int, prefetch_bytes: int) -> Iterator[int]:
        """Yield the blocks to prefetch in order of use, while a block with a later use is
        missing."""
        block = self.block_uses[position]
        seen = {block}
        is_next, beyond = True, 0
        for at in range(position + 1, self.end):
            if not self.num_missing:
                return
            candidate = self.block_uses[at]
            if candidate in seen:
                continue
            seen.add(candidate)
            # The next block is always prefetched. Blocks of 0 bytes are gathered in place.
            if self.sizes[candidate]:
                beyond += 0 if is_next else self.sizes[candidate]
                is_next = False
                if beyond > prefetch_bytes:
                    return
            yield candidate

    def _make_room(
        self, size: int, use: int, reshards: list[int], *, all_or_nothing: bool = False
    ) -> bool:
        """Evict the blocks with the latest next use, later than `use`, until `size` bytes fit.

        The block in use stays. With `all_or_nothing`, no block is evicted unless the bytes then
        fit.
        """
        evicted: list[tuple[int, int]] = []
        room = self.budget - self.bytes - size
        while room < 0 and self.eviction_heap and -self.eviction_heap[0][0] > use:
            entry = heapq.heappop(self.eviction_heap)
            at, candidate = -entry[0], entry[1]
            # A stale entry is dropped here: heapq cannot remove entries from the middle.
            if candidate in self.resident and self.next_use[candidate] == at:
                evicted.append(entry)
                room += self.sizes[candidate]
        if room < 0 and all_or_nothing:
            for entry in evicted:
                heapq.heappush(self.eviction_heap, entry)
            return False
        for _, candidate in evicted:
            self._drop(candidate, reshards)
        return True

    def _add(self, block: int, all_gathers: list[int]) -> None:
        """Add a block whose all-gather starts."""
        self.resident.add(block)
        self.num_missing -= 1
        self.bytes += self.sizes[block]
        self.gathers += 1
        all_gathers.append(block)
        self._push_next_use(block)

    def _drop(self, block: int, reshards: list[int]) -> None:
        """Remove a block, which is resharded."""
        self.resident.remove(block)
        self.num_missing += self.next_use[block] < self.end
        self.bytes -= self.sizes[block]
        reshards.append(block)

    def _push_next_use(self, block: int) -> None:
        """Push a block's next use onto the eviction heap."""
        if self.sizes[block]:
            heapq.heappush(self.eviction_heap, (-self.next_use[block], block))

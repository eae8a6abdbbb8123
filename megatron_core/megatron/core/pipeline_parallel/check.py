# SPDX-License-Identifier: Apache-2.0
"""Everything that is wrong with the lists of a schedule, found without carrying them out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

from megatron.core.pipeline_parallel.schedule import (
    AHEAD,
    COMPUTES,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
)
from megatron.core.pipeline_parallel.simulate import DeadlockError, Times, simulate

_WHOLE, _SPLIT = (Kind.BACKWARD,), (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_NEEDS_WEIGHTS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT})
_MAKES_GRADIENTS = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRADIENT})


def check(schedule: Schedule) -> list[str]:
    """Return everything that is wrong with a schedule, nothing if it can be carried out.

    - Every chunk computes the forward of every microbatch once, and, unless no rank has any, its
      backward once: as B, or as I and later W, after F. Each of these kinds takes a chunk's
      microbatches in their order, as all schedules do, so that sums are the same to the bit.
    - Either no list holds transfers, or every output that goes to another rank is sent once, after
      it is computed, and received once, before it is needed; two ranks have the transfers between
      them in one order, those of each direction by themselves.
    - Gathers, if there are any, are one for each chunk, before its first F and with its microbatch;
      or one for each F, B and I, with no compute between. Reductions are one after the last B or W
      of each chunk, or one after each, with no compute between.
    - Nothing deadlocks, with transfers under either rule of `simulate`.

    Whether something deadlocks is looked at only if nothing else is wrong.
    """
    if len(schedule.ranks) != schedule.stages:
        return [f"{len(schedule.ranks)} lists for {schedule.stages} stages"]
    lists = [_List(schedule, rank) for rank in range(schedule.stages)]
    foreign = [problem for one in lists for problem in one.foreign()]
    if foreign:
        return foreign
    backward = any(one.has(_MAKES_GRADIENTS | {Kind.INPUT_GRADIENT}) for one in lists)
    wrong = [problem for one in lists for problem in one.computes(backward)]
    if any(one.has(TRANSFERS) for one in lists):
        wrong += [problem for one in lists for problem in one.transfers()]
        wrong += _pairs(schedule)
    wrong += _traffic(lists, Kind.GATHER, _NEEDS_WEIGHTS)
    wrong += _traffic(lists, Kind.REDUCE, _MAKES_GRADIENTS)
    if not wrong:
        for rendezvous in (False, True):
            try:
                simulate(schedule, Times(), rendezvous=rendezvous)
            except DeadlockError as error:
                return [str(error)]
    return wrong


class _List:
    """One rank's list and where its actions are."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.actions = schedule, rank, schedule.ranks[rank]
        self.at: dict[Action, int] = {}
        for index, action in enumerate(self.actions):
            self.at.setdefault(action, index)
        self.counts = Counter(self.actions)
        self.kinds = {action.kind for action in self.actions}

    def has(self, kinds: frozenset[Kind]) -> bool:
        """Tell whether the list holds an action of one of these kinds."""
        return not self.kinds.isdisjoint(kinds)

    def foreign(self) -> Iterator[str]:
        """Yield what this rank has no part in."""
        chunks, microbatches = self.schedule.chunks, self.schedule.microbatches
        for action in self.counts:
            if not (0 <= action.chunk < chunks and 0 <= action.microbatch < microbatches):
                yield (
                    f"rank {self.rank}: {action} is not of its {chunks} chunks and "
                    f"{microbatches} microbatches"
                )
            elif action.kind in TRANSFERS:
                other_end = self.schedule.other_end(self.rank, action)
                if other_end is None or other_end[0] == self.rank:
                    yield f"rank {self.rank}: {action} has no other rank"

    def computes(self, backward: bool) -> Iterator[str]:
        """Yield what is wrong with F, B, I and W."""
        for chunk in range(self.schedule.chunks):
            for number in range(self.schedule.microbatches):
                order = [Kind.FORWARD]
                if backward:
                    kinds = [k for k in (*_WHOLE, *_SPLIT) if Action(k, chunk, number) in self.at]
                    if Kind.BACKWARD in kinds and len(kinds) > 1:
                        names = " and ".join(kind.value for kind in kinds)
                        yield f"rank {self.rank}: {names} of microbatch {chunk}.{number}"
                    whole = Kind.BACKWARD in kinds or not kinds
                    order += _WHOLE if whole else _SPLIT
                actions = [Action(kind, chunk, number) for kind in order]
                for action in actions:
                    yield from self._once(action)
                for earlier, later in pairwise(actions):
                    yield from self._ordered(earlier, later)
        last: dict[tuple[Kind, int], Action] = {}
        for action in self.at:
            if action.kind in COMPUTES:
                before = last.get((action.kind, action.chunk))
                if before is not None and before.microbatch > action.microbatch:
                    yield f"rank {self.rank}: {before} comes before {action}"
                last[action.kind, action.chunk] = action

    def transfers(self) -> Iterator[str]:
        """Yield what is wrong with this rank's sends and receives, but for their order."""
        wanted = set()
        for action in self.at:
            for transfer in self._transfers_of(action):
                if transfer not in wanted:
                    yield from self._once(transfer)
                wanted.add(transfer)
                if transfer.kind in SENDS:
                    yield from self._ordered(action, transfer)
                else:
                    yield from self._ordered(transfer, action)
        for action in self.at:
            if action.kind in SENDS and action not in wanted:
                yield f"rank {self.rank}: {action} sends what is not computed"
            if action.kind in RECEIVES and action not in wanted:
                yield f"rank {self.rank}: {action} receives what nothing needs"

    def _transfers_of(self, action: Action) -> Iterator[Action]:
        """Yield the transfers that a compute takes part in."""
        if action.kind is Kind.FORWARD:
            kinds = (Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            kinds = (Kind.RECEIVE_BACKWARD, Kind.SEND_BACKWARD)
        else:
            return
        for kind in kinds:
            transfer = Action(kind, action.chunk, action.microbatch)
            if self.schedule.other_end(self.rank, transfer) is not None:
                yield transfer

    def _once(self, action: Action) -> Iterator[str]:
        count = self.counts[action]
        if count != 1:
            yield f"rank {self.rank}: {action} is {f'there {count} times' if count else 'missing'}"

    def _ordered(self, earlier: Action, later: Action) -> Iterator[str]:
        if self.at.get(earlier, -1) > self.at.get(later, len(self.actions)):
            yield f"rank {self.rank}: {later} comes before {earlier}"


def _pairs(schedule: Schedule) -> Iterator[str]:
    """Yield the pairs of ranks that disagree about the order of what is between them."""
    between: dict[tuple[int, int, bool], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            other_end = schedule.other_end(rank, action)
            if other_end is not None:
                between[rank, other_end[0], action.kind in AHEAD].append((rank, action))
    for low, high, ahead in sorted(between):
        if low > high:
            continue
        theirs = [schedule.other_end(*place) for place in between[high, low, ahead]]
        for (_, mine), other in zip(between[low, high, ahead], theirs, strict=False):
            if other is not None and mine != other[1]:
                yield f"ranks {low} and {high}: {mine} on rank {low} meets {other[1]}'s other end"
                break


def _traffic(lists: list[_List], kind: Kind, computes: frozenset[Kind]) -> Iterator[str]:
    """Yield what is wrong with gathers, which go before `computes`, or with reductions, after them.

    Lists are walked towards the traffic's end of its compute: reductions from the back.
    """
    walks = [one.actions if kind is Kind.GATHER else one.actions[::-1] for one in lists]
    found = sum(action.kind is kind for walk in walks for action in walk)
    each = sum(action.kind in computes for walk in walks for action in walk)
    once = sum(len({a.chunk for a in walk if a.kind in computes}) for walk in walks)
    if not found:
        return
    for rank, walk in enumerate(walks):
        if abs(found - once) <= abs(found - each):
            problems = _once_a_chunk(walk, kind, computes)
        else:
            problems = _once_a_compute(walk, kind, computes)
        for problem in problems:
            yield f"rank {rank}: {problem}"


def _once_a_chunk(walk: tuple[Action, ...], kind: Kind, computes: frozenset[Kind]) -> Iterator[str]:
    """Yield where chunks have not one gather or reduction before the first compute of a walk."""
    first: dict[int, int] = {}
    for index, action in enumerate(walk):
        if action.kind in computes:
            first.setdefault(action.chunk, index)
    for chunk, index in sorted(first.items()):
        wanted = Action(kind, chunk, walk[index].microbatch)
        places = [i for i, a in enumerate(walk) if a.kind is kind and a.chunk == chunk]
        between = walk[places[0] : index] if places else ()
        late = kind is Kind.REDUCE and any(a.kind in COMPUTES for a in between)
        if [walk[i] for i in places] != [wanted]:
            names = " ".join(str(walk[i]) for i in places) or "nothing"
            yield f"{names} for chunk {chunk} where {wanted} belongs"
        elif places[0] > index or late:
            yield f"{wanted} is not {_SIDES[kind]} {walk[index]}"
    for action in dict.fromkeys(walk):
        if action.kind is kind and action.chunk not in first:
            yield f"{action} belongs to no compute"


def _once_a_compute(
    walk: tuple[Action, ...], kind: Kind, computes: frozenset[Kind]
) -> Iterator[str]:
    """Yield where gathers or reductions and the computes of a walk do not come in turn."""
    waiting: Action | None = None
    for action in walk:
        if action.kind is kind or action.kind in COMPUTES:
            fits = action.kind in computes and waiting == Action(
                kind, action.chunk, action.microbatch
            )
            if waiting is not None and not fits:
                yield f"{waiting} is not {_SIDES[kind]} its compute"
            elif action.kind in computes and not fits:
                yield f"{action} has no {kind.name.lower()} {_SIDES[kind]} it"
            waiting = action if action.kind is kind else None
    if waiting is not None:
        yield f"{waiting} is not {_SIDES[kind]} its compute"


_SIDES: Mapping[Kind, str] = MappingProxyType(
    {Kind.GATHER: "right before", Kind.REDUCE: "right after"}
)

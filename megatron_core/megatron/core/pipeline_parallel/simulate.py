# SPDX-License-Identifier: Apache-2.0
"""Simulation of pipeline schedules: their dependences, time, idleness, memory, and mistakes.

A schedule is a graph: an action starts when everything before it has ended. It is timed, and its
lists are checked, without processes. Computes of a rank follow each other in the order of its list;
transfers, gathers and reductions overlap with them. In a schedule of computes alone, every tensor
is sent when it is ready.

There are two rules for the transfers of a list:

- eager: a send starts when the rank's list reaches it, and its receive ends when the tensor has
  arrived and the list has reached the receive. Nothing blocks.
- rendezvous, the rule of NCCL with a communicator for each direction: adjacent transfers of one
  direction are one batch. The batches of a rank and direction follow each other, a transfer starts
  when both its ranks are at its batch, and an action that needs one transfer of a batch waits for
  the whole batch. Lists that pair their transfers up badly deadlock.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

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

__all__ = ["DeadlockError", "Event", "PerStage", "Timeline", "Times", "check", "simulate"]


class DeadlockError(ValueError):
    """Ranks wait for each other, or for what never comes."""


class Node(NamedTuple):
    """A point of the graph.

    Args:
        what: "do" is the action number `index` of the rank's list; "leave" is the way to the next
            rank of what that action computes, where no list holds transfers; "batch" and
            "batch end" number the batches of adjacent transfers.
    """

    what: str
    rank: int
    index: int


class Dependence:
    """The graph of a schedule.

    Args:
        seconds: (kind, virtual stage) to how long such an action takes.
        rendezvous: transfers follow the rule of NCCL, see `simulate`.
    """

    def __init__(
        self, schedule: Schedule, seconds: Callable[[Kind, int], float], *, rendezvous: bool
    ) -> None:
        self._schedule, self._seconds_of = schedule, seconds
        self._explicit = any(a.kind in TRANSFERS for actions in schedule.ranks for a in actions)
        self._where = [
            {action: index for index, action in reversed(list(enumerate(actions)))}
            for actions in schedule.ranks
        ]
        self._seconds: dict[Node, float] = {}
        #: a text where what is needed is nowhere.
        self._before: dict[Node, list[Node | str]] = {}
        self._batches: dict[Node, int] = {}
        self._inputs: list[tuple[Node, Node | str]] = []
        if rendezvous:
            for rank in range(schedule.stages):
                self._add_batches(rank)
        for rank in range(schedule.stages):
            self._add_list(rank)

    def walk(self) -> dict[Node, tuple[float, float]]:
        """Return when every node starts and ends, if each starts as early as it can.

        Raises:
            DeadlockError: some never start.
        """
        after: dict[Node, list[Node]] = defaultdict(list)
        for node, before in self._before.items():
            for other in before:
                if isinstance(other, Node):
                    after[other].append(node)
        missing = {node: len(before) for node, before in self._before.items()}
        starts = dict.fromkeys(self._before, 0.0)
        spans: dict[Node, tuple[float, float]] = {}
        ready = deque(node for node, count in missing.items() if not count)
        while ready:
            node = ready.popleft()
            end = starts[node] + self._seconds[node]
            spans[node] = starts[node], end
            for other in after[node]:
                starts[other] = max(starts[other], end)
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        if len(spans) < len(self._before):
            raise DeadlockError(self._stuck(spans))
        return spans

    def waiting(self, spans: dict[Node, tuple[float, float]]) -> list[list[tuple[float, float]]]:
        """Return by rank, for every tensor from another rank, when it is there and when used."""
        waits: list[list[tuple[float, float]]] = [[] for _ in self._schedule.ranks]
        for compute, source in self._inputs:
            assert isinstance(source, Node)
            waits[compute.rank].append((spans[source][1], spans[compute][0]))
        return waits

    def _find(self, rank: int, *actions: Action) -> Node | str:
        """Return the first of `actions` that a rank's list holds, else a text for messages."""
        for action in actions:
            index = self._where[rank].get(action)
            if index is not None:
                return Node("do", rank, index)
        return f"{actions[0]}, which is not in the list of rank {rank}"

    def _add(self, node: Node, seconds: float, before: list[Node | str]) -> None:
        self._seconds[node], self._before[node] = seconds, before

    def _add_batches(self, rank: int) -> None:
        """Join a rank's adjacent transfers of a direction into batches, in turn in each of both."""
        compute: list[Node | str] = []
        last: dict[bool, int] = {}  # by direction
        is_open: set[bool] = set()
        number = -1
        for index, action in enumerate(self._schedule.ranks[rank]):
            node = Node("do", rank, index)
            if action.kind not in TRANSFERS:
                is_open.clear()
                compute = [node] if action.kind in COMPUTES else compute
                continue
            ahead = action.kind in AHEAD
            if ahead not in is_open:
                number += 1
                earlier = [Node("batch end", rank, last[ahead])] if ahead in last else []
                self._add(Node("batch", rank, number), 0.0, [*compute, *earlier])
                self._add(Node("batch end", rank, number), 0.0, [])
                is_open.add(ahead)
                last[ahead] = number
            self._batches[node] = last[ahead]
            self._before[Node("batch end", rank, last[ahead])].append(node)

    def _add_list(self, rank: int) -> None:
        """Add a rank's actions."""
        compute: list[Node | str] = []
        gathered: dict[int, list[Node | str]] = defaultdict(list)
        last: dict[Kind, list[Node | str]] = defaultdict(list)
        for index, action in enumerate(self._schedule.ranks[rank]):
            node = Node("do", rank, index)
            if action.kind in COMPUTES:
                before = [*compute, *gathered[action.chunk], *self._needs(node, action)]
                compute = [node]
            elif action.kind in TRANSFERS:
                before = self._transfer(node, action, compute)
            else:
                before = [*compute, *last[action.kind]]
                last[action.kind] = [node]
                if action.kind is Kind.GATHER:
                    gathered[action.chunk] = [node]
            stage = self._schedule.virtual_stage(rank, action.chunk)
            self._add(node, self._seconds_of(action.kind, stage), before)

    def _needs(self, node: Node, action: Action) -> list[Node | str]:
        """Return what a compute needs: what its own rank computed, and an input from another."""
        kind, chunk, number = action.kind, action.chunk, action.microbatch
        rank, needs = node.rank, []
        if kind is Kind.WEIGHT_GRADIENT:
            return [self._find(rank, Action(Kind.INPUT_GRADIENT, chunk, number))]
        if kind is Kind.FORWARD:
            source = self._schedule.preceding(rank, chunk)
            receive = Action(Kind.RECEIVE_FORWARD, chunk, number)
        else:
            source = self._schedule.following(rank, chunk)
            receive = Action(Kind.RECEIVE_BACKWARD, chunk, number)
            needs.append(self._find(rank, Action(Kind.FORWARD, chunk, number)))
        if source is None:
            return needs
        if self._explicit and source[0] != rank:
            brought = self._find(rank, receive)
            if brought in self._batches:
                brought = Node("batch end", rank, self._batches[brought])
        else:
            brought = self._leave(source[0], self._made(*source, kind, number))
        self._inputs.append((node, brought))
        return [*needs, brought]

    def _made(self, rank: int, chunk: int, kind: Kind, number: int) -> Node | str:
        """Return what computes the output of a chunk, forward or backward."""
        if kind is Kind.FORWARD:
            return self._find(rank, Action(Kind.FORWARD, chunk, number))
        kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        return self._find(rank, *(Action(kind, chunk, number) for kind in kinds))

    def _leave(self, rank: int, made: Node | str) -> Node | str:
        """Return the way of an output to the next rank, in a schedule without transfers."""
        if isinstance(made, str):
            return made
        action = self._schedule.ranks[rank][made.index]
        send = Kind.SEND_FORWARD if action.kind is Kind.FORWARD else Kind.SEND_BACKWARD
        stage = self._schedule.virtual_stage(rank, action.chunk)
        seconds = self._seconds_of(send, stage) if self._schedule.stages > 1 else 0.0
        node = Node("leave", rank, made.index)
        self._add(node, seconds, [made])
        return node

    def _transfer(self, node: Node, action: Action, compute: list[Node | str]) -> list[Node | str]:
        """Return what a send or receive needs; the time on the way is the send's."""
        other_end = self._schedule.other_end(node.rank, action)
        other = f"{action} has no other end" if other_end is None else self._find(*other_end)
        reached = compute
        if node in self._batches:
            reached = [Node("batch", node.rank, self._batches[node])]
        if action.kind not in SENDS:
            return [*reached, other]
        kind = Kind.FORWARD if action.kind is Kind.SEND_FORWARD else Kind.BACKWARD
        needs = [*reached, self._made(node.rank, action.chunk, kind, action.microbatch)]
        if node in self._batches:
            known = other in self._batches
            needs.append(Node("batch", other.rank, self._batches[other]) if known else other)
        return needs

    def _stuck(self, spans: dict[Node, tuple[float, float]]) -> str:
        """Say for every rank that hangs where it is and what it waits for."""
        texts = []
        for rank, actions in enumerate(self._schedule.ranks):
            nodes = [Node("do", rank, index) for index in range(len(actions))]
            for node in nodes:
                if node in spans:
                    continue
                waits = [other for other in self._before[node] if other not in spans]
                what = " and ".join(dict.fromkeys(map(self._text, waits)))
                texts.append(f"rank {rank} at {actions[node.index]} waits for {what}")
                break
        return "deadlock: " + "; ".join(texts)

    def _text(self, node: Node | str) -> str:
        """Name what is waited for."""
        if isinstance(node, str):
            return node
        if node.what in ("batch", "batch end"):
            joined = [n for n, number in self._batches.items() if n.rank == node.rank]
            joined = [n for n in joined if self._batches[n] == node.index]
            names = " ".join(str(self._schedule.ranks[n.rank][n.index]) for n in joined)
            turn = "the turn" if node.what == "batch" else "the end"
            return f"{turn} of [{names}] on rank {node.rank}"
        return f"{self._schedule.ranks[node.rank][node.index]} of rank {node.rank}"


#: A number, or one for each virtual stage.
PerStage: TypeAlias = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds, or any other unit, of every kind of action; one for all or by virtual stage.

    Args:
        forward, input_gradient, weight_gradient: of one microbatch; a whole backward is the sum of
            the last two.
        transfer: from the end of a compute until its output is at the next rank, by the virtual
            stage that sends.
        gather, reduce: of a chunk's weights and gradients.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    transfer: PerStage = 0.0
    gather: PerStage = 0.0
    reduce: PerStage = 0.0

    def of(self, kind: Kind, virtual_stage: int) -> float:
        """Return how long an action takes; receives take none, their sends do."""
        values: tuple[PerStage, ...]
        match kind:
            case Kind.FORWARD:
                values = (self.forward,)
            case Kind.BACKWARD:
                values = (self.input_gradient, self.weight_gradient)
            case Kind.INPUT_GRADIENT:
                values = (self.input_gradient,)
            case Kind.WEIGHT_GRADIENT:
                values = (self.weight_gradient,)
            case Kind.GATHER:
                values = (self.gather,)
            case Kind.REDUCE:
                values = (self.reduce,)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                values = (self.transfer,)
            case _:
                values = ()
        return sum((v if isinstance(v, (int, float)) else v[virtual_stage] for v in values), 0.0)


class Event(NamedTuple):
    """When one action took place. A receive's start and end are both when its tensor is there."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When everything takes place.

    Args:
        ranks: the events of every rank, in the order of its list.
        makespan: when the last event ends.
        peak_received: for every rank, the most tensors that are there while the computes that need
            them have not started.
    """

    schedule: Schedule
    ranks: tuple[tuple[Event, ...], ...]
    makespan: float
    peak_received: tuple[int, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """The time in which each rank computes nothing."""
        return tuple(
            self.makespan - sum(e.end - e.start for e in events if e.action.kind in COMPUTES)
            for events in self.ranks
        )

    @property
    def bubble_fraction(self) -> float:
        """The idle part of the time of all ranks, from 0 to 1."""
        return sum(self.idle) / (self.makespan * len(self.ranks)) if self.makespan else 0.0

    def peak_activations(self, freed_by_input_gradient: float = 0.0) -> tuple[float, ...]:
        """Return for each rank the most activations alive, each of a chunk and a microbatch.

        Args:
            freed_by_input_gradient: the part of them that I frees, from 0 to 1; W, or a whole
                backward, frees the rest.
        """
        change = {
            Kind.FORWARD: 1.0,
            Kind.BACKWARD: -1.0,
            Kind.INPUT_GRADIENT: -freed_by_input_gradient,
            Kind.WEIGHT_GRADIENT: freed_by_input_gradient - 1.0,
        }
        peaks = []
        for actions in self.schedule.ranks:
            alive = peak = 0.0
            for action in actions:
                alive += change.get(action.kind, 0.0)
                peak = max(peak, alive)
            peaks.append(peak)
        return tuple(peaks)


def simulate(schedule: Schedule, times: Times, *, rendezvous: bool = False) -> Timeline:
    """Return when everything in a schedule takes place.

    Args:
        schedule: computes alone, or with transfers, gathers and reductions.
        rendezvous: transfers follow the rule of NCCL, else nothing blocks.

    Raises:
        DeadlockError: what ranks wait for never comes; names them.
    """
    graph = Dependence(schedule, times.of, rendezvous=rendezvous)
    spans = graph.walk()
    ranks = tuple(
        tuple(Event(action, *spans[Node("do", rank, n)]) for n, action in enumerate(actions))
        for rank, actions in enumerate(schedule.ranks)
    )
    makespan = max((event.end for events in ranks for event in events), default=0.0)
    peaks = tuple(_most_at_once(intervals) for intervals in graph.waiting(spans))
    return Timeline(schedule, ranks, makespan, peaks)


def _most_at_once(intervals: Iterable[tuple[float, float]]) -> int:
    """Return how many of [start, end) are open at once at most."""
    borders = [
        (at, change)
        for start, end in intervals
        if start < end
        for at, change in ((start, 1), (end, -1))
    ]
    count = most = 0
    for _, change in sorted(borders):
        count += change
        most = max(most, count)
    return most


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

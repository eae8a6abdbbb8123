# SPDX-License-Identifier: Apache-2.0
"""Simulation of pipeline schedules on their dependency graph: time, bubble, memory, and errors.

An action starts when all its dependencies have ended. Schedules are timed and checked without
processes. The computes of a rank run in the order of its list; transfers, gathers and reductions
overlap with them. In a schedule of computes only, every tensor is sent when it is ready.

There are two models of the transfers of a list:

- eager: a send starts when the rank's list reaches it, and its receive ends when the tensor has
  arrived and the list has reached the receive. Nothing blocks.
- rendezvous, the semantics of NCCL with a communicator for each direction: adjacent transfers of
  one direction are one batch. The batches of a rank and direction run one after another. A transfer
  starts when both its ranks have reached its batch, and an action that needs one transfer of a
  batch waits for the whole batch. Lists that order their transfers differently deadlock.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from megatron.core.pipeline_parallel.schedule import (
    COMPUTES,
    FORWARD_TRANSFERS,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    ActionKind,
    Schedule,
)

__all__ = ["DeadlockError", "Event", "PerStage", "Timeline", "Times", "check", "simulate"]


class DeadlockError(ValueError):
    """Ranks wait for each other, or for an action that no list has."""


class Node(NamedTuple):
    """A point of the graph.

    Args:
        what: "do" is action `index` of the rank's list. "transfer" is the transfer of its output to
            the next rank, in a schedule without transfer actions. "batch" and "batch end" are the
            begin and end of batch `index` of adjacent transfers.
        rank: the rank of the list.
        index: number of the action or batch.
    """

    what: str
    rank: int
    index: int


class DependencyGraph:
    """The dependency graph of a schedule.

    Args:
        schedule: the schedule.
        seconds: returns the duration of an action from its kind and virtual stage.
        rendezvous: transfers block as in NCCL, see the module.
    """

    def __init__(
        self, schedule: Schedule, seconds: Callable[[ActionKind, int], float], *, rendezvous: bool
    ) -> None:
        self._schedule, self._seconds_of = schedule, seconds
        self._explicit = any(a.kind in TRANSFERS for actions in schedule.ranks for a in actions)
        self._indices = [
            {action: index for index, action in reversed(list(enumerate(actions)))}
            for actions in schedule.ranks
        ]
        self._seconds: dict[Node, float] = {}
        # A dependency is a text if no list has its action.
        self._dependencies: dict[Node, list[Node | str]] = {}
        self._batches: dict[Node, int] = {}
        self._inputs: list[tuple[Node, Node | str]] = []
        # Batches first: a transfer depends on the batches of both its ranks.
        if rendezvous:
            for rank in range(schedule.stages):
                self._add_batches(rank)
        for rank in range(schedule.stages):
            self._add_list(rank)

    def spans(self) -> dict[Node, tuple[float, float]]:
        """Return the (start, end) of every node, each started as early as possible.

        Raises:
            DeadlockError: some nodes never start.
        """
        dependents: dict[Node, list[Node]] = defaultdict(list)
        for node, dependencies in self._dependencies.items():
            for dependency in dependencies:
                if isinstance(dependency, Node):
                    dependents[dependency].append(node)
        # Kahn's algorithm. A dependency that is a text is never met, and blocks its node.
        missing = {node: len(dependencies) for node, dependencies in self._dependencies.items()}
        starts = dict.fromkeys(self._dependencies, 0.0)
        spans: dict[Node, tuple[float, float]] = {}
        ready = deque(node for node, count in missing.items() if not count)
        while ready:
            node = ready.popleft()
            end = starts[node] + self._seconds[node]
            spans[node] = starts[node], end
            for dependent in dependents[node]:
                starts[dependent] = max(starts[dependent], end)
                missing[dependent] -= 1
                if not missing[dependent]:
                    ready.append(dependent)
        if len(spans) < len(self._dependencies):
            raise DeadlockError(self._deadlock_text(spans))
        return spans

    def input_intervals(
        self, spans: dict[Node, tuple[float, float]]
    ) -> list[list[tuple[float, float]]]:
        """Return the (arrival, use) times of every received tensor, by rank."""
        waits: list[list[tuple[float, float]]] = [[] for _ in self._schedule.ranks]
        for compute, source in self._inputs:
            assert isinstance(source, Node)
            waits[compute.rank].append((spans[source][1], spans[compute][0]))
        return waits

    def _find(self, rank: int, *actions: Action) -> Node | str:
        """Return the node of the first of `actions` in a rank's list, else a text for messages."""
        for action in actions:
            index = self._indices[rank].get(action)
            if index is not None:
                return Node("do", rank, index)
        return f"{actions[0]}, which is not in the list of rank {rank}"

    def _add(self, node: Node, seconds: float, dependencies: list[Node | str]) -> None:
        self._seconds[node], self._dependencies[node] = seconds, dependencies

    def _add_batches(self, rank: int) -> None:
        """Join a rank's adjacent transfers of one direction into batches, which run in order."""
        compute: list[Node | str] = []
        last_batch: dict[bool, int] = {}  # by direction
        is_open: set[bool] = set()
        batch = -1
        for index, action in enumerate(self._schedule.ranks[rank]):
            node = Node("do", rank, index)
            if action.kind not in TRANSFERS:
                # Any other action ends the batches of both directions.
                is_open.clear()
                compute = [node] if action.kind in COMPUTES else compute
                continue
            is_forward = action.kind in FORWARD_TRANSFERS
            if is_forward not in is_open:
                batch += 1
                earlier = (
                    [Node("batch end", rank, last_batch[is_forward])]
                    if is_forward in last_batch
                    else []
                )
                self._add(Node("batch", rank, batch), 0.0, [*compute, *earlier])
                self._add(Node("batch end", rank, batch), 0.0, [])
                is_open.add(is_forward)
                last_batch[is_forward] = batch
            # NCCL completes a batch as a whole: every transfer of it delays the end.
            self._batches[node] = last_batch[is_forward]
            self._dependencies[Node("batch end", rank, last_batch[is_forward])].append(node)

    def _add_list(self, rank: int) -> None:
        """Add a rank's actions."""
        compute: list[Node | str] = []
        gathered: dict[int, list[Node | str]] = defaultdict(list)
        previous: dict[ActionKind, list[Node | str]] = defaultdict(list)
        for index, action in enumerate(self._schedule.ranks[rank]):
            node = Node("do", rank, index)
            if action.kind in COMPUTES:
                dependencies = [*compute, *gathered[action.chunk], *self._inputs_of(node, action)]
                compute = [node]
            elif action.kind in TRANSFERS:
                dependencies = self._transfer(node, action, compute)
            else:
                # Gathers follow one another on a communicator, reductions on another one.
                dependencies = [*compute, *previous[action.kind]]
                previous[action.kind] = [node]
                if action.kind is ActionKind.GATHER:
                    gathered[action.chunk] = [node]
            stage = self._schedule.virtual_stage(rank, action.chunk)
            self._add(node, self._seconds_of(action.kind, stage), dependencies)

    def _inputs_of(self, node: Node, action: Action) -> list[Node | str]:
        """Return the dependencies of a compute: earlier computes of its rank and a received
        tensor."""
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        rank, inputs = node.rank, []
        if kind is ActionKind.WEIGHT_GRADIENT:
            return [self._find(rank, Action(ActionKind.INPUT_GRADIENT, chunk, microbatch))]
        if kind is ActionKind.FORWARD:
            source = self._schedule.prev_stage(rank, chunk)
            receive = Action(ActionKind.RECEIVE_FORWARD, chunk, microbatch)
        else:
            source = self._schedule.next_stage(rank, chunk)
            receive = Action(ActionKind.RECEIVE_BACKWARD, chunk, microbatch)
            inputs.append(self._find(rank, Action(ActionKind.FORWARD, chunk, microbatch)))
        # The embedding reads tokens, and the loss is computed on the last stage.
        if source is None:
            return inputs
        if self._explicit and source[0] != rank:
            arrival = self._find(rank, receive)
            # Under rendezvous the compute waits for all transfers of the batch.
            if isinstance(arrival, Node) and arrival in self._batches:
                arrival = Node("batch end", rank, self._batches[arrival])
        else:
            arrival = self._implicit_transfer(source[0], self._producer(*source, kind, microbatch))
        self._inputs.append((node, arrival))
        return [*inputs, arrival]

    def _producer(self, rank: int, chunk: int, kind: ActionKind, microbatch: int) -> Node | str:
        """Return the node that computes the output of a chunk, forward or backward."""
        if kind is ActionKind.FORWARD:
            return self._find(rank, Action(ActionKind.FORWARD, chunk, microbatch))
        kinds = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        return self._find(rank, *(Action(kind, chunk, microbatch) for kind in kinds))

    def _implicit_transfer(self, rank: int, producer: Node | str) -> Node | str:
        """Add the transfer of an output to the next rank, in a schedule without transfers."""
        if isinstance(producer, str):
            return producer
        action = self._schedule.ranks[rank][producer.index]
        send = (
            ActionKind.SEND_FORWARD
            if action.kind is ActionKind.FORWARD
            else ActionKind.SEND_BACKWARD
        )
        stage = self._schedule.virtual_stage(rank, action.chunk)
        seconds = self._seconds_of(send, stage) if self._schedule.stages > 1 else 0.0
        node = Node("transfer", rank, producer.index)
        self._add(node, seconds, [producer])
        return node

    def _transfer(self, node: Node, action: Action, compute: list[Node | str]) -> list[Node | str]:
        """Return the dependencies of a send or receive; the send has the duration of both."""
        peer = self._schedule.matching_transfer(node.rank, action)
        match = f"{action} has no counterpart" if peer is None else self._find(*peer)
        reached = compute
        if node in self._batches:
            reached = [Node("batch", node.rank, self._batches[node])]
        # A receive ends with its send, and takes no time of its own.
        if action.kind not in SENDS:
            return [*reached, match]
        kind = ActionKind.FORWARD if action.kind is ActionKind.SEND_FORWARD else ActionKind.BACKWARD
        inputs = [*reached, self._producer(node.rank, action.chunk, kind, action.microbatch)]
        # Rendezvous: a send also waits until the peer has reached the batch of the receive.
        if node in self._batches:
            if isinstance(match, Node) and match in self._batches:
                match = Node("batch", match.rank, self._batches[match])
            inputs.append(match)
        return inputs

    def _deadlock_text(self, spans: dict[Node, tuple[float, float]]) -> str:
        """Return the position of every blocked rank and the actions that it waits for."""
        texts = []
        for rank, actions in enumerate(self._schedule.ranks):
            nodes = [Node("do", rank, index) for index in range(len(actions))]
            for node in nodes:
                if node in spans:
                    continue
                waits = [x for x in self._dependencies[node] if x not in spans]
                what = " and ".join(dict.fromkeys(map(self._describe, waits)))
                texts.append(f"rank {rank} at {actions[node.index]} waits for {what}")
                break
        return "deadlock: " + "; ".join(texts)

    def _describe(self, node: Node | str) -> str:
        """Return the text of a dependency."""
        if isinstance(node, str):
            return node
        if node.what in ("batch", "batch end"):
            transfers = [n for n, number in self._batches.items() if n.rank == node.rank]
            transfers = [n for n in transfers if self._batches[n] == node.index]
            names = " ".join(str(self._schedule.ranks[n.rank][n.index]) for n in transfers)
            turn = "the turn" if node.what == "batch" else "the end"
            return f"{turn} of [{names}] on rank {node.rank}"
        return f"{self._schedule.ranks[node.rank][node.index]} of rank {node.rank}"


#: A number, or one for each virtual stage.
PerStage: TypeAlias = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Durations of the actions in any unit; a single number or one for each virtual stage.

    Args:
        forward, input_gradient, weight_gradient: of one microbatch; a whole backward takes the sum
            of input and weight gradient.
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

    def of(self, kind: ActionKind, virtual_stage: int) -> float:
        """Return the duration of an action; 0 for a receive, because its send has the duration."""
        values: tuple[PerStage, ...]
        match kind:
            case ActionKind.FORWARD:
                values = (self.forward,)
            case ActionKind.BACKWARD:
                values = (self.input_gradient, self.weight_gradient)
            case ActionKind.INPUT_GRADIENT:
                values = (self.input_gradient,)
            case ActionKind.WEIGHT_GRADIENT:
                values = (self.weight_gradient,)
            case ActionKind.GATHER:
                values = (self.gather,)
            case ActionKind.REDUCE:
                values = (self.reduce,)
            case ActionKind.SEND_FORWARD | ActionKind.SEND_BACKWARD:
                values = (self.transfer,)
            case _:  # receives: the send has the duration of the transfer
                values = ()
        return sum((v if isinstance(v, (int, float)) else v[virtual_stage] for v in values), 0.0)


class Event(NamedTuple):
    """The start and end of one action. Both are the arrival of the tensor for a receive."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The timing of a schedule.

    Args:
        schedule: the schedule.
        ranks: the events of every rank, in the order of its list.
        makespan: end of the last event.
        peak_received: maximum number of received tensors that wait for their compute, by rank.
    """

    schedule: Schedule
    ranks: tuple[tuple[Event, ...], ...]
    makespan: float
    peak_received: tuple[int, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """The idle time of each rank."""
        return tuple(
            self.makespan - sum(e.end - e.start for e in events if e.action.kind in COMPUTES)
            for events in self.ranks
        )

    @property
    def bubble_fraction(self) -> float:
        """The idle fraction of the time of all ranks, from 0 to 1."""
        return sum(self.idle) / (self.makespan * len(self.ranks)) if self.makespan else 0.0

    def peak_activations(self, freed_by_input_gradient: float = 0.0) -> tuple[float, ...]:
        """Return the maximum number of activations in memory by rank, each of a chunk and a
        microbatch.

        Args:
            freed_by_input_gradient: the fraction of an activation that I frees, from 0 to 1; W, or
                a whole backward, frees the remaining one.
        """
        change = {
            ActionKind.FORWARD: 1.0,
            ActionKind.BACKWARD: -1.0,
            ActionKind.INPUT_GRADIENT: -freed_by_input_gradient,
            ActionKind.WEIGHT_GRADIENT: freed_by_input_gradient - 1.0,
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
    """Return the timing of a schedule.

    Args:
        schedule: a schedule of computes, with or without transfers, gathers and reductions.
        times: durations of the actions.
        rendezvous: transfers block as in NCCL, see the module; otherwise nothing blocks.

    Raises:
        DeadlockError: ranks wait for actions that never happen; the message names them.
    """
    graph = DependencyGraph(schedule, times.of, rendezvous=rendezvous)
    spans = graph.spans()
    ranks = tuple(
        tuple(Event(action, *spans[Node("do", rank, n)]) for n, action in enumerate(actions))
        for rank, actions in enumerate(schedule.ranks)
    )
    makespan = max((event.end for events in ranks for event in events), default=0.0)
    peaks = tuple(_max_overlap(intervals) for intervals in graph.input_intervals(spans))
    return Timeline(schedule, ranks, makespan, peaks)


def _max_overlap(intervals: Iterable[tuple[float, float]]) -> int:
    """Return the maximum number of overlapping intervals [start, end)."""
    changes = [
        (time, change)
        for start, end in intervals
        if start < end
        for time, change in ((start, 1), (end, -1))
    ]
    count = max_count = 0
    # At equal times ends (-1) sort before starts (+1): half-open intervals do not overlap there.
    for _, change in sorted(changes):
        count += change
        max_count = max(max_count, count)
    return max_count


_WHOLE, _SPLIT = (ActionKind.BACKWARD,), (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
_NEEDS_WEIGHTS = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT})
_MAKES_GRADIENTS = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT})


def check(schedule: Schedule) -> list[str]:
    """Return all errors of a schedule, an empty list if it can be executed.

    - Every chunk computes the forward of every microbatch once. Unless no list has a backward, it
      computes each backward once, after F: as B, or as I and later W. Actions of one kind on a
      chunk are in the order of the microbatches, so that sums have the same bits in all schedules.
    - Either no list has transfers; or every output for another rank is sent once, after its
      compute, and received once, before its use. Two ranks have the transfers of one direction
      between them in the same order.
    - Gathers, if any, are one per chunk, before its first F and with the same microbatch; or one
      per F, B and I, with no compute in between. Reductions are one after the last B or W of each
      chunk, or one after each, with no compute in between.
    - No deadlock with eager or rendezvous transfers. This is checked only if there are no other
      errors.
    """
    if len(schedule.ranks) != schedule.stages:
        return [f"{len(schedule.ranks)} lists for {schedule.stages} stages"]
    lists = [_RankList(schedule, rank) for rank in range(schedule.stages)]
    out_of_range = [problem for rank_list in lists for problem in rank_list.out_of_range()]
    if out_of_range:
        return out_of_range
    backward = any(
        rank_list.has(_MAKES_GRADIENTS | {ActionKind.INPUT_GRADIENT}) for rank_list in lists
    )
    errors = [problem for rank_list in lists for problem in rank_list.computes(backward)]
    if any(rank_list.has(TRANSFERS) for rank_list in lists):
        errors += [problem for rank_list in lists for problem in rank_list.transfers()]
        errors += _order_errors(schedule)
    errors += _weight_traffic_errors(lists, ActionKind.GATHER, _NEEDS_WEIGHTS)
    errors += _weight_traffic_errors(lists, ActionKind.REDUCE, _MAKES_GRADIENTS)
    # Only for lists without errors: a missing action would be reported as a deadlock as well.
    if not errors:
        for rendezvous in (False, True):
            try:
                simulate(schedule, Times(), rendezvous=rendezvous)
            except DeadlockError as error:
                return [str(error)]
    return errors


class _RankList:
    """One rank's list and the index of each of its actions."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.actions = schedule, rank, schedule.ranks[rank]
        self.index_of: dict[Action, int] = {}
        for index, action in enumerate(self.actions):
            self.index_of.setdefault(action, index)  # the first of duplicates
        self.counts = Counter(self.actions)
        self.kinds = {action.kind for action in self.actions}

    def has(self, kinds: frozenset[ActionKind]) -> bool:
        """Return whether the list has an action of a kind in `kinds`."""
        return not self.kinds.isdisjoint(kinds)

    def out_of_range(self) -> Iterator[str]:
        """Yield actions on chunks, microbatches or peers that do not exist."""
        chunks, microbatches = self.schedule.chunks, self.schedule.microbatches
        for action in self.counts:
            if not (0 <= action.chunk < chunks and 0 <= action.microbatch < microbatches):
                yield (
                    f"rank {self.rank}: {action} is outside its {chunks} chunks and "
                    f"{microbatches} microbatches"
                )
            elif action.kind in TRANSFERS:
                peer = self.schedule.matching_transfer(self.rank, action)
                if peer is None or peer[0] == self.rank:
                    yield f"rank {self.rank}: {action} has no peer rank"

    def computes(self, backward: bool) -> Iterator[str]:
        """Yield the errors in F, B, I and W."""
        for chunk in range(self.schedule.chunks):
            for microbatch in range(self.schedule.microbatches):
                order = [ActionKind.FORWARD]
                if backward:
                    kinds = [
                        k
                        for k in (*_WHOLE, *_SPLIT)
                        if Action(k, chunk, microbatch) in self.index_of
                    ]
                    if ActionKind.BACKWARD in kinds and len(kinds) > 1:
                        names = " and ".join(kind.value for kind in kinds)
                        yield f"rank {self.rank}: {names} of microbatch {chunk}.{microbatch}"
                    whole = ActionKind.BACKWARD in kinds or not kinds
                    order += _WHOLE if whole else _SPLIT
                actions = [Action(kind, chunk, microbatch) for kind in order]
                for action in actions:
                    yield from self._once(action)
                for earlier, later in pairwise(actions):
                    yield from self._ordered(earlier, later)
        previous: dict[tuple[ActionKind, int], Action] = {}
        for action in self.index_of:
            if action.kind in COMPUTES:
                earlier = previous.get((action.kind, action.chunk))
                if earlier is not None and earlier.microbatch > action.microbatch:
                    yield f"rank {self.rank}: {earlier} comes before {action}"
                previous[action.kind, action.chunk] = action

    def transfers(self) -> Iterator[str]:
        """Yield the errors in this rank's sends and receives, except for their order."""
        expected = set()
        for action in self.index_of:
            for transfer in self._transfers_of(action):
                if transfer not in expected:
                    yield from self._once(transfer)
                expected.add(transfer)
                if transfer.kind in SENDS:
                    yield from self._ordered(action, transfer)
                else:
                    yield from self._ordered(transfer, action)
        for action in self.index_of:
            if action.kind in SENDS and action not in expected:
                yield f"rank {self.rank}: {action} sends a tensor that is not computed"
            if action.kind in RECEIVES and action not in expected:
                yield f"rank {self.rank}: {action} receives a tensor that nothing uses"

    def _transfers_of(self, action: Action) -> Iterator[Action]:
        """Yield the receive before a compute and the send after it."""
        if action.kind is ActionKind.FORWARD:
            kinds = (ActionKind.RECEIVE_FORWARD, ActionKind.SEND_FORWARD)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            kinds = (ActionKind.RECEIVE_BACKWARD, ActionKind.SEND_BACKWARD)
        else:
            return
        for kind in kinds:
            transfer = Action(kind, action.chunk, action.microbatch)
            if self.schedule.matching_transfer(self.rank, transfer) is not None:
                yield transfer

    def _once(self, action: Action) -> Iterator[str]:
        count = self.counts[action]
        if count != 1:
            yield (
                f"rank {self.rank}: {action} is {f'listed {count} times' if count else 'missing'}"
            )

    def _ordered(self, earlier: Action, later: Action) -> Iterator[str]:
        if self.index_of.get(earlier, -1) > self.index_of.get(later, len(self.actions)):
            yield f"rank {self.rank}: {later} comes before {earlier}"


def _order_errors(schedule: Schedule) -> Iterator[str]:
    """Yield the pairs of ranks that disagree about the order of their transfers."""
    between: dict[tuple[int, int, bool], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            peer = schedule.matching_transfer(rank, action)
            if peer is not None:
                between[rank, peer[0], action.kind in FORWARD_TRANSFERS].append((rank, action))
    for low, high, is_forward in sorted(between):
        if low > high:  # both orders of a pair are keys
            continue
        matches = [schedule.matching_transfer(*x) for x in between[high, low, is_forward]]
        for (_, action), match in zip(between[low, high, is_forward], matches, strict=False):
            if match is not None and action != match[1]:
                yield (
                    f"ranks {low} and {high}: {action} on rank {low} meets the counterpart "
                    f"of {match[1]}"
                )
                break


def _weight_traffic_errors(
    lists: list[_RankList], kind: ActionKind, computes: frozenset[ActionKind]
) -> Iterator[str]:
    """Yield the errors in gathers, which precede `computes`, or in reductions, which follow them.

    Lists with reductions are checked in reverse, so that both kinds come before their compute.
    """
    walks = [x.actions if kind is ActionKind.GATHER else x.actions[::-1] for x in lists]
    num_actions = sum(action.kind is kind for walk in walks for action in walk)
    num_computes = sum(action.kind in computes for walk in walks for action in walk)
    num_chunks = sum(len({a.chunk for a in walk if a.kind in computes}) for walk in walks)
    if not num_actions:
        return
    for rank, walk in enumerate(walks):
        # The intended placement is the one with the closer number of actions, so that a single
        # missing action is reported as such.
        if abs(num_actions - num_chunks) <= abs(num_actions - num_computes):
            problems = _once_per_chunk(walk, kind, computes)
        else:
            problems = _once_per_compute(walk, kind, computes)
        for problem in problems:
            yield f"rank {rank}: {problem}"


def _once_per_chunk(
    walk: tuple[Action, ...], kind: ActionKind, computes: frozenset[ActionKind]
) -> Iterator[str]:
    """Yield chunks without exactly one gather or reduction before their first compute."""
    first_compute: dict[int, int] = {}
    for index, action in enumerate(walk):
        if action.kind in computes:
            first_compute.setdefault(action.chunk, index)
    # Gathers are compared with the first compute of a chunk, reductions with the last: their lists
    # are reversed.
    for chunk, index in sorted(first_compute.items()):
        expected = Action(kind, chunk, walk[index].microbatch)
        indices = [i for i, a in enumerate(walk) if a.kind is kind and a.chunk == chunk]
        between = walk[indices[0] : index] if indices else ()
        # Computes in between would delay a reduction, but give a gather time to overlap.
        delayed = kind is ActionKind.REDUCE and any(a.kind in COMPUTES for a in between)
        if [walk[i] for i in indices] != [expected]:
            names = " ".join(str(walk[i]) for i in indices) or "nothing"
            yield f"{names} for chunk {chunk} where {expected} belongs"
        elif indices[0] > index or delayed:
            yield f"{expected} is not {_SIDES[kind]} {walk[index]}"
    for action in dict.fromkeys(walk):
        if action.kind is kind and action.chunk not in first_compute:
            yield f"{action} belongs to no compute action"


def _once_per_compute(
    walk: tuple[Action, ...], kind: ActionKind, computes: frozenset[ActionKind]
) -> Iterator[str]:
    """Yield computes without a gather or reduction of their own."""
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


_SIDES: Mapping[ActionKind, str] = MappingProxyType(
    {ActionKind.GATHER: "right before", ActionKind.REDUCE: "right after"}
)

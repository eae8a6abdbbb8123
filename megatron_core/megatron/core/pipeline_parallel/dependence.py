# SPDX-License-Identifier: Apache-2.0
"""What has to end before what starts in a schedule: a graph, and the walk through it in time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule import (
    AHEAD,
    COMPUTES,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
)


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
        """Say for every rank that stands still where it is and what it waits for."""
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

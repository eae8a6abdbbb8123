# SPDX-License-Identifier: Apache-2.0
"""How long a schedule takes, what it idles and keeps: simulated without processes.

A schedule is a graph: an action starts when everything before it has ended. Computes of a rank
follow each other in the order of its list; transfers, gathers and reductions run beside them. A
schedule of computes alone is taken as if every tensor left when it is ready.

There are two rules for the transfers of a list:

- eager: a send leaves when the rank's list reaches it, and its receive ends when it is there and
  reached. Nothing blocks.
- rendezvous, the rule of NCCL with a communicator for each direction: adjacent transfers of one
  direction are one batch. The batches of a rank and direction follow each other, a transfer starts
  when both its ranks are at its batch, and what needs one transfer of a batch waits for the whole
  batch. Lists that pair their transfers up badly deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from megatron.core.pipeline_parallel.dependence import DeadlockError, Dependence, Node
from megatron.core.pipeline_parallel.schedule import COMPUTES, Action, Kind, Schedule

__all__ = ["DeadlockError", "Event", "PerStage", "Timeline", "Times", "simulate"]

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
        DeadlockError: what ranks wait for never comes; says which, and for what.
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

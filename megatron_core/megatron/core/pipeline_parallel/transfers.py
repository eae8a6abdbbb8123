# SPDX-License-Identifier: Apache-2.0
"""What a schedule's ranks pass to each other and when their weights travel, added to its lists.

**No deadlock.** Every transfer is given a place in one order of all events of all ranks: the time
at which its tensor is computed when forward, input gradient and weight gradient take one unit each
and transfers none. Each list is sorted by that order, so at any moment the first event of all that
has not happened heads the list of every rank that it concerns, and nothing is before it: it can
happen. This holds even when a send blocks until it is received and every rank does one thing at a
time. In the lists of two ranks the transfers between them come in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule import COMPUTES, TRANSFERS, Action, Kind, Schedule
from megatron.core.pipeline_parallel.simulate import Times, simulate

#: F, I and W take one unit each.
_UNIT_TIMES = Times()


class _Place(NamedTuple):
    """Where an event is in the order of all; transfers come before computes that start then.

    Args:
        number: parts transfers of one time; the same at both ends.
    """

    time: float
    computes: bool
    number: int


def with_transfers(schedule: Schedule) -> Schedule:
    """Return a schedule of computes with the sends and receives that they need.

    A send is right after the compute that makes its tensor. A receive is before the first compute
    that starts when the tensor is made, or later, so never after the one that needs it: there it is
    posted, and the compute that needs it waits for it. Adjacent transfers are one batch. One rank
    has none.

    Raises:
        ValueError: the lists hold more than computes, or computes that wait for each other.
    """
    _reject(schedule, [kind for kind in Kind if kind not in COMPUTES], "add transfers first")
    if schedule.stages == 1:
        return schedule
    timeline = simulate(schedule, _UNIT_TIMES)
    placed: list[list[tuple[_Place, Action]]] = [
        [(_Place(event.start, True, 0), event.action) for event in events]
        for events in timeline.ranks
    ]
    made = sorted(
        (event.end, rank, index)
        for rank, events in enumerate(timeline.ranks)
        for index, event in enumerate(events)
    )
    for number, (time, rank, index) in enumerate(made):
        send = _send(schedule, rank, schedule.ranks[rank][index])
        if send is not None:
            place = _Place(time, False, number)
            placed[rank].append((place, send))
            receiver, receive = schedule.other_end(rank, send) or (rank, send)
            placed[receiver].append((place, receive))
    lists = (sorted(events, key=lambda event: event[0]) for events in placed)
    return replace(schedule, ranks=tuple(tuple(action for _, action in events) for events in lists))


def _send(schedule: Schedule, rank: int, compute: Action) -> Action | None:
    """Return the send that follows a compute, None if its output stays."""
    if compute.kind is Kind.FORWARD:
        kind = Kind.SEND_FORWARD
    elif compute.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        kind = Kind.SEND_BACKWARD
    else:
        return None
    send = Action(kind, compute.chunk, compute.microbatch)
    return None if schedule.other_end(rank, send) is None else send


def _reject(schedule: Schedule, kinds: list[Kind], mend: str) -> None:
    """Raise if the lists hold actions of these kinds."""
    found = {action.kind for actions in schedule.ranks for action in actions}
    names = [kind.name.lower() for kind in kinds if kind in found]
    if names:
        raise ValueError(f"the schedule has {', '.join(names)} already: {mend}")


def with_weight_traffic(schedule: Schedule, *, gathers: str, reduces: str) -> Schedule:
    """Return a schedule with the gathers of weights and reductions of gradients that it needs.

    Args:
        schedule: with or without transfers; batches of transfers stay together.
        gathers: "none"; "once": each chunk's weights for the whole step, under `G` of its first
            forward's microbatch, right before the last compute ahead of that forward, so that they
            come in meanwhile; "each": right before every F, B and I, after its receives are posted
            and before they are waited for. W needs no weights.
        reduces: "none"; "once": after a chunk's last B or W; "each": after every B and W. Transfers
            that follow that compute come first: no rank waits for another's reductions.

    Raises:
        ValueError: another word, or there are gathers or reductions already.
    """
    for what, word in (("gathers", gathers), ("reduces", reduces)):
        if word not in ("none", "once", "each"):
            raise ValueError(f"{what} {word!r}: take none, once or each")
    _reject(schedule, [Kind.GATHER, Kind.REDUCE], "add the traffic of weights once")
    lists = (tuple(_with_traffic(actions, gathers, reduces)) for actions in schedule.ranks)
    return replace(schedule, ranks=tuple(lists))


def _with_traffic(actions: tuple[Action, ...], gathers: str, reduces: str) -> Iterator[Action]:
    """Yield one rank's list with the traffic of its weights."""
    before: dict[int, list[Action]] = {}
    after: dict[int, Action] = {}
    gathered: set[int] = set()
    last_of_chunk: dict[int, int] = {}
    ahead = 0
    for index, action in enumerate(actions):
        if action.kind not in COMPUTES:
            continue
        gather = Action(Kind.GATHER, action.chunk, action.microbatch)
        if gathers == "each" and action.kind is not Kind.WEIGHT_GRADIENT:
            before.setdefault(index, []).append(gather)
        elif gathers == "once" and action.chunk not in gathered:
            gathered.add(action.chunk)
            before.setdefault(ahead, []).append(gather)
        ahead = index
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            if reduces == "once" and action.chunk in last_of_chunk:
                del after[last_of_chunk[action.chunk]]
            last_of_chunk[action.chunk] = index
            if reduces != "none":
                after[index] = Action(Kind.REDUCE, action.chunk, action.microbatch)
    due: list[Action] = []
    for index, action in enumerate(actions):
        if action.kind not in TRANSFERS:
            yield from due
            due = []
        yield from before.get(index, ())
        yield action
        if index in after:
            due.append(after[index])
    yield from due

# SPDX-License-Identifier: Apache-2.0
"""The transfers of a schedule, added to its lists: activations, gradients and weights.

**No deadlock.** Every transfer is given a place in one order of all events of all ranks: the time
at which its tensor is computed when forward, input gradient and weight gradient take one unit each
and transfers none. Each list is sorted by that order, so at any moment the first event of all that
has not happened heads the list of every rank that it concerns, and nothing is before it: it can
happen. This holds even when a send blocks until it is received and every rank does one thing at a
time. In the lists of two ranks the transfers between them come in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from megatron.core.pipeline_parallel.schedule import COMPUTES, TRANSFERS, Action, Kind, Schedule
from megatron.core.pipeline_parallel.simulate import Times, simulate

#: An event in the order of all: its time; 0 for a transfer, which comes before a compute that
#: starts then; a number that parts transfers of one time, the same at both ends. No two of a rank
#: are alike in these three, so sorting compares no actions.
_Placed: TypeAlias = tuple[int, int, int, Action]


def with_transfers(schedule: Schedule) -> Schedule:
    """Return a schedule of computes with the sends and receives that they need.

    A send is right after the compute that makes its tensor. A receive is before the first compute
    that starts when the tensor is made, or later, so never after the one that needs it: there it is
    posted, and the compute that needs it waits for it. Adjacent transfers of a direction are one
    batch. One rank has none.

    Raises:
        ValueError: the lists hold more than computes, or computes that wait for each other.
    """
    _reject(schedule, [kind for kind in Kind if kind not in COMPUTES], "add transfers first")
    if schedule.stages == 1:
        return schedule
    placed: list[list[_Placed]] = [[] for _ in schedule.ranks]
    made: list[tuple[int, int, int]] = []
    for rank, ends in enumerate(_ends(schedule)):
        for index, (action, end) in enumerate(zip(schedule.ranks[rank], ends, strict=True)):
            placed[rank].append((end - _units(action.kind), 1, 0, action))
            if action.kind is not Kind.WEIGHT_GRADIENT:
                made.append((end, rank, index))
    made.sort()
    for number, (end, rank, index) in enumerate(made):
        compute = schedule.ranks[rank][index]
        if compute.kind is Kind.FORWARD:
            send, receive = Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD
            place = schedule.following(rank, compute.chunk)
        else:
            send, receive = Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD
            place = schedule.preceding(rank, compute.chunk)
        if place is not None:
            there, chunk, microbatch = *place, compute.microbatch
            placed[rank].append((end, 0, number, Action(send, compute.chunk, microbatch)))
            placed[there].append((end, 0, number, Action(receive, chunk, microbatch)))
    for events in placed:
        events.sort()
    return replace(schedule, ranks=tuple(tuple(event[3] for event in events) for events in placed))


def _units(kind: Kind) -> int:
    """Return how long a compute takes: one unit, a whole backward is I and W."""
    return 2 if kind is Kind.BACKWARD else 1


def _ends(schedule: Schedule) -> list[list[int]]:
    """Return when each compute of each rank ends: as `simulate` computes it, without its graph.

    Raises:
        DeadlockError: computes that wait for each other; names them.
    """
    stages, many = schedule.stages, schedule.microbatches
    behind = stages * schedule.chunks * many
    # By virtual stage * microbatches + microbatch; what the embedding and the loss need is there.
    forward = dict.fromkeys(range(-many, 0), 0)
    backward = dict.fromkeys(range(behind, behind + many), 0)
    found: list[list[int]] = [[] for _ in schedule.ranks]
    ready, waits = deque(range(stages)), [False] * stages
    while ready:
        rank = ready.popleft()
        actions, mine, waits[rank] = schedule.ranks[rank], found[rank], False
        clock = mine[-1] if mine else 0
        for index in range(len(mine), len(actions)):
            kind, own = actions[index].kind, actions[index].microbatch
            own += (actions[index].chunk * stages + rank) * many
            if kind is Kind.FORWARD:
                needs, makes, feeds = (forward.get(own - many),), forward, (rank + 1) % stages
            elif kind is Kind.WEIGHT_GRADIENT:
                needs, makes, feeds = (backward.get(own),), {}, rank
            else:
                needs = forward.get(own), backward.get(own + many)
                makes, feeds = backward, (rank - 1) % stages
            if None in needs:
                waits[rank] = True
                break
            clock = makes[own] = max(clock, *needs) + _units(kind)
            mine.append(clock)
            if waits[feeds]:
                waits[feeds] = False
                ready.append(feeds)
    if any(waits):
        simulate(schedule, Times())  # raises
    return found


def _reject(schedule: Schedule, kinds: list[Kind], fix: str) -> None:
    """Raise if the lists hold actions of these kinds."""
    found = {action.kind for actions in schedule.ranks for action in actions}
    names = [kind.name.lower() for kind in kinds if kind in found]
    if names:
        raise ValueError(f"the schedule has {', '.join(names)} already: {fix}")


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

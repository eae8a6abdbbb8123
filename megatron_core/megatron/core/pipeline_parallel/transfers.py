# SPDX-License-Identifier: Apache-2.0
"""Add transfers to a schedule: activations, gradients and weights.

**No deadlock.** All events of all ranks have one total order. The position of a transfer is the
time at which its tensor is computed, if forward, input gradient and weight gradient take one unit
each and transfers none. Each list is sorted by this order. So the earliest event that has not
happened is at the head of the list of every rank that takes part in it, and can happen. This holds
even if a send blocks until it is received and every rank does one thing at a time. The lists of two
ranks have the transfers between them in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from megatron.core.pipeline_parallel.schedule import (
    COMPUTES,
    TRANSFERS,
    Action,
    ActionKind,
    Schedule,
)
from megatron.core.pipeline_parallel.simulate import Times, simulate

#: An event in the total order: its time; 0 for a transfer and 1 for a compute, so that transfers
#: come before computes that start at the same time; a number that orders transfers of the same time
#: on both ranks alike. These three are unique on a rank, so sorting never compares actions.
_TimedAction: TypeAlias = tuple[int, int, int, Action]


def with_transfers(schedule: Schedule) -> Schedule:
    """Return a schedule with the sends and receives that its computes need.

    A send follows the compute of its tensor. A receive is posted before the first compute that
    starts at the time of the send or later, and the compute that needs the tensor waits for it.
    Adjacent transfers of a direction are one batch. A single stage has no transfers.

    Raises:
        ValueError: the lists have other actions than computes, or computes wait for each other.
    """
    _reject(
        schedule, [kind for kind in ActionKind if kind not in COMPUTES], "call add_transfers first"
    )
    if schedule.stages == 1:
        return schedule
    timed: list[list[_TimedAction]] = [[] for _ in schedule.ranks]
    outputs: list[tuple[int, int, int]] = []
    for rank, ends in enumerate(_end_times(schedule)):
        for index, (action, end) in enumerate(zip(schedule.ranks[rank], ends, strict=True)):
            # A compute has the position of its start, its output the position of its end.
            timed[rank].append((end - _units(action.kind), 1, 0, action))
            if action.kind is not ActionKind.WEIGHT_GRADIENT:
                outputs.append((end, rank, index))
    # Numbered over all ranks, so that both ends of a transfer have the same number.
    outputs.sort()
    for number, (end, rank, index) in enumerate(outputs):
        compute = schedule.ranks[rank][index]
        if compute.kind is ActionKind.FORWARD:
            send, receive = ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD
            dest = schedule.next_stage(rank, compute.chunk)
        else:
            send, receive = ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD
            dest = schedule.prev_stage(rank, compute.chunk)
        if dest is not None:
            dest_rank, dest_chunk, microbatch = *dest, compute.microbatch
            timed[rank].append((end, 0, number, Action(send, compute.chunk, microbatch)))
            timed[dest_rank].append((end, 0, number, Action(receive, dest_chunk, microbatch)))
    for events in timed:
        events.sort()
    return replace(schedule, ranks=tuple(tuple(event[3] for event in events) for events in timed))


def _units(kind: ActionKind) -> int:
    """Return the duration of a compute: one unit, and two for a whole backward (I and W)."""
    return 2 if kind is ActionKind.BACKWARD else 1


def _end_times(schedule: Schedule) -> list[list[int]]:
    """Return the end time of every compute by rank, as `simulate` does but without a graph.

    Raises:
        DeadlockError: computes wait for each other; the message names them.
    """
    stages, microbatches = schedule.stages, schedule.microbatches
    num_outputs = stages * schedule.chunks * microbatches
    # Keyed by virtual stage * microbatches + microbatch. The inputs of the embedding and of the
    # loss exist at time 0.
    forward = dict.fromkeys(range(-microbatches, 0), 0)
    backward = dict.fromkeys(range(num_outputs, num_outputs + microbatches), 0)
    end_times: list[list[int]] = [[] for _ in schedule.ranks]
    ready, blocked = deque(range(stages)), [False] * stages
    while ready:
        rank = ready.popleft()
        actions, ends, blocked[rank] = schedule.ranks[rank], end_times[rank], False
        clock = ends[-1] if ends else 0
        for index in range(len(ends), len(actions)):
            kind, key = actions[index].kind, actions[index].microbatch
            key += (actions[index].chunk * stages + rank) * microbatches
            if kind is ActionKind.FORWARD:
                awaited = (forward.get(key - microbatches),)
                outputs, consumer = forward, (rank + 1) % stages
            elif kind is ActionKind.WEIGHT_GRADIENT:
                awaited, outputs, consumer = (backward.get(key),), {}, rank
            else:
                awaited = forward.get(key), backward.get(key + microbatches)
                outputs, consumer = backward, (rank - 1) % stages
            inputs = [time for time in awaited if time is not None]
            if len(inputs) < len(awaited):
                blocked[rank] = True
                break
            clock = outputs[key] = max(clock, *inputs) + _units(kind)
            ends.append(clock)
            # Wake the rank that may wait for this output. A weight gradient has no consumer.
            if blocked[consumer]:
                blocked[consumer] = False
                ready.append(consumer)
    # A blocked rank waits for an output that no list computes, or ranks wait for each other.
    if any(blocked):
        simulate(schedule, Times())  # raises the DeadlockError, with its text
    return end_times


def _reject(schedule: Schedule, kinds: list[ActionKind], fix: str) -> None:
    """Raise a ValueError if the lists have actions of a kind in `kinds`."""
    present = {action.kind for actions in schedule.ranks for action in actions}
    names = [kind.name.lower() for kind in kinds if kind in present]
    if names:
        raise ValueError(f"the schedule has {', '.join(names)} already: {fix}")


def with_weight_traffic(schedule: Schedule, *, gathers: str, reduces: str) -> Schedule:
    """Return a schedule with the all-gathers of its weights and reductions of its gradients.

    Args:
        schedule: with or without transfers; batches of transfers stay together.
        gathers: "none"; "once": one gather per chunk and step, before the compute that precedes the
            chunk's first forward, so that they overlap; "each": right before every F, B and I,
            after its receives are posted and before they are waited for. W needs no weights.
        reduces: "none"; "once": after a chunk's last B or W; "each": after every B and W. Transfers
            that follow the compute come first, so no rank waits for the reductions of another.

    Raises:
        ValueError: an unknown value, or the schedule has gathers or reductions already.
    """
    for what, word in (("gathers", gathers), ("reduces", reduces)):
        if word not in ("none", "once", "each"):
            raise ValueError(f"{what} {word!r}: use none, once or each")
    _reject(
        schedule, [ActionKind.GATHER, ActionKind.REDUCE], "weight traffic can be added only once"
    )
    lists = (tuple(_with_traffic(actions, gathers, reduces)) for actions in schedule.ranks)
    return replace(schedule, ranks=tuple(lists))


def _with_traffic(actions: tuple[Action, ...], gathers: str, reduces: str) -> Iterator[Action]:
    """Yield one rank's list with its gathers and reductions."""
    before: dict[int, list[Action]] = {}
    after: dict[int, Action] = {}
    gathered: set[int] = set()
    last_of_chunk: dict[int, int] = {}
    previous_compute = 0
    for index, action in enumerate(actions):
        if action.kind not in COMPUTES:
            continue
        gather = Action(ActionKind.GATHER, action.chunk, action.microbatch)
        if gathers == "each" and action.kind is not ActionKind.WEIGHT_GRADIENT:
            before.setdefault(index, []).append(gather)
        elif gathers == "once" and action.chunk not in gathered:
            # One compute earlier, so that the all-gather overlaps with it.
            gathered.add(action.chunk)
            before.setdefault(previous_compute, []).append(gather)
        previous_compute = index
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            if reduces == "once" and action.chunk in last_of_chunk:
                del after[last_of_chunk[action.chunk]]
            last_of_chunk[action.chunk] = index
            if reduces != "none":
                after[index] = Action(ActionKind.REDUCE, action.chunk, action.microbatch)
    # Reductions follow the transfers after their compute: peers wait for the transfers only.
    reductions: list[Action] = []
    for index, action in enumerate(actions):
        if action.kind not in TRANSFERS:
            yield from reductions
            reductions = []
        yield from before.get(index, ())
        yield action
        if index in after:
            reductions.append(after[index])
    yield from reductions

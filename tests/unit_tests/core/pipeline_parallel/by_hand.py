# SPDX-License-Identifier: Apache-2.0
"""Schedules drawn at random, and carried out action by action, without megatron's simulation."""

from __future__ import annotations

import random
from collections import defaultdict, deque

from megatron.core.pipeline_parallel import (
    COMPUTES,
    FORWARD_TRANSFERS,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    ActionKind,
    Schedule,
    Times,
    make_schedule,
    problems,
    with_transfers,
    with_weight_traffic,
)

TRAFFIC = ("none", "once", "each")


def random_schedule(
    draw: random.Random, *, stages: int = 8, chunks: int = 4, microbatches: int = 10
) -> Schedule:
    """Return the computes of a schedule that `problems` has nothing against."""
    name = draw.choice(["1f1b", "interleaved", "zb-h1", "forward"])
    many = name in ("interleaved", "forward")
    while True:
        sizes = {
            "stages": draw.randint(1, stages),
            "microbatches": draw.randint(1, microbatches),
            "chunks": draw.randint(1, chunks) if many else 1,
            "group_size": draw.randint(1, microbatches) if many and draw.random() < 0.6 else None,
        }
        if not problems(name, **sizes):
            return make_schedule(name, **sizes)


def random_full(draw: random.Random, **sizes: int) -> Schedule:
    """Return a schedule with all that can be added to it."""
    schedule = with_transfers(random_schedule(draw, **sizes))
    return with_weight_traffic(schedule, gathers=draw.choice(TRAFFIC), reduces=draw.choice(TRAFFIC))


def random_times(draw: random.Random, schedule: Schedule) -> Times:
    """Return times that differ from one virtual stage to the next."""

    def uneven() -> list[float]:
        return [draw.uniform(0.5, 2.0) for _ in range(schedule.stages * schedule.chunks)]

    return Times(
        forward=uneven(),
        input_gradient=uneven(),
        weight_gradient=uneven(),
        transfer=draw.choice([0.0, 0.1, uneven()]),
    )


def ends(schedule: Schedule, times: Times) -> list[float]:
    """Return when every rank has computed all, by the recurrence over (kind, stage, microbatch)."""
    last = schedule.stages * schedule.chunks - 1
    way = times.of if schedule.stages > 1 else lambda kind, stage: 0.0
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * schedule.stages
    queues = [deque(a for a in actions if a.kind in COMPUTES) for actions in schedule.ranks]
    while any(queues):
        before = len(done)
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                stage, number = schedule.virtual_stage(rank, action.chunk), action.microbatch
                needs = []
                if action.kind is ActionKind.FORWARD and stage > 0:
                    needs.append(("f", stage - 1, number, way(ActionKind.SEND_FORWARD, stage - 1)))
                if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
                    needs.append(("f", stage, number, 0.0))
                    if stage < last:
                        needs.append(
                            ("b", stage + 1, number, way(ActionKind.SEND_BACKWARD, stage + 1))
                        )
                if action.kind is ActionKind.WEIGHT_GRADIENT:
                    needs.append(("b", stage, number, 0.0))
                if any(need[:3] not in done for need in needs):
                    break
                start = max([clocks[rank], *(done[need[:3]] + need[3] for need in needs)])
                clocks[rank] = start + times.of(action.kind, stage)
                name = {ActionKind.FORWARD: "f", ActionKind.WEIGHT_GRADIENT: "w"}.get(
                    action.kind, "b"
                )
                done[name, stage, number] = clocks[rank]
                queue.popleft()
        assert len(done) > before, "nothing can go on"
    return clocks


def one_at_a_time(schedule: Schedule) -> bool:
    """Tell whether all lists end if each rank does one thing at a time and sends block.

    A send and its receive happen when both head their lists, and not before.
    """
    queues = [deque(actions) for actions in schedule.ranks]
    while any(queues):
        moved = False
        for rank, queue in enumerate(queues):
            while queue:
                if queue[0].kind in TRANSFERS:
                    other, action = schedule.matching_transfer(rank, queue[0])
                    if not queues[other] or queues[other][0] != action:
                        break
                    queues[other].popleft()
                queue.popleft()
                moved = True
        if not moved:
            return False
    return True


def by_messages(schedule: Schedule, *, rendezvous: bool) -> None:
    """Carry out all lists with messages that nothing but their order tells apart.

    A message lies in a mailbox from its send on; each direction has mailboxes of its own. With
    `rendezvous` it passes when both ranks are at its batch, and a batch of adjacent transfers of a
    direction starts when the one before it has ended. A compute waits for the whole batch that
    brings its input.

    Raises:
        AssertionError: what arrives is something else, something is not there, or nobody goes on.
    """
    ranks = [_Rank(schedule, rank) for rank in range(schedule.stages)]
    while any(not one.finished() for one in ranks):
        moved = [one.go_on() for one in ranks]
        moved += [one.exchange(ranks, rendezvous) for one in ranks]
        assert any(moved), "nobody goes on"
    assert not any(box for one in ranks for box in one.boxes.values()), "left in the mailbox"


class _Rank:
    """What one rank has done so far."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.queue = deque(schedule.ranks[rank])
        self.batches: dict[bool, deque[list[Action]]] = {True: deque(), False: deque()}
        self.boxes: dict[tuple[int, bool], deque[Action]] = defaultdict(deque)
        self.computed: set[tuple[ActionKind, int, int]] = set()
        self.posted: set[Action] = set()

    def finished(self) -> bool:
        return not self.queue and not any(self.batches.values())

    def go_on(self) -> bool:
        moved = False
        while self.queue and self._step():
            moved = True
        return moved

    def _step(self) -> bool:
        action = self.queue[0]
        if action.kind in TRANSFERS:
            batch = []
            while self.queue and self.queue[0].kind in TRANSFERS:
                batch.append(self.queue.popleft())
                if batch[-1].kind in SENDS:
                    self._assert_computed(batch[-1])
            for ahead in (True, False):
                if one_way := [a for a in batch if (a.kind in FORWARD_TRANSFERS) is ahead]:
                    self.batches[ahead].append(one_way)
            self.posted.update(batch)
            return True
        if action.kind in COMPUTES and not self._fed(action):
            return False
        self.queue.popleft()
        return True

    def _assert_computed(self, send: Action) -> None:
        kind = ActionKind.FORWARD if send.kind is ActionKind.SEND_FORWARD else ActionKind.BACKWARD
        assert (kind, send.chunk, send.microbatch) in self.computed, f"{send} of nothing"

    def _fed(self, action: Action) -> bool:
        """Tell whether a compute may start; note that it has."""
        place = (action.chunk, action.microbatch)
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            assert (ActionKind.BACKWARD, *place) in self.computed, f"{action} of nothing"
            return True
        forward = action.kind is ActionKind.FORWARD
        near = self.schedule.prev_stage if forward else self.schedule.next_stage
        source = near(self.rank, action.chunk)
        if source is not None and source[0] != self.rank:
            kind = ActionKind.RECEIVE_FORWARD if forward else ActionKind.RECEIVE_BACKWARD
            receive = Action(kind, *place)
            assert receive in self.posted, f"{receive} is not posted at {action}"
            if any(receive in batch for batch in self.batches[forward]):
                return False
        if not forward:
            assert (ActionKind.FORWARD, *place) in self.computed, f"{action} of nothing"
        self.computed.add((ActionKind.FORWARD if forward else ActionKind.BACKWARD, *place))
        return True

    def exchange(self, ranks: list[_Rank], rendezvous: bool) -> bool:
        """Let messages pass: of the first batch of a direction, without `rendezvous` of all."""
        return any([self._exchange(ranks, ahead, rendezvous) for ahead in (True, False)])

    def _exchange(self, ranks: list[_Rank], ahead: bool, rendezvous: bool) -> bool:
        moved, batches = False, self.batches[ahead]
        for batch in list(batches)[: 1 if rendezvous else None]:
            before = len(batch)
            for action in [a for a in batch if a.kind in SENDS]:
                other, wanted = self.schedule.matching_transfer(self.rank, action)
                theirs = ranks[other].batches[ahead]
                if not rendezvous or (theirs and wanted in theirs[0]):
                    ranks[other].boxes[self.rank, ahead].append(wanted)
                    batch.remove(action)
            for action in [a for a in batch if a.kind in RECEIVES]:
                other, _ = self.schedule.matching_transfer(self.rank, action)
                if self.boxes[other, ahead]:
                    arrived = self.boxes[other, ahead].popleft()
                    assert arrived == action, f"{arrived} arrives where {action} is due"
                    batch.remove(action)
            moved = moved or len(batch) < before
            if not batch:
                batches.remove(batch)
        return moved

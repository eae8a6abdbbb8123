# SPDX-License-Identifier: Apache-2.0
"""Random schedules, and their execution action by action, independent of `simulate`."""

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
    rng: random.Random, *, stages: int = 8, chunks: int = 4, microbatches: int = 10
) -> Schedule:
    """Draw the computes of a schedule for which `problems` reports none."""
    name = rng.choice(["1f1b", "interleaved", "zb-h1", "forward"])
    has_groups = name in ("interleaved", "forward")
    while True:
        sizes = {
            "stages": rng.randint(1, stages),
            "microbatches": rng.randint(1, microbatches),
            "chunks": rng.randint(1, chunks) if has_groups else 1,
            "group_size": rng.randint(1, microbatches)
            if has_groups and rng.random() < 0.6
            else None,
        }
        if not problems(name, **sizes):
            return make_schedule(name, **sizes)


def random_full_schedule(rng: random.Random, **sizes: int) -> Schedule:
    """Draw a schedule with transfers and weight traffic."""
    schedule = with_transfers(random_schedule(rng, **sizes))
    return with_weight_traffic(schedule, gathers=rng.choice(TRAFFIC), reduces=rng.choice(TRAFFIC))


def random_times(rng: random.Random, schedule: Schedule) -> Times:
    """Draw times that differ between virtual stages."""

    def uneven() -> list[float]:
        return [rng.uniform(0.5, 2.0) for _ in range(schedule.stages * schedule.chunks)]

    return Times(
        forward=uneven(),
        input_gradient=uneven(),
        weight_gradient=uneven(),
        transfer=rng.choice([0.0, 0.1, uneven()]),
    )


def end_times(schedule: Schedule, times: Times) -> list[float]:
    """Return the end time of every rank, by the recurrence over (kind, stage, microbatch)."""
    last_stage = schedule.stages * schedule.chunks - 1
    transfer_time = times.of if schedule.stages > 1 else lambda kind, stage: 0.0
    end_of: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * schedule.stages
    queues = [deque(a for a in actions if a.kind in COMPUTES) for actions in schedule.ranks]
    while any(queues):
        num_computed = len(end_of)
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                stage, number = schedule.virtual_stage(rank, action.chunk), action.microbatch
                inputs = []  # ((kind, stage, microbatch), delay)
                if action.kind is ActionKind.FORWARD and stage > 0:
                    delay = transfer_time(ActionKind.SEND_FORWARD, stage - 1)
                    inputs.append((("f", stage - 1, number), delay))
                if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
                    inputs.append((("f", stage, number), 0.0))
                    if stage < last_stage:
                        delay = transfer_time(ActionKind.SEND_BACKWARD, stage + 1)
                        inputs.append((("b", stage + 1, number), delay))
                if action.kind is ActionKind.WEIGHT_GRADIENT:
                    inputs.append((("b", stage, number), 0.0))
                if any(key not in end_of for key, _ in inputs):
                    break
                start = max([clocks[rank], *(end_of[key] + delay for key, delay in inputs)])
                clocks[rank] = start + times.of(action.kind, stage)
                compute = {ActionKind.FORWARD: "f", ActionKind.WEIGHT_GRADIENT: "w"}.get(
                    action.kind, "b"
                )
                end_of[compute, stage, number] = clocks[rank]
                queue.popleft()
        assert len(end_of) > num_computed, "no rank can proceed"
    return clocks


def runs_with_blocking_sends(schedule: Schedule) -> bool:
    """Return whether all lists complete if each rank runs one action at a time and sends block.

    A send and its receive run when both are at the head of their lists.
    """
    queues = [deque(actions) for actions in schedule.ranks]
    while any(queues):
        progressed = False
        for rank, queue in enumerate(queues):
            while queue:
                if queue[0].kind in TRANSFERS:
                    peer, action = schedule.matching_transfer(rank, queue[0])
                    if not queues[peer] or queues[peer][0] != action:
                        break
                    queues[peer].popleft()
                queue.popleft()
                progressed = True
        if not progressed:
            return False
    return True


def run_with_messages(schedule: Schedule, *, rendezvous: bool) -> None:
    """Run all lists with messages that are matched by order only.

    A sent message waits in a mailbox; each direction has separate mailboxes. With `rendezvous` a
    message passes when both ranks are at its batch, and a batch of adjacent transfers of one
    direction starts when the previous batch has ended. A compute waits for the whole batch that
    brings its input.

    Raises:
        AssertionError: a message arrives out of order, an input is missing, or no rank can proceed.
    """
    ranks = [_Rank(schedule, rank) for rank in range(schedule.stages)]
    while any(not rank_state.finished() for rank_state in ranks):
        progressed = [rank_state.advance() for rank_state in ranks]
        progressed += [rank_state.exchange(ranks, rendezvous) for rank_state in ranks]
        assert any(progressed), "no rank can proceed"
    assert not any(mailbox for rank_state in ranks for mailbox in rank_state.mailboxes.values()), (
        "left in the mailbox"
    )


class _Rank:
    """Progress of one rank: its remaining actions, pending transfers and finished computes."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.queue = deque(schedule.ranks[rank])
        self.batches: dict[bool, deque[list[Action]]] = {True: deque(), False: deque()}
        self.mailboxes: dict[tuple[int, bool], deque[Action]] = defaultdict(deque)
        self.computed: set[tuple[ActionKind, int, int]] = set()
        self.posted: set[Action] = set()

    def finished(self) -> bool:
        return not self.queue and not any(self.batches.values())

    def advance(self) -> bool:
        progressed = False
        while self.queue and self._step():
            progressed = True
        return progressed

    def _step(self) -> bool:
        action = self.queue[0]
        if action.kind in TRANSFERS:
            batch = []
            while self.queue and self.queue[0].kind in TRANSFERS:
                batch.append(self.queue.popleft())
                if batch[-1].kind in SENDS:
                    self._assert_computed(batch[-1])
            for forward in (True, False):
                if direction_batch := [
                    a for a in batch if (a.kind in FORWARD_TRANSFERS) is forward
                ]:
                    self.batches[forward].append(direction_batch)
            self.posted.update(batch)
            return True
        if action.kind in COMPUTES and not self._start_compute(action):
            return False
        self.queue.popleft()
        return True

    def _assert_computed(self, send: Action) -> None:
        kind = ActionKind.FORWARD if send.kind is ActionKind.SEND_FORWARD else ActionKind.BACKWARD
        assert (kind, send.chunk, send.microbatch) in self.computed, f"{send} of nothing"

    def _start_compute(self, action: Action) -> bool:
        """Return whether a compute may start, and record it as computed if so."""
        key = (action.chunk, action.microbatch)
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            assert (ActionKind.BACKWARD, *key) in self.computed, f"{action} of nothing"
            return True
        forward = action.kind is ActionKind.FORWARD
        neighbour = self.schedule.prev_stage if forward else self.schedule.next_stage
        source = neighbour(self.rank, action.chunk)
        if source is not None and source[0] != self.rank:
            kind = ActionKind.RECEIVE_FORWARD if forward else ActionKind.RECEIVE_BACKWARD
            receive = Action(kind, *key)
            assert receive in self.posted, f"{receive} is not posted at {action}"
            if any(receive in batch for batch in self.batches[forward]):
                return False
        if not forward:
            assert (ActionKind.FORWARD, *key) in self.computed, f"{action} of nothing"
        self.computed.add((ActionKind.FORWARD if forward else ActionKind.BACKWARD, *key))
        return True

    def exchange(self, ranks: list[_Rank], rendezvous: bool) -> bool:
        """Pass messages of the first batch of each direction, or of all without `rendezvous`."""
        return any([self._exchange(ranks, forward, rendezvous) for forward in (True, False)])

    def _exchange(self, ranks: list[_Rank], forward: bool, rendezvous: bool) -> bool:
        progressed, batches = False, self.batches[forward]
        for batch in list(batches)[: 1 if rendezvous else None]:
            num_transfers = len(batch)
            for action in [a for a in batch if a.kind in SENDS]:
                peer, receive = self.schedule.matching_transfer(self.rank, action)
                peer_batches = ranks[peer].batches[forward]
                if not rendezvous or (peer_batches and receive in peer_batches[0]):
                    ranks[peer].mailboxes[self.rank, forward].append(receive)
                    batch.remove(action)
            for action in [a for a in batch if a.kind in RECEIVES]:
                peer, _ = self.schedule.matching_transfer(self.rank, action)
                if self.mailboxes[peer, forward]:
                    arrived = self.mailboxes[peer, forward].popleft()
                    assert arrived == action, f"{arrived} arrives where {action} is due"
                    batch.remove(action)
            progressed = progressed or len(batch) < num_transfers
            if not batch:
                batches.remove(batch)
        return progressed

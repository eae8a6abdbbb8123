# SPDX-License-Identifier: Apache-2.0
"""`check` accepts the generated schedules and detects every fault planted in them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron.core.pipeline_parallel import (
    COMPUTES,
    FORWARD_TRANSFERS,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    ActionKind,
    Schedule,
    check,
    make_schedule,
    with_transfers,
    with_weight_traffic,
)
from tests.unit_tests.core.pipeline_parallel.by_hand import random_full_schedule, run_with_messages

ActionLists = list[list[Action]]


def with_change(schedule: Schedule, change: Callable[[ActionLists], None]) -> Schedule:
    lists = [list(actions) for actions in schedule.ranks]
    change(lists)
    return replace(schedule, ranks=tuple(map(tuple, lists)))


class Fault:
    """Plants one fault at a random position of a schedule; `plant` returns None if none fits."""

    def __init__(self, rng: random.Random, schedule: Schedule) -> None:
        self.draw, self.schedule = rng, schedule
        self.lists = [list(actions) for actions in schedule.ranks]

    def plant(self, kind: str) -> Schedule | None:
        applied = vars(Fault)[kind](self)
        ranks = tuple(map(tuple, self.lists))
        return (
            replace(self.schedule, ranks=ranks)
            if applied and ranks != self.schedule.ranks
            else None
        )

    def _random_action(
        self, kinds: frozenset[ActionKind] = frozenset(ActionKind)
    ) -> tuple[list[Action], int] | None:
        positions = [
            (actions, index)
            for actions in self.lists
            for index, action in enumerate(actions)
            if action.kind in kinds
        ]
        return self.draw.choice(positions) if positions else None

    def _swap(self, before: Callable[[Action, Action, int], bool]) -> bool:
        """Swap two actions of a rank that `before` says are in the required order."""
        pairs = [
            (actions, i, j)
            for rank, actions in enumerate(self.lists)
            for i in range(len(actions))
            for j in range(i + 1, len(actions))
            if before(actions[i], actions[j], rank)
        ]
        if not pairs:
            return False
        actions, i, j = self.draw.choice(pairs)
        actions[i], actions[j] = actions[j], actions[i]
        return True

    def dropped(self) -> bool:
        actions, index = self._random_action(COMPUTES | TRANSFERS)
        del actions[index]
        return True

    def dropped_traffic(self) -> bool:
        position = self._random_action(frozenset({ActionKind.GATHER, ActionKind.REDUCE}))
        if (
            position is None
            or sum(a.kind is position[0][position[1]].kind for x in self.lists for a in x) < 3
        ):
            return False  # a schedule without any traffic of a kind is valid
        del position[0][position[1]]
        return True

    def doubled(self) -> bool:
        actions, index = self._random_action()
        actions.insert(self.draw.randrange(len(actions) + 1), actions[index])
        return True

    def on_the_wrong_rank(self) -> bool:
        actions, index = self._random_action()
        self.draw.choice(self.lists).insert(0, actions.pop(index))
        return len(self.lists) > 1

    def of_another_microbatch(self) -> bool:
        actions, index = self._random_action()
        number = self.draw.randint(-1, self.schedule.microbatches)
        actions[index] = replace(actions[index], microbatch=number)
        return True

    def of_another_chunk(self) -> bool:
        actions, index = self._random_action()
        actions[index] = replace(actions[index], chunk=self.draw.randint(-1, self.schedule.chunks))
        return True

    def of_another_kind(self) -> bool:
        actions, index = self._random_action()
        actions[index] = replace(actions[index], kind=self.draw.choice(list(ActionKind)))
        return True

    def gradient_before_its_forward(self) -> bool:
        return self._swap(
            lambda a, b, _: (
                _same(a, b)
                and a.kind is ActionKind.FORWARD
                and b.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
            )
        )

    def weight_before_its_input_gradient(self) -> bool:
        return self._swap(
            lambda a, b, _: (
                _same(a, b)
                and (a.kind, b.kind) == (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
            )
        )

    def whole_and_split_backward(self) -> bool:
        position = self._random_action(frozenset({ActionKind.BACKWARD}))
        if position is None:
            return False
        actions, index = position
        kind = self.draw.choice([ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT])
        actions.insert(index + 1, replace(actions[index], kind=kind))
        return True

    def microbatches_out_of_order(self) -> bool:
        return self._swap(
            lambda a, b, _: a.kind is b.kind and a.kind in COMPUTES and a.chunk == b.chunk
        )

    def consumer_before_its_receive(self) -> bool:
        return self._swap(
            lambda a, b, _: _same(a, b) and a.kind in RECEIVES and b.kind in _CONSUMERS[a.kind]
        )

    def send_before_its_producer(self) -> bool:
        return self._swap(
            lambda a, b, _: _same(a, b) and b.kind in SENDS and a.kind in _PRODUCERS[b.kind]
        )

    def two_of_a_pair_swapped_at_one_end(self) -> bool:
        return self._swap(
            lambda a, b, rank: (
                self._order_of_transfer(rank, a) == self._order_of_transfer(rank, b) is not None
            )
        )

    def moved_past_another_of_its_pair(self) -> bool:
        pairs = [
            (actions, i, j)
            for rank, actions in enumerate(self.lists)
            for i, action in enumerate(actions)
            for j, peer in enumerate(actions)
            if i != j
            and self._order_of_transfer(rank, action)
            == self._order_of_transfer(rank, peer)
            is not None
        ]
        if not pairs:
            return False
        actions, i, j = self.draw.choice(pairs)
        actions.insert(j, actions.pop(i))
        return True

    def gather_after_its_use(self) -> bool:
        return self._swap(
            lambda a, b, _: (
                _same(a, b) and a.kind is ActionKind.GATHER and b.kind is ActionKind.FORWARD
            )
        )

    def reduction_before_its_gradients(self) -> bool:
        return self._swap(
            lambda a, b, _: (
                _same(a, b)
                and b.kind is ActionKind.REDUCE
                and a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
            )
        )

    def reduction_put_off(self) -> bool:
        return self._swap(
            lambda a, b, _: (
                a.kind is ActionKind.REDUCE
                and b.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
            )
        )

    def lists_of_two_ranks_exchanged(self) -> bool:
        if len(self.lists) > 1:
            i, j = self.draw.sample(range(len(self.lists)), 2)
            self.lists[i], self.lists[j] = self.lists[j], self.lists[i]
        return any(a.kind in TRANSFERS for actions in self.lists for a in actions)

    def list_missing(self) -> bool:
        self.lists.pop()
        return True

    def _order_of_transfer(self, rank: int, action: Action) -> tuple[int, bool] | None:
        """Return (peer rank, direction) of a transfer; transfers of one pair have a fixed order."""
        peer = self.schedule.matching_transfer(rank, action)
        return peer and (peer[0], action.kind in FORWARD_TRANSFERS)


_CONSUMERS = {
    ActionKind.RECEIVE_FORWARD: (ActionKind.FORWARD,),
    ActionKind.RECEIVE_BACKWARD: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
}
_PRODUCERS = {
    ActionKind.SEND_FORWARD: (ActionKind.FORWARD,),
    ActionKind.SEND_BACKWARD: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
}


def _same(a: Action, b: Action) -> bool:
    return (a.chunk, a.microbatch) == (b.chunk, b.microbatch)


FAULTS = [name for name in vars(Fault) if not name.startswith("_") and name != "plant"]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_detected(fault: str):
    rng = random.Random(fault)
    planted = 0
    while planted < 12:
        legal = random_full_schedule(rng, stages=4, chunks=3, microbatches=5)
        if legal.stages * legal.microbatches == 1:
            continue  # without its only backward it would be a valid forward schedule
        assert check(legal) == []
        faulty = Fault(rng, legal).plant(fault)
        if faulty is not None:
            planted += 1
            assert check(faulty), (faulty.name, [" ".join(map(str, r)) for r in faulty.ranks])


def test_schedules_that_pass_check_can_be_executed():
    """A schedule with a randomly moved action that passes `check` runs, with and without
    rendezvous."""
    rng = random.Random(17)
    counts: Counter[bool] = Counter()
    for _ in range(1200):
        legal = random_full_schedule(rng, stages=4, chunks=2, microbatches=4)
        fault = Fault(rng, legal)
        actions = rng.choice(fault.lists)
        action = actions.pop(rng.randrange(len(actions)))
        actions.insert(rng.randrange(len(actions) + 1), action)
        changed = replace(legal, ranks=tuple(map(tuple, fault.lists)))
        if changed != legal:
            passes = check(changed) == []
            counts[passes] += 1
            if passes:
                for rendezvous in (False, True):
                    run_with_messages(changed, rendezvous=rendezvous)
    assert min(counts.values()) > 50


def full_schedule(name: str = "1f1b", **sizes: int) -> Schedule:
    schedule = make_schedule(name, **{"stages": 2, "microbatches": 2, **sizes})
    return with_weight_traffic(with_transfers(schedule), gathers="once", reduces="once")


def replace_action(rank: int, old: str, new: list[Action]) -> Callable[[ActionLists], None]:
    def change(lists: ActionLists) -> None:
        index = [str(action) for action in lists[rank]].index(old)
        lists[rank][index : index + 1] = new

    return change


def parse_action(text: str) -> Action:
    kind, numbers = text.rstrip("0123456789."), text.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    chunk, number = map(int, numbers.split("."))
    return Action(ActionKind(kind), chunk, number)


@pytest.mark.parametrize(
    ("rank", "old", "new", "texts"),
    [
        (0, "F0.1", "", ["rank 0: F0.1 is missing"]),
        (1, "B0.0", "B0.0 B0.0", ["rank 1: B0.0 is listed 2 times"]),
        (1, "B0.0", "I0.0", ["rank 1: W0.0 is missing"]),
        (
            1,
            "B0.0",
            "B0.0 W0.0",
            ["rank 1: B and W of microbatch 0.0"],
        ),
        (0, "F0.0", "F0.7", ["rank 0: F0.7 is outside its 1 chunks and 2 microbatches"]),
        (0, "SF0.0", "RF0.0", ["rank 0: RF0.0 has no peer rank"]),
        (0, "SF0.0", "", ["rank 0: SF0.0 is missing", "ranks 0 and 1: SF0.1 on rank 0 meets"]),
        (1, "F0.0 RF0.1", "RF0.1 F0.0", []),
        (0, "RB0.0 B0.0", "B0.0 RB0.0", ["rank 0: B0.0 comes before RB0.0"]),
        (0, "SF0.1 RB0.0", "RB0.0 SF0.1", []),
        (1, "RF0.1", "RF0.1 RF0.1", ["rank 1: RF0.1 is listed 2 times"]),
        (0, "G0.0", "", ["rank 0: nothing for chunk 0 where G0.0 belongs"]),
        (0, "G0.0", "G0.1", ["rank 0: G0.1 for chunk 0 where G0.0 belongs"]),
        (0, "G0.0 F0.0", "F0.0 G0.0", ["rank 0: G0.0 is not right before F0.0"]),
        (0, "B0.1 R0.1", "R0.1 B0.1", ["rank 0: R0.1 is not right after B0.1"]),
    ],
)
def test_problem_names_the_rank_and_the_action(rank: int, old: str, new: str, texts: list[str]):
    legal = full_schedule()
    lists = [" ".join(map(str, actions)) for actions in legal.ranks]
    assert f" {old} " in f" {lists[rank]} "
    lists[rank] = f" {lists[rank]} ".replace(f" {old} ", f" {new} ")
    faulty = replace(legal, ranks=tuple(tuple(map(parse_action, line.split())) for line in lists))
    problems = check(faulty)
    assert len(problems) >= len(texts)
    assert bool(problems) == bool(texts)
    for text in texts:
        assert any(line.startswith(text) for line in problems), problems


def test_all_problems_are_reported_at_once():
    legal = full_schedule("zb-h1", microbatches=3)
    faulty = with_change(legal, replace_action(0, "I0.1", []))
    faulty = with_change(
        faulty, replace_action(1, "SB0.2", [parse_action("SB0.2"), parse_action("SB0.2")])
    )
    assert check(faulty) == [
        "rank 0: I0.1 is missing",
        "rank 0: RB0.1 receives a tensor that nothing uses",
        "rank 1: SB0.2 is listed 2 times",
    ]


def test_a_deadlock_is_reported_if_nothing_else_is_wrong():
    # Rank 0 waits for a message of chunk 1 before the batch that starts the ring.
    legal = with_transfers(make_schedule("forward", stages=3, microbatches=1, chunks=2))
    assert " ".join(map(str, legal.ranks[0])) == "F0.0 SF0.0 RF1.0 F1.0 SF1.0"
    early = with_change(legal, lambda lists: lists[0].insert(0, lists[0].pop(2)))
    run_with_messages(early, rendezvous=False)
    with pytest.raises(AssertionError, match="no rank can proceed"):
        run_with_messages(early, rendezvous=True)
    assert check(early) == [
        "deadlock: rank 0 at RF1.0 waits for SF0.0 of rank 2; "
        "rank 1 at RF0.0 waits for SF0.0 of rank 0; rank 2 at RF0.0 waits for SF0.0 of rank 1"
    ]

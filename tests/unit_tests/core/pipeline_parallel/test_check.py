# SPDX-License-Identifier: Apache-2.0
"""`check` has nothing against what the generators give, and sees every fault planted in it."""

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
from tests.unit_tests.core.pipeline_parallel.by_hand import by_messages, random_full

Lists = list[list[Action]]


def mutated(schedule: Schedule, change: Callable[[Lists], None]) -> Schedule:
    lists = [list(actions) for actions in schedule.ranks]
    change(lists)
    return replace(schedule, ranks=tuple(map(tuple, lists)))


class Fault:
    """Plants one fault at a random place of a schedule; `plant` tells whether there was a place."""

    def __init__(self, draw: random.Random, schedule: Schedule) -> None:
        self.draw, self.schedule = draw, schedule
        self.lists = [list(actions) for actions in schedule.ranks]

    def plant(self, kind: str) -> Schedule | None:
        done = vars(Fault)[kind](self)
        ranks = tuple(map(tuple, self.lists))
        return (
            replace(self.schedule, ranks=ranks) if done and ranks != self.schedule.ranks else None
        )

    def _any(
        self, kinds: frozenset[ActionKind] = frozenset(ActionKind)
    ) -> tuple[list[Action], int] | None:
        places = [
            (actions, index)
            for actions in self.lists
            for index, action in enumerate(actions)
            if action.kind in kinds
        ]
        return self.draw.choice(places) if places else None

    def _swap(self, before: Callable[[Action, Action, int], bool]) -> bool:
        """Swap two actions of a rank of which the first has to come before the second."""
        places = [
            (actions, i, j)
            for rank, actions in enumerate(self.lists)
            for i in range(len(actions))
            for j in range(i + 1, len(actions))
            if before(actions[i], actions[j], rank)
        ]
        if not places:
            return False
        actions, i, j = self.draw.choice(places)
        actions[i], actions[j] = actions[j], actions[i]
        return True

    def dropped(self) -> bool:
        actions, index = self._any(COMPUTES | TRANSFERS)
        del actions[index]
        return True

    def dropped_traffic(self) -> bool:
        place = self._any(frozenset({ActionKind.GATHER, ActionKind.REDUCE}))
        if (
            place is None
            or sum(a.kind is place[0][place[1]].kind for x in self.lists for a in x) < 3
        ):
            return False  # the last one gone, there is none, which is fine
        del place[0][place[1]]
        return True

    def doubled(self) -> bool:
        actions, index = self._any()
        actions.insert(self.draw.randrange(len(actions) + 1), actions[index])
        return True

    def on_the_wrong_rank(self) -> bool:
        actions, index = self._any()
        self.draw.choice(self.lists).insert(0, actions.pop(index))
        return len(self.lists) > 1

    def of_another_microbatch(self) -> bool:
        actions, index = self._any()
        number = self.draw.randint(-1, self.schedule.microbatches)
        actions[index] = replace(actions[index], microbatch=number)
        return True

    def of_another_chunk(self) -> bool:
        actions, index = self._any()
        actions[index] = replace(actions[index], chunk=self.draw.randint(-1, self.schedule.chunks))
        return True

    def of_another_kind(self) -> bool:
        actions, index = self._any()
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
        place = self._any(frozenset({ActionKind.BACKWARD}))
        if place is None:
            return False
        actions, index = place
        kind = self.draw.choice([ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT])
        actions.insert(index + 1, replace(actions[index], kind=kind))
        return True

    def microbatches_out_of_order(self) -> bool:
        return self._swap(
            lambda a, b, _: a.kind is b.kind and a.kind in COMPUTES and a.chunk == b.chunk
        )

    def consumer_before_its_receive(self) -> bool:
        return self._swap(
            lambda a, b, _: _same(a, b) and a.kind in RECEIVES and b.kind in _FED[a.kind]
        )

    def send_before_its_producer(self) -> bool:
        return self._swap(
            lambda a, b, _: _same(a, b) and b.kind in SENDS and a.kind in _MAKERS[b.kind]
        )

    def two_of_a_pair_swapped_at_one_end(self) -> bool:
        return self._swap(lambda a, b, rank: self._line(rank, a) == self._line(rank, b) is not None)

    def moved_past_another_of_its_pair(self) -> bool:
        places = [
            (actions, i, j)
            for rank, actions in enumerate(self.lists)
            for i, action in enumerate(actions)
            for j, other in enumerate(actions)
            if i != j and self._line(rank, action) == self._line(rank, other) is not None
        ]
        if not places:
            return False
        actions, i, j = self.draw.choice(places)
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

    def _line(self, rank: int, action: Action) -> tuple[int, bool] | None:
        """Return the other rank and the direction, within which there is one order."""
        other_end = self.schedule.matching_transfer(rank, action)
        return other_end and (other_end[0], action.kind in FORWARD_TRANSFERS)


_FED = {
    ActionKind.RECEIVE_FORWARD: (ActionKind.FORWARD,),
    ActionKind.RECEIVE_BACKWARD: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
}
_MAKERS = {
    ActionKind.SEND_FORWARD: (ActionKind.FORWARD,),
    ActionKind.SEND_BACKWARD: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
}


def _same(a: Action, b: Action) -> bool:
    return (a.chunk, a.microbatch) == (b.chunk, b.microbatch)


FAULTS = [name for name in vars(Fault) if not name.startswith("_") and name != "plant"]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_detected(fault: str):
    draw = random.Random(fault)
    planted = 0
    while planted < 12:
        legal = random_full(draw, stages=4, chunks=3, microbatches=5)
        if legal.stages * legal.microbatches == 1:
            continue  # its only backward gone, it is a schedule of forwards
        assert check(legal) == []
        faulty = Fault(draw, legal).plant(fault)
        if faulty is not None:
            planted += 1
            assert check(faulty), (faulty.name, [" ".join(map(str, r)) for r in faulty.ranks])


def test_what_check_lets_pass_can_be_carried_out():
    """Actions moved at random: what is not refused runs, by messages in order, under both rules."""
    draw = random.Random(17)
    seen: Counter[bool] = Counter()
    for _ in range(1200):
        legal = random_full(draw, stages=4, chunks=2, microbatches=4)
        fault = Fault(draw, legal)
        actions = draw.choice(fault.lists)
        action = actions.pop(draw.randrange(len(actions)))
        actions.insert(draw.randrange(len(actions) + 1), action)
        moved = replace(legal, ranks=tuple(map(tuple, fault.lists)))
        if moved != legal:
            fine = check(moved) == []
            seen[fine] += 1
            if fine:
                for rendezvous in (False, True):
                    by_messages(moved, rendezvous=rendezvous)
    assert min(seen.values()) > 50


def full(name: str = "1f1b", **sizes: int) -> Schedule:
    schedule = make_schedule(name, **{"stages": 2, "microbatches": 2, **sizes})
    return with_weight_traffic(with_transfers(schedule), gathers="once", reduces="once")


def put(rank: int, old: str, new: list[Action]) -> Callable[[Lists], None]:
    def change(lists: Lists) -> None:
        index = [str(action) for action in lists[rank]].index(old)
        lists[rank][index : index + 1] = new

    return change


def act(text: str) -> Action:
    kind, place = text.rstrip("0123456789."), text.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    chunk, number = map(int, place.split("."))
    return Action(ActionKind(kind), chunk, number)


@pytest.mark.parametrize(
    ("rank", "old", "new", "texts"),
    [
        (0, "F0.1", "", ["rank 0: F0.1 is missing"]),
        (1, "B0.0", "B0.0 B0.0", ["rank 1: B0.0 is there 2 times"]),
        (1, "B0.0", "I0.0", ["rank 1: W0.0 is missing"]),
        (
            1,
            "B0.0",
            "B0.0 W0.0",
            ["rank 1: B and W of microbatch 0.0"],
        ),
        (0, "F0.0", "F0.7", ["rank 0: F0.7 is not of its 1 chunks and 2 microbatches"]),
        (0, "SF0.0", "RF0.0", ["rank 0: RF0.0 has no other rank"]),
        (0, "SF0.0", "", ["rank 0: SF0.0 is missing", "ranks 0 and 1: SF0.1 on rank 0 meets"]),
        (1, "F0.0 RF0.1", "RF0.1 F0.0", []),
        (0, "RB0.0 B0.0", "B0.0 RB0.0", ["rank 0: B0.0 comes before RB0.0"]),
        (0, "SF0.1 RB0.0", "RB0.0 SF0.1", []),
        (1, "RF0.1", "RF0.1 RF0.1", ["rank 1: RF0.1 is there 2 times"]),
        (0, "G0.0", "", ["rank 0: nothing for chunk 0 where G0.0 belongs"]),
        (0, "G0.0", "G0.1", ["rank 0: G0.1 for chunk 0 where G0.0 belongs"]),
        (0, "G0.0 F0.0", "F0.0 G0.0", ["rank 0: G0.0 is not right before F0.0"]),
        (0, "B0.1 R0.1", "R0.1 B0.1", ["rank 0: R0.1 is not right after B0.1"]),
    ],
)
def test_every_problem_is_named(rank: int, old: str, new: str, texts: list[str]):
    legal = full()
    lists = [" ".join(map(str, actions)) for actions in legal.ranks]
    assert f" {old} " in f" {lists[rank]} "
    lists[rank] = f" {lists[rank]} ".replace(f" {old} ", f" {new} ")
    faulty = replace(legal, ranks=tuple(tuple(map(act, one.split())) for one in lists))
    found = check(faulty)
    assert len(found) >= len(texts)
    assert bool(found) == bool(texts)
    for text in texts:
        assert any(line.startswith(text) for line in found), found


def test_all_problems_are_reported_at_once():
    legal = full("zb-h1", microbatches=3)
    faulty = mutated(legal, put(0, "I0.1", []))
    faulty = mutated(faulty, put(1, "SB0.2", [act("SB0.2"), act("SB0.2")]))
    assert check(faulty) == [
        "rank 0: I0.1 is missing",
        "rank 0: RB0.1 receives what nothing needs",
        "rank 1: SB0.2 is there 2 times",
    ]


def test_a_deadlock_is_reported_if_nothing_else_is_wrong():
    # Rank 0 waits for what comes round the ring in the batch before the one that starts it.
    legal = with_transfers(make_schedule("forward", stages=3, microbatches=1, chunks=2))
    assert " ".join(map(str, legal.ranks[0])) == "F0.0 SF0.0 RF1.0 F1.0 SF1.0"
    early = mutated(legal, lambda lists: lists[0].insert(0, lists[0].pop(2)))
    by_messages(early, rendezvous=False)
    with pytest.raises(AssertionError, match="nobody goes on"):
        by_messages(early, rendezvous=True)
    assert check(early) == [
        "deadlock: rank 0 at RF1.0 waits for SF0.0 of rank 2; "
        "rank 1 at RF0.0 waits for SF0.0 of rank 0; rank 2 at RF0.0 waits for SF0.0 of rank 1"
    ]

# SPDX-License-Identifier: Apache-2.0
"""What is added to a schedule's computes: nothing lost, where it belongs, and never a deadlock."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megatron.core.pipeline_parallel import (
    COMPUTES,
    SENDS,
    TRANSFERS,
    Action,
    ActionKind,
    Times,
    check,
    make_schedule,
    simulate,
    with_transfers,
    with_weight_traffic,
)
from tests.unit_tests.core.pipeline_parallel.by_hand import (
    TRAFFIC,
    by_messages,
    ends,
    one_at_a_time,
    random_full,
    random_schedule,
    random_times,
)


def texts(schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def test_transfers_of_one_forward_one_backward():
    assert texts(with_transfers(make_schedule("1f1b", stages=2, microbatches=3))) == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 F0.2 SF0.2 RB0.1 B0.1 RB0.2 B0.2",
        "RF0.0 F0.0 RF0.1 B0.0 SB0.0 F0.1 B0.1 RF0.2 SB0.1 F0.2 B0.2 SB0.2",
    ]


def test_input_gradients_leave_before_the_weight_gradients():
    assert texts(with_transfers(make_schedule("zb-h1", stages=2, microbatches=3))) == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 I0.0 W0.0 RB0.1 F0.2 SF0.2 I0.1 W0.1 RB0.2 I0.2 W0.2",
        "RF0.0 F0.0 RF0.1 I0.0 SB0.0 F0.1 I0.1 SB0.1 W0.0 RF0.2 F0.2 I0.2 SB0.2 W0.1 W0.2",
    ]


def test_the_last_rank_sends_to_the_first_ones_next_chunk():
    schedule = with_transfers(make_schedule("forward", stages=2, microbatches=2, chunks=2))
    assert texts(schedule) == [
        "F0.0 SF0.0 F0.1 SF0.1 RF1.0 F1.0 SF1.0 RF1.1 F1.1 SF1.1",
        "RF0.0 F0.0 RF0.1 SF0.0 F0.1 RF1.0 SF0.1 F1.0 RF1.1 F1.1",
    ]


def test_one_rank_has_no_transfers():
    schedule = make_schedule("1f1b", stages=1, microbatches=3)
    assert with_transfers(schedule) == schedule


def test_no_deadlock_under_any_rule():
    """300 schedules: one thing at a time, NCCL's batches, mailboxes; simulated at uneven times."""
    draw = random.Random(11)
    seen: Counter[str] = Counter()
    for _ in range(300):
        computes = random_schedule(draw)
        schedule = with_transfers(computes)
        schedule = with_weight_traffic(
            schedule, gathers=draw.choice(TRAFFIC), reduces=draw.choice(TRAFFIC)
        )
        seen[schedule.name] += any(a.kind in TRANSFERS for r in schedule.ranks for a in r)
        assert one_at_a_time(schedule)
        for rendezvous in (False, True):
            by_messages(schedule, rendezvous=rendezvous)
        assert check(schedule) == []
        times = random_times(draw, schedule)
        best = simulate(computes, times)
        for one, end in zip(best.ranks, ends(computes, times), strict=True):
            assert one[-1].end == pytest.approx(end, rel=1e-12)
        # Nothing blocks, so lists with transfers cost nothing; meeting can only cost time.
        eager = simulate(schedule, times)
        assert eager.makespan == pytest.approx(best.makespan, rel=1e-12)
        met = simulate(schedule, times, rendezvous=True)
        assert met.makespan >= eager.makespan * (1 - 1e-12)
    assert min(seen[name] for name in ("1f1b", "interleaved", "zb-h1", "forward")) > 20


def by_simulated_times(schedule):
    """Return the lists in the order of the simulator's times, at which F, I and W take one unit."""
    placed = [[] for _ in schedule.ranks]
    made = []
    for rank, events in enumerate(simulate(schedule, Times()).ranks):
        for index, (action, start, end) in enumerate(events):
            placed[rank].append((start, 1, 0, action))
            made.append((end, rank, index, action))
    sends = {ActionKind.FORWARD: ActionKind.SEND_FORWARD, ActionKind.WEIGHT_GRADIENT: None}
    for number, (end, rank, _, action) in enumerate(sorted(made, key=lambda event: event[:3])):
        kind = sends.get(action.kind, ActionKind.SEND_BACKWARD)
        send = kind and Action(kind, action.chunk, action.microbatch)
        other_end = send and schedule.matching_transfer(rank, send)
        if other_end and schedule.stages > 1:
            placed[rank].append((end, 0, number, send))
            placed[other_end[0]].append((end, 0, number, other_end[1]))
    return tuple(tuple(e[3] for e in sorted(es, key=lambda e: e[:3])) for es in placed)


def test_transfers_stand_where_the_simulated_times_put_them():
    draw = random.Random(21)
    for _ in range(150):
        schedule = random_schedule(draw)
        assert with_transfers(schedule).ranks == by_simulated_times(schedule)


def test_computes_that_wait_for_each_other_are_refused():
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    crossed = replace(schedule, ranks=(schedule.ranks[0][::-1], schedule.ranks[1]))
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at B0.1 waits for F0.1 of rank 0"):
        with_transfers(crossed)


def test_the_hand_sees_a_deadlock():
    """Two ranks that both send first block each other, unless what they send is buffered."""
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    first = " ".join(map(str, schedule.ranks[0]))
    assert first == "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 B0.1"
    actions = list(schedule.ranks[0])
    actions[3:5] = actions[4], actions[3]
    swapped = replace(schedule, ranks=(tuple(actions), schedule.ranks[1]))
    assert one_at_a_time(schedule)
    assert not one_at_a_time(swapped)
    # Two directions have a communicator each, so these two do not wait for each other's turn.
    by_messages(swapped, rendezvous=True)
    # Round the ring of chunks all goes one way: what comes back is due before what is sent.
    schedule = with_transfers(make_schedule("forward", stages=2, microbatches=2, chunks=2))
    actions = list(schedule.ranks[0])
    assert str(actions[4]) == "RF1.0"
    early = replace(schedule, ranks=((actions.pop(4), *actions), schedule.ranks[1]))
    for rendezvous in (False, True):
        by_messages(schedule, rendezvous=rendezvous)
    by_messages(early, rendezvous=False)
    with pytest.raises(AssertionError, match="nobody goes on"):
        by_messages(early, rendezvous=True)


def test_sends_follow_compute_and_receives_are_posted_early():
    draw = random.Random(3)
    for _ in range(60):
        schedule = with_transfers(random_schedule(draw, stages=6, microbatches=10))
        for rank, actions in enumerate(schedule.ranks):
            compute = None
            waited: set[Action] = set()
            for action in actions:
                place = (action.chunk, action.microbatch)
                if action.kind in COMPUTES:
                    compute = action
                    feeds = {
                        ActionKind.FORWARD: ActionKind.RECEIVE_FORWARD,
                        ActionKind.BACKWARD: ActionKind.RECEIVE_BACKWARD,
                        ActionKind.INPUT_GRADIENT: ActionKind.RECEIVE_BACKWARD,
                    }.get(action.kind)
                    if feeds and schedule.matching_transfer(rank, Action(feeds, *place)):
                        waited.remove(Action(feeds, *place))
                elif action.kind in SENDS:
                    assert compute is not None
                    assert (compute.chunk, compute.microbatch) == place
                    forward = action.kind is ActionKind.SEND_FORWARD
                    assert (compute.kind is ActionKind.FORWARD) == forward
                else:
                    waited.add(action)
            assert not waited


@pytest.mark.parametrize(
    ("gathers", "reduces", "first"),
    [
        ("none", "none", "F0.0 SF0.0 F0.1 SF0.1 RF1.0 F1.0 SF1.0 RF1.1 F1.1"),
        ("once", "none", "G0.0 F0.0 SF0.0 G1.0 F0.1 SF0.1 RF1.0 F1.0 SF1.0 RF1.1 F1.1"),
        ("each", "none", "G0.0 F0.0 SF0.0 G0.1 F0.1 SF0.1 RF1.0 G1.0 F1.0 SF1.0 RF1.1 G1.1 F1.1"),
    ],
)
def test_gathers_come_before_what_needs_them(gathers: str, reduces: str, first: str):
    schedule = with_transfers(make_schedule("interleaved", stages=2, microbatches=2, chunks=2))
    found = texts(with_weight_traffic(schedule, gathers=gathers, reduces=reduces))[0]
    assert found.startswith(first)


@pytest.mark.parametrize(
    ("reduces", "last"),
    [
        ("none", "F0.1 I0.1 SB0.1 W0.0 W0.1"),
        ("once", "F0.1 I0.1 SB0.1 W0.0 W0.1 R0.1"),
        ("each", "F0.1 I0.1 SB0.1 W0.0 R0.0 W0.1 R0.1"),
    ],
)
def test_reductions_come_after_the_last_weight_gradients(reduces: str, last: str):
    schedule = with_transfers(make_schedule("zb-h1", stages=3, microbatches=2))
    found = texts(with_weight_traffic(schedule, gathers="none", reduces=reduces))[2]
    assert found == f"RF0.0 F0.0 RF0.1 I0.0 SB0.0 {last}"


def test_reductions_let_gradients_leave_first():
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    schedule = with_weight_traffic(schedule, gathers="each", reduces="each")
    assert texts(schedule)[1] == (
        "RF0.0 G0.0 F0.0 RF0.1 G0.0 B0.0 SB0.0 R0.0 G0.1 F0.1 G0.1 B0.1 SB0.1 R0.1"
    )


def test_weight_traffic_keeps_transfers_and_their_batches():
    draw = random.Random(8)
    for _ in range(60):
        full = random_full(draw, stages=5, microbatches=8)
        bare = tuple(
            tuple(a for a in actions if a.kind not in (ActionKind.GATHER, ActionKind.REDUCE))
            for actions in full.ranks
        )
        assert bare == with_transfers(_computes(full)).ranks
        for actions in full.ranks:
            for before, action, after in zip(actions, actions[1:], actions[2:], strict=False):
                if action.kind in (ActionKind.GATHER, ActionKind.REDUCE):
                    assert not {before.kind, after.kind} <= TRANSFERS


def _computes(schedule):
    ranks = (tuple(a for a in actions if a.kind in COMPUTES) for actions in schedule.ranks)
    return replace(schedule, ranks=tuple(ranks))


def test_nothing_is_added_twice():
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    with pytest.raises(ValueError, match=r"has send_forward, receive_forward.* already"):
        with_transfers(schedule)
    schedule = with_weight_traffic(schedule, gathers="once", reduces="once")
    with pytest.raises(ValueError, match="has gather, reduce already"):
        with_weight_traffic(schedule, gathers="each", reduces="none")
    with pytest.raises(ValueError, match="reduces 'twice': take none, once or each"):
        with_weight_traffic(schedule, gathers="none", reduces="twice")

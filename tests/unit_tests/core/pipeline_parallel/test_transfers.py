# SPDX-License-Identifier: Apache-2.0
"""Transfers and weight traffic of a schedule: complete, in order, and without deadlocks."""

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
    end_times,
    random_full_schedule,
    random_schedule,
    random_times,
    run_with_messages,
    runs_with_blocking_sends,
)


def texts(schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def test_1f1b_transfers_match_the_written_lists():
    assert texts(with_transfers(make_schedule("1f1b", stages=2, microbatches=3))) == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 F0.2 SF0.2 RB0.1 B0.1 RB0.2 B0.2",
        "RF0.0 F0.0 RF0.1 B0.0 SB0.0 F0.1 B0.1 RF0.2 SB0.1 F0.2 B0.2 SB0.2",
    ]


def test_input_gradients_are_sent_before_weight_gradients():
    assert texts(with_transfers(make_schedule("zb-h1", stages=2, microbatches=3))) == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 I0.0 W0.0 RB0.1 F0.2 SF0.2 I0.1 W0.1 RB0.2 I0.2 W0.2",
        "RF0.0 F0.0 RF0.1 I0.0 SB0.0 F0.1 I0.1 SB0.1 W0.0 RF0.2 F0.2 I0.2 SB0.2 W0.1 W0.2",
    ]


def test_last_rank_sends_to_the_next_chunk_of_the_first():
    schedule = with_transfers(make_schedule("forward", stages=2, microbatches=2, chunks=2))
    assert texts(schedule) == [
        "F0.0 SF0.0 F0.1 SF0.1 RF1.0 F1.0 SF1.0 RF1.1 F1.1 SF1.1",
        "RF0.0 F0.0 RF0.1 SF0.0 F0.1 RF1.0 SF0.1 F1.0 RF1.1 F1.1",
    ]


def test_one_rank_has_no_transfers():
    schedule = make_schedule("1f1b", stages=1, microbatches=3)
    assert with_transfers(schedule) == schedule


def test_schedules_do_not_deadlock_under_any_transfer_rule():
    """Run 300 schedules with blocking sends, NCCL's batches and mailboxes, and simulate them."""
    rng = random.Random(11)
    counts: Counter[str] = Counter()
    for _ in range(300):
        computes = random_schedule(rng)
        schedule = with_transfers(computes)
        schedule = with_weight_traffic(
            schedule, gathers=rng.choice(TRAFFIC), reduces=rng.choice(TRAFFIC)
        )
        counts[schedule.name] += any(a.kind in TRANSFERS for r in schedule.ranks for a in r)
        assert runs_with_blocking_sends(schedule)
        for rendezvous in (False, True):
            run_with_messages(schedule, rendezvous=rendezvous)
        assert check(schedule) == []
        times = random_times(rng, schedule)
        best = simulate(computes, times)
        for events, end in zip(best.ranks, end_times(computes, times), strict=True):
            assert events[-1].end == pytest.approx(end, rel=1e-12)
        # Without rendezvous no transfer blocks, so listing transfers costs no time.
        eager = simulate(schedule, times)
        assert eager.makespan == pytest.approx(best.makespan, rel=1e-12)
        rendezvous_run = simulate(schedule, times, rendezvous=True)
        assert rendezvous_run.makespan >= eager.makespan * (1 - 1e-12)
    assert min(counts[name] for name in ("1f1b", "interleaved", "zb-h1", "forward")) > 20


def lists_by_simulated_times(schedule):
    """Return the lists ordered by simulated times, with one unit of time for F, I and W."""
    timed_actions = [[] for _ in schedule.ranks]
    computes = []
    for rank, events in enumerate(simulate(schedule, Times()).ranks):
        for index, (action, start, end) in enumerate(events):
            timed_actions[rank].append((start, 1, 0, action))
            computes.append((end, rank, index, action))
    sends = {ActionKind.FORWARD: ActionKind.SEND_FORWARD, ActionKind.WEIGHT_GRADIENT: None}
    for number, (end, rank, _, action) in enumerate(sorted(computes, key=lambda event: event[:3])):
        kind = sends.get(action.kind, ActionKind.SEND_BACKWARD)
        send = kind and Action(kind, action.chunk, action.microbatch)
        peer = send and schedule.matching_transfer(rank, send)
        if peer and schedule.stages > 1:
            timed_actions[rank].append((end, 0, number, send))
            timed_actions[peer[0]].append((end, 0, number, peer[1]))
    return tuple(tuple(e[3] for e in sorted(es, key=lambda e: e[:3])) for es in timed_actions)


def test_transfers_are_ordered_by_simulated_times():
    rng = random.Random(21)
    for _ in range(150):
        schedule = random_schedule(rng)
        assert with_transfers(schedule).ranks == lists_by_simulated_times(schedule)


def test_computes_that_wait_for_each_other_are_refused():
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    crossed = replace(schedule, ranks=(schedule.ranks[0][::-1], schedule.ranks[1]))
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at B0.1 waits for F0.1 of rank 0"):
        with_transfers(crossed)


def test_reference_execution_detects_a_deadlock():
    """Two ranks that both send first block each other unless sends are buffered."""
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    actions_of_rank0 = " ".join(map(str, schedule.ranks[0]))
    assert actions_of_rank0 == "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 B0.1"
    actions = list(schedule.ranks[0])
    actions[3:5] = actions[4], actions[3]
    swapped = replace(schedule, ranks=(tuple(actions), schedule.ranks[1]))
    assert runs_with_blocking_sends(schedule)
    assert not runs_with_blocking_sends(swapped)
    # Each direction has its own communicator, so the two sends do not wait for each other.
    run_with_messages(swapped, rendezvous=True)
    # In a ring of chunks all messages go forward: rank 0 would receive before it sends.
    schedule = with_transfers(make_schedule("forward", stages=2, microbatches=2, chunks=2))
    actions = list(schedule.ranks[0])
    assert str(actions[4]) == "RF1.0"
    early = replace(schedule, ranks=((actions.pop(4), *actions), schedule.ranks[1]))
    for rendezvous in (False, True):
        run_with_messages(schedule, rendezvous=rendezvous)
    run_with_messages(early, rendezvous=False)
    with pytest.raises(AssertionError, match="no rank can proceed"):
        run_with_messages(early, rendezvous=True)


def test_sends_follow_compute_and_receives_are_posted_early():
    rng = random.Random(3)
    for _ in range(60):
        schedule = with_transfers(random_schedule(rng, stages=6, microbatches=10))
        for rank, actions in enumerate(schedule.ranks):
            compute = None
            posted: set[Action] = set()
            for action in actions:
                key = (action.chunk, action.microbatch)
                if action.kind in COMPUTES:
                    compute = action
                    receive_kind = {
                        ActionKind.FORWARD: ActionKind.RECEIVE_FORWARD,
                        ActionKind.BACKWARD: ActionKind.RECEIVE_BACKWARD,
                        ActionKind.INPUT_GRADIENT: ActionKind.RECEIVE_BACKWARD,
                    }.get(action.kind)
                    if receive_kind and schedule.matching_transfer(
                        rank, Action(receive_kind, *key)
                    ):
                        posted.remove(Action(receive_kind, *key))
                elif action.kind in SENDS:
                    assert compute is not None
                    assert (compute.chunk, compute.microbatch) == key
                    forward = action.kind is ActionKind.SEND_FORWARD
                    assert (compute.kind is ActionKind.FORWARD) == forward
                else:
                    posted.add(action)
            assert not posted


@pytest.mark.parametrize(
    ("gathers", "reduces", "prefix"),
    [
        ("none", "none", "F0.0 SF0.0 F0.1 SF0.1 RF1.0 F1.0 SF1.0 RF1.1 F1.1"),
        ("once", "none", "G0.0 F0.0 SF0.0 G1.0 F0.1 SF0.1 RF1.0 F1.0 SF1.0 RF1.1 F1.1"),
        ("each", "none", "G0.0 F0.0 SF0.0 G0.1 F0.1 SF0.1 RF1.0 G1.0 F1.0 SF1.0 RF1.1 G1.1 F1.1"),
    ],
)
def test_gathers_precede_the_computes_that_need_them(gathers: str, reduces: str, prefix: str):
    schedule = with_transfers(make_schedule("interleaved", stages=2, microbatches=2, chunks=2))
    actions = texts(with_weight_traffic(schedule, gathers=gathers, reduces=reduces))[0]
    assert actions.startswith(prefix)


@pytest.mark.parametrize(
    ("reduces", "suffix"),
    [
        ("none", "F0.1 I0.1 SB0.1 W0.0 W0.1"),
        ("once", "F0.1 I0.1 SB0.1 W0.0 W0.1 R0.1"),
        ("each", "F0.1 I0.1 SB0.1 W0.0 R0.0 W0.1 R0.1"),
    ],
)
def test_reductions_come_after_the_last_weight_gradients(reduces: str, suffix: str):
    schedule = with_transfers(make_schedule("zb-h1", stages=3, microbatches=2))
    actions = texts(with_weight_traffic(schedule, gathers="none", reduces=reduces))[2]
    assert actions == f"RF0.0 F0.0 RF0.1 I0.0 SB0.0 {suffix}"


def test_gradient_sends_precede_reductions():
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    schedule = with_weight_traffic(schedule, gathers="each", reduces="each")
    assert texts(schedule)[1] == (
        "RF0.0 G0.0 F0.0 RF0.1 G0.0 B0.0 SB0.0 R0.0 G0.1 F0.1 G0.1 B0.1 SB0.1 R0.1"
    )


def test_weight_traffic_keeps_transfers_and_their_batches():
    rng = random.Random(8)
    for _ in range(60):
        full = random_full_schedule(rng, stages=5, microbatches=8)
        without_traffic = tuple(
            tuple(a for a in actions if a.kind not in (ActionKind.GATHER, ActionKind.REDUCE))
            for actions in full.ranks
        )
        assert without_traffic == with_transfers(computes_only(full)).ranks
        for actions in full.ranks:
            for previous, action, following in zip(actions, actions[1:], actions[2:], strict=False):
                if action.kind in (ActionKind.GATHER, ActionKind.REDUCE):
                    assert not {previous.kind, following.kind} <= TRANSFERS


def computes_only(schedule):
    ranks = (tuple(a for a in actions if a.kind in COMPUTES) for actions in schedule.ranks)
    return replace(schedule, ranks=tuple(ranks))


def test_adding_transfers_or_traffic_twice_is_refused():
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    with pytest.raises(ValueError, match="send_forward, receive_forward"):
        with_transfers(schedule)
    schedule = with_weight_traffic(schedule, gathers="once", reduces="once")
    with pytest.raises(ValueError, match="has gather, reduce already"):
        with_weight_traffic(schedule, gathers="each", reduces="none")
    with pytest.raises(ValueError, match="'twice'"):
        with_weight_traffic(schedule, gathers="none", reduces="twice")

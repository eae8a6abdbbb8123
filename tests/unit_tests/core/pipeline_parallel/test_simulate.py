# SPDX-License-Identifier: Apache-2.0
"""Simulated times against closed forms and small cases worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron.core.pipeline_parallel import (
    Action,
    ActionKind,
    DeadlockError,
    Schedule,
    Times,
    make_schedule,
    simulate,
    with_transfers,
    with_weight_traffic,
)

#: Of F, I and W: equal and distinct, each of them the least once.
FORWARD_INPUT_WEIGHT = list(itertools.product((2.0, 3.0, 5.0), repeat=3))


def timed(name: str, times: tuple[float, float, float], **sizes: int):
    forward, input_gradient, weight_gradient = times
    return simulate(
        make_schedule(name, **sizes),
        Times(forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient),
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_1f1b_bubble_is_p_minus_1_of_m_plus_p_minus_1(stages: int):
    for microbatches in (1, 2, 3, 4, 8, 17):
        for times in FORWARD_INPUT_WEIGHT[::5]:
            line = timed("1f1b", times, stages=stages, microbatches=microbatches)
            wanted = (stages - 1) / (microbatches + stages - 1)
            assert line.bubble_fraction == pytest.approx(wanted, abs=1e-12)
            assert line.makespan == (microbatches + stages - 1) * sum(times)
            assert line.idle == ((stages - 1) * sum(times),) * stages
            assert line.peak_activations() == tuple(
                min(stages - rank, microbatches) for rank in range(stages)
            )


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_idles_p_minus_1_of_v_m_plus_p_minus_1(stages: int, chunks: int):
    for groups in (1, 2, 3):
        microbatches = groups * stages
        for times in FORWARD_INPUT_WEIGHT[::5]:
            sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
            line = timed("interleaved", times, **sizes)
            wanted = (stages - 1) / (chunks * microbatches + stages - 1)
            assert line.bubble_fraction == pytest.approx(wanted, abs=1e-12)
            # In microbatches of a whole rank: 1 + (p - 1) / (p v) times those of 1f1b.
            most = min(2 * (stages - 1) + (chunks - 1) * stages + 1, chunks * microbatches)
            assert max(line.peak_activations()) == most


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_zero_bubble_idles_p_minus_1_times_f_plus_i_minus_w(stages: int):
    """Holds for m >= p and W <= min(F, I); a longer W leaves (p - 1) max(F, I) or more."""
    seen = 0
    for microbatches in (stages, stages + 1, 2 * stages, 3 * stages + 1):
        for times in FORWARD_INPUT_WEIGHT:
            forward, input_gradient, weight_gradient = times
            line = timed("zb-h1", times, stages=stages, microbatches=microbatches)
            wanted = (stages - 1) * (forward + input_gradient - weight_gradient)
            if weight_gradient <= min(forward, input_gradient):
                seen += 1
                assert line.idle == (wanted,) * stages
            else:
                floor = (stages - 1) * max(forward, input_gradient)
                assert all(idle >= floor >= wanted for idle in line.idle)
    assert seen == 4 * 14


def test_zb_h1_is_never_slower_and_keeps_no_more_than_1f1b():
    for stages, microbatches in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 5, 12)):
        for times in FORWARD_INPUT_WEIGHT:
            sizes = {"stages": stages, "microbatches": microbatches}
            split, whole = timed("zb-h1", times, **sizes), timed("1f1b", times, **sizes)
            assert split.makespan <= whole.makespan
            assert max(split.peak_activations()) == min(stages, microbatches)
            assert max(split.peak_activations()) == max(whole.peak_activations())
    # What I frees at once is not kept until W.
    line = timed("zb-h1", FORWARD_INPUT_WEIGHT[0], stages=4, microbatches=8)
    assert line.peak_activations() == (4, 4, 4, 4)
    assert line.peak_activations(freed_by_input_gradient=1.0) == (4, 3, 2, 1)
    assert line.peak_activations(freed_by_input_gradient=0.5) == (4, 3.5, 3, 2.5)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_weight_gradients_at_once_idle_p_minus_1_times_f_plus_i(stages: int):
    for microbatches in (1, stages, 2 * stages, 3 * stages + 1):
        for times in FORWARD_INPUT_WEIGHT:
            forward, input_gradient, weight_gradient = times
            sizes = {"stages": stages, "microbatches": microbatches}
            made = make_schedule("zb-h1", **sizes, weight_delay=0)
            line = simulate(
                with_transfers(made),
                Times(
                    forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
                ),
                rendezvous=True,
            )
            assert line.idle == ((stages - 1) * (forward + input_gradient),) * stages
            # Nothing is alive longer than in 1f1b.
            assert line.peak_activations() == timed("1f1b", times, **sizes).peak_activations()


def test_uneven_stages_wait_for_the_slowest():
    # Rank 1 takes 3 + 6 a microbatch: it starts at 1, and rank 0 ends with its last backward.
    schedule = make_schedule("1f1b", stages=2, microbatches=4)
    times = Times(forward=(1, 3), input_gradient=(1, 3), weight_gradient=(1, 3))
    line = simulate(schedule, times)
    assert line.makespan == 1 + 4 * 9 + 2
    assert line.idle == (39 - 12, 39 - 36)
    assert line.bubble_fraction == 30 / 78


def texts(events) -> str:
    return " ".join(f"{action}@{start:g}-{end:g}" for action, start, end in events)


def test_transfers_take_time_whether_they_are_listed_or_not():
    schedule = make_schedule("1f1b", stages=2, microbatches=1)
    times = Times(transfer=0.5)
    implied = simulate(schedule, times)
    assert texts(implied.ranks[0]) == "F0.0@0-1 B0.0@5-7"
    assert texts(implied.ranks[1]) == "F0.0@1.5-2.5 B0.0@2.5-4.5"
    listed = simulate(with_transfers(schedule), times)
    assert texts(listed.ranks[0]) == "F0.0@0-1 SF0.0@1-1.5 RB0.0@5-5 B0.0@5-7"
    assert texts(listed.ranks[1]) == "RF0.0@1.5-1.5 F0.0@1.5-2.5 B0.0@2.5-4.5 SB0.0@4.5-5"
    assert listed.makespan == implied.makespan == 7


def test_who_meets_waits_for_the_whole_batch():
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    assert [" ".join(map(str, actions)) for actions in schedule.ranks] == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 B0.1",
        "RF0.0 F0.0 RF0.1 B0.0 SB0.0 F0.1 B0.1 SB0.1",
    ]
    times = Times(forward=(1, 2), transfer=0.25)
    eager = simulate(schedule, times)
    # SF0.1 leaves at 2 and waits at rank 1, whose list is at its receive from 3.25 on.
    assert (
        texts(eager.ranks[1][:4]) == "RF0.0@1.25-1.25 F0.0@1.25-3.25 RF0.1@3.25-3.25 B0.0@3.25-5.25"
    )
    met = simulate(schedule, times, rendezvous=True)
    assert texts(met.ranks[0][:6]) == (
        "F0.0@0-1 SF0.0@1-1.25 F0.1@1-2 SF0.1@3.25-3.5 RB0.0@5.5-5.5 B0.0@5.5-7.5"
    )
    assert texts(met.ranks[1][:5]) == (
        "RF0.0@1.25-1.25 F0.0@1.25-3.25 RF0.1@3.5-3.5 B0.0@3.25-5.25 SB0.0@5.25-5.5"
    )


def test_gathers_and_reductions_overlap_computes_in_order():
    schedule = make_schedule("1f1b", stages=1, microbatches=2)
    schedule = with_weight_traffic(schedule, gathers="each", reduces="each")
    line = simulate(schedule, Times(gather=0.5, reduce=5))
    assert texts(line.ranks[0]) == (
        "G0.0@0-0.5 F0.0@0.5-1.5 G0.0@1.5-2 B0.0@2-4 R0.0@4-9 "
        "G0.1@4-4.5 F0.1@4.5-5.5 G0.1@5.5-6 B0.1@6-8 R0.1@9-14"
    )
    assert line.makespan == 14
    assert line.idle == (14 - 6,)


def test_tensors_that_are_there_and_not_yet_used():
    # Rank 1 is slow: what rank 0 computes ahead piles up.
    schedule = make_schedule("forward", stages=2, microbatches=5)
    times = Times(forward=(1, 10))
    assert simulate(schedule, times).peak_received == (0, 4)
    assert simulate(schedule, Times()).peak_received == (0, 0)
    # Listed, a receive is posted when the compute before its own starts, not earlier.
    assert simulate(with_transfers(schedule), times).peak_received == (0, 0)
    listed = with_transfers(make_schedule("1f1b", stages=2, microbatches=5))
    assert "RF0.1 B0.0 SB0.0 F0.1" in " ".join(map(str, listed.ranks[1]))
    assert simulate(listed, Times()).peak_received == (0, 1)


def test_a_deadlock_says_who_waits_for_what():
    forward, backward = Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0)
    crossed = Schedule("crossed", 2, 1, 1, ((backward, forward), (forward, backward)))
    with pytest.raises(DeadlockError) as raised:
        simulate(crossed, Times())
    assert str(raised.value) == (
        "deadlock: rank 0 at B0.0 waits for F0.0 of rank 0 and B0.0 of rank 1; "
        "rank 1 at F0.0 waits for F0.0 of rank 0"
    )
    lonely = Schedule(
        "lonely", 2, 1, 1, ((forward,), (Action(ActionKind.RECEIVE_FORWARD, 0, 0), forward))
    )
    with pytest.raises(DeadlockError) as raised:
        simulate(lonely, Times())
    assert str(raised.value) == (
        "deadlock: rank 1 at RF0.0 waits for SF0.0, which is not in the list of rank 0"
    )


def test_a_deadlock_of_batches_names_them():
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    actions = list(schedule.ranks[0])
    assert " ".join(map(str, actions[2:6])) == "F0.1 SF0.1 RB0.0 B0.0"
    actions[2:5] = actions[4], actions[2], actions[3]
    early = replace(schedule, ranks=(tuple(actions), schedule.ranks[1]))
    # Nothing that goes forward waits for the turn of what comes back.
    assert (
        simulate(early, Times(), rendezvous=True).makespan == simulate(schedule, Times()).makespan
    )
    schedule = with_transfers(make_schedule("forward", stages=2, microbatches=2, chunks=2))
    actions = list(schedule.ranks[1])
    assert " ".join(map(str, actions[:6])) == "RF0.0 F0.0 RF0.1 SF0.0 F0.1 RF1.0"
    early = replace(schedule, ranks=(schedule.ranks[0], (actions.pop(5), *actions)))
    assert simulate(early, Times()).makespan > 0
    with pytest.raises(DeadlockError) as raised:
        simulate(early, Times(), rendezvous=True)
    assert str(raised.value) == (
        "deadlock: rank 0 at SF0.1 waits for the turn of [RF0.1 SF0.0] on rank 1; "
        "rank 1 at RF1.0 waits for SF1.0 of rank 0"
    )


#: Of F, I and W: each the least once, and W the longest.
UNEVEN = [(1.2, 0.8, 1.0), (0.8, 2.0, 0.5), (2.0, 0.8, 0.8), (1.0, 1.2, 0.8), (0.8, 1.2, 2.0)]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]
)
def test_meeting_costs_nothing_if_transfers_are_free(name: str, chunks: int, stages: int):
    """By the rule of NCCL a step takes as long as its closed form says, however long it is."""
    for microbatches in (4 * stages, 8 * stages)[: 1 if stages == 8 else 2]:
        sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
        schedule = with_transfers(make_schedule(name, **sizes))
        for forward, input_gradient, weight_gradient in UNEVEN:
            times = Times(
                forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
            )
            met = simulate(schedule, times, rendezvous=True)
            whole = forward + input_gradient + weight_gradient
            in_turn = whole * (chunks * microbatches + stages - 1)  # of 1f1b
            if name != "zb-h1":
                assert met.makespan == pytest.approx(in_turn, rel=1e-12)
                continue
            assert met.makespan <= in_turn
            wanted = whole * microbatches
            wanted += (stages - 1) * (forward + input_gradient - weight_gradient)
            if weight_gradient <= min(forward, input_gradient):
                assert met.makespan == pytest.approx(wanted, rel=1e-12)
            else:
                eager = simulate(make_schedule(name, **sizes), times)
                assert met.makespan == pytest.approx(eager.makespan, rel=1e-12)

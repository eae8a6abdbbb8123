# SPDX-License-Identifier: Apache-2.0
"""Simulated times against closed forms and small handwritten cases."""

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

#: Times of F, I and W: equal and distinct, each kind the shortest at least once.
FORWARD_INPUT_WEIGHT = list(itertools.product((2.0, 3.0, 5.0), repeat=3))


def simulate_schedule(name: str, times: tuple[float, float, float], **sizes: int):
    forward, input_gradient, weight_gradient = times
    return simulate(
        make_schedule(name, **sizes),
        Times(forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient),
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_1f1b_bubble_is_p_minus_1_of_m_plus_p_minus_1(stages: int):
    for microbatches in (1, 2, 3, 4, 8, 17):
        for times in FORWARD_INPUT_WEIGHT[::5]:
            timeline = simulate_schedule("1f1b", times, stages=stages, microbatches=microbatches)
            expected = (stages - 1) / (microbatches + stages - 1)
            assert timeline.bubble_fraction == pytest.approx(expected, abs=1e-12)
            assert timeline.makespan == (microbatches + stages - 1) * sum(times)
            assert timeline.idle == ((stages - 1) * sum(times),) * stages
            assert timeline.peak_activations() == tuple(
                min(stages - rank, microbatches) for rank in range(stages)
            )


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_idles_p_minus_1_of_v_m_plus_p_minus_1(stages: int, chunks: int):
    for groups in (1, 2, 3):
        microbatches = groups * stages
        for times in FORWARD_INPUT_WEIGHT[::5]:
            sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
            timeline = simulate_schedule("interleaved", times, **sizes)
            expected = (stages - 1) / (chunks * microbatches + stages - 1)
            assert timeline.bubble_fraction == pytest.approx(expected, abs=1e-12)
            # Counted in whole ranks, this is 1 + (p - 1) / (p v) times the peak of 1f1b.
            expected_peak = min(2 * (stages - 1) + (chunks - 1) * stages + 1, chunks * microbatches)
            assert max(timeline.peak_activations()) == expected_peak


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_zero_bubble_idles_p_minus_1_times_f_plus_i_minus_w(stages: int):
    """Holds for m >= p and W <= min(F, I); a longer W leaves (p - 1) max(F, I) or more."""
    num_exact = 0
    for microbatches in (stages, stages + 1, 2 * stages, 3 * stages + 1):
        for times in FORWARD_INPUT_WEIGHT:
            forward, input_gradient, weight_gradient = times
            timeline = simulate_schedule("zb-h1", times, stages=stages, microbatches=microbatches)
            expected = (stages - 1) * (forward + input_gradient - weight_gradient)
            if weight_gradient <= min(forward, input_gradient):
                num_exact += 1
                assert timeline.idle == (expected,) * stages
            else:
                lower_bound = (stages - 1) * max(forward, input_gradient)
                assert all(idle >= lower_bound >= expected for idle in timeline.idle)
    assert num_exact == 4 * 14


def test_zb_h1_is_never_slower_and_stores_no_more_than_1f1b():
    for stages, microbatches in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 5, 12)):
        for times in FORWARD_INPUT_WEIGHT:
            sizes = {"stages": stages, "microbatches": microbatches}
            zb_h1, baseline = (
                simulate_schedule("zb-h1", times, **sizes),
                simulate_schedule("1f1b", times, **sizes),
            )
            assert zb_h1.makespan <= baseline.makespan
            assert max(zb_h1.peak_activations()) == min(stages, microbatches)
            assert max(zb_h1.peak_activations()) == max(baseline.peak_activations())
    # Activations that I frees are not stored until W.
    timeline = simulate_schedule("zb-h1", FORWARD_INPUT_WEIGHT[0], stages=4, microbatches=8)
    assert timeline.peak_activations() == (4, 4, 4, 4)
    assert timeline.peak_activations(freed_by_input_gradient=1.0) == (4, 3, 2, 1)
    assert timeline.peak_activations(freed_by_input_gradient=0.5) == (4, 3.5, 3, 2.5)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_undelayed_weight_grads_idle_p_minus_1_times_f_plus_i(stages: int):
    for microbatches in (1, stages, 2 * stages, 3 * stages + 1):
        for times in FORWARD_INPUT_WEIGHT:
            forward, input_gradient, weight_gradient = times
            sizes = {"stages": stages, "microbatches": microbatches}
            schedule = make_schedule("zb-h1", **sizes, weight_delay=0)
            timeline = simulate(
                with_transfers(schedule),
                Times(
                    forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
                ),
                rendezvous=True,
            )
            assert timeline.idle == ((stages - 1) * (forward + input_gradient),) * stages
            # No activation lives longer than in 1f1b.
            assert (
                timeline.peak_activations()
                == simulate_schedule("1f1b", times, **sizes).peak_activations()
            )


def test_uneven_stages_wait_for_the_slowest():
    # Rank 1 takes 3 + 6 per microbatch and starts at 1; rank 0 ends with its last backward.
    schedule = make_schedule("1f1b", stages=2, microbatches=4)
    times = Times(forward=(1, 3), input_gradient=(1, 3), weight_gradient=(1, 3))
    timeline = simulate(schedule, times)
    assert timeline.makespan == 1 + 4 * 9 + 2
    assert timeline.idle == (39 - 12, 39 - 36)
    assert timeline.bubble_fraction == 30 / 78


def texts(events) -> str:
    return " ".join(f"{action}@{start:g}-{end:g}" for action, start, end in events)


def test_implied_and_listed_transfers_take_equal_time():
    schedule = make_schedule("1f1b", stages=2, microbatches=1)
    times = Times(transfer=0.5)
    implied = simulate(schedule, times)
    assert texts(implied.ranks[0]) == "F0.0@0-1 B0.0@5-7"
    assert texts(implied.ranks[1]) == "F0.0@1.5-2.5 B0.0@2.5-4.5"
    listed = simulate(with_transfers(schedule), times)
    assert texts(listed.ranks[0]) == "F0.0@0-1 SF0.0@1-1.5 RB0.0@5-5 B0.0@5-7"
    assert texts(listed.ranks[1]) == "RF0.0@1.5-1.5 F0.0@1.5-2.5 B0.0@2.5-4.5 SB0.0@4.5-5"
    assert listed.makespan == implied.makespan == 7


def test_rendezvous_waits_for_the_whole_batch():
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
    rendezvous = simulate(schedule, times, rendezvous=True)
    assert texts(rendezvous.ranks[0][:6]) == (
        "F0.0@0-1 SF0.0@1-1.25 F0.1@1-2 SF0.1@3.25-3.5 RB0.0@5.5-5.5 B0.0@5.5-7.5"
    )
    assert texts(rendezvous.ranks[1][:5]) == (
        "RF0.0@1.25-1.25 F0.0@1.25-3.25 RF0.1@3.5-3.5 B0.0@3.25-5.25 SB0.0@5.25-5.5"
    )


def test_gathers_and_reductions_overlap_computes_in_order():
    schedule = make_schedule("1f1b", stages=1, microbatches=2)
    schedule = with_weight_traffic(schedule, gathers="each", reduces="each")
    timeline = simulate(schedule, Times(gather=0.5, reduce=5))
    assert texts(timeline.ranks[0]) == (
        "G0.0@0-0.5 F0.0@0.5-1.5 G0.0@1.5-2 B0.0@2-4 R0.0@4-9 "
        "G0.1@4-4.5 F0.1@4.5-5.5 G0.1@5.5-6 B0.1@6-8 R0.1@9-14"
    )
    assert timeline.makespan == 14
    assert timeline.idle == (14 - 6,)


def test_peak_received_counts_tensors_not_yet_used():
    # Rank 1 is slow: outputs of rank 0 accumulate.
    schedule = make_schedule("forward", stages=2, microbatches=5)
    times = Times(forward=(1, 10))
    assert simulate(schedule, times).peak_received == (0, 4)
    assert simulate(schedule, Times()).peak_received == (0, 0)
    # A listed receive is posted when the compute before its consumer starts, not earlier.
    assert simulate(with_transfers(schedule), times).peak_received == (0, 0)
    listed = with_transfers(make_schedule("1f1b", stages=2, microbatches=5))
    assert "RF0.1 B0.0 SB0.0 F0.1" in " ".join(map(str, listed.ranks[1]))
    assert simulate(listed, Times()).peak_received == (0, 1)


def test_deadlock_names_the_waiting_ranks_and_actions():
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


def test_deadlock_of_batches_names_the_batches():
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=2))
    actions = list(schedule.ranks[0])
    assert " ".join(map(str, actions[2:6])) == "F0.1 SF0.1 RB0.0 B0.0"
    actions[2:5] = actions[4], actions[2], actions[3]
    early = replace(schedule, ranks=(tuple(actions), schedule.ranks[1]))
    # Forward transfers do not wait for the turn of backward transfers.
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


#: Times of F, I and W: each kind is the shortest once, and W is once the longest.
UNEVEN_TIMES = [(1.2, 0.8, 1.0), (0.8, 2.0, 0.5), (2.0, 0.8, 0.8), (1.0, 1.2, 0.8), (0.8, 1.2, 2.0)]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]
)
def test_rendezvous_is_free_if_transfers_are_free(name: str, chunks: int, stages: int):
    """With rendezvous a step takes as long as its closed form for any number of microbatches."""
    for microbatches in (4 * stages, 8 * stages)[: 1 if stages == 8 else 2]:
        sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
        schedule = with_transfers(make_schedule(name, **sizes))
        for forward, input_gradient, weight_gradient in UNEVEN_TIMES:
            times = Times(
                forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
            )
            rendezvous = simulate(schedule, times, rendezvous=True)
            microbatch_time = forward + input_gradient + weight_gradient
            makespan_1f1b = microbatch_time * (chunks * microbatches + stages - 1)  # of 1f1b
            if name != "zb-h1":
                assert rendezvous.makespan == pytest.approx(makespan_1f1b, rel=1e-12)
                continue
            assert rendezvous.makespan <= makespan_1f1b
            expected = microbatch_time * microbatches
            expected += (stages - 1) * (forward + input_gradient - weight_gradient)
            if weight_gradient <= min(forward, input_gradient):
                assert rendezvous.makespan == pytest.approx(expected, rel=1e-12)
            else:
                eager = simulate(make_schedule(name, **sizes), times)
                assert rendezvous.makespan == pytest.approx(eager.makespan, rel=1e-12)

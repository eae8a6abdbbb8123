# SPDX-License-Identifier: Apache-2.0
"""Computes of each schedule, their order, and sizes that are refused."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from megatron.core.pipeline_parallel import (
    COMPUTES,
    SENDS,
    TRANSFERS,
    Action,
    ActionKind,
    check,
    make_schedule,
    problems,
)
from tests.unit_tests.core.pipeline_parallel.by_hand import end_times, random_schedule, random_times


def action_lists(name: str, **sizes: int) -> list[str]:
    return [" ".join(map(str, actions)) for actions in make_schedule(name, **sizes).ranks]


def test_1f1b_matches_the_written_lists():
    assert action_lists("1f1b", stages=3, microbatches=4) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3",
    ]


def test_interleaved_processes_chunks_group_by_group():
    assert action_lists("interleaved", stages=2, microbatches=4, chunks=2) == [
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3",
    ]


def test_interleaved_may_end_with_a_smaller_group():
    forwards = [
        str(action)
        for action in make_schedule(
            "interleaved", stages=2, microbatches=5, chunks=2, group_size=3
        ).ranks[0]
        if action.kind is ActionKind.FORWARD
    ]
    assert " ".join(forwards) == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 F0.3 F0.4 F1.3 F1.4"


def test_zero_bubble_delays_weight_gradients_by_rank():
    assert action_lists("zb-h1", stages=3, microbatches=4) == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3",
        "F0.0 F0.1 I0.0 F0.2 I0.1 W0.0 F0.3 I0.2 W0.1 I0.3 W0.2 W0.3",
        "F0.0 I0.0 F0.1 I0.1 F0.2 I0.2 W0.0 F0.3 I0.3 W0.1 W0.2 W0.3",
    ]


def test_weight_delay_sets_when_weight_gradients_run():
    assert action_lists("zb-h1", stages=3, microbatches=2, weight_delay=0) == [
        "F0.0 F0.1 I0.0 W0.0 I0.1 W0.1",
        "F0.0 F0.1 I0.0 W0.0 I0.1 W0.1",
        "F0.0 I0.0 W0.0 F0.1 I0.1 W0.1",
    ]
    sizes = {"stages": 4, "microbatches": 6}
    default = action_lists("zb-h1", **sizes)
    assert (
        action_lists("zb-h1", **sizes, weight_delay=3)
        == action_lists("zb-h1", **sizes, weight_delay=9)
        == default
    )
    delayed = action_lists("zb-h1", **sizes, weight_delay=1)
    assert delayed[:2] == default[:2]
    assert delayed[3].startswith("F0.0 I0.0 F0.1 I0.1 W0.0 F0.2 I0.2 W0.1")
    for delay, name, text in (
        (-1, "zb-h1", "weight delay -1: use 0 or more"),
        (0, "1f1b", "1f1b defers no weight gradients: leave out weight delay 0"),
    ):
        with pytest.raises(ValueError, match=text):
            make_schedule(name, **sizes, weight_delay=delay)


def test_forward_schedule_has_only_forwards():
    assert (
        action_lists("forward", stages=2, microbatches=2, chunks=2) == ["F0.0 F0.1 F1.0 F1.1"] * 2
    )


def test_explicit_group_size_is_used():
    sizes = {"stages": 2, "microbatches": 3, "chunks": 2}
    assert action_lists("forward", **sizes)[0] == "F0.0 F0.1 F1.0 F1.1 F0.2 F1.2"
    assert action_lists("forward", **sizes, group_size=3)[0] == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2"
    even_sizes = {"stages": 2, "microbatches": 4, "chunks": 2}
    assert action_lists("interleaved", **even_sizes, group_size=4)[0].startswith(
        "F0.0 F0.1 F0.2 F0.3 F1.0"
    )


def test_stage_neighbours_and_matching_transfers_agree():
    schedule = make_schedule("interleaved", stages=3, microbatches=3, chunks=2)
    assert schedule.virtual_stage(1, 1) == 4
    assert (schedule.next_stage(2, 0), schedule.next_stage(2, 1)) == ((0, 1), None)
    assert (schedule.prev_stage(0, 1), schedule.prev_stage(0, 0)) == ((2, 0), None)
    for rank in range(3):
        for chunk in range(2):
            for kind in TRANSFERS:
                action = Action(kind, chunk, 1)
                peer = schedule.matching_transfer(rank, action)
                to_next = kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD)
                neighbour = schedule.next_stage if to_next else schedule.prev_stage
                if peer is None:
                    assert neighbour(rank, chunk) is None
                    continue
                assert (peer[0], peer[1].chunk) == neighbour(rank, chunk)
                assert schedule.matching_transfer(*peer) == (rank, action)
                assert (kind in SENDS) != (peer[1].kind in SENDS)
    assert schedule.matching_transfer(0, Action(ActionKind.FORWARD, 0, 0)) is None


def test_schedules_run_every_action_once_in_microbatch_order():
    rng = random.Random(5)
    counts: Counter[str] = Counter()
    for _ in range(300):
        schedule = random_schedule(rng)
        counts[schedule.name] += 1
        numbers = list(range(schedule.microbatches))
        kinds = {
            "forward": {ActionKind.FORWARD},
            "zb-h1": {ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT},
        }.get(schedule.name, {ActionKind.FORWARD, ActionKind.BACKWARD})
        for actions in schedule.ranks:
            orders: dict[tuple[ActionKind, int], list[int]] = defaultdict(list)
            for action in actions:
                orders[action.kind, action.chunk].append(action.microbatch)
            assert orders == {(k, c): numbers for k in kinds for c in range(schedule.chunks)}
        assert check(schedule) == []
        assert max(end_times(schedule, random_times(rng, schedule))) > 0
    assert min(counts[name] for name in ("1f1b", "interleaved", "zb-h1", "forward")) > 20


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_accepts_only_group_sizes_without_waits(stages: int, chunks: int):
    for microbatches in range(1, 3 * stages + 2):
        for size in range(1, microbatches + 2):
            remainder = microbatches % size
            legal = stages <= size <= microbatches and (remainder == 0 or remainder >= stages)
            legal = legal or size == microbatches < stages
            sizes = {"microbatches": microbatches, "chunks": chunks, "group_size": size}
            assert legal == (problems("interleaved", stages=stages, **sizes) == [])


@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        ("dualpipe", {}, "no schedule 'dualpipe': use 1f1b, interleaved, zb-h1 or forward"),
        ("1f1b", {"microbatches": 0}, "microbatches 0: use 1 or more"),
        ("1f1b", {"stages": 0, "chunks": 0}, "stages 0: use 1 or more; chunks 0: use 1 or more"),
        ("interleaved", {"chunks": 2, "group_size": 0}, "group size 0: use 1 or more"),
        ("1f1b", {"chunks": 2}, "1f1b has one chunk per stage, not 2: use interleaved"),
        (
            "zb-h1",
            {"group_size": 4},
            "zb-h1 has no groups of microbatches: leave out group size 4",
        ),
        (
            "interleaved",
            {"chunks": 1},
            "interleaved with one chunk per stage is 1f1b: use that or more chunks",
        ),
        (
            "interleaved",
            {"stages": 1, "chunks": 2},
            "2 chunks on one stage overlap nothing: use 1 chunk",
        ),
        (
            "interleaved",
            {"chunks": 2, "microbatches": 9, "group_size": 4},
            "groups of 4 of 9 microbatches on 4 stages leave 1, fewer than the stages, for the "
            "last group: use groups of 5, or other numbers of microbatches",
        ),
        ("interleaved", {"chunks": 2, "group_size": 3}, "are too small: use groups of 4"),
        ("interleaved", {"chunks": 2, "group_size": 9}, "are too large: use groups of 8"),
    ],
)
def test_invalid_schedule_is_refused_with_the_fix(name: str, sizes: dict, text: str):
    sizes = {"stages": 4, "microbatches": 8, **sizes}
    assert text in "; ".join(problems(name, **sizes))
    with pytest.raises(ValueError) as raised:
        make_schedule(name, **sizes)
    assert str(raised.value) == "; ".join(problems(name, **sizes))


@pytest.mark.parametrize(
    ("stages", "microbatches", "size"),
    [(4, 8, 4), (4, 5, 5), (4, 9, 5), (4, 3, 3), (3, 7, 4), (3, 8, 4), (2, 3, 3), (2, 5, 3)],
)
def test_default_group_size_is_the_smallest_valid_size(stages: int, microbatches: int, size: int):
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": 2}
    assert problems("interleaved", **sizes) == []
    schedule = make_schedule("interleaved", **sizes)
    assert schedule == make_schedule("interleaved", **sizes, group_size=size)
    assert check(schedule) == []
    smaller = range(min(stages, microbatches), size)
    assert all(problems("interleaved", **sizes, group_size=n) for n in smaller)


def test_refused_group_size_would_deadlock():
    # 9 microbatches in groups of 4 leave a group of 1: rank 0 waits for the input of its second
    # chunk before its first chunk has run the microbatches that rank 3 needs for its warm-up.
    assert problems("interleaved", stages=4, microbatches=9, chunks=3, group_size=4)
    turns = [(c, n) for s in (0, 4, 8) for c in range(3) for n in range(s, min(s + 4, 9))]
    ranks = []
    for rank in range(4):
        num_warmup = 2 * (4 - rank - 1) + 2 * 4
        forwards = [Action(ActionKind.FORWARD, c, n) for c, n in turns]
        backwards = [Action(ActionKind.BACKWARD, 2 - c, n) for c, n in turns]
        pairs = zip(forwards[num_warmup:], backwards, strict=False)
        cooldown = backwards[len(turns) - num_warmup :]
        ranks.append((*forwards[:num_warmup], *(a for pair in pairs for a in pair), *cooldown))
    legal = make_schedule("interleaved", stages=4, microbatches=9, chunks=3, group_size=9)
    assert {a.kind for a in ranks[0]} <= COMPUTES
    refused = type(legal)("interleaved", 4, 3, 9, tuple(ranks))
    assert check(legal) == []
    assert check(refused)[0].startswith("deadlock: ")


def test_schedules_do_not_import_torch():
    text = (
        "import sys; from megatron.core.pipeline_parallel import with_transfers, check;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", text], check=True)

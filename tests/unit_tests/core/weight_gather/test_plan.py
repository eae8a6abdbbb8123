# SPDX-License-Identifier: Apache-2.0
"""Gather plans: blocks stay within the budget, the next block is prefetched, faults are found."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

from megatron.core.weight_gather import GatherPlan, check_plan, compile_plan
from megatron.core.weight_gather.plan import PlannedUse, max_adjacent_bytes

UNLIMITED = 10**12

#: Embedding, four layers, head.
FORWARD = (0, 1, 2, 3, 4, 5)
TRACES = {"forward": FORWARD, "backward": tuple(reversed(FORWARD))}


def steps(microbatches: int) -> list[str]:
    return ["forward", "backward"] * microbatches


def plan_of(*, budget: int, prefetch_bytes: int = 0, microbatches: int = 3, prefetch: bool = True):
    sizes = [1] * len(FORWARD)
    plan = compile_plan(
        TRACES,
        steps(microbatches),
        sizes=sizes,
        budget=budget,
        prefetch_bytes=prefetch_bytes,
        prefetch=prefetch,
    )
    assert check_plan(plan, sizes=sizes, budget=budget) == []
    return plan


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_unlimited_budget_gathers_every_block_once(prefetch: bool, microbatches: int):
    plan = plan_of(budget=UNLIMITED, microbatches=microbatches, prefetch=prefetch)
    assert plan.gathers == len(FORWARD)
    assert plan.peak_bytes == len(FORWARD)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("resident", [2, 3, 4, 5])
def test_alternating_passes_regather_only_blocks_over_budget(resident: int, prefetch: bool):
    # Every pass over n blocks but the first gathers n - resident blocks again; the first gathers n.
    blocks, microbatches = len(FORWARD), 3
    plan = plan_of(budget=resident, microbatches=microbatches, prefetch=prefetch)
    assert plan.gathers == blocks + (2 * microbatches - 1) * (blocks - resident)
    assert plan.peak_bytes == resident


def test_one_resident_block_degrades_to_on_demand():
    plan = plan_of(budget=1, microbatches=2)
    assert plan.prologue == (0,)
    assert [c.all_gather for c in plan.uses[1:]] == [(c.block,) for c in plan.uses[1:]]
    assert plan.gathers == len(plan.uses) == 4 * len(FORWARD) - 3


def test_block_used_by_last_forward_and_backward_is_one_use():
    plan = plan_of(budget=2, microbatches=2)
    assert [c.block for c in plan.uses] == [
        *(0, 1, 2, 3, 4, 5),
        *(4, 3, 2, 1, 0),
        *(1, 2, 3, 4, 5),
        *(4, 3, 2, 1, 0),
    ]


def test_next_block_is_prefetched_before_its_use():
    plan = plan_of(budget=2)
    assert plan.prologue == (0, 1)
    assert plan.uses[0] == PlannedUse(0, (), ())
    assert plan.uses[1] == PlannedUse(1, (0,), (2,))
    for use, next_use in itertools.pairwise(plan.uses):
        assert next_use.block not in next_use.all_gather, (use, next_use)


def test_without_prefetch_gathers_start_at_the_use():
    plan = plan_of(budget=UNLIMITED, prefetch=False)
    assert plan.prologue == ()
    assert [c.all_gather for c in plan.uses if c.all_gather] == [(b,) for b in FORWARD]
    assert all(c.all_gather in ((), (c.block,)) for c in plan.uses)


def test_prefetch_bytes_count_beyond_the_next_block():
    sizes = [1, 100, 3, 4, 5, 6]
    for prefetch_bytes, prologue in ((0, (0, 1)), (2, (0, 1)), (3, (0, 1, 2)), (7, (0, 1, 2, 3))):
        plan = compile_plan(
            TRACES, steps(1), sizes=sizes, budget=UNLIMITED, prefetch_bytes=prefetch_bytes
        )
        assert plan.prologue == prologue
        assert check_plan(plan, sizes=sizes, budget=UNLIMITED) == []


def test_no_block_is_released_for_one_needed_later():
    # At the use of block 0 the budget is two blocks: 2 would replace 1, which is used earlier.
    traces = {"forward": (0, 1, 2, 0, 1)}
    plan = compile_plan(traces, ["forward"], sizes=[1, 1, 1], budget=2, prefetch_bytes=UNLIMITED)
    assert plan.prologue == (0, 1)
    assert plan.uses[1] == PlannedUse(1, (0,), (2,))


def test_zero_byte_block_is_gathered_once_and_never_released():
    sizes = [0, 10, 10, 10, 10, 0]
    plan = compile_plan(TRACES, steps(3), sizes=sizes, budget=20, prefetch_bytes=0)
    assert check_plan(plan, sizes=sizes, budget=20) == []
    gathered = [*plan.prologue, *(b for c in plan.uses for b in c.all_gather)]
    assert gathered.count(0) == gathered.count(5) == 1
    assert not {0, 5} & {b for c in plan.uses for b in c.reshard}
    # Zero-byte blocks may all start at once: they need no memory, and the link keeps their order.
    free = compile_plan(TRACES, steps(3), sizes=[0] * 6, budget=0, prefetch_bytes=0)
    assert free.prologue == FORWARD
    assert free.gathers == 6


def test_block_over_budget_is_alone_while_in_use():
    sizes = [1, 50, 1, 1, 1, 1]
    plan = compile_plan(TRACES, steps(2), sizes=sizes, budget=3, prefetch_bytes=UNLIMITED)
    assert check_plan(plan, sizes=sizes, budget=3) == []
    assert plan.peak_bytes == 50


def test_blocks_without_a_later_use_are_released():
    plan = plan_of(budget=UNLIMITED, microbatches=1)
    assert [c.reshard for c in plan.uses[-5:]] == [(5,), (4,), (3,), (2,), (1,)]


def test_an_empty_program_has_an_empty_plan():
    assert compile_plan(TRACES, [], sizes=[], budget=0, prefetch_bytes=0) == GatherPlan(
        (), (), 0, 0
    )


def random_case(rng: random.Random) -> dict:
    blocks = rng.randint(1, 9)
    traces = {}
    for name in ("a", "b", "c"):
        trace = [rng.randrange(blocks) for _ in range(rng.randint(0, 14))]
        traces[name] = tuple(block for block, _ in itertools.groupby(trace))
    sizes = [rng.choice((0, 1, 2, 3, 5, 8, 40)) for _ in range(blocks)]
    return {
        "traces": traces,
        "program": [rng.choice("abc") for _ in range(rng.randint(0, 8))],
        "sizes": sizes,
        "budget": rng.choice((0, 1, 3, 6, 10, 50, UNLIMITED)),
        "prefetch_bytes": rng.choice((0, 1, 4, 20, UNLIMITED)),
        "prefetch": rng.random() < 0.8,
    }


def test_plans_of_random_programs_pass_all_checks():
    rng = random.Random(4)
    prefetched = released = 0
    for _ in range(1500):
        case = random_case(rng)
        plan = compile_plan(**case)
        assert check_plan(plan, sizes=case["sizes"], budget=case["budget"]) == [], case
        flat = [b for name in case["program"] for b in case["traces"][name]]
        assert [c.block for c in plan.uses] == [b for b, _ in itertools.groupby(flat)]
        # A program gathers each of its blocks at least once and at most once per use.
        assert len(set(flat)) <= plan.gathers <= max(1, len(plan.uses))
        if case["budget"] == UNLIMITED:
            assert plan.gathers == len(set(flat))
        prefetched += sum(b != c.block for c in plan.uses for b in c.all_gather)
        released += sum(len(c.reshard) for c in plan.uses)
    assert prefetched > 1000
    assert released > 1000


def test_prefetch_is_never_late_with_budget_for_any_two_blocks():
    rng = random.Random(5)
    for _ in range(300):
        case = random_case(rng) | {"prefetch": True, "budget": 80}
        plan = compile_plan(**case)
        for use in plan.uses:
            assert use.block not in use.all_gather, case


def test_prefetch_is_never_late_with_budget_for_neighbours():
    rng = random.Random(7)
    num_late = 0
    for _ in range(300):
        case = random_case(rng) | {"prefetch": True, "prefetch_bytes": 0}
        program = {name: case[name] for name in ("traces", "program", "sizes")}
        sufficient_budget = max_adjacent_bytes(**program)
        for budget in (sufficient_budget, max(0, sufficient_budget - 1)):
            plan = compile_plan(**case | {"budget": budget})
            late = any(use.block in use.all_gather for use in plan.uses)
            assert not late or budget < sufficient_budget, case
            num_late += late
    assert num_late > 100


def fewest_gathers(uses: list[int], slots: int) -> int:
    """Return the optimum by exhaustive search over resident sets, with one slot per block."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for block in uses:
        next_states: dict[frozenset[int], int] = {}
        for resident, cost in states.items():
            loads = cost + (block not in resident)
            pool = resident | {block}
            for retained in itertools.combinations(pool, min(slots, len(pool))):
                if block in retained:
                    key = frozenset(retained)
                    next_states[key] = min(next_states.get(key, UNLIMITED), loads)
        states = next_states
    return min(states.values())


def test_gathers_are_minimal_for_blocks_of_equal_size():
    rng = random.Random(6)
    for _ in range(60):
        blocks, slots = rng.randint(2, 6), rng.randint(1, 4)
        uses = [rng.randrange(blocks) for _ in range(rng.randint(2, 20))]
        plan = compile_plan(
            {"a": tuple(uses)},
            ["a"],
            sizes=[1] * blocks,
            budget=slots,
            prefetch_bytes=0,
            prefetch=False,
        )
        assert plan.gathers == fewest_gathers([b for b, _ in itertools.groupby(uses)], slots)


def test_a_large_program_compiles_quickly():
    blocks = 100
    forward = tuple(range(blocks))
    traces = {"forward": forward, "backward": forward[::-1]}
    for budget, prefetch_bytes in ((2, 0), (10, 3), (50, 30), (UNLIMITED, UNLIMITED)):
        start = time.process_time()
        plan = compile_plan(
            traces, steps(16), sizes=[1] * blocks, budget=budget, prefetch_bytes=prefetch_bytes
        )
        # 10 to 40 ms on an idle core; the bound allows for a busy core.
        assert time.process_time() - start < 0.5
        assert len(plan.uses) == 16 * 2 * (blocks - 1) + 1


def change(plan: GatherPlan, index: int, **fields: tuple[int, ...]) -> GatherPlan:
    uses = list(plan.uses)
    uses[index] = replace(uses[index], **fields)
    return replace(plan, uses=tuple(uses))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda p: change(p, 1, all_gather=()), "block 2 is used but not gathered"),
        (lambda p: change(p, 1, reshard=(0, 1)), "reshards block 1 before it is used"),
        (lambda p: change(p, 2, reshard=(1, 4)), "reshards block 4, which is not gathered"),
        (lambda p: change(p, 1, all_gather=(2, 1)), "gathers block 1 again"),
        (lambda p: change(p, 1, reshard=()), "3 bytes are gathered, the budget is 2"),
        (lambda p: replace(p, peak_bytes=1), "the plan states 1 bytes"),
        (lambda p: replace(p, gathers=p.gathers + 1), "the plan states 2 bytes"),
        (lambda p: replace(p, prologue=(0, 1, 2)), "prologue: 3 bytes"),
    ],
)
def test_check_plan_reports_faults(fault, message: str):
    plan = fault(plan_of(budget=2))
    problems = check_plan(plan, sizes=[1] * len(FORWARD), budget=2)
    assert any(message in p for p in problems)


def test_check_plan_refuses_releasing_permanent_storage():
    plan = plan_of(budget=2)
    problems = check_plan(plan, sizes=[0, 1, 1, 1, 1, 1], budget=2)
    assert any("permanent" in p for p in problems)


@pytest.mark.parametrize(
    ("traces", "kwargs", "message"),
    [
        ({"f": (0,)}, {"sizes": [1], "budget": 1, "prefetch_bytes": 0}, "'forward'"),
        ({"forward": (3,)}, {"sizes": [1], "budget": 1, "prefetch_bytes": 0}, "needs block 3"),
        ({"forward": (0,)}, {"sizes": [-1], "budget": 1, "prefetch_bytes": 0}, "0 or more"),
        ({"forward": (0,)}, {"sizes": [1], "budget": 1, "prefetch_bytes": -1}, "0 or more"),
    ],
)
def test_invalid_arguments_are_reported(traces, kwargs, message: str):
    with pytest.raises(ValueError, match=message):
        compile_plan(traces, ["forward"], **kwargs)

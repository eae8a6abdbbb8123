# SPDX-License-Identifier: Apache-2.0
"""Which collectives a row must run in one step: the formulas that its trace is held to.

So a feature that is silently off (sequence parallelism that does not cut, a sharded optimizer that
reduces everything everywhere, a reduction that waits for the end) fails, although it gives the
right numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.process_groups import GROUP_NAMES
from tests.parity.rows import CUT_WEIGHTS
from tests.parity.training import LAYERS, RECOMPUTE, Run, Step
from tests.support.activation import assert_active, assert_silent, matching, table
from tests.support.covering_array import Row

CUT_GRADIENTS = ("optim_grads", CUT_WEIGHTS)


def assert_traffic(row: Row, runs: Sequence[Run], number: int) -> None:
    """Fail unless every rank's step `number` ran exactly the collectives that the row asks for."""
    steps = [run.steps[number] for run in runs]
    for run, step in zip(runs, steps, strict=True):
        _over_lanes(row, step, last=number == len(run.steps) - 1)
        _launched(row, run, step)
        _gathers(row, run)
        if run.leased_bytes:
            raise AssertionError(f"{run.leased_bytes} bytes were never given back")
        if (run.late > 0) != (row["link"] == "late"):
            raise AssertionError(f"{run.late} collectives were late, wanted {row['link']}")
        if row["tp"] > 1:
            _in_regions(row, step)
        else:
            assert_silent(step.records, group="tp")
    once = _all_reduces_in_regions(row)
    whole_on_tp = row["tp"] > 1 and (row["sequence_parallel"] or row["qk_norm"])
    _once_a_step(row, steps, group="tp", beyond=once, wanted=whole_on_tp)
    for size in (2, 4):  # kv heads that several ranks hold
        replicas = row["tp"] // row["groups"]
        _once_a_step(row, steps, group=f"tp/{size}", beyond=0, wanted=replicas == size)


def _launched(row: Row, run: Run, step: Step) -> None:
    """All buckets are reduced during backward, unless they wait for its end; cut ones never do."""
    at_once = row["overlap"] or (row["dp"] > 1 and row["placement"] in CUT_GRADIENTS)
    launched = len(run.buckets) if at_once else 0
    if step.launched_in_backward != launched:
        raise AssertionError(
            f"{step.launched_in_backward} buckets reduced during backward, wanted {launched}"
        )
    if row["dp"] > 1 and row["placement"] == CUT_WEIGHTS:  # layers, and what is on either side
        by_unit = len(run.buckets) == LAYERS + 2
        if by_unit != (row["granularity"] == "unit") or len(run.buckets) < LAYERS + 2:
            raise AssertionError(f"by {row['granularity']}, but there are {len(run.buckets)}")
    elif (len(run.buckets) > 2) != (row["bucket"] == "small"):
        raise AssertionError(f"{row['bucket']} buckets, but there are {len(run.buckets)}")


def _over_lanes(row: Row, step: Step, *, last: bool) -> None:
    """What the formula says, bucket by bucket; gathers from when they follow a plan.

    For a per-token loss the number of tokens is summed as well; the report's loss is summed over
    the world.
    """
    if row["tp"] * row["dp"] > 1:
        first = matching(step.records, kind="all_reduce", group="world")[:1]
        assert_active(first, exactly=1, exactly_bytes=8)
    if row["dp"] == 1:
        assert_silent(step.records, group="lanes")
        return
    wanted = {(t.kind, t.group): (t.count, t.bytes) for t in step.over_lanes}
    if row["per_token"]:  # the number of tokens, fp32
        count, size = wanted.get(("all_reduce", "lanes"), (0, 0))
        wanted["all_reduce", "lanes"] = count + 1, size + 4
    groups = {name for name in GROUP_NAMES if name.endswith("lanes")}
    seen = {(r.kind, r.group) for r in step.records if r.group in groups}
    for kind, group in sorted(seen | wanted.keys()):
        if kind == "all_gather" and not last:
            continue
        count, size = wanted.get((kind, group), (0, 0))
        assert_active(step.records, kind=kind, group=group, exactly=count, exactly_bytes=size)


def _gathers(row: Row, run: Run) -> None:
    """Weights are gathered ahead if that is asked for, within the plan, and as often as it says."""
    first, last = run.steps[0].gathers, run.steps[-1].gathers
    if row["placement"] == "no_shard" or row["dp"] == 1:
        assert first is None
        return
    if last.mismatches or (last.prefetched > 0) != row["early_gather"]:
        raise AssertionError(f"early gathers are {row['early_gather']}, but there were {last}")
    for step in run.steps:
        if (step.in_flight > 0) != row["early_gather"]:
            raise AssertionError(f"{step.in_flight} gathers under way after a step")
    gathered = last.gathers - run.steps[-2].gathers.gathers
    over = "gather_lanes" if row["placement"] == CUT_WEIGHTS else "inner_lanes"
    over = "lanes" if (over, row["instances"]) == ("inner_lanes", 1) else over
    assert_active(run.steps[-1].records, kind="all_gather", group=over, exactly=gathered)
    if row["placement"] == CUT_WEIGHTS:
        sizes = [4 * b.numel for b in run.buckets]
        units = [4 * b.numel for b in run.buckets if not b.root]
        root = sum(sizes) - sum(units)
        if not 0 < last.peak_bytes <= root + 2 * max(units):
            raise AssertionError(f"{last.peak_bytes} bytes of {sizes} were gathered at a time")
        each = gathered / len(run.buckets)
        if not 1.0 <= each <= 3.0 * row["accumulation"]:
            raise AssertionError(f"a bucket was gathered {each} times in a step")


def _all_reduces_in_regions(row: Row) -> int:
    """Return the all-reduces over tp of all microbatches: a maximum and a sum for the loss, and
    without sequence parallelism one where a region ends, in forward and in backward, and where
    one is run again."""
    if row["tp"] == 1:
        return 0
    ends = 0 if row["sequence_parallel"] else 4 * LAYERS + 2 + _regions_again(row)
    return (2 + ends) * row["accumulation"]


def _regions_again(row: Row) -> int:
    """Return how many regions of a layer, two each, are run a second time in backward."""
    runs = RECOMPUTE[row["recompute"]].runs(LAYERS)
    return sum(2 * (last - first) for first, last, again in runs if again)


def _in_regions(row: Row, step: Step) -> None:
    """Two regions a layer, and one at each end of the model.

    With sequence parallelism, entering a region gathers (in backward once more, for the weight's
    gradient) and leaving it scatters; in backward the other way round. A region that is run again
    does both once more.
    """
    regions, again = 2 * LAYERS, _regions_again(row)
    microbatches = row["accumulation"] if row["sequence_parallel"] else 0
    for kind, count in (
        ("all_gather", (3 * regions + again + 2) * microbatches),
        ("reduce_scatter", (2 * regions + again + 2) * microbatches),
    ):
        assert_active(step.records, kind=kind, group="tp", exactly=count)


def _once_a_step(row: Row, steps: Sequence[Step], *, group: str, beyond: int, wanted: bool) -> None:
    """Expect one more all-reduce on `group`, of gradients that are addends on its ranks.

    A rank whose shard of the gradients holds none of those runs none; not all can be such ranks.
    """
    for step in steps:
        extra = len(matching(step.records, kind="all_reduce", group=group)) - beyond
        allowed = {0, 1} if wanted and row["placement"] != "no_shard" else {int(wanted)}
        if extra not in allowed:
            raise AssertionError(
                f"{extra} gradient sums over {group}, wanted {allowed}:\n{table(step.records)}"
            )
    if wanted:
        everywhere = [record for step in steps for record in step.records]
        assert_active(everywhere, kind="all_reduce", group=group, at_least=beyond * len(steps) + 1)

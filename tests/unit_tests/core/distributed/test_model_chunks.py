# SPDX-License-Identifier: Apache-2.0
"""Steps that run model chunks in any order: gradients, gathers, reductions and planted bugs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import CollectiveRecord, trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.weight_gather import EVALUATION, FORWARD, segment_name
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.mutants import Mutation, apply, bug_table
from tests.support.nan_memory import nan_memory
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.distributed.chunked_model import (
    NUM_CHUNKS,
    SCHEDULES,
    ChunkedModel,
    ChunkedReference,
    run_schedule,
)
from tests.unit_tests.core.distributed.engine_steps import (
    LEARNING_RATE,
    assert_gradients,
    assert_weights,
    update,
)
from tests.unit_tests.core.distributed.small_model import tokens

Config = dict[str, object]
REDUCTION_KINDS = ("all_reduce", "reduce_scatter", "all_to_all")


def build_engine(
    groups: ProcessGroupCollection,
    *,
    bucket_bytes: int = 1,
    order=range(NUM_CHUNKS),
    **settings: object,
) -> tuple[ChunkedModel, DataParallel]:
    """Return a chunked model and its engine, with unused buffers full of NaN."""
    config = DataParallelConfig(**{"debug": True, **settings})  # type: ignore[arg-type]
    model = ChunkedModel(groups, config, bucket_bytes=bucket_bytes, order=order)
    return model, DataParallel(model.store, groups, config=config)


def configs() -> list[Config]:
    """Return strategies with and without both overlaps."""
    strategy_configs: list[Config] = []
    for strategy, overlap in itertools.product(STRATEGIES, (True, False)):
        gather = overlap and strategy != "no_shard"
        config = {"strategy": strategy, "overlap_grad_reduce": overlap}
        strategy_configs.append({**config, "overlap_param_gather": gather})
    return [
        *strategy_configs,
        {"strategy": "optim", "overlap_param_gather": True, "bucket_bytes": 400},
    ]


def reductions(records: Sequence[CollectiveRecord]) -> list[tuple[str, int]]:
    """Return the reductions of a trace in order."""
    return [(r.kind, r.bytes) for r in records if r.kind in REDUCTION_KINDS]


def train_case(groups: ProcessGroupCollection, config: Config, schedule: str) -> None:
    """Train four steps of three microbatches and compare them with the reference."""
    model, engine = build_engine(groups, order=(1, 3, 0, 2), **config)
    chunks = [bucket.model_chunk for bucket in model.store.buckets]
    assert chunks == sorted(chunks, reverse=True)
    assert set(chunks) == {0, 1, 3}
    reference = ChunkedReference(_initial(), groups["dense_dp"].size)
    for step in range(4):
        indices = [3 * step + i for i in range(3)]
        with trace(groups) as records, nan_memory():
            run_schedule(model, engine, SCHEDULES[schedule], indices)
        expected = reference.gradients(indices)
        assert_gradients(engine, expected)
        sharded = bool(engine.placement.gradient)
        early = engine.config.overlap_grad_reduce or sharded
        assert engine.launched_in_backward == (len(engine.buckets) if early else 0)
        assert {x.num_reductions for b in engine.buckets for x in b.blocks} == {3 if sharded else 1}
        assert len(reductions(records)) == len(engine.buckets) * (3 if sharded else 1)
        update(engine)
        engine.start_param_sync()
        for name, gradient in expected.items():
            reference.weights[name] = reference.weights[name] - LEARNING_RATE * gradient
    gatherer = gatherer_of(engine)
    if gatherer is not None:
        assert gatherer.counts.mismatches == 0
        assert gatherer.counts.peak_bytes <= gatherer.budget
        has_plan = gatherer.reshards or engine.config.overlap_param_gather
        assert (gatherer.current_plan is not None) == has_plan
        assert (gatherer.counts.prefetched > 0) == engine.config.overlap_param_gather
        if gatherer.reshards:
            assert gatherer.pool.peak_bytes <= gatherer.budget
    with engine.evaluation([]):
        pass
    assert_weights(engine, reference.weights)
    assert engine.pool.live_bytes == 0


def _initial():
    single = ProcessGroupCollection.single()
    return ChunkedModel(single, DataParallelConfig()).store.handles


def train_all_cases(rank: int, world: int) -> None:
    """Run every config and schedule with late or early collectives."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for number, (config, schedule) in enumerate(itertools.product(configs(), SCHEDULES)):
        link = Late() if number % 3 else Early()
        with simulated(groups, link):
            train_case(groups, config, schedule)
        assert link.count > 0


def test_chunks_in_any_order_get_gradients_and_planned_gathers():
    run_ranks(train_all_cases, 2, timeout=120.0)


def compare_split_backward(rank: int, world: int) -> None:
    """Compare gradients and reductions of split and unsplit backward bit for bit."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for config in configs():
        for grad_dtype in (torch.float32, torch.bfloat16):
            settings = {**config, "grad_dtype": grad_dtype}
            if grad_dtype is torch.bfloat16 and config["strategy"] != "no_shard":
                settings["fp32_accumulation"] = True
            runs = []
            for schedule in (SCHEDULES["in turn"], SCHEDULES["split"]):
                model, engine = build_engine(groups, **settings)
                gradients = []
                for step in range(2):
                    with trace(groups) as records:
                        run_schedule(model, engine, schedule, [3 * step + i for i in range(3)])
                    gradients += [owned.gradients.clone() for owned in engine.owned()]
                    update(engine)
                    engine.start_param_sync()
                runs.append((gradients, sorted(reductions(records))))
            for unsplit_gradient, split_gradient in zip(runs[0][0], runs[1][0], strict=True):
                assert torch.equal(unsplit_gradient, split_gradient), settings
            assert runs[0][1] == runs[1][1]


def test_split_backward_of_chunks_keeps_bits_and_reductions():
    run_ranks(compare_split_backward, 2, timeout=120.0)


def check_prefetches(rank: int, world: int) -> None:
    """Check which gathers a prefetch starts, and that the step uses all started gathers."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for strategy in STRATEGIES[1:]:
        model, engine = build_engine(
            groups,
            strategy=strategy,
            overlap_param_gather=True,
            fsdp_all_gather_in_start_param_sync=False,
        )
        gatherer = gatherer_of(engine)
        for _ in range(3):
            run_schedule(model, engine, SCHEDULES["in turn"], (0, 1, 2))
            update(engine)
            engine.start_param_sync()
        engine.begin_step(program=[segment_name(FORWARD, 0), segment_name(FORWARD, 1)])
        engine.enter_segment(FORWARD)
        before, started = gatherer.counts.gathers, list(gatherer.in_flight)
        engine.prefetch_segment(segment_name(FORWARD, 1))
        newly_started = [i for i in gatherer.in_flight if i not in started]
        chunk_buckets = [b.index for b in model.store.buckets if b.model_chunk == 1]
        if gatherer.reshards:
            assert newly_started == []  # the current plan starts the gathers
        else:
            assert sorted(newly_started) == sorted(chunk_buckets)
        assert gatherer.counts.gathers == before + len(newly_started)
        engine.prefetch_segment(segment_name(FORWARD, 2))
        engine.prefetch_segment("unknown segment")
        assert gatherer.counts.gathers == before + len(newly_started)
        ids, targets = tokens(rank, 0)
        hidden = model.run(0, ids, targets)
        engine.enter_segment(segment_name(FORWARD, 1))
        model.run(1, hidden, targets)
        engine.finish()
        assert gatherer.counts.mismatches == 0


def test_prefetch_starts_each_gather_of_a_chunk_once():
    run_ranks(check_prefetches, 2)


def check_unplanned_prefetch(rank: int, world: int) -> None:
    """Check that a prefetch without a plan gathers a chunk's first bucket."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for prefetch in (True, False):
        model, engine = build_engine(
            groups, strategy="optim_grads_params", overlap_param_gather=prefetch
        )
        gatherer = gatherer_of(engine)
        run_schedule(model, engine, SCHEDULES["in turn"], (0, 1, 2))
        engine.begin_step(program=["a segment that never ran", segment_name(FORWARD, 1)])
        assert gatherer.current_plan is None
        engine.prefetch_segment(segment_name(FORWARD, 1))
        first_bucket = model.store.handles["scale"].block.bucket.index
        assert gatherer.in_flight == ([first_bucket] if prefetch else [])
        engine.abort()
        assert gatherer.pool.live_bytes == 0


def test_a_prefetch_without_a_plan_gathers_the_first_bucket():
    run_ranks(check_unplanned_prefetch, 2)


def check_reordered_segments(rank: int, world: int) -> None:
    """Check that a segment's trace does not depend on the segment that ran before it."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    model, engine = build_engine(groups, strategy="optim_grads_params")
    # The head is the last weight of F30 and the first of B30, but not of the segment before B31.
    steps = (
        "F00 F10 F20 F30 B30 B20 B10 B00",
        "F00 F10 F20 F30 F01 F11 F21 F31 B30 B20 B10 B00 B31 B21 B11 B01",
    )
    for microbatches, schedule in enumerate(steps, 1):
        run_schedule(model, engine, schedule, range(microbatches))
        update(engine)
        engine.start_param_sync()
    gatherer = gatherer_of(engine)
    assert gatherer.counts.mismatches == 0
    assert gatherer.current_plan is not None


def test_segments_in_a_new_order_follow_their_plan():
    run_ranks(check_reordered_segments, 2)


def check_evaluations(rank: int, world: int) -> None:
    """Run forwards of several microbatches and chunks in one evaluation."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    reference = ChunkedReference(_initial(), 1)
    for strategy in STRATEGIES[1:]:
        model, engine = build_engine(groups, strategy=strategy, overlap_param_gather=True)
        order = [(chunk, i) for i in range(2) for chunk in range(NUM_CHUNKS)]
        for kind in (FORWARD, EVALUATION, FORWARD):
            for _ in range(3):
                # a sync without an update: all weights become stale but keep their values
                engine.start_param_sync()
                program = [segment_name(kind, chunk) for chunk, _ in order]
                with engine.evaluation(program), torch.no_grad():
                    hidden: dict[int, torch.Tensor] = {}
                    for chunk, i in order:
                        ids, targets = tokens(rank, i)
                        engine.enter_segment(segment_name(kind, chunk))
                        hidden[i] = model.run(chunk, hidden.get(i, ids), targets)
                for i, loss in hidden.items():
                    expected = reference.losses(rank, i)
                    assert abs(loss.item() - expected) <= 1e-5 * expected
        assert gatherer_of(engine).counts.mismatches == 0
        assert gatherer_of(engine).counts.prefetched > 0
        with pytest.raises(ValueError, match="segment forward outside a step"):
            engine.enter_segment(FORWARD)


def test_evaluation_may_run_model_chunks():
    run_ranks(check_evaluations, 2)


def test_calls_outside_a_step_are_refused():
    model, engine = build_engine(ProcessGroupCollection.single())
    for call in (
        lambda: engine.begin_last_backward(0),
        lambda: engine.post_backward(1),
        lambda: engine.prefetch_segment("x"),
    ):
        with pytest.raises(ValueError, match="begin_step"):
            call()
    with engine.evaluation():
        with (
            pytest.raises(ValueError, match="evaluation inside an evaluation"),
            engine.evaluation(),
        ):
            pass
        with pytest.raises(ValueError, match=r"begin_last_backward\(0\)"):
            engine.begin_last_backward(0)
    assert model.store.queue is None


def test_last_backward_before_an_earlier_microbatch_is_refused():
    model, engine = build_engine(ProcessGroupCollection.single(), overlap_grad_reduce=True)
    ids, targets = tokens(0, 0)
    engine.begin_step()
    engine.begin_last_backward(0)
    engine.backward(model.run(0, ids, targets).sum(), last=False)
    with pytest.raises(ValueError, match="last=False"):
        engine.backward(model.run(0, ids, targets).sum(), last=False)
    engine.abort()


#: Planted bugs of model chunks, and the config that shows each.
BUGS = bug_table(r"""
the last microbatch of one chunk counts for all [strategy=no_shard]
    distributed.data_parallel DataParallel.begin_last_backward: if bucket.model_chunk ==
    model_chunk:
    => if self._last_backward_chunks.update(self._model_chunks) or True:
a bucket spans model chunks [strategy=optim bucket_bytes=1000000000]
    weight_gather.bucket bucket_plans: if tied or model_chunks[handle.name] != model_chunk:
    => if tied:
a bucket is reduced before its last weight gradient [strategy=no_shard]
    distributed.data_parallel DataParallel.post_backward: is_last = model_chunk in
    self._last_backward_chunks and
    => is_last =
sharded gradients of a microbatch are not reduced [strategy=optim_grads]
    distributed.gradient_bucket GradientBlock.grad_accumulated: self.num_unfinished == 0
    => self.num_unfinished < 0
a segment without weights is never recorded [strategy=optim_grads_params overlap_param_gather]
    weight_gather.gatherer Gatherer._close_trace: or running.segment not in running.traces
    => or False
a segment without gathers clears its trace [strategy=optim overlap_param_gather]
    weight_gather.gatherer Gatherer._close_trace: running.trace or running.segment not in
    running.traces
    => True
unsharded weights are planned for the first segment only [strategy=optim overlap_param_gather]
    weight_gather.gatherer Gatherer.begin: tuple(dict.fromkeys(program)) => program[:1]
""")
#: Errors that show a badly planted bug rather than a detected one.
PLANTING_ERRORS = ("NameError", "TypeError", "AttributeError", "SyntaxError", "no live function")


def train_with_fault(
    rank: int, world: int, configs: Sequence[Config], fault: Mutation | None
) -> None:
    """Run every schedule under some configs, with or without a planted fault."""
    if fault is not None:
        apply(fault)
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    with simulated(groups, Late()):
        for config, schedule in itertools.product(configs, SCHEDULES):
            train_case(groups, config, schedule)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_of_model_chunks_is_detected(name: str):
    (fault,), config = BUGS[name].mutations(), BUGS[name].settings
    with pytest.raises(RankFailure) as error:
        run_ranks(train_with_fault, 2, [config], fault, timeout=20.0)
    assert not any(word in str(error.value) for word in PLANTING_ERRORS), error.value
    print(str(error.value).strip().splitlines()[-1])


def test_configs_of_planted_bugs_pass_without_the_bug():
    different = {str(bug.settings): bug.settings for bug in BUGS.values()}
    run_ranks(train_with_fault, 2, list(different.values()), None)

# SPDX-License-Identifier: Apache-2.0
"""Steps that run the parts of a model in any order: gradients, gathers, reductions, mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from megatron.core.comm import CollectiveRecord, trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import EVALUATION, FORWARD, segment_name
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.mutants import Mutation, apply, planted
from tests.support.nan_memory import nan_memory
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    LEARNING_RATE,
    assert_gradients,
    assert_weights,
    update,
)
from tests.unit_tests.core.distributed.parts_model import (
    PARTS,
    SCHEDULES,
    PartsModel,
    PartsReference,
    play,
)
from tests.unit_tests.core.distributed.small_model import tokens

Config = dict[str, object]
SUMS = ("all_reduce", "reduce_scatter", "all_to_all")


def built(
    groups: ProcessGroupCollection, *, bucket_bytes: int = 1, order=range(PARTS), **settings: object
) -> tuple[PartsModel, DataParallel]:
    """Return a model in parts and its engine, whose unused buffers hold NaN."""
    config = DataParallelConfig(**{"debug": True, **settings})  # type: ignore[arg-type]
    model = PartsModel(groups, config, bucket_bytes=bucket_bytes, order=order)
    return model, DataParallel(model.store, groups, config=config)


def configs() -> list[Config]:
    """Return strategies with and without both overlaps."""
    found: list[Config] = []
    for strategy, overlap in itertools.product(STRATEGIES, (True, False)):
        gather = overlap and strategy != "no_shard"
        config = {"strategy": strategy, "overlap_grad_reduce": overlap}
        found.append({**config, "overlap_param_gather": gather})
    return [*found, {"strategy": "optim", "overlap_param_gather": True, "bucket_bytes": 400}]


def reductions(records: Sequence[CollectiveRecord]) -> list[tuple[str, int]]:
    """Return the reductions of a trace in order."""
    return [(r.kind, r.bytes) for r in records if r.kind in SUMS]


def case(groups: ProcessGroupCollection, config: Config, schedule: str) -> None:
    """Train four steps of three microbatches."""
    model, engine = built(groups, order=(1, 3, 0, 2), **config)
    parts = [bucket.model_chunk for bucket in model.store.buckets]
    assert parts == sorted(parts, reverse=True)
    assert set(parts) == {0, 1, 3}
    reference = PartsReference(_initial(), groups["dense_dp"].size)
    for step in range(4):
        indices = [3 * step + i for i in range(3)]
        with trace(groups) as records, nan_memory():
            play(model, engine, SCHEDULES[schedule], indices)
        wanted = reference.gradients(indices)
        assert_gradients(engine, wanted)
        cut = bool(engine.placement.gradient)
        early = engine.config.overlap_grad_reduce or cut
        assert engine.launched_in_backward == (len(engine.buckets) if early else 0)
        assert {x.num_reductions for b in engine.buckets for x in b.blocks} == {3 if cut else 1}
        assert len(reductions(records)) == len(engine.buckets) * (3 if cut else 1)
        update(engine)
        engine.start_param_sync()
        for name, gradient in wanted.items():
            reference.weights[name] = reference.weights[name] - LEARNING_RATE * gradient
    gatherer = gatherer_of(engine)
    if gatherer is not None:
        assert gatherer.counts.mismatches == 0
        assert gatherer.counts.peak_bytes <= gatherer.budget
        follows = gatherer.reshards or engine.config.overlap_param_gather
        assert (gatherer.current_plan is not None) == follows
        assert (gatherer.counts.prefetched > 0) == engine.config.overlap_param_gather
        if gatherer.reshards:
            assert gatherer.pool.peak_bytes <= gatherer.budget
    with engine.evaluation([]):
        pass
    assert_weights(engine, reference.weights)
    assert engine.pool.live_bytes == 0


def _initial():
    single = ProcessGroupCollection.single()
    return PartsModel(single, DataParallelConfig()).store.handles


def cases(rank: int, world: int) -> None:
    """Run every config and schedule, late or early."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for number, (config, schedule) in enumerate(itertools.product(configs(), SCHEDULES)):
        link = Late() if number % 3 else Early()
        with simulated(groups, link):
            case(groups, config, schedule)
        assert link.count > 0


def test_chunks_in_any_order_get_gradients_and_planned_gathers():
    run_ranks(cases, 2, timeout=120.0)


def split_cases(rank: int, world: int) -> None:
    """Compare, to the bit, the gradients and reductions of split backwards with plain ones."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for config in configs():
        for grad_dtype in (torch.float32, torch.bfloat16):
            settings = {**config, "grad_dtype": grad_dtype}
            if grad_dtype is torch.bfloat16 and config["strategy"] != "no_shard":
                settings["fp32_accumulation"] = True
            found = []
            for schedule in (SCHEDULES["in turn"], SCHEDULES["split"]):
                model, engine = built(groups, **settings)
                seen = []
                for step in range(2):
                    with trace(groups) as records:
                        play(model, engine, schedule, [3 * step + i for i in range(3)])
                    seen += [owned.gradients.clone() for owned in engine.owned()]
                    update(engine)
                    engine.start_param_sync()
                found.append((seen, sorted(reductions(records))))
            for one, other in zip(found[0][0], found[1][0], strict=True):
                assert torch.equal(one, other), settings
            assert found[0][1] == found[1][1]


def test_split_backward_of_chunks_keeps_bits_and_reductions():
    run_ranks(split_cases, 2, timeout=120.0)


def prefetches(rank: int, world: int) -> None:
    """Check what a prefetch starts, and that what it started is used."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for strategy in STRATEGIES[1:]:
        model, engine = built(
            groups,
            strategy=strategy,
            overlap_param_gather=True,
            fsdp_all_gather_in_start_param_sync=False,
        )
        gatherer = gatherer_of(engine)
        for _ in range(3):
            play(model, engine, SCHEDULES["in turn"], (0, 1, 2))
            update(engine)
            engine.start_param_sync()
        engine.begin_step(program=[segment_name(FORWARD, 0), segment_name(FORWARD, 1)])
        engine.enter_segment(FORWARD)
        before, started = gatherer.counts.gathers, list(gatherer.in_flight)
        engine.prefetch_segment(segment_name(FORWARD, 1))
        new = [i for i in gatherer.in_flight if i not in started]
        of_part = [b.index for b in model.store.buckets if b.model_chunk == 1]
        if gatherer.reshards:
            assert new == []  # the plan that is followed starts them
        else:
            assert sorted(new) == sorted(of_part)
        assert gatherer.counts.gathers == before + len(new)
        engine.prefetch_segment(segment_name(FORWARD, 2))
        engine.prefetch_segment("backward of nobody")
        assert gatherer.counts.gathers == before + len(new)
        ids, targets = tokens(rank, 0)
        hidden = model.run(0, ids, targets)
        engine.enter_segment(segment_name(FORWARD, 1))
        model.run(1, hidden, targets)
        engine.finish()
        assert gatherer.counts.mismatches == 0


def test_a_prefetch_starts_what_a_part_needs_and_nothing_twice():
    run_ranks(prefetches, 2)


def unplanned_prefetch(rank: int, world: int) -> None:
    """Check that a prefetch gathers a part's first bucket where no plan is followed."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for ahead in (True, False):
        model, engine = built(groups, strategy="optim_grads_params", overlap_param_gather=ahead)
        gatherer = gatherer_of(engine)
        play(model, engine, SCHEDULES["in turn"], (0, 1, 2))
        engine.begin_step(program=["a segment that never ran", segment_name(FORWARD, 1)])
        assert gatherer.current_plan is None
        engine.prefetch_segment(segment_name(FORWARD, 1))
        first = model.store.handles["scale"].block.bucket.index
        assert gatherer.in_flight == ([first] if ahead else [])
        engine.abort()
        assert gatherer.pool.live_bytes == 0


def test_a_prefetch_without_a_plan_gathers_the_first_bucket():
    run_ranks(unplanned_prefetch, 2)


def evaluations(rank: int, world: int) -> None:
    """Run forwards of several microbatches and parts in one evaluation."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    reference = PartsReference(_initial(), 1)
    for strategy in STRATEGIES[1:]:
        model, engine = built(groups, strategy=strategy, overlap_param_gather=True)
        order = [(part, i) for i in range(2) for part in range(PARTS)]
        for kind in (FORWARD, EVALUATION, FORWARD):
            for _ in range(3):
                # the optimizer writes what was there, so that all is stale and nothing new
                engine.start_param_sync()
                program = [segment_name(kind, part) for part, _ in order]
                with engine.evaluation(program), torch.no_grad():
                    hidden: dict[int, torch.Tensor] = {}
                    for part, i in order:
                        ids, targets = tokens(rank, i)
                        engine.enter_segment(segment_name(kind, part))
                        hidden[i] = model.run(part, hidden.get(i, ids), targets)
                for i, loss in hidden.items():
                    wanted = reference.losses(rank, i)
                    assert abs(loss.item() - wanted) <= 1e-5 * wanted
        assert gatherer_of(engine).counts.mismatches == 0
        assert gatherer_of(engine).counts.prefetched > 0
        with pytest.raises(ValueError, match="segment forward outside a step"):
            engine.enter_segment(FORWARD)


def test_an_evaluation_may_run_parts_too():
    run_ranks(evaluations, 2)


def test_calls_outside_a_step_are_refused():
    model, engine = built(ProcessGroupCollection.single())
    for call in (
        lambda: engine.begin_last_backward(0),
        lambda: engine.post_backward(1),
        lambda: engine.prefetch_segment("x"),
    ):
        with pytest.raises(ValueError, match="outside a step: call begin_step"):
            call()
    with engine.evaluation():
        with (
            pytest.raises(ValueError, match="evaluation inside an evaluation"),
            engine.evaluation(),
        ):
            pass
        with pytest.raises(ValueError, match=r"begin_last_backward\(0\) outside a step"):
            engine.begin_last_backward(0)
    assert model.store.queue is None


def test_last_before_an_earlier_microbatch_is_done_is_noticed():
    model, engine = built(ProcessGroupCollection.single(), overlap_grad_reduce=True)
    ids, targets = tokens(0, 0)
    engine.begin_step()
    engine.begin_last_backward(0)
    engine.backward(model.run(0, ids, targets).sum(), last=False)
    with pytest.raises(ValueError, match="last=False"):
        engine.backward(model.run(0, ids, targets).sum(), last=False)
    engine.abort()


#: A fault of parts: (module, function, code, faulty code), the config it shows with.
BUGS: dict[str, tuple[tuple[str, str, str, str], Config]] = {
    "the last microbatch of one part counts for all": (
        (
            "megatron.core.distributed.data_parallel",
            "DataParallel.begin_last_backward",
            "if bucket.model_chunk == model_chunk:",
            "if self._last_backward_chunks.update(self._model_chunks) or True:",
        ),
        {"strategy": "no_shard"},
    ),
    "a bucket spans parts": (
        (
            "megatron.core.weight_gather.bucket",
            "bucket_plans",
            "if tied or model_chunks[handle.name] != model_chunk:",
            "if tied:",
        ),
        {"strategy": "optim", "bucket_bytes": 10**9},
    ),
    "a bucket is reduced before its last weight gradient": (
        (
            "megatron.core.distributed.data_parallel",
            "DataParallel.post_backward",
            "is_last = model_chunk in self._last_backward_chunks and",
            "is_last =",
        ),
        {"strategy": "no_shard"},
    ),
    "cut gradients of a microbatch stay open": (
        (
            "megatron.core.distributed.data_parallel",
            "GradientBlock.grad_accumulated",
            "self.num_unfinished == 0",
            "self.num_unfinished < 0",
        ),
        {"strategy": "optim_grads"},
    ),
    "a segment without weights is never known": (
        (
            "megatron.core.weight_gather.gatherer",
            "Gatherer._close_trace",
            "or running.segment not in running.traces",
            "or False",
        ),
        {"strategy": "optim_grads_params", "overlap_param_gather": True},
    ),
    "a segment that needed nothing again is forgotten": (
        (
            "megatron.core.weight_gather.gatherer",
            "Gatherer._close_trace",
            "running.trace or running.segment not in running.traces",
            "True",
        ),
        {"strategy": "optim", "overlap_param_gather": True},
    ),
    "what is stored whole follows the first segment alone": (
        (
            "megatron.core.weight_gather.gatherer",
            "Gatherer.begin",
            "tuple(dict.fromkeys(program))",
            "program[:1]",
        ),
        {"strategy": "optim", "overlap_param_gather": True},
    ),
}
#: Mistakes of the planting, not of the code.
ACCIDENTS = ("NameError", "TypeError", "AttributeError", "SyntaxError", "no live function")


def ordeal(rank: int, world: int, configs: Sequence[Config], fault: Mutation | None) -> None:
    """Run every schedule under some configs, with a fault."""
    if fault is not None:
        apply(fault)
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    with simulated(groups, Late()):
        for config, schedule in itertools.product(configs, SCHEDULES):
            case(groups, config, schedule)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_parts_is_noticed(name: str):
    edit, config = BUGS[name]
    with pytest.raises(RankFailure) as error:
        run_ranks(ordeal, 2, [config], planted(*edit), timeout=20.0)
    assert not any(word in str(error.value) for word in ACCIDENTS), error.value
    print(str(error.value).strip().splitlines()[-1])


def test_the_configs_of_the_bugs_pass_without_them():
    different = {str(config): config for _, config in BUGS.values()}
    run_ranks(ordeal, 2, list(different.values()), None)

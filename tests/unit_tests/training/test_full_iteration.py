# SPDX-License-Identifier: Apache-2.0
"""Recorded steps against eager steps, bit for bit, on a simulated GPU with capture rules."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.device import CudaRecorder
from megatron.core.distributed import DataParallelConfig
from megatron.core.distributed.capture import StepRecording
from megatron.core.models.gpt import MTPTargets, shift_targets
from megatron.core.moe.router import routers_of
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.training.cuda_graphs import PATIENCE, StepInputs
from megatron.training.failures.replay import Replayer, RerunPolicy
from megatron.training.step import Microbatch, TrainStep
from tests.support.capture_rules import CaptureError, CaptureRules
from tests.support.device_products import products_of_a_gpu
from tests.support.inputs import one_thread
from tests.support.op_tape import OpTape, TapeRecorder
from tests.support.ranks import run_ranks
from tests.support.simulated_links import simulated
from tests.unit_tests.training.graphed_runs import (
    EVALUATED,
    EXPERTS,
    HYBRID,
    REPLAYED,
    SHORTER,
    STEPS,
    WARMUP,
    WITHOUT_DROPOUT,
    build_step,
    prepare_too_early,
    run_eager_and_recorded,
    run_steps,
    simulated_gpu,
    step_batches,
    whole_rows,
)

WITHOUT_EARLY = {"overlap_param_gather": True, "fsdp_all_gather_in_start_param_sync": False}
CUT = {"strategy": "optim_grads_params"}


def assert_equal_runs(eager, recorded, step) -> None:
    """See that most steps were replayed, and that nobody can tell."""
    graph = step.forward_backward
    assert graph.replays == graph.recorder.tape.replays == len(REPLAYED)
    assert graph.eager_steps == STEPS - len(REPLAYED)
    assert graph.recorder.captures == 1
    assert recorded.losses == eager.losses
    assert len(set(eager.losses)) == STEPS + len(EVALUATED)
    assert recorded.launched == eager.launched
    for key, weight in eager.weights.items():
        assert torch.equal(recorded.weights[key], weight), key


@pytest.mark.parametrize(
    ("granularity", "documents"), [(None, True), ("selective", False), ("full", False)]
)
@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_one_rank_is_replayed_to_the_bits_of_eager_steps(granularity, documents):
    with one_thread():
        found = run_eager_and_recorded(
            ProcessGroupCollection.single(),
            DataParallelConfig(),
            granularity=granularity,
            documents=documents,
        )
    assert_equal_runs(*found)
    # On a CPU only: the factor of the loss, and the range of tokens and labels, are read.
    read = 1 + 2 * len(("tokens", "labels"))
    assert found[2].forward_backward.recorder.tape.syncs == ["aten._local_scalar_dense"] * 2 * read
    assert found[2].optimizer.scaler.scale > 4.0, "the loss scale has changed on the way"


def test_hybrid_of_whole_rows_replays_bits_of_eager_steps():
    with one_thread():
        found = run_eager_and_recorded(
            ProcessGroupCollection.single(), DataParallelConfig(), model=HYBRID
        )
    assert_equal_runs(*found)
    assert whole_rows(torch.device("cpu")).num_maps == 1, "tables were made for other rows too"


@pytest.mark.parametrize(("granularity", "factor"), [(None, None), ("full", 0.7)])
@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_experts_are_replayed_with_other_routes(granularity, factor):
    model = dataclasses.replace(
        EXPERTS, moe=dataclasses.replace(EXPERTS.moe, capacity_factor=factor)
    )
    with one_thread(), products_of_a_gpu():
        found = run_eager_and_recorded(
            ProcessGroupCollection.single(),
            DataParallelConfig(),
            model=model,
            granularity=granularity,
        )
    assert_equal_runs(*found)
    read = 1 + 2 * len(("tokens", "labels"))
    assert found[2].forward_backward.recorder.tape.syncs == ["aten._local_scalar_dense"] * 2 * read
    (router,) = routers_of(found[2].model)
    microbatches = sum(1 if i in SHORTER else 2 for i in range(STEPS))
    recorded = 2  # a tape computes what it records
    assert router.counted[:6].sum() == 2 * 12 * 2 * (microbatches + recorded)


def cases(rank: int, world: int, grid: dict, configs: list[dict]) -> None:
    """Compare on the ranks of a grid."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **grid), rank=rank)
    for config in configs:
        eager, recorded, step = run_eager_and_recorded(
            groups, DataParallelConfig(**config), model=WITHOUT_DROPOUT
        )
        assert_equal_runs(eager, recorded, step)
        if any(gatherer.reshards for gatherer in step.engine.gatherers):
            assert recorded.gathers == eager.gathers, config
            assert step.forward_backward.recording.buffers


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_two_ranks_are_replayed_with_their_collectives(strategy):
    more = [{}] if strategy == "no_shard" else [{}, WITHOUT_EARLY]
    if strategy == "optim_grads":
        more.append({"grad_dtype": torch.bfloat16, "fp32_accumulation": True})
    run_ranks(cases, 2, {}, [{"strategy": strategy, **one} for one in more])


@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_hybrid_sharding_outer_gathers_are_in_the_graph():
    configs = [{**CUT, **WITHOUT_EARLY, "outer": outer} for outer in ("optim", "no_shard")]
    run_ranks(cases, 4, {"instances": 2}, configs)


@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_weights_over_gtp_are_gathered_inside_the_graph():
    whole = {"strategy": "no_shard", "fsdp_all_gather_in_start_param_sync": False}
    run_ranks(cases, 2, {"gtp": 2}, [whole, {"strategy": "optim", **WITHOUT_EARLY}])


@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_tensor_parallel_ranks_are_replayed():
    run_ranks(cases, 2, {"tp": 2}, [{}])


def context_cases(rank: int, world: int, engines: list[str]) -> None:
    """Compare with sequences that are cut over the ranks, for each engine of attention."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    for engine in engines:
        backend = dataclasses.replace(LOCAL, context_engine=engine)
        found = run_eager_and_recorded(
            groups, DataParallelConfig(), model=WITHOUT_DROPOUT, backend=backend
        )
        assert_equal_runs(*found)


@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_ranks_that_share_sequences_are_replayed():
    run_ranks(context_cases, 2, ["p2p", "all_gather", "a2a"])


# --- what cannot be recorded ----------------------------------------------------------------------


def refusals(rank: int, world: int) -> None:
    """See that settings which reach across the border of a step are refused."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for more, message in (
        ({"overlap_param_gather": True}, "set fsdp_all_gather_in_start_param_sync to False"),
        ({"debug": True}, "debug compares orders on the host"),
    ):
        with pytest.raises(ValueError, match=message):
            build_step(groups, DataParallelConfig(**CUT, **more), graph=TapeRecorder(OpTape()))


def gtp_refusals(rank: int, world: int) -> None:
    """Weights over gtp are gathered ahead without being asked for: their first ones too."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    with pytest.raises(ValueError, match="set fsdp_all_gather_in_start_param_sync to False"):
        build_step(groups, DataParallelConfig(), graph=TapeRecorder(OpTape()))


def test_overlap_across_graph_boundary_is_refused():
    run_ranks(refusals, 2)
    run_ranks(gtp_refusals, 2)


def early_gather(rank: int, world: int) -> None:
    """Record a step whose first gather is under way, past the refusal."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    config = DataParallelConfig(**CUT, **WITHOUT_EARLY)
    rules, recorder = simulated_gpu()
    with rules.enforced(), simulated(groups, rules):
        step = build_step(groups, config, graph=recorder)
        step.engine.config = dataclasses.replace(config, fsdp_all_gather_in_start_param_sync=True)
        with (
            mock.patch.object(StepRecording, "prepare", prepare_too_early),
            pytest.raises(CaptureError, match="on the other side of a capture's border"),
        ):
            run_steps(step)
    assert (recorder.captures, step.forward_backward.replays) == (1, 0)


def test_an_early_gather_cannot_be_recorded():
    run_ranks(early_gather, 2)


def other_order(rank: int, world: int) -> None:
    """Run the layers the other way round from the step on that is to be recorded."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    rules, recorder = simulated_gpu()
    with rules.enforced(), simulated(groups, rules):
        step = build_step(groups, DataParallelConfig(**CUT), graph=recorder)
        for i in range(WARMUP):
            step(step_batches(rank, 10 + i), lr=1e-3, weight_decay=0.0)
        blocks = step.model.decoder.blocks
        step.model.decoder.blocks = torch.nn.ModuleList([*blocks[2:], *blocks[:2]])
        with pytest.raises(ValueError, match="needed weights in another order than the one before"):
            step(step_batches(rank, 20), lr=1e-3, weight_decay=0.0)
    assert (recorder.captures, recorder.tape.replays) == (1, 0)


def test_an_order_that_changes_in_the_recording_is_an_error():
    run_ranks(other_order, 2)


def test_weights_needed_in_changing_orders_are_an_error():
    step = build_step(
        ProcessGroupCollection.single(), DataParallelConfig(), graph=TapeRecorder(OpTape())
    )
    graph = step.forward_backward
    graph.eager_steps, graph._planned = WARMUP + PATIENCE - 1, False
    step(step_batches(0, 0), lr=1e-2, weight_decay=0.0)
    assert graph.recorder.captures == 0
    graph._planned = False
    with pytest.raises(ValueError, match=r"after 7 steps layers still need.*drop --cuda-graph"):
        step(step_batches(0, 0), lr=1e-2, weight_decay=0.0)


def test_a_recorder_of_cuda_graphs_needs_a_gpu():
    with pytest.raises(ValueError, match=r"full_iteration needs a GPU, .* on the cpu: leave"):
        CudaRecorder(torch.device("cpu"), "--cuda-graph-impl full_iteration")


def test_what_a_step_returns_outlives_the_next_replay():
    recorder = TapeRecorder(OpTape())
    step = build_step(ProcessGroupCollection.single(), DataParallelConfig(), graph=recorder)
    totals, copies = [], []
    for i in range(WARMUP + 2):
        batches = step_batches(0, 10 + i)
        totals.append(step.forward_backward(batches, step.loss_factors(batches)))
        copies.append(totals[-1].item())
    assert step.forward_backward.replays == 2
    assert [total.item() for total in totals] == copies
    assert len(set(copies)) == WARMUP + 2


# --- its parts ------------------------------------------------------------------------------------


def by_blocks(batches: list[Microbatch]) -> list[Microbatch]:
    """Return microbatches whose layouts know documents by where they begin, and not by ids."""
    found = []
    for b in batches:
        rows = {name: getattr(b.layout, name).t() for name in ("positions", "document_ids")}
        cut = SequenceSharding.of(b.tokens.shape[1], 1)
        layout = SequenceLayout.make(cut, 0, rows=2, **rows)
        layout = layout.with_samples(b.layout.sample_ids)
        found.append(dataclasses.replace(b, layout=layout))
    return found


def test_graph_replays_feed_gradients_to_checksum_comparison():
    def checksums_of(step: TrainStep) -> list[tuple[int, float]]:
        world = step.groups["world"]
        reruns = RerunPolicy("report_determinism_stats")
        step.replayer = replayer = Replayer(reruns, engine=step.engine, world=world)
        found = []
        for i in (0, 1, 3, 6, 7):
            report = step(step_batches(0, i), lr=1e-2, weight_decay=0.0)
            assert report.anomaly is None
            found.append((int(replayer.checksum.sum), float(replayer.checksum.norm)))
        assert (replayer.compared, replayer.differed) == (5, 0)
        return found

    with one_thread():
        single = ProcessGroupCollection.single()
        eager = checksums_of(build_step(single, DataParallelConfig()))
        rules, recorder = simulated_gpu()
        with rules.enforced():
            step = build_step(single, DataParallelConfig(), graph=recorder)
            recorded = checksums_of(step)
    assert recorded == eager
    assert len(set(eager)) == 5
    assert step.forward_backward.replays == 10 - WARMUP


def test_layout_inputs_keep_addresses_and_copy_new_values():
    first, second = (padded(step_batches(0, i, documents=True), i) for i in (0, 7))
    inputs = StepInputs(first, torch.ones(2))
    layouts = [m.layout for m in inputs.microbatches]
    names = ("positions", "document_ids", "sample_ids", "padding")
    addresses = [getattr(x, n).data_ptr() for x in layouts for n in names]
    assert inputs.fit(second)
    inputs.take(second, torch.ones(2))
    assert addresses == [getattr(x, n).data_ptr() for x in layouts for n in names]
    for mine, given, before in zip(layouts, second, first, strict=True):
        for name in names:
            assert torch.equal(getattr(mine, name), getattr(given.layout, name)), name
            assert not torch.equal(getattr(before.layout, name), getattr(given.layout, name)), name


def padded(batches: list[Microbatch], count: int) -> list[Microbatch]:
    """Return microbatches of which so many tokens are padding."""

    def marked(b: Microbatch) -> Microbatch:
        mark = torch.arange(b.tokens.numel()).view_as(b.tokens.t()) < count
        return dataclasses.replace(b, layout=b.layout.with_padding(mark))

    return [marked(b) for b in batches]


def test_steps_with_and_without_padding_are_of_other_forms():
    inputs = StepInputs(padded(step_batches(0, 0), 2), torch.ones(2))
    assert inputs.fit(padded(step_batches(0, 0), 5))
    assert not inputs.fit(step_batches(0, 0))


def test_blocks_of_other_documents_do_not_fit():
    first, same, other = (by_blocks(step_batches(0, i, documents=True)) for i in (0, 5 * 2, 1))
    inputs = StepInputs(first, torch.ones(2))
    assert inputs.fit(same)
    assert not inputs.fit(other)
    assert not inputs.fit(step_batches(0, 0, documents=True))


def test_inputs_keep_their_addresses_and_take_every_field():
    first, second = step_batches(0, 0, documents=True), step_batches(1, 7, documents=True)
    inputs = StepInputs(first, torch.tensor([1.0, 2.0]))
    others = ("layout", "mtp_targets", "share")  # the last is in the factors
    fields = [f.name for f in dataclasses.fields(first[0]) if f.name not in others]
    addresses = [getattr(m, f).data_ptr() for m in inputs.microbatches for f in fields]
    assert inputs.fit(second)
    inputs.take(second, torch.tensor([3.0, 4.0]))
    assert addresses == [getattr(m, f).data_ptr() for m in inputs.microbatches for f in fields]
    for mine, given, before in zip(inputs.microbatches, second, first, strict=True):
        for name in fields:
            assert torch.equal(getattr(mine, name), getattr(given, name)), name
            assert not torch.equal(getattr(before, name), getattr(given, name)), name
    assert inputs.factors.tolist() == [3.0, 4.0]


def with_ahead(batches: list[Microbatch]) -> list[Microbatch]:
    """Return microbatches that know what two depths predict."""

    def shifted_targets(b: Microbatch) -> MTPTargets:
        return shift_targets(
            b.tokens, b.labels, b.loss_mask, num_layers=2, padding=b.layout.padding.t()
        )

    return [dataclasses.replace(b, mtp_targets=shifted_targets(b)) for b in batches]


def tensors_of(mtp_targets: MTPTargets) -> list[torch.Tensor]:
    """Return the tensors of what depths predict."""
    return [x for x in vars(mtp_targets).values() if x is not None]


def test_mtp_targets_keep_addresses_and_copy_new_values():
    first, second = (with_ahead(padded(step_batches(i, 7 * i), i)) for i in range(2))
    inputs = StepInputs(first, torch.ones(2))
    kept = [x for m in inputs.microbatches for x in tensors_of(m.mtp_targets)]
    addresses = [x.data_ptr() for x in kept]
    assert inputs.fit(second)
    assert not inputs.fit(step_batches(1, 7))
    inputs.take(second, torch.ones(2))
    given = [x for m in second for x in tensors_of(m.mtp_targets)]
    assert len(given) == 2 * 4
    assert addresses == [
        x.data_ptr() for m in inputs.microbatches for x in tensors_of(m.mtp_targets)
    ]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, given, strict=True))
    assert not any(
        torch.equal(mine, before)
        for mine, before in zip(
            kept, (x for m in first for x in tensors_of(m.mtp_targets)), strict=True
        )
    )


def test_steps_of_another_form_do_not_fit():
    inputs = StepInputs(step_batches(0, 0), torch.ones(2))
    plain, packed = step_batches(0, 1), step_batches(0, 1, documents=True)
    assert inputs.fit(plain)
    assert not inputs.fit(plain[:1])
    assert not inputs.fit(packed)
    longer = [dataclasses.replace(b, tokens=b.tokens.repeat(1, 2)) for b in plain]
    assert not inputs.fit(longer)
    narrower = [dataclasses.replace(b, labels=b.labels.int()) for b in plain]
    assert not inputs.fit(narrower)


def test_the_stand_ins_are_strict():
    x, tape = torch.ones(3), OpTape()
    with tape:
        y = x * 2
        z = y.view(3, 1).sum()
    tape.poison()
    assert bool(y.isnan().all())
    x.fill_(5.0)
    tape.replay()
    assert z.item() == 30.0
    rules = CaptureRules()
    with rules.enforced():
        side, before = rules.new_stream(), rules.current
        rules.begin()
        with pytest.raises(CaptureError, match="event of before"):
            rules.current.wait_stream(before)
        side.wait_stream(rules.current)
        with pytest.raises(CaptureError, match="not joined"):
            rules.end()

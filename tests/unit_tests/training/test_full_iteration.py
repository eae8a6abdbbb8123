# SPDX-License-Identifier: Apache-2.0
"""Recorded steps against eager steps, bit for bit, on a simulated GPU with capture rules."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.device import CudaRecorder
from megatron.core.distributed import DataParallelConfig
from megatron.core.distributed.data_parallel import StepRecording
from megatron.core.models.gpt import MTPTargets, shift_targets
from megatron.core.moe import routers_of
from megatron.training.fault_tolerance.replay import Replayer, RerunPolicy
from megatron.training.step import PATIENCE, Microbatch, StepInputs, TrainStep
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
    """Check that most steps were replayed, with the losses and weights of the eager run."""
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
@pytest.mark.covers("graph replay matches eager")
def test_single_rank_replays_match_eager_steps_bitwise(granularity, documents):
    with one_thread():
        runs = run_eager_and_recorded(
            ProcessGroupCollection.single(),
            DataParallelConfig(),
            granularity=granularity,
            documents=documents,
        )
    assert_equal_runs(*runs)
    # Only the CPU syncs: it reads the loss factor, and the range of tokens and labels.
    read = 1 + 2 * len(("tokens", "labels"))
    assert runs[2].forward_backward.recorder.tape.syncs == ["aten._local_scalar_dense"] * 2 * read
    assert runs[2].optimizer.scaler.scale > 4.0, "the loss scale has not changed during the run"


def test_hybrid_whole_row_replays_match_eager_bitwise():
    with one_thread():
        runs = run_eager_and_recorded(
            ProcessGroupCollection.single(), DataParallelConfig(), model=HYBRID
        )
    assert_equal_runs(*runs)
    assert whole_rows(torch.device("cpu")).num_maps == 1, (
        "index tables were built for other rows too"
    )


@pytest.mark.parametrize(("granularity", "factor"), [(None, None), ("full", 0.7)])
@pytest.mark.covers("graph replay matches eager")
def test_expert_replays_follow_changed_routing(granularity, factor):
    model = dataclasses.replace(
        EXPERTS, moe=dataclasses.replace(EXPERTS.moe, capacity_factor=factor)
    )
    with one_thread(), products_of_a_gpu():
        runs = run_eager_and_recorded(
            ProcessGroupCollection.single(),
            DataParallelConfig(),
            model=model,
            granularity=granularity,
        )
    assert_equal_runs(*runs)
    read = 1 + 2 * len(("tokens", "labels"))
    assert runs[2].forward_backward.recorder.tape.syncs == ["aten._local_scalar_dense"] * 2 * read
    (router,) = routers_of(runs[2].model)
    microbatches = sum(1 if i in SHORTER else 2 for i in range(STEPS))
    recorded = 2  # a tape computes what it records
    assert router.counted[:6].sum() == 2 * 12 * 2 * (microbatches + recorded)


def check_cases(rank: int, world: int, grid: dict, configs: list[dict]) -> None:
    """Compare recorded with eager runs on the ranks of a grid."""
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
@pytest.mark.covers("graph replay matches eager")
def test_data_parallel_replays_include_their_collectives(strategy):
    settings = [{}] if strategy == "no_shard" else [{}, WITHOUT_EARLY]
    if strategy == "optim_grads":
        settings.append({"grad_dtype": torch.bfloat16, "fp32_accumulation": True})
    run_ranks(check_cases, 2, {}, [{"strategy": strategy, **setting} for setting in settings])


@pytest.mark.covers("graph replay matches eager")
def test_hybrid_sharding_outer_gathers_are_in_the_graph():
    configs = [
        {**CUT, **WITHOUT_EARLY, "outer": outer_strategy}
        for outer_strategy in ("optim", "no_shard")
    ]
    run_ranks(check_cases, 4, {"instances": 2}, configs)


@pytest.mark.covers("graph replay matches eager")
def test_weights_over_gtp_are_gathered_inside_the_graph():
    whole = {"strategy": "no_shard", "fsdp_all_gather_in_start_param_sync": False}
    run_ranks(check_cases, 2, {"gtp": 2}, [whole, {"strategy": "optim", **WITHOUT_EARLY}])


@pytest.mark.covers("graph replay matches eager")
def test_tensor_parallel_replays_match_eager_steps():
    run_ranks(check_cases, 2, {"tp": 2}, [{}])


def check_context_cases(rank: int, world: int, engines: list[str]) -> None:
    """Compare with sequences sharded over the ranks, for each context-parallel engine."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    for engine in engines:
        backend = dataclasses.replace(LOCAL, context_engine=engine)
        runs = run_eager_and_recorded(
            groups, DataParallelConfig(), model=WITHOUT_DROPOUT, backend=backend
        )
        assert_equal_runs(*runs)


@pytest.mark.covers("graph replay matches eager")
def test_context_parallel_replays_match_eager_steps():
    run_ranks(check_context_cases, 2, ["p2p", "all_gather", "a2a"])


# --- refused recordings ---------------------------------------------------------------------------


def check_refusals(rank: int, world: int) -> None:
    """Check that settings are refused whose work crosses the boundary of a step."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for settings, message in (
        ({"overlap_param_gather": True}, "set fsdp_all_gather_in_start_param_sync to False"),
        ({"debug": True}, "debug compares orders on the host"),
    ):
        with pytest.raises(ValueError, match=message):
            build_step(groups, DataParallelConfig(**CUT, **settings), graph=TapeRecorder(OpTape()))


def check_gtp_refusals(rank: int, world: int) -> None:
    """Weights over gtp are prefetched by default, the first of a step before the step begins."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    with pytest.raises(ValueError, match="set fsdp_all_gather_in_start_param_sync to False"):
        build_step(groups, DataParallelConfig(), graph=TapeRecorder(OpTape()))


def test_overlap_across_graph_boundary_is_refused():
    run_ranks(check_refusals, 2)
    run_ranks(check_gtp_refusals, 2)


def record_early_gather(rank: int, world: int) -> None:
    """Record a step whose first gather is in flight, bypassing the check of the settings."""
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


def test_gather_in_flight_cannot_be_recorded():
    run_ranks(record_early_gather, 2)


def record_reversed_layers(rank: int, world: int) -> None:
    """Reorder the layers from the recorded step on."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    rules, recorder = simulated_gpu()
    with rules.enforced(), simulated(groups, rules):
        step = build_step(groups, DataParallelConfig(**CUT), graph=recorder)
        for i in range(WARMUP):
            step(step_batches(rank, 10 + i), lr=1e-3, weight_decay=0.0)
        blocks = step.model.decoder.blocks
        step.model.decoder.blocks = torch.nn.ModuleList([*blocks[2:], *blocks[:2]])
        with pytest.raises(ValueError, match="weights in another order than the step before"):
            step(step_batches(rank, 20), lr=1e-3, weight_decay=0.0)
    assert (recorder.captures, recorder.tape.replays) == (1, 0)


def test_weight_order_that_changes_while_recording_is_an_error():
    run_ranks(record_reversed_layers, 2)


def test_weight_order_that_never_settles_is_an_error():
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


def test_cuda_graph_recorder_needs_a_gpu():
    with pytest.raises(ValueError, match=r"full_iteration needs a GPU, .* uses cpu: leave"):
        CudaRecorder(torch.device("cpu"), "--cuda-graph-impl full_iteration")


def test_step_losses_outlive_the_next_replay():
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


# --- inputs of a recorded step --------------------------------------------------------------------


def with_document_bounds(batches: list[Microbatch]) -> list[Microbatch]:
    """Return microbatches whose layouts hold document bounds instead of ids."""
    blocked = []
    for b in batches:
        rows = {name: getattr(b.layout, name).t() for name in ("positions", "document_ids")}
        cut = SequenceSharding.of(b.tokens.shape[1], 1)
        layout = SequenceLayout.make(cut, 0, rows=2, **rows)
        layout = layout.with_samples(b.layout.sample_ids)
        blocked.append(dataclasses.replace(b, layout=layout))
    return blocked


def test_graph_replays_feed_gradients_to_checksum_comparison():
    def checksums_of(step: TrainStep) -> list[tuple[int, float]]:
        world = step.groups["world"]
        reruns = RerunPolicy("report_determinism_stats")
        step.replayer = replayer = Replayer(reruns, engine=step.engine, world=world)
        checksums = []
        for i in (0, 1, 3, 6, 7):
            report = step(step_batches(0, i), lr=1e-2, weight_decay=0.0)
            assert report.anomaly is None
            checksums.append((int(replayer.checksum.sum), float(replayer.checksum.norm)))
        assert (replayer.compared, replayer.differed) == (5, 0)
        return checksums

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


def with_padding(batches: list[Microbatch], num_padding: int) -> list[Microbatch]:
    """Return microbatches whose first `num_padding` tokens are padding."""

    def marked(b: Microbatch) -> Microbatch:
        padding = torch.arange(b.tokens.numel()).view_as(b.tokens.t()) < num_padding
        return dataclasses.replace(b, layout=b.layout.with_padding(padding))

    return [marked(b) for b in batches]


def test_padding_changes_the_form_of_a_step():
    inputs = StepInputs(with_padding(step_batches(0, 0), 2), torch.ones(2))
    assert inputs.fit(with_padding(step_batches(0, 0), 5))
    assert not inputs.fit(step_batches(0, 0))


def test_other_document_bounds_do_not_fit_the_recording():
    recorded, same_documents, other_documents = (
        with_document_bounds(step_batches(0, i, documents=True)) for i in (0, 5 * 2, 1)
    )
    inputs = StepInputs(recorded, torch.ones(2))
    assert inputs.fit(same_documents)
    assert not inputs.fit(other_documents)
    assert not inputs.fit(step_batches(0, 0, documents=True))


def with_mtp_targets(batches: list[Microbatch]) -> list[Microbatch]:
    """Return microbatches with the targets of two MTP layers."""

    def shifted_targets(b: Microbatch) -> MTPTargets:
        return shift_targets(
            b.tokens, b.labels, b.loss_mask, num_layers=2, padding=b.layout.padding.t()
        )

    return [dataclasses.replace(b, mtp_targets=shifted_targets(b)) for b in batches]


def tensors_of(batches: list[Microbatch]) -> dict[str, torch.Tensor]:
    """Return the tensors of microbatches that a recorded step reads, by microbatch and name."""
    fields = [f.name for f in dataclasses.fields(Microbatch)]
    layout_fields = ("positions", "document_ids", "sample_ids", "padding")
    tensors = {}
    for i, batch in enumerate(batches):
        values = {name: getattr(batch, name) for name in fields}
        values |= {f"layout.{name}": getattr(batch.layout, name) for name in layout_fields}
        values |= {f"mtp.{name}": value for name, value in vars(batch.mtp_targets).items()}
        tensors |= {f"{i} {name}": x for name, x in values.items() if isinstance(x, torch.Tensor)}
    return tensors


def test_step_inputs_keep_addresses_and_copy_new_values():
    recorded, replayed = (
        with_mtp_targets(with_padding(step_batches(i, 7 * i, documents=True), 7 * i))
        for i in range(2)
    )
    inputs = StepInputs(recorded, torch.tensor([1.0, 2.0]))
    addresses = {name: x.data_ptr() for name, x in tensors_of(inputs.microbatches).items()}
    assert len(addresses) == 2 * (3 + 4 + 4)
    assert inputs.fit(replayed)
    assert not inputs.fit(step_batches(1, 7))
    inputs.take(replayed, torch.tensor([3.0, 4.0]))
    local, old, new = (tensors_of(b) for b in (inputs.microbatches, recorded, replayed))
    assert addresses == {name: x.data_ptr() for name, x in local.items()}
    for name, x in local.items():
        assert torch.equal(x, new[name]), name
        assert not torch.equal(old[name], new[name]), name
    assert inputs.factors.tolist() == [3.0, 4.0]


def test_steps_of_another_form_do_not_fit_the_recording():
    inputs = StepInputs(step_batches(0, 0), torch.ones(2))
    plain, packed = step_batches(0, 1), step_batches(0, 1, documents=True)
    assert inputs.fit(plain)
    assert not inputs.fit(plain[:1])
    assert not inputs.fit(packed)
    longer = [dataclasses.replace(b, tokens=b.tokens.repeat(1, 2)) for b in plain]
    assert not inputs.fit(longer)
    narrower = [dataclasses.replace(b, labels=b.labels.int()) for b in plain]
    assert not inputs.fit(narrower)


def test_simulated_recorder_and_rules_detect_misuse():
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

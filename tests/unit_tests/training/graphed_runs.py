# SPDX-License-Identifier: Apache-2.0
"""A small eager or replayed run with skipped, shorter and evaluated steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from megatron.core import ProcessGroupCollection
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.device import Recorder
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.data_parallel import StepRecording
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.optimizer import (
    DynamicLossScaler,
    DynamicLossScalerConfig,
    Optimizer,
    OptimizerConfig,
)
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, MLPConfig, Recompute
from megatron.training.step import ForwardBackward, FullIterationGraph, Microbatch, TrainStep
from tests.support.capture_rules import CaptureRules
from tests.support.gatherers import gatherer_of
from tests.support.inputs import microbatch
from tests.support.op_tape import OpTape, TapeRecorder
from tests.support.simulated_links import simulated

MODEL = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=37,
    attention=AttentionConfig(
        num_attention_heads=4, num_query_groups=2, kv_channels=6, dropout=0.1
    ),
    mlp=MLPConfig(ffn_hidden_size=20),
    hidden_dropout=0.1,
    init_std=0.2,
)
#: The same model without dropout: drawing the masks is most of its operations.
WITHOUT_DROPOUT = replace(
    MODEL, hidden_dropout=0.0, attention=replace(MODEL.attention, dropout=0.0)
)
#: Both recurrent block types; the host builds their index tables for whole rows.
HYBRID = replace(
    WITHOUT_DROPOUT,
    num_layers=6,
    ffn_pattern="",
    pattern="G-M-*-",
    delta_net=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=6, value_channels=5
    ),
    mamba=Mamba2Config(num_heads=4, head_channels=5, num_groups=2, state_channels=6),
)
#: Experts in every second layer, with a shared one and auxiliary losses.
EXPERTS = replace(
    WITHOUT_DROPOUT,
    num_layers=2,
    ffn_pattern="-E",
    moe=MoEConfig(
        num_experts=6,
        ffn_hidden_size=16,
        router=RouterConfig(
            expert_bias=True, balance="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.01
        ),
        shared_ffn_hidden_size=8,
    ),
)
#: Eager steps before the recording. The last is skipped for its loss, so it syncs no weights.
WARMUP, STEPS = 3, 9
SKIPPED, SHORTER, EVALUATED = (2, 4), (5,), (1, 4, 6)
REPLAYED = (3, 4, 6, 7, 8)


@dataclass(frozen=True)
class RunResult:
    """Losses, weights and collectives of one run on one rank.

    Args:
        losses: losses of steps and evaluations, in order.
        weights: this rank's chunks after the last step, by weight name and chunk index.
        launched: number of reductions started in backward, for each step.
        gathers: number of weight gathers, and number of prefetched gathers.
    """

    losses: list[float]
    weights: Mapping[tuple[str, int], torch.Tensor]
    launched: list[int]
    gathers: tuple[int, int]


@cache
def whole_rows(device: torch.device) -> SequenceLayout:
    """Return the layout of single-document rows; as in training, all steps share one object."""
    return SequenceLayout.of_rows(12, device=device)


def step_batches(
    dp_rank: int, step: int, *, documents: bool = False, device: torch.device | str = "cpu"
) -> list[Microbatch]:
    """Return the microbatches of a step: one for steps in SHORTER, otherwise two."""
    batches = [
        microbatch(seed=9, dp_rank=dp_rank, index=2 * step + i, batch=2, sequence=12, vocabulary=37)
        for i in range(1 if step in SHORTER else 2)
    ]
    layout = whole_rows(torch.device(device))
    if documents:
        cut = 3 + step % 5
        positions = torch.arange(12, device=device).expand(2, 12)
        ids = (positions >= cut).long()
        rows = {"positions": positions - cut * ids, "document_ids": ids}
        layout = SequenceLayout.of_rows(12, device=device, **rows)
    microbatches = []
    for b in batches:
        fields = (x.to(device) for x in (b.tokens, b.labels, b.loss_mask))
        microbatches.append(Microbatch(*fields, layout.with_samples(b.sample_ids.to(device))))
    return microbatches


def shard_batches(batches: list[Microbatch], groups: ProcessGroupCollection) -> list[Microbatch]:
    """Return this context-parallel rank's shard of each microbatch."""
    group, shards = groups["cp"], []
    for b in batches:
        layout = SequenceLayout.make(SequenceSharding.of(12, group.size), group.rank, rows=2)
        fields = (layout.local(x) for x in (b.tokens, b.labels, b.loss_mask))
        shards.append(Microbatch(*fields, layout.with_samples(b.layout.sample_ids)))
    return shards


def build_step(
    groups: ProcessGroupCollection,
    config: DataParallelConfig,
    *,
    graph: Recorder | None = None,
    granularity: str | None = None,
    model: GPTConfig = MODEL,
    **model_options: object,
) -> TrainStep:
    """Build a training step: Adam with clipping and a loss scale that grows during the run.

    Args:
        model_options: dtype, device and backend of the model.
    """
    storage = config.storage(bucket_bytes=2000)
    model = GPTModel(model, groups, seed=3, storage=storage, **model_options)
    model.decoder.set_recompute(
        Recompute(granularity=granularity, method="uniform", num_layers=1)
        if granularity == "full"
        else Recompute(granularity=granularity)
    )
    engine = DataParallel(model.store, groups, config=config)
    scaler = DynamicLossScaler(DynamicLossScalerConfig(initial_scale=4.0, growth_interval=2))
    optimizer = Optimizer(
        engine.owned(), groups, config=OptimizerConfig(clip_grad=1.0), scaler=scaler
    )
    run: ForwardBackward | FullIterationGraph = ForwardBackward(model, engine)
    if graph is not None:
        run = FullIterationGraph(run, recorder=graph, warmup_steps=WARMUP)
    return TrainStep(model, engine, optimizer=optimizer, groups=groups, forward_backward=run)


def run_steps(step: TrainStep, *, documents: bool = False) -> RunResult:
    """Run all steps; those in SKIPPED are skipped by a loss limit, those in EVALUATED evaluate."""
    dp_rank, losses, launched = step.groups["samples"].rank, [], []

    def batches_of(index: int) -> list[Microbatch]:
        batches = step_batches(dp_rank, index, **options)
        return shard_batches(batches, step.groups) if step.groups["cp"].size > 1 else batches

    options = {"documents": documents, "device": step.engine.store.device}
    for i in range(STEPS):
        limit = 0.0 if i in SKIPPED else 1e9
        report = step(batches_of(i), lr=1e-2, weight_decay=0.01, loss_limit=limit)
        assert report.spiked == (i in SKIPPED)
        losses.append(report.loss)
        launched.append(step.engine.launched_in_backward)
        if i in EVALUATED:
            losses.append(step.evaluate(batches_of(50 + i)))
    store = step.model.store
    step.engine.start_param_sync(force_sync=True)
    weights = {
        (name, i): chunk.tensor.clone()
        for name, handle in store.handles.items()
        for i, chunk in enumerate(store.chunks(handle))
    }
    counts = [gatherer.counts for gatherer in step.engine.gatherers if gatherer.reshards]
    gathers = sum(count.gathers for count in counts), sum(count.prefetched for count in counts)
    return RunResult(losses, weights, launched, gathers)


def prepare_too_early(recording: StepRecording) -> None:
    """Replace `prepare` and leave the first gather in flight, which a capture must refuse."""
    gatherer = gatherer_of(recording.engine)
    recording.engine.start_param_sync()
    assert gatherer.in_flight
    gatherer.pool.trim()


def simulated_gpu() -> tuple[CaptureRules, TapeRecorder]:
    """Return a simulated GPU with the rules of stream capture, and a recorder for it."""
    tape = OpTape()
    rules = CaptureRules(tape.paused)
    return rules, TapeRecorder(tape, rules.begin, rules.end)


def run_eager_and_recorded(
    groups: ProcessGroupCollection, config: DataParallelConfig, **options: object
) -> tuple[RunResult, RunResult, TrainStep]:
    """Run eagerly and recorded; return both results and the recorded run's step.

    The recorded run uses a simulated device that refuses the operations which CUDA refuses.
    """
    documents = bool(options.pop("documents", False))
    eager = run_steps(build_step(groups, config, **options), documents=documents)
    rules, recorder = simulated_gpu()
    with rules.enforced(), simulated(groups, rules):
        step = build_step(groups, config, graph=recorder, **options)
        recorded = run_steps(step, documents=documents)
    return eager, recorded, step

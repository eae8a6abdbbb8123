# SPDX-License-Identifier: Apache-2.0
"""The same small run carried out eagerly and by replays, with odd steps in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.device import Recorder
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.capture import StepRecording
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.optimizer.loss_scaler import DynamicLossScaler, DynamicLossScalerConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, MLPConfig, Recompute
from megatron.training.cuda_graphs import FullIterationGraph
from megatron.training.step import ForwardBackward, Microbatch, TrainStep
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
#: The same without dropout, whose masks are most of its operations.
WITHOUT_DROPOUT = replace(
    MODEL, hidden_dropout=0.0, attention=replace(MODEL.attention, dropout=0.0)
)
#: Both recurrences, whose tables of whole rows come from the host.
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
#: Steps before the recording; the last of them is skipped for its loss, so it syncs no weights.
WARMUP, STEPS = 3, 9
SKIPPED, SHORTER, EVALUATED = (2, 4), (5,), (1, 4, 6)
REPLAYED = (3, 4, 6, 7, 8)


@dataclass(frozen=True)
class RunResult:
    """What a run showed.

    Args:
        losses: of steps and evaluations, in order.
        weights: what this rank holds at the end, by weight and place.
        launched: reductions started in backward, by step.
        gathers: of weights stored in shards, and how many of them ahead of need.
    """

    losses: list[float]
    weights: Mapping[tuple[str, int], torch.Tensor]
    launched: list[int]
    gathers: tuple[int, int]


@cache
def whole_rows(device: torch.device) -> SequenceLayout:
    """Return the layout of rows of one document, one for all steps as in training."""
    return SequenceLayout.of_rows(12, device=device)


def data(
    lane: int, step: int, *, documents: bool = False, device: torch.device | str = "cpu"
) -> list[Microbatch]:
    """Return the microbatches of a step: two, or one where it is shorter."""
    made = [
        microbatch(seed=9, dp_rank=lane, index=2 * step + i, batch=2, sequence=12, vocabulary=37)
        for i in range(1 if step in SHORTER else 2)
    ]
    layout = whole_rows(torch.device(device))
    if documents:
        cut = 3 + step % 5
        places = torch.arange(12, device=device).expand(2, 12)
        ids = (places >= cut).long()
        rows = {"positions": places - cut * ids, "document_ids": ids}
        layout = SequenceLayout.of_rows(12, device=device, **rows)
    found = []
    for b in made:
        parts = (x.to(device) for x in (b.tokens, b.labels, b.loss_mask))
        found.append(Microbatch(*parts, layout.with_samples(b.sample_ids.to(device))))
    return found


def of_rank(batches: list[Microbatch], groups: ProcessGroupCollection) -> list[Microbatch]:
    """Return this context-parallel rank's part of microbatches."""
    group, found = groups["cp"], []
    for b in batches:
        layout = SequenceLayout.make(SequenceSharding.of(12, group.size), group.rank, rows=2)
        parts = (layout.local(x) for x in (b.tokens, b.labels, b.loss_mask))
        found.append(Microbatch(*parts, layout.with_samples(b.layout.sample_ids)))
    return found


def step_of(
    groups: ProcessGroupCollection,
    config: DataParallelConfig,
    *,
    graph: Recorder | None = None,
    granularity: str | None = None,
    model: GPTConfig = MODEL,
    **place: object,
) -> TrainStep:
    """Return a step of Adam with clipping and a loss scale that grows on the way.

    Args:
        place: dtype and device of the model.
    """
    storage = config.storage(bucket_bytes=2000)
    model = GPTModel(model, groups, seed=3, storage=storage, **place)
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


def carried_out(step: TrainStep, *, documents: bool = False) -> RunResult:
    """Run the steps, skipping some for their loss, evaluating between others."""
    lane, losses, launched = step.groups["samples"].rank, [], []

    def batches_of(index: int) -> list[Microbatch]:
        found = data(lane, index, **options)
        return of_rank(found, step.groups) if step.groups["cp"].size > 1 else found

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
    held = {
        (name, i): box.tensor.clone()
        for name, handle in store.handles.items()
        for i, box in enumerate(store.chunks(handle))
    }
    counts = [gatherer.counts for gatherer in step.engine.gatherers if gatherer.reshards]
    gathers = sum(count.gathers for count in counts), sum(count.prefetched for count in counts)
    return RunResult(losses, held, launched, gathers)


def prepare_too_early(recording: StepRecording) -> None:
    """Stand in for `prepare` where it must not: leave the first gather under way."""
    gatherer = gatherer_of(recording.engine)
    recording.engine.start_param_sync()
    assert gatherer.in_flight
    gatherer.pool.trim()


def pretended() -> tuple[CaptureRules, TapeRecorder]:
    """Return a GPU with the rules of a capture, and what records on it."""
    tape = OpTape()
    rules = CaptureRules(tape.paused)
    return rules, TapeRecorder(tape, rules.begin, rules.end)


def both(
    groups: ProcessGroupCollection, config: DataParallelConfig, **options: object
) -> tuple[RunResult, RunResult, TrainStep]:
    """Return what the run shows eagerly and recorded, and the latter's step; the recorded one on a
    device that refuses what CUDA refuses."""
    documents = bool(options.pop("documents", False))
    eager = carried_out(step_of(groups, config, **options), documents=documents)
    rules, recorder = pretended()
    with rules.enforced(), simulated(groups, rules):
        step = step_of(groups, config, graph=recorder, **options)
        recorded = carried_out(step, documents=documents)
    return eager, recorded, step

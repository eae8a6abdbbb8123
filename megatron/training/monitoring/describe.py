# SPDX-License-Identifier: Apache-2.0
"""The lines that a run logs at its start, one for each kind of parallelism.

They describe context parallelism (how attention and recurrences get the tokens of other ranks, how
packed rows are split, and why), a global batch that does not divide evenly over ranks and its cost,
what data parallelism shards and what remains on each rank, dropout (on by Megatron's defaults) and
its cost, the experts (where they are, how tokens are dispatched, what a token uses), and the
pipeline (stages, schedule, idle time). What the first step corrects has a line of its own.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch

from megatron.core.comm import all_reduce
from megatron.core.comm.nccl_memory import communicator_bytes
from megatron.core.context_parallel.comm_type import explain
from megatron.core.context_parallel.cut import AttentionWork
from megatron.core.context_parallel.layout import documents_of
from megatron.core.datasets.samplers import GPTBatch
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.extensions import GATHERED
from megatron.core.models.gpt import GPTConfig, logical_weights
from megatron.core.models.layer_pattern import EXPERTS
from megatron.core.moe.dispatch import choose_dispatcher, dispatched_rows
from megatron.core.ops.attention import explain as explain_attention
from megatron.core.ops.compiler import explain as explain_compiler
from megatron.core.ops.recurrence import CHUNK_SIZE
from megatron.core.optimizer import Optimizer
from megatron.core.pipeline_parallel.schedule import make_schedule
from megatron.core.pipeline_parallel.simulate import Times, simulate
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.ssm.choice import explain as explain_linear
from megatron.core.ssm.choice import linear_shape
from megatron.core.transformer import LatentAttentionConfig
from megatron.training.config import Config
from megatron.training.config.layer_pattern import has_attention, num_layers
from megatron.training.config.model_table import recurrent_shapes
from megatron.training.config.quantization import quantization
from megatron.training.config.resolve import Run
from megatron.training.core_configs import (
    attention_shape,
    early_gather,
    pipeline_order,
    split,
    weight_dtype,
)
from megatron.training.data.data_sets import training_batches
from megatron.training.hooks import TrainingHooks
from megatron.training.layouts import PackedCuts, packed_cuts
from megatron.training.monitoring.step_window import StepOutcome
from megatron.training.progress_state import Progress
from megatron.training.run_groups import rank_grid
from megatron.training.session import Session


def batch_words(run: Run) -> str:
    """Return how a step's samples are divided, for a line about all kinds of parallelism."""
    made = run.final_division
    if made.is_even:
        return (
            f"global batch {made.samples} = {made.lanes} x {made.micro_batch_size} x "
            f"{made.rounds} microbatches"
        )
    return f"global batch {made.samples} in {made.blocks} microbatches of {made.micro_batch_size}"


def batch_sizes_line(run: Run) -> str | None:
    """Return where the global batch changes its size; None where it has one."""
    stages = run.batch_sizes.stages
    if len(stages) == 1:
        return None
    shown = [f"{size} from sample {threshold:,} on" for threshold, size in stages]
    if len(shown) > 8:
        shown = [*shown[:3], f"... {len(shown) - 4} more", shown[-1]]
    return f"global batch by samples: {', '.join(shown)}"


def batch_line(run: Run) -> str | None:
    """Return the padding microbatches of each data-parallel rank in a step, and the share of time
    that padding and a smaller last microbatch waste; None if the batch divides evenly."""
    made = run.final_division
    if made.is_even:
        return None
    padding = "no padding microbatch"
    ranks = f"{made.lanes} data-parallel rank{'s' if made.lanes > 1 else ''}"
    if made.fillers:
        first = made.lanes - made.fillers
        padded = f"rank {first}" if made.fillers == 1 else f"ranks {first}-{made.lanes - 1}"
        padding = f"1 padding microbatch on {padded}"
    rest = made.samples % made.micro_batch_size
    last = f", the last one of {rest}" if rest else ""
    return (
        f"uneven batch: {made.blocks} microbatches of {made.micro_batch_size}{last}, on "
        f"{ranks}, {made.rounds} each, {padding}; "
        f"{100.0 * made.wasted:.1f} % of their time is wasted"
    )


def data_parallel_line(engine: DataParallel, optimizer: Optimizer) -> str:
    """Return the strategy in effect, its buckets, and the bytes of one rank by role.

    With several pipeline stages, each number is the largest of all of them; every rank calls this.
    Bytes of weights and gradients are the formula's; those of gathered weights are the budget in
    force; those of optimizer state are counted, in device and host memory, since weights may have
    states of different kinds.

    Raises:
        ValueError: another strategy is in effect than the one that was asked for.
    """
    config = engine.config
    if engine.groups["lanes"].size == engine.groups["expert_lanes"].size == 1:
        scope = "one rank"
        if idle := _idle_flags(config):
            verb = "has" if len(idle) == 1 else "have"
            scope += f", so that {', '.join(idle)} {verb} nothing to do"
    elif engine.placement != config.placement:
        raise ValueError(
            f"data parallelism cuts {engine.placement} but {config.strategy} was asked for, which "
            f"is {config.placement}"
        )
    else:
        scope = f"{config.strategy} over {_scope(engine)}"
    buckets = [BucketSize.of(bucket) for bucket in engine.store.buckets]
    of = ElementBytes(
        weight=engine.store.dtype.itemsize,
        gradient=config.grad_dtype.itemsize,
        optimizer=0,
        wide_sum=config.fp32_accumulation and engine.sharded,
        gtp_once=config.gtp_reduce_scatter_per == "step",
    )
    rank = bytes_per_rank(
        buckets,
        engine.placement,
        of=of,
        overlap=config.overlap_grad_reduce,
    )
    most = of.weight * max((bucket.numel for bucket in buckets), default=0)
    states = [optimizer.state_bytes(on_host=host) for host in (False, True)]
    count, largest, weights, gradients, state, on_host, gathered, reducing = _most_of_stages(
        engine,
        [len(buckets), most, rank.weights, rank.gradients, *states]
        + [engine.gathered_bytes, rank.reducing],
    )
    stages = engine.groups["pp"].size
    line = (
        f"data parallel: {scope}; {count} bucket{'s' * (count != 1)} of up to {_size(largest)}; "
        f"per rank {'at most ' if stages > 1 else ''}{_size(weights)} of weights, "
        f"{_size(gradients)} of gradients, {_size(state)} of optimizer state"
    )
    if on_host:
        line += f" on the device and {_size(on_host)} in host memory"
    if gathered:
        line += f", at most {_size(gathered)} of gathered weights"
    if reducing:
        line += f", at most {_size(reducing)} of gradients that are being reduced"
    return line


def communicators_line(
    groups: ProcessGroupCollection, device: torch.device, environment: Mapping[str, str]
) -> str | None:
    """Return how many communicators this rank has and about what they take of its GPU's memory,
    beside what torch allocates; None where it has none, or they are gloo's.

    Args:
        environment: NCCL's variables, see `communicator_bytes`.
    """
    count = groups.num_communicators
    if not count or device.type != "cuda":
        return None
    taken = count * communicator_bytes(environment)
    return (
        f"communicators: {count} of NCCL, about {_size(taken)} of device memory once all are used, "
        "which torch does not count"
    )


def weight_shards_line(engine: DataParallel) -> str | None:
    """Return what generalized tensor parallelism shards, over which ranks, and what each gathers;
    None where it shards nothing. With several stages, of this rank's."""
    grid = engine.groups.grid
    if grid.gtp * grid.egtp == 1:
        return None
    if engine.placement.weight:
        return (
            f"weight shards: gtp {grid.gtp} and egtp {grid.egtp} are among the data parallel ranks "
            f"over which {engine.config.strategy} shards all weights: they change nothing"
        )
    found = []
    for expert, axis, size in ((False, "gtp", grid.gtp), (True, "egtp", grid.egtp)):
        over = [
            block
            for bucket in engine.store.buckets
            if bucket.gtp and bucket.expert == expert
            for block in bucket.blocks
        ]
        if over:
            whole = sum(block.whole_bytes for block in over)
            noun = "matrix" if len(over) == 1 else "matrices"
            kind = f"{noun} of experts" if expert else noun
            found.append(
                f"{len(over)} {kind} over {axis} {size}: {_size(whole // size)} of {_size(whole)} "
                "on this rank"
            )
    if not found:  # a pipeline stage without matrices
        return None
    form = engine.config.gather_format
    if form == "bf16":
        form = str(engine.store.dtype).removeprefix("torch.")
    elif engine.config.gather_scale_blocks == "1d":
        form += " with 1-D scale blocks, a plane for forward and one for backward,"
    per = engine.config.gtp_reduce_scatter_per
    return (
        f"weight shards: {'; '.join(found)}; gathered in {form} before each use, gradients "
        f"reduce-scattered once a {per}"
    )


class GatheredBytes(TrainingHooks):
    """Say so where the order in which a step uses its weights needs more gathered bytes than were
    said before: of this rank's pipeline stage.

    Args:
        say: writes a line of the log.
    """

    def __init__(self, engine: DataParallel, say: Callable[[str], None]) -> None:
        self._engine, self._say, self._said = engine, say, engine.gathered_bytes

    def on_step_end(self, progress: Progress, outcome: StepOutcome) -> None:
        """Compare."""
        if self._engine.gathered_bytes > self._said:
            self._said = self._engine.gathered_bytes
            self._say(
                f"weight shards: in their order of use at most {_size(self._said)} of gathered "
                "weights"
            )


def _most_of_stages(engine: DataParallel, numbers: Sequence[int]) -> list[int]:
    """Return for each number the largest of all pipeline stages."""
    own = torch.tensor(numbers, dtype=torch.int64, device=engine.store.device)
    return [int(number) for number in all_reduce(own, engine.groups["pp"], op="max").tolist()]


def _idle_flags(config: DataParallelConfig) -> list[str]:
    """Return the flags that specify how data-parallel ranks share, of those that are set."""
    flags = {
        f"--data-parallel-sharding-strategy {config.strategy}": config.strategy != "no_shard",
        "--overlap-grad-reduce": config.overlap_grad_reduce,
        "--overlap-param-gather": config.overlap_param_gather,
        f"--param-gather-prefetch-bytes {config.prefetch_bytes}": config.prefetch_bytes > 0,
        f"--param-gather-granularity {config.granularity}": config.granularity != "unit",
        "--reduce-scatter-with-fp32-accumulation": config.fp32_accumulation,
        "--use-nccl-ub": config.use_nccl_ub,
        "--check-weight-gather": config.debug,
    }
    return [flag for flag, given in flags.items() if given]


def _scope(engine: DataParallel) -> str:
    """Return over how many data-parallel ranks the strategy shards; experts may have others."""
    groups, instances = engine.groups, engine.groups.grid.instances
    lanes, experts = (groups[name].size // instances for name in ("lanes", "expert_lanes"))
    text = f"{lanes} rank{'s' if lanes > 1 else ''}"
    if experts != lanes:
        text += f" of dense weights and {experts} of experts"
    if instances == 1:
        return text
    text = f"the {text} in each" if experts != lanes else f"the {text} of each"
    text += f" of {instances} instances"
    if engine.config.outer == "optim":
        text += ", optimizer state over all of them"
    return text


def _size(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


def loss_weight_line(run: Run) -> str | None:
    """Return how microbatches of conversations weigh in the loss, and the flag that weighs tokens
    alike; None where they do, or where no conversations are trained on."""
    training, blocks = run.config.training, run.final_division.blocks
    if not run.config.data.sft or training.calculate_per_token_loss or blocks == 1:
        return None
    return (
        f"--sft without --calculate-per-token-loss: each of the {blocks} microbatches of a step "
        "weighs alike, however few of its tokens are learnt, so that a token of a short answer "
        "counts for more; with the flag every learnt token weighs alike"
    )


def attention_line(config: Config, model: GPTConfig, device: torch.device) -> str | None:
    """Return which kernel of a GPU attention takes and why; None on a CPU, without attention, and
    with TransformerEngine's layers. Context parallel ranks attend block by block of one document
    each, and let sinks take their probability afterwards."""
    parallel, attention = config.parallel, model.attention
    if device.type != "cuda" or not has_attention(config) or parallel.transformer_impl != "local":
        return None
    by_blocks = parallel.context_parallel_size > 1
    if parallel.attention_backend != "auto":
        return f"attention: {parallel.attention_backend} (--attention-backend)"
    latent = isinstance(attention, LatentAttentionConfig)
    features = attention.query_channels if latent else attention.kv_channels
    packed = config.data.sft or config.data.reset_attention_mask
    recorded = config.execution.cuda_graph_impl != "none"
    options = {
        "a window": not latent and attention.window is not None,
        "documents": packed and not recorded and not by_blocks,
        "documents known by ids alone": packed and recorded and not by_blocks,
        "sinks": not latent and attention.sinks and not by_blocks,
        "attention dropout": attention.dropout > 0,
    }
    named = [name for name, holds in options.items() if holds]
    kernel = explain_attention(device, weight_dtype(config), features, options=named)
    return f"attention{' of each block' if by_blocks else ''}: {kernel}"


def kernels_line(device: torch.device) -> str | None:
    """Return which Triton and ptxas compile the kernels, with their known faults; None on a CPU."""
    compilers = explain_compiler(device)
    return None if compilers is None else f"kernels: {compilers}"


def dropout_line(config: Config, device: torch.device) -> str | None:
    """Return which dropout is on, what it costs and how to turn it off; None where all is off."""
    rates = {
        "attention": config.attention.attention_dropout if has_attention(config) else 0.0,
        "hidden": config.model.hidden_dropout,
    }
    on = {name: rate for name, rate in rates.items() if rate}
    if not on:
        return None
    costs = ["a mask for every value in forward and backward"]
    if "attention" in on and device.type == "cuda" and config.parallel.attention_backend == "auto":
        length, cp = config.training.seq_length, config.parallel.context_parallel_size
        costs.append(
            "attention in plain torch instead of its kernel, which has no dropout, with scores of "
            f"{length // cp:,} x {length:,} for each head"
        )
    return (
        f"dropout: {', '.join(f'{name} {rate:g}' for name, rate in on.items())} (Megatron's "
        f"default is 0.1); costs {'; '.join(costs)}; most models are pretrained without: "
        f"{' '.join(f'--{name}-dropout 0' for name in on)}"
    )


def expert_line(run: Run, model: GPTConfig) -> str | None:
    """Return what is so of a run's experts and why; None where there are none."""
    moe = model.moe
    if moe is None:
        return None
    grid = rank_grid(run)
    layers, noun = model.blocks.count(EXPERTS), "blocks" if model.pattern else "layers"
    total, active = (f"{count:,}" for count in parameters(model))
    scores = moe.router.score_function
    scores += ", weights that sum to 1" if moe.router.normalize else ", weights as they are"
    shared = "" if moe.shared_ffn_hidden_size is None else " and a shared one"
    return (
        f"experts: {moe.num_experts} in {layers} of {model.num_layers} {noun}, a token goes to "
        f"{moe.router.topk}{shared} by {scores}; expert parallel {grid.ep}, expert tensor parallel "
        f"{grid.size('etp')}, expert data parallel {grid.edp}; {_dispatcher(run, model)}; a token "
        f"uses {active} of {total} parameters"
    )


def capacity_line(run: Run, model: GPTConfig) -> str | None:
    """Return what results depend on where experts have a capacity; None where they have none."""
    moe, parallel = model.moe, run.config.parallel
    if moe is None or moe.capacity_factor is None:
        return None
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return (
        f"expert capacity: each expert takes at most {moe.capacity_factor:g} x the even share of a "
        f"rank's tokens of a microbatch, without padding, and drops others by {moe.drop_policy}; "
        f"results depend on --micro-batch-size {run.config.training.micro_batch_size} and on how "
        f"the ranks of --tensor-model-parallel-size {tp} and --context-parallel-size {cp} divide "
        "a microbatch: keep these to compare runs"
    )


def _dispatcher(run: Run, model: GPTConfig) -> str:
    """Say how tokens come to their experts, and what that moves."""
    grid, moe, parallel = rank_grid(run), model.moe, run.config.parallel
    etp = grid.size("etp")
    if etp * grid.ep == 1:
        return "all experts are on every rank, no token travels"
    assert moe is not None
    wanted, topk = parallel.moe_token_dispatcher_type, moe.router.topk
    chosen = choose_dispatcher(wanted, topk=topk, ep=grid.ep)
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    tokens = run.config.training.micro_batch_size * run.config.training.seq_length
    share = math.ceil(tokens / ranks)
    rows = {
        kind: dispatched_rows(kind, tokens=share, topk=topk, etp=etp, ep=grid.ep)
        for kind in ("alltoall", "allgather")
    }
    shown = ", ".join(f"{kind} {rows[kind]:,}" for kind in sorted(rows, key=rows.__getitem__))
    why = "least rows" if wanted == "auto" else "asked for; rows"
    line = f"tokens by {chosen}: {why} of a rank, there and back: {shown}"
    factor = parallel.moe_expert_rank_capacity_factor
    if factor is None:
        return line
    return f"{line}; in training a rank takes {factor:g} x the even share of {etp * share * topk:,}"


def parameters(model: GPTConfig) -> tuple[int, int]:
    """Return the parameters of a model, and those that a token uses: of its own experts alone."""
    total = active = 0.0
    share = 0.0 if model.moe is None else model.moe.router.topk / model.moe.num_experts
    for name, shape in logical_weights(model).items():
        count = math.prod(shape)
        total += count
        active += count * share if ".moe.experts." in name else count
    return round(total), round(active)


def pipeline_words(config: Config) -> str:
    """Return the pipeline for a line about all kinds of parallelism; nothing for one stage."""
    if (stages := split(config)) is None:
        return ""
    order = pipeline_order(config)["schedule"]
    return f"pipeline parallel {stages.stages} ({order}), {stages.describe()}, "


def pipeline_line(run: Run) -> str | None:
    """Return how the stages work and the share of time that they wait; None where there is one.

    The share is that of a simulation in which each block takes as long forward as for its input's
    and for its weights' gradients; transfers and the model's ends take no time there.
    """
    if (stages := split(run.config)) is None:
        return None
    order = pipeline_order(run.config)
    made = make_schedule(
        order["schedule"],
        stages=stages.stages,
        microbatches=run.num_microbatches,
        chunks=stages.chunks,
        group_size=order["group_size"],
        weight_delay=order["weight_delay"],
    )
    blocks = tuple(float(last - first) for first, last in stages.ranges)
    found = simulate(made, Times(forward=blocks, input_gradient=blocks, weight_gradient=blocks))
    bubble = 100.0 * found.bubble_fraction
    return (
        f"pipeline: {made.name}, {made.stages} stages of {stages.describe()}, {made.microbatches} "
        f"microbatches, bubble {bubble:.1f} % if a layer's input and weight gradients take as long "
        "as its forward"
    )


def context_words(config: Config) -> str:
    """Return context parallelism for a line about all kinds; nothing for one rank."""
    cp = config.parallel.context_parallel_size
    return f"context parallel {cp}, " if cp > 1 else ""


def context_line(run: Run) -> str | None:
    """Return how attention meets the tokens of other ranks and why; None where there are none."""
    parallel, training = run.config.parallel, run.config.training
    cp, shape = parallel.context_parallel_size, attention_shape(run)
    if cp == 1 or shape is None:
        return None
    return (
        f"{explain(parallel.cp_comm_type, shape, cp)}; each rank has {shape.tokens:,} of the "
        f"{training.seq_length:,} tokens of a sample"
    )


def linear_lines(run: Run) -> list[str]:
    """Return how each kind of recurrent block meets the tokens of other ranks and why; none where
    there are no others."""
    parallel, training = run.config.parallel, run.config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if cp == 1:
        return []
    tokens = {
        "tokens": training.seq_length // cp,
        "rows": training.micro_batch_size,
        "element_bytes": weight_dtype(run.config).itemsize,
    }
    found = []
    for name, config in recurrent_shapes(run.config).items():
        shape = replace(linear_shape(config, tp), **tokens)
        found.append(f"{name}: {explain_linear(parallel.linear_cp_mode, shape, cp)}")
    return found


def recurrent_states_line(run: Run, device: torch.device) -> str | None:
    """Return how many bytes --keep-recurrent-states keeps; None without it."""
    if not run.config.execution.keep_recurrent_states:
        return None
    if device.type == "cpu":
        return "recurrent states: a CPU always keeps them, with or without --keep-recurrent-states"
    parallel, training = run.config.parallel, run.config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tokens = training.micro_batch_size * training.seq_length // cp
    texts = []
    for name, config in recurrent_shapes(run.config).items():
        shape = linear_shape(config, tp)
        elements = shape.heads * shape.key_channels * shape.value_channels
        chunk_bytes = elements * weight_dtype(run.config).itemsize
        texts.append(f"{name} {-(-tokens // CHUNK_SIZE) * chunk_bytes / 2**20:,.1f} MiB a layer")
    return f"recurrent states kept for backward, for each microbatch: {', '.join(texts)}"


def cut_line(cuts: PackedCuts, batches: Iterable[GPTBatch]) -> str | None:
    """Return how evenly either split of packed rows divides attention, and which is chosen; None
    without any.

    Args:
        batches: some of the run's, the first ones.
    """
    given = (batch.document_ids for batch in batches)
    found = [cuts.choice(documents_of(ids.numpy())) for ids in given if ids is not None]
    if not found:
        return None
    apart, number = [choice.apart for choice in found], len(found)
    padding = sum(work.padding for work in apart)
    tokens = sum(work.tokens for work in apart) * cuts.size - padding
    count = sum(choice.cut is not None for choice in found)
    which = f"{count} of them are cut by documents"
    if count in (0, number):
        which = "documents" if count else "row"
    reason = "auto" if cuts.kind == "auto" else "by --context-parallel-cut"
    return (
        f"context parallel cut: in the first {number} microbatches the slowest rank has "
        f"{_imbalance([choice.row for choice in found]):.2f} x the mean attention pairs by row, "
        f"{_imbalance(apart):.2f} x by documents, with {padding / tokens:.1%} padding; "
        f"{reason}: {which}"
    )


def _imbalance(works: list[AttentionWork]) -> float:
    """Return the pairs of the slowest rank of each microbatch over the mean; 1 is even."""
    mean = sum(sum(work.pairs) / len(work.pairs) for work in works)
    return sum(max(work.pairs) for work in works) / max(mean, 1.0)


def start_lines(session: Session, *, consumed_samples: int) -> list[str]:
    """Return the lines that a run begins its log with: what it is, what it has chosen and why.

    Every rank calls this.

    Args:
        consumed_samples: its position in the data.
    """
    run = session.run
    lines = (
        _run_line(session),
        pipeline_line(run),
        context_line(run),
        *linear_lines(run),
        recurrent_states_line(run, session.place.device),
        expert_line(run, session.model.config),
        capacity_line(run, session.model.config),
        batch_sizes_line(run),
        batch_line(run),
        data_parallel_line(session.step.engine, session.optimizer),
        communicators_line(session.place.groups, session.place.device, os.environ),
        weight_shards_line(session.step.engine),
        layers_line(run.config),
        delayed_scaling_line(run.config),
        attention_line(run.config, session.model.config, session.place.device),
        kernels_line(session.place.device),
        dropout_line(run.config, session.place.device),
        loss_weight_line(run),
        None if session.cpu_matmul is None else session.cpu_matmul.line(),
        *session.data.notes,
        _export_line(session),
        early_gather(run.config)[1],
        _experiment_line(run.config),
        _rows_line(session, consumed_samples),
    )
    return [line for line in lines if line is not None]


def layers_line(config: Config) -> str | None:
    """Return whose layers the model has; None where they are this package's own."""
    if config.parallel.transformer_impl == "local":
        return None
    release = importlib.metadata.version("transformer-engine")
    found, layers = quantization(config), num_layers(config)
    within = "the dtype of the weights"
    if found is not None:
        covered = sum(found.covers(layer, layers) for layer in range(layers))
        bits = "FP4" if found.recipe == "nvfp4" else "FP8"
        within = f"{bits} ({found.recipe}) in {covered} of {layers} layers"
        within += _gathered_weights(found.recipe, config.data_parallel.weight_gather_format)
    reasons = {
        "context parallelism": config.parallel.context_parallel_size > 1,
        "--attention-backend": config.parallel.attention_backend != "auto",
        "dropout of attention weights": config.attention.attention_dropout > 0,
    }
    reason = " and ".join(name for name, holds in reasons.items() if holds)
    parts, local = "linear, grouped linear, norms and attention", ""
    if reason:
        parts, local = "linear, grouped linear and norms", f"attention (for {reason}), "
    return (
        f"layers: {parts} of TransformerEngine {release}; linear layers multiply in {within}; "
        f"{local}embedding, output layer, router and recurrences are local"
    )


def delayed_scaling_line(config: Config) -> str | None:
    """Return when scales of earlier steps change, which is not when TransformerEngine's do; None
    without them."""
    found = quantization(config)
    if found is None or found.recipe != "delayed":
        return None
    steps = "step" if found.amax_history_len == 1 else f"{found.amax_history_len} steps"
    return (
        "delayed scaling: scales change once a step, by the largest magnitudes of the last "
        f"{steps} over tp and data parallel ranks; TransformerEngine's own change once a microbatch"
    )


def _gathered_weights(recipe: str, form: str) -> str:
    """Return what becomes of weights over gtp that a recipe multiplies, after the recipe."""
    if form == "bf16":
        return ""
    if GATHERED.get(recipe) == form:
        return f", by weights as they are gathered in {form}"
    return (
        f", by weights that are quantized twice: gathered in {form}, taken back, and quantized by "
        f"{recipe}"
    )


def _export_line(session: Session) -> str | None:
    """Return whether the model can be exported to Hugging Face, if that was asked."""
    if not session.run.config.checkpoint.hf_export_check:
        return None
    from megatron.hf.config_json import architecture_of, check_exportable
    from megatron.training.config.model_table import model_options

    try:
        check_exportable(session.model.config, flags_of=model_options)
    except ValueError as error:
        return f"Hugging Face: {error}"
    name = architecture_of(session.model.config).class_name
    return f"Hugging Face: the model can be exported as {name}"


def _experiment_line(config: Config) -> str | None:
    """Return the experiments of a run with their options; None without any."""
    chosen = config.experiments
    words = [" ".join((name, *chosen.words_of(name))) for name in chosen.experiment or ()]
    return f"experiments: {', '.join(words)}" if words else None


#: Microbatches whose documents are looked at before the first step.
MICROBATCHES_SHOWN = 16


def _rows_line(session: Session, consumed_samples: int) -> str | None:
    """Return how packed rows are cut over ranks and why, see `cut_line`; None if they are not."""
    run, lanes = session.run, session.place.groups["samples"]
    cuts = packed_cuts(run, session.place, session.model.config)
    if cuts is None:
        return None
    batches = training_batches(session.data, run, dp_group=lanes, consumed_samples=consumed_samples)
    return cut_line(cuts, islice(batches, MICROBATCHES_SHOWN))


def _run_line(session: Session) -> str:
    """Return one line on model, layout and data."""
    run, config = session.run, session.run.config
    return (
        f"{session.model.num_parameters:,} parameters in "
        f"{str(weight_dtype(config)).removeprefix('torch.')}, vocabulary "
        f"{session.vocabulary.size:,}; {run.world_size} processes: tensor parallel "
        f"{config.parallel.tensor_model_parallel_size}"
        f"{' with sequence parallel' if config.parallel.sequence_parallel else ''}, "
        f"{context_words(config)}{pipeline_words(config)}data parallel {run.data_parallel_size} "
        f"({config.data_parallel.strategy}); {batch_words(run)}; {run.train_iters:,} iterations"
    )

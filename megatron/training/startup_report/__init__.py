# SPDX-License-Identifier: Apache-2.0
"""The lines that a run logs at its start, one for each feature in use.

They describe the pipeline (stages, schedule, bubble), context parallelism (how attention and
recurrences get the tokens of other ranks, how packed rows are split, and why), the experts
(placement, dispatcher, active parameters), an uneven global batch and its cost, the data-parallel
strategy with bytes per rank, and dropout (on by Megatron's defaults) and its cost. A separate line
follows if the first step needs more memory for gathered weights than estimated.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Callable, Iterable
from itertools import islice

import torch

from megatron.core.context_parallel.sequence_sharding import AttentionWork, documents_of
from megatron.core.datasets.samplers import GPTBatch
from megatron.core.distributed import DataParallel
from megatron.core.extensions import GATHERED
from megatron.core.models.gpt import GPTConfig, logical_weights
from megatron.core.models.layer_pattern import EXPERTS
from megatron.core.moe.dispatch import choose_dispatcher, dispatched_rows
from megatron.core.ops.attention import explain as explain_attention
from megatron.core.ops.backend_choice import explain_compilers
from megatron.core.ops.recurrence import CHUNK_SIZE
from megatron.core.ssm.mixer_config import linear_shape
from megatron.core.transformer import LatentAttentionConfig
from megatron.training.config import Config
from megatron.training.config.implementation_checks import quantization
from megatron.training.config.layer_pattern_options import has_attention, num_layers
from megatron.training.config.model_table import recurrent_shapes
from megatron.training.config.resolve import ResolvedRun
from megatron.training.core_configs import early_gather, weight_dtype
from megatron.training.data.data_sets import training_batches
from megatron.training.distributed_context import rank_grid
from megatron.training.hooks import Progress, StepReport, TrainingHooks
from megatron.training.layouts import PackedCuts, packed_cuts
from megatron.training.monitoring.flops import window_shares
from megatron.training.session import Session
from megatron.training.startup_report.parallelism import (
    communicators_line,
    context_line,
    context_words,
    data_parallel_line,
    linear_lines,
    megabytes,
    pipeline_line,
    pipeline_words,
    weight_shards_line,
)


def start_lines(session: Session, *, consumed_samples: int) -> list[str]:
    """Return the first lines of the log: layout, chosen implementations and why.

    Every rank calls this.

    Args:
        consumed_samples: position in the data.
    """
    run = session.run
    lines = (
        _run_line(session),
        pipeline_line(run),
        context_line(run),
        *linear_lines(run),
        recurrent_states_line(run, session.context.device),
        expert_line(run, session.model.config),
        capacity_line(run, session.model.config),
        batch_sizes_line(run),
        batch_line(run),
        data_parallel_line(session.step.engine, session.optimizer),
        communicators_line(session.context.groups, session.context.device, os.environ),
        weight_shards_line(session.step.engine),
        layers_line(run.config),
        delayed_scaling_line(run.config),
        attention_line(run.config, session.model.config, session.context.device),
        kernels_line(session.context.device),
        dropout_line(run.config, session.context.device),
        loss_weight_line(run),
        None if session.cpu_matmul is None else session.cpu_matmul.line(),
        *session.data.notes,
        _export_line(session),
        early_gather(run.config)[1],
        _experiment_line(run.config),
        _rows_line(session, consumed_samples),
    )
    return [line for line in lines if line is not None]


def _export_line(session: Session) -> str | None:
    """Return whether the model can be exported to Hugging Face; None without the check."""
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
    """Return the enabled experiments with their options; None without any."""
    chosen = config.experiments
    words = [" ".join((name, *chosen.option_arguments(name))) for name in chosen.experiment or ()]
    return f"experiments: {', '.join(words)}" if words else None


#: Microbatches whose documents are inspected before the first step.
NUM_INSPECTED_MICROBATCHES = 16


def _rows_line(session: Session, consumed_samples: int) -> str | None:
    """Return how packed rows are split over ranks, see `cut_line`; None if they are not split."""
    run, dp_group = session.run, session.context.groups["samples"]
    cuts = packed_cuts(run, session.context, session.model.config)
    if cuts is None:
        return None
    batches = training_batches(
        session.data, run, dp_group=dp_group, consumed_samples=consumed_samples
    )
    return cut_line(cuts, islice(batches, NUM_INSPECTED_MICROBATCHES))


def _run_line(session: Session) -> str:
    """Return the run line: model, layout and data."""
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


class GatheredBytes(TrainingHooks):
    """Log when the order of use in a step needs more gathered bytes than logged before, for this
    rank's pipeline stage.

    Args:
        log: writes a line to the log.
    """

    def __init__(self, engine: DataParallel, log: Callable[[str], None]) -> None:
        self._engine, self._log, self._reported_bytes = engine, log, engine.gathered_bytes

    def on_step_end(self, progress: Progress, outcome: StepReport) -> None:
        """Compare the gathered bytes with the logged ones."""
        if self._engine.gathered_bytes > self._reported_bytes:
            self._reported_bytes = self._engine.gathered_bytes
            self._log(
                f"weight shards: their order of use needs at most "
                f"{megabytes(self._reported_bytes)} of gathered weights"
            )


def batch_words(run: ResolvedRun) -> str:
    """Return how a step's samples are divided into microbatches, for the run line."""
    division = run.final_division
    num_ranks = division.data_parallel_size
    if division.is_even:
        return (
            f"global batch {division.samples} = {num_ranks} x {division.micro_batch_size} x "
            f"{division.rounds} microbatches"
        )
    return (
        f"global batch {division.samples} in {division.blocks} microbatches of "
        f"{division.micro_batch_size}"
    )


def batch_sizes_line(run: ResolvedRun) -> str | None:
    """Return the sizes of a global batch that ramps up; None if the size is constant."""
    stages = run.batch_sizes.stages
    if len(stages) == 1:
        return None
    sizes = [f"{size} from sample {threshold:,} on" for threshold, size in stages]
    if len(sizes) > 8:
        sizes = [*sizes[:3], f"... {len(sizes) - 4} more", sizes[-1]]
    return f"global batch by samples: {', '.join(sizes)}"


def batch_line(run: ResolvedRun) -> str | None:
    """Return the padding microbatches of each data-parallel rank in a step, and the share of time
    that padding and a smaller last microbatch waste; None if the batch divides evenly."""
    division = run.final_division
    if division.is_even:
        return None
    padding = "no padding microbatch"
    num_ranks = division.data_parallel_size
    ranks = f"{num_ranks} data-parallel rank{'s' if num_ranks > 1 else ''}"
    if division.padding_microbatches:
        padded_from = num_ranks - division.padding_microbatches
        padded = (
            f"rank {padded_from}"
            if division.padding_microbatches == 1
            else f"ranks {padded_from}-{num_ranks - 1}"
        )
        padding = f"1 padding microbatch on {padded}"
    remainder = division.samples % division.micro_batch_size
    remainder_text = f", the last one of {remainder}" if remainder else ""
    return (
        f"uneven batch: {division.blocks} microbatches of {division.micro_batch_size}"
        f"{remainder_text}, on {ranks}, {division.rounds} each, {padding}; "
        f"{100.0 * division.wasted:.1f} % of their time is wasted"
    )


def loss_weight_line(run: ResolvedRun) -> str | None:
    """Return how microbatches of conversations are weighted in the loss, and the flag that weights
    all tokens equally; None if tokens are weighted equally, or without --sft."""
    training, blocks = run.config.training, run.final_division.blocks
    if not run.config.data.sft or training.calculate_per_token_loss or blocks == 1:
        return None
    return (
        f"--sft without --calculate-per-token-loss: each of the {blocks} microbatches of a "
        "step has the same weight, however few of its tokens have a loss, so tokens of short "
        "responses count more; with the flag all tokens with a loss have the same weight"
    )


def cut_line(cuts: PackedCuts, batches: Iterable[GPTBatch]) -> str | None:
    """Return the load balance of attention for both ways to split packed rows, and the selected
    one; None without packed rows.

    Args:
        batches: the first batches of the run.
    """
    document_ids = (batch.document_ids for batch in batches)
    choices = [cuts.choice(documents_of(ids.numpy())) for ids in document_ids if ids is not None]
    if not choices:
        return None
    by_documents, num_batches = [choice.by_document for choice in choices], len(choices)
    padding = sum(work.padding for work in by_documents)
    tokens = sum(work.tokens for work in by_documents) * cuts.size - padding
    num_cut = sum(choice.cut is not None for choice in choices)
    selected = f"{num_cut} of them are split by documents"
    if num_cut in (0, num_batches):
        selected = "documents" if num_cut else "row"
    reason = "auto" if cuts.kind == "auto" else "by --context-parallel-cut"
    return (
        f"context parallel cut: in the first {num_batches} microbatches the slowest rank has "
        f"{_pairs_imbalance([choice.row for choice in choices]):.2f} x the mean attention pairs by "
        f"row, {_pairs_imbalance(by_documents):.2f} x by documents, with "
        f"{padding / tokens:.1%} padding; {reason}: {selected}"
    )


def _pairs_imbalance(work_per_batch: list[AttentionWork]) -> float:
    """Return the attention pairs of the slowest rank over the mean; 1 is perfectly balanced."""
    mean = sum(sum(work.pairs) / len(work.pairs) for work in work_per_batch)
    return sum(max(work.pairs) for work in work_per_batch) / max(mean, 1.0)


def layers_line(config: Config) -> str | None:
    """Return which layers come from TransformerEngine; None if all are local."""
    if config.parallel.transformer_impl == "local":
        return None
    release = importlib.metadata.version("transformer-engine")
    recipe_config, layers = quantization(config), num_layers(config)
    precision = "the dtype of the weights"
    if recipe_config is not None:
        covered = sum(recipe_config.covers(layer, layers) for layer in range(layers))
        number_format = "FP4" if recipe_config.recipe == "nvfp4" else "FP8"
        precision = f"{number_format} ({recipe_config.recipe}) in {covered} of {layers} layers"
        precision += _gathered_weights(
            recipe_config.recipe, config.data_parallel.weight_gather_format
        )
    reasons = {
        "context parallelism": config.parallel.context_parallel_size > 1,
        "--attention-backend": config.parallel.attention_backend != "auto",
        "dropout of attention weights": config.attention.attention_dropout > 0,
    }
    reason = " and ".join(name for name, applies in reasons.items() if applies)
    te_layers, local_layers = "linear, grouped linear, norms and attention", ""
    if reason:
        te_layers, local_layers = "linear, grouped linear and norms", f"attention (for {reason}), "
    return (
        f"layers: {te_layers} of TransformerEngine {release}; linear layers compute in "
        f"{precision}; {local_layers}embedding, output layer, router and recurrences are local"
    )


def delayed_scaling_line(config: Config) -> str | None:
    """Return when delayed scales are updated, which differs from TransformerEngine; None without
    delayed scaling."""
    recipe_config = quantization(config)
    if recipe_config is None or recipe_config.recipe != "delayed":
        return None
    steps = (
        "step" if recipe_config.amax_history_len == 1 else f"{recipe_config.amax_history_len} steps"
    )
    return (
        "delayed scaling: scales are updated once per step, from the amax of the last "
        f"{steps} over tp and data parallel ranks; TransformerEngine itself updates them per "
        "microbatch"
    )


def _gathered_weights(recipe: str, gather_format: str) -> str:
    """Return how a recipe uses weights gathered over gtp, as a suffix to its name."""
    if gather_format == "bf16":
        return ""
    if GATHERED.get(recipe) == gather_format:
        return f", with weights used as gathered in {gather_format}"
    return (
        f", with weights quantized twice: gathered in {gather_format}, dequantized, and "
        f"quantized by {recipe}"
    )


def attention_line(config: Config, model: GPTConfig, device: torch.device) -> str | None:
    """Return which GPU kernel attention uses and why; None on a CPU, without attention, and with
    TransformerEngine's layers. Context-parallel ranks compute attention block by block, each block
    within one document, and apply sinks afterwards."""
    parallel, attention = config.parallel, model.attention
    if device.type != "cuda" or not has_attention(config) or parallel.transformer_impl != "local":
        return None
    blockwise = parallel.context_parallel_size > 1
    if parallel.attention_backend != "auto":
        return f"attention: {parallel.attention_backend} (--attention-backend)"
    latent = isinstance(attention, LatentAttentionConfig)
    features = attention.query_channels if latent else attention.kv_channels
    packed = config.data.sft or config.data.reset_attention_mask
    uses_graphs = config.execution.cuda_graph_impl != "none"
    kinds = () if latent else (attention, model.second_attention)
    has_sinks = any(kind is not None and kind.sinks for kind in kinds)
    options = {
        "a window": any(window is not None for window in window_shares(model)),
        "documents": packed and not uses_graphs and not blockwise,
        "documents known by ids alone": packed and uses_graphs and not blockwise,
        "sinks": has_sinks and not blockwise,
        "a soft cap": not latent and attention.softcap is not None,
        "attention dropout": attention.dropout > 0,
    }
    used_options = [name for name, is_used in options.items() if is_used]
    kernel = explain_attention(device, weight_dtype(config), features, options=used_options)
    return f"attention{' of each block' if blockwise else ''}: {kernel}"


def kernels_line(device: torch.device) -> str | None:
    """Return the Triton and ptxas versions with their known bugs; None on a CPU."""
    compilers = explain_compilers(device)
    return None if compilers is None else f"kernels: {compilers}"


def dropout_line(config: Config, device: torch.device) -> str | None:
    """Return which dropout is on, its cost and how to turn it off; None if all is off."""
    rates = {
        "attention": config.attention.attention_dropout if has_attention(config) else 0.0,
        "hidden": config.model.hidden_dropout,
    }
    active = {name: rate for name, rate in rates.items() if rate}
    if not active:
        return None
    costs = ["a mask for every value in forward and backward"]
    if (
        "attention" in active
        and device.type == "cuda"
        and config.parallel.attention_backend == "auto"
    ):
        length, cp = config.training.seq_length, config.parallel.context_parallel_size
        costs.append(
            "attention in plain torch instead of its kernel, which has no dropout, with scores of "
            f"{length // cp:,} x {length:,} for each head"
        )
    return (
        f"dropout: {', '.join(f'{name} {rate:g}' for name, rate in active.items())} (Megatron's "
        f"default is 0.1); costs {'; '.join(costs)}; most models are pretrained without: "
        f"{' '.join(f'--{name}-dropout 0' for name in active)}"
    )


def recurrent_states_line(run: ResolvedRun, device: torch.device) -> str | None:
    """Return the size of the states stored by --keep-recurrent-states; None without it."""
    if not run.config.execution.keep_recurrent_states:
        return None
    if device.type == "cpu":
        return "recurrent states: a CPU always stores them, with or without --keep-recurrent-states"
    parallel, training = run.config.parallel, run.config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tokens = training.micro_batch_size * training.seq_length // cp
    texts = []
    for name, config in recurrent_shapes(run.config).items():
        shape = linear_shape(config, tp)
        elements = shape.heads * shape.key_channels * shape.value_channels
        chunk_bytes = elements * weight_dtype(run.config).itemsize
        texts.append(f"{name} {-(-tokens // CHUNK_SIZE) * chunk_bytes / 2**20:,.1f} MiB per layer")
    return f"recurrent states stored for backward, per microbatch: {', '.join(texts)}"


def expert_line(run: ResolvedRun, model: GPTConfig) -> str | None:
    """Return the experts' placement, router and dispatcher; None without experts."""
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


def capacity_line(run: ResolvedRun, model: GPTConfig) -> str | None:
    """Return which options change the results under an expert capacity; None without one."""
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


def _dispatcher(run: ResolvedRun, model: GPTConfig) -> str:
    """Return the token dispatcher and the number of rows it moves."""
    grid, moe, parallel = rank_grid(run), model.moe, run.config.parallel
    etp = grid.size("etp")
    if etp * grid.ep == 1:
        return "all experts are on every rank, no token is sent"
    assert moe is not None
    requested, topk = parallel.moe_token_dispatcher_type, moe.router.topk
    dispatcher = choose_dispatcher(requested, topk=topk, ep=grid.ep)
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    tokens = run.config.training.micro_batch_size * run.config.training.seq_length
    local_tokens = math.ceil(tokens / ranks)
    rows = {
        kind: dispatched_rows(kind, tokens=local_tokens, topk=topk, etp=etp, ep=grid.ep)
        for kind in ("alltoall", "allgather")
    }
    row_counts = ", ".join(f"{kind} {rows[kind]:,}" for kind in sorted(rows, key=rows.__getitem__))
    reason = "fewest rows" if requested == "auto" else "requested; rows"
    line = f"tokens by {dispatcher}: {reason} per rank, dispatch and combine: {row_counts}"
    factor = parallel.moe_expert_rank_capacity_factor
    if factor is None:
        return line
    return (
        f"{line}; in training the capacity of a rank is {factor:g} x the even share of "
        f"{etp * local_tokens * topk:,}"
    )


def parameters(model: GPTConfig) -> tuple[int, int]:
    """Return the number of parameters, and of active parameters per token."""
    total = active = 0.0
    share = 0.0 if model.moe is None else model.moe.router.topk / model.moe.num_experts
    for name, shape in logical_weights(model).items():
        count = math.prod(shape)
        total += count
        active += count * share if ".moe.experts." in name else count
    return round(total), round(active)

# SPDX-License-Identifier: Apache-2.0
"""Lines about the parallel layout: pipeline, context parallelism, data parallelism with bytes per
rank, and weight shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megatron.core.comm import all_reduce
from megatron.core.comm.symmetric_memory import communicator_bytes
from megatron.core.context_parallel.attention import explain
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.models.layer_pattern import SHORT_CONV
from megatron.core.optimizer import Optimizer
from megatron.core.pipeline_parallel.schedule import make_schedule
from megatron.core.pipeline_parallel.simulate import Times, simulate
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.ssm.mixer_config import explain as explain_linear
from megatron.core.ssm.mixer_config import linear_shape
from megatron.training.config import Config
from megatron.training.config.layer_pattern_options import has
from megatron.training.config.model_table import recurrent_shapes
from megatron.training.config.resolve import ResolvedRun
from megatron.training.core_configs import attention_shape, pipeline_order, split, weight_dtype


def pipeline_words(config: Config) -> str:
    """Return the pipeline layout for the run line; empty for one stage."""
    if (stages := split(config)) is None:
        return ""
    schedule = pipeline_order(config)["schedule"]
    return f"pipeline parallel {stages.stages} ({schedule}), {stages.describe()}, "


def pipeline_line(run: ResolvedRun) -> str | None:
    """Return the pipeline schedule and its bubble; None for one stage.

    The bubble is simulated: forward, input gradient and weight gradient of a layer take the same
    time; transfers, embedding and output layer take none.
    """
    if (stages := split(run.config)) is None:
        return None
    schedule_options = pipeline_order(run.config)
    schedule = make_schedule(
        schedule_options["schedule"],
        stages=stages.stages,
        microbatches=run.num_microbatches,
        chunks=stages.chunks,
        group_size=schedule_options["group_size"],
        weight_delay=schedule_options["weight_delay"],
    )
    blocks = tuple(float(end - begin) for begin, end in stages.ranges)
    simulation = simulate(
        schedule, Times(forward=blocks, input_gradient=blocks, weight_gradient=blocks)
    )
    bubble = 100.0 * simulation.bubble_fraction
    return (
        f"pipeline: {schedule.name}, {schedule.stages} stages of {stages.describe()}, "
        f"{schedule.microbatches} microbatches, bubble {bubble:.1f} % if a layer's input and "
        "weight gradients take as long as its forward"
    )


def context_words(config: Config) -> str:
    """Return the context-parallel size for the run line; empty for one rank."""
    cp = config.parallel.context_parallel_size
    return f"context parallel {cp}, " if cp > 1 else ""


def context_line(run: ResolvedRun) -> str | None:
    """Return the context-parallel communication of attention and why; None without any."""
    parallel, training = run.config.parallel, run.config.training
    cp, shape = parallel.context_parallel_size, attention_shape(run)
    if cp == 1 or shape is None:
        return None
    return (
        f"{explain(parallel.cp_comm_type, shape, cp)}; each rank has {shape.tokens:,} of the "
        f"{training.seq_length:,} tokens of a sample"
    )


def linear_lines(run: ResolvedRun) -> list[str]:
    """Return the context-parallel mode of each kind of recurrent block and why; empty without
    context parallelism."""
    parallel, training = run.config.parallel, run.config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if cp == 1:
        return []
    sizes = {
        "tokens": training.seq_length // cp,
        "rows": training.micro_batch_size,
        "element_bytes": weight_dtype(run.config).itemsize,
    }
    lines = []
    for name, config in recurrent_shapes(run.config).items():
        shape = replace(linear_shape(config, tp), **sizes)
        lines.append(f"{name}: {explain_linear(parallel.linear_cp_mode, shape, cp)}")
    if has(run.config, SHORT_CONV):
        width = run.config.hybrid.short_conv_kernel_dim
        lines.append(
            f"short convolution: each rank receives the {width - 1} tokens before its sequences"
        )
    return lines


def data_parallel_line(engine: DataParallel, optimizer: Optimizer) -> str:
    """Return the data-parallel strategy in effect, its buckets, and the bytes per rank.

    With several pipeline stages, each number is the maximum over the stages; every rank calls this.
    Bytes of weights and gradients come from the formula; bytes of gathered weights are the budget
    in force; bytes of optimizer state are measured, in device and host memory, because weights can
    have different kinds of state.

    Raises:
        ValueError: the strategy in effect differs from the requested one.
    """
    config = engine.config
    if engine.groups["dense_dp"].size == engine.groups["expert_dp"].size == 1:
        scope = "one rank"
        if idle := _idle_flags(config):
            verb = "has" if len(idle) == 1 else "have"
            scope += f", so that {', '.join(idle)} {verb} nothing to do"
    elif engine.placement != config.placement:
        raise ValueError(
            f"data parallelism shards {engine.placement} but {config.strategy} was requested, "
            f"which is {config.placement}"
        )
    else:
        scope = f"{config.strategy} over {_scope(engine)}"
    buckets = [BucketSize.of(bucket) for bucket in engine.store.buckets]
    element_bytes = ElementBytes(
        weight=engine.store.dtype.itemsize,
        gradient=config.grad_dtype.itemsize,
        optimizer=0,
        fp32_sum=config.fp32_accumulation and engine.sharded,
        gtp_once=config.gtp_reduce_scatter_per == "step",
    )
    rank_bytes = bytes_per_rank(
        buckets,
        engine.placement,
        element_bytes=element_bytes,
        overlap=config.overlap_grad_reduce,
    )
    largest_gather = element_bytes.weight * max((bucket.numel for bucket in buckets), default=0)
    states = [optimizer.state_bytes(on_host=host) for host in (False, True)]
    count, largest, weights, gradients, state, on_host, gathered, reducing = _max_over_stages(
        engine,
        [len(buckets), largest_gather, rank_bytes.weights, rank_bytes.gradients, *states]
        + [engine.gathered_bytes, rank_bytes.reducing],
    )
    stages = engine.groups["pp"].size
    line = (
        f"data parallel: {scope}; {count} bucket{'s' * (count != 1)} of up to "
        f"{megabytes(largest)}; per rank {'at most ' if stages > 1 else ''}{megabytes(weights)} "
        f"of weights, {megabytes(gradients)} of gradients, {megabytes(state)} of optimizer state"
    )
    if on_host:
        line += f" on the device and {megabytes(on_host)} in host memory"
    if gathered:
        line += f", at most {megabytes(gathered)} of gathered weights"
    if reducing:
        line += f", at most {megabytes(reducing)} of gradients that are being reduced"
    return line


def communicators_line(
    groups: ProcessGroupCollection, device: torch.device, environment: Mapping[str, str]
) -> str | None:
    """Return the number of NCCL communicators of this rank and their approximate device memory,
    which torch's allocator does not count; None without NCCL communicators.

    Args:
        environment: NCCL's variables, see `communicator_bytes`.
    """
    count = groups.num_communicators
    if not count or device.type != "cuda":
        return None
    num_bytes = count * communicator_bytes(environment)
    return (
        f"communicators: {count} of NCCL, about {megabytes(num_bytes)} of device memory once "
        "all are used, which torch does not count"
    )


def weight_shards_line(engine: DataParallel) -> str | None:
    """Return which weights of this rank's stage generalized tensor parallelism shards, over which
    ranks, and how they are gathered; None if it shards nothing."""
    grid = engine.groups.grid
    if grid.gtp * grid.egtp == 1:
        return None
    if engine.placement.weight:
        return (
            f"weight shards: gtp {grid.gtp} and egtp {grid.egtp} have no effect: "
            f"{engine.config.strategy} already shards all weights over the data parallel "
            "ranks that include them"
        )
    descriptions = []
    for expert, axis, size in ((False, "gtp", grid.gtp), (True, "egtp", grid.egtp)):
        sharded_blocks = [
            block
            for bucket in engine.store.buckets
            if bucket.gtp and bucket.expert == expert
            for block in bucket.blocks
        ]
        if sharded_blocks:
            total_bytes = sum(block.unsharded_bytes for block in sharded_blocks)
            noun = "matrix" if len(sharded_blocks) == 1 else "matrices"
            kind = f"{noun} of experts" if expert else noun
            descriptions.append(
                f"{len(sharded_blocks)} {kind} over {axis} {size}: "
                f"{megabytes(total_bytes // size)} of {megabytes(total_bytes)} on this rank"
            )
    if not descriptions:  # a pipeline stage without matrices
        return None
    gather_format = engine.config.gather_format
    if gather_format == "bf16":
        gather_format = str(engine.store.dtype).removeprefix("torch.")
    elif engine.config.gather_scale_blocks == "1d":
        gather_format += " with separate 1-D scale blocks for forward and backward,"
    interval = engine.config.gtp_reduce_scatter_per
    return (
        f"weight shards: {'; '.join(descriptions)}; gathered in {gather_format} before each use, "
        f"gradients reduce-scattered once per {interval}"
    )


def _max_over_stages(engine: DataParallel, values: Sequence[int]) -> list[int]:
    """Return the maximum of each value over the pipeline stages."""
    stage_values = torch.tensor(values, dtype=torch.int64, device=engine.store.device)
    return [
        int(value) for value in all_reduce(stage_values, engine.groups["pp"], op="max").tolist()
    ]


def _idle_flags(config: DataParallelConfig) -> list[str]:
    """Return the data-parallel flags in use, which have no effect on one rank."""
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
    return [flag for flag, is_set in flags.items() if is_set]


def _scope(engine: DataParallel) -> str:
    """Return the number of data-parallel ranks of dense weights and of experts."""
    groups, instances = engine.groups, engine.groups.grid.instances
    dense_ranks, expert_ranks = (
        groups[name].size // instances for name in ("dense_dp", "expert_dp")
    )
    text = f"{dense_ranks} rank{'s' if dense_ranks > 1 else ''}"
    if expert_ranks != dense_ranks:
        text += f" of dense weights and {expert_ranks} of experts"
    if instances == 1:
        return text
    text = f"the {text} in each" if expert_ranks != dense_ranks else f"the {text} of each"
    text += f" of {instances} instances"
    if engine.config.outer == "optim":
        text += ", optimizer state over all of them"
    return text


def megabytes(count: int) -> str:
    """Return a number of bytes as text in MB."""
    return f"{count / 1e6:,.2f} MB"

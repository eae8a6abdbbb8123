# SPDX-License-Identifier: Apache-2.0
"""Checks of the parallel layout: sizes against the number of processes, sharded weights, context
parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.training.config import data_parallel_options
from megatron.training.config.layer_pattern_options import has_attention

if TYPE_CHECKING:
    from megatron.training.config import Config


def layout_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each parallel size that the processes or the model cannot have."""
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ranks_per_replica = config.pipeline.pipeline_model_parallel_size, config.model_parallel_size
    sizes = {
        "--tensor-model-parallel-size": tp,
        "--context-parallel-size": cp,
        "--pipeline-model-parallel-size": pp,
    }
    non_trivial_sizes = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    if world_size % ranks_per_replica:
        product = " x ".join(non_trivial_sizes) + (
            f" = {ranks_per_replica}" if len(non_trivial_sizes) > 1 else ""
        )
        yield (
            f"{product} does not divide the world of {world_size} processes: start a multiple of "
            f"{ranks_per_replica} processes or lower it"
        )
    yield from _weight_shards(config, world_size)
    yield from _expert_blocks(config)
    if config.parallel.sequence_parallel and tp > 1 and config.training.seq_length % (tp * cp):
        product = " x ".join(flag for flag in non_trivial_sizes if "pipeline" not in flag)
        yield (
            f"--seq-length {config.training.seq_length} is not a multiple of {product}, which "
            "--sequence-parallel needs: change one"
        )


def _weight_shards(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each problem of generalized tensor parallelism."""
    parallel, tp = config.parallel, config.parallel.tensor_model_parallel_size
    shards, dp = (
        parallel.tensor_parallel_num_weight_shards,
        world_size // config.model_parallel_size,
    )
    flag = f"--tensor-parallel-num-weight-shards {shards}"
    if shards is not None and shards % tp:
        yield (
            f"{flag} is not a multiple of --tensor-model-parallel-size {tp}: it counts the shards "
            f"over tp and gtp, use {-(-shards // tp) * tp}, for example"
        )
    elif world_size % config.model_parallel_size == 0 and dp % parallel.gtp_size:
        yield (
            f"{flag} over tensor parallel size {tp} needs {parallel.gtp_size} data parallel ranks, "
            f"or a multiple: there are {dp}"
        )
    latent = config.attention.multi_latent_attention
    learned = config.position.position_embedding_type == "learned_absolute"
    for name, used, needs in (
        ("mla_down_proj", latent, "--multi-latent-attention"),
        ("position_embeddings", learned, "--position-embedding-type learned_absolute"),
    ):
        if name in (parallel.gtp_opt_in_modules or ()) and not (used and parallel.gtp_size > 1):
            needs = needs if parallel.gtp_size > 1 else "--tensor-parallel-num-weight-shards"
            yield f"--gtp-opt-in-modules {name} has no effect without {needs}: drop it"
    instances = config.data_parallel.num_distributed_optimizer_instances
    if instances > 1:
        for size, name in (
            (parallel.gtp_size, "--tensor-parallel-num-weight-shards"),
            (parallel.expert_gtp_size, "--expert-tensor-parallel-num-weight-shards"),
        ):
            if size > 1:
                yield (
                    f"{name} with --num-distributed-optimizer-instances {instances}: weights are "
                    "sharded over gtp or over the ranks of an instance: drop one"
                )


def _expert_blocks(config: Config) -> Iterator[str]:
    """Yield a message if blocks that share a scale would span two experts' matrices."""
    gather_format, experts = config.data_parallel.weight_gather_format, config.experts
    block = {"mxfp8": 32, "nvfp4": 16}.get(gather_format)
    if block is None or experts.num_experts is None or config.parallel.expert_gtp_size == 1:
        return
    if config.data_parallel.strategy == "optim_grads_params":
        return  # `data_parallel_options` reports that the format has no effect
    etp = config.parallel.expert_tensor_parallel_size or config.parallel.tensor_model_parallel_size
    width = experts.moe_ffn_hidden_size or config.model.inner_features
    for rows, name in (
        (width // etp, "--moe-ffn-hidden-size"),
        (config.model.hidden_size, "--hidden-size"),
    ):
        if rows % block:
            yield (
                f"--weight-gather-format {gather_format} has blocks of {block} rows, and a rank "
                f"has {rows} of {name} in each expert's matrix, so that some would hold rows of "
                "two experts: use fp8 or bf16, or another size"
            )


def data_parallel_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each problem of sharding over data-parallel ranks."""
    ranks = config.model_parallel_size
    size = world_size // ranks if world_size % ranks == 0 else 1
    yield from data_parallel_options.problems(
        config.data_parallel,
        data_parallel_size=size,
        bf16=config.training.bf16,
        context_size=config.parallel.context_parallel_size,
        over_gtp=config.parallel.requests_gtp,
    )


def context_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each problem of context parallelism."""
    parallel, length = config.parallel, config.training.seq_length
    cp, kernel = parallel.context_parallel_size, parallel.attention_backend
    if cp == 1:
        return
    flag = f"--context-parallel-size {cp}"
    if length % (2 * cp):
        longer = -(-length // (2 * cp)) * 2 * cp
        yield (
            f"--seq-length {length} is not a multiple of 2 x {flag} = {2 * cp}, two chunks of each "
            f"sample for every rank: use {longer}, for example"
        )
    if not has_attention(config):
        return
    if kernel != "auto":
        yield (
            f"--attention-backend {kernel} has no effect with {flag}, which uses the kernel of its "
            "device: leave it at auto"
        )
    latent = config.attention.multi_latent_attention  # checks its heads itself
    has_heads = config.model.num_attention_heads is not None
    if parallel.cp_comm_type == "a2a" and has_heads and not latent:
        yield from _heads(config)


def _heads(config: Config) -> Iterator[str]:
    """Yield a message if attention heads cannot be divided over the ranks."""
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    heads = config.model.num_attention_heads
    assert heads is not None
    groups = config.model.num_query_groups or heads
    per_rank = f" on each of {tp} tensor parallel ranks" if tp > 1 else ""
    fix = f"--context-parallel-size {cp}: use --cp-comm-type p2p"
    if heads % tp == 0 and heads // tp % cp:
        yield f"--cp-comm-type a2a: {heads // tp} heads{per_rank} do not divide over {fix}"
    elif (groups_per_rank := max(1, groups // tp)) % cp and cp % groups_per_rank:
        yield (
            f"--cp-comm-type a2a: {groups_per_rank} query groups{per_rank} do not divide over {fix}"
        )

# SPDX-License-Identifier: Apache-2.0
"""Check combinations of options before any process group exists.

The checks are pure functions of the config and the number of processes; they read no file. Checks
within a help group are in its module, checks across groups in a module of the feature, and checks
of the parallel layout (sizes, sharded weights, context parallelism) here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.training.config import (
    Config,
    block_checks,
    implementation_checks,
    layer_pattern_options,
    logging_options,
    optimizer_options,
    stages,
    training_options,
    unused_options,
)
from megatron.training.config.checkpoint_options import failure_problems
from megatron.training.config.data_options import vocabulary_problems
from megatron.training.config.execution_options import recompute_problems
from megatron.training.config.layer_pattern_options import has_attention
from megatron.training.config.model_options import rope_scaling_problems
from megatron.training.config.parallel_options import sharding_problems


def check(config: Config, world_size: int) -> list[str]:
    """Return a message with a fix for each problem of a config on `world_size` processes."""
    config = layer_pattern_options.with_layers(config)
    return list(
        itertools.chain(
            layout_problems(config, world_size),
            context_problems(config),
            implementation_checks.transformer_engine_problems(config),
            implementation_checks.quantization_problems(config),
            _batch(config, world_size),
            data_parallel_problems(config, world_size),
            layer_pattern_options.problems(config),
            unused_options.missing_block_problems(config),
            block_checks.recurrent_problems(config),
            block_checks.head_problems(config),
            block_checks.inner_feature_problems(config),
            block_checks.latent_attention_problems(config),
            block_checks.expert_problems(config, world_size),
            rope_scaling_problems(config.position),
            block_checks.learned_position_problems(config),
            implementation_checks.attention_kernel_problems(config),
            _recompute(config),
            stages.problems(config, world_size),
            implementation_checks.cuda_graph_problems(config),
            _run(config, world_size),
        )
    )


def _batch(config: Config, world_size: int) -> Iterator[str]:
    dp_size, remainder = divmod(world_size, config.model_parallel_size)
    if remainder:
        return  # `layout_problems` reports it
    yield from training_options.batch_problems(
        config.training,
        config.evaluation,
        dp_size=dp_size,
        has_experts=config.experts.num_experts is not None,
    )


def _recompute(config: Config) -> Iterator[str]:
    num_layers = layer_pattern_options.num_layers(config)
    yield from recompute_problems(config.execution, num_layers=num_layers)


def _run(config: Config, world_size: int) -> Iterator[str]:
    """Yield the problems of the options that do not concern the model and its layout."""
    training = config.training
    yield from training_options.length_problems(
        training,
        max_position_embeddings=config.model.max_position_embeddings,
        dp_size=max(1, world_size // config.model_parallel_size),
    )
    yield from optimizer_options.schedule_problems(config.schedule, training)
    yield from optimizer_options.weight_decay_problems(config.optimizer)
    yield from optimizer_options.optimizer_problems(config.optimizer)
    yield from vocabulary_problems(config.tokenizer)
    yield from failure_problems(
        config.failures,
        checkpoint=config.checkpoint,
        max_consecutive_bad_steps=training.max_consecutive_bad_steps,
    )
    yield from unused_options.missing_switch_problems(config)
    yield from logging_options.profiling_problems(
        config.profiling, train_iters=training.train_iters, world_size=world_size
    )


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
        return  # `sharding_problems` reports that the format has no effect
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
    yield from sharding_problems(
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

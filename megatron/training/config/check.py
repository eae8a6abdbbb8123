# SPDX-License-Identifier: Apache-2.0
"""Check combinations of options before any process group exists.

The checks are pure functions of the config and the number of processes; they read no file. Checks
within a help group are in its module, checks across groups in a module of the feature. Checks of
the parallel layout (sizes, sharded weights, context parallelism) and of the model's blocks on their
ranks (attention, MLPs, recurrent mixers, experts) are here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.core.models.layer_pattern import DENSE, EXPERTS
from megatron.training.config import (
    Config,
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
from megatron.training.config.layer_pattern_options import (
    FLAG,
    blocks,
    expert_layers,
    has_attention,
    mtp_blocks,
)
from megatron.training.config.model_options import gate_problems, rope_scaling_problems
from megatron.training.config.parallel_options import sharding_problems


def check(config: Config, world_size: int) -> list[str]:
    """Return a message with a fix for each problem of a config on `world_size` processes."""
    config = layer_pattern_options.with_layers(config)
    if kind_problems := list(layer_pattern_options.attention_kind_problems(config)):
        return kind_problems  # the other checks need the blocks
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
            recurrent_problems(config),
            head_problems(config),
            inner_feature_problems(config),
            latent_attention_problems(config),
            query_key_norm_problems(config),
            expert_problems(config, world_size),
            rope_scaling_problems(config.position, config.rope_scaling),
            gate_problems(config.model, config.activations),
            learned_position_problems(config),
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


def head_problems(config: Config) -> Iterator[str]:
    """Yield a message for each problem of the sizes of attention heads."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not layer_pattern_options.has_attention(config):
        return  # `missing_block_problems` reports attention options of a model without attention
    if heads is None:
        yield "missing --num-attention-heads: give it"
        return
    latent_heads = config.attention.multi_latent_attention
    if heads % tp and not latent_heads:
        yield (
            f"--num-attention-heads {heads} is not a multiple of --tensor-model-parallel-size "
            f"{tp}: change one"
        )
    if model.group_query_attention and groups is None:
        yield "--group-query-attention needs --num-query-groups: give it"
    if model.group_query_attention and groups is not None and groups > 0:
        if heads % groups:
            yield (
                f"--num-attention-heads {heads} is not a multiple of --num-query-groups "
                f"{groups}: change one"
            )
        if groups % tp and tp % groups:
            yield (
                f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must "
                "divide the other"
            )
    if latent_heads:
        channels, flag = config.attention.qk_pos_emb_head_dim, "--qk-pos-emb-head-dim"
    else:
        channels, flag = model.kv_channels or model.hidden_size // heads, "--kv-channels"
    if not latent_heads and model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{heads}: change one or give --kv-channels"
        )
    rotated = int(channels * config.position.rotary_percent)
    if config.position.is_rotary and (rotated % 2 or rotated == 0):
        yield (
            f"{rotated} features per head would be rotated ({flag} {channels} x --rotary-percent "
            f"{config.position.rotary_percent}): the number must be even and above 0"
        )


def inner_feature_problems(config: Config) -> Iterator[str]:
    """Yield a message if the features of an MLP do not divide over the ranks."""
    ffn, tp = config.model.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if ffn is not None and ffn % tp:
        yield (
            f"--ffn-hidden-size {ffn} is not a multiple of --tensor-model-parallel-size {tp}: "
            "change one"
        )


def query_key_norm_problems(config: Config) -> Iterator[str]:
    """Yield a message if the norm of whole projections cannot take effect."""
    if config.attention.qk_layernorm_scope == "head":
        return
    flag = f"--qk-layernorm-scope {config.attention.qk_layernorm_scope}"
    if config.attention.multi_latent_attention or not config.attention.qk_layernorm:
        yield f"{flag} needs --qk-layernorm without --multi-latent-attention: change one"
    if config.model.normalization != "RMSNorm":
        yield f"{flag} needs --normalization RMSNorm: change one"


def latent_attention_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that latent attention cannot be combined with."""
    flag, model = "--multi-latent-attention", config.model
    if not config.attention.multi_latent_attention or model.num_attention_heads is None:
        return
    refused = {
        "--group-query-attention": (model.group_query_attention, "every head has its own keys"),
        "--attention-output-gate": (config.attention.attention_output_gate, "it has no gate"),
        "--add-qkv-bias": (config.attention.add_qkv_bias, "it has no biases"),
        "--add-attention-output-bias": (
            config.attention.add_attention_output_bias,
            "it has no biases",
        ),
        "--window-size": (config.attention.window_size, "it attends to all preceding tokens"),
        "--softmax-scale": (config.activations.softmax_scale, "its scale follows its features"),
        "--attn-logit-softcapping": (
            config.activations.attn_logit_softcapping,
            "its logits have no bound",
        ),
        "--no-rope-freq": (config.position.no_rope_freq, "all layers are rotary"),
        "--softmax-type learnable": (
            config.attention.softmax_type == "learnable",
            "it has no sinks",
        ),
    }
    for conflicting, (is_set, reason) in refused.items():
        if is_set:
            yield f"{conflicting} cannot be combined with {flag}: {reason}: drop one"
    if not model.disable_bias_linear:
        yield f"{flag} has no biases: add --disable-bias-linear (MLPs: --add-mlp-bias)"
    if not config.position.is_rotary:
        kind = config.position.position_embedding_type
        yield f"--position-embedding-type {kind} cannot be combined with {flag}: use rope or yarn"
    # Imported on demand: options of other models do not need to import torch.
    from megatron.training.config.model_table import part_config

    parallel = config.parallel
    latent = part_config(config, "attention")
    for problem in latent.problems(
        parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        engine=parallel.cp_comm_type,
    ):
        yield f"{flag}: {problem}"


def recurrent_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each problem of the shapes of recurrent blocks."""
    # Imported on demand: the model table imports this module's callers.
    from megatron.training.config.model_table import part_config, recurrent_shapes

    hybrid, parallel, width = config.hybrid, config.parallel, 2 * config.model.hidden_size
    short_conv = part_config(config, "short_conv")
    if short_conv is not None:
        yield from short_conv.problems(
            parallel.tensor_model_parallel_size, hidden_size=config.model.hidden_size
        )
    shapes = recurrent_shapes(config)
    if "Mamba-2" in shapes and hybrid.mamba_num_heads is None and width % hybrid.mamba_head_dim:
        yield (
            f"--mamba-head-dim {hybrid.mamba_head_dim} does not divide 2 x --hidden-size = "
            f"{width}: change one or give --mamba-num-heads"
        )
        return
    for name, shape in shapes.items():
        for problem in shape.problems(
            parallel.tensor_model_parallel_size,
            cp=parallel.context_parallel_size,
            mode=parallel.linear_cp_mode,
        ):
            yield f"{name}: {problem}"


def learned_position_problems(config: Config) -> Iterator[str]:
    """Yield a message if learned positions cannot be combined with the model."""
    learned = config.position.position_embedding_type == "learned_absolute"
    if learned and layer_pattern_options.mtp_num_layers(config):
        yield (
            "--position-embedding-type learned_absolute cannot be combined with multi-token "
            "prediction, which embeds tokens without positions: use rope, yarn or none"
        )


def expert_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message with a fix for each problem of experts on `world_size` processes."""
    yield from _layers(config)
    if config.experts.num_experts is None:
        return
    yield from _layout(config, world_size)
    yield from _switches(config)
    # Imported on demand: options of dense models do not need to import torch.
    from megatron.training.config.model_table import part_config

    parallel = config.parallel
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    moe = part_config(config, "moe")
    source = config.checkpoint
    # A run that starts from existing weights keeps their router, normalised or not.
    has_trained_router = (
        source.load_hf or source.pretrained_checkpoint or source.use_checkpoint_args
    )
    if moe.router.topk == 1 and moe.router.normalize and not has_trained_router:
        yield (
            "--moe-router-topk 1 with normalized scores gives every token the weight 1 "
            "whatever the router's logits, so the router gets no gradient: give "
            "--moe-router-pre-softmax"
        )
    for problem in moe.problems(tp=tp, etp=parallel.expert_tensor_parallel_size or tp, ep=ep):
        yield f"mixture of experts: {problem}"


def _layers(config: Config) -> Iterator[str]:
    """Yield a message if the options disagree about which layers have experts, or none has."""
    experts, pattern = config.experts, config.hybrid.hybrid_layer_pattern
    if experts.num_experts is None:
        if EXPERTS in (pattern or ""):
            yield f"{FLAG} {pattern} has layers with experts: give --num-experts"
        return
    try:
        expert_layers(config)
    except ValueError as error:
        yield str(error)
        return
    kinds = set(blocks(config) + mtp_blocks(config))
    if EXPERTS not in kinds:
        yield f"--num-experts {experts.num_experts}: no layer has experts: change which layers do"
    elif config.model.add_mlp_bias and config.model.disable_bias_linear and DENSE not in kinds:
        yield "--add-mlp-bias has no effect where all layers have experts: drop it"


def _layout(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each parallel size of experts that does not divide the processes."""
    parallel, pp = config.parallel, config.pipeline.pipeline_model_parallel_size
    ep = parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    total = etp * ep * pp
    product = (
        f"--expert-tensor-parallel-size {etp} x --expert-model-parallel-size {ep} x "
        f"--pipeline-model-parallel-size {pp} = {total}"
    )
    if world_size % total:
        yield (
            f"{product} does not divide the world of {world_size} processes: start a multiple of "
            f"{total} processes or lower it"
        )
        return
    shards = parallel.expert_tensor_parallel_num_weight_shards
    flag = f"--expert-tensor-parallel-num-weight-shards {shards}"
    if shards is not None and shards % etp:
        yield (
            f"{flag} is not a multiple of --expert-tensor-parallel-size {etp}: it counts the "
            f"shards over etp and gtp, use {-(-shards // etp) * etp}, for example"
        )
    elif world_size % (total * parallel.expert_gtp_size):
        yield (
            f"{flag}: {world_size} processes leave {world_size // total} expert data parallel "
            f"ranks, which do not divide by {shards} / {etp} = {parallel.expert_gtp_size}: use a "
            "divisor"
        )
    instances, edp = config.data_parallel.num_distributed_optimizer_instances, world_size // total
    if edp % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the expert data "
            f"parallel size {world_size} / ({product}) = {edp}: use a divisor of {edp}"
        )


def _switches(config: Config) -> Iterator[str]:
    """Yield a message for options that cannot be combined with experts, or with each other."""
    chosen, graphs = config.experts, config.execution.cuda_graph_impl
    if not config.model.disable_bias_linear:
        yield (
            "experts have no biases: add --disable-bias-linear (attention keeps its own with "
            "--add-qkv-bias and --add-attention-output-bias, other MLPs with --add-mlp-bias)"
        )
    ep = config.parallel.expert_model_parallel_size
    etp = config.parallel.expert_tensor_parallel_size or config.parallel.tensor_model_parallel_size
    factor = config.parallel.moe_expert_rank_capacity_factor
    if graphs != "none" and ep * etp > 1 and factor is None:
        yield (
            f"experts on {ep * etp} ranks with --cuda-graph-impl {graphs}: the host reads how many "
            "tokens each rank gets, which a graph cannot capture: add "
            "--moe-expert-rank-capacity-factor"
        )
    if factor is not None and ep * etp == 1:
        yield (
            f"--moe-expert-rank-capacity-factor {factor:g} has no effect: every rank has all "
            "experts: drop it or give --expert-model-parallel-size"
        )
    kind, coefficient = chosen.moe_router_load_balancing_type, chosen.moe_aux_loss_coeff
    if kind == "none" and coefficient:
        yield (
            f"--moe-aux-loss-coeff {coefficient} has no effect with "
            "--moe-router-load-balancing-type none: drop one"
        )

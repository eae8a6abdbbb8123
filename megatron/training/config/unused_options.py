# SPDX-License-Identifier: Apache-2.0
"""Checks between the options of one feature and the rest of a config.

The features are context parallelism, TransformerEngine, CUDA graphs, attention, experts and
recurrent mixers. Other checks report options for blocks that the layer pattern does not contain,
and options that have no effect without another option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.extensions import transformer_engine_problem
from megatron.core.models.layer_pattern import ATTENTIONS, DENSE, EXPERTS, FEED_FORWARD
from megatron.training.config.layer_pattern_options import (
    FLAG,
    blocks,
    expert_layers,
    has,
    has_attention,
    is_hybrid,
    is_recurrent,
    mtp_blocks,
    mtp_num_layers,
    written,
)

if TYPE_CHECKING:
    from megatron.training.config import Config

DOCUMENTS = "--reset-attention-mask"


def cuda_graph_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that CUDA graphs cannot be combined with."""
    chosen = config.execution
    if chosen.cuda_graph_impl == "none":
        return
    flag = f"--cuda-graph-impl {chosen.cuda_graph_impl}"
    cp = config.parallel.context_parallel_size
    packed = config.data.sft or config.data.reset_attention_mask
    if config.training.device == "cpu":
        yield f"{flag} needs a GPU: drop it or --device cpu"
    size = config.pipeline.pipeline_model_parallel_size
    for conflicting, on, reason in (
        (
            f"--pipeline-model-parallel-size {size}",
            size > 1,
            "sends and receives between stages, which a graph cannot capture",
        ),
        (
            f"--context-parallel-size {cp} with {'--sft' if config.data.sft else DOCUMENTS}",
            cp > 1 and packed,
            "attends block by block at document boundaries, with other blocks in every step",
        ),
        (
            f"recurrent blocks with {'--sft' if config.data.sft else DOCUMENTS}",
            is_recurrent(config) and packed,
            "process sequences of other lengths in every step",
        ),
        (
            "--step-batch-size-schedule",
            config.training.step_batch_size_schedule is not None,
            "changes the number of microbatches, and the graph has a fixed number",
        ),
        (
            "--rampup-batch-size",
            config.training.rampup_batch_size is not None,
            "changes the number of microbatches, and the graph has a fixed number",
        ),
        (
            "--check-weight-gather",
            config.data_parallel.check_weight_gather,
            "compares the order of gathers on the host in every step",
        ),
        (
            "--check-collectives",
            config.failures.check_collectives,
            "does not see the collectives of a replayed step",
        ),
        (
            "--log-straggler",
            config.failures.log_straggler,
            "does not see how long a replayed step waits",
        ),
    ):
        if on:
            yield f"{conflicting} {reason}: drop it or {flag}"
    steps, iterations = chosen.cuda_graph_warmup_steps, config.training.train_iters
    if iterations is not None and steps >= iterations:
        yield (
            f"--cuda-graph-warmup-steps {steps} is not below --train-iters {iterations}, so that "
            "no graph is captured: lower it"
        )


#: Attention options: field names by section. An empty tuple means all fields of the section, except
#: position_embedding_type, which `layer_pattern.problems` checks.
_ATTENTION_FIELDS: dict[str, tuple[str, ...]] = {
    "model": (
        "num_attention_heads",
        "group_query_attention",
        "num_query_groups",
        "kv_channels",
        "add_qkv_bias",
        "add_attention_output_bias",
    ),
    "attention": (),
    "position": (),
    "parallel": ("cp_comm_type", "context_parallel_cut", "attention_backend"),
}

#: (symbols, name of the block, fields by section): a pattern needs one of the symbols for the
#: fields to take effect.
_BLOCKS: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
    (ATTENTIONS, "attention", _ATTENTION_FIELDS),
    (FEED_FORWARD, "MLP", {"model": ("swiglu", "squared_relu", "add_mlp_bias")}),
)


def missing_block_problems(config: Config) -> Iterator[str]:
    """Yield a message for each option whose block does not occur in the layer pattern."""
    pattern = written(config)
    if pattern is None or not is_hybrid(config):
        return
    for symbols, noun, fields in _BLOCKS:
        if not any(has(config, symbol) for symbol in symbols):
            for flag in _set_flags(config, fields):
                yield f"{flag} has no effect: {FLAG} {pattern.main} has no {noun}: drop it"


def _set_flags(config: Config, fields: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the flags, with values, of those fields that differ from their defaults and are not
    off."""
    for section, names in fields.items():
        holder: Any = vars(config)[section]
        for field in dataclasses.fields(holder):
            value = vars(holder)[field.name]
            if (names and field.name not in names) or value == field.default:
                continue
            if field.name == "position_embedding_type" or (
                field.name == "attention_dropout" and value == 0.0
            ):
                continue
            flag = f"--{field.name.replace('_', '-')}"
            yield flag if value is True else f"{flag} {value}"


def _dependents(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield (section, prefix of field names, whether the switch is on, switch) for dependent
    options."""
    failures, checkpoint, profiling = config.failures, config.checkpoint, config.profiling
    if has_attention(config):  # else `missing_block_problems` reports them
        yield from _attention_dependents(config)
    yield from _expert_dependents(config)
    yield from _recurrent_dependents(config)
    graphs = config.execution.cuda_graph_impl != "none"
    yield config.execution, "cuda_graph_warmup_", graphs, "--cuda-graph-impl full_iteration"
    quantized, outer = config.quantization, config.quantization.first_last_layers_bf16
    is_quantized = quantized.flag is not None
    yield quantized, "fp8_recipe", quantized.fp8_format is not None, "--fp8-format"
    yield quantized, "first_last_", is_quantized, "--fp8-format or --fp4-format"
    for start in ("num_layers_at_start_", "num_layers_at_end_"):
        yield quantized, start, outer, "--first-last-layers-bf16"
    delayed = quantized.fp8_format is not None and quantized.fp8_recipe == "delayed"
    for start in ("fp8_margin", "fp8_amax_"):
        yield quantized, start, delayed, "--fp8-format and --fp8-recipe delayed"
    is_16_bit = config.training.bf16 or config.training.fp16
    yield config.execution, "cpu_matmul_", is_16_bit, "--bf16 or --fp16"
    spikes = failures.loss_spike_factor is not None
    yield failures, "loss_spike_window", spikes, "--loss-spike-factor"
    stats = failures.rerun_mode == "report_determinism_stats"
    yield failures, "rerun_interval", stats, "--rerun-mode report_determinism_stats"
    yield failures, "straggler_factor", failures.log_straggler, "--log-straggler"
    decoupled = config.schedule.decoupled_lr is not None
    yield config.schedule, "decoupled_min_", decoupled, "--decoupled-lr"
    optimizer = config.optimizer
    yield config.muon, "muon_", optimizer.optimizer == "muon", "--optimizer muon"
    offloads = optimizer.optimizer_cpu_offload
    yield optimizer, "optimizer_offload_fraction", offloads, "--optimizer-cpu-offload"
    has_mtp = mtp_num_layers(config) > 0
    yield config.training, "mtp_loss_", has_mtp, "--mtp-num-layers"
    loads = checkpoint.load is not None
    for start in ("allow_data_change", "reorder_samples"):
        yield config.data, start, loads, "--load"
    starts_from_weights = loads or checkpoint.pretrained_checkpoint is not None
    yield checkpoint, "finetune", starts_from_weights, "--load or --pretrained-checkpoint"
    resumes = loads and not checkpoint.finetune
    yield checkpoint, "schedule_on_load", resumes, "--load, or with --finetune"
    yield profiling, "profile_step_", profiling.profile, "--profile"
    watched = profiling.profile or profiling.record_memory_history
    yield profiling, "profile_ranks", watched, "--profile or --record-memory-history"


def _attention_dependents(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield the rows of `_dependents` for attention options."""
    position = config.position
    yield position, "rope_scaling_", position.use_rope_scaling, "--use-rope-scaling"
    yarn = position.position_embedding_type == "yarn"
    yield position, "yarn_", yarn, "--position-embedding-type yarn"
    for start in ("rotary_", "use_rope_"):
        yield position, start, position.is_rotary, "--position-embedding-type rope or yarn"
    latent = config.attention.multi_latent_attention
    for start in ("q_", "kv_", "qk_head_", "qk_pos_", "v_"):
        yield config.attention, start, latent, "--multi-latent-attention"
    latent_yarn_flags = "--multi-latent-attention with --position-embedding-type yarn"
    yield config.attention, "mscale", latent and yarn, latent_yarn_flags
    cuts = config.parallel.context_parallel_size > 1
    yield config.parallel, "cp_comm_type", cuts, "--context-parallel-size above 1"
    packed = config.data.sft or config.data.reset_attention_mask
    documents = "--reset-attention-mask or --sft" if cuts else "--context-parallel-size above 1"
    yield config.parallel, "context_parallel_cut", cuts and packed, documents


def _expert_dependents(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield the rows of `_dependents` for expert options."""
    experts, parallel = config.experts, config.parallel
    on = experts.num_experts is not None
    for section, start in ((experts, "moe_"), (parallel, "moe_"), (parallel, "expert_model_")):
        yield section, start, on, "--num-experts"
    if parallel.expert_tensor_parallel_size != 1:  # 1 is also true without experts
        yield parallel, "expert_tensor_parallel_size", on, "--num-experts"
    yield parallel, "expert_tensor_parallel_num_", on, "--num-experts"
    if on:
        shares = experts.moe_shared_expert_intermediate_size is not None
        switch = "--moe-shared-expert-intermediate-size"
        yield parallel, "moe_shared_expert_overlap", shares, switch
        drops = experts.moe_expert_capacity_factor is not None
        yield experts, "moe_token_drop_policy", drops, "--moe-expert-capacity-factor"
        biased = experts.moe_router_enable_expert_bias
        yield experts, "moe_router_bias_", biased, "--moe-router-enable-expert-bias"


def _recurrent_dependents(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield the rows of `_dependents` for recurrent blocks."""
    hybrid, parallel, flag = config.hybrid, config.parallel, "--hybrid-layer-pattern"
    has_recurrent, has_cp = is_recurrent(config), parallel.context_parallel_size > 1
    delta_nets, mamba = (symbol in (hybrid.hybrid_layer_pattern or "") for symbol in "GM")
    yield hybrid, "linear_", delta_nets, f"G in {flag}"
    for start in ("mamba_", "add_mamba_"):
        yield hybrid, start, mamba, f"M in {flag}"
    yield parallel, "linear_cp_", has_recurrent, f"G or M in {flag}"
    yield config.execution, "keep_recurrent_", has_recurrent, f"G or M in {flag}"
    if has_recurrent:
        yield parallel, "linear_cp_", has_cp, "--context-parallel-size above 1"


def missing_switches(config: Config) -> Iterator[str]:
    """Yield a message for each non-default option that has no effect without its switch."""
    for section, start, on, switch in _dependents(config):
        for field in () if on else dataclasses.fields(section):  # type: ignore[arg-type]
            if field.name.startswith(start) and vars(section)[field.name] != field.default:
                off = "no-" if field.default is True else ""
                flag = off + field.name.replace("_", "-")
                yield f"--{flag} has no effect without {switch}: add that"


def ineffective(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each accepted option that has no effect with the other options, and the reason.

    Args:
        config: the config, resolved or not.
    """
    model, checkpoint, parallel = config.model, config.checkpoint, config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel", "--tensor-model-parallel-size is 1: nothing is sharded over it"
    if checkpoint.save is None and checkpoint.save_interval is not None:
        yield f"--save-interval {checkpoint.save_interval}", "nothing is saved without --save"
    if checkpoint.save is None and not checkpoint.save_optim:
        yield "--no-save-optim", "nothing is saved without --save"
    if (iterations := config.evaluation.eval_iters) < 0:
        yield f"--eval-iters {iterations}", "there is no validation, as with 0"
    groups = model.num_query_groups
    if not model.group_query_attention and groups not in (None, model.num_attention_heads):
        reason = "without --group-query-attention every query head has a key and value head"
        yield f"--num-query-groups {groups}", reason
    if config.attention.multi_latent_attention and model.kv_channels is not None:
        reason = "latent attention has the sizes of --qk-head-dim and --v-head-dim"
        yield f"--kv-channels {model.kv_channels}", reason
    yield from _ineffective_of_feed_forward(config)


def _ineffective_of_feed_forward(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the rows of `ineffective` for MLPs and experts."""
    width, experts = config.model.ffn_hidden_size, config.experts
    derived = dataclasses.replace(config.model, ffn_hidden_size=None).inner_features
    # In a resolved config, the widths may be derived rather than the user's.
    if width not in (None, derived, experts.moe_ffn_hidden_size):
        if experts.num_experts is None:
            if is_hybrid(config) and not has(config, DENSE):
                yield f"--ffn-hidden-size {width}", "no layer has an MLP"
        elif experts.moe_ffn_hidden_size is not None and DENSE not in _feed_forward(config):
            reason = "no layer has an MLP, and experts have their --moe-ffn-hidden-size"
            yield f"--ffn-hidden-size {width}", reason
    kind = experts.moe_router_load_balancing_type
    if (
        experts.num_experts is not None
        and kind == "seq_aux_loss"
        and not experts.moe_aux_loss_coeff
    ):
        yield f"--moe-router-load-balancing-type {kind}", "--moe-aux-loss-coeff is 0"


def _feed_forward(config: Config) -> set[str]:
    """Return the kinds of blocks of the model and of its multi-token prediction layers."""
    return set(blocks(config) + mtp_blocks(config))


def profiling_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for profiling of ranks or iterations that the run does not have."""
    profiling, iterations = config.profiling, config.training.train_iters
    is_profiled = profiling.profile or profiling.record_memory_history
    unknown_ranks = [rank for rank in profiling.profile_ranks if rank >= world_size]
    if is_profiled and unknown_ranks:
        yield (
            f"--profile-ranks {unknown_ranks[0]}: there are ranks 0 to {world_size - 1}: name one "
            "of them"
        )
    start = profiling.profile_step_start
    if profiling.profile and iterations is not None and start >= iterations:
        yield f"--profile-step-start {start} is not below --train-iters {iterations}: lower it"


def attention_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that latent attention cannot be combined with."""
    flag, model = "--multi-latent-attention", config.model
    if not config.attention.multi_latent_attention or model.num_attention_heads is None:
        return
    refused = {
        "--group-query-attention": (model.group_query_attention, "every head has its own keys"),
        "--attention-output-gate": (config.attention.attention_output_gate, "it has no gate"),
        "--add-qkv-bias": (model.add_qkv_bias, "it has no biases"),
        "--add-attention-output-bias": (model.add_attention_output_bias, "it has no biases"),
        "--window-size": (config.attention.window_size, "it attends to all preceding tokens"),
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


def hybrid_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each problem of the shapes of recurrent blocks."""
    # Imported on demand: the model table imports this module's callers.
    from megatron.training.config.model_table import recurrent_shapes

    hybrid, parallel, width = config.hybrid, config.parallel, 2 * config.model.hidden_size
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


def machine_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each requirement that this machine does not meet."""
    if config.parallel.transformer_impl == "transformer_engine":
        problem = transformer_engine_problem()
        if problem is not None:
            flag = "--transformer-impl transformer_engine"
            yield f"{flag}: {problem}, or take --transformer-impl local"


def transformer_engine_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that TransformerEngine does not support."""
    if config.parallel.transformer_impl != "transformer_engine":
        return
    flag = "--transformer-impl transformer_engine"
    chosen = config.execution
    if chosen.cuda_graph_impl != "none":
        yield f"{flag} cannot be captured by --cuda-graph-impl {chosen.cuda_graph_impl}: drop one"


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

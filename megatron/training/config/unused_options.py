# SPDX-License-Identifier: Apache-2.0
"""Options without effect: for blocks that the model does not have, or without their switch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.models.layer_pattern import ATTENTIONS, DENSE, FEED_FORWARD
from megatron.training.config.data_options import tiktoken_flags
from megatron.training.config.layer_pattern_options import (
    FLAG,
    blocks,
    has,
    has_attention,
    is_hybrid,
    mtp_blocks,
    mtp_num_layers,
    written,
)

if TYPE_CHECKING:
    from megatron.training.config import Config

#: Attention options: field names by section. An empty tuple means all fields of the section, except
#: position_embedding_type, which `layer_pattern_options.problems` checks.
_ATTENTION_FIELDS: dict[str, tuple[str, ...]] = {
    "model": (
        "num_attention_heads",
        "group_query_attention",
        "num_query_groups",
        "kv_channels",
    ),
    "attention": (),
    "activations": ("softmax_scale", "attn_logit_softcapping"),
    "position": (),
    "rope_scaling": (),
    "parallel": ("cp_comm_type", "context_parallel_cut", "attention_backend"),
}

#: (symbols, name of the block, fields by section): a pattern needs one of the symbols for the
#: fields to take effect.
_BLOCKS: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
    (ATTENTIONS, "attention", _ATTENTION_FIELDS),
    (
        FEED_FORWARD,
        "MLP",
        {
            "model": ("swiglu", "squared_relu", "openai_gelu", "add_mlp_bias"),
            "activations": (
                "quick_geglu",
                "geglu",
                "glu_linear_offset",
                "activation_func_clamp_value",
            ),
        },
    ),
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
    scaled = config.activations.embedding_multiplier != 1.0
    yield config.activations, "round_embedding_", scaled, "--embedding-multiplier"
    layer_norm = config.model.normalization == "LayerNorm"
    yield config.activations, "layernorm_bias", layer_norm, "--normalization LayerNorm"
    factors = config.activations.mlp_output_multiplier, config.activations.mlp_gate_multiplier
    has_mlp = factors == (1.0, 1.0) or DENSE in _feed_forward(config)
    yield config.activations, "mlp_output_", has_mlp, "a layer with an MLP"
    gates = config.model.swiglu, config.activations.geglu, config.activations.quick_geglu
    gated = has_mlp and any(gates)
    yield config.activations, "mlp_gate_", gated, "a layer with a gated MLP"
    attends = has_attention(config)
    yield config.activations, "attention_output_", attends, "attention in --hybrid-layer-pattern"
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
    scaling = config.rope_scaling
    yield scaling, "rope_scaling_", scaling.use_rope_scaling, "--use-rope-scaling"
    yarn = position.position_embedding_type == "yarn"
    for start in ("yarn_", "no_yarn_"):
        yield scaling, start, yarn, "--position-embedding-type yarn"
    for start in ("rotary_", "use_rope_"):
        yield scaling, start, position.is_rotary, "--position-embedding-type rope or yarn"
    for start in ("rotary_", "no_rope_", "window_rotary_", "window_rope_"):
        yield position, start, position.is_rotary, "--position-embedding-type rope or yarn"
    scales = position.rotary_query_scale_beta > 0
    yield position, "rotary_query_scale_length", scales, "--rotary-query-scale-beta"
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
    expert_options = ((experts, "moe_"), (config.activations, "moe_"), (parallel, "moe_"))
    for section, start in (*expert_options, (parallel, "expert_model_")):
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
    has_cp = parallel.context_parallel_size > 1
    delta_nets, mamba, convs = (symbol in (hybrid.hybrid_layer_pattern or "") for symbol in "GMC")
    yield hybrid, "linear_", delta_nets, f"G in {flag}"
    for start in ("mamba_", "add_mamba_"):
        yield hybrid, start, mamba, f"M in {flag}"
    yield config.activations, "mamba_output_", mamba, f"M in {flag}"
    for start in ("short_conv_", "add_short_conv_"):
        yield hybrid, start, convs, f"C in {flag}"
    yield parallel, "linear_cp_", delta_nets or mamba, f"G or M in {flag}"
    yield config.execution, "keep_recurrent_", delta_nets or mamba, f"G or M in {flag}"
    if delta_nets or mamba:
        yield parallel, "linear_cp_", has_cp, "--context-parallel-size above 1"


def missing_switch_problems(config: Config) -> Iterator[str]:
    """Yield a message for each non-default option that has no effect without its switch."""
    for section, start, on, switch in _dependents(config):
        for field in () if on else dataclasses.fields(section):  # type: ignore[arg-type]
            if field.name.startswith(start) and vars(section)[field.name] != field.default:
                off = "no-" if field.default is True else ""
                flag = off + field.name.replace("_", "-")
                yield f"--{flag} has no effect without {switch}: add that"


def _ineffective(config: Config) -> Iterator[tuple[str, str]]:
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
    yield from _ineffective_feed_forward(config)


def _ineffective_feed_forward(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the rows of `_ineffective` for MLPs and experts."""
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


def without_effect(config: Config, resolved: Config) -> list[str]:
    """Return a line for each group of options that have no effect in combination with the others.

    Args:
        config: the config before derived fields are filled in.
        resolved: the same config, resolved.
    """
    ineffective_flags = list(_ineffective(config))
    kind, unused = resolved.tokenizer.tokenizer_type, tiktoken_flags(config.tokenizer)
    if unused and kind != "tiktoken":
        tokenizer = "no tokenizer is given" if kind is None else f"--tokenizer-type is {kind}"
        ineffective_flags.append((" ".join(unused), f"{tokenizer}, not tiktoken"))
    return [f"no effect here: {flag} ({reason})" for flag, reason in ineffective_flags]

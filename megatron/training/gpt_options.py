# SPDX-License-Identifier: Apache-2.0
"""From a run's options to the configs of the core: the model, the optimizer and their schedules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from megatron.core.backend import LOCAL, Backend
from megatron.core.context_parallel.choice import AttentionShape
from megatron.core.distributed import DataParallelConfig
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.pattern import DENSE
from megatron.core.models.stages import StageSplit
from megatron.core.ops.rope import RopeScaling
from megatron.core.optimizer import MuonConfig, OptimizerConfig
from megatron.core.optimizer.loss_scaler import (
    ConstantLossScaler,
    DynamicLossScaler,
    DynamicLossScalerConfig,
    LossScaler,
)
from megatron.core.optimizer.schedule import (
    DecayStyle,
    LearningRateSchedule,
    WeightDecaySchedule,
)
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    NormConfig,
    Recompute,
    RopeConfig,
)
from megatron.training.config import Config
from megatron.training.config.expert_layers import expert_layers
from megatron.training.config.layer_pattern import depths, has, has_attention, is_hybrid
from megatron.training.config.resolve import Run
from megatron.training.config.stages import schedule_name, stage_split
from megatron.training.config.values import name_factors
from megatron.training.expert_options import (
    activation,
    latent_config,
    moe_config,
    yarn_attention_factor,
)
from megatron.training.hybrid_options import hybrid_fields


def gpt_config(config: Config, vocab_size: int) -> GPTConfig:
    """Return the model that resolved options describe.

    Args:
        vocab_size: without padding.
    """
    model = config.model
    return GPTConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=vocab_size,
        attention=attention_config(config),
        mlp=_mlp(config),
        norm=NormConfig(
            kind=model.normalization,
            epsilon=model.norm_epsilon,
            zero_centered=model.apply_layernorm_1p,
        ),
        rope=_rope(config),
        tied=not model.untie_embeddings_and_output_weights,
        hidden_dropout=model.hidden_dropout,
        init_std=model.init_method_std,
        moe=moe_config(config),
        ffn_pattern=expert_layers(config),
        mtp_num_layers=depths(config),
        mtp_loss_factor=config.training.mtp_loss_scaling_factor,
        **hybrid_fields(config),
    )


def _mlp(config: Config) -> MLPConfig | None:
    """Return the shape of MLPs; None for a hybrid that has none."""
    model = config.model
    if is_hybrid(config) and not has(config, DENSE):
        return None
    assert model.ffn_hidden_size is not None, "the config must be resolved"
    return MLPConfig(
        ffn_hidden_size=model.ffn_hidden_size,
        gated=model.swiglu,
        activation=activation(config),
        bias=not model.disable_bias_linear or model.add_mlp_bias,
    )


def attention_config(config: Config) -> AttentionConfig | LatentAttentionConfig | None:
    """Return the shape of attention that resolved options describe; None where there is none."""
    model, chosen = config.model, config.attention
    if not has_attention(config):
        return None
    if chosen.multi_latent_attention:
        return latent_config(config)
    assert model.num_query_groups is not None, "the config must be resolved"
    assert model.num_attention_heads is not None
    assert model.kv_channels is not None
    biases = not model.disable_bias_linear
    return AttentionConfig(
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        qkv_bias=biases or model.add_qkv_bias,
        output_bias=biases or model.add_attention_output_bias,
        qk_norm=chosen.qk_layernorm,
        dropout=chosen.attention_dropout,
        window=chosen.window_size,
        sinks=chosen.softmax_type == "learnable",
        output_gate=chosen.attention_output_gate,
    )


def _rope(config: Config) -> RopeConfig | None:
    position = config.position
    if position.position_embedding_type == "none":
        return None
    scaling = None
    if position.rotary_seq_len_interpolation_factor is not None:
        scaling = RopeScaling(kind="linear", factor=position.rotary_seq_len_interpolation_factor)
    elif position.use_rope_scaling:
        scaling = RopeScaling(
            kind="llama3",
            factor=position.rope_scaling_factor,
            low_freq_factor=position.rope_scaling_low_freq_factor,
            high_freq_factor=position.rope_scaling_high_freq_factor,
            original_max_position=position.rope_scaling_original_max_position,
        )
    elif position.position_embedding_type == "yarn":
        scaling = RopeScaling(
            kind="yarn",
            factor=position.yarn_rotary_scaling_factor,
            original_max_position=position.yarn_original_max_position_embeddings,
            beta_fast=position.yarn_beta_fast,
            beta_slow=position.yarn_beta_slow,
            attention_factor=yarn_attention_factor(config),
        )
    return RopeConfig(
        base=position.rotary_base,
        percent=position.rotary_percent,
        interleaved=position.rotary_interleaved,
        scaling=scaling,
    )


def attention_shape(run: Run) -> AttentionShape | None:
    """Return what one rank attends of a microbatch; None without attention."""
    parallel, training = run.config.parallel, run.config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    attention = attention_config(run.config)
    if attention is None:
        return None
    if isinstance(attention, AttentionConfig):
        groups, features = attention.num_query_groups, attention.kv_channels
    else:  # values are as wide as keys on their way
        keys = attention.nope_channels + attention.rope_channels
        groups, features = attention.num_attention_heads, max(keys, attention.value_channels)
    return AttentionShape(
        tokens=training.seq_length // cp,
        rows=training.micro_batch_size,
        heads=attention.num_attention_heads // tp,
        groups=max(1, groups // tp),
        features=features,
        element_bytes=weight_dtype(run.config).itemsize,
    )


def weight_dtype(config: Config) -> torch.dtype:
    """Return the dtype of weights and activations."""
    if config.training.bf16:
        return torch.bfloat16
    return torch.float16 if config.training.fp16 else torch.float32


def backend(config: Config) -> Backend:
    """Return the implementations that the model is built from."""
    kernel = config.parallel.attention_backend
    chosen = replace(
        LOCAL,
        context_engine=config.parallel.cp_comm_type,
        linear_mode=config.parallel.linear_cp_mode,
        linear_splits=config.parallel.linear_recurrence_splits,
        dispatcher=config.parallel.moe_token_dispatcher_type,
        overlap_shared_expert=config.parallel.moe_shared_expert_overlap,
    )
    if kernel == "auto":
        return chosen
    return replace(chosen, attention=partial(LOCAL.attention, implementation=kernel))


def recompute(config: Config) -> Recompute:
    """Return what is computed again in backward."""
    chosen = config.execution
    return Recompute(
        granularity=chosen.recompute_granularity,
        method=chosen.recompute_method,
        num_layers=chosen.recompute_num_layers,
    )


def split(config: Config) -> StageSplit | None:
    """Return which layers each pipeline stage has; None where there is one stage."""
    return stage_split(config) if config.pipeline.pipeline_model_parallel_size > 1 else None


def pipeline_order(config: Config) -> dict[str, Any]:
    """Return in which order several stages work, as arguments of `PipelineForwardBackward`.

    Where whole layers are recomputed, their weight gradients follow at once: until then all that
    has been recomputed is kept.
    """
    group = config.pipeline.microbatch_group_size_per_virtual_pipeline_stage
    name = schedule_name(config)
    at_once = name == "zb-h1" and config.execution.recompute_granularity == "full"
    return {"schedule": name, "group_size": group, "weight_delay": 0 if at_once else None}


def early_gather(config: Config) -> tuple[bool, str | None]:
    """Return whether the first gathers of a step start at the end of the optimizer step, and where
    that was not to be had though it was asked for, a line that says why."""
    chosen = config.data_parallel
    wanted = chosen.fsdp_all_gather_in_start_param_sync
    if config.execution.cuda_graph_impl == "none" or not wanted:
        return wanted, None
    if not chosen.overlap_param_gather:
        return False, None
    return False, (
        "--no-fsdp-all-gather-in-start-param-sync is set, as --cuda-graph-impl "
        f"{config.execution.cuda_graph_impl} cannot wait for gathers that start outside a step"
    )


def data_parallel_config(config: Config) -> DataParallelConfig:
    """Return what the data-parallel engine cuts and when it communicates."""
    chosen = config.data_parallel
    return DataParallelConfig(
        strategy=chosen.strategy,
        outer=chosen.outer_dp_sharding_strategy,
        overlap_grad_reduce=chosen.overlap_grad_reduce,
        overlap_param_gather=chosen.overlap_param_gather,
        fsdp_all_gather_in_start_param_sync=early_gather(config)[0],
        granularity=chosen.param_gather_granularity,
        prefetch_bytes=chosen.param_gather_prefetch_bytes,
        grad_dtype=torch.bfloat16 if chosen.grad_reduce_in_bf16 else torch.float32,
        fp32_accumulation=chosen.reduce_scatter_with_fp32_accumulation,
        debug=chosen.check_weight_gather,
    )


def optimizer_config(config: Config) -> OptimizerConfig:
    """Return the settings of the update."""
    chosen = config.optimizer
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return OptimizerConfig(
        kind=chosen.optimizer,
        adam_beta1=chosen.adam_beta1,
        adam_beta2=chosen.adam_beta2,
        adam_eps=chosen.adam_eps,
        exp_avg_dtype=dtypes[chosen.exp_avg_dtype],
        exp_avg_sq_dtype=dtypes[chosen.exp_avg_sq_dtype],
        lr_factors=_lr_factors(config),
        decay_factors=name_factors("--weight-decay-group", chosen.weight_decay_group),
        sgd_momentum=chosen.sgd_momentum,
        muon=_muon_config(config),
        clip_grad=chosen.clip_grad,
        count_zeros=config.logging.log_num_zeros_in_grad,
        offload_fraction=chosen.optimizer_offload_fraction if chosen.optimizer_cpu_offload else 0.0,
    )


def _muon_config(config: Config) -> MuonConfig:
    chosen = config.muon
    return MuonConfig(
        momentum=chosen.muon_momentum,
        nesterov=chosen.muon_use_nesterov,
        num_ns_steps=chosen.muon_num_ns_steps,
        scale_mode=chosen.muon_scale_mode,
        extra_scale_factor=chosen.muon_extra_scale_factor,
        split_fused=chosen.muon_split_qkv,
        adam_names=chosen.muon_adam_weights or (),
    )


def _lr_factors(config: Config) -> tuple[tuple[str, float], ...]:
    """Return the factors of --lr-group, then those that --decoupled-lr means."""
    found = dict(name_factors("--lr-group", config.optimizer.lr_group))
    if config.schedule.decoupled_lr is not None:
        own_head = config.model.untie_embeddings_and_output_weights
        for name in ("embedding.weight", *(("head.weight",) if own_head else ())):
            found.setdefault(name, config.schedule.decoupled_lr / config.schedule.lr)
    return tuple(found.items())


def loss_scaler(config: Config) -> LossScaler:
    """Return the loss scaler: 1 without fp16."""
    scale = config.loss_scale
    if not config.training.fp16:
        return ConstantLossScaler()
    if scale.loss_scale is not None:
        return ConstantLossScaler(scale.loss_scale)
    return DynamicLossScaler(
        DynamicLossScalerConfig(
            initial_scale=scale.initial_loss_scale,
            min_scale=scale.min_loss_scale,
            growth_interval=scale.loss_scale_window,
            hysteresis=scale.hysteresis,
        )
    )


def learning_rate_schedule(run: Run) -> LearningRateSchedule:
    """Return the learning rate as a function of the samples of applied updates."""
    schedule = run.config.schedule
    return LearningRateSchedule(
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        init_lr=schedule.lr_warmup_init,
        warmup_samples=run.warmup_samples,
        decay_samples=run.decay_samples,
        style=cast(DecayStyle, schedule.lr_decay_style.lower()),
        wsd_decay_samples=run.wsd_decay_samples or None,
        wsd_decay_style=schedule.lr_wsd_decay_style,
    )


def weight_decay_schedule(run: Run) -> WeightDecaySchedule:
    """Return weight decay as a function of the samples of applied updates."""
    optimizer = run.config.optimizer
    assert optimizer.start_weight_decay is not None, "the config must be resolved"
    assert optimizer.end_weight_decay is not None
    return WeightDecaySchedule(
        start=optimizer.start_weight_decay,
        end=optimizer.end_weight_decay,
        ramp_samples=run.train_samples,
        style=optimizer.weight_decay_incr_style,
    )

# SPDX-License-Identifier: Apache-2.0
"""Core configs built from a run's options: data parallelism, optimizer, schedules, recomputation,
and the dtype of matrix products on a CPU.

The model's config comes from the table in config/model_table.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch

from megatron.core.backend import LOCAL, Backend
from megatron.core.context_parallel.attention import AttentionShape
from megatron.core.dist_checkpointing import Coordinator
from megatron.core.distributed import DataParallelConfig
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.ops.backend_choice import cpu_bf16_speedup, measured_matmul_dtype
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
from megatron.core.transformer import AttentionConfig, Recompute
from megatron.training.config import Config
from megatron.training.config.implementation_checks import quantization
from megatron.training.config.model_table import part_config
from megatron.training.config.resolve import ResolvedRun
from megatron.training.config.stages import schedule_name, stage_split
from megatron.training.config.values import name_factors


def attention_shape(run: ResolvedRun) -> AttentionShape | None:
    """Return the shape of one rank's attention per microbatch; None without attention."""
    parallel, training = run.config.parallel, run.config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    attention = part_config(run.config, "attention")
    if attention is None:
        return None
    if isinstance(attention, AttentionConfig):
        groups, features = attention.num_query_groups, attention.kv_channels
    else:  # exchanged values are padded to the width of keys
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
        LOCAL if config.parallel.transformer_impl == "local" else _transformer_engine(config),
        context_engine=config.parallel.cp_comm_type,
        linear_mode=config.parallel.linear_cp_mode,
        keep_recurrent_states=config.execution.keep_recurrent_states,
        dispatcher=config.parallel.moe_token_dispatcher_type,
        expert_rank_capacity_factor=config.parallel.moe_expert_rank_capacity_factor,
        overlap_shared_expert=config.parallel.moe_shared_expert_overlap,
        gtp_opt_in_modules=config.parallel.gtp_opt_in_modules or (),
    )
    if kernel == "auto":
        return chosen
    local = partial(LOCAL.attention, implementation=kernel)
    return replace(chosen, attention=local, attention_layer=None)


def _transformer_engine(config: Config) -> Backend:
    # Imported on demand: it is an extra, and takes seconds.
    from megatron.core.extensions import transformer_engine

    return transformer_engine.backend(LOCAL, quantization(config))


def recompute(config: Config) -> Recompute:
    """Return the activation recomputation settings."""
    chosen = config.execution
    return Recompute(
        granularity=chosen.recompute_granularity,
        method=chosen.recompute_method,
        num_layers=chosen.recompute_num_layers,
    )


def split(config: Config) -> StageSplit | None:
    """Return the layers of each pipeline stage; None with a single stage."""
    return stage_split(config) if config.pipeline.pipeline_model_parallel_size > 1 else None


def pipeline_order(config: Config) -> dict[str, Any]:
    """Return the schedule of several stages, as arguments of `PipelineForwardBackward`.

    With full recomputation, weight gradients are computed immediately: deferring them would keep
    all recomputed activations alive.
    """
    group = config.pipeline.microbatch_group_size_per_virtual_pipeline_stage
    name = schedule_name(config)
    at_once = name == "zb-h1" and config.execution.recompute_granularity == "full"
    return {"schedule": name, "group_size": group, "weight_delay": 0 if at_once else None}


def early_gather(config: Config) -> tuple[bool, str | None]:
    """Return whether all-gathers start at the end of the optimizer step, and if they cannot
    although requested, a line that says why."""
    chosen = config.data_parallel
    is_requested = chosen.fsdp_all_gather_in_start_param_sync
    if config.execution.cuda_graph_impl == "none" or not is_requested:
        return is_requested, None
    if not chosen.overlap_param_gather:
        return False, None
    return False, (
        "--no-fsdp-all-gather-in-start-param-sync is set, as --cuda-graph-impl "
        f"{config.execution.cuda_graph_impl} cannot wait for gathers that start outside a step"
    )


def data_parallel_config(config: Config) -> DataParallelConfig:
    """Return what the data-parallel engine shards, and when it communicates."""
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
        gtp_reduce_scatter_per=chosen.gtp_reduce_scatter_per,
        gather_format=chosen.weight_gather_format,
        gather_scale_blocks=chosen.weight_gather_scale_blocks,
        use_nccl_ub=chosen.use_nccl_ub,
        debug=chosen.check_weight_gather,
    )


def optimizer_config(config: Config) -> OptimizerConfig:
    """Return the optimizer settings."""
    chosen = config.optimizer
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return OptimizerConfig(
        kind=chosen.optimizer,
        adam_beta1=chosen.adam_beta1,
        adam_beta2=chosen.adam_beta2,
        adam_eps=chosen.adam_eps,
        exp_avg_dtype=dtypes[chosen.exp_avg_dtype],
        exp_avg_sq_dtype=dtypes[chosen.exp_avg_sq_dtype],
        decoupled=()
        if config.schedule.decoupled_lr is None
        else ("embedding.weight", "head.weight"),
        lr_factors=name_factors("--lr-group", config.optimizer.lr_group),
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
        split_matrices=chosen.muon_split_matrices or "megatron",
        split_qkv=chosen.muon_split_qkv,
        adam_names=chosen.muon_adam_weights or (),
    )


def loss_scaler(config: Config) -> LossScaler:
    """Return the loss scaler; its scale is 1 without fp16."""
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


def learning_rate_schedule(run: ResolvedRun) -> LearningRateSchedule:
    """Return the learning rate schedule over samples of applied updates."""
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


def decoupled_schedule(run: ResolvedRun) -> LearningRateSchedule | None:
    """Return the learning rate schedule of --decoupled-lr for embedding and head; None without
    it."""
    schedule = run.config.schedule
    if schedule.decoupled_lr is None:
        return None
    min_lr = schedule.decoupled_min_lr
    return replace(
        learning_rate_schedule(run),
        max_lr=schedule.decoupled_lr,
        min_lr=schedule.min_lr if min_lr is None else min_lr,
    )


def weight_decay_schedule(run: ResolvedRun) -> WeightDecaySchedule:
    """Return the weight decay schedule over samples of applied updates."""
    optimizer = run.config.optimizer
    assert optimizer.start_weight_decay is not None, "the config must be resolved"
    assert optimizer.end_weight_decay is not None
    return WeightDecaySchedule(
        start=optimizer.start_weight_decay,
        end=optimizer.end_weight_decay,
        ramp_samples=run.train_samples,
        style=optimizer.weight_decay_incr_style,
    )


CPU_MATMUL_FLAG = "--cpu-matmul-dtype"


@dataclass(frozen=True, kw_only=True)
class CpuMatmul:
    """The dtype of a run's matrix products on a CPU.

    Args:
        dtype: dtype of the products: the weights' dtype, or fp32.
        weights: dtype of the weights.
        speedup: measured speed of bf16 over fp32 on the first rank; None for other weights.
        is_user_choice: whether an option set the dtype.
    """

    dtype: torch.dtype
    weights: torch.dtype
    speedup: float | None
    is_user_choice: bool

    @staticmethod
    def choose(
        mode: Literal["auto", "weights", "fp32"],
        *,
        weights: torch.dtype,
        device: torch.device,
        coordinator: Coordinator,
    ) -> CpuMatmul | None:
        """Choose the dtype for all ranks; every rank calls this. None if there is no choice.

        The first rank measures the speedup even if the user chose the dtype, to report its cost.

        Raises:
            ValueError: the user chose a dtype, and the device is a GPU.
        """
        if device.type != "cpu":
            if mode != "auto":
                raise ValueError(f"{CPU_MATMUL_FLAG} {mode} has no effect on a GPU: drop it")
            return None
        if weights not in (torch.bfloat16, torch.float16):
            return None
        is_rank_0 = coordinator.rank == 0

        def measure() -> tuple[bool, float | None]:
            if not is_rank_0:
                return False, None
            speedup = cpu_bf16_speedup() if weights == torch.bfloat16 else None
            return measured_matmul_dtype(weights) == weights, speedup

        coordinator.begin("choosing the dtype of products")
        uses_16_bit, speedup = coordinator.agree("cpu matmul", measure, lambda answers: answers[0])
        if mode != "auto":
            uses_16_bit = mode == "weights"
        dtype = weights if uses_16_bit else torch.float32
        return CpuMatmul(
            dtype=dtype, weights=weights, speedup=speedup, is_user_choice=mode != "auto"
        )

    @property
    def name(self) -> str:
        """The dtype's name as checkpoints store it."""
        return str(self.dtype).removeprefix("torch.")

    def line(self) -> str:
        """Return the choice and its reason for a run's log."""
        weights = str(self.weights).removeprefix("torch.")
        text = f"{weights} matrices are multiplied in {self.name} on this CPU"
        reasons = [f"as {CPU_MATMUL_FLAG} says"] if self.is_user_choice else []
        if self.speedup is not None:
            reasons.append(f"where bf16 runs at {self.speedup:.1f} x the speed of fp32")
        return ", ".join([text, *reasons])


def another_dtype(saved: str | None, now: str | None) -> str | None:
    """Return a line if a run resumes with another dtype than its checkpoint's, else None."""
    if saved is None or now is None or saved == now:
        return None
    flag = f"{CPU_MATMUL_FLAG} {'fp32' if saved == 'float32' else 'weights'}"
    return (
        f"its matrices were multiplied in {saved}, now they are in {now}: losses are not "
        f"bit-identical to an uninterrupted run; {flag} continues as before"
    )

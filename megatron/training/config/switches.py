# SPDX-License-Identifier: Apache-2.0
"""Options that only mean something beside another one: given without it, they are an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.training.config.layer_pattern import depths, has_attention, is_recurrent

if TYPE_CHECKING:
    from megatron.training.config import Config


def _dependents(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield (section, beginning of its fields' names, whether the switch is on, the switch)."""
    failures, checkpoint, profiling = config.failures, config.checkpoint, config.profiling
    if has_attention(config):  # else `missing_blocks` says more
        yield from _of_attention(config)
    yield from _of_experts(config)
    yield from _of_recurrent(config)
    graphs = config.execution.cuda_graph_impl != "none"
    yield config.execution, "cuda_graph_warmup_", graphs, "--cuda-graph-impl full_iteration"
    narrow = config.training.bf16 or config.training.fp16
    yield config.execution, "cpu_matmul_", narrow, "--bf16 or --fp16"
    spikes = failures.loss_spike_factor is not None
    yield failures, "loss_spike_window", spikes, "--loss-spike-factor"
    stats = failures.rerun_mode == "report_determinism_stats"
    yield failures, "rerun_interval", stats, "--rerun-mode report_determinism_stats"
    yield failures, "straggler_factor", failures.log_straggler, "--log-straggler"
    optimizer = config.optimizer
    yield config.muon, "muon_", optimizer.optimizer == "muon", "--optimizer muon"
    offloads = optimizer.optimizer_cpu_offload
    yield optimizer, "optimizer_offload_fraction", offloads, "--optimizer-cpu-offload"
    further = depths(config) > 0
    yield config.training, "mtp_loss_", further, "--mtp-num-layers"
    loads = checkpoint.load is not None
    yield config.data, "allow_data_change", loads, "--load"
    some = loads or checkpoint.pretrained_checkpoint is not None
    yield checkpoint, "finetune", some, "--load or --pretrained-checkpoint"
    yield profiling, "profile_step_", profiling.profile, "--profile"
    watched = profiling.profile or profiling.record_memory_history
    yield profiling, "profile_ranks", watched, "--profile or --record-memory-history"


def _of_attention(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield what `_dependents` does for the options of attention."""
    position = config.position
    yield position, "rope_scaling_", position.use_rope_scaling, "--use-rope-scaling"
    yarn = position.position_embedding_type == "yarn"
    yield position, "yarn_", yarn, "--position-embedding-type yarn"
    turns = position.position_embedding_type != "none"
    for start in ("rotary_", "use_rope_"):
        yield position, start, turns, "--position-embedding-type rope or yarn"
    latent = config.attention.multi_latent_attention
    for start in ("q_", "kv_", "qk_head_", "qk_pos_", "v_"):
        yield config.attention, start, latent, "--multi-latent-attention"
    both = "--multi-latent-attention with --position-embedding-type yarn"
    yield config.attention, "mscale", latent and yarn, both
    cuts = config.parallel.context_parallel_size > 1
    yield config.parallel, "cp_comm_type", cuts, "--context-parallel-size above 1"
    packed = config.data.sft or config.data.reset_attention_mask
    documents = "--reset-attention-mask or --sft" if cuts else "--context-parallel-size above 1"
    yield config.parallel, "context_parallel_cut", cuts and packed, documents


def _of_experts(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield what `_dependents` does for the options of experts."""
    experts, parallel = config.experts, config.parallel
    on = experts.num_experts is not None
    for section, start in ((experts, "moe_"), (parallel, "moe_"), (parallel, "expert_model_")):
        yield section, start, on, "--num-experts"
    if parallel.expert_tensor_parallel_size != 1:  # which is so without experts
        yield parallel, "expert_tensor_", on, "--num-experts"
    if on:
        shares = experts.moe_shared_expert_intermediate_size is not None
        switch = "--moe-shared-expert-intermediate-size"
        yield parallel, "moe_shared_expert_overlap", shares, switch
        drops = experts.moe_expert_capacity_factor is not None
        yield experts, "moe_token_drop_policy", drops, "--moe-expert-capacity-factor"
        biased = experts.moe_router_enable_expert_bias
        yield experts, "moe_router_bias_", biased, "--moe-router-enable-expert-bias"


def _of_recurrent(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield what `_dependents` does for the options of recurrent blocks."""
    hybrid, parallel, flag = config.hybrid, config.parallel, "--hybrid-layer-pattern"
    some, cuts = is_recurrent(config), parallel.context_parallel_size > 1
    delta_nets, mamba = (symbol in (hybrid.hybrid_layer_pattern or "") for symbol in "GM")
    yield hybrid, "linear_", delta_nets, f"G in {flag}"
    for start in ("mamba_", "add_mamba_"):
        yield hybrid, start, mamba, f"M in {flag}"
    yield parallel, "linear_recurrence_", some, f"G or M in {flag}"
    yield parallel, "linear_cp_", some, f"G or M in {flag}"
    if some:
        yield parallel, "linear_cp_", cuts, "--context-parallel-size above 1"


def without_switch(config: Config) -> Iterator[str]:
    """Name every option that has another value than its default and no effect."""
    for section, start, on, switch in _dependents(config):
        for field in () if on else dataclasses.fields(section):  # type: ignore[arg-type]
            if field.name.startswith(start) and vars(section)[field.name] != field.default:
                off = "no-" if field.default is True else ""
                flag = off + field.name.replace("_", "-")
                yield f"--{flag} has no effect without {switch}: add that"


def beyond_the_run(config: Config, world_size: int) -> Iterator[str]:
    """Name what profiling asks for and the run does not have."""
    profiling, iterations = config.profiling, config.training.train_iters
    watched = profiling.profile or profiling.record_memory_history
    far = [rank for rank in profiling.profile_ranks if rank >= world_size]
    if watched and far:
        yield f"--profile-ranks {far[0]}: there are ranks 0 to {world_size - 1}: name one of them"
    start = profiling.profile_step_start
    if profiling.profile and iterations is not None and start >= iterations:
        yield f"--profile-step-start {start} is not below --train-iters {iterations}: lower it"

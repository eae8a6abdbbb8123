# SPDX-License-Identifier: Apache-2.0
"""Checks of mixture of experts: layers with experts, parallel sizes, and other options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.models.layer_pattern import DENSE, EXPERTS
from megatron.training.config.layer_pattern_options import FLAG, blocks, expert_layers, mtp_blocks

if TYPE_CHECKING:
    from megatron.training.config import Config


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

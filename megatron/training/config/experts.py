# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: their shape, how tokens find them, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.core.models.layer_pattern import DENSE, EXPERTS
from megatron.training.config.expert_layers import expert_layers
from megatron.training.config.layer_pattern import FLAG, blocks, depth_blocks
from megatron.training.config.values import not_negative, positive, require_all

if TYPE_CHECKING:
    from megatron.training.config import Config


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture of experts: each expert sees the tokens that a router, in fp32, sends to it."""

    num_experts: int | None = None
    """Experts of each layer that has some."""
    moe_layer_freq: str | None = None
    """Which layers have experts: N for every N-th from the first on, or a 1 or 0 for each layer as
    0,1,1 or [0]*1+[1]*2; derived: what --hybrid-layer-pattern says, else all layers."""
    moe_ffn_hidden_size: int | None = None
    """Inner width of each expert, in features; derived: --ffn-hidden-size."""
    moe_expert_capacity_factor: float | None = None
    """An expert takes at most this times the even share of a rank's tokens of a microbatch, the
    rest are dropped there; none drops none."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens an expert at its capacity keeps: those of the highest weight, or the first."""
    moe_shared_expert_intermediate_size: int | None = None
    """Inner width, in features, of an MLP that every token goes through as well."""
    moe_shared_expert_gate: bool = False
    """Multiply that MLP's output by the sigmoid of a learned product with the token."""
    moe_router_topk: int = 2
    """Experts of a token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits: softmax over all experts, or sigmoid of each."""
    moe_router_pre_softmax: bool = False
    """Weigh the chosen experts by their scores as they are, of softmax over all experts or of
    sigmoid, instead of dividing these by their sum."""
    moe_router_num_groups: int | None = None
    """Groups of experts; a token finds its experts within some of them only."""
    moe_router_group_topk: int | None = None
    """Groups of a token: those whose best experts, topk / this many, have the highest sum."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor of the chosen experts' weights, after they sum to 1; derived: none."""
    moe_router_enable_expert_bias: bool = False
    """Give each expert a bias that is added to its score where experts are chosen; every step moves
    it towards even load, without a loss."""
    moe_router_bias_update_rate: float = 1e-3
    """What a step adds to the bias of an expert with fewer tokens than the mean, and takes from one
    with more."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "aux_loss"
    """What the auxiliary loss balances: the load over all tokens of a microbatch, or over those of
    each sequence; it has the coefficient --moe-aux-loss-coeff."""
    moe_aux_loss_coeff: float = 0.0
    """Coefficient of the auxiliary loss that balances load; 0 leaves it out."""
    moe_z_loss_coeff: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits; 0 leaves it out."""
    moe_input_jitter_eps: float = 0.0
    """Multiply what the router reads by random numbers in [1 - eps, 1 + eps] in training."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "num_experts", "moe_ffn_hidden_size"),
            lambda: positive(
                self, "moe_expert_capacity_factor", "moe_shared_expert_intermediate_size"
            ),
            lambda: positive(self, "moe_router_topk", "moe_router_topk_scaling_factor"),
            lambda: positive(self, "moe_router_num_groups", "moe_router_group_topk"),
            lambda: positive(self, "moe_router_bias_update_rate"),
            lambda: not_negative(
                self, "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"
            ),
        )


def problems(config: Config, world_size: int) -> Iterator[str]:
    """Name what is wrong with experts on `world_size` processes, each with its mend."""
    yield from _layers(config)
    if config.experts.num_experts is None:
        return
    yield from _layout(config, world_size)
    yield from _switches(config)
    # Not above: the options of a model without experts must not wait for torch.
    from megatron.training.config.model_table import part_config

    parallel = config.parallel
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    moe = part_config(config, "moe")
    source = config.checkpoint
    # A run that starts from weights takes their router as it is.
    given = source.load_hf or source.pretrained_checkpoint or source.use_checkpoint_args
    if moe.router.topk == 1 and moe.router.normalize and not given:
        yield (
            "--moe-router-topk 1 with normalised scores gives the weight 1 whatever the router "
            "says, which then learns nothing: give --moe-router-pre-softmax"
        )
    for problem in moe.problems(tp=tp, etp=parallel.expert_tensor_parallel_size or tp, ep=ep):
        yield f"mixture of experts: {problem}"


def _layers(config: Config) -> Iterator[str]:
    """Compare what says which layers have experts, and that there are some."""
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
    kinds = set(blocks(config) + depth_blocks(config))
    if EXPERTS not in kinds:
        yield f"--num-experts {experts.num_experts}: no layer has experts: change which layers do"
    elif config.model.add_mlp_bias and config.model.disable_bias_linear and DENSE not in kinds:
        yield "--add-mlp-bias has no effect where all layers have experts: drop it"


def _layout(config: Config, world_size: int) -> Iterator[str]:
    """Name degrees that do not go into the world."""
    parallel, pp = config.parallel, config.pipeline.pipeline_model_parallel_size
    ep = parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    total = etp * ep * pp
    shown = (
        f"--expert-tensor-parallel-size {etp} x --expert-model-parallel-size {ep} x "
        f"--pipeline-model-parallel-size {pp} = {total}"
    )
    if world_size % total:
        yield (
            f"{shown} does not divide the world of {world_size} processes: start a multiple of "
            f"{total} processes or lower it"
        )
        return
    instances, edp = config.data_parallel.num_distributed_optimizer_instances, world_size // total
    if edp % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the expert data "
            f"parallel size {world_size} / ({shown}) = {edp}: use a divisor of {edp}"
        )


def _switches(config: Config) -> Iterator[str]:
    """Name options that do not go with experts, or with each other."""
    chosen, graphs = config.experts, config.execution.cuda_graph_impl
    if not config.model.disable_bias_linear:
        yield (
            "experts have no biases: add --disable-bias-linear (attention keeps its own with "
            "--add-qkv-bias and --add-attention-output-bias, other MLPs with --add-mlp-bias)"
        )
    if graphs != "none":
        yield (
            f"--num-experts with --cuda-graph-impl {graphs}: the host reads how many tokens each "
            "expert has, which is not recorded: drop the latter"
        )
    kind, coefficient = chosen.moe_router_load_balancing_type, chosen.moe_aux_loss_coeff
    if kind == "none" and coefficient:
        yield (
            f"--moe-aux-loss-coeff {coefficient} has no effect with "
            "--moe-router-load-balancing-type none: drop one"
        )
    if kind == "seq_aux_loss" and not coefficient:
        yield (
            f"--moe-router-load-balancing-type {kind} has no effect without --moe-aux-loss-coeff "
            "above 0: give that"
        )

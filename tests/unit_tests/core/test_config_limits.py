# SPDX-License-Identifier: Apache-2.0
"""Core configs just below and just above each limit of their fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from megatron.core import RankGrid
from megatron.core.models import GPTConfig
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.optimizer import LearningRateSchedule, WeightDecaySchedule
from megatron.core.pipeline_parallel import make_schedule
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    RopeConfig,
)

ATTENTION = AttentionConfig(num_attention_heads=12, num_query_groups=4, kv_channels=6)
MLA = LatentAttentionConfig(
    num_attention_heads=4,
    q_lora_rank=None,
    kv_lora_rank=8,
    nope_channels=4,
    rope_channels=4,
    value_channels=6,
)
MLP = MLPConfig(ffn_hidden_size=12)
ROUTER = RouterConfig(topk=2)
GROUPED = RouterConfig(topk=4, num_groups=4, group_topk=2)
MOE = MoEConfig(num_experts=8, ffn_hidden_size=12)
DELTA_NET = GatedDeltaNetConfig(
    num_key_heads=4, num_value_heads=8, key_channels=4, value_channels=6
)


def mtp(num_layers: int, **fields: Any) -> dict[str, MTPConfig]:
    """Return the change of a model's configuration to these MTP layers."""
    return {"mtp": MTPConfig(num_layers=num_layers, **fields)}


MAMBA = Mamba2Config(num_heads=12, head_channels=6, state_channels=5, num_groups=4)
TOP_GROUP = {"num_groups": 2, "group_topk": 1}
GPT = GPTConfig(num_layers=2, hidden_size=24, vocab_size=31, attention=ATTENTION, mlp=MLP)
EXPERTS = dataclasses.replace(GPT, mlp=None, moe=MOE, ffn_pattern="EE")
HYBRID = dataclasses.replace(GPT, ffn_pattern="", num_layers=4, pattern="G-*-", delta_net=DELTA_NET)
HEADWISE = {"mode": "headwise"}
GRID = (RankGrid, {"world_size": 8})
ROPE = (RopeConfig, {})
LEARNING_RATE = (LearningRateSchedule, {"max_lr": 1.0, "decay_samples": 10})
WSD = (
    LearningRateSchedule,
    {**LEARNING_RATE[1], "style": "wsd", "warmup_samples": 3, "wsd_decay_samples": 4},
)
WEIGHT_DECAY = (
    WeightDecaySchedule,
    {"start": 0.0, "end": 1.0, "ramp_samples": 4, "style": "linear"},
)
SCHEDULE = (make_schedule, {"name": "1f1b", "stages": 4, "microbatches": 8})
INTERLEAVED = (make_schedule, {**SCHEDULE[1], "name": "interleaved", "chunks": 2})


def list_problems(target: Any, changes: dict[str, Any]) -> list[str]:
    """Return the problems that a config reports after changes to its fields and parallel sizes.

    Args:
        target: a config with a method `problems`, or (callable, arguments) where the callable
            raises ValueError with the problems.
        changes: new values of fields or arguments; all other keys are arguments of `problems`.
    """
    if isinstance(target, tuple):
        build, arguments = target
        try:
            build(**{**arguments, **changes})
        except ValueError as error:
            return str(error).split("; ")
        return []
    names = {field.name for field in dataclasses.fields(target)}
    fields = {name: value for name, value in changes.items() if name in names}
    ranks = {name: value for name, value in changes.items() if name not in names}
    if isinstance(target, RouterConfig):
        ranks = {"num_experts": 8, **ranks}
    elif isinstance(target, AttentionConfig | LatentAttentionConfig | MLPConfig):
        ranks = {"tp": 1, **ranks}
    return dataclasses.replace(target, **fields).problems(**ranks)


LIMITS = [
    # config, changes just beyond a limit, text of the one problem, changes just within the limit
    (ATTENTION, {"kv_channels": 0}, "use >= 1", {"kv_channels": 1}),
    (ATTENTION, {"num_query_groups": 0}, "use >= 1", {"num_query_groups": 1}),
    (ATTENTION, {"num_attention_heads": 0}, "use >= 1", {"num_query_groups": 12}),
    (ATTENTION, {"num_query_groups": 5}, "num-query-groups 5", {"num_query_groups": 6}),
    (ATTENTION, {"num_query_groups": 1, "tp": 8}, "num-attention-heads 12", {"tp": 12}),
    (ATTENTION, {"tp": 6}, "num-query-groups 4", {"num_query_groups": 3, "tp": 6}),
    (ATTENTION, {"dropout": -0.01}, "attention-dropout -0.01", {"dropout": 0.0}),
    (ATTENTION, {"dropout": 1.0}, "attention-dropout 1.0", {"dropout": 0.99}),
    (ATTENTION, {"window": 0}, "attention window 0", {"window": 1}),
    (ATTENTION, {"engine": "a2a", "cp": 3}, "4 key heads", {"engine": "a2a", "cp": 4}),
    (ATTENTION, {"engine": "a2a", "cp": 3, "tp": 2}, "2 key", {"engine": "a2a", "cp": 3, "tp": 4}),
    (ATTENTION, {"engine": "a2a", "cp": 8, "tp": 2}, "6 query", {"engine": "a2a", "cp": 2}),
    (ATTENTION, {"engine": "a2a", "cp": 8}, "12 query heads", {"engine": "p2p", "cp": 8}),
    (ATTENTION, {"engine": "ring", "dropout": 0.5}, "'ring'", {"engine": "all_gather"}),
    (ATTENTION, {"engine": "ring", "dropout": 1.0}, "1.0", {"engine": "a2a", "cp": 12}),
    (MLA, {"num_attention_heads": 0, "tp": 2}, "use >= 1", {"num_attention_heads": 1}),
    (MLA, {"q_lora_rank": 0}, "use >= 1", {"q_lora_rank": 1}),
    (MLA, {"kv_lora_rank": 0}, "use >= 1", {"kv_lora_rank": 1}),
    (MLA, {"nope_channels": 0}, "use >= 1", {"nope_channels": 1}),
    (MLA, {"rope_channels": 0}, "use >= 1", {"rope_channels": 1}),
    (MLA, {"value_channels": 0}, "use >= 1", {"value_channels": 1}),
    (MLA, {"tp": 3}, "num-attention-heads 4", {"tp": 4}),
    (MLA, {"dropout": -0.01}, "attention-dropout -0.01", {"dropout": 0.0}),
    (MLA, {"dropout": 1.0}, "attention-dropout 1.0", {"dropout": 0.99}),
    (MLA, {"scale_factor": 0.0}, "softmax scale", {"scale_factor": 0.01}),
    (MLA, {"scale_factor": math.nan}, "softmax scale", {"scale_factor": 9.0}),
    (MLA, {"norm_epsilon": 0.0}, "norm epsilon", {"norm_epsilon": 1e-9}),
    (MLA, {"engine": "a2a", "cp": 3}, "4 query heads", {"engine": "a2a", "cp": 4}),
    (MLA, {"engine": "a2a", "cp": 4, "tp": 2}, "2 query", {"engine": "a2a", "cp": 2, "tp": 2}),
    (MLA, {"engine": "ring", "dropout": 1.0}, "1.0", {"engine": "p2p", "cp": 3}),
    (MLP, {"ffn_hidden_size": 0}, "ffn-hidden-size 0", {"ffn_hidden_size": 1}),
    (MLP, {"tp": 8}, "ffn-hidden-size 12", {"tp": 12}),
    (MLP, {"activation": "relu"}, "'relu'", {"activation": "relu", "gated": False}),
    (ROUTER, {"topk": 0}, "moe-router-topk 0", {"topk": 1}),
    (ROUTER, {"topk": 9}, "moe-router-topk 9", {"topk": 8}),
    (ROUTER, {"score_function": "relu"}, "'relu'", {"score_function": "sigmoid"}),
    (ROUTER, {"balance": "even"}, "'even'", {"balance": "aux_loss"}),
    (ROUTER, {"aux_loss_coeff": -0.01}, "coefficients", {"bias_update_rate": 0.0}),
    (ROUTER, {"z_loss_coeff": -0.01}, "coefficients", {"z_loss_coeff": 0.01}),
    (ROUTER, {"bias_update_rate": -0.01}, "coefficients", {"aux_loss_coeff": 0.01}),
    (ROUTER, {"jitter": -0.01}, "moe-input-jitter-eps -0.01", {"jitter": 0.0}),
    (ROUTER, {"jitter": 1.0}, "moe-input-jitter-eps 1.0", {"jitter": 0.99}),
    (ROUTER, {"num_groups": 4}, "give both", {"num_groups": 4, "group_topk": 1}),
    (ROUTER, {"group_topk": 4}, "give both", {}),
    (GROUPED, {"num_groups": 0}, "moe-router-num-groups 0", {"num_groups": 2}),
    (GROUPED, {"num_groups": 3}, "moe-router-num-groups 3", {"num_experts": 12}),
    (GROUPED, {"num_groups": 16}, "num-groups 16", {"num_groups": 1, "group_topk": 1}),
    (GROUPED, {**TOP_GROUP, "topk": 5}, "group-topk 1 of 2", TOP_GROUP),
    (GROUPED, {"group_topk": 0}, "moe-router-group-topk 0", {"group_topk": 4}),
    (GROUPED, {"group_topk": 5}, "moe-router-group-topk 5", {"group_topk": 4}),
    (GROUPED, {"topk": 5}, "group-topk 2 of 4 groups of 2", {"topk": 4}),
    (GROUPED, {"group_candidates": 0}, "0 candidates", {"group_candidates": 1}),
    (GROUPED, {"group_candidates": 3}, "3 candidates", {"group_candidates": 2}),
    (MOE, {"router": GROUPED, "num_experts": 6}, "num-groups 4", {"router": GROUPED}),
    (MOE, {"num_experts": 1}, "topk 2", {"num_experts": 1, "router": RouterConfig(topk=1)}),
    (MOE, {"ep": 3}, "num-experts 8", {"ep": 8}),
    (MOE, {"ffn_hidden_size": 0}, "moe-ffn-hidden-size 0", {"ffn_hidden_size": 1}),
    (MOE, {"etp": 8}, "moe-ffn-hidden-size 12", {"etp": 12, "tp": 8}),
    (MOE, {"activation": "relu"}, "'relu'", {"activation": "relu", "gated": False}),
    (MOE, {"capacity_factor": 0.0}, "capacity-factor 0.0", {"capacity_factor": 0.01}),
    (MOE, {"capacity_factor": math.nan}, "capacity-factor nan", {"capacity_factor": 2.0}),
    (MOE, {"drop_policy": "last"}, "'last'", {"drop_policy": "position"}),
    (MOE, {"shared_ffn_hidden_size": 0}, "shared expert", {"shared_ffn_hidden_size": 1}),
    (MOE, {"shared_ffn_hidden_size": 4, "tp": 8}, "shared", {"shared_ffn_hidden_size": 8, "tp": 8}),
    (MOE, {"shared_gate": True}, "gate", {"shared_gate": True, "shared_ffn_hidden_size": 4}),
    (DELTA_NET, {"num_key_heads": 0}, "linear-num-key-heads 0", {"num_key_heads": 1}),
    (DELTA_NET, {"num_value_heads": 0}, "linear-num-value-heads 0", {"num_value_heads": 4}),
    (DELTA_NET, {"key_channels": 0}, "linear-key-head-dim 0", {"key_channels": 1}),
    (DELTA_NET, {"value_channels": 0}, "linear-value-head-dim 0", {"value_channels": 1}),
    (DELTA_NET, {"conv_width": 0}, "linear-conv-kernel-dim 0", {"conv_width": 1}),
    (DELTA_NET, {"num_key_heads": 3}, "linear-num-key-heads 3", {"num_key_heads": 8}),
    (DELTA_NET, {"tp": 8}, "linear-num-key-heads 4", {"tp": 4}),
    (DELTA_NET, {"mode": "ring"}, "'ring'", {"mode": "segments", "cp": 3}),
    (DELTA_NET, {"mode": "ring", "tp": 8}, "linear-num-key-heads 4", {"cp": 3}),
    (DELTA_NET, {**HEADWISE, "cp": 4, "tp": 2}, "2 key", {**HEADWISE, "cp": 4}),
    (MAMBA, {"num_heads": 0}, "mamba-num-heads 0", {"num_heads": 4}),
    (MAMBA, {"head_channels": 0}, "mamba-head-dim 0", {"head_channels": 1}),
    (MAMBA, {"state_channels": 0}, "mamba-state-dim 0", {"state_channels": 1}),
    (MAMBA, {"num_groups": 0, "norm_groups": 1}, "mamba-num-groups 0", {"num_groups": 1}),
    (MAMBA, {"conv_width": 0}, "mamba-conv-kernel-dim 0", {"conv_width": 1}),
    (MAMBA, {"norm_groups": 0}, "mamba-norm-groups 0", {"norm_groups": 1}),
    (MAMBA, {"norm_groups": 5}, "mamba-norm-groups 5", {"norm_groups": 12}),
    (MAMBA, {"num_groups": 5, "norm_groups": 1}, "mamba-num-groups 5", {"num_groups": 6}),
    (MAMBA, {"dt_limit": (-0.01, 1.0)}, "mamba-dt-limit", {"dt_limit": (0.0, 0.1)}),
    (MAMBA, {"dt_limit": (1.0, 1.0)}, "mamba-dt-limit", {"dt_limit": (1.0, 1.1)}),
    (MAMBA, {"num_groups": 1, "tp": 8}, "mamba-num-heads 12", {"num_groups": 1, "tp": 12}),
    (MAMBA, {"tp": 6, "norm_groups": 6}, "mamba-num-groups 4", {"tp": 2, "norm_groups": 6}),
    (MAMBA, {"tp": 4, "norm_groups": 6}, "mamba-num-norm-groups 6", {"tp": 4, "norm_groups": 12}),
    (MAMBA, {**HEADWISE, "cp": 4, "tp": 2}, "6 heads", {**HEADWISE, "cp": 4}),
    (MAMBA, {**HEADWISE, "cp": 3}, "4 groups", {**HEADWISE, "cp": 12}),
    (MAMBA, {**HEADWISE, "cp": 3, "tp": 2}, "2 groups", {**HEADWISE, "cp": 2, "tp": 2}),
    (MAMBA, {**HEADWISE, "cp": 8}, "12 heads", {**HEADWISE, "cp": 3, "num_groups": 1}),
    (MAMBA, {"mode": "ring"}, "'ring'", {**HEADWISE, "cp": 2}),
    (MAMBA, {**HEADWISE, "cp": 6}, "4 groups", {**HEADWISE, "cp": 6, "num_groups": 2}),
    (GPT, {"num_layers": 0, "ffn_pattern": ""}, "num_layers is 0", {}),
    (GPT, {"num_layers": -1, "ffn_pattern": ""}, "is -1", {"num_layers": 1, "ffn_pattern": "-"}),
    (GPT, {"hidden_size": 0}, "hidden_size is 0", {"hidden_size": 1}),
    (GPT, {"vocab_size": 3, "tp": 4}, "vocab_size 3", {"vocab_size": 4, "tp": 4}),
    (GPT, {"hidden_dropout": -0.01}, "hidden-dropout -0.01", {"hidden_dropout": 0.0}),
    (GPT, {"hidden_dropout": 1.0}, "hidden-dropout 1.0", {"hidden_dropout": 0.99}),
    (GPT, {"ffn_pattern": "-"}, "ffn_pattern '-'", {"ffn_pattern": "--"}),
    (GPT, {"ffn_pattern": "-x"}, "ffn_pattern '-x'", {"ffn_pattern": "-E", "moe": MOE}),
    (GPT, mtp(0), "mtp-num-layers 0", mtp(1)),
    (GPT, mtp(1, loss_factor=-0.01), "factor -0.01", mtp(1, loss_factor=0.0)),
    (GPT, {"rope": RopeConfig(percent=0.5)}, "0.5 of 6", {"rope": RopeConfig(percent=0.4)}),
    (GPT, {"rope": RopeConfig(percent=0.1)}, "0.1 of 6", {"rope": RopeConfig(percent=1.0)}),
    (GPT, {"cp": 8, "engine": "a2a"}, "12 query heads", {"cp": 12, "engine": "a2a"}),
    (GPT, {"mlp": MLPConfig(ffn_hidden_size=10), "tp": 4}, "ffn-hidden-size 10", {"tp": 12}),
    (GPT, {"ep": 2}, "expert-model-parallel-size 2", {"etp": 2, "tp": 2}),
    (GPT, {"etp": 2}, "expert-tensor-parallel-size 2", {"etp": 1, "tp": 2}),
    (GPT, {"moe": MOE}, "need num-experts", {"moe": MOE, "ffn_pattern": "E-"}),
    (EXPERTS, {"moe": None}, "need num-experts", {"ep": 8, "etp": 12, "tp": 4}),
    (EXPERTS, {"ep": 3}, "num-experts 8", {"tp": 2, "ep": 2}),
    (EXPERTS, {"etp": 8}, "moe-ffn-hidden-size 12", {"etp": 3}),
    (HYBRID, {"num_layers": 3}, "has 4 blocks", {}),
    (HYBRID, {"ffn_pattern": "--"}, "ffn_pattern empty", {}),
    (HYBRID, {"pattern": "G-x-"}, "'x' at 3", {"pattern": "GG*-"}),
    (HYBRID, mtp(1), "blocks ''", mtp(1, pattern="*-")),
    (HYBRID, mtp(1, pattern="*x"), "'x' at 2", {}),
    (HYBRID, mtp(1, pattern="*M"), "Mamba-2", {}),
    (HYBRID, {"cp": 3, "linear_mode": "headwise"}, "4 key heads", {"cp": 3}),
    (HYBRID, {"cp": 3, "linear_mode": "ring"}, "'ring'", {"cp": 3, "linear_mode": "segments"}),
    (HYBRID, {"attention": None, "rope": None}, "attention", {"pattern": "GG*-"}),
    (ROPE, {"base": 1.0}, "base 1.0", {"base": 1.05}),
    (ROPE, {"percent": 0.0}, "percent 0.0", {"percent": 0.05}),
    (ROPE, {"percent": 1.05}, "percent 1.05", {"percent": 1.0}),
    ((RankGrid(world_size=8).ranks, {}), {"axes": ("x",)}, "unknown axis 'x'", {"axes": ("tp",)}),
    (GRID, {"world_size": 0}, "world size is 0", {"world_size": 1}),
    (GRID, {"gtp": 0}, "gtp size is 0", {"gtp": 8}),
    (GRID, {"etp": 0}, "etp size is 0", {"etp": 8}),
    (GRID, {"instances": 0}, "instances size is 0", {"instances": 8}),
    (GRID, {"tp": 3, "etp": 1}, "tp=3", {"tp": 4, "gtp": 2, "etp": 1}),
    (GRID, {"ep": 3}, "ep=3", {"ep": 8}),
    (GRID, {"tp": 2, "etp": 1, "instances": 8}, "dp=4", {"tp": 2, "instances": 4}),
    (GRID, {"ep": 2, "instances": 8}, "edp=4", {"ep": 2, "instances": 4}),
    (LEARNING_RATE, {"min_lr": -0.01}, "min -0.01", {"min_lr": 0.0}),
    (LEARNING_RATE, {"min_lr": 1.01}, "min 1.01", {"min_lr": 1.0}),
    (LEARNING_RATE, {"max_lr": math.inf}, "max inf", {"max_lr": 1e9}),
    (LEARNING_RATE, {"init_lr": -0.01}, "starts at -0.01", {"init_lr": 0.0}),
    (LEARNING_RATE, {"init_lr": 1.01}, "starts at 1.01", {"init_lr": 1.0}),
    (LEARNING_RATE, {"warmup_samples": -1}, "warm-up of -1", {"decay_samples": 1}),
    (LEARNING_RATE, {"warmup_samples": 10}, "warm-up of 10", {"warmup_samples": 9}),
    (WSD, {"wsd_decay_samples": 0}, "over 0", {"wsd_decay_samples": 1}),
    (WSD, {"wsd_decay_samples": 8}, "over 8", {"wsd_decay_samples": 7}),
    (WSD, {"wsd_decay_samples": None}, "needs", {"style": "cosine"}),
    (WEIGHT_DECAY, {"start": -0.01}, "from -0.01", {"start": 0.0}),
    (WEIGHT_DECAY, {"start": 1.01}, "from 1.01", {"start": 1.0}),
    (WEIGHT_DECAY, {"end": math.inf}, "to inf", {"end": 1e9}),
    (WEIGHT_DECAY, {"ramp_samples": 0}, "over 0", {"ramp_samples": 1}),
    (WEIGHT_DECAY, {"style": "constant"}, "differ", {"style": "constant", "end": 0.0}),
    (SCHEDULE, {"stages": 0}, "stages 0", {"stages": 1}),
    (SCHEDULE, {"microbatches": 0}, "microbatches 0", {"microbatches": 1}),
    (SCHEDULE, {"chunks": 0}, "chunks 0", {"chunks": 1}),
    (SCHEDULE, {"weight_delay": 0}, "weight delay 0", {"name": "zb-h1", "weight_delay": 0}),
    (SCHEDULE, {"group_size": 1}, "group size 1", {"name": "forward", "group_size": 1}),
    (INTERLEAVED, {"group_size": 0}, "group size 0", {"group_size": 4}),
    (INTERLEAVED, {"chunks": 1}, "one chunk", {"name": "1f1b", "chunks": 1}),
    (INTERLEAVED, {"stages": 1}, "one stage", {"stages": 2}),
    (INTERLEAVED, {"stages": 1, "group_size": 9}, "one stage", {"group_size": 8}),
    (INTERLEAVED, {"name": "forward", "stages": 1}, "one stage", {"name": "forward"}),
    (INTERLEAVED, {"group_size": 9}, "too large", {"group_size": 8}),
    (INTERLEAVED, {"group_size": 3}, "too small", {"group_size": 4}),
    (INTERLEAVED, {"microbatches": 3, "group_size": 2}, "too small", {"microbatches": 3}),
    (INTERLEAVED, {"group_size": 5}, "leave 3", {"microbatches": 9, "group_size": 5}),
]


@pytest.mark.parametrize(("config", "invalid", "message", "valid"), LIMITS)
def test_only_values_beyond_a_limit_are_reported(config, invalid, message, valid):
    problems = list_problems(config, invalid)
    assert len(problems) == 1, problems
    assert message in problems[0]
    assert list_problems(config, valid) == []


@pytest.mark.parametrize(
    ("config", "changes", "messages"),
    [
        (GPT, {"vocab_size": 0}, ["vocab_size is 0", "vocab_size 0 is less"]),
        (HYBRID, {"pattern": "G*+-"}, ["both '*' and '+'", "has '+'"]),
        (MOE, {"num_experts": 0}, ["num-experts 0", "moe-router-topk 2"]),
        (ATTENTION, {"dropout": 1.0, "engine": "ring", "window": 0}, ["1.0", "window 0"]),
    ],
)
def test_several_problems_are_listed_in_order(config, changes, messages):
    problems = list_problems(config, changes)
    assert len(problems) == len(messages), problems
    assert all(text in problem for text, problem in zip(messages, problems, strict=True))


@pytest.mark.parametrize(
    ("router", "adds_loss"),
    [
        ({"balance": "none", "aux_loss_coeff": 0.1}, False),
        ({"balance": "aux_loss", "aux_loss_coeff": 0.0}, False),
        ({"balance": "aux_loss", "aux_loss_coeff": 0.01}, True),
        ({"z_loss_coeff": 0.01}, True),
    ],
)
def test_routers_add_losses_only_with_positive_coefficients(router, adds_loss):
    moe = dataclasses.replace(MOE, router=dataclasses.replace(ROUTER, **router))
    assert dataclasses.replace(EXPERTS, moe=moe).has_auxiliary_losses is adds_loss
    assert not GPT.has_auxiliary_losses


def test_mtp_blocks_exist_only_with_mtp_layers():
    assert (GPT.mtp_blocks, dataclasses.replace(GPT, **mtp(1)).mtp_blocks) == ("", "*-")


def test_a_constant_weight_decay_needs_no_ramp():
    assert WeightDecaySchedule(start=0.1, end=0.1, ramp_samples=5).weight_decay(0) == 0.1

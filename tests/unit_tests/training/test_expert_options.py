# SPDX-License-Identifier: Apache-2.0
"""Options of experts and latent attention: the core's configs, and refused combinations."""

from __future__ import annotations

import math

import pytest

from megatron.core import RankGrid
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig
from megatron.training.config.check import check
from megatron.training.config.layer_pattern_options import read_frequency, write_frequency
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.core_configs import backend
from megatron.training.core_configs import split as stage_split
from megatron.training.distributed_context import rank_grid
from tests.unit_tests.training.small_config import small_config

EXPERTS = "--num-experts 8 --disable-bias-linear"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
LATENT = "--multi-latent-attention --disable-bias-linear"
SHARED = "--moe-shared-expert-intermediate-size 40"


# --- which layers have experts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers", "pattern"),
    [
        ("1", 3, "EEE"),
        ("2", 5, "E-E-E"),
        ("7", 3, "E--"),
        ("0,1,1", 3, "-EE"),
        ("[0,1,0]", 3, "-E-"),
        ("[0]*1+[1]*3", 4, "-EEE"),
        ("([0] * 1 + [1]*2)*2", 6, "-EE-EE"),
        ("[0,1]*2+[1]", 5, "-E-EE"),
        ("(([1]))*2*2", 4, "EEEE"),
    ],
)
def test_moe_layer_freq_is_parsed_and_written(text: str, layers: int, pattern: str):
    assert read_frequency(text, layers) == pattern
    assert read_frequency(write_frequency(pattern), layers) == pattern


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "x", "", "[0]*", "[0]+", "[2,1]", "[0]1", "([0]", "[0])", "2*[0]", "[0]*-1"]
    + ["[0]*99999", "(" * 5000, "__import__('os')", "[1]*3;", "1.0", "[]"],
)
def test_invalid_moe_layer_freq_is_refused(text: str):
    with pytest.raises(ValueError, match=r"is neither a number above 0 nor a list of 0 and 1"):
        read_frequency(text, 3)


def test_moe_layer_freq_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"0,1 has 2 layers, --num-layers is 3: write a 0 or 1"):
        read_frequency("0,1", 3)


def test_layer_pattern_chooses_the_expert_layers():
    pattern = "*-*E|*E*-"
    options = f"{EXPERTS} --num-layers 4 --hybrid-layer-pattern {pattern} {PP} 2"
    run = resolve(small_config(options), 2)
    assert check(run.config, 2) == []
    assert gpt_config(run.config, 61).ffn_pattern == "-EE-"
    split = stage_split(run.config)
    assert split is not None
    assert split.ranges == ((0, 4), (4, 8))
    # A checkpoint's options hold the frequency instead of the pattern.
    assert run.config.experts.moe_layer_freq == "[0]*1+[1]*2+[0]*1"
    assert resolve(run.config, 2) == run
    assert check(small_config(f"{options} --moe-layer-freq 1"), 2) == [
        f"--moe-layer-freq 1 and --hybrid-layer-pattern {pattern} differ in which layers have "
        "experts: drop --moe-layer-freq"
    ]
    assert check(small_config(f"{options} --moe-layer-freq 0,1,1,0"), 2) == []


# --- configs of the core --------------------------------------------------------------------------


def test_router_defaults_match_the_core():
    run = resolve(small_config(f"{EXPERTS} --swiglu --ffn-hidden-size 72"), 1)
    model = gpt_config(run.config, 61)
    assert model.moe == MoEConfig(num_experts=8, ffn_hidden_size=72)
    assert model.ffn_pattern == "EE"
    assert resolve(run.config, 1) == run
    plain = gpt_config(resolve(small_config(EXPERTS), 1).config, 61).moe
    assert plain == MoEConfig(
        num_experts=8,
        ffn_hidden_size=192,
        gated=False,
        activation="gelu",
        router=RouterConfig(),
    )
    assert gpt_config(resolve(small_config(), 1).config, 61).moe is None


def test_every_router_and_expert_option_reaches_the_model():
    options = (
        f"{EXPERTS} --swiglu --moe-ffn-hidden-size 24 --moe-layer-freq 0,1 --moe-router-topk 4 "
        "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
        "--moe-z-loss-coeff 0.2 --moe-input-jitter-eps 0.3 --moe-expert-capacity-factor 1.5 "
        f"--moe-token-drop-policy position {SHARED} --moe-shared-expert-gate "
        "--moe-token-dispatcher-type alltoall --no-moe-shared-expert-overlap"
    )
    config = small_config(options)
    assert check(config, 1) == []
    run = resolve(config, 1)
    model = gpt_config(run.config, 61)
    assert model.ffn_pattern == "-E"
    assert model.moe == MoEConfig(
        num_experts=8,
        ffn_hidden_size=24,
        router=RouterConfig(
            topk=4,
            score_function="sigmoid",
            normalize=False,
            scaling_factor=2.5,
            num_groups=4,
            group_topk=2,
            group_candidates=2,
            expert_bias=True,
            bias_update_rate=0.01,
            balance="seq_aux_loss",
            aux_loss_coeff=0.1,
            z_loss_coeff=0.2,
            jitter=0.3,
        ),
        capacity_factor=1.5,
        drop_policy="position",
        shared_ffn_hidden_size=40,
        shared_gate=True,
    )
    chosen = backend(run.config)
    assert (chosen.dispatcher, chosen.overlap_shared_expert) == ("alltoall", False)


def test_group_score_sums_the_experts_selected_per_group():
    options = f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk"
    for best, topk, expected in ((1, 3, 3), (2, 3, 1), (2, 1, 1)):
        flags = f"{options} {best} --moe-router-topk {topk} --moe-router-pre-softmax"
        moe = gpt_config(resolve(small_config(flags), 1).config, 61).moe
        assert moe is not None
        assert moe.router.group_candidates == expected


def test_expert_parallel_sizes_reach_the_rank_grid():
    run = resolve(small_config(f"{EXPERTS} {TP} 2 {EP} 4 --global-batch-size 12"), 8)
    assert run.config.parallel.expert_tensor_parallel_size == 2
    assert rank_grid(run) == RankGrid(world_size=8, tp=2, etp=2, ep=4)
    # Samples and batches are those of the dense grid.
    assert (run.data_parallel_size, run.num_microbatches) == (4, 1)
    without_etp = resolve(small_config(f"{EXPERTS} {TP} 2 {ETP} 1 {EP} 4"), 8)
    assert rank_grid(without_etp) == RankGrid(world_size=8, tp=2, etp=1, ep=4)
    assert rank_grid(without_etp).edp == 2
    dense = resolve(small_config(f"{TP} 2 {ETP} 1 {EP} 1"), 8)
    assert rank_grid(dense) == RankGrid(world_size=8, tp=2)
    assert resolve(without_etp.config, 8) == without_etp


def test_latent_attention_flags_reach_the_model():
    options = (
        f"{LATENT} --q-lora-rank 20 --kv-lora-rank 12 --qk-head-dim 10 --qk-pos-emb-head-dim 6 "
        "--v-head-dim 14 --rotary-interleaved --attention-dropout 0.2"
    )
    run = resolve(small_config(options), 1)
    assert check(run.config, 1) == []
    assert resolve(run.config, 1) == run
    model = gpt_config(run.config, 61)
    assert model.attention == LatentAttentionConfig(
        num_attention_heads=6,
        q_lora_rank=20,
        kv_lora_rank=12,
        nope_channels=10,
        rope_channels=6,
        value_channels=14,
        dropout=0.2,
    )
    assert model.rope is not None
    assert model.rope.interleaved
    direct = gpt_config(resolve(small_config(LATENT), 1).config, 61).attention
    assert isinstance(direct, LatentAttentionConfig)
    assert direct.q_lora_rank is None
    assert isinstance(gpt_config(resolve(small_config(), 1).config, 61).attention, AttentionConfig)


def test_yarn_scales_rotary_features_and_softmax():
    yarn = "--position-embedding-type yarn --yarn-rotary-scaling-factor 40"
    model = gpt_config(resolve(small_config(f"{LATENT} {yarn}"), 1).config, 61)
    assert model.rope is not None
    assert model.rope.scaling is not None
    plain = 0.1 * math.log(40) + 1
    assert model.rope.scaling.magnitude == pytest.approx(plain)
    assert isinstance(model.attention, LatentAttentionConfig)
    assert model.attention.scale_factor == 1.0
    scaled = f"{LATENT} {yarn} --mscale 0.707 --mscale-all-dim 0.5"
    model = gpt_config(resolve(small_config(scaled), 1).config, 61)
    assert isinstance(model.attention, LatentAttentionConfig)
    softmax_scale, rotary_scale = 0.05 * math.log(40) + 1, 0.0707 * math.log(40) + 1
    assert model.attention.scale_factor == pytest.approx(softmax_scale**2)
    assert model.rope is not None
    assert model.rope.scaling is not None
    assert model.rope.scaling.magnitude == pytest.approx(rotary_scale / softmax_scale)


# --- refused combinations -------------------------------------------------------------------------

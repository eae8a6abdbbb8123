# SPDX-License-Identifier: Apache-2.0
"""Every option of model, optimizer, schedule and loss scale reaches the core, and changes it."""

from __future__ import annotations

import pytest
import torch

from megatron.core import RankGrid
from megatron.core.distributed import DataParallelConfig
from megatron.core.models import GPTConfig
from megatron.core.ops.rope import RopeScaling
from megatron.core.optimizer import (
    ConstantLossScaler,
    DynamicLossScaler,
    MuonConfig,
    OptimizerConfig,
)
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.core_configs import (
    data_parallel_config,
    decoupled_schedule,
    learning_rate_schedule,
    loss_scaler,
    optimizer_config,
    weight_decay_schedule,
    weight_dtype,
)
from megatron.training.distributed_context import rank_grid
from tests.unit_tests.training.small_config import small_config

POSITIONS = "--position-embedding-type"
ROPE_SCALING = "--use-rope-scaling --rope-scaling"
YARN = f"{POSITIONS} yarn --yarn"


def _gpt(flags: str = "") -> GPTConfig:
    return gpt_config(resolve(small_config(flags), 1).config, 61)


def test_model_flags_reach_the_model():
    flags = (
        "--num-layers 3 --hidden-size 96 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --kv-channels 10 --ffn-hidden-size 50 --swiglu "
        "--normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm --disable-bias-linear "
        "--add-qkv-bias --untie-embeddings-and-output-weights --attention-dropout 0.2 "
        "--hidden-dropout 0.3 --init-method-std 0.01 --window-size 7 --softmax-type learnable "
        "--rotary-base 500000 --rotary-percent 0.5"
    )
    model = _gpt(flags)
    assert model == GPTConfig(
        num_layers=3,
        hidden_size=96,
        vocab_size=61,
        attention=AttentionConfig(
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=10,
            qkv_bias=True,
            output_bias=False,
            qk_norm=True,
            dropout=0.2,
            window=7,
            sinks=True,
        ),
        mlp=MLPConfig(ffn_hidden_size=50, gated=True, activation="silu", bias=False),
        norm=NormConfig(kind="RMSNorm", epsilon=1e-6),
        rope=RopeConfig(base=500000.0, percent=0.5),
        tied=False,
        hidden_dropout=0.3,
        init_std=0.01,
        ffn_pattern="---",
    )
    assert GPTConfig.from_json(model.to_json()) == model


@pytest.mark.parametrize(
    ("flags", "biases"),
    [
        ("", (True, True, True)),
        ("--disable-bias-linear", (False, False, False)),
        ("--disable-bias-linear --add-attention-output-bias", (False, True, False)),
        ("--disable-bias-linear --add-mlp-bias", (False, False, True)),
    ],
)
def test_bias_flags_reach_attention_and_mlp(flags, biases):
    model = _gpt(flags)
    assert (model.attention.qkv_bias, model.attention.output_bias, model.mlp.bias) == biases


@pytest.mark.parametrize(
    ("flags", "scaling"),
    [
        ("--rotary-seq-len-interpolation-factor 4", {"kind": "linear", "factor": 4.0}),
        (
            f"{ROPE_SCALING}-factor 32 --rope-scaling-original-max-position 4096 "
            "--rope-scaling-low-freq-factor 2 --rope-scaling-high-freq-factor 9",
            {
                "kind": "llama3",
                "factor": 32.0,
                "original_max_position": 4096,
                "low_freq_factor": 2.0,
                "high_freq_factor": 9.0,
            },
        ),
        (
            f"{YARN}-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64 "
            "--yarn-beta-fast 16 --yarn-beta-slow 2 --yarn-attention-factor 1.5",
            {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_position": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.5,
            },
        ),
    ],
)
def test_rope_scaling_flags_reach_the_model(flags, scaling):
    assert _gpt(flags).rope == RopeConfig(scaling=RopeScaling(**scaling))
    assert _gpt(f"{POSITIONS} none").rope is None


def test_precision_flags_choose_the_weight_dtype():
    assert weight_dtype(small_config()) == torch.float32
    assert weight_dtype(small_config("--bf16")) == torch.bfloat16
    assert weight_dtype(small_config("--fp16")) == torch.float16


def test_optimizer_flags_reach_the_core():
    flags = (
        "--optimizer sgd --sgd-momentum 0.5 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6 "
        "--clip-grad 0.5 --log-num-zeros-in-grad"
    )
    assert optimizer_config(small_config(flags)) == OptimizerConfig(
        kind="sgd",
        sgd_momentum=0.5,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_eps=1e-6,
        clip_grad=0.5,
        count_zeros=True,
    )


def test_muon_flags_reach_the_core():
    flags = (
        "--optimizer dist_muon --muon-momentum 0.8 --muon-use-nesterov --muon-num-ns-steps 6 "
        "--muon-scale-mode rms --muon-extra-scale-factor 0.5 --no-muon-split-qkv "
        "--muon-adam-weights *.router.* *.gate.*"
    )
    chosen = optimizer_config(small_config(flags))
    assert chosen.kind == "muon"
    assert chosen.muon == MuonConfig(
        momentum=0.8,
        nesterov=True,
        num_ns_steps=6,
        scale_mode="rms",
        extra_scale_factor=0.5,
        split_qkv=False,
        adam_names=("*.router.*", "*.gate.*"),
    )
    assert optimizer_config(small_config("--optimizer muon")).muon == MuonConfig()
    whole = small_config("--optimizer muon --muon-split-matrices whole")
    assert optimizer_config(whole).muon == MuonConfig(split_matrices="whole")


def test_offload_fraction_defaults_to_all_of_the_state():
    assert optimizer_config(small_config("--optimizer-cpu-offload")).offload_fraction == 1.0
    quarter = small_config("--optimizer-cpu-offload --optimizer-offload-fraction 0.25")
    assert optimizer_config(quarter).offload_fraction == 0.25


def test_lr_groups_and_state_dtypes_reach_the_core():
    flags = (
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95 --lr 1e-3 "
        "--lr-group head.*=3 *.bias=0 --weight-decay-group *norm*=0.5 --decoupled-lr 5e-4"
    )
    chosen = optimizer_config(small_config(flags))
    assert chosen.exp_avg_dtype == chosen.exp_avg_sq_dtype == torch.bfloat16
    assert chosen.lr_factors == (("head.*", 3.0), ("*.bias", 0.0))
    assert chosen.decay_factors == (("*norm*", 0.5),)
    assert chosen.decoupled == ("embedding.weight", "head.weight")
    assert optimizer_config(small_config()).decoupled == ()


def test_decoupled_lr_decays_to_its_own_minimum():
    flags = "--lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --lr-warmup-init 1e-5"
    run = resolve(small_config(f"{flags} --decoupled-lr 5e-4 --decoupled-min-lr 2e-4"), 1)
    schedule = decoupled_schedule(run)
    batch = run.config.training.global_batch_size
    assert [schedule.lr(n * batch) for n in (0, 1, 2, 6, 10)] == pytest.approx(
        [1e-5, (1e-5 + 5e-4) / 2, 5e-4, 3.5e-4, 2e-4]
    )
    same = decoupled_schedule(resolve(small_config(f"{flags} --decoupled-lr 5e-4"), 1))
    assert same.lr(10 * batch) == 1e-4
    assert decoupled_schedule(resolve(small_config(flags), 1)) is None


def test_loss_scale_flags_choose_the_scaler():
    assert loss_scaler(small_config("--bf16")) == ConstantLossScaler(1.0)
    assert loss_scaler(small_config("--fp16 --loss-scale 128")) == ConstantLossScaler(128.0)
    flags = (
        "--fp16 --initial-loss-scale 1024 --min-loss-scale 2 --loss-scale-window 7 --hysteresis 3"
    )
    dynamic = loss_scaler(small_config(flags))
    assert isinstance(dynamic, DynamicLossScaler)
    config = dynamic.config
    assert (config.initial_scale, config.min_scale) == (1024.0, 2.0)
    assert (config.growth_interval, config.hysteresis) == (7, 3)


@pytest.mark.parametrize(
    ("flags", "samples", "rate"),
    [
        ("--lr-decay-style constant", 30, 1.0),
        ("--lr-decay-style linear", 30, 0.55),
        ("--lr-decay-style cosine", 30, 0.55),
        ("--lr-decay-style linear --lr-decay-iters 20", 30, 0.775),
        ("--lr-warmup-iters 5 --lr-warmup-init 0.5", 15, 0.75),
        ("--lr-warmup-fraction 0.5", 15, 0.5),
        ("--lr-decay-style inverse-square-root --lr-warmup-iters 2", 48, 0.5),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear", 36, 1.0),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear", 48, 0.55),
    ],
)
def test_learning_rate_follows_its_schedule(flags, samples, rate):
    all_flags = f"--lr 1.0 --min-lr 0.1 --global-batch-size 6 {flags}"
    run = resolve(small_config(all_flags), 1)
    assert learning_rate_schedule(run).lr(samples) == pytest.approx(rate)


def test_weight_decay_follows_its_schedule():
    flags = "--start-weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style linear"
    schedule = weight_decay_schedule(resolve(small_config(f"{flags} --global-batch-size 6"), 1))
    assert schedule.weight_decay(30) == pytest.approx(0.2)
    plain = weight_decay_schedule(resolve(small_config("--weight-decay 0.4"), 1))
    assert plain.weight_decay(3) == 0.4


def test_data_parallel_flags_reach_the_core():
    run = resolve(small_config("--use-distributed-optimizer --overlap-grad-reduce"), 2)
    config = data_parallel_config(run.config)
    assert (config.strategy, config.overlap_grad_reduce) == ("optim", True)
    config = data_parallel_config(resolve(small_config(), 2).config)
    assert (config.strategy, config.overlap_grad_reduce) == ("no_shard", False)
    assert config.fsdp_all_gather_in_start_param_sync
    flags = "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather --bf16 "
    flags += "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim "
    flags += "--no-fsdp-all-gather-in-start-param-sync --param-gather-prefetch-bytes 4096 "
    flags += "--grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation --check-weight-gather"
    run = resolve(small_config(flags), 4)
    assert rank_grid(run) == RankGrid(world_size=4, instances=2)
    assert data_parallel_config(run.config) == DataParallelConfig(
        strategy="optim_grads_params",
        outer="optim",
        overlap_grad_reduce=False,
        overlap_param_gather=True,
        fsdp_all_gather_in_start_param_sync=False,
        prefetch_bytes=4096,
        grad_dtype=torch.bfloat16,
        fp32_accumulation=True,
        debug=True,
    )

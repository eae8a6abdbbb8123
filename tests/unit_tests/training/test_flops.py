# SPDX-License-Identifier: Apache-2.0
"""Operations of a step against a count over every matrix product of the model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.core.datasets import GPTBatch
from megatron.core.models.gpt import logical_weights
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.monitoring.flops import (
    flops_per_square,
    peak_flops,
    product_weights,
    training_flops,
)
from megatron.training.monitoring.log_line import Speedometer
from megatron.training.startup_report import capacity_line, expert_line, parameters
from megatron.training.train_steps import squared_lengths
from tests.unit_tests.training.small_config import small_config


def _products(model, vocab: int, tokens: int, seq: int) -> float:
    """Sum 2·m·k·n over the forward products; causal attention computes half of each square."""
    h, d = model.hidden_size, model.attention.kv_channels
    n, g = model.attention.num_attention_heads, model.attention.num_query_groups
    f = model.mlp.ffn_hidden_size
    layer = [(tokens, h, n * d), (tokens, h, g * d), (tokens, h, g * d), (tokens, n * d, h)]
    layer += [(tokens, h, f)] * (2 if model.mlp.gated else 1) + [(tokens, f, h)]
    attention = sum(2 * (row + 1) * d * 2 for row in range(seq)) * n * (tokens // seq)
    exact = sum(2 * a * b * c for a, b, c in layer) + attention
    return model.num_layers * exact + 2 * tokens * h * vocab


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --ffn-hidden-size 40",
        "--group-query-attention --num-query-groups 2 --kv-channels 10",
    ],
)
def test_training_flops_are_three_times_the_forward(flags):
    seq, samples, vocab = 512, 3, 131
    model = gpt_config(resolve(small_config(flags), 1).config, vocab)
    counted = 3 * _products(model, vocab, seq * samples, seq)
    flops = training_flops(model, vocab_size=vocab, seq_length=seq, samples=samples)
    # The formula takes the triangle as exactly half of the square, without the half diagonal.
    heads = model.attention.num_attention_heads * model.attention.kv_channels
    diagonal = 3 * 2 * model.num_layers * heads * seq * samples
    assert flops == counted - diagonal


def test_flops_of_a_512_wide_model_match_the_formula():
    """8 layers, hidden 512: 6 x parameters x tokens plus attention."""
    flags = (
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --swiglu --ffn-hidden-size 1536"
    )
    run = resolve(small_config(flags + " --group-query-attention --num-query-groups 4"), 1)
    model = gpt_config(run.config, 8192)
    weights = 8 * (512 * 512 * 3 + 3 * 512 * 1536) + 512 * 8192
    flops = training_flops(model, vocab_size=8192, seq_length=512, samples=4)
    assert flops == 6 * weights * 2048 + 8 * 6 * 512 * 512 * 512 * 4


EXPERTS = "--num-experts 8 --moe-layer-freq 0,1 --moe-router-topk 3 --moe-ffn-hidden-size 20"
SHARED = "--moe-shared-expert-intermediate-size 36 --moe-shared-expert-gate"
LATENT = "--kv-lora-rank 12 --qk-head-dim 10 --qk-pos-emb-head-dim 6 --v-head-dim 14"


@pytest.mark.parametrize(
    "flags",
    [
        f"{EXPERTS} --swiglu",
        f"{EXPERTS} {SHARED}",
        f"--multi-latent-attention {LATENT} --q-lora-rank 20",
        f"--multi-latent-attention {LATENT}",
        f"{EXPERTS} --swiglu --mtp-num-layers 2",
    ],
)
def test_product_weights_count_active_matrices_per_token(flags):
    run = resolve(small_config(f"--disable-bias-linear {flags}"), 1)
    model = gpt_config(run.config, 131)
    weights = logical_weights(model)
    matrices = {name: math.prod(shape) for name, shape in weights.items() if len(shape) > 1}
    counted = sum(
        count * 3 // 8 if ".experts." in name else count for name, count in matrices.items()
    )
    # The tied embedding is the head: one use for the next token, one for each MTP layer.
    counted += model.mtp_num_layers * 131 * model.hidden_size
    assert product_weights(model, 131) == counted
    total, active = parameters(model)
    assert total == sum(math.prod(shape) for shape in weights.values())
    whole = sum(count for name, count in matrices.items() if ".experts." in name)
    assert total - active == whole * 5 // 8


def test_latent_attention_flops_use_key_and_value_widths():
    run = resolve(small_config(f"--multi-latent-attention {LATENT} --disable-bias-linear"), 1)
    model = gpt_config(run.config, 131)
    assert flops_per_square(model) == 3 * 6 * (16 + 14) * 2
    with_mtp = resolve(small_config(f"{EXPERTS} --disable-bias-linear --mtp-num-layers 1"), 1)
    assert flops_per_square(gpt_config(with_mtp.config, 131)) == 3 * 6 * (8 + 8) * (2 + 1)


def test_expert_line_states_layout_and_active_parameters():
    assert expert_line(*_run_and_model("", 1)) is None
    line = expert_line(*_run_and_model(f"{EXPERTS} --expert-model-parallel-size 4", 4))
    assert line is not None
    assert line.startswith(
        "experts: 8 in 1 of 2 layers, a token goes to 3 by softmax, weights that sum to 1; expert "
        "parallel 4, expert tensor parallel 1, expert data parallel 1; tokens by "
        "alltoall: fewest rows per rank, dispatch and combine: alltoall 180, allgather 240; a "
        "token uses "
    )
    tp = "--expert-model-parallel-size 2 --tensor-model-parallel-size 2"
    flags = f"{EXPERTS} {SHARED} {tp} --moe-token-dispatcher-type alltoall"
    flags += " --moe-router-score-function sigmoid --moe-router-pre-softmax"
    line = expert_line(*_run_and_model(flags, 8))
    assert line is not None
    assert "a token goes to 3 and a shared one by sigmoid, weights as they are; expert" in line
    assert "expert parallel 2, expert tensor parallel 2, expert" in line
    assert "expert data parallel 2; tokens by alltoall: requested; rows per rank, dispatch" in line
    assert "allgather 120, alltoall 180; a token" in line
    line = expert_line(*_run_and_model(EXPERTS, 2))
    assert line is not None
    assert "expert data parallel 2; all experts are on every rank, no token is sent;" in line


def test_capacity_line_states_dependence_on_layout():
    assert capacity_line(*_run_and_model("", 1)) is None
    assert capacity_line(*_run_and_model(EXPERTS, 1)) is None
    limited = f"{EXPERTS} --moe-expert-capacity-factor 1.25 --moe-token-drop-policy position"
    line = capacity_line(
        *_run_and_model(f"{limited} --tensor-model-parallel-size 2 --micro-batch-size 1", 2)
    )
    assert line is not None
    for fragment in (
        "1.25 x",
        "by position",
        "--micro-batch-size 1",
        "--tensor-model-parallel-size 2",
        "--context-parallel-size 1",
    ):
        assert fragment in line


def _run_and_model(flags: str, world: int):
    run = resolve(small_config(f"--disable-bias-linear {flags}"), world)
    return run, gpt_config(run.config, 131)


def test_peak_flops_depend_on_the_device_name():
    assert peak_flops("NVIDIA H200") == 989.5e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.5e12
    assert peak_flops("NVIDIA B200") == 2250e12
    assert peak_flops("NVIDIA GB200") == 2500e12
    assert peak_flops("Intel Xeon") is None
    assert peak_flops(None) is None


def test_document_masks_reduce_attention_flops():
    run = resolve(small_config("--global-batch-size 6"), 1)
    speed = Speedometer.of(run, padded_vocab_size=128, peak_flops=None)
    model, whole = run.config.model, speed.flops(samples=12, squares=0)
    assert whole == 12 * speed.flops_per_sample
    # Two steps of six samples of 20 tokens, each two documents of 10.
    halves = speed.flops(samples=12, squares=2 * 6 * 2 * 10**2)
    attention = 6 * model.num_layers * model.num_attention_heads * model.kv_channels * 20**2
    assert whole - halves == pytest.approx(2 * 6 * attention / 2)


def test_squared_lengths_count_masked_documents_only():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    whole = GPTBatch(tokens=tokens, loss_mask=torch.ones(2, 3), sample_ids=torch.arange(2))
    assert squared_lengths(whole) == 0
    documents = torch.tensor([[0, 0, 1], [0, 0, 0]], dtype=torch.int32)
    assert squared_lengths(dataclasses.replace(whole, document_ids=documents)) == 4 + 1 + 9


def test_hybrid_flops_count_weights_and_state_passes():
    """Weights count by their shapes; state updates are counted by hand."""
    options = (
        "--num-layers 9 --hybrid-layer-pattern GE|M-*-GEC/*-/*- --num-experts 4 "
        "--disable-bias-linear --attention-output-gate --position-embedding-type none "
        "--linear-num-key-heads 2 --linear-num-value-heads 6 --linear-key-head-dim 5 "
        "--linear-value-head-dim 7 --mamba-head-dim 12 --mamba-state-dim 10 --mamba-num-groups 2 "
        "--pipeline-model-parallel-size 2"
    )
    model, vocab = gpt_config(resolve(small_config(options), 2).config, 131), 131
    weights = 0.0
    for name, shape in logical_weights(model).items():
        if len(shape) < 2:  # norms, biases, decay rates
            continue
        share = model.moe.router.topk / 4 if ".moe.experts." in name else 1.0
        uses = 1 + model.mtp_num_layers if name == "embedding.weight" else 1  # the head's, tied
        weights += share * uses * math.prod(shape)
    # Delta rule state per token: decayed, read by the key, written, read by the query.
    states = 2 * 4 * (6 * 5 * 7)
    # Mamba-2 state per token: decayed, written, read.
    states += 3 * (8 * 12 * 10)
    assert product_weights(model, vocab) == weights + states
    assert flops_per_square(model) == 3 * 6 * 2 * 8 * 3  # heads of 8 in a block and two depths
    flops = training_flops(model, vocab_size=vocab, seq_length=20, samples=3)
    assert flops == 6 * 60 * (weights + states) + 3 * flops_per_square(model) * 20**2


def test_model_without_attention_has_no_attention_flops():
    options = "--num-layers 2 --hybrid-layer-pattern MM --mamba-head-dim 12 --mamba-num-groups 2"
    config = small_config(options, without=("--num-attention-heads",))
    assert flops_per_square(gpt_config(resolve(config, 1).config, 61)) == 0.0

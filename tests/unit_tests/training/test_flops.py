# SPDX-License-Identifier: Apache-2.0
"""Operations of a step against a count over every matrix product of the model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.datasets.samplers import GPTBatch
from megatron.training.config.resolve import resolve
from megatron.training.monitoring.flops import peak_flops, training_flops
from megatron.training.monitoring.step_window import Speedometer
from megatron.training.pretraining import squared_lengths
from tests.unit_tests.training.small_config import small_config


def _products(model, vocab: int, tokens: int, seq: int) -> float:
    """Sum 2·m·k·n over the forward products; causal attention computes half of each square."""
    h, d = model.hidden_size, model.kv_channels
    n, g, f = model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size
    layer = [(tokens, h, n * d), (tokens, h, g * d), (tokens, h, g * d), (tokens, n * d, h)]
    layer += [(tokens, h, f)] * (2 if model.swiglu else 1) + [(tokens, f, h)]
    attention = sum(2 * (row + 1) * d * 2 for row in range(seq)) * n * (tokens // seq)
    exact = sum(2 * a * b * c for a, b, c in layer) + attention
    return model.num_layers * exact + 2 * tokens * h * vocab


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--swiglu --ffn-hidden-size 40",
        "--group-query-attention --num-query-groups 2 --kv-channels 10",
    ],
)
def test_three_times_the_forward_products(more):
    model = resolve(small_config(more), 1).config.model
    seq, samples, vocab = 512, 3, 131
    counted = 3 * _products(model, vocab, seq * samples, seq)
    got = training_flops(model, vocab_size=vocab, seq_length=seq, samples=samples)
    # The formula takes the triangle as exactly half of the square, without the half diagonal.
    diagonal = (
        3 * 2 * model.num_layers * model.num_attention_heads * model.kv_channels * seq * samples
    )
    assert got == counted - diagonal


def test_a_known_size():
    """8 layers, hidden 512: 6 x parameters x tokens plus attention."""
    more = (
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --swiglu --ffn-hidden-size 1536"
    )
    model = resolve(
        small_config(more + " --group-query-attention --num-query-groups 4"), 1
    ).config.model
    weights = 8 * (512 * 512 * 3 + 3 * 512 * 1536) + 512 * 8192
    got = training_flops(model, vocab_size=8192, seq_length=512, samples=4)
    assert got == 6 * weights * 2048 + 8 * 6 * 512 * 512 * 512 * 4


def test_peaks():
    assert peak_flops("NVIDIA H200") == 989.5e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.5e12
    assert peak_flops("NVIDIA B200") == 2250e12
    assert peak_flops("NVIDIA GB200") == 2500e12
    assert peak_flops("Intel Xeon") is None
    assert peak_flops(None) is None


def test_masked_documents_cost_less_attention_by_their_squares():
    run = resolve(small_config("--global-batch-size 6"), 1)
    speed = Speedometer.of(run, padded_vocab_size=128, peak_flops=None)
    model, whole = run.config.model, speed.flops(steps=2, squares=0)
    assert whole == 2 * speed.flops_per_step
    # Two steps of six samples of 20 tokens, each two documents of 10.
    halves = speed.flops(steps=2, squares=2 * 6 * 2 * 10**2)
    attention = 6 * model.num_layers * model.num_attention_heads * model.kv_channels * 20**2
    assert whole - halves == pytest.approx(2 * 6 * attention / 2)


def test_squared_lengths_are_of_documents_and_none_without_masks():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    whole = GPTBatch(tokens=tokens, loss_mask=torch.ones(2, 3), sample_ids=torch.arange(2))
    assert squared_lengths(whole) == 0
    documents = torch.tensor([[0, 0, 1], [0, 0, 0]], dtype=torch.int32)
    assert squared_lengths(dataclasses.replace(whole, document_ids=documents)) == 4 + 1 + 9

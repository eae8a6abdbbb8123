# SPDX-License-Identifier: Apache-2.0
"""Operations of a step against a count over every matrix product of the model."""

from __future__ import annotations

import pytest

from megatron.training.flops import peak_flops, training_flops
from megatron.training.resolve import resolve
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

# SPDX-License-Identifier: Apache-2.0
"""Floating point operations of a training step, and the peak throughput of known devices.

These are model FLOPs, not hardware FLOPs: forward + backward = 3 x forward, a multiply-add counts
2; recomputation and elementwise operations are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from megatron.core.models.gpt_config import GPTConfig
from megatron.core.models.layer_pattern import (
    ATTENTION,
    ATTENTIONS,
    DELTA_NET,
    DENSE,
    EXPERTS,
    LATENT,
    MAMBA,
    SHORT_CONV,
    WINDOW,
)
from megatron.core.moe import MoEConfig
from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig, MLPConfig

Lengths = TypeVar("Lengths", int, np.ndarray)

#: Dense bf16 peak in FLOP/s by substring of the device name, more specific names first (vendors'
#: data sheets).
PEAK_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "GB200": 2500e12,
        "B200": 2250e12,
        "H200": 989.5e12,
        "GH200": 989.5e12,
        "H100 PCIe": 756e12,
        "H100 NVL": 835e12,
        "H100": 989.5e12,
        "H20": 148e12,
        "A100": 312e12,
        "A800": 312e12,
        "L40S": 362e12,
    }
)


def training_flops(model: GPTConfig, *, vocab_size: int, seq_length: int, samples: int) -> float:
    """Return the FLOPs of forward and backward over `samples` sequences.

    Each token counts 6 per weight that multiplies it: attention, MLP (or router, top-k experts and
    shared expert) and output layer. Each sequence adds the two matrix products of attention. A
    recurrence is counted in its sequential form, also where kernels work in chunks: in forward,
    each decay, read and update counts 2 per state element. Each MTP layer adds its blocks, a
    projection from 2 h to h and the output layer.

    Args:
        vocab_size: padded vocabulary size.
        seq_length: tokens per sample.
        samples: number of sequences.
    """
    squares = mean_square(seq_length, window_shares(model))
    tokens = samples * seq_length
    return float(6 * tokens * product_weights(model, vocab_size)) + (
        flops_per_square(model) * squares * samples
    )


def product_weights(model: GPTConfig, vocab_size: int) -> int:
    """Return the number of weights that multiply a token, counting only its active experts."""
    mtp_layers, size = model.mtp_num_layers, model.hidden_size
    kinds = all_blocks(model)
    layers = 0
    if model.attention is not None:
        layers += attention_blocks(model) * _attention_weights(size, model.attention)
    if model.mlp is not None:
        layers += kinds.count(DENSE) * _mlp_weights(size, model.mlp)
    if model.moe is not None:
        layers += kinds.count(EXPERTS) * _expert_weights(size, model.moe)
    if model.delta_net is not None:
        layers += kinds.count(DELTA_NET) * _delta_net_weights(size, model.delta_net)
    if model.mamba is not None:
        layers += kinds.count(MAMBA) * _mamba_weights(size, model.mamba)
    if model.short_conv is not None:
        layers += kinds.count(SHORT_CONV) * _short_conv_weights(size, model.short_conv)
    return layers + mtp_layers * 2 * size * size + (1 + mtp_layers) * size * vocab_size


def all_blocks(model: GPTConfig) -> str:
    """Return the layer symbols of all blocks, including those of every MTP layer."""
    return model.blocks + model.mtp_blocks * model.mtp_num_layers


def attention_blocks(model: GPTConfig) -> int:
    """Return the number of attention blocks."""
    return sum(symbol in ATTENTIONS for symbol in all_blocks(model))


def _attention_weights(size: int, shape: AttentionConfig | LatentAttentionConfig) -> int:
    heads = shape.num_attention_heads
    if isinstance(shape, AttentionConfig):
        gates = heads if shape.output_gate else 0
        return size * shape.kv_channels * (2 * (heads + shape.num_query_groups) + gates)
    query = heads * (shape.nope_channels + shape.rope_channels)
    key_value = heads * (shape.nope_channels + shape.value_channels)
    rank = shape.q_lora_rank
    down = size * query if rank is None else rank * (size + query)
    latent = size * (shape.kv_lora_rank + shape.rope_channels) + shape.kv_lora_rank * key_value
    return down + latent + heads * shape.value_channels * size


def _delta_net_weights(size: int, shape: GatedDeltaNetConfig) -> int:
    """Return the weights of a gated delta net plus its state operations in units of weights: decay,
    read by the key, update, and read by the query."""
    keys = shape.num_key_heads * shape.key_channels
    values = shape.num_value_heads * shape.value_channels
    projections = size * (2 * keys + 2 * values + 2 * shape.num_value_heads) + values * size
    return projections + shape.conv_width * (2 * keys + values) + 4 * shape.key_channels * values


def _mamba_weights(size: int, shape: Mamba2Config) -> int:
    """Return the weights of a Mamba-2 block plus its state operations in units of weights: decay,
    update and read."""
    inner, shared = shape.inner_channels, 2 * shape.num_groups * shape.state_channels
    projections = size * (2 * inner + shared + shape.num_heads) + inner * size
    return projections + shape.conv_width * (inner + shared) + 3 * shape.state_channels * inner


def _short_conv_weights(size: int, shape: ShortConvConfig) -> int:
    return size * (4 * size + shape.conv_width)


def _mlp_weights(size: int, mlp: MLPConfig) -> int:
    return size * mlp.ffn_hidden_size * (3 if mlp.gated else 2)


def _expert_weights(size: int, moe: MoEConfig) -> int:
    expert = size * moe.ffn_hidden_size * (3 if moe.gated else 2)
    shared = 0 if moe.shared is None else _mlp_weights(size, moe.shared)
    gate = size if moe.shared_gate else 0
    return moe.num_experts * size + moe.router.topk * expert + shared + gate


def flops_per_square(model: GPTConfig) -> float:
    """Return the FLOPs of attention, forward and backward, for a document of one token.

    A document of n tokens needs n^2 times as many. With a document mask, the sum of squared
    document lengths replaces the squared sequence length. The factor 3 is forward plus backward;
    each of the two matrix products (QK^T and PV) costs 2 n^2 / 2 per channel.
    """
    shape = model.attention
    if shape is None:
        return 0.0
    if isinstance(shape, AttentionConfig):
        features = 2 * shape.kv_channels
    else:
        features = shape.nope_channels + shape.rope_channels + shape.value_channels
    return 3.0 * shape.num_attention_heads * features * attention_blocks(model)


def window_shares(model: GPTConfig) -> Mapping[int | None, float]:
    """Return the share of the attention blocks with each attention window; None is no window."""
    windows: dict[str, int | None] = {LATENT: None}
    if isinstance(model.attention, AttentionConfig):
        windows[ATTENTION] = model.attention.window
    if model.second_attention is not None:
        windows[WINDOW] = model.second_attention.window
    counts = Counter(windows[symbol] for symbol in all_blocks(model) if symbol in windows)
    return {window: count / counts.total() for window, count in counts.items()} or {None: 1.0}


def mean_square(length: Lengths, shares: Mapping[int | None, float]) -> Any:
    """Return the mean of `visible_square` over the attention blocks, whose windows have these
    shares."""
    return sum(share * visible_square(length, window) for window, share in shares.items())


def visible_square(length: Lengths, window: int | None) -> Lengths:
    """Return n^2 for documents of n tokens, or 2 w n - w^2 with a window of w tokens.

    Both are twice the number of visible query-key pairs of a causal mask."""
    if window is None:
        return length * length
    visible = np.minimum(length, window)
    return visible * (2 * length - visible)


def peak_flops(device_name: str | None) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s; None for unknown devices and CPUs."""
    if device_name is None:
        return None
    for name, peak in PEAK_FLOPS.items():
        if name in device_name:
            return peak
    return None

# SPDX-License-Identifier: Apache-2.0
"""Plain recurrent mixers: token by token, over whole logical weights.

No chunks, fused weights or packing: a loop over the tokens of a row that resets the state where a
document begins. It uses no code under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PlainDeltaNet:
    """The shape of a gated delta net (Yang et al. 2024, arXiv 2412.06464)."""

    key_heads: int
    value_heads: int
    key_channels: int
    value_channels: int
    epsilon: float

    def __call__(
        self, weights: Weights, name: str, x: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of the mixer of block `name` for normalised x [b, s, h].

        Args:
            ids: document ids [b, s].
        """
        name = f"{name}.delta_net"
        heads_per_key = self.value_heads // self.key_heads
        query, key, value = (
            convolved(
                weights,
                f"{name}.conv.{projection}",
                _linear(weights, f"{name}.{projection}", x),
                ids,
            )
            for projection in ("query", "key", "value")
        )
        query, key = (
            _unit(t.unflatten(-1, (self.key_heads, self.key_channels))).repeat_interleave(
                heads_per_key, 2
            )
            for t in (query, key)
        )  # [b, s, Hv, K]
        value = value.unflatten(-1, (self.value_heads, self.value_channels))
        beta = _linear(weights, f"{name}.beta", x).sigmoid()  # [b, s, Hv]
        alpha = _linear(weights, f"{name}.alpha", x) + weights[f"{name}.dt_bias"]
        decay = -weights[f"{name}.A_log"].exp() * functional.softplus(alpha)
        begins = _begins(ids)
        state = x.new_zeros(x.shape[0], self.value_heads, self.key_channels, self.value_channels)
        out = []
        for t in range(x.shape[1]):
            retention = decay[:, t].exp() * ~begins[:, t, None]
            state = state * retention[:, :, None, None]
            predicted = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
            delta = beta[:, t, :, None] * (value[:, t] - predicted)
            state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], delta)
            out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
        mixed = torch.stack(out, 1) / math.sqrt(self.key_channels)  # [b, s, Hv, V]
        mixed = _unit_mean(mixed, self.epsilon) * weights[f"{name}.output_norm.weight"]
        gate = functional.silu(_linear(weights, f"{name}.gate", x))
        return _linear(weights, f"{name}.output", mixed.flatten(2) * gate)


@dataclass(frozen=True, kw_only=True)
class PlainMamba:
    """The shape of a Mamba-2 mixer (Dao & Gu 2024, arXiv 2405.21060)."""

    heads: int
    head_channels: int
    state_channels: int
    groups: int
    norm_groups: int
    epsilon: float
    factors: tuple[float, ...] = (1.0,) * 5

    def __call__(
        self, weights: Weights, name: str, x: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of the mixer of block `name` for normalised x [b, s, h].

        Args:
            ids: document ids [b, s].
        """
        name = f"{name}.mamba"
        heads_per_group = self.heads // self.groups
        gate_factor, *input_factors, dt_factor = self.factors
        inputs, write, read = (
            convolved(
                weights,
                f"{name}.conv.{projection}",
                _linear(weights, f"{name}.{projection}", x) * factor,
                ids,
            )
            for projection, factor in zip(("x", "B", "C"), input_factors, strict=True)
        )
        write, read = (
            t.unflatten(-1, (self.groups, self.state_channels)).repeat_interleave(
                heads_per_group, 2
            )
            for t in (write, read)
        )  # [b, s, H, N]
        inputs = inputs.unflatten(-1, (self.heads, self.head_channels))
        raw_dt = _linear(weights, f"{name}.dt", x) * dt_factor
        dt = functional.softplus(raw_dt + weights[f"{name}.dt_bias"])
        decay = (-weights[f"{name}.A_log"].exp() * dt).exp()  # [b, s, H]
        begins = _begins(ids)
        state = x.new_zeros(x.shape[0], self.heads, self.head_channels, self.state_channels)
        out = []
        for t in range(x.shape[1]):
            state = state * (decay[:, t] * ~begins[:, t, None])[:, :, None, None]
            dt_x = dt[:, t, :, None] * inputs[:, t]
            state = state + torch.einsum("bhp,bhn->bhpn", dt_x, write[:, t])
            out.append(torch.einsum("bhpn,bhn->bhp", state, read[:, t]))
        mixed = torch.stack(out, 1) + weights[f"{name}.D"][:, None] * inputs  # [b, s, H, P]
        gate = _linear(weights, f"{name}.gate", x) * gate_factor
        gated = mixed.flatten(2) * functional.silu(gate)
        grouped = _unit_mean(gated.unflatten(-1, (self.norm_groups, -1)), self.epsilon)
        normed = grouped.flatten(2) * weights[f"{name}.output_norm.weight"]
        return _linear(weights, f"{name}.output", normed)


@dataclass(frozen=True)
class PlainShortConv:
    """A gated short convolution as LFM2 has it."""

    def __call__(
        self, weights: Weights, name: str, x: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of the mixer of block `name` for normalised x [b, s, h].

        Args:
            ids: document ids [b, s].
        """
        name = f"{name}.short_conv"
        b, c, inputs = (
            _linear(weights, f"{name}.{projection}", x) for projection in ("B", "C", "x")
        )
        mixed = causal_sum(weights, f"{name}.conv.x", b * inputs, ids)
        return _linear(weights, f"{name}.output", c * mixed)


def convolved(weights: Weights, name: str, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return SiLU of the causal convolution of x [b, s, c] within each document."""
    return functional.silu(causal_sum(weights, name, x, ids))


def causal_sum(weights: Weights, name: str, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the causal convolution of x [b, s, c] within each document, by a loop."""
    kernel = weights[f"{name}.weight"][:, 0]  # [c, W]
    bias, width = weights.get(f"{name}.bias"), kernel.shape[1]
    out = []
    for t in range(x.shape[1]):
        total = torch.zeros_like(x[:, 0]) if bias is None else bias.expand_as(x[:, 0])
        for back in range(min(width, t + 1)):
            same = (ids[:, t - back] == ids[:, t]).unsqueeze(-1)
            total = total + same * kernel[:, width - 1 - back] * x[:, t - back]
        out.append(total)
    return torch.stack(out, 1)


def _begins(ids: torch.Tensor) -> torch.Tensor:
    """Return bool [b, s]: whether a document begins at a token that is not the row's first."""
    begins = torch.zeros_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _unit_mean(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def _linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    out = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias

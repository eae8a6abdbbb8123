# SPDX-License-Identifier: Apache-2.0
"""Our GPT as a module of `nn.Parameter`s, for torch's own data parallelism to wrap.

The same weights in the same fusion (q|k|v, gate|up), the same ops in the same order; only how a
weight is reached and where its gradient goes are torch's: `F.linear`, `F.embedding`, autograd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.models.gpt import GPTModel
from megatron.core.ops.attention import attention
from megatron.core.ops.linear_cross_entropy import linear_cross_entropy
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.swiglu import gated
from tools.bench import shapes
from tools.bench.shapes import Shape


class PlainLayer(nn.Module):
    """An attention and an MLP block: the unit that `fully_shard` is applied to."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        rows = (shape.heads + 2 * shape.kv_heads) * self.head
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = _matrix(rows, shape.hidden)
        self.output = _matrix(shape.hidden, shape.heads * self.head)
        self.mlp_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = _matrix(2 * shape.ffn, shape.hidden)
        self.down = _matrix(shape.hidden, shape.ffn)

    def forward(
        self,
        delta: torch.Tensor,
        stream: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the MLP's delta, the stream with the attention's), each [s, b, h]."""
        normed, stream = _normed(delta, stream, self.attention_norm)
        mixed = F.linear(normed, self.qkv)
        mixed = mixed.view(*mixed.shape[:2], -1, self.head)  # [s, b, n + 2g, d]
        query_key, value = mixed.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        query_key = apply_rope(query_key, cos, sin)
        query, key = query_key.split([self.heads, self.kv_heads], dim=2)
        out, _ = attention(query, key, value, causal=True)  # [s, b, n, d]
        delta = F.linear(out.reshape(*out.shape[:2], -1), self.output)
        normed, stream = _normed(delta, stream, self.mlp_norm)
        return F.linear(gated(F.linear(normed, self.gate_up), "silu"), self.down), stream


class PlainModel(nn.Module):
    """Embedding, layers, final norm and an untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.hidden // shape.heads
        self.embedding = _matrix(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(PlainLayer(shape) for _ in range(shape.layers))
        self.final_norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = _matrix(shape.vocabulary, shape.hidden)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, token_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of token_weights · nll, a scalar; all arguments are [b, s]."""
        positions = torch.arange(tokens.shape[1])
        cos, sin = rotary_table(positions, dim=self.head_size, base=shapes.ROPE_BASE)
        delta, stream = F.embedding(tokens.t(), self.embedding), None  # [s, b, h]
        for layer in self.layers:
            delta, stream = layer(delta, stream, cos, sin)
        hidden, _ = _normed(delta, stream, self.final_norm)
        loss, _ = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.head,
            labels.t().reshape(-1),
            token_weights.t().reshape(-1),
        )
        return loss


def plain_names(shape: Shape) -> dict[str, str]:
    """Return our handle's name for every parameter of a `PlainModel`."""
    plain_by_name = {
        "attention_norm": "0.norm.weight",
        "qkv": "0.attention.qkv.weight",
        "output": "0.attention.output.weight",
        "mlp_norm": "1.norm.weight",
        "gate_up": "1.mlp.input.weight",
        "down": "1.mlp.down.weight",
    }
    names = {
        "embedding": "embedding.weight",
        "final_norm": "decoder.final_norm.weight",
        "head": "head.weight",
    }
    for layer in range(shape.layers):
        for name, plain_name in plain_by_name.items():
            block, _, suffix = plain_name.partition(".")
            names[f"layers.{layer}.{name}"] = f"decoder.blocks.{2 * layer + int(block)}.{suffix}"
    return names


def copy_weights(plain: PlainModel, model: GPTModel, shape: Shape) -> None:
    """Give a plain model the weights of ours, before it is wrapped.

    Raises:
        ValueError: the two do not have the same weights: the race would be over other work.
    """
    names = plain_names(shape)
    parameters = dict(plain.named_parameters())
    mcore_shapes = {name: handle.shape for name, handle in model.store.handles.items()}
    plain_shapes = {names[name]: tuple(parameter.shape) for name, parameter in parameters.items()}
    if mcore_shapes != plain_shapes:
        raise ValueError(
            f"the models differ: {sorted(mcore_shapes.items() ^ plain_shapes.items())}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(model.store.handles[names[name]].get())


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))


def _normed(
    delta: torch.Tensor, stream: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(stream + delta), stream + delta)."""
    if stream is None:
        return rms_norm(delta, weight, eps=shapes.NORM_EPSILON), delta
    return rms_norm(delta, weight, eps=shapes.NORM_EPSILON, residual=stream)

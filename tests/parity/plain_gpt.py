# SPDX-License-Identifier: Apache-2.0
"""A plain fp64 GPT over whole logical weights: the reference of the parity tests.

No parallelism, fused weights, kernels, handles or buffers: autograd over a dictionary of logical
tensors. Its gradients are logical gradients, and it uses no code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tests.support.inputs import Microbatch

Weights = Mapping[str, torch.Tensor]

_POSITIONS = "embedding.position_embeddings.weight"

#: A recurrent mixer: function of (weights, name of its block, normalised x, document ids).
Mixer = Callable[[Weights, str, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PlainGPT:
    """The shape of a decoder: residual blocks, causal grouped-query attention, and positions that
    are rotary unless the weights have learned ones.

    Args:
        clamp: the gate is (up + 1) g sigmoid(1.702 g) with g <= clamp and |up| <= clamp; None gates
            by silu.
        norm_placement: norms of a block: "pre" of its input, "post" of its output, "both".
        attention_multiplier, mlp_multiplier, recurrent_multiplier: factors on outputs of mixers.
        embedding_multiplier, residual_multiplier, logit_scale: factors on embeddings, outputs of
            blocks and logits.
        softmax_scale: factor on the attention logits; None is 1 / sqrt(d).
        parallel: attention and MLP of a layer have one norm, and their outputs are added together.
        softcap, final_softcap: bounds c of attention logits and of logits x, which become
            c tanh(x / c).
        recurrent: mixers of the first layers, in place of attention.
        second: window and rotary base of the first attention block if it differs from the other
            blocks; base None does not rotate.
        yarn: factor, original context, and rotations over it of features that are not and that are
            scaled (Peng et al. 2023, section 3.2); None for none.
        query_scale: β and L of the factor 1 + β ln(1 + ⌊p / L⌋) on queries; None for none.
    """

    layers: int
    heads: int
    groups: int
    head_dim: int
    tied: bool = False
    norm: str = "RMSNorm"
    norm_placement: str = "pre"
    qk_norm: bool = False
    gated: bool = True
    clamp: float | None = None
    window: int | None = None
    rotary_base: float = 10000.0
    epsilon: float = 1e-5
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    attention_multiplier: float = 1.0
    mlp_multiplier: float = 1.0
    recurrent_multiplier: float = 1.0
    softmax_scale: float | None = None
    parallel: bool = False
    softcap: float | None = None
    final_softcap: float | None = None
    recurrent: tuple[Mixer, ...] = ()
    second: tuple[int | None, float | None] | None = None
    yarn: tuple[float, int, float, float] | None = None
    query_scale: tuple[float, int] | None = None

    def logits(
        self, weights: Weights, tokens: torch.Tensor, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [b, s, v] for tokens [b, s] of documents `ids` [b, s]; None: one per row."""
        ids = torch.zeros_like(tokens) if ids is None else ids
        hidden = weights["embedding.weight"][tokens] * self.embedding_multiplier  # [b, s, h]
        if _POSITIONS in weights:
            starts = (ids[:, None, :] < ids[:, :, None]).sum(-1)  # start of each token's document
            hidden = hidden + weights[_POSITIONS][torch.arange(tokens.shape[1]) - starts]
        for block in range(2 * self.layers):
            name, layer = f"decoder.blocks.{block}", block // 2
            if self.parallel and block % 2:
                continue
            if self.parallel:
                further = f"decoder.blocks.{block + 1}"
                delta = self.attention(weights, name, hidden, ids)
                delta = delta + self.mlp(weights, further, hidden, norm=name)
            elif block % 2:
                delta = self.mlp(weights, name, hidden)
            elif layer < len(self.recurrent):
                x = self.input_norm(weights, name, hidden)
                delta = self.recurrent[layer](weights, name, x, ids) * self.recurrent_multiplier
            else:
                delta = self.attention(weights, name, hidden, ids)
            if self.norm_placement != "pre":
                delta = self.norm_of(weights, f"{name}.post_norm", delta)
            hidden = hidden + delta * self.residual_multiplier
        hidden = self.norm_of(weights, "decoder.final_norm", hidden)
        head = weights["embedding.weight" if self.tied else "head.weight"]
        return _bounded(hidden @ head.T * self.logit_scale, self.final_softcap)

    def token_losses(
        self,
        weights: Weights,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the negative log-likelihoods [b, s]."""
        return functional.cross_entropy(
            self.logits(weights, tokens, ids).transpose(1, 2), labels, reduction="none"
        )

    def _linear(self, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ weights[f"{name}.weight"].T
        bias = weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def input_norm(self, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the mixer of block `name` from the stream [..., h]."""
        return x if self.norm_placement == "post" else self.norm_of(weights, f"{name}.norm", x)

    def norm_of(self, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., h] normalised by the weights of `name`."""
        if self.norm == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        out = x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        out = out * weights[f"{name}.weight"]
        bias = weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def attention(
        self, weights: Weights, name: str, hidden: torch.Tensor, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the output of attention block `name` for hidden [b, s, h] of documents [b, s]."""
        x = self.input_norm(weights, name, hidden)
        query = self._heads(weights, f"{name}.attention.query", x)  # [b, n, s, d]
        key = self._heads(weights, f"{name}.attention.key", x)  # [b, g, s, d]
        window, base = self.window, self.rotary_base
        if self.second is not None and name == f"decoder.blocks.{2 * len(self.recurrent)}":
            window, base = self.second
        value = self._heads(weights, f"{name}.attention.value", x)
        if self.qk_norm:
            query = self._norm_of_heads(weights, f"{name}.attention.query_norm", query)
            key = self._norm_of_heads(weights, f"{name}.attention.key_norm", key)
        if _POSITIONS not in weights and base is not None:
            query, key = self._rotated(query, base), self._rotated(key, base)
            query = self._scaled(query, ids)
        heads_per_group = self.heads // self.groups
        key, value = (
            t.repeat_interleave(heads_per_group, dim=1) for t in (key, value)
        )  # [b, n, s, d]
        scale = 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale
        scores = _bounded(query @ key.transpose(-1, -2) * scale, self.softcap)  # [b, n, s, s]
        length = scores.shape[-1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        if window is not None:
            visible = visible.triu(1 - window)
        if ids is not None:
            visible = visible & (ids[:, None, :, None] == ids[:, None, None, :])
        scores = scores.masked_fill(~visible, -math.inf)
        sinks = weights.get(f"{name}.attention.sinks")
        if sinks is not None:  # an additional key with value 0
            sink_scores = sinks[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink_scores], dim=-1)
        mixed = scores.softmax(-1)[..., :length] @ value  # [b, n, s, d]
        mixed = mixed.transpose(1, 2).flatten(2)
        if f"{name}.attention.gate.weight" in weights:
            mixed = mixed * self._linear(weights, f"{name}.attention.gate", x).sigmoid()
        return self._linear(weights, f"{name}.attention.output", mixed) * self.attention_multiplier

    def _heads(self, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._linear(weights, name, x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _norm_of_heads(self, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
        """Normalise each head of x [b, n, s, d], or all n·d features if the weight has as many."""
        if len(weights[f"{name}.weight"]) == x.shape[-1]:
            return self.norm_of(weights, name, x)
        rows = self.norm_of(weights, name, x.transpose(1, 2).flatten(2))  # [b, s, n·d]
        return rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotated(self, x: torch.Tensor, base: float) -> torch.Tensor:
        """Rotate pairs (i, i + d/2) by position · base^(-2i/d) (Su et al. 2021, section 3.2)."""
        half = self.head_dim // 2
        frequency = base ** (-torch.arange(half, dtype=x.dtype) / half)
        if self.yarn is not None:
            factor, length, fast, slow = self.yarn
            # The features (not integers) that rotate `fast` and `slow` times over the context.
            low, high = (
                half * math.log(length / (2 * math.pi * turns), base) for turns in (fast, slow)
            )
            scaled = ((torch.arange(half) - low) / (min(high, 2 * half - 1) - low)).clamp(0, 1)
            frequency = frequency * (1 - scaled + scaled / factor)
            x = x * (0.1 * math.log(factor) + 1)
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency  # [s, d/2]
        x1, x2 = x[..., :half], x[..., half:]
        return torch.cat(
            (
                x1 * angle.cos() - x2 * angle.sin(),
                x2 * angle.cos() + x1 * angle.sin(),
            ),
            dim=-1,
        )

    def _scaled(self, query: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Multiply queries [b, n, s, d] by the factors of their positions in documents [b, s]."""
        if self.query_scale is None:
            return query
        positions = torch.arange(query.shape[-2])
        if ids is not None:
            positions = positions - (ids[:, None, :] < ids[:, :, None]).sum(-1)  # [b, s]
        beta, length = self.query_scale
        factors = 1 + beta * (1 + positions.div(length, rounding_mode="floor")).to(query).log()
        return query * factors.view(-1, 1, query.shape[-2], 1)

    def mlp(
        self, weights: Weights, name: str, hidden: torch.Tensor, *, norm: str | None = None
    ) -> torch.Tensor:
        """Return the output of MLP block `name` for hidden [b, s, h], with the norm of block
        `norm`, by default its own."""
        x = self.input_norm(weights, norm or name, hidden)
        up = self._linear(weights, f"{name}.mlp.up", x)
        if self.clamp is not None:
            gate = self._linear(weights, f"{name}.mlp.gate", x).clamp(max=self.clamp)
            inner = gate * (1.702 * gate).sigmoid() * (up.clamp(-self.clamp, self.clamp) + 1.0)
        elif self.gated:
            inner = functional.silu(self._linear(weights, f"{name}.mlp.gate", x)) * up
        else:
            inner = functional.gelu(up)
        return self._linear(weights, f"{name}.mlp.down", inner) * self.mlp_multiplier


def _bounded(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else cap * (logits / cap).tanh()


def step_loss(
    model: PlainGPT, weights: Weights, microbatches: Sequence[Microbatch], *, per_token: bool
) -> torch.Tensor:
    """Return the loss of one step over the microbatches of all data-parallel ranks.

    Mean loss: the mean over microbatches of the mean over their counted tokens. Per-token
    loss: the sum over all counted tokens of the step, over their number.
    """
    tokens = torch.cat([batch.tokens for batch in microbatches])
    labels = torch.cat([batch.labels for batch in microbatches])
    ids = None
    if microbatches[0].document_ids is not None:
        ids = torch.cat([batch.document_ids for batch in microbatches])
    losses = model.token_losses(weights, tokens, labels, ids).split(len(microbatches[0].tokens))
    masks = [batch.loss_mask for batch in microbatches]
    sums = torch.stack([(x * mask).sum() for x, mask in zip(losses, masks, strict=True)])
    counts = torch.stack([mask.sum().double() for mask in masks])
    return sums.sum() / counts.sum() if per_token else (sums / counts).mean()

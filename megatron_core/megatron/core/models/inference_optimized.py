# SPDX-License-Identifier: Apache-2.0
"""The forward pass of generation, as few operations as it takes, over the weights of a GPTModel.

    engine = Engine(InferenceOptimizedModel(model), ...)

It has no weights and no modules of its own: it reads those of the model, so what training or an
update writes shows in the next step. It runs forward only, outside of autograd. Activations are
packed tokens [t, h]; what differs from the model's own forward:

| part | model | here |
|---|---|---|
| rotary tables | computed each step | rows of a table that is made once |
| rotation | into a new tensor | in place, queries and keys at once |
| keys and values | two writes, two gathers | one each, into pages that hold both |
| attention, MLP | modules in [s, b, h] | functions in [t, h], without checks of shapes |
| row-parallel product | reduced by its layer | left as addends, which the next norm reduces |

Mixers other than attention and MLPs (experts, latent attention, recurrences) run their modules.

The residual stream under tensor parallelism: between blocks there is the stream, and `delta`, which
the last block adds to it. `delta` may be addends of the ranks; whoever normalises reduces first,
which under sequence parallelism is one step: reduce-scatter, add, norm, all-gather. Where
`megatron.core.comm.symmetric_memory` has found a way over NVLink, that is one kernel.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.comm.collectives import all_reduce
from megatron.core.comm.symmetric_memory import SequenceParallelComm
from megatron.core.context_parallel import SequenceLayout
from megatron.core.models.gpt import GPTModel
from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.nvls import RowNorm
from megatron.core.ops.weight_copy import CopyDtype
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelHead,
)
from megatron.core.transformer import (
    MLP,
    KeyValueCache,
    LatentAttention,
    Norm,
    RopeTable,
    RotaryEmbedding,
    SelfAttention,
)
from megatron.core.weight_gather import WeightHandle, copy_weights

#: Dtypes that norms are computed in as they are.
_WIDE = frozenset({torch.float32, torch.float64})

#: Positions that the rotary table has at first; it doubles where a step needs more.
TABLE_ROWS = 4096


class RotaryRows:
    """Rotate heads in place, by rows of a table of all positions.

    Args:
        rotary: the model's frequencies.
        device: where positions will be.
    """

    def __init__(self, rotary: RotaryEmbedding, device: torch.device) -> None:
        self.rotary, self.device, self.size = rotary, device, 0

    def _grow(self, size: int) -> None:
        """Make the table of positions 0 to size - 1: cosines and signed sines, fp32 [size, r]."""
        table = self.rotary(torch.arange(size, device=self.device))
        if table.interleaved:
            cos = table.cos.repeat_interleave(2, -1)
            sin = torch.stack([-table.sin, table.sin], -1).flatten(-2)
        else:
            cos = torch.cat([table.cos, table.cos], -1)
            sin = torch.cat([-table.sin, table.sin], -1)
        self.size, self.table, self._cos, self._sin = size, table, cos, sin

    def at(self, positions: Tensor, end: int) -> Rotation:
        """Return the rotation of tokens.

        Args:
            positions: int64 [t].
            end: above all positions.
        """
        if end > self.size:
            self._grow(max(TABLE_ROWS, 1 << (end - 1).bit_length()))
        return Rotation(
            self._cos.index_select(0, positions).unsqueeze(1),
            self._sin.index_select(0, positions).unsqueeze(1),
            self.table.interleaved,
        )


@dataclass(frozen=True, eq=False)
class Rotation:
    """cos and signed sin of t tokens, fp32 [t, 1, r]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def rotate_(self, heads: Tensor) -> None:
        """Rotate heads [t, n, d] in place."""
        turned = self.cos.shape[-1]
        x = heads if turned == heads.shape[-1] else heads[..., :turned]
        if self.interleaved or x.dtype != self.cos.dtype:
            x.copy_(self._rotated(x.to(accumulation_dtype(x.dtype))))
        else:
            other = x.roll(turned // 2, -1)
            x.mul_(self.cos).addcmul_(other, self.sin)

    def _rotated(self, x: Tensor) -> Tensor:
        """Return x [t, n, r], fp32 or fp64, rotated."""
        if self.interleaved:
            other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            other = x.roll(x.shape[-1] // 2, -1)
        return (x * self.cos).addcmul_(other, self.sin.to(x.dtype))


@dataclass(frozen=True, eq=False)
class Step:
    """What all blocks of a step share.

    Args:
        layout: of the new tokens.
        cache: of keys and values, and of states.
        rotation: of the attention blocks' heads.
        rope: for mixers that run their modules; None if there are none.
    """

    layout: SequenceLayout
    cache: KeyValueCache
    rotation: Rotation | None
    rope: RopeTable | None


class InferenceOptimizedModel:
    """Generate with the weights of a model; a `megatron.core.inference.engine.LanguageModel`.

    Args:
        model: all of it is on this rank, up to tensor parallelism.
        comm: collectives of sequence parallelism; None goes through torch.distributed.
        copies: dtype of copies of the matrices that are multiplied by instead; None makes none.
            The embedding, routers, experts and what latent attention absorbs stay as stored.

    Attributes:
        head: of the model; hidden states come to it whole.
        copied: what the copies cost; None without copies.

    Raises:
        ValueError: copies of matrices that are not on a CPU, or in that dtype already.
    """

    def __init__(
        self,
        model: GPTModel,
        comm: SequenceParallelComm | None = None,
        *,
        copies: CopyDtype | None = None,
    ) -> None:
        self.model, self.region = model, model.region
        self.comm = comm or SequenceParallelComm.plain(model.region.group)
        self.head = WholeHead(model.head, self.comm)
        functions = {SelfAttention: attention, MLP: mlp}
        self._blocks = [
            (block.norm, block.mixer, functions.get(type(block.mixer)))
            for block in model.decoder.blocks
        ]
        self._runs_modules = any(function is None for *_, function in self._blocks)
        self._rows = None
        if model.rotary is not None:
            self._rows = RotaryRows(model.rotary, model.rotary.frequencies.device)
        self._copies, self.copied = copies, None
        self.weights_replaced()

    def weights_replaced(self) -> None:
        """Copy the matrices again, if there are copies."""
        if self._copies is not None:
            self.copied = copy_weights(matrices(self.model), self._copies)

    def __call__(self, tokens: Tensor, *, layout: SequenceLayout, cache: KeyValueCache) -> Tensor:
        """Return hidden states [t, 1, h], whole on every rank, of new tokens [1, t]."""
        step = self._step(layout, cache)
        if self.region.scatters:
            self.comm.begin_step()
        delta, stream = self._embedded(tokens, layout), None
        addends = False  # whether delta is the sum over tp of what the ranks have
        for norm, mixer, function in self._blocks:
            normed, stream = self._entered(
                norm, delta, stream, addends=addends, whole=function is not None
            )
            if function is not None:
                delta = function(mixer, normed, step)
            else:
                mixed = mixer(normed.unsqueeze(1), layout, rope=step.rope, cache=cache)
                delta = mixed.squeeze(1)
            addends = function is not None and self.region.group.size > 1
        final = self.model.decoder.final_norm
        assert final is not None
        return self._entered(final, delta, stream, addends=addends, whole=True)[0].unsqueeze(1)

    def _step(self, layout: SequenceLayout, cache: KeyValueCache) -> Step:
        rotation = rope = None
        if self._rows is not None:
            end = layout.rows_with_past.batch.max_context
            rotation = self._rows.at(layout.positions, end)
            rope = self._rows.rotary(layout.positions) if self._runs_modules else None
        return Step(layout, cache, rotation, rope)

    def _embedded(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Return [t, h], of this rank's tokens under sequence parallelism."""
        hidden = self._reduced(self.model.embedding.addends(tokens.t()))  # [t, 1, h]
        if self.model.position_embedding is not None:
            learned = self.model.position_embedding
            longest = layout.rows_with_past.batch.max_context
            if longest > learned.positions:
                raise ValueError(
                    f"a text of {longest} tokens for a model that has learned {learned.positions} "
                    "positions: use shorter ones"
                )
            hidden = hidden + learned.look_up(layout)
        return hidden.squeeze(1)

    def _entered(
        self, norm: Norm, delta: Tensor, stream: Tensor | None, *, addends: bool, whole: bool
    ) -> tuple[Tensor, Tensor]:
        """Add delta to the stream and normalise it.

        Args:
            delta: [t, h] if it is addends, else as the stream.
            stream: of this rank's tokens under sequence parallelism; None is 0.
            whole: the tokens of all ranks are wanted.

        Returns:
            (normalised, stream).
        """
        whole = whole and self.region.scatters
        if addends and whole and stream is not None and self.comm.fuses(delta):
            fused = row_norm(norm)
            if fused is not None:
                return self.comm.reduce_norm_gather(delta, stream, fused), stream
        if addends:
            delta = self._reduced(delta)
        normed, stream = normalise(norm, delta, stream)
        return (self.comm.all_gather(normed) if whole else normed), stream

    def _reduced(self, addends: Tensor) -> Tensor:
        """Return the sum over tp, under sequence parallelism of this rank's tokens."""
        if self.region.group.size == 1:
            return addends
        if self.region.scatters:
            return self.comm.reduce_scatter(addends)
        return all_reduce(addends, self.region.group)


def matrices(model: GPTModel) -> list[WeightHandle]:
    """Return the weights that tokens are multiplied by: of linear layers and of the head."""
    linear = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
    absorbed = {m.kv_up for m in model.modules() if isinstance(m, LatentAttention)}
    found = [m for m in model.modules() if isinstance(m, linear) and m not in absorbed]
    return [*(module.weight for module in found), model.head.weight]


class WholeHead:
    """A head to which hidden states come whole."""

    def __init__(self, head: VocabParallelHead, comm: SequenceParallelComm) -> None:
        self.head, self.comm = head, comm

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return hidden [s, b, h]."""
        return hidden

    def project(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [s, b, V/tp]."""
        return self.head.weight.product(hidden)

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks, fp32 [s, b, V]."""
        if not self.head.region.scatters:
            return self.head.whole(logits)
        return self.head.joined(self.comm.all_gather(logits.unsqueeze(0)))


def normalise(norm: Norm, delta: Tensor, stream: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (norm(delta + stream), delta + stream), [t, h] each. May write to delta."""
    fused = norm.bias is None and delta.device.type == "cpu" and delta.dtype in _WIDE
    if not fused:
        return norm(delta, stream) if stream is not None else (norm(delta), delta)
    total = delta if stream is None else delta.add_(stream)
    return _rms_norm(norm, total), total


def row_norm(norm: Norm) -> RowNorm | None:
    """Return a norm as the fused kernel takes it; None for LayerNorm."""
    if norm.bias is not None:
        return None
    config = norm.config
    return RowNorm(norm.weight.use(torch.float32), config.epsilon, float(config.zero_centered))


def _rms_norm(norm: Norm, x: Tensor) -> Tensor:
    """Return the RMSNorm of [..., h], fp32 or fp64: x w sqrt(h) / sqrt(|x|^2 + h eps).

    Four operations. While weights go through a CPU's cache each costs microseconds, whatever its
    size.
    """
    weight, size = norm.weight.use(torch.float32), x.shape[-1]
    if norm.config.zero_centered:
        weight = weight + 1
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
    length = torch.hypot(length, _root(size * norm.config.epsilon, x.dtype))
    return torch.addcdiv(_root(0.0, x.dtype), x, length, value=math.sqrt(size)).mul_(weight)


@functools.cache
def _root(square: float, dtype: torch.dtype) -> Tensor:
    """Return a square root, [] on the CPU."""
    return torch.tensor(math.sqrt(square), dtype=dtype)


def attention(mixer: SelfAttention, x: Tensor, step: Step) -> Tensor:
    """Return [t, h], addends over tp, from x [t, h]."""
    n, g, d = mixer.heads, mixer.kv_heads, mixer.config.kv_channels
    heads = mixer.qkv.weight.product(x, mixer.qkv.bias).view(x.shape[0], -1, d)
    turned = heads.narrow(1, 0, n + g)  # queries and keys
    if mixer.query_norm is not None:
        turned[:, :n] = mixer.query_norm(turned[:, :n])
        turned[:, n:] = mixer.key_norm(turned[:, n:])
    if step.rotation is not None:
        step.rotation.rotate_(turned)
    sinks = None if mixer.sinks is None else mixer.sinks.use(torch.float32)
    query, key_value = heads.narrow(1, 0, n), heads.narrow(1, n, 2 * g)
    rows = step.layout.rows_with_past
    out = step.cache.attend_joint(mixer.layer, query, key_value, rows, mixer.core, sinks=sinks)
    if mixer.config.output_gate:
        out = out * heads[:, n + 2 * g :].sigmoid()
    return _row_product(mixer.output, out.reshape(x.shape[0], -1))


def mlp(mixer: MLP, x: Tensor, step: Step) -> Tensor:
    """Return [t, h], addends over tp, from x [t, h]."""
    inner = mixer.input.weight.product(x, mixer.input.bias)  # [t, 2f/tp] or [t, f/tp]
    return _row_product(mixer.down, mixer.activate(inner))


def _row_product(linear: nn.Module, x: Tensor) -> Tensor:
    """Return this rank's addend of a row-parallel product, the bias in that of rank 0."""
    bias = linear.bias if linear.region.group.rank == 0 else None
    return linear.weight.product(x, bias)

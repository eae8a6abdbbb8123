# SPDX-License-Identifier: Apache-2.0
"""Forward pass for generation with few operations, on the weights of a GPTModel.

    >>> fast = InferenceOptimizedModel(model)
    >>> engine = Engine(fast, EngineConfig(num_blocks=8))

The optimized model has no weights. It reads the weights of the model, so training steps and weight
updates take effect in the next step. It runs forward only, without autograd. Activations are packed
tokens [t, h]. Differences to the forward pass of the model:

| operation | model | optimized model |
|---|---|---|
| rotary tables | computed each step | rows of a cached table |
| rotation | into a new tensor | in place, queries and keys together |
| keys and values | two writes, two gathers | one write and one gather, into fused pages |
| attention, MLP | modules on [s, b, h] | [t, h], without shape checks |
| intermediate results | new tensors | buffers per number of tokens, shared by all layers |
| row-parallel product, tp > 1 | reduced by the layer | partial sums, reduced by the next norm |
| row-parallel product, tp = 1 | a tensor to add | the GEMM adds to the residual stream |

Other mixers (experts, latent attention, recurrent mixers) run their modules. The exception is
experts with sequence parallelism: each rank gathers and routes the tokens of all ranks, and shared
and routed experts are reduced together, which takes two collectives. Over NVLink the collectives
skip the padding of decode-only steps.

Residual stream with tensor parallelism: blocks pass the stream and `delta`, the output of the
previous block, which is not added yet. `delta` may be a partial sum per rank. The next norm reduces
it first; with sequence parallelism this is reduce-scatter, add, norm, all-gather, one kernel if
`megatron.core.comm.symmetric_memory` has NVLink access. Pipeline stages exchange the stream with
`delta` reduced and added, as the model does.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.comm.collectives import all_reduce
from megatron.core.comm.symmetric_memory import SequenceParallelComm
from megatron.core.context_parallel import SequenceLayout
from megatron.core.models.gpt import GPTModel
from megatron.core.moe.dispatch import partial_sums
from megatron.core.moe.layer import MoE
from megatron.core.moe.router import Share
from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.matmul.low_bit import CopyDtype
from megatron.core.ops.nvls import RowNorm
from megatron.core.ops.swiglu import gate_
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

#: Dtypes in which norms need no cast.
_NORM_DTYPES = frozenset({torch.float32, torch.float64})

#: Initial number of positions of the rotary table; it doubles on demand.
TABLE_ROWS = 4096

#: Largest step with persistent buffers, in tokens. Larger steps are prefill and allocate.
BUFFERED_TOKENS = 256


class Buffers:
    """Buffers for intermediate results, which all layers of a step share.

    There is one tensor of `BUFFERED_TOKENS` rows per name. Views of its prefixes are created once
    per number of tokens.

    Warning:
        The next layer overwrites the buffers. A result that outlives its layer must not use one.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._memory: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[str, int, int], Tensor] = {}

    def get(self, name: str, tokens: int, features: int) -> Tensor:
        """Return an uninitialised contiguous tensor [tokens, features]."""
        view = self._views.get((name, tokens, features))
        return view if view is not None else self._create(name, tokens, features)

    def _create(self, name: str, tokens: int, features: int) -> Tensor:
        if tokens > BUFFERED_TOKENS:
            return torch.empty(tokens, features, dtype=self.dtype, device=self.device)
        # Never reallocated: recorded steps hold the address.
        memory = self._memory.get((name, features))
        if memory is None:
            memory = torch.empty(BUFFERED_TOKENS, features, dtype=self.dtype, device=self.device)
            self._memory[name, features] = memory
        self._views[name, tokens, features] = memory[:tokens]
        return memory[:tokens]


class RotaryCache:
    """Cached rotary table, for in-place rotation of heads.

    Args:
        rotary: rotary embedding of the model.
        device: device of the positions.
    """

    def __init__(self, rotary: RotaryEmbedding, device: torch.device) -> None:
        self.rotary, self.device, self.size = rotary, device, 0

    def _grow(self, size: int) -> None:
        """Compute cos and sin of positions 0 to size - 1, fp32 [size, r].

        The sign of sin is the sign with which a feature is added to the other feature of its pair.
        """
        table = self.rotary(torch.arange(size, device=self.device))
        if table.interleaved:
            cos = table.cos.repeat_interleave(2, -1)
            sin = torch.stack([table.sin, -table.sin], -1).flatten(-2)
        else:
            cos = torch.cat([table.cos, table.cos], -1)
            sin = torch.cat([table.sin, -table.sin], -1)
        self.size, self.table, self._cos, self._sin = size, table, cos, sin

    def rotation(self, positions: Tensor, end: int) -> Rotation:
        """Return the rotation of t tokens.

        Args:
            positions: int64 [t].
            end: exclusive upper bound of the positions, known on the host.
        """
        if end > self.size:
            self._grow(max(TABLE_ROWS, 1 << (end - 1).bit_length()))
        return Rotation(
            self._cos.index_select(0, positions).unsqueeze(1),
            self._sin.index_select(0, positions).unsqueeze(1),
            self.table.interleaved,
        )


class RotaryHalves(NamedTuple):
    """The rotated features of heads, [t, n, r], and views of their two halves, [t, n, r / 2]."""

    full: Tensor
    left: Tensor
    right: Tensor

    @staticmethod
    def from_heads(x: Tensor) -> RotaryHalves:
        """Return the features [t, n, r] with views of their halves."""
        return RotaryHalves(x, *x.chunk(2, -1))


@dataclass(frozen=True, eq=False)
class Rotation:
    """cos and sin of t tokens, fp32 [t, 1, r]; sin has the signs of `RotaryCache`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def rotate_(self, heads: RotaryHalves, scratch: RotaryHalves) -> None:
        """Rotate heads in place. `scratch`, of the same shape, is overwritten."""
        x = heads.full
        if self.interleaved or x.dtype != self.cos.dtype:
            x_fp32 = x.to(accumulation_dtype(x.dtype))
            x.copy_((x_fp32 * self.cos).add_(self._swapped(x_fp32 * self.sin)))
        else:
            # The sine products must be complete before `x` is scaled in place.
            torch.mul(x, self.sin, out=scratch.full)
            x.mul_(self.cos)
            heads.left.add_(scratch.right)
            heads.right.add_(scratch.left)

    def _swapped(self, x: Tensor) -> Tensor:
        """Return x [t, n, r] with the two features of each pair swapped."""
        if self.interleaved:
            return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return x.roll(x.shape[-1] // 2, -1)


@dataclass(frozen=True, eq=False)
class Step:
    """Inputs that all blocks of a step share.

    Args:
        layout: layout of the tokens.
        cache: cache of keys, values and states.
        rotation: rotation of attention heads; None without rotary positions.
        rope: rotary table for mixers that run their modules; None without such mixers.
        rows: int32 [tp], number of tokens without padding per rank, for experts over NVLink. None
            without such experts, or if the padding is not at the end of each rank's tokens.
    """

    layout: SequenceLayout
    cache: KeyValueCache
    rotation: Rotation | None
    rope: RopeTable | None
    rows: Tensor | None


class InferenceOptimizedModel:
    """A `megatron.core.inference.model_runner.LanguageModel` on the weights of a GPTModel.

    Args:
        model: the model or its pipeline stage, in one chunk.
        comm: collectives of sequence parallelism; None uses torch.distributed.
        copies: dtype of low-bit copies of the weight matrices, which replace them in products; None
            makes no copies. The embedding, routers, experts and the matrices that latent attention
            absorbs are not copied.

    Attributes:
        cache_shapes, vocab_size, max_sequence_length, device: see `GPTModel`.
        head: output head for gathered hidden states. Raises ValueError on stages without a head.
        copied: size of the copies; None without copies.

    Raises:
        ValueError: the model is batch-invariant, or copies are requested for matrices on a GPU or
            in the dtype of the copies.
    """

    def __init__(
        self,
        model: GPTModel,
        comm: SequenceParallelComm | None = None,
        *,
        copies: CopyDtype | None = None,
    ) -> None:
        if model.store.row_tiles:
            raise ValueError(
                "InferenceOptimizedModel computes sums whose order depends on the batch: "
                "give it a model of a backend without batch invariance, or generate with the "
                "model itself"
            )
        self.model, self.region, self._scatters = model, model.region, model.region.scatters
        self.cache_shapes, self.vocab_size = model.cache_shapes, model.vocab_size
        self.max_sequence_length, self.device = model.max_sequence_length, model.device
        self.comm = comm or SequenceParallelComm.plain(model.region.group)
        self._head: GatheredHead | None = None
        self._rotary = None
        if model.rotary is not None:
            self._rotary = RotaryCache(model.rotary, model.rotary.frequencies.device)
        buffers = self._buffers = Buffers(model.store.dtype, model.store.device)
        self._blocks: list[OptimizedBlock] = []
        for block in model.decoder.blocks:
            inner: OptimizedAttention | OptimizedMLP | None = None
            experts: OptimizedExperts | None = None
            if isinstance(block.mixer, SelfAttention):
                inner = OptimizedAttention(block.mixer, buffers)
            elif isinstance(block.mixer, MLP):
                inner = OptimizedMLP(block.mixer, buffers)
            elif isinstance(block.mixer, MoE) and OptimizedExperts.supports(block.mixer):
                experts = OptimizedExperts(block.mixer, self.comm, buffers)
            self._blocks.append(OptimizedBlock(block.norm, block.mixer, inner, experts))
        self._runs_modules = any(b.inner is None and b.experts is None for b in self._blocks)
        has_experts = any(block.experts is not None for block in self._blocks)
        self._counts_rows = has_experts and self.comm.way != "torch.distributed"
        self._copies, self.copied = copies, None
        self.weights_replaced()

    @property
    def head(self) -> GatheredHead:
        """Output head for gathered hidden states. Raises ValueError on stages without a head."""
        if self._head is None:
            self._head = GatheredHead(self.model.head, self.comm)
        return self._head

    def boundary_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        """Return the shape of the hidden states that stages exchange for tokens [1, t]."""
        return self.model.boundary_shape(tokens)

    def join_experts(self, max_tokens: int) -> None:
        """See `GPTModel.join_experts`."""
        self.model.join_experts(max_tokens)

    def weights_replaced(self) -> None:
        """Copy the matrices again if the model uses copies."""
        if self._copies is not None:
            self.copied = copy_weights(matrices(self.model), self._copies)

    def __call__(
        self,
        tokens: Tensor,
        *,
        layout: SequenceLayout,
        cache: KeyValueCache,
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [t, 1, h] of new tokens [1, t], gathered on all ranks.

        Pipeline stages before the last return the stream, and receive it as `hidden_states`:
        [t, 1, h], or [t/tp, 1, h] with sequence parallelism.
        """
        step = self._step(layout, cache)
        if self._scatters:
            self.comm.begin_step()
        if hidden_states is None:
            hidden_states = self._embed(tokens, layout)  # [t, 1, h]
        delta: Tensor | None = hidden_states.squeeze(1)
        stream: Tensor | None = None
        is_partial = False  # whether delta is a partial sum, to be reduced over tp
        for norm, mixer, inner, experts in self._blocks:
            normed, stream = self._add_and_norm(
                norm, delta, stream, is_partial=is_partial, gather=inner is not None
            )
            if inner is not None:
                delta = self._row_parallel_product(inner.output, inner(normed, step), stream)
                is_partial = delta is not None
            elif experts is not None:
                delta, is_partial = experts(normed, step), False
            else:
                mix = functools.partial(
                    mixer, normed.unsqueeze(1), layout, rope=step.rope, cache=cache
                )
                graph = layout.rows_with_past.graph if isinstance(mixer, MoE) else None
                # The host reads the number of tokens of each expert, which a graph cannot record.
                mixed = mix() if graph is None else graph.call_for(mix)
                delta, is_partial = mixed.squeeze(1), False
        final = self.model.decoder.final_norm
        if final is None:
            if delta is None:
                assert stream is not None
                return stream.unsqueeze(1)
            delta = self._reduce(delta) if is_partial else delta
            return (delta if stream is None else stream + delta).unsqueeze(1)
        normed, _ = self._add_and_norm(
            final, delta, stream, is_partial=is_partial, gather=True, is_output=True
        )
        if self._scatters:
            self.comm.check()
        return normed.unsqueeze(1)

    def predict_ahead(
        self,
        depth: int,
        hidden_states: Tensor,
        tokens: Tensor,
        *,
        layout: SequenceLayout,
        cache: KeyValueCache,
    ) -> Tensor:
        """See `GPTModel.predict_ahead`; the MTP layers run their modules."""
        return self.model.predict_ahead(depth, hidden_states, tokens, layout=layout, cache=cache)

    def _step(self, layout: SequenceLayout, cache: KeyValueCache) -> Step:
        rotation = rope = None
        if self._rotary is not None:
            end = layout.rows_with_past.batch.max_context
            rotation = self._rotary.rotation(layout.positions, end)
            rope = self._rotary.rotary(layout.positions) if self._runs_modules else None
        rows, paged = None, layout.rows_with_past
        # With prefill rows, padding lies between decode rows and prefill rows, not at the end.
        if self._counts_rows and paged.prefill is None:
            real = paged.slot_mapping.view(self.region.group.size, -1) >= 0
            rows = real.sum(1, dtype=torch.int32)
        return Step(layout, cache, rotation, rope, rows)

    def _embed(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Return embeddings [t, 1, h]; with sequence parallelism t runs over this rank's tokens."""
        hidden = self._reduce(self.model.embedding.addends(tokens.t()))  # [t, 1, h]
        if self.model.position_embedding is not None:
            learned = self.model.position_embedding
            max_context = layout.rows_with_past.batch.max_context
            if max_context > learned.positions:
                raise ValueError(
                    f"a sequence of {max_context} tokens exceeds the {learned.positions} "
                    "learned positions: use shorter sequences"
                )
            hidden = hidden + learned.look_up(layout)
        return hidden

    def _row_parallel_product(self, linear: nn.Module, x: Tensor, stream: Tensor) -> Tensor | None:
        """Multiply by a row-parallel weight.

        Returns:
            The partial sum [t, h] of this rank, with the bias on rank 0; None with one rank, after
            adding the product to `stream` in place.
        """
        group = self.region.group
        if group.size == 1:
            linear.weight.add_product_(stream, x, bias=linear.bias)
            return None
        bias, out = linear.bias if group.rank == 0 else None, None
        if self._scatters:
            out = self.comm.addends((x.shape[0], linear.weight.shape[0]), x.dtype)
        return linear.weight.linear(x, bias, out=out)

    def _add_and_norm(
        self,
        norm: Norm,
        delta: Tensor | None,
        stream: Tensor | None,
        *,
        is_partial: bool,
        gather: bool,
        is_output: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Add delta to the stream and normalise the sum.

        Args:
            norm: norm of the next block.
            delta: [t, h] for partial sums, otherwise as `stream`; None means 0.
            stream: [t, h], or this rank's [t/tp, h] with sequence parallelism; None means 0.
            is_partial: `delta` is a partial sum, to be reduced over tp.
            gather: return the normalised tokens of all ranks.
            is_output: the result leaves the model, so it must not be a shared buffer.

        Returns:
            (normalised, stream).
        """
        gather = gather and self._scatters
        if is_partial:
            assert delta is not None
            if gather and stream is not None and self.comm.fuses(delta):
                fused = row_norm(norm)
                if fused is not None:
                    return self.comm.reduce_norm_gather(delta, stream, fused), stream
            delta = self._reduce(delta)
        normed, stream = normalise(norm, delta, stream, None if is_output else self._buffers)
        return (self.comm.all_gather(normed) if gather else normed), stream

    def _reduce(self, partial_sum: Tensor) -> Tensor:
        """Reduce partial sums over tp; with sequence parallelism to this rank's tokens."""
        if self.region.group.size == 1:
            return partial_sum
        if self._scatters:
            return self.comm.reduce_scatter(partial_sum)
        return all_reduce(partial_sum, self.region.group)


def matrices(model: GPTModel) -> list[WeightHandle]:
    """Return the weights of the linear layers, and of the head on its pipeline stage."""
    linear = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
    absorbed = {m.kv_up for m in model.modules() if isinstance(m, LatentAttention)}
    linears = [m for m in model.modules() if isinstance(m, linear) and m not in absorbed]
    head = [model.head.weight] if model.holds_head else []
    return [*(module.weight for module in linears), *head]


class GatheredHead:
    """Output head for hidden states that are gathered already."""

    def __init__(self, head: VocabParallelHead, comm: SequenceParallelComm) -> None:
        self.head, self.comm = head, comm

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [s, b, h], which is gathered already."""
        return hidden

    def project(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [s, b, V/tp]."""
        return self.head.weight.linear(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def whole(self, logits: Tensor) -> Tensor:
        """All-gather logits to fp32 [s, b, V]."""
        return self._all_gather(logits).float()

    def write_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write the gathered logits to `out`, fp32 [s, b, V], and return `out`."""
        if self.head.projects_whole(hidden):
            self.head.weight.linear(hidden.flatten(0, 1), out=out.flatten(0, 1))
            return out
        return out.copy_(self._all_gather(self.project(hidden)))

    def _all_gather(self, logits: Tensor) -> Tensor:
        """All-gather logits to [s, b, V] without a cast."""
        if not self.head.region.scatters:
            return self.head.joined(logits)
        return self.head.join(self.comm.all_gather(logits.unsqueeze(0)))


def normalise(
    norm: Norm, delta: Tensor | None, stream: Tensor | None, buffers: Buffers | None
) -> tuple[Tensor, Tensor]:
    """Return (norm(delta + stream), delta + stream), [t, h] each; one input may be None.

    Warning:
        It may write to `delta`, and the first result may be a shared buffer.
    """
    total = stream if delta is None else delta
    assert total is not None
    residual = None if delta is None else stream
    if norm.bias is not None or total.device.type != "cpu" or total.dtype not in _NORM_DTYPES:
        return norm(total, residual) if residual is not None else (norm(total), total)
    if residual is not None:
        total.add_(residual)
    return _rms_norm(norm, total, buffers), total


def row_norm(norm: Norm) -> RowNorm | None:
    """Return the norm's parameters for the fused kernel; None for LayerNorm."""
    if norm.bias is not None:
        return None
    config = norm.config
    return RowNorm(norm.weight.use(torch.float32), config.epsilon, float(config.zero_centered))


def _rms_norm(norm: Norm, x: Tensor, buffers: Buffers | None) -> Tensor:
    """Return the RMSNorm of [t, h], fp32 or fp64: x w sqrt(h) / sqrt(|x|^2 + h eps).

    Only four operations: while weights stream through the cache of a CPU, each operation of a
    decode step costs microseconds, independent of its size.
    """
    weight, (tokens, size) = norm.weight.use(torch.float32), x.shape
    length = out = None
    if buffers is not None and buffers.dtype is x.dtype:
        length, out = buffers.get("length", tokens, 1), buffers.get("normed", tokens, size)
    length = torch.linalg.vector_norm(x, 2, -1, True, out=length)  # [t, 1]
    length.hypot_(_root(size * norm.config.epsilon, x.dtype))
    normed = torch.addcdiv(_root(0.0, x.dtype), x, length, value=math.sqrt(size), out=out)
    if norm.config.zero_centered:
        return normed.addcmul_(normed, weight)
    return normed.mul_(weight)


@functools.cache
def _root(square: float, dtype: torch.dtype) -> Tensor:
    """Return the square root as a 0-dimensional CPU tensor, cached by value and dtype."""
    return torch.tensor(math.sqrt(square), dtype=dtype)


class Heads(NamedTuple):
    """Views of the output of the QKV projection.

    Args:
        flat: projection output [t, (n + 2g) d], or [t, (2n + 2g) d] with output gates.
        query: [t, n, d].
        key: [t, g, d].
        rotated: the r rotated features of queries and keys, [t, n + g, r].
        scratch: scratch of the rotation, same shape.
        key_value: [t, 2g, d].
        gate: [t, n, d]; empty without output gates.
    """

    flat: Tensor
    query: Tensor
    key: Tensor
    rotated: RotaryHalves
    scratch: RotaryHalves
    key_value: Tensor
    gate: Tensor


class OptimizedAttention:
    """Self-attention on packed tokens, without the output projection, on a module's weights."""

    def __init__(self, mixer: SelfAttention, buffers: Buffers) -> None:
        self.mixer, self.output = mixer, mixer.output
        self._weight, self._bias = mixer.qkv.weight, mixer.qkv.bias
        self._norms = None
        if mixer.query_norm is not None:
            self._norms = mixer.query_norm, mixer.key_norm
        self._gates, self._buffers = mixer.config.output_gate, buffers
        self._views: dict[int, Heads] = {}

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Return [t, n d] from x [t, h]."""
        mixer, heads = self.mixer, self._heads(x, step.rotation)
        self._weight.linear(x, self._bias, out=heads.flat)
        if self._norms is not None:
            for norm, heads_view in zip(self._norms, (heads.query, heads.key), strict=True):
                heads_view.copy_(norm(heads_view))
        if step.rotation is not None:
            step.rotation.rotate_(heads.rotated, heads.scratch)
        sinks = None if mixer.sinks is None else mixer.sinks.use(torch.float32)
        out = step.cache.attend(
            mixer.layer,
            heads.query,
            heads.key_value,
            step.layout.rows_with_past,
            mixer.core,
            sinks=sinks,
        )
        if self._gates:
            out = out * heads.gate.sigmoid()
        return out.reshape(x.shape[0], -1)

    def _heads(self, x: Tensor, rotation: Rotation | None) -> Heads:
        """Return views of the QKV buffer, cached by the number of tokens."""
        n, g, d = self.mixer.heads, self.mixer.kv_heads, self.mixer.config.kv_channels
        tokens = x.shape[0]
        flat = self._buffers.get("heads", tokens, self._weight.shape[0])
        # Large steps get a new buffer each time, so compare its identity.
        views = self._views.get(tokens)
        if views is not None and views.flat is flat:
            return views
        heads = flat.view(tokens, -1, d)
        r = 0 if rotation is None else rotation.cos.shape[-1]
        scratch = self._buffers.get("rotated", tokens, (n + g) * r).view(tokens, n + g, r)
        views = Heads(
            flat,
            query=heads[:, :n],
            key=heads[:, n : n + g],
            rotated=RotaryHalves.from_heads(heads[:, : n + g, :r]),
            scratch=RotaryHalves.from_heads(scratch),
            key_value=heads[:, n : n + 2 * g],
            gate=heads[:, n + 2 * g :],
        )
        if tokens <= BUFFERED_TOKENS:
            self._views[tokens] = views
        return views


class OptimizedMLP:
    """MLP on packed tokens, without the down projection, on a module's weights."""

    def __init__(self, mixer: MLP, buffers: Buffers) -> None:
        self.mixer, self.output, self._buffers = mixer, mixer.down, buffers
        self._weight, self._bias = mixer.input.weight, mixer.input.bias
        self._halves: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Return [t, f/tp] from x [t, h]."""
        tokens = x.shape[0]
        inner = self._buffers.get("inner", tokens, self._weight.shape[0])
        self._weight.linear(x, self._bias, out=inner)  # [t, 2f/tp] or [t, f/tp]
        if not self.mixer.config.gated or inner.device.type != "cpu":
            return self.mixer.activate(inner)
        halves = self._halves.get(tokens)
        if halves is None or halves[0] is not inner:
            halves = (inner, *inner.chunk(2, -1))
            if tokens <= BUFFERED_TOKENS:
                self._halves[tokens] = halves
        return gate_(halves[1], halves[2], activation=self.mixer.config.activation)


class OptimizedExperts:
    """Mixture of experts with expert ranks equal to the sequence-parallel ranks.

    The collectives are all-gather-v and reduce-scatter-v, without padding, if the padding of a step
    is at the end of each rank's tokens.
    """

    def __init__(self, mixer: MoE, comm: SequenceParallelComm, buffers: Buffers) -> None:
        self.mixer, self.comm = mixer, comm
        self._shared = None if mixer.shared is None else OptimizedMLP(mixer.shared.mlp, buffers)

    @staticmethod
    def supports(mixer: MoE) -> bool:
        """Return whether expert ranks equal sequence-parallel ranks and no tokens are dropped."""
        same = mixer.ranks.group.ranks == mixer.region.group.ranks
        return mixer.region.scatters and same and mixer.router.capacity_factor is None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Return [t/tp, h] from x [t/tp, h]."""
        if step.rows is None:
            return self.comm.reduce_scatter(self._partial_sums(self.comm.all_gather(x), step))
        gathered = self.comm.all_gather_v(x, step.rows)  # [t, h]
        return self.comm.reduce_scatter_v(self._partial_sums(gathered, step), step.rows)

    def _partial_sums(self, gathered: Tensor, step: Step) -> Tensor:
        """Return the partial sums [t, h] of this rank's experts for the tokens of all ranks."""
        mixer, shared = self.mixer, self._shared
        share = Share(gathered.unsqueeze(1), step.layout, region=mixer.region)
        routing = mixer.router(gathered, share)
        sums = partial_sums(gathered, routing, mixer.experts, ranks=mixer.ranks)
        if shared is None:
            return sums
        assert mixer.shared is not None
        shared_out = shared.output.weight.linear(shared(gathered, step))
        if mixer.shared.gate is not None:
            shared_out = shared_out * mixer.shared.gate.linear(gathered).sigmoid()
        return sums + shared_out


class OptimizedBlock(NamedTuple):
    """A block of the model. `inner` or `experts`, if set, replaces the mixer's module."""

    norm: Norm
    mixer: nn.Module
    inner: OptimizedAttention | OptimizedMLP | None
    experts: OptimizedExperts | None

# SPDX-License-Identifier: Apache-2.0
"""The forward pass of generation, as few operations as it takes, over the weights of a GPTModel.

    >>> shapes = CacheShapes.from_modules(model.modules(), torch.float32)
    >>> fast = InferenceOptimizedModel(model)
    >>> engine = Engine(fast, EngineConfig(num_blocks=8), shapes=shapes, vocab_size=VOCABULARY)

It has no weights and no modules of its own: it reads those of the model, so what training or an
update writes shows in the next step. It runs forward only, outside of autograd. Activations are
packed tokens [t, h]; what differs from the model's own forward:

| part | model | here |
|---|---|---|
| rotary tables | computed each step | rows of a table that is made once |
| rotation | into a new tensor | in place, queries and keys at once |
| keys and values | two writes, two gathers | one each, into pages that hold both |
| attention, MLP | modules in [s, b, h] | [t, h], without checks of shapes |
| their intermediate results | new tensors | buffers, by the number of tokens, that layers share |
| row-parallel product | reduced by its layer | left as addends, which the next norm reduces |
| the same on one rank | a tensor that is added | added to the residual stream by the product |

Mixers other than attention and MLPs (experts, latent attention, recurrences) run their modules. But
experts under sequence parallelism take the rows of all ranks, each routes all of them, and the sums
of shared and routed experts are reduced at once: two collectives. Over NVLink these move no padding
of a step that only decodes.

The residual stream under tensor parallelism: between blocks there is the stream, and `delta`, which
the last block adds to it. `delta` may be addends of the ranks; whoever normalises reduces first,
which under sequence parallelism is one step: reduce-scatter, add, norm, all-gather. Where
`megatron.core.comm.symmetric_memory` has found a way over NVLink, that is one kernel. Between
pipeline stages goes the stream with `delta` reduced and added, as from the model's own forward.
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
from megatron.core.ops.low_bit_copy import CopyDtype
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

#: Dtypes that norms are computed in as they are.
_WIDE = frozenset({torch.float32, torch.float64})

#: Positions that the rotary table has at first; it doubles where a step needs more.
TABLE_ROWS = 4096

#: Tokens of a step whose buffers are kept. Longer steps compute prompts, and allocate.
BUFFERED_TOKENS = 256


class Buffers:
    """Memory for what the layers of a step compute and the next layer computes over.

    There is one tensor by name, of `BUFFERED_TOKENS`; its beginnings are made once for each number
    of tokens. It stays where it is: recorded steps go on using it. Results that outlive a layer
    have no place here.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._memory: dict[tuple[str, int], Tensor] = {}
        self._beginnings: dict[tuple[str, int, int], Tensor] = {}

    def of(self, name: str, tokens: int, features: int) -> Tensor:
        """Return [tokens, features], contiguous, with anything in it."""
        view = self._beginnings.get((name, tokens, features))
        return view if view is not None else self._made(name, tokens, features)

    def _made(self, name: str, tokens: int, features: int) -> Tensor:
        if tokens > BUFFERED_TOKENS:
            return torch.empty(tokens, features, dtype=self.dtype, device=self.device)
        memory = self._memory.get((name, features))
        if memory is None:
            memory = torch.empty(BUFFERED_TOKENS, features, dtype=self.dtype, device=self.device)
            self._memory[name, features] = memory
        self._beginnings[name, tokens, features] = memory[:tokens]
        return memory[:tokens]


class RotaryRows:
    """Rotate heads in place, by rows of a table of all positions.

    Args:
        rotary: the model's frequencies.
        device: where positions will be.
    """

    def __init__(self, rotary: RotaryEmbedding, device: torch.device) -> None:
        self.rotary, self.device, self.size = rotary, device, 0

    def _grow(self, size: int) -> None:
        """Make the table of positions 0 to size - 1: cosines and sines, fp32 [size, r], with the
        signs of what each feature adds to the other of its pair."""
        table = self.rotary(torch.arange(size, device=self.device))
        if table.interleaved:
            cos = table.cos.repeat_interleave(2, -1)
            sin = torch.stack([table.sin, -table.sin], -1).flatten(-2)
        else:
            cos = torch.cat([table.cos, table.cos], -1)
            sin = torch.cat([table.sin, -table.sin], -1)
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


class Halves(NamedTuple):
    """The features of t tokens' heads that are rotated, [t, n, r], and their two halves."""

    whole: Tensor
    first: Tensor
    second: Tensor

    @staticmethod
    def of(x: Tensor) -> Halves:
        """Return those of [t, n, r]."""
        return Halves(x, *x.chunk(2, -1))


@dataclass(frozen=True, eq=False)
class Rotation:
    """cos and sin of t tokens, fp32 [t, 1, r]; sin has the signs of `RotaryRows`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def rotate_(self, heads: Halves, scratch: Halves) -> None:
        """Rotate heads in place; scratch is written."""
        x = heads.whole
        if self.interleaved or x.dtype != self.cos.dtype:
            x_fp32 = x.to(accumulation_dtype(x.dtype))
            x.copy_((x_fp32 * self.cos).add_(self._swapped(x_fp32 * self.sin)))
        else:
            torch.mul(x, self.sin, out=scratch.whole)
            x.mul_(self.cos)
            heads.first.add_(scratch.second)
            heads.second.add_(scratch.first)

    def _swapped(self, x: Tensor) -> Tensor:
        """Return x [t, n, r] with the two features of each pair exchanged."""
        if self.interleaved:
            return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return x.roll(x.shape[-1] // 2, -1)


@dataclass(frozen=True, eq=False)
class Step:
    """What all blocks of a step share.

    Args:
        layout: of the new tokens.
        cache: of keys and values, and of states.
        rotation: of the attention blocks' heads.
        rope: for mixers that run their modules; None if there are none.
        rows: int32 [tp], how many of each rank's tokens are no padding, for experts whose tokens
            move over NVLink; None for others, and where a rank's padding is not at its end.
    """

    layout: SequenceLayout
    cache: KeyValueCache
    rotation: Rotation | None
    rope: RopeTable | None
    rows: Tensor | None


class InferenceOptimizedModel:
    """Generate with the weights of a model; a `megatron.core.inference.engine.LanguageModel`.

    Args:
        model: one chunk: all of it, or a pipeline stage.
        comm: collectives of sequence parallelism; None goes through torch.distributed.
        copies: dtype of copies of the matrices that are multiplied by instead; None makes none.
            The embedding, routers, experts and what latent attention absorbs stay as stored.

    Attributes:
        head: of the model, which hidden states come to whole. Raises ValueError if it is on another
            stage.
        copied: what the copies cost; None without copies.

    Raises:
        ValueError: copies of matrices that are not on a CPU, or in that dtype already, or a
            batch-invariant model.
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
                "InferenceOptimizedModel sums in an order that follows the batch: give it a model "
                "of a backend without batch invariance, or generate by the model itself"
            )
        self.model, self.region, self._scatters = model, model.region, model.region.scatters
        self.comm = comm or SequenceParallelComm.plain(model.region.group)
        self._rows = None
        if model.rotary is not None:
            self._rows = RotaryRows(model.rotary, model.rotary.frequencies.device)
        buffers = self._buffers = Buffers(model.store.dtype, model.store.device)
        self._blocks: list[Block] = []
        for block in model.decoder.blocks:
            inner: OptimizedAttention | OptimizedMLP | None = None
            experts: OptimizedExperts | None = None
            if isinstance(block.mixer, SelfAttention):
                inner = OptimizedAttention(block.mixer, buffers)
            elif isinstance(block.mixer, MLP):
                inner = OptimizedMLP(block.mixer, buffers)
            elif isinstance(block.mixer, MoE) and OptimizedExperts.takes(block.mixer):
                experts = OptimizedExperts(block.mixer, self.comm, buffers)
            self._blocks.append(Block(block.norm, block.mixer, inner, experts))
        self._runs_modules = any(b.inner is None and b.experts is None for b in self._blocks)
        has_experts = any(block.experts is not None for block in self._blocks)
        self._counts_rows = has_experts and self.comm.way != "torch.distributed"
        self._copies, self.copied = copies, None
        self.weights_replaced()

    @functools.cached_property
    def head(self) -> WholeHead:
        """The head. Raises ValueError if it is on another pipeline stage."""
        return WholeHead(self.model.head, self.comm)

    def boundary_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        """Return the shape of the hidden states of tokens [1, t] between two stages."""
        return self.model.boundary_shape(tokens)

    def join_experts(self, most_tokens: int) -> None:
        """Do as `GPTModel.join_experts`."""
        self.model.join_experts(most_tokens)

    def weights_replaced(self) -> None:
        """Copy the matrices again, if there are copies."""
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
        """Return hidden states [t, 1, h], whole on every rank, of new tokens [1, t].

        Before the last pipeline stage it is the stream, [t/tp, 1, h] under sequence parallelism, as
        `hidden_states` of the stage before are.
        """
        step = self._step(layout, cache)
        if self._scatters:
            self.comm.begin_step()
        if hidden_states is None:
            hidden_states = self._embedded(tokens, layout)  # [t, 1, h]
        delta: Tensor | None = hidden_states.squeeze(1)
        stream: Tensor | None = None
        addends = False  # whether delta is the sum over tp of what the ranks have
        for norm, mixer, inner, experts in self._blocks:
            normed, stream = self._entered(
                norm, delta, stream, addends=addends, whole=inner is not None
            )
            if inner is not None:
                delta = self._left(inner.output, inner(normed, step), stream)
                addends = delta is not None
            elif experts is not None:
                delta, addends = experts(normed, step), False
            else:
                mix = functools.partial(
                    mixer, normed.unsqueeze(1), layout, rope=step.rope, cache=cache
                )
                graph = layout.rows_with_past.graph if isinstance(mixer, MoE) else None
                # The host reads how many tokens each expert has.
                mixed = mix() if graph is None else graph.call_for(mix)
                delta, addends = mixed.squeeze(1), False
        final = self.model.decoder.final_norm
        if final is None:
            if delta is None:
                assert stream is not None
                return stream.unsqueeze(1)
            delta = self._reduced(delta) if addends else delta
            return (delta if stream is None else stream + delta).unsqueeze(1)
        normed, _ = self._entered(final, delta, stream, addends=addends, whole=True, last=True)
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
        """Do as `GPTModel.predict_ahead`; the depths run their modules."""
        return self.model.predict_ahead(depth, hidden_states, tokens, layout=layout, cache=cache)

    def _step(self, layout: SequenceLayout, cache: KeyValueCache) -> Step:
        rotation = rope = None
        if self._rows is not None:
            end = layout.rows_with_past.batch.max_context
            rotation = self._rows.at(layout.positions, end)
            rope = self._rows.rotary(layout.positions) if self._runs_modules else None
        rows, paged = None, layout.rows_with_past
        if self._counts_rows and paged.prefill is None:  # else padding is in the middle
            real = paged.slot_mapping.view(self.region.group.size, -1) >= 0
            rows = real.sum(1, dtype=torch.int32)
        return Step(layout, cache, rotation, rope, rows)

    def _embedded(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Return [t, 1, h], of this rank's tokens under sequence parallelism."""
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
        return hidden

    def _left(self, linear: nn.Module, x: Tensor, stream: Tensor) -> Tensor | None:
        """Multiply by a row-parallel weight.

        Returns:
            This rank's addend [t, h], the bias in that of rank 0; None if there is one rank, and
            the product has been added to the stream.
        """
        group = self.region.group
        if group.size == 1:
            linear.weight.add_product_(stream, x, bias=linear.bias)
            return None
        bias, out = linear.bias if group.rank == 0 else None, None
        if self._scatters:
            out = self.comm.addends((x.shape[0], linear.weight.shape[0]), x.dtype)
        return linear.weight.linear(x, bias, out=out)

    def _entered(
        self,
        norm: Norm,
        delta: Tensor | None,
        stream: Tensor | None,
        *,
        addends: bool,
        whole: bool,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Add delta to the stream and normalise it.

        Args:
            delta: [t, h] if it is addends, else as the stream; None is 0.
            stream: of this rank's tokens under sequence parallelism; None is 0.
            whole: the tokens of all ranks are wanted.
            last: the result leaves the model, so it is no buffer.

        Returns:
            (normalised, stream).
        """
        whole = whole and self._scatters
        if addends:
            assert delta is not None
            if whole and stream is not None and self.comm.fuses(delta):
                fused = row_norm(norm)
                if fused is not None:
                    return self.comm.reduce_norm_gather(delta, stream, fused), stream
            delta = self._reduced(delta)
        normed, stream = normalise(norm, delta, stream, None if last else self._buffers)
        return (self.comm.all_gather(normed) if whole else normed), stream

    def _reduced(self, addends: Tensor) -> Tensor:
        """Return the sum over tp, under sequence parallelism of this rank's tokens."""
        if self.region.group.size == 1:
            return addends
        if self._scatters:
            return self.comm.reduce_scatter(addends)
        return all_reduce(addends, self.region.group)


def matrices(model: GPTModel) -> list[WeightHandle]:
    """Return the weights that tokens are multiplied by: of linear layers, and of the head if it is
    on this pipeline stage."""
    linear = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
    absorbed = {m.kv_up for m in model.modules() if isinstance(m, LatentAttention)}
    linears = [m for m in model.modules() if isinstance(m, linear) and m not in absorbed]
    head = [model.head.weight] if model.holds_head else []
    return [*(module.weight for module in linears), *head]


class WholeHead:
    """A head to which hidden states come whole."""

    def __init__(self, head: VocabParallelHead, comm: SequenceParallelComm) -> None:
        self.head, self.comm = head, comm

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return hidden [s, b, h]."""
        return hidden

    def project(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [s, b, V/tp]."""
        return self.head.weight.linear(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks, fp32 [s, b, V]."""
        return self._joined(logits).float()

    def write_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write the logits of all ranks to `out`, fp32 [s, b, V], and return it."""
        if self.head.projects_whole(hidden):
            self.head.weight.linear(hidden.flatten(0, 1), out=out.flatten(0, 1))
            return out
        return out.copy_(self._joined(self.project(hidden)))

    def _joined(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks [s, b, V] in the dtype that they are in."""
        if not self.head.region.scatters:
            return self.head.joined(logits)
        return self.head.join(self.comm.all_gather(logits.unsqueeze(0)))


def normalise(
    norm: Norm, delta: Tensor | None, stream: Tensor | None, buffers: Buffers | None
) -> tuple[Tensor, Tensor]:
    """Return (norm(delta + stream), delta + stream), [t, h] each; one of the two may be None.

    May write to delta. The first result may be one of the buffers.
    """
    total = stream if delta is None else delta
    assert total is not None
    added = None if delta is None else stream
    if norm.bias is not None or total.device.type != "cpu" or total.dtype not in _WIDE:
        return norm(total, added) if added is not None else (norm(total), total)
    if added is not None:
        total.add_(added)
    return _rms_norm(norm, total, buffers), total


def row_norm(norm: Norm) -> RowNorm | None:
    """Return a norm as the fused kernel takes it; None for LayerNorm."""
    if norm.bias is not None:
        return None
    config = norm.config
    return RowNorm(norm.weight.use(torch.float32), config.epsilon, float(config.zero_centered))


def _rms_norm(norm: Norm, x: Tensor, buffers: Buffers | None) -> Tensor:
    """Return the RMSNorm of [t, h], fp32 or fp64: x w sqrt(h) / sqrt(|x|^2 + h eps).

    Four operations. While weights go through a CPU's cache each costs microseconds, whatever its
    size.
    """
    weight, (tokens, size) = norm.weight.use(torch.float32), x.shape
    length = out = None
    if buffers is not None and buffers.dtype is x.dtype:
        length, out = buffers.of("length", tokens, 1), buffers.of("normed", tokens, size)
    length = torch.linalg.vector_norm(x, 2, -1, True, out=length)  # [t, 1]
    length.hypot_(_root(size * norm.config.epsilon, x.dtype))
    normed = torch.addcdiv(_root(0.0, x.dtype), x, length, value=math.sqrt(size), out=out)
    if norm.config.zero_centered:
        return normed.addcmul_(normed, weight)
    return normed.mul_(weight)


@functools.cache
def _root(square: float, dtype: torch.dtype) -> Tensor:
    """Return a square root, [] on the CPU."""
    return torch.tensor(math.sqrt(square), dtype=dtype)


class Heads(NamedTuple):
    """Views of what a product with the weights of queries, keys and values writes.

    Args:
        flat: [t, (n + 2g) d], or [t, (2n + 2g) d] with gates of the output.
        query: [t, n, d].
        key: [t, g, d].
        turned: of both, the r features of [t, n + g, d] that are rotated.
        scratch: as large.
        key_value: [t, 2g, d].
        gate: [t, n, d], without elements where there is none.
    """

    flat: Tensor
    query: Tensor
    key: Tensor
    turned: Halves
    scratch: Halves
    key_value: Tensor
    gate: Tensor


class OptimizedAttention:
    """Self-attention of packed tokens up to its output projection, by the weights of a module."""

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
            step.rotation.rotate_(heads.turned, heads.scratch)
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
        """Return views of the buffer for x, made once for each number of tokens."""
        n, g, d = self.mixer.heads, self.mixer.kv_heads, self.mixer.config.kv_channels
        tokens = x.shape[0]
        flat = self._buffers.of("heads", tokens, self._weight.shape[0])
        views = self._views.get(tokens)
        if views is not None and views.flat is flat:
            return views
        heads, turned = flat.view(tokens, -1, d), 0
        if rotation is not None:
            turned = rotation.cos.shape[-1]
        scratch = self._buffers.of("turned", tokens, (n + g) * turned).view(tokens, n + g, turned)
        views = Heads(
            flat,
            query=heads[:, :n],
            key=heads[:, n : n + g],
            turned=Halves.of(heads[:, : n + g, :turned]),
            scratch=Halves.of(scratch),
            key_value=heads[:, n : n + 2 * g],
            gate=heads[:, n + 2 * g :],
        )
        if tokens <= BUFFERED_TOKENS:
            self._views[tokens] = views
        return views


class OptimizedMLP:
    """An MLP of packed tokens up to its down projection, by the weights of a module."""

    def __init__(self, mixer: MLP, buffers: Buffers) -> None:
        self.mixer, self.output, self._buffers = mixer, mixer.down, buffers
        self._weight, self._bias = mixer.input.weight, mixer.input.bias
        self._halves: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Return [t, f/tp] from x [t, h]."""
        tokens = x.shape[0]
        inner = self._buffers.of("inner", tokens, self._weight.shape[0])
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
    """A mixture of experts whose ranks are those of sequence parallelism, by a module's weights.

    Its collectives are all-gather-v and reduce-scatter-v, where a step has padding at the end of
    ranks' tokens.
    """

    def __init__(self, mixer: MoE, comm: SequenceParallelComm, buffers: Buffers) -> None:
        self.mixer, self.comm = mixer, comm
        self._shared = None if mixer.shared is None else OptimizedMLP(mixer.shared.mlp, buffers)

    @staticmethod
    def takes(mixer: MoE) -> bool:
        """Whether the ranks that share experts are those that share tokens, and drop none."""
        same = mixer.ranks.group.ranks == mixer.region.group.ranks
        return mixer.region.scatters and same and mixer.router.capacity_factor is None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Return [t/tp, h] from x [t/tp, h]."""
        if step.rows is None:
            return self.comm.reduce_scatter(self._sums(self.comm.all_gather(x), step))
        everyone = self.comm.all_gather_v(x, step.rows)  # [t, h]
        return self.comm.reduce_scatter_v(self._sums(everyone, step), step.rows)

    def _sums(self, everyone: Tensor, step: Step) -> Tensor:
        """Return [t, h] partial(tp) from the rows of all ranks [t, h]."""
        mixer, shared = self.mixer, self._shared
        share = Share(everyone.unsqueeze(1), step.layout, region=mixer.region)
        routing = mixer.router(everyone, share)
        sums = partial_sums(everyone, routing, mixer.experts, ranks=mixer.ranks)
        if shared is None:
            return sums
        assert mixer.shared is not None
        shared_out = shared.output.weight.linear(shared(everyone, step))
        if mixer.shared.gate is not None:
            shared_out = shared_out * mixer.shared.gate.linear(everyone).sigmoid()
        return sums + shared_out


class Block(NamedTuple):
    """A block of the model; `inner` or `experts` runs in place of its mixer's module, if there is
    such."""

    norm: Norm
    mixer: nn.Module
    inner: OptimizedAttention | OptimizedMLP | None
    experts: OptimizedExperts | None

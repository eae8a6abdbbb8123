# SPDX-License-Identifier: Apache-2.0
"""Forward pass for generation with few operations, on the weights of a GPTModel.

    >>> fast = InferenceOptimizedModel(model)
    >>> engine = Engine(fast, EngineConfig(num_blocks=8))

The optimized model has no weights. It calls `decode` of the model's layers instead of `forward`, so
training steps and weight updates take effect in the next step. It runs forward only, without
autograd. Activations are packed tokens [t, h]. Differences to the forward pass of the model:

| operation | `forward` | `decode` |
|---|---|---|
| rotary tables | computed each step | rows of a cached table |
| rotation | into a new tensor | in place, queries and keys together |
| keys and values | concatenated for the cache | views of the projection's output |
| RMSNorm on a CPU | nine operations | four |
| row-parallel product, tp > 1 | reduced by the layer | partial sums, reduced by the next norm |
| row-parallel product, tp = 1 | a tensor to add | the GEMM adds to the residual stream |

Other mixers (experts, latent attention, recurrent mixers) run `forward`. The exception is experts
with sequence parallelism, see `MoE.decode`. The outputs of parallel mixers are summed and reduced
together, see `ParallelMixers.decode`.

Residual stream with tensor parallelism: blocks pass the stream and `delta`, the output of the
previous block, which is not added yet. `delta` may be a partial sum per rank. The next norm reduces
it first; with sequence parallelism this is reduce-scatter, add, norm, all-gather, one kernel if
`megatron.core.comm.symmetric_memory` has NVLink access. Pipeline stages exchange the stream with
`delta` reduced and added, as the model does. A norm of a block's output needs the whole product: it
is reduced and normalised right away.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.comm.symmetric_memory import SequenceParallelComm
from megatron.core.context_parallel import SequenceLayout
from megatron.core.models.decoder import DecoderBlock
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelHead,
)
from megatron.core.transformer import KeyValueCache, LatentAttention, Norm
from megatron.core.weight_gather import WeightHandle


class InferenceOptimizedModel:
    """A `megatron.core.inference.model_runner.LanguageModel` on the weights of a GPTModel.

    Args:
        model: the model or its pipeline stage, in one chunk.
        comm: collectives of sequence parallelism; None uses torch.distributed.

    Attributes:
        cache_shapes, vocab_size, max_sequence_length, device: see `GPTModel`.
        head: output head for gathered hidden states. Raises ValueError on stages without a head.

    Raises:
        ValueError: the model is batch-invariant.
    """

    def __init__(self, model: GPTModel, comm: SequenceParallelComm | None = None) -> None:
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
        self._blocks = [block for block in model.decoder.blocks if isinstance(block, DecoderBlock)]

    @property
    def head(self) -> GatheredHead:
        """Output head for gathered hidden states. Raises ValueError on stages without a head."""
        return GatheredHead(self.model.head, self.comm)

    def boundary_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        """Return the shape of the hidden states that stages exchange for tokens [1, t]."""
        return self.model.boundary_shape(tokens)

    def join_experts(self, max_tokens: int) -> None:
        """See `GPTModel.join_experts`."""
        self.model.join_experts(max_tokens)

    def weights_replaced(self) -> None:
        """See `megatron.core.inference.model_runner.LanguageModel`."""
        self.model.weights_replaced()

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
        context: dict[str, Any] = {"cache": cache, "comm": self.comm}
        rotary, window_rotary = self.model.rotary, self.model.window_rotary
        positions, end = layout.positions, layout.rows_with_past.batch.max_context
        if rotary is not None:
            context["rope"] = rotary.cached(positions, end=end)
        if window_rotary is not None:
            is_shared = window_rotary is rotary
            context["window_rope"] = (
                context["rope"] if is_shared else window_rotary.cached(positions, end=end)
            )
        if self._scatters:
            self.comm.begin_step()
        if hidden_states is None:
            hidden_states = self._embed(tokens, layout)  # [t, 1, h]
        delta: Tensor | None = hidden_states.squeeze(1)
        stream: Tensor | None = None
        is_partial = False  # whether delta is a partial sum, to be reduced over tp
        for block in self._blocks:
            normed, stream = self._add_and_norm(
                block.norm,
                delta,
                stream,
                is_partial=is_partial,
                gather=block.mixer.decodes_gathered,
            )
            delta, linear = block.mixer.decode(normed, layout, **context)
            if block.post_norm is not None:
                delta = self._normed_output(block.post_norm, delta, linear)
            elif linear is not None:
                into = stream if block.multiplier == 1.0 else None
                delta = self._row_parallel_product(linear, delta, into)
            is_partial = block.post_norm is None and linear is not None and delta is not None
            if block.multiplier != 1.0:
                assert delta is not None
                # A partial sum may be in the buffer that the next norm reduces.
                delta = delta.mul_(block.multiplier) if is_partial else delta * block.multiplier
        final = self.model.decoder.final_norm
        if final is None:
            if delta is None:
                assert stream is not None
                return stream.unsqueeze(1)
            delta = self._reduce(delta) if is_partial else delta
            return (delta if stream is None else stream + delta).unsqueeze(1)
        normed, _ = self._add_and_norm(final, delta, stream, is_partial=is_partial, gather=True)
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

    def _embed(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Return embeddings [t, 1, h]; with sequence parallelism t runs over this rank's tokens."""
        embedding = self.model.embedding
        hidden = embedding.scaled(self._reduce(embedding.addends(tokens.t())))  # [t, 1, h]
        positions = self.model.position_embedding
        return hidden if positions is None else hidden + positions.decode(layout)

    def _normed_output(
        self, post_norm: Norm, out: Tensor, linear: RowParallelLinear | None
    ) -> Tensor:
        """Return the normalised output of a block, shaped as the stream.

        Args:
            out, linear: result of `Mixer.decode`.
        """
        if linear is not None:
            partial_sum = self._row_parallel_product(linear, out, None)
            assert partial_sum is not None
            out = self._reduce(partial_sum)
        return post_norm.decode(out, None)[0]

    def _row_parallel_product(
        self, linear: RowParallelLinear, x: Tensor, stream: Tensor | None
    ) -> Tensor | None:
        """Multiply by a row-parallel weight.

        Returns:
            The partial sum [t, h] of this rank, with the bias on rank 0. With one rank it is the
            product; if there is a `stream`, the product is added to it in place, and the result is
            None.
        """
        group = self.region.group
        if group.size == 1 and stream is not None:
            linear.weight.add_product_(stream, x, bias=linear.bias)
            return None
        bias, out = linear.bias if group.rank == 0 else None, None
        if self._scatters:
            out = self.comm.addends((x.shape[0], linear.weight.shape[0]), x.dtype)
        return linear.weight.linear(x, bias, out=out)

    def _add_and_norm(
        self,
        norm: Norm | None,
        delta: Tensor | None,
        stream: Tensor | None,
        *,
        is_partial: bool,
        gather: bool,
    ) -> tuple[Tensor, Tensor]:
        """Add delta to the stream and normalise the sum.

        Args:
            norm: norm of the next block's input; None returns the sum twice.
            delta: [t, h] for partial sums, otherwise as `stream`; None means 0.
            stream: [t, h], or this rank's [t/tp, h] with sequence parallelism; None means 0.
            is_partial: `delta` is a partial sum, to be reduced over tp.
            gather: return the normalised tokens of all ranks.

        Returns:
            (normalised, stream).
        """
        gather = gather and self._scatters
        if norm is None:
            assert delta is not None
            assert not is_partial, "an output's norm reduces it"
            total = delta if stream is None else delta.add_(stream)
            return (self.comm.all_gather(total) if gather else total), total
        if is_partial:
            assert delta is not None
            if gather and stream is not None and self.comm.fuses(delta):
                fused = norm.for_fused_kernel()
                if fused is not None:
                    return self.comm.reduce_norm_gather(delta, stream, fused), stream
            delta = self._reduce(delta)
        normed, stream = norm.decode(delta, stream)
        return (self.comm.all_gather(normed) if gather else normed), stream

    def _reduce(self, partial_sum: Tensor) -> Tensor:
        """Reduce partial sums over tp; with sequence parallelism to this rank's tokens."""
        if self.region.group.size == 1:
            return partial_sum
        if self._scatters:
            return self.comm.reduce_scatter(partial_sum)
        return all_reduce(partial_sum, self.region.group)


def matrices(model: GPTModel) -> list[WeightHandle]:
    """Return the weights that `copy_weights` copies: of the linear layers, and of the head on its
    pipeline stage, without the embedding, routers, experts and what latent attention absorbs."""
    linear = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
    absorbed = {m.kv_up for m in model.modules() if isinstance(m, LatentAttention)}
    linears = [m for m in model.modules() if isinstance(m, linear) and m not in absorbed]
    has_head = model.holds_head and model.config.num_labels is None
    head = [model.head.weight] if has_head else []
    return [*(module.weight for module in linears), *head]


class GatheredHead:
    """Output head for hidden states that are gathered already."""

    def __init__(self, head: VocabParallelHead, comm: SequenceParallelComm) -> None:
        all_gather = comm.all_gather if head.region.scatters else None
        self.project = head.project
        self.whole = functools.partial(head.whole, all_gather=all_gather)
        self.write_logits = functools.partial(head.write_logits, all_gather=all_gather)

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [s, b, h], which is gathered already."""
        return hidden

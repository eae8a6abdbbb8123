# SPDX-License-Identifier: Apache-2.0
"""Backend, LayerBuild, Mixer: a model's layer implementations, their context, their interface.

Layer constructors receive one `Backend` instead of a module tree per implementation. `LOCAL` is
this package's implementation; an adapter for another library supplies the same components. The
layer of a decoder block is a `Mixer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from megatron.core.context_parallel.layout import AUTO, ContextParallel, SequenceLayout
from megatron.core.initialize import InitSpec
from megatron.core.ops.attention import attention
from megatron.core.ops.backend_choice import StoredWeight
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.matmul.batch_invariant import with_padded_rows
from megatron.core.ops.recurrence import recur
from megatron.core.ops.rmsnorm import RMS_NORM, normalise
from megatron.core.ops.tiled_attention import tiled_attention
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRegion,
)
from megatron.core.weight_gather import RowRuns, WeightHandle, WeightStore, grouped_linear
from megatron.core.weight_gather.handle import call_with_stored

#: Maps x and the handles of its weight (and bias) to norm(x), or with a residual to (norm(x +
#: residual), the sum).
NormFunction = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]

#: Maps query [s, b, n, d], key and value [s, b, g, d], a `SequenceLayout` and `sinks` [n] to causal
#: attention [s, b, n, d], or to None if it does not support the layout.
AttentionLayer = Callable[..., "torch.Tensor | None"]

#: Maps rows [r, h], in runs, to [r, o]: `weight_gather.grouped_linear` of one weight.
GroupedLinear = Callable[[torch.Tensor, RowRuns], torch.Tensor]


class StepState(Protocol):
    """State of a model's layers that changes once a step, such as the scales of FP8 tensors."""

    def begin(self) -> None:
        """Begin a step: discard what an evaluation or an unfinished step recorded."""

    def finish(self, groups: ProcessGroupCollection) -> None:
        """End a step; every rank calls it."""


def _local_rms_norm(**settings: float | bool) -> NormFunction:
    return partial(call_with_stored, partial(normalise, RMS_NORM, **settings))


def _local_layer_norm(**settings: float | bool) -> NormFunction:
    def normalise_rows(
        x: torch.Tensor, weight: StoredWeight, *biases: StoredWeight, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return layer_norm(x, weight, *(biases or (None,)), **settings, **options)

    return partial(call_with_stored, normalise_rows)


def _local_grouped_linear(handle: WeightHandle, num_runs: int, store: WeightStore) -> GroupedLinear:
    return partial(grouped_linear, handle)


@dataclass(frozen=True)
class Backend:
    """The components in which implementations differ.

    Args:
        name: as `--transformer-impl` spells it.
        column_linear, row_linear: constructors with the signatures of tensor_parallel's layers.
        rms_norm, layer_norm: constructors, from `eps` and `zero_centered`, of a layer's
            `NormFunction`.
        attention: function with the signature of `ops.attention.attention`.
        attention_layer: constructor, from `scale` and `window`, of a layer's attention over whole
            rows without dropout; None uses `attention`, as all other attention does.
        grouped_linear: constructor, from a weight's handle, the number of runs and the store, of
            the function that multiplies rows in runs by its matrices, see
            `weight_gather.grouped_linear`.
        recurrence: function with the signature of `ops.recurrence.recur`.
        keep_recurrent_states: keep the states between chunks of a recurrence from forward to
            backward instead of computing them again.
        context_engine: how attention over ranks that share the tokens of a row brings queries and
            keys together: "p2p", "all_gather", "a2a" or "auto".
        linear_mode: how recurrences run over context-parallel ranks: "headwise", "segments" or
            "auto".
        dispatcher: how tokens reach the ranks of their experts: "allgather", "alltoall", or "auto"
            for the dispatcher that moves fewer bytes.
        expert_rank_capacity_factor: in training an expert-parallel rank takes this times its even
            share of tokens, so that the host knows all sizes, see `moe.dispatch`; None takes all.
        overlap_shared_expert: compute the shared expert while tokens are exchanged.
        gtp_opt_in_modules: modules whose matrices generalized tensor parallelism may shard although
            tensor parallelism replicates them: "mla_down_proj" (the down projections of latent
            attention), "position_embeddings" (learned absolute positions).
        cpu_dtype: dtype in which a CPU multiplies bf16 and fp16 matrices: their own or fp32; None
            chooses the faster of the two. All ranks of a model must use the same dtype, see
            `with_cpu_dtype`.
        batch_invariant: whether the bits of a row depend on that row alone: see
            `with_batch_invariance`.
        layer_parts: replacements for layer i of n, by field; None if all layers are equal.
        step_state: state of the layers built from this backend; None without such state.
    """

    name: str
    column_linear: Callable[..., ColumnParallelLinear]
    row_linear: Callable[..., RowParallelLinear]
    rms_norm: Callable[..., NormFunction]
    layer_norm: Callable[..., NormFunction]
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    attention_layer: Callable[..., AttentionLayer] | None = None
    grouped_linear: Callable[..., GroupedLinear] = _local_grouped_linear
    recurrence: Callable[..., tuple[torch.Tensor, torch.Tensor]] = recur
    keep_recurrent_states: bool = False
    context_engine: str = AUTO
    linear_mode: str = AUTO
    dispatcher: str = AUTO
    expert_rank_capacity_factor: float | None = None
    overlap_shared_expert: bool = True
    gtp_opt_in_modules: tuple[str, ...] = ()
    cpu_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    layer_parts: Callable[[int, int], Mapping[str, Any]] | None = None
    step_state: StepState | None = None

    def of_layer(self, layer: int, num_layers: int) -> Backend:
        """Return the backend that layer `layer` of `num_layers` is built from."""
        if self.layer_parts is None:
            return self
        return replace(self, **self.layer_parts(layer, num_layers))

    def elementwise(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return an elementwise function of x [..., f] as this backend computes it."""
        return with_padded_rows(function) if self.batch_invariant else function


def with_cpu_dtype(backend: Backend, dtype: torch.dtype | None) -> Backend:
    """Return the backend with the dtype of bf16 and fp16 matmuls on a CPU, also in attention."""
    if dtype is None:
        return backend
    with_dtype = partial(backend.attention, cpu_dtype=dtype)
    return replace(backend, attention=with_dtype, cpu_dtype=dtype)


def with_batch_invariance(backend: Backend) -> Backend:
    """Return the backend with bits that depend neither on other rows nor on how a row is divided.

    Matmuls use packed matrices or tiles of a fixed number of rows (`ops.matmul.batch_invariant`),
    attention uses tiles of keys counted from the row's beginning (`ops.tiled_attention`), and
    recurrences run token by token; 16-bit matrices are multiplied in fp32. The log-probabilities of
    a whole row are then bit-identical to an engine's, which computes the row in chunks and single
    tokens. Recurrences are forward only.
    """
    return replace(
        backend,
        attention=tiled_attention,
        attention_layer=None,
        cpu_dtype=torch.float32,
        batch_invariant=True,
    )


LOCAL = Backend(
    "local",
    ColumnParallelLinear,
    RowParallelLinear,
    _local_rms_norm,
    _local_layer_norm,
    attention,
)


@dataclass(frozen=True, eq=False)
class LayerBuild:
    """The context in which a layer is built.

    Args:
        store: where weights are declared.
        region: the tp group and whether the sequence is sharded outside blocks.
        backend: the implementations to use.
        hidden_size: h.
        init: initial values of input projections.
        output_init: initial values of projections back into the residual stream.
        seed: dropout seed.
        context: the ranks that share the tokens of a row.
    """

    store: WeightStore
    region: TensorParallelRegion
    backend: Backend
    hidden_size: int
    init: InitSpec
    output_init: InitSpec
    seed: int = 0
    context: ContextParallel = field(default_factory=ContextParallel)

    def column_linear(
        self,
        name: str,
        outputs: Sequence[tuple[str, int, int | None]],
        *,
        input_size: int | None = None,
        **options: object,
    ) -> ColumnParallelLinear:
        """Build the backend's `ColumnParallelLinear`, which leads into a block.

        Args:
            name, outputs, options: arguments of that layer.
            input_size: input features; None means h.
        """
        return self.backend.column_linear(
            name,
            outputs,
            input_size=input_size or self.hidden_size,
            store=self.store,
            region=self.region,
            init=self.init,
            **options,
        )

    def row_linear(self, name: str, input_size: int, *, bias: bool = False) -> RowParallelLinear:
        """Build the backend's `RowParallelLinear`, which leads back into the residual stream."""
        return self.backend.row_linear(
            name,
            input_size=input_size,
            output_size=self.hidden_size,
            store=self.store,
            region=self.region,
            init=self.output_init,
            bias=bias,
        )


class Mixer(nn.Module):
    """The layer of a decoder block, between its norm and the residual stream.

    Attributes:
        decodes_gathered: under sequence parallelism `decode` takes the tokens of all ranks.
    """

    decodes_gathered = False

    def decode(
        self, x: torch.Tensor, layout: SequenceLayout, **context: object
    ) -> tuple[torch.Tensor, RowParallelLinear | None]:
        """Compute the new tokens of a generation step, outside of autograd.

        Args:
            x: [t, h], not changed by the call; [t/tp, h] with sequence parallelism, unless
                `decodes_gathered`.
            layout: layout of the tokens, with `paged`.
            context: keyword arguments of `forward`, and `comm`, the collectives.

        Returns:
            (the output, shaped as x, None), or the input [t, o/tp] of the row-parallel layer that
            the mixer ends with, and this layer. The caller then multiplies and reduces.
        """
        return self(x.unsqueeze(1), layout, **context).squeeze(1), None

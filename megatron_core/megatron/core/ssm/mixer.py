# SPDX-License-Identifier: Apache-2.0
"""RecurrentMixer: mixers with a state per sequence. LinearRecurrentMixer: the common part of the
gated delta net and of Mamba-2.

hidden [s, b, h] → units [s, b, u, w] → convolution → recurrence → [s, b, u, w_out] → gate and norm
→ output [s, b, h]

A unit is a key head (gated delta net), a group (Mamba-2) or all channels of a rank (short
convolution, which has no recurrence) with all its features. Sharding the rows of the fused input
projection by units is sharding by heads. The gate is applied token by token; the other features of
a unit depend on earlier tokens, in one of four modes:

| mode | tokens | heads | communication |
|---|---|---|---|
| one rank | all, packed in row order | all local heads | none |
| headwise | all tokens of all ranks | 1/cp of the local heads | features before, outputs after |
| segments | the local tokens | all local heads | a state, its transition, a halo |
| generation | new tokens, after the cached ones | all local heads | none |

A cache for generation stores the state of each mixer by name, one slot per row: the state of its
convolution and of its recurrence. A row with several new tokens gets new states, and a call with
one new token per row updates them in place. The new tokens of a step are packed (`PagedRows`).
Rows with one token come first and are decoded; the other rows are prefilled by a sweep.

Generation is not differentiable: it has no backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn

from megatron.core.backend import LayerBuild, Mixer
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.all_to_all import RecurrenceOutput, gather_heads, scatter_heads
from megatron.core.context_parallel.layout import PagedRows
from megatron.core.initialize import InitSpec
from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.matmul.batch_invariant import TILE_ROWS, pad_rows
from megatron.core.ops.recurrence import (
    DecodeMemory,
    LinearRecurrence,
    OutputNorm,
    PrologueWeights,
    RecurrenceInputs,
    UnitLayout,
    needs_arrival_counts,
    recurrence_decode,
    recurrence_prologue,
)
from megatron.core.ops.recurrence.interface import ProjectionSlice, slice_of, split_projection
from megatron.core.ops.sequences import PackingIndices, Sequences
from megatron.core.ssm.mixer_config import SEGMENTS, LinearShape, choose_mode
from megatron.core.ssm.state_passing import halo_rows, recur_in_segments
from megatron.core.transformer import CacheShapes
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_sharding import Shard, SubWeight, WeightSharding


class RecurrentCache(Protocol):
    """The cache interface that recurrent mixers use during generation."""

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the buffer of this name, [slots + 1, *shape], the same storage in every call.

        The slot of a new row is zero. The last slot is a dummy: rows with slot -1 write to it, and
        no row reads it.
        """
        ...


class _TemporaryCache:
    """A `RecurrentCache` of new rows, for one call."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the buffer of this name, [rows + 1, *shape]; zeros at the first call."""
        if name not in self._buffers:
            self._buffers[name] = torch.zeros((self.rows + 1, *shape), dtype=dtype, device=device)
        return self._buffers[name]


def load_state(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the states of rows [b, ...]; zero for a row with slot -1.

    Args:
        buffer: [slots + 1, ...] of a `RecurrentCache`.
        slots: int64 [b], of a `PagedRows`.
    """
    state = buffer[slots]  # -1 is the last row
    absent = (slots < 0).view(-1, *[1] * (state.ndim - 1))
    return state.masked_fill_(absent, 0)


def store_state(buffer: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write the states of rows by slot; the state of a row with slot -1 is dropped.

    Args:
        buffer: [slots + 1, ...] of a `RecurrentCache`.
        slots: int64 [b], without duplicates except -1.
        values: [b, ...].
    """
    with torch.no_grad():
        buffer[slots] = values.to(buffer.dtype)


class UnitShard:
    """A cp rank's shard of per-unit weights: shard `index` of `count` equal shards."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this shard of dimension 0; autograd sums the gradients of all shards."""
        return weight if self.count == 1 else weight.chunk(self.count)[self.index]


class RecurrentMixer(Mixer, ABC):
    """Base class of mixers with a state per sequence.

    Args:
        name: prefix of its weights.
        units: number of units on this rank.
        gate_channels: number of gates after the columns of a unit.
        build: the backend, weight store and process groups.

    Attributes:
        input: the fused input projection; each of the u units is followed by its gates.
        output: the output projection.
        conv, conv_bias: weight and bias of the convolution; the bias may be None.
        column_factors: factors on the columns of a unit and its gates [w + r V]; None is 1.
        token_by_token: process tokens sequentially in every call, so that the split of a row into
            calls does not change a bit.
    """

    input: nn.Module
    output: nn.Module
    conv: WeightHandle
    conv_bias: WeightHandle | None
    column_factors: torch.Tensor | None

    def __init__(self, name: str, *, units: int, gate_channels: int, build: LayerBuild) -> None:
        super().__init__()
        self.name, self.units, self.gate_channels = name, units, gate_channels
        self.conv_bias = self.column_factors = None
        self.context = build.context
        self.token_by_token = build.backend.batch_invariant
        self._store, self._tp = build.store, build.region.group

    # --- what a mixer specifies of itself ---------------------------------------------------------

    @abstractmethod
    def run_recurrence(
        self, columns: torch.Tensor | ProjectionSlice, layout: SequenceLayout
    ) -> RecurrenceOutput:
        """Return the outputs for the tokens of a layout from the columns of units [s, b, u, w]."""

    @abstractmethod
    def prefill(
        self,
        units: torch.Tensor,
        sequences: Sequences,
        slots: torch.Tensor,
        cache: RecurrentCache,
    ) -> torch.Tensor:
        """Return the outputs [t, u, ...] for several new tokens per row, and store the states.

        Args:
            units: [t, u, w].
            sequences: the boundaries of the rows.
            slots: int64 [b], the slots of the rows' states.
            cache: the states.
        """

    @abstractmethod
    def norm_and_gate(
        self, out: RecurrenceOutput, gate: torch.Tensor | ProjectionSlice
    ) -> torch.Tensor:
        """Apply norm and gate [s, b, u, r V] to the recurrence's outputs; return [s, b, H V]."""

    @abstractmethod
    def decode_tokens(
        self, units: torch.Tensor, gate: torch.Tensor, slots: torch.Tensor, cache: RecurrentCache
    ) -> torch.Tensor:
        """Return the input of the output projection [b, H V] for one new token per row.

        Args:
            units: [b, u, w].
            gate: [b, u, r V].
            slots: int64 [b], the slots of the rows' states.
            cache: the states.
        """

    @abstractmethod
    def state_shapes(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of a sequence's states by name."""

    # --- weights ----------------------------------------------------------------------------------

    def declare_convolution(
        self,
        kind: str,
        segment_shapes: Mapping[str, tuple[int, int | None]],
        *,
        units: int,
        width: int,
    ) -> WeightHandle:
        """Declare weights [channels, 1, W] or biases [channels] of a depthwise convolution.

        Args:
            kind: "weight" or "bias".
            segment_shapes: channels and number of blocks by segment name.
            units: number of units of all ranks, by which rows interleave.
            width: W.
        """
        kernel_shape = (1, width) if kind == "weight" else ()
        segments = tuple(
            SubWeight(
                name=f"{self.name}.conv.{segment_name}.{kind}",
                shape=(channels, *kernel_shape),
                shards=(Shard(axis="tp", dim=0, count=num_blocks),),
            )
            for segment_name, (channels, num_blocks) in segment_shapes.items()
        )
        sharding = WeightSharding(
            name=f"{self.name}.conv.{kind}",
            sub_weights=segments,
            interleave=units,
            weight_decay=kind == "weight",
        )
        bound = width**-0.5  # torch's bound for depthwise convolutions
        return self._store.declare(sharding, InitSpec.uniform(-bound, bound))

    def forward(
        self,
        hidden: torch.Tensor,
        layout: SequenceLayout,
        *,
        cache: RecurrentCache | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] both under sequence parallelism)."""
        units = self.input(hidden).unflatten(-1, (self.units, -1))  # [s, b, u, w + r V]
        if self.column_factors is not None:
            units = units * self.column_factors.to(units)
        gates = self.gate_channels
        columns, gate = split_projection(units, [units.shape[-1] - gates, gates])
        if cache is not None:
            rows = layout.rows_with_past
            return self.output(self.generate(columns.value, gate.value, rows, cache))
        if self.token_by_token:
            return self.output(self._forward_token_by_token(columns.value, gate.value, layout))
        return self.output(self.norm_and_gate(self.run_recurrence(columns, layout), gate))

    # --- generation -------------------------------------------------------------------------------

    def generate(
        self, units: torch.Tensor, gate: torch.Tensor, rows: PagedRows, cache: RecurrentCache
    ) -> torch.Tensor:
        """Return the input of the output projection [t, 1, H V] for the new tokens of a step.

        Args:
            units: [t, 1, u, w].
            gate: [t, 1, u, r V].
            rows: the rows of the tokens.
            cache: the states.
        """
        num_decode, outputs = rows.decode_rows, []
        if self.token_by_token:
            prefill_ends = () if rows.prefill is None else rows.prefill.bounds[1:]
            bounds = [*range(num_decode + 1), *(num_decode + end for end in prefill_ends)]
            packed = units[:, 0], gate[:, 0]
            return self._decode_token_by_token(*packed, bounds, rows.state_slots, cache).unsqueeze(
                1
            )
        if num_decode:
            slots = rows.state_slots[:num_decode]
            outputs.append(
                self.decode_tokens(units[:num_decode, 0], gate[:num_decode, 0], slots, cache)
            )
        if rows.prefill is not None:
            out = self.prefill(
                units[num_decode:, 0], rows.prefill, rows.state_slots[num_decode:], cache
            )
            outputs.append(
                self.norm_and_gate(RecurrenceOutput(out), gate[num_decode:]).flatten(0, 1)
            )
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(1)

    def cache_shapes(self, dtype: torch.dtype) -> CacheShapes:
        """Return the shapes of a sequence's states, for activations of `dtype`."""
        return CacheShapes(states=self.state_shapes(dtype), dtype=dtype)

    def _decode_token_by_token(
        self,
        units: torch.Tensor,
        gate: torch.Tensor,
        bounds: Sequence[int],
        slots: torch.Tensor,
        cache: RecurrentCache,
    ) -> torch.Tensor:
        """Return the input of the output projection [t, H V] of packed tokens, decoded in order.

        Step i decodes token i of every row that has one, in tiles of `TILE_ROWS` rows.

        Args:
            units: [t, u, w].
            gate: [t, u, r V].
            bounds: cumulative numbers of tokens of the rows, [0, ..., t].
            slots: int64 [b], the slots of the rows' states.
            cache: the states.
        """
        row_starts, lengths = bounds[:-1], [end - start for start, end in pairwise(bounds)]
        token_order, outputs = [], []
        for step in range(max(lengths, default=0)):
            rows = [row for row, length in enumerate(lengths) if length > step]
            for start in range(0, len(rows), TILE_ROWS):
                tile = rows[start : start + TILE_ROWS]
                token_indices = [row_starts[row] + step for row in tile]
                tile_units, tile_gate = (
                    pad_rows(x[token_indices], TILE_ROWS) for x in (units, gate)
                )
                tile_slots = slots.new_full((TILE_ROWS,), -1)
                tile_slots[: len(tile)] = slots[tile]
                outputs.append(
                    self.decode_tokens(tile_units, tile_gate, tile_slots, cache)[: len(tile)]
                )
                token_order += token_indices
        if not outputs:
            return units.new_empty(0, self.gate_channels * self.units)
        joined = torch.cat(outputs)
        return torch.empty_like(joined).index_copy_(
            0, torch.tensor(token_order, device=joined.device), joined
        )

    def _forward_token_by_token(
        self, units: torch.Tensor, gate: torch.Tensor, layout: SequenceLayout
    ) -> torch.Tensor:
        """Return the input of the output projection [s, b, H V], bit-equal to generation.

        Raises:
            ValueError: autograd is on, rows are split over ranks, or have several documents.
        """
        documents = layout.documents is not None or layout.document_ids is not None
        if torch.is_grad_enabled() or self.context.group.size > 1 or documents:
            raise ValueError(
                f"{self.name}: a batch-invariant recurrence supports forward only, over rows "
                "of one document on one context parallel rank: call it under torch.no_grad()"
            )
        length, batch = units.shape[:2]
        # [b s, ...]
        packed_units, packed_gate = (x.transpose(0, 1).flatten(0, 1) for x in (units, gate))
        bounds = range(0, length * batch + 1, length)
        slots = torch.arange(batch, device=units.device)
        out = self._decode_token_by_token(
            packed_units, packed_gate, bounds, slots, _TemporaryCache(batch)
        )
        return out.unflatten(0, (batch, length)).transpose(0, 1)


class LinearRecurrentMixer(RecurrentMixer):
    """Base class of the mixers with a convolution and a linear recurrence.

    Args:
        name: prefix of its weights.
        shape: sizes that determine the communication volume, without tokens.
        unit: the columns of a unit on this rank.
        recurrence: the recurrence over the tokens.
        build: the backend, weight store and process groups.

    Attributes:
        a_log, dt_bias: A_log and dt_bias, one value per head.
        skip: D, one value per head, of the skip connection; None has no skip.
    """

    a_log: WeightHandle
    dt_bias: WeightHandle
    skip: WeightHandle | None

    def __init__(
        self,
        name: str,
        *,
        shape: LinearShape,
        unit: UnitLayout,
        recurrence: LinearRecurrence,
        build: LayerBuild,
    ) -> None:
        gates = unit.heads * unit.value_channels
        super().__init__(name, units=shape.units, gate_channels=gates, build=build)
        self.shape, self.unit_layout, self.skip = shape, unit, None
        self.recurrence = recurrence
        self.recur = build.backend.recurrence
        self.keep_states = build.backend.keep_recurrent_states

    @abstractmethod
    def convolution(self, shard: UnitShard) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight [u, c, W] and bias [u, c] of the convolution for a shard of the units."""

    def apply_skip(
        self, out: torch.Tensor, inputs: RecurrenceInputs, shard: UnitShard
    ) -> torch.Tensor:
        """Return out [t, H, V] plus the skip connection."""
        return out

    def replicate_shared(self, units: torch.Tensor, copies: int) -> torch.Tensor:
        """Split each of the units [..., u, w] by heads, [..., u · copies, w']."""
        raise ValueError(f"{self.name}: {self.units} units do not divide over context ranks")

    def weights(self, shard: UnitShard, dtype: torch.dtype) -> PrologueWeights:
        """Return the prologue's weights for a shard of the units and features of `dtype`."""
        dtype_acc = accumulation_dtype(dtype)
        per_head = (shard.of(handle.read_only(dtype_acc)) for handle in (self.a_log, self.dt_bias))
        return PrologueWeights(*self.convolution(shard), *per_head)

    def declare_per_head(self, suffix: str, heads: int, init: InitSpec) -> WeightHandle:
        """Declare a weight with one fp32 value per head, sharded over tp."""
        sharding = WeightSharding.of(
            f"{self.name}.{suffix}", (heads,), Shard(axis="tp", dim=0), weight_decay=False
        )
        return self._store.declare(sharding, init, dtype=torch.float32)

    # --- over the tokens --------------------------------------------------------------------------

    def run_recurrence(
        self, columns: torch.Tensor | ProjectionSlice, layout: SequenceLayout
    ) -> RecurrenceOutput:
        """Return the outputs of the recurrence for u units of r heads from [s, b, u, w]."""
        group, (units, gradient) = self.context.group, slice_of(columns)
        if group.size > 1 and self._mode(units, layout) == SEGMENTS:
            return self._run_segments(units, layout)
        shard = UnitShard(group.rank, group.size)
        copies = self._unit_copies(shard)
        units = units if copies == 1 else self.replicate_shared(units, copies)
        source, packing = scatter_heads(units, layout, group)  # [rows, u/cp, w]
        sequences = layout.whole_rows(units.shape[1]).sequences
        if group.size > 1 or copies > 1:
            gradient = None  # the source is not a view of the projection
        source_slice = ProjectionSlice(source, gradient)
        inputs, _ = self._prologue(source_slice, shard, sequences=sequences, packing=packing)
        recurrence = self.recurrence.operations(inputs)
        out, _ = self.recur(recurrence, inputs, sequences, keep_states=self.keep_states)
        out = self.apply_skip(out, inputs, shard).unflatten(1, (source.shape[1], -1))
        return gather_heads(out, layout, group)  # from [t, u/cp, r, V]

    def _mode(self, units: torch.Tensor, layout: SequenceLayout) -> str:
        """Return the context-parallel mode for units [s/cp, b, u, w], chosen once for all layers of
        this shape in a layout."""
        rows, size = units.shape[1], units.element_size()

        def choose() -> str:
            shape = self.shape.with_tokens(layout, rows, element_bytes=size)
            return choose_mode(self.context.linear_mode, shape, self.context.group.size).mode

        return layout.once((self.context.linear_mode, self.shape, rows, size), choose)

    def _unit_copies(self, shard: UnitShard) -> int:
        """Return the number of ranks that share one unit."""
        return 1 if self.units % shard.count == 0 else shard.count // self.units

    def _prologue(
        self,
        source: torch.Tensor | ProjectionSlice,
        shard: UnitShard,
        *,
        sequences: Sequences,
        packing: PackingIndices | None,
        initial: torch.Tensor | None = None,
        return_conv_state: bool = False,
    ) -> tuple[RecurrenceInputs, torch.Tensor | None]:
        """Return the recurrence's inputs for a shard of the units, see `recurrence_prologue`."""
        return recurrence_prologue(
            source,
            self.weights(shard, slice_of(source).value.dtype),
            unit=self.unit_layout.with_heads(self.unit_layout.heads // self._unit_copies(shard)),
            sequences=sequences,
            packing=packing,
            initial=initial,
            return_conv_state=return_conv_state,
        )

    def _run_segments(self, units: torch.Tensor, layout: SequenceLayout) -> RecurrenceOutput:
        """Return the outputs of the recurrence over this rank's tokens, with state passing."""
        group, shard = self.context.group, UnitShard()
        local = layout.local_sequences(units.shape[1])
        source, packing = units.flatten(0, 1), local.indices
        halo = halo_rows(
            source,
            local,
            group,
            width=self.shape.conv_width - 1,
            channels=self.unit_layout.conv_channels,
            packing=packing,
        )
        inputs, _ = self._prologue(
            source, shard, sequences=local.sequences, packing=packing, initial=halo
        )
        recurrence = self.recurrence.operations(inputs)
        out = recur_in_segments(recurrence, inputs, local, group, keep_states=self.keep_states)
        out = self.apply_skip(out, inputs, shard).unflatten(1, (self.units, -1))
        return RecurrenceOutput(out, packing)

    # --- generation -------------------------------------------------------------------------------

    def decode_recurrence(
        self,
        units: torch.Tensor,
        slots: torch.Tensor,
        cache: RecurrentCache,
        norm: OutputNorm | None,
    ) -> torch.Tensor:
        """Run the recurrence, norm and gate for one new token per row.

        Args:
            units: [b, u, w].
            slots: int64 [b], the slots of the rows' states; -1 is a padding row, whose output is
                zero even if its inputs are NaN.
            cache: the states.
            norm: norm and gate; None leaves both to the caller.

        Returns:
            [b, H, V].
        """
        conv, state = self._cache_buffers(cache, units)
        arrival_counts = None
        if needs_arrival_counts(units, self.unit_layout):
            arrival_counts = cache.buffer(
                f"{self.name}.arrived", (self.units,), dtype=torch.int32, device=units.device
            )
        # `get` returns the stored weight without a copy: decoding saves nothing for backward.
        bias = None if self.conv_bias is None else self.conv_bias.get().view(self.units, -1)
        return recurrence_decode(
            units,
            PrologueWeights(
                self.conv.get().view(self.units, -1, self.shape.conv_width),
                bias,
                self.a_log.get(),
                self.dt_bias.get(),
            ),
            unit=self.unit_layout,
            memory=DecodeMemory(conv, state, slots, arrival_counts),
            skip=None if self.skip is None else self.skip.get(),
            norm=norm,
        )

    def state_shapes(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of a sequence's states by name."""
        shape, unit = self.shape, self.unit_layout
        before = (shape.conv_width - 1, self.units, unit.conv_channels)
        states = (shape.heads, shape.key_channels, shape.value_channels)
        return {
            f"{self.name}.conv": (before, dtype),
            f"{self.name}.state": (states, accumulation_dtype(dtype)),
        }

    def _cache_buffers(
        self, cache: RecurrentCache, units: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers of the states."""
        conv, state = (
            cache.buffer(name, shape, dtype=dtype, device=units.device)
            for name, (shape, dtype) in self.state_shapes(units.dtype).items()
        )
        return conv, state

    def prefill(
        self,
        units: torch.Tensor,
        sequences: Sequences,
        slots: torch.Tensor,
        cache: RecurrentCache,
    ) -> torch.Tensor:
        """Return the outputs of the recurrence [t, u, r, V] for several new tokens per row."""
        shard = UnitShard()
        conv, state = self._cache_buffers(cache, units)
        inputs, conv_state = self._prologue(
            units,
            shard,
            sequences=sequences,
            packing=None,
            initial=load_state(conv, slots),
            return_conv_state=True,
        )
        assert conv_state is not None
        store_state(conv, slots, conv_state)
        recurrence = self.recurrence.operations(inputs)
        out, states = self.recur(recurrence, inputs, sequences, initial=load_state(state, slots))
        store_state(state, slots, states)
        return self.apply_skip(out, inputs, shard).unflatten(1, (self.units, -1))

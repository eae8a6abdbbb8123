# SPDX-License-Identifier: Apache-2.0
"""RecurrentMixer: how a gated delta net and Mamba-2 apply their recurrence to the tokens of a row.

hidden [s, b, h] → units [s, b, u, w] → convolution → recurrence → [s, b, u, w_out] → gate and norm
→ output [s, b, h]

A unit is a key head (gated delta net) or a group (Mamba-2) with all its features. So the rows of
the fused input projection can be sharded by units, which is sharding by heads. The gate stays with
its token; the other features of a unit depend on earlier tokens, in one of four ways:

| way | tokens | heads | sent |
|---|---|---|---|
| one rank | packed in the order of the rows | all of the rank's | nothing |
| headwise | the same of all ranks | 1/cp of them | features before, outputs after |
| segments | those of this rank | all of the rank's | a state, its transition, a halo |
| generation | the new ones, after those in the cache | all of the rank's | nothing |

A cache for generation holds the state of each mixer by name, one slot a row: the last tokens
before its convolution, and the state of its recurrence. A row with many new tokens gets new
states; a call with one new token a row updates them in place. The new tokens of a step are packed
(`PagedRows`), those of rows with one token first: these are decoded, the rest swept.

Generation is not differentiable: it has no backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn

from megatron.core.backend import LayerBuild
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.all_to_all import RecurrenceOutput, gather_heads, scatter_heads
from megatron.core.context_parallel.layout import PagedRows
from megatron.core.initialize import InitSpec
from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.batch_invariant import TILE_ROWS, pad_rows
from megatron.core.ops.joint_gradient import ProjectionSlice, slice_of, split_projection
from megatron.core.ops.recurrence import Recurrence, RecurrenceInputs
from megatron.core.ops.recurrence_decode import needs_arrival_counts, recurrence_decode
from megatron.core.ops.recurrence_decode.reference import DecodeMemory, OutputNorm
from megatron.core.ops.recurrence_prologue import PrologueWeights, UnitLayout, recurrence_prologue
from megatron.core.ops.sequences import PackingIndices, Sequences
from megatron.core.ssm.choice import LinearShape, choose_mode
from megatron.core.ssm.mixer_config import SEGMENTS
from megatron.core.ssm.state_passing import halo_rows, recur_in_segments
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_sharding import Cut, Segment, WeightSharding


class RecurrentCache(Protocol):
    """What recurrent mixers need of a cache while generating."""

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return what is kept by this name, [slots + 1, *shape], the same storage in every call.

        It is zero for a row that begins. The last slot is nobody's: what rows of slot -1 write
        goes there, and nothing that counts is read from it.
        """
        ...


class _States:
    """A `RecurrentCache` of rows that begin, for one call."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return what is kept by this name, [rows + 1, *shape]; zeros the first time."""
        if name not in self._buffers:
            self._buffers[name] = torch.zeros((self.rows + 1, *shape), dtype=dtype, device=device)
        return self._buffers[name]


def carried(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what rows go on from, [b, ...]; zero for a row of slot -1.

    Args:
        buffer: [slots + 1, ...] of a `RecurrentCache`.
        slots: int64 [b], of a `PagedRows`.
    """
    found = buffer[slots]  # -1 is the last row
    absent = (slots < 0).view(-1, *[1] * (found.ndim - 1))
    return found.masked_fill_(absent, 0)


def keep(buffer: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write what rows go on from by slot; of a row of slot -1 nothing is kept.

    Args:
        buffer: [slots + 1, ...] of a `RecurrentCache`.
        slots: int64 [b]; none but -1 twice.
        values: [b, ...].
    """
    with torch.no_grad():
        buffer[slots] = values.to(buffer.dtype)


class Part:
    """A cp rank's share of per-unit weights: number `index` of `count` equal ones."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this share of dimension 0; gradients of all shares add up to the weight's."""
        return weight if self.count == 1 else weight.chunk(self.count)[self.index]


class RecurrentMixer(nn.Module, ABC):
    """What the mixers share.

    Args:
        name: prefix of its weights.
        shape: what decides how much is sent, without tokens.
        parts: the columns of a unit on this rank.
        recurrence: what runs over the tokens.
        build: the surroundings.

    Attributes:
        input: makes the u units of a token, each followed by its gates; units interleave.
        output: the projection of what the mixer makes.
        conv, conv_bias: of the convolution; there may be no bias.
        rates, bias: A_log and dt_bias, a number for each head.
        skip: D, a number for each head, of what `added` adds; None adds nothing.
        step_by_step: compute tokens one after another in any call, so that chunks change no bit.
    """

    input: nn.Module
    output: nn.Module
    conv: WeightHandle
    conv_bias: WeightHandle | None
    rates: WeightHandle
    bias: WeightHandle
    skip: WeightHandle | None

    def __init__(
        self,
        name: str,
        *,
        shape: LinearShape,
        unit: UnitLayout,
        recurrence: Recurrence,
        build: LayerBuild,
    ) -> None:
        super().__init__()
        self.name, self.shape, self.units, self.unit_layout = name, shape, shape.units, unit
        self.conv_bias = self.skip = None
        self.recurrence, self.context = recurrence, build.context
        self.recur = build.backend.recurrence
        self.keep_states = build.backend.keep_recurrent_states
        self.step_by_step = build.backend.batch_invariant
        self._store, self._tp = build.store, build.region.group

    # --- what a mixer specifies of itself ---------------------------------------------------------

    @abstractmethod
    def convolution(self, part: Part) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight [u, c, W] and bias [u, c] of the convolution for a share of the units."""

    def added(self, out: torch.Tensor, inputs: RecurrenceInputs, part: Part) -> torch.Tensor:
        """Return out [t, H, V] with what the token itself adds to it."""
        return out

    def spread(self, units: torch.Tensor, copies: int) -> torch.Tensor:
        """Return units [..., u, w] sharded further, [..., u · copies, w']."""
        raise ValueError(f"{self.name}: {self.units} units do not divide over context ranks")

    def weights(self, part: Part, dtype: torch.dtype) -> PrologueWeights:
        """Return those of a share of the units before the recurrence, for features of `dtype`."""
        wide = accumulation_dtype(dtype)
        per_head = (part.of(handle.read_only(wide)) for handle in (self.rates, self.bias))
        return PrologueWeights(*self.convolution(part), *per_head)

    # --- weights ----------------------------------------------------------------------------------

    def declare_per_head(self, part: str, heads: int, init: InitSpec) -> WeightHandle:
        """Declare one fp32 number for each head, sharded over tp."""
        sharding = WeightSharding.of(
            f"{self.name}.{part}", (heads,), Cut(axis="tp", dim=0), weight_decay=False
        )
        return self._store.declare(sharding, init, dtype=torch.float32)

    def declare_convolution(
        self, kind: str, parts: dict[str, tuple[int, int]], *, units: int, width: int
    ) -> WeightHandle:
        """Declare weights [channels, 1, W] or biases [channels] of a depthwise convolution.

        Args:
            kind: "weight" or "bias".
            parts: channels and pieces by the part's name.
            units: of all ranks; rows interleave by them.
            width: W.
        """
        inner = (1, width) if kind == "weight" else ()
        segments = tuple(
            Segment(
                name=f"{self.name}.conv.{part}.{kind}",
                shape=(channels, *inner),
                cuts=(Cut(axis="tp", dim=0, parts=pieces),),
            )
            for part, (channels, pieces) in parts.items()
        )
        sharding = WeightSharding(
            name=f"{self.name}.conv.{kind}",
            segments=segments,
            interleave=units,
            weight_decay=kind == "weight",
        )
        bound = width**-0.5  # of torch's convolutions with one channel in a group
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
        gates = self.unit_layout.heads * self.unit_layout.value_channels
        travels, gate = split_projection(units, [units.shape[-1] - gates, gates])
        if cache is not None:
            rows = layout.rows_with_past
            return self.output(self.generated(travels.value, gate.value, rows, cache))
        if self.step_by_step:
            return self.output(self._whole_rows_stepped(travels.value, gate.value, layout))
        return self.output(self.gated(self.over_tokens(travels, layout), gate))

    # --- over the tokens --------------------------------------------------------------------------

    def over_tokens(
        self, columns: torch.Tensor | ProjectionSlice, layout: SequenceLayout
    ) -> RecurrenceOutput:
        """Return what comes out of the recurrence, of u units of r heads, from [s, b, u, w]."""
        group, (units, gradient) = self.context.group, slice_of(columns)
        if group.size > 1 and self._mode(units, layout) == SEGMENTS:
            return self._in_segments(units, layout)
        part = Part(group.rank, group.size)
        copies = self._copies(part)
        units = units if copies == 1 else self.spread(units, copies)
        source, packing = scatter_heads(units, layout, group)  # [rows, u/cp, w]
        sequences = layout.whole_rows(units.shape[1]).sequences
        if group.size > 1 or copies > 1:
            gradient = None  # the source is no view of the projection
        own = ProjectionSlice(source, gradient)
        inputs, _ = self._read(own, part, sequences=sequences, packing=packing)
        out, _ = self.recur(self.recurrence, inputs, sequences, keep_states=self.keep_states)
        out = self.added(out, inputs, part).unflatten(1, (source.shape[1], -1))
        return gather_heads(out, layout, group)  # from [t, u/cp, r, V]

    def _mode(self, units: torch.Tensor, layout: SequenceLayout) -> str:
        """Return how units [s/cp, b, u, w] meet the tokens of other ranks: chosen once for all
        layers of a layout that have this shape."""
        rows, size = units.shape[1], units.element_size()

        def choose() -> str:
            shape = self.shape.with_tokens(layout, rows, element_bytes=size)
            return choose_mode(self.context.linear_mode, shape, self.context.group.size).mode

        return layout.once((self.context.linear_mode, self.shape, rows, size), choose)

    def _copies(self, part: Part) -> int:
        """Return in how many a unit is sharded so that each share has one."""
        return 1 if self.units % part.count == 0 else part.count // self.units

    def _read(
        self,
        source: torch.Tensor | ProjectionSlice,
        part: Part,
        *,
        sequences: Sequences,
        packing: PackingIndices | None,
        initial: torch.Tensor | None = None,
        return_conv_state: bool = False,
    ) -> tuple[RecurrenceInputs, torch.Tensor | None]:
        """Return what the recurrence reads of a share of the units, see `recurrence_prologue`."""
        return recurrence_prologue(
            source,
            self.weights(part, slice_of(source).value.dtype),
            unit=self.unit_layout.with_heads(self.unit_layout.heads // self._copies(part)),
            sequences=sequences,
            packing=packing,
            initial=initial,
            return_conv_state=return_conv_state,
        )

    def _in_segments(self, units: torch.Tensor, layout: SequenceLayout) -> RecurrenceOutput:
        """Return what comes out of the recurrence over this rank's own tokens."""
        group, part = self.context.group, Part()
        pieces = layout.local_sequences(units.shape[1])
        source, packing = units.flatten(0, 1), pieces.indices
        before = halo_rows(
            source,
            pieces,
            group,
            width=self.shape.conv_width - 1,
            channels=self.unit_layout.conv_channels,
            packing=packing,
        )
        inputs, _ = self._read(
            source, part, sequences=pieces.sequences, packing=packing, initial=before
        )
        out = recur_in_segments(
            self.recurrence, inputs, pieces, group, keep_states=self.keep_states
        )
        out = self.added(out, inputs, part).unflatten(1, (self.units, -1))
        return RecurrenceOutput(out, packing)

    # --- generation -------------------------------------------------------------------------------

    def generated(
        self, units: torch.Tensor, gate: torch.Tensor, rows: PagedRows, cache: RecurrentCache
    ) -> torch.Tensor:
        """Return what is projected out [t, 1, H V] of the new tokens of a step.

        Args:
            units: [t, 1, u, w].
            gate: [t, 1, u, r V].
            rows: whose tokens they are.
            cache: where states are.
        """
        first, found = rows.decode_rows, []
        if self.step_by_step:
            ends = () if rows.prefill is None else rows.prefill.bounds[1:]
            bounds = [*range(first + 1), *(first + end for end in ends)]
            packed = units[:, 0], gate[:, 0]
            return self._stepped(*packed, bounds, rows.state_slots, cache).unsqueeze(1)
        if first:
            slots = rows.state_slots[:first]
            found.append(self.decoded(units[:first, 0], gate[:first, 0], slots, cache))
        if rows.prefill is not None:
            out = self._swept(units[first:, 0], rows.prefill, rows.state_slots[first:], cache)
            found.append(self.gated(RecurrenceOutput(out), gate[first:]).flatten(0, 1))
        return (found[0] if len(found) == 1 else torch.cat(found)).unsqueeze(1)

    @abstractmethod
    def gated(self, out: RecurrenceOutput, gate: torch.Tensor | ProjectionSlice) -> torch.Tensor:
        """Return what is projected out [s, b, H V] of what came out of the recurrence, behind norm
        and gate [s, b, u, r V]."""

    @abstractmethod
    def decoded(
        self, units: torch.Tensor, gate: torch.Tensor, slots: torch.Tensor, cache: RecurrentCache
    ) -> torch.Tensor:
        """Return what is projected out [b, H V] of one new token a row, [b, u, w], gate [b, u,
        r V], the rows' states in slots int64 [b]."""

    def decode(
        self,
        units: torch.Tensor,
        slots: torch.Tensor,
        cache: RecurrentCache,
        norm: OutputNorm | None,
    ) -> torch.Tensor:
        """Return what comes out of the recurrence, norm and gate for one new token a row.

        Args:
            units: [b, u, w].
            slots: int64 [b], of the rows' states; -1 is a row without a token: it puts out zeros,
                whatever it holds.
            cache: where states are.
            norm: and the gate; None leaves them to the caller.

        Returns:
            [b, H, V].
        """
        conv, state = self._kept(cache, units)
        arrival_counts = None
        if needs_arrival_counts(units, self.unit_layout):
            arrival_counts = cache.buffer(
                f"{self.name}.arrived", (self.units,), dtype=torch.int32, device=units.device
            )
        # Weights as stored, not copies: nothing here is saved for a backward pass.
        bias = None if self.conv_bias is None else self.conv_bias.get().view(self.units, -1)
        return recurrence_decode(
            units,
            PrologueWeights(
                self.conv.get().view(self.units, -1, self.shape.conv_width),
                bias,
                self.rates.get(),
                self.bias.get(),
            ),
            unit=self.unit_layout,
            memory=DecodeMemory(conv, state, slots, arrival_counts),
            skip=None if self.skip is None else self.skip.get(),
            norm=norm,
        )

    def kept_shapes(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of what a cache keeps of a row, by name: the tokens before the
        convolution, and the states.

        Args:
            dtype: of activations.
        """
        shape, unit = self.shape, self.unit_layout
        before = (shape.conv_width - 1, self.units, unit.conv_channels)
        states = (shape.heads, shape.key_channels, shape.value_channels)
        return {
            f"{self.name}.conv": (before, dtype),
            f"{self.name}.state": (states, accumulation_dtype(dtype)),
        }

    def _kept(
        self, cache: RecurrentCache, units: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers of `kept_shapes`."""
        conv, state = (
            cache.buffer(name, shape, dtype=dtype, device=units.device)
            for name, (shape, dtype) in self.kept_shapes(units.dtype).items()
        )
        return conv, state

    def _stepped(
        self,
        units: torch.Tensor,
        gate: torch.Tensor,
        bounds: Sequence[int],
        slots: torch.Tensor,
        cache: RecurrentCache,
    ) -> torch.Tensor:
        """Return what is projected out [t, H V] of packed tokens, taken on one by one in tiles of
        rows: first the first token of every row, then the second of those that have one.

        Args:
            units: [t, u, w].
            gate: [t, u, r V].
            bounds: where the tokens of each row begin and end, [0, ..., t].
            slots: int64 [b], of the rows' states.
            cache: where states are.
        """
        starts, lengths = bounds[:-1], [end - start for start, end in pairwise(bounds)]
        order, found = [], []
        for step in range(max(lengths, default=0)):
            rows = [row for row, length in enumerate(lengths) if length > step]
            for first in range(0, len(rows), TILE_ROWS):
                tile = rows[first : first + TILE_ROWS]
                places = [starts[row] + step for row in tile]
                inputs = (pad_rows(x[places], TILE_ROWS) for x in (units, gate))
                where = slots.new_full((TILE_ROWS,), -1)
                where[: len(tile)] = slots[tile]
                found.append(self.decoded(*inputs, where, cache)[: len(tile)])
                order += places
        if not found:
            return units.new_empty(
                0, self.unit_layout.heads * self.unit_layout.value_channels * self.units
            )
        joined = torch.cat(found)
        return torch.empty_like(joined).index_copy_(
            0, torch.tensor(order, device=joined.device), joined
        )

    def _whole_rows_stepped(
        self, units: torch.Tensor, gate: torch.Tensor, layout: SequenceLayout
    ) -> torch.Tensor:
        """Return what is projected out [s, b, H V] of whole rows, as generation computes it.

        Raises:
            ValueError: gradients are wanted, rows are shared by ranks, or hold several documents.
        """
        documents = layout.documents is not None or layout.document_ids is not None
        if torch.is_grad_enabled() or self.context.group.size > 1 or documents:
            raise ValueError(
                f"{self.name}: a batch-invariant recurrence is forward only, over rows of one "
                "document on one context parallel rank: call it under torch.no_grad()"
            )
        length, batch = units.shape[:2]
        packed = (x.transpose(0, 1).flatten(0, 1) for x in (units, gate))  # [b s, ...]
        bounds = range(0, length * batch + 1, length)
        slots = torch.arange(batch, device=units.device)
        out = self._stepped(*packed, bounds, slots, _States(batch))
        return out.unflatten(0, (batch, length)).transpose(0, 1)

    def _swept(
        self,
        units: torch.Tensor,
        sequences: Sequences,
        slots: torch.Tensor,
        cache: RecurrentCache,
    ) -> torch.Tensor:
        """Return what comes out of the recurrence [t, u, r, V] for several new tokens a row."""
        part = Part()
        conv, state = self._kept(cache, units)
        inputs, conv_state = self._read(
            units,
            part,
            sequences=sequences,
            packing=None,
            initial=carried(conv, slots),
            return_conv_state=True,
        )
        keep(conv, slots, conv_state)
        out, states = self.recur(self.recurrence, inputs, sequences, initial=carried(state, slots))
        keep(state, slots, states)
        return self.added(out, inputs, part).unflatten(1, (self.units, -1))

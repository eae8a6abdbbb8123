# SPDX-License-Identifier: Apache-2.0
"""The recurrence prologue in Triton: one kernel forward, one backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.ops.backend_choice import apply_function
from megatron.core.ops.launches import Launches, cdiv, next_power_of_2
from megatron.core.ops.recurrence.convolution.cpu import ConvBoundaries
from megatron.core.ops.recurrence.interface import GradientSlice, ProjectionSlice, RecurrenceInputs
from megatron.core.ops.recurrence.prologue.cpu import PrologueWeights, UnitLayout
from megatron.core.ops.recurrence.prologue.kernels import (
    prologue_backward_kernel,
    prologue_forward_kernel,
)
from megatron.core.ops.sequences import PackingIndices, Sequences


class SequenceMetadata:
    """Position and sequence of each packed token, computed on the device; the host does not wait.

    Args:
        sequences: the boundaries of the packed tokens.

    Attributes:
        positions: int32 [t], position of each token in its sequence.
        sequence_ids: int32 [t], index of each token's sequence.
        cu_seqlens: int64 [N+1], cumulative lengths.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.cu_seqlens = sequences.to_device(np.asarray(sequences.bounds))
        lengths, device = self.cu_seqlens.diff(), self.cu_seqlens.device
        sequence_ids = torch.repeat_interleave(lengths, output_size=sequences.tokens)
        tokens = torch.arange(sequences.tokens, device=device)
        self.positions = (tokens - self.cu_seqlens.index_select(0, sequence_ids)).int()
        self.sequence_ids = sequence_ids.int()

    @staticmethod
    def of(sequences: Sequences) -> SequenceMetadata:
        """Return the metadata of `sequences`, built once."""
        return sequences.cached("sequence_metadata", lambda: SequenceMetadata(sequences))


#: Added to the sum of squares of a query or a key, as in `l2norm`.
EPSILON = 1e-6
#: Maximum programs of the backward pass: sixteen per multiprocessor of the largest current GPUs.
#: Each writes a partial gradient of the weights.
BACKWARD_PROGRAMS = 2112
#: Elements of a tile of gates.
GATES = 1024

FORWARD = Launches(
    "prologue_forward",
    {"BLOCK_T": 32, "num_warps": 8, "num_stages": 1},  # nothing in a loop
    alternatives=(
        {"BLOCK_T": 16, "num_warps": 4, "num_stages": 1},
        {"BLOCK_T": 32, "num_warps": 4, "num_stages": 1},
        {"BLOCK_T": 64, "num_warps": 8, "num_stages": 1},
    ),
)
# Iterations depend on each other, but their loads do not: AHEAD 3 keeps two iterations in flight.
BACKWARD = Launches(
    "prologue_backward",
    {"SEGMENTS": 4, "STEPS": 64, "AHEAD": 3, "num_warps": 4, "num_stages": 1},
    alternatives=(
        {"SEGMENTS": 4, "STEPS": 64, "AHEAD": 1, "num_warps": 4, "num_stages": 1},
        {"SEGMENTS": 4, "STEPS": 64, "AHEAD": 2, "num_warps": 4, "num_stages": 1},
        {"SEGMENTS": 2, "STEPS": 64, "AHEAD": 3, "num_warps": 2, "num_stages": 1},
        {"SEGMENTS": 4, "STEPS": 32, "AHEAD": 3, "num_warps": 4, "num_stages": 1},
        {"SEGMENTS": 4, "STEPS": 64, "AHEAD": 3, "num_warps": 8, "num_stages": 1},
        {"SEGMENTS": 8, "STEPS": 64, "AHEAD": 3, "num_warps": 8, "num_stages": 1},
        {"SEGMENTS": 8, "STEPS": 32, "AHEAD": 1, "num_warps": 4, "num_stages": 1},
    ),
)


def prologue(
    source: ProjectionSlice,
    weights: PrologueWeights,
    *,
    unit: UnitLayout,
    sequences: Sequences,
    packing: PackingIndices | None,
    initial: torch.Tensor | None,
    return_conv_state: bool,
) -> tuple[RecurrenceInputs, torch.Tensor | None]:
    """Return (inputs, state of the convolution), see `recurrence_prologue`."""
    x, gradient = source
    call = _PrologueCall(unit, sequences, packing, weights.weight.shape[-1], gradient)
    inputs = RecurrenceInputs(*apply_function(_Prologue, call, x, initial, *weights))
    return inputs, call.conv_state(x.detach(), initial) if return_conv_state else None


@dataclass(frozen=True)
class _PrologueCall:
    """The non-tensor arguments of the autograd function.

    Args:
        unit: the columns of a unit.
        sequences: the boundaries of the packed tokens.
        packing: the rows of the tokens; None if the source is packed.
        conv_width: W.
        gradient: the destination of the source's gradient; None allocates a tensor.
    """

    unit: UnitLayout
    sequences: Sequences
    packing: PackingIndices | None
    conv_width: int
    gradient: GradientSlice | None

    def maps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the row, the position and the sequence of each token, [t] each."""
        metadata = SequenceMetadata.of(self.sequences)
        # Without packing the kernels do not read the rows: positions are a placeholder.
        rows = metadata.positions if self.packing is None else self.packing.rows
        return rows, metadata.positions, metadata.sequence_ids

    def constants(self, source: torch.Tensor, *, has_bias: bool, has_initial: bool) -> dict:
        """Return the compile-time constants of both kernels."""
        return constants_of(
            self.unit,
            conv_width=self.conv_width,
            align=alignment(source),
            has_index=self.packing is not None,
            has_bias=has_bias,
            has_initial=has_initial,
        )

    def key(self, source: torch.Tensor) -> str:
        """Return the key of the measured launch options, see `Launches.pick`."""
        return f"{block_of(self.unit)} {self.unit.qk_l2norm} {source.dtype}"

    def conv_state(self, source: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
        """Return the last W-1 rows [N, W-1, u, c] of each sequence, including initial rows."""
        history = self.conv_width - 1
        columns = source[..., : self.unit.conv_channels]
        if history == 0:
            return columns.new_empty(self.sequences.count, 0, *columns.shape[1:])
        boundaries = ConvBoundaries.of(self.sequences, self.conv_width)
        tail = (
            boundaries.tail
            if self.packing is None
            else self.packing.rows.index_select(0, boundaries.tail)
        )
        zero = columns.new_zeros(1, *columns.shape[1:])
        initial_rows = zero if initial is None else initial.detach().flatten(0, 1).to(columns.dtype)
        indices = (
            boundaries.final_rows
            if initial is not None
            else boundaries.final_rows.clamp(max=boundaries.count)
        )
        table = torch.cat([columns.index_select(0, tail), initial_rows])
        return table.index_select(0, indices).unflatten(0, (-1, history))


def constants_of(
    unit: UnitLayout,
    *,
    conv_width: int,
    align: int,
    has_index: bool = False,
    has_bias: bool = False,
    has_initial: bool = False,
) -> dict:
    """Return the compile-time constants of both kernels."""
    heads, has_beta = next_power_of_2(unit.heads), unit.beta is not None
    return {
        "QUERY": unit.query,
        "KEY": unit.key,
        "VALUE": unit.value,
        "BETA_COLUMN": unit.beta if has_beta else unit.dt,
        "DT_COLUMN": unit.dt,
        "KEYS": unit.key_channels,
        "VALUES": unit.heads * unit.value_channels,
        "HEADS": unit.heads,
        "WIDTH": conv_width,
        "HAS_BIAS": has_bias,
        "HAS_INDEX": has_index,
        "HAS_INITIAL": has_initial,
        "HAS_BETA": has_beta,
        "QK_L2NORM": unit.qk_l2norm,
        "ALIGN": align,
        "SECTIONS": sections_of(unit),
        "BLOCK": block_of(unit),
        "BLOCK_H": heads,
        "GATE_T": max(1, GATES // heads),
    }


def block_of(unit: UnitLayout) -> int:
    """Return the columns of a tile."""
    return next_power_of_2(unit.key_channels)


def sections_of(unit: UnitLayout) -> int:
    """Return the number of sections of a unit: query, key, blocks of values, gates."""
    return 3 + cdiv(unit.heads * unit.value_channels, block_of(unit))


def alignment(source: torch.Tensor) -> int:
    """Return the largest power of two, up to 16, that divides both strides."""
    return math.gcd(16, *source.stride()[:2])


class _Prologue(torch.autograd.Function):
    """Forward: convolution, SiLU, norms and gates, see `recurrence_prologue`.

    dgrad: of the source rows, each written once, and of the initial rows. wgrad: of weight, bias,
    A_log and dt_bias, as the sum of partial sums over shares of the tokens. Saves the arguments,
    with the weight transposed to [W, u, c], so that a thread loads several columns at once.
    """

    @staticmethod
    def forward(ctx, call: _PrologueCall, source, initial, weight, bias, a_log, dt_bias):
        taps = weight.movedim(-1, 0)
        source, saved = _contiguous(source, initial, taps, bias, a_log, dt_bias)
        unit, units, tokens = call.unit, source.shape[1], call.sequences.tokens
        heads = units * unit.heads
        query, key = source.new_empty(2, tokens, units, unit.key_channels).unbind()
        value = source.new_empty(tokens, heads, unit.value_channels)
        decay, beta = torch.empty(
            (2, tokens, heads), dtype=torch.float32, device=source.device
        ).unbind()
        ctx.save_for_backward(source, *saved)
        ctx.call = call
        if tokens and units:
            initial, taps, bias, a_log, dt_bias = saved
            launch = FORWARD.pick(source, call.key(source))
            constants = call.constants(
                source, has_bias=bias is not None, has_initial=initial is not None
            )
            grid = (cdiv(tokens, launch["BLOCK_T"]) * units * sections_of(unit),)
            constants["GATE_T"] = min(constants["GATE_T"], launch["BLOCK_T"])
            prologue_forward_kernel[grid](
                source,
                taps,
                taps if bias is None else bias,
                a_log,
                dt_bias,
                source if initial is None else initial,
                *call.maps(),
                query,
                key,
                value,
                decay,
                beta,
                *_sizes(source, tokens),
                EPSILON,
                *unit.dt_limit,
                **constants,
                **launch,
            )
        return query, key, value, decay, beta

    @staticmethod
    def backward(ctx, *grads):
        call: _PrologueCall = ctx.call
        source, initial, *weights = ctx.saved_tensors
        taps, bias, a_log, dt_bias = weights
        units, tokens, unit = source.shape[1], call.sequences.tokens, call.unit
        d_source = None if call.gradient is None else call.gradient.memory_like(source)
        is_joint = d_source is not None
        if d_source is None:
            d_source = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        if call.packing is not None:
            call.packing.zero_padding(d_source)
        d_initial = None if initial is None else torch.zeros_like(initial)
        launch = BACKWARD.pick(source, call.key(source))
        max_shares = max(1, BACKWARD_PROGRAMS // max(1, units * sections_of(unit)))
        tokens_per_program = launch["SEGMENTS"] * launch["STEPS"]
        shares = min(max_shares, cdiv(tokens, tokens_per_program)) if units else 0
        options = {"dtype": torch.float32, "device": source.device}
        conv_partials = torch.empty(
            (shares, units, call.conv_width + 1, unit.conv_channels), **options
        )
        gate_partials = torch.empty((shares, 2, units * unit.heads), **options)
        if shares:
            constants = call.constants(
                source, has_bias=bias is not None, has_initial=initial is not None
            )
            prologue_backward_kernel[(shares * units * sections_of(unit),)](
                source,
                taps,
                taps if bias is None else bias,
                a_log,
                dt_bias,
                source if initial is None else initial,
                *call.maps(),
                *(grad.contiguous() for grad in grads),
                d_source,
                source if initial is None else d_initial,
                conv_partials,
                gate_partials,
                *_sizes(source, tokens, shares),
                EPSILON,
                *unit.dt_limit,
                **constants,
                JOINT=is_joint,
                **launch,
            )
        return None, d_source, d_initial, *_sum_partials(conv_partials, gate_partials, weights)


def _contiguous(source, *tensors):
    """Return source with contiguous columns, and the other tensors contiguous."""
    source = source if source.stride(-1) == 1 else source.contiguous()
    return source, [None if x is None else x.contiguous() for x in tensors]


def _sizes(source: torch.Tensor, tokens: int, *shares: int) -> tuple[int, ...]:
    """Return the runtime sizes of both kernels; strides are divided by their alignment."""
    align = alignment(source)
    row_stride, unit_stride = (stride // align for stride in source.stride()[:2])
    return tokens, source.shape[1], *shares, row_stride, unit_stride


def _sum_partials(conv_partials, gate_partials, weights):
    """Sum the partial gradients of the shares, [P, u, W + 1, c] and [P, 2, H]."""
    taps, bias, a_log, dt_bias = weights
    conv_width = taps.shape[0]
    d_conv, d_gates = conv_partials.sum(0), gate_partials.sum(0)
    # One pass converts and transposes; `contiguous` copies only if there was nothing to convert.
    options = {"dtype": taps.dtype, "memory_format": torch.contiguous_format}
    d_weight = d_conv[:, :conv_width].transpose(1, 2).to(**options).contiguous()  # [u, c, W]
    d_bias = None if bias is None else d_conv[:, conv_width].to(bias.dtype)
    d_a_log, d_dt_bias = d_gates[0].to(a_log.dtype), d_gates[1].to(dt_bias.dtype)
    return d_weight, d_bias, d_a_log, d_dt_bias

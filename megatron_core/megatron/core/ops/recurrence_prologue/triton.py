# SPDX-License-Identifier: Apache-2.0
"""The prologue of recurrences in Triton: one kernel forward, one backward.

Marks: what a kernel asks of one packed token about the sequence that it is in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.ops.backend_choice import apply_function
from megatron.core.ops.causal_conv1d import Borders
from megatron.core.ops.joint_gradient import GradientSlice, ProjectionSlice
from megatron.core.ops.launches import Launches, cdiv, next_power_of_2
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.recurrence_prologue.kernels import (
    prologue_backward_kernel,
    prologue_forward_kernel,
)
from megatron.core.ops.recurrence_prologue.reference import PrologueWeights, UnitParts
from megatron.core.ops.sequences import PackingIndices, Sequences


class Marks:
    """Tables on the device, worked out there from the bounds; the host does not wait.

    Args:
        sequences: of the packed tokens.

    Attributes:
        after: int32 [t], how many tokens of its sequence are before a token.
        number: int32 [t], which sequence it is in.
        bounds: int64 [N+1].
    """

    def __init__(self, sequences: Sequences) -> None:
        self.bounds = sequences.to_device(np.asarray(sequences.bounds))
        lengths, device = self.bounds.diff(), self.bounds.device
        number = torch.repeat_interleave(lengths, output_size=sequences.tokens)
        place = torch.arange(sequences.tokens, device=device)
        self.after = (place - self.bounds.index_select(0, number)).int()
        self.number = number.int()

    @staticmethod
    def of(sequences: Sequences) -> Marks:
        """Return those of these sequences, made once."""
        return sequences.cached("marks", lambda: Marks(sequences))


#: Added to the sum of squares of a query or a key, as `l2norm` does.
EPSILON = 1e-6
#: Programs of the backward pass that its tokens are shared out to, if they are so many: sixteen for
#: each multiprocessor of the largest current devices. Each has a partial gradient of its weights.
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
# A round of the walk waits for the one before; its loads need not: two rounds are under way.
BACKWARD = Launches(
    "prologue_backward",
    {"LANES": 4, "STEPS": 64, "AHEAD": 3, "num_warps": 4, "num_stages": 1},
    alternatives=(
        {"LANES": 4, "STEPS": 64, "AHEAD": 1, "num_warps": 4, "num_stages": 1},
        {"LANES": 4, "STEPS": 64, "AHEAD": 2, "num_warps": 4, "num_stages": 1},
        {"LANES": 2, "STEPS": 64, "AHEAD": 3, "num_warps": 2, "num_stages": 1},
        {"LANES": 4, "STEPS": 32, "AHEAD": 3, "num_warps": 4, "num_stages": 1},
        {"LANES": 4, "STEPS": 64, "AHEAD": 3, "num_warps": 8, "num_stages": 1},
        {"LANES": 8, "STEPS": 64, "AHEAD": 3, "num_warps": 8, "num_stages": 1},
        {"LANES": 8, "STEPS": 32, "AHEAD": 1, "num_warps": 4, "num_stages": 1},
    ),
)


def prologue(
    source: ProjectionSlice,
    weights: PrologueWeights,
    *,
    parts: UnitParts,
    sequences: Sequences,
    places: PackingIndices | None,
    initial: torch.Tensor | None,
    keeps_last: bool,
) -> tuple[RecurrenceInputs, torch.Tensor | None]:
    """Return (inputs, last) of packed tokens, as `recurrence_prologue` does."""
    rows, gradient = source
    call = _PrologueCall(parts, sequences, places, weights.weight.shape[-1], gradient)
    inputs = RecurrenceInputs(*apply_function(_Prologue, call, rows, initial, *weights))
    return inputs, call.last_rows(rows.detach(), initial) if keeps_last else None


@dataclass(frozen=True)
class _PrologueCall:
    """What the autograd function is told beside tensors; `width` is W, `gradient` where that of the
    source goes."""

    parts: UnitParts
    sequences: Sequences
    places: PackingIndices | None
    width: int
    gradient: GradientSlice | None

    def maps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return [t] of each token: its row, its number in its sequence, and that one's."""
        marks = Marks.of(self.sequences)
        rows = marks.after if self.places is None else self.places.rows
        return rows, marks.after, marks.number

    def constants(self, source: torch.Tensor, *, has_bias: bool, has_initial: bool) -> dict:
        """Return the compile-time constants that both kernels have."""
        return constants_of(
            self.parts,
            width=self.width,
            align=alignment(source),
            has_places=self.places is not None,
            has_bias=has_bias,
            has_initial=has_initial,
        )

    def key(self, source: torch.Tensor) -> str:
        """Return what decides the best launch."""
        return f"{block_of(self.parts)} {self.parts.normalised} {source.dtype}"

    def last_rows(self, source: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
        """Return the last W-1 rows [N, W-1, u, c] of each sequence, carried ones included."""
        near = self.width - 1
        rows = source[..., : self.parts.convolved]
        if near == 0:
            return rows.new_empty(self.sequences.count, 0, *rows.shape[1:])
        borders = Borders.of(self.sequences, self.width)
        tail = (
            borders.tail if self.places is None else self.places.rows.index_select(0, borders.tail)
        )
        zero = rows.new_zeros(1, *rows.shape[1:])
        before = zero if initial is None else initial.detach().flatten(0, 1).to(rows.dtype)
        index = borders.last if initial is not None else borders.last.clamp(max=borders.count)
        table = torch.cat([rows.index_select(0, tail), before])
        return table.index_select(0, index).unflatten(0, (-1, near))


def constants_of(
    parts: UnitParts,
    *,
    width: int,
    align: int,
    has_places: bool = False,
    has_bias: bool = False,
    has_initial: bool = False,
) -> dict:
    """Return the compile-time constants that both kernels have."""
    heads, has_strengths = next_power_of_2(parts.heads), parts.strengths is not None
    return {
        "QUERY": parts.query,
        "KEY": parts.key,
        "VALUE": parts.value,
        "STRENGTHS": parts.strengths if has_strengths else parts.steps,
        "STEPS_COLUMN": parts.steps,
        "KEYS": parts.key_channels,
        "VALUES": parts.heads * parts.value_channels,
        "HEADS": parts.heads,
        "WIDTH": width,
        "HAS_BIAS": has_bias,
        "HAS_PLACES": has_places,
        "HAS_INITIAL": has_initial,
        "HAS_STRENGTHS": has_strengths,
        "NORMALISED": parts.normalised,
        "ALIGN": align,
        "SECTIONS": sections_of(parts),
        "BLOCK": block_of(parts),
        "BLOCK_H": heads,
        "GATE_T": max(1, GATES // heads),
    }


def block_of(parts: UnitParts) -> int:
    """Return the columns of a tile."""
    return next_power_of_2(parts.key_channels)


def sections_of(parts: UnitParts) -> int:
    """Return the sections of a unit: query, key, some columns of values each, gates."""
    return 3 + cdiv(parts.heads * parts.value_channels, block_of(parts))


def alignment(source: torch.Tensor) -> int:
    """Return the largest power of two, up to 16, that both strides are multiples of."""
    return math.gcd(16, *source.stride()[:2])


class _Prologue(torch.autograd.Function):
    """forward: convolution, SiLU, norms and gates, see `recurrence_prologue`.

    dgrad: of rows, each written once, and of the rows before sequences. wgrad: of taps, their bias,
    rates and the bias of steps: partial sums of shares of the tokens, then their sum. Saves the
    arguments; of the weight, a copy [W, u, c], of which a thread loads several columns at once.
    """

    @staticmethod
    def forward(ctx, call: _PrologueCall, source, initial, weight, bias, rates, step_bias):
        taps = weight.movedim(-1, 0)
        source, saved = _contiguous(source, initial, taps, bias, rates, step_bias)
        parts, units, tokens = call.parts, source.shape[1], call.sequences.tokens
        heads = units * parts.heads
        query, key = source.new_empty(2, tokens, units, parts.key_channels).unbind()
        value = source.new_empty(tokens, heads, parts.value_channels)
        decay, strength = torch.empty(
            (2, tokens, heads), dtype=torch.float32, device=source.device
        ).unbind()
        ctx.save_for_backward(source, *saved)
        ctx.call = call
        if tokens and units:
            initial, taps, bias, rates, step_bias = saved
            launch = FORWARD.pick(source, call.key(source))
            constants = call.constants(
                source, has_bias=bias is not None, has_initial=initial is not None
            )
            grid = (cdiv(tokens, launch["BLOCK_T"]) * units * sections_of(parts),)
            constants["GATE_T"] = min(constants["GATE_T"], launch["BLOCK_T"])
            prologue_forward_kernel[grid](
                source,
                taps,
                taps if bias is None else bias,
                rates,
                step_bias,
                source if initial is None else initial,
                *call.maps(),
                query,
                key,
                value,
                decay,
                strength,
                *_numbers(source, tokens),
                EPSILON,
                *parts.limits,
                **constants,
                **launch,
            )
        return query, key, value, decay, strength

    @staticmethod
    def backward(ctx, *grads):
        call: _PrologueCall = ctx.call
        source, initial, *weights = ctx.saved_tensors
        taps, bias, rates, step_bias = weights
        units, tokens, parts = source.shape[1], call.sequences.tokens, call.parts
        d_source = None if call.gradient is None else call.gradient.memory_like(source)
        joint = d_source is not None
        if d_source is None:
            d_source = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        if call.places is not None:
            call.places.zero_padding(d_source)
        d_initial = None if initial is None else torch.zeros_like(initial)
        launch = BACKWARD.pick(source, call.key(source))
        most = max(1, BACKWARD_PROGRAMS // max(1, units * sections_of(parts)))
        stretch = launch["LANES"] * launch["STEPS"]
        shares = min(most, cdiv(tokens, stretch)) if units else 0
        kind = {"dtype": torch.float32, "device": source.device}
        convolution = torch.empty((shares, units, call.width + 1, parts.convolved), **kind)
        gates = torch.empty((shares, 2, units * parts.heads), **kind)
        if shares:
            constants = call.constants(
                source, has_bias=bias is not None, has_initial=initial is not None
            )
            prologue_backward_kernel[(shares * units * sections_of(parts),)](
                source,
                taps,
                taps if bias is None else bias,
                rates,
                step_bias,
                source if initial is None else initial,
                *call.maps(),
                *(grad.contiguous() for grad in grads),
                d_source,
                source if initial is None else d_initial,
                convolution,
                gates,
                *_numbers(source, tokens, shares),
                EPSILON,
                *parts.limits,
                **constants,
                JOINT=joint,
                **launch,
            )
        return None, d_source, d_initial, *_summed(convolution, gates, weights)


def _contiguous(source, *others):
    """Return source with columns next to each other, and the others, whole."""
    source = source if source.stride(-1) == 1 else source.contiguous()
    return source, [None if x is None else x.contiguous() for x in others]


def _numbers(source: torch.Tensor, tokens: int, *shares: int) -> tuple[int, ...]:
    """Return the numbers that both kernels are told, strides divided by their alignment."""
    align = alignment(source)
    rows, units = (stride // align for stride in source.stride()[:2])
    return tokens, source.shape[1], *shares, rows, units


def _summed(convolution, gates, weights):
    """Return the gradients of weights from those of shares, [P, u, W + 1, c] and [P, 2, H]."""
    taps, bias, rates, step_bias = weights
    width = taps.shape[0]
    found, rest = convolution.sum(0), gates.sum(0)
    # Converted and laid out at once; what needs no conversion is laid out after it.
    kind = {"dtype": taps.dtype, "memory_format": torch.contiguous_format}
    d_weight = found[:, :width].transpose(1, 2).to(**kind).contiguous()  # [u, c, W]
    d_bias = None if bias is None else found[:, width].to(bias.dtype)
    d_rates, d_step_bias = rest[0].to(rates.dtype), rest[1].to(step_bias.dtype)
    return d_weight, d_bias, d_rates, d_step_bias

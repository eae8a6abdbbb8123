# SPDX-License-Identifier: Apache-2.0
"""Gated RMS normalisation in Triton: one pass over memory each way, several groups a program.

A group of features is a row here. All rows of a program have the same weights. Backward, a program
goes through many tiles of rows and adds up its part of the weights' gradient; parts are added up
behind it, always in the same order. Where x has its own order of rows, `places` says which row
belongs to one of the gate, -1 that none does.

What Triton kernels over `AlignedRows` share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron.core.ops.backend_choice import StoredWeight
from megatron.core.ops.joint_gradient import GradientSlice
from megatron.core.ops.launches import Launches, cdiv
from megatron.core.ops.strided_rows import AlignedRows, StridedRows, row_tile


@triton.jit
def row_starts(row, inner, offset, outer_steps, inner_steps, STEP: tl.constexpr):
    """Return where rows begin, int64, of numbers int32: division of wider ones is slow."""
    outer = row // inner
    within = (row - outer * inner).to(tl.int64)
    return (offset + outer.to(tl.int64) * outer_steps + within * inner_steps) * STEP


#: A program has ELEMENTS of rows at a time, which are padded to powers of two.
FORWARD = Launches(
    "gated_norm_forward",
    {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1},
    alternatives=(
        {"ELEMENTS": 2048, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 1024, "num_warps": 1, "num_stages": 1},
        {"ELEMENTS": 8192, "num_warps": 8, "num_stages": 1},
    ),
)
BACKWARD = Launches(
    "gated_norm_backward",
    {"ELEMENTS": 2048, "AHEAD": 1, "num_warps": 4, "num_stages": 1},
    alternatives=(
        {"ELEMENTS": 1024, "AHEAD": 1, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 2048, "AHEAD": 2, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 4096, "AHEAD": 1, "num_warps": 8, "num_stages": 1},
    ),
)
#: Programs of the backward pass, about.
BACKWARD_PROGRAMS = 4096


@triton.jit
def placed_rows(row, live, places_ptr, per_place, HAS_PLACES: tl.constexpr):
    """Return which row of x belongs to a row of the gate, and whether one does."""
    if HAS_PLACES:
        outer = row // per_place
        place = tl.load(places_ptr + outer, mask=live, other=-1)
        return place.to(tl.int32) * per_place + (row - outer * per_place), live & (place >= 0)
    else:
        return row, live


@triton.jit(do_not_specialize=["count"])
def gated_norm_forward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    places_ptr,
    y_ptr,
    rstd_ptr,
    count,
    weights,
    per_place,
    features,
    x_inner,
    x_offset,
    x_step_o,
    x_step_i,
    gate_inner,
    gate_offset,
    gate_step_o,
    gate_step_i,
    eps,
    X_STEP: tl.constexpr,
    GATE_STEP: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Normalise and gate ROWS rows of one group of weights; there are `count` of each group."""
    group = tl.program_id(0) % weights
    turn = tl.program_id(0) // weights * ROWS + tl.arange(0, ROWS)
    row, live = turn * weights + group, turn < count
    columns = tl.arange(0, FEATURES)
    inside = (columns < features)[None, :]
    x_row, there = placed_rows(row, live, places_ptr, per_place, HAS_PLACES)
    start = row_starts(x_row, x_inner, x_offset, x_step_o, x_step_i, X_STEP)
    seen = there[:, None] & inside
    x = tl.load(x_ptr + start[:, None] + columns[None, :], mask=seen, other=0.0).to(tl.float32)
    start = row_starts(row, gate_inner, gate_offset, gate_step_o, gate_step_i, GATE_STEP)
    gate = tl.load(gate_ptr + start[:, None] + columns[None, :], mask=seen, other=0.0)
    gate = gate.to(tl.float32)
    opened = gate * tl.sigmoid(gate)
    if GATE_FIRST:
        x *= opened
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / features + eps)
    tl.store(rstd_ptr + row, rstd, mask=live)
    weight_ptr += group * features + columns
    weight = tl.load(weight_ptr, mask=columns < features, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * weight[None, :]
    if not GATE_FIRST:
        y *= opened
    target = y_ptr + row.to(tl.int64)[:, None] * features + columns[None, :]
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=live[:, None] & inside)


@triton.jit(do_not_specialize=["count", "programs"])
def gated_norm_backward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    places_ptr,
    rstd_ptr,
    grad_ptr,
    d_x_ptr,
    d_gate_ptr,
    partial_ptr,
    count,
    programs,
    weights,
    per_place,
    features,
    x_inner,
    x_offset,
    x_step_o,
    x_step_i,
    gate_inner,
    gate_offset,
    gate_step_o,
    gate_step_i,
    X_STEP: tl.constexpr,
    GATE_STEP: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    JOINT: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Differentiate every `programs`-th tile of one group; sum a part of the weights' gradient."""
    group, program = tl.program_id(0) % weights, tl.program_id(0) // weights
    columns = tl.arange(0, FEATURES)
    inside = (columns < features)[None, :]
    source = weight_ptr + group * features + columns
    weight = tl.load(source, mask=columns < features, other=0.0).to(tl.float32)
    partial = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    for tile in tl.range(program * ROWS, count, programs * ROWS, num_stages=AHEAD):
        turn = tile + tl.arange(0, ROWS)
        row, live = turn * weights + group, turn < count
        x_row, there = placed_rows(row, live, places_ptr, per_place, HAS_PLACES)
        seen = there[:, None] & inside
        start = row_starts(x_row, x_inner, x_offset, x_step_o, x_step_i, X_STEP)
        x = tl.load(x_ptr + start[:, None] + columns[None, :], mask=seen, other=0.0)
        start = row_starts(row, gate_inner, gate_offset, gate_step_o, gate_step_i, GATE_STEP)
        gate = tl.load(gate_ptr + start[:, None] + columns[None, :], mask=seen, other=0.0)
        place = row.to(tl.int64)[:, None] * features + columns[None, :]
        grad = tl.load(grad_ptr + place, mask=seen, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)[:, None]
        x, gate = x.to(tl.float32), gate.to(tl.float32)
        share = tl.sigmoid(gate)
        opened = gate * share
        slope = share * (1 + gate * (1 - share))
        if GATE_FIRST:
            normal, pull = x * opened * rstd, grad
        else:
            normal, pull = x * rstd, grad * opened
        partial += pull * normal
        pull *= weight[None, :]
        mean = tl.sum(pull * normal, axis=1) / features
        if GATE_FIRST:
            d_inner = rstd * (pull - normal * mean[:, None])
            d_x, d_gate = d_inner * opened, d_inner * x * slope
        else:
            d_x = rstd * (pull - normal * mean[:, None])
            d_gate = grad * normal * weight[None, :] * slope
        target = d_gate_ptr + place
        if JOINT:  # a slice as the gate is one
            target = d_gate_ptr + start[:, None] + columns[None, :]
        tl.store(target, d_gate.to(d_gate_ptr.dtype.element_ty), mask=live[:, None] & inside)
        target = d_x_ptr + x_row.to(tl.int64)[:, None] * features + columns[None, :]
        tl.store(target, d_x.to(d_x_ptr.dtype.element_ty), mask=seen)
    total = tl.sum(partial, axis=0)
    target = partial_ptr + tl.program_id(0).to(tl.int64) * features + columns
    tl.store(target, total, mask=columns < features)


@dataclass(frozen=True)
class NormCall:
    """What the autograd function is told beside tensors.

    Args:
        eps, gate_first: of the op.
        size: features that are normalised together.
        gradient: where that of the gate goes; None is a tensor of its own.
        stored: the weight, where the op reads it as it is stored.
    """

    eps: float
    gate_first: bool
    size: int
    gradient: GradientSlice | None
    stored: StoredWeight | None

    def joint_rows(self, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return memory of the gate's gradient in that of its projection, and the base of its rows,
        which begin where the gate's do; None where it has no such memory."""
        found = None if self.gradient is None else self.gradient.memory_like(gate)
        if found is None:
            return None
        groups, gates = (x.unflatten(-1, (-1, self.size)) for x in (found, gate))
        if StridedRows.from_tensor(groups).tensor is not groups:
            return None
        steps, wanted = AlignedRows.from_tensor(groups), AlignedRows.from_tensor(gates)
        if (steps.kernel_args, steps.step) != (wanted.kernel_args, wanted.step):
            return None
        return found, steps.base


class GatedRmsNorm(torch.autograd.Function):
    """Forward, dgrad and wgrad as in `gated_rms_norm.GatedRmsNorm`, with the way to x in the loads.
    Saves x, gate, w, the places and one number a group."""

    @staticmethod
    def forward(ctx, x, gate, weight, places, call: NormCall):
        size, weight = call.size, weight if call.stored is None else call.stored.value
        rows = _Rows.of(x, gate, weight, places, size)
        y = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
        shape = (*gate.shape[:-1], gate.shape[-1] // size)
        rstd = torch.empty(shape, dtype=torch.float32, device=x.device)
        if rows is not None:
            launch = row_tile(FORWARD, x, size)
            gated_norm_forward_kernel[(cdiv(rows.count, launch["ROWS"]) * rows.weights,)](
                *rows.tensors,
                y,
                rstd,
                rows.count,
                *rows.sizes,
                call.eps,
                **rows.constants,
                GATE_FIRST=call.gate_first,
                **launch,
            )
        ctx.save_for_backward(x, gate, weight, rstd, places)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight, rstd, places = ctx.saved_tensors
        call: NormCall = ctx.call
        rows = _Rows.of(x, gate, weight, places, call.size)
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        joint = None if rows is None else call.joint_rows(gate)
        if joint is None:
            d_gate = base = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        else:
            d_gate, base = joint
        if rows is None:
            return (
                d_x,
                d_gate,
                _weight_gradient(ctx, weight, torch.zeros_like(weight).view(1, -1)),
                None,
                None,
            )
        launch = row_tile(BACKWARD, x, call.size)
        programs = min(cdiv(rows.count, launch["ROWS"]), cdiv(BACKWARD_PROGRAMS, rows.weights))
        partial = torch.empty(
            (programs, rows.weights, call.size), dtype=torch.float32, device=x.device
        )
        gated_norm_backward_kernel[(programs * rows.weights,)](
            *rows.tensors,
            rstd,
            grad.contiguous(),
            d_x,
            base,
            partial,
            rows.count,
            programs,
            *rows.sizes,
            **rows.constants,
            GATE_FIRST=call.gate_first,
            JOINT=joint is not None,
            **launch,
        )
        return d_x, d_gate, _weight_gradient(ctx, weight, partial.flatten(1)), None, None


def _weight_gradient(ctx, weight: torch.Tensor, addends: torch.Tensor) -> torch.Tensor | None:
    """Return the weight's gradient from its addends [programs, n]; None where it was put."""
    stored = ctx.call.stored
    if stored is None:
        return addends.sum(0).view(weight.shape).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        stored.accumulate_grad(addends)
    return None


@dataclass(frozen=True)
class _Rows:
    """What both passes say of rows, which are groups of features.

    Attributes:
        tensors: x, gate, weights and places.
        count: rows of each group of weights.
        weights: how many groups there are.
        sizes: weights, rows of a place, features, and where rows of x and of the gate are.
        constants: of both kernels.
    """

    tensors: tuple[torch.Tensor, ...]
    count: int
    weights: int
    sizes: tuple[int, ...]
    constants: dict[str, object]

    @staticmethod
    def of(x, gate, weight, places, size: int) -> _Rows | None:
        """Return those of x [..., n] and gate [..., n], or None where there are none."""
        if not gate.numel():
            return None
        gates = AlignedRows.from_tensor(gate.unflatten(-1, (-1, size)))
        # Without a row of x nothing of it is read: any pointer will do.
        values = AlignedRows.from_tensor(x.unflatten(-1, (-1, size))) if x.numel() else gates
        weights, rows = weight.numel() // size, gate.numel() // size
        weight = weight.contiguous()
        return _Rows(
            tensors=(
                values.base,
                gates.base,
                weight,
                weight if places is None else places.contiguous(),
            ),
            count=rows // weights,
            weights=weights,
            sizes=(
                weights,
                1 if places is None else rows // len(places),
                size,
                *values.kernel_args,
                *gates.kernel_args,
            ),
            constants={
                "X_STEP": values.step,
                "GATE_STEP": gates.step,
                "HAS_PLACES": places is not None,
            },
        )

# SPDX-License-Identifier: Apache-2.0
"""Gated RMS normalisation in Triton: one pass over memory each way, several groups per program.

A row here is one norm group of features. All rows of a program share the same slice of the weight.
In backward a program processes many tiles of rows and writes one partial gradient of the weight;
the partial gradients are then summed in a fixed order. `row_index` maps rows of the gate to rows of
x, or to -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron.core.ops.backend_choice import StoredWeight
from megatron.core.ops.launches import Launches, cdiv
from megatron.core.ops.recurrence.interface import GradientSlice
from megatron.core.ops.strided_rows import AlignedRows, StridedRows, row_tile


@triton.jit
def row_starts(row, inner, offset, outer_steps, inner_steps, STEP: tl.constexpr):
    """Return the int64 offsets of int32 row numbers: the division of int64 numbers is slow."""
    outer = row // inner
    within = (row - outer * inner).to(tl.int64)
    return (offset + outer.to(tl.int64) * outer_steps + within * inner_steps) * STEP


#: A tile has ELEMENTS: rows times features, padded to a power of two.
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
#: Approximate number of programs of the backward pass.
BACKWARD_PROGRAMS = 4096


@triton.jit
def x_rows(row, in_range, index_ptr, groups_per_row, HAS_INDEX: tl.constexpr):
    """Return the row of x for each row of the gate, and the mask of rows that have one."""
    if HAS_INDEX:
        outer = row // groups_per_row
        index = tl.load(index_ptr + outer, mask=in_range, other=-1)
        return index.to(tl.int32) * groups_per_row + (row - outer * groups_per_row), in_range & (
            index >= 0
        )
    else:
        return row, in_range


@triton.jit(do_not_specialize=["count"])
def gated_norm_forward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    index_ptr,
    y_ptr,
    rstd_ptr,
    count,
    weights,
    groups_per_row,
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
    HAS_INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Normalise and gate ROWS of the `count` rows that share one slice of the weight."""
    group = tl.program_id(0) % weights
    row_in_group = tl.program_id(0) // weights * ROWS + tl.arange(0, ROWS)
    row, in_range = row_in_group * weights + group, row_in_group < count
    columns = tl.arange(0, FEATURES)
    inside = (columns < features)[None, :]
    x_row, has_x = x_rows(row, in_range, index_ptr, groups_per_row, HAS_INDEX)
    start = row_starts(x_row, x_inner, x_offset, x_step_o, x_step_i, X_STEP)
    mask = has_x[:, None] & inside
    x = tl.load(x_ptr + start[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    start = row_starts(row, gate_inner, gate_offset, gate_step_o, gate_step_i, GATE_STEP)
    gate = tl.load(gate_ptr + start[:, None] + columns[None, :], mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    silu_gate = gate * tl.sigmoid(gate)
    if GATE_FIRST:
        x *= silu_gate
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / features + eps)
    tl.store(rstd_ptr + row, rstd, mask=in_range)
    weight_ptr += group * features + columns
    weight = tl.load(weight_ptr, mask=columns < features, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * weight[None, :]
    if not GATE_FIRST:
        y *= silu_gate
    pointers = y_ptr + row.to(tl.int64)[:, None] * features + columns[None, :]
    tl.store(pointers, y.to(y_ptr.dtype.element_ty), mask=in_range[:, None] & inside)


@triton.jit(do_not_specialize=["count", "programs"])
def gated_norm_backward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    index_ptr,
    rstd_ptr,
    d_y_ptr,
    d_x_ptr,
    d_gate_ptr,
    partial_ptr,
    count,
    programs,
    weights,
    groups_per_row,
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
    HAS_INDEX: tl.constexpr,
    JOINT: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Differentiate every `programs`-th tile of one slice of the weight, and sum its gradient."""
    group, program = tl.program_id(0) % weights, tl.program_id(0) // weights
    columns = tl.arange(0, FEATURES)
    inside = (columns < features)[None, :]
    weight_pointers = weight_ptr + group * features + columns
    weight = tl.load(weight_pointers, mask=columns < features, other=0.0).to(tl.float32)
    d_weight = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    for tile in tl.range(program * ROWS, count, programs * ROWS, num_stages=AHEAD):
        row_in_group = tile + tl.arange(0, ROWS)
        row, in_range = row_in_group * weights + group, row_in_group < count
        x_row, has_x = x_rows(row, in_range, index_ptr, groups_per_row, HAS_INDEX)
        mask = has_x[:, None] & inside
        start = row_starts(x_row, x_inner, x_offset, x_step_o, x_step_i, X_STEP)
        x = tl.load(x_ptr + start[:, None] + columns[None, :], mask=mask, other=0.0)
        start = row_starts(row, gate_inner, gate_offset, gate_step_o, gate_step_i, GATE_STEP)
        gate = tl.load(gate_ptr + start[:, None] + columns[None, :], mask=mask, other=0.0)
        offsets = row.to(tl.int64)[:, None] * features + columns[None, :]
        d_y = tl.load(d_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=in_range, other=0.0)[:, None]
        x, gate = x.to(tl.float32), gate.to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu_gate = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        if GATE_FIRST:
            normalized, d_normalized = x * silu_gate * rstd, d_y
        else:
            normalized, d_normalized = x * rstd, d_y * silu_gate
        d_weight += d_normalized * normalized
        d_normalized *= weight[None, :]
        dot = tl.sum(d_normalized * normalized, axis=1) / features
        if GATE_FIRST:
            d_inner = rstd * (d_normalized - normalized * dot[:, None])
            d_x, d_gate = d_inner * silu_gate, d_inner * x * slope
        else:
            d_x = rstd * (d_normalized - normalized * dot[:, None])
            d_gate = d_y * normalized * weight[None, :] * slope
        pointers = d_gate_ptr + offsets
        if JOINT:  # the gate's slice of its projection's gradient
            pointers = d_gate_ptr + start[:, None] + columns[None, :]
        tl.store(pointers, d_gate.to(d_gate_ptr.dtype.element_ty), mask=in_range[:, None] & inside)
        pointers = d_x_ptr + x_row.to(tl.int64)[:, None] * features + columns[None, :]
        tl.store(pointers, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
    total = tl.sum(d_weight, axis=0)
    pointers = partial_ptr + tl.program_id(0).to(tl.int64) * features + columns
    tl.store(pointers, total, mask=columns < features)


@dataclass(frozen=True)
class NormCall:
    """The non-tensor arguments of the autograd function.

    Args:
        eps, gate_first: see `gated_rms_norm`.
        size: features of a norm group.
        gradient: the destination of the gate's gradient; None allocates a tensor.
        stored: the weight in its storage; None for a plain tensor.
    """

    eps: float
    gate_first: bool
    size: int
    gradient: GradientSlice | None
    stored: StoredWeight | None

    def joint_rows(self, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the gate's gradient as a slice of its projection's gradient, and the base of its
        rows, which have the gate's strides; None if there is no such memory."""
        d_gate = None if self.gradient is None else self.gradient.memory_like(gate)
        if d_gate is None:
            return None
        groups, gate_groups = (x.unflatten(-1, (-1, self.size)) for x in (d_gate, gate))
        if StridedRows.from_tensor(groups).tensor is not groups:
            return None
        d_gate_rows = AlignedRows.from_tensor(groups)
        gate_rows = AlignedRows.from_tensor(gate_groups)
        if (d_gate_rows.kernel_args, d_gate_rows.step) != (gate_rows.kernel_args, gate_rows.step):
            return None
        return d_gate, d_gate_rows.base


class GatedRmsNorm(torch.autograd.Function):
    """Forward, dgrad and wgrad as in the reference, with the gather of x in the loads.

    Saves x, gate, w, row_index and one number per group.
    """

    @staticmethod
    def forward(ctx, x, gate, weight, row_index, call: NormCall):
        size, weight = call.size, weight if call.stored is None else call.stored.value
        rows = _KernelRows.of(x, gate, weight, row_index, size)
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
        ctx.save_for_backward(x, gate, weight, rstd, row_index)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx, d_y):
        x, gate, weight, rstd, row_index = ctx.saved_tensors
        call: NormCall = ctx.call
        rows = _KernelRows.of(x, gate, weight, row_index, call.size)
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        joint_rows = None if rows is None else call.joint_rows(gate)
        if joint_rows is None:
            d_gate = base = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        else:
            d_gate, base = joint_rows
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
        partials = torch.empty(
            (programs, rows.weights, call.size), dtype=torch.float32, device=x.device
        )
        gated_norm_backward_kernel[(programs * rows.weights,)](
            *rows.tensors,
            rstd,
            d_y.contiguous(),
            d_x,
            base,
            partials,
            rows.count,
            programs,
            *rows.sizes,
            **rows.constants,
            GATE_FIRST=call.gate_first,
            JOINT=joint_rows is not None,
            **launch,
        )
        return d_x, d_gate, _weight_gradient(ctx, weight, partials.flatten(1)), None, None


def _weight_gradient(ctx, weight: torch.Tensor, addends: torch.Tensor) -> torch.Tensor | None:
    """Return the weight's gradient from its addends [programs, n]; None for a stored weight."""
    stored = ctx.call.stored
    if stored is None:
        return addends.sum(0).view(weight.shape).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        stored.accumulate_grad(addends)
    return None


@dataclass(frozen=True)
class _KernelRows:
    """The arguments of both kernels that describe rows; a row is one norm group of features.

    Attributes:
        tensors: x, gate, weight and row_index.
        count: number of rows per slice of the weight.
        weights: number of slices of the weight.
        sizes: weights, norm groups per row of the gate, features, and the addressing of x and gate.
        constants: compile-time constants of both kernels.
    """

    tensors: tuple[torch.Tensor, ...]
    count: int
    weights: int
    sizes: tuple[int, ...]
    constants: dict[str, object]

    @staticmethod
    def of(x, gate, weight, row_index, size: int) -> _KernelRows | None:
        """Return the arguments for x [..., n] and gate [..., n]; None if there are no rows."""
        if not gate.numel():
            return None
        gates = AlignedRows.from_tensor(gate.unflatten(-1, (-1, size)))
        # An empty x is never read, so any pointer is valid.
        values = AlignedRows.from_tensor(x.unflatten(-1, (-1, size))) if x.numel() else gates
        weights, rows = weight.numel() // size, gate.numel() // size
        weight = weight.contiguous()
        return _KernelRows(
            tensors=(
                values.base,
                gates.base,
                weight,
                weight if row_index is None else row_index.contiguous(),
            ),
            count=rows // weights,
            weights=weights,
            sizes=(
                weights,
                1 if row_index is None else rows // len(row_index),
                size,
                *values.kernel_args,
                *gates.kernel_args,
            ),
            constants={
                "X_STEP": values.step,
                "GATE_STEP": gates.step,
                "HAS_INDEX": row_index is not None,
            },
        )

# SPDX-License-Identifier: Apache-2.0
"""Gated activations in Triton: one pass over memory forward and one backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv, next_power_of_2
from megatron.core.ops.swiglu.cpu import QUICK_GELU_FACTOR

# 16 elements per thread of every tensor: two loads of 16 bytes in flight for each.
FORWARD = Launches(
    "gated_forward",
    {"BLOCK": 2048, "num_warps": 4},
    alternatives=(
        {"BLOCK": 1024, "num_warps": 4},
        {"BLOCK": 2048, "num_warps": 8},
        {"BLOCK": 4096, "num_warps": 4},
        {"BLOCK": 4096, "num_warps": 8},
    ),
)
BACKWARD = Launches("gated_backward", FORWARD.default, alternatives=FORWARD.alternatives)


@triton.jit
def activation_and_slope(gate, GELU: tl.constexpr, FACTOR: tl.constexpr = 1.0):
    """Compute act(gate) and act'(gate) in fp32: gate sigmoid(FACTOR gate), or gelu by its tanh
    approximation."""
    if GELU:
        # gelu(x) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3), as tanh(u) = 2 sig(2u) - 1
        double_u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        double_u_slope = 1.5957691216057308 * (1 + 0.134145 * gate * gate)
        sigmoid = tl.sigmoid(double_u)
        return gate * sigmoid, sigmoid + gate * sigmoid * (1 - sigmoid) * double_u_slope
    elif FACTOR == 1.0:
        sigmoid = tl.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    else:
        sigmoid = tl.sigmoid(FACTOR * gate)
        return gate * sigmoid, sigmoid * (1 + FACTOR * gate * (1 - sigmoid))


@triton.jit
def gated_forward_kernel(
    gate_up_ptr,
    y_ptr,
    width,
    blocks,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr = 1.0,
    CLAMP: tl.constexpr = None,
    OFFSET: tl.constexpr = 0.0,
):
    """Compute one block of one row of act(gate) * (up + OFFSET); adjacent programs share a row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    if CLAMP is not None:
        gate = tl.minimum(gate, CLAMP)
        up = tl.clamp(up, -CLAMP, CLAMP)
    if OFFSET != 0.0:
        up += OFFSET
    active, _ = activation_and_slope(gate, GELU, FACTOR)
    y = (active * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + columns, y, mask=inside)


@triton.jit
def gated_backward_kernel(
    gate_up_ptr,
    grad_ptr,
    grad_gate_up_ptr,
    width,
    blocks,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr = 1.0,
    CLAMP: tl.constexpr = None,
    OFFSET: tl.constexpr = 0.0,
):
    """Compute one block of one row of both gradients; the activation is recomputed."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = row * 2 * width + columns
    gate = tl.load(gate_up_ptr + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + start + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if CLAMP is not None:
        free_gate = gate <= CLAMP
        free_up = tl.abs(up) <= CLAMP
        gate = tl.minimum(gate, CLAMP)
        up = tl.clamp(up, -CLAMP, CLAMP)
    if OFFSET != 0.0:
        up += OFFSET
    active, slope = activation_and_slope(gate, GELU, FACTOR)
    if CLAMP is not None:
        slope = tl.where(free_gate, slope, 0.0)
        active = tl.where(free_up, active, 0.0)
    dtype = grad_gate_up_ptr.dtype.element_ty
    tl.store(grad_gate_up_ptr + start, (grad * up * slope).to(dtype), mask=inside)
    tl.store(grad_gate_up_ptr + start + width, (grad * active).to(dtype), mask=inside)


def row_blocks(launch: Mapping[str, int], width: int) -> dict[str, int]:
    """Return block and warps for rows of `width`; short rows get smaller blocks, fewer warps."""
    block = min(launch["BLOCK"], next_power_of_2(width))
    return {"BLOCK": block, "num_warps": max(1, launch["num_warps"] * block // launch["BLOCK"])}


def launch_key(y: torch.Tensor) -> str:
    """Return the key of the launch table: size of a row and dtype."""
    return f"f{next_power_of_2(y.shape[-1])} {str(y.dtype).removeprefix('torch.')}"


def _constants(activation: str, clamp: float | None, offset: float) -> dict[str, Any]:
    """Return the constants of the kernels for a gate."""
    constants: dict[str, Any] = {"GELU": activation == "gelu"}
    if activation == "quick_gelu":
        constants["FACTOR"] = QUICK_GELU_FACTOR
    if clamp is not None:
        constants["CLAMP"] = float(clamp)
    if offset:
        constants["OFFSET"] = float(offset)
    return constants


def gated_forward(
    gate_up: torch.Tensor, activation: str, clamp: float | None = None, offset: float = 0.0
) -> torch.Tensor:
    """Return activation(gate) * (up + offset) [..., f] of gate_up [..., 2f]."""
    width = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        tile = row_blocks(FORWARD.pick(y, launch_key(y)), width)
        blocks = cdiv(width, tile["BLOCK"])
        gated_forward_kernel[(y.numel() // width * blocks,)](
            gate_up.contiguous(),
            y,
            width,
            blocks,
            **_constants(activation, clamp, offset),
            **tile,
        )
    return y


def gated_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """Return the gradient of gate_up [..., 2f] from the gradient of y [..., f]."""
    gate_up = gate_up.contiguous()
    grad_gate_up = torch.empty_like(gate_up)
    width = grad.shape[-1]
    if grad.numel():
        tile = row_blocks(BACKWARD.pick(grad, launch_key(grad)), width)
        blocks = cdiv(width, tile["BLOCK"])
        gated_backward_kernel[(grad.numel() // width * blocks,)](
            gate_up,
            grad.contiguous(),
            grad_gate_up,
            width,
            blocks,
            **_constants(activation, clamp, offset),
            **tile,
        )
    return grad_gate_up

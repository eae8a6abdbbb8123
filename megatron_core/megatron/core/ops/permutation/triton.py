# SPDX-License-Identifier: Apache-2.0
"""Permutations of rows in Triton: each row is read and written once, sums stay in registers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv, next_power_of_2

# BLOCK: elements of a row that a program copies, 16 a thread.
TAKE = Launches(
    "take_rows",
    {"BLOCK": 2048, "num_warps": 4},
    alternatives=(
        {"BLOCK": 1024, "num_warps": 2},
        {"BLOCK": 4096, "num_warps": 4},
        {"BLOCK": 4096, "num_warps": 8},
    ),
)
# TILE: elements of one token's rows that a program holds. In a single warp a thread has the same
# columns of every row, so that a sum over rows needs no other thread and no barrier.
SUM = Launches(
    "sum_rows",
    {"TILE": 2048, "num_warps": 1},
    alternatives=(
        {"TILE": 1024, "num_warps": 1},
        {"TILE": 4096, "num_warps": 1},
        {"TILE": 4096, "num_warps": 4},
    ),
)
SUM_BACKWARD = Launches("sum_rows_backward", SUM.default, alternatives=SUM.alternatives)


@triton.jit
def take_rows_kernel(x_ptr, places_ptr, y_ptr, features, copies, blocks, BLOCK: tl.constexpr):
    """Copy one block of one row: y[i] = x[places[i] // copies]."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    token = tl.load(places_ptr + row) // copies
    values = tl.load(x_ptr + token * features + columns, mask=inside, other=0.0)
    tl.store(y_ptr + row * features + columns, values, mask=inside)


@triton.jit
def sum_rows_kernel(
    y_ptr,
    weights_ptr,
    slots_ptr,
    out_ptr,
    features,
    copies,
    blocks,
    HAS_WEIGHTS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one block of the rows of one token; COPIES is the power of two from `copies` up."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    places = tl.arange(0, COPIES)
    slots = tl.load(slots_ptr + token * copies + places, mask=places < copies, other=-1)
    there = (slots >= 0)[:, None] & (columns < features)[None, :]
    tile = tl.load(y_ptr + slots[:, None] * features + columns[None, :], mask=there, other=0.0)
    tile = tile.to(tl.float32)
    if HAS_WEIGHTS:
        weights = tl.load(weights_ptr + token * copies + places, mask=places < copies, other=0.0)
        tile = tile * weights[:, None]
    total = tl.sum(tile, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * features + columns, total, mask=columns < features)


@triton.jit
def sum_rows_backward_kernel(
    grad_ptr,
    y_ptr,
    weights_ptr,
    slots_ptr,
    d_y_ptr,
    d_weights_ptr,
    features,
    copies,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute dy = w · dout of all rows of one token, and its dw = dout · y: dout is read once."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, COPIES)
    real = places < copies
    slots = tl.load(slots_ptr + token * copies + places, mask=real, other=-1)
    weights = tl.load(weights_ptr + token * copies + places, mask=real, other=0.0)
    dots = tl.zeros((COPIES,), tl.float32)
    for start in range(0, features, BLOCK):
        columns = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = columns < features
        there = (slots >= 0)[:, None] & inside[None, :]
        offsets = slots[:, None] * features + columns[None, :]
        grad = tl.load(grad_ptr + token * features + columns, mask=inside, other=0.0)
        grad = grad.to(tl.float32)[None, :]
        y = tl.load(y_ptr + offsets, mask=there, other=0.0).to(tl.float32)
        dots += tl.sum(y * grad, axis=1)
        d_y = (weights[:, None] * grad).to(d_y_ptr.dtype.element_ty)
        tl.store(d_y_ptr + offsets, d_y, mask=there)
    tl.store(d_weights_ptr + token * copies + places, dots, mask=real)


def tile_shape(launch: Mapping[str, int], features: int, copies: int) -> dict[str, int]:
    """Return the rows and columns of what a program holds of one token, powers of two, and warps.

    Args:
        launch: TILE elements and `num_warps`; every thread has at least 8 columns.
        features: of a row.
        copies: rows of a token.
    """
    rows = next_power_of_2(copies)
    columns = max(256 * launch["num_warps"], launch["TILE"] // rows)
    columns = min(columns, next_power_of_2(features))
    return {"COPIES": rows, "BLOCK": columns, "num_warps": launch["num_warps"]}


def launch_key(rows: torch.Tensor, copies: int) -> str:
    """Name what decides how the kernels are best started."""
    sizes = f"k{next_power_of_2(copies)} h{next_power_of_2(rows.shape[1])}"
    return f"{sizes} {str(rows.dtype).removeprefix('torch.')}"


def take(x: torch.Tensor, places: torch.Tensor, copies: int) -> torch.Tensor:
    """See `permutation.take`."""
    x, features = x.contiguous(), x.shape[1]
    y = torch.empty(len(places), features, dtype=x.dtype, device=x.device)
    if y.numel():
        launch = TAKE.pick(x, launch_key(x, 1))
        block = min(launch["BLOCK"], next_power_of_2(features))
        warps = max(1, launch["num_warps"] * block // launch["BLOCK"])
        blocks = cdiv(features, block)
        take_rows_kernel[(len(places) * blocks,)](
            x, places.contiguous(), y, features, copies, blocks, BLOCK=block, num_warps=warps
        )
    return y


def total(y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """See `permutation.total`."""
    y, features, (tokens, copies) = y.contiguous(), y.shape[1], slots.shape
    out = torch.empty(tokens, features, dtype=y.dtype, device=y.device)
    if out.numel():
        tile = tile_shape(SUM.pick(y, launch_key(y, copies)), features, copies)
        blocks = cdiv(features, tile["BLOCK"])
        sum_rows_kernel[(tokens * blocks,)](
            y,
            out if weights is None else weights.contiguous(),
            slots.contiguous(),
            out,
            features,
            copies,
            blocks,
            HAS_WEIGHTS=weights is not None,
            **tile,
        )
    return out


class Total(torch.autograd.Function):
    """forward, dgrad and the weights' gradient as in `permutation.Total`, both of those in one
    kernel. Saves y where there are weights."""

    @staticmethod
    def forward(ctx, y, weights, places, slots):
        ctx.save_for_backward(None if weights is None else y, weights, places, slots)
        return total(y, slots, weights)

    @staticmethod
    def backward(ctx, grad):
        y, weights, places, slots = ctx.saved_tensors
        if weights is None:
            return take(grad, places, slots.shape[1]), None, None, None
        (tokens, copies), features = slots.shape, grad.shape[1]
        d_y = torch.empty(len(places), features, dtype=y.dtype, device=y.device)
        d_weights = torch.empty(tokens, copies, dtype=torch.float32, device=y.device)
        if tokens:
            launch = SUM_BACKWARD.pick(y, launch_key(y, copies))
            sum_rows_backward_kernel[(tokens,)](
                grad.contiguous(),
                y.contiguous(),
                weights.contiguous(),
                slots.contiguous(),
                d_y,
                d_weights,
                features,
                copies,
                **tile_shape(launch, features, copies),
            )
        return d_y, d_weights, None, None

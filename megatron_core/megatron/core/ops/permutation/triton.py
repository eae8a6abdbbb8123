# SPDX-License-Identifier: Apache-2.0
"""Permutations of rows in Triton: each row is read and written once, sums are in registers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv, next_power_of_2

# BLOCK: elements of a row per program, 16 per thread.
TAKE = Launches(
    "take_rows",
    {"BLOCK": 2048, "num_warps": 4},
    alternatives=(
        {"BLOCK": 1024, "num_warps": 2},
        {"BLOCK": 4096, "num_warps": 4},
        {"BLOCK": 4096, "num_warps": 8},
    ),
)
# TILE: elements of one token's rows per program. In a single warp a thread has the same columns of
# every row, so that a sum over rows needs neither another thread nor a barrier.
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
def take_rows_kernel(x_ptr, sources_ptr, y_ptr, features, copies, blocks, BLOCK: tl.constexpr):
    """Copy one block of one row: y[i] = x[sources[i] // copies]."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    token = tl.load(sources_ptr + row) // copies
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
    """Sum one block of the rows of one token; COPIES is `copies` rounded up to a power of two."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    copy = tl.arange(0, COPIES)
    slots = tl.load(slots_ptr + token * copies + copy, mask=copy < copies, other=-1)
    mask = (slots >= 0)[:, None] & (columns < features)[None, :]
    tile = tl.load(y_ptr + slots[:, None] * features + columns[None, :], mask=mask, other=0.0)
    tile = tile.to(tl.float32)
    if HAS_WEIGHTS:
        weights = tl.load(weights_ptr + token * copies + copy, mask=copy < copies, other=0.0)
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
    """Compute dy = w · dout of all rows of one token, and dw = dout · y, reading dout once."""
    token = tl.program_id(0).to(tl.int64)
    copy = tl.arange(0, COPIES)
    copy_mask = copy < copies
    slots = tl.load(slots_ptr + token * copies + copy, mask=copy_mask, other=-1)
    weights = tl.load(weights_ptr + token * copies + copy, mask=copy_mask, other=0.0)
    dots = tl.zeros((COPIES,), tl.float32)
    for start in range(0, features, BLOCK):
        columns = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = columns < features
        mask = (slots >= 0)[:, None] & inside[None, :]
        offsets = slots[:, None] * features + columns[None, :]
        grad = tl.load(grad_ptr + token * features + columns, mask=inside, other=0.0)
        grad = grad.to(tl.float32)[None, :]
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dots += tl.sum(y * grad, axis=1)
        d_y = (weights[:, None] * grad).to(d_y_ptr.dtype.element_ty)
        tl.store(d_y_ptr + offsets, d_y, mask=mask)
    tl.store(d_weights_ptr + token * copies + copy, dots, mask=copy_mask)


def tile_shape(launch: Mapping[str, int], features: int, copies: int) -> dict[str, int]:
    """Return rows and columns of a program's tile of one token, powers of two, and warps.

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
    """Return the key of the launch table: copies, size of a row and dtype."""
    sizes = f"k{next_power_of_2(copies)} h{next_power_of_2(rows.shape[1])}"
    return f"{sizes} {str(rows.dtype).removeprefix('torch.')}"


def gather_copies(x: torch.Tensor, sources: torch.Tensor, copies: int) -> torch.Tensor:
    """See `permutation.gather_copies`."""
    x, features = x.contiguous(), x.shape[1]
    y = torch.empty(len(sources), features, dtype=x.dtype, device=x.device)
    if y.numel():
        launch = TAKE.pick(x, launch_key(x, 1))
        block = min(launch["BLOCK"], next_power_of_2(features))
        warps = max(1, launch["num_warps"] * block // launch["BLOCK"])
        blocks = cdiv(features, block)
        take_rows_kernel[(len(sources) * blocks,)](
            x, sources.contiguous(), y, features, copies, blocks, BLOCK=block, num_warps=warps
        )
    return y


def sum_copies(y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """See `permutation.sum_copies`."""
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


class FusedSumRows(torch.autograd.Function):
    """`permutation.SumRows` with dgrad and the weights' gradient in one kernel."""

    @staticmethod
    def forward(ctx, y, weights, sources, slots):
        ctx.save_for_backward(None if weights is None else y, weights, sources, slots)
        return sum_copies(y, slots, weights)

    @staticmethod
    def backward(ctx, grad):
        y, weights, sources, slots = ctx.saved_tensors
        if weights is None:
            return gather_copies(grad, sources, slots.shape[1]), None, None, None
        (tokens, copies), features = slots.shape, grad.shape[1]
        d_y = torch.empty(len(sources), features, dtype=y.dtype, device=y.device)
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

# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant matrix products and activations: a row's bits are independent of the batch.

A matrix product chooses its kernel, and with it the reduction order, by its shape: a row alone and
the same row among sixteen get different bits. Routers, experts and weights that
`ops.matmul.packed` cannot multiply are therefore multiplied in tiles of `TILE_ROWS` rows, and the
last tile is padded with zeros: every product of a weight then has one shape, whatever the batch.
This still assumes that the kernel treats all rows of a tile alike on any number of threads;
`check_tile_invariance` tests it for the model's weights. (He et al. 2025, "Defeating Nondeterminism
in LLM Inference", describe the same method on GPUs.)

Elementwise functions compute the elements after the last full vector of a tensor, or of a thread's
chunk, in scalar code, which rounds exponentials differently. Padded to full vectors, with at most
`PADDED_ROWS` rows, a tensor has no such elements. Softmax and norms reduce each row separately, so
they need no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

#: Rows of one product: a CPU multiplies them at full speed, and about as many sequences decode.
TILE_ROWS = 16
#: Rows that fill whole vectors for any number of features: two vectors of fp32 on any CPU.
PADDED_ROWS = 32
#: Elements of whole vectors for both halves of fused features on each of 2, 4, ... 32 threads.
PADDED_ELEMENTS = 2048


def pad_rows(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return rows [r, ...] followed by rows of zeros up to a multiple."""
    missing = -len(x) % multiple
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x


def tiled_matmul(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return x [..., h] times matrix [h, o], [..., o], in tiles of rows; outside of autograd."""
    rows = x.reshape(-1, x.shape[-1])
    tiles = pad_rows(rows, TILE_ROWS).contiguous()
    out = tiles.new_empty(len(tiles), matrix.shape[1])
    for start in range(0, len(tiles), TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        torch.mm(tiles[tile], matrix, out=out[tile])
    return out[: len(rows)].view(*x.shape[:-1], matrix.shape[1])


def tiled_bmm(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return x [t, n, a] times matrices [n, a, c], [t, n, c], in tiles of tokens."""
    tiles = pad_rows(x, TILE_ROWS).split(TILE_ROWS)
    products = [torch.bmm(tile.transpose(0, 1).contiguous(), matrices) for tile in tiles]
    return torch.cat(products, 1)[:, : len(x)].transpose(0, 1)


def with_padded_rows(
    function: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Return an elementwise function that pads its rows to whole vectors.

    Args:
        function: maps x [..., f], and arguments that are not tensors, to [..., g].
    """

    def compute(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        aligned_rows = PADDED_ELEMENTS // math.gcd(PADDED_ELEMENTS, rows.shape[-1])
        y = function(pad_rows(rows, min(aligned_rows, PADDED_ROWS)), *arguments)
        return y[: len(rows)].view(*x.shape[:-1], y.shape[-1])

    return compute


def check_tile_invariance(matrices: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Raise ValueError unless products give equal rows of a tile equal results.

    Each shape is multiplied on one thread and on the current number of threads.

    Args:
        matrices: weights [o, h]; one weight of each shape is tested.
        dtype: in which the weights are multiplied.
    """
    threads = torch.get_num_threads()
    shapes = {tuple(matrix.shape): matrix for matrix in matrices}
    try:
        for (outputs, features), matrix in shapes.items():
            row = torch.linspace(-1.0, 1.0, features, dtype=dtype, device=matrix.device).cos_()
            tile, operand = row.expand(TILE_ROWS, -1).contiguous(), matrix.detach().to(dtype).t()
            products = []
            for num_threads in {1, threads}:
                torch.set_num_threads(num_threads)
                products.append(tile.mm(operand))
            expected = products[0][:1]
            if any(not torch.equal(y, expected.expand_as(y)) for y in products):
                raise ValueError(
                    f"batch-invariant: this CPU multiplies {TILE_ROWS} equal rows by a matrix "
                    f"[{outputs}, {features}] with different results: run on one thread, or "
                    "drop it"
                )
    finally:
        torch.set_num_threads(threads)

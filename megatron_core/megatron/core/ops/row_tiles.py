# SPDX-License-Identifier: Apache-2.0
"""Products and activations whose bits do not depend on how many rows are computed together.

A matrix product picks its kernel, and with it the order of its sums, by its shape: one row times a
matrix has other bits than the same row among sixteen. Routers, experts and what
`ops.packed_product` cannot multiply are therefore multiplied in tiles of rows of one size,
the last one padded with zeros: every product of a weight then has one shape, whatever the batch.
What is left is that a tile's kernel treats all of its rows alike, on any number of threads;
`check_tiles` tries that for given weights. (He et al. 2025, "Defeating Nondeterminism in LLM
Inference", do so on GPUs.)

Elementwise functions compute the last elements of a tensor, or of a thread's part, one by one and
not in vectors, with other roundings of exponentials. Padded to whole vectors, `PADDED_ROWS` rows at
most, there are no such elements. Softmax and norms go row by row: their bits depend on the row
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

#: Rows of one product: what a CPU multiplies at full speed, and as many as usually decode.
TILE_ROWS = 16
#: Rows that elementwise functions are padded to for any features: two vectors of fp32 on any CPU.
PADDED_ROWS = 32
#: Elements of which fewer rows are padded to a multiple: those vectors of both halves of fused
#: features on each of 2, 4, ... 32 threads.
PADDED_ELEMENTS = 2048


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return rows [r, ...] followed by zeros up to a multiple of rows."""
    missing = -len(x) % multiple
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x


def tiled_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return x [..., h] times matrix [h, o], [..., o], in tiles of rows; outside of autograd."""
    rows = x.reshape(-1, x.shape[-1])
    tiles = padded(rows, TILE_ROWS).contiguous()
    out = tiles.new_empty(len(tiles), matrix.shape[1])
    for start in range(0, len(tiles), TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        torch.mm(tiles[tile], matrix, out=out[tile])
    return out[: len(rows)].view(*x.shape[:-1], matrix.shape[1])


def tiled_bmm(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return x [t, n, a] times matrices [n, a, c], [t, n, c], in tiles of tokens."""
    tiles = padded(x, TILE_ROWS).split(TILE_ROWS)
    found = [torch.bmm(tile.transpose(0, 1).contiguous(), matrices) for tile in tiles]
    return torch.cat(found, 1)[:, : len(x)].transpose(0, 1)


def over_padded_rows(
    function: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Return an elementwise function that is computed over padded rows.

    Args:
        function: maps x [..., f], and arguments that are no tensors, to [..., g].
    """

    def compute(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        whole = PADDED_ELEMENTS // math.gcd(PADDED_ELEMENTS, rows.shape[-1])
        found = function(padded(rows, min(whole, PADDED_ROWS)), *arguments)
        return found[: len(rows)].view(*x.shape[:-1], found.shape[-1])

    return compute


def check_tiles(matrices: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Raise ValueError unless products treat the rows of a tile alike, on one thread and on all.

    Args:
        matrices: [o, h] of weights; one of each shape is tried.
        dtype: that they are multiplied in.
    """
    threads = torch.get_num_threads()
    shapes = {tuple(matrix.shape): matrix for matrix in matrices}
    try:
        for (outputs, features), matrix in shapes.items():
            row = torch.linspace(-1.0, 1.0, features, dtype=dtype, device=matrix.device).cos_()
            tile, wide = row.expand(TILE_ROWS, -1).contiguous(), matrix.detach().to(dtype).t()
            found = []
            for count in {1, threads}:
                torch.set_num_threads(count)
                found.append(tile.mm(wide))
            if any(not torch.equal(out, found[0][:1].expand_as(out)) for out in found):
                raise ValueError(
                    f"batch-invariant: this CPU multiplies {TILE_ROWS} equal rows by a matrix "
                    f"[{outputs}, {features}] to different results: run on one thread, or drop it"
                )
    finally:
        torch.set_num_threads(threads)

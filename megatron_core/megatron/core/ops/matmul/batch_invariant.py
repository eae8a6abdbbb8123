# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant matrix products and activations: a row's bits are independent of the batch.

A matrix product chooses its kernel, and with it the reduction order, by its shape: a row alone and
the same row among sixteen get different bits. (He et al. 2025, "Defeating Nondeterminism in LLM
Inference", describe the same problem and method on GPUs.) Two kinds of product avoid this.

Packed weights: oneDNN's inner product on a packed weight chooses the order by the weight's shape
alone: on every CPU measured, a row has the same bits in every batch of 1 or more rows, or of 2 or
more rows (a single row splits more than 1,024 features differently), on any number of threads.
oneDNN does not promise this, so `min_invariant_rows` tests each shape of a weight.

Tiles: routers, experts and weights that cannot be packed are multiplied in tiles of `TILE_ROWS`
rows, and the last tile is padded with zeros: every product of a weight then has one shape, whatever
the batch. This still assumes that the kernel treats all rows of a tile alike on any number of
threads; `check_tile_invariance` tests it for the model's weights.

Elementwise functions compute the elements after the last full vector of a tensor, or of a thread's
chunk, in scalar code, which rounds exponentials differently. Padded to full vectors, with at most
`PADDED_ROWS` rows, a tensor has no such elements. Softmax and norms reduce each row separately, so
they need no padding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from megatron.core.ops.matmul.onednn import is_available, onednn_linear, pack_weight

#: Batch sizes, in rows, with which each shape is tested.
TESTED_ROWS = (1, 2, 3, 8, 16, 17, 33, 64, 128)
#: Largest batch of one product: larger ones were not tested.
MAX_ROWS = TESTED_ROWS[-1]
#: Rows of one product: a CPU multiplies them at full speed, and about as many sequences decode.
TILE_ROWS = 16
#: Rows that fill whole vectors for any number of features: two vectors of fp32 on any CPU.
PADDED_ROWS = 32
#: Elements of whole vectors for both halves of fused features on each of 2, 4, ... 32 threads.
PADDED_ELEMENTS = 2048


class PackedMatrix:
    """A snapshot of a weight [o, h] in oneDNN's packed layout, in fp32.

    Args:
        weight: [o, h], on a CPU.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = outputs, features = tuple(weight.shape)
        self.nbytes = 4 * outputs * features
        # The version counter grows with every in-place write that autograd sees.
        self._packed_version = weight._version, weight.data_ptr()
        self._packed = pack_weight(weight.detach().float())

    def is_current(self, weight: torch.Tensor) -> bool:
        """Return whether the weight's version counter and storage are the packed ones."""
        return self._packed_version == (weight._version, weight.data_ptr())

    def linear(self, x: torch.Tensor, min_rows: int) -> torch.Tensor:
        """Return x [..., h] Wᵀ, fp32 [..., o], outside of autograd.

        Args:
            x: fp32.
            min_rows: smallest batch of one product, 1 or 2, see `min_invariant_rows`.
        """
        outputs, features = self.shape
        if min_rows * features <= x.numel() <= MAX_ROWS * features:
            return onednn_linear(x, self._packed)
        products = [
            # A single row that needs a second one is duplicated.
            onednn_linear(
                rows if len(rows) >= min_rows else rows.expand(min_rows, -1), self._packed
            )
            for rows in x.reshape(-1, features).split(MAX_ROWS)
        ]
        y = products[0] if len(products) == 1 else torch.cat(products)
        return y[: x.numel() // features].view(*x.shape[:-1], outputs)


def min_invariant_rows(shape: tuple[int, ...]) -> int | None:
    """Return the smallest batch from which on packed products of a shape are batch-invariant.

    The shape is tested on one thread and on the current number of threads.

    Args:
        shape: (o, h) of the weight.

    Returns:
        1 or 2 rows; None if no batch size is invariant or torch cannot pack.
    """
    return _min_invariant_rows(*shape, torch.get_num_threads()) if is_available() else None


@functools.cache
def _min_invariant_rows(outputs: int, features: int, threads: int) -> int | None:
    """See `min_invariant_rows`: equal input rows must give equal output rows in every batch."""
    packed = pack_weight(
        torch.linspace(0, outputs, outputs * features).sin_().view(outputs, features)
    )
    x = torch.linspace(-1.0, 1.0, features).cos_().expand(MAX_ROWS, -1).contiguous()
    expected = onednn_linear(x, packed)[:1]
    min_rows = 1
    try:
        for num_threads in {1, threads}:
            torch.set_num_threads(num_threads)
            for rows in TESTED_ROWS:
                y = onednn_linear(x[:rows], packed)
                if not torch.equal(y, expected.expand_as(y)):
                    if rows > 1:
                        return None
                    min_rows = 2
    finally:
        torch.set_num_threads(threads)
    return min_rows


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
        function: maps x [..., f], and arguments and options that are not tensors, to [..., g].
    """

    def compute(x: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        aligned_rows = PADDED_ELEMENTS // math.gcd(PADDED_ELEMENTS, rows.shape[-1])
        y = function(pad_rows(rows, min(aligned_rows, PADDED_ROWS)), *arguments, **options)
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

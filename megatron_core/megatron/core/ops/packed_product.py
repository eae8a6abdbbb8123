# SPDX-License-Identifier: Apache-2.0
"""Products by a matrix in oneDNN's packed layout: a row's bits do not depend on how many there are.

`F.linear` picks its kernel, and with it the order of its sums, by the number of rows. oneDNN's
inner product with a packed matrix goes by the matrix: on the CPUs tried every row of 1 or more has
the same bits, or every row of 2 or more (one row alone divides more than 1,024 features otherwise),
on any number of threads. Nothing promises that, so `least_rows` tries each shape of a matrix, and
products fall back to tiles (`ops.row_tiles`) where it does not hold.

In bf16 such a product is also faster than `F.linear`, which packs its matrix at every call: it took
0.35 to 0.83 of the time for 1 to 256 rows, five shapes, on a Xeon with AMX, and as long for 1,024.
So `ops.weight_copy` keeps its copies packed.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

#: Numbers of rows that a shape is tried with.
TRIED_ROWS = (1, 2, 3, 8, 16, 17, 33, 64, 128)
#: Rows of one product: no more than were tried.
MOST_ROWS = TRIED_ROWS[-1]
#: Rows that the layout is chosen for: as many as usually decode.
LAYOUT_ROWS = 16


class PackedMatrix:
    """A matrix [o, h] in oneDNN's layout, of what a weight held when it was made.

    Args:
        weight: [o, h], on a CPU; multiplied in fp32.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = outputs, features = tuple(weight.shape)
        self.nbytes = 4 * outputs * features
        self._made_of = weight._version, weight.data_ptr()
        self._packed = pack(weight.detach().float())

    def is_of(self, weight: torch.Tensor) -> bool:
        """Return whether the weight was not written to since, as far as torch counts."""
        return self._made_of == (weight._version, weight.data_ptr())

    def product(self, x: torch.Tensor, least: int) -> torch.Tensor:
        """Return x [..., h] Wᵀ, fp32 [..., o], outside of autograd.

        Args:
            x: fp32.
            least: rows of a product at least, 1 or 2, see `least_rows`.
        """
        outputs, features = self.shape
        if least * features <= x.numel() <= MOST_ROWS * features:
            return multiply(x, self._packed)
        found = [
            # One row that needs a second gets itself as that.
            multiply(part if len(part) >= least else part.expand(least, -1), self._packed)
            for part in x.reshape(-1, features).split(MOST_ROWS)
        ]
        rows = found[0] if len(found) == 1 else torch.cat(found)
        return rows[: x.numel() // features].view(*x.shape[:-1], outputs)


def least_rows(shape: tuple[int, ...]) -> int | None:
    """Return from how many rows on products by packed matrices [o, h] give a row the same bits, on
    one thread and on as many as there are now: 1 or 2; None if they do not, or cannot be had."""
    return _least_rows(*shape, torch.get_num_threads()) if is_available() else None


@functools.cache
def is_available() -> bool:
    """Return whether this build of torch multiplies by packed matrices."""
    try:
        multiply(torch.ones(1, 1), pack(torch.ones(1, 1)))
    except (AttributeError, RuntimeError, NotImplementedError):  # no operator, or without oneDNN
        return False
    return True


@functools.cache
def _least_rows(outputs: int, features: int, threads: int) -> int | None:
    """See `least_rows`: equal rows have to give equal rows, whatever the number and the place."""
    packed = pack(torch.linspace(0, outputs, outputs * features).sin_().view(outputs, features))
    x = torch.linspace(-1.0, 1.0, features).cos_().expand(MOST_ROWS, -1).contiguous()
    wanted = multiply(x, packed)[:1]
    least = 1
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            for rows in TRIED_ROWS:
                y = multiply(x[:rows], packed)
                if not torch.equal(y, wanted.expand_as(y)):
                    if rows > 1:
                        return None
                    least = 2
    finally:
        torch.set_num_threads(threads)
    return least


@functools.cache
def packs_bf16(outputs: int, features: int) -> bool:
    """Return whether a bf16 matrix [o, h] can be packed: where oneDNN multiplies bf16 at all, and
    products of 1 row and of 16 rows are those of `F.linear` up to rounding."""
    weight = torch.linspace(0, outputs, outputs * features).sin_().view(outputs, features)
    weight = weight.to(torch.bfloat16)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = pack(weight)
        for rows in (1, LAYOUT_ROWS):
            x = torch.linspace(-1, 1, rows * features).cos_().view(rows, features)
            x = x.to(torch.bfloat16)
            plain, ours = F.linear(x, weight), multiply(x, packed)
            if (ours.float() - plain.float()).abs().amax() > 2**-6 * plain.abs().amax():
                return False
    except (AttributeError, RuntimeError, NotImplementedError):  # no operator, or without oneDNN
        return False
    return True


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix [o, h], fp32 or bf16, in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), LAYOUT_ROWS)


def multiply(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return x [..., h] times the transpose of a packed matrix [o, h], [..., o]."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")

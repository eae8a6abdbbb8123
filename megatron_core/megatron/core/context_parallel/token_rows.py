# SPDX-License-Identifier: Apache-2.0
"""TokenRows: the tokens of rows packed for a recurrence, document after document, and the way back.

One gather does all of it: it undoes the cut over ranks, leaves padding out, and turns columns of
rows into rows of columns. The map of the way back is known, so backward gathers too: nothing is
added up, and nothing is scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.core.context_parallel.index_maps import inverse_of
from megatron.core.ops.places import Places
from megatron.core.ops.sequences import Sequences

if TYPE_CHECKING:
    from megatron.core.context_parallel.layout import SequenceLayout


class TokenRows:
    """Which tokens of [n, b, ...] are packed, in which order, and which sequences they make.

    Made on the host, once; the maps are copied to the device without waiting.

    Args:
        places: int64 [t] on the host, where each packed token lies: column · b + row. None twice
            the same; what is in none is padding.
        bounds: where sequences of packed tokens begin and end, [0, ..., t].
        length: n.
        batch: b.
        device: where layers work.

    Attributes:
        sequences: the packed tokens, on the device.
        places: of the packed tokens among [n · b, ...]; None where they are all, as they lie.

    Raises:
        ValueError: bounds of another number of tokens.
    """

    def __init__(
        self,
        places: np.ndarray,
        bounds: Sequence[int],
        *,
        length: int,
        batch: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.sequences = Sequences(bounds, device=device)
        if self.sequences.tokens != len(places):
            raise ValueError(
                f"bounds end at {self.sequences.tokens}, there are {len(places)} tokens: the last "
                "is their number"
            )
        self.length, self.batch = length, batch
        self.places = Places.of(places, length * batch, self.sequences.moved)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [t, ...] from x [n, b, ...]; a view where that is the order in memory."""
        self._check("pack", x, (self.length, self.batch))
        flat = x.flatten(0, 1)
        return flat if self.places is None else self.places.pack(flat)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, b, ...] from x [t, ...], zero where padding is; a view like `pack`'s."""
        self._check("unpack", x, (self.sequences.tokens,))
        return self._rows(x if self.places is None else self.places.unpack(x))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `pack` does, for ops that have a backward of their own."""
        flat = x.flatten(0, 1)
        return flat if self.places is None else self.places.take(flat)

    def put_back(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `unpack` does, for ops that have a backward of their own."""
        return self._rows(x if self.places is None else self.places.put_back(x))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, b, ...], a view of [n · b, ...]."""
        return x.unflatten(0, (self.length, self.batch))

    @staticmethod
    def _check(what: str, x: torch.Tensor, wanted: tuple[int, ...]) -> None:
        if tuple(x.shape[: len(wanted)]) != wanted:
            raise ValueError(f"{what}: {tuple(x.shape)} must begin with {wanted}")


def whole_rows(layout: SequenceLayout, batch: int) -> TokenRows:
    """Return the tokens of whole rows among what is gathered from all ranks, [cp · s/cp, b].

    Row follows row, and in each its tokens in the order of places; padding is left out. Documents
    are sequences.

    Args:
        layout: of this rank; without a cut, of whole rows.
        batch: b.

    Raises:
        ValueError: rows of another number than the layout's, or documents known by ids alone.
    """
    documents = known_documents(layout, batch)
    cut, width = layout.cut, layout.positions.shape[0]
    length, gathered = (width, width) if cut is None else (cut.length, cut.padded[-1])
    inverse = None if cut is None else inverse_of(cut)
    columns = np.arange(length) if inverse is None else inverse.numpy()
    places = columns * batch + np.arange(batch)[:, None]  # [b, s]
    bounds = [0]
    for row, ends in enumerate(documents):
        bounds += [row * length + end for end in ends[1:]]
    return TokenRows(
        places.reshape(-1), bounds, length=gathered, batch=batch, device=layout.positions.device
    )


def known_documents(layout: SequenceLayout, batch: int) -> Sequence[Sequence[int]]:
    """Return where the documents of each row begin and end by place, [0, ..., s].

    Raises:
        ValueError: rows of another number than the layout's, or documents known by ids alone.
    """
    if layout.rows not in (None, batch):
        raise ValueError(f"{batch} rows of tokens, the layout is of {layout.rows}: make it for all")
    if layout.documents is None and layout.document_ids is not None:
        raise ValueError(
            "this layout knows documents only by their ids: a recurrence needs where they begin "
            "(cu_seqlens), or its state goes on into the next; make it by SequenceLayout.make, on "
            "the host"
        )
    if layout.documents is not None:
        return layout.documents
    length = layout.positions.shape[0] if layout.cut is None else layout.cut.length
    return ((0, length),) * batch

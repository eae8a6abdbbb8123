# SPDX-License-Identifier: Apache-2.0
"""The layout of the tokens that a rank was given: chosen, and whether it is theirs."""

from __future__ import annotations

import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.process_groups import Group

#: What `RowLayouts.of` makes a layout of.
OF_ROWS = ("layout", "sample_ids", "positions", "document_ids")


class RowLayouts:
    """The layouts of a model's microbatches; whole rows of one length share what is made for them.

    So tables that the host makes for whole rows are copied to the device in the first step alone,
    and a CUDA graph of a later one holds no copy from memory that is gone when it is replayed.
    """

    def __init__(self) -> None:
        self._whole: dict[tuple[int, torch.device], SequenceLayout] = {}

    def of(
        self,
        tokens: torch.Tensor,
        layout: SequenceLayout | None = None,
        *,
        sample_ids: torch.Tensor | None = None,
        **rows: torch.Tensor | None,
    ) -> SequenceLayout:
        """Return the layout of a microbatch.

        Args:
            tokens: int64 [b, s].
            layout: given; None makes one of whole rows.
            sample_ids: int64 [b]; None turns dropout off, unless the layout has some.
            rows: `positions` and `document_ids` of `SequenceLayout.packed`.

        Raises:
            ValueError: both a layout and rows, or tokens that are no rows.
        """
        check_rows(tokens)
        if layout is not None:
            if rows:
                raise ValueError(
                    f"a layout and {', '.join(rows)}: the layout has those, leave them out"
                )
            return layout if sample_ids is None else layout.with_samples(sample_ids)
        length, device = tokens.shape[1], tokens.device
        if any(x is not None for x in rows.values()):
            return SequenceLayout.packed(length, sample_ids=sample_ids, device=device, **rows)
        key = length, device
        if key not in self._whole:
            self._whole[key] = SequenceLayout.packed(length, device=device)
        return self._whole[key].with_samples(sample_ids)


def check_rows(tokens: torch.Tensor) -> None:
    """Raise ValueError unless tokens are [b, s]."""
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens {list(tokens.shape)} are no rows [b, s]: give one row as tokens.unsqueeze(0)"
        )


def check_layout(layout: SequenceLayout, tokens: torch.Tensor, context: Group) -> None:
    """Raise ValueError unless the layout is of this rank's tokens.

    Args:
        tokens: int64 [b, s/cp].
        context: the ranks that share the tokens of a row.
    """
    cut = layout.cut
    if context.size > 1 and cut is None:
        raise ValueError(
            f"{context.size} context parallel ranks need a layout with a cut: give "
            "SequenceLayout.make(cut, rank, ...) and this rank's tokens"
        )
    if cut is not None and (layout.rank, cut.size) != (context.rank, context.size):
        raise ValueError(
            f"the layout is cut for rank {layout.rank} of {cut.size}, this is rank "
            f"{context.rank} of {context.size}: make it for this rank"
        )
    if layout.rows not in (None, tokens.shape[0]):
        raise ValueError(
            f"{tokens.shape[0]} rows of tokens, the layout is of {layout.rows}: make it for as many"
        )
    if layout.positions.shape[0] != tokens.shape[1]:
        raise ValueError(
            f"{tokens.shape[1]} tokens a row, the layout is of {layout.positions.shape[0]}: "
            "give those of this rank, layout.local(tokens)"
        )

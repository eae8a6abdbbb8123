# SPDX-License-Identifier: Apache-2.0
"""Links: which states own pieces give to other ranks and get from them, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from megatron.core.context_parallel.pieces import OwnPieces
from megatron.core.process_groups import Group
from megatron.core.ssm.chains import NOBODY, Fold, Selected, Step


@dataclass(frozen=True, eq=False, kw_only=True)
class Links:
    """How own pieces hang together with those of other ranks.

    Args:
        group: cp.
        exports: pieces whose summaries others need, filled up to `export_slots`.
        entries: pieces whose first states come from others, filled up to `entry_slots`.
        first: gives first states from summaries.
        last: gives gradients of last states from those of first ones.
        chained: whether any M is needed.
    """

    group: Group
    exports: Selected
    entries: Selected
    export_slots: int
    entry_slots: int
    first: Fold
    last: Fold
    chained: bool

    @staticmethod
    def of(pieces: OwnPieces, group: Group) -> Links:
        """Return how own pieces hang together with those of other ranks."""
        sequences, rank = pieces.sequences, pieces.rank
        exports, entries = pieces.export_slots, pieces.entry_slots
        first, last = [], []
        for chain in pieces.chains:
            steps = []
            for link in chain:
                slot = link.source * exports + link.export
                taker = pieces.entries[link.entry] if link.target == rank else NOBODY
                steps.append(Step(slot, slot, taker))
            first.append(steps)
            steps, behind = [], NOBODY
            for link in reversed(chain):
                slot = link.target * entries + link.entry
                taker = pieces.exports[link.export] if link.source == rank else NOBODY
                # The piece behind this link is the one before the next, which exported its M.
                steps.append(Step(slot, behind, taker))
                behind = link.source * exports + link.export
            last.append(steps)
        return Links(
            group=group,
            exports=Selected(pieces.exports, sequences),
            entries=Selected(pieces.entries, sequences),
            export_slots=exports,
            entry_slots=entries,
            first=Fold(first, sequences),
            last=Fold(last, sequences),
            chained=pieces.chained,
        )


def filled_up(x: torch.Tensor, slots: int) -> torch.Tensor:
    """Return x [n, ...] with rows of zeros behind, [slots, ...]."""
    if x.shape[0] == slots:
        return x
    return functional.pad(x, (0, 0) * (x.ndim - 1) + (0, slots - x.shape[0]))

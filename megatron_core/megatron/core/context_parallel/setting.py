# SPDX-License-Identifier: Apache-2.0
"""ContextParallel: the ranks that share the tokens of a row, and how their attention meets."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron.core.context_parallel.choice import ALL_TO_ALL, AUTO, ENGINES, head_problem
from megatron.core.context_parallel.layout import SequenceLayout
from megatron.core.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """How the sequences of a model are cut over ranks.

    Args:
        group: cp.
        engine: of attention, "p2p", "all_gather", "a2a", or "auto" for the one that moves least.
        linear_mode: of recurrent mixers, "headwise", "segments", or "auto" likewise.
        linear_splits: segments of a rank's own sequences that recurrences work on side by side.
        cpu_dtype: what a CPU multiplies 16-bit queries and keys in, see `ops.dispatch`.
    """

    group: Group = field(default_factory=lambda: Group.single("cp"))
    engine: str = AUTO
    linear_mode: str = AUTO
    linear_splits: int = 1
    cpu_dtype: torch.dtype | None = None

    def joins(self, layout: SequenceLayout) -> bool:
        """Return whether attention goes block by block: it has keys of other ranks to see, or the
        documents of its own rows are known by where they begin, and not by a mask."""
        if self.group.size > 1:
            return True
        return layout.documents is not None and layout.document_ids is None


def context_problems(engine: str, *, heads: int, groups: int, cp: int) -> list[str]:
    """List what keeps an engine from attending over cp ranks, with the mend.

    Args:
        engine: "p2p", "all_gather", "a2a" or "auto".
        heads: query heads of a rank, n/tp.
        groups: key heads of a rank, at least 1.
        cp: ranks.
    """
    if engine not in (AUTO, *ENGINES):
        return [f"context-parallel engine {engine!r}: use {', '.join((AUTO, *ENGINES))}"]
    reason = head_problem(heads, groups, cp) if engine == ALL_TO_ALL else None
    return [] if reason is None else [f"context-parallel engine a2a: {reason}"]

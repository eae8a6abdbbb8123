# SPDX-License-Identifier: Apache-2.0
"""Attend: what every engine is told about one attention call, beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.context_parallel import blockwise
from megatron.core.context_parallel.blocks import Block
from megatron.core.context_parallel.layout import SequenceLayout
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.process_groups import Group

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Attend:
    """One attention over a cut sequence.

    Args:
        layout: of the microbatch; its cut says which rank has which tokens.
        group: cp.
        scale: factor on the logits, usually 1 / sqrt(d).
        window: a query at place q sees only keys k with q - k < window.
        dropout: drops probabilities.
        cpu_dtype: what a CPU multiplies 16-bit queries and keys in, see `ops.dispatch`.
    """

    layout: SequenceLayout
    group: Group
    scale: float
    window: int | None = None
    dropout: AttentionDropout | None = None
    cpu_dtype: torch.dtype | None = None

    def blocks(self, key_rank: int | None) -> tuple[Block, ...]:
        """Return the blocks of this rank's queries and one rank's keys, of whole rows' if None."""
        joined = self.window is None and self.dropout is None
        return self.layout.blocks(key_rank, self.window, joined=joined)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: tuple[Block, ...],
        *,
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) of these blocks, merged into what is there if `into` is given."""
        return blockwise.forward(
            query,
            key,
            value,
            blocks,
            scale=self.scale,
            window=self.window,
            dropout=self.dropout,
            into=into,
            cpu_dtype=self.cpu_dtype,
        )

    def backward(
        self,
        grad: torch.Tensor,
        qkv: Tensors,
        result: tuple[torch.Tensor, torch.Tensor],
        *,
        blocks: tuple[Block, ...],
        wide: bool = False,
    ) -> Tensors:
        """Return (dq, dk, dv) of these blocks, as sums of fp32 if `wide`; `result` is the complete
        (out, lse)."""
        return blockwise.backward(
            grad,
            *qkv,
            *result,
            blocks,
            scale=self.scale,
            window=self.window,
            dropout=self.dropout,
            wide=wide,
            cpu_dtype=self.cpu_dtype,
        )

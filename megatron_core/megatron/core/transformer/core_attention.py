# SPDX-License-Identifier: Apache-2.0
"""CoreAttention: softmax attention of a rank's heads, the part that all attention layers share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron.core.backend import Backend
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.attend import Attend
from megatron.core.context_parallel.engines import context_attention
from megatron.core.context_parallel.setting import ContextParallel
from megatron.core.ops.dropout import AttentionDropout, dropout_key
from megatron.core.transformer.build import LayerBuild


@dataclass(frozen=True, eq=False, kw_only=True)
class CoreAttention:
    """Attention of projected queries to keys and values, over this rank's tokens or those of all cp
    ranks. It has no weights.

    Args:
        backend: whose attention it is.
        context: the ranks that share the tokens of a row.
        scale: factor on the logits.
        window: tokens that a query sees, itself and those before it; None is all of them.
        rate: probability of dropping an attention weight in training.
        dropout_key: of the layer, from `ops.dropout.dropout_key`.
        head_offset: number of this rank's first query head among those of all tp ranks.
    """

    backend: Backend
    context: ContextParallel
    scale: float
    window: int | None
    rate: float
    dropout_key: int
    head_offset: int

    @staticmethod
    def of(
        name: str,
        build: LayerBuild,
        *,
        heads: int,
        channels: int,
        rate: float,
        window: int | None = None,
        scale_factor: float = 1.0,
    ) -> CoreAttention:
        """Make that of the layer `name`.

        Args:
            heads: query heads of this rank, n/tp.
            channels: features d of a query; the scale is scale_factor / sqrt(d).
            rate, window: see the class.
        """
        return CoreAttention(
            backend=build.backend,
            context=build.context,
            scale=scale_factor / math.sqrt(channels),
            window=window,
            rate=rate,
            dropout_key=dropout_key(build.seed, name, "attention"),
            head_offset=build.region.group.rank * heads,
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        *,
        sinks: torch.Tensor | None = None,
        implementation: str | None = None,
    ) -> torch.Tensor:
        """Return [s, b, n/tp, d]; with a cache there are more keys than queries.

        Args:
            query: [s, b, n/tp, d].
            key, value: [s_k, b, g/tp, d].
            sinks: [n/tp], learned logits.
            implementation: of the op, "reference", "triton" or None (by device); not for tokens
                that are cut over ranks.
        """
        dropout = self._dropout(layout)
        if self.context.joins(layout):
            attend = Attend(
                layout=layout,
                group=self.context.group,
                scale=self.scale,
                window=self.window,
                dropout=dropout,
                cpu_dtype=self.context.cpu_dtype,
            )
            engine = self.context.engine
            return context_attention(query, key, value, attend=attend, engine=engine, sinks=sinks)
        return self.backend.attention(
            query,
            key,
            value,
            causal=True,
            scale=self.scale,
            window=self.window,
            sinks=sinks,
            document_ids=layout.document_ids,
            dropout=dropout,
            implementation=implementation,
        )[0]

    def _dropout(self, layout: SequenceLayout) -> AttentionDropout | None:
        if layout.sample_ids is None or self.rate == 0.0:
            return None
        return AttentionDropout(
            rate=self.rate,
            key=self.dropout_key,
            sample_ids=layout.sample_ids,
            head_offset=self.head_offset,
            sample_length=layout.sample_length,
        )

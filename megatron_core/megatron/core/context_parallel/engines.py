# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is cut over the context-parallel ranks: three engines.

Every rank has the queries, keys and values of its own tokens, and its queries must see keys of
others. The engines bring them together; blocks of queries and keys that see each other are then
attended one by one and merged by their log-sum-exp (`blockwise`), the same way in all of them.

| engine | forward moves | backward moves | keeps of other ranks |
|---|---|---|---|
| p2p | keys and values, step by step | them again, and their gradients | one rank's at a time |
| all_gather | keys and values at once | them again; gradients reduced | all at a time |
| a2a | q, k, v and the output: heads are cut, not the sequence | their gradients | nothing |

Ring: Liu et al. 2023 (arXiv 2310.01889), in the zigzag order of Brandon et al. 2023 (2311.09431).
All-gather: Llama 3 (2407.21783), section 3.3.2. All-to-all: DeepSpeed Ulysses (2309.14509).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from megatron.core.context_parallel.all_gather import AllGatherAttention
from megatron.core.context_parallel.all_to_all import AllToAllAttention
from megatron.core.context_parallel.attend import Attend
from megatron.core.context_parallel.choice import (
    ALL_GATHER,
    ALL_TO_ALL,
    AUTO,
    RING,
    AttentionShape,
    choose,
)
from megatron.core.context_parallel.ring import RingAttention

_FUNCTIONS: Mapping[str, type[torch.autograd.Function]] = MappingProxyType(
    {RING: RingAttention, ALL_GATHER: AllGatherAttention, ALL_TO_ALL: AllToAllAttention}
)


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attend: Attend,
    engine: str = AUTO,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of this rank's queries to the keys of all ranks, [s/cp, b, n, d].

    Args:
        query: [s/cp, b, n, d].
        key, value: [s/cp, b, g, d], g dividing n.
        attend: the layout, cut over the ranks of the group, and the rules. On one rank it attends
            to its own keys, document by document.
        engine: "p2p", "all_gather", "a2a", or "auto" for the one that moves least.
        sinks: [n], learned logits.

    Raises:
        ValueError: a layout that is cut for other ranks, heads that do not divide for a2a.
    """
    layout, group = attend.layout, attend.group
    cut = layout.cut
    if cut is None or cut.size != group.size or layout.rank != group.rank:
        told = "is not cut" if cut is None else f"is cut for rank {layout.rank} of {cut.size}"
        raise ValueError(
            f"the layout {told}, group {group.name} is rank {group.rank} of {group.size}: make "
            "it for this group"
        )
    if query.shape[0] != cut.local_length:
        raise ValueError(f"{query.shape[0]} queries, the layout has {cut.local_length} here")
    name = ALL_GATHER  # of one rank: no collective
    if group.size > 1:
        name = choose(engine, attention_shape(query, key), group.size).engine
    return _FUNCTIONS[name].apply(query, key, value, sinks, attend)


def attention_shape(query: torch.Tensor, key: torch.Tensor) -> AttentionShape:
    """Return the shape by which an engine is chosen."""
    tokens, rows, heads, features = query.shape
    return AttentionShape(
        tokens=tokens,
        rows=rows,
        heads=heads,
        groups=key.shape[2],
        features=features,
        element_bytes=query.element_size(),
    )

# SPDX-License-Identifier: Apache-2.0
"""The equations of masked softmax attention, all heads and pairs at once."""

import math
from typing import Any

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention from its definition, all heads and pairs at once.

    Args:
        query: [s_q, b, n, d].
        key, value: [s_k, b, g, d].
        sinks: [n], extra logits without a value.
        options: softcap, window, documents (int [s_k, b], of the keys), keep (factors [b, n, s_q,
            s_k] on the probabilities, for dropout), query_start, key_start and query_document_ids.
    """
    window, documents, keep = (options.get(name) for name in ("window", "documents", "keep"))
    queries, keys, heads = query.shape[0], key.shape[0], query.shape[2]
    key_start = options.get("key_start", 0)
    query_start = options.get("query_start", key_start + keys - queries)
    repeat = heads // key.shape[2]
    key, value = (x.repeat_interleave(repeat, 2) for x in (key, value))
    logits = torch.einsum("qbnd,kbnd->bnqk", query, key) * scale
    if (cap := options.get("softcap")) is not None:
        logits = cap * (logits / cap).tanh()
    q = torch.arange(queries)[:, None] + query_start
    k = torch.arange(keys) + key_start
    visible = torch.ones(logits.shape, dtype=torch.bool)
    if causal:
        visible &= k <= q
    if window is not None:
        visible &= q - k < window
    if documents is not None:
        offset = query_start - key_start
        query_documents = options.get("query_document_ids", documents[offset : offset + queries])
        visible &= query_documents.t()[:, None, :, None] == documents.t()[:, None, None, :]
    logits = logits.masked_fill(~visible, -math.inf)
    if sinks is not None:
        extra = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, extra], -1)
    lse = logits.logsumexp(-1)
    shift = lse.masked_fill(lse == -math.inf, 0)  # for queries without visible keys
    weights = (logits - shift[..., None]).exp()[..., :keys]
    if keep is not None:
        weights = weights * keep
    return torch.einsum("bnqk,kbnd->qbnd", weights, value), lse.detach()

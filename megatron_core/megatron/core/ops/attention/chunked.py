# SPDX-License-Identifier: Apache-2.0
"""Attention by chunks of queries: any mask, never more than one [b, n, chunk, s_k] matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from megatron.core.ops.attention.masking import Mask
from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.dropout import AttentionDropout

QUERIES_PER_CHUNK = 128


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: Mask,
    dropout: AttentionDropout | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [s_q, b, n, d], lse [b, n, s_q]) in the accumulation dtype.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        scale: factor on the logits.
        mask: which keys a query sees.
        dropout: drops probabilities after the softmax, or None.
    """
    queries, batch, heads, features = query.shape
    wide = accumulation_dtype(query.dtype)
    keys, values = _by_group(key, wide), _by_group(value, wide)  # [b*g, s_k, d]
    starts = _starts(mask, queries, key.shape[0])
    out = torch.empty(query.shape, dtype=wide, device=query.device)
    lse = torch.empty((batch, heads, queries), dtype=wide, device=query.device)
    for rows, columns, hidden in _chunks(mask, query, key):
        if columns[0] == columns[1]:  # these queries see no key
            out[slice(*rows)], lse[:, :, slice(*rows)] = 0, -math.inf
            continue
        chunk = _query_rows(query[slice(*rows)], keys.shape[0] // batch, wide)  # [b*g, n/g*c, d]
        logits = torch.bmm(chunk.mul_(scale), keys[:, slice(*columns)].transpose(1, 2))
        shaped = logits.view(batch, heads, rows[1] - rows[0], -1)  # [b, n, c, k]
        if hidden is not None:
            shaped.masked_fill_(hidden, -math.inf)
        peak = shaped.amax(-1, keepdim=True)
        # A row that sees no key has peak -inf; shifting by 0 there keeps its sum 0, not nan.
        shift = peak.masked_fill(peak == -math.inf, 0)
        total = shaped.sub_(shift).exp_().sum(-1, keepdim=True)  # [b, n, c, 1]
        lse[:, :, slice(*rows)] = (shift + total.log())[..., 0]
        if dropout is not None:
            _drop_(shaped, dropout, rows, columns, starts)
        part = torch.bmm(logits, values[:, slice(*columns)]).view(batch, heads, -1, features)
        part.div_(total.masked_fill_(total == 0, 1))
        out[slice(*rows)] = part.permute(2, 0, 1, 3)
    return out, lse


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    mask: Mask,
    dropout: AttentionDropout | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute (dq, dk, dv) shaped and typed like query, key and value; see `forward`.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], complete.
        lse: [b, n, s_q], complete; may cover more keys than `key`.
        scale: factor on the logits.
        mask: which keys a query sees.
        dropout: that of the forward pass, or None.
    """
    queries, batch, heads, _ = query.shape
    groups = key.shape[2]
    wide = accumulation_dtype(query.dtype)
    keys, values = _by_group(key, wide), _by_group(value, wide)  # [b*g, s_k, d]
    starts = _starts(mask, queries, key.shape[0])
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, columns, hidden in _chunks(mask, query, key):
        span, part = slice(*columns), slice(*rows)
        if columns[0] == columns[1]:
            grad_query[part] = 0
            continue
        grad = _query_rows(grad_out[part], groups, wide)  # [b*g, n/g*c, d]
        delta = (grad * _query_rows(out[part], groups, wide)).sum(-1, keepdim=True)
        chunk = _query_rows(query[part], groups, wide).mul_(scale)
        offset = lse[:, :, part].to(wide).reshape(*delta.shape)  # [b*g, n/g*c, 1]
        # A row that sees no key has lse -inf: any finite offset then leaves its hidden logits 0.
        offset = offset.masked_fill(offset == -math.inf, 0).neg_()
        weights = torch.baddbmm(offset, chunk, keys[:, span].transpose(1, 2))
        shaped = weights.view(batch, heads, rows[1] - rows[0], -1)  # [b, n, c, k]
        if hidden is not None:
            shaped.masked_fill_(hidden, -math.inf)
        shaped.exp_()
        grad_weights = torch.bmm(grad, values[:, span].transpose(1, 2))
        dropped = weights
        if dropout is not None:
            dropped = weights.clone()
            _drop_(dropped.view_as(shaped), dropout, rows, columns, starts)
            _drop_(grad_weights.view_as(shaped), dropout, rows, columns, starts)
        grad_values[:, span].baddbmm_(dropped.transpose(1, 2), grad)
        grad_logits = grad_weights.sub_(delta).mul_(weights)
        grad_keys[:, span].baddbmm_(grad_logits.transpose(1, 2), chunk)
        grad_rows = torch.bmm(grad_logits, keys[:, span]).mul_(scale)  # [b*g, n/g*c, d]
        grad_query[part] = grad_rows.view(batch, heads, -1, query.shape[-1]).permute(2, 0, 1, 3)
    return grad_query, _by_position(grad_keys, key), _by_position(grad_values, value)


def _chunks(
    mask: Mask, query: torch.Tensor, key: torch.Tensor
) -> Iterator[tuple[tuple[int, int], tuple[int, int], torch.Tensor | None]]:
    """Yield ([first, last) query rows, [first, last) keys they can see, which pairs are hidden)."""
    queries, keys = query.shape[0], key.shape[0]
    shift, documents = mask.shift(queries, keys), mask.documents_of_queries(queries, keys)
    for first in range(0, queries, QUERIES_PER_CHUNK):
        rows = (first, min(first + QUERIES_PER_CHUNK, queries))
        columns = mask.key_range(*rows, queries, keys)
        yield (
            rows,
            columns,
            mask.hidden(rows, columns, shift=shift, documents=documents, device=query.device),
        )


def _starts(mask: Mask, queries: int, keys: int) -> tuple[int, int]:
    """Return the places of the first query and the first key."""
    return mask.key_start + mask.shift(queries, keys), mask.key_start


def _drop_(
    weights: torch.Tensor,
    dropout: AttentionDropout,
    rows: tuple[int, int],
    columns: tuple[int, int],
    starts: tuple[int, int],
) -> None:
    """Drop and rescale probabilities [b, n, c, k] in place."""
    places = torch.arange(*rows, device=weights.device) + starts[0]
    count = columns[1] - columns[0]
    kept = dropout.keep(weights.shape[1], places, starts[1] + columns[0], count)
    weights.mul_(kept).mul_(dropout.scale)


def _by_group(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn [s, b, g, d] into [b*g, s, d]."""
    return x.to(dtype).flatten(1, 2).transpose(0, 1)


def _by_position(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Turn [b*g, s, d] back into [s, b, g, d], shaped and typed like `like`."""
    return x.transpose(0, 1).reshape(like.shape).to(like.dtype)


def _query_rows(x: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy [c, b, n, d] to [b*g, n/g * c, d]: the heads that share a key head are its rows."""
    count, batch, heads, features = x.shape
    rows = torch.empty((batch, heads, count, features), dtype=dtype, device=x.device)
    rows.copy_(x.permute(1, 2, 0, 3))
    return rows.view(batch * groups, heads // groups * count, features)

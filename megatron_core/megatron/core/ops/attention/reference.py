# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch: torch's flash kernel for the plain CPU cases, else by query chunks.

Which keys a query may see: causal order, a left window, documents.

Attention by chunks of queries: any mask, never more than one [b, n, chunk, s_k] matrix.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from megatron.core.ops.backend_choice import accumulation_dtype, matmul_dtype
from megatron.core.ops.dropout import AttentionDropout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The visibility rule of one attention call.

    Queries and keys are neighbouring tokens of a row: query i stands at place query_start + i, key
    j at key_start + j. Order, window and dropout go by places.

    Args:
        causal: a query sees no later key.
        window: a query at place q sees only keys k with q - k < window.
        document_ids: int [s_k, b], the keys' documents; tokens see only their own document.
        query_document_ids: int [s_q, b]; None takes them from the keys that stand where the
            queries do.
        query_start: place of the first query; None where the queries are the last of the keys.
        key_start: place of the first key.
        cu_seqlens: int32 [documents + 1], where the documents of `document_ids` begin in whole rows
            that lie one after the other; None where only their ids are known. Fused kernels skip
            other documents by it.
        max_seqlen: a bound on the tokens of a document; None is the length of a row.
    """

    causal: bool = True
    window: int | None = None
    document_ids: torch.Tensor | None = None
    query_document_ids: torch.Tensor | None = None
    query_start: int | None = None
    key_start: int = 0
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None

    def shift(self, queries: int, keys: int) -> int:
        """Return how many places the first query stands behind the first key."""
        return keys - queries if self.query_start is None else self.query_start - self.key_start

    def documents_of_queries(self, queries: int, keys: int) -> torch.Tensor | None:
        """Return int [s_q, b], or None without documents."""
        if self.query_document_ids is not None or self.document_ids is None:
            return self.query_document_ids
        shift = self.shift(queries, keys)
        return self.document_ids[shift : shift + queries]

    def key_range(self, rows: tuple[int, int], *, shift: int, keys: int) -> tuple[int, int]:
        """Bound the keys that query rows [first, last) can see, as [low, high).

        `shift` is that of `shift`.
        """
        high = min(max(rows[1] + shift, 0), keys) if self.causal else keys
        low = 0
        if self.window is not None:
            low = min(max(rows[0] + shift - self.window + 1, 0), keys)
        return low, high

    def hidden(
        self,
        rows: tuple[int, int],
        columns: tuple[int, int],
        *,
        shift: int,
        documents: torch.Tensor | None,
        device: torch.device,
    ) -> torch.Tensor | None:
        """Mark the (query, key) pairs that must not see each other.

        Args:
            rows: [first, last) query rows.
            columns: [first, last) keys.
            shift: as `shift` returns it.
            documents: as `documents_of_queries` returns them.
            device: where to put the result.

        Returns:
            bool [1 or b, 1, q, k], True where hidden, or None where every pair is visible.
        """
        hidden = None
        later = self.causal and columns[1] - 1 > rows[0] + shift
        earlier = self.window is not None and rows[1] - 1 + shift - columns[0] >= self.window
        if later or earlier:
            positions = torch.arange(*rows, device=device)[:, None] + shift  # [q, 1]
            keys = torch.arange(*columns, device=device)  # [k]
            if later:
                hidden = keys > positions
            if earlier:
                outside = positions - keys >= self.window
                hidden = outside if hidden is None else hidden | outside
            hidden = hidden[None, None]  # [1, 1, q, k]
        if self.document_ids is not None and documents is not None:
            mine = documents[slice(*rows)].t()  # [b, q]
            other = self.document_ids[columns[0] : columns[1]].t()  # [b, k]
            foreign = mine[:, None, :, None] != other[:, None, None, :]  # [b, 1, q, k]
            hidden = foreign if hidden is None else hidden | foreign
        return hidden


QUERIES_PER_CHUNK = 128


def chunked_forward(
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
            _drop_(shaped, dropout, rows, columns, _starts(mask, queries, key.shape[0]))
        part = torch.bmm(logits, values[:, slice(*columns)]).view(batch, heads, -1, features)
        part.div_(total.masked_fill_(total == 0, 1))
        out[slice(*rows)] = part.permute(2, 0, 1, 3)
    return out, lse


def chunked_backward(
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
    """Compute (dq, dk, dv) shaped and typed like query, key and value; see `chunked_forward`.

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
            starts = _starts(mask, queries, key.shape[0])
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
        columns = mask.key_range(rows, shift=shift, keys=keys)
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


_QUERIES_WORTH_PACKING = 256

#: From how many queries on torch's backward kernel is faster in bf16, where products are. Against
#: fp32 and its conversions it runs at 0.2 of the speed with 16 tokens, 0.7 with 128, 1.2 with 512
#: and 1.2 to 1.4 with more (AMD EPYC, avx512_bf16); with AMX, too, it is slower below 512.
_QUERIES_WORTH_NARROW = 512


class Attention(torch.autograd.Function):
    """out = softmax(scale q k^T + mask) v, and lse, the log of the softmax denominator.

    Forward: as above. dgrad: p = exp(scale q k^T - lse); dv = p^T g; ds = p (g v^T - rowsum(g
    out)); dq = scale ds k; dk = scale ds^T q. wgrad (sinks): -sum of exp(sink - lse) rowsum(g
    out). Saves q, k, v, out and lse. `forward_of` and `backward_of` are `attention_forward` and
    `attention_backward` of this module or of `triton`.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, forward_of, backward_of, options):
        out, lse = forward_of(query, key, value, sinks, **options)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.backward_of, ctx.options = backward_of, options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for lse
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grads = ctx.backward_of(grad_out, query, key, value, out, lse, **ctx.options)
        grad_sinks = sink_gradient(grad_out, out, lse, sinks) if sinks is not None else None
        return *grads, grad_sinks, None, None, None


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    mask: Mask,
    dropout: AttentionDropout | None = None,
    dtype: torch.dtype | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [s_q, b, n, d], lse [b, n, s_q]); see `ops.attention.attention`.

    `dtype` is that of `out`; None is that of `query`. `cpu_dtype` is that of `matmul_dtype`.
    """
    if dropout is not None and dropout.rate == 0:
        dropout = None
    if _has_flash(query, key, mask, dropout):
        fast = matmul_dtype(query, cpu_dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(query, fast),
            *(_packed(x, fast, query) for x in (key, value)),
            0.0,
            mask.causal,
            scale=scale,
        )
        out = _sequence_first(out)
        lse = lse.to(accumulation_dtype(query.dtype))
    else:
        out, lse = chunked_forward(query, key, value, scale, mask, dropout)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.to(query.dtype if dtype is None else dtype).contiguous(), lse.contiguous()


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a part of the probability to one more logit per head, which carries no value.

    Args:
        out: [s_q, b, n, d], of attention to all keys.
        lse: [b, n, s_q].
        sinks: [n].

    Returns:
        (out, lse) with the sinks, new tensors.
    """
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])  # [b, n, s_q]
    share = (lse - with_sink).exp_()
    return out * share.permute(2, 0, 1)[..., None], with_sink  # out times [s_q, b, n, 1]


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    mask: Mask,
    dropout: AttentionDropout | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate attention given its output and log-sum-exp, over these or over more keys.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], the complete output (also of keys that are not in `key`).
        lse: [b, n, s_q], the complete log-sum-exp.
        scale: factor on the logits.
        mask: the rule of the forward pass.
        dropout: that of the forward pass.
        cpu_dtype: that of `matmul_dtype`.

    Returns:
        (dq, dk, dv), shaped and typed like query, key and value.
    """
    if dropout is not None and dropout.rate == 0:
        dropout = None
    if not _has_flash(query, key, mask, dropout):
        return chunked_backward(grad_out, query, key, value, out, lse, scale, mask, dropout)
    fast = backward_dtype(query, query.shape[0], cpu_dtype)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_heads_first(x, fast) for x in (grad_out, query)),
        *(_packed(x, fast, query) for x in (key, value)),
        _heads_first(out, fast),
        lse,
        0.0,
        mask.causal,
        scale=scale,
    )
    return tuple(_sequence_first(grad).to(query.dtype) for grad in grads)


def backward_dtype(query: torch.Tensor, queries: int, cpu_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which to differentiate attention of so many queries at a time."""
    dtype = matmul_dtype(query, cpu_dtype)
    narrow = dtype.itemsize == 2 and query.device.type == "cpu"
    return torch.float32 if narrow and queries < _QUERIES_WORTH_NARROW else dtype


def sink_gradient(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Differentiate the sinks [n]: minus the sum of sink probability times rowsum(g out)."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [s_q, b, n]
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp_()  # [b, n, s_q]
    return torch.einsum("bnq,qbn->n", probability, delta).neg_().to(sinks.dtype)


def _has_flash(
    query: torch.Tensor, key: torch.Tensor, mask: Mask, dropout: AttentionDropout | None
) -> bool:
    """Say whether torch's CPU flash kernel computes exactly this attention.

    Its causal mask counts from the first key, so queries that stand behind the first of the keys
    need chunks.
    """
    plain = mask.window is None and mask.document_ids is None and dropout is None
    queries, keys = query.shape[0], key.shape[0]
    together = mask.query_start is None or mask.query_start == mask.key_start
    aligned = not mask.causal or (queries == keys and together)
    filled = query.numel() > 0 and key.numel() > 0
    return plain and aligned and filled and query.device.type == "cpu"


def _heads_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View [s, b, n, d] as [b, n, s, d], or copy it there where the dtype changes anyway.

    torch's kernel takes strided inputs and lays its output out like the query.
    """
    if x.dtype == dtype:
        return x.permute(1, 2, 0, 3)
    sequence, batch, heads, features = x.shape
    copy = torch.empty((batch, heads, sequence, features), dtype=dtype, device=x.device)
    return copy.copy_(x.permute(1, 2, 0, 3))


def _packed(x: torch.Tensor, dtype: torch.dtype, query: torch.Tensor) -> torch.Tensor:
    """Turn keys or values [s, b, g, d] into [b, g, s, d], a head's rows side by side if it pays.

    The kernel reads them again for every block of queries, and rows a power of two apart share few
    cache sets: at 512 positions of 4 sequences the copy makes it 12-15 % faster.
    """
    x = _heads_first(x, dtype)
    return x if query.shape[0] < _QUERIES_WORTH_PACKING else x.contiguous()


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    """View [b, n, s, d] as [s, b, n, d]."""
    return x.permute(2, 0, 1, 3)

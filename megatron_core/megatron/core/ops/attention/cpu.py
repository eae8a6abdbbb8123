# SPDX-License-Identifier: Apache-2.0
"""Attention in plain PyTorch, and the mask of an attention call.

Plain causal or full attention on a CPU uses torch's flash kernel. All other cases (a sliding
window, documents, a soft cap, dropout) loop over chunks of queries and never hold more than one
[b, n, chunk, s_k] matrix.
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
    """The mask of one attention call, and the bound of the logits before it.

    Query i has position query_start + i, key j position key_start + j. Causality, window and
    dropout depend on positions.

    Args:
        causal: whether later keys are masked.
        window: a query at position q attends only to keys k with q - k < window.
        softcap: bound c of logits x, which become c tanh(x / c); None for none.
        document_ids: int [s_k, b], the keys' documents; tokens attend only to their own document.
        query_document_ids: int [s_q, b]; None reads the keys' documents at the queries' positions.
        query_start: position of the first query; None if the queries are the last of the keys.
        key_start: position of the first key.
        cu_seqlens: int32 [documents + 1], starts of the documents of `document_ids` in the
            concatenated rows; None if unknown. Fused kernels need it to skip other documents.
        max_seqlen: upper bound on the tokens of a document; None is the length of a row.
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    document_ids: torch.Tensor | None = None
    query_document_ids: torch.Tensor | None = None
    query_start: int | None = None
    key_start: int = 0
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None

    def shift(self, queries: int, keys: int) -> int:
        """Return the first query's position minus the first key's position."""
        return keys - queries if self.query_start is None else self.query_start - self.key_start

    def documents_of_queries(self, queries: int, keys: int) -> torch.Tensor | None:
        """Return int [s_q, b], or None without documents."""
        if self.query_document_ids is not None or self.document_ids is None:
            return self.query_document_ids
        shift = self.shift(queries, keys)
        return self.document_ids[shift : shift + queries]

    def key_range(self, rows: tuple[int, int], *, shift: int, keys: int) -> tuple[int, int]:
        """Return bounds [low, high) of the keys visible to a range of query rows.

        Args:
            rows: [start, stop) of the query rows.
            shift: as `shift` returns it.
            keys: number of keys.
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
        """Return the mask of a block of (query, key) pairs.

        Args:
            rows: [start, stop) of the query rows.
            columns: [start, stop) of the keys.
            shift: as `shift` returns it.
            documents: as `documents_of_queries` returns them.
            device: of the mask.

        Returns:
            bool [1 or b, 1, q, k], True for masked pairs, or None if every pair is visible.
        """
        hidden = None
        later = self.causal and columns[1] - 1 > rows[0] + shift
        window = math.inf if self.window is None else self.window
        earlier = rows[1] - 1 + shift - columns[0] >= window
        if later or earlier:
            positions = torch.arange(*rows, device=device)[:, None] + shift  # [q, 1]
            keys = torch.arange(*columns, device=device)  # [k]
            if later:
                hidden = keys > positions
            if earlier:
                outside = positions - keys >= window
                hidden = outside if hidden is None else hidden | outside
            assert hidden is not None
            hidden = hidden[None, None]  # [1, 1, q, k]
        if self.document_ids is not None and documents is not None:
            query_ids = documents[slice(*rows)].t()  # [b, q]
            key_ids = self.document_ids[columns[0] : columns[1]].t()  # [b, k]
            differ = query_ids[:, None, :, None] != key_ids[:, None, None, :]  # [b, 1, q, k]
            hidden = differ if hidden is None else hidden | differ
        return hidden


#: Query rows whose logits are materialized at a time.
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
        mask: of the call.
        dropout: of the probabilities, or None.
    """
    queries, batch, heads, features = query.shape
    dtype = accumulation_dtype(query.dtype)
    keys, values = _by_group(key, dtype), _by_group(value, dtype)  # [b*g, s_k, d]
    out = torch.empty(query.shape, dtype=dtype, device=query.device)
    lse = torch.empty((batch, heads, queries), dtype=dtype, device=query.device)
    for rows, columns, hidden in _chunks(mask, query, key):
        if columns[0] == columns[1]:  # no visible key
            out[slice(*rows)], lse[:, :, slice(*rows)] = 0, -math.inf
            continue
        chunk = _query_rows(query[slice(*rows)], keys.shape[0] // batch, dtype)  # [b*g, n/g*c, d]
        logits = torch.bmm(chunk.mul_(scale), keys[:, slice(*columns)].transpose(1, 2))
        if mask.softcap is not None:
            logits.div_(mask.softcap).tanh_().mul_(mask.softcap)
        weights = logits.view(batch, heads, rows[1] - rows[0], -1)  # [b, n, c, k], same storage
        if hidden is not None:
            weights.masked_fill_(hidden, -math.inf)
        peak = weights.amax(-1, keepdim=True)
        # A row without a visible key has peak -inf: subtract 0, because -inf - -inf is NaN.
        offset = peak.masked_fill(peak == -math.inf, 0)
        denominator = weights.sub_(offset).exp_().sum(-1, keepdim=True)  # [b, n, c, 1]
        lse[:, :, slice(*rows)] = (offset + denominator.log())[..., 0]
        if dropout is not None:
            _drop_(weights, dropout, rows, columns, _starts(mask, queries, key.shape[0]))
        chunk_out = torch.bmm(logits, values[:, slice(*columns)]).view(batch, heads, -1, features)
        chunk_out.div_(denominator.masked_fill_(denominator == 0, 1))
        out[slice(*rows)] = chunk_out.permute(2, 0, 1, 3)
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
        mask, dropout: of the forward pass.
    """
    queries, batch, heads, _ = query.shape
    groups = key.shape[2]
    dtype = accumulation_dtype(query.dtype)
    keys, values = _by_group(key, dtype), _by_group(value, dtype)  # [b*g, s_k, d]
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, columns, hidden in _chunks(mask, query, key):
        key_slice, query_slice = slice(*columns), slice(*rows)
        if columns[0] == columns[1]:
            grad_query[query_slice] = 0
            continue
        grad = _query_rows(grad_out[query_slice], groups, dtype)  # [b*g, n/g*c, d]
        delta = (grad * _query_rows(out[query_slice], groups, dtype)).sum(-1, keepdim=True)
        chunk = _query_rows(query[query_slice], groups, dtype).mul_(scale)
        offset = lse[:, :, query_slice].to(dtype).reshape(*delta.shape)  # [b*g, n/g*c, 1]
        # A row without a visible key has lse -inf: any finite offset leaves its weights 0.
        offset = offset.masked_fill(offset == -math.inf, 0).neg_()
        weights, slope = _shifted_logits(offset, chunk, keys[:, key_slice], mask.softcap)
        # A view [b, n, c, k] of the weights.
        head_weights = weights.view(batch, heads, rows[1] - rows[0], -1)
        if hidden is not None:
            head_weights.masked_fill_(hidden, -math.inf)
        head_weights.exp_()
        grad_weights = torch.bmm(grad, values[:, key_slice].transpose(1, 2))
        dropped = weights
        if dropout is not None:
            starts = _starts(mask, queries, key.shape[0])
            dropped = weights.clone()
            _drop_(dropped.view_as(head_weights), dropout, rows, columns, starts)
            _drop_(grad_weights.view_as(head_weights), dropout, rows, columns, starts)
        grad_values[:, key_slice].baddbmm_(dropped.transpose(1, 2), grad)
        grad_logits = grad_weights.sub_(delta).mul_(weights)
        if slope is not None:
            grad_logits.mul_(slope)
        grad_keys[:, key_slice].baddbmm_(grad_logits.transpose(1, 2), chunk)
        grad_rows = torch.bmm(grad_logits, keys[:, key_slice]).mul_(scale)  # [b*g, n/g*c, d]
        grad_rows = grad_rows.view(batch, heads, -1, query.shape[-1])
        grad_query[query_slice] = grad_rows.permute(2, 0, 1, 3)
    return grad_query, _by_position(grad_keys, key), _by_position(grad_values, value)


def _shifted_logits(
    offset: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits plus an offset [b*g, n/g*c, 1], and the derivative of the soft cap or None."""
    if softcap is None:
        return torch.baddbmm(offset, queries, keys.transpose(1, 2)), None
    bounded = torch.bmm(queries, keys.transpose(1, 2)).div_(softcap).tanh_()  # in (-1, 1)
    return bounded.mul(softcap).add_(offset), bounded.square_().neg_().add_(1.0)


def _chunks(
    mask: Mask, query: torch.Tensor, key: torch.Tensor
) -> Iterator[tuple[tuple[int, int], tuple[int, int], torch.Tensor | None]]:
    """Yield ([start, stop) query rows, [start, stop) visible keys, mask of the block or None)."""
    queries, keys = query.shape[0], key.shape[0]
    shift, documents = mask.shift(queries, keys), mask.documents_of_queries(queries, keys)
    for start in range(0, queries, QUERIES_PER_CHUNK):
        rows = (start, min(start + QUERIES_PER_CHUNK, queries))
        columns = mask.key_range(rows, shift=shift, keys=keys)
        yield (
            rows,
            columns,
            mask.hidden(rows, columns, shift=shift, documents=documents, device=query.device),
        )


def _starts(mask: Mask, queries: int, keys: int) -> tuple[int, int]:
    """Return the positions of the first query and the first key."""
    return mask.key_start + mask.shift(queries, keys), mask.key_start


def _drop_(
    weights: torch.Tensor,
    dropout: AttentionDropout,
    rows: tuple[int, int],
    columns: tuple[int, int],
    starts: tuple[int, int],
) -> None:
    """Drop and rescale probabilities [b, n, c, k] in place."""
    positions = torch.arange(*rows, device=weights.device) + starts[0]
    num_keys = columns[1] - columns[0]
    keep_mask = dropout.keep(weights.shape[1], positions, starts[1] + columns[0], num_keys)
    weights.mul_(keep_mask).mul_(dropout.scale)


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


#: Smallest number of queries for which keys and values are copied, see `_packed`.
_MIN_PACKED_QUERIES = 256

#: Smallest number of queries for which torch's backward kernel is faster in bf16, on a CPU whose
#: matmuls are. Relative to fp32 with its conversions the speed is 0.2 with 16 tokens, 0.7 with 128,
#: 1.2 with 512 and 1.2 to 1.4 with more (AMD EPYC, avx512_bf16); with AMX it is also slower below
#: 512.
_MIN_BF16_QUERIES = 512


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

    Args:
        dtype: of `out`; None is the query's dtype.
        cpu_dtype: see `ops.backend_choice.matmul_dtype`.
    """
    if dropout is not None and dropout.rate == 0:
        dropout = None
    if _has_flash(query, key, mask, dropout):
        operand_dtype = matmul_dtype(query, cpu_dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(query, operand_dtype),
            *(_packed(x, operand_dtype, query) for x in (key, value)),
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
    """Add one logit per head to the softmax, whose value is zero.

    Args:
        out: [s_q, b, n, d], of attention to all keys.
        lse: [b, n, s_q].
        sinks: [n].

    Returns:
        (out, lse) with the sinks, new tensors.
    """
    lse_with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])  # [b, n, s_q]
    key_probability = (lse - lse_with_sink).exp_()
    return out * key_probability.permute(2, 0, 1)[..., None], lse_with_sink  # [s_q, b, n, 1]


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
    """Differentiate attention given its output and log-sum-exp, which may cover more keys.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], the complete output (also of keys that are not in `key`).
        lse: [b, n, s_q], the complete log-sum-exp.
        scale: factor on the logits.
        mask, dropout: of the forward pass.
        cpu_dtype: see `ops.backend_choice.matmul_dtype`.

    Returns:
        (dq, dk, dv), shaped and typed like query, key and value.
    """
    if dropout is not None and dropout.rate == 0:
        dropout = None
    if not _has_flash(query, key, mask, dropout):
        return chunked_backward(grad_out, query, key, value, out, lse, scale, mask, dropout)
    operand_dtype = backward_dtype(query, query.shape[0], cpu_dtype)
    d_query, d_key, d_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_heads_first(x, operand_dtype) for x in (grad_out, query)),
        *(_packed(x, operand_dtype, query) for x in (key, value)),
        _heads_first(out, operand_dtype),
        lse,
        0.0,
        mask.causal,
        scale=scale,
    )
    dtype = query.dtype
    return (
        _sequence_first(d_query).to(dtype),
        _sequence_first(d_key).to(dtype),
        _sequence_first(d_value).to(dtype),
    )


def backward_dtype(query: torch.Tensor, queries: int, cpu_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the operands of the backward, by the number of queries."""
    dtype = matmul_dtype(query, cpu_dtype)
    is_16_bit_cpu = dtype.itemsize == 2 and query.device.type == "cpu"
    return torch.float32 if is_16_bit_cpu and queries < _MIN_BF16_QUERIES else dtype


def sink_gradient(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the sinks' gradient [n]: -Σ sink probability · rowsum(g out)."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [s_q, b, n]
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp_()  # [b, n, s_q]
    return torch.einsum("bnq,qbn->n", probability, delta).neg_().to(sinks.dtype)


def _has_flash(
    query: torch.Tensor, key: torch.Tensor, mask: Mask, dropout: AttentionDropout | None
) -> bool:
    """Return whether torch's CPU flash kernel supports this attention.

    Its causal mask aligns the first query with the first key, so queries at other positions need
    chunks.
    """
    plain = mask.window is None and mask.document_ids is None and dropout is None
    plain = plain and mask.softcap is None
    queries, keys = query.shape[0], key.shape[0]
    same_start = mask.query_start is None or mask.query_start == mask.key_start
    aligned = not mask.causal or (queries == keys and same_start)
    nonempty = query.numel() > 0 and key.numel() > 0
    return plain and aligned and nonempty and query.device.type == "cpu"


def _heads_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View [s, b, n, d] as [b, n, s, d], or copy it if the dtype changes.

    torch's kernel accepts strided inputs, and its output has the query's layout.
    """
    if x.dtype == dtype:
        return x.permute(1, 2, 0, 3)
    sequence, batch, heads, features = x.shape
    copy = torch.empty((batch, heads, sequence, features), dtype=dtype, device=x.device)
    return copy.copy_(x.permute(1, 2, 0, 3))


def _packed(x: torch.Tensor, dtype: torch.dtype, query: torch.Tensor) -> torch.Tensor:
    """Turn keys or values [s, b, g, d] into [b, g, s, d], contiguous for many queries.

    The kernel reads keys again for every block of queries, and rows a power of two apart map to
    few cache sets: at 512 positions of 4 sequences the copy makes the kernel 12-15 % faster.
    """
    x = _heads_first(x, dtype)
    return x if query.shape[0] < _MIN_PACKED_QUERIES else x.contiguous()


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    """View [b, n, s, d] as [s, b, n, d]."""
    return x.permute(2, 0, 1, 3)

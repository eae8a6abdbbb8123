# SPDX-License-Identifier: Apache-2.0
"""Attention block by block, merged by the log-sum-exp, and its backward pass.

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

(online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867). A block is one call of the op, so a
row that is cut over ranks or packed with documents needs no mask but the op's own, and no pair of
two documents is ever computed. Given the complete out and lse, backward is a sum over blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron.core.context_parallel.blocks import Block, Blocks
from megatron.core.ops.attention import Mask, reference
from megatron.core.ops.dispatch import accumulation_dtype, choose, matmul_dtype
from megatron.core.ops.dropout import AttentionDropout

#: On a CPU one more block costs what a mask by document ids costs for this many (query, key, head)
#: of causal rows. Measured on one thread, forward and backward: 0.17 ms a block, the two equal at
#: 3,500 to 5,100 (128 to 1024 tokens, 4 and 8 heads of 16 to 64 features: documents of 15 tokens in
#: rows of 128, of 4 in rows of 256 with 8 heads); twice that, as masks gain more from threads.
PAIRS_WORTH_A_BLOCK = 10_000


class _Rule(NamedTuple):
    """What all blocks of an attention share."""

    scale: float
    window: int | None
    dropout: AttentionDropout | None
    cpu_dtype: torch.dtype | None


def worth_blocks(count: int, *, rows: int, length: int, heads: int) -> bool:
    """Say whether causal attention on a CPU is faster in blocks than with a mask by document ids.

    Documents of 64 tokens in rows of 256 to 1024 are 3 to 9 times faster in blocks.

    Args:
        count: of blocks: of documents, where rows are whole.
        rows: b.
        length: s.
        heads: n/tp.
    """
    return rows * length * (length + 1) // 2 * heads >= PAIRS_WORTH_A_BLOCK * count


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[Block],
    *,
    scale: float,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys of all blocks; a query that is in none gets out 0 and lse -inf.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        blocks: which queries see which keys, every pair in one block; `Blocks` keep what is worked
            out of them for the next call.
        scale: factor on the logits.
        window: a query at place q sees only keys k with q - k < window.
        dropout: drops probabilities, by place.
        into: a former result over other keys; this one is merged into it, in place.
        cpu_dtype: what a CPU multiplies 16-bit operands in, see `ops.dispatch.matmul_dtype`.

    Returns:
        (out [s_q, b, n, d], lse [b, n, s_q]), both fp32 (fp64 for fp64): see `finish`.
    """
    wide = accumulation_dtype(query.dtype)
    # Converted once here, not in every block.
    query, key, value = (x.to(matmul_dtype(x, cpu_dtype)) for x in (query, key, value))
    rule = _Rule(scale, window, dropout, cpu_dtype)
    if into is None and len(blocks) == 1 and _holds_all(blocks[0], query):
        return _block_forward(query, key, value, blocks[0], rule)
    if into is None:
        _, is_first, is_full = Blocks.of(blocks).visits("query", query.shape[1], query.shape[0])
        out = torch.empty(query.shape, dtype=wide, device=query.device)
        lse = torch.empty((*query.shape[1:3], query.shape[0]), dtype=wide, device=query.device)
        if not is_full:
            out.zero_()
            lse.fill_(-math.inf)
    else:
        is_first, (out, lse) = (False,) * len(blocks), into
    for block, first in zip(blocks, is_first, strict=True):
        part, part_lse = _block_forward(query, key, value, block, rule)
        rows, queries = slice(block.row0, block.row1), slice(block.q0, block.q1)
        whole, whole_lse = out[queries, rows], lse[rows, :, queries]
        if first:
            whole.copy_(part)
            whole_lse.copy_(part_lse)
        else:
            merge(whole, whole_lse, part, part_lse)
    return out, lse


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Sequence[Block],
    *,
    scale: float,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
    wide: bool = False,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate the attention to the keys of these blocks; sums over blocks are fp32.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], the complete output: of all blocks of all ranks, and of sinks.
        lse: [b, n, s_q], the complete log-sum-exp.
        blocks: those of the forward pass that lie between these queries and keys.
        scale, window, dropout, cpu_dtype: those of the forward pass.
        wide: return the sums as they are, in fp32 (fp64 for fp64), to be added to others.

    Returns:
        (dq, dk, dv), shaped like query, key and value, in their dtype or wide.
    """
    kind = accumulation_dtype(query.dtype) if wide else query.dtype
    shortest = min((block.q1 - block.q0 for block in blocks), default=0)
    if window is not None or dropout is not None:
        shortest = 0  # by chunks, which compute in fp32
    dtype = reference.backward_dtype(query, shortest, cpu_dtype)
    fast = [x.to(dtype) for x in (grad_out, query, key, value, out)]
    rule = _Rule(scale, window, dropout, cpu_dtype)
    if len(blocks) == 1 and _holds_all(blocks[0], query, key):
        return tuple(x.to(kind) for x in _block_backward(fast, lse, blocks[0], rule))
    blocks = Blocks.of(blocks)
    sums, visits = [], []
    for x, side in ((query, "query"), (key, "key"), (value, "key")):
        visits.append(blocks.visits(side, x.shape[1], x.shape[0]))
        make = torch.empty if visits[-1].covers else torch.zeros
        sums.append(make(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device))
    for index, block in enumerate(blocks):
        parts = _block_backward(fast, lse, block, rule)
        for total, part, visit in zip(sums, parts, visits, strict=True):
            row0, row1, first, last = visit.places[index]
            target = total[first:last, row0:row1]
            target.copy_(part) if visit.is_first[index] else target.add_(part)
    return tuple(x.to(kind) for x in sums)


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Merge attention to other keys into (out, lse), in place; exact where either saw no key.

    Args:
        out: [s_q, b, n, d], fp32 or fp64.
        lse: [b, n, s_q], -inf where nothing was seen; out is 0 there.
        other: [s_q, b, n, d], to be merged.
        other_lse: [b, n, s_q].
    """
    # exp(lse_i - total) by the difference of the two, which keeps its digits where both are large.
    # What saw nothing on either side has no difference, and no output to weigh.
    ahead = (lse - other_lse).nan_to_num_(0.0, math.inf, -math.inf)  # [b, n, s_q]
    torch.logaddexp(lse, other_lse, out=lse)
    keep, take = (x.permute(2, 0, 1)[..., None] for x in (ahead.sigmoid(), ahead.neg_().sigmoid_()))
    # Not lerp: it is one pass and 15 times slower than these two (torch 2.13, [1024, 4, 8, 64]).
    out.mul_(keep).addcmul_(other, take)


def finish(
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let sinks [n] take their probability, once, after all keys; return out in `dtype`, and lse.

    Their gradient is `ops.attention.reference.sink_gradient` of the complete out and lse.
    """
    if sinks is not None:
        out, lse = reference.add_sinks(out, lse, sinks)
    return out.to(dtype), lse


def _block_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: Block,
    rule: _Rule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of one block, fp32 or fp64."""
    dropout = rule.dropout
    rows, keys = slice(block.row0, block.row1), slice(block.k0, block.k1)
    parts = (query[block.q0 : block.q1, rows], key[keys, rows], value[keys, rows])
    mask, wide = _mask(block, rule), accumulation_dtype(query.dtype)
    if choose(None, query, "attention", has_triton=dropout is None) == "triton":
        from megatron.core.ops.attention import triton as kernels

        return kernels.attention_forward(*parts, None, rule.scale, mask, dtype=wide)
    return reference.attention_forward(
        *parts,
        None,
        rule.scale,
        mask,
        _of_block(dropout, block),
        dtype=wide,
        cpu_dtype=rule.cpu_dtype,
    )


def _block_backward(
    tensors: Sequence[torch.Tensor],
    lse: torch.Tensor,
    block: Block,
    rule: _Rule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) of one block from all of (grad_out, query, key, value, out) and lse."""
    dropout = rule.dropout
    rows = slice(block.row0, block.row1)
    queries, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
    spans = (queries, queries, keys, keys, queries)
    parts = [x[span, rows] for x, span in zip(tensors, spans, strict=True)]
    parts.append(lse[rows, :, queries])
    mask = _mask(block, rule)
    if choose(None, tensors[1], "attention", has_triton=dropout is None) == "triton":
        from megatron.core.ops.attention import triton as kernels

        return kernels.attention_backward(*parts, scale=rule.scale, mask=mask)
    return reference.attention_backward(
        *parts,
        scale=rule.scale,
        mask=mask,
        dropout=_of_block(dropout, block),
        cpu_dtype=rule.cpu_dtype,
    )


def _mask(block: Block, rule: _Rule) -> Mask:
    """Return the op's rule of one block, without a window that hides none of its pairs.

    Dropout counts in places of a sample, which has all documents of a block, and so all its tokens.
    """
    window, dropout = rule.window, rule.dropout
    first = _sample(dropout, block) * (dropout.sample_length or 0) if dropout is not None else 0
    if window is not None:
        farthest = block.q_place + block.q1 - block.q0 - 1 - block.k_place
        window = window if farthest >= window else None
    return Mask(
        causal=block.causal,
        window=window,
        query_start=block.q_place - first,
        key_start=block.k_place - first,
    )


def _of_block(dropout: AttentionDropout | None, block: Block) -> AttentionDropout | None:
    """Return the dropout of a block's rows of the batch, or of the sample that it is of."""
    if dropout is None:
        return None
    samples = slice(block.row0, block.row1)
    if dropout.sample_length is not None:
        samples = slice(_sample(dropout, block), _sample(dropout, block) + 1)
    return replace(dropout, sample_ids=dropout.sample_ids[samples], sample_length=None)


def _sample(dropout: AttentionDropout, block: Block) -> int:
    """Return the number of the sample in its row that a block is of."""
    return 0 if dropout.sample_length is None else block.q_place // dropout.sample_length


def _holds_all(block: Block, query: torch.Tensor, key: torch.Tensor | None = None) -> bool:
    """Say whether a block holds all queries [s_q, b, ...] and, if given, all keys [s_k, b, ...]."""
    keys = (block.k0, block.k1) if key is None else (0, key.shape[0])
    whole = Block(0, query.shape[1], 0, query.shape[0], *keys, block.q_place, block.k_place, False)
    return replace(block, causal=False) == whole

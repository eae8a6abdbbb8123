# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain PyTorch: gather the keys from their pages, then attend.

The leading rows with few new tokens are computed in one call, with every token as a row of its
own; all other rows are computed one by one. The host reads the lengths, so on a GPU this waits for
the device; the Triton kernel does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.ops.attention.cpu import Mask, add_sinks, attention_forward
from megatron.core.ops.backend_choice import accumulation_dtype, matmul_dtype

#: Most new tokens of a row, and most new tokens times context, whose tokens are separate rows:
#: gathering the keys once per token then takes less time than a call for the row.
MAX_DECODE_TOKENS, MAX_DECODE_KEYS = 8, 1 << 12

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class GatherIndices(NamedTuple):
    """Gather indices of a batch, computed once for each window and block size.

    Args:
        bounds: start and end of each row's new tokens, [0, ...].
        contexts: tokens of each row in the cache.
        rows: number of leading rows with few new tokens.
        decoding: number of new tokens in the leading rows; each token is a row of its own.
        slots: int64 [decoding * k], the slot of each visible key; a token with fewer than k visible
            keys repeats a key. None with a slot range.
        mask: [decoding, 1, 1, k], added to logits: -inf for repeated keys, else 0; None if no token
            repeats a key.
        slot_range: (first slot, k) if a single token decodes and its slots are contiguous.
    """

    bounds: list[int]
    contexts: list[int]
    rows: int
    decoding: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None
    slot_range: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """The rows of one engine step: packed new tokens, and the pages of their contexts.

    A page is a block of the cache. Token p of row i is in page block_table[i, p // block_size] at
    offset p % block_size. The new tokens of a row are the last of its context, and their keys
    and values must be in the cache before attention runs. The host never reads the tensors on the
    device; it uses two upper bounds instead. A CUDA graph can therefore be captured with the bounds
    of its bucket, and replayed with any batch within them.

    Padding has no effect. A row of context length 0 gets out 0 and lse -inf for its tokens, and so
    do tokens after the last row; a row without new tokens is skipped. Entries of the block table
    after a context, or entirely before the window, are never read and may hold anything.

    The reference caches its gather indices for all layers, and `ops.tiled_attention` caches its
    tiles in `tiles` by window. Create a new batch for each step, or call `numbers_replaced` after
    writing to the tensors.

    Args:
        block_table: int32 [b, blocks of a row].
        query_bounds: int32 [b + 1], start of each row's new tokens; the first is 0.
        context_lengths: int32 [b], tokens of each row in the cache, including the new tokens.
        max_query: upper bound on the new tokens of a row.
        max_context: upper bound on the context of a row.
        cpu_dtype: dtype in which a CPU multiplies 16-bit operands, see
            `ops.backend_choice.matmul_dtype`.
        recorded: for a captured step that is replayed with different contents. Every row, also
            padding, has one new token, and the reference does not read lengths on the host
            either: it gathers `max_context` keys of each row.

    Raises:
        ValueError: shapes, dtypes or bounds that do not fit.
    """

    block_table: torch.Tensor
    query_bounds: torch.Tensor
    context_lengths: torch.Tensor
    max_query: int
    max_context: int
    cpu_dtype: torch.dtype | None = None
    recorded: bool = False
    tiles: dict[int | None, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _gathers: dict[tuple[int, int | None, torch.dtype], GatherIndices] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        rows, device = self.context_lengths.numel(), self.context_lengths.device
        for name, x, shape, fits in (
            ("context_lengths", self.context_lengths, "[b]", self.context_lengths.ndim == 1),
            ("query_bounds", self.query_bounds, "[b + 1]", self.query_bounds.shape == (rows + 1,)),
            (
                "block_table",
                self.block_table,
                "[b, blocks]",
                self.block_table.shape[:-1] == (rows,),
            ),
        ):
            dense = x.stride(-1) == 1 or x.shape[-1] <= 1
            if not (fits and dense) or x.dtype != torch.int32 or x.device != device:
                raise ValueError(
                    f"paged attention: {name} {tuple(x.shape)} {x.dtype} on {x.device} must be"
                    f" int32 {shape}, b = {rows}, on one device, its last dimension dense"
                )
        if self.max_query < 1 or self.max_context < 1:
            raise ValueError(
                f"paged attention: max_query={self.max_query} and max_context={self.max_context}"
                " must be at least 1: give the bounds of the largest batch"
            )

    def numbers_replaced(self) -> None:
        """Drop cached indices, after new table entries, bounds or lengths were written."""
        self._gathers.clear()
        self.tiles.clear()

    @property
    def device(self) -> torch.device:
        """Device of block table, bounds and lengths."""
        return self.context_lengths.device

    @property
    def rows(self) -> int:
        """Number of rows, including padding."""
        return self.context_lengths.shape[0]


class JointPages:
    """Pages of a layer that hold keys and values side by side, with cached views.

    Args:
        pages: [blocks, block_size, 2g, d], contiguous: the key heads, then the value heads.
        cpu_dtype: as in the `PagedBatch`es that use the pages.

    Attributes:
        matmul_dtype: dtype of matrix products with the pages on their device.
        slots: [blocks * block_size, 2g, d].
        keys, values: [g, blocks * block_size, d].
        transposed_keys: [g, d, blocks * block_size].

    Raises:
        ValueError: another shape or strides.
    """

    def __init__(self, pages: torch.Tensor, cpu_dtype: torch.dtype | None = None) -> None:
        if pages.ndim != 4 or pages.shape[2] % 2 or not pages.is_contiguous():
            raise ValueError(
                f"pages {tuple(pages.shape)} with strides {pages.stride()} must be contiguous "
                "[blocks, block_size, 2g, d]"
            )
        self.pages, self.slots = pages, pages.flatten(0, 1)
        self.keys, self.values = self.slots.transpose(0, 1).chunk(2)
        self.transposed_keys = self.keys.mT
        self.matmul_dtype = matmul_dtype(pages, cpu_dtype)


def gather_indices(
    batch: PagedBatch, size: int, window: int | None, tokens: int, dtype: torch.dtype
) -> GatherIndices:
    """Return the gather indices of a batch; computed once per window and block size.

    Args:
        batch: rows of the step.
        size: block size of the cache.
        window: of the attention, or None.
        tokens: number of new tokens.
        dtype: of the mask.
    """
    indices = batch._gathers.get((size, window, dtype))
    if indices is not None:
        return indices
    if batch.recorded:
        return _recorded_indices(batch, size, window, dtype)
    bounds, contexts = batch.query_bounds.tolist(), batch.context_lengths.tolist()
    _check_lengths(bounds, contexts, batch, tokens)
    if (
        tokens == len(contexts) == bounds[1] == 1 and contexts[0] > 0
    ):  # common: decoding one sequence
        start = 0 if window is None else max(contexts[0] - window, 0)
        blocks = batch.block_table[0, start // size : -(-contexts[0] // size)].tolist()
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            slot_range = blocks[0] * size + start % size, contexts[0] - start
            indices = GatherIndices(bounds, contexts, 1, 1, None, None, slot_range)
            batch._gathers[size, window, dtype] = indices
            return indices
    counts = np.diff(bounds)
    rows = 0
    while rows < len(contexts) and _is_short(int(counts[rows]), contexts[rows]):
        rows += 1
    decoding = bounds[rows]
    slots = mask = None
    if decoding:
        token_rows = np.repeat(np.arange(rows), counts[:rows])  # [d], of each token
        num_blocks = -(-max(contexts[:rows]) // size)
        table = batch.block_table[:rows, :num_blocks].cpu().numpy()[token_rows]
        # New tokens of the same row after each token.
        later_tokens = np.array(bounds)[token_rows + 1] - 1 - np.arange(decoding)
        ends = (np.array(contexts)[token_rows] - later_tokens)[:, None]  # [d, 1]
        starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        columns = np.arange(int((ends - starts).max()))  # [k]
        positions = np.minimum(starts + columns, ends - 1)  # [d, k]
        pages = np.take_along_axis(table, positions // size, 1).astype(np.int64)
        slots = torch.from_numpy((pages * size + positions % size).reshape(-1)).to(batch.device)
        masked = columns >= ends - starts  # [d, k]
        if masked.any():
            bias = np.where(masked, -np.inf, 0.0)[:, None, None]
            mask = torch.from_numpy(bias).to(batch.device, dtype)
    indices = GatherIndices(bounds, contexts, rows, decoding, slots, mask, None)
    batch._gathers[size, window, dtype] = indices
    return indices


def _is_short(new: int, context: int) -> bool:
    """Return whether each new token of a row is computed as a row of its own."""
    few = new == 1 or (0 < new <= MAX_DECODE_TOKENS and new * context <= MAX_DECODE_KEYS)
    return few and context > 0


def _recorded_indices(
    batch: PagedBatch, size: int, window: int | None, dtype: torch.dtype
) -> GatherIndices:
    """Return the gather indices of a recorded batch without reading the device.

    Every row gathers as many keys as the upper bound. A padding row attends to one key, and
    its output is masked later.
    """
    ends = batch.context_lengths[:, None].long().clamp(min=1)  # [d, 1]
    starts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    num_keys = batch.max_context if window is None else min(batch.max_context, window)
    columns = torch.arange(num_keys, device=batch.device)  # [k]
    positions = torch.minimum(starts + columns, ends - 1)  # [d, k]
    pages = batch.block_table.gather(1, positions // size).long()
    mask = torch.zeros((batch.rows, 1, 1, num_keys), dtype=dtype, device=batch.device)
    mask.masked_fill_((columns >= ends - starts)[:, None, None], float("-inf"))
    slots = (pages * size + positions % size).flatten()
    indices = GatherIndices([], [], batch.rows, batch.rows, slots, mask, None)
    batch._gathers[size, window, dtype] = indices
    return indices


def _without_padding(
    batch: PagedBatch, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [b, n, d] and lse [b, n], with 0 and -inf for padding rows of a recorded batch."""
    if not batch.recorded:
        return out, lse
    is_padding = (batch.context_lengths == 0)[:, None]
    return out.masked_fill(is_padding[..., None], 0), lse.masked_fill(is_padding, float("-inf"))


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [t, n, d], lse [t, n]); see `ops.paged_attention.paged_attention`."""
    on_cpu = query.device.type == "cpu"
    dtype = matmul_dtype(query, batch.cpu_dtype) if on_cpu else accumulation_dtype(query.dtype)
    indices = gather_indices(batch, key_cache.shape[1], window, query.shape[0], dtype)
    caches = (key_cache,) if value_cache is key_cache else (key_cache, value_cache)
    decoding = indices.decoding
    if decoding:
        decodes_all = decoding == query.shape[0]
        keys, *values = [_gather_slots(cache, indices) for cache in caches]  # [d, k, g, d]
        out_and_lse = _decode(
            query if decodes_all else query[:decoding],
            keys,
            values[0] if values else keys,
            indices.mask,
            scale,
            sinks,
            dtype,
            softcap,
        )
        if decodes_all:
            return _without_padding(batch, *out_and_lse)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    sums = {"dtype": accumulation_dtype(query.dtype), "device": query.device}
    lse = torch.full(query.shape[:2], float("-inf"), **sums)
    if decoding:
        out[:decoding], lse[:decoding] = out_and_lse
    for row in range(indices.rows, len(indices.contexts)):
        context, tokens = indices.contexts[row], slice(indices.bounds[row], indices.bounds[row + 1])
        queries = tokens.stop - tokens.start
        if queries == 0 or context == 0:
            continue
        # Pages entirely before the window may already belong to another row.
        low = 0 if window is None else max(context - queries - window + 1, 0)
        keys, *values = (
            _gather_pages(cache, batch.block_table[row], low, context)[:, None]  # [s_k, 1, g, d]
            for cache in caches
        )
        row_out, row_lse = attention_forward(
            query[tokens, None],
            keys,
            values[0] if values else keys,
            sinks,
            scale,
            Mask(window=window, softcap=softcap),
            cpu_dtype=batch.cpu_dtype,
        )
        out[tokens] = row_out[:, 0]  # [s_q, n, d]
        lse[tokens] = row_lse[0].t().to(lse.dtype)  # [s_q, n]
    return out, lse


def decode_step(
    query: torch.Tensor,
    key_value: torch.Tensor,
    pages: JointPages,
    batch: PagedBatch,
    slot_mapping: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor | None:
    """Write and attend if every row has few new tokens and there is no padding, else return None.

    See `ops.paged_attention.write_and_attend`.
    """
    dtype = pages.matmul_dtype
    indices = gather_indices(batch, pages.pages.shape[1], window, query.shape[0], dtype)
    if indices.decoding != query.shape[0] or query.device.type != "cpu" or batch.recorded:
        return None
    rows, heads, features = query.shape
    pages.slots.index_copy_(0, slot_mapping, key_value)
    plain, groups = dtype == query.dtype and sinks is softcap is None, pages.keys.shape[0]
    if plain and indices.slot_range is not None:
        grouped = query.view(groups, heads // groups, features)
        return attend_slot_range(grouped, pages, indices.slot_range, scale).view(query.shape)
    keys, values = _gather_slots(pages.pages, indices).split(groups, 2)  # [b, k, g, d]
    if not plain:
        return _decode(query, keys, values, indices.mask, scale, sinks, dtype, softcap)[0]
    out, _ = _FLASH(
        query.view(rows, groups, heads // groups, features),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        0.0,
        False,
        attn_mask=indices.mask,
        scale=scale,
    )
    return out.reshape(query.shape)


def attend_slot_range(
    query: torch.Tensor,
    pages: JointPages,
    slot_range: tuple[int, int],
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one token [g, n/g, d] to contiguous slots; a group is one matrix product."""
    keys, values = pages.transposed_keys.narrow(2, *slot_range), pages.values.narrow(1, *slot_range)
    logits = torch.bmm(query * scale, keys)  # faster than baddbmm with alpha
    return torch.bmm(logits.softmax(-1), values, out=out)


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query per row, [b, n, d], to keys and values [b, k, g, d], in `dtype`.

    Query heads that share a key head are the queries of one head.
    """
    rows, heads, features = query.shape
    groups = keys.shape[2]
    lse_dtype = accumulation_dtype(query.dtype)
    grouped = query.reshape(rows, groups, heads // groups, features).to(dtype)
    keys, values = keys.to(dtype).transpose(1, 2), values.to(dtype).transpose(1, 2)  # [b, g, k, d]
    if query.device.type == "cpu" and softcap is None:
        out, lse = _FLASH(grouped, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    else:
        logits = (grouped * scale) @ keys.mT  # [b, g, n/g, k]
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            logits = logits + mask
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp() @ values
    out, lse = out.reshape(query.shape), lse.reshape(rows, heads).to(lse_dtype)
    if sinks is not None:
        out, lse = add_sinks(out[None].to(lse_dtype), lse[..., None], sinks)
        out, lse = out[0], lse[..., 0]
    return out.to(query.dtype), lse


def write_rows(
    new: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    *,
    recorded: bool = False,
) -> None:
    """Write tokens [t, ...] to unique slots of caches [blocks, size, ...] in place.

    Slot -1 writes nothing. A recording has a fixed number of writes: padding repeats the write of
    the first token, or rewrites the slot's present value if the first token is also padding.
    """
    if recorded:
        is_token, first_slot = slot_mapping >= 0, slot_mapping[:1].clamp(min=0)
        slot_mapping = slot_mapping.where(is_token, first_slot)
        for x, cache in zip(new, caches, strict=True):
            size = cache.shape[1]
            index, shape = (slot_mapping // size, slot_mapping % size), (-1, *[1] * (x.ndim - 1))
            first_value = cache[first_slot // size, first_slot % size]
            first_value = x[:1].where(is_token[:1].view(shape), first_value)
            cache[index] = x.where(is_token.view(shape), first_value)
        return
    if slot_mapping.numel() and slot_mapping.min() < 0:
        is_token = slot_mapping >= 0
        slot_mapping, new = slot_mapping[is_token], [x[is_token] for x in new]
    for x, cache in zip(new, caches, strict=True):
        slots = _flat_slots(cache)
        if slots is not None:
            slots.index_copy_(0, slot_mapping, x)
        else:
            size = cache.shape[1]
            cache[slot_mapping // size, slot_mapping % size] = x


def _flat_slots(cache: torch.Tensor) -> torch.Tensor | None:
    """Return a view [blocks * size, ...] of a cache [blocks, size, ...], or None."""
    if cache.stride(0) != cache.shape[1] * cache.stride(1):
        return None
    return cache.flatten(0, 1)


def _gather_slots(cache: torch.Tensor, indices: GatherIndices) -> torch.Tensor:
    """Return the cached entries [b, k, g, d] of the indexed slots."""
    size, shape = cache.shape[1], (indices.decoding, -1, *cache.shape[2:])
    flat = _flat_slots(cache)
    if indices.slot_range is not None:
        start, count = indices.slot_range
        if flat is not None:
            return flat.narrow(0, start, count).unsqueeze(0)
        slots = torch.arange(start, start + count, device=cache.device)
    else:
        assert indices.slots is not None
        slots = indices.slots
        if flat is not None:
            return flat.index_select(0, slots).view(shape)
    return cache[slots // size, slots % size].view(shape)


def _gather_pages(cache: torch.Tensor, pages: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Copy tokens low .. high - 1 of a row out of its pages, as [high - low, g, d]."""
    size = cache.shape[1]
    first_page = low // size
    tokens = cache[pages[first_page : -(-high // size)].long()]  # [pages, size, g, d]
    return tokens.flatten(0, 1)[low - first_page * size : high - first_page * size]


def _check_lengths(bounds: list[int], contexts: list[int], batch: PagedBatch, tokens: int) -> None:
    """Raise ValueError unless the lengths are consistent and within the bounds of the batch."""
    queries = [end - begin for begin, end in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] > tokens or min(queries, default=0) < 0:
        raise ValueError(
            f"paged_attention: query_bounds {bounds} must begin at 0, never fall and end within"
            f" the {tokens} tokens"
        )
    for row, (new, context) in enumerate(zip(queries, contexts, strict=True)):
        if new > batch.max_query or context > batch.max_context or context < 0:
            raise ValueError(
                f"paged_attention: row {row} has {new} new tokens and a context of {context}, over"
                f" max_query={batch.max_query} or max_context={batch.max_context}: raise these"
            )
        if 0 < context < new:
            raise ValueError(
                f"paged_attention: row {row} has {new} new tokens but a context of only "
                f"{context}: context_lengths include the new tokens"
            )

# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain torch: keys are gathered from their pages, then attended to.

The first rows, as far as they have one new token each or few, are attended to in one call, every
token as a row of its own; the others one after another. Reads lengths on the host, so on a GPU it
waits for the device; the kernel does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.ops.attention.reference import Mask, add_sinks, attention_forward
from megatron.core.ops.backend_choice import accumulation_dtype, matmul_dtype

#: New tokens of a row, and these times its context, up to which each is attended to by itself: keys
#: are gathered once for each token then, which takes less than a call for the row.
FEW_TOKENS, FEW_KEYS = 8, 1 << 12

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class GatherIndices(NamedTuple):
    """What the reference reads of a batch, worked out once for each window and block size.

    Args:
        bounds: where each row's new tokens begin and end, [0, ...].
        contexts: tokens of each row in the cache.
        rows: how many of the first rows have one new token or few.
        decoding: their tokens, which are attended to together, each as a row of its own.
        slots: int64 [decoding * k], the slot of each key that these see; some key that the token
            sees where it sees fewer than k. None with a run.
        run: (first slot, k) where one token decodes and its slots lie one after the other.
        mask: [decoding, 1, 1, k], added to logits: -inf there and else 0; None if all see k.
    """

    bounds: list[int]
    contexts: list[int]
    rows: int
    decoding: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None
    run: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """The rows of one engine step: packed new tokens, and the pages that hold their contexts.

    A page is a block of the cache. Token number p of row i lies in page block_table[i, p // size],
    at place p % size. The new tokens of a row are the last ones of its context, and their keys and
    values are in the cache before attention is asked for. Numbers on the device are never read by
    the host, which knows two upper bounds instead: so a CUDA graph can be captured with the bounds
    of its bucket, and replayed with any batch that fits.

    Padding is inert. A row of context length 0 gets out 0 and lse -inf for its tokens, and so do
    tokens behind the last row; a row without new tokens does nothing. Entries of the table past a
    context, or wholly before what a window still sees, are never used and may hold anything.

    Args:
        block_table: int32 [b, blocks of a row].
        query_bounds: int32 [b + 1], where each row's new tokens begin; the first is 0.
        context_lengths: int32 [b], tokens of each row in the cache, the new ones too.
        max_query: no row has more new tokens.
        max_context: no row has a longer context.
        cpu_dtype: what a CPU multiplies 16-bit operands in, see `ops.backend_choice.matmul_dtype`.
        recorded: for a recording that is replayed with other numbers. Every row, padding included,
            has one new token, and the reference too reads nothing on the host: it gathers
            `max_context` keys of each row.

    The reference works out what it gathers once for all layers, and `ops.tiled_attention` keeps in
    `tiles` by window what it gathers: make a new batch for each step, or say that the numbers were
    replaced.

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
        """Work out anew what follows from the numbers: others were written over them."""
        self._gathers.clear()
        self.tiles.clear()

    @property
    def device(self) -> torch.device:
        """Where table, bounds and lengths are."""
        return self.context_lengths.device

    @property
    def rows(self) -> int:
        """How many rows the batch has, padding included."""
        return self.context_lengths.shape[0]


class JointPages:
    """Pages of a layer that hold keys and values, and views of them that are made once.

    Args:
        pages: [blocks, block_size, 2g, d], contiguous: the heads of the keys, then of the values.

    Attributes:
        places: [blocks * block_size, 2g, d].
        keys, values: [g, blocks * block_size, d].
        transposed_keys: [g, d, blocks * block_size].

    Raises:
        ValueError: another shape or strides.
    """

    def __init__(self, pages: torch.Tensor) -> None:
        if pages.ndim != 4 or pages.shape[2] % 2 or not pages.is_contiguous():
            raise ValueError(
                f"pages {tuple(pages.shape)} with strides {pages.stride()} must be contiguous "
                "[blocks, block_size, 2g, d]"
            )
        self.pages, self.places = pages, pages.flatten(0, 1)
        self.keys, self.values = self.places.transpose(0, 1).chunk(2)
        self.transposed_keys = self.keys.mT


def gather_of(
    batch: PagedBatch, size: int, window: int | None, tokens: int, dtype: torch.dtype
) -> GatherIndices:
    """Return what is read of pages of `size` places, for `tokens` new tokens; made once. The mask
    has `dtype`."""
    found = batch._gathers.get((size, window, dtype))
    if found is not None:
        return found
    if batch.recorded:
        return _recorded(batch, size, window, dtype)
    bounds, contexts = batch.query_bounds.tolist(), batch.context_lengths.tolist()
    _check_lengths(bounds, contexts, batch, tokens)
    if tokens == len(contexts) == bounds[1] == 1 and contexts[0] > 0:  # most steps of a single text
        start = 0 if window is None else max(contexts[0] - window, 0)
        blocks = batch.block_table[0, start // size : -(-contexts[0] // size)].tolist()
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            run = blocks[0] * size + start % size, contexts[0] - start
            found = GatherIndices(bounds, contexts, 1, 1, None, None, run)
            batch._gathers[size, window, dtype] = found
            return found
    counts = np.diff(bounds)
    rows = 0
    while rows < len(contexts) and _is_short(int(counts[rows]), contexts[rows]):
        rows += 1
    decoding = bounds[rows]
    slots = mask = None
    if decoding:
        row = np.repeat(np.arange(rows), counts[:rows])  # [d], of each token
        width = -(-max(contexts[:rows]) // size)
        table = batch.block_table[:rows, :width].cpu().numpy()[row]
        after = np.array(bounds)[row + 1] - 1 - np.arange(decoding)  # new tokens of its row
        ends = (np.array(contexts)[row] - after)[:, None]  # [d, 1]
        starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        columns = np.arange(int((ends - starts).max()))  # [k]
        places = np.minimum(starts + columns, ends - 1)  # [d, k]
        pages = np.take_along_axis(table, places // size, 1).astype(np.int64)
        slots = torch.from_numpy((pages * size + places % size).reshape(-1)).to(batch.device)
        hidden = columns >= ends - starts  # [d, k]
        if hidden.any():
            added = np.where(hidden, -np.inf, 0.0)[:, None, None]
            mask = torch.from_numpy(added).to(batch.device, dtype)
    found = GatherIndices(bounds, contexts, rows, decoding, slots, mask, None)
    batch._gathers[size, window, dtype] = found
    return found


def _is_short(new: int, context: int) -> bool:
    """Say whether each new token of a row is attended to by itself."""
    few = new == 1 or (0 < new <= FEW_TOKENS and new * context <= FEW_KEYS)
    return few and context > 0


def _recorded(
    batch: PagedBatch, size: int, window: int | None, dtype: torch.dtype
) -> GatherIndices:
    """Return what is read of a recorded batch: as many keys of each row as a row may have, by
    numbers that stay on the device. Padding sees one key, which counts for nothing."""
    ends = batch.context_lengths[:, None].long().clamp(min=1)  # [d, 1]
    starts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    most = batch.max_context if window is None else min(batch.max_context, window)
    columns = torch.arange(most, device=batch.device)  # [k]
    places = torch.minimum(starts + columns, ends - 1)  # [d, k]
    pages = batch.block_table.gather(1, places // size).long()
    mask = torch.zeros((batch.rows, 1, 1, most), dtype=dtype, device=batch.device)
    mask.masked_fill_((columns >= ends - starts)[:, None, None], float("-inf"))
    slots = (pages * size + places % size).flatten()
    found = GatherIndices([], [], batch.rows, batch.rows, slots, mask, None)
    batch._gathers[size, window, dtype] = found
    return found


def _without_padding(
    batch: PagedBatch, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [b, n, d] and lse [b, n], 0 and -inf for the rows of a recorded batch that are
    padding."""
    if not batch.recorded:
        return out, lse
    absent = (batch.context_lengths == 0)[:, None]
    return out.masked_fill(absent[..., None], 0), lse.masked_fill(absent, float("-inf"))


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [t, n, d], lse [t, n]); see `ops.paged_attention.paged_attention`."""
    on_cpu = query.device.type == "cpu"
    dtype = matmul_dtype(query, batch.cpu_dtype) if on_cpu else accumulation_dtype(query.dtype)
    what = gather_of(batch, key_cache.shape[1], window, query.shape[0], dtype)
    caches = (key_cache,) if value_cache is key_cache else (key_cache, value_cache)
    decoding = what.decoding
    if decoding:
        alone = decoding == query.shape[0]
        keys, *values = [_at_slots(cache, what) for cache in caches]  # [d, k, g, d]
        step = _decode(
            query if alone else query[:decoding],
            keys,
            values[0] if values else keys,
            what.mask,
            scale,
            sinks,
            dtype,
        )
        if alone:
            return _without_padding(batch, *step)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(
        query.shape[:2],
        float("-inf"),
        dtype=accumulation_dtype(query.dtype),
        device=query.device,
    )
    if decoding:
        out[:decoding], lse[:decoding] = step
    for row in range(what.rows, len(what.contexts)):
        context, tokens = what.contexts[row], slice(what.bounds[row], what.bounds[row + 1])
        queries = tokens.stop - tokens.start
        if queries == 0 or context == 0:
            continue
        # What a window hides from all queries may lie in pages that others have by now.
        low = 0 if window is None else max(context - queries - window + 1, 0)
        keys, *values = (
            _gather(cache, batch.block_table[row], low, context)[:, None]  # [s_k, 1, g, d]
            for cache in caches
        )
        mine, mine_lse = attention_forward(
            query[tokens, None],
            keys,
            values[0] if values else keys,
            sinks,
            scale,
            Mask(window=window),
            cpu_dtype=batch.cpu_dtype,
        )
        out[tokens] = mine[:, 0]  # [s_q, n, d]
        lse[tokens] = mine_lse[0].t().to(lse.dtype)  # [s_q, n]
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
) -> torch.Tensor | None:
    """Write and attend where every row has one new token or few and none is padding, else return
    None; see `ops.paged_attention.write_and_attend`."""
    dtype = matmul_dtype(query, batch.cpu_dtype)
    what = gather_of(batch, pages.pages.shape[1], window, query.shape[0], dtype)
    if what.decoding != query.shape[0] or query.device.type != "cpu" or batch.recorded:
        return None
    rows, heads, features = query.shape
    pages.places.index_copy_(0, slot_mapping, key_value)
    plain, groups = dtype == query.dtype and sinks is None, pages.keys.shape[0]
    if plain and what.run is not None:
        grouped = query.view(groups, heads // groups, features)
        return attend_run(grouped, pages, what.run, scale).view(query.shape)
    keys, values = _at_slots(pages.pages, what).split(groups, 2)  # [b, k, g, d]
    if not plain:
        return _decode(query, keys, values, what.mask, scale, sinks, dtype)[0]
    out, _ = _FLASH(
        query.view(rows, groups, heads // groups, features),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        0.0,
        False,
        attn_mask=what.mask,
        scale=scale,
    )
    return out.reshape(query.shape)


def attend_run(
    query: torch.Tensor,
    pages: JointPages,
    run: tuple[int, int],
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one token, [g, n/g, d], to places that lie one after the other; heads that share
    keys are the rows of a product."""
    keys, values = pages.transposed_keys.narrow(2, *run), pages.values.narrow(1, *run)
    logits = torch.bmm(query * scale, keys)  # less than baddbmm takes
    return torch.bmm(logits.softmax(-1), values, out=out)


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query of each row, [b, n, d], to keys and values [b, k, g, d], in `dtype`.

    Heads that share keys are the queries of one head.
    """
    rows, heads, features = query.shape
    groups = keys.shape[2]
    wide = accumulation_dtype(query.dtype)
    grouped = query.reshape(rows, groups, heads // groups, features).to(dtype)
    keys, values = keys.to(dtype).transpose(1, 2), values.to(dtype).transpose(1, 2)  # [b, g, k, d]
    if query.device.type == "cpu":
        out, lse = _FLASH(grouped, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    else:
        logits = (grouped * scale) @ keys.mT  # [b, g, n/g, k]
        if mask is not None:
            logits = logits + mask
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp() @ values
    out, lse = out.reshape(query.shape), lse.reshape(rows, heads).to(wide)
    if sinks is not None:
        both = add_sinks(out[None].to(wide), lse[..., None], sinks)
        out, lse = both[0][0], both[1][..., 0]
    return out.to(query.dtype), lse


def write_rows(
    new: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    *,
    recorded: bool = False,
) -> None:
    """Write tokens [t, ...] to slots of caches [blocks, size, ...] in place, each to its own; slot
    -1 writes nothing. In a recording, padding writes what the first token does: nothing if that is
    padding too."""
    if recorded:
        is_token, first = slot_mapping >= 0, slot_mapping[:1].clamp(min=0)
        slot_mapping = slot_mapping.where(is_token, first)
        for x, cache in zip(new, caches, strict=True):
            size = cache.shape[1]
            at, shape = (slot_mapping // size, slot_mapping % size), (-1, *[1] * (x.ndim - 1))
            there = cache[first // size, first % size]
            there = x[:1].where(is_token[:1].view(shape), there)
            cache[at] = x.where(is_token.view(shape), there)
        return
    if slot_mapping.numel() and slot_mapping.min() < 0:
        kept = slot_mapping >= 0
        slot_mapping, new = slot_mapping[kept], [x[kept] for x in new]
    for x, cache in zip(new, caches, strict=True):
        places = _places(cache)
        if places is not None:
            places.index_copy_(0, slot_mapping, x)
        else:
            size = cache.shape[1]
            cache[slot_mapping // size, slot_mapping % size] = x


def _places(cache: torch.Tensor) -> torch.Tensor | None:
    """Return a view [blocks * size, ...] of a cache [blocks, size, ...]; None if it has none."""
    if cache.stride(0) != cache.shape[1] * cache.stride(1):
        return None
    return cache.flatten(0, 1)


def _at_slots(cache: torch.Tensor, what: GatherIndices) -> torch.Tensor:
    """Return [b, k, g, d], what lies in the slots of a cache [blocks, size, g, d]."""
    size, shape = cache.shape[1], (what.decoding, -1, *cache.shape[2:])
    places = _places(cache)
    if what.run is not None:
        first, count = what.run
        if places is not None:
            return places.narrow(0, first, count).unsqueeze(0)
        slots = torch.arange(first, first + count, device=cache.device)
    else:
        assert what.slots is not None
        slots = what.slots
        if places is not None:
            return places.index_select(0, slots).view(shape)
    return cache[slots // size, slots % size].view(shape)


def _gather(cache: torch.Tensor, pages: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Copy the tokens low .. high - 1 of a row out of its pages, as [high - low, g, d]."""
    size = cache.shape[1]
    first = low // size
    found = cache[pages[first : -(-high // size)].long()]  # [pages, size, g, d]
    return found.flatten(0, 1)[low - first * size : high - first * size]


def _check_lengths(bounds: list[int], contexts: list[int], batch: PagedBatch, tokens: int) -> None:
    """Raise ValueError unless the lengths on the device keep to each other and to the bounds."""
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
                f"paged_attention: row {row} has {new} new tokens but a context of only {context}:"
                " context_lengths count the new tokens in"
            )

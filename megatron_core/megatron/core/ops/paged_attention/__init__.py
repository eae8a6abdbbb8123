# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens to keys and values in a paged cache.

The cache of a layer is a pair [blocks, block_size, g, d], keys and values. A block table maps each
sequence to its blocks, in any order, so memory is allocated block by block as sequences grow, and
sequences with a common prefix share blocks. `write_to_pages` writes the keys and values of new
tokens, then `paged_attention` reads them. Forward only, for inference.
"""

from __future__ import annotations

import math

import torch

from megatron.core.ops.backend_choice import choose
from megatron.core.ops.paged_attention import cpu
from megatron.core.ops.paged_attention.cpu import JointPages, PagedBatch

__all__ = [
    "JointPages",
    "PagedBatch",
    "ReplayedAttention",
    "paged_attention",
    "paged_latent_attention",
    "write_and_attend",
    "write_latents_to_pages",
    "write_to_pages",
]

MIN_BLOCK_SIZE = 16
MAX_FEATURES = 256


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    batch: PagedBatch,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale q k^T + mask) v of each row's new tokens over the row's context.

    A batch mixes decode rows (one new token), drafts to verify (a few), whole prompts and chunks of
    prompts (chunked prefill). A token attends to its row's tokens up to itself; `window`, `sinks`
    are as in `ops.attention`. The host never synchronizes with the device: launch grids depend only
    on shapes and on `batch`'s upper bounds. With few rows, contexts are split and the splits are
    merged, so the reduction order depends on the bounds, not on the actual lengths.

    Args:
        query: [t, n, d], the concatenated new tokens of all rows.
        key_cache: [blocks, block_size, g, d], g dividing n, block_size a power of two from 16 on.
        value_cache: [blocks, block_size, g, d].
        batch: tokens and blocks of each row.
        scale: positive factor on the logits; None is 1 / sqrt(d).
        softcap: bound of the logits before the mask, see `ops.attention`; None for none.
        window: a token at position q attends only to positions k with q - k < window.
        sinks: [n], extra logits with no value; part of the log-sum-exp.
        implementation: "reference", "triton" or None (by device).

    Returns:
        (out [t, n, d] in query's dtype, lse fp32 [t, n]); 0 and -inf for padding.

    Raises:
        ValueError: shapes, dtypes or bounds that do not fit, or inputs that need a gradient. The
            reference also checks the lengths; the kernel does not, because it would have to wait
            for the device.
    """
    _check_caches("paged_attention", query, key_cache, value_cache)
    _check_batch(query, key_cache, batch, window=window, sinks=sinks)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    _check_scale("paged_attention", scale)
    function = cpu.paged_attention
    if choose(implementation, query, "paged_attention") == "triton":
        from megatron.core.ops.paged_attention import triton as kernels

        function = kernels.paged_attention
    return function(query, key_cache, value_cache, batch, scale, window, sinks, softcap)


def paged_latent_attention(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    *,
    batch: PagedBatch,
    scale: float,
    value_features: int,
    implementation: str | None = None,
) -> torch.Tensor:
    """Compute softmax(scale q c^T + mask) c_v: all heads attend to one latent per token.

    This is multi-head latent attention with absorbed up projections (DeepSeek-AI 2024, section
    2.1.1): keys are latents followed by RoPE features, values are the latents alone.

    Args:
        query: [t, n, c], the concatenated new tokens of all rows.
        latent_cache: [blocks, block_size, c].
        batch: tokens and blocks of each row.
        scale: positive factor on the logits.
        value_features: leading features of a latent that are also its value.
        implementation: "reference", "triton" or None (by device).

    Returns:
        [t, n, value_features] in query's dtype; 0 for padding.

    Raises:
        ValueError: shapes, dtypes or bounds that do not fit.
    """
    fits = latent_cache.ndim == 3 and query.ndim == 3 and query.shape[2] == latent_cache.shape[2]
    if not fits or query.dtype != latent_cache.dtype or latent_cache.stride(2) != 1:
        raise ValueError(
            f"paged_latent_attention: query {tuple(query.shape)} {query.dtype} and latents "
            f"{tuple(latent_cache.shape)} {latent_cache.dtype} must be [t, n, c] and [blocks, "
            "block_size, c] of one dtype, with contiguous features"
        )
    _check_scale("paged_latent_attention", scale)
    caches = latent_cache.unsqueeze(2)  # one head
    _check_batch(query, caches, batch)
    _check_gradients("paged_latent_attention", query, latent_cache)
    if choose(implementation, query, "paged_latent_attention") == "triton":
        from megatron.core.ops.paged_attention import triton as kernels

        return kernels.paged_latent_attention(query, latent_cache, batch, scale, value_features)
    out, _ = cpu.paged_attention(query, caches, caches, batch, scale, None, None, None)
    return out[..., :value_features]


def write_and_attend(
    query: torch.Tensor,
    key_value: torch.Tensor,
    pages: JointPages,
    *,
    batch: PagedBatch,
    slot_mapping: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the keys and values of new tokens into joint pages, then attend.

    Same results as `write_to_pages` and `paged_attention`, with fewer operations if every row has
    one new token.

    Args:
        query: [t, n, d], the concatenated new tokens of all rows.
        key_value: [t, 2g, d], the key heads, then the value heads.
        pages: of 2g heads a token, written.
        batch: tokens and blocks of each row.
        slot_mapping: int64 [t], the slot of each token; -1 writes nothing.
        scale: factor on the logits.
        softcap, window, sinks: of `paged_attention`.

    Returns:
        [t, n, d] in query's dtype; 0 for padding.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if key_value.shape[1:] != pages.slots.shape[1:]:
        raise ValueError(
            f"write_and_attend: keys and values {tuple(key_value.shape)} do not fit pages "
            f"{tuple(pages.pages.shape)}"
        )
    if query.is_cpu or choose(None, query, "write_and_attend") == "reference":
        out = cpu.decode_step(
            query, key_value, pages, batch, slot_mapping, scale, window, sinks, softcap
        )
        if out is not None:
            return out
    (key, value), (keys, values) = key_value.chunk(2, 1), pages.pages.chunk(2, 2)
    write_to_pages(
        key,
        value,
        key_cache=keys,
        value_cache=values,
        slot_mapping=slot_mapping,
        recorded=batch.recorded,
    )
    return paged_attention(
        query,
        keys,
        values,
        batch=batch,
        scale=scale,
        softcap=softcap,
        window=window,
        sinks=sinks,
    )[0]


class ReplayedAttention:
    """`write_and_attend` of a step that a `CpuGraph` replays.

    Every replay has the same tensors, whose contents change between replays.

    Args:
        query, key_value, pages, batch, slot_mapping, scale, softcap, window, sinks: of
            `write_and_attend`, on a CPU.

    Attributes:
        out: [t, n, d].
    """

    def __init__(
        self,
        query: torch.Tensor,
        key_value: torch.Tensor,
        pages: JointPages,
        *,
        batch: PagedBatch,
        slot_mapping: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.out = torch.empty_like(query)
        self._inputs = query, key_value, pages
        self._options = {"batch": batch, "slot_mapping": slot_mapping, "scale": scale}
        self._options |= {"softcap": softcap, "window": window, "sinks": sinks}
        self._batch, self._slots, self._scale = batch, slot_mapping, scale
        self._gather = pages.pages.shape[1], window, 1, query.dtype
        plain = sinks is softcap is None and pages.matmul_dtype == query.dtype
        self._is_row = plain and query.shape[0] == 1
        if self._is_row:
            shape = (pages.keys.shape[0], -1, query.shape[2])
            self._grouped, self._grouped_out = query.view(shape), self.out.view(shape)

    def __call__(self) -> None:
        """Write and attend. A single row uses the views that the constructor made."""
        slot_range = (
            cpu.gather_indices(self._batch, *self._gather).slot_range if self._is_row else None
        )
        query, key_value, pages = self._inputs
        if slot_range is None:
            self.out.copy_(write_and_attend(query, key_value, pages, **self._options))
            return
        pages.slots.index_copy_(0, self._slots, key_value)
        cpu.attend_slot_range(self._grouped, pages, slot_range, self._scale, out=self._grouped_out)


def write_to_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    recorded: bool = False,
    implementation: str | None = None,
) -> None:
    """Write the keys and values of new tokens into their pages, in place.

    Slot s is position s % block_size of block s // block_size. Slots must be unique.

    Args:
        key: [t, g, d].
        value: [t, g, d].
        key_cache: [blocks, block_size, g, d], written.
        value_cache: [blocks, block_size, g, d], written.
        slot_mapping: int64 [t], the slot of each token; -1 writes nothing (padding).
        recorded: of `PagedBatch`.
        implementation: "reference", "triton" or None (by device).

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check_caches("write_to_pages", key, key_cache, value_cache)
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[2:]:
        raise ValueError(
            f"write_to_pages: key {tuple(key.shape)} and value {tuple(value.shape)} must be"
            f" [t, g, d] with the heads and features of the cache {tuple(key_cache.shape)}"
        )
    if value.dtype != key.dtype:
        raise ValueError(
            f"write_to_pages: key {key.dtype} and value {value.dtype} must have one dtype"
        )
    if slot_mapping.shape != key.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"write_to_pages: slot_mapping {tuple(slot_mapping.shape)} {slot_mapping.dtype} must"
            f" be int64 [t] = [{key.shape[0]}]"
        )
    if choose(implementation, key, "write_to_pages") == "triton":
        from megatron.core.ops.paged_attention import triton as kernels

        kernels.write_to_pages(key, value, key_cache, value_cache, slot_mapping)
    else:
        caches = (key_cache, value_cache)
        cpu.write_rows((key, value), caches, slot_mapping, recorded=recorded)


def write_latents_to_pages(
    latent: torch.Tensor,
    *,
    latent_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    recorded: bool = False,
    implementation: str | None = None,
) -> None:
    """Write the latents of new tokens into their pages, in place; see `write_to_pages`.

    Args:
        latent: [t, c].
        latent_cache: [blocks, block_size, c], written.
        slot_mapping: int64 [t]; -1 writes nothing.
        recorded: of `PagedBatch`.
        implementation: "reference", "triton" or None (by device).

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if latent.shape[1:] != latent_cache.shape[2:] or latent.dtype != latent_cache.dtype:
        raise ValueError(
            f"write_latents_to_pages: {tuple(latent.shape)} {latent.dtype} does not fit a cache of "
            f"{tuple(latent_cache.shape)} {latent_cache.dtype}"
        )
    _check_gradients("write_latents_to_pages", latent, latent_cache)
    if choose(implementation, latent, "write_latents_to_pages") == "triton":
        from megatron.core.ops.paged_attention import triton as kernels

        rows, cache = latent.unsqueeze(1), latent_cache.unsqueeze(2)  # one head
        kernels.write_to_pages(rows, rows, cache, cache, slot_mapping)
    else:
        cpu.write_rows((latent,), (latent_cache,), slot_mapping, recorded=recorded)


def _check_caches(
    op: str, x: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> None:
    """Raise ValueError unless the caches are a pair and fit [t, heads, d] packed tokens."""
    if x.ndim != 3 or key_cache.ndim != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"{op}: {_shapes(x, key_cache, value_cache)} must be [t, heads, d] and twice [blocks, "
            "block_size, g, d]"
        )
    size, features = key_cache.shape[1], key_cache.shape[3]
    if x.shape[2] != features or not 1 <= features <= MAX_FEATURES:
        raise ValueError(
            f"{op}: {_shapes(x, key_cache, value_cache)} must agree in the features of a head, at "
            f"most {MAX_FEATURES}"
        )
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError(
            f"{op}: the features of a head must be contiguous in the caches, whose strides are"
            f" {key_cache.stride()} and {value_cache.stride()}: make the last one 1"
        )
    if size < MIN_BLOCK_SIZE or size & (size - 1):
        raise ValueError(
            f"{op}: block_size {size} of the caches must be a power of two from {MIN_BLOCK_SIZE} on"
        )
    if not x.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            f"{op}: {x.dtype} tokens and caches of {key_cache.dtype} and {value_cache.dtype} must"
            " have one dtype"
        )
    if not x.device == key_cache.device == value_cache.device:
        raise ValueError(f"{op}: {x.device} tokens need caches there, not on {key_cache.device}")
    _check_gradients(op, x, key_cache, value_cache)


def _check_scale(op: str, scale: float) -> None:
    """Raise ValueError unless scale > 0: kernels get the largest logit from the largest product."""
    if not scale > 0:
        raise ValueError(f"{op}: scale={scale} must be positive")


def _shapes(x: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> str:
    return f"{tuple(x.shape)} with caches {tuple(key_cache.shape)}, {tuple(value_cache.shape)}"


def _check_gradients(op: str, *tensors: torch.Tensor) -> None:
    """Raise ValueError if an input requires a gradient, because there is no backward."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(f"{op} has no backward: call it under torch.no_grad()")


def _check_batch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Raise ValueError unless heads, table, window and sinks fit query and cache."""
    heads, groups = query.shape[1], key_cache.shape[2]
    if groups == 0 or heads == 0 or heads % groups:
        raise ValueError(
            f"paged_attention: {heads} query heads must be a multiple of the cache's {groups}"
        )
    if query.device != batch.device:
        raise ValueError(
            f"paged_attention: the batch is on {batch.device}, the query on {query.device}: move it"
        )
    num_slots = batch.block_table.shape[1] * key_cache.shape[1]
    if batch.max_context > num_slots:
        raise ValueError(
            f"paged_attention: max_context={batch.max_context} is over the {num_slots} slots of a"
            f" row of block_table {tuple(batch.block_table.shape)} with blocks of"
            f" {key_cache.shape[1]}: widen the table"
        )
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window={window} must be at least 1, or None")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(
            f"paged_attention: sinks {tuple(sinks.shape)} must hold one logit for each of the"
            f" {query.shape[1]} heads"
        )

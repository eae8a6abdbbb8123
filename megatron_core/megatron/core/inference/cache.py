# SPDX-License-Identifier: Apache-2.0
"""Device memory of the inference cache: paged KV cache, paged latents, and recurrent states.

`PagedCache` allocates the entries that `CacheShapes` describes: for each attention layer, pages
[blocks, block_size, ...], which sequences occupy block by block (Kwon et al. 2023, arXiv
2309.06180); for each recurrent mixer, one slot of constant size per sequence. The `scheduler`
assigns blocks and slots to sequences; this module only stores, and attends to, the entries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatron.core.context_parallel.layout import PagedRows
from megatron.core.ops.paged_attention import (
    JointPages,
    ReplayedAttention,
    paged_latent_attention,
    write_and_attend,
    write_latents_to_pages,
    write_to_pages,
)
from megatron.core.ops.tiled_attention import tiled_paged_attention
from megatron.core.transformer import CacheShapes
from megatron.core.transformer.attention import CoreAttention


class StateCache:
    """State buffers [slots + 1, ...] of the recurrent mixers, by name.

    A buffer is allocated at the first request, with the mixer's shape and dtype. The last slot
    belongs to no sequence: padding rows, whose slot is -1, write there.

    Args:
        num_slots: largest number of sequences and snapshots.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a state cache of {num_slots} slots: use a positive number")
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._buffers: dict[str, Tensor] = {}

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    @property
    def addresses(self) -> tuple[int, ...]:
        """Device addresses of the buffers, in the order of allocation."""
        return tuple(buffer.data_ptr() for buffer in self._buffers.values())

    def take(self, count: int) -> list[int]:
        """Allocate slots for new sequences. Their contents are stale; see `copy`.

        Raises:
            ValueError: fewer than `count` slots are free.
        """
        if count > len(self._free):
            raise ValueError(
                f"{count} sequences, but {len(self._free)} of {self.num_slots} slots are "
                "free: pass fewer sequences, or enlarge the state cache"
            )
        return [self._free.pop() for _ in range(count)]

    def release(self, slots: Collection[int]) -> None:
        """Free the slots of finished sequences.

        Raises:
            ValueError: a slot is not allocated.
        """
        for slot in slots:
            if slot in self._free or not 0 <= slot < self.num_slots:
                raise ValueError(
                    f"slot {slot} of {self.num_slots} is not allocated: release it once"
                )
            self._free.append(slot)

    def give_back(self) -> None:
        """Free the memory of all buffers; `buffer` allocates them again."""
        self._buffers.clear()

    def copy(self, copies: Sequence[tuple[int | None, int]]) -> None:
        """Copy states between slots.

        Args:
            copies: (source, target) pairs; source None writes zeros. The order matters, because a
                target may be the source of a later pair.
        """
        for source, target in copies:
            for buffer in self._buffers.values():
                # A new sequence must not see the states that the slot's last owner left.
                if source is None:
                    buffer[target].zero_()
                else:
                    buffer[target].copy_(buffer[source])

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the buffer [slots + 1, *shape] of this name; allocated with zeros.

        Raises:
            ValueError: the buffer has another shape, dtype or device.
        """
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.zeros((self.num_slots + 1, *shape), dtype=dtype, device=device)
            self._buffers[name] = buffer
        elif (tuple(buffer.shape[1:]), buffer.dtype, buffer.device) != (
            tuple(shape),
            dtype,
            torch.device(device),
        ):
            raise ValueError(
                f"state {name}: {list(shape)} {dtype} on {device} does not match "
                f"{list(buffer.shape[1:])} {buffer.dtype} on {buffer.device}: use one cache "
                "per model"
            )
        return buffer


class PagedCache:
    """Cache memory of one engine: a `KeyValueCache` and a `RecurrentCache`.

    Args:
        shapes: shapes of the cache entries.
        num_blocks: pages per attention layer.
        block_size: tokens per page.
        num_slots: state slots, for sequences and snapshots.
        device: device of the model.
    """

    def __init__(
        self,
        shapes: CacheShapes,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shapes, self.num_blocks, self.block_size = shapes, num_blocks, block_size
        self.device = torch.device(device)
        self.states = StateCache(num_slots)
        self._pages: list[Tensor] = []
        self._kv_pages: list[JointPages | None] = []
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, at construction and again after `give_back`."""
        # Keys and values of a token are adjacent: [blocks, block_size, 2g, d]. The pages are
        # uninitialised; kernels mask slots beyond the context length.
        self._pages = [
            torch.empty(
                (self.num_blocks, self.block_size, *entry),
                dtype=self.shapes.dtype,
                device=self.device,
            )
            for entry in self.shapes.page_entries
        ]
        self._kv_pages = [JointPages(pages) if pages.ndim == 4 else None for pages in self._pages]
        for name, (shape, dtype) in self.shapes.states.items():
            self.states.buffer(name, shape, dtype=dtype, device=self.device)

    def give_back(self) -> None:
        """Free the memory; all entries are lost."""
        self._pages, self._kv_pages = [], []
        self.states.give_back()

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages and slots on this rank."""
        pages = sum(x.numel() * x.element_size() for x in self._pages)
        return pages + self.states.num_bytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """Device addresses of the pages and the states. `allocate` changes them."""
        return (*(pages.data_ptr() for pages in self._pages), *self.states.addresses)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key_value: Tensor,
        rows: PagedRows,
        core: CoreAttention,
        *,
        sinks: Tensor | None,
    ) -> Tensor:
        """Write keys and values to the cache, then attend; see `KeyValueCache`."""
        pages, options = self._kv_pages[layer], {"batch": rows.batch, "scale": core.scale}
        assert pages is not None
        options |= {"window": core.window, "sinks": sinks}
        # Batch invariance needs the tiled kernel: its reduction order is independent of the batch.
        if core.backend.batch_invariant:
            (key, value), (keys, values) = key_value.chunk(2, 1), pages.pages.chunk(2, 2)
            write_to_pages(
                key,
                value,
                key_cache=keys,
                value_cache=values,
                slot_mapping=rows.slot_mapping,
                recorded=rows.batch.recorded,
            )
            return tiled_paged_attention(query, keys, values, **options)
        options["slot_mapping"] = rows.slot_mapping
        if rows.graph is None:
            return write_and_attend(query, key_value, pages, **options)
        # A CPU graph calls attention at each replay, as block tables and lengths change per step.
        replayed = ReplayedAttention(query, key_value, pages, **options)
        rows.graph.call(replayed)
        return replayed.out

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        latent: Tensor,
        rows: PagedRows,
        core: CoreAttention,
        *,
        value_features: int,
    ) -> Tensor:
        """Write latents to the cache, then attend; see `KeyValueCache`."""
        cache = self._pages[layer]

        def attend() -> Tensor:
            write_latents_to_pages(
                latent,
                latent_cache=cache,
                slot_mapping=rows.slot_mapping,
                recorded=rows.batch.recorded,
            )
            options = {"batch": rows.batch, "scale": core.scale}
            if core.backend.batch_invariant:
                # A latent is the key and the value of a single head.
                pages = cache.unsqueeze(2)
                return tiled_paged_attention(query, pages, pages, **options)[..., :value_features]
            return paged_latent_attention(query, cache, value_features=value_features, **options)

        return attend() if rows.graph is None else rows.graph.call_for(attend)

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the state buffer [slots + 1, *shape] of this name; see `StateCache.buffer`."""
        return self.states.buffer(name, shape, dtype=dtype, device=device)

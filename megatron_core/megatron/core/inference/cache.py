# SPDX-License-Identifier: Apache-2.0
"""The inference cache: its sizes, and device memory of pages, latents and recurrent states.

An `EngineConfig` bounds the cache; `CacheSizes` are the sizes that all pipeline stages agree on.

`PagedCache` allocates the entries that `CacheShapes` describes: for each attention layer, pages
[blocks, block_size, ...], which sequences occupy block by block (Kwon et al. 2023, arXiv
2309.06180); for each recurrent mixer, one slot of constant size per sequence. The `scheduler`
assigns blocks and slots to sequences; this module only stores, and attends to, the entries.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.context_parallel.layout import PagedRows
from megatron.core.inference.stages import StageLink
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

#: Largest sequence length for block accounting in models without attention, whose tokens take no
#: cache memory.
MAX_SEQUENCE_TOKENS = 1 << 20

#: Neutral element of a minimum over stages.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and scheduling options of an engine.

    Args:
        max_num_seqs: largest number of running sequences.
        max_num_batched_tokens: token budget of a step; longer prompts take several steps.
        block_size: tokens per cache block, a power of two, at least 16.
        num_blocks: number of cache blocks; None derives it from `memory_bytes`.
        memory_bytes: bytes of pages and states. The states of `max_num_seqs` sequences come first,
            then state snapshots for the prefix cache with at most a quarter of the remaining bytes,
            then pages.
        prefix_caching: share cache blocks among requests with a common prefix.
        token_multiple: pad the number of tokens of a step to a multiple of this; with sequence
            parallelism the number of ranks.
        asynchronous: schedule a step while the previous step runs. A stop token, `Engine.abort` and
            `Engine.finish` then take effect one step late.
        num_speculative_tokens: largest number of drafts per sequence and step; 0 disables
            speculative decoding.
        max_model_len: longest sequence in tokens; None takes the model's limit.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    prefix_caching: bool = True
    token_multiple: int = 1
    asynchronous: bool = False
    num_speculative_tokens: int = 0
    max_model_len: int | None = None

    def limited_to(self, max_sequence_length: int | None) -> EngineConfig:
        """Return the config with `max_model_len` at most the longest sequence of a model."""
        lengths = [n for n in (self.max_model_len, max_sequence_length) if n is not None]
        return dataclasses.replace(self, max_model_len=min(lengths, default=None))

    @property
    def min_blocks(self) -> int:
        """Smallest number of cache blocks: a step holds all drafts of a sequence and one token."""
        return -(-(1 + self.num_speculative_tokens) // self.block_size)

    @property
    def min_blocks_text(self) -> str:
        """Text for the smallest cache, for error messages."""
        number = "one block" if self.min_blocks == 1 else f"{self.min_blocks} blocks"
        return f"{number} of {self.block_size} tokens"

    def min_state_slots(self, shapes: CacheShapes) -> int:
        """Return the state slots of `max_num_seqs` sequences, without cached snapshots."""
        if not shapes.states:
            return 1
        # Restoring a snapshot needs the snapshot's slot and the slot of the sequence at once.
        slots = self.max_num_seqs + (1 if self.prefix_caching else 0)
        # Speculation saves the states before the drafts in a second slot.
        return slots + (self.max_num_seqs if self.num_speculative_tokens else 0)

    def min_state_bytes(self, shapes: CacheShapes) -> int:
        """Return the bytes of `min_state_slots` slots and of the padding slot."""
        return (self.min_state_slots(shapes) + 1) * shapes.state_bytes

    def window_blocks(self, num_blocks: int, window: int, *, steps: int = 1) -> int:
        """Return the number of blocks for layers with a window, if other layers have `num_blocks`.

        Running sequences need blocks for their windows and for the tokens of the steps in flight.
        The prefix cache gets an eighth of `num_blocks` in addition.

        Args:
            num_blocks: blocks for layers with full attention.
            window: the largest window, in tokens.
            steps: number of steps in flight.
        """
        # The first and the last block of a window may be partly outside of it.
        per_sequence = -(-(window + self.num_speculative_tokens) // self.block_size) + 2
        in_flight = steps * -(-self.max_num_batched_tokens // self.block_size)
        cached = num_blocks // 8 if self.prefix_caching else 0
        return min(num_blocks, self.max_num_seqs * per_sequence + in_flight + cached)

    def sizes(
        self, shapes: CacheShapes, *, window: int | None = None, steps: int = 1
    ) -> tuple[int, int]:
        """Return the number of blocks and the number of state slots.

        Args:
            shapes: shapes of the model's cache entries.
            window: largest window, if layers with a window have blocks of their own
                (`window_blocks`); None if all layers share one block table.
            steps: number of steps in flight.

        Raises:
            ValueError: `memory_bytes` is too small for the states and `min_blocks` blocks.
        """
        full_bytes, windowed_bytes = shapes.token_bytes * self.block_size, 0
        if window is not None:
            windowed_bytes = shapes.windowed_token_bytes * self.block_size
            full_bytes -= windowed_bytes

        def page_bytes(num_blocks: int) -> int:
            total = num_blocks * full_bytes
            if window is not None:
                total += self.window_blocks(num_blocks, window, steps=steps) * windowed_bytes
            return total

        min_page_bytes = page_bytes(self.min_blocks)
        slots = self.min_state_slots(shapes)
        if self.num_blocks is not None:
            snapshots = 2 * self.max_num_seqs if self.prefix_caching and shapes.states else 0
            return self.num_blocks, slots + snapshots
        if self.memory_bytes is None:
            raise ValueError("an engine needs num_blocks or memory_bytes: give one of them")
        # One slot more than can be allocated: padding rows write to it.
        remaining_bytes = self.memory_bytes - (slots + 1) * shapes.state_bytes
        if remaining_bytes < min_page_bytes:
            required_bytes = (slots + 1) * shapes.state_bytes + min_page_bytes
            states = f"the states of {self.max_num_seqs} sequences and " if shapes.states else ""
            raise ValueError(
                f"{self.memory_bytes:,} bytes of memory do not fit "
                f"{states}{self.min_blocks_text}: give at least {required_bytes:,}"
            )
        if shapes.states and self.prefix_caching:
            # Snapshots must leave room for `min_blocks` blocks.
            snapshot_bytes = min(remaining_bytes // 4, remaining_bytes - min_page_bytes)
            snapshots = min(snapshot_bytes // shapes.state_bytes, 16 * self.max_num_seqs)
            slots += snapshots
            remaining_bytes -= snapshots * shapes.state_bytes
        # Without attention a block takes no memory: provide enough for the longest sequences.
        max_tokens = min(self.max_model_len or MAX_SEQUENCE_TOKENS, MAX_SEQUENCE_TOKENS)
        max_blocks = self.max_num_seqs * -(-max_tokens // self.block_size)
        if full_bytes:
            max_blocks = remaining_bytes // full_bytes
        if not windowed_bytes:
            return max_blocks, slots
        least = max(self.min_blocks, 1)
        fits = bisect_right(
            range(least, max_blocks + 1), remaining_bytes, key=page_bytes
        )  # `page_bytes` never decreases
        return least + fits - 1, slots


@dataclass(frozen=True)
class CacheSizes:
    """Cache sizes that hold on all pipeline stages.

    Args:
        num_blocks: pages per attention layer.
        num_slots: number of state slots.
        has_states: True if any layer on any stage has recurrent states.
        window: largest attention window of any layer, in tokens; None if no layer has a window.
        num_window_blocks: pages per attention layer with a window, if other layers have none; None
            if all layers share one block table.
    """

    num_blocks: int
    num_slots: int = 1
    has_states: bool = False
    window: int | None = None
    num_window_blocks: int | None = None

    @staticmethod
    def for_all_stages(config: EngineConfig, shapes: CacheShapes, link: StageLink) -> CacheSizes:
        """Return the smallest sizes over all stages; all stages call this.

        Schedulers of different stages must assign the same blocks and slots.

        Raises:
            ValueError: the memory of a stage is too small.
        """
        any_states, any_full, largest_window = link.all_reduce_max(
            (int(bool(shapes.states)), int(shapes.has_full_attention), shapes.window or 0)
        )
        window = largest_window or None
        # All layers share one block table unless some, but not all, have a window.
        separate_window = window if any_full else None
        steps = 2 if config.asynchronous else link.count
        blocks, slots, problem = 0, 0, None
        try:
            blocks, slots = config.sizes(shapes, window=separate_window, steps=steps)
        except ValueError as error:
            problem = error
        # A stage without states must not limit the slots. An error is reduced as 0 blocks, so that
        # all stages raise instead of waiting.
        if not shapes.states and problem is None:
            slots = _UNLIMITED
        blocks, slots = link.all_reduce_max((-blocks, -slots))
        if not blocks:
            raise problem or ValueError(
                "the memory of another pipeline stage does not fit the states of "
                f"{config.max_num_seqs} sequences and {config.min_blocks_text}: give it more "
                "memory"
            )
        return CacheSizes(
            num_blocks=-blocks,
            num_slots=-slots if any_states else 1,
            has_states=bool(any_states),
            window=window,
            num_window_blocks=None
            if separate_window is None
            else config.window_blocks(-blocks, separate_window, steps=steps),
        )

    def check_drafts(self, config: EngineConfig) -> None:
        """Raise ValueError if the drafts of a sequence do not fit a step."""
        count, blocks = config.num_speculative_tokens, self.num_blocks
        max_tokens = min(config.max_num_batched_tokens, blocks * config.block_size)
        if count and count + 1 > max_tokens:
            raise ValueError(
                f"num-speculative-tokens is {count}: a step verifies them together with the "
                f"token before, but {count + 1} tokens do not fit a step of "
                f"{config.max_num_batched_tokens} tokens and a cache of {blocks} blocks of "
                f"{config.block_size}: use at most {max_tokens - 1}"
            )


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
        num_window_blocks: pages per attention layer with a window; None: as many as in other
            layers, in the same block table.
        device: device of the model.
    """

    def __init__(
        self,
        shapes: CacheShapes,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        num_window_blocks: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        # Whether each layer uses the block table of the layers with a window.
        self._is_windowed = [False] * len(shapes.attention)
        if num_window_blocks is not None and shapes.windows:
            self._is_windowed = [window is not None for window in shapes.windows]
        self.num_window_blocks = num_window_blocks
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
                ((windowed and self.num_window_blocks) or self.num_blocks, self.block_size, *entry),
                dtype=self.shapes.dtype,
                device=self.device,
            )
            for entry, windowed in zip(self.shapes.page_entries, self._is_windowed, strict=True)
        ]
        self._kv_pages = [
            JointPages(pages, self.shapes.cpu_dtype) if pages.ndim == 4 else None
            for pages in self._pages
        ]
        for name, (shape, dtype) in self.shapes.states.items():
            self.states.buffer(name, shape, dtype=dtype, device=self.device)

    def give_back(self) -> None:
        """Free the memory; all entries are lost."""
        self._pages, self._kv_pages = [], []
        self.states.give_back()

    @property
    def num_groups(self) -> int:
        """Number of groups of attention layers, each with a block table of its own."""
        return 1 if self.num_window_blocks is None else 2

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
        if self._is_windowed[layer]:
            assert rows.windowed is not None
            rows = rows.windowed
        pages, options = self._kv_pages[layer], {"batch": rows.batch, "scale": core.scale}
        assert pages is not None
        options |= {"softcap": core.softcap, "window": core.window, "sinks": sinks}
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

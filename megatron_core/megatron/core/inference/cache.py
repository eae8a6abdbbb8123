# SPDX-License-Identifier: Apache-2.0
"""What generation keeps of tokens: pages of keys and values or latents, and states of mixers.

`CacheShapes` says what a model keeps of each token and of each row. `PagedCache` is that memory:
for every attention layer pages [blocks, block_size, ...], given out block by block as rows grow
(Kwon et al. 2023, arXiv 2309.06180), and for every recurrent mixer slots of constant size, one a
row. Who has which block and slot is decided elsewhere (`scheduler`); here is only the memory, and
the attention to it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

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
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.transformer import LatentAttention, SelfAttention
from megatron.core.transformer.attention import CoreAttention


@dataclass(frozen=True, kw_only=True)
class CacheShapes:
    """What a rank's part of a model keeps while generating.

    Args:
        attention: of each attention layer, what a token leaves: (g, d) for keys and for values, or
            (c,) for one latent.
        states: of each recurrent mixer by name, shape and dtype of what a row leaves.
        dtype: of keys, values and latents.
        window: how many tokens the attention layer that sees most sees; None if one sees all.
        cpu_dtype: what a CPU multiplies 16-bit operands of attention in.
    """

    attention: tuple[tuple[int, ...], ...] = ()
    states: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    window: int | None = None
    cpu_dtype: torch.dtype | None = None

    @staticmethod
    def of(layers: Iterable[nn.Module], dtype: torch.dtype) -> CacheShapes:
        """Return those of the mixers among `layers`, in the order of their blocks.

        Args:
            layers: for example all modules of a decoder.
            dtype: of activations.
        """
        attention: list[tuple[int, ...]] = []
        states: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        windows: list[int | None] = []
        cpu_dtype = None
        for layer in layers:
            if isinstance(layer, (SelfAttention, LatentAttention)):
                attention.append(layer.kept_shape)
                windows.append(layer.core.window)
                cpu_dtype = layer.core.context.cpu_dtype
            elif isinstance(layer, RecurrentMixer):
                states |= layer.kept_shapes(dtype)
        known = [window for window in windows if window is not None]
        window = max(known) if known and len(known) == len(windows) else None
        return CacheShapes(
            attention=tuple(attention),
            states=states,
            dtype=dtype,
            window=window,
            cpu_dtype=cpu_dtype,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in pages of all layers."""
        numbers = sum(math.prod(_joint(shape)) for shape in self.attention)
        return numbers * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes that a row takes in a slot of all mixers."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.states.values())


def _joint(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a token takes in a page: keys and values (g, d) as (2g, d), a latent as it is."""
    return (2 * shape[0], shape[1]) if len(shape) == 2 else shape


class StateCache:
    """Hold [slots + 1, ...] buffers by name, for every recurrent mixer those that it asks for.

    A buffer is allocated when first requested, with the shape and dtype that the mixer gives: a
    model without recurrent mixers has none. The last row of each is nobody's: rows that write
    nothing that counts, those of slot -1, write there.

    Args:
        num_slots: how many sequences there may be at a time.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a state cache of {num_slots} slots: use a positive number")
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._buffers: dict[str, Tensor] = {}

    @property
    def free_slots(self) -> int:
        """How many more sequences there may be."""
        return len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are, in the order in which they were made."""
        return tuple(buffer.data_ptr() for buffer in self._buffers.values())

    def take(self, count: int) -> list[int]:
        """Return free slots for new sequences; they hold what was there, see `copy`.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(
                f"{count} sequences, but {len(self._free)} of {self.num_slots} slots are free: "
                "give fewer at a time, or make the state cache larger"
            )
        return [self._free.pop() for _ in range(count)]

    def release(self, slots: Collection[int]) -> None:
        """Free the slots of sequences that have ended.

        Raises:
            ValueError: one that nobody has taken.
        """
        for slot in slots:
            if slot in self._free or not 0 <= slot < self.num_slots:
                raise ValueError(f"slot {slot} of {self.num_slots} is not taken: release it once")
            self._free.append(slot)

    def give_back(self) -> None:
        """Give the memory of all buffers back; what is asked for next is made anew."""
        self._buffers.clear()

    def copy(self, copies: Sequence[tuple[int | None, int]]) -> None:
        """Copy what slots hold, (source, target) after (source, target); from None are zeros."""
        for source, target in copies:
            for buffer in self._buffers.values():
                if source is None:
                    buffer[target].zero_()
                else:
                    buffer[target].copy_(buffer[source])

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return what is kept by this name, [slots + 1, *shape]; zeros the first time.

        Raises:
            ValueError: it was made with another shape, dtype or device.
        """
        found = self._buffers.get(name)
        if found is None:
            found = torch.zeros((self.num_slots + 1, *shape), dtype=dtype, device=device)
            self._buffers[name] = found
        elif (tuple(found.shape[1:]), found.dtype, found.device) != (
            tuple(shape),
            dtype,
            torch.device(device),
        ):
            raise ValueError(
                f"state {name}: {list(shape)} {dtype} on {device} does not continue "
                f"{list(found.shape[1:])} {found.dtype} on {found.device}: use one cache per model"
            )
        return found


class PagedCache:
    """The memory of one engine: a `KeyValueCache` for attention, a `RecurrentCache` for mixers.

    Args:
        shapes: what the model keeps.
        num_blocks: pages of each layer.
        block_size: tokens of a page.
        num_slots: rows that have states at a time, snapshots of states included.
        device: where the model is.
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
        self._joint: list[JointPages | None] = []
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, as at the start and again after `give_back`."""
        # Keys and values of a token lie one after the other: [blocks, block_size, 2g, d].
        self._pages = [
            torch.empty(
                (self.num_blocks, self.block_size, *_joint(shape)),
                dtype=self.shapes.dtype,
                device=self.device,
            )
            for shape in self.shapes.attention
        ]
        self._joint = [JointPages(pages) if pages.ndim == 4 else None for pages in self._pages]
        for name, (shape, dtype) in self.shapes.states.items():
            self.states.buffer(name, shape, dtype=dtype, device=self.device)

    def give_back(self) -> None:
        """Give the memory back; what it held is lost."""
        self._pages, self._joint = [], []
        self.states.give_back()

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages and slots on this rank."""
        pages = sum(x.numel() * x.element_size() for x in self._pages)
        return pages + self.states.num_bytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the pages of each layer and the states are; others after `allocate`."""
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
        """Keep keys and values, then attend; see `KeyValueCache`."""
        pages, options = self._joint[layer], {"batch": rows.batch, "scale": core.scale}
        assert pages is not None
        options |= {"window": core.window, "sinks": sinks}
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
        """Keep latents, then attend to them; see `KeyValueCache`."""
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
                one = cache.unsqueeze(2)  # one head
                return tiled_paged_attention(query, one, one, **options)[..., :value_features]
            return paged_latent_attention(query, cache, value_features=value_features, **options)

        return attend() if rows.graph is None else rows.graph.call_for(attend)

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return what is kept by this name, [slots + 1, *shape]; see `StateCache.buffer`."""
        return self.states.buffer(name, shape, dtype=dtype, device=device)

# SPDX-License-Identifier: Apache-2.0
"""The arena: leases of flat buffers for gathered weights and gradients under way.

A lease belongs to whoever took it until it is given back; no storage is leased twice at a time.
Buffers are kept by size and dtype, so the steps of a training run allocate only at first. On a GPU
a buffer given back carries an event: the stream of its next holder waits until its last reader has
run. With `poison`, buffers hold NaN when they are leased and again when they are given back, so a
read before the gather or after the release shows in the loss, and autograd refuses a saved view.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.comm.poison import poison_
from megatron.core.device import Event, Stream, current_stream, new_event, on_stream

#: A size class is at most 1/64 above what was asked for, and a multiple of so many elements.
_STEPS_PER_OCTAVE_LOG2 = 6
_ALIGNMENT = 16


@dataclass
class _Buffer:
    """Storage [size class], and the event after which it may be written again."""

    data: torch.Tensor
    released: Event


class Arena:
    """Lease flat buffers on one device.

    Args:
        device: where they lie.
        poison: fill buffers with NaN (integers: their largest value) at lease and at release.
    """

    def __init__(self, device: torch.device | str, *, poison: bool = False) -> None:
        self.device = torch.device(device)
        self.poison = poison
        self.live_bytes = 0
        self.peak_bytes = 0
        self._free: dict[tuple[int, torch.dtype], list[_Buffer]] = {}
        # The leased tensor is kept with its buffer: its id stays its own while the lease lasts.
        self._leased: dict[int, tuple[torch.Tensor, _Buffer]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers, leased or kept for the next lease, sizes rounded up."""
        kept = [buffer for free in self._free.values() for buffer in free]
        leased = [buffer for _, buffer in self._leased.values()]
        return sum(b.data.numel() * b.data.element_size() for b in kept + leased)

    def lease(
        self, numel: int, dtype: torch.dtype, *, stream: Stream | None = None
    ) -> torch.Tensor:
        """Return a flat tensor [numel] with no defined content, until `release`.

        Args:
            stream: where it is written first: this stream waits for the last holder's work. The
                current stream if None.
        """
        here = current_stream(self.device)
        stream = here if stream is None else stream
        free = self._free.get((size_class(numel), dtype))
        if free:
            buffer = free.pop()
            stream.wait_event(buffer.released)
        else:
            data = torch.empty(size_class(numel), dtype=dtype, device=self.device)
            buffer = _Buffer(data, new_event(self.device))
            stream.wait_stream(here)  # fresh memory is in order on the stream that allocated it
        if self.poison:
            with on_stream(stream):
                poison_(buffer.data)
        tensor = buffer.data[:numel]
        self._leased[id(tensor)] = (tensor, buffer)
        self.live_bytes += tensor.numel() * tensor.element_size()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        """Give a lease back; call it where the current stream has been told of the last reader.

        Args:
            tensor: what `lease` returned, itself and not a view of it.

        Raises:
            ValueError: the tensor is not leased: given back before, or never this arena's.
        """
        found = self._leased.pop(id(tensor), None)
        if found is None:
            raise ValueError(
                f"this tensor of {tensor.numel()} elements is not leased from the arena: release "
                "each lease once, by the tensor that lease() returned"
            )
        buffer = found[1]
        if self.poison:
            poison_(buffer.data)
        buffer.released.record(current_stream(self.device))
        self._free.setdefault((buffer.data.numel(), buffer.data.dtype), []).append(buffer)
        self.live_bytes -= tensor.numel() * tensor.element_size()

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        self.peak_bytes = self.live_bytes

    def trim(self) -> None:
        """Give the memory of all buffers that nobody leases back to the allocator."""
        for free in self._free.values():
            for buffer in free:
                buffer.released.synchronize()
        self._free.clear()

    def detach(self) -> list[torch.Tensor]:
        """Hand over the buffers that nobody leases: no later lease gets their memory.

        A buffer that was leased while a CUDA graph was captured belongs to that graph: replays
        write it, and nothing outside may wait for the event that it carries.

        Raises:
            ValueError: something is leased.
        """
        if self._leased:
            raise ValueError(
                f"{len(self._leased)} buffers are leased from the arena: release them first"
            )
        found = [buffer.data for free in self._free.values() for buffer in free]
        self._free.clear()
        return found


def size_class(numel: int) -> int:
    """Return `numel` rounded up to the size in which buffers are kept, at most 1/64 or 15 more."""
    step = max(_ALIGNMENT, 1 << max(0, numel.bit_length() - 1 - _STEPS_PER_OCTAVE_LOG2))
    return -(-numel // step) * step

# SPDX-License-Identifier: Apache-2.0
"""State cache: what recurrent mixers carry from token to token, one slot a sequence.

A sequence takes a slot when it begins and frees it when it ends; the next one that takes the slot
starts from zeros. What a slot holds does not grow with the sequence, so slots, unlike keys and
values, are made once and used again by batch after batch.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from megatron.core.device import pin


class StateCache:
    """Hold [slots + 1, ...] buffers by name, for every recurrent mixer those that it asks for.

    A buffer is made when it is first asked for, with the shape and dtype that the mixer says: a
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

    def take(self, count: int) -> list[int]:
        """Return free slots for new sequences; they hold zeros.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(
                f"{count} sequences, but {len(self._free)} of {self.num_slots} slots are free: "
                "give fewer at a time, or make the state cache larger"
            )
        taken = [self._free.pop() for _ in range(count)]
        places: dict[torch.device, Tensor] = {}  # copied once, and the host does not wait
        for buffer in self._buffers.values():
            device = buffer.device
            if device not in places:
                index = pin(torch.tensor(taken, dtype=torch.int64), device)
                places[device] = index.to(device, non_blocking=True)
            buffer.index_fill_(0, places[device], 0)
        return taken

    def release(self, slots: Collection[int]) -> None:
        """Free the slots of sequences that have ended.

        Raises:
            ValueError: one that nobody has taken.
        """
        for slot in slots:
            if slot in self._free or not 0 <= slot < self.num_slots:
                raise ValueError(f"slot {slot} of {self.num_slots} is not taken: release it once")
            self._free.append(slot)

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

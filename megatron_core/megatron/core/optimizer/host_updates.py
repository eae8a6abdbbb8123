# SPDX-License-Identifier: Apache-2.0
"""HostUpdates: ranges whose masters and moments live in host memory, and are updated there.

Per range a step copies the gradients over, updates on the host and copies the weights back (Ren et
al. 2021, "ZeRO-Offload"). The copies run beside the host's arithmetic, on a stream for each
direction: while range i is updated, the gradients of i + 1 arrive and the weights of i - 1 leave.
On a CPU the same steps are plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.core.device import current_stream, new_event, new_stream, on_stream, pin
from megatron.core.optimizer.range_state import RangeState

#: Ranges that may be on their way in one direction at a time.
SLOTS = 2


class HostUpdates:
    """Carry out the updates of states in host memory.

    Args:
        states: those with `on_host`.
        device: where weights and gradients are.

    Attributes:
        bytes_to_host, bytes_to_device: copied so far.
    """

    def __init__(self, states: Sequence[RangeState], device: torch.device) -> None:
        self.states, self.device = tuple(states), device
        self.bytes_to_host = self.bytes_to_device = 0
        self._down, self._up = new_stream(device), new_stream(device)
        largest = max((len(s.master) for s in self.states), default=0)
        dtypes = {s.owned.gradients.dtype for s in self.states}
        self._arrived = [
            {dtype: self._staging(largest, dtype) for dtype in dtypes} for _ in range(SLOTS)
        ]
        # fp32 weights leave from the master itself
        narrow = {s.owned.weights.dtype for s in self.states if s.saves_master}
        self._leaving = [
            {dtype: self._staging(largest, dtype) for dtype in narrow} for _ in range(SLOTS)
        ]
        self._fetches = [new_event(device) for _ in range(SLOTS)]
        self._sends = [new_event(device) for _ in range(SLOTS)]

    def begin(self) -> None:
        """Start to copy the first gradients; to be called when all gradients are final."""
        if not self.states:
            return
        self._up.synchronize()  # the last step's weights have left the masters
        self._down.wait_stream(current_stream(self.device))
        self._fetch(0)

    def run(self, update: Callable[[RangeState, torch.Tensor], None]) -> None:
        """Update every state after `begin`, and write the weights.

        Args:
            update: given a state and its gradients [k] in host memory.
        """
        for i, state in enumerate(self.states):
            if i + 1 < len(self.states):
                self._fetch(i + 1)
            self._fetches[i % SLOTS].synchronize()
            update(state, self._staged(self._arrived, i, state.owned.gradients))
            self._send(i)
        if self.states:
            current_stream(self.device).wait_stream(self._up)

    def _fetch(self, index: int) -> None:
        """Start to copy the gradients of a state to the host."""
        source = self.states[index].owned.gradients
        with on_stream(self._down):
            self._staged(self._arrived, index, source).copy_(source, non_blocking=True)
            self._fetches[index % SLOTS].record(self._down)
        self.bytes_to_host += source.numel() * source.element_size()

    def _send(self, index: int) -> None:
        """Start to copy the updated weights of a state to the device."""
        state = self.states[index]
        source, target = state.master, state.owned.weights
        if state.saves_master:
            if index >= SLOTS:
                self._sends[index % SLOTS].synchronize()
            source = self._staged(self._leaving, index, target).copy_(state.master)
        with on_stream(self._up):
            # after everything that was put on the device before, readers of the old weights too
            self._up.wait_stream(current_stream(self.device))
            target.copy_(source, non_blocking=True)
            self._sends[index % SLOTS].record(self._up)
        self.bytes_to_device += target.numel() * target.element_size()

    def _staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return pin(torch.empty(numel, dtype=dtype, device="cpu"), self.device)

    def _staged(
        self, slots: list[dict[torch.dtype, torch.Tensor]], index: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Return the part of a slot that a tensor of the state at `index` goes through."""
        return slots[index % SLOTS][like.dtype][: len(like)]

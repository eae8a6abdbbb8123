# SPDX-License-Identifier: Apache-2.0
"""Recurrences that run in Triton where the tensors and their sizes allow, else in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.ops.backend_choice import choose, uses_tensor_memory
from megatron.core.ops.recurrence import Recurrence, RecurrenceInputs
from megatron.core.ops.sequences import Sequences

#: What the kernels take: their tiles hold all features of keys, and T is solved in blocks.
CHUNK_SIZES = (16, 32, 64)
MOST_KEYS = 256
#: On Blackwell in 16 bits, where the gradients' accumulators must fit in tensor memory.
MOST_KEYS_IN_TENSOR_MEMORY = 128


@dataclass(frozen=True)
class ByDevice:
    """A `Recurrence` whose `prepare` picks an implementation; what is prepared stays with it.

    Args:
        op: its name, for messages.
        reference: in plain torch.
        kept: what `reference.prepare` returns.
        corrects: whether it is the delta rule, not SSD.
        scale: of queries; None is K^-0.5.
        chunk_size: tokens of a chunk.
        implementation: "reference", "triton" or None (by device and sizes).
    """

    op: str
    reference: Recurrence
    kept: type
    corrects: bool
    scale: float | None
    chunk_size: int
    implementation: str | None = None

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> Any:
        """See `Recurrence`.

        Raises:
            ValueError: an implementation that is unknown, or that cannot take these tensors.
        """
        if choose(self.implementation, inputs.value, self.op) == "reference":
            return self.reference.prepare(inputs, sequences)
        problem = self._unfit(inputs)
        if problem is None:
            return self._kernels().prepare(inputs, sequences)
        if self.implementation is not None:
            raise ValueError(
                f"{self.op}: the Triton kernels take {problem}; use implementation='reference'"
            )
        return self.reference.prepare(inputs, sequences)

    def sweep(
        self, prepared: Any, initial: torch.Tensor | None, *, keep_states: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        return self._that_made(prepared).sweep(prepared, initial, keep_states=keep_states)

    def summary(self, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        return self._that_made(prepared).summary(prepared)

    def state_gradient(self, prepared: Any, grad: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        return self._that_made(prepared).state_gradient(prepared, grad)

    def backward(
        self, prepared: Any, grad: torch.Tensor, grad_last: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        return self._that_made(prepared).backward(prepared, grad, grad_last)

    def _that_made(self, prepared: Any) -> Recurrence:
        return self.reference if isinstance(prepared, self.kept) else self._kernels()

    def _kernels(self) -> Recurrence:
        from megatron.core.ops.chunked_recurrence.triton import TritonRecurrence

        return TritonRecurrence(self.corrects, self.scale, self.chunk_size)

    def _unfit(self, inputs: RecurrenceInputs) -> str | None:
        """Return what the kernels take and these inputs are not; None where they fit."""
        keys = inputs.key.shape[-1]
        most = MOST_KEYS
        if uses_tensor_memory(inputs.value):
            most = MOST_KEYS_IN_TENSOR_MEMORY
        if keys > most:
            return f"keys of up to {most} features, not {keys}"
        if self.chunk_size not in CHUNK_SIZES:
            sizes = ", ".join(map(str, CHUNK_SIZES[:-1]))
            return f"chunks of {sizes} or {CHUNK_SIZES[-1]} tokens, not {self.chunk_size}"
        return None

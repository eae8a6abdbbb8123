# SPDX-License-Identifier: Apache-2.0
"""Dispatch of recurrences: Triton if the device and the sizes allow it, else plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.ops.backend_choice import choose, uses_tensor_memory
from megatron.core.ops.recurrence.interface import Recurrence, RecurrenceInputs
from megatron.core.ops.sequences import Sequences

#: Limits of the kernels: a tile holds all features of keys, and T is solved in blocks of 16 rows.
CHUNK_SIZES = (16, 32, 64)
MAX_KEYS = 256
#: On Blackwell in 16 bits, where the gradients' accumulators must fit in tensor memory.
MAX_KEYS_IN_TENSOR_MEMORY = 128


@dataclass(frozen=True)
class DeviceDispatchedRecurrence:
    """A `Recurrence` whose `prepare` picks the implementation of the later operations too.

    Args:
        op: the op's name, for messages.
        reference: the implementation in plain torch.
        prepared_type: the type that `reference.prepare` returns.
        delta_rule: whether it is the delta rule, not SSD.
        scale: factor of queries; None is K^-0.5.
        chunk_size: tokens of a chunk.
        implementation: "reference", "triton" or None (by device and sizes).
    """

    op: str
    reference: Recurrence
    prepared_type: type
    delta_rule: bool
    scale: float | None
    chunk_size: int
    implementation: str | None = None

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> Any:
        """See `Recurrence`.

        Raises:
            ValueError: an implementation that is unknown, or that does not support these tensors.
        """
        if choose(self.implementation, inputs.value, self.op) == "reference":
            return self.reference.prepare(inputs, sequences)
        problem = self._unsupported(inputs)
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
        return self._implementation_of(prepared).sweep(prepared, initial, keep_states=keep_states)

    def summary(self, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        return self._implementation_of(prepared).summary(prepared)

    def state_gradient(self, prepared: Any, d_out: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        return self._implementation_of(prepared).state_gradient(prepared, d_out)

    def backward(
        self, prepared: Any, d_out: torch.Tensor, d_final: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        return self._implementation_of(prepared).backward(prepared, d_out, d_final)

    def _implementation_of(self, prepared: Any) -> Recurrence:
        return self.reference if isinstance(prepared, self.prepared_type) else self._kernels()

    def _kernels(self) -> Recurrence:
        from megatron.core.ops.recurrence.sweep.triton import TritonRecurrence

        return TritonRecurrence(self.delta_rule, self.scale, self.chunk_size)

    def _unsupported(self, inputs: RecurrenceInputs) -> str | None:
        """Return the limit of the kernels that these inputs exceed; None if there is none."""
        keys = inputs.key.shape[-1]
        max_keys = MAX_KEYS
        if uses_tensor_memory(inputs.value):
            max_keys = MAX_KEYS_IN_TENSOR_MEMORY
        if keys > max_keys:
            return f"keys of up to {max_keys} features, not {keys}"
        if self.chunk_size not in CHUNK_SIZES:
            sizes = ", ".join(map(str, CHUNK_SIZES[:-1]))
            return f"chunks of {sizes} or {CHUNK_SIZES[-1]} tokens, not {self.chunk_size}"
        return None

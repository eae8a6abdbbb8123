# SPDX-License-Identifier: Apache-2.0
"""State of recurrent mixers while generating: by name, one slot a sequence.

A mixer keeps two buffers, the last rows before its convolution and the states of its recurrence. A
call of many new tokens carries both on; a call of one new token a row changes them in place:

    conv = cache.buffer(f"{name}.conv", (W - 1, *c), dtype=x.dtype, device=x.device)
    state = cache.buffer(f"{name}.state", (H, K, V), dtype=torch.float32, device=x.device)
    if x.shape[0] == 1:  # [1, b, ...]: every row has one new token, or slot -1
        return recurrence_decode(x[0], ..., memory=DecodeMemory(conv, state, cache.slots))[None]
    rows = cache.new_tokens(x.shape[0])
    y, last = causal_conv1d(
        rows.pack(x), ..., sequences=rows.sequences, initial=carried(conv, cache.slots)
    )
    keep(conv, cache.slots, last)
    out, last = gated_delta_rule(..., initial=carried(state, cache.slots))
    keep(state, cache.slots, last)
    return rows.unpack(out)

Nothing here is differentiable: there is no backward pass while generating.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.core.context_parallel.token_rows import TokenRows


class RecurrentCache(Protocol):
    """What recurrent mixers need of a cache while generating.

    Attributes:
        slots: int64 [b], where each row's state is; -1 for a row without a new token in this call,
            whose output is zero and which changes no state.
    """

    slots: torch.Tensor

    def new_tokens(self, length: int) -> TokenRows:
        """Return which of the [length, b] tokens of this call are real: one sequence a row, empty
        where it has none. Left padding is not real."""
        ...

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return what is kept by this name, [slots + 1, *shape], the same storage in every call.

        It is zero for a sequence that begins. The last row is nobody's: what rows of slot -1 write
        goes there, and nothing that counts is read from it.
        """
        ...


def carried(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what rows go on from, [b, ...]; zero for a row of slot -1.

    Args:
        buffer: [slots + 1, ...] of a `RecurrentCache`.
        slots: int64 [b].
    """
    found = buffer[slots]  # -1 is the last row
    absent = (slots < 0).view(-1, *[1] * (found.ndim - 1))
    return found.masked_fill_(absent, 0)


def keep(buffer: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write what rows go on from by slot; of a row of slot -1 nothing is kept.

    Args:
        buffer: [slots + 1, ...] of a `RecurrentCache`.
        slots: int64 [b]; none but -1 twice.
        values: [b, ...].
    """
    with torch.no_grad():
        buffer[slots] = values.to(buffer.dtype)

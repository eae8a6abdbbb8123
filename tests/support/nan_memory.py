# SPDX-License-Identifier: Apache-2.0
"""Memory from `torch.empty` that shows when it is read before it is written.

Fresh memory is often zero by luck, and code that forgets to write an element then passes its tests.
Inside `nan_memory()` every uninitialised tensor holds NaN (integers: the least value, unsigned ones
the greatest).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_UNINITIALISED = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.empty_permuted,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    }
)


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with the value that shows: NaN, or an extreme integer; True for booleans."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    limits = torch.iinfo(tensor.dtype)
    return tensor.fill_(limits.min if limits.min < 0 else limits.max)


class _PoisonMode(TorchDispatchMode):
    """Poison what the operators that promise no value return.

    A mode of the dispatcher, because one of `__torch_function__` is off during backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.poisoned = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNINITIALISED and made.device.type != "meta":
            self.poisoned += 1
            poison_(made)
        return made


@contextlib.contextmanager
def nan_memory() -> Iterator[_PoisonMode]:
    """Poison uninitialised tensors made in this thread; yields a counter of them, `poisoned`."""
    with _PoisonMode() as mode:
        yield mode

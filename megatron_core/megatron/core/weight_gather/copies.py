# SPDX-License-Identifier: Apache-2.0
"""Give matrices of a store copies in fewer bytes, which generation multiplies by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.core.ops.weight_copy import CopyDtype, WeightCopy
from megatron.core.weight_gather.handle import WeightHandle


@dataclass(frozen=True)
class CopyReport:
    """What copies cost and how far they are from what they were made of.

    Args:
        matrices: that were copied.
        packed: how many of them are in oneDNN's layout.
        nbytes, stored_bytes: of the copies, and of what is stored of the same matrices.
        mean_error, worst_error: of a matrix, relative, Frobenius norms.
    """

    dtype: CopyDtype
    matrices: int
    packed: int
    nbytes: int
    stored_bytes: int
    mean_error: float
    worst_error: float

    def __str__(self) -> str:
        packed = f"{self.packed} packed by oneDNN, " if self.packed else ""
        return (
            f"{self.dtype} weights: copies of {self.matrices} matrices, {packed}"
            f"{self.nbytes / 1e6:,.1f} MB "
            f"next to the stored {self.stored_bytes / 1e6:,.1f} MB; relative error of a matrix "
            f"{self.mean_error:.2%}, at most {self.worst_error:.2%}"
        )


def copy_weights(
    handles: Iterable[WeightHandle], dtype: CopyDtype, *, packs: bool = True
) -> CopyReport:
    """Give matrices a copy of what they hold now, which products outside of autograd use from here
    on. It does not follow updates: copy again after them.

    Args:
        packs: pack bf16 copies where that was measured to be faster. Ranks that have the same
            matrix must not: each would measure for itself, and they must compute alike.

    Raises:
        ValueError: a weight is not on a CPU, or is stored in the copy's dtype.
    """
    found = list(dict.fromkeys(handles))
    errors, packed, nbytes, stored = [], 0, 0, 0
    for handle in found:
        weight = handle.get()
        if weight.device.type != "cpu":
            raise ValueError(
                f"--weights-dtype {dtype} multiplies on a CPU, the model is on "
                f"{weight.device.type}: drop it, or give --device cpu"
            )
        if dtype == "bf16" and weight.dtype is torch.bfloat16:
            raise ValueError("--weights-dtype bf16: the weights are bf16 already: drop it")
        handle.copy = WeightCopy(weight, dtype, cpu_dtype=handle.cpu_dtype)
        errors.append(handle.copy.error(weight))
        packed += packs and handle.copy.pack()
        nbytes, stored = nbytes + handle.copy.nbytes, stored + weight.nbytes
    return CopyReport(
        dtype,
        matrices=len(found),
        packed=packed,
        nbytes=nbytes,
        stored_bytes=stored,
        mean_error=sum(errors) / max(1, len(errors)),
        worst_error=max(errors, default=0),
    )

# SPDX-License-Identifier: Apache-2.0
"""Grouped products as a GPU has them, on a CPU: nothing reads on the host where runs end.

torch's `grouped_mm` takes the place of both kernels, its weight gradients too: it reads the ends
inside of the operation, so that a recorded one follows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F

from megatron.core.ops import grouped_mm
from megatron.core.ops.grouped_mm import triton as kernels


def _wgrad_(
    total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, *, overwrite: bool
) -> None:
    product = F.grouped_mm(grad.t(), x, offs=ends)  # [runs, o, h]
    if overwrite:
        total.copy_(product)
    else:
        total.add_(product)


def _choice(*_: object, **__: object) -> str:
    return "triton"


def _is_taken(*_: object) -> bool:
    return True


@contextmanager
def products_of_a_gpu() -> Iterator[None]:
    """Let experts take the path of a GPU; widths must be of whole 16 bytes.

    No mock takes a call: it would hold the tensors.
    """
    with (
        mock.patch.object(grouped_mm, "choose", _choice),
        mock.patch.object(grouped_mm, "_is_torch_supported", _is_taken),
        mock.patch.object(kernels, "grouped_wgrad_", _wgrad_),
    ):
        yield

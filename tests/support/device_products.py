# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products on a CPU without host reads, as on a GPU.

torch's `grouped_mm` replaces both kernels, forward and weight gradient. It reads the group offsets
inside the operation, so a recorded operation follows new offsets.
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
    """Let experts take the GPU path; widths must be multiples of 16 bytes.

    Plain functions replace the originals: a mock would keep its arguments alive.
    """
    with (
        mock.patch.object(grouped_mm, "choose", _choice),
        mock.patch.object(grouped_mm, "_is_torch_supported", _is_taken),
        mock.patch.object(kernels, "grouped_wgrad_", _wgrad_),
    ):
        yield

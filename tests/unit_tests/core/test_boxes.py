# SPDX-License-Identifier: Apache-2.0
"""Boxes that a tensor is cut into."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.boxes import row_boxes


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (9, 5), (3, 7, 5), (2, 3, 4, 5), (2, 1, 40)])
@pytest.mark.parametrize("piece_bytes", [1, 48, 100, 1000])
def test_row_boxes_are_runs_in_order_and_small(shape: tuple[int, ...], piece_bytes: int) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    pieces = [tensor[box.slices] for box in row_boxes(shape, 4, piece_bytes=piece_bytes)]
    assert all(piece.is_contiguous() for piece in pieces)
    found = [piece.flatten() for piece in pieces] or [tensor.flatten()]
    assert torch.equal(torch.cat(found), tensor.flatten())
    row = 4 * shape[-1] if len(shape) > 1 else 4
    assert all(4 * piece.numel() <= max(piece_bytes, row) for piece in pieces)

# SPDX-License-Identifier: Apache-2.0
"""Splitting a tensor into boxes of rows."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.boxes import row_boxes


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (9, 5), (3, 7, 5), (2, 3, 4, 5), (2, 1, 40)])
@pytest.mark.parametrize("box_bytes", [1, 48, 100, 1000])
def test_row_boxes_are_ordered_contiguous_and_bounded(
    shape: tuple[int, ...], box_bytes: int
) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    views = [tensor[box.slices] for box in row_boxes(shape, 4, box_bytes=box_bytes)]
    assert all(view.is_contiguous() for view in views)
    blocks = [view.flatten() for view in views] or [tensor.flatten()]
    assert torch.equal(torch.cat(blocks), tensor.flatten())
    row_bytes = 4 * shape[-1] if len(shape) > 1 else 4
    assert all(4 * view.numel() <= max(box_bytes, row_bytes) for view in views)

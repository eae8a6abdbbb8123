# SPDX-License-Identifier: Apache-2.0
"""The equation of weighted sums of permuted rows; autograd's gradient is the gather."""

import torch


def sum_rows(
    y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return out[t] = sum_j w[t, j] · y[slots[t, j]], one row at a time; slot -1 adds nothing."""
    sums = []
    for token, row in enumerate(slots.tolist()):
        rows = [
            y[slot] * (1 if weights is None else weights[token, copy])
            for copy, slot in enumerate(row)
            if slot >= 0
        ]
        sums.append(torch.stack([torch.zeros_like(y[0]), *rows]).sum(0))
    return torch.stack(sums)

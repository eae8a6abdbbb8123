# SPDX-License-Identifier: Apache-2.0
"""The equations of grouped matmuls, one row at a time."""

from collections.abc import Sequence

import torch


def grouped_mm(x: torch.Tensor, matrices: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return y[i] = x[i] M_e for x [r, m] and M [runs, m, n], e the run of row i.

    Run e has counts[e] rows; y has no rows after the last run.
    """
    runs = [run for run, count in enumerate(counts) for _ in range(count)]
    return torch.stack([row @ matrices[run] for row, run in zip(x, runs, strict=False)])

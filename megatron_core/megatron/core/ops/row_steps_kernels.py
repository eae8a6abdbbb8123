# SPDX-License-Identifier: Apache-2.0
"""What Triton kernels over `RowSteps` share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_starts(row, inner, offset, outer_steps, inner_steps, STEP: tl.constexpr):
    """Return where rows begin, int64, of numbers int32: division of wider ones is slow."""
    outer = row // inner
    within = (row - outer * inner).to(tl.int64)
    return (offset + outer.to(tl.int64) * outer_steps + within * inner_steps) * STEP

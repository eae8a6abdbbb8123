# SPDX-License-Identifier: Apache-2.0
"""oneDNN's inner product, y = x Wᵀ + b on a CPU, of a dense weight or of a packed one.

A packed weight is a copy in the blocked layout that oneDNN reads. `F.linear` in bf16 packs its
weight at every call, so a weight that is packed once is faster: 0.35 to 0.83 of the time for 1 to
256 rows and five shapes on a Xeon with AMX, and the same time for 1,024 rows; 0.5 to 0.8 of the
time on an AMD EPYC with avx512_bf16.

torch declares these operators for its compiler. `is_available` and `agrees` test that they exist
and compute the product on this CPU.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

#: Most rows of a tested weight, to test a large one in little time and memory.
MAX_TESTED_OUTPUTS = 1 << 12
#: Batch size for which oneDNN chooses the layout: a usual number of sequences in decoding.
LAYOUT_ROWS = 16


def onednn_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x [..., h] Wᵀ + bias [o], [..., o], for a weight [o, h] of x's dtype, or packed."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [o, h], fp32 or bf16, in oneDNN's packed layout."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), LAYOUT_ROWS)


@functools.cache
def is_available() -> bool:
    """Return whether this build of torch multiplies packed weights."""
    try:
        onednn_linear(torch.ones(1, 1), pack_weight(torch.ones(1, 1)))
    except (AttributeError, RuntimeError, NotImplementedError):  # no operator, or no oneDNN
        return False
    return True


@functools.cache
def agrees(outputs: int, features: int, dtype: torch.dtype, *, packed: bool) -> bool:
    """Return whether products of 1 row and of 16 rows agree with `F.linear` up to rounding.

    Args:
        outputs, features: shape [o, h] of the weight.
        dtype: of the product; oneDNN must support bf16 on this CPU.
        packed: multiply by the packed weight.
    """
    outputs = min(outputs, MAX_TESTED_OUTPUTS)
    weight = torch.linspace(0, outputs, outputs * features).sin_().view(outputs, features)
    weight = weight.to(dtype)
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        operand = pack_weight(weight) if packed else weight
        for rows in (1, LAYOUT_ROWS):
            x = torch.linspace(-1, 1, rows * features).cos_().view(rows, features).to(dtype)
            expected, actual = F.linear(x, weight), onednn_linear(x, operand)
            # Two bf16 roundings of the largest output.
            if (actual.float() - expected.float()).abs().amax() > 2**-6 * expected.abs().amax():
                return False
    except (AttributeError, RuntimeError, NotImplementedError):  # no operator, or no oneDNN
        return False
    return True

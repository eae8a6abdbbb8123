# SPDX-License-Identifier: Apache-2.0
"""MoE: the mixture-of-experts mixer of one block."""

from __future__ import annotations

from torch import nn


class MoE(nn.Module):
    """Router, dispatch, experts and the shared expert."""

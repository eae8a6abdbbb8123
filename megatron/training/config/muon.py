# SPDX-License-Identifier: Apache-2.0
"""Muon, the optimizer of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import fraction, positive


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon."""

    muon_momentum: float = 0.9
    """Momentum of --optimizer muon."""
    muon_use_nesterov: bool = False
    """Orthogonalize the gradient plus its momentum; off, the momentum alone."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations of an update."""
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm", "rms"] = "spectral"
    """How an update is scaled by its matrix's shape [rows, cols]: the root of max(rows, cols), of
    max(1, rows / cols), of rows / cols, or 0.2 times the first, for learning rates of AdamW."""
    muon_extra_scale_factor: float = 1.0
    """A factor of every update beside that."""
    muon_split_qkv: bool = True
    """Orthogonalize q, k and v, and gate and up, each by itself; off, those of a layer together."""
    muon_adam_weights: tuple[str, ...] | None = None
    """PATTERN ...: matrices that AdamW updates as it does embedding, head, norms and biases; shell
    wildcards over weight names."""

    def __post_init__(self) -> None:
        fraction(self, "muon_momentum")
        positive(self, "muon_num_ns_steps", "muon_extra_scale_factor")

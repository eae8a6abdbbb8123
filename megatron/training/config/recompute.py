# SPDX-License-Identifier: Apache-2.0
"""Which activations are computed again in backward instead of being kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation recompute: less memory for more time; losses and gradients keep every bit."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """full keeps the inputs of layers alone and computes them twice; selective computes again what
    is cheap: norms and MLP activations."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full: uniform cuts all layers into runs of --recompute-num-layers and keeps the inputs
    of each run; block does so for each of the first --recompute-num-layers layers."""
    recompute_num_layers: int | None = None
    """Layers of --recompute-method, in each chunk of layers of a pipeline stage by itself."""

    def __post_init__(self) -> None:
        positive(self, "recompute_num_layers")

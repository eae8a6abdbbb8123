# SPDX-License-Identifier: Apache-2.0
"""Norm: RMSNorm or LayerNorm over the last dimension, with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from megatron.core.backend import LayerBuild
from megatron.core.initialize import InitSpec
from megatron.core.ops.nvls import RowNorm
from megatron.core.ops.rmsnorm.cpu import rms_norm_inference
from megatron.core.weight_sharding import GradientKind, WeightSharding

NORMS = ("RMSNorm", "LayerNorm")
PLACEMENTS = ("pre", "post", "both")

#: Dtypes in which a CPU normalises without a cast.
_EXACT_DTYPES = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Settings of a norm.

    Args:
        kind: "RMSNorm" (Zhang & Sennrich 2019) or "LayerNorm" (with a bias).
        epsilon: term added to the mean square or the variance.
        zero_centered: store the weight as weight - 1.
        placement: the decoder's blocks normalise their input ("pre"), their output before the
            residual addition ("post", as in OLMo 2), or "both" (as in Gemma 2). Other norms ignore
            it.
    """

    kind: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    epsilon: float = 1e-5
    zero_centered: bool = False
    placement: Literal["pre", "post", "both"] = "pre"

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            raise ValueError(f"normalization {self.kind!r}: use one of {', '.join(NORMS)}")
        if not self.epsilon > 0.0:
            raise ValueError(f"norm epsilon is {self.epsilon}: use a positive number")
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"norm placement {self.placement!r}: use one of {', '.join(PLACEMENTS)}"
            )


class Norm(nn.Module):
    """Norm over [..., size] with a weight that every tp rank replicates.

    Args:
        gradient: reduction of the weight's gradient over tp; None uses the region's (outside of
            tensor-parallel blocks).
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        config: NormConfig,
        build: LayerBuild,
        gradient: GradientKind | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        kind = gradient or build.region.replicated_gradient

        def declare(parameter: str, value: float):
            sharding = WeightSharding.of(
                f"{name}.{parameter}", (size,), gradient={"tp": kind}, weight_decay=False
            )
            return build.store.declare(sharding, InitSpec.constant(value))

        self.weight = declare("weight", 0.0 if config.zero_centered else 1.0)
        self.bias = declare("bias", 0.0) if config.kind == "LayerNorm" else None
        make = build.backend.rms_norm if self.bias is None else build.backend.layer_norm
        self._normalise = make(eps=config.epsilon, zero_centered=config.zero_centered)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return norm(x), or (norm(x + residual), x + residual); both in x's dtype."""
        if self.bias is None:
            return self._normalise(x, self.weight, residual=residual)
        return self._normalise(x, self.weight, self.bias, residual=residual)

    def decode(
        self, delta: torch.Tensor | None, stream: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(delta + stream), delta + stream), [t, h], outside of autograd.

        One input may be None. `delta` may be overwritten.
        """
        total = stream if delta is None else delta
        assert total is not None
        residual = None if delta is None else stream
        if self.bias is not None or total.device.type != "cpu" or total.dtype not in _EXACT_DTYPES:
            return self(total, residual) if residual is not None else (self(total), total)
        if residual is not None:
            total.add_(residual)
        weight = self.weight.use(torch.float32)
        zero_centered = self.config.zero_centered
        return rms_norm_inference(total, self.config.epsilon, zero_centered, weight), total

    def for_fused_kernel(self) -> RowNorm | None:
        """Return the parameters of the kernel that reduces, normalises and gathers; None for
        LayerNorm."""
        if self.bias is not None:
            return None
        weight = self.weight.use(torch.float32)
        return RowNorm(weight, self.config.epsilon, float(self.config.zero_centered))

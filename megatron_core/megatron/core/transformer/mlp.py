# SPDX-License-Identifier: Apache-2.0
"""MLP: gated (SwiGLU, GeGLU) or plain, its inner features sharded over tp.

gated: down(activation(gate(x)) · up(x)), with gate and up as one product; plain:
    down(activation(up(x))).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.core.backend import LayerBuild, Mixer
from megatron.core.context_parallel import SequenceLayout
from megatron.core.ops.swiglu import ACTIVATIONS, GATES, activate, gated
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.recompute import discard_until_backward


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Shape of an MLP.

    Args:
        ffn_hidden_size: intermediate size f.
        gated: use two input projections, one of which gates the other.
        activation: "silu", "gelu" (tanh form) or "quick_gelu" if gated, else "gelu", "gelu_tanh",
            "relu", "squared_relu" or "silu".
        bias: whether the projections have biases.
        clamp, linear_offset: of a gate, see `ops.swiglu.gated`.
        gate_multiplier: factor on the gate before its activation.
    """

    ffn_hidden_size: int
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    clamp: float | None = None
    linear_offset: float = 0.0
    gate_multiplier: float = 1.0

    def problems(self, tp: int) -> list[str]:
        """Return a message for each setting that is invalid on `tp` ranks."""
        problems = activation_problems(self)
        if not 0.0 < self.gate_multiplier < math.inf:
            problems.append(f"mlp-gate-multiplier {self.gate_multiplier}: use a positive number")
        if self.gate_multiplier != 1.0 and not self.gated:
            problems.append("mlp-gate-multiplier needs a gated MLP: leave it out")
        if self.ffn_hidden_size < 1 or self.ffn_hidden_size % tp:
            problems.append(
                f"ffn-hidden-size {self.ffn_hidden_size} must be a positive multiple of "
                f"tensor-model-parallel-size {tp}"
            )
        return problems


class ActivationConfig(Protocol):
    """The activation of an MLP or of experts."""

    @property
    def gated(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def clamp(self) -> float | None: ...
    @property
    def linear_offset(self) -> float: ...


def activation_problems(config: ActivationConfig) -> list[str]:
    """Return a message for each invalid setting of an activation."""
    problems = []
    activations = GATES if config.gated else ACTIVATIONS
    if config.activation not in activations:
        problems.append(f"activation {config.activation!r}: use one of {', '.join(activations)}")
    if config.clamp is not None and not config.clamp > 0.0:
        problems.append(f"activation-func-clamp-value {config.clamp} must be above 0")
    if not config.gated and (config.clamp is not None or config.linear_offset):
        problems.append(
            "activation-func-clamp-value and glu-linear-offset need a gate: use swiglu or "
            "quick-geglu, or leave them out"
        )
    return problems


def activation_settings(config: ActivationConfig) -> dict[str, Any]:
    """Return the settings of an activation, for the config of other MLPs or experts."""
    return {
        name: getattr(config, name) for name in ("gated", "activation", "clamp", "linear_offset")
    }


def gate_options(config: ActivationConfig) -> dict[str, Any]:
    """Return the options of `gated`; empty without a clamp and an offset."""
    if config.clamp is None and not config.linear_offset:
        return {}
    return {"clamp": config.clamp, "offset": config.linear_offset}


class MLP(Mixer):
    """The MLP of one block.

    Attributes:
        recomputes: recompute the activated features in backward instead of storing them. A relu
            stores its output in any case.
    """

    decodes_gathered = True

    def __init__(self, name: str, *, config: MLPConfig, build: LayerBuild) -> None:
        super().__init__()
        problems = config.problems(build.region.group.size)
        if problems:
            raise ValueError("; ".join(problems))
        self.config, self.recomputes = config, False
        self._activate = build.backend.elementwise(gated if config.gated else activate)
        self._gate_options = gate_options(config)
        f = config.ffn_hidden_size
        projections = ["gate", "up"] if config.gated else ["up"]
        self.input = build.column_linear(
            f"{name}.input",
            [(f"{name}.{projection}", f, None) for projection in projections],
            bias=config.bias,
        )
        self.down = build.row_linear(f"{name}.down", f, bias=config.bias)

    def forward(self, hidden: torch.Tensor, layout: SequenceLayout, **_: object) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] both under sequence parallelism)."""
        inner = self._scaled(self.input(hidden))  # [s, b, 2f/tp] or [s, b, f/tp]
        active = self._activate(inner, self.config.activation, **self._gate_options)
        y = self.down(active)
        if self.recomputes and torch.is_grad_enabled():
            source = inner.detach()
            discard_until_backward(active, lambda: self.activate(source), used_by=y)
        return y

    def decode(
        self, x: torch.Tensor, layout: SequenceLayout, **_: object
    ) -> tuple[torch.Tensor, RowParallelLinear]:
        """See `Mixer.decode`."""
        inner = self._scaled(self.input.weight.linear(x, self.input.bias))
        return self.activate(inner), self.down

    def _scaled(self, inner: torch.Tensor) -> torch.Tensor:
        """Return inner [..., 2f/tp] with the factor on the gate."""
        if self.config.gate_multiplier == 1.0:
            return inner
        gate, up = inner.chunk(2, dim=-1)
        return torch.cat([gate * self.config.gate_multiplier, up], dim=-1)

    def activate(self, inner: torch.Tensor) -> torch.Tensor:
        """Return the activated features [..., f/tp] from inner [..., 2f/tp] ([..., f/tp] plain)."""
        return self._activate(inner, self.config.activation, **self._gate_options)

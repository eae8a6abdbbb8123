# SPDX-License-Identifier: Apache-2.0
"""MLP: gated (SwiGLU, GeGLU) or plain, its inner features sharded over tp.

gated: down(activation(gate(x)) · up(x)), with gate and up as one product; plain:
    down(activation(up(x))).
"""

from __future__ import annotations

from dataclasses import dataclass

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
        activation: "silu" or "gelu" (tanh form) if gated, else "gelu", "gelu_tanh", "relu",
            "squared_relu" or "silu".
        bias: whether the projections have biases.
    """

    ffn_hidden_size: int
    gated: bool = True
    activation: str = "silu"
    bias: bool = False

    def problems(self, tp: int) -> list[str]:
        """Return a message for each setting that is invalid on `tp` ranks."""
        problems = []
        activations = GATES if self.gated else ACTIVATIONS
        if self.activation not in activations:
            problems.append(f"activation {self.activation!r}: use one of {', '.join(activations)}")
        if self.ffn_hidden_size < 1 or self.ffn_hidden_size % tp:
            problems.append(
                f"ffn-hidden-size {self.ffn_hidden_size} must be a positive multiple of "
                f"tensor-model-parallel-size {tp}"
            )
        return problems


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
        inner = self.input(hidden)  # [s, b, 2f/tp] or [s, b, f/tp]
        active = self._activate(inner, self.config.activation)  # [s, b, f/tp]
        y = self.down(active)
        if self.recomputes and torch.is_grad_enabled():
            source = inner.detach()
            discard_until_backward(active, lambda: self.activate(source), used_by=y)
        return y

    def decode(
        self, x: torch.Tensor, layout: SequenceLayout, **_: object
    ) -> tuple[torch.Tensor, RowParallelLinear]:
        """See `Mixer.decode`."""
        return self.activate(self.input.weight.linear(x, self.input.bias)), self.down

    def activate(self, inner: torch.Tensor) -> torch.Tensor:
        """Return the activated features [..., f/tp] from inner [..., 2f/tp] ([..., f/tp] plain)."""
        return self._activate(inner, self.config.activation)

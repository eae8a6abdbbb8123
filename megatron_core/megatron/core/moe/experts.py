# SPDX-License-Identifier: Apache-2.0
"""Experts: this rank's MLPs of a mixture, over rows in runs, one run an expert.

gated: down_e(activation(gate_e(x)) · up_e(x)), gate and up one product; plain as in `MLP`.

| weight | logical | local |
|---|---|---|
| gate, up | [E, f, h] each | [2 E/ep, f/etp, h], an expert's gate before its up |
| down | [E, h, f] | [E/ep, h, f/etp] |

A rank's results are addends of an expert's over etp.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.moe.config import MoEConfig
from megatron.core.ops.swiglu import activate, gated
from megatron.core.transformer.build import LayerBuild
from megatron.core.transformer.recompute import remade
from megatron.core.weight_gather import RowRuns, grouped_linear
from megatron.core.weight_sharding import Cut, Segment, WeightSharding


class ExpertMLPs(nn.Module):
    """The experts of one rank.

    Attributes:
        remakes: compute the activated features again in backward instead of keeping them.
    """

    def __init__(self, name: str, *, config: MoEConfig, build: LayerBuild) -> None:
        super().__init__()
        self.config, self.remakes = config, False
        count, f, h = config.num_experts, config.ffn_hidden_size, build.hidden_size
        by_expert = Cut(axis="ep", dim=0)
        parts = ["gate", "up"] if config.gated else ["up"]
        inner = (by_expert, Cut(axis="etp", dim=1))
        segments = tuple(
            Segment(name=f"{name}.{part}.weight", shape=(count, f, h), cuts=inner) for part in parts
        )
        self.input = build.store.declare(
            WeightSharding(
                name=f"{name}.input.weight" if config.gated else segments[0].name,
                segments=segments,
                interleave=count if config.gated else 1,
                expert=True,
            ),
            build.init,
        )
        outer = (by_expert, Cut(axis="etp", dim=2))
        self.down = build.store.declare(
            WeightSharding.of(f"{name}.down.weight", (count, h, f), *outer, expert=True),
            build.output_init,
        )

    def forward(self, rows: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """Return [r, h] partial(etp) from rows [r, h]."""
        inner = grouped_linear(self.input, rows, runs)  # [r, 2f/etp] or [r, f/etp]
        active = self._activate(inner)  # [r, f/etp]
        if not (self.remakes and torch.is_grad_enabled()):
            return grouped_linear(self.down, active, runs)
        source = inner.detach()
        with remade(active, lambda: self._activate(source)):
            return grouped_linear(self.down, active, runs)

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        apply = gated if self.config.gated else activate
        return apply(inner, self.config.activation)

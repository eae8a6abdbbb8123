# SPDX-License-Identifier: Apache-2.0
"""MoE: the mixture-of-experts mixer of one block (Shazeer et al. 2017; Fedus et al. 2021).

hidden [s, b, h] → rows [t, h] of this rank → router → dispatch → experts → weighted sums [t, h] →
[s, b, h], plus the shared expert's. The shared expert is computed while rows are under way.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe.config import MoEConfig
from megatron.core.moe.dispatch import ExpertRanks, choose_dispatcher, dispatch
from megatron.core.moe.experts import ExpertMLPs
from megatron.core.moe.router import Router
from megatron.core.moe.share import Share
from megatron.core.transformer.build import LayerBuild
from megatron.core.transformer.mlp import MLP
from megatron.core.weight_sharding import WeightSharding


class MoE(nn.Module):
    """The mixture of experts of one block.

    Args:
        name: prefix of its weights.

    Raises:
        ValueError: the mixture cannot be on these ranks.

    Attributes:
        dispatcher: what brings tokens to their experts.
        overlaps: whether the shared expert is computed meanwhile.
    """

    def __init__(self, name: str, *, config: MoEConfig, build: LayerBuild) -> None:
        super().__init__()
        grid, region = build.store.groups.grid, build.region
        etp = grid.size("etp")
        problems = config.problems(tp=region.group.size, etp=etp, ep=grid.ep)
        if problems:
            raise ValueError("; ".join(problems))
        self.region = region
        self.ranks = ExpertRanks(build.store.groups["etp_ep"], etp, config.num_experts)
        self.dispatcher = choose_dispatcher(
            build.backend.dispatcher, topk=config.router.topk, ep=grid.ep
        )
        self.overlaps = build.backend.overlap_shared_expert
        self.router = Router(f"{name}.router", config=config, build=build)
        self.experts = ExpertMLPs(f"{name}.experts", config=config, build=build)
        self.shared: SharedExpert | None = None
        if config.shared is not None:
            self.shared = SharedExpert(name, config=config, build=build)

    @property
    def remakes(self) -> bool:
        """Whether activated features are computed again in backward instead of kept."""
        return self.experts.remakes

    @remakes.setter
    def remakes(self, remakes: bool) -> None:
        self.experts.remakes = remakes
        if self.shared is not None:
            self.shared.mlp.remakes = remakes

    def forward(
        self,
        hidden: torch.Tensor,
        layout: SequenceLayout,
        *,
        aux_factor: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] both under sequence parallelism).

        Args:
            aux_factor: fp32 scalar, of the router's auxiliary losses; None leaves them out.
        """
        share = Share(hidden, layout, region=self.region)
        rows = share.rows(hidden)  # [t, h]
        routing = self.router(rows, share, aux_factor=aux_factor)
        shared: list[torch.Tensor] = []

        def meanwhile() -> None:
            if self.shared is not None:
                shared.append(self.shared(hidden, layout))

        mixed = dispatch(
            rows,
            routing,
            self.experts,
            ranks=self.ranks,
            dispatcher=self.dispatcher,
            meanwhile=meanwhile if self.overlaps else None,
        )  # [t, h]
        if not self.overlaps:
            meanwhile()
        whole = share.whole(mixed)
        return whole + shared[0] if shared else whole


class SharedExpert(nn.Module):
    """The MLP that every token goes through, with its gate."""

    def __init__(self, name: str, *, config: MoEConfig, build: LayerBuild) -> None:
        super().__init__()
        assert config.shared is not None
        self.mlp = MLP(f"{name}.shared", config=config.shared, build=build)
        self.gate = None
        if config.shared_gate:
            kind = build.region.replicated_gradient
            sharding = WeightSharding.of(
                f"{name}.shared_gate.weight", (1, build.hidden_size), gradient={"tp": kind}
            )
            self.gate = build.store.declare(sharding, build.init)

    def forward(self, hidden: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] under sequence parallelism)."""
        out = self.mlp(hidden, layout)
        return out if self.gate is None else out * self.gate.linear(hidden).sigmoid()

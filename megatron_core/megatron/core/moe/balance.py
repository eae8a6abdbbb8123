# SPDX-License-Identifier: Apache-2.0
"""Balance: the token counts of a model's routers, summed over all ranks, and the biases they move.

    b_e += rate · sign(mean over experts of their tokens - tokens of e)

once a step (Wang et al. 2024, arXiv 2408.15664): tokens are those of the step's whole batch, on all
data-parallel ranks, before any are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.comm import all_reduce
from megatron.core.moe.config import MoEConfig
from megatron.core.moe.router import MEASURES, Router
from megatron.core.process_groups import Group


@dataclass(frozen=True)
class RouterLoad:
    """What a router did since the report before.

    Args:
        name: of the router.
        tokens: places of tokens that wanted each expert.
        dropped: share of the places that their experts did not take.
        entropy: mean over tokens of that of their shares of scores, in nats.
        balance_loss, z_loss: means over microbatches, without coefficients; 0 where they have none.
    """

    name: str
    tokens: tuple[int, ...]
    dropped: float
    entropy: float
    balance_loss: float
    z_loss: float

    @property
    def imbalance(self) -> float:
        """The tokens of the busiest expert over the mean; 1 is even."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens))


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers among a model's modules."""
    return [module for module in model.modules() if isinstance(module, Router)]


class Balance:
    """Sum what routers count, and keep their loads even.

    Args:
        routers: of this rank.
        names: of all routers of the model, in its order; the same on every rank.
        config: of them all.
        world: all ranks; those of a pipeline stage have routed different tokens.
        device: where this rank computes.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        names: Sequence[str],
        *,
        config: MoEConfig,
        world: Group,
        device: torch.device | str = "cpu",
    ) -> None:
        unknown = [router.name for router in routers if router.name not in names]
        if unknown:
            raise ValueError(f"routers {', '.join(unknown)} are not among the model's: {names}")
        self.routers, self.names, self.world = list(routers), tuple(names), world
        self.config, self.device = config, torch.device(device)
        self._rows = [self.names.index(router.name) for router in self.routers]
        self._totals = [torch.zeros_like(router.counted) for router in self.routers]

    def finish(self, *, applied: bool) -> None:
        """End a step: move the biases, if there are any; every rank calls it.

        Args:
            applied: whether the step changed weights; otherwise biases stay as well.
        """
        counted = [router.counted.clone() for router in self.routers]
        for router, total, found in zip(self.routers, self._totals, counted, strict=True):
            total += found
            router.counted.zero_()
        if not (self.config.router.expert_bias and applied):
            return
        sums = self._summed(counted)
        for router, row in zip(self.routers, self._rows, strict=True):
            assert router.expert_bias is not None
            tokens = sums[row, : router.num_experts]
            behind = torch.sign(tokens.mean() - tokens).float()
            router.expert_bias += router.config.bias_update_rate * behind

    def report(self) -> list[RouterLoad]:
        """Return the loads of all routers since the last report; every rank calls it."""
        sums = self._summed(self._totals).tolist()
        for total in self._totals:
            total.zero_()
        return [self._load(name, row) for name, row in zip(self.names, sums, strict=True)]

    def _summed(self, counted: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [routers of the model, E + measures] of all ranks."""
        shape = len(self.names), self.config.num_experts + len(MEASURES)
        whole = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for row, found in zip(self._rows, counted, strict=True):
            whole[row] = found
        return all_reduce(whole, self.world)

    def _load(self, name: str, row: list[float]) -> RouterLoad:
        tokens, measures = (
            row[: -len(MEASURES)],
            dict(zip(MEASURES, row[-len(MEASURES) :], strict=True)),
        )
        places, microbatches = max(1.0, measures["places"]), max(1.0, measures["microbatches"])
        return RouterLoad(
            name=name,
            tokens=tuple(round(count) for count in tokens),
            dropped=measures["dropped"] / places,
            entropy=measures["entropy"] / places * self.config.router.topk,
            balance_loss=measures["balance_loss"] / microbatches,
            z_loss=measures["z_loss"] / microbatches,
        )

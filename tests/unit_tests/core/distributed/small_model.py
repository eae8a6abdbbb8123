# SPDX-License-Identifier: Apache-2.0
"""A small network over weight handles, different data on every rank, and a plain reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core import InitSpec, ProcessGroupCollection, WeightSharding
from megatron.core.distributed import DataParallelConfig
from megatron.core.weight_gather import WeightStore
from tests.support.inputs import generator

VOCABULARY, HIDDEN = 13, 6
SHAPES = {
    "table": (VOCABULARY, HIDDEN),
    "first": (HIDDEN, HIDDEN),
    "first.bias": (HIDDEN,),
    "scale": (HIDDEN,),
    "spare": (3, HIDDEN),
    "second": (HIDDEN, HIDDEN),
    "second.bias": (HIDDEN,),
    "third": (HIDDEN, HIDDEN),
}


class SmallModel:
    """A tied embedding around a biased layer, a scale and two more layers; `spare` is optional.
    The model has four units, more than are gathered at a time.

    Args:
        config: settings of the engine that trains the model.
        bucket_bytes: bucket size; a small value makes one bucket per weight.
    """

    def __init__(
        self,
        groups: ProcessGroupCollection,
        *,
        config: DataParallelConfig | None = None,
        bucket_bytes: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.store = WeightStore(groups, seed=9, dtype=dtype)
        self._declare("table")
        with self.store.unit("hidden"):
            self._declare("first", "first.bias")
        with self.store.unit("gate"):
            self._declare("scale", "spare")
        with self.store.unit("second"):
            self._declare("second", "second.bias")
        with self.store.unit("third"):
            self._declare("third")
        self._declare("table")
        config = config or DataParallelConfig()
        self.store.materialize(config.storage(bucket_bytes=bucket_bytes))

    def _declare(self, *names: str) -> None:
        for name in names:
            sharding = WeightSharding.of(
                name,
                SHAPES[name],
                gradient={"tp": "identical"},
                weight_decay=len(SHAPES[name]) > 1,
                gtp=len(SHAPES[name]) > 1,
            )
            self.store.declare(sharding, InitSpec.normal(0.6))

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, *, spare: bool = True) -> torch.Tensor:
        """Return the summed loss of ids and targets [t]."""
        use = self.store.handles
        hidden = use["first"].linear(use["table"].embedding(ids), use["first.bias"])
        hidden = torch.tanh(hidden) * use["scale"].use()
        if spare:
            hidden = hidden + torch.sin(use["spare"].use()).sum(0)
        hidden = torch.tanh(use["second"].linear(hidden, use["second.bias"]))
        hidden = hidden + use["third"].linear(hidden)
        logits = use["table"].linear(hidden)
        return F.cross_entropy(logits.float(), targets, reduction="sum")


def plain_loss(weights: dict[str, torch.Tensor], ids, targets, *, spare: bool = True):
    """Return the loss of the same network with plain autograd."""
    hidden = F.linear(F.embedding(ids, weights["table"]), weights["first"], weights["first.bias"])
    hidden = torch.tanh(hidden) * weights["scale"]
    if spare:
        hidden = hidden + torch.sin(weights["spare"]).sum(0)
    hidden = torch.tanh(F.linear(hidden, weights["second"], weights["second.bias"]))
    hidden = hidden + F.linear(hidden, weights["third"])
    return F.cross_entropy(F.linear(hidden, weights["table"]), targets, reduction="sum")


def tokens(dp_rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, targets) of a microbatch, different for every (dp_rank, index)."""
    drawn = torch.randint(0, VOCABULARY, (2, 7), generator=generator(5, dp_rank, index))
    return drawn[0], drawn[1]


def leaves(store: WeightStore) -> dict[str, torch.Tensor]:
    """Return fp64 leaves of a store's full weights."""
    return {n: h.get().double().requires_grad_(True) for n, h in store.handles.items()}


def reference_gradients(
    store: WeightStore, batches: list[tuple[int, int]], *, spare: bool = True
) -> dict[str, torch.Tensor]:
    """Return the fp64 gradients of the loss summed over (dp_rank, index) microbatches."""
    weights = leaves(store)
    for dp_rank, index in batches:
        plain_loss(weights, *tokens(dp_rank, index), spare=spare).backward()
    return {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}

# SPDX-License-Identifier: Apache-2.0
"""A store, an engine and an optimizer stepped on given logical gradients, on any layout."""

from __future__ import annotations

import torch

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.optimizer.loss_scaler import ConstantLossScaler
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import Shard, SubWeight, WeightSharding
from tests.support.inputs import generator

ROWS = Shard(axis="tp", dim=0)
#: Logical tensors of the weights below.
SHAPES = {
    "table": (13, 6),
    "norm": (6,),
    "q": (8, 6),
    "k": (3, 6),
    "down": (6, 8),
    "down.bias": (6,),
    "experts": (8, 6),
}


def shardings() -> list[WeightSharding]:
    """Return weights cut by rows (padded) and columns, whole, with one kv head, and of experts."""
    one = (Shard(axis="tp", dim=0, count=1),)
    return [
        WeightSharding.of("table", SHAPES["table"], ROWS, row_multiple=4),
        WeightSharding.of("norm", (6,), gradient={"tp": "partial"}, weight_decay=False),
        WeightSharding(
            name="qk",
            sub_weights=(
                SubWeight(name="q", shape=SHAPES["q"], shards=(ROWS,)),
                SubWeight(name="k", shape=SHAPES["k"], shards=one),
            ),
        ),
        WeightSharding.of("down", SHAPES["down"], Shard(axis="tp", dim=1)),
        WeightSharding.of("down.bias", (6,), gradient={"tp": "identical"}, weight_decay=False),
        WeightSharding.of(
            "experts",
            SHAPES["experts"],
            Shard(axis="ep", dim=0),
            Shard(axis="etp", dim=1),
            expert=True,
        ),
    ]


class Training:
    """A store, an engine and an optimizer whose gradients are given in logical form."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        config: OptimizerConfig,
        *,
        strategy: str = "no_shard",
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
        bucket_bytes: int = 300,
        device: torch.device | str = "cpu",
        **parallel: object,
    ) -> None:
        self.groups, self.scale = groups, scale
        self.store = WeightStore(groups, seed=2, dtype=dtype, device=device)
        for sharding in shardings():
            self.store.declare(sharding, InitSpec.normal(0.8))
        placed = DataParallelConfig(strategy=strategy, **parallel)  # type: ignore[arg-type]
        self.store.materialize(placed.storage(bucket_bytes=bucket_bytes))
        self.engine = DataParallel(self.store, groups, config=placed)
        scaler = ConstantLossScaler(scale)
        self.optimizer = Optimizer(
            self.engine.owned(),
            groups,
            config=config,
            scaler=scaler,
            weights=[handle.sharding for handle in self.store.handles.values()],
        )

    def step(self, gradients: dict[str, torch.Tensor], *, fault: float = 0.0, **options: float):
        """Put this rank's addend of every gradient (plus a fault), then step.

        A lane's share and, where the plan sums over tp, the rank's share of it are uneven.
        """
        tp = self.groups["tp"]
        self.engine.begin_step()
        self.engine.set_is_last_backward(True)
        for handle in self.store.handles.values():
            grid = "expert_dp" if handle.sharding.expert else "dense_dp"
            group = self.groups[grid]
            local = torch.zeros(handle.shape).view(-1)
            for box in self.store.boxes(handle):
                piece = gradients[box.name] * self.scale
                for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    piece = piece.narrow(dim, first, size)
                part = _share(group.rank, group.size)
                if box.name in ("norm", "k"):
                    part *= _share(tp.rank, tp.size)
                local[box.start : box.start + box.numel] = (piece * part).flatten()
            if handle.name == "down":
                local[-1] += fault
            handle.accumulate_grad(local.view(handle.shape).to(self.store.device))
        self.engine.finish()
        result = self.optimizer.step(**options)
        self.engine.start_param_sync()
        return result

    def pieces(self) -> list[tuple]:
        """Return (name, offsets, values) of this rank's weights."""
        found = []
        for handle in self.store.handles.values():
            flat = handle.get().view(-1)
            for box in self.store.boxes(handle):
                values = flat[box.start : box.start + box.numel].view(box.sizes).clone().cpu()
                found.append((box.name, box.offsets, values))
        return found

    def logical(self) -> dict[str, torch.Tensor]:
        """Return whole weights; a single process only."""
        return {name: values for name, _, values in self.pieces()}


def _share(rank: int, size: int) -> float:
    """Return uneven shares that add up to one, exact in binary."""
    return 1.0 if size == 1 else (0.25, 0.75)[rank] if size == 2 else 1.0 / size


def drawn(step: int) -> dict[str, torch.Tensor]:
    """Return logical gradients of one step, a tenth of the elements exactly zero."""
    found = {}
    for name, shape in SHAPES.items():
        source = generator(11, step, *name.encode())
        values = torch.randn(shape, generator=source)
        values[torch.rand(shape, generator=source) < 0.1] = 0.0
        found[name] = values
    return found

# SPDX-License-Identifier: Apache-2.0
"""A weight store, an engine and an optimizer, stepped with logical gradients on any layout."""

from __future__ import annotations

import torch

from megatron.core import InitSpec, ProcessGroupCollection, WeightSharding
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.optimizer import ConstantLossScaler, Optimizer, OptimizerConfig
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import Shard, SubWeight
from tests.support.inputs import generator

ROWS = Shard(axis="tp", dim=0)
#: Logical tensors of `shardings`.
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
    """Return weights sharded by rows (padded) and columns, replicated, with one kv head, and of
    experts."""
    kv_head = (Shard(axis="tp", dim=0, count=1),)
    return [
        WeightSharding.of("table", SHAPES["table"], ROWS, row_multiple=4),
        WeightSharding.of("norm", (6,), gradient={"tp": "partial"}, weight_decay=False),
        WeightSharding(
            name="qk",
            sub_weights=(
                SubWeight(name="q", shape=SHAPES["q"], shards=(ROWS,)),
                SubWeight(name="k", shape=SHAPES["k"], shards=kv_head),
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
    """A weight store, an engine and an optimizer that take logical gradients."""

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
        data_parallel = DataParallelConfig(strategy=strategy, **parallel)  # type: ignore[arg-type]
        self.store.materialize(data_parallel.storage(bucket_bytes=bucket_bytes))
        self.engine = DataParallel(self.store, groups, config=data_parallel)
        scaler = ConstantLossScaler(scale)
        self.optimizer = Optimizer(
            self.engine.owned(),
            groups,
            config=config,
            scaler=scaler,
            weights=[handle.sharding for handle in self.store.handles.values()],
        )

    def step(self, gradients: dict[str, torch.Tensor], *, fault: float = 0.0, **options: float):
        """Accumulate this rank's addend of every gradient (plus a fault), then step.

        Shares are uneven over data-parallel ranks and, for partial(tp) gradients, over tp ranks.
        """
        tp = self.groups["tp"]
        self.engine.begin_step()
        self.engine.set_is_last_backward(True)
        for handle in self.store.handles.values():
            grid = "expert_dp" if handle.sharding.expert else "dense_dp"
            group = self.groups[grid]
            local = torch.zeros(handle.shape).view(-1)
            for box in self.store.boxes(handle):
                gradient = gradients[box.name] * self.scale
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    gradient = gradient.narrow(dim, offset, size)
                share = _share(group.rank, group.size)
                if box.name in ("norm", "k"):
                    share *= _share(tp.rank, tp.size)
                local[box.start : box.start + box.numel] = (gradient * share).flatten()
            if handle.name == "down":
                local[-1] += fault
            handle.accumulate_grad(local.view(handle.shape).to(self.store.device))
        self.engine.finish()
        step_result = self.optimizer.step(**options)
        self.engine.start_param_sync()
        return step_result

    def shards(self) -> list[tuple]:
        """Return (name, offsets, values) of this rank's weights."""
        shards = []
        for handle in self.store.handles.values():
            flat = handle.get().view(-1)
            for box in self.store.boxes(handle):
                values = flat[box.start : box.start + box.numel].view(box.sizes).clone().cpu()
                shards.append((box.name, box.offsets, values))
        return shards

    def logical(self) -> dict[str, torch.Tensor]:
        """Return full weights; on a single process only."""
        return {name: values for name, _, values in self.shards()}


def _share(rank: int, size: int) -> float:
    """Return uneven shares that add up to one, exact in binary."""
    return 1.0 if size == 1 else (0.25, 0.75)[rank] if size == 2 else 1.0 / size


def random_gradients(step: int) -> dict[str, torch.Tensor]:
    """Return the logical gradients of a step, a tenth of the elements exactly zero."""
    gradients = {}
    for name, shape in SHAPES.items():
        source = generator(11, step, *name.encode())
        values = torch.randn(shape, generator=source)
        values[torch.rand(shape, generator=source) < 0.1] = 0.0
        gradients[name] = values
    return gradients

# SPDX-License-Identifier: Apache-2.0
"""Side streams of eager steps: of two uses of the same memory, the later one always waits."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.data_parallel import GradientBlock, GradientBucket
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import BufferPool, Gatherer
from tests.support.simulated_links import simulated
from tests.support.stream_order import OrderedStream, OrderError, StreamOrder
from tests.unit_tests.core.distributed.engine_steps import train, update
from tests.unit_tests.core.distributed.small_model import SmallModel, tokens

BF16 = torch.bfloat16
WIDE = {"grad_dtype": BF16, "fp32_accumulation": True}
LATER = {"fsdp_all_gather_in_start_param_sync": False}
#: One on demand, one to plan by, one behind the evaluation, one that prefetches.
STEPS = 4
FLAT = RankGrid(world_size=2)
HYBRID = RankGrid(world_size=4, instances=2)
GTP = RankGrid(world_size=4, gtp=2)


class Handle:
    """A communicator that moves nothing."""

    def __init__(self, ranks: list[int], timeout: object = None) -> None:
        self.ranks = ranks

    def start(self, *tensors: object) -> None:
        """Start nothing."""

    allreduce = _allgather_base = _reduce_scatter_base = alltoall_base = start


def groups_of(grid: RankGrid) -> ProcessGroupCollection:
    """Return the groups of rank 0 without other ranks."""
    with (
        mock.patch("torch.distributed.new_group", Handle),
        mock.patch("torch.distributed.get_world_size", return_value=grid.world_size),
    ):
        return ProcessGroupCollection.create(grid, rank=0)


def steps(
    *, strategy: str, grid: RankGrid = FLAT, **settings: object
) -> tuple[StreamOrder, DataParallel]:
    """Run steps that gather and reduce beside the computation, with an evaluation between two."""
    config = DataParallelConfig(
        strategy=strategy,
        overlap_param_gather=strategy != "no_shard",
        **settings,  # type: ignore[arg-type]
    )
    groups, order = groups_of(grid), StreamOrder()
    with order.enforced(), simulated(groups, order):
        model = SmallModel(groups, config=config)
        engine = DataParallel(model.store, groups, config=config)
        with order:
            for step in range(STEPS):
                train(model, engine, (0, 1))
                update(engine)
                engine.start_param_sync()
                if step == 1:
                    with engine.evaluation():
                        model.loss(*tokens(0, 5))
            engine.complete_weights()
    return order, engine


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("no_shard", {}),
        ("no_shard", {"grid": HYBRID, "grad_dtype": BF16}),
        ("optim", {}),
        ("optim", {"grid": HYBRID, **LATER}),
        ("optim", WIDE),
        ("optim_grads", {"grid": HYBRID}),
        ("optim_grads", {**WIDE, **LATER}),
        ("optim_grads_params", {}),
        ("optim_grads_params", {"granularity": "weight", "prefetch_bytes": 200, **WIDE}),
        ("optim_grads_params", {"grid": HYBRID, **WIDE}),
        ("optim_grads_params", {"grid": HYBRID, "outer": "optim"}),
        ("optim_grads_params", {"grid": HYBRID, "outer": "optim", **LATER}),
        ("no_shard", {"grid": GTP}),
        ("optim", {"grid": GTP, "gather_format": "mxfp8", **WIDE}),
        ("optim_grads", {"grid": GTP, **LATER}),
    ],
)
def test_uses_of_memory_are_in_order(strategy: str, settings: dict):
    order, engine = steps(**settings, strategy=strategy)
    blocks = sum(len(entry.blocks) for entry in engine.buckets)
    assert order.count >= STEPS * blocks
    assert order.crossings > order.count
    assert engine.launched_in_backward == blocks
    assert all(gatherer.counts.prefetched > 0 for gatherer in engine.gatherers)


@pytest.mark.parametrize(
    ("owner", "method", "wait", "strategy"),
    [
        (GradientBlock, "reduce", "wait_stream", "no_shard"),
        (GradientBlock, "reduce", "wait_stream", "optim"),
        (GradientBlock, "reduce", "wait_stream", "optim_grads_params"),
        (GradientBucket, "reduce_outer", "wait_stream", "optim_grads"),
        (Gatherer, "invalidate", "wait_stream", "optim"),
        (Gatherer, "invalidate", "wait_stream", "optim_grads_params"),
        (BufferPool, "lease", "wait_event", "optim_grads_params"),
    ],
)
def test_a_wait_left_out_is_seen(owner: type, method: str, wait: str, strategy: str):
    real, left_out = vars(owner)[method], mock.Mock()

    def without_wait(*args, **options):
        with mock.patch.object(OrderedStream, wait, left_out):
            return real(*args, **options)

    with mock.patch.object(owner, method, without_wait), pytest.raises(OrderError):
        steps(strategy=strategy, grid=HYBRID)
    assert left_out.called

# SPDX-License-Identifier: Apache-2.0
"""The sharded average equals the closed form in fp64, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from experimental.weight_average.average import WeightAverage
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.sharded_buffer import BufferLayout, BufferPlacement, ShardedBuffer
from tests.support.ranks import run_ranks

SHAPES = (("a", (7, 5)), ("b", (13,)))
SAMPLES = (3, 5, 2, 7)
HALF_LIFE = 6.0


def weights_at(step: int, numel: int) -> torch.Tensor:
    """Return the weights [numel] after `step` steps."""
    return torch.sin(torch.arange(numel, dtype=torch.float32) * 0.7 + step)


def averaged(group: Group) -> torch.Tensor:
    """Return the whole average [numel] after all steps, as this rank sees it."""
    layout = BufferLayout.of(SHAPES, parts=group.size)
    weights = ShardedBuffer.empty(
        layout,
        group,
        placement=BufferPlacement.REPLICATED,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    weights.data.copy_(weights_at(0, layout.numel))
    average = WeightAverage(weights, half_life_samples=HALF_LIFE)
    for step, samples in enumerate(SAMPLES, start=1):
        weights.data.copy_(weights_at(step, layout.numel))
        average.update(weights, samples=samples)
    average.write_to(weights).wait()
    return weights.data


def averaged_on(rank: int, world: int) -> torch.Tensor:
    """Run `averaged` on one of several ranks."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    return averaged(groups["dp"])


def closed_form(numel: int) -> torch.Tensor:
    """Return the average [numel] in fp64: step k weighs (1 - d_k) times all later d."""
    total = torch.zeros(numel, dtype=torch.float64)
    decays = [1.0] + [0.5 ** (n / HALF_LIFE) for n in SAMPLES]
    for step, decay in enumerate(decays):
        share = 1.0 if step == 0 else 1.0 - decay
        for later in decays[step + 1 :]:
            share *= later
        total += share * weights_at(step, numel).double()
    return total


@pytest.mark.parametrize("world", [1, 2])
def test_the_average_is_the_closed_form(world: int) -> None:
    seen = [averaged(Group.single())] if world == 1 else run_ranks(averaged_on, world)
    for whole in seen:
        torch.testing.assert_close(whole.double(), closed_form(whole.numel()), rtol=0, atol=3e-7)


def test_bad_arguments_are_refused() -> None:
    layout = BufferLayout.of(SHAPES, parts=1)
    data = torch.zeros(layout.numel)
    partial = ShardedBuffer(layout, Group.single(), BufferPlacement.PARTIAL, data)
    with pytest.raises(ValueError, match="pending sums"):
        WeightAverage(partial, half_life_samples=HALF_LIFE)
    partial.placement = BufferPlacement.REPLICATED
    with pytest.raises(ValueError, match="half-life of 0 samples"):
        WeightAverage(partial, half_life_samples=0)

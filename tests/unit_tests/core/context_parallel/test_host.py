# SPDX-License-Identifier: Apache-2.0
"""Host cost of a layer: it never waits for the device and builds each plan once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout, SequenceSharding, context_attention
from megatron.core.context_parallel.attention import Attend
from tests.support.inputs import generator
from tests.support.ranks import run_ranks

ENGINES = ("p2p", "all_gather", "a2a")
LENGTH, ROWS, HEADS, GROUPS, FEATURES = 16, 2, 4, 2, 6
STARTS = ((0, 5, 6, 11), (0, 9))
#: Methods that make the host wait for the device.
READ_METHODS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__")


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yield a list that records the method name of every host read of a tensor's values."""
    names: list[str] = []

    def recorded(name: str):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args, **options):
            names.append(name)
            return original(tensor, *args, **options)

        return read

    with contextlib.ExitStack() as stack:
        for name in READ_METHODS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, recorded(name)))
        yield names


def run_two_layers(rank: int, world: int):
    """Attend in two layers, forward and backward, with every engine.

    Returns:
        ({engine: (host reads, [plans, tile lists] of each step)}, host reads of a control).
    """
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    sharding = SequenceSharding.of(LENGTH, world)
    positions = torch.arange(LENGTH)
    ids = torch.stack([(positions[:, None] >= torch.tensor(x)).sum(1) for x in STARTS])
    reports = {}
    for engine in ENGINES:
        layout = SequenceLayout.make(sharding, rank, rows=ROWS, document_ids=ids)
        attend = Attend(layout=layout, group=groups["cp"], scale=0.4)
        query, key, value, grad = (
            torch.randn(LENGTH // world, ROWS, heads, FEATURES, generator=generator(3, rank))
            for heads in (HEADS, GROUPS, GROUPS, HEADS)
        )
        leaves = [x.requires_grad_() for x in (query, key, value)]
        counts = []
        for _ in range(2):  # the first step builds the blocks
            with host_reads() as names:
                out = query
                for _ in range(2):
                    out = context_attention(out, key, value, attend=attend, engine=engine)
                torch.autograd.grad(out, leaves, grad)
            counts.append((layout.num_plans, layout.num_tile_lists))
        reports[engine] = (names, counts)
    with host_reads() as names:
        if torch.ones(2).sum() > 1:
            torch.ones(1).item()
    return reports, names


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_two_layers, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_never_read_back_from_the_device(ranks, engine):
    for reports, control in ranks:
        assert control == ["__bool__", "item"]
        assert reports[engine][0] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_block_plans_are_built_once_for_all_layers(ranks, engine):
    plans = 2 if engine == "p2p" else 1
    for reports, _ in ranks:
        # Tile lists of queries and of keys; values use the lists of the keys.
        assert reports[engine][1] == [(plans, 2 * plans)] * 2

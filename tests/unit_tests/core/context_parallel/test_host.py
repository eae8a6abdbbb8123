# SPDX-License-Identifier: Apache-2.0
"""What a layer costs the host: it never waits for the device, and works nothing out twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.attention import Attend, context_attention
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.inputs import generator
from tests.support.ranks import run_ranks

ENGINES = ("p2p", "all_gather", "a2a")
LENGTH, ROWS, HEADS, GROUPS, FEATURES = 16, 2, 4, 2, 6
STARTS = ((0, 5, 6, 11), (0, 9))
#: Each of these makes the host wait for what a device has computed.
READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__")


@contextlib.contextmanager
def reads() -> Iterator[list[str]]:
    """Yield a list that gets the name of every read of a tensor's values."""
    seen: list[str] = []

    def watched(name: str):
        plain = getattr(torch.Tensor, name)

        def read(tensor, *args, **options):
            seen.append(name)
            return plain(tensor, *args, **options)

        return read

    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, watched(name)))
        yield seen


def two_layers(rank: int, world: int):
    """Attend in two layers, forward and backward, with every engine; return what the host did."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    cut = SequenceSharding.of(LENGTH, world)
    places = torch.arange(LENGTH)
    ids = torch.stack([(places[:, None] >= torch.tensor(x)).sum(1) for x in STARTS])
    found = {}
    for engine in ENGINES:
        layout = SequenceLayout.make(cut, rank, rows=ROWS, document_ids=ids)
        attend = Attend(layout=layout, group=groups["cp"], scale=0.4)
        query, key, value, grad = (
            torch.randn(LENGTH // world, ROWS, heads, FEATURES, generator=generator(3, rank))
            for heads in (HEADS, GROUPS, GROUPS, HEADS)
        )
        leaves = [x.requires_grad_() for x in (query, key, value)]
        counts = []
        for _ in range(2):  # the blocks are made in the first step
            with reads() as seen:
                out = query
                for _ in range(2):
                    out = context_attention(out, key, value, attend=attend, engine=engine)
                torch.autograd.grad(out, leaves, grad)
            counts.append((layout.num_plans, layout.num_tile_lists))
        found[engine] = (seen, counts)
    with reads() as seen:
        if torch.ones(2).sum() > 1:
            torch.ones(1).item()
    return found, seen


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(two_layers, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_layer_reads_back_from_the_device(ranks, engine):
    for found, watched in ranks:
        assert watched == ["__bool__", "item"]
        assert found[engine][0] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_where_blocks_lie_is_worked_out_once_for_all_layers(ranks, engine):
    plans = 2 if engine == "p2p" else 1
    for found, _ in ranks:
        # Of queries and of keys, of which values have the same places.
        assert found[engine][1] == [(plans, 2 * plans)] * 2

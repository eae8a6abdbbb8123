# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks: order, simulated links, records."""

import contextlib

import pytest
import torch

from megatron.core.comm import Early, Late, simulated, trace
from megatron.core.comm.point_to_point import Message, exchange_async
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from tests.support.ranks import run_ranks

LINKS = {"none": None, "late": Late, "early": Early}


def swapped(rank: int, world: int, link: str) -> dict[str, object]:
    """Exchange two tensors of different shapes with the other rank, both ways in one batch."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    group, other = groups["pp"], 1 - rank
    sent = [torch.full((2, 3), 10.0 + rank), torch.full((5,), 20.0 + rank)]
    landed = [torch.zeros(2, 3), torch.zeros(5)]
    simulation = LINKS[link]
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(trace(groups))
        if simulation is not None:
            stack.enter_context(simulated(groups, simulation()))
        pending = exchange_async(
            [
                Message(landed[0], other, sends=False),
                Message(sent[0], other, sends=True),
                Message(sent[1], other, sends=True),
                Message(landed[1], other, sends=False),
            ],
            group,
        )
        early = [bool(x.isnan().all()) for x in landed]
        for each in pending:
            each.wait()
    return {
        "landed": landed,
        "returned": [pending[0].output.data_ptr() == landed[0].data_ptr(), pending[1].is_done()],
        "early": early,
        "records": [(r.kind, r.how, r.bytes) for r in records],
    }


@pytest.mark.parametrize("link", LINKS)
def test_messages_of_a_batch_arrive_in_order(link):
    for rank, found in enumerate(run_ranks(swapped, 2, link)):
        assert torch.equal(found["landed"][0], torch.full((2, 3), 11.0 - rank))
        assert torch.equal(found["landed"][1], torch.full((5,), 21.0 - rank))
        assert found["returned"] == [True, True]
        if link != "none":
            assert found["early"] == [True, True], "what arrives must be poison before the wait"
        other = 1 - rank
        assert found["records"] == [
            ("receive", f"from {other}", 24),
            ("send", f"to {other}", 24),
            ("send", f"to {other}", 20),
            ("receive", f"from {other}", 20),
        ]


def overwritten(rank: int, world: int) -> str:
    """Write into a tensor that is being sent."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    tensor = torch.ones(4)
    with simulated(groups, Late()):
        (pending,) = exchange_async([Message(tensor, 1 - rank, sends=rank == 0)], groups["pp"])
        if rank == 0:
            tensor.zero_()
        try:
            pending.wait()
        except RuntimeError as error:
            return str(error)
    return ""


def test_writing_what_is_being_sent_is_an_error():
    found = run_ranks(overwritten, 2)
    assert "was written while it was under way" in found[0]
    assert found[1] == ""


def test_a_message_to_oneself_is_refused():
    with pytest.raises(ValueError, match="to its own rank 0"):
        exchange_async([Message(torch.zeros(1), 0, sends=True)], Group.single("pp"))

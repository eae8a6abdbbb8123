# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks: order, simulated links, records."""

import contextlib

import pytest
import torch

from megatron.core.comm import point_to_point, trace
from megatron.core.comm.point_to_point import P2PMessage, exchange_async
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated

LINKS = {"none": None, "late": Late, "early": Early}

#: The second is what runs on a GPU; gloo can do it as well.
STARTS = {"one by one": exchange_async, "as one launch": point_to_point._start_batched}


def swapped(rank: int, world: int, link: str, start: str) -> dict[str, object]:
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
        pending = STARTS[start](
            [
                P2PMessage(landed[0], other, sends=False),
                P2PMessage(sent[0], other, sends=True),
                P2PMessage(sent[1], other, sends=True),
                P2PMessage(landed[1], other, sends=False),
            ],
            group,
        )
        early = [bool(x.isnan().all()) for x in landed]
        for each in pending:
            each.wait()
    return {
        "landed": landed,
        "returned": [
            pending[0].output.data_ptr() == landed[0].data_ptr(),
            pending[1].is_completed(),
        ],
        "early": early,
        "records": [(r.kind, r.how, r.bytes) for r in records],
    }


@pytest.mark.parametrize(
    ("link", "start"), [*((link, "one by one") for link in LINKS), ("none", "as one launch")]
)
def test_messages_of_a_batch_arrive_in_order(link, start):
    for rank, found in enumerate(run_ranks(swapped, 2, link, start)):
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
        (pending,) = exchange_async([P2PMessage(tensor, 1 - rank, sends=rank == 0)], groups["pp"])
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
        exchange_async([P2PMessage(torch.zeros(1), 0, sends=True)], Group.single("pp"))


def shifted(rank: int, world: int) -> list[float]:
    """Swap a number with the other rank of a group, as one launch each time."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=2), rank=rank)
    group, found = groups["pp_backward"], []
    value = torch.full((3,), float(rank))
    for _ in range(3):
        landing = torch.full((3,), -1.0)
        messages = [
            P2PMessage(value, 1 - group.rank, sends=True),
            P2PMessage(landing, 1 - group.rank, sends=False),
        ]
        for pending in point_to_point._start_batched(messages, group):
            pending.wait()
        value = landing + 10
        found.append(float(value.sum()))
    return found


def test_one_launch_names_the_other_rank_in_the_world():
    """Groups (0, 2) and (1, 3): a rank local to the group is another one of the world."""
    ranks = run_ranks(shifted, 4)
    for rank, found in enumerate(ranks):
        assert found == [3.0 * ((rank + 2 * n) % 4 + 10 * n) for n in (1, 2, 3)]

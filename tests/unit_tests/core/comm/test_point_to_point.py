# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks: order, simulated links, records."""

import contextlib

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import collectives, trace
from megatron.core.comm.collectives import P2PMessage, exchange_async
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated

LINKS = {"none": None, "late": Late, "early": Early}

#: GPUs use the batched start; gloo supports both.
STARTS = {"one by one": exchange_async, "as one launch": collectives._start_batched}


def exchange_batch(rank: int, world: int, link: str, start: str) -> dict[str, object]:
    """Exchange two tensors of different shapes with the peer, both directions in one batch."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    group, peer = groups["pp"], 1 - rank
    sent = [torch.full((2, 3), 10.0 + rank), torch.full((5,), 20.0 + rank)]
    received = [torch.zeros(2, 3), torch.zeros(5)]
    simulation = LINKS[link]
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(trace(groups))
        if simulation is not None:
            stack.enter_context(simulated(groups, simulation()))
        pending = STARTS[start](
            [
                P2PMessage(received[0], peer, sends=False),
                P2PMessage(sent[0], peer, sends=True),
                P2PMessage(sent[1], peer, sends=True),
                P2PMessage(received[1], peer, sends=False),
            ],
            group,
        )
        early = [bool(x.isnan().all()) for x in received]
        for work in pending:
            work.wait()
    return {
        "received": received,
        "returned": [
            pending[0].output.data_ptr() == received[0].data_ptr(),
            pending[1].is_completed(),
        ],
        "early": early,
        "records": [(r.kind, r.how, r.bytes) for r in records],
    }


@pytest.mark.parametrize(
    ("link", "start"), [*((link, "one by one") for link in LINKS), ("none", "as one launch")]
)
def test_batched_messages_arrive_in_order(link, start):
    for rank, report in enumerate(run_ranks(exchange_batch, 2, link, start)):
        assert torch.equal(report["received"][0], torch.full((2, 3), 11.0 - rank))
        assert torch.equal(report["received"][1], torch.full((5,), 21.0 - rank))
        assert report["returned"] == [True, True]
        if link != "none":
            assert report["early"] == [True, True], "received tensors are poisoned until the wait"
        peer = 1 - rank
        assert report["records"] == [
            ("receive", f"from {peer}", 24),
            ("send", f"to {peer}", 24),
            ("send", f"to {peer}", 20),
            ("receive", f"from {peer}", 20),
        ]


def error_of_early_write(rank: int, world: int) -> str:
    """Write to a tensor while its send is in flight; return the error."""
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


def test_write_to_tensor_being_sent_is_an_error():
    errors = run_ranks(error_of_early_write, 2)
    assert "was written while it was under way" in errors[0]
    assert errors[1] == ""


def test_message_to_own_rank_is_refused():
    with pytest.raises(ValueError, match="from rank 0 to itself"):
        exchange_async([P2PMessage(torch.zeros(1), 0, sends=True)], Group.single("pp"))


def swap_repeatedly(rank: int, world: int) -> list[float]:
    """Swap a value with the peer of a group three times, each in one batched launch."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=2), rank=rank)
    group, sums = groups["pp_backward"], []
    value = torch.full((3,), float(rank))
    for _ in range(3):
        receive_buffer = torch.full((3,), -1.0)
        messages = [
            P2PMessage(value, 1 - group.rank, sends=True),
            P2PMessage(receive_buffer, 1 - group.rank, sends=False),
        ]
        for pending in collectives._start_batched(messages, group):
            pending.wait()
        value = receive_buffer + 10
        sums.append(float(value.sum()))
    return sums


def test_batched_launch_addresses_global_ranks():
    """Groups (0, 2) and (1, 3): group ranks differ from global ranks."""
    sums_by_rank = run_ranks(swap_repeatedly, 4)
    for rank, sums in enumerate(sums_by_rank):
        assert sums == [3.0 * ((rank + 2 * n) % 4 + 10 * n) for n in (1, 2, 3)]

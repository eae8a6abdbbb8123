# SPDX-License-Identifier: Apache-2.0
"""The executor: what runs is the list, and every stage gets what it is due."""

import contextlib

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.pipeline_parallel import make_schedule, with_transfers, with_weight_traffic
from megatron.core.pipeline_parallel.runtime import Executor
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.pipeline_parallel.line import FEATURES, Line, expected, width

TRANSFERS = {
    "SF": ("pp", "send"),
    "RF": ("pp", "receive"),
    "SB": ("pp_backward", "send"),
    "RB": ("pp_backward", "receive"),
}

#: schedule, stages, chunks, microbatches
CASES = [
    ("1f1b", 1, 1, 3),
    ("1f1b", 2, 1, 1),
    ("1f1b", 4, 1, 3),
    ("1f1b", 4, 1, 8),
    ("interleaved", 2, 2, 4),
    ("interleaved", 2, 3, 6),
    ("interleaved", 4, 2, 8),
    ("zb-h1", 2, 1, 3),
    ("zb-h1", 4, 1, 2),
    ("zb-h1", 4, 1, 8),
    ("forward", 4, 2, 5),
]


def pipeline(rank: int, world: int, case: tuple[str, int, int, int], late: bool):
    """Run one step of a case; return what the worker saw and what was observed."""
    name, stages, chunks, microbatches = case
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=stages), rank=rank)
    schedule = with_transfers(
        make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    )
    if name != "forward":
        schedule = with_weight_traffic(schedule, gathers="once", reduces="each")
    worker = Line(schedule, rank)
    executed: list[str] = []
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(trace(groups))
        link = stack.enter_context(simulated(groups, Late())) if late else None
        Executor(
            schedule,
            worker,
            group=groups["pp"],
            backward_group=groups["pp_backward"],
            observe=lambda a: executed.append(str(a)),
        ).run()
    return {
        "list": [str(action) for action in schedule.ranks[rank]],
        "executed": executed,
        "calls": worker.calls,
        "slopes": worker.slopes,
        "inputs": worker.inputs,
        "losses": worker.losses,
        "records": [(r.group, r.kind, r.bytes) for r in records],
        "late": 0 if link is None else link.count,
    }


@pytest.mark.parametrize("late", [False, True], ids=["direct", "late"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-p{c[1]}-v{c[2]}-m{c[3]}")
def test_the_list_is_what_runs_and_every_gradient_is_right(case, late):
    name, stages, chunks, microbatches = case
    ranks = run_ranks(pipeline, stages, case, late)
    sent = 0
    for found in ranks:
        assert found["executed"] == found["list"]
        assert found["calls"] == [a for a in found["list"] if a[:2] not in TRANSFERS]
        listed = [
            (*TRANSFERS[a[:2]], 8 * FEATURES * width(int(a.partition(".")[2])))
            for a in found["list"]
            if a[:2] in TRANSFERS
        ]
        for group in ("pp", "pp_backward"):
            one_way = [record for record in listed if record[0] == group]
            assert [record for record in found["records"] if record[0] == group] == one_way
        assert len(found["records"]) == len(listed)
        sent += len(listed)
        assert found["late"] == (len(listed) if late else 0)
    crossings = (stages * chunks - 1) * microbatches * (1 if name == "forward" else 2)
    assert sent == (2 * crossings if stages > 1 else 0)
    for microbatch in range(microbatches):
        loss, first, slopes = expected(stages * chunks, microbatch)
        assert ranks[-1]["losses"][microbatch] == pytest.approx(loss, rel=1e-14)
        if name == "forward":
            continue
        assert torch.allclose(ranks[0]["inputs"][microbatch], first, rtol=1e-14, atol=0)
        got = [ranks[g % stages]["slopes"][g // stages, microbatch] for g in range(stages * chunks)]
        assert got == pytest.approx(slopes, rel=1e-13)


def crossed(rank: int, world: int) -> None:
    """Run a list in which rank 1 receives two microbatches in the wrong order."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=3))
    worker = Line(schedule, rank)
    if rank == 1:
        recv_buffer, order = worker.recv_buffer, iter([1, 0, 2])
        worker.recv_buffer = lambda microbatch: recv_buffer(next(order))  # type: ignore[method-assign]
    Executor(schedule, worker, group=groups["pp"], backward_group=groups["pp_backward"]).run()


def test_messages_in_another_order_are_noticed():
    with pytest.raises(RankFailure):
        run_ranks(crossed, 2)


def test_a_schedule_for_another_number_of_stages_is_refused():
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    with pytest.raises(ValueError, match=r"2 stages, group pp has 1 ranks"):
        Executor(
            schedule,
            Line(schedule, 0),
            group=Group.single("pp"),
            backward_group=Group.single("pp_backward"),
        )


def test_directions_over_other_ranks_are_refused():
    schedule = make_schedule("1f1b", stages=1, microbatches=2)
    with pytest.raises(ValueError, match=r"pp has the ranks \(0,\), pp_backward has \(1,\)"):
        Executor(
            schedule,
            Line(schedule, 0),
            group=Group.single("pp"),
            backward_group=Group.single("pp_backward", 1),
        )


class Sent:
    """A transfer that nothing ends but a wait for it."""

    def __init__(self, tensor: torch.Tensor, name: object, under_way: list[object]) -> None:
        self.output, self.name, self.under_way = tensor, name, under_way

    def wait(self) -> torch.Tensor:
        if self.name in self.under_way:
            self.under_way.remove(self.name)
        return self.output

    def is_completed(self) -> bool:
        return False


class OnDevice:
    """What a GPU's tensor says of itself."""

    device = torch.device("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_so_many_outputs_of_a_kind_wait_to_leave(monkeypatch, device):
    """A send's tensor is let go when the next but one is sent; on a GPU, whose process runs ahead
    of it, when stages + 1 more are."""
    schedule = with_transfers(make_schedule("1f1b", stages=3, microbatches=20))
    under_way: list[object] = []
    most = {"pp": 0, "pp_backward": 0}

    def exchange(messages, group):
        found = []
        for message in messages:
            name = (group.name, object())
            sent = message.tensor.zero_()
            if message.sends:
                under_way.append(name)
                sent = OnDevice() if device == "cuda" else sent
            found.append(Sent(sent, name, under_way))
        most[group.name] = max(most[group.name], sum(n[0] == group.name for n in under_way))
        return found

    monkeypatch.setattr("megatron.core.pipeline_parallel.runtime.exchange_async", exchange)
    group, backward = (
        Group(name, (0, 1, 2), 1, handle=object())  # type: ignore[arg-type]
        for name in ("pp", "pp_backward")
    )
    Executor(schedule, Line(schedule, 1), group=group, backward_group=backward).run()
    assert under_way == []
    bound = 2 if device == "cpu" else 3 + 1
    assert most == {"pp": bound + 1, "pp_backward": bound + 1}, "those and one that starts"

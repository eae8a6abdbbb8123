# SPDX-License-Identifier: Apache-2.0
"""The executor runs the list of actions and delivers every input to its stage."""

import contextlib

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.pipeline_parallel import (
    Executor,
    make_schedule,
    with_transfers,
    with_weight_traffic,
)
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.pipeline_parallel.line import (
    FEATURES,
    LinearWorker,
    microbatch_length,
    reference,
)

TRANSFERS = {
    "SF": ("pp", "send"),
    "RF": ("pp", "receive"),
    "SB": ("pp_backward", "send"),
    "RB": ("pp_backward", "receive"),
}

#: schedule, stages, chunks, microbatches
CASES = [
    ("1f1b", 1, 1, 3), ("1f1b", 2, 1, 1), ("1f1b", 4, 1, 3), ("1f1b", 4, 1, 8),
    ("interleaved", 2, 2, 4), ("interleaved", 2, 3, 6), ("interleaved", 4, 2, 8),
    ("zb-h1", 2, 1, 3), ("zb-h1", 4, 1, 2), ("zb-h1", 4, 1, 8), ("forward", 4, 2, 5),
]  # fmt: skip


def run_pipeline(rank: int, world: int, case: tuple[str, int, int, int], late: bool):
    """Run one step of a case; return the worker's calls and results, and the transfers."""
    name, stages, chunks, microbatches = case
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=stages), rank=rank)
    schedule = with_transfers(
        make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    )
    if name != "forward":
        schedule = with_weight_traffic(schedule, gathers="once", reduces="each")
    worker = LinearWorker(schedule, rank)
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
        "weight_grads": worker.weight_grads,
        "input_grads": worker.input_grads,
        "losses": worker.losses,
        "records": [(r.group, r.kind, r.bytes) for r in records],
        "late": 0 if link is None else link.count,
    }


@pytest.mark.parametrize("late", [False, True], ids=["direct", "late"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-p{c[1]}-v{c[2]}-m{c[3]}")
def test_executor_runs_the_list_with_correct_gradients(case, late):
    name, stages, chunks, microbatches = case
    ranks = run_ranks(run_pipeline, stages, case, late)
    sent = 0
    for report in ranks:
        assert report["executed"] == report["list"]
        assert report["calls"] == [a for a in report["list"] if a[:2] not in TRANSFERS]
        transfers = [
            (*TRANSFERS[a[:2]], 8 * FEATURES * microbatch_length(int(a.partition(".")[2])))
            for a in report["list"]
            if a[:2] in TRANSFERS
        ]
        for group in ("pp", "pp_backward"):
            group_transfers = [record for record in transfers if record[0] == group]
            assert [record for record in report["records"] if record[0] == group] == group_transfers
        assert len(report["records"]) == len(transfers)
        sent += len(transfers)
        assert report["late"] == (len(transfers) if late else 0)
    crossings = (stages * chunks - 1) * microbatches * (1 if name == "forward" else 2)
    assert sent == (2 * crossings if stages > 1 else 0)
    for microbatch in range(microbatches):
        loss, input_grad, weight_grads = reference(stages * chunks, microbatch)
        assert ranks[-1]["losses"][microbatch] == pytest.approx(loss, rel=1e-14)
        if name == "forward":
            continue
        assert torch.allclose(ranks[0]["input_grads"][microbatch], input_grad, rtol=1e-14, atol=0)
        actual = [
            ranks[g % stages]["weight_grads"][g // stages, microbatch]
            for g in range(stages * chunks)
        ]
        assert actual == pytest.approx(weight_grads, rel=1e-13)


def run_in_wrong_order(rank: int, world: int) -> None:
    """Run a list in which rank 1 receives two microbatches in the wrong order."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    schedule = with_transfers(make_schedule("1f1b", stages=2, microbatches=3))
    worker = LinearWorker(schedule, rank)
    if rank == 1:
        recv_buffer, order = worker.recv_buffer, iter([1, 0, 2])
        worker.recv_buffer = lambda microbatch: recv_buffer(next(order))  # type: ignore[method-assign]
    Executor(schedule, worker, group=groups["pp"], backward_group=groups["pp_backward"]).run()


def test_messages_in_the_wrong_order_are_detected():
    with pytest.raises(RankFailure):
        run_ranks(run_in_wrong_order, 2)


def test_a_schedule_for_another_number_of_stages_is_refused():
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    with pytest.raises(ValueError, match=r"2 stages, group pp has 1 ranks"):
        Executor(
            schedule,
            LinearWorker(schedule, 0),
            group=Group.single("pp"),
            backward_group=Group.single("pp_backward"),
        )


def test_directions_with_different_ranks_are_refused():
    schedule = make_schedule("1f1b", stages=1, microbatches=2)
    with pytest.raises(ValueError, match=r"\(0,\), pp_backward.*\(1,\)"):
        Executor(
            schedule,
            LinearWorker(schedule, 0),
            group=Group.single("pp"),
            backward_group=Group.single("pp_backward", 1),
        )


class PendingTransfer:
    """A transfer that completes only when it is waited for."""

    def __init__(self, tensor: torch.Tensor, name: object, pending: list[object]) -> None:
        self.output, self.name, self.pending = tensor, name, pending

    def wait(self) -> torch.Tensor:
        if self.name in self.pending:
            self.pending.remove(self.name)
        return self.output

    def is_completed(self) -> bool:
        return False


class FakeCudaTensor:
    """A tensor's stand-in that reports a CUDA device."""

    device = torch.device("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_number_of_pending_sends_is_bounded(monkeypatch, device):
    """On a CPU two sends of a kind may be pending. On a GPU stages + 1 may be pending, because the
    host runs ahead of the device."""
    schedule = with_transfers(make_schedule("1f1b", stages=3, microbatches=20))
    pending: list[object] = []
    max_pending = {"pp": 0, "pp_backward": 0}

    def exchange(messages, group):
        transfers = []
        for message in messages:
            name = (group.name, object())
            tensor = message.tensor.zero_()
            if message.sends:
                pending.append(name)
                tensor = FakeCudaTensor() if device == "cuda" else tensor
            transfers.append(PendingTransfer(tensor, name, pending))
        max_pending[group.name] = max(
            max_pending[group.name], sum(n[0] == group.name for n in pending)
        )
        return transfers

    monkeypatch.setattr("megatron.core.pipeline_parallel.runtime.exchange_async", exchange)
    group, backward = (
        Group(name, (0, 1, 2), 1, handle=object())  # type: ignore[arg-type]
        for name in ("pp", "pp_backward")
    )
    Executor(schedule, LinearWorker(schedule, 1), group=group, backward_group=backward).run()
    assert pending == []
    bound = 2 if device == "cpu" else 3 + 1
    assert max_pending == {"pp": bound + 1, "pp_backward": bound + 1}, (
        "the bound and one that starts"
    )

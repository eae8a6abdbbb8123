# SPDX-License-Identifier: Apache-2.0
"""Collectives compared between ranks: equal collectives pass, all ranks report a difference."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from megatron.cli.errors import PeerLost, RunStopped
from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import all_gather, all_reduce, all_to_all
from megatron.core.comm.collectives import P2PMessage, exchange_async
from megatron.training.distributed_context import CollectiveCheck
from megatron.training.fault_tolerance.peers import PeerWatch
from tests.support.ranks import run_ranks

ONES = torch.ones(4)


def _matching_collectives(rank, groups):
    for name in ("world", "tp", "dense_dp", "world"):
        all_reduce(torch.ones(2), groups[name])
        all_gather(torch.ones(2), groups[name])
    counts = {
        "send_counts": [rank] * 4,
        "receive_counts": range(4),
    }  # uneven counts are no mismatch
    all_to_all(torch.ones(4 * rank), groups["world"], **counts)


def _pipeline_messages(rank, groups):
    """Send to the next rank before the all-reduce, and receive from the previous after it."""
    group = groups["tp"]
    message = P2PMessage(ONES.clone(), 1 - group.rank, sends=group.rank == 0)
    requests = exchange_async([message], group) if group.rank == 0 else []
    all_reduce(torch.ones(2), groups["world"])
    for request in requests or exchange_async([message], group):
        request.wait()


def _kind_differs(rank, groups):
    (all_gather if rank == 1 else all_reduce)(ONES, groups["world"])


def _shape_differs(rank, groups):
    all_reduce(ONES.view(2, 2) if rank == 1 else ONES, groups["world"])


def _dtype_differs(rank, groups):
    all_reduce(ONES.to(torch.float16 if rank == 1 else torch.bfloat16), groups["world"])


def _operation_differs(rank, groups):
    all_reduce(ONES, groups["world"], op="max" if rank == 1 else "sum")


def _two_groups(rank, groups):
    """Ranks 0 and 2 wait in their tp groups, ranks 1 and 3 in the world group: a deadlock."""
    all_reduce(ONES, groups["tp" if rank in (0, 2) else "world"])


def _slow_rank(rank, groups):
    if rank == 1:
        time.sleep(1.5)
    all_reduce(ONES, groups["world"])


def _missing_rank(rank, groups):
    if rank == 1:
        time.sleep(4.0)
        return
    all_reduce(ONES, groups["world"])


def _run_checked(
    rank: int, world: int, port: int, work: str, limit: float
) -> tuple[str, float, int]:
    def client() -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=2), rank=rank)
    watch = PeerWatch(client, rank=rank, world_size=world)
    watch.iteration = 7
    check = CollectiveCheck(client(), rank=rank, timeout_seconds=limit, watch=watch)
    groups.observers.append(check)
    start = time.monotonic()
    try:
        globals()[work](rank, groups)
        text = ""
    except (RunStopped, PeerLost) as stop:
        text = str(stop)
    return text, time.monotonic() - start, check.compared


def _run(work: str, *, world: int = 2, limit: float = 60.0):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(_run_checked, world, server.port, work, limit)


def test_equal_collectives_pass_and_are_compared():
    outcomes = _run("_matching_collectives", world=4)
    assert [(text, compared) for text, _, compared in outcomes] == [("", 9)] * 4


def test_point_to_point_messages_are_not_compared():
    assert [(text, compared) for text, _, compared in _run("_pipeline_messages", world=4)] == [
        ("", 1)
    ] * 4


@pytest.mark.parametrize(
    ("work", "rank0", "rank1"),
    [
        (
            "_kind_differs",
            "all_reduce (sum) of float32 [4] over world",
            "all_gather of float32 [8] over",
        ),
        (
            "_shape_differs",
            "all_reduce (sum) of float32 [4]",
            "all_reduce (sum) of float32 [2 x 2]",
        ),
        ("_dtype_differs", "all_reduce (sum) of bfloat16", "all_reduce (sum) of float16"),
        ("_operation_differs", "all_reduce (sum) of", "all_reduce (max) of"),
    ],
)
def test_collective_mismatch_is_reported_alike_by_both_ranks(work, rank0, rank1):
    (text, _, _), (other_text, _, _) = _run(work)
    assert text == other_text
    assert text.startswith("ranks differ in collective 1 over world: ")
    assert f"rank 0: {rank0}" in text
    assert f"rank 1: {rank1}" in text
    assert "in iteration 7" in text


def test_cross_group_deadlock_is_reported_within_seconds():
    outcomes = _run("_two_groups", world=4)
    texts = [text for text, _, _ in outcomes if "wait for each other" in text]
    assert texts
    for text in texts:
        assert "over tp in iteration 7" in text
        assert "over world in iteration 7" in text
    assert max(seconds for _, seconds, _ in outcomes) < 20.0


def test_a_slow_rank_is_waited_for():
    assert [text for text, _, _ in _run("_slow_rank")] == ["", ""]


def test_missing_rank_is_named_after_the_time_limit():
    (text, seconds, _), _ = _run("_missing_rank", limit=1.5)
    assert "the timeout has expired" in text
    assert "rank 0: all_reduce (sum) of float32 [4] over world" in text
    assert "rank 1: no collective yet" in text
    assert seconds < 4.0

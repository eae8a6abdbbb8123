# SPDX-License-Identifier: Apache-2.0
"""What a launcher's restart goes on from: what its own job has saved, and nothing else."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megatron.cli.errors import PeerLost
from megatron.cli.launch import Launch
from megatron.training.config.resolve import resolve
from megatron.training.failures import restart
from megatron.training.failures.restart import RestartRecord, agree_on_start, resume_own_checkpoint
from tests.unit_tests.training.small_config import small_config


def _note(port: int, attempt: int, *, serves: bool = True) -> RestartRecord:
    launch = Launch(address="127.0.0.1", port=port, launcher_serves=serves, attempt=attempt)
    return RestartRecord(launch, timeout_seconds=10.0)


def test_only_a_later_start_of_a_job_that_has_saved_goes_on():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = _note(server.port, 0)
    assert not first.resumes
    assert not _note(server.port, 0).resumes
    assert not _note(server.port, 1).resumes, "it crashed before its first save"
    first.saved()
    assert _note(server.port, 0).resumes, "a machine came or went, which the launcher counts not"
    assert _note(server.port, 1).resumes
    assert _note(server.port, 2).resumes
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not _note(other.port, 1).resumes, "of another job"


def test_without_a_launcher_that_serves_a_store_nothing_is_noted():
    note = RestartRecord(Launch(), timeout_seconds=1.0)
    note.saved()
    assert not note.resumes


def test_a_run_that_goes_on_loads_all_of_what_it_saved():
    run = resolve(small_config("--save s --load other --finetune --no-load-optim"), 1)
    chosen = resume_own_checkpoint(run).config.checkpoint
    assert (chosen.load, chosen.finetune, chosen.load_optim) == ("s", False, True)


def _started(port: int, counts: list[int], *, serves: bool = True) -> list[int]:
    """Start ranks to whom their launchers tell these counts; return the numbers they agree on."""
    found = [-1] * len(counts)

    def start(rank: int) -> None:
        launch = Launch(
            rank=rank,
            world_size=len(counts),
            address="127.0.0.1",
            port=port,
            launcher_serves=serves,
            attempt=counts[rank],
        )
        store = launch.connect(timeout_seconds=20.0)
        found[rank] = agree_on_start(launch, store, timeout_seconds=20.0).attempt

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(len(counts))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_start_gets_a_unique_number():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert _started(server.port, [0, 0, 0]) == [0, 0, 0]
    # One machine saw the failure, the others only that it had left; then a new machine comes.
    assert _started(server.port, [1, 0]) == [1, 1]
    assert _started(server.port, [1, 0, 0, 0]) == [2] * 4
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert _started(other.port, [2, 1, 2], serves=False) == [2, 2, 2]


def test_stale_names_of_an_earlier_start_are_ignored():
    """Its rank 0 was killed before it had answered."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    left = dist.PrefixStore("megatron/starts", server)
    left.add("count", 1)
    for rank in (1, 2):
        left.set(f"name/{rank}", f"stale {rank}")
    assert _started(server.port, [0, 0, 0]) == [1, 1, 1]


def test_ranks_that_do_not_come_are_named():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = Launch(world_size=4, address="127.0.0.1", port=server.port, launcher_serves=True)
    dist.PrefixStore("megatron/starts", server).set("knows/0/2", "1")
    with pytest.raises(PeerLost, match=r"ranks 1, 3 of 4 "):
        agree_on_start(launch, server, timeout_seconds=0.05)


def test_a_rank_that_rank_0_does_not_answer_says_so(monkeypatch):
    monkeypatch.setattr(restart, "ANSWER_SECONDS", 0.0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = Launch(rank=3, world_size=4, address="127.0.0.1", port=server.port)
    with pytest.raises(PeerLost, match=r"rank 0 .*WORLD_SIZE"):
        agree_on_start(launch, server, timeout_seconds=0.05)


def test_all_ranks_get_the_address_of_rank_0s_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = {}

    def start(rank: int) -> None:
        launch = Launch(rank=rank, world_size=2, address="127.0.0.1", port=server.port)
        store = launch.connect(timeout_seconds=20.0)
        own = None if rank else ("host", 7)
        found[rank] = agree_on_start(
            launch, store, timeout_seconds=20.0, rank0_store=own
        ).rank0_store

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: ("host", 7), 1: ("host", 7)}

# SPDX-License-Identifier: Apache-2.0
"""Restarts by a launcher resume only from a checkpoint that the same job has saved."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megatron.cli.errors import ExitCode, PeerLost, RunStopped
from megatron.cli.launch import Launch
from megatron.training.config.resolve import resolve
from megatron.training.fault_tolerance import restart
from megatron.training.fault_tolerance.restart import (
    RestartRecord,
    agree_on_start,
    resume_own_checkpoint,
)
from tests.unit_tests.training.small_config import small_config


def _restart_record(port: int, attempt: int, *, serves: bool = True) -> RestartRecord:
    launch = Launch(address="127.0.0.1", port=port, launcher_serves=serves, attempt=attempt)
    return RestartRecord(launch, timeout_seconds=10.0)


def test_only_a_restart_of_a_job_that_saved_resumes():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    record = _restart_record(server.port, 0)
    assert not record.resumes
    assert not _restart_record(server.port, 0).resumes
    assert not _restart_record(server.port, 1).resumes, "it crashed before its first save"
    record.saved()
    assert _restart_record(server.port, 0).resumes, (
        "a host joined or left, which the launcher does not count as a restart"
    )
    assert _restart_record(server.port, 1).resumes
    assert _restart_record(server.port, 2).resumes
    other_server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not _restart_record(other_server.port, 1).resumes, "the save is of another job"


def test_without_a_launcher_store_no_restart_is_recorded():
    record = RestartRecord(Launch(), timeout_seconds=1.0)
    record.saved()
    assert not record.resumes


def test_resumed_run_loads_its_own_complete_checkpoint():
    run = resolve(small_config("--save s --load other --finetune --no-load-optim"), 1)
    chosen = resume_own_checkpoint(run).config.checkpoint
    assert (chosen.load, chosen.finetune, chosen.load_optim) == ("s", False, True)


def _start_ranks(port: int, counts: list[int], *, serves: bool = True) -> list[int]:
    """Start ranks with their launchers' restart counts; return the attempts they agree on."""
    attempts = [-1] * len(counts)

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
        attempts[rank] = agree_on_start(launch, store, timeout_seconds=20.0).attempt

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(len(counts))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return attempts


def test_every_start_gets_a_unique_number():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert _start_ranks(server.port, [0, 0, 0]) == [0, 0, 0]
    # One host saw the failure, the others only that the host had left; then a new host joins.
    assert _start_ranks(server.port, [1, 0]) == [1, 1]
    assert _start_ranks(server.port, [1, 0, 0, 0]) == [2] * 4
    other_server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert _start_ranks(other_server.port, [2, 1, 2], serves=False) == [2, 2, 2]


def test_stale_names_of_an_earlier_start_are_ignored():
    """Rank 0 of the earlier start was killed before it answered."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("megatron/starts", server)
    store.add("count", 1)
    for rank in (1, 2):
        store.set(f"name/{rank}", f"stale {rank}")
    assert _start_ranks(server.port, [0, 0, 0]) == [1, 1, 1]


def test_missing_ranks_at_start_are_named():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = Launch(world_size=4, address="127.0.0.1", port=server.port, launcher_serves=True)
    dist.PrefixStore("megatron/starts", server).set("knows/0/2", "1")
    with pytest.raises(PeerLost, match=r"ranks 1, 3 of 4 "):
        agree_on_start(launch, server, timeout_seconds=0.05)


def test_missing_answer_of_rank_0_is_reported(monkeypatch):
    monkeypatch.setattr(restart, "ANSWER_SECONDS", 0.0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = Launch(rank=3, world_size=4, address="127.0.0.1", port=server.port)
    with pytest.raises(PeerLost, match=r"rank 0 .*WORLD_SIZE"):
        agree_on_start(launch, server, timeout_seconds=0.05)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("launcher_serves", "code"), [(True, ExitCode.LAUNCHER_LOST), (False, ExitCode.PEER_LOST)]
)
def test_store_lost_at_start_is_reported_in_one_line(rank, launcher_serves, code):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    launch = Launch(
        rank=rank,
        world_size=2,
        address="127.0.0.1",
        port=server.port,
        launcher_serves=launcher_serves,
    )
    del server  # ends the store, as a killed launcher does
    with pytest.raises(RunStopped, match="the store was lost while the ranks started") as stop:
        agree_on_start(launch, client, timeout_seconds=5.0)
    assert stop.value.code == code
    assert "\n" not in str(stop.value)


def test_all_ranks_get_the_address_of_rank_0s_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    addresses = {}

    def start(rank: int) -> None:
        launch = Launch(rank=rank, world_size=2, address="127.0.0.1", port=server.port)
        store = launch.connect(timeout_seconds=20.0)
        address = None if rank else ("host", 7)
        addresses[rank] = agree_on_start(
            launch, store, timeout_seconds=20.0, rank0_store=address
        ).rank0_store

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert addresses == {0: ("host", 7), 1: ("host", 7)}

# SPDX-License-Identifier: Apache-2.0
"""Naming the rank that is gone: killed, stopped, failed, silent elsewhere, and nobody."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import asdict

import pytest
import torch.distributed as dist

from megatron.core.comm import CollectiveRecord
from megatron.training.failures import peers
from megatron.training.failures.hang_files import HangFiles
from megatron.training.failures.launcher import process_state
from megatron.training.failures.peers import Diagnosis, Identity, PeerWatch
from tests.support.ranks import start_ranks


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _client(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _watch(rank: int, world: int, port: int) -> str | None:
    """Join; rank 0 waits for the parent's word and looks around, the others wait for their end."""
    watch = PeerWatch(lambda: _client(port), rank=rank, world_size=world, heartbeat_seconds=0.05)
    watch.iteration = 7
    store = _client(port)
    store.set(f"ready/{rank}", "1")
    if rank:
        store.wait(["over"])
        watch.close()
        return None
    store.wait(["look"])
    found = watch.diagnose(0.5)
    text = None if found is None else found.text
    store.set("over", "1")
    return text


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGKILL, "is dead"), (signal.SIGSTOP, "is stopped"), (None, None)],
)
def test_a_rank_of_this_machine(server, number, text):
    with start_ranks(_watch, 3, server.port, init=False) as ranks:
        server.wait([f"ready/{rank}" for rank in range(3)])
        if number is not None:
            ranks.kill(2, number)
        server.set("look", "1")
        server.wait(["over"])
        if number == signal.SIGSTOP:
            ranks.kill(2, signal.SIGKILL)
        found = ranks.outcomes(timeout=20)
        said = found[0].value
        if text is None:
            assert said is None
        else:
            assert f"rank 2 (process {ranks.processes[2].pid} on " in said
            assert said.endswith(text)


def test_rank_on_another_host_is_tracked_by_heartbeat(server):
    watch = PeerWatch(lambda: _client(server.port), rank=0, world_size=3, heartbeat_seconds=0.05)
    for rank in (1, 2):
        server.set(f"peer/{rank}", json.dumps(asdict(Identity("elsewhere", 1))))
        server.set(f"beat/{rank}", json.dumps([1, 12]))
    other = PeerWatch(lambda: _client(server.port), rank=1, world_size=3, heartbeat_seconds=0.05)
    server.set("peer/1", json.dumps(asdict(Identity("elsewhere", 1))))
    assert watch.diagnose(2.0) == Diagnosis("rank 2 is silent since iteration 12")
    other.close()
    watch.close()


def test_the_text_of_a_failure_is_quoted_first(server):
    watches = [
        PeerWatch(lambda: _client(server.port), rank=rank, world_size=2, heartbeat_seconds=0.05)
        for rank in range(2)
    ]
    watches[1].report_failure(ValueError("no such\n file"))
    assert watches[0].diagnose(1.0) == Diagnosis("rank 1 failed: no such file", is_reported=True)
    for watch in watches:
        watch.close()


def test_one_rank_prints_a_text(server):
    watches = [
        PeerWatch(lambda: _client(server.port), rank=rank, world_size=3) for rank in range(3)
    ]
    assert [w.claims.claim("error: x") for w in watches] == [True, False, False]
    assert [w.claims.claim("error: y") for w in reversed(watches)] == [True, False, False]
    for watch in watches:
        watch.close()


def test_process_states():
    assert process_state(os.getpid()) == "running"
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while process_state(child.pid) != "stopped" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(child.pid) == "stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet collected
    assert process_state(child.pid) == "dead"
    child.wait()
    assert process_state(child.pid) == "dead"


def test_a_rank_that_has_left_in_good_order_is_not_missed(server):
    watch = PeerWatch(lambda: _client(server.port), rank=0, world_size=2, heartbeat_seconds=0.05)
    other = PeerWatch(lambda: _client(server.port), rank=1, world_size=2, heartbeat_seconds=0.05)
    gone = subprocess.Popen(["true"])
    gone.wait()
    server.set("peer/1", json.dumps(asdict(Identity(socket.gethostname(), gone.pid))))
    assert "is dead" in watch.diagnose(0.5).text
    other.close()
    assert watch.diagnose(0.5) is None
    watch.close()


def test_live_rank_missing_a_collective_is_named_with_its_last(server):
    watches = [
        PeerWatch(lambda: _client(server.port), rank=rank, world_size=3, heartbeat_seconds=0.05)
        for rank in range(3)
    ]
    for rank, (iteration, count) in enumerate([(4, 9), (4, 8), (4, 9)]):
        watches[rank].iteration = iteration
        for number in range(count):
            record = CollectiveRecord("all_reduce", "tp", 3, 8, (), (number,), "float32", "sum")
            watches[rank].collectives(record)
    time.sleep(0.3)
    assert watches[0].diagnose_lagging() == Diagnosis(
        "rank 1 is still in iteration 4 behind its collective 8 (all_reduce (sum) of float32 [7] "
        "over tp)"
    )
    watches[1].iteration = 5
    time.sleep(0.3)
    assert watches[0].diagnose_lagging() is None
    for watch in watches:
        watch.close()


def test_other_stages_lag_only_by_iteration_number(server):
    watches = [
        PeerWatch(lambda: _client(server.port), rank=rank, world_size=4, heartbeat_seconds=0.05)
        for rank in range(4)
    ]
    for rank, (watch, count) in enumerate(zip(watches, (9, 9, 3, 4), strict=True)):
        watch.join_pipeline((rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1))
        watch.iteration = 4
        for number in range(count):
            record = CollectiveRecord("send", "pp", 2, 8, (), (number,), "float32", f"to {rank}")
            watch.collectives(record)
    time.sleep(0.3)
    assert watches[0].diagnose_lagging() == Diagnosis(
        "stages wait for one another: rank 2 has come to send (to 2) of float32 [2] over pp"
    )
    assert watches[3].diagnose_lagging() == Diagnosis(
        "rank 2 is still in iteration 4 behind its collective 3 (send (to 2) of float32 [2] over "
        "pp)"
    )
    watches[1].iteration = 3
    time.sleep(0.3)
    assert watches[2].diagnose_lagging() == Diagnosis(
        "rank 1 is still in iteration 3 behind its collective 9 (send (to 1) of float32 [8] over "
        "pp)"
    )
    for watch in watches:
        watch.close()


class ListedHangFiles(HangFiles):
    """HangFiles that is listed instead of written."""

    def __init__(self, rank, kept):
        super().__init__("save", attempt=0, rank=rank, frozen_seconds=9.0)
        self.rank, self.kept = rank, kept

    def write(self, reason, error, log):
        self.kept.append((self.rank, reason))

    def write_report(self, text):
        self.kept.append(("report", text))

    def heartbeat(self):
        pass


def keeping(server, world, kept):
    return [
        PeerWatch(
            lambda: _client(server.port),
            rank=rank,
            world_size=world,
            heartbeat_seconds=0.05,
            files=ListedHangFiles(rank, kept),
        )
        for rank in range(world)
    ]


def until(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_live_ranks_write_evidence_once_and_one_writes_report(server):
    kept = []
    watches = keeping(server, 3, kept)
    watches[1].write_diagnostics("rank 5 is dead")
    watches[1].write_diagnostics("rank 6 is dead")
    until(lambda: len(kept) == 4)
    watches[0].write_diagnostics("rank 7 is dead")
    reports = [text for kind, text in kept if kind == "report"]
    assert sorted(k for k in kept if k[0] != "report") == [(r, "rank 5 is dead") for r in range(3)]
    assert len(reports) == 1
    assert "written by rank 1\nrank 5 is dead\n" in reports[0]
    for watch in watches:
        watch.close()


def test_rank_that_gave_up_is_not_blamed(server):
    watches = keeping(server, 2, [])
    watches[1].write_diagnostics("rank 7 is stopped")
    gone = subprocess.Popen(["true"])
    gone.wait()
    server.set("peer/1", json.dumps(asdict(Identity(socket.gethostname(), gone.pid))))
    assert watches[0].diagnose(0.5) == Diagnosis("rank 7 is stopped", is_reported=True)
    for watch in watches:
        watch.close()


def test_error_already_printed_by_a_rank_needs_no_report(server):
    kept = []
    watches = keeping(server, 2, kept)
    watches[0].claims.note_printed("no such file")
    watches[1].write_diagnostics("rank 0 failed: no such file", is_reported=True)
    until(lambda: len(kept) == 2)
    assert sorted(kept) == [(r, "rank 0 failed: no such file") for r in range(2)]
    for watch in watches:
        watch.close()


def test_a_rank_ends_after_the_rank_at_fault_has_printed(server):
    """A launcher ends the rank at fault as soon as another one has ended."""
    watches = keeping(server, 2, [])
    text = "rank 0 failed: no such file"
    survivor = threading.Thread(
        target=lambda: watches[1].write_diagnostics(text, is_reported=True), daemon=True
    )
    survivor.start()
    survivor.join(timeout=0.3)
    assert survivor.is_alive()
    watches[0].claims.note_printed("error: no such file")
    survivor.join()
    for watch in watches:
        watch.close()


def test_a_guard_finds_the_lost_rank_while_the_main_thread_waits(server):
    """As on a GPU, where nothing is raised: the thread that beats ends the process."""
    kept, lost = [], []
    watches = keeping(server, 3, kept)
    watches[0].guard(0.4, lost.append)
    record = CollectiveRecord("all_reduce", "world", 3, 8, (0, 1, 2), (2,), "float32", "sum")
    for watch in watches[:2]:
        watch.iteration = 3
    for _ in range(12):  # as long as it comes to new ones nothing is looked up
        watches[0].collectives(record)
        time.sleep(0.05)
    assert not kept
    gone = subprocess.Popen(["true"])
    gone.wait()
    server.set("peer/2", json.dumps(asdict(Identity(socket.gethostname(), gone.pid))))
    until(lambda: lost)
    assert f"rank 2 (process {gone.pid} on {socket.gethostname()}) is dead" in lost[0].text
    assert kept[0] == (0, lost[0].text)
    for watch in watches:
        watch.close()


def test_a_guard_tells_of_a_rank_that_lives_but_ends_nothing(server, monkeypatch):
    monkeypatch.setattr(peers, "GUARD_SECONDS", 0.2)
    kept, lost = [], []
    watches = keeping(server, 2, kept)
    watches[0].iteration = watches[1].iteration = 3
    watches[0].guard(0.3, lost.append)
    watches[0].collectives(CollectiveRecord("all_reduce", "tp", 2, 8, (0, 1), (2,), "int64", "sum"))
    until(lambda: len(kept) == 3)
    assert watches[1].diagnose(0.2) is None, "nobody has given up"
    for watch in watches:
        watch.close()
    assert not lost
    assert (0, "rank 1 is still in iteration 3 behind its collective 0 (no collective yet)") in kept

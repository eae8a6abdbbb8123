# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a lost rank: killed, stopped, failed, silent on another host, or none."""

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
from megatron.training.fault_tolerance import peers
from megatron.training.fault_tolerance.hang_files import HangFiles
from megatron.training.fault_tolerance.launcher import process_state
from megatron.training.fault_tolerance.peers import Diagnosis, Identity, PeerWatch
from tests.support.ranks import start_ranks


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _client(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _watch(rank: int, world: int, port: int) -> str | None:
    """Join; rank 0 diagnoses when the parent sets "look", the others wait until "over"."""
    watch = PeerWatch(lambda: _client(port), rank=rank, world_size=world, heartbeat_seconds=0.05)
    watch.iteration = 7
    store = _client(port)
    store.set(f"ready/{rank}", "1")
    if rank:
        store.wait(["over"])
        watch.close()
        return None
    store.wait(["look"])
    diagnosis = watch.diagnose(0.5)
    text = None if diagnosis is None else diagnosis.text
    store.set("over", "1")
    return text


@pytest.mark.parametrize(
    ("kill_signal", "text"),
    [(signal.SIGKILL, "is dead"), (signal.SIGSTOP, "is stopped"), (None, None)],
)
def test_dead_or_stopped_local_rank_is_named(server, kill_signal, text):
    with start_ranks(_watch, 3, server.port, init=False) as ranks:
        server.wait([f"ready/{rank}" for rank in range(3)])
        if kill_signal is not None:
            ranks.kill(2, kill_signal)
        server.set("look", "1")
        server.wait(["over"])
        if kill_signal == signal.SIGSTOP:
            ranks.kill(2, signal.SIGKILL)
        outcomes = ranks.outcomes(timeout=20)
        diagnosis = outcomes[0].value
        if text is None:
            assert diagnosis is None
        else:
            assert f"rank 2 (process {ranks.processes[2].pid} on " in diagnosis
            assert diagnosis.endswith(text)


def test_rank_on_another_host_is_tracked_by_heartbeat(server):
    watch = PeerWatch(lambda: _client(server.port), rank=0, world_size=3, heartbeat_seconds=0.05)
    for rank in (1, 2):
        server.set(f"peer/{rank}", json.dumps(asdict(Identity("elsewhere", 1))))
        server.set(f"beat/{rank}", json.dumps([1, 12]))
    watch1 = PeerWatch(lambda: _client(server.port), rank=1, world_size=3, heartbeat_seconds=0.05)
    server.set("peer/1", json.dumps(asdict(Identity("elsewhere", 1))))
    assert watch.diagnose(2.0) == Diagnosis("rank 2 is silent since iteration 12")
    watch1.close()
    watch.close()


def test_reported_failure_message_is_quoted(server):
    watches = [
        PeerWatch(lambda: _client(server.port), rank=rank, world_size=2, heartbeat_seconds=0.05)
        for rank in range(2)
    ]
    watches[1].report_failure(ValueError("no such\n file"))
    assert watches[0].diagnose(1.0) == Diagnosis("rank 1 failed: no such file", is_reported=True)
    for watch in watches:
        watch.close()


def test_only_one_rank_prints_a_message(server):
    watches = [
        PeerWatch(lambda: _client(server.port), rank=rank, world_size=3) for rank in range(3)
    ]
    assert [w.claims.claim("error: x") for w in watches] == [True, False, False]
    assert [w.claims.claim("error: y") for w in reversed(watches)] == [True, False, False]
    for watch in watches:
        watch.close()


def test_process_state_is_running_stopped_or_dead():
    assert process_state(os.getpid()) == "running"
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while process_state(child.pid) != "stopped" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(child.pid) == "stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: exited, but not reaped
    assert process_state(child.pid) == "dead"
    child.wait()
    assert process_state(child.pid) == "dead"


def test_rank_that_closed_cleanly_is_not_reported(server):
    watch = PeerWatch(lambda: _client(server.port), rank=0, world_size=2, heartbeat_seconds=0.05)
    watch1 = PeerWatch(lambda: _client(server.port), rank=1, world_size=2, heartbeat_seconds=0.05)
    exited = subprocess.Popen(["true"])
    exited.wait()
    server.set("peer/1", json.dumps(asdict(Identity(socket.gethostname(), exited.pid))))
    assert "is dead" in watch.diagnose(0.5).text
    watch1.close()
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
        "rank 1 is still in iteration 4 after its collective 8 (all_reduce (sum) of float32 [7] "
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
        "stages wait for one another: rank 2 has reached send (to 2) of float32 [2] over pp"
    )
    assert watches[3].diagnose_lagging() == Diagnosis(
        "rank 2 is still in iteration 4 after its collective 3 (send (to 2) of float32 [2] over pp)"
    )
    watches[1].iteration = 3
    time.sleep(0.3)
    assert watches[2].diagnose_lagging() == Diagnosis(
        "rank 1 is still in iteration 3 after its collective 9 (send (to 1) of float32 [8] over pp)"
    )
    for watch in watches:
        watch.close()


class RecordedHangFiles(HangFiles):
    """HangFiles that records its writes in a list instead of files."""

    def __init__(self, rank, writes):
        super().__init__("save", attempt=0, rank=rank, frozen_seconds=9.0)
        self.rank, self.writes = rank, writes

    def write(self, reason, error, log):
        self.writes.append((self.rank, reason))

    def write_report(self, text):
        self.writes.append(("report", text))

    def heartbeat(self):
        pass


def watches_with_files(server, world, writes):
    return [
        PeerWatch(
            lambda: _client(server.port),
            rank=rank,
            world_size=world,
            heartbeat_seconds=0.05,
            files=RecordedHangFiles(rank, writes),
        )
        for rank in range(world)
    ]


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_live_ranks_write_evidence_once_and_one_writes_report(server):
    writes = []
    watches = watches_with_files(server, 3, writes)
    watches[1].write_diagnostics("rank 5 is dead")
    watches[1].write_diagnostics("rank 6 is dead")
    wait_until(lambda: len(writes) == 4)
    watches[0].write_diagnostics("rank 7 is dead")
    reports = [text for kind, text in writes if kind == "report"]
    assert sorted(k for k in writes if k[0] != "report") == [
        (r, "rank 5 is dead") for r in range(3)
    ]
    assert len(reports) == 1
    assert "written by rank 1\nrank 5 is dead\n" in reports[0]
    for watch in watches:
        watch.close()


def test_rank_that_gave_up_is_not_blamed(server):
    watches = watches_with_files(server, 2, [])
    watches[1].write_diagnostics("rank 7 is stopped")
    exited = subprocess.Popen(["true"])
    exited.wait()
    server.set("peer/1", json.dumps(asdict(Identity(socket.gethostname(), exited.pid))))
    assert watches[0].diagnose(0.5) == Diagnosis("rank 7 is stopped", is_reported=True)
    for watch in watches:
        watch.close()


def test_error_already_printed_by_a_rank_needs_no_report(server):
    writes = []
    watches = watches_with_files(server, 2, writes)
    watches[0].claims.note_printed("no such file")
    watches[1].write_diagnostics("rank 0 failed: no such file", is_reported=True)
    wait_until(lambda: len(writes) == 2)
    assert sorted(writes) == [(r, "rank 0 failed: no such file") for r in range(2)]
    for watch in watches:
        watch.close()


def test_rank_waits_until_the_failed_rank_has_printed(server):
    """A launcher ends the failed rank as soon as another rank has exited."""
    watches = watches_with_files(server, 2, [])
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


def test_guard_names_the_dead_rank_in_a_blocked_collective(server):
    """On a GPU, no exception interrupts a collective: the heartbeat thread ends the process."""
    writes, lost = [], []
    watches = watches_with_files(server, 3, writes)
    watches[0].guard(0.4, lost.append)
    record = CollectiveRecord("all_reduce", "world", 3, 8, (0, 1, 2), (2,), "float32", "sum")
    for watch in watches[:2]:
        watch.iteration = 3
    for _ in range(12):  # no diagnosis while the rank reaches new collectives
        watches[0].collectives(record)
        time.sleep(0.05)
    assert not writes
    exited = subprocess.Popen(["true"])
    exited.wait()
    server.set("peer/2", json.dumps(asdict(Identity(socket.gethostname(), exited.pid))))
    wait_until(lambda: lost)
    assert f"rank 2 (process {exited.pid} on {socket.gethostname()}) is dead" in lost[0].text
    assert writes[0] == (0, lost[0].text)
    for watch in watches:
        watch.close()


def test_guard_reports_a_lagging_rank_without_ending_the_run(server, monkeypatch):
    monkeypatch.setattr(peers, "GUARD_SECONDS", 0.2)
    writes, lost = [], []
    watches = watches_with_files(server, 2, writes)
    watches[0].iteration = watches[1].iteration = 3
    watches[0].guard(0.3, lost.append)
    watches[0].collectives(CollectiveRecord("all_reduce", "tp", 2, 8, (0, 1), (2,), "int64", "sum"))
    wait_until(lambda: len(writes) == 3)
    assert watches[1].diagnose(0.2) is None, "no rank has given up"
    for watch in watches:
        watch.close()
    assert not lost
    assert (
        0,
        "rank 1 is still in iteration 3 after its collective 0 (no collective yet)",
    ) in writes

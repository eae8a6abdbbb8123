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


@pytest.fixture
def join(server):
    """Return a function that joins ranks to one job; the ranks leave after the test."""
    joined: list[PeerWatch] = []

    def join_ranks(ranks, world, writes=None):
        watches = [
            PeerWatch(
                lambda: _client(server.port),
                rank=rank,
                world_size=world,
                heartbeat_seconds=0.05,
                files=None if writes is None else RecordedHangFiles(rank, writes),
            )
            for rank in ranks
        ]
        joined.extend(watches)
        return watches

    yield join_ranks
    for watch in joined:
        watch.close()


def leave_dead_process(server, rank: int) -> int:
    """Replace a rank's process by one that has ended, and return its id."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    server.set(f"peer/{rank}", json.dumps(asdict(Identity(socket.gethostname(), ended.pid))))
    return ended.pid


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


def test_rank_on_another_host_is_tracked_by_heartbeat(server, join):
    (watch,) = join([0], 3)
    for rank in (1, 2):
        server.set(f"peer/{rank}", json.dumps(asdict(Identity("elsewhere", 1))))
        server.set(f"beat/{rank}", json.dumps([1, 12]))
    join([1], 3)
    server.set("peer/1", json.dumps(asdict(Identity("elsewhere", 1))))
    assert watch.diagnose(2.0) == Diagnosis("rank 2 is silent since iteration 12")


def test_reported_failure_message_is_quoted(join):
    watches = join(range(2), 2)
    watches[1].report_failure(ValueError("no such\n file"))
    assert watches[0].diagnose(1.0) == Diagnosis("rank 1 failed: no such file", is_reported=True)


def test_only_one_rank_prints_a_message(join):
    watches = join(range(3), 3)
    assert [w.claims.claim("error: x") for w in watches] == [True, False, False]
    assert [w.claims.claim("error: y") for w in reversed(watches)] == [True, False, False]


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


def test_rank_that_closed_cleanly_is_not_reported(server, join):
    watch, closed = join(range(2), 2)
    leave_dead_process(server, 1)
    assert "is dead" in watch.diagnose(0.5).text
    closed.close()
    assert watch.diagnose(0.5) is None


def test_live_rank_missing_a_collective_is_named_with_its_last(join):
    watches = join(range(3), 3)
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


def test_other_stages_lag_only_by_iteration_number(join):
    watches = join(range(4), 4)
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


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_live_ranks_write_evidence_once_and_one_writes_report(join):
    writes = []
    watches = join(range(3), 3, writes)
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


def test_rank_that_gave_up_is_not_blamed(server, join):
    watches = join(range(2), 2, [])
    watches[1].write_diagnostics("rank 7 is stopped")
    leave_dead_process(server, 1)
    assert watches[0].diagnose(0.5) == Diagnosis("rank 7 is stopped", is_reported=True)


def test_error_already_printed_by_a_rank_needs_no_report(join):
    writes = []
    watches = join(range(2), 2, writes)
    watches[0].claims.note_printed("no such file")
    watches[1].write_diagnostics("rank 0 failed: no such file", is_reported=True)
    wait_until(lambda: len(writes) == 2)
    assert sorted(writes) == [(r, "rank 0 failed: no such file") for r in range(2)]


def test_rank_waits_until_the_failed_rank_has_printed(join):
    """A launcher ends the failed rank as soon as another rank has exited."""
    watches = join(range(2), 2, [])
    text = "rank 0 failed: no such file"
    survivor = threading.Thread(
        target=lambda: watches[1].write_diagnostics(text, is_reported=True), daemon=True
    )
    survivor.start()
    survivor.join(timeout=0.3)
    assert survivor.is_alive()
    watches[0].claims.note_printed("error: no such file")
    survivor.join()


def test_guard_names_the_dead_rank_in_a_blocked_collective(server, join):
    """On a GPU, no exception interrupts a collective: the heartbeat thread ends the process."""
    writes, lost = [], []
    watches = join(range(3), 3, writes)
    watches[0].guard(0.4, lost.append)
    record = CollectiveRecord("all_reduce", "world", 3, 8, (0, 1, 2), (2,), "float32", "sum")
    for watch in watches[:2]:
        watch.iteration = 3
    for _ in range(12):  # no diagnosis while the rank reaches new collectives
        watches[0].collectives(record)
        time.sleep(0.05)
    assert not writes
    pid = leave_dead_process(server, 2)
    wait_until(lambda: lost)
    assert f"rank 2 (process {pid} on {socket.gethostname()}) is dead" in lost[0].text
    assert writes[0] == (0, lost[0].text)


def test_guard_reports_a_lagging_rank_without_ending_the_run(join, monkeypatch):
    monkeypatch.setattr(peers, "GUARD_SECONDS", 0.2)
    writes, lost = [], []
    watches = join(range(2), 2, writes)
    watches[0].iteration = watches[1].iteration = 3
    watches[0].guard(0.3, lost.append)
    watches[0].collectives(CollectiveRecord("all_reduce", "tp", 2, 8, (0, 1), (2,), "int64", "sum"))
    wait_until(lambda: len(writes) == 3)
    assert watches[1].diagnose(0.2) is None, "no rank has given up"
    assert not lost
    assert (
        0,
        "rank 1 is still in iteration 3 after its collective 0 (no collective yet)",
    ) in writes

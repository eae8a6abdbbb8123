# SPDX-License-Identifier: Apache-2.0
"""Evidence of a stuck rank: the collective log, the report of all ranks, and the files."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time

import pytest

from megatron.core.comm import CollectiveRecord
from megatron.training.fault_tolerance import hang_files
from megatron.training.fault_tolerance.hang_files import (
    MAX_ENTRIES,
    CollectiveLog,
    HangFiles,
    enable_flight_recorder,
    flight_recorder_enabled,
    read_flight_recorder,
    stack_file,
    write_stacks,
)
from megatron.training.fault_tolerance.peers import Heartbeat, RankState, hang_report
from tests.support.ranks import start_ranks


def record(kind="all_reduce", group="tp", ranks=(0, 1), shape=(3, 2), how="sum"):
    return CollectiveRecord(kind, group, len(ranks), 24, ranks, shape, "float32", how)


def test_collective_log_keeps_last_entries_and_their_outcome():
    iteration = [0]
    log = CollectiveLog(lambda: iteration[0])
    assert (log.name, log.stuck(), log.entries()) == ("no collective yet", None, [])
    for number in range(MAX_ENTRIES + 5):
        iteration[0] = number // 10
        with log(record(shape=(number,))):
            pass
    log(record("send", "pp", how="to 1"))
    stuck = log(record(group="world"))
    stuck.__enter__()
    with pytest.raises(ValueError, match="gone"), log(record()):
        raise ValueError("gone")
    assert log.count == MAX_ENTRIES + 8
    assert log.collectives_by_group == {"tp": MAX_ENTRIES + 6, "world": 1}, (
        "sends do not count as collectives of a group"
    )
    entries = [entry.to_json(time.monotonic()) for entry in log.entries()]
    assert len(entries) == MAX_ENTRIES
    assert [e["state"] for e in entries[-4:]] == ["returned", "started", "waiting", "failed"]
    assert entries[0]["shape"] == [8]
    assert entries[0]["iteration"] == 0
    assert entries[-5]["number_in_group"] == MAX_ENTRIES + 4
    assert "waited_seconds" not in entries[-3], "no rank waited for it"
    assert log.stuck() is stuck


def heartbeat_of(iteration, counts, wait=None, count=9):
    """Return a heartbeat as read back from the store."""
    log = CollectiveLog(lambda: iteration)
    for group, number in counts.items():
        for _ in range(number):
            collective = log(record(group=group, ranks=(0, 1, 2, 3)))
    if wait:
        collective.__enter__()
    return Heartbeat.of(Heartbeat.now(count, iteration, log, final=bool(wait)).to_text())


def test_hang_report_names_missing_ranks_and_collective():
    beats = [
        heartbeat_of(7, {"tp": 4, "world": 3}, wait=True),
        heartbeat_of(7, {"tp": 4, "world": 2}),
        heartbeat_of(7, {"tp": 4, "world": 3}, wait=True),
        heartbeat_of(6, {"world": 2, "tp": 4}),
    ]
    states = [
        RankState(rank=r, host=f"h{r}", pid=10 + r, state="running", heartbeat=beat, age=0.5)
        for r, beat in enumerate(beats)
    ]
    text = hang_report("rank 3 is stopped", states, writer=2, files="S/stacks/*")
    lines = text.splitlines()
    assert lines[0].endswith("written by rank 2")
    assert lines[1] == "rank 3 is stopped"
    assert " ".join(lines[3].split()) == "rank machine process state iteration last beat where"
    assert lines[4].startswith(
        "0     h0       10       running  7          0.5 s ago  0.0 s in all_"
    )
    assert lines[7].endswith("after its collective 6: all_reduce (sum) of float32 [3 x 2] over tp")
    assert (
        "Ranks 0, 2 wait in all_reduce (sum) of float32 [3 x 2] over world, number 3 of that "
        "group, and ranks 1, 3 had not come to it at the last beat."
    ) in lines
    assert lines[-1].endswith(": S/stacks/*")


def test_hang_report_covers_absent_ranks_and_p2p_waits():
    log = CollectiveLog(lambda: 2)
    log(record("receive", "pp", how="from 0")).__enter__()
    heartbeat = Heartbeat.now(1, 2, log, final=True)
    states = [
        RankState(rank=0, host="?", pid=None, state="never came", heartbeat=None, age=None),
        RankState(rank=1, host="h", pid=5, state="running", heartbeat=heartbeat, age=0.0),
    ]
    text = hang_report("why", states, writer=1, files="f")
    assert "\n0     ?        ?        never came  ?          none       ?\n" in text
    assert "\nRank 1 waits in receive (from 0) of float32 [3 x 2] over pp.\n" in text


def test_hang_files_hold_stacks_and_collectives_or_are_removed(tmp_path):
    log = CollectiveLog(lambda: 3)
    log(record()).__enter__()
    evidence = HangFiles(str(tmp_path), attempt=1, rank=2, frozen_seconds=9.0, environment={})
    evidence.heartbeat()
    assert [p.name for p in (tmp_path / "stacks").iterdir()] == ["attempt_1_rank_2_frozen.txt"]
    evidence.close()
    assert not list(tmp_path.iterdir())
    evidence.write("rank 0 is dead", None, log)
    evidence.write_report("text")
    names = {p.name for p in tmp_path.rglob("*.*")}
    assert names == {
        "attempt_1_rank_2.txt",
        "attempt_1_rank_2_collectives.json",
        "hang_report_attempt_1.txt",
    }
    collectives = json.loads(
        (tmp_path / "stacks" / "attempt_1_rank_2_collectives.json").read_text()
    )
    assert collectives["reason"] == "rank 0 is dead"
    assert collectives["last"][-1]["state"] == "waiting"
    assert collectives["last"][-1]["iteration"] == 3


def test_stacks_are_written_while_ranks_remove_empty_folder(tmp_path):
    finished = threading.Event()
    removed = 0

    def remove() -> None:
        nonlocal removed
        while not finished.wait(1e-4):
            with contextlib.suppress(OSError):
                (tmp_path / "stacks").rmdir()
                removed += 1

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for i in range(500):
            path = stack_file(str(tmp_path), attempt=0, rank=i)
            write_stacks(path, "why", root=tmp_path)
            assert path.exists(), i
            path.unlink()
    finally:
        finished.set()
        thread.join()
    assert removed


def freeze(rank: int, world: int, save: str) -> None:
    """Send two heartbeats, then hold the GIL until the process ends."""
    evidence = HangFiles(save, attempt=0, rank=rank, frozen_seconds=0.3)
    evidence.heartbeat()
    evidence.heartbeat()
    print("frozen", flush=True)
    ctypes.PyDLL(None).sleep(60)


def test_rank_holding_the_gil_still_writes_its_stacks(tmp_path):
    with start_ranks(freeze, 1, str(tmp_path), init=False) as ranks:
        ranks.wait_for_line(0, "frozen")
        path = tmp_path / "stacks" / "attempt_0_rank_0_frozen.txt"
        deadline = time.monotonic() + 10
        while "in freeze" not in path.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "in freeze" in path.read_text()


def test_flight_recorder_is_enabled_unless_user_set_it():
    for user_environment in (
        {},
        {"TORCH_FR_BUFFER_SIZE": "0"},
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"},
    ):
        environment = dict(user_environment)
        enable_flight_recorder(environment)
        assert environment == (
            user_environment or {"TORCH_FR_BUFFER_SIZE": str(hang_files.DEFAULT_BUFFER_SIZE)}
        )
        assert flight_recorder_enabled(environment) == (
            environment != {"TORCH_FR_BUFFER_SIZE": "0"}
        )


class Bindings:
    """torch's bindings in older versions."""

    @staticmethod
    def _dump_nccl_trace_json():
        return '{"entries": []}'


def test_torch_flight_recorder_is_read_as_json(tmp_path, monkeypatch):
    assert read_flight_recorder(object()) is None
    assert read_flight_recorder(Bindings()) == b'{"entries": []}'
    import torch

    trace = read_flight_recorder(torch._C._distributed_c10d)
    assert trace is not None
    assert "version" in json.loads(trace)
    environment = {"TORCH_FR_BUFFER_SIZE": "9"}
    evidence = HangFiles(
        str(tmp_path), attempt=0, rank=0, frozen_seconds=9.0, environment=environment
    )
    evidence.write("why", None, CollectiveLog())
    assert json.loads((tmp_path / "stacks" / "attempt_0_rank_0_torch.json").read_text())


def _resting(ready: threading.Event, finished: threading.Event) -> None:
    ready.set()
    finished.wait()


def test_every_thread_and_the_error_are_in_the_file(tmp_path):
    ready, finished = threading.Event(), threading.Event()
    thread = threading.Thread(target=_resting, args=(ready, finished))
    thread.start()
    ready.wait()
    path = stack_file(str(tmp_path / "new"), attempt=2, rank=3)
    try:
        try:
            raise KeyError("what happened")
        except KeyError as error:
            write_stacks(path, "rank 1 is dead", root=tmp_path, error=error)
    finally:
        finished.set()
        thread.join()
    text = path.read_text()
    assert path.name == "attempt_2_rank_3.txt"
    assert text.splitlines()[0].endswith("rank 1 is dead")
    for fragment in ("KeyError: 'what happened'", "in _resting", "test_every_thread"):
        assert fragment in text


def test_unwritable_stack_file_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    write_stacks(tmp_path / "file" / "stacks.txt", "reason", root=tmp_path)

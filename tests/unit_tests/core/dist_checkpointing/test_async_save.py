# SPDX-License-Identifier: Apache-2.0
"""Background saves: the bytes of a synchronous save, consistent snapshots, killed processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointReader,
    SaveFolderLock,
    SaveReport,
    Solo,
    TensorChunk,
    list_checkpoints,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing.async_save import MIN_SINGLE_COPY_BYTES
from megatron.core.dist_checkpointing.run_folder import TRACKER_NAME
from tests.support.ranks import start_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import full_chunks, on_threads, same_bits


@contextlib.contextmanager
def saver_of(root: Path, chunks: list[TensorChunk], **options: Any) -> Iterator[AsyncSaver]:
    saver = AsyncSaver(root, chunks, coordinator=options.pop("coordinator", Solo()), **options)
    saver.wait()  # until the writer has started
    try:
        yield saver
    finally:
        saver.close()


def outcome(saver: AsyncSaver) -> SaveReport:
    """Wait for the save in progress and return its report."""
    saver.wait()
    (report,) = saver.finished()
    return report


def kill_in(saver: AsyncSaver, killing_command: str) -> None:
    """Kill the writer just before its next command `killing_command`."""
    call, pid = saver.writer.call, saver.writer.pid

    def killing(command: str, **arguments: Any) -> Any:
        if command == killing_command and saver.writer.pid == pid:
            os.kill(pid, signal.SIGKILL)
        return call(command, **arguments)

    saver.writer.call = killing


def read(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    targets = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with CheckpointReader(folder) as reader:
        reader.read(full_chunks(targets))
    return targets


def test_changes_after_synchronize_staging_are_not_saved(tmp_path):
    tensors = {
        "a": torch.randn(MIN_SINGLE_COPY_BYTES),
        "b": torch.randn(5),
        "c": torch.randn(6, 4)[:, ::2],
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with saver_of(tmp_path, full_chunks(tensors)) as saver:
        copies = saver.staging._from_host
        gate, copied = threading.Event(), []
        copies.insert(0, lambda: copied.append(gate.wait(30)))  # simulates a slow copy
        saver.save(1, {})
        assert not copied, "save() does not wait for copies"
        threading.Timer(0.2, gate.set).start()
        saver.synchronize_staging()
        assert copied == [True], "synchronize_staging() waits for the copy"
        for tensor in tensors.values():
            tensor.mul_(-2.0)
        assert outcome(saver).error is None
        copies.pop(0)
        saver.save(2, {})
        saver.synchronize_staging()
        assert outcome(saver).error is None
    saved = read(tmp_path / "iter_0000001", before)
    assert all(same_bits(saved[name], before[name]) for name in before)
    saved = read(tmp_path / "iter_0000002", before)
    assert all(same_bits(saved[name], tensors[name].contiguous()) for name in before)


def test_killed_writer_is_reported_and_restarted(tmp_path):
    with saver_of(tmp_path, full_chunks({"a": torch.randn(9)})) as saver:
        first_pid = saver.writer.pid
        kill_in(saver, "commit")
        saver.save(1, {})
        report = outcome(saver)
        assert (
            report.error == f"the writer process {first_pid} was ended by SIGKILL during 'commit'"
        )
        assert list(tmp_path.glob("iter_*")) == []
        saver.save(2, {})
        assert outcome(saver).error is None
        assert (saver.writer.starts, saver.writer.pid != first_pid) == (2, True)
        saver.save(3, {})
        assert outcome(saver).error is None
        assert saver.writer.starts == 2
    verify_checkpoint(tmp_path / "iter_0000003")


def test_writer_killed_after_open_leaves_no_temporary_folder(tmp_path):
    with saver_of(tmp_path, full_chunks({"a": torch.randn(9)})) as saver:
        call, pid = saver.writer.call, saver.writer.pid
        temporary_folders: list[str] = []

        def kill_after_open(command: str, **arguments: Any) -> Any:
            answer = call(command, **arguments)
            if command == "open" and saver.writer.pid == pid:
                temporary_folders.extend(path.name for path in tmp_path.glob("*.tmp-*"))
                os.kill(pid, signal.SIGKILL)
                return call("write", path="", block_bytes=1)  # fails: the writer is dead
            return answer

        saver.writer.call = kill_after_open
        saver.save(1, {})
        assert outcome(saver).error is not None
        assert len(temporary_folders) == 1, "the writer was killed after creating the folder"
        assert not list(tmp_path.glob("*.tmp-*"))
        saver.save(2, {})
        assert outcome(saver).error is None


def test_unresponsive_writer_is_killed_after_the_timeout(tmp_path):
    with saver_of(tmp_path, full_chunks({"a": torch.randn(9)}), timeout_seconds=1.5) as saver:
        os.kill(saver.writer.pid, signal.SIGSTOP)
        saver.save(1, {})
        assert "did not respond for 1.5 s in 'plans' and was killed" in outcome(saver).error
        saver.writer._timeout_seconds = 60.0  # the new writer may wait longer for a core
        saver.save(2, {})
        assert outcome(saver).error is None


def test_removed_locked_folder_is_not_recreated(tmp_path):
    root = tmp_path / "root"
    with (
        SaveFolderLock(root),
        saver_of(root, full_chunks({"a": torch.ones(3)}), folder_locked=True) as saver,
    ):
        saver.save(1, {})
        assert outcome(saver).error is None
        root.rename(tmp_path / "away")
        saver.save(2, {})
        assert "is no longer the folder that this run locked" in outcome(saver).error
        assert not root.exists()


def test_older_checkpoints_are_removed_after_each_save(tmp_path):
    keep = {"keep_last": 2, "retain_interval": 4}
    with saver_of(tmp_path, full_chunks({"a": torch.randn(3)}), keep=keep) as saver:
        for iteration in range(3, 9):
            saver.save(iteration, {})
            assert outcome(saver).error is None
    assert [int(folder.name[5:]) for folder in list_checkpoints(tmp_path)] == [8, 7, 4]


def test_writer_killed_while_pruning_leaves_no_temporary_folder(tmp_path):
    keep = {"keep_last": 1}
    with saver_of(tmp_path, full_chunks({"a": torch.randn(3)}), keep=keep) as saver:
        saver.save(1, {})
        assert outcome(saver).error is None
        (tmp_path / "iter_0000000.tmp-0123456789abcdef").mkdir()
        kill_in(saver, "prune")
        saver.save(2, {})
        report = outcome(saver)
        assert (report.error, report.written) == (None, True)
        assert "iter_0000002 is saved, but: the writer process" in report.lines[0]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000002"]


def halves(rank: int) -> tuple[list[TensorChunk], dict[str, torch.Tensor]]:
    """Return the chunks of one of two ranks: half of one tensor and replicas of two others."""
    generator = torch.Generator().manual_seed(3)
    w, r, s = (torch.randn(6, 4, generator=generator) for _ in range(3))
    chunks = [
        TensorChunk(
            name="w",
            shape=(6, 4),
            offsets=(3 * rank, 0),
            tensor=w[3 * rank : 3 * rank + 3].clone(),
            replica_ranks=(rank,),
        ),
        *full_chunks({"r": r, "s": s}, (0, 1)),
    ]
    return chunks, {"w": w, "r": r, "s": s}


def test_ranks_write_their_shards_once_and_fail_together(tmp_path):
    def work(rank: int, coordinator: Any) -> list[SaveReport]:
        chunks, _ = halves(rank)
        saved = []
        with saver_of(tmp_path, chunks, coordinator=coordinator) as saver:
            for iteration in range(1, 6):
                if (rank, iteration) in ((1, 2), (0, 4)):
                    kill_in(saver, "write")
                saver.save(iteration, {"by": rank})
                saved.append(outcome(saver))
            assert saver.writer.starts == 2
            assert saver.staging.bytes < 600, "only one of its ranks copies a replica"
        return saved

    reports_by_rank = on_threads(2, work)
    errors = [[report.error for report in reports] for reports in reports_by_rank]
    assert errors[0] == errors[1]
    assert [error is None for error in errors[0]] == [True, False, True, False, True]
    assert "rank 1: the writer process" in errors[0][1]
    assert [folder.name[-1] for folder in list_checkpoints(tmp_path)] == ["5", "3", "1"]
    assert sorted(path.name for path in tmp_path.iterdir() if "tmp" in path.name) == []
    _, tensors = halves(0)
    saved = read(tmp_path / "iter_0000005", tensors)
    assert all(same_bits(saved[name], tensors[name]) for name in tensors)
    verify_checkpoint(tmp_path / "iter_0000005")


def test_failed_copy_on_one_rank_fails_only_that_save(tmp_path):
    def work(rank: int, coordinator: Any) -> list[SaveReport]:
        chunks, _ = halves(rank)
        reports = []
        with saver_of(tmp_path, chunks, coordinator=coordinator) as saver:
            for iteration in (1, 2, 3):
                if (rank, iteration) == (1, 1):
                    copy = saver.staging.complete_copy
                    saver.staging.complete_copy = fail
                saver.save(iteration, {})
                saver.synchronize_staging()
                reports.append(outcome(saver))
                if (rank, iteration) == (1, 1):
                    saver.staging.complete_copy = copy
        return reports

    def fail() -> None:
        raise OSError(12, "Cannot allocate memory")

    for reports in on_threads(2, work):
        assert [report.written for report in reports] == [False, True, True]
        assert "rank 1: Cannot allocate memory" in reports[0].error


def test_writer_death_between_saves_is_reported(tmp_path):
    with saver_of(tmp_path, full_chunks({"a": torch.ones(3)})) as saver:
        pid = saver.writer.pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        saver.save(1, {})
        report = outcome(saver)
    assert report.error is None
    (line,) = report.lines
    assert line == (
        f"rank 0: the writer process {pid} was ended by SIGKILL between saves; a new one was "
        "started"
    )


def hold_a_save(rank: int, world: int, root: str) -> None:
    """Run a trainer whose writer is stopped in the middle of a save."""
    saver = AsyncSaver(root, full_chunks({"a": torch.randn(9)}), coordinator=Solo())
    saver.save(1, {})
    saver.wait()
    os.kill(saver.writer.pid, signal.SIGSTOP)
    saver.save(2, {})
    print(f"writer {saver.writer.pid}", flush=True)
    time.sleep(60)


def test_a_writer_ends_with_its_trainer_and_commits_nothing(tmp_path):
    with start_ranks(hold_a_save, 1, str(tmp_path), init=False) as ranks:
        ranks.wait_for_line(0, "writer ", timeout=30)
        pid = int(ranks.log(0).split("writer ")[1].split()[0])
        ranks.kill(0, signal.SIGKILL)
        ranks.processes[0].join(10)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # a writer that survived would continue
        deadline = time.monotonic() + 5.0
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{pid}").exists()
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]
    assert (tmp_path / TRACKER_NAME).read_text() == "1\n"


def test_abandon_does_not_wait_for_the_writer(tmp_path):
    saver = AsyncSaver(tmp_path, full_chunks({"a": torch.randn(9)}), coordinator=Solo())
    saver.wait()
    pid = saver.writer.pid
    os.kill(pid, signal.SIGSTOP)
    saver.save(1, {})
    saver.abandon()  # returns, although the writer is stopped
    assert outcome(saver).error is not None
    saver.close()
    assert list_checkpoints(tmp_path) == []


def test_every_rank_is_notified_of_a_committed_checkpoint(tmp_path):
    committed: list[bool] = []

    def note() -> None:
        committed.append((tmp_path / "iter_0000001" / "manifest.json").exists())

    with saver_of(tmp_path, full_chunks({"a": torch.randn(9)}), on_commit=note) as saver:
        saver.save(1, {})
        assert outcome(saver).error is None
    assert committed == [True]

# SPDX-License-Identifier: Apache-2.0
"""Retention removes old checkpoints, but none that is tracked, damaged or being read."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointReader,
    DamagedCheckpointError,
    RemovedCheckpointError,
    SaveFolderLock,
    Solo,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    reading,
    save_checkpoint,
)
from megatron.core.dist_checkpointing import load as load_module
from megatron.core.dist_checkpointing import run_folder as run_folder_module
from megatron.core.dist_checkpointing.save_plan import SaveSteps
from tests.support.ranks import start_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import full_chunks

TRACKER = "latest_checkpointed_iteration.txt"


def save(root: Path, *iterations: int) -> list[Path]:
    return [
        save_checkpoint(
            root, i, full_chunks({"w": torch.full((3,), float(i))}), {}, coordinator=Solo()
        )
        for i in iterations
    ]


def iterations_left(root: Path) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in list_checkpoints(root))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep_last": 1}, [45]),
        ({"keep_last": 3}, [35, 40, 45]),
        ({"keep_last": 1, "retain_interval": 20}, [0, 20, 40, 45]),
        ({"keep_last": 2, "retain_interval": 20}, [0, 20, 40, 45]),
        ({"keep_last": 3, "retain_interval": 20}, [0, 20, 35, 40, 45]),
        ({"keep_last": 99}, list(range(0, 50, 5))),
    ],
)
def test_newest_and_interval_checkpoints_are_retained(tmp_path, options, expected):
    folders = save(tmp_path, *range(0, 50, 5))
    removed = prune_checkpoints(tmp_path, **options)
    assert iterations_left(tmp_path) == expected
    assert sorted(removed) == [f for f in folders if int(f.name[5:]) not in expected]
    assert not list(tmp_path.glob("*.tmp-*"))
    assert prune_checkpoints(tmp_path, **options) == []


def test_tracked_and_damaged_are_retained_but_not_counted(tmp_path):
    folders = save(tmp_path, *range(1, 8))
    (tmp_path / TRACKER).write_text("2")
    os.truncate(folders[6] / "shard-00000.safetensors", 3)  # the newest, unfit to resume from
    (folders[3] / "manifest.json").unlink()
    assert prune_checkpoints(tmp_path, keep_last=2) == [folders[2], folders[0]]
    assert iterations_left(tmp_path) == [2, 4, 5, 6, 7]
    for options in ({"keep_last": 0}, {"keep_last": 1, "retain_interval": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            prune_checkpoints(tmp_path, **options)


def read_slowly(rank: int, world: int, folder: str, how: str) -> list[float]:
    """Hold a checkpoint open until the parent creates the file `go`, then read it."""
    target = torch.zeros(3)
    gate = Path(folder).parent / "go"

    def wait(*arguments):
        print("reading", flush=True)
        while not gate.exists():
            os.sched_yield()
        return execute_reads(*arguments)

    execute_reads = load_module._execute_reads
    if how == "load":
        load_module._execute_reads = wait
        load_checkpoint(folder, full_chunks({"w": target}))
    else:
        with CheckpointReader(folder) as reader:
            execute_reads = reader.read
            wait(full_chunks({"w": target}))
    return target.tolist()


@pytest.mark.parametrize("how", ["load", "reader"])
def test_checkpoint_being_read_is_removed_only_afterwards(tmp_path, how):
    folders = save(tmp_path, 1, 2, 3)
    lines: list[str] = []
    with start_ranks(read_slowly, 1, str(folders[0]), how, init=False) as ranks:
        ranks.wait_for_line(0, "reading")
        assert prune_checkpoints(tmp_path, keep_last=1, say=lines.append) == [folders[1]]
        (tmp_path / "go").touch()
        assert ranks.values(timeout=20) == [[1.0, 1.0, 1.0]]
    assert lines == [f"retention: {folders[0]} is being read and is kept for now"]
    assert iterations_left(tmp_path) == [1, 3]
    assert prune_checkpoints(tmp_path, keep_last=1, say=lines.append) == [folders[0]]
    assert len(lines) == 1


def test_reader_after_removal_gets_an_error(tmp_path, monkeypatch):
    (folder,) = save(tmp_path, 1)
    with (folder / "manifest.json").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RemovedCheckpointError, match="is being removed"), reading(folder):
            pass
    os_open = os.open

    def replaced(path, *arguments):
        fd = os_open(path, *arguments)
        os.rename(folder, folder.with_name("away"))
        return fd

    monkeypatch.setattr(os, "open", replaced)
    gone = pytest.raises(RemovedCheckpointError, match=r"was just removed")
    with gone, reading(folder):
        pass
    monkeypatch.undo()
    with pytest.raises(RemovedCheckpointError, match="no longer exists"), reading(folder):
        pass
    folder.mkdir()
    with pytest.raises(DamagedCheckpointError, match="not a complete"), reading(folder):
        pass


def test_filesystem_without_locks_is_readable_but_not_pruned(tmp_path, monkeypatch):
    folders = save(tmp_path, 1, 2)

    def no_locks(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    target = torch.zeros(3)
    load_checkpoint(folders[0], full_chunks({"w": target}))
    assert target.tolist() == [1.0] * 3
    lines: list[str] = []
    assert prune_checkpoints(tmp_path, keep_last=1, say=lines.append) == []
    assert lines == [f"retention: cannot remove {folders[0]}: {os.strerror(errno.ENOLCK)}"]


def test_remains_of_failed_removal_are_ignored_and_swept(tmp_path, monkeypatch):
    folders = save(tmp_path, 1, 2)

    def broken(path, *arguments, **options):
        (path / "manifest.json").unlink()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shutil, "rmtree", broken)
    lines: list[str] = []
    assert prune_checkpoints(tmp_path, keep_last=1, say=lines.append) == []
    monkeypatch.undo()
    (leftover,) = tmp_path.glob("*.tmp-*")
    assert lines == [
        f"retention: cannot remove {folders[0]}: {os.strerror(errno.EIO)}; {leftover.name} "
        "remains of it"
    ]
    assert iterations_left(tmp_path) == [2]
    with SaveFolderLock(tmp_path) as lock:
        assert lock.removed_paths == (leftover,)
    assert not leftover.exists()


def test_a_writer_that_survives_the_sweep_cannot_commit(tmp_path):
    """A save continues although a new run has locked the folder and removed leftovers."""
    write = SaveSteps.write

    def swept_meanwhile(steps, *arguments, **options):
        digests = write(steps, *arguments, **options)
        with SaveFolderLock(tmp_path) as lock:
            assert len(lock.removed_paths) == 1
        return digests

    with pytest.MonkeyPatch.context() as context:
        context.setattr(SaveSteps, "write", swept_meanwhile)
        with pytest.raises(CheckpointError, match="No such file"):
            save(tmp_path, 1)
    assert iterations_left(tmp_path) == []
    assert not list(tmp_path.glob("*.tmp-*"))


def test_finding_verifying_and_removing_need_no_torch(tmp_path):
    folders = save(tmp_path, 1, 2)
    code = (
        "import sys; from megatron.core.dist_checkpointing import latest_checkpoint, "
        "prune_checkpoints, SaveFolderLock, verify_checkpoint; "
        f"root = {str(tmp_path)!r}; found = latest_checkpoint(root); "
        "print(verify_checkpoint(found).bytes_verified); "
        "print(len(prune_checkpoints(root, keep_last=1))); "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split("\n")[:3] == ["12", "1", "[]"], run.stderr
    assert not folders[0].exists()


def test_newest_checkpoint_is_found_while_others_are_removed(tmp_path, monkeypatch):
    save(tmp_path, 5)
    lines: list[str] = []
    original = run_folder_module.read_manifest

    def saving(folder):
        if not (tmp_path / "iter_0000010").exists():
            save(tmp_path, 10)
            shutil.rmtree(tmp_path / "iter_0000005")
        return original(folder)

    monkeypatch.setattr(run_folder_module, "read_manifest", saving)
    newest = latest_checkpoint(tmp_path, fall_back=False, say=lines.append)
    assert (newest, lines) == (tmp_path / "iter_0000010", [])

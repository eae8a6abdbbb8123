# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders, the tracker, fallback, folder locks and the removal of leftovers."""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    DamagedCheckpointError,
    SaveFolderLock,
    Solo,
    TensorChunk,
    checkpoint_folder,
    compare_architecture,
    latest_checkpoint,
    list_checkpoints,
    read_extra,
    save_checkpoint,
)
from megatron.core.dist_checkpointing import run_folder as run_folder_module
from megatron.core.dist_checkpointing import save_plan as save_plan_module
from tests.support.ranks import start_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import full_chunks

TRACKER = "latest_checkpointed_iteration.txt"


def save(root: Path, iteration: int, **options) -> Path:
    tensors = {"w": torch.full((3,), float(iteration))}
    options.setdefault("coordinator", Solo())
    return save_checkpoint(root, iteration, full_chunks(tensors), {}, **options)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_save_leaves_only_checkpoint_folder_and_tracker(tmp_path):
    root = tmp_path / "new" / "root"
    assert save(root, 100) == root / "iter_0000100"
    assert names(root) == {"iter_0000100", TRACKER}
    assert (root / TRACKER).read_text() == "100\n"
    assert checkpoint_folder(root, 12345678).name == "iter_12345678"


def test_files_are_synced_before_anything_refers_to_them(tmp_path, monkeypatch):
    events = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def relative(path):
        return re.sub(r"\.tmp-\w+", ".tmp", os.path.relpath(path, tmp_path))

    def record_sync(fd):
        fsync(fd)
        events.append(f"sync {relative(os.readlink(f'/proc/self/fd/{fd}'))}")

    monkeypatch.setattr(os, "fsync", record_sync)
    for name, function in (("rename", rename), ("replace", replace)):

        def record(source, target, name=name, function=function):
            function(source, target)
            events.append(f"{name} {relative(source)} {relative(target)}")

        monkeypatch.setattr(os, name, record)
    save(tmp_path, 1)
    shard, manifest = "shard-00000.safetensors", "manifest.json"
    assert events == [
        f"sync iter_0000001.tmp/{shard}",
        "sync iter_0000001.tmp",  # by the rank that wrote the shard
        f"sync iter_0000001.tmp/{manifest}",
        "sync iter_0000001.tmp",
        "rename iter_0000001.tmp iter_0000001",
        "sync .",
        f"sync {TRACKER}.tmp",
        f"replace {TRACKER}.tmp {TRACKER}",
        "sync .",
    ]


def test_failed_tracker_write_leaves_a_complete_checkpoint(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"iter_0000001 is complete, but .*No space left"):
        save(tmp_path, 1)
    assert names(tmp_path) == {"iter_0000001"}
    lines: list[str] = []
    assert latest_checkpoint(tmp_path, say=lines.append) == tmp_path / "iter_0000001"


def test_existing_step_is_never_overwritten(tmp_path):
    folder = save(tmp_path, 1)
    before = (folder / "manifest.json").stat()
    with pytest.raises(CheckpointError, match=r"iter_0000001 exists already"):
        save(tmp_path, 1)
    assert (folder / "manifest.json").stat() == before
    assert names(tmp_path) == {"iter_0000001", TRACKER}
    (tmp_path / "iter_0000002").mkdir()  # rename would replace an empty folder
    with pytest.raises(CheckpointError, match=r"iter_0000002 exists already"):
        save(tmp_path, 2)


@pytest.mark.parametrize(
    ("tracker", "reason"),
    [
        ("", "contains ''"),
        ("garbage", "contains 'garbage'"),
        ("-1", "contains '-1'"),
        ("9" * 5000, "not an iteration"),
        ("7", "names iter_0000007, which does not exist"),
        ("1", "names iter_0000001; using"),
        (None, "does not exist"),
    ],
)
def test_newest_checkpoint_is_used_and_tracker_error_reported(tmp_path, tracker, reason):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (tmp_path / TRACKER).unlink()
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    lines: list[str] = []
    assert latest_checkpoint(tmp_path, say=lines.append) == newest
    assert len(lines) == 1
    assert "using iter_0000002, the newest undamaged checkpoint" in lines[0]
    assert reason in lines[0]


def test_a_kill_between_rename_and_tracker_loses_nothing(tmp_path, monkeypatch):
    """An error in place of the kill leaves the tracker unchanged."""
    save(tmp_path, 1)

    def killed(root, iteration):
        raise KeyboardInterrupt

    monkeypatch.setattr(save_plan_module, "write_tracker", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert (tmp_path / TRACKER).read_text() == "1\n"
    lines: list[str] = []
    assert latest_checkpoint(tmp_path, say=lines.append) == tmp_path / "iter_0000002"
    assert len(lines) == 1
    assert "names iter_0000001; using iter_0000002" in lines[0]


def test_damaged_newest_checkpoint_falls_back_or_raises(tmp_path):
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    shard = newest / "shard-00000.safetensors"
    content = shard.read_bytes()
    lines: list[str] = []
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert latest_checkpoint(tmp_path, say=lines.append) == newest, "only reading finds a bit"
    assert latest_checkpoint(tmp_path, digests=True, say=lines.append) == older
    assert str(shard) in lines.pop()
    os.truncate(shard, 3)
    assert latest_checkpoint(tmp_path, say=lines.append) == older
    assert len(lines) == 1
    assert re.search(r"WARNING: falling back to .*1: .*shard-00000.safetensors has 3", lines[0])
    with pytest.raises(DamagedCheckpointError, match=r"newest .* is damaged: .*has 3 bytes"):
        latest_checkpoint(tmp_path, fall_back=False)
    with pytest.raises(DamagedCheckpointError, match="no undamaged checkpoint"):
        latest_checkpoint(tmp_path, excluded=[older])


def test_missing_checkpoint_is_none_and_only_damaged_ones_raise(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    folder = save(tmp_path, 3)
    lines: list[str] = []
    assert latest_checkpoint(tmp_path, say=lines.append) == folder
    assert not lines
    os.truncate(folder / "shard-00000.safetensors", 20)
    with pytest.raises(CheckpointError, match=r"no undamaged checkpoint .*shard-00000.*20 bytes"):
        latest_checkpoint(tmp_path)


def test_checkpoints_are_listed_newest_first_by_number(tmp_path):
    for iteration in (2, 10, 9_999_999, 10_000_000):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000011.tmp-0123456789abcdef").mkdir()
    (tmp_path / "iter_x").mkdir()
    iterations = [int(path.name[5:]) for path in list_checkpoints(tmp_path)]
    assert iterations == [10_000_000, 9_999_999, 10, 2]


def test_lock_removes_only_leftover_temporary_files(tmp_path):
    save(tmp_path, 1)
    keep = names(tmp_path) | {"iter_0000001.backup", "notes.tmp-0123456789abcdef"}
    for name in ("iter_0000001.backup", "notes.tmp-0123456789abcdef"):
        (tmp_path / name).mkdir()
    stale = tmp_path / "iter_0000002.tmp-0123456789abcdef"
    stale.mkdir()
    (stale / "shard-00000.safetensors").write_bytes(b"half")
    (tmp_path / f"{TRACKER}.tmp-0123456789abcdef").write_text("2")
    save(tmp_path, 2)
    assert stale.exists()  # a save leaves foreign folders alone
    with SaveFolderLock(tmp_path) as lock:
        assert len(lock.removed_paths) == 2
        assert names(tmp_path) == keep | {"iter_0000002", ".writer.lock"}


def hold_lock(rank: int, world: int, root: str) -> None:
    with SaveFolderLock(root):
        print("claimed", flush=True)
        multiprocessing.Event().wait()


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    with start_ranks(hold_lock, 1, str(tmp_path), init=False) as ranks:
        ranks.wait_for_line(0, "claimed")
        pid = ranks.processes[0].pid
        with pytest.raises(CheckpointError, match=rf"in use by another run \(pid {pid} on"):
            SaveFolderLock(tmp_path)
        ranks.kill(0)
        ranks.processes[0].join()
        SaveFolderLock(tmp_path).close()


def test_abandoned_lock_removes_only_its_own_files(tmp_path):
    folder = tmp_path / "save"
    SaveFolderLock(folder).abandon()
    assert not folder.exists()
    folder.mkdir()
    lock = SaveFolderLock(folder)
    lock.abandon()
    lock.abandon()
    assert names(folder) == set()
    lock = SaveFolderLock(folder)
    (folder / "metrics.jsonl").write_text("")
    lock.abandon()
    assert names(folder) == {".writer.lock", "metrics.jsonl"}


def test_lock_on_a_just_removed_file_is_refused(tmp_path, monkeypatch):
    lockf = run_folder_module.fcntl.lockf

    def late(descriptor, how):
        (tmp_path / ".writer.lock").unlink()
        lockf(descriptor, how)

    monkeypatch.setattr(run_folder_module.fcntl, "lockf", late)
    with pytest.raises(CheckpointError, match=r"released by another run: start again"):
        SaveFolderLock(tmp_path)


def test_lock_fails_at_start_when_folder_is_not_writable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save under .*name a folder"):
        SaveFolderLock(tmp_path / "file")

    def full(path, content):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(run_folder_module, "write_synced", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        SaveFolderLock(tmp_path)


def test_extra_round_trips(tmp_path):
    extra = {"model": {"eps": 1e-05, "pattern": "*-", "none": None}, "samples": 2**60, "ü": [True]}
    assert read_extra(save_checkpoint(tmp_path, 1, [], extra, coordinator=Solo())) == extra


def test_architectures_are_compared_field_by_field():
    saved = {"num_layers": 4, "mlp": {"ffn": 8, "gated": True}, "pattern": ["*", "-"], "old": 1}
    model = {"num_layers": 6, "mlp": {"ffn": 8, "gated": False}, "pattern": ("*", "-"), "new": 2}
    assert compare_architecture(saved, model) == [
        "mlp.gated: True in the checkpoint, False in the model",
        "new: absent in the checkpoint, 2 in the model",
        "num_layers: 4 in the checkpoint, 6 in the model",
        "old: 1 in the checkpoint, absent in the model",
    ]
    assert compare_architecture(saved, saved) == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"offsets": (1,)}, "does not lie inside"),
        ({"offsets": (-1,)}, "does not lie inside"),
        ({"offsets": (0, 0)}, "does not lie inside"),
        ({"name": "a@b"}, "without '@'"),
        ({"name": ""}, "not empty"),
        ({"name": "a\n"}, "printable"),
        ({"replica_ranks": ()}, "replica_ranks"),
        ({"replica_ranks": (1, 0)}, "ascending"),
        ({"replica_ranks": (0, 0)}, "distinct"),
    ],
)
def test_invalid_chunk_is_refused(fields, text):
    good = {"name": "w", "shape": (3,), "offsets": (0,), "replica_ranks": (0,)}
    with pytest.raises(ValueError, match=text):
        TensorChunk(tensor=torch.zeros(3), **(good | fields))


@pytest.mark.parametrize("options", [{"block_bytes": 8}, {"block_bytes": 100}, {"existing": "?"}])
def test_invalid_options_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=r"block_bytes|existing"):
        save(tmp_path, 1, **options)

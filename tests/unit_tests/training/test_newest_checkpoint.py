# SPDX-License-Identifier: Apache-2.0
"""Choice of the checkpoint to load when some are damaged, edited, removed or too new."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    Solo,
    TensorChunk,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from megatron.core.dist_checkpointing import manifest as manifest_module
from megatron.core.dist_checkpointing import run_folder as retention_module
from megatron.training.checkpointing import find
from megatron.training.checkpointing.find import load_newest, reject_later_checkpoints

SHARD = "shard-00000.safetensors"
NAMES = tuple(f"layer.{i}" for i in range(4))


def chunks(tensors: dict[str, torch.Tensor]) -> list[TensorChunk]:
    return [
        TensorChunk(name=name, shape=(100,), offsets=(0,), tensor=t, replica_ranks=(0,))
        for name, t in tensors.items()
    ]


@pytest.fixture
def root(tmp_path):
    """Save checkpoints of iterations 1, 2 and 3, whose tensors hold the iteration number."""
    for i in (1, 2, 3):
        tensors = {name: torch.full((100,), float(i)) for name in NAMES}
        save_checkpoint(tmp_path, i, chunks(tensors), {}, coordinator=Solo())
    return tmp_path


def flip_bit(folder: Path) -> None:
    """Flip a bit in the second last tensor of the file."""
    begin = sorted(t.chunks[0].begin for t in read_manifest(folder).tensors.values())[-2]
    with (folder / SHARD).open("r+b") as file:
        file.seek(begin + 7)
        (byte,) = file.read(1)
        file.seek(begin + 7)
        file.write(bytes([byte ^ 16]))


def truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, 900)


def delete(folder: Path) -> None:
    (folder / SHARD).unlink()


def edit(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = path.read_text()
        assert old in manifest
        path.write_text(manifest.replace(old, new, 1))

    return change


def edit_digest(folder: Path) -> None:
    """Edit a digest of the tensors in the manifest."""
    digest = read_manifest(folder).tensors[NAMES[1]].chunks[0].xxh3[0]
    edit(digest, "0" * len(digest))(folder)


DAMAGES = {
    "flipped bit": (flip_bit, rf"{SHARD} is damaged: layer\.2\[0:100\] does not match"),
    "truncated file": (truncate, rf"{SHARD} has 900 bytes, but the manifest says \d+"),
    "deleted file": (delete, f"cannot read .*{SHARD}: No such file"),
    "edited size": (edit('"bytes":', '"bytes": '), r"manifest\.json has changed"),
    "edited digest": (edit_digest, r"manifest\.json has changed"),
}


class RecordedLoad:
    """Load all tensors; record the folders that were read and the logged lines."""

    def __init__(self) -> None:
        self.tensors = {name: torch.full((100,), -1.0) for name in NAMES}
        self.folders: list[str] = []
        self.lines: list[str] = []

    def use(self, folder: Path) -> str:
        self.folders.append(folder.name)
        load_checkpoint(folder, chunks(self.tensors))
        return folder.name

    def run(self, load: Path | str, **options):
        return load_newest(str(load), self.use, Solo(self.lines.append), **options)

    @property
    def loaded(self) -> set[float]:
        return {float(x) for t in self.tensors.values() for x in t}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_checkpoint_falls_back_with_a_warning(root, damage):
    damage_checkpoint, text = DAMAGES[damage]
    newest = root / "iter_0000003"
    damage_checkpoint(newest)
    loading = RecordedLoad()
    assert loading.run(root) == (root / "iter_0000002", "iter_0000002")
    assert loading.loaded == {2.0}
    assert len(loading.lines) == 1
    assert re.search(f"WARNING: falling back to .*iter_0000002: .*{text}", loading.lines[0])
    assert "iter_0000003" in loading.lines[0]
    # The tracker still names the damaged checkpoint, and `newest` names it explicitly.
    for options in ({"fall_back": False}, {}):
        load = root if options else newest
        with pytest.raises(ValueError, match=text):
            RecordedLoad().run(load, **options)


def test_partly_loaded_tensors_are_loaded_again(root):
    """The two newest checkpoints have a flipped bit: each fills some tensors before it fails."""
    for i in (2, 3):
        flip_bit(root / f"iter_000000{i}")
    loading = RecordedLoad()
    assert loading.run(root)[1] == "iter_0000001"
    assert loading.folders == ["iter_0000003", "iter_0000002", "iter_0000001"]
    assert loading.loaded == {1.0}
    assert len(loading.lines) == 2
    assert "falling back to" in loading.lines[1]
    flip_bit(root / "iter_0000001")
    with pytest.raises(ValueError, match=r"no undamaged checkpoint .*0003.*0002.*0001"):
        RecordedLoad().run(root)


def test_foreign_file_is_reported_and_ignored(root):
    newest = root / "iter_0000003"
    shutil.copy(newest / SHARD, newest / "shard-00001.safetensors")
    for load in (root, newest):
        loading = RecordedLoad()
        assert loading.run(load)[1] == "iter_0000003"
        assert loading.lines == [
            f"WARNING: {newest} contains files that do not belong to it and are ignored: "
            "shard-00001.safetensors"
        ]


@pytest.mark.parametrize("tracker", ["", "garbage", "77", None])
def test_only_damaged_checkpoints_raise_for_any_tracker(root, tracker):
    for folder in list_checkpoints(root):
        (folder / "manifest.json").unlink()
    path = root / "latest_checkpointed_iteration.txt"
    path.unlink() if tracker is None else path.write_text(tracker)
    with pytest.raises(ValueError, match="no undamaged checkpoint in"):
        RecordedLoad().run(root)


def test_other_load_errors_do_not_fall_back(root):
    def use(folder: Path) -> None:
        load_checkpoint(folder, chunks({"other": torch.zeros(100)}))

    with pytest.raises(ValueError, match=r"iter_0000003: .*other is missing from"):
        load_newest(str(root), use, Solo())
    assert load_newest(str(root / "nowhere"), use, Solo()) is None


def test_checkpoint_being_loaded_is_not_pruned(root):
    """Retention runs between the search and the load, when a newer checkpoint exists."""

    def use(folder: Path) -> str:
        lines: list[str] = []
        # Rank 0 of another job saves a newer checkpoint and keeps only the newest.
        if folder.name == "iter_0000003":
            tensors = {name: torch.full((100,), 4.0) for name in NAMES}
            save_checkpoint(root, 4, chunks(tensors), {}, coordinator=Solo())
        removed = retention_module.prune_checkpoints(root, keep_last=1, say=lines.append)
        assert [path.name for path in removed] == ["iter_0000002", "iter_0000001"]
        assert any("iter_0000003 is being read" in line for line in lines)
        return loading.use(folder)

    loading = RecordedLoad()
    assert load_newest(str(root), use, Solo()) == (root / "iter_0000003", "iter_0000003")
    assert loading.loaded == {3.0}
    removed = retention_module.prune_checkpoints(root, keep_last=1)
    assert removed == [root / "iter_0000003"], "the read lock is released"


def test_checkpoint_removed_before_lock_is_searched_again(root, monkeypatch):
    latest_checkpoint = find.latest_checkpoint
    removed = threading.Event()

    def find_and_remove(*arguments, **options):
        checkpoint = latest_checkpoint(*arguments, **options)
        if not removed.is_set():
            removed.set()
            shutil.rmtree(checkpoint)
        return checkpoint

    monkeypatch.setattr(find, "latest_checkpoint", find_and_remove)
    loading = RecordedLoad()
    assert loading.run(root)[1] == "iter_0000002"
    assert removed.is_set()


def test_start_before_existing_checkpoints_is_refused(root):
    reject_later_checkpoints(str(root), 3, resumes_newest=False, coordinator=Solo())
    for start, message in (
        (2, "it contains iter_0000003, later than iteration 2, from"),
        (0, "it contains 3 checkpoints from iter_0000001 to iter_0000003, later"),
    ):
        with pytest.raises(ValueError, match=f"--save {root}: {message}.*move them away"):
            reject_later_checkpoints(str(root), start, resumes_newest=False, coordinator=Solo())
    assert list_checkpoints(root)[0].name == "iter_0000003"
    reject_later_checkpoints(str(root / "new"), 0, resumes_newest=False, coordinator=Solo())


def test_damaged_later_checkpoints_are_renamed_before_saving(root):
    truncate(root / "iter_0000003")
    lines: list[str] = []
    reject_later_checkpoints(str(root), 2, resumes_newest=True, coordinator=Solo(lines.append))
    assert [f.name for f in list_checkpoints(root)] == ["iter_0000002", "iter_0000001"]
    (renamed,) = root.glob("iter_0000003.damaged-*")
    assert (renamed / SHARD).stat().st_size == 900
    assert lines == [f"WARNING: {root / 'iter_0000003'} is damaged and is now {renamed.name}"]


def test_newer_format_is_not_treated_as_damage(root, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(manifest_module, "VERSION", 2)
        tensors = {name: torch.full((100,), 4.0) for name in NAMES}
        save_checkpoint(root, 4, chunks(tensors), {}, coordinator=Solo())
    with pytest.raises(ValueError, match="version 2, but this library reads"):
        RecordedLoad().run(root)

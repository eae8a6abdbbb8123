# SPDX-License-Identifier: Apache-2.0
"""`make soak`: kill choices, observed stages, power cuts and checks; and a short soak."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    Solo,
    TensorChunk,
    run_folder,
    save_checkpoint,
    verify_checkpoint,
)
from tests.functional_tests.small_run import digests
from tools.soak.folder import Snapshot, look, under_way
from tools.soak.power_cut import Durable, cut_power, note_syncs

ROOT = Path(__file__).resolve().parents[2]


def save(root: Path, iteration: int, value: float = 1.0) -> Path:
    """Write a small checkpoint."""
    weight = torch.full((64, 5), value)
    chunk = TensorChunk(
        name="weight", shape=(64, 5), offsets=(0, 0), tensor=weight, replica_ranks=(0,)
    )
    return save_checkpoint(root, iteration, [chunk], {}, coordinator=Solo())


# --- stages ---------------------------------------------------------------------------------------


def test_stage_of_a_save_is_read_from_the_folder(tmp_path):
    def temporary(iteration: int, digit: str) -> Path:
        path = tmp_path / f"iter_{iteration:07d}.tmp-{digit * 16}"
        path.mkdir()
        return path

    save(tmp_path, 2)
    temporary(4, "a")  # of an earlier start
    start = look(tmp_path)
    assert under_way(start, start) == ""
    new = temporary(4, "b")
    assert under_way(look(tmp_path), start) == "writing"
    (new / "manifest.json").touch()
    assert under_way(look(tmp_path), start) == "manifest"
    new.rename(tmp_path / "iter_0000004")
    assert under_way(look(tmp_path), start) == "renamed"
    assert under_way(look(tmp_path), look(tmp_path)) == "", "an earlier start has renamed it"
    run_folder.write_tracker(tmp_path, 4)
    assert under_way(look(tmp_path), start) == ""
    (tmp_path / "iter_0000002").rename(tmp_path / f"iter_0000002.tmp-{'c' * 16}")
    assert under_way(look(tmp_path), start) == "removing"
    assert look(tmp_path).newest == look(tmp_path).tracked == 4
    assert look(tmp_path / "absent") == Snapshot()


# --- power cuts -----------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A save folder, and a function that simulates a power cut of its process."""
    root, journal = tmp_path / "save", tmp_path / "journal"
    root.mkdir()
    durable = Durable.everything(root)
    monkeypatch.setattr(os, "fsync", os.fsync)
    note_syncs(str(root), str(journal))

    def cut() -> None:
        durable.read(journal)
        cut_power(root, durable)

    return root, cut


def test_synced_saves_survive_a_power_cut(disk):
    root, cut = disk
    for iteration in (2, 4):
        save(root, iteration, float(iteration))
    expected = digests(root / "iter_0000004")
    cut()
    verify_checkpoint(root / "iter_0000004")
    verify_checkpoint(root / "iter_0000002")
    assert digests(root / "iter_0000004") == expected
    assert look(root).tracked == 4


def unsynced_file(monkeypatch) -> None:
    def write(path: Path, content: bytes) -> None:
        path.write_bytes(content)

    monkeypatch.setattr(run_folder, "write_synced", write)


def unsynced_folder(monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "sync_folder", lambda folder: None)


@pytest.mark.parametrize("forget", [unsynced_file, unsynced_folder])
def test_unsynced_saves_are_lost_in_a_power_cut(disk, monkeypatch, forget):
    root, cut = disk
    save(root, 2)
    forget(monkeypatch)
    save(root, 4)
    verify_checkpoint(root / "iter_0000004")  # a kill alone loses nothing
    cut()
    verify_checkpoint(root / "iter_0000002")
    with pytest.raises(CheckpointError):
        verify_checkpoint(root / "iter_0000004")


def test_power_cut_reverts_unsynced_renames_and_files(disk):
    root, cut = disk
    save(root, 2)
    save(root, 4)
    os.rename(root / "iter_0000002", root / f"iter_0000002.tmp-{'a' * 16}")
    (root / "iter_0000006").mkdir()
    run_folder.write_synced(root / "latest_new", b"6\n")
    os.replace(root / "latest_new", root / run_folder.TRACKER_NAME)
    (root / ".writer.lock").write_text("not part of it")
    cut()
    assert sorted(p.name for p in root.iterdir()) == [
        ".writer.lock",
        "iter_0000002",
        "iter_0000004",
        run_folder.TRACKER_NAME,
    ]
    assert look(root).tracked == 4
    verify_checkpoint(root / "iter_0000002")


# --- real soak runs -------------------------------------------------------------------------------


def soak(*words: str, timeout: float = 110.0) -> subprocess.CompletedProcess[str]:
    """Run the soak like `make soak`."""
    return subprocess.run(
        [sys.executable, "-m", "tools.soak", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.slow
def test_short_soak_loses_no_checkpoint(tmp_path):
    # kills of a writer process, all ranks (twice), the machine and a rank, each within a save
    options = ["--flavour", "dp async", "--iterations", "8", "--disk-milliseconds", "10"]
    process = soak("--kills", "5", "--seed", "930", *options, "--folder", str(tmp_path))
    assert process.returncode == 0, process.stdout + process.stderr
    assert "soak: seed 930, 5 kills" in process.stdout
    assert process.stdout.count(" ok\n") == 5
    assert "in a save: " in process.stdout
    assert "0 lost checkpoints, 0 inexact resumes" in process.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("defect", "kind"),
    [
        ("resume_reads_a_batch_twice", "inexact"),
        ("makes_room_first", "lost"),
        ("manifest_is_not_synced", "lost"),
    ],
)
def test_soak_finds_a_defect_and_prints_how_to_repeat_it(tmp_path, defect, kind):
    options = ["--flavour", "dp", "--iterations", "10", "--plant", f"tools.soak.defects:{defect}"]
    process = soak("--kills", "40", "--seed", "5", *options, "--folder", str(tmp_path), timeout=380)
    assert process.returncode == 1, process.stdout + process.stderr
    assert f"soak: FAILED: {kind}: " in process.stdout
    assert "python -m tools.soak --seed 5 --chain " in process.stdout
    (folder,) = tmp_path.iterdir()
    assert list(folder.glob("chain_*_start_*_rank_1.txt"))

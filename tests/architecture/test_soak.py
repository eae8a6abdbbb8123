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
from tools.soak.folder import look
from tools.soak.power_cut import Durable, cut_power, note_syncs

ROOT = Path(__file__).resolve().parents[2]


def save(root: Path, iteration: int, value: float = 1.0) -> Path:
    """Write a small checkpoint."""
    weight = torch.full((64, 5), value)
    chunk = TensorChunk(
        name="weight", shape=(64, 5), offsets=(0, 0), tensor=weight, replica_ranks=(0,)
    )
    return save_checkpoint(root, iteration, [chunk], {}, coordinator=Solo())


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

# SPDX-License-Identifier: Apache-2.0
"""`make soak`: kill choices, observed stages, power cuts and checks; and a short soak."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
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
from tools.soak.chain import Result
from tools.soak.checks import Ledger, Reference
from tools.soak.choices import FLAVOURS, Kill, choose, flavour_of
from tools.soak.folder import Snapshot, look, under_way
from tools.soak.job import SoakFailure, Struck
from tools.soak.pace import Measured, SaveClock
from tools.soak.power_cut import Durable, cut_power, note_syncs
from tools.soak.report import complaint, line, table

ROOT = Path(__file__).resolve().parents[2]
KILL = Kill(victim="all", how="KILL", moment="save", skip=0, offset=0.5, delay=0.0)


def save(root: Path, iteration: int, value: float = 1.0) -> Path:
    """Write a small checkpoint."""
    weight = torch.full((64, 5), value)
    chunk = TensorChunk(
        name="weight", shape=(64, 5), offsets=(0, 0), tensor=weight, replica_ranks=(0,)
    )
    return save_checkpoint(root, iteration, [chunk], {}, coordinator=Solo())


# --- choices --------------------------------------------------------------------------------------


def test_seeds_determine_kills_and_cover_all_kinds():
    kills = [choose(f"7/1/{k}", ranks=2, asynchronous=True) for k in range(2000)]
    assert kills == [choose(f"7/1/{k}", ranks=2, asynchronous=True) for k in range(2000)]
    assert len(set(kills)) == 2000
    victims = Counter(kill.victim for kill in kills)
    ranks = {"rank 0", "rank 1", "writer 0", "writer 1"}
    assert set(victims) == {"all", "launcher", "machine", *ranks}
    assert min(victims.values()) > 100
    assert Counter(kill.how for kill in kills)["KILL"] > 1400
    # uniform: kills hit each tenth of a save and of the time between saves equally often
    for moment in ("training", "save"):
        tenths = Counter(int(10 * k.offset) for k in kills if k.moment == moment)
        assert len(tenths) == 10
        assert max(tenths.values()) < 2 * min(tenths.values()), tenths
    assert all(k.how == "KILL" for k in kills if k.of_writer or k.of_machine)
    assert 0.6 < sum(k.launcher for k in kills) / len(kills) < 0.8
    sync = [choose(f"7/1/{k}", ranks=2, asynchronous=False) for k in range(300)]
    assert not any(kill.of_writer for kill in sync)


def test_half_of_soak_runs_save_async_and_some_prune_checkpoints():
    assert sum(flavour.asynchronous for flavour in FLAVOURS) * 2 == len(FLAVOURS)
    chains = [flavour_of(number) for number in range(1, 13)]
    assert set(chains) == set(FLAVOURS)
    assert [flavour_of(7), flavour_of(4, ["tp2"])] == [chains[0], FLAVOURS[2]]
    keeping = {f.asynchronous for f in FLAVOURS if "--save-keep-last" in f.saving}
    assert keeping == {True, False}


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


def test_save_clock_measures_save_commit_and_interval():
    clock, folders_of = SaveClock(measurements := Measured()), {}
    folders_of["a"], folders_of["b"] = frozenset("a"), frozenset("b")
    none: frozenset[str] = frozenset()
    seen = [(folders_of["a"], "writing", 1.0), (folders_of["a"], "manifest", 3.0)]
    seen += [(none, "renamed", 4.0), (none, "", 4.5), (none, "removing", 5.0), (none, "", 6.0)]
    for folders, stage, time in [*seen, (folders_of["b"], "writing", 9.0)]:
        clock.observe(folders, stage, time)
    assert (measurements.save, measurements.commit, measurements.between) == ([4.0], [2.0], [8.0])
    assert (clock.begins, clock.commits) == ([1.0, 9.0], [3.0])
    clock.observe(frozenset("c"), "writing", 12.0)  # the second save failed: no measurement
    assert measurements.between == [8.0]
    assert measurements.of("start") == 1.0
    assert measurements.of("save") == 4.0


def results(stages: list[str]) -> list[Result]:
    """Return the results of kills in the given stages."""
    now = Snapshot(complete=frozenset({2}), tracked=2)
    strikes = [Struck(before=now, after=now, stage=stage, iteration=3) for stage in stages]
    return [
        Result(chain=1, number=i, flavour=FLAVOURS[0], kill=KILL, struck=struck, newest=2)
        for i, struck in enumerate(strikes, 1)
    ]


def test_too_few_kills_inside_saves_is_a_complaint():
    assert complaint(results(["writing"] * 15 + [""] * 35)) is None
    assert "14 of 50 kills came while a save was under way" in str(
        complaint(results(["writing", "removing"] * 7 + [""] * 36))
    )
    assert complaint(results([""] * 6)) is None, "chance"
    in_save, between_saves = results(["manifest", ""])
    assert "in a save: manifest" in line(1, in_save)
    assert "newest 2 -> 2" in line(1, in_save)
    assert "between saves" in line(2, between_saves)
    assert "between saves 1, manifest 1" in table([in_save, between_saves])


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


# --- checks ---------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path):
    """A ledger of a folder with two good checkpoints; the reference run has three."""
    reference = tmp_path / "reference"
    for iteration in (2, 4, 6):
        save(reference, iteration, float(iteration))
    events = [{"kind": "train", "iteration": i, "lm_loss": 1.0 / i} for i in range(1, 7)]
    (reference / "metrics.jsonl").write_text("".join(f"{e}\n".replace("'", '"') for e in events))
    root = tmp_path / "save"
    for iteration in (2, 4):
        save(root, iteration, float(iteration))
    shutil.copy(reference / "metrics.jsonl", root)
    run_ledger = Ledger(root=root, reference=Reference.of(reference), keep_last=None)
    assert run_ledger.check().newest == 4
    return run_ledger


def test_missing_checkpoint_is_lost_unless_retention_removed_it(ledger):
    shutil.rmtree(ledger.root / "iter_0000002")
    with pytest.raises(SoakFailure, match=r"^lost: of \[2, 4\] those of \[2\] are gone"):
        ledger.check()
    ledger.keep_last = 1
    assert ledger.check().complete == {4}
    shutil.rmtree(ledger.root / "iter_0000004")
    with pytest.raises(SoakFailure, match=r"^lost: "):
        ledger.check()


def test_damaged_checkpoint_counts_as_lost(ledger):
    shard = ledger.root / "iter_0000002" / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SoakFailure, match=r"^lost: .*iter_0000002"):
        ledger.check()


def test_different_bits_are_reported_as_inexact(ledger):
    save(ledger.root, 6, 5.0)
    with pytest.raises(SoakFailure, match=r"^inexact: iteration 6: 1 of 1 tensors differ"):
        ledger.check()


def test_different_metrics_are_reported_as_inexact(ledger):
    path = ledger.root / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.5}", "0.50000001}"))
    with pytest.raises(SoakFailure, match=r"^inexact: metrics\.jsonl has .*0\.50000001"):
        ledger.check()


def test_resume_at_wrong_step_and_leftovers_are_reported(ledger):
    start = look(ledger.root)
    ledger.check_start(start, "loaded x; resuming at iteration 4\n")
    ledger.check_start(start, "killed before it said anything")
    with pytest.raises(SoakFailure, match=r"went on at \[2\], the newest is 4"):
        ledger.check_start(start, "loaded x; resuming at iteration 2\n")
    (ledger.root / f"iter_0000006.tmp-{'a' * 16}").mkdir()
    with pytest.raises(SoakFailure, match="were not swept"):
        ledger.check_start(look(ledger.root), "loaded x; resuming at iteration 4\n")


def test_after_power_cut_only_reported_saves_must_exist(ledger):
    start = look(ledger.root)
    save(ledger.root, 6, 6.0)
    ledger.note(look(ledger.root))
    shutil.rmtree(ledger.root / "iter_0000006")
    run_folder.write_tracker(ledger.root, 4)
    ledger.forget_unsynced(start, "")
    assert ledger.check().newest == 4
    ledger.forget_unsynced(start, f"saved {ledger.root}/iter_0000006\n")
    with pytest.raises(SoakFailure, match=r"^lost: .*\[6\] are gone"):
        ledger.check()


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

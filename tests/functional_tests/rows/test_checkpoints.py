# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged, newer, unwritable, in use, or of another run."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import (
    CheckpointReader,
    latest_checkpoint,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
)
from tests.functional_tests.planted_faults import at_step, run_with
from tests.functional_tests.small_run import (
    digests,
    flags,
    run_in_process,
    run_on,
    running,
    timeless,
)
from tests.support.ranks import start_ranks

PLAIN = "--train-iters 4 --eval-interval 0"
FOUR_ITERS = f"{PLAIN} --save-interval 2"
TENSOR = "--tensor-model-parallel-size 2"
SHARDS = ("shard-00000.safetensors", "shard-00001.safetensors")


@pytest.fixture(scope="module")
def whole(prefix, tmp_path_factory):
    """The folder of a run of two ranks, with checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("whole")
    run_on(2, flags(prefix, f"{FOUR_ITERS} {TENSOR} --save {folder}"))
    return folder


@pytest.fixture
def cut(whole, tmp_path):
    """A copy of the folder `whole` to damage."""
    return Path(shutil.copytree(whole, tmp_path / "cut"))


def flip_bit(folder: Path, shard: str, *, fraction: float) -> str:
    """Flip a bit of the tensor at a fraction of a shard and return the tensor's name."""
    tensors = read_manifest(folder).tensors
    chunks = sorted((c.begin, n) for n, t in tensors.items() for c in t.chunks if c.file == shard)
    begin, name = chunks[int(fraction * len(chunks))]
    content = bytearray((folder / shard).read_bytes())
    content[begin + 1] ^= 4
    (folder / shard).write_bytes(content)
    return name


def run_ranks_to_end(argv: list[str], world: int = 2) -> tuple[list[int | None], str]:
    """Run to the end and return the exit codes and the printed text."""
    with running(world, argv) as ranks:
        outcomes = ranks.outcomes(timeout=100)
        return [o.exit_code for o in outcomes], "".join(ranks.log(r) for r in range(world))


@pytest.mark.covers("bit-identical resume after SIGKILL")
def test_all_ranks_fall_back_if_one_reads_a_flipped_bit(prefix, whole, cut):
    """The flipped bit is late in rank 1's shard, when both ranks have loaded nearly all tensors."""
    newest = cut / "iter_0000004"
    name = flip_bit(newest, SHARDS[1], fraction=0.9)
    argv = flags(prefix, f"{FOUR_ITERS} {TENSOR} --save {cut} --load {cut}")
    codes, text = run_ranks_to_end([*argv, "--no-load-fallback"])
    assert codes == [ExitCode.USER_ERROR] * 2, text
    assert f"{SHARDS[1]} is damaged: {name}" in text
    assert newest.is_dir()
    codes, text = run_ranks_to_end(argv)
    assert codes == [0, 0], text
    (line,) = (line for line in text.splitlines() if line.startswith("WARNING: falling back"))
    assert (
        f"falling back to {cut / 'iter_0000002'}: rank 1: {newest / SHARDS[1]} is damaged" in line
    )
    assert f"{name}[" in line
    assert f"loaded {cut / 'iter_0000002'}; resuming at iteration 2" in text
    (damaged,) = cut.glob("iter_0000004.damaged-*")
    assert f"{newest} is damaged and is now {damaged.name}" in text
    assert digests(newest) == digests(whole / newest.name)
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")


def plant_vanishing(save: Path, rank: int) -> None:
    """Replace the save folder in the third step, like an unmounted file system."""

    def replace_folder(steps) -> None:
        save.rename(save.with_name("away"))
        save.mkdir()

    if rank == 0:
        at_step(3, replace_folder)


def test_removed_save_folder_is_reported_and_not_recreated(prefix, tmp_path):
    save, moved = tmp_path / "save", tmp_path / "away"
    options = (
        f"{FOUR_ITERS} --train-iters 5 --save {save} --metrics-file {tmp_path / 'metrics.jsonl'}"
    )
    outcomes, logs = run_with(partial(plant_vanishing, save), flags(prefix, options))
    text = "".join(logs)
    assert [o.exit_code for o in outcomes] == [ExitCode.SAVE_FAILED] * 2, text
    assert "Traceback" not in text
    line = f"{save} is no longer the folder that this run locked"
    assert text.count(line) == 2, "at the interval and at the end"
    assert f"saving at iteration 4 failed (1 so far): rank 0: {line}" in text
    assert "iteration        5/" in text, "training went on"
    assert not list_checkpoints(save)
    assert latest_checkpoint(moved) == moved / "iter_0000002"
    verify_checkpoint(moved / "iter_0000002")


def hold_open(rank: int, world: int, folder: str, gate: str) -> int:
    """Open a checkpoint, wait until the file `gate` exists, and verify the checkpoint."""
    with CheckpointReader(folder):
        print("open", flush=True)
        while not Path(gate).exists():
            time.sleep(0.01)
        return verify_checkpoint(folder).bytes_verified


@pytest.mark.covers("checkpoint retention")
def test_retention_keeps_checkpoints_that_are_being_read(prefix, cut, tmp_path, capsys):
    keep = "--save-keep-last 1 --save-retain-interval 5 --save-interval 1 --train-iters 7"
    argv = flags(prefix, f"{FOUR_ITERS} {keep} --save {cut} --load {cut}")
    gate = tmp_path / "gate"
    with start_ranks(hold_open, 1, str(cut / "iter_0000002"), str(gate), init=False) as ranks:
        ranks.wait_for_line(0, "open")
        assert run_in_process(argv) == 0
        gate.touch()
        (bytes_read,) = ranks.values(timeout=30)
    assert bytes_read > 100_000
    assert [f.name for f in list_checkpoints(cut)] == [f"iter_000000{i}" for i in (7, 5, 2)]
    waiting = f"retention: {cut / 'iter_0000002'} is being read and is kept for now"
    assert capsys.readouterr().err.count(waiting) == 3
    assert not list(cut.glob("*.tmp-*"))


def test_checkpoint_of_other_shape_is_refused_by_field(prefix, cut, capsys):
    options = "--hidden-size 32 --num-layers 3 --vocab-size 67 --seq-length 32 --qk-layernorm"
    assert run_in_process(flags(prefix, f"{PLAIN} {options} --load {cut}")) == ExitCode.USER_ERROR
    text = capsys.readouterr().err
    for difference in (
        "hidden_size: 48 in the checkpoint, 32 in the model",
        "num_layers: 2 in the checkpoint, 3 in the model",
        "attention.qk_norm: ",
        "vocab_size: 61 in the checkpoint, 67 in the model",
        "sequence_length: 24 in the checkpoint, 32 now",
    ):
        assert difference in text
    argv = flags(prefix, f"{PLAIN} --seq-length 32 --load {cut}")
    assert run_in_process(argv) == ExitCode.USER_ERROR
    text = capsys.readouterr().err
    assert "trained on other data: sequence_length: 24 in the checkpoint, 32 now: give" in text

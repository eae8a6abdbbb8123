# SPDX-License-Identifier: Apache-2.0
"""Frozen checkpoints of earlier versions load on another layout and resume.

`python -m tests.functional_tests.test_frozen_checkpoint version_N` makes a checkpoint in the
current format; an existing one is never made again (frozen/README.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import read_manifest, verify_checkpoint
from megatron.core.dist_checkpointing.manifest import VERSION
from megatron.core.dist_checkpointing.safetensors_file import DTYPES
from megatron.training import checkpoint
from tests.functional_tests.small_run import run_on, write_tokens
from tests.functional_tests.test_golden_loss import PINNED
from tests.functional_tests.test_upcycle import stored

FROZEN = Path(__file__).with_name("frozen")
FROZEN_FOLDERS = (
    sorted(path for path in FROZEN.iterdir() if path.is_dir()) if FROZEN.is_dir() else []
)

#: A model of 6,000 parameters, saved by two tensor parallel ranks after 4 of 8 iterations.
FLAGS = """
--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --kv-channels 4
--group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.1
--hidden-dropout 0.1 --seq-length 24 --micro-batch-size 2 --global-batch-size 8 --train-iters 8
--lr 5e-3 --lr-warmup-iters 2 --lr-decay-style cosine --eval-interval 0 --split 90,10
--vocab-size 61 --make-vocab-size-divisible-by 4 --log-interval 1 --progress plain
--deterministic-mode
"""
SAVING = "--save run --exit-interval 4 --tensor-model-parallel-size 2 --sequence-parallel"


def resume(folder: Path, words: str) -> str:
    """Resume from a folder's checkpoint in one process and return the log without times."""
    argv = f"{words} --load . --data-path tokens --metrics-file metrics.jsonl".split()
    process = subprocess.run(
        [sys.executable, "-m", "megatron.training.pretrain_gpt", *argv],
        env={**os.environ, **PINNED},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    loss_lines = [line for line in process.stdout.splitlines() if "lm loss" in line]
    measured = r"\[.*?\] |elapsed time .*?\| | tokens per second:.*"
    return "".join(re.sub(measured, "", line).strip() + "\n" for line in loss_lines)


def digests_of(checkpoint: Path) -> dict[str, list[object]]:
    """Return dtype, shape and the SHA-256 of the bytes of every whole tensor, by name."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        name: [
            names[tensor.dtype],
            list(tensor.shape),
            hashlib.sha256(tensor.numpy().tobytes()).hexdigest(),
        ]
        for name, tensor in sorted(stored(checkpoint).items())
    }


def make(folder: Path) -> None:
    """Make a frozen folder."""
    folder.mkdir(parents=True)
    write_tokens(folder / "tokens", documents=12)
    before = Path.cwd()
    os.chdir(folder)  # no path of this machine may be stored
    try:
        run_on(2, f"{FLAGS} {SAVING} --data-path tokens".split())
    finally:
        os.chdir(before)
    (folder / "run" / "iter_0000004").rename(folder / "iter_0000004")
    manifest = folder / "iter_0000004" / "manifest.json"  # contains the path of its data
    text = manifest.read_text(encoding="utf-8").replace(str(folder), f"/data/{folder.name}")
    manifest.write_text(text, encoding="utf-8")
    shutil.rmtree(folder / "run")
    flags = " ".join(FLAGS.split())
    (folder / "flags.txt").write_text(f"{flags}\n", encoding="utf-8")
    digests = json.dumps(digests_of(folder / "iter_0000004"), indent=1)
    (folder / "digests.json").write_text(f"{digests}\n", encoding="utf-8")
    names = {path.name for path in folder.iterdir()}
    losses = resume(folder, flags)
    for path in folder.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "losses.txt").write_text(losses, encoding="utf-8")


def test_every_format_version_has_a_frozen_checkpoint():
    """A new version of the format needs a new folder; see frozen/README.md."""
    assert [folder.name for folder in FROZEN_FOLDERS] == [
        f"version_{n + 1}" for n in range(VERSION)
    ]
    for number, folder in enumerate(FROZEN_FOLDERS, start=1):
        manifest = (folder / "iter_0000004" / "manifest.json").read_bytes()
        assert f'"version":{number},'.encode() in manifest
        assert not re.search(rb"/(tmp|home|root|work)/", manifest)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert size <= 150_000


@pytest.mark.parametrize("frozen", FROZEN_FOLDERS, ids=lambda path: path.name)
def test_frozen_checkpoint_still_loads_the_same_values(frozen, capsys):
    folder = frozen / "iter_0000004"
    assert verify_checkpoint(folder).unexpected_files == ()
    manifest = read_manifest(folder)
    assert manifest.world_size == 2
    assert any(len(tensor.chunks) == 2 for tensor in manifest.tensors.values())
    recorded = json.loads((frozen / "digests.json").read_text(encoding="utf-8"))
    assert sum(name.startswith("optimizer.exp_avg_sq/") for name in recorded) == 21
    assert digests_of(folder) == recorded
    assert checkpoint.main(["list", str(frozen), "--verify"], {}) == 0
    assert "a run would load: iter_0000004" in capsys.readouterr().out


@pytest.mark.parametrize("frozen", FROZEN_FOLDERS, ids=lambda path: path.name)
def test_frozen_checkpoint_resumes_on_one_process(frozen, tmp_path):
    shutil.copytree(frozen, tmp_path / "run")  # leave the frozen folder unchanged
    loss_log = resume(tmp_path / "run", (frozen / "flags.txt").read_text(encoding="utf-8"))
    assert loss_log == (frozen / "losses.txt").read_text(encoding="utf-8")
    assert [int(line.split()[1].rstrip("/")) for line in loss_log.splitlines()] == [5, 6, 7, 8]


if __name__ == "__main__":
    if (FROZEN / sys.argv[1]).exists():
        raise SystemExit(f"{FROZEN / sys.argv[1]} is there and is never made again")
    with tempfile.TemporaryDirectory() as elsewhere:
        make(Path(elsewhere) / sys.argv[1])
        shutil.copytree(Path(elsewhere) / sys.argv[1], FROZEN / sys.argv[1])

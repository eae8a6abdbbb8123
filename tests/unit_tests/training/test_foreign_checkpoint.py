# SPDX-License-Identifier: Apache-2.0
"""A run never treats a checkpoint of another program as an empty folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import Solo, TensorChunk, save_checkpoint
from megatron.training import checkpoint
from megatron.training.checkpointing.find import load_newest
from tests.functional_tests.small_run import run_in_process

UPSTREAM = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})


def write(root: Path, names: dict[str, str]) -> None:
    for name, text in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def load(path: Path, **options: Any) -> Any:
    return load_newest(str(path), lambda folder: folder.name, Solo(), **options)


@pytest.mark.parametrize(
    ("names", "where", "kind"),
    [
        ({".metadata": ""}, ".", "dcp"),
        ({"iter_0000007/.metadata": ""}, "iter_0000007", "dcp"),
        (
            {"iter_0000007/.metadata": "", "iter_0000007/metadata.json": UPSTREAM},
            "iter_0000007",
            "",
        ),
        ({"iter_0000007/metadata.json": UPSTREAM}, "iter_0000007", ""),
        ({"release/.metadata": "", "release/metadata.json": UPSTREAM}, "release", ""),
    ],
)
@pytest.mark.parametrize("tracker", [None, "7", "release"])
def test_foreign_checkpoint_error_names_the_conversion(
    names, where, kind, tracker, tmp_path, capsys
):
    write(tmp_path, names)
    if tracker is not None:
        write(tmp_path, {"latest_checkpointed_iteration.txt": tracker})
    folder = tmp_path / where
    text = f"{folder} is a foreign checkpoint: convert it with python -m megatron"
    text += f".training.checkpoint convert {folder} NEW_FOLDER --from {kind or 'torch_dist'} --to"
    for named in {tmp_path, folder}:
        for fall_back in (True, False):
            with pytest.raises(ValueError) as refusal:
                load(named, flag="--pretrained-checkpoint", fall_back=fall_back)
            assert str(refusal.value).startswith(f"--pretrained-checkpoint {named}: {text}")
            assert "complete checkpoint" not in str(refusal.value)
    checkpoint.main(["list", str(tmp_path)], {})
    out = capsys.readouterr().out
    assert f"a run would load: none, and stop: {text}" in out
    assert "start from scratch" not in out


def test_run_does_not_restart_from_scratch_on_foreign_load(tmp_path, capfd):
    write(tmp_path, {"theirs/.metadata": ""})
    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --max-position-embeddings 16 "
    words += "--mock-data --vocab-size 32 --seq-length 8 --micro-batch-size 1 --train-iters 1 "
    words += f"--lr 1e-3 --load {tmp_path / 'theirs'}"
    assert run_in_process(words.split()) == 2
    err = capfd.readouterr().err
    assert f"--load {tmp_path / 'theirs'}: {tmp_path / 'theirs'} is a foreign checkpoint" in err
    assert "--from dcp" in err


def test_native_checkpoint_next_to_foreign_one_is_loaded(tmp_path):
    location = {"shape": (3,), "offsets": (0,), "replica_ranks": (0,)}
    chunk = TensorChunk(name="a", tensor=torch.ones(3), **location)
    save_checkpoint(tmp_path, 5, [chunk], {}, coordinator=Solo())
    write(tmp_path, {".metadata": "", "iter_0000009/.metadata": ""})
    assert load(tmp_path)[1] == "iter_0000005"
    (tmp_path / "iter_0000005" / "shard-00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no undamaged checkpoint in .*iter_0000005"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"sharded_backend": 3}', "[" * 9999])
def test_other_metadata_files_are_not_checkpoints(text, tmp_path):
    write(tmp_path, {"metadata.json": text})
    assert load(tmp_path) is None

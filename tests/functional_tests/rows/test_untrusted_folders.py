# SPDX-License-Identifier: Apache-2.0
"""Links, pipes, endless files and huge descriptions in folders of runs.

Nothing is written through a link, nothing hangs, no memory is allocated for sizes that a file only
claims, and a run falls back past such a checkpoint to an older one.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.core.dist_checkpointing import (
    Manifest,
    Solo,
    TensorChunk,
    read_manifest,
    save_checkpoint,
)
from megatron.inference import generate
from megatron.training import checkpoint
from tests.functional_tests.small_run import flags, refused, run_in_process, write_tokens
from tests.support.edited_manifests import edit_manifest, seal_manifest

HUGE = 1 << 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the save folder of a run with checkpoints 1 and 2, and the arguments to resume it."""
    root = tmp_path_factory.mktemp("run")
    prefix = write_tokens(root / "data")
    options = "--train-iters 2 --save-interval 1 --lr-warmup-iters 0 --eval-interval 0"
    options += f" --tokenizer-type null --vocab-size 60 --save {root / 'save'}"
    with contextlib.redirect_stdout(io.StringIO()):
        assert run_in_process(flags(prefix, options)) == 0
    return root / "save", flags(prefix, options.replace("--train-iters 2", "--train-iters 3"))


def change_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that changes the fields of a manifest and signs it."""
    return lambda folder: edit_manifest(folder, change)


def save_tensors(names: Callable[[str], bool], **extra: Any) -> Callable[[Path], None]:
    """Return a function that saves a checkpoint again with only the tensors `names` accepts."""

    def act(folder: Path) -> None:
        manifest: Manifest = read_manifest(folder)
        tensors: dict[str, torch.Tensor] = {}
        for name in manifest.files:
            tensors |= load_file(folder / name)
        tensors_by_name = {key.partition("@")[0]: tensor for key, tensor in tensors.items()}
        stored = {n: s for n, s in manifest.tensors.items() if names(n)}
        chunks = [
            TensorChunk(
                name=name,
                shape=shape.shape,
                offsets=(0,) * len(shape.shape),
                tensor=tensors_by_name[name].view(shape.shape),
                replica_ranks=(0,),
            )
            for name, shape in stored.items()
        ]
        shutil.rmtree(folder)
        extra_fields = {**manifest.extra, **extra}
        save_checkpoint(folder.parent, 2, chunks, extra_fields, coordinator=Solo())

    return act


def replace_file(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that replaces a file by the result of `make`."""

    def act(folder: Path) -> None:
        path = next(folder.glob(name))
        path.rename(folder.parent / "moved")
        make(path)

    return act


def nest_deeply(folder: Path) -> None:
    path = folder / "manifest.json"
    body = path.read_bytes().partition(b",\n")[2]
    nested = b'"extra":{"x":' + b"[" * 900 + b"]" * 900 + b","
    seal_manifest(path, body.replace(b'"extra":{', nested))


def change_extra(section: str, **fields: Any) -> Callable[[Path], None]:
    """Return a function that changes fields in a section of a checkpoint's `extra`."""
    return change_manifest(lambda manifest: manifest["extra"][section].update(fields))


def rename_shard(to: str) -> Callable[[Path], None]:
    def change(fields: dict[str, Any]) -> None:
        (_, file), *_ = fields["files"].items()
        fields["files"] = {to: file}
        for tensor in fields["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk["file"] = to

    return change_manifest(change)


def link_to_moved(path: Path) -> None:
    path.symlink_to(path.parent.parent / "moved")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "manifest is a pipe": replace_file("manifest.json", os.mkfifo),
    "manifest is a folder": replace_file("manifest.json", Path.mkdir),
    "manifest is a link out": replace_file("manifest.json", link_to_moved),
    "manifest is endless": replace_file("manifest.json", lambda path: path.symlink_to("/dev/zero")),
    "manifest goes on for 200 GiB": lambda f: os.truncate(f / "manifest.json", 200 << 30),
    "manifest is nested": nest_deeply,
    "shard is a pipe": replace_file("*.safetensors", os.mkfifo),
    "shard is a link out": replace_file("*.safetensors", link_to_moved),
    "NUL in a shard's name": rename_shard("a\0b"),
    "escape in a shard's name": rename_shard("\x1b[2Ja"),
    "long name of a shard": rename_shard("a" * 5000),
    "another iteration": change_manifest(lambda fields: fields.update(iteration=7)),
    "huge blocks": change_manifest(lambda fields: fields.update(block_bytes=1 << 60)),
    "digests are no text": change_manifest(
        lambda fields: next(iter(fields["tensors"].values()))["chunks"][0].update(xxh3=[7])
    ),
    "a weight left out of the manifest": change_manifest(
        lambda fields: fields["tensors"].pop("decoder.final_norm.weight")
    ),
}
#: Complete as files: only a comparison with the model's tensors finds the damage.
INCOMPLETE: dict[str, Callable[[Path], None]] = {
    "weights were never saved": save_tensors(lambda name: "mlp" not in name),
    "a moment was never saved": save_tensors(lambda name: "exp_avg_sq/head" not in name),
    "layers without end": change_extra("model", num_layers=10**15),
    "a large vocabulary": change_extra("model", vocab_size=HUGE),
    "heads without end": change_manifest(
        lambda fields: fields["extra"]["model"]["attention"].update(num_attention_heads=10**15)
    ),
    "model is a list": change_manifest(lambda fields: fields["extra"].update(model=[])),
}


def verified(folder: Path, capsys: Any) -> tuple[int, str]:
    """Return the exit code and the output of `verify`."""
    capsys.readouterr()
    code = checkpoint.main(["verify", str(folder)], {})
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize("case", [*DAMAGES, *INCOMPLETE])
def test_run_falls_back_past_foreign_checkpoint_folders(
    case: str, run: tuple[Path, list[str]], tmp_path: Path, capsys: Any
) -> None:
    root = tmp_path / "save"
    shutil.copytree(run[0], root)
    {**DAMAGES, **INCOMPLETE}[case](root / "iter_0000002")
    code, output = verified(root / "iter_0000002", capsys)
    assert code == 1, output
    assert output.startswith("DAMAGED: "), output
    assert "\x1b" not in output
    assert len(output) < 2000
    if case == "a moment was never saved":  # generation needs none
        return
    words = ["--load", str(root), "--prompt", "1 2 3", "--device", "cpu", "--max-new-tokens", "1"]
    code = generate.main(words, {})
    err = capsys.readouterr().err
    assert code == 0, err
    assert "falling back to" in err
    assert "iter_0000001" in err


@pytest.mark.parametrize(
    "change",
    [
        INCOMPLETE["a moment was never saved"],
        change_extra("progress", consumed_samples=10**30),
        change_extra("progress", iteration=1),
        change_extra("optimizer", steps=10**400),
        change_manifest(lambda fields: fields["extra"].update(window=[])),
    ],
    ids=[
        "moment",
        "samples without end",
        "another iteration",
        "steps without end",
        "window is a list",
    ],
)
def test_resumed_run_falls_back_past_invalid_state(
    change: Callable[[Path], None], run: tuple[Path, list[str]], tmp_path: Path, capsys: Any
) -> None:
    root = tmp_path / "save"
    shutil.copytree(run[0], root)
    change(root / "iter_0000002")
    words = [str(root) if word == str(run[0]) else word for word in run[1]]
    code = run_in_process([*words, "--load", str(root)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "falling back to" in out + err


@pytest.mark.parametrize("tracker", [os.mkfifo, Path.mkdir, lambda p: p.symlink_to("/dev/zero")])
def test_tracker_that_is_not_a_file_is_tolerated(
    tracker: Callable[[Path], object], run: tuple[Path, list[str]], tmp_path: Path, capsys: Any
) -> None:
    root = tmp_path / "save"
    shutil.copytree(run[0], root)
    (root / "latest_checkpointed_iteration.txt").unlink()
    tracker(root / "latest_checkpointed_iteration.txt")
    assert checkpoint.main(["list", str(root)], {}) == 0
    out, _ = capsys.readouterr()
    assert "a run would load: iter_0000002" in out


def test_checkpoint_options_must_match_its_own_model(
    run: tuple[Path, list[str]], tmp_path: Path
) -> None:
    changes = {"num-layers": 10**15, "hidden-size": 1 << 12, "vocab-size": HUGE}
    for name, value in {**changes, "make-vocab-size-divisible-by": HUGE}.items():
        root = tmp_path / name
        shutil.copytree(run[0], root)
        for folder in root.glob("iter_*"):
            change_extra("config", **{name: value})(folder)
        words = ["--load", root, "--use-checkpoint-args", "--metrics-file", tmp_path / "m.jsonl"]
        refused(words, "iter_0000002")

# SPDX-License-Identifier: Apache-2.0
"""Untrusted folders and files never run code and never lead out of the folder."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import Solo, save_checkpoint
from megatron.core.models import GPTModel
from megatron.hf import convert
from megatron.inference import generate
from megatron.training import pretrain_gpt
from tests.functional_tests.small_run import flags, refused, write_tokens
from tests.support.hf_folders import (
    change_json,
    make_model,
    save_folder,
)

INDEX = "model.safetensors.index.json"


def refused_everywhere(folder: Path, tmp_path: Path) -> str:
    """Assert that three entry points refuse an HF folder; return the converter's message."""
    training = f"--load-hf {folder} --mock-data --seq-length 24 --micro-batch-size 2 --lr 1e-3"
    training += f" --train-iters 1 --eval-interval 0 --metrics-file {tmp_path / 'metrics.jsonl'}"
    assert folder.name in refused([*training.split()], main=pretrain_gpt.main)
    refused(["--load", folder, "--prompt", "a", "--device", "cpu"], main=generate.main)
    return refused(["import", "--hf", folder, "--save", tmp_path / "imported"], main=convert.main)


def malicious_pickle(canary: Path) -> bytes:
    """Return a pickle that creates the file `canary` when it is loaded."""
    return f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()


def test_malicious_pickles_are_never_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle = malicious_pickle(canary)
    prefix = write_tokens(tmp_path / "data")
    extra = {"format": 1, "model": {}, "config": {}}
    chunks: list[Any] = []
    root = tmp_path / "root"
    save_checkpoint(root, 1, chunks, extra, coordinator=Solo())
    # The places of such files in other programs: beside, in, and instead of a checkpoint.
    foreign = tmp_path / "other"
    (foreign / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    for folder in (root, root / "iter_0000001", foreign, foreign / "iter_0000001"):
        for name in (".metadata", "common.pt", "model_optim_rng.pt", "rng.npy", "__0_0.distcp"):
            (folder / name).write_bytes(pickle)
    (foreign / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(pickle)
    (foreign / "latest_checkpointed_iteration.txt").write_text("1")
    for load in (root, foreign, foreign / "iter_0000001", root / "common.pt"):
        refused([*flags(prefix, f"--load {load}")], main=pretrain_gpt.main)
        refused(["--load", load, "--prompt", "a", "--device", "cpu"], main=generate.main)
        refused(["export", "--load", load, "--save", tmp_path / "out"], main=convert.main)
    # An index cache that is a pickle is discarded and rebuilt.
    cache = tmp_path / "cache"
    run = flags(prefix, f"--data-cache-path {cache} --train-iters 3 --eval-interval 0")
    assert pretrain_gpt.main(run, {}) == 0
    arrays = sorted(cache.rglob("*.npy"))
    assert arrays
    for array in arrays:
        array.write_bytes(b"\x80\x04" + pickle)
    with contextlib.redirect_stderr(io.StringIO()):
        assert pretrain_gpt.main(run, {}) == 0
    assert not canary.exists()
    loading = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    subprocess.run([sys.executable, "-c", loading], input=pickle, check=True)
    assert canary.exists(), "the pickle does nothing: the test proves nothing"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a valid folder of several files with a tokenizer."""
    folder = tmp_path_factory.mktemp("good") / "model"
    save_folder(make_model("llama-3to1"), folder, max_shard_size="30KB")
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}}}
    tokenizer["model"]["unk_token"] = "a"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def with_auto_map(folder: Path) -> None:
    code = "import pathlib\npathlib.Path(__file__).with_name('canary').touch()\n"
    (folder / "evil.py").write_text(code)
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change_json(folder / "config.json", auto_map=auto_map)


def with_pickled_weights(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(malicious_pickle(folder / "canary"))


def with_link(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.mkdir(exist_ok=True)
        path = sorted(folder.glob(name))[0]
        shutil.move(path, outside / path.name)
        path.symlink_to(outside / path.name)

    return change


def with_index(where: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        name = next(iter(set(index["weight_map"].values())))
        (folder.parent / "outside").mkdir(exist_ok=True)
        shutil.copy(folder / name, folder.parent / "outside" / "secret.safetensors")
        named = where.format(parent=folder.parent)
        moved = {k: named if v == name else v for k, v in index["weight_map"].items()}
        change_json(folder / INDEX, weight_map=moved)

    return change


HOSTILE = {
    "auto_map": (with_auto_map, "auto_map"),
    "weights as pickle": (with_pickled_weights, "weights as pickle only"),
    "link of weights": (with_link("*.safetensors"), "a link to"),
    "link of config.json": (with_link("config.json"), "a link to"),
    "link of the index": (with_link(INDEX), "a link to"),
    "link of the tokenizer": (with_link("tokenizer.json"), "a link to"),
    "path upwards in the index": (with_index("../outside/secret.safetensors"), "only files in"),
    "absolute path in the index": (with_index("{parent}/outside/secret.safetensors"), "only files"),
    "pickle in the index": (with_index("weights.bin"), "only safetensors are read"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders_are_refused(case: str, good: Path, tmp_path: Path) -> None:
    change, text = HOSTILE[case]
    folder = tmp_path / "hostile"
    shutil.copytree(good, folder)
    change(folder)
    assert text in refused_everywhere(folder, tmp_path)
    assert not (folder / "canary").exists()
    assert not (tmp_path / "imported").exists()
    allowed = {"auto_map": "--ignore-auto-map"}
    allowed.update(dict.fromkeys((name for name in HOSTILE if "link" in name), "--follow-links"))
    if case in allowed:  # an explicit flag allows the folder
        words = ["import", "--hf", folder, "--save", tmp_path / "imported", allowed[case]]
        with contextlib.redirect_stdout(io.StringIO()):
            assert convert.main([str(word) for word in words], {}) == 0
        assert not (folder / "canary").exists()


def test_export_refuses_symlinks_in_the_like_folder(good: Path, tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        words = ["import", "--hf", str(good), "--save", str(tmp_path / "imported")]
        assert convert.main(words, {}) == 0
    like = tmp_path / "like"
    shutil.copytree(good, like)
    (tmp_path / "secret").write_text("secret")
    (like / "merges.txt").symlink_to(tmp_path / "secret")
    words = ["export", "--load", str(tmp_path / "imported"), "--save", str(tmp_path / "out")]
    assert "merges.txt is a link to" in refused([*words, "--like", like], main=convert.main)
    assert not (tmp_path / "out").exists()


def test_symlinks_of_the_hub_cache_are_followed(good: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(good.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    with contextlib.redirect_stdout(io.StringIO()):
        words = ["import", "--hf", str(snapshot), "--save", str(tmp_path / "imported")]
        assert convert.main(words, {}) == 0


def test_a_folder_of_another_model_is_refused(good: Path, tmp_path: Path) -> None:
    def changed(name: str, **changes: Any) -> str:
        folder = tmp_path / name
        shutil.copytree(good, folder)
        for file, fields in changes.items():
            change_json(folder / {"config": "config.json", "index": INDEX}[file], **fields)
        return refused_everywhere(folder, tmp_path)

    assert "model.layers.2.input_layernorm.weight is missing" in changed(
        "missing", config={"num_hidden_layers": 3}
    )
    assert "model.layers.1.input_layernorm.weight does not belong to the model" in changed(
        "more", config={"num_hidden_layers": 1}
    )
    assert "model.embed_tokens.weight is [263, 48], config.json requires [264, 48]" in changed(
        "shape", config={"vocab_size": 264}
    )
    weight_map = json.loads((good / INDEX).read_text())["weight_map"]
    weight_map["model.norm.weight"] = weight_map["model.embed_tokens.weight"]
    assert "lacks model.norm.weight" in changed("index", index={"weight_map": weight_map})
    weight_map["model.norm.weight"] = "absent.safetensors"
    assert "absent.safetensors does not exist" in changed("no", index={"weight_map": weight_map})


def test_archives_are_not_opened(good: Path, tmp_path: Path) -> None:
    tar, packed = tmp_path / "model.tar", tmp_path / "model.zip"
    evil = tmp_path / "evil.txt"
    evil.write_text("x")
    with tarfile.open(tar, "w") as archive:
        archive.add(good, "../../model")
        archive.add(evil, "../canary")
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(evil, "../canary")
    evil.unlink()
    prefix = write_tokens(tmp_path / "data")
    before = sorted(tmp_path.rglob("*"))
    for path in (tar, packed):
        refused(["import", "--hf", path, "--save", tmp_path / "imported"], main=convert.main)
        refused(["export", "--load", path, "--save", tmp_path / "out"], main=convert.main)
        refused(["--load", path, "--prompt", "a", "--device", "cpu"], main=generate.main)
        for flag in ("--load", "--load-hf", "--tokenizer-model", "--data-path"):
            words = flags(prefix, f"{flag} {path}")
            refused([*words], main=pretrain_gpt.main)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 1 << 30),
        ("hidden_size", 6 << 20),
        ("intermediate_size", 1 << 30),
        ("num_hidden_layers", 10**6),
        ("num_hidden_layers", 9_999),
        ("num_attention_heads", 1 << 12),
        ("head_dim", 1 << 20),
    ],
)
def test_config_json_is_checked_before_building_a_model(
    field: str, value: int, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPTModel, "__init__", None)  # nothing is built
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    change_json(folder / "config.json", **{field: value})
    refused_everywhere(folder, tmp_path)

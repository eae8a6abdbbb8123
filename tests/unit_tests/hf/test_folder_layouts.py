# SPDX-License-Identifier: Apache-2.0
"""Slices of a folder on two ranks: the same weights, few bytes, and little memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.dist_checkpointing import Solo, read_manifest, weight_chunks
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import Storage
from megatron.hf.config_json import read_folder, read_model
from megatron.hf.folder import open_folder, read_object
from megatron.hf.read_weights import read_weights
from megatron.hf.tensor_map import tensor_map
from megatron.training.checkpoints.hf_export import export_folder
from megatron.training.checkpoints.hf_import import import_folder
from tests.support.hf_folders import change_json, make_model, save_folder
from tests.support.ranks import start_ranks

MB = 1 << 20


def read_half(rank: int, world: int, path: Path) -> tuple[int, int, int, dict[str, float]]:
    """Be one of two ranks: return bytes read, bytes held, memory gained and sums of weights."""
    folder = open_folder(path)
    described = read_model(folder.config, where="x")
    grid = RankGrid(world_size=2, tp=2)
    groups = ProcessGroupCollection.create(grid, rank=rank, timeout_seconds=30)
    model = GPTModel(described.config, groups, storage=Storage(initialize=False))
    chunks = weight_chunks(model.store)
    for chunk in chunks:
        chunk.tensor.fill_(1.0)  # touched, so that what follows is not its memory
    memory = PeakMemory()
    count = read_weights(folder, described, chunks, coordinator=Solo())
    gained = memory.gained()
    held = sum(chunk.tensor.numel() * chunk.tensor.itemsize for chunk in chunks)
    sums = {f"{c.name}{c.box}": float(c.tensor.double().sum()) for c in chunks}
    return count, held, gained, sums


class PeakMemory:
    """Measure how far memory rises above where it is now."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
        self._before = self._read("VmRSS")

    def gained(self) -> int:
        """Return the bytes that memory has risen at most since then."""
        return self._read("VmHWM") - self._before

    @staticmethod
    def _read(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        assert found is not None
        return int(found[1]) * 1024


def check_halves(path: Path, *, slack: int) -> None:
    """Read a folder on two ranks and hold each to the bytes of its half."""
    folder = open_folder(path)
    described = read_model(folder.config, where="x")
    with start_ranks(read_half, 2, path) as ranks:
        found = ranks.values(timeout=100)
    whole = GPTModel(
        described.config, ProcessGroupCollection.single(), storage=Storage(initialize=False)
    )
    chunks = weight_chunks(whole.store)
    read_weights(folder, described, chunks, coordinator=Solo())
    logical = {chunk.name: chunk.tensor for chunk in chunks}
    stored = sum(t.numel() * t.itemsize for t in logical.values())
    sizes = {}
    with folder.open_tensors() as opened:
        for name in opened:
            sizes[name] = opened.find(name).end - opened.find(name).begin
    on_disk = sum(sizes.values())
    for count, held, gained, sums in found:
        # A rank's half of the large ones, all of the small ones, in the dtype of the files.
        share = held * on_disk / stored
        assert count <= share + slack
        assert held < 0.6 * stored
        assert gained <= 64 * MB
        for key, value in sums.items():
            name, _, spans = key.partition("[")
            part = logical[name]
            for dim, span in enumerate(spans.rstrip("]").split(", ")):
                begin, end = map(int, span.split(":"))
                part = part.narrow(dim, begin, end - begin)
            assert float(part.double().sum()) == pytest.approx(value, rel=1e-12)


def test_two_ranks_read_their_slices_and_nothing_else(tmp_path: Path) -> None:
    for case in ("llama-biases", "qwen3-8to1"):
        model = make_model(case).to(torch.bfloat16)
        check_halves(save_folder(model, tmp_path / case), slack=8 << 10)


def random_folder(path: Path, case: str = "llama-3to1", **shape: Any) -> Path:
    """Write a folder of a shape without a model of that size in memory."""
    save_folder(make_model(case), path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    change_json(path / "config.json", dtype="float32", **shape)
    described = read_model(read_object(path / "config.json"), where="x")
    shards: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    wanted = tensor_map(described.kind, described.config).hf_tensors.values()
    for number, tensor in enumerate(wanted):
        name = f"part-{number // 9:03d}.safetensors"
        shards.setdefault(name, {})[tensor.name] = torch.randn(tensor.shape)
        weight_map[tensor.name] = name
        if (number + 1) % 9 == 0:
            save_file(shards.pop(name), path / name)
    for name, rest in shards.items():
        save_file(rest, path / name)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    change_json(path / "model.safetensors.index.json", weight_map=weight_map)
    return path


#: Shapes of folders, of which each layer takes 50 MB.
WIDE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 4096,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 3200,
}
#: And of layers with 32 experts, of three matrices of 0.27 MB: less than a block of a checkpoint.
EXPERTS: dict[str, Any] = {
    "hidden_size": 512,
    "moe_intermediate_size": 131,
    "n_routed_experts": 32,
    "n_group": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "qk_nope_head_dim": 48,
    "qk_head_dim": 58,
    "v_head_dim": 40,
    "kv_lora_rank": 256,
    "num_hidden_layers": 5,
}


def convert_both_ways(rank: int, world: int, path: Path, out: Path) -> list[int]:
    """Import and export in a process of its own; return the memory that each has gained."""
    folder = open_folder(path)
    described = read_folder(folder)
    gained = []
    memory = PeakMemory()
    checkpoint = import_folder(folder, described, str(out / "checkpoints"))
    gained.append(memory.gained())
    memory = PeakMemory()
    exported = export_folder(checkpoint, str(out / "again"), max_shard_bytes=200 * MB)
    gained.append(memory.gained())
    return [*gained, exported.bytes_read]


def check_stream(path: Path, out: Path) -> None:
    """Convert a folder both ways and hold that to little memory and few bytes.

    Both take 30 to 54 MB; in one run of six the allocator keeps 20 MB more.
    """
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    with start_ranks(convert_both_ways, 1, path, out, init=False) as ranks:
        ((imported, exported, bytes_read),) = ranks.values(timeout=300)
    assert imported <= 96 * MB, imported
    assert exported <= 96 * MB, exported
    manifest = read_manifest(out / "checkpoints/iter_0000000")
    assert bytes_read <= 1.75 * sum(file.bytes for file in manifest.files.values())
    again = sum(file.stat().st_size for file in (out / "again").glob("*.safetensors"))
    assert abs(again - size) < 64 << 10


@pytest.mark.parametrize(
    ("case", "shape"), [("llama-3to1", {**WIDE, "num_hidden_layers": 3}), ("deepseek", EXPERTS)]
)
def test_conversion_of_a_model_larger_than_the_bound_on_memory(
    case: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    path = random_folder(tmp_path / "model", case, **shape)
    assert sum(f.stat().st_size for f in path.glob("*.safetensors")) > 100 * MB
    check_stream(path, tmp_path)


@pytest.mark.slow
def test_conversion_and_slices_of_500_mb(tmp_path: Path) -> None:
    wide = {**WIDE, "vocab_size": 32000, "num_hidden_layers": 9}
    path = random_folder(tmp_path / "model", **wide)
    assert sum(f.stat().st_size for f in path.glob("*.safetensors")) > 450 * MB
    check_stream(path, tmp_path)
    check_halves(path, slack=64 << 10)

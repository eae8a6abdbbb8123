# SPDX-License-Identifier: Apache-2.0
"""Folders whose matrices are FP8 with a scale for each block, as DeepSeek-V3 is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.process_groups import RankGrid
from megatron.hf.folder import open_folder
from megatron.hf.model_config import read_folder
from tests.support.closeness import assert_close_by_metric
from tests.support.hf_converter import convert, held, imported, read_by_a_rank, tensors
from tests.support.hf_folders import VOCABULARY, change_json, load_folder, make_model, save_folder
from tests.support.inputs import generator, one_thread
from tests.support.ranks import run_ranks

TOKENS = torch.randint(VOCABULARY, (2, 19), generator=generator(6))
#: Smaller than published, and no divisor of the sizes of this model.
BLOCK = (7, 5)
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": list(BLOCK),
    "activation_scheme": "dynamic",
}
WHOLE = ("norm", "embed_tokens", "lm_head", "mlp.gate.")


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the factor of each element [o, i] from those of blocks."""
    rows, columns = (
        torch.arange(count).repeat_interleave(size)
        for count, size in zip(scales.shape, BLOCK, strict=True)
    )
    return scales[rows[: shape[0]]][:, columns[: shape[1]]]


def quantize(folder: Path, dequantized: Path) -> None:
    """Write matrices of a folder in FP8 with random scales, and their values into another one."""
    (file,) = folder.glob("*.safetensors")
    stored, values = {}, {}
    for number, (name, weight) in enumerate(sorted(load_file(file).items())):
        stored[name] = values[name] = weight
        if weight.ndim != 2 or any(part in name for part in WHOLE):
            continue
        blocks = [-(-n // b) for n, b in zip(weight.shape, BLOCK, strict=True)]
        scales = 0.5 + torch.rand(blocks, generator=generator(number))
        factors = spread(scales, weight.shape)
        stored[name] = (weight / factors).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        values[name] = stored[name].float() * factors
    save_file(stored, file, metadata={"format": "pt"})
    dequantized.mkdir()
    (dequantized / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(values, dequantized / file.name, metadata={"format": "pt"})
    change_json(folder / "config.json", quantization_config=QUANTIZED)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return a quantised folder of DeepSeek-V3, and one of the same values in fp32."""
    folder = save_folder(make_model("deepseek-even"), tmp_path / "fp8")
    quantize(folder, tmp_path / "fp32")
    return folder, tmp_path / "fp32"


def on_a_rank(rank: int, world: int, path: Path) -> dict[str, Any]:
    """Be one of four ranks: read slices of a quantised folder."""
    model, _, count = read_by_a_rank(rank, path, RankGrid(world_size=world, tp=2, ep=2))
    with torch.no_grad():
        return {"bytes": count, "logits": model.full_logits(TOKENS)}


def test_ranks_read_their_blocks_and_compute_what_transformers_does(folders) -> None:
    folder, values = folders
    found = run_ranks(on_a_rank, 4, folder)
    with one_thread(), torch.no_grad():
        expected = load_folder(values)(TOKENS, use_cache=False).logits.transpose(0, 1)
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for rank in found:
        assert_close_by_metric("logits", rank["logits"], expected)
        assert rank["bytes"] < 0.8 * whole, "a rank reads its shards, not whole tensors"
    exact = held(imported(values, folder.parent / "a"))
    convert("import", "--hf", folder, "--save", folder.parent / "b", "--dtype", "float32")
    read = held(folder.parent / "b" / "iter_0000000")
    assert exact.keys() == read.keys()
    assert all(torch.equal(tensor, read[name]) for name, tensor in exact.items())


def test_export_writes_bf16_and_drops_the_field(folders) -> None:
    folder, values = folders
    printed = convert("import", "--hf", folder, "--save", folder.parent / "a")
    assert "FP8 matrices with a scale for each block of 7 x 5" in printed
    checkpoint = folder.parent / "a" / "iter_0000000"
    out = folder.parent / "out"
    printed = convert("export", "--load", checkpoint.parent, "--save", out)
    assert "quantization_config: weights are written in bfloat16" in printed
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    before, after = tensors(values), tensors(out)
    assert before.keys() == after.keys()
    quantized = [name for name in tensors(folder) if f"{name}_scale_inv" in tensors(folder)]
    assert len(quantized) > 10
    for name in quantized:
        assert torch.equal(after[name].bfloat16(), before[name].bfloat16()), name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "gptq"),
        ("fmt", "e5m2"),
        ("weight_block_size", None),
        ("weight_block_size", [128]),
        ("weight_block_size", [0, 128]),
        ("zero_point", True),
    ],
)
def test_other_ways_to_quantise_are_refused_by_field(folders, field, value) -> None:
    folder, _ = folders
    change_json(folder / "config.json", quantization_config={**QUANTIZED, field: value})
    with pytest.raises(ValueError, match=rf"quantization_config\.{field}"):
        read_folder(open_folder(folder))


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), f"{NAME}_scale_inv is missing"),
        (lambda t: t.update({NAME: t[NAME].float()}), "has no FP8 tensor"),
        (lambda t: t.update({f"{NAME}_scale_inv": torch.ones(2, 2)}), "is [2, 2], blocks of"),
        (lambda t: t[f"{NAME}_scale_inv"].fill_(torch.inf), "not positive and finite"),
        (lambda t: t[f"{NAME}_scale_inv"].zero_(), "not positive and finite"),
        (
            lambda t: t.update({f"{NAME}_scale_inv": t[f"{NAME}_scale_inv"].half()}),
            "has dtype F16",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(folders, change, words) -> None:
    folder, _ = folders
    (file,) = folder.glob("*.safetensors")
    found = load_file(file)
    change(found)
    save_file(found, file, metadata={"format": "pt"})
    error = convert("import", "--hf", folder, "--save", folder.parent / "a", code=2)
    assert words in error

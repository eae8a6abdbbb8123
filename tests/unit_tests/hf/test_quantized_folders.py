# SPDX-License-Identifier: Apache-2.0
"""Folders in block-scaled FP8 (DeepSeek-V3) and in MXFP4 (gpt-oss)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core import RankGrid
from megatron.core.boxes import Box
from megatron.core.dist_checkpointing import TensorChunk
from megatron.core.dist_checkpointing.safetensors_file import SafetensorsFile, TensorInfo
from megatron.hf import HuggingFaceModel, open_folder, read_folder
from megatron.hf.tensor_map import tensor_map
from tests.support.closeness import assert_all_equal, assert_close_by_metric
from tests.support.hf_converter import (
    checkpoint_weights,
    convert,
    imported,
    read_by_a_rank,
    tensors,
)
from tests.support.hf_folders import VOCABULARY, change_json, load_folder
from tests.support.inputs import generator, one_thread
from tests.support.quantized_folders import (
    BLOCK,
    FP8,
    MXFP4,
    fp8_folders,
    gpt_oss_folders,
    mxfp4_folders,
)
from tests.support.ranks import run_ranks

TOKENS = torch.randint(VOCABULARY, (2, 19), generator=generator(6))


def blocks_of_box(box: Box, sizes: Sequence[int]) -> int:
    """Return how many quantization blocks a box overlaps."""
    return math.prod(
        (offset + n - 1) // size - offset // size + 1
        for offset, n, size in zip(box.offsets, box.sizes, sizes, strict=True)
    )


def stored_bytes(infos: dict[str, TensorInfo], name: str, box: Box) -> int:
    """Return the bytes of a box's elements and of its blocks' scales in a file."""
    if f"{name}_scale_inv" in infos:
        return box.numel + 4 * blocks_of_box(box, BLOCK)
    if f"{name}_blocks" in infos:
        return 17 * blocks_of_box(box, (*[1] * (len(box.sizes) - 1), 32))
    tensor = infos[name]
    return box.numel * (tensor.end - tensor.begin) // math.prod(tensor.shape)


def needed_bytes(path: Path, model: HuggingFaceModel, chunks: Sequence[TensorChunk]) -> int:
    """Return the bytes of the header, the chunks' elements and the scales of their blocks."""
    (file,) = path.glob("*.safetensors")
    with SafetensorsFile(file) as opened:
        infos = dict(opened.tensors)
    names = [name.removesuffix("_blocks") for name in infos]
    mapped = tensor_map(model.kind, model.config, names=names)
    total = min(tensor.begin for tensor in infos.values())
    for chunk in chunks:
        for tensor_slice in mapped.mcore_tensors[chunk.name].slices:
            if (common := tensor_slice.common(chunk.box)) is not None:
                hf_tensor = mapped.hf_tensors[tensor_slice.hf_name]
                box, layout = tensor_slice.hf_box(common), hf_tensor.layout
                if layout is not None:
                    is_packed = f"{hf_tensor.name}_blocks" in infos
                    layout = layout._replace(transposed=layout.transposed and not is_packed)
                    box = layout.stored_box(box, hf_tensor.shape)
                total += stored_bytes(infos, hf_tensor.name, box)
    return total


def read_slices(rank: int, world: int, path: Path) -> dict[str, Any]:
    """Read the slices of one of four ranks from a quantized folder."""
    model, chunks, count = read_by_a_rank(rank, path, RankGrid(world_size=world, tp=2, ep=2))
    with torch.no_grad():
        return {
            "bytes": count,
            "needed": needed_bytes(path, read_folder(open_folder(path)), chunks),
            "elements": sum(chunk.tensor.numel() for chunk in chunks),
            "logits": model.full_logits(TOKENS),
        }


@pytest.mark.parametrize(
    "make", [fp8_folders, mxfp4_folders, gpt_oss_folders], ids=["fp8", "mxfp4", "gpt_oss"]
)
def test_ranks_read_only_their_blocks_and_match_transformers(
    make: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, values = make(tmp_path)
    ranks = run_ranks(read_slices, 4, folder)
    with one_thread(), torch.no_grad():
        expected = load_folder(values)(TOKENS, use_cache=False).logits.transpose(0, 1)
    num_elements = sum(math.prod(tensor.shape) for tensor in tensors(values).values())
    for rank in ranks:
        assert_close_by_metric("logits", rank["logits"], expected)
        assert rank["bytes"] == rank["needed"]
        assert rank["elements"] < 0.6 * num_elements
    exact = checkpoint_weights(imported(values, tmp_path / "a"))
    convert("import", "--hf", folder, "--save", tmp_path / "b", "--dtype", "float32")
    read = checkpoint_weights(tmp_path / "b" / "iter_0000000")
    assert_all_equal(read, exact)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (fp8_folders, "FP8 matrices with a scale for each block of 7 x 5"),
        (mxfp4_folders, "MXFP4 tensors with a scale for each 32 elements"),
        (gpt_oss_folders, "MXFP4 tensors with a scale for each 32 elements"),
    ],
    ids=["fp8", "mxfp4", "gpt_oss"],
)
def test_export_writes_bf16_and_drops_quantization_config(make, words, tmp_path) -> None:
    folder, values = make(tmp_path)
    change_json(folder / "config.json", dtype="bfloat16")
    printed = convert("import", "--hf", folder, "--save", tmp_path / "a", "--dtype", "bfloat16")
    assert words in printed
    out = tmp_path / "out"
    printed = convert("export", "--load", tmp_path / "a", "--save", out, "--verify")
    assert re.search(r"quantization_config: weights are written in bfloat16", printed)
    fields = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in fields
    assert fields["dtype"] == "bfloat16"
    exact = checkpoint_weights(imported(values, tmp_path / "b"))
    convert("import", "--hf", out, "--save", tmp_path / "c", "--dtype", "float32")
    reimported = checkpoint_weights(tmp_path / "c" / "iter_0000000")
    assert exact.keys() == reimported.keys()
    for name, tensor in exact.items():
        rounded = tensor if name.endswith("expert_bias") else tensor.bfloat16().float()
        assert torch.equal(reimported[name], rounded), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a DeepSeek-V3 folder in FP8."""
    return fp8_folders(tmp_path)[0]


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (FP8, "quant_method", "bitsandbytes"),
        (FP8, "quant_method", ["fp8"]),
        (FP8, "fmt", "e5m2"),
        (FP8, "weight_block_size", [128]),
        (FP8, "weight_block_size", [0, 128]),
        (FP8, "zero_point", True),
        (FP8, "modules_to_not_convert", "lm_head"),
        (MXFP4, "modules_to_not_convert", [7]),
        (MXFP4, "weight_block_size", [128, 128]),
    ],
)
def test_unsupported_quantization_is_refused_by_field(folder, config, field, value) -> None:
    change_json(folder / "config.json", quantization_config={**config, field: value})
    with pytest.raises(ValueError, match=rf"quantization_config\.{field}"):
        read_folder(open_folder(folder))


def import_error(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """Change the tensors of a folder and return the error line of the import."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    error = convert("import", "--hf", folder, "--save", folder.parent / "a", code=2)
    assert error.count("\n") == 1
    return error


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), f"{NAME}_scale_inv is missing"),
        (lambda t: t.update({NAME: t[NAME].float()}), "has no FP8 tensor"),
        (lambda t: t.update({f"{NAME}_scale_inv": torch.ones(2, 2)}), "is [2, 2], blocks of"),
        (lambda t: t.update({NAME: t[NAME][None]}), f"{NAME} is [1, 48, 40]"),
        (lambda t: t[f"{NAME}_scale_inv"].fill_(torch.inf), "not positive and finite"),
        (lambda t: t[f"{NAME}_scale_inv"].fill_(torch.nan), "not positive and finite"),
        (lambda t: t[f"{NAME}_scale_inv"].zero_(), "not positive and finite"),
        (lambda t: t[f"{NAME}_scale_inv"].fill_(3e38), "is not finite"),
        (lambda t: t[NAME].view(torch.uint8)[3].fill_(0x7F), f"{NAME} times"),
        (
            lambda t: t.update({f"{NAME}_scale_inv": t[f"{NAME}_scale_inv"].double()}),
            "has dtype F64",
        ),
    ],
)
def test_mismatched_fp8_scales_are_named(folder, change, words) -> None:
    assert words in import_error(folder, change)


EXPERTS = "model.layers.1.mlp.experts.down_proj"
BLOCKS, SCALES = f"{EXPERTS}_blocks", f"{EXPERTS}_scales"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(SCALES), f"{SCALES} is missing"),
        (lambda t: t.pop(BLOCKS), f"{SCALES} has no {BLOCKS}"),
        (lambda t: t.update({SCALES: t[SCALES][:, 1:].clone()}), f"{SCALES} is [6, 63, 3]"),
        (lambda t: t.update({SCALES: t[SCALES].char()}), f"{SCALES} has dtype I8"),
        (lambda t: t.update({BLOCKS: t[BLOCKS].float()}), f"{BLOCKS} has dtype F32"),
        (lambda t: t.update({BLOCKS: t[BLOCKS][..., 1:].clone()}), f"{BLOCKS} is [6, 64, 3, 15]"),
        (lambda t: t.update({BLOCKS: t[BLOCKS].flatten()}), f"{BLOCKS} is [18432]"),
        (lambda t: t.update({EXPERTS: torch.zeros(6, 64, 96)}), "are the same weight"),
        (
            lambda t: t.update({name: t[name][:, :, 1:].clone() for name in (BLOCKS, SCALES)}),
            f"{EXPERTS} is [6, 64, 64], config.json requires [6, 64, 96]",
        ),
        (lambda t: t[SCALES][2, 3].fill_(255), f"{BLOCKS} times {SCALES} is not finite"),
    ],
)
def test_mismatched_mxfp4_scales_are_named(change, words, tmp_path) -> None:
    assert words in import_error(mxfp4_folders(tmp_path)[0], change)

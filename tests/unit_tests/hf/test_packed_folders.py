# SPDX-License-Identifier: Apache-2.0
"""Folders in AWQ, GPTQ, compressed-tensors, and FP8 with scales of rows and of matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core import RankGrid
from megatron.hf import open_folder, read_folder
from tests.support.closeness import assert_close_by_metric
from tests.support.hf_converter import checkpoint_weights, convert, imported, read_by_a_rank
from tests.support.hf_folders import VOCABULARY, change_json, load_folder
from tests.support.inputs import generator, one_thread
from tests.support.packed_folders import FORMATS, compressed, packed_folders
from tests.support.ranks import run_ranks

TOKENS = torch.randint(VOCABULARY, (2, 19), generator=generator(6))


@pytest.mark.parametrize("name", FORMATS)
def test_import_equals_the_values_of_the_format(name: str, tmp_path: Path) -> None:
    folder, values = packed_folders(tmp_path, name)
    exact = checkpoint_weights(imported(values, tmp_path / "a"))
    printed = convert("import", "--hf", folder, "--save", tmp_path / "b", "--dtype", "float32")
    assert "dequantized" in printed
    read = checkpoint_weights(tmp_path / "b" / "iter_0000000")
    assert exact.keys() == read.keys()
    for weight, tensor in exact.items():
        assert torch.equal(tensor, read[weight]), weight


def logits_of_a_rank(rank: int, world: int, path: Path) -> torch.Tensor:
    """Read the slices of one of two tensor-parallel ranks and return the logits."""
    model, _, _ = read_by_a_rank(rank, path, RankGrid(world_size=world, tp=2))
    with torch.no_grad():
        return model.full_logits(TOKENS)


@pytest.mark.parametrize("name", ["awq", "gptq-order", "int4", "fp8-rows"])
def test_ranks_read_slices_whose_logits_match_transformers(name: str, tmp_path: Path) -> None:
    folder, values = packed_folders(tmp_path, name)
    ranks = run_ranks(logits_of_a_rank, 2, folder)
    with one_thread(), torch.no_grad():
        expected = load_folder(values)(TOKENS, use_cache=False).logits.transpose(0, 1)
    for logits in ranks:
        assert_close_by_metric("logits", logits, expected)


def _int4_config(**weights: object) -> dict[str, object]:
    fields = {"group_size": 16, "symmetric": False, **weights}
    return compressed("pack-quantized", "group", 4, "int", **fields)


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("awq", {"bits": 8}, "bits"),
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("awq", {"group_size": 0}, "group_size"),
        ("awq", {"w_bit": 4}, "w_bit"),
        ("gptq-order", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq-order", {"dynamic": {"-:lm_head": {}}}, "dynamic"),
        ("gptq-order", {"desc_act": "yes"}, "desc_act"),
        ("int4", {"format": "marlin-24"}, "format"),
        ("int4", {"config_groups": {}}, "config_groups"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("int4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("int4", {"config_groups": {"a": {"weights": None}}}, "config_groups.a"),
        ("int4", _int4_config(num_bits=3), "config_groups.group_0.weights.num_bits"),
        ("int4", _int4_config(strategy="tensor"), "config_groups.group_0.weights.num_bits"),
        ("int4", _int4_config(sparsity=2), "config_groups.group_0.weights.sparsity"),
        ("int4", _int4_config(dynamic=True), "config_groups.group_0.weights.dynamic"),
        ("fp8-rows", compressed("float-quantized", "block", 8, "float"),
         "config_groups.group_0.weights.strategy"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused_by_field(name, change, field, tmp_path) -> None:
    config = FORMATS[name][3]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    change_json(tmp_path / "config.json", quantization_config={**config, **change})
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"quantization_config\.{field} is"):
        read_folder(open_folder(tmp_path))


UP = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("awq", lambda t: t.pop(f"{UP}.qzeros"), f"{UP}.qzeros is missing"),
        ("awq", lambda t: t.pop(f"{UP}.qweight"), f"has no {UP}.qweight"),
        ("awq", lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][1:].clone()}),
         f"{UP}.scales is [2, 16], group_size 16 and {UP}.qweight require [3, 16]"),
        ("awq", lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].short()}), "dtype I16"),
        ("awq", lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"][None]}),
         "[1, 48, 2]: expected a matrix"),
        ("awq", lambda t: t.update({f"{UP}.weight": torch.ones(2)}), "are the same weight"),
        ("awq", lambda t: t[f"{UP}.scales"].fill_(torch.inf), "is not finite"),
        ("gptq-order", lambda t: t.pop(f"{UP}.g_idx"), f"{UP}.g_idx is missing"),
        ("gptq-order", lambda t: t[f"{UP}.g_idx"].fill_(3), "has a group outside of 0 to 2"),
        ("gptq-order", lambda t: t[f"{UP}.g_idx"].fill_(-1), "has a group outside of 0 to 2"),
        ("gptq-order", lambda t: t[f"{UP}.bias"].fill_(1), f"{UP}.bias does not belong"),
        ("gptq-symmetric", lambda t: t[f"{UP}.qzeros"].fill_(0), "a zero point other than 8"),
        ("int4", lambda t: t.pop(f"{UP}.weight_zero_point"), "weight_zero_point is missing"),
        ("fp8-rows", lambda t: t.update({f"{UP}.weight_scale": torch.ones(3)}),
         "expected one scale, or one for each of the 20 rows"),
        ("fp8-rows", lambda t: t.pop(f"{UP}.weight_scale"), f"{UP}.weight_scale is missing"),
        ("mxfp4", lambda t: t.update({f"{UP}.weight_packed": torch.zeros(32, 30).byte()}),
         "a multiple of 16 bytes"),
    ],
)  # fmt: skip
def test_mismatched_tensors_are_named_in_one_line(
    name: str, change: Callable[[dict[str, torch.Tensor]], object], words: str, tmp_path: Path
) -> None:
    folder, _ = packed_folders(tmp_path, name)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    error = convert("import", "--hf", folder, "--save", tmp_path / "a", code=2)
    assert error.count("\n") == 1
    assert words in error


def test_wrong_group_size_is_refused(tmp_path: Path) -> None:
    folder, _ = packed_folders(tmp_path, "awq")
    config = {**FORMATS["awq"][3], "group_size": 8}
    change_json(folder / "config.json", quantization_config=config)
    error = convert("import", "--hf", folder, "--save", tmp_path / "a", code=2)
    assert "group_size 8" in error
    assert error.count("\n") == 1

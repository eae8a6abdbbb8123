# SPDX-License-Identifier: Apache-2.0
"""Quantized Hugging Face folders for tests, each with a folder of the same values in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.hf_folders import change_json, make_model, save_folder
from tests.support.inputs import generator

#: Smaller than published blocks, and no divisor of the sizes of these models.
BLOCK = (7, 5)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": list(BLOCK),
    "activation_scheme": "dynamic",
}
#: The configuration of gpt-oss.
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}

_WHOLE = ("norm", "embed_tokens", "lm_head", "mlp.gate.")


def _spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Expand block scales to the factor of each element [o, i]."""
    rows, columns = (
        torch.arange(count).repeat_interleave(size)
        for count, size in zip(scales.shape, BLOCK, strict=True)
    )
    return scales[rows[: shape[0]]][:, columns[: shape[1]]]


def fp8_folders(path: Path, case: str = "deepseek-even", **changes: Any) -> tuple[Path, Path]:
    """Write a model with FP8 matrices and random scales, and the same values in fp32."""
    folder = save_folder(make_model(case, **changes), path / "fp8")
    (file,) = folder.glob("*.safetensors")
    stored, values = {}, {}
    for number, (name, weight) in enumerate(sorted(load_file(file).items())):
        stored[name] = values[name] = weight
        if weight.ndim != 2 or any(pattern in name for pattern in _WHOLE):
            continue
        blocks = [-(-n // b) for n, b in zip(weight.shape, BLOCK, strict=True)]
        scales = 0.5 + torch.rand(blocks, generator=generator(number))
        factors = _spread(scales, weight.shape)
        stored[name] = (weight / factors).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        values[name] = stored[name].float() * factors
    return write_folder_pair(folder, path / "fp32", stored, values, FP8)


def mxfp4_folders(path: Path) -> tuple[Path, Path]:
    """Write a model with experts and queries in MXFP4, and its values by transformers in fp32."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    model = make_model("qwen3moe-yarn", hidden_size=64, moe_intermediate_size=96)
    folder = save_folder(model, path / "mxfp4", save_original_format=False)
    (file,) = folder.glob("*.safetensors")
    stored, values = {}, {}
    for number, (name, weight) in enumerate(sorted(load_file(file).items())):
        stored[name] = values[name] = weight
        if ".experts." not in name and "q_proj" not in name:
            continue
        random = generator(number)
        groups = (*weight.shape[:-1], weight.shape[-1] // 32)
        blocks = torch.randint(256, (*groups, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(121, 125, groups, generator=random, dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        three = (t.view(-1, *t.shape[weight.ndim - 2 :]) for t in (blocks, scales))  # [E, r, ...]
        dequantized = mxfp4.convert_moe_packed_tensors(*three, dtype=torch.float32)  # [E, c, r]
        values[name] = dequantized.transpose(1, 2).reshape(weight.shape).contiguous()
    return write_folder_pair(folder, path / "fp32", stored, values, MXFP4)


def gpt_oss_folders(path: Path) -> tuple[Path, Path]:
    """Write gpt-oss with experts in random MXFP4, and its values by transformers in fp32."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    folder = save_folder(make_model("gpt_oss", hidden_size=64, intermediate_size=96), path / "oss")
    (file,) = folder.glob("*.safetensors")
    stored, values = {}, {}
    for number, (name, weight) in enumerate(sorted(load_file(file).items())):
        stored[name] = values[name] = weight
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = weight.shape
        groups, random = (experts, outputs, inputs // 32), generator(number)
        blocks = torch.randint(256, (*groups, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(121, 125, groups, generator=random, dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        values[name] = values[name].contiguous()
        assert values[name].shape == weight.shape
    return write_folder_pair(folder, path / "fp32", stored, values, MXFP4)


def write_folder_pair(
    folder: Path,
    dequantized: Path,
    stored: dict[str, torch.Tensor],
    values: dict[str, torch.Tensor],
    config: dict[str, Any],
) -> tuple[Path, Path]:
    """Replace the tensors of a folder by quantized ones, and write their values to another one."""
    (file,) = folder.glob("*.safetensors")
    dequantized.mkdir()
    (dequantized / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(values, dequantized / file.name, metadata={"format": "pt"})
    save_file(stored, file, metadata={"format": "pt"})
    change_json(folder / "config.json", quantization_config=config)
    return folder, dequantized

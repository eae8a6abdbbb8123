# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders in published 4- and 8-bit formats, each with the same values in fp32.

Integers, zero points and scales are random. The values follow from the equations of the formats,
and the packing is written bit by bit, apart from the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.hf_folders import make_model, save_folder
from tests.support.inputs import generator
from tests.support.quantized_folders import write_folder_pair

#: Not a divisor of every number of input channels.
GROUP_SIZE = 16
#: Sizes that are multiples of the eight integers of an int32.
SIZES = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6, "head_dim": 8}

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "damp_percent": 0.01}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "zero_point": True}

Stored = Mapping[str, torch.Tensor]
#: Returns the stored tensors by suffix, and the values, of a weight [o, i] of a given shape.
Writer = Callable[[tuple[int, int], torch.Generator], tuple[Stored, torch.Tensor]]


def packed(integers: torch.Tensor, dim: int, nibble_of: tuple[int, ...]) -> torch.Tensor:
    """Pack 4-bit integers along a dimension: the j-th of eight goes to `nibble_of[j]`."""
    rows = np.moveaxis(integers.numpy().astype(np.uint32), dim, -1)
    if remainder := -rows.shape[-1] % 8:
        rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], remainder), np.uint32)], -1)
    words = np.zeros((*rows.shape[:-1], rows.shape[-1] // 8), np.uint32)
    for word in range(words.shape[-1]):
        for j in range(8):
            words[..., word] |= rows[..., 8 * word + j] << np.uint32(4 * nibble_of[j])
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, dim)).view(np.int32))


STRAIGHT, AWQ_NIBBLES = tuple(range(8)), (0, 4, 1, 5, 2, 6, 3, 7)


def _int4(
    shape: tuple[int, int], random: torch.Generator, groups: torch.Tensor, *, low: int = 1
) -> tuple[torch.Tensor, ...]:
    """Return integers [o, i], zero points and scales [o, groups], and values [o, i]."""
    count = int(groups.max()) + 1
    integers = torch.randint(16, shape, generator=random)
    zeros = torch.randint(low, 16, (shape[0], count), generator=random)
    scales = (0.01 + 0.09 * torch.rand(shape[0], count, generator=random)).half()
    values = (integers - zeros[:, groups]).float() * scales.float()[:, groups]
    return integers, zeros, scales, values


def awq(shape: tuple[int, int], random: torch.Generator) -> tuple[Stored, torch.Tensor]:
    """Write AWQ's layout "gemm"."""
    groups = torch.arange(shape[1]) // GROUP_SIZE
    integers, zeros, scales, values = _int4(shape, random, groups, low=0)
    return {
        ".qweight": packed(integers.T, 1, AWQ_NIBBLES),
        ".qzeros": packed(zeros.T, 1, AWQ_NIBBLES),
        ".scales": scales.T.contiguous(),
    }, values


def gptq(
    shape: tuple[int, int],
    random: torch.Generator,
    *,
    act_order: bool = True,
    symmetric_zero: int | None = None,
    offset: int = 1,
) -> tuple[Stored, torch.Tensor]:
    """Write GPTQ: reordered channels unless `act_order` is false, zero points minus `offset`."""
    groups = torch.arange(shape[1]) // GROUP_SIZE
    if act_order:
        groups = groups[torch.randperm(shape[1], generator=random)]
    integers, zeros, scales, values = _int4(shape, random, groups)
    if symmetric_zero is not None:
        zeros = torch.full_like(zeros, symmetric_zero)
        values = (integers - 8).float() * scales.float()[:, groups]
    return {
        ".qweight": packed(integers.T, 0, STRAIGHT),
        ".qzeros": packed(zeros.T - offset, 1, STRAIGHT),
        ".scales": scales.T.contiguous(),
        ".g_idx": groups.to(torch.int32),
        ".bias": torch.zeros(shape[0], dtype=torch.float16),
    }, values


def compressed_int4(shape: tuple[int, int], random: torch.Generator) -> tuple[Stored, torch.Tensor]:
    """Write asymmetric "pack-quantized" of compressed-tensors."""
    groups = torch.arange(shape[1]) // GROUP_SIZE
    integers, zeros, scales, _ = _int4(shape, random, groups)
    return {
        ".weight_packed": packed(integers, 1, STRAIGHT),
        ".weight_scale": scales.bfloat16(),
        ".weight_zero_point": packed(zeros, 0, STRAIGHT),
        ".weight_shape": torch.tensor(shape),
    }, (integers - zeros[:, groups]).float() * scales.bfloat16().float()[:, groups]


def eight_bits(
    shape: tuple[int, int],
    random: torch.Generator,
    *,
    scale_shape: str = "rows",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Stored, torch.Tensor]:
    """Write matrices of 8 bits with scales of rows or of the whole matrix."""
    sizes = {"rows": (shape[0], 1), "flat rows": (shape[0],), "matrix": (), "one": (1,)}
    scales = 0.5 + torch.rand(sizes[scale_shape], generator=random)
    if dtype == torch.int8:
        scales = (scales / 100).bfloat16()
        weight = torch.randint(-128, 128, shape, generator=random).to(dtype)
    else:
        weight = (0.3 * torch.randn(shape, generator=random)).to(dtype)
    factors = scales.float() if scales.numel() == 1 else scales.float().view(-1, 1)
    extra = {} if "rows" in scale_shape else {".input_scale": torch.ones(())}
    return {".weight": weight, ".weight_scale": scales, **extra}, weight.float() * factors


def compressed_mxfp4(
    shape: tuple[int, int], random: torch.Generator
) -> tuple[Stored, torch.Tensor]:
    """Write "mxfp4-pack-quantized": two E2M1 codes in a byte, the first in its lower half."""
    codes = torch.randint(16, shape, generator=random)
    exponents = torch.randint(122, 126, (shape[0], shape[1] // 32), generator=random)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signs = 1 - 2 * (codes // 8).float()
    factors = 2.0 ** (exponents - 127).float().repeat_interleave(32, dim=1)
    return {
        ".weight_packed": (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8),
        ".weight_scale": exponents.to(torch.uint8),
    }, signs * magnitudes[codes % 8] * factors


def compressed(form: str, strategy: str, bits: int, kind: str, /, **weights: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    described = {"num_bits": bits, "type": kind, "strategy": strategy, **weights}
    group = {"targets": ["Linear"], "input_activations": None, "weights": described}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "version": "0.9.0",
    }


#: name: (case of `hf_folders`, changes of its sizes, writer, quantization_config)
FORMATS: Mapping[str, tuple[str, dict[str, Any], Writer, dict[str, Any]]] = {
    "awq": ("qwen2-3to1-linear", SIZES, awq, {**_AWQ, "version": "gemm", "backend": "autoawq"}),
    "gptq-order": ("qwen3moe-yarn", {**SIZES, "moe_intermediate_size": 24}, gptq,
                   {**_GPTQ, "desc_act": True, "sym": False}),
    "gptq-v2": ("llama-3to1", SIZES, lambda *a: gptq(*a, act_order=False, offset=0),
                {**_GPTQ, "desc_act": False, "checkpoint_format": "gptq_v2"}),
    "gptq-symmetric": ("llama-3to1", SIZES, lambda *a: gptq(*a, symmetric_zero=8),
                       {**_GPTQ, "desc_act": True, "sym": True, "meta": {"quantizer": "x"}}),
    # As GPTQModel 5 writes it: the zero points of the second version, labelled as the first.
    "gptq-mislabelled": ("llama-3to1", SIZES, lambda *a: gptq(*a, symmetric_zero=9),
                         {**_GPTQ, "desc_act": True, "sym": True}),
    "int4": ("qwen3-biases", SIZES, compressed_int4,
             compressed("pack-quantized", "group", 4, "int", symmetric=False, group_size=16,
                        actorder="weight")),
    "fp8-rows": ("llama-3to1", {}, eight_bits,
                 compressed("float-quantized", "channel", 8, "float", dynamic=False)),
    "fp8-matrix": ("llama-3to1", {}, lambda *a: eight_bits(*a, scale_shape="matrix"),
                   compressed("naive-quantized", "tensor", 8, "float", symmetric=True)),
    "fp8-auto": ("mistral", {}, lambda *a: eight_bits(*a, scale_shape="one"),
                 {"quant_method": "fp8", "activation_scheme": "static"}),
    "int8": ("llama-3to1", {}, lambda *a: eight_bits(*a, scale_shape="flat rows",
                                                      dtype=torch.int8),
             compressed("int-quantized", "channel", 8, "int")),
    "mxfp4": ("llama-3to1", {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16},
              compressed_mxfp4,
              compressed("mxfp4-pack-quantized", "group", 4, "float", group_size=32)),
}  # fmt: skip


def packed_folders(path: Path, name: str) -> tuple[Path, Path]:
    """Write a model in a format of `FORMATS`, and the same values in fp32."""
    case, sizes, write, config = FORMATS[name]
    folder = save_folder(make_model(case, **sizes), path / name)
    (file,) = folder.glob("*.safetensors")
    stored, values = {}, {}
    for number, (tensor_name, weight) in enumerate(sorted(load_file(file).items())):
        stored[tensor_name] = values[tensor_name] = weight
        if weight.ndim != 2 or "_proj" not in tensor_name:
            continue
        del stored[tensor_name]
        base = tensor_name.removesuffix(".weight")
        tensors, dequantized = write(tuple(weight.shape), generator(number))
        values[tensor_name] = dequantized
        stored |= {base + suffix: t for suffix, t in tensors.items() if base + suffix not in stored}
    return write_folder_pair(folder, path / f"{name}-fp32", stored, values, config)

# SPDX-License-Identifier: Apache-2.0
"""Weights in FP8 with a scale for each block, dequantised slice by slice while they are read.

DeepSeek-V3 and Kimi-K2 are published so (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3): a matrix
W [o, i] is E4M3, and `W_scale_inv` [ceil(o / b0), ceil(i / b1)] holds a factor for each block of
b0 x b1 elements,

    w[r, c] = W[r, c] · W_scale_inv[r // b0, c // b1]

in fp32, rounded to the dtype of the target. A rank reads the elements that it stores and the scales
of the blocks that these lie in. Tensors of other dtypes are as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.hf.fields import Fields
from megatron.hf.safetensors_file import FoundTensor, SafetensorsFile

#: What the name of a matrix's scales ends with.
SUFFIX = "_scale_inv"

_FP8 = "F8_E4M3"

#: Fields of quantization_config that change no weight: how activations are quantised, and which
#: modules are not, as their tensors show.
_NEUTRAL = ("activation_scheme", "modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True)
class BlockFP8:
    """FP8 with a factor for each block.

    Args:
        block: rows and columns of a block.
    """

    block: tuple[int, int]

    @staticmethod
    def of(config: Mapping[str, Any], *, where: str) -> BlockFP8 | None:
        """Return how the weights of a config.json are quantised; None if they are not.

        Args:
            where: its path, for errors.

        Raises:
            ValueError: in a way that is not supported; names the field.
        """
        found = config.get("quantization_config")
        if found is None:
            return None
        if not isinstance(found, dict):
            Fields(config, where).refuse("quantization_config", "expected an object")
        fields = Fields(found, where, prefix="quantization_config.")
        if found.get("quant_method") != "fp8":
            fields.refuse("quant_method", "supported is 'fp8' with weight_block_size")
        fields.must_be("fmt", "e4m3")
        fields.must_be("scale_fmt", "ue8m0", "float")
        block = found.get("weight_block_size")
        if not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and 0 < size < 1 << 31 for size in block)
        ):
            fields.refuse("weight_block_size", "expected rows and columns of a block, [128, 128]")
        known = ("quant_method", "fmt", "scale_fmt", "weight_block_size", *_NEUTRAL)
        for name in found:
            if name not in known:
                fields.refuse(name, "what it means for the weights is not known")
        return BlockFP8((block[0], block[1]))

    def problems(self, files: Mapping[str, SafetensorsFile]) -> list[str]:
        """List FP8 tensors that lack their scales, and scales that do not fit."""
        found = []
        for name, file in files.items():
            tensor = file.tensors[name]
            if tensor.dtype == _FP8 and name + SUFFIX not in files:
                found.append(f"{name} is FP8 and {name}{SUFFIX} is missing")
            base = name.removesuffix(SUFFIX)
            if base == name:
                continue
            if base not in files or files[base].tensors[base].dtype != _FP8:
                found.append(f"{name} has no FP8 tensor that it scales")
                continue
            shape = files[base].tensors[base].shape
            wanted = tuple(-(-n // b) for n, b in zip(shape, self.block, strict=False))
            if len(shape) != 2 or tensor.shape != wanted:
                found.append(
                    f"{name} is {list(tensor.shape)}, blocks of {list(self.block)} make it "
                    f"{list(wanted)}"
                )
            elif tensor.dtype not in ("F32", "BF16"):
                found.append(f"{name} has dtype {tensor.dtype}: supported are F32, BF16")
        return found

    def read_box(
        self,
        name: str,
        box: Box,
        target: torch.Tensor,
        *,
        files: Mapping[str, SafetensorsFile],
    ) -> None:
        """Read the elements of a box of an FP8 matrix, dequantised, into `target`.

        Args:
            files: of all tensors, by name.
            target: [*box.sizes], converted to its dtype.

        Raises:
            ValueError: a scale is not a positive finite number, or a file cannot be read.
        """
        scales = name + SUFFIX
        for band in row_boxes(box.sizes, torch.float32.itemsize):
            if not band.numel:
                continue
            first = tuple(a + b for a, b in zip(box.offsets, band.offsets, strict=True))
            low = tuple(at // b for at, b in zip(first, self.block, strict=True))
            high = tuple(
                -(-(at + n) // b) for at, n, b in zip(first, band.sizes, self.block, strict=True)
            )
            factors = torch.empty([b - a for a, b in zip(low, high, strict=True)])
            blocks = Box(low, tuple(factors.shape))
            files[scales].read_box(scales, blocks, factors)
            if not bool(((factors > 0) & factors.isfinite()).all()):
                raise ValueError(
                    f"{files[scales].path}: {scales} has a factor that is not positive and finite"
                )
            stored = torch.empty(band.sizes, dtype=torch.float8_e4m3fn)
            files[name].read_box(name, Box(first, band.sizes), stored)
            values = stored.float()  # [r, c]
            for dim in (0, 1):
                at = torch.arange(first[dim], first[dim] + band.sizes[dim]) // self.block[dim]
                factors = factors.index_select(dim, at - low[dim])
            target[band.slices].copy_(values.mul_(factors))

    @staticmethod
    def seen(found: FoundTensor) -> FoundTensor:
        """Return what a tensor is once it is dequantised: bf16 if it is FP8."""
        return found._replace(dtype="BF16") if found.dtype == _FP8 else found

# SPDX-License-Identifier: Apache-2.0
"""Dequantize the quantized weights of a Hugging Face folder slice by slice while they are read.

A `Quantization` finds the tensors that contain the values and the scales of a weight, and computes
any box of the weight in fp32; callers see plain tensors. A rank reads only the elements of its
shard and the scales of their blocks. Tensors that are not quantized, such as the modules in
`modules_to_not_convert`, are read without change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing.safetensors_file import SafetensorsFile, TensorInfo
from megatron.hf.fields import Fields

_FP8 = "F8_E4M3"

#: Elements of MXFP4 that share a scale, and their size in bytes.
GROUP, GROUP_BYTES = 32, 16

#: Values of the non-negative E2M1 codes; the other eight codes are their negatives.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: Exponent bias of E8M0: a code c stands for 2^(c - 127).
_E8M0_BIAS = 127


class QuantizedTensor(NamedTuple):
    """A weight that is stored as two tensors.

    Args:
        values, scales: names of the two tensors.
        dequantized: dtype and shape of the dequantized weight.
    """

    values: str
    scales: str
    dequantized: TensorInfo


class Quantization(ABC):
    """A quantization format of a folder's weights.

    Attributes:
        scales: suffix of the names of scale tensors.
    """

    scales: ClassVar[str]

    @property
    @abstractmethod
    def form(self) -> str:
        """Short description of the quantization, for the log."""

    @abstractmethod
    def find(
        self, tensors: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, QuantizedTensor], list[str]]:
        """Return the quantized weights among the tensors of the files, and a list of problems.

        Returns:
            The weights by their names after dequantization, and one message per invalid tensor:
            values without scales, scales without values, wrong shapes and dtypes.
        """

    @abstractmethod
    def dequantize(
        self, tensor: QuantizedTensor, box: Box, files: Mapping[str, SafetensorsFile]
    ) -> torch.Tensor:
        """Return a box of a weight [*box.sizes] in fp32."""

    def read_box(
        self,
        tensor: QuantizedTensor,
        box: Box,
        target: torch.Tensor,
        *,
        files: Mapping[str, SafetensorsFile],
    ) -> None:
        """Read a box of a weight, dequantized, into `target`.

        Args:
            tensor: the weight.
            box: the elements to read.
            target: [*box.sizes]; values are converted to its dtype.
            files: the file of each tensor, by the tensor's name.

        Raises:
            ValueError: a scale is not positive and finite, a value is not finite, or a file cannot
                be read.
        """
        for band in row_boxes(box.sizes, torch.float32.itemsize):
            if not band.numel:
                continue
            offsets = tuple(a + b for a, b in zip(box.offsets, band.offsets, strict=True))
            values = self.dequantize(tensor, Box(offsets, band.sizes), files)
            if not bool(values.isfinite().all()):
                raise ValueError(
                    f"{files[tensor.values].path}: {tensor.values} times {tensor.scales} is not "
                    "finite"
                )
            target[band.slices].copy_(values)

    def line(self, names: Iterable[str]) -> str:
        """Return a log line about a folder that contains tensors with the given names."""
        count = sum(name.endswith(self.scales) for name in names)
        return (
            f"dequantized {count} {self.form}; they are trained, saved and exported in the dtype "
            "of the model"
        )


@dataclass(frozen=True)
class BlockFP8(Quantization):
    """FP8 matrices with one scale per block, the format of DeepSeek-V3 and Kimi-K2.

    A matrix W [o, i] is stored in E4M3, and `*_scale_inv` [ceil(o / b0), ceil(i / b1)] contains one
    scale per block of b0 x b1 elements (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3):

        w[r, c] = W[r, c] · scale_inv[r // b0, c // b1]

    Args:
        block: number of rows and of columns of a block.
    """

    block: tuple[int, int]
    scales: ClassVar[str] = "_scale_inv"

    @classmethod
    def of(cls, fields: Fields) -> BlockFP8:
        """Parse a quantization_config of "fp8". Raises ValueError, naming the field."""
        fields.must_be("fmt", "e4m3")
        fields.must_be("scale_fmt", "ue8m0", "float")
        block = fields.raw.get("weight_block_size")
        if not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and 0 < size < 1 << 31 for size in block)
        ):
            fields.refuse("weight_block_size", "expected rows and columns of a block, [128, 128]")
        # The quantization of activations does not change the weights.
        _check_known(fields, "fmt", "scale_fmt", "weight_block_size", "activation_scheme")
        return cls((block[0], block[1]))

    @property
    def form(self) -> str:
        """Short description of the quantization, for the log."""
        return f"FP8 matrices with a scale for each block of {self.block[0]} x {self.block[1]}"

    def find(
        self, tensors: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, QuantizedTensor], list[str]]:
        """Return the FP8 matrices and a list of problems with their scales."""
        weights: dict[str, QuantizedTensor] = {}
        problems = []
        for name, tensor in tensors.items():
            base = name.removesuffix(self.scales)
            if base != name and (base not in tensors or tensors[base].dtype != _FP8):
                problems.append(f"{name} has no FP8 tensor to scale")
            if tensor.dtype != _FP8:
                continue
            scales = tensors.get(name + self.scales)
            if scales is None:
                problems.append(f"{name} is FP8 and {name}{self.scales} is missing")
                continue
            problems += self._misfits(name, tensor, scales)
            weights[name] = QuantizedTensor(
                name, name + self.scales, _dequantized_info(tensor, tensor.shape)
            )
        return weights, problems

    def _misfits(self, name: str, tensor: TensorInfo, scales: TensorInfo) -> list[str]:
        expected_shape = tuple(-(-n // b) for n, b in zip(tensor.shape, self.block, strict=False))
        if len(tensor.shape) != 2:
            return [f"{name} is {list(tensor.shape)}: blocks of two dimensions need a matrix"]
        if scales.shape != expected_shape:
            return [
                f"{name}{self.scales} is {list(scales.shape)}, blocks of {list(self.block)} "
                "require "
                f"{list(expected_shape)}"
            ]
        if scales.dtype not in ("F32", "BF16"):
            return [f"{name}{self.scales} has dtype {scales.dtype}: supported are F32, BF16"]
        return []

    def dequantize(
        self, tensor: QuantizedTensor, box: Box, files: Mapping[str, SafetensorsFile]
    ) -> torch.Tensor:
        """Return a box of a matrix in fp32. Raises ValueError for a scale that is not positive."""
        low = tuple(offset // b for offset, b in zip(box.offsets, self.block, strict=True))
        high = tuple(
            -(-(offset + n) // b)
            for offset, n, b in zip(box.offsets, box.sizes, self.block, strict=True)
        )
        factors = torch.empty([b - a for a, b in zip(low, high, strict=True)])
        files[tensor.scales].read_box(tensor.scales, Box(low, tuple(factors.shape)), factors)
        if not bool(((factors > 0) & factors.isfinite()).all()):
            raise ValueError(
                f"{files[tensor.scales].path}: {tensor.scales} has a factor that is not positive "
                "and finite"
            )
        stored = torch.empty(box.sizes, dtype=torch.float8_e4m3fn)
        files[tensor.values].read_box(tensor.values, box, stored)
        for dim in (0, 1):
            index = torch.arange(box.offsets[dim], box.offsets[dim] + box.sizes[dim])
            factors = factors.index_select(dim, index // self.block[dim] - low[dim])
        return stored.float().mul_(factors)  # [r, c]


@dataclass(frozen=True)
class MXFP4(Quantization):
    """MXFP4 tensors, the format of gpt-oss's experts (OCP Microscaling Formats v1.0, section 5).

    A tensor W [..., r, c] is stored as bytes: `*_blocks` [..., r, c / 32, 16] and `*_scales`
    [..., r, c / 32]. A byte of blocks contains two E2M1 elements, the first in its lower half. A
    scale is a power of two in E8M0, shared by 32 elements:

        w[..., 32 g + k] = E2M1[code k of blocks[..., g, :]] · 2^(scales[..., g] - 127)
    """

    values: ClassVar[str] = "_blocks"
    scales: ClassVar[str] = "_scales"

    @classmethod
    def of(cls, fields: Fields) -> MXFP4:
        """Parse a quantization_config of "mxfp4". Raises ValueError, naming the field."""
        _check_known(fields, "dequantize")  # `dequantize` only tells transformers what to do
        return cls()

    @property
    def form(self) -> str:
        """Short description of the quantization, for the log."""
        return f"MXFP4 tensors with a scale for each {GROUP} elements of a row"

    def find(
        self, tensors: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, QuantizedTensor], list[str]]:
        """Return the MXFP4 tensors and a list of problems with their scales."""
        weights: dict[str, QuantizedTensor] = {}
        problems = []
        for name, tensor in tensors.items():
            base = name.removesuffix(self.scales)
            if base != name and base + self.values not in tensors:
                problems.append(f"{name} has no {base}{self.values} to scale")
            base = name.removesuffix(self.values)
            if base == name:
                continue
            scales = tensors.get(base + self.scales)
            if scales is None:
                problems.append(f"{name} is MXFP4 and {base}{self.scales} is missing")
                continue
            if base in tensors:
                problems.append(f"{base} and {name} are the same weight: remove one of them")
            problems += self._misfits(base, tensor, scales)
            shape = (*tensor.shape[:-2], GROUP * tensor.shape[-2]) if tensor.shape[1:] else ()
            weights[base] = QuantizedTensor(
                name, base + self.scales, _dequantized_info(tensor, shape)
            )
        return weights, problems

    def _misfits(self, base: str, tensor: TensorInfo, scales: TensorInfo) -> list[str]:
        if len(tensor.shape) < 2 or tensor.shape[-1] != GROUP_BYTES:
            return [
                f"{base}{self.values} is {list(tensor.shape)}: the last size must be "
                f"{GROUP_BYTES} bytes of {GROUP} elements"
            ]
        problems = [
            f"{base}{suffix} has dtype {tensor_info.dtype}: supported is U8"
            for suffix, tensor_info in ((self.values, tensor), (self.scales, scales))
            if tensor_info.dtype != "U8"
        ]
        if scales.shape != tensor.shape[:-1]:
            problems.append(
                f"{base}{self.scales} is {list(scales.shape)}, {base}{self.values} requires "
                f"{list(tensor.shape[:-1])}"
            )
        return problems

    def dequantize(
        self, tensor: QuantizedTensor, box: Box, files: Mapping[str, SafetensorsFile]
    ) -> torch.Tensor:
        """Return a box of a tensor in fp32, from the groups of 32 elements that contain it."""
        begin, size = box.offsets[-1], box.sizes[-1]
        first_group, end_group = begin // GROUP, -(-(begin + size) // GROUP)
        groups = Box((*box.offsets[:-1], first_group), (*box.sizes[:-1], end_group - first_group))
        stored = torch.empty((*groups.sizes, GROUP_BYTES), dtype=torch.uint8)
        byte_box = Box((*groups.offsets, 0), tuple(stored.shape))
        files[tensor.values].read_box(tensor.values, byte_box, stored)
        scales = torch.empty(groups.sizes, dtype=torch.uint8)
        files[tensor.scales].read_box(tensor.scales, groups, scales)
        code_values = torch.tensor((*_E2M1, *(-value for value in _E2M1)))  # [16]
        all_bytes = torch.arange(256)
        # One lookup per byte: its two fp32 elements are gathered as one 64-bit integer.
        table = torch.stack(
            (code_values[all_bytes & 15], code_values[all_bytes >> 4]), dim=-1
        ).view(torch.int64)
        values = table.view(-1).index_select(0, stored.view(-1).int()).view(torch.float32)
        values = values.view(*groups.sizes, GROUP)
        values = torch.ldexp(values, scales.int()[..., None] - _E8M0_BIAS).flatten(-2)
        return values.narrow(-1, begin - GROUP * first_group, size)


_METHODS = {"fp8": BlockFP8.of, "mxfp4": MXFP4.of}


def quantization_of(config: Mapping[str, Any], *, where: str) -> Quantization | None:
    """Return the quantization of a config.json; None without a quantization_config.

    Args:
        config: the fields of config.json.
        where: its path, for errors.

    Raises:
        ValueError: the quantization is not supported; the message names the field.
    """
    quantization_config = config.get("quantization_config")
    if quantization_config is None:
        return None
    if not isinstance(quantization_config, dict):
        Fields(config, where).refuse("quantization_config", "expected an object")
    fields = Fields(quantization_config, where, prefix="quantization_config.")
    method = quantization_config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        fields.refuse(
            "quant_method",
            "supported are 'fp8' with weight_block_size and 'mxfp4': save the model dequantized, "
            "without quantization_config",
        )
    return _METHODS[method](fields)


def _check_known(fields: Fields, *names: str) -> None:
    """Reject unknown fields, which could change the weights, and malformed lists of modules."""
    modules = ("modules_to_not_convert", "ignored_layers")
    for name in modules:
        listed = fields.raw.get(name) or []
        if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
            fields.refuse(name, "expected names of modules")
    for name in fields.raw:
        if name not in ("quant_method", *modules, *names):
            fields.refuse(name, "it is unknown and could change the weights")


def _dequantized_info(stored: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    """Return the TensorInfo of a dequantized tensor; its byte range is the range of the values."""
    return stored._replace(dtype="BF16", shape=shape)

# SPDX-License-Identifier: Apache-2.0
"""Dequantize the quantized weights of a Hugging Face folder slice by slice while they are read.

A `Quantization` finds the tensors that contain the values and the scales of a weight, and computes
any box of the weight in fp32; callers see plain tensors. A rank reads only the elements of its
shard and the scales of their blocks. Tensors that are not quantized, such as the modules in
`modules_to_not_convert`, are read without change.

This module has the formats with 8 bits per element, and MXFP4.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing.safetensors_file import DTYPES, TensorInfo

FP8, INT8 = "F8_E4M3", "I8"

#: Dtypes of scales in the files.
SCALE_DTYPES = ("F32", "BF16", "F16")

#: Elements of MXFP4 that share a scale, and their size in bytes.
GROUP, GROUP_BYTES = 32, 16

#: Values of the non-negative E2M1 codes; the other eight codes are their negatives.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: Exponent bias of E8M0: a code c stands for 2^(c - 127).
_E8M0_BIAS = 127


class TensorFile(Protocol):
    """An open file of tensors.

    Attributes:
        path: path of the file.
        tensors: dtype and shape of each tensor.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, header included."""
        ...

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read only the elements of a box of a tensor into `target` [*box.sizes]."""


class QuantizedTensor(NamedTuple):
    """A weight that is stored as several tensors.

    Args:
        values, scales: names of the tensors of quantized values and of their scales.
        dequantized: dtype and shape of the dequantized weight.
        zero_points: name of the tensor of zero points; None for a symmetric format.
        group_index: name of the tensor with the quantization group of each input channel; None if
            groups are consecutive channels.
    """

    values: str
    scales: str
    dequantized: TensorInfo
    zero_points: str | None = None
    group_index: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return tuple(name for name in (self.values, self.scales, *self[3:]) if name is not None)


#: Suffixes of tensors that quantize activations and caches; they do not change the weights.
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")


class Quantization(ABC):
    """A quantization format of a folder's weights."""

    @property
    @abstractmethod
    def form(self) -> str:
        """Short description of the quantization, for the log."""

    @abstractmethod
    def count(self, names: Iterable[str]) -> int:
        """Return the number of quantized weights among tensors with the given names."""

    @abstractmethod
    def find(
        self, tensors: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, QuantizedTensor], list[str]]:
        """Return the quantized weights among the tensors of the files, and a list of problems.

        Returns:
            The weights by their names after dequantization, and one message per invalid tensor:
            values without scales, scales without values, wrong shapes and dtypes.
        """

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor does not change the weights, such as the scale of activations."""
        return name.endswith(ACTIVATION_SCALES)

    @abstractmethod
    def dequantize(
        self, tensor: QuantizedTensor, box: Box, files: Mapping[str, TensorFile]
    ) -> torch.Tensor:
        """Return a box of a weight [*box.sizes] in fp32."""

    def bands(self, sizes: tuple[int, ...]) -> Iterator[Box]:
        """Cut a box of a weight into boxes that are dequantized one at a time."""
        return row_boxes(sizes, torch.float32.itemsize)

    def read_box(
        self,
        tensor: QuantizedTensor,
        box: Box,
        target: torch.Tensor,
        *,
        files: Mapping[str, TensorFile],
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
        for band in self.bands(box.sizes):
            if not band.numel:
                continue
            values = self.dequantize(tensor, band.within(box.offsets), files)
            if not bool(values.isfinite().all()):
                raise ValueError(
                    f"{files[tensor.values].path}: {tensor.values} times {tensor.scales} is not "
                    "finite"
                )
            target[band.slices].copy_(values)

    def line(self, names: Iterable[str]) -> str:
        """Return a log line about a folder that contains tensors with the given names."""
        return (
            f"dequantized {self.count(names)} {self.form}; they are trained, saved and exported in "
            "the dtype of the model"
        )


@dataclass(frozen=True)
class ScaledMatrices(Quantization):
    """Matrices of 8 bits per element with scales for blocks, for rows or for whole matrices.

    A matrix W [o, i] is stored in E4M3 or in int8. Its scales are a matrix
    [ceil(o / b0), ceil(i / b1)], one per block of b0 x b1 elements (DeepSeek-AI 2024, arXiv
    2412.19437, section 3.3), one per row, or one for the whole matrix:

        w[r, c] = W[r, c] · scale[r // b0, c // b1]

    Scales are named `*_scale_inv` or `*_scale`; both are factors.

    Args:
        block: number of rows and of columns of a block; None for a scale per row or per matrix.
        dtype: the files' dtype of the stored values.
    """

    block: tuple[int, int] | None
    dtype: str = FP8
    suffixes: ClassVar[tuple[str, ...]] = ("_scale_inv", "_scale")

    @property
    def form(self) -> str:
        """Short description of the quantization, for the log."""
        scales = "each row or matrix"
        if self.block is not None:
            scales = f"each block of {self.block[0]} x {self.block[1]}"
        return f"{'FP8' if self.dtype == FP8 else 'int8'} matrices with a scale for {scales}"

    def count(self, names: Iterable[str]) -> int:
        """Return the number of quantized matrices among tensors with the given names."""
        return sum(name.endswith(self.suffixes) and not self.is_ignored(name) for name in names)

    def find(
        self, tensors: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, QuantizedTensor], list[str]]:
        """Return the quantized matrices and a list of problems with their scales."""
        weights: dict[str, QuantizedTensor] = {}
        problems = []
        form = "FP8" if self.dtype == FP8 else self.dtype
        for name, tensor in tensors.items():
            if name.endswith(self.suffixes) and not self.is_ignored(name):
                base = name[: name.rindex("_scale")]
                if base not in tensors or tensors[base].dtype != self.dtype:
                    problems.append(f"{name} has no {form} tensor to scale")
            if tensor.dtype != self.dtype:
                continue
            scales = [name + suffix for suffix in self.suffixes if name + suffix in tensors]
            if not scales:
                suffix = self.suffixes[self.block is None]
                problems.append(f"{name} is {form} and {name}{suffix} is missing")
                continue
            if len(scales) > 1:
                problems.append(f"{name} has two scales, {' and '.join(scales)}: remove one")
            problems += self._misfits(name, tensor, scales[0], tensors[scales[0]])
            weights[name] = QuantizedTensor(name, scales[0], dequantized_info(tensor, tensor.shape))
        return weights, problems

    def _misfits(
        self, name: str, tensor: TensorInfo, scales_name: str, scales: TensorInfo
    ) -> list[str]:
        if len(tensor.shape) != 2:
            kind = "scales of rows need" if self.block is None else "blocks of two dimensions need"
            return [f"{name} is {list(tensor.shape)}: {kind} a matrix"]
        rows, columns = tensor.shape
        if self.block is None:
            if scales.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
                return [
                    f"{scales_name} is {list(scales.shape)}: expected one scale, or one for each "
                    f"of the {rows} rows of {name}"
                ]
        else:
            expected_shape = (-(-rows // self.block[0]), -(-columns // self.block[1]))
            if scales.shape != expected_shape:
                return [
                    f"{scales_name} is {list(scales.shape)}, blocks of {list(self.block)} require "
                    f"{list(expected_shape)}"
                ]
        if scales.dtype not in SCALE_DTYPES:
            return [
                f"{scales_name} has dtype {scales.dtype}: supported are {', '.join(SCALE_DTYPES)}"
            ]
        return []

    def dequantize(
        self, tensor: QuantizedTensor, box: Box, files: Mapping[str, TensorFile]
    ) -> torch.Tensor:
        """Return a box of a matrix in fp32. Raises ValueError for a scale that is not positive."""
        stored_shape = files[tensor.scales].tensors[tensor.scales].shape
        block = self.block
        if block is None:
            rows, columns = tensor.dequantized.shape
            block = (rows if math.prod(stored_shape) == 1 else 1, columns)
        low = tuple(offset // b for offset, b in zip(box.offsets, block, strict=True))
        high = tuple(
            -(-(offset + n) // b)
            for offset, n, b in zip(box.offsets, box.sizes, block, strict=True)
        )
        factors = torch.empty([b - a for a, b in zip(low, high, strict=True)])
        dims = len(stored_shape)
        scales_box = Box(low[:dims], tuple(factors.shape[:dims]))
        scales_target = factors.view(scales_box.sizes)
        files[tensor.scales].read_box(tensor.scales, scales_box, scales_target)
        if not bool(((factors > 0) & factors.isfinite()).all()):
            raise ValueError(
                f"{files[tensor.scales].path}: {tensor.scales} has a factor that is not positive "
                "and finite"
            )
        stored = torch.empty(box.sizes, dtype=DTYPES[self.dtype])
        files[tensor.values].read_box(tensor.values, box, stored)
        for dim in (0, 1):
            index = torch.arange(box.offsets[dim], box.offsets[dim] + box.sizes[dim])
            factors = factors.index_select(dim, index // block[dim] - low[dim])
        return stored.float().mul_(factors)  # [r, c]


@dataclass(frozen=True)
class MXFP4(Quantization):
    """MXFP4 tensors, the format of gpt-oss's experts (OCP Microscaling Formats v1.0, section 5).

    A tensor W [..., r, c] is stored as bytes: `*_blocks` [..., r, c / 32, 16] and `*_scales`
    [..., r, c / 32]. A byte of blocks contains two E2M1 elements, the first in its lower half. A
    scale is a power of two in E8M0, shared by 32 elements:

        w[..., 32 g + k] = E2M1[code k of blocks[..., g, :]] · 2^(scales[..., g] - 127)

    Args:
        is_flat: the bytes of a row are one dimension, `*_packed` [..., r, c / 2], and the scales
            are named `*_scale`, as compressed-tensors writes them.
    """

    is_flat: bool = False

    @property
    def values(self) -> str:
        """Suffix of the names of the tensors of values."""
        return "_packed" if self.is_flat else "_blocks"

    @property
    def scales(self) -> str:
        """Suffix of the names of the tensors of scales."""
        return "_scale" if self.is_flat else "_scales"

    def count(self, names: Iterable[str]) -> int:
        """Return the number of quantized tensors among tensors with the given names."""
        return sum(name.endswith(self.values) for name in names)

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
            is_scale = base != name and not self.is_ignored(name)
            if is_scale and base + self.values not in tensors:
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
            dims = len(tensor.shape) - (not self.is_flat)
            columns = GROUP * math.prod(tensor.shape[dims - 1 :]) // GROUP_BYTES
            shape = (*tensor.shape[: dims - 1], columns) if dims > 0 else ()
            weights[base] = QuantizedTensor(
                name, base + self.scales, dequantized_info(tensor, shape)
            )
        return weights, problems

    def _misfits(self, base: str, tensor: TensorInfo, scales: TensorInfo) -> list[str]:
        sizes = tensor.shape
        if self.is_flat and sizes and not sizes[-1] % GROUP_BYTES:
            sizes = (*sizes[:-1], sizes[-1] // GROUP_BYTES, GROUP_BYTES)
        if len(sizes) < 2 or sizes[-1] != GROUP_BYTES:
            multiple = "a multiple of " * self.is_flat
            return [
                f"{base}{self.values} is {list(tensor.shape)}: the last size must be "
                f"{multiple}{GROUP_BYTES} bytes of {GROUP} elements"
            ]
        problems = [
            f"{base}{suffix} has dtype {tensor_info.dtype}: supported is U8"
            for suffix, tensor_info in ((self.values, tensor), (self.scales, scales))
            if tensor_info.dtype != "U8"
        ]
        if scales.shape != sizes[:-1]:
            problems.append(
                f"{base}{self.scales} is {list(scales.shape)}, {base}{self.values} requires "
                f"{list(sizes[:-1])}"
            )
        return problems

    def dequantize(
        self, tensor: QuantizedTensor, box: Box, files: Mapping[str, TensorFile]
    ) -> torch.Tensor:
        """Return a box of a tensor in fp32, from the groups of 32 elements that contain it."""
        begin, size = box.offsets[-1], box.sizes[-1]
        first_group, end_group = begin // GROUP, -(-(begin + size) // GROUP)
        groups = Box((*box.offsets[:-1], first_group), (*box.sizes[:-1], end_group - first_group))
        stored = torch.empty((*groups.sizes, GROUP_BYTES), dtype=torch.uint8)
        byte_box = Box((*groups.offsets, 0), tuple(stored.shape))
        if self.is_flat:
            byte_box = Box(
                (*groups.offsets[:-1], GROUP_BYTES * first_group),
                (*groups.sizes[:-1], GROUP_BYTES * groups.sizes[-1]),
            )
        files[tensor.values].read_box(tensor.values, byte_box, stored.view(byte_box.sizes))
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


def dequantized_info(stored: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    """Return the TensorInfo of a dequantized tensor; its byte range is the range of the values."""
    return stored._replace(dtype="BF16", shape=shape)

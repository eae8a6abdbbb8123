# SPDX-License-Identifier: Apache-2.0
"""Dequantize matrices of 4-bit integers: AWQ, GPTQ and the packed format of compressed-tensors.

A matrix w [o, i] has groups of input channels that share a scale and a zero point per output
channel:

    w[r, c] = (q[r, c] - zero[r, g(c)]) · scale[r, g(c)]

Eight 4-bit integers are packed into an int32. The formats differ in the orientation of the stored
matrix, in the dimension and in the order in which they pack, and in how they store zero points.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing.safetensors_file import TensorInfo
from megatron.hf.quantized import (
    SCALE_DTYPES,
    Quantization,
    QuantizedTensor,
    TensorFile,
    dequantized_info,
)

#: Integers in an int32, and the zero point of symmetric quantization.
PACK, SYMMETRIC_ZERO = 8, 8


class Layout(NamedTuple):
    """How a format stores a matrix of 4-bit integers.

    Args:
        label: name of the format, for the log.
        values, scales, zero_points, group_index: suffixes of the names of tensors, in place of the
            suffix of the weight.
        shape: suffix of a tensor that repeats the shape of the weight; None without one.
        input_dim: dimension of the input channels in the stored matrix; the other one has the
            output channels. Zero points are always packed along the output channels.
        packed_dim: dimension along which the values are packed.
        order: position in an int32 of each of eight consecutive integers.
    """

    label: str
    values: str
    scales: str
    zero_points: str
    group_index: str
    shape: str | None
    input_dim: int
    packed_dim: int
    order: tuple[int, ...]


_CONSECUTIVE = (0, 1, 2, 3, 4, 5, 6, 7)
_TRANSPOSED_NAMES = (".qweight", ".scales", ".qzeros", ".g_idx", None)

#: AWQ's layout "gemm" stores w^T and interleaves the output channels of an int32.
AWQ = Layout("AWQ", *_TRANSPOSED_NAMES, 0, 1, (0, 4, 1, 5, 2, 6, 3, 7))
GPTQ = Layout("GPTQ", *_TRANSPOSED_NAMES, 0, 0, _CONSECUTIVE)
COMPRESSED_TENSORS = Layout(
    "compressed-tensors",
    ".weight_packed",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
    1,
    1,
    _CONSECUTIVE,
)


@dataclass(frozen=True)
class PackedInt4(Quantization):
    """Matrices of packed 4-bit integers.

    Args:
        layout: the format.
        group_size: input channels per scale; None for one scale per output channel.
        is_symmetric: every zero point is 8, whatever the files contain.
        zero_offset: number to add to stored zero points modulo 16; 1 in the first version of GPTQ.
        needs_index: input channels are reordered, so that every matrix needs a group index.
    """

    layout: Layout
    group_size: int | None
    is_symmetric: bool = False
    zero_offset: int = 0
    needs_index: bool = False

    @property
    def form(self) -> str:
        """Short description of the quantization, for the log."""
        scales = "each output channel"
        if self.group_size is not None:
            scales = f"each {self.group_size} input channels"
        return f"int4 matrices of {self.layout.label} with a scale for {scales}"

    def count(self, names: Iterable[str]) -> int:
        """Return the number of quantized matrices among tensors with the given names."""
        return sum(name.endswith(self.layout.values) for name in names)

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor does not change the weights."""
        shape = self.layout.shape
        return super().is_ignored(name) or (shape is not None and name.endswith(shape))

    def find(
        self, tensors: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, QuantizedTensor], list[str]]:
        """Return the packed matrices and a list of problems with their scales and zero points."""
        layout = self.layout
        weights: dict[str, QuantizedTensor] = {}
        problems = []
        further_suffixes = (layout.scales, layout.zero_points, layout.group_index)
        for name, tensor in tensors.items():
            for suffix in further_suffixes:
                base = name.removesuffix(suffix)
                if base != name and base + layout.values not in tensors:
                    problems.append(f"{name} has no {base}{layout.values} that it belongs to")
            base = name.removesuffix(layout.values)
            if base == name:
                continue
            if base + ".weight" in tensors:
                problems.append(f"{base}.weight and {name} are the same weight: remove one of them")
            misfits, weight = self._matrix(base, tensor, tensors)
            problems += misfits
            weights[f"{base}.weight"] = weight
        return weights, problems

    def _matrix(
        self, base: str, values: TensorInfo, tensors: Mapping[str, TensorInfo]
    ) -> tuple[list[str], QuantizedTensor]:
        """Return the problems of a matrix, and the matrix."""
        layout = self.layout
        shape = [0, 0]
        if len(values.shape) == 2:
            shape = list(values.shape)
            shape[layout.packed_dim] *= PACK
            shape = shape if layout.input_dim == 1 else shape[::-1]  # [o, i]
        groups = 1 if self.group_size is None else -(-shape[1] // self.group_size)
        packed_outputs = -(-shape[0] // PACK)
        by_group = (groups, shape[0]), (groups, packed_outputs)
        scale_shape, zero_shape = (sizes[:: 1 - 2 * layout.input_dim] for sizes in by_group)
        named_zeros, named_index = base + layout.zero_points, base + layout.group_index
        has_zeros = layout.input_dim == 0 or not self.is_symmetric
        weight = QuantizedTensor(
            base + layout.values,
            base + layout.scales,
            dequantized_info(values, tuple(shape)),
            named_zeros if has_zeros else None,
            named_index if self.needs_index or named_index in tensors else None,
        )
        if len(values.shape) != 2:
            return [f"{weight.values} is {list(values.shape)}: expected a matrix"], weight
        expected: dict[str | None, tuple[tuple[int, ...], tuple[str, ...]]] = {
            weight.values: (values.shape, ("I32",)),
            weight.scales: (scale_shape, SCALE_DTYPES),
            weight.zero_points: (zero_shape, ("I32",)),
            weight.group_index: ((shape[1],), ("I32", "I64")),
        }
        problems = []
        for name, (expected_shape, dtypes) in expected.items():
            if name is None:
                continue
            if name not in tensors:
                problems.append(f"{weight.values} is int4 and {name} is missing")
            elif tensors[name].shape != expected_shape:
                problems.append(
                    f"{name} is {list(tensors[name].shape)}, group_size {self.group_size or -1} "
                    f"and {weight.values} require {list(expected_shape)}"
                )
            elif tensors[name].dtype not in dtypes:
                problems.append(
                    f"{name} has dtype {tensors[name].dtype}: supported are {', '.join(dtypes)}"
                )
        return problems, weight

    def bands(self, sizes: tuple[int, ...]) -> Iterator[Box]:
        """Cut a box of a weight along the first dimension of the stored matrix."""
        if self.layout.input_dim == 1:
            yield from super().bands(sizes)
            return
        for box in row_boxes(sizes[::-1], torch.float32.itemsize):
            yield Box(box.offsets[::-1], box.sizes[::-1])

    def dequantize(
        self, tensor: QuantizedTensor, box: Box, files: Mapping[str, TensorFile]
    ) -> torch.Tensor:
        """Return a box of a matrix in fp32. Raises ValueError for a group that does not exist."""
        layout = self.layout
        input_dim, output_dim = layout.input_dim, 1 - layout.input_dim
        stored_box = box if input_dim == 1 else Box(box.offsets[::-1], box.sizes[::-1])
        values = _read_packed(
            files, tensor.values, stored_box, dim=layout.packed_dim, order=layout.order
        )
        groups = self._groups(tensor, stored_box, files)  # [c], in the order of input channels
        unique_groups, positions = groups.unique(return_inverse=True)
        begin, size = stored_box.offsets[output_dim], stored_box.sizes[output_dim]
        scales, zero_points = [], []
        # Only the groups of this box are read, so that all boxes together read each group at most
        # once per input channel.
        for begin_group, count in _runs(unique_groups.tolist()):
            offsets, sizes = (begin_group, begin), (count, size)
            if input_dim == 1:
                offsets, sizes = offsets[::-1], sizes[::-1]
            run_scales = torch.empty(sizes)
            files[tensor.scales].read_box(tensor.scales, Box(offsets, sizes), run_scales)
            scales.append(run_scales)
            if tensor.zero_points is not None:
                run_zeros = _read_packed(
                    files,
                    tensor.zero_points,
                    Box(offsets, sizes),
                    dim=output_dim,
                    order=layout.order,
                )
                zero_points.append(self._zero_points(tensor, run_zeros, files))
        factors = torch.cat(scales, input_dim).index_select(input_dim, positions)
        zeros: int | torch.Tensor = SYMMETRIC_ZERO
        if zero_points and not self.is_symmetric:
            zeros = torch.cat(zero_points, input_dim).index_select(input_dim, positions)
        weights = (values - zeros).float().mul_(factors)
        return weights if input_dim == 1 else weights.T

    def _zero_points(
        self, tensor: QuantizedTensor, stored: torch.Tensor, files: Mapping[str, TensorFile]
    ) -> torch.Tensor:
        """Return zero points from their stored values.

        Raises:
            ValueError: they contradict symmetric quantization. Writers of GPTQ disagree on whether
                its first version stores 7 or 8 there.
        """
        if self.is_symmetric:
            is_symmetric = (stored == SYMMETRIC_ZERO) | (stored == SYMMETRIC_ZERO - 1)
            if not bool(is_symmetric.all()):
                name = tensor.zero_points or ""
                raise ValueError(
                    f"{files[name].path}: {name} has a zero point other than {SYMMETRIC_ZERO}, but "
                    "quantization_config.sym is true: set it to false if they are right"
                )
        return (stored + self.zero_offset) & 15

    def _groups(
        self, tensor: QuantizedTensor, stored_box: Box, files: Mapping[str, TensorFile]
    ) -> torch.Tensor:
        """Return the group of each input channel of a box."""
        dim = self.layout.input_dim
        begin, size = stored_box.offsets[dim], stored_box.sizes[dim]
        num_inputs = tensor.dequantized.shape[1]
        group_size = self.group_size or num_inputs
        if tensor.group_index is None:
            return torch.arange(begin, begin + size) // group_size
        groups = torch.empty(size, dtype=torch.int64)
        files[tensor.group_index].read_box(tensor.group_index, Box((begin,), (size,)), groups)
        num_groups = -(-num_inputs // group_size)
        if not bool(((groups >= 0) & (groups < num_groups)).all()):
            raise ValueError(
                f"{files[tensor.group_index].path}: {tensor.group_index} has a group outside of "
                f"0 to {num_groups - 1}"
            )
        return groups


def _read_packed(
    files: Mapping[str, TensorFile],
    name: str,
    box: Box,
    *,
    dim: int,
    order: tuple[int, ...],
) -> torch.Tensor:
    """Return a box of 4-bit integers [*box.sizes] that are packed along a dimension."""
    begin, size = box.offsets[dim], box.sizes[dim]
    begin_word, end_word = begin // PACK, -(-(begin + size) // PACK)
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = begin_word, end_word - begin_word
    words = torch.empty(sizes, dtype=torch.int32)
    files[name].read_box(name, Box(tuple(offsets), tuple(sizes)), words)
    shifts = torch.tensor([4 * position for position in order], dtype=torch.int32)
    shifts = shifts.view([PACK if d == dim + 1 else 1 for d in range(len(sizes) + 1)])
    integers = (words.unsqueeze(dim + 1) >> shifts) & 15
    return integers.flatten(dim, dim + 1).narrow(dim, begin - PACK * begin_word, size)


def _runs(groups: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first group, number of groups) of each run of consecutive ascending groups."""
    begin = 0
    for end in range(1, len(groups) + 1):
        if end == len(groups) or groups[end] != groups[end - 1] + 1:
            yield groups[begin], end - begin
            begin = end

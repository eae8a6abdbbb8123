# SPDX-License-Identifier: Apache-2.0
"""Compare two checkpoints by their logical tensors, whatever layouts they were saved on.

Tensors are read in boxes of rows and verified against their digests. The metric is the one used by
the parity tests: the largest difference of a tensor relative to its largest element.

Some gradients are zero in exact arithmetic, such as the gradient of a bias on the keys of softmax
attention. Their moments contain rounding errors of the run, and Adam moves the weight by them. Such
tensors have no meaningful scale; they are detected by gradients below the tolerance times the
model's largest gradient.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron.core.boxes import Box
from megatron.core.dist_checkpointing import CheckpointReader, Manifest
from megatron.core.dist_checkpointing.manifest import flatten
from megatron.core.dist_checkpointing.shard_format import ITEM_BYTES
from megatron.training.checkpointing.commands.inspection import (
    one_checkpoint,
    read_box,
    read_rows,
)
from megatron.training.checkpointing.commands.options import CompareConfig

#: Lines of each kind that are printed without --all.
MAX_LINES = 20

#: Elements compared at a time; in fp64 they take several times their memory.
MAX_ELEMENTS = 1 << 18

#: Entries of `extra` that may differ between equal checkpoints: options, and sums of the current
#: logging interval.
_NOT_COMPARED = ("config", "window")
_BITS: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)
#: Exponents that turn a moment's scale into a gradient's scale; masters are copies of the weight.
_MOMENTS = MappingProxyType({"exp_avg": 1.0, "momentum": 1.0, "exp_avg_sq": 0.5})
_MASTER = "optimizer.master/"


class Verdict(enum.Enum):
    """Result of comparing two tensors of the same name."""

    EQUAL = "equal tensors"
    ROUNDING = "tensors whose gradient is zero up to rounding, which does not count"
    DIFFERENT = "tensors that differ"


@dataclass(kw_only=True, slots=True)
class TensorDifference:
    """Difference of a tensor, accumulated box by box.

    Args:
        differing: number of elements whose bits differ.
        largest: largest absolute difference; infinite if only one value is NaN.
        scales: largest finite absolute value of each of the two tensors.
        note: differences of shape and dtype; "" without any.
        comparable: whether the shapes are equal.
    """

    differing: int = 0
    largest: float = 0.0
    scales: tuple[float, float] = (0.0, 0.0)
    note: str = ""
    comparable: bool = True

    @property
    def relative(self) -> float:
        """The largest difference relative to the largest element."""
        if not self.largest:
            return 0.0
        scale = max(self.scales)
        return self.largest / scale if scale else math.inf

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Accumulate the same elements of both tensors."""
        if first.dtype == second.dtype:
            bits = _BITS[first.itemsize]
            unequal = first.view(bits) != second.view(bits)
        else:
            unequal = first.double() != second.double()
        count = int(unequal.sum())
        a, b = self.scales
        self.scales = max(a, largest_finite(first)), max(b, largest_finite(second))
        if not count:
            return
        self.differing += count
        x, y = first.double()[unequal], second.double()[unequal]
        gaps = (x - y).abs()
        gaps[(x == y) | (x.isnan() & y.isnan())] = 0.0  # equal values with other bits, infinities
        gaps[gaps.isnan()] = math.inf
        self.largest = max(self.largest, float(gaps.max()))

    def within(self, tolerance: float) -> bool:
        """Return whether the tensors count as equal, without looking at other tensors."""
        if not self.comparable:
            return False
        if not self.differing:
            return not self.note or tolerance > 0
        return bool(tolerance) and self.relative <= tolerance

    def text(self, shape: Sequence[int]) -> str:
        """Return a description of the comparison."""
        if not self.comparable:
            return self.note
        note = f"{self.note}, " if self.note else ""
        if not self.differing:
            return f"{note}equal {'values' if note else 'bits'}"
        return (
            f"{note}{self.differing} of {math.prod(shape)} elements differ, by at most "
            f"{self.largest:.3g}, {self.relative:.3g} of the largest element"
        )


def largest_finite(values: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor [k]; 0 if there is none."""
    if not values.is_floating_point() or values.itemsize == 1:
        values = values.double()
    sizes = values.abs()
    finite = torch.where(sizes.isfinite(), sizes, torch.zeros((), dtype=sizes.dtype))
    return float(finite.max()) if finite.numel() else 0.0


def compare_folders(config: CompareConfig) -> int:
    """Print the differences of two checkpoints. Returns 0 if they are equal, else 1. Raises
    ValueError."""
    folders = [one_checkpoint(config.first), one_checkpoint(config.second)]
    limit = None if config.all else MAX_LINES
    with CheckpointReader(folders[0]) as first, CheckpointReader(folders[1]) as second:
        manifests = (first.manifest, second.manifest)
        counted, uncounted = _fields(*manifests)
        _print("fields that differ", counted, limit)
        _print("options and log sums that differ, which does not count", uncounted, limit)
        names = [set(manifest.tensors) for manifest in manifests]
        alone = [sorted(names[0] - names[1]), sorted(names[1] - names[0])]
        for folder, lone in zip(folders, alone, strict=True):
            _print(f"tensors of {folder} only", lone, limit)
        differences = {name: _compare(first, second, name) for name in sorted(names[0] & names[1])}
    verdicts = judge(differences, manifests, config.tolerance)
    lines: dict[Verdict, list[str]] = {verdict: [] for verdict in Verdict}
    for name, difference in differences.items():
        text = difference.text(manifests[0].tensors[name].shape)
        lines[verdicts[name]].append(f"{name}: {text}")
    for verdict in (Verdict.DIFFERENT, Verdict.ROUNDING, Verdict.EQUAL):
        if verdict is not Verdict.EQUAL or config.all:
            _print(verdict.value, lines[verdict], limit)
    same = not (counted or any(alone) or lines[Verdict.DIFFERENT])
    within = f" within {config.tolerance:g}" if config.tolerance else ""
    rounding = len(lines[Verdict.ROUNDING])
    print(
        f"{'equal' if same else 'different'}: {len(lines[Verdict.EQUAL])} of {len(differences)} "
        f"common tensors are equal{within}, "
        f"{f'{rounding} contain rounding of zero, ' if rounding else ''}{len(counted)} fields "
        "differ"
    )
    return 0 if same else 1


def judge(
    differences: Mapping[str, TensorDifference],
    manifests: tuple[Manifest, Manifest],
    tolerance: float,
) -> dict[str, Verdict]:
    """Return the verdict on each pair of tensors.

    Args:
        differences: differences of the common tensors, by name.
        manifests: manifests of the two checkpoints.
        tolerance: see `CompareConfig`.
    """
    zero_gradients = _zero_gradients(differences, tolerance)
    drift = 2 * max(_lr_steps(manifest) for manifest in manifests)
    verdicts = {}
    for name, difference in differences.items():
        if difference.within(tolerance):
            verdicts[name] = Verdict.EQUAL
            continue
        kind, _, weight = name.rpartition("/")
        is_moment = kind.removeprefix("optimizer.") in _MOMENTS
        is_rounding = difference.comparable and weight in zero_gradients
        if is_rounding and not is_moment:  # one Adam step moves a weight by about the learning rate
            is_rounding = name in (weight, _MASTER + weight) and difference.largest <= drift
        verdicts[name] = Verdict.ROUNDING if is_rounding else Verdict.DIFFERENT
    return verdicts


def _zero_gradients(differences: Mapping[str, TensorDifference], tolerance: float) -> set[str]:
    """Return the weights whose gradients were only rounding errors in both checkpoints.

    Gradients are estimated from the optimizer's moments. A moment of exactly zero belongs to a
    weight that was not trained, whose differences count.
    """
    is_zero: dict[str, bool] = {}
    for kind, power in _MOMENTS.items():
        prefix = f"optimizer.{kind}/"
        gradients = {
            name.removeprefix(prefix): [scale**power for scale in difference.scales]
            for name, difference in differences.items()
            if name.startswith(prefix)
        }
        largest = [max(sizes) for sizes in zip(*gradients.values(), strict=True)]
        for weight, sizes in gradients.items():
            is_small = all(
                0 < size <= tolerance * max_size
                for size, max_size in zip(sizes, largest, strict=True)
            )
            is_zero[weight] = is_zero.get(weight, True) and is_small
    return {weight for weight, is_small in is_zero.items() if is_small}


def _lr_steps(manifest: Manifest) -> float:
    """Return the largest learning rate of a run times its number of steps; 0 if it is unknown."""
    options = manifest.extra.get("config")
    rate = options.get("lr") if isinstance(options, Mapping) else None
    return abs(rate) * manifest.iteration if isinstance(rate, int | float) else 0.0


def _print(title: str, lines: list[str], limit: int | None) -> None:
    if not lines:
        return
    print(f"{title}:")
    for line in lines[:limit]:
        print(f"  {line}")
    if limit is not None and len(lines) > limit:
        print(f"  and {len(lines) - limit} more: see them with --all")


def _fields(first: Manifest, second: Manifest) -> tuple[list[str], list[str]]:
    """Return a line per differing field: fields that count, and fields that do not."""
    sides = [flatten({"iteration": m.iteration, **m.extra}) for m in (first, second)]
    counted, uncounted = [], []
    for name in sorted(sides[0].keys() | sides[1].keys()):
        if name in sides[0] and name in sides[1] and sides[0][name] == sides[1][name]:
            continue
        line = f"{name}: {_field_text(sides[0], name)} and {_field_text(sides[1], name)}"
        (uncounted if name.partition(".")[0] in _NOT_COMPARED else counted).append(line)
    return counted, uncounted


def _field_text(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name]) if name in fields else "absent"


def _compare(first: CheckpointReader, second: CheckpointReader, name: str) -> TensorDifference:
    """Compare a tensor, box by box."""
    a, b = first.manifest.tensors[name], second.manifest.tensors[name]
    if a.shape != b.shape:
        return TensorDifference(note=f"{list(a.shape)} and {list(b.shape)}", comparable=False)
    difference = TensorDifference(note="" if a.dtype == b.dtype else f"{a.dtype} and {b.dtype}")
    wider = max((a.dtype, b.dtype), key=lambda dtype: ITEM_BYTES[dtype])
    for box in read_rows(a.shape, wider):
        _add_box(difference, first, second, name=name, box=box)
    return difference


def _add_box(
    difference: TensorDifference,
    first: CheckpointReader,
    second: CheckpointReader,
    *,
    name: str,
    box: Box,
) -> None:
    """Accumulate a box of both tensors; its memory is freed before the next box is read."""
    values_of_sides = [read_box(reader, name, box).flatten() for reader in (first, second)]
    for a, b in zip(*(values.split(MAX_ELEMENTS) for values in values_of_sides), strict=True):
        difference.add(a, b)

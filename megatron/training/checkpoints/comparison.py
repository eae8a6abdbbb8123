# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints compared by their logical tensors, whatever layouts they were saved on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron.core.dist_checkpointing import CheckpointReader, Manifest
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.shard_header import ITEM_BYTES
from megatron.training.checkpoints.inspection import flat
from megatron.training.checkpoints.options import CompareConfig
from megatron.training.checkpoints.places import one_checkpoint
from megatron.training.checkpoints.reading import read_box, row_boxes

#: Lines of one kind that are printed without --all.
MAX_LINES = 20

#: Elements that are compared at a time: in fp64 they take several times their memory.
MAX_ELEMENTS = 1 << 18

#: Parts of `extra` that may differ between equal checkpoints: how it was run, and sums of a log
#: line that is being gathered.
_BESIDE = ("config", "window")
_BITS: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)


@dataclass(kw_only=True)
class Difference:
    """How a tensor differs, gathered piece by piece.

    Args:
        differing: elements of other bits.
        largest: the largest absolute difference; infinite where only one has a NaN.
        scale: the largest finite element of either tensor.
    """

    differing: int = 0
    largest: float = 0.0
    scale: float = 0.0

    @property
    def relative(self) -> float:
        """The largest difference as a share of the largest element."""
        if not self.largest:
            return 0.0
        return self.largest / self.scale if self.scale else math.inf

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Take in the same elements of both tensors."""
        if first.dtype == second.dtype:
            bits = _BITS[first.itemsize]
            others = first.view(bits) != second.view(bits)
        else:
            others = first.double() != second.double()
        count = int(others.sum())
        a, b = first.double(), second.double()
        for values in (a, b):
            finite = values[values.isfinite()]
            if finite.numel():
                self.scale = max(self.scale, float(finite.abs().max()))
        if not count:
            return
        self.differing += count
        a, b = a[others], b[others]
        gaps = (a - b).abs()
        gaps[(a == b) | (a.isnan() & b.isnan())] = 0.0  # other bits of the same value, infinities
        gaps[gaps.isnan()] = math.inf
        self.largest = max(self.largest, float(gaps.max()))


def compare_folders(config: CompareConfig) -> int:
    """Print how two checkpoints differ. Returns 0 if they are equal, else 1. Raises ValueError."""
    folders = [one_checkpoint(config.first), one_checkpoint(config.second)]
    limit = None if config.all else MAX_LINES
    with CheckpointReader(folders[0]) as first, CheckpointReader(folders[1]) as second:
        manifests = (first.manifest, second.manifest)
        counted, beside = _fields(*manifests)
        _print("fields that differ", counted, limit)
        _print("options and log sums that differ, which does not count", beside, limit)
        names = [set(manifest.tensors) for manifest in manifests]
        alone = [sorted(names[0] - names[1]), sorted(names[1] - names[0])]
        for folder, lone in zip(folders, alone, strict=True):
            _print(f"tensors of {folder} only", lone, limit)
        both = sorted(names[0] & names[1])
        texts: dict[bool, list[str]] = {False: [], True: []}
        for name in both:
            equal, text = _compare(first, second, name, config.tolerance)
            texts[equal].append(text)
    _print("tensors that differ", texts[False], limit)
    if config.all:
        _print("equal tensors", texts[True], None)
    same = not (counted or any(alone) or texts[False])
    within = f" within {config.tolerance:g}" if config.tolerance else ""
    print(
        f"{'equal' if same else 'different'}: {len(texts[True])} of {len(both)} common tensors are "
        f"equal{within}, {len(counted)} fields differ"
    )
    return 0 if same else 1


def _print(title: str, lines: list[str], limit: int | None) -> None:
    if not lines:
        return
    print(f"{title}:")
    for line in lines[:limit]:
        print(f"  {line}")
    if limit is not None and len(lines) > limit:
        print(f"  and {len(lines) - limit} more: see them with --all")


def _fields(first: Manifest, second: Manifest) -> tuple[list[str], list[str]]:
    """Return a line per field that differs: those that count, and those that do not."""
    sides = [flat({"iteration": m.iteration, **m.extra}) for m in (first, second)]
    counted, beside = [], []
    for name in sorted(sides[0].keys() | sides[1].keys()):
        if name in sides[0] and name in sides[1] and sides[0][name] == sides[1][name]:
            continue
        line = f"{name}: {_shown(sides[0], name)} and {_shown(sides[1], name)}"
        (beside if name.partition(".")[0] in _BESIDE else counted).append(line)
    return counted, beside


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name]) if name in fields else "absent"


def _compare(
    first: CheckpointReader, second: CheckpointReader, name: str, tolerance: float
) -> tuple[bool, str]:
    """Return whether a tensor counts as equal, and a line about it."""
    a, b = first.manifest.tensors[name], second.manifest.tensors[name]
    if a.shape != b.shape:
        return False, f"{name}: {list(a.shape)} and {list(b.shape)}"
    found = Difference()
    wider = max((a.dtype, b.dtype), key=lambda dtype: ITEM_BYTES[dtype])
    for box in row_boxes(a.shape, wider, first.manifest, second.manifest):
        _add_box(found, first, second, name=name, box=box)
    dtypes = f"{a.dtype} and {b.dtype}, " if a.dtype != b.dtype else ""
    if not found.differing:
        equal = not dtypes or tolerance > 0
        return equal, f"{name}: {dtypes}equal {'values' if dtypes else 'bits'}"
    total = math.prod(a.shape)
    text = (
        f"{name}: {dtypes}{found.differing} of {total} elements differ, by at most "
        f"{found.largest:.3g}, {found.relative:.3g} of the largest element"
    )
    return bool(tolerance) and found.relative <= tolerance, text


def _add_box(
    found: Difference, first: CheckpointReader, second: CheckpointReader, *, name: str, box: Box
) -> None:
    """Take in a box of both tensors; what has been read is gone before the next is."""
    pieces = [read_box(reader, name, box).flatten() for reader in (first, second)]
    for one, other in zip(*(piece.split(MAX_ELEMENTS) for piece in pieces), strict=True):
        found.add(one, other)

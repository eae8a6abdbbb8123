# SPDX-License-Identifier: Apache-2.0
"""Launches: the tile sizes, warps and stages that a Triton kernel is started with.

A kernel has a default, which tests, the interpreter and budgets see, and candidates. Nothing is
tried out while a model runs: `launches.json` says which candidate is faster on which device, and
holds only those whose results agreed with the reference when they were timed there. What another
release of Triton compiles was not held to anything, so its entries are passed over. So a kernel is
the same in every run and in every CUDA graph, and a size that was never seen costs nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import torch

#: What a launch holds besides a kernel's own compile-time constants.
WARPS, STAGES = "num_warps", "num_stages"


# `triton.cdiv` and `triton.next_power_of_2` also serve kernels and therefore take 2 µs on the host;
# a training step calls them hundreds of times.
def cdiv(size: int, block: int) -> int:
    """Return the number of blocks that cover a size."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


@dataclass(frozen=True)
class Launches:
    """How one kernel may be started.

    Args:
        name: of the kernel, in `launches.json`.
        default: compile-time constants by name, with `num_warps` and `num_stages`.
        others: candidates, with the same names.

    Raises:
        ValueError: a candidate that does not name what the default names.
    """

    name: str
    default: Mapping[str, int]
    others: Sequence[Mapping[str, int]] = field(default=())
    _picked: dict[tuple[int | None, str], Mapping[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for other in self.others:
            if other.keys() != self.default.keys():
                raise ValueError(
                    f"launches of {self.name}: {dict(other)} must name {sorted(self.default)}"
                )

    @property
    def candidates(self) -> tuple[Mapping[str, int], ...]:
        """All of them, the default first."""
        return (self.default, *self.others)

    def pick(self, tensor: torch.Tensor, key: str = "") -> dict[str, int]:
        """Return what to start the kernel with on the device of `tensor`.

        Args:
            tensor: any that the kernel reads.
            key: padded sizes and dtype, what decides the best candidate; never a number of tokens.

        Returns:
            Keyword arguments of the launch.
        """
        if tensor.device.type != "cuda":
            return dict(self.default)
        index = tensor.device.index
        launch = self._picked.get((index, key))
        if launch is None:
            measured = measured_launches(_device_name(index))
            launch = measured.get(f"{self.name} {key}".strip(), self.default)
            launch = launch if launch in self.candidates else self.default
            self._picked[index, key] = launch
        return dict(launch)


@functools.cache
def _device_name(index: int) -> str:
    """Return the name of a CUDA device; asking CUDA takes microseconds at every launch."""
    return torch.cuda.get_device_name(index)


@functools.cache
def measured_launches(device_name: str) -> Mapping[str, Mapping[str, int]]:
    """Return the launches that were measured on devices of this name, by kernel and key.

    Those that another release of Triton compiled are left out.

    Args:
        device_name: as CUDA says it, such as NVIDIA H200.
    """
    text = files("megatron.core.ops").joinpath("launches.json").read_text("utf-8")
    return of_release(json.loads(text).get(device_name, {}), version("triton"))


def of_release(entries: Mapping[str, Any], release: str) -> Mapping[str, Mapping[str, int]]:
    """Return the launches of a device's entries that this release of Triton has compiled."""
    return MappingProxyType(
        {
            name: entry["launch"]
            for name, entry in entries.items()
            if entry["versions"]["triton"] == release
        }
    )

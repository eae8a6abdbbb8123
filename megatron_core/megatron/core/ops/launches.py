# SPDX-License-Identifier: Apache-2.0
"""Launch configurations of Triton kernels: tile sizes, warps and stages.

A kernel has a default, which tests, the interpreter and the budgets use, and alternatives.
Nothing is autotuned while a model runs: `launches.json` names the fastest candidate by device, and
lists only candidates whose results agreed with the reference when they were timed there. Entries
that another release of Triton compiled are skipped, because nobody checked this release's code.
A kernel is therefore the same in every run and in every CUDA graph, and a new size costs no time.
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

#: Keys of a launch that are not compile-time constants of the kernel.
WARPS, STAGES = "num_warps", "num_stages"


# `triton.cdiv` and `triton.next_power_of_2` also serve kernels and therefore take 2 µs on the host;
# a training step calls them hundreds of times.
def cdiv(size: int, block: int) -> int:
    """Return the number of blocks that cover a size."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two >= `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


@dataclass(frozen=True)
class Launches:
    """Launch configurations of one kernel.

    Args:
        name: of the kernel, in `launches.json`.
        default: compile-time constants by name, with `num_warps` and `num_stages`.
        alternatives: further candidates, with the same keys.

    Raises:
        ValueError: an alternative whose keys differ from the default's keys.
    """

    name: str
    default: Mapping[str, int]
    alternatives: Sequence[Mapping[str, int]] = field(default=())
    _picked: dict[tuple[int | None, str], Mapping[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for launch in self.alternatives:
            if launch.keys() != self.default.keys():
                raise ValueError(
                    f"launches of {self.name}: {dict(launch)} must name {sorted(self.default)}"
                )

    @property
    def candidates(self) -> tuple[Mapping[str, int], ...]:
        """All configurations, the default first."""
        return (self.default, *self.alternatives)

    def pick(self, tensor: torch.Tensor, key: str = "") -> dict[str, int]:
        """Return the launch configuration for the device of `tensor`.

        Args:
            tensor: any input of the kernel.
            key: padded sizes and dtype that decide which candidate is fastest. It never holds a
                number of tokens, so that the kernel stays the same from step to step.

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
    """Return the name of a CUDA device; cached, because the query takes microseconds a launch."""
    return torch.cuda.get_device_name(index)


@functools.cache
def measured_launches(device_name: str) -> Mapping[str, Mapping[str, int]]:
    """Return the launches measured on devices of a name, by kernel and key.

    Entries that another release of Triton compiled are left out.

    Args:
        device_name: as CUDA reports it, such as NVIDIA H200.
    """
    text = files("megatron.core.ops").joinpath("launches.json").read_text("utf-8")
    return launches_of_release(json.loads(text).get(device_name, {}), version("triton"))


def launches_of_release(
    entries: Mapping[str, Any], release: str
) -> Mapping[str, Mapping[str, int]]:
    """Return the launches of those entries of a device that `release` of Triton compiled."""
    return MappingProxyType(
        {
            name: entry["launch"]
            for name, entry in entries.items()
            if entry["versions"]["triton"] == release
        }
    )

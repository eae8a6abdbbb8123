# SPDX-License-Identifier: Apache-2.0
"""Description of how one Triton kernel is compiled ahead of time, without a launch.

Each part of the ops has a file `<part>_kernels.py` here, whose `KERNELS` is a tuple of
`Description`s. `compile_kernels.py` imports every such file. To add a part, write

    KERNELS = (
        Description(
            sweep_kernel,
            {"DELTA_RULE": True, "BLOCK_K": 128, **SWEEP.default},
            typed("*fp32 cumsum; *i64 chunk_starts; fp32 scale"),
            divisible="key_size value_size",
            label="128",
            quick=(90, 100),
        ),
        ...
    )

then record the budgets: `python tests/unit_tests/core/ops/kernel_budget.py --only <part>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = (90, 100)  # Hopper and Blackwell
#: Launch options, which are no arguments of the kernel.
LAUNCH_OPTIONS = ("num_warps", "num_stages")
DEFAULT_OPTIONS = {"num_warps": 4, "num_stages": 3}  # the defaults of Triton's launcher


def typed(text: str) -> dict[str, str]:
    """Return the types of arguments: "*fp32 sum" is the pointer sum_ptr, "fp32 eps" is eps."""
    groups = (group.split() for group in text.split("; "))
    return {f"{x}_ptr" if kind[0] == "*" else x: kind for kind, *names in groups for x in names}


@dataclass(frozen=True)
class Description:
    """One kernel at the sizes of a real model, in bf16.

    Args:
        kernel: the function under `@triton.jit`.
        launch: compile-time constants, and `num_warps` and `num_stages` where a launch passes
            them; accepts `**NAME.default` of a `Launches`.
        types: the types of arguments that are not bf16 pointers (names that end in `_ptr`) or
            32-bit integers (all others): "*fp32", "*i64", "i64", "fp32".
        divisible: names of integers that are multiples of 16 in any real model. Pointers and
            arguments named `..._stride_...` count as multiples of 16 without being listed.
        label: distinguishes descriptions of the same kernel.
        quick: the architectures that `make test` compiles, 30 compilations in total; the nightly
            tests compile every kernel for all architectures. The heaviest kernels list both
            architectures, the lightest none.
        architectures: all architectures that launch the kernel with these constants.
    """

    kernel: Any
    launch: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    divisible: str = ""
    label: str = ""
    quick: tuple[int, ...] = ()
    architectures: tuple[int, ...] = ARCHITECTURES

    @property
    def name(self) -> str:
        """The name of the kernel and the label."""
        return f"{self.kernel.__name__} {self.label}".strip()

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time constants."""
        return {k: v for k, v in self.launch.items() if k not in LAUNCH_OPTIONS}

    @property
    def options(self) -> dict[str, int]:
        """The numbers of warps and of stages."""
        return {k: self.launch.get(k, v) for k, v in DEFAULT_OPTIONS.items()}

    def signature(self) -> dict[str, str]:
        """Return the type of every argument.

        Raises:
            ValueError: the kernel has no argument of a name, or a constant is missing.
        """
        names, constants = self.kernel.arg_names, self.constants
        unknown = {*constants, *self.types, *self.divisible.split()} - {*names}
        missing = {p.name for p in self.kernel.params if p.is_constexpr} - {*constants}
        if unknown or missing:
            raise ValueError(
                f"{self.name}: unknown arguments {sorted(unknown)}, missing constants"
                f" {sorted(missing)}; the kernel has {names}"
            )
        types = {}
        for name in names:
            fallback = "*bf16" if name.endswith("_ptr") else "i32"
            types[name] = "constexpr" if name in constants else self.types.get(name, fallback)
        return types

    def attributes(self) -> dict[tuple[int], list]:
        """Return the arguments that the launcher would specialize as multiples of 16."""
        return {
            (index,): [["tt.divisibility", 16]]
            for index, (name, kind) in enumerate(self.signature().items())
            if kind != "constexpr"
            and (kind.startswith("*") or name in self.divisible.split() or "_stride_" in name)
        }

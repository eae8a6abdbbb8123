# SPDX-License-Identifier: Apache-2.0
"""Trials: the problems on which candidates of a kernel's launch are verified and timed.

A trial builds the problem of an op. To add one, write a function that returns a `Problem` and add
it to `TRIALS` in one of the files `trials_*.py`:

    def build(make, tokens, *, features):
        return Problem(function=partial(rms_norm, eps=1e-5), inputs=(make(tokens, features), ...))

    Trial({"rms_norm_forward": FORWARD, "rms_norm_backward": BACKWARD}, build,
          shapes=({"features": 4096},), tiny={"features": 40})
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import megatron.core.ops as ops
from megatron.core.ops.launches import Launches
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, agree
from tools.bench.cases import tensors_of, with_gradients

FORWARD, BACKWARD, FORWARD_BACKWARD = "forward", "backward", "forward and backward"
Make = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A computation with inputs.

    Args:
        function: takes the inputs and `implementation`; returns a tensor or a tuple of tensors.
        inputs: fp32 tensors.
        fp32_inputs: indices of the inputs that stay fp32.
        differentiable: whether inputs have gradients; otherwise they may be changed in place.
    """

    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    fp32_inputs: tuple[int, ...] = ()
    differentiable: bool = True

    def error(self, dtype: torch.dtype) -> float:
        """Return the error of the kernels against the reference in fp64.

        Raises:
            AssertionError: it is above the bound of the GPU tests.
        """
        if self.differentiable:
            return agree(self.function, self.inputs, dtype, fp32_inputs=self.fp32_inputs)
        rounded = self.rounded(dtype)
        triton_output = self.function(*(x.clone() for x in rounded), implementation="triton")
        true = self.function(*(x.double() for x in rounded), implementation="reference")
        pairs = zip(tensors_of(triton_output), tensors_of(true), strict=True)
        return max(
            assert_close_by_metric(f"output {i}", x, y, bound=BOUND[dtype])
            for i, (x, y) in enumerate(pairs)
        )

    def rounded(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the inputs as the kernels take them."""
        return [x if i in self.fp32_inputs else x.to(dtype) for i, x in enumerate(self.inputs)]

    def call(self, dtype: torch.dtype, way: str) -> Callable[[], object]:
        """Return the timed function."""
        rounded = self.rounded(dtype)
        if way == FORWARD:
            return lambda: self.function(*rounded, implementation="triton")

        def differentiable(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = tensors_of(self.function(*inputs, implementation="triton"))
            return tuple(x for x in outputs if x is not None and x.requires_grad)

        whole, back = with_gradients(differentiable, [x.detach().requires_grad_() for x in rounded])
        return whole if way == FORWARD_BACKWARD else back


@dataclass(frozen=True)
class Trial:
    """Problems of an op.

    Args:
        launches: the `Launches` to try, by name, and the timed direction.
        build: function of (make, tokens) and the fields of a shape.
        shapes: shapes of models; each has separate launches.
        tiny: shape for the interpreter.
        tokens: few tokens, an odd number, and many: results are compared for the first two, the
            last is timed. Launches do not depend on the number.
        few: numbers of tokens for the interpreter.
    """

    launches: Mapping[str, str]
    build: Callable[..., Problem]
    shapes: Sequence[Mapping[str, int]]
    tiny: Mapping[str, int]
    tokens: tuple[int, int, int] = (64, 1021, 32768)
    few: tuple[int, int, int] = (2, 5, 5)


@dataclass(frozen=True)
class Forced(Launches):
    """Choose one fixed candidate instead of the device's measured one; record the keys."""

    keys: set[str] = field(default_factory=set, compare=False)

    def pick(self, tensor: torch.Tensor, key: str = "") -> dict[str, int]:
        """Return the candidate."""
        self.keys.add(key)
        return dict(self.default)


def all_launches() -> dict[str, Launches]:
    """Return every `Launches` of the ops by name."""
    launches_by_name: dict[str, Launches] = {}
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if module.name.rsplit(".", 1)[1] != "triton":
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if (
                isinstance(value, Launches)
                and launches_by_name.setdefault(value.name, value) is not value
            ):
                raise ValueError(f"two launches are named {value.name}")
    return launches_by_name


@contextlib.contextmanager
def started_with(launches: Launches, candidate: Mapping[str, int]) -> Iterator[set[str]]:
    """Launch a kernel with one candidate; yields the requested keys."""
    forced = Forced(launches.name, candidate)
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith(f"{ops.__name__}."):
                continue
            for attribute, value in list(vars(module).items()):
                if value is launches:
                    stack.enter_context(mock.patch.object(module, attribute, forced))
        yield forced.keys

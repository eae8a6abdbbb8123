# SPDX-License-Identifier: Apache-2.0
"""Implementations of an op compared in fp64 with its equation, or kernels with the CPU's code.

The test module of an op has the fixture `backend`: plain torch on a CPU, in `make test`, and the
kernels, marked gpu, which Triton's interpreter runs for `make test` and a GPU for `make gpu`. Where
a GPU has no memory for all terms of an equation, the CPU's code in fp64 replaces it.

A rehearsal (`python -m tools.gpu --rehearse`) runs the same tests in Triton's interpreter, which
rounds like `tensor_core_rounding`, with the same bounds and with sizes that take seconds. So every
line of a GPU test has run before it reaches a rented machine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
import torch

from megatron.core.ops.launches import Launches
from tests.support.closeness import assert_close_by_metric
from tests.support.nan_memory import nan_memory

Size = TypeVar("Size")

#: Whether Triton interprets in this process.
REHEARSES = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16)
#: PROOF's metric; bf16 rounds results and the inputs of the last products.
BOUND: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 2e-5, torch.bfloat16: 2**-6})
CPU_BOUND: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6}
)
Results = torch.Tensor | tuple[torch.Tensor | None, ...]


def sized(full: Size, small: Size) -> Size:
    """Return the full size on a machine with a GPU, else or in a rehearsal the small size."""
    return small if REHEARSES or not torch.cuda.is_available() else full


def random_tensor(device: torch.device, *shape: int) -> torch.Tensor:
    """Return random normal numbers, seeded by the shape."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device)


def use_launches(
    monkeypatch: pytest.MonkeyPatch, op: str, names: Sequence[str], **options: int
) -> None:
    """Replace options of an op's launches, in the interpreter only; skip options that it lacks.

    Args:
        op: the package in `megatron.core.ops`, with dots.
        names: the `Launches` in its module `triton`.
        options: such as tiles so small that a row has several.
    """
    if not REHEARSES:
        return
    kernels = importlib.import_module(f"megatron.core.ops.{op}.triton")
    for name in names:
        default = getattr(kernels, name).default
        changed = {key: options.get(key, value) for key, value in default.items()}
        monkeypatch.setattr(kernels, name, Launches(name, changed))


def assert_refused(call: Callable[[], object], message: str) -> None:
    """Fail unless the call raises ValueError with one line that matches the message."""
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@dataclass(frozen=True)
class Backend:
    """An implementation of the ops, and the inputs on which a test runs it.

    Args:
        implementation: "reference" or "triton".
        device: the device of the inputs.
        dtype: the dtype of the inputs.
    """

    implementation: str
    device: torch.device
    dtype: torch.dtype

    def random(self, *shapes: Sequence[int]) -> list[torch.Tensor]:
        """Return a random normal tensor of each shape, in fp64 from one seed."""
        generator = torch.Generator().manual_seed(1234)
        tensors = [torch.randn(*x, generator=generator, dtype=torch.float64) for x in shapes]
        return [x.to(self.device) for x in tensors]

    def agree(
        self,
        function: Callable[..., Results],
        equation: Callable[..., Results],
        inputs: Sequence[torch.Tensor],
        **options: Any,
    ) -> None:
        """Compare outputs and gradients with an equation in fp64; see `agree` for the rest."""
        options = {"bounds": self.bounds, "implementation": self.implementation} | options
        agree(function, inputs, self.dtype, equation=equation, **options)

    @property
    def bounds(self) -> Mapping[torch.dtype, float]:
        """Return the largest error by dtype; a GPU sums fp32 in another order."""
        return BOUND if self.device.type == "cuda" else CPU_BOUND


def agree(
    function: Callable[..., Results],
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    equation: Callable[..., Results] | None = None,
    implementation: str = "triton",
    fp32_inputs: Collection[int] = (),
    bounds: Mapping[torch.dtype, float] = BOUND,
    poison: bool = True,
    zeros: bool = False,
) -> float:
    """Compare outputs and gradients in `dtype` with an equation in fp64.

    Both read the same inputs, rounded to `dtype`.

    Args:
        function: called with `inputs` and `implementation`; outputs that are None or need no
            gradient are not compared.
        inputs: floating-point tensors; gradients of all are compared.
        dtype: dtype of the inputs of `function`.
        equation: called with `inputs`; None, or on a GPU, is `function` in plain torch.
        implementation: the tested implementation.
        fp32_inputs: indices of the inputs that are at least fp32, such as decays.
        bounds: largest error by dtype.
        poison: fill uninitialised memory with NaN while `function` runs.
        zeros: whether an output or a gradient of the equation may be all zero or missing.

    Returns:
        The largest error.

    Raises:
        AssertionError: an output or a gradient differs, is not finite, is missing, or has another
            dtype than its input.
    """
    at_least_fp32 = torch.promote_types(dtype, torch.float32)
    rounded = [
        x.detach().to(at_least_fp32 if i in fp32_inputs else dtype) for i, x in enumerate(inputs)
    ]
    with nan_memory() if poison else contextlib.nullcontext():
        tensors = _results(function, rounded, zeros=zeros, implementation=implementation)
    fp64 = [x.double() for x in rounded]
    equation = None if rounded[0].is_cuda else equation
    if equation is None:
        references = _results(function, fp64, zeros=zeros, like=rounded, implementation="reference")
    else:
        references = _results(equation, fp64, zeros=zeros, like=rounded)
    assert tensors.keys() == references.keys(), f"{sorted(tensors)}, not {sorted(references)}"
    if equation is not None and not zeros:
        empty = [name for name, x in references.items() if not x.any()]
        assert not empty, f"{empty} are all zero, so comparing them proves nothing"
    for i, x in enumerate(rounded):
        assert tensors[f"gradient of input {i}"].dtype == x.dtype
    return max(
        assert_close_by_metric(name, tensor, references[name], bound=bounds[dtype])
        for name, tensor in tensors.items()
    )


def _results(
    function: Callable[..., Results],
    inputs: Sequence[torch.Tensor],
    *,
    zeros: bool,
    like: Sequence[torch.Tensor] | None = None,
    **options: str,
) -> dict[str, torch.Tensor]:
    """Return outputs and input gradients by name.

    The gradients of the outputs are the same for all inputs of one shape, rounded to the narrowest
    dtype of `like`, by default of the inputs.
    """
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {f"output {i}": y for i, y in enumerate(outputs) if y is not None and y.requires_grad}
    narrowest = min((x.dtype for x in like or inputs), key=lambda dtype: dtype.itemsize)
    grad_outputs = [
        random_tensor(y.device, *y.shape).to(narrowest).to(y.dtype) for y in named.values()
    ]
    torch.autograd.backward(list(named.values()), grad_outputs)
    named_tensors = {name: y.detach() for name, y in named.items()}
    for i, leaf in enumerate(leaves):
        assert zeros or leaf.grad is not None, f"input {i} has no gradient"
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        named_tensors[f"gradient of input {i}"] = grad
    return named_tensors

# SPDX-License-Identifier: Apache-2.0
"""Triton kernels held to their references in fp64, on a GPU or, in a rehearsal, on a CPU.

A rehearsal (`python -m tools.gpu --rehearse`) runs the same tests in Triton's interpreter, which
rounds as `tensor_core_rounding` says, with the same bounds and sizes that take it no minutes. So no
line of a GPU test is run for the first time on a machine that somebody pays for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch

from tests.support.closeness import assert_close_by_metric
from tests.support.nan_memory import nan_memory

Size = TypeVar("Size")

#: Whether Triton interprets in this process.
REHEARSES = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16)
#: PROOF's metric; bf16 rounds results and the inputs of the last products.
BOUND: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 2e-5, torch.bfloat16: 2**-6})


def sized(full: Size, small: Size) -> Size:
    """Return what a GPU works on, or in a rehearsal what the interpreter can."""
    return small if REHEARSES else full


def made(device: torch.device, *shape: int) -> torch.Tensor:
    """Return normal numbers, the same for the same shape."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device)


def agree(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor | None, ...]],
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    wide: Collection[int] = (),
    bounds: Mapping[torch.dtype, float] = BOUND,
    poison: bool = True,
) -> float:
    """Compare outputs and gradients of the Triton kernel in `dtype` with the reference in fp64.

    Both read the same numbers: the inputs, rounded to what the kernel takes.

    Args:
        function: of `inputs`, and `implementation`; what it returns of None, or without a
            gradient, is not compared.
        inputs: tensors of floating point; all get gradients.
        dtype: of the kernel's inputs.
        wide: numbers of the inputs that stay fp32, as decays do.
        bounds: largest error by dtype.
        poison: let memory that nothing has written hold NaN while the kernels run.

    Returns:
        The largest error.

    Raises:
        AssertionError: an output or a gradient differs, is not finite, or is missing.
    """
    kept = {number: torch.float32 for number in wide}
    rounded = [x.detach().to(kept.get(i, dtype)) for i, x in enumerate(inputs)]
    if poison:
        with nan_memory():
            found = _results(function, rounded, "triton", None)
    else:
        found = _results(function, rounded, "triton", None)
    true = _results(function, rounded, "reference", torch.float64)
    assert found.keys() == true.keys(), f"{sorted(found)} instead of {sorted(true)}"
    return max(
        assert_close_by_metric(name, tensor, true[name], bound=bounds[dtype])
        for name, tensor in found.items()
    )


def _results(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor | None, ...]],
    rounded: Sequence[torch.Tensor],
    implementation: str,
    kind: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """Return outputs and gradients by name; the gradients that flow in are those of every call."""
    leaves = [x.to(kind or x.dtype, copy=True).requires_grad_() for x in rounded]
    outputs = function(*leaves, implementation=implementation)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {f"output {i}": y for i, y in enumerate(outputs) if y is not None and y.requires_grad}
    narrow = min((x.dtype for x in rounded), key=lambda dtype: dtype.itemsize)
    pulls = [made(y.device, *y.shape).to(narrow).to(y.dtype) for y in named.values()]
    torch.autograd.backward(list(named.values()), pulls)
    found = {name: y.detach() for name, y in named.items()}
    for i, leaf in enumerate(leaves):
        assert leaf.grad is not None, f"{implementation}: input {i} has no gradient"
        found[f"gradient of input {i}"] = leaf.grad
    return found

# SPDX-License-Identifier: Apache-2.0
"""Triton kernels held to their references in fp64, on a GPU or, in a rehearsal, on a CPU.

A rehearsal (`python -m tools.gpu --rehearse`) runs the same tests in Triton's interpreter, which
rounds like `tensor_core_rounding`, with the same bounds and with sizes that take seconds. So every
line of a GPU test has run before it reaches a rented machine.
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
    """Return the full size on a GPU, or the small size in a rehearsal."""
    return small if REHEARSES else full


def random_tensor(device: torch.device, *shape: int) -> torch.Tensor:
    """Return random normal numbers, seeded by the shape."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device)


def agree(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor | None, ...]],
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    fp32_inputs: Collection[int] = (),
    bounds: Mapping[torch.dtype, float] = BOUND,
    poison: bool = True,
) -> float:
    """Compare outputs and gradients of the Triton kernel in `dtype` with the reference in fp64.

    Both read the same inputs, rounded to the dtype of the kernel.

    Args:
        function: called with `inputs` and `implementation`; outputs that are None or need no
            gradient are not compared.
        inputs: floating-point tensors; gradients of all are compared.
        dtype: dtype of the kernel's inputs.
        fp32_inputs: indices of the inputs that stay fp32, such as decays.
        bounds: largest error by dtype.
        poison: fill uninitialised memory with NaN while the kernels run.

    Returns:
        The largest error.

    Raises:
        AssertionError: an output or a gradient differs, is not finite, or is missing.
    """
    fp32 = {number: torch.float32 for number in fp32_inputs}
    rounded = [x.detach().to(fp32.get(i, dtype)) for i, x in enumerate(inputs)]
    if poison:
        with nan_memory():
            triton_tensors = _results(function, rounded, "triton", None)
    else:
        triton_tensors = _results(function, rounded, "triton", None)
    reference_tensors = _results(function, rounded, "reference", torch.float64)
    assert triton_tensors.keys() == reference_tensors.keys(), (
        f"{sorted(triton_tensors)} instead of {sorted(reference_tensors)}"
    )
    return max(
        assert_close_by_metric(name, tensor, reference_tensors[name], bound=bounds[dtype])
        for name, tensor in triton_tensors.items()
    )


def _results(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor | None, ...]],
    rounded: Sequence[torch.Tensor],
    implementation: str,
    kind: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """Return outputs and input gradients by name; every call uses the same output gradients."""
    leaves = [x.to(kind or x.dtype, copy=True).requires_grad_() for x in rounded]
    outputs = function(*leaves, implementation=implementation)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {f"output {i}": y for i, y in enumerate(outputs) if y is not None and y.requires_grad}
    narrowest = min((x.dtype for x in rounded), key=lambda dtype: dtype.itemsize)
    grad_outputs = [
        random_tensor(y.device, *y.shape).to(narrowest).to(y.dtype) for y in named.values()
    ]
    torch.autograd.backward(list(named.values()), grad_outputs)
    named_tensors = {name: y.detach() for name, y in named.items()}
    for i, leaf in enumerate(leaves):
        assert leaf.grad is not None, f"{implementation}: input {i} has no gradient"
        named_tensors[f"gradient of input {i}"] = leaf.grad
    return named_tensors

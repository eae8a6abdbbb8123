# SPDX-License-Identifier: Apache-2.0
"""The measure of parity: the largest difference over the largest reference value, per tensor.

    error(got, ref) = max|got - ref| / max|ref|

Elementwise relative error reaches 1 on healthy runs, where a sum of large terms happens to cancel;
this does not. Healthy fp32 parity is at or below 7e-7 and the bound is 1e-5, so a term that is
dropped, doubled or taken from the wrong rank is seen by orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

#: Largest error that counts as parity in fp32.
BOUND = 1e-5


def relative_error(got: torch.Tensor, ref: torch.Tensor) -> float:
    """Return max|got - ref| / max|ref|, computed in fp64; infinite where it has no meaning.

    Infinite: NaN or infinity in either, another shape, or a difference from a reference of zeros.
    Two tensors of zeros, or two empty ones, have error 0.
    """
    if got.shape != ref.shape:
        return math.inf
    if ref.numel() == 0:
        return 0.0
    # There: a GPU compares what would take seconds to copy.
    got64, ref64 = (t.detach().to(device=ref.device, dtype=torch.float64) for t in (got, ref))
    if not (got64.isfinite().all() and ref64.isfinite().all()):
        return math.inf
    difference, largest = (got64 - ref64).abs().max().item(), ref64.abs().max().item()
    if largest == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / largest


def assert_close_by_metric(
    name: str, got: torch.Tensor, ref: torch.Tensor, *, bound: float = BOUND
) -> float:
    """Return the relative error of `got`, or fail saying where it is worst."""
    found = relative_error(got, ref)
    if found <= bound:
        return found
    raise AssertionError(f"{name}: error {found:.3g} > {bound:.3g}; {_worst_place(got, ref)}")


def assert_all_close(
    got: Mapping[str, torch.Tensor],
    ref: Mapping[str, torch.Tensor],
    *,
    bound: float = BOUND,
    zeros: Collection[str] = (),
) -> float:
    """Compare two sets of named tensors, such as all gradients of a model; return the worst error.

    Args:
        got, ref: tensors by name. A missing or an extra name fails.
        bound: largest error allowed.
        zeros: names whose reference is declared to be all zero. Any other reference of zeros
            fails, because a comparison with it proves nothing.

    Raises:
        AssertionError: with every offender, the worst first.
    """
    problems = [f"missing: {name}" for name in sorted(ref.keys() - got.keys())]
    problems += [f"unexpected: {name}" for name in sorted(got.keys() - ref.keys())]
    if not ref:
        problems.append("nothing to compare: the reference is empty")
    errors = {name: relative_error(got[name], ref[name]) for name in ref.keys() & got.keys()}
    for name in sorted(errors):
        is_zero = not bool(ref[name].detach().count_nonzero())
        if is_zero and name not in zeros:
            problems.append(f"{name}: the reference is all zero, so comparing it proves nothing")
        if not is_zero and name in zeros:
            problems.append(f"{name}: declared to be zero, but the reference is not")
    for name, found in sorted(errors.items(), key=lambda item: -item[1]):
        if not found <= bound:
            place = _worst_place(got[name], ref[name])
            problems.append(f"{name}: error {found:.3g} > {bound:.3g}; {place}")
    if problems:
        raise AssertionError("\n".join(problems))
    return max(errors.values())


def _worst_place(got: torch.Tensor, ref: torch.Tensor) -> str:
    """Describe the element with the largest difference."""
    if got.shape != ref.shape:
        return f"shape {list(got.shape)} instead of {list(ref.shape)}"
    got64, ref64 = (t.detach().to(device="cpu", dtype=torch.float64) for t in (got, ref))
    difference = (got64 - ref64).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    flat = int(difference.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), ref.shape)]
    wrong = int((difference > 0).sum())
    return (
        f"worst at {place}: got {got64.flatten()[flat]:.9g}, reference {ref64.flatten()[flat]:.9g} "
        f"({wrong} of {ref.numel()} elements differ)"
    )

# SPDX-License-Identifier: Apache-2.0
"""The parity metric: the largest difference over the largest reference value, per tensor.

    error(got, ref) = max|got - ref| / max|ref|

Elementwise relative error reaches 1 on healthy runs, where a sum of large terms happens to cancel;
this does not. Healthy fp32 parity is at or below 7e-7 and the bound is 1e-5, so a term that is
dropped, doubled or taken from the wrong rank is seen by orders of magnitude.

A reference that is zero in exact arithmetic (the gradient of a bias before a norm, of keys under a
window of one token) consists of rounding errors, and so does the tested tensor: their ratio depends
on the CPU. A reference below `NOISE` rounding steps of its terms is therefore refused, whatever the
result. Declare such a tensor in `zeros`; it is then compared absolutely:

    max|got|, max|ref| <= NOISE * eps * scale        scale: the magnitude of the terms
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

#: Largest error that counts as parity in fp32.
BOUND = 1e-5
#: The bound by the device of the ranks. A GPU sums in another order, and in fused operations, than
#: the single process on a CPU.
DEVICE_BOUND: Mapping[str, float] = MappingProxyType({"cpu": BOUND, "cuda": 2 * BOUND})
#: A reference below this number of rounding steps of its terms is noise.
NOISE = 64


def noise_floor(got: torch.Tensor, ref: torch.Tensor, *, scale: float = 1.0) -> float:
    """Return the largest value that is rounding noise of terms of magnitude `scale`.

    The rounding step is the larger of both tensors' steps, and at most fp32's: narrower types are
    sums in fp32, rounded once.
    """
    types = [t.dtype for t in (got, ref) if t.dtype.is_floating_point]
    steps = [torch.finfo(dtype).eps for dtype in types] or [0.0]
    return NOISE * min(max(steps), torch.finfo(torch.float32).eps) * scale


def relative_error(
    got: torch.Tensor, ref: torch.Tensor, *, scale: float = 1.0, whole: torch.Tensor | None = None
) -> float:
    """Return max|got - ref| / max|ref|, computed in fp64; infinite where it has no meaning.

    Infinite: NaN or infinity in either, another shape, a difference from a reference of zeros, or a
    reference that is rounding noise. Two tensors of zeros, or two empty ones, have error 0.

    Args:
        scale: the magnitude of the terms that `ref` is a sum of; 0 for a product, which may be
            small without being noise.
        whole: the full tensor if `ref` is a slice; the error is then relative to max|whole|.
    """
    if got.shape != ref.shape:
        return math.inf
    if ref.numel() == 0:
        return 0.0
    # Compare on the device of `ref`: copying large tensors from a GPU takes seconds.
    got64, ref64 = (t.detach().to(device=ref.device, dtype=torch.float64) for t in (got, ref))
    if not (got64.isfinite().all() and ref64.isfinite().all()):
        return math.inf
    difference = (got64 - ref64).abs().max().item()
    largest = _largest(ref if whole is None else whole)
    if largest == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.inf if largest < noise_floor(got, ref, scale=scale) else difference / largest


def assert_close_by_metric(
    name: str,
    got: torch.Tensor,
    ref: torch.Tensor,
    *,
    bound: float = BOUND,
    scale: float = 1.0,
    whole: torch.Tensor | None = None,
) -> float:
    """Return the relative error of `got`, or fail saying where it is worst.

    Args:
        scale, whole: see `relative_error`.
    """
    error = relative_error(got, ref, scale=scale, whole=whole)
    if error <= bound:
        return error
    raise AssertionError(f"{name}: {_complaint(got, ref, error, bound=bound, scale=scale)}")


def assert_piece_close(
    name: str,
    got: torch.Tensor,
    whole: torch.Tensor,
    offsets: Sequence[int],
    *,
    bound: float = BOUND,
    scale: float = 1.0,
) -> torch.Tensor:
    """Compare the part of a logical tensor that a rank holds; return that part of the reference.

    Args:
        got: from `offsets` on.
        whole: the reference of the whole tensor; the error is relative to its largest value, and
            if it is zero, comparing proves nothing.
        scale: see `relative_error`.
    """
    ref = whole
    for dim, (offset, size) in enumerate(zip(offsets, got.shape, strict=True)):
        ref = ref.narrow(dim, offset, size)
    if not _largest(whole):
        raise AssertionError(f"{name}: the reference is all zero, so comparing it proves nothing")
    assert_close_by_metric(name, got, ref, bound=bound, scale=scale, whole=whole)
    return ref


def assert_all_close(
    got: Mapping[str, torch.Tensor],
    ref: Mapping[str, torch.Tensor],
    *,
    bound: float = BOUND,
    zeros: Collection[str] = (),
    scale: float = 1.0,
) -> float:
    """Compare two sets of named tensors, such as all gradients of a model; return the worst error.

    Args:
        got, ref: tensors by name. A missing or an extra name fails.
        bound: largest error allowed.
        zeros: names whose reference is declared to be zero in exact arithmetic; the tested tensor
            must stay below the noise of the largest tensor of the set. Any other reference of
            zeros or noise fails, because a comparison with it proves nothing.
        scale: the magnitude of the terms, if that is more than the largest tensor of the set; below
            1 if all of the set is small.

    Raises:
        AssertionError: with every offender, the worst first.
    """
    problems = [f"missing: {name}" for name in sorted(ref.keys() - got.keys())]
    problems += [f"unexpected: {name}" for name in sorted(got.keys() - ref.keys())]
    if not ref:
        problems.append("nothing to compare: the reference is empty")
    scale = max([scale, *(_largest(tensor) for tensor in ref.values())])
    errors: dict[str, float] = {}
    for name in sorted(ref.keys() & got.keys()):
        if name in zeros:
            errors[name] = 0.0
            problems += _not_zero(name, got[name], ref[name], scale=scale)
            continue
        errors[name] = relative_error(got[name], ref[name], scale=scale)
        if ref[name].numel() and not _largest(ref[name]):
            problems.append(f"{name}: the reference is all zero, so comparing it proves nothing")
    for name, error in sorted(errors.items(), key=lambda item: -item[1]):
        if not error <= bound:
            complaint = _complaint(got[name], ref[name], error, bound=bound, scale=scale)
            problems.append(f"{name}: {complaint}")
    if problems:
        raise AssertionError("\n".join(problems))
    return max(errors.values())


def _largest(tensor: torch.Tensor) -> float:
    """Return max|tensor|, 0 if it is empty."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def _not_zero(name: str, got: torch.Tensor, ref: torch.Tensor, *, scale: float) -> list[str]:
    """List the tensors that are above the noise floor, or a shape mismatch."""
    if got.shape != ref.shape:
        return [f"{name}: {_worst_place(got, ref)}"]
    floor = noise_floor(got, ref, scale=scale)
    magnitudes = {"got": _largest(got), "the reference": _largest(ref)}
    return [
        f"{name}: declared to be zero, but {which} has {largest:.3g}, over the noise of {floor:.3g}"
        for which, largest in magnitudes.items()
        if not largest <= floor
    ]


def _complaint(
    got: torch.Tensor, ref: torch.Tensor, error: float, *, bound: float, scale: float
) -> str:
    """Describe an error above the bound."""
    worst = _worst_place(got, ref)
    if got.shape == ref.shape and 0.0 < _largest(ref) < noise_floor(got, ref, scale=scale):
        return (
            f"the reference is at most {_largest(ref):.3g}, rounding noise of terms of magnitude "
            f"{scale:.3g}: compare it absolutely (`zeros`), or give the terms' `scale`; {worst}"
        )
    return f"error {error:.3g} > {bound:.3g}; {worst}"


def _worst_place(got: torch.Tensor, ref: torch.Tensor) -> str:
    """Describe the element with the largest difference."""
    if got.shape != ref.shape:
        return f"shape {list(got.shape)} instead of {list(ref.shape)}"
    got64, ref64 = (t.detach().to(device="cpu", dtype=torch.float64) for t in (got, ref))
    difference = (got64 - ref64).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    flat = int(difference.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), ref.shape)]
    wrong = int((difference > 0).sum())
    return (
        f"worst at {index}: got {got64.flatten()[flat]:.9g}, reference {ref64.flatten()[flat]:.9g} "
        f"({wrong} of {ref.numel()} elements differ)"
    )


def assert_all_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]):
    """Assert that both have the same names, and each tensor the same dtype and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name

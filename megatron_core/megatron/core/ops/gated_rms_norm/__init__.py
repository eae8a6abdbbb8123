# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation with a gate: of Gated DeltaNet behind it, of Mamba-2 before it.

In plain torch, which a CPU uses, a block of rows is worked out at once, so that its passes find
each other's results in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.ops.backend_choice import (
    StoredWeight,
    accumulation_dtype,
    apply_function,
    choose,
)
from megatron.core.ops.joint_gradient import ProjectionSlice, slice_of

#: Whether the norm or the gate comes first.
NORM_FIRST, GATE_FIRST = "norm_first", "gate_first"


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | ProjectionSlice,
    weight: torch.Tensor | StoredWeight,
    *,
    eps: float,
    order: str = NORM_FIRST,
    group_size: int | None = None,
    places: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Normalise groups of the last dimension by their root mean square, and gate them.

    norm_first: y = rms(x) * w * silu(gate) (Yang et al. 2024, arXiv 2412.06464, section 3.4);
    gate_first: y = rms(x * silu(gate)) * w (Dao & Gu 2024, arXiv 2405.21060, section 7.2);
    rms(t) = t / sqrt(mean of t^2 over a group + eps), in fp32.
    Backward saves the inputs and one fp32 number a group.

    With `places` x has its rows in another order, such as that of packed tokens: y and the gate
    have those of the places, and nothing else goes over x to put it in order.

    Args:
        x: [..., n], or [t, ..., n] with places; slices are read in place.
        gate: [..., n], or [rows, ..., n] with places; of a slice of a projection the gradient is
            written to that of the projection, if it says where that is.
        weight: [n], or [u, n] for x and gate [..., u, n]; the gradient of a stored one is put flat.
        eps: added to the mean square.
        order: "norm_first" or "gate_first".
        group_size: features that are normalised together; None is n.
        places: int64 [rows], the row of x that each row of y is made of. Each of x is named once.
            -1 is a padding row: y and the gradient of its gate are 0, whatever it holds.
        implementation: "reference", "triton" or None (by device).

    Returns:
        y in x's dtype, of the gate's shape.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    """
    op = "gated_rms_norm"
    gate, gradient = slice_of(gate)
    stored = weight if isinstance(weight, StoredWeight) else None
    value, leaf = (weight, weight) if stored is None else stored[:2]
    _check_shapes(op, x, gate, value, places=places)
    if not x.is_floating_point() or not gate.is_floating_point():
        raise ValueError(f"{op}: x is {x.dtype}, gate {gate.dtype}; give floating-point tensors")
    if eps < 0:
        raise ValueError(f"{op}: eps={eps} must not be negative")
    if order not in (NORM_FIRST, GATE_FIRST):
        raise ValueError(f"{op}: order={order!r}: use {NORM_FIRST} or {GATE_FIRST}")
    features = x.shape[-1]
    size = features if group_size is None else group_size
    if size < 1 or features % size:
        raise ValueError(f"{op}: group_size {size} must divide the {features} features")
    if choose(implementation, x, op) == "triton":
        from megatron.core.ops.gated_rms_norm import triton as kernels

        call = kernels.NormCall(eps, order == GATE_FIRST, size, gradient, stored)
        return apply_function(kernels.GatedRmsNorm, x, gate, leaf, places, call)
    options = {"eps": eps, "gate_first": order == GATE_FIRST, "size": size}
    return _in_torch(x, gate, weight, places=places, **options)


def _check_shapes(
    op: str,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    places: torch.Tensor | None,
) -> None:
    """Raise ValueError unless shapes fit together."""
    first = 0 if places is None else 1
    if x.ndim < 2 or gate.ndim != x.ndim or gate.shape[first:] != x.shape[first:]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and gate {tuple(gate.shape)} must have one shape, of rows "
            "and features" + (", but for the number of rows" if first else "")
        )
    wanted = x.shape[-1:] if weight.ndim != 2 else x.shape[-2:]
    if weight.shape != wanted or weight.ndim >= x.ndim:
        raise ValueError(f"{op}: weight {tuple(weight.shape)} must be {tuple(x.shape[-1:])}")
    if places is None:
        return
    if places.dtype != torch.int64 or places.shape != gate.shape[:1]:
        raise ValueError(
            f"{op}: places {tuple(places.shape)} {places.dtype} must be int64, one for each of "
            f"{gate.shape[0]} rows"
        )
    if len(x) > len(places):
        raise ValueError(
            f"{op}: {len(x)} rows of x are more than {len(places)} places: each row needs one"
        )


# --- reference: plain torch

# Elements of a block on a CPU: few stay in the cache, but every block starts the threads anew.
# Layers that call this take 6 to 13 % longer with 2^17.
ELEMENTS_IN_CACHE = 1 << 20


def _in_torch(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    *,
    eps: float,
    gate_first: bool,
    size: int,
    places: torch.Tensor | None,
) -> torch.Tensor:
    """Normalise and gate; see `gated_rms_norm`."""
    shape = gate.shape
    stored = weight if isinstance(weight, StoredWeight) else None
    if (weight if stored is None else stored.value).ndim == 2:
        x, gate = x.flatten(-2), gate.flatten(-2)
    leaf = weight.flatten() if stored is None else stored.anchor
    last = leaf, eps, gate_first, size, stored
    if places is None:
        return apply_function(GatedRmsNorm, x, gate, *last).view(shape)
    rows = apply_function(TakePlaces, x, places)
    if len(x) == len(places):  # each is named: there is no padding
        return apply_function(GatedRmsNorm, rows, gate, *last).view(shape)
    padding = (places < 0).view(-1, *[1] * (gate.ndim - 1))
    y = apply_function(GatedRmsNorm, rows, gate.masked_fill(padding, 0), *last)
    return y.masked_fill(padding, 0).view(shape)


class TakePlaces(torch.autograd.Function):
    """Forward: y[i] = x[places[i]], 0 where that is -1. dgrad: dx[places[i]] = dy[i]. Saves the
    places."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        ctx.count = len(x)
        if len(x) == len(places):
            return x.index_select(0, places)
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, _filled(places, len(x)))

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        found = grad.new_zeros(ctx.count + 1, *grad.shape[1:])  # padding goes to the last row
        return found.index_copy_(0, _filled(places, ctx.count), grad)[:-1], None


def _filled(places: torch.Tensor, count: int) -> torch.Tensor:
    """Return places with `count` in place of -1."""
    return torch.where(places < 0, count, places)


class GatedRmsNorm(torch.autograd.Function):
    """y = x r w silu(gate), or y = z r w with z = x silu(gate) where the gate comes first.

    Forward: as above, with r = 1 / sqrt(mean(t^2) + eps), one a group, t = x or z.
    dgrad: with s = silu(gate) and d = g s or g, dt = r (d w - t r^2 mean(d w t)), and
    dx = dt, dgate = g x r w s', or dx = dt s, dgate = dt x s'.
    wgrad: sum over rows of r d t. Saves x, gate, w and r.
    """

    @staticmethod
    def forward(ctx, x, gate, weight, eps, gate_first, size, stored):
        dtype = accumulation_dtype(x.dtype)
        weight = weight if stored is None else stored.value.flatten()
        scale = weight.to(dtype)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty((*x.shape[:-1], x.shape[-1] // size), dtype=dtype, device=x.device)
        for (opened,), values, gates, out, factor in _blocks(1, dtype, x, gate, y, rstd):
            _silu(_wide(gates, opened), out=opened)
            if gate_first:
                opened.mul_(values)
            inner = opened if gate_first else values
            torch.linalg.vector_norm(_groups(inner, size), dim=-1, dtype=dtype, out=factor)
            factor.square_().div_(size).add_(eps).rsqrt_()
            if not gate_first:
                opened.mul_(values)
            torch.mul(_groups(opened.mul_(scale), size), factor[..., None], out=_groups(out, size))
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.gate_first, ctx.size, ctx.stored = gate_first, size, stored
        return y

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight, rstd = ctx.saved_tensors
        grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate)]
        scale = weight.to(rstd.dtype)
        grad_scale = torch.zeros_like(scale)
        differentiate = _differentiate_gate_first if ctx.gate_first else _differentiate_norm_first
        for scratch, *block in _blocks(5, scale.dtype, x, gate, grad, rstd, *grads):
            differentiate(*block, scratch=scratch, weights=(scale, grad_scale))
        if ctx.stored is None:
            return *grads, grad_scale.to(weight.dtype), None, None, None, None
        if ctx.needs_input_grad[2]:
            ctx.stored.accumulate_grad(grad_scale)
        return *grads, None, None, None, None, None


def _blocks(buffers: int, dtype: torch.dtype, *tensors: torch.Tensor) -> Iterator[tuple]:
    """Yield buffers of the shape of a block, which all blocks share, and the block.

    Args:
        buffers: so many.
        dtype: of these.
        tensors: [t, ...]; a block has some rows of each. Buffers have the shape of the first.
    """
    first = tensors[0]
    rows = max(1, first.shape[0])
    if first.device.type == "cpu":
        rows = max(1, ELEMENTS_IN_CACHE // max(1, first[:1].numel()))
    shape = (buffers, min(rows, first.shape[0]), *first.shape[1:])
    scratch = torch.empty(shape, dtype=dtype, device=first.device)
    for block in zip(*(x.split(rows) for x in tensors), strict=True):
        yield scratch[:, : block[0].shape[0]].unbind(), *block


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return [..., n / size, size] from x [..., n]."""
    return x.unflatten(-1, (-1, size))


def _wide(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype of `scratch`: itself, or written there."""
    return x if x.dtype == scratch.dtype else scratch.copy_(x)


def _silu(gate: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.silu.out(gate, out=out)


def _silu_backward(grad: torch.Tensor, gate: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write the gradient of a gate in the dtype of `grad` to `out`, whose dtype may be narrower;
    `grad` is overwritten if it is."""
    wide = out if out.dtype == grad.dtype else grad
    torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=wide)
    if wide is not out:
        out.copy_(wide)


def _differentiate_norm_first(x, gate, grad, rstd, grad_x, grad_gate, *, scratch, weights):
    """Write the gradients of a block of y = x r w silu(gate)."""
    pull, product, inner, both, wide = scratch
    gate = _wide(gate, wide)
    _silu(gate, out=pull).mul_(grad)
    torch.mul(inner.copy_(x), grad, out=both)
    torch.mul(pull, inner, out=product)
    _differentiate_norm(pull, product, inner, rstd=rstd, weights=weights)
    grad_x.copy_(pull)
    groups = _groups(both.mul_(weights[0]), x.shape[-1] // rstd.shape[-1])
    groups.mul_(rstd[..., None])
    _silu_backward(both, gate, out=grad_gate)


def _differentiate_gate_first(x, gate, grad, rstd, grad_x, grad_gate, *, scratch, weights):
    """Write the gradients of a block of y = x silu(gate) r w."""
    pull, product, inner, opened, wide = scratch
    gate = _wide(gate, wide)
    torch.mul(_silu(gate, out=opened), x, out=inner)
    torch.mul(inner, grad, out=product)
    pull.copy_(grad)
    _differentiate_norm(pull, product, inner, rstd=rstd, weights=weights)
    torch.mul(pull, opened, out=grad_x)
    _silu_backward(pull.mul_(x), gate, out=grad_gate)


def _differentiate_norm(pull, product, inner, *, rstd, weights):
    """Turn `pull`, the gradient d of t r w, into that of t; add that of w to its own.

    Args:
        pull: d [..., n], changed in place.
        product: d t.
        inner: t, written over.
        rstd: r [..., n / size].
        weights: w and its gradient, [n].
    """
    scale, grad_scale = weights
    groups = rstd.shape[-1]
    size = pull.shape[-1] // groups
    factor = rstd.reshape(-1, groups)  # [t, groups]
    parts = product.view(-1, groups, size).transpose(0, 1)  # [groups, t, size]
    grad_scale.view(groups, 1, size).baddbmm_(factor.t()[:, None], parts)
    means = torch.bmm(parts, scale.view(groups, size, 1)).div_(size)  # [groups, t, 1]
    means.mul_(factor.t()[..., None].square())
    rows = _groups(pull.mul_(scale), size)
    means = means.transpose(0, 1).view(*rstd.shape, 1)
    rows.addcmul_(_groups(inner, size), means, value=-1).mul_(rstd[..., None])

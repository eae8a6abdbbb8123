# SPDX-License-Identifier: Apache-2.0
"""Gated norms in plain torch, in blocks of rows whose intermediate results stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.ops.backend_choice import StoredWeight, accumulation_dtype, apply_function

# Elements of a block on a CPU. Small blocks stay in the cache, but every block restarts the
# threads: layers that call this take 6 to 13 % longer with 2^17.
ELEMENTS_IN_CACHE = 1 << 20


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    *,
    eps: float,
    gate_first: bool,
    size: int,
    row_index: torch.Tensor | None,
) -> torch.Tensor:
    """Normalise and gate; see `ops.recurrence.gated_norm.gated_rms_norm`."""
    shape = gate.shape
    if isinstance(weight, StoredWeight):
        value, leaf, stored = weight.value, weight.anchor, weight
    else:
        value, leaf, stored = weight, weight.flatten(), None
    if value.ndim == 2:
        x, gate = x.flatten(-2), gate.flatten(-2)
    arguments = leaf, eps, gate_first, size, stored
    if row_index is None:
        return apply_function(GatedRmsNorm, x, gate, *arguments).view(shape)
    gathered = apply_function(GatherRows, x, row_index)
    if len(x) == len(row_index):  # no padding rows
        return apply_function(GatedRmsNorm, gathered, gate, *arguments).view(shape)
    padding = (row_index < 0).view(-1, *[1] * (gate.ndim - 1))
    y = apply_function(GatedRmsNorm, gathered, gate.masked_fill(padding, 0), *arguments)
    return y.masked_fill(padding, 0).view(shape)


class GatherRows(torch.autograd.Function):
    """Forward: y[i] = x[row_index[i]], or 0 if row_index[i] is -1. dgrad: dx[row_index[i]] = dy[i].
    Saves row_index."""

    @staticmethod
    def forward(ctx, x, row_index):
        ctx.save_for_backward(row_index)
        ctx.count = len(x)
        if len(x) == len(row_index):
            return x.index_select(0, row_index)
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(
            0, _fill_padding(row_index, len(x))
        )

    @staticmethod
    def backward(ctx, d_y):
        (row_index,) = ctx.saved_tensors
        d_x = d_y.new_zeros(
            ctx.count + 1, *d_y.shape[1:]
        )  # padding rows write to the last row, which is cut off
        return d_x.index_copy_(0, _fill_padding(row_index, ctx.count), d_y)[:-1], None


def _fill_padding(row_index: torch.Tensor, count: int) -> torch.Tensor:
    """Return row_index with -1 replaced by `count`."""
    return torch.where(row_index < 0, count, row_index)


class GatedRmsNorm(torch.autograd.Function):
    """y = x r w silu(gate), or y = z r w with z = x silu(gate) where the gate comes first.

    Forward: as above, with r = 1 / sqrt(mean(t^2) + eps), one per group, t = x or z.
    dgrad: with s = silu(gate) and d = g s or g, dt = r (d w - t r^2 mean(d w t)), and
    dx = dt, dgate = g x r w s', or dx = dt s, dgate = dt x s'.
    wgrad: sum over rows of r d t. Saves x, gate, w and r.
    """

    @staticmethod
    def forward(ctx, x, gate, weight, eps, gate_first, size, stored):
        dtype = accumulation_dtype(x.dtype)
        weight = weight if stored is None else stored.value.flatten()
        weight_acc = weight.to(dtype)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty((*x.shape[:-1], x.shape[-1] // size), dtype=dtype, device=x.device)
        for (silu_gate,), x_block, gate_block, y_block, rstd_block in _blocks(
            1, dtype, x, gate, y, rstd
        ):
            _silu(_to_dtype_of(gate_block, silu_gate), out=silu_gate)
            if gate_first:
                silu_gate.mul_(x_block)
            norm_input = silu_gate if gate_first else x_block
            torch.linalg.vector_norm(_groups(norm_input, size), dim=-1, dtype=dtype, out=rstd_block)
            rstd_block.square_().div_(size).add_(eps).rsqrt_()
            if not gate_first:
                silu_gate.mul_(x_block)
            torch.mul(
                _groups(silu_gate.mul_(weight_acc), size),
                rstd_block[..., None],
                out=_groups(y_block, size),
            )
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.gate_first, ctx.size, ctx.stored = gate_first, size, stored
        return y

    @staticmethod
    def backward(ctx, d_y):
        x, gate, weight, rstd = ctx.saved_tensors
        grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate)]
        weight_acc = weight.to(rstd.dtype)
        d_weight = torch.zeros_like(weight_acc)
        differentiate = _differentiate_gate_first if ctx.gate_first else _differentiate_norm_first
        for scratch, *block in _blocks(5, weight_acc.dtype, x, gate, d_y, rstd, *grads):
            differentiate(*block, scratch=scratch, weights=(weight_acc, d_weight))
        if ctx.stored is None:
            return *grads, d_weight.to(weight.dtype), None, None, None, None
        if ctx.needs_input_grad[2]:
            ctx.stored.accumulate_grad(d_weight)
        return *grads, None, None, None, None, None


def _blocks(buffers: int, dtype: torch.dtype, *tensors: torch.Tensor) -> Iterator[tuple]:
    """Yield (shared scratch buffers, slices of the tensors) for each block of rows.

    Args:
        buffers: number of buffers.
        dtype: the dtype of the buffers.
        tensors: [t, ...]; the buffers have the shape of a slice of tensors[0].
    """
    x = tensors[0]
    rows = max(1, x.shape[0])
    if x.device.type == "cpu":
        rows = max(1, ELEMENTS_IN_CACHE // max(1, x[:1].numel()))
    shape = (buffers, min(rows, x.shape[0]), *x.shape[1:])
    scratch = torch.empty(shape, dtype=dtype, device=x.device)
    for block in zip(*(x.split(rows) for x in tensors), strict=True):
        yield scratch[:, : block[0].shape[0]].unbind(), *block


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return [..., n / size, size] from x [..., n]."""
    return x.unflatten(-1, (-1, size))


def _to_dtype_of(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype of `scratch`: x itself, or `scratch` after a copy."""
    return x if x.dtype == scratch.dtype else scratch.copy_(x)


def _silu(gate: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.silu.out(gate, out=out)


def _silu_backward(d_silu: torch.Tensor, gate: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write the gradient of a gate to `out`; overwrites `d_silu` if `out` has another dtype."""
    acc_out = out if out.dtype == d_silu.dtype else d_silu
    torch.ops.aten.silu_backward.grad_input(d_silu, gate, grad_input=acc_out)
    if acc_out is not out:
        out.copy_(acc_out)


def _differentiate_norm_first(x, gate, d_y, rstd, d_x, d_gate, *, scratch, weights):
    """Write the gradients of a block of y = x r w silu(gate)."""
    d_norm, product, norm_input, d_silu, gate_scratch = scratch
    gate = _to_dtype_of(gate, gate_scratch)
    _silu(gate, out=d_norm).mul_(d_y)
    torch.mul(norm_input.copy_(x), d_y, out=d_silu)
    torch.mul(d_norm, norm_input, out=product)
    _differentiate_norm(d_norm, product, norm_input, rstd=rstd, weights=weights)
    d_x.copy_(d_norm)
    groups = _groups(d_silu.mul_(weights[0]), x.shape[-1] // rstd.shape[-1])
    groups.mul_(rstd[..., None])
    _silu_backward(d_silu, gate, out=d_gate)


def _differentiate_gate_first(x, gate, d_y, rstd, d_x, d_gate, *, scratch, weights):
    """Write the gradients of a block of y = x silu(gate) r w."""
    d_norm, product, norm_input, silu_gate, gate_scratch = scratch
    gate = _to_dtype_of(gate, gate_scratch)
    torch.mul(_silu(gate, out=silu_gate), x, out=norm_input)
    torch.mul(norm_input, d_y, out=product)
    d_norm.copy_(d_y)
    _differentiate_norm(d_norm, product, norm_input, rstd=rstd, weights=weights)
    torch.mul(d_norm, silu_gate, out=d_x)
    _silu_backward(d_norm.mul_(x), gate, out=d_gate)


def _differentiate_norm(d_norm, product, norm_input, *, rstd, weights):
    """Replace `d_norm`, the gradient d of t r w, by the gradient of t; add to the gradient of w.

    Args:
        d_norm: d [..., n], updated in place.
        product: d t.
        norm_input: t, overwritten.
        rstd: r [..., n / size].
        weights: w and its gradient, [n].
    """
    weight, d_weight = weights
    groups = rstd.shape[-1]
    size = d_norm.shape[-1] // groups
    rstd_rows = rstd.reshape(-1, groups)  # [t, groups]
    products = product.view(-1, groups, size).transpose(0, 1)  # [groups, t, size]
    d_weight.view(groups, 1, size).baddbmm_(rstd_rows.t()[:, None], products)
    dots = torch.bmm(products, weight.view(groups, size, 1)).div_(size)  # [groups, t, 1]
    dots.mul_(rstd_rows.t()[..., None].square())
    d_groups = _groups(d_norm.mul_(weight), size)
    dots = dots.transpose(0, 1).view(*rstd.shape, 1)
    d_groups.addcmul_(_groups(norm_input, size), dots, value=-1).mul_(rstd[..., None])

# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of a vocabulary-parallel projection, a chunk of tokens at a time.

Each chunk's logits [t, V/tp] exist only while that chunk is worked on: its softmax statistics are
combined over tp (one all-reduce of the maximum, one of the sums), and both gradients are made on
the spot, since the weight of every token's loss is known in forward. Backward only multiplies by
the incoming gradient. Where one rank has the whole vocabulary there is nothing to combine, and a
CPU goes through a chunk once, a few rows in its cache at a time.

A split backward costs the memory of all logits from forward to the weight gradient: dlogits wait
for it, in the dtype of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron.core.comm.collectives import all_reduce
from megatron.core.ops.dispatch import matmul_dtype
from megatron.core.ops.linear_cross_entropy import (
    chunk_gradient_,
    chunk_statistics,
    fused_gradient_,
    tokens_per_chunk,
)
from megatron.core.process_groups import Group
from megatron.core.weight_gather import WeightHandle
from megatron.core.weight_gather.matmul import linear_dgrad, linear_forward, linear_wgrad_


def vocab_parallel_cross_entropy(
    hidden: torch.Tensor,
    weight: WeightHandle,
    targets: torch.Tensor,
    token_weights: torch.Tensor,
    *,
    group: Group,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum of token_weights · nll, nll) of hidden Wᵀ.

    Args:
        hidden: [t, h], whole on every tp rank; its gradient is partial(tp).
        weight: handle of the local [V/tp, h] rows, padding last.
        targets: int64 [t], in [0, V).
        token_weights: fp32 [t], the factor of each token's loss; no gradient.
        group: tp.
        vocab_size: V without padding.

    Returns:
        (loss fp32 scalar, nll fp32 [t] without gradient).
    """
    training = torch.is_grad_enabled()  # always off inside a Function's forward
    return _CrossEntropy.apply(
        hidden, weight.anchor, weight, targets, token_weights, group, vocab_size, training
    )


def combine_statistics(
    maximum: torch.Tensor, sum_exp: torch.Tensor, target_logit: torch.Tensor, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-sum-exp, target logit), fp32 [t], of the whole vocabulary from its slices."""
    top = all_reduce(maximum, group, op="max")
    sums = torch.stack([sum_exp * torch.exp(maximum - top), target_logit])  # [2, t]
    all_reduce(sums, group, out=sums)
    return top + torch.log(sums[0]), sums[1]


def _chunk_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    token_weights: torch.Tensor,
    *,
    group: Group,
    columns: Mapping[str, int],
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a chunk's nll [t] and, if `wanted`, overwrite its logits by their gradient.

    Also returned: the factor [t, 1] by which that gradient must still be multiplied, or None.
    """
    if group.size == 1 and logits.device.type == "cpu":
        nll, factor = fused_gradient_(
            logits, targets, valid_columns=columns["valid_columns"], gradient=wanted
        )
        return nll, None if factor is None else factor.mul_(token_weights)[:, None]
    lse, target_logit = combine_statistics(*chunk_statistics(logits, targets, **columns), group)
    if wanted:
        chunk_gradient_(logits, targets, lse, token_weights, **columns)
    return lse - target_logit, None


class _CrossEntropy(torch.autograd.Function):
    """forward loss, and both gradients if wanted; backward scales them. Saves d_hidden and dW.

    Where backward will be split, forward leaves the weight gradient out and saves what it is made
    of, hidden and dlogits; the product is then put off with the others.
    """

    @staticmethod
    def forward(ctx, hidden, anchor, handle, targets, token_weights, group, vocab_size, training):
        weight = handle.get()
        rows = weight.shape[0]
        first = group.rank * rows
        columns = {
            "vocab_start": first,
            "valid_columns": max(0, min(rows, vocab_size - first)),
        }
        want_hidden = training and ctx.needs_input_grad[0]
        want_weight = training and ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = None
        later: list[torch.Tensor | None] = []  # dlogits and the factor of every chunk, in turn
        splits = want_weight and handle.deferral.splits
        if want_weight and not splits:
            d_weight = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        nll = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        # Where the device multiplies in a wider dtype: once, not once a chunk, and the logits stay
        # in it, unrounded.
        matrix = weight.to(matmul_dtype(hidden, handle.cpu_dtype))
        step = tokens_per_chunk(rows, weight.device)
        for start in range(0, targets.shape[0], step):
            part = slice(start, start + step)
            chunk = hidden[part].to(matrix.dtype)  # [t, h]
            # [t, V/tp], then their gradient
            logits = linear_forward(chunk, matrix, cpu_dtype=matrix.dtype)
            nll[part], factor = _chunk_gradient_(
                logits,
                targets[part],
                token_weights[part],
                group=group,
                columns=columns,
                wanted=want_hidden or want_weight,
            )
            if d_hidden is not None:
                product = linear_dgrad(logits, matrix, cpu_dtype=matrix.dtype)
                d_hidden[part] = product if factor is None else product.mul_(factor)
            if d_weight is not None:
                _add_chunk_(d_weight, chunk, logits, factor, first=start == 0)
            if splits:
                later += [logits, factor]
        ctx.handle = handle
        kept = (hidden, *later) if splits else ()
        ctx.save_for_backward(d_hidden, d_weight, *kept)
        ctx.mark_non_differentiable(nll)
        return torch.dot(nll, token_weights), nll

    @staticmethod
    def backward(ctx, grad, _):
        d_hidden, d_weight, *kept = ctx.saved_tensors
        # On a CPU reading the factor costs nothing, and it is 1 in training: no pass over the
        # gradients.
        scaled = grad.device.type != "cpu" or float(grad) != 1.0
        if d_hidden is not None and scaled:
            d_hidden = d_hidden * grad
        if d_weight is not None:
            ctx.handle.add_gradient(d_weight * grad if scaled else d_weight)
        if kept:
            scale = grad.detach() if scaled else None
            ctx.handle.made_gradient(_product(ctx.handle.shape, kept[0].detach(), kept[1:], scale))
        return d_hidden, None, None, None, None, None, None, None


def _product(
    shape: tuple[int, ...],
    hidden: torch.Tensor,
    later: Sequence[torch.Tensor | None],
    scale: torch.Tensor | None,
) -> Callable[[], torch.Tensor]:
    """Return what computes the weight gradient, as forward would have, of what forward has kept.

    Args:
        shape: of the weight, (V/tp, h).
        hidden: [t, h].
        later: dlogits [t, V/tp] and its factor [t, 1] or None, for every chunk of t in turn.
        scale: the incoming gradient, a scalar; None is 1.
    """

    def make() -> torch.Tensor:
        d_weight = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        start = 0
        for logits, factor in zip(later[::2], later[1::2], strict=True):
            assert logits is not None
            chunk = hidden[start : start + len(logits)].to(logits.dtype)  # [t, h]
            _add_chunk_(d_weight, chunk, logits, factor, first=start == 0)
            start += len(logits)
        return d_weight if scale is None else d_weight * scale

    return make


def _add_chunk_(
    d_weight: torch.Tensor,
    chunk: torch.Tensor,
    logits: torch.Tensor,
    factor: torch.Tensor | None,
    *,
    first: bool,
) -> None:
    """Add a chunk's dlogitsᵀ hidden to the weight gradient [V/tp, h]; the first one overwrites.

    Args:
        chunk: hidden [t, h], in the dtype of the product.
        logits: dlogits [t, V/tp], up to `factor`.
        factor: [t, 1], which dlogits must be multiplied by; None is 1.
    """
    rows = chunk if factor is None else (chunk * factor).to(chunk.dtype)
    linear_wgrad_(d_weight, logits, rows, overwrite=first, cpu_dtype=chunk.dtype)

# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel embedding, output projection and cross entropy.

The embedding and the head are sharded by vocabulary rows over tp, for any vocabulary size.

The cross entropy is computed one chunk of tokens at a time. A chunk's logits [t, V/tp] exist only
while it is processed: its softmax statistics are combined over tp (one all-reduce of the maximum,
one of the sums), and both gradients are computed immediately, since the weight of every token's
loss is known in forward. Backward only multiplies by the incoming gradient. If one rank has the
whole vocabulary, statistics need not be combined, and a CPU computes a chunk in one pass, a few
cached rows at a time.

A split backward takes the memory of all logits from forward to the weight gradient: it stores
dlogits, in the dtype of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.comm.collectives import all_reduce
from megatron.core.comm.conjugates import (
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
)
from megatron.core.initialize import InitSpec
from megatron.core.ops.backend_choice import accumulation_dtype, add_product_, apply_function
from megatron.core.ops.linear_cross_entropy import (
    chunk_gradient_,
    chunk_statistics,
    fused_gradient_,
    tokens_per_chunk,
)
from megatron.core.process_groups import Group
from megatron.core.tensor_parallel.linear import TensorParallelRegion
from megatron.core.weight_gather import WeightHandle, WeightStore
from megatron.core.weight_sharding import Shard, WeightSharding


def vocab_parallel_cross_entropy(
    hidden: torch.Tensor,
    weight: WeightHandle,
    targets: torch.Tensor,
    token_weights: torch.Tensor,
    *,
    group: Group,
    vocab_size: int,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum of token_weights · nll, nll) of hidden Wᵀ, or of c tanh(hidden Wᵀ / c).

    Args:
        hidden: [t, h], replicated on every tp rank; its gradient is partial(tp).
        weight: handle of the local [V/tp, h] rows, padding last.
        targets: int64 [t], in [0, V).
        token_weights: fp32 [t], factor on each token's loss; no gradient.
        group: the tp group.
        vocab_size: V without padding.
        softcap: bound c of the logits; None for none.

    Returns:
        (loss fp32 scalar, nll fp32 [t] without gradient).
    """
    training = torch.is_grad_enabled()  # always off inside a Function's forward
    return apply_function(
        _CrossEntropy,
        hidden,
        weight.param,
        weight,
        targets,
        token_weights,
        _LossOptions(group, vocab_size, softcap, training),
    )


class _LossOptions(NamedTuple):
    """Options of `vocab_parallel_cross_entropy`, and whether gradients are needed."""

    group: Group
    vocab_size: int
    softcap: float | None
    training: bool


def _cap_(logits: torch.Tensor, softcap: float, *, needs_slope: bool) -> torch.Tensor | None:
    """Bound logits in place; return the derivative if needed."""
    bounded = (logits.to(accumulation_dtype(logits.dtype)) / softcap).tanh_()  # in (-1, 1)
    logits.copy_(bounded).mul_(softcap)
    return bounded.square_().neg_().add_(1.0) if needs_slope else None


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
    columns: Mapping[str, Any],
    needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a chunk's nll [t] and, if `needs_gradient`, overwrite its logits by their gradient.

    The second result is a factor [t, 1] that the gradient still has to be multiplied by, or None.
    """
    if group.size == 1 and logits.device.type == "cpu":
        nll, factor = fused_gradient_(
            logits, targets, valid_columns=columns["valid_columns"], gradient=needs_gradient
        )
        return nll, None if factor is None else factor.mul_(token_weights)[:, None]
    lse, target_logit = combine_statistics(*chunk_statistics(logits, targets, **columns), group)
    if needs_gradient:
        chunk_gradient_(logits, targets, lse, token_weights, **columns)
    return lse - target_logit, None


class _CrossEntropy(torch.autograd.Function):
    """forward loss, and both gradients if required; backward scales them in place, so it runs once.
    Saves d_hidden and dW.

    dgrad is computed in forward and thus uses forward's weight, also with 1-D scale blocks.

    For a split backward, forward does not compute the weight gradient and saves its inputs, hidden
    and dlogits; the product is deferred with those of other layers.
    """

    @staticmethod
    def forward(ctx, hidden, anchor, handle, targets, token_weights, options):
        group, vocab_size, softcap, training = options
        weight = handle.get()
        rows = weight.shape[0]
        first_token_id = group.rank * rows
        columns = {
            "vocab_start": first_token_id,
            "valid_columns": max(0, min(rows, vocab_size - first_token_id)),
        }
        needs_d_hidden = training and ctx.needs_input_grad[0]
        needs_d_weight = training and ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden) if needs_d_hidden else None
        d_weight = None
        deferred: list[torch.Tensor | None] = []  # dlogits and factor of each chunk, alternating
        splits = needs_d_weight and handle.deferral.splits
        if needs_d_weight and not splits:
            d_weight = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        nll = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        # If the device multiplies in a wider dtype, convert once rather than per chunk, and keep
        # the logits unrounded in it.
        matrix = weight.to(handle.product_dtype)
        step = tokens_per_chunk(rows, weight.device)
        for start in range(0, targets.shape[0], step):
            span = slice(start, start + step)
            chunk = hidden[span].to(matrix.dtype)  # [t, h]
            logits = F.linear(chunk, matrix)  # [t, V/tp], then their gradient
            slope = None
            if softcap is not None:
                needs_slope = needs_d_hidden or needs_d_weight
                slope = _cap_(logits, softcap, needs_slope=needs_slope)
            nll[span], factor = _chunk_gradient_(
                logits,
                targets[span],
                token_weights[span],
                group=group,
                columns=columns,
                needs_gradient=needs_d_hidden or needs_d_weight,
            )
            if slope is not None:
                logits.mul_(slope)
            if d_hidden is not None:
                product = logits.matmul(matrix)
                d_hidden[span] = product if factor is None else product.mul_(factor)
            if d_weight is not None:
                _add_chunk_(d_weight, chunk, logits, factor, is_first_chunk=start == 0)
            if splits:
                deferred += [logits, factor]
        ctx.handle = handle
        saved = (hidden, *deferred) if splits else ()
        ctx.save_for_backward(d_hidden, d_weight, *saved)
        ctx.mark_non_differentiable(nll)
        return torch.dot(nll, token_weights), nll

    @staticmethod
    def backward(ctx, grad, _):
        d_hidden, d_weight, *saved = ctx.saved_tensors
        # On a CPU, reading the factor is free, and it is 1 in training: skip the pass over the
        # gradients.
        scaled = grad.device.type != "cpu" or float(grad) != 1.0
        scale = grad.detach() if scaled else None
        if d_hidden is not None and scale is not None:
            d_hidden.mul_(scale)
        if d_weight is not None:
            ctx.handle.accumulate_written_grad(partial(_write_scaled, d_weight.detach(), scale))
        if saved:
            ctx.handle.accumulate_computed_grad(
                _product(ctx.handle.shape, saved[0].detach(), saved[1:], scale)
            )
        return d_hidden, None, None, None, None, None


def _write_scaled(
    d_weight: torch.Tensor, scale: torch.Tensor | None, main_grad: torch.Tensor, *, overwrite: bool
) -> None:
    """Write d_weight · scale to `main_grad`, or add it; a scale of None is 1."""
    if scale is None:
        main_grad.copy_(d_weight) if overwrite else main_grad.add_(d_weight)
    elif overwrite:
        torch.mul(d_weight, scale, out=main_grad)
    else:  # scaled in place, and rounded as a split backward rounds it
        main_grad.add_(d_weight.mul_(scale))


def _product(
    shape: tuple[int, ...],
    hidden: torch.Tensor,
    chunks: Sequence[torch.Tensor | None],
    scale: torch.Tensor | None,
) -> Callable[[], torch.Tensor]:
    """Return a function that computes the deferred weight gradient, with forward's arithmetic.

    Args:
        shape: shape of the weight, (V/tp, h).
        hidden: [t, h].
        chunks: dlogits [t, V/tp] and factor [t, 1] or None of each chunk, alternating.
        scale: the incoming gradient, a scalar; None is 1.
    """

    def make() -> torch.Tensor:
        d_weight = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        start = 0
        for dlogits, factor in zip(chunks[::2], chunks[1::2], strict=True):
            assert dlogits is not None
            chunk = hidden[start : start + len(dlogits)].to(dlogits.dtype)  # [t, h]
            _add_chunk_(d_weight, chunk, dlogits, factor, is_first_chunk=start == 0)
            start += len(dlogits)
        return d_weight if scale is None else d_weight * scale

    return make


def _add_chunk_(
    d_weight: torch.Tensor,
    chunk: torch.Tensor,
    dlogits: torch.Tensor,
    factor: torch.Tensor | None,
    *,
    is_first_chunk: bool,
) -> None:
    """Add a chunk's dlogitsᵀ hidden to the weight gradient [V/tp, h]; the first chunk overwrites
    it.

    Args:
        chunk: hidden [t, h], in the dtype of the product.
        dlogits: [t, V/tp], without `factor`.
        factor: factor [t, 1] on dlogits; None is 1.
    """
    scaled = chunk if factor is None else (chunk * factor).to(chunk.dtype)
    add_product_(d_weight, dlogits.t(), scaled, overwrite=is_first_chunk)


def vocabulary_sharding(
    name: str,
    vocab_size: int,
    hidden_size: int,
    *,
    row_multiple: int = 1,
    stages: tuple[int, ...] = (),
) -> WeightSharding:
    """Return the sharding of a [V, h] weight by rows over tp, with each rank's rows padded to a
    multiple.

    Args:
        stages: the pipeline stages that own the weight, if several do.
    """
    return WeightSharding.of(
        name,
        (vocab_size, hidden_size),
        Shard(axis="tp", dim=0),
        row_multiple=row_multiple,
        stages=stages,
        gtp=True,
    )


#: Fixes for an invalid id.
_FIX = MappingProxyType(
    {
        "token": "use this model's tokenizer, or a model with a larger vocabulary",
        "label": "to exclude a token, set its weight to 0 and its label to any valid id",
    }
)


def check_ids(ids: torch.Tensor, vocab_size: int, what: Literal["token", "label"]) -> None:
    """Raise ValueError for an id outside of the vocabulary; ids on a GPU are not checked.

    Args:
        ids: int64, of any shape.
        what: kind of ids, for the message.
    """
    if ids.is_floating_point():
        raise ValueError(f"{what} ids are {ids.dtype}: use integers, such as {what}s.long()")
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = ids.aminmax()
    if low < 0 or high >= vocab_size:
        invalid_id = int(low if low < 0 else high)
        raise ValueError(
            f"{what} id {invalid_id} is not in the vocabulary of {vocab_size} ids, 0 to "
            f"{vocab_size - 1}: {_FIX[what]}"
        )


class VocabParallelEmbedding(nn.Module):
    """Embedding lookup in a [V, h] table of which each rank holds V/tp rows (padded).

    Args:
        multiplier: factor on the embeddings.

    Raises:
        ValueError: a token id is outside [0, V); only checked on a CPU, to avoid synchronising with
            a GPU.
    """

    def __init__(
        self,
        sharding: WeightSharding,
        *,
        store: WeightStore,
        region: TensorParallelRegion,
        init: InitSpec,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.region, self.multiplier = region, multiplier
        self.vocab_size = sharding.sub_weights[0].shape[0]
        self.weight = store.declare(sharding, init)
        self.first_token_id = region.group.rank * self.weight.shape[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h] ([s/tp, b, h] under sequence parallelism) from ids int64 [s, b]."""
        check_ids(ids, self.vocab_size, "token")
        rows = self.addends(ids)
        if self.region.group.size > 1:
            reduce = reduce_scatter_to_group if self.region.scatters else reduce_from_group
            rows = reduce(rows, self.region.group)  # [s/tp, b, h] or [s, b, h]
        return self.scaled(rows)

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings times the multiplier."""
        return rows if self.multiplier == 1.0 else rows * self.multiplier

    def addends(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [..., h], partial(tp), without the multiplier: the embeddings of ids in this
        rank's rows, zeros for others."""
        if self.region.group.size == 1:
            return self.weight.embedding(ids)
        local = ids - self.first_token_id
        valid = (local >= 0) & (local < self.weight.shape[0])
        return self.weight.embedding(local.where(valid, 0), valid)


#: Maps x [n, ...] of every rank to [n · tp, ...].
AllGather = Callable[[torch.Tensor], torch.Tensor]


class VocabParallelHead(nn.Module):
    """Projection to the vocabulary; tied to the embedding if declared with its sharding.

    Args:
        multiplier: factor on the logits, applied to the hidden states, which are smaller.
        softcap: bound c of the logits x, which become c tanh(x / c); None for none.
    """

    def __init__(
        self,
        sharding: WeightSharding,
        *,
        store: WeightStore,
        region: TensorParallelRegion,
        init: InitSpec,
        multiplier: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.region, self.multiplier, self.softcap = region, multiplier, softcap
        self.vocab_size = sharding.sub_weights[0].shape[0]
        self.weight = store.declare(sharding, init)

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `TensorParallelRegion.gathered`."""
        return self.region.gathered(hidden)

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of token_weights · nll, nll [s, b]).

        Args:
            hidden: [s, b, h] ([s/tp, b, h] under sequence parallelism).
            targets: int64 [s, b].
            token_weights: [s, b], any floating dtype; converted to fp32.

        Raises:
            ValueError: targets or weights have another shape, weights are not floating point, or a
                target is outside of the vocabulary.
        """
        hidden = self.gathered(hidden)
        for what, tensor in (("labels", targets), ("token_weights", token_weights)):
            if tensor.shape != hidden.shape[:-1]:
                raise ValueError(
                    f"{what} {list(tensor.t().shape)} for {list(hidden.shape[1::-1])} tokens: pass "
                    "one per token, [b, s]"
                )
        if not token_weights.is_floating_point():
            raise ValueError(
                f"token_weights are {token_weights.dtype}: pass one fp32 factor per token, "
                "such as mask.float() / mask.sum() for the mean over a mask"
            )
        check_ids(targets, self.vocab_size, "label")
        loss, nll = vocab_parallel_cross_entropy(
            self._rows(hidden),
            self.weight,
            targets.reshape(-1),
            token_weights.float().reshape(-1),
            group=self.region.group,
            vocab_size=self.vocab_size,
            softcap=self.softcap,
        )
        return loss, nll.view(targets.shape)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return local logits [s, b, V/tp], including padding columns."""
        return self.project(self.gathered(hidden))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return local logits [s, b, V/tp] of replicated hidden states [s, b, h]."""
        logits = self.weight.linear(self._rows(hidden)).view(*hidden.shape[:2], -1)
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def _rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [s b, h], hidden states times the multiplier."""
        rows = hidden.flatten(0, 1)
        return rows if self.multiplier == 1.0 else rows * self.multiplier

    def whole(self, logits: torch.Tensor, *, all_gather: AllGather | None = None) -> torch.Tensor:
        """Gather local logits [s, b, V/tp] to fp32 [s, b, V] on every rank, without padding
        columns. Every rank must compute the same from the result: each rank backpropagates the
        gradient of its own columns only.

        Args:
            all_gather: of generation; None is differentiable.
        """
        return self._joined(logits, all_gather).float()

    def write_logits(
        self, hidden: torch.Tensor, out: torch.Tensor, *, all_gather: AllGather | None = None
    ) -> torch.Tensor:
        """Write `whole(project(hidden))` to `out`, fp32 [s, b, V], and return it; requires disabled
        gradients."""
        # The local logits of a single rank are the result, unless columns or bits are dropped.
        is_whole = self.region.group.size == 1 and self.weight.shape[0] == self.vocab_size
        if is_whole and hidden.dtype is torch.float32:
            self.weight.linear(self._rows(hidden), out=out.flatten(0, 1))
            return (
                out if self.softcap is None else out.div_(self.softcap).tanh_().mul_(self.softcap)
            )
        return out.copy_(self._joined(self.project(hidden), all_gather))

    def _joined(self, logits: torch.Tensor, all_gather: AllGather | None) -> torch.Tensor:
        """Return [s, b, V] from local logits [s, b, V/tp], in the same dtype."""
        if self.region.group.size > 1:
            all_gather = all_gather or partial(gather_from_group, group=self.region.group)
            by_rank = all_gather(logits.unsqueeze(0))  # [tp, s, b, V/tp]
            logits = by_rank.permute(1, 2, 0, 3).flatten(2)
        return logits[..., : self.vocab_size]

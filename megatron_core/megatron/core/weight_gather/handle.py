# SPDX-License-Identifier: Apache-2.0
"""WeightHandle: how a layer computes with a weight, and how its gradient reaches its slot.

The functional ops take the handle's parameter as an *anchor*: it makes the output require a
gradient, its backward returns None for it, and `.grad` stays None. The gradient goes straight into
the handle's slot, a view of a flat fp32 buffer, so the optimizer and the reduction never touch
parameters.

This handle is resident: the whole local weight is always there. A gathering handle differs only in
what `get()` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.weight_gather.matmul import linear_dgrad, linear_forward, linear_wgrad_
from megatron.core.weight_gather.queue import WgradQueue
from megatron.core.weight_sharding import WeightSharding


class WeightHandle:
    """One weight of a model, as its layers use it.

    Attributes:
        sharding: the description everything is derived from.
        shape: the local shape.
        uses: how many layers declared it (2 for tied embeddings); its gradient is whole after so
            many puts.
        param: the local weight, a view of a flat buffer; None until the store is materialised.
        slot: where its gradient goes, fp32 of the same shape; None while it is frozen or not
            training.
        fresh: the slot holds nothing of this step yet: the next put overwrites.
        on_put: called after every put, by the data-parallel engine.
        queue: where puts wait while backward is split; None runs them at once.
    """

    def __init__(self, sharding: WeightSharding, shape: tuple[int, ...]) -> None:
        self.sharding = sharding
        self.name = sharding.name
        self.shape = shape
        self.uses = 1
        self.param: nn.Parameter | None = None
        self.slot: torch.Tensor | None = None
        self.fresh = True
        self.on_put: Callable[[WeightHandle], None] | None = None
        self.queue: WgradQueue | None = None

    def __repr__(self) -> str:
        return f"WeightHandle({self.name}, {list(self.shape)})"

    # --- what a layer calls -----------------------------------------------------------------------

    def get(self) -> torch.Tensor:
        """Return the local weight for immediate use; it must not outlive the asking op."""
        return self.anchor.detach()

    @property
    def anchor(self) -> nn.Parameter:
        """The leaf that the functional ops differentiate through.

        Raises:
            ValueError: the store is not materialised.
        """
        if self.param is None:
            raise ValueError(f"{self.name} has no storage yet: call materialize() on its store")
        return self.param

    @property
    def trainable(self) -> bool:
        return self.anchor.requires_grad

    def linear(self, x: torch.Tensor, bias: WeightHandle | None = None) -> torch.Tensor:
        """Return x [..., h] Wᵀ + bias, [..., o]. Saves x only."""
        bias_anchor = None if bias is None else bias.anchor
        return _Linear.apply(x, self.anchor, bias_anchor, self, bias)

    def embedding(self, ids: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows `ids` [...] of the weight, [..., h]; zero where `valid` is False. Saves
        ids only."""
        return _Embedding.apply(ids, valid, self.anchor, self)

    def use(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a private copy of a small weight (norm, bias, router) that any op may save.

        Args:
            dtype: of the copy; None is the weight's own. In fp32 its gradient arrives unrounded.
        """
        return _Use.apply(self.anchor, self, dtype)

    # --- gradients --------------------------------------------------------------------------------

    def wgrad(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Put dyᵀ x, now or through the queue."""
        grad, x = grad.detach(), x.detach()
        self._put(lambda: self._run_linear(grad, x))

    def add_gradient(self, grad: torch.Tensor) -> None:
        """Put a gradient that is already computed, of the local shape, now or through the queue."""
        grad = grad.detach()
        self._put(lambda: self._run_add(grad))

    def index_gradient(
        self, ids: torch.Tensor, valid: torch.Tensor | None, grad: torch.Tensor
    ) -> None:
        """Put the gradient rows of an embedding look-up, now or through the queue."""
        grad = grad.detach()
        self._put(lambda: self._run_index(ids, valid, grad))

    def _put(self, run: Callable[[], None]) -> None:
        if self.slot is None:
            if self.trainable:
                raise ValueError(
                    f"{self.name} has no gradient buffer: build a DataParallel engine over "
                    "its store before backward, or freeze the weight"
                )
            return
        if self.queue is not None:
            self.queue.push(run)
        else:
            run()

    def _done(self) -> None:
        self.fresh = False
        if self.on_put is not None:
            self.on_put(self)

    def _run_linear(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        assert self.slot is not None
        with torch.no_grad():
            linear_wgrad_(self.slot, grad, x, overwrite=self.fresh)
        self._done()

    def _run_add(self, grad: torch.Tensor) -> None:
        assert self.slot is not None
        with torch.no_grad():
            if self.fresh:
                self.slot.copy_(grad)
            else:
                self.slot.add_(grad)
        self._done()

    def _run_index(self, ids: torch.Tensor, valid: torch.Tensor | None, grad: torch.Tensor) -> None:
        assert self.slot is not None
        with torch.no_grad():
            if self.fresh:
                self.slot.zero_()
            rows = grad.reshape(-1, grad.shape[-1]).to(self.slot.dtype)  # [t, h]
            if valid is not None:
                rows = rows * valid.reshape(-1, 1)
            self.slot.index_add_(0, ids.reshape(-1), rows)
        self._done()


class _Linear(torch.autograd.Function):
    """forward y = x Wᵀ + b; dgrad dx = dy W; wgrad dW = dyᵀ x into the slot. Saves x."""

    @staticmethod
    def forward(ctx, x, anchor, bias_anchor, handle, bias):
        ctx.handle, ctx.bias = handle, bias
        ctx.save_for_backward(x if handle.trainable else None)
        return linear_forward(x, handle.get(), bias=None if bias is None else bias.get())

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        dx = linear_dgrad(grad, ctx.handle.get()) if ctx.needs_input_grad[0] else None
        put_linear_gradients(ctx.handle, ctx.bias, grad, x)
        return dx, None, None, None, None


def put_linear_gradients(
    handle: WeightHandle, bias: WeightHandle | None, grad: torch.Tensor, x: torch.Tensor | None
) -> None:
    """Put the weight's and the bias's gradient of a linear op, skipping what is frozen."""
    if x is not None:
        handle.wgrad(grad, x)
    if bias is not None and bias.trainable:
        bias.add_gradient(grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32))


class _Embedding(torch.autograd.Function):
    """forward rows of W; wgrad adds the gradient rows at ids. Saves ids and the mask."""

    @staticmethod
    def forward(ctx, ids, valid, anchor, handle):
        ctx.handle = handle
        ctx.save_for_backward(ids, valid)
        rows = F.embedding(ids, handle.get())  # [..., h]
        return rows if valid is None else rows.mul_(valid.unsqueeze(-1))

    @staticmethod
    def backward(ctx, grad):
        ids, valid = ctx.saved_tensors
        ctx.handle.index_gradient(ids, valid, grad)
        return None, None, None, None


class _Use(torch.autograd.Function):
    """forward a copy of W; wgrad is the gradient of the copy. Saves nothing."""

    @staticmethod
    def forward(ctx, anchor, handle, dtype):
        ctx.handle = handle
        return handle.get().to(dtype or anchor.dtype, copy=True)

    @staticmethod
    def backward(ctx, grad):
        ctx.handle.add_gradient(grad)
        return None, None, None

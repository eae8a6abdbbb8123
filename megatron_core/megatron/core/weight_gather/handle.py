# SPDX-License-Identifier: Apache-2.0
"""Weight handles: how a layer computes with a weight, wherever it is stored.

`WeightHandle`: the functional ops take the handle's parameter as an *anchor*. It makes the output
require a gradient; its backward returns None for it, so `.grad` stays None. The gradient is
accumulated directly in the handle's slot (`main_grad`), a view of a flat fp32 buffer, so optimizer
and reduction never touch parameters. The whole local weight may be resident, or be gathered when an
op asks for it and released afterwards; only `get()` knows. The weights of one op must be in one
block (`bucket`): a request for another block may release the first.

`WgradQueue`: the weight gradients of a split backward (its W half). While a queue is open on a
store, backward computes input gradients only and appends one item per weight use; a schedule drains
the queue at any time, first in first out. Gradients that are already computed (norms, biases) go
through the queue as well: accumulated early, they would keep a whole block open from I to W, and
change the summation order of a tied weight.

The three matrix products of a linear layer are a handle's, in the dtype that the device multiplies
fastest (`product_dtype`). Where a CPU multiplies bf16 slower than fp32 the operands are widened,
which also keeps the whole sum in fp32.

| product | equation | result |
|---|---|---|
| forward | y = x Wᵀ (+ bias) | dtype of x |
| dgrad | dx = dy W | dtype of dy |
| wgrad | dW (+)= dyᵀ x | accumulated in the gradient slot, fp32 |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.ops import small_m_matmul
from megatron.core.ops.backend_choice import (
    StoredWeight,
    add_product_,
    matmul_dtype,
    record_function,
)
from megatron.core.ops.batch_invariant import tiled_matmul
from megatron.core.ops.low_bit_copy import LowBitCopy
from megatron.core.ops.packed_matmul import PackedMatrix, min_invariant_rows
from megatron.core.weight_gather.wire import EncodedWeight, WireFormat
from megatron.core.weight_sharding import WeightSharding


@dataclass
class Deferral:
    """What all handles of a store know about split backward.

    Args:
        queue: where weight gradients are queued; None runs them at once.
        splits: backward will be split: what an op could compute for a weight gradient before
            backward belongs after it, with all that is deferred.
    """

    queue: WgradQueue | None = None
    splits: bool = False


class WgradQueue:
    """First-in-first-out list of deferred weight gradients."""

    def __init__(self) -> None:
        self._items: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def push(self, put: Callable[[], None]) -> None:
        """Append a put; it must not keep an autograd graph alive (detach what it holds)."""
        self._items.append(put)

    def drain(self) -> None:
        """Carry out all puts in the order in which they were pushed."""
        while self._items:
            self._items.popleft()()


class WeightBlock(Protocol):
    """Where a weight is stored: the block that it is gathered with.

    Attributes:
        current: what is bound may be read without asking anybody.
        views: its weights by name, each of the local shape, while they are bound.
        keeps_codes: it stays as it was encoded, and `encoded` takes the place of `views`.
    """

    current: bool
    views: dict[str, torch.Tensor]
    keeps_codes: bool
    encoded: EncodedWeight | None

    def need(self) -> None:
        """Have the whole weights bound."""


class GradientSink(Protocol):
    """Where the gradients of a block's weights go."""

    def open(self) -> None:
        """Give every trained weight of the block a slot."""

    def put_done(self, handle: WeightHandle) -> None:
        """Record an accumulated gradient."""


class WeightParameter(nn.Parameter):
    """What a rank stores of a weight. Its gradient is in the engine's buffers once there is one.

    Raises:
        ValueError: `.grad` is asked for although an engine has the gradients. An optimizer of torch
            would take None for a weight that is not trained, and leave it as it is.
    """

    handle: WeightHandle

    @staticmethod
    def of(handle: WeightHandle, stored: torch.Tensor) -> WeightParameter:
        """Return the parameter of a weight."""
        found = WeightParameter(stored)
        found.handle = handle
        return found

    @property
    def grad(self) -> torch.Tensor | None:
        if self.handle.gradients is not None and not self.handle.keeps_grad:
            raise ValueError(
                f"{self.handle.name}.grad: DataParallel keeps the gradients of these weights in "
                "its own buffers: update them by megatron.core.optimizer.Optimizer(engine.owned(), "
                "groups), read them in engine.owned(), and forget them by engine.begin_step()"
            )
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, grad)


class WeightHandle:
    """One weight of a model, as its layers use it.

    Attributes:
        sharding: the description everything is derived from.
        shape, dtype: of the local weight.
        uses: how many layers declared it (2 for tied embeddings); its gradient is whole after so
            many puts.
        param: what this rank stores of it: the local weight, or the part of it in this rank's
            shard [k]; None until the store is materialised.
        block: what it is stored and gathered with.
        whole: the local weight, where no other rank stores a part of it: then it is always here.
        backward_block: what dgrad reads, the same but where scale blocks are 1-D.
        slot: where its gradient goes, of the local shape; None while it is frozen or no buffer is
            open.
        fresh: the slot holds nothing yet: the next gradient overwrites.
        gradients: opens slots and is notified of gradients; None if it is frozen or not training.
        deferral: whether weight gradients are deferred, shared with the other weights of the store.
        keeps_grad: without `gradients`, puts go to the `.grad` of `param`, as autograd's would: in
            one process, until an engine is built.
        cpu_dtype: what a CPU multiplies it in, see `ops.backend_choice.matmul_dtype`.
        row_tiles: multiply rows by it so that their bits do not depend on how many there are: by
            `ops.packed_matmul` where that holds, else in tiles, see `ops.batch_invariant`.
        copy: what `linear` multiplies by outside of autograd instead (`LowBitCopy`).
        multiplies: the wire format that it is multiplied in, where it is gathered in that: then it
            is not decoded, and asked for by `get_encoded`.
    """

    def __init__(
        self,
        sharding: WeightSharding,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        deferral: Deferral | None = None,
        cpu_dtype: torch.dtype | None = None,
        row_tiles: bool = False,
    ) -> None:
        self.sharding = sharding
        self.name = sharding.name
        self.shape, self.dtype = shape, dtype
        self.uses = 1
        self.param: nn.Parameter | None = None
        self.block: WeightBlock | None = None
        self.whole: torch.Tensor | None = None
        self.backward_block: WeightBlock | None = None
        self.slot: torch.Tensor | None = None
        self.fresh = True
        self.gradients: GradientSink | None = None
        self.deferral = deferral or Deferral()
        self.cpu_dtype, self.row_tiles = cpu_dtype, row_tiles
        self.copy: LowBitCopy | None = None
        self.multiplies: type[WireFormat] | None = None
        self._packed: PackedMatrix | None = None
        self.keeps_grad = False

    def __repr__(self) -> str:
        return f"WeightHandle({self.name}, {list(self.shape)})"

    # --- what a layer calls -----------------------------------------------------------------------

    def get(self, *, backward: bool = False) -> torch.Tensor:
        """Return the local weight for immediate use; it must not outlive the asking op.

        Gathers it if it is not here: every rank that shares it must ask in the same order.

        Args:
            backward: for dgrad, a product that sums over the weight's rows.

        Raises:
            ValueError: the store is not materialised.
        """
        if self.whole is not None and not backward:
            return self.whole
        block = self.backward_block if backward else self.block
        if block is None:
            raise ValueError(f"{self.name} has no storage yet: call materialize() on its store")
        if not block.current:
            block.need()
        return block.views[self.name]

    def get_encoded(self, *, backward: bool = False) -> EncodedWeight | None:
        """Return the local weight as it was gathered, [r, c] with all its rows, for immediate use;
        None if it is not gathered in the format that it is multiplied in: then `get` has it.

        Args:
            backward: as `get` has it.

        Raises:
            ValueError: the store is not materialised.
        """
        block = self.backward_block if backward else self.block
        if block is None:
            raise ValueError(f"{self.name} has no storage yet: call materialize() on its store")
        if not block.keeps_codes:
            return None
        if not block.current:
            block.need()
        return block.encoded

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

    @cached_property
    def product_dtype(self) -> torch.dtype:
        """What the weight is multiplied in where it is, see `ops.backend_choice.matmul_dtype`."""
        return matmul_dtype(self.anchor, self.cpu_dtype)

    def linear(
        self,
        x: torch.Tensor,
        bias: WeightHandle | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x [..., h] Wᵀ [h, o] + bias [o], [..., o] in x's dtype. Saves x only.

        Args:
            out: [..., o] where the result is written, and returned, instead of to a new tensor;
                outside of autograd only.
        """
        if torch.is_grad_enabled():
            if bias is None:
                return _apply_linear(x, self.param, self)
            return _apply_linear(x, self.param, self, bias, bias.param)
        added = None if bias is None else bias.get()
        if self.copy is not None:
            return self.copy.linear(x, added, out=out)
        weight = self.get() if self.whole is None else self.whole
        dtype = self.product_dtype
        if self.row_tiles:
            y = self._row_product(x.to(dtype), weight)
            y = (y if added is None else y + added).to(x.dtype)
            return y if out is None else out.copy_(y)
        if dtype is x.dtype:
            if added is None and x.ndim == 2:
                return small_m_matmul.linear(x, weight, out=out)
            return F.linear(x, weight, added, out=out)
        wide = None if added is None else added.to(dtype)
        y = F.linear(x.to(dtype), weight.to(dtype), wide)
        return y.to(x.dtype) if out is None else out.copy_(y)

    def _row_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x [..., h] Wᵀ, [..., o], each row with bits of its own."""
        least = self.min_invariant_rows
        if least is None:
            return tiled_matmul(x, weight.to(x.dtype).t())
        return self.packed().linear(x, least)

    @property
    def min_invariant_rows(self) -> int | None:
        """Smallest batch with invariant rows, see `ops.packed_matmul.min_invariant_rows`."""
        packs = self.product_dtype is torch.float32 and self.anchor.device.type == "cpu"
        return min_invariant_rows(self.shape) if packs else None

    def packed(self) -> PackedMatrix:
        """Return the local weight as it is now in oneDNN's layout, which `ops.packed_matmul` must
        hold for.

        It is kept until the weight is written to, or `forget_packed`, if no other rank has the
        weight: what is gathered for a layer is packed for a layer.
        """
        weight, found = self.get(), self._packed
        if found is None or not found.is_current(weight):
            found = PackedMatrix(weight)
            if self.whole is not None:
                self._packed = found
        return found

    def forget_packed(self) -> None:
        """Pack the weight anew when it is next used: it was written to past torch's counter."""
        self._packed = None

    def add_product_(
        self, total: torch.Tensor, x: torch.Tensor, *, bias: WeightHandle | None = None
    ) -> None:
        """Add x [t, h] Wᵀ + bias [o] to total [t, o], in place, outside of autograd."""
        if self.copy is not None:
            self.copy.add_product_(total, x)
        elif self.product_dtype is x.dtype is total.dtype:
            small_m_matmul.add_linear_(total, x, self.get())
        else:
            total.add_(self.linear(x))
        if bias is not None:
            total.add_(bias.get())

    def embedding(self, ids: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows `ids` [...] of the weight, [..., h]; zero where `valid` is False. Saves
        ids only."""
        if not torch.is_grad_enabled():
            return _embedding_rows(self.get(), ids, valid)
        return record_function(_Embedding, ids, valid, self.param, self)

    def use(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a small weight (norm, bias, router) as a private copy that any op may save.

        Where gradients are off and one rank has the whole weight, it is the weight itself: not to
        be written to.

        Args:
            dtype: of the copy; None is the weight's own. In fp32 its gradient arrives unrounded.
        """
        if torch.is_grad_enabled():
            return record_function(_Use, self.param, self, dtype, True)
        if self.whole is None:
            return self.get().to(dtype or self.dtype, copy=True)
        return self.whole if dtype in (None, self.whole.dtype) else self.whole.to(dtype)

    def read_only(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a small weight as `use` does, for ops that do not write to it: without a copy,
        where one rank has the whole weight in that dtype."""
        if torch.is_grad_enabled():
            return record_function(_Use, self.param, self, dtype, False)
        return self.use(dtype)

    def stored(self) -> StoredWeight:
        """Return a small weight for an op that reads it in the dtype that it is stored in: without
        a copy, where one rank has the whole weight. Its gradient arrives unrounded."""
        value = self.get().clone() if self.whole is None else self.whole
        return StoredWeight(value, self.anchor, self.summed_gradient)

    # --- gradients --------------------------------------------------------------------------------

    @property
    def defers(self) -> bool:
        """Whether gradients put now wait in a queue."""
        return self.deferral.queue is not None

    def dgrad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return dy [..., o] W [o, h], [..., h] in dy's dtype."""
        weight, dtype = self.get(backward=True), self.product_dtype
        if dtype is grad.dtype:
            return grad.matmul(weight)
        return grad.to(dtype).matmul(weight.to(dtype)).to(grad.dtype)

    def wgrad(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        *,
        enter: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Put dyᵀ x, now or through the queue.

        Args:
            grad: dy [..., o].
            x: [..., h], the same leading shape.
            enter: makes x of what waits in its place, a collective for instance: all ranks drain
                their queues in one order.
        """
        at_once = self.deferral.queue is None and enter is None
        if at_once and self.gradients is not None and not torch.is_grad_enabled():
            self._run_linear(grad, x)  # the everyday case, at half the microseconds
            return
        grad, x = grad.detach(), x.detach()

        def run() -> None:
            with torch.no_grad():
                self._run_linear(grad, x if enter is None else enter(x))

        self._put(run)

    def add_gradient(self, grad: torch.Tensor) -> None:
        """Put a gradient that is already computed, of the local shape, now or through the queue."""
        grad = grad.detach()
        self._put(lambda: self._run_add(grad))

    def summed_gradient(self, addends: torch.Tensor) -> None:
        """Put the sum of addends [n, ...] of a gradient, or one of the local shape, now or through
        the queue."""
        self.written_gradient(partial(_write_sum, addends.detach()))

    def made_gradient(self, make: Callable[[], torch.Tensor]) -> None:
        """Put a gradient of the local shape that `make` computes, now or through the queue."""

        def run() -> None:
            with torch.no_grad():
                grad = make()
            self._run_add(grad)

        self._put(run)

    def written_gradient(self, write: Callable[..., None]) -> None:
        """Put a gradient that `write(slot, overwrite=...)` writes, now or through the queue.

        Args:
            write: writes the slot if `overwrite`, else adds to it. It must not keep an autograd
                graph alive.
        """
        self._put(lambda: self._run_write(write))

    def index_gradient(
        self, ids: torch.Tensor, valid: torch.Tensor | None, grad: torch.Tensor
    ) -> None:
        """Put the gradient rows of an embedding look-up, now or through the queue."""
        grad = grad.detach()
        self._put(lambda: self._run_index(ids, valid, grad))

    def gradient_buffer(self) -> torch.Tensor:
        """Return where a kernel that cannot accumulate may write a gradient, fp32 of the local
        shape: the slot while it holds nothing, else a new tensor. Put it by `written_gradient`.

        Raises:
            ValueError: there is no gradient buffer.
        """
        self._check_receives()
        slot = self._open()
        return slot if self.fresh else torch.empty_like(slot)

    def _check_receives(self) -> bool:
        """Return whether gradients are kept. Raises ValueError if they should be."""
        if self.gradients is not None or (self.keeps_grad and self.trainable):
            return True
        if self.trainable:
            raise ValueError(
                f"{self.name} has no gradient buffer: build a DataParallel engine over "
                "its store before backward, or freeze the weight"
            )
        return False

    def _put(self, run: Callable[[], None]) -> None:
        if not self._check_receives():
            return
        if self.deferral.queue is not None:
            self.deferral.queue.push(run)
        else:
            run()

    def _open(self) -> torch.Tensor:
        """Return the slot, opening it if this is its block's first gradient."""
        if self.gradients is None:
            return self._open_grad()
        if self.slot is None:
            self.gradients.open()
        assert self.slot is not None
        return self.slot

    def _open_grad(self) -> torch.Tensor:
        """Return `.grad` of the parameter, made if whoever updates the weight has dropped it."""
        param = self.anchor
        self.fresh = param.grad is None
        if param.grad is None:
            param.grad = torch.empty_like(param)
        return param.grad

    def _done(self) -> None:
        self.fresh = False
        if self.gradients is not None:
            self.gradients.put_done(self)

    def _run_linear(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Write or add dyᵀ x; grad mode must be off."""
        slot, dtype = self._open(), self.product_dtype
        if x.ndim != 2:
            grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])  # [t, o], [t, h]
        if grad.dtype is not dtype or x.dtype is not dtype:
            grad, x = grad.to(dtype), x.to(dtype)
        add_product_(slot, grad.t(), x, overwrite=self.fresh)
        self._done()

    def _run_add(self, grad: torch.Tensor) -> None:
        slot = self._open()
        with torch.no_grad():
            if self.fresh:
                slot.copy_(grad)
            else:
                slot.add_(grad)
        self._done()

    def _run_write(self, write: Callable[..., None]) -> None:
        slot = self._open()
        with torch.no_grad():
            write(slot, overwrite=self.fresh)
        self._done()

    def _run_index(self, ids: torch.Tensor, valid: torch.Tensor | None, grad: torch.Tensor) -> None:
        slot = self._open()
        with torch.no_grad():
            if self.fresh:
                slot.zero_()
            rows = grad.reshape(-1, grad.shape[-1]).to(slot.dtype)  # [t, h]
            if valid is not None:
                rows = rows * valid.reshape(-1, 1)
            slot.index_add_(0, ids.reshape(-1), rows)
        self._done()


def _write_sum(addends: torch.Tensor, slot: torch.Tensor, *, overwrite: bool) -> None:
    """Write the sum of addends [n, ...] to the slot, or add it."""
    if addends.ndim == slot.ndim:
        slot.copy_(addends) if overwrite else slot.add_(addends)
    elif overwrite:
        torch.sum(addends, 0, dtype=slot.dtype, out=slot)
    else:
        slot.add_(addends.sum(0))


class _Linear(torch.autograd.Function):
    """forward y = x Wᵀ + b; dgrad dx = dy W; wgrad dW = dyᵀ x into the slot. Saves x."""

    @staticmethod
    def forward(ctx, x, anchor, handle, bias=None, bias_anchor=None):
        ctx.handle, ctx.bias = handle, bias
        y = handle.linear(x, bias)
        ctx.save_for_backward(x if anchor.requires_grad else None)
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        handle, dx = ctx.handle, None
        if ctx.needs_input_grad[0]:
            dx = handle.dgrad(grad)
        put_linear_gradients(handle, ctx.bias, grad, x)
        return dx, None, None, None, None


#: `apply` of the base class: that of `torch.autograd.Function` looks for transforms of
#: `torch.func` first, which weights outside of autograd have no use for, and takes as long again.
_apply_linear = super(torch.autograd.Function, _Linear).apply


def put_linear_gradients(
    handle: WeightHandle,
    bias: WeightHandle | None,
    grad: torch.Tensor,
    x: torch.Tensor | None,
    *,
    enter: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Put the weight's and the bias's gradient of a linear op, skipping what is frozen.

    Args:
        x: None if the weight is frozen.
        enter: see `WeightHandle.wgrad`.
    """
    if x is not None:
        handle.wgrad(grad, x, enter=enter)
    if bias is not None and bias.trainable:
        bias.add_gradient(grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32))


def _embedding_rows(
    weight: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor | None
) -> torch.Tensor:
    """Return rows `ids` [...] of the weight, [..., h], zero where `valid` is False."""
    rows = F.embedding(ids, weight)
    return rows if valid is None else rows.mul_(valid.unsqueeze(-1))


class _Embedding(torch.autograd.Function):
    """forward rows of W; wgrad adds the gradient rows at ids. Saves ids and the mask."""

    @staticmethod
    def forward(ctx, ids, valid, anchor, handle):
        ctx.handle = handle
        ctx.save_for_backward(ids, valid)
        return _embedding_rows(handle.get(), ids, valid)

    @staticmethod
    def backward(ctx, grad):
        ids, valid = ctx.saved_tensors
        ctx.handle.index_gradient(ids, valid, grad)
        return None, None, None, None


class _Use(torch.autograd.Function):
    """forward a copy of W, or its memory where that stays; wgrad is the gradient of what forward
    returned. Saves nothing."""

    @staticmethod
    def forward(ctx, anchor, handle, dtype, copies):
        ctx.handle = handle
        dtype = dtype or handle.dtype
        if copies or handle.whole is None:
            return handle.get().to(dtype, copy=True)
        # A tensor of its own: autograd gives what forward returns a history, a weight has none.
        return handle.whole.detach().to(dtype)

    @staticmethod
    def backward(ctx, grad):
        ctx.handle.add_gradient(grad)
        return None, None, None, None

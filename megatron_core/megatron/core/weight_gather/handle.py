# SPDX-License-Identifier: Apache-2.0
"""Weight handles: computation with a weight, independent of its storage.

`WeightHandle`: the functional ops take the handle's parameter as an *anchor*, which makes their
output require a gradient. Backward returns None for the anchor, so `.grad` stays None. The gradient
is accumulated directly in `main_grad`, a view of a flat fp32 buffer, so the optimizer and the
reduction never touch parameters. `get()` returns the unsharded local weight, which is always in
memory or is all-gathered for the op and resharded afterwards. All weights of one op must be in one
block (`bucket`), because unsharding another block may reshard the first.

`WgradQueue`: the weight gradients of a split backward (its W half). While a queue is open on a
store, backward computes input gradients only and appends one entry per use of a weight. A schedule
drains the queue at any time, first in first out. Gradients that are already computed (norms,
biases) go through the queue as well: accumulated early, they would keep the block's gradient buffer
allocated from I to W, and change the summation order of a tied weight.

A handle computes the three matrix products of a linear layer in the dtype that the device
multiplies fastest (`product_dtype`). Where a CPU multiplies bf16 slower than fp32, the operands are
converted to fp32, so the whole sum is in fp32 too.

| product | equation | result |
|---|---|---|
| forward | y = x Wᵀ (+ bias) | dtype of x |
| dgrad | dx = dy W | dtype of dy |
| wgrad | dW (+)= dyᵀ x | accumulated in `main_grad`, fp32 |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.ops.backend_choice import (
    StoredWeight,
    add_product_,
    apply_function,
    direct_apply,
    matmul_dtype,
)
from megatron.core.ops.grouped_mm import RowRuns, grouped_mm, grouped_wgrad_, reads_counts
from megatron.core.ops.matmul import MatmulKernel, batch_invariant_kernel, choose_kernel
from megatron.core.ops.matmul.batch_invariant import PackedMatrix, min_invariant_rows
from megatron.core.ops.matmul.low_bit import LowBitCopy
from megatron.core.ops.matmul.onednn import agrees
from megatron.core.weight_gather.gather_format import EncodedWeight, GatherFormat
from megatron.core.weight_sharding import WeightSharding


@dataclass
class Deferral:
    """State of a split backward, shared by all handles of a store.

    Args:
        queue: the queue of deferred weight gradients; None computes them immediately.
        splits: backward will be split, so an op must not compute weight gradients in its forward:
            they belong to the deferred half.
    """

    queue: WgradQueue | None = None
    splits: bool = False


class WgradQueue:
    """First-in-first-out list of deferred weight gradients."""

    def __init__(self) -> None:
        self._items: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def push(self, accumulate: Callable[[], None]) -> None:
        """Append a function that accumulates a gradient. It must not keep an autograd graph alive:
        detach the tensors that it captures."""
        self._items.append(accumulate)

    def drain(self) -> None:
        """Accumulate all gradients in the order of `push`."""
        while self._items:
            self._items.popleft()()


class WeightBlock(Protocol):
    """The block that a weight is stored and all-gathered with.

    Attributes:
        ready: the attached weights may be read without a call of `unshard`.
        views: its weights by name, each of the local shape, while the block is attached.
        keeps_quantized: the weight stays quantized, and `encoded` takes the place of `views`.
    """

    ready: bool
    views: dict[str, torch.Tensor]
    keeps_quantized: bool
    encoded: EncodedWeight | None

    def unshard(self) -> None:
        """Have the unsharded weights attached."""


class GradientSink(Protocol):
    """Collects the gradients of a block's weights."""

    def alloc_main_grads(self) -> None:
        """Set `main_grad` of every trained weight of the block."""

    def grad_accumulated(self, handle: WeightHandle) -> None:
        """Count a gradient that has been accumulated."""


# The descriptor, which torch declares as what it returns.
_TORCH_GRAD: Any = torch.Tensor.grad


class WeightParameter(nn.Parameter):
    """This rank's shard of a weight. An engine keeps its gradient in buffers of its own.

    Raises:
        ValueError: `.grad` is read after an engine was built. A torch optimizer would take None for
            a weight without gradient, and skip it silently.
    """

    handle: WeightHandle

    @staticmethod
    def of(handle: WeightHandle, stored: torch.Tensor) -> WeightParameter:
        """Return the parameter of a weight, whose storage is `stored`."""
        parameter = WeightParameter(stored)
        parameter.handle = handle
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:
        if self.handle.gradients is not None and not self.handle.uses_param_grad:
            raise ValueError(
                f"{self.handle.name}.grad: DataParallel keeps the gradients of these weights in "
                "its own buffers: update them by megatron.core.optimizer.Optimizer(engine.owned(), "
                "groups), read them in engine.owned(), and forget them by engine.begin_step()"
            )
        return _TORCH_GRAD.__get__(self)

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        _TORCH_GRAD.__set__(self, grad)


class WeightHandle:
    """One weight of a model, as its layers use it.

    Attributes:
        sharding: the description of the weight; all its other properties derive from it.
        shape, dtype: of the local weight.
        uses: number of layers that declared it (2 for tied embeddings), and thus of gradients that
            a microbatch accumulates.
        param: this rank's storage: the local weight, or the elements of its shard [k]; None until
            the store is materialised.
        block: the block that it is stored and all-gathered with.
        unsharded_param: the local weight, if no other rank stores a shard of it and it is always in
            memory; otherwise None.
        backward_block: the block that dgrad reads; differs from `block` with 1-D scale blocks.
        main_grad: accumulates its gradient, in the local shape; None while it is frozen or no
            buffer is allocated.
        overwrite_main_grad: `main_grad` is uninitialised, so the next gradient overwrites it.
        gradients: allocates `main_grad` and counts gradients; None if it is frozen or not trained.
        deferral: state of a split backward, shared by all weights of the store.
        uses_param_grad: gradients accumulate in the `.grad` of `param`, as autograd's would: in a
            single process, until an engine is built.
        cpu_dtype: dtype of its products on a CPU, see `ops.backend_choice.matmul_dtype`.
        row_tiles: compute each row of a product with bits that do not depend on the number of rows:
            packed where packed products have this property, else in tiles, see
            `ops.matmul.batch_invariant`.
        copy: a copy that `linear` multiplies by outside of autograd, see
            `ops.matmul.low_bit.LowBitCopy`.
        matmul_format: the gather format that its kernels multiply in. A weight gathered in this
            format is not decoded, and `get_encoded` returns it.
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
        self.unsharded_param: torch.Tensor | None = None
        self.backward_block: WeightBlock | None = None
        self.main_grad: torch.Tensor | None = None
        # Gradient buffers are not zeroed when they are reused: the first gradient overwrites.
        self.overwrite_main_grad = True
        self.gradients: GradientSink | None = None
        self.deferral = deferral or Deferral()
        self.cpu_dtype, self.row_tiles = cpu_dtype, row_tiles
        self.copy: LowBitCopy | None = None
        self.matmul_format: type[GatherFormat] | None = None
        self._packed: PackedMatrix | None = None
        self._kernels: dict[torch.dtype, MatmulKernel] = {}
        self.uses_param_grad = False

    def __repr__(self) -> str:
        return f"WeightHandle({self.name}, {list(self.shape)})"

    # --- what a layer calls -----------------------------------------------------------------------

    def get(self, *, backward: bool = False) -> torch.Tensor:
        """Return the unsharded local weight for immediate use; it must not outlive the calling op.

        It is all-gathered if it is not in memory. The all-gather is collective: all ranks of the
        shard group must call this in the same order.

        Args:
            backward: for dgrad, a product that sums over the weight's rows.

        Raises:
            ValueError: the store is not materialised.
        """
        if self.unsharded_param is not None and not backward:
            return self.unsharded_param
        block = self.backward_block if backward else self.block
        if block is None:
            raise ValueError(f"{self.name} has no storage yet: call materialize() on its store")
        if not block.ready:
            block.unshard()  # may reshard the block of an earlier call, see above
        return block.views[self.name]

    def get_encoded(self, *, backward: bool = False) -> EncodedWeight | None:
        """Return the quantized local weight [r, c] for immediate use; None if its kernels do not
        multiply in its gather format, so that `get` returns it decoded.

        Args:
            backward: see `get`.

        Raises:
            ValueError: the store is not materialised.
        """
        block = self.backward_block if backward else self.block
        if block is None:
            raise ValueError(f"{self.name} has no storage yet: call materialize() on its store")
        if not block.keeps_quantized:
            return None
        if not block.ready:
            block.unshard()
        return block.encoded

    @property
    def anchor(self) -> nn.Parameter:
        """The leaf tensor that makes outputs of the functional ops require a gradient.

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
        """Dtype of its products on its device, see `ops.backend_choice.matmul_dtype`."""
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
            out: output buffer [..., o]; outside of autograd only. None allocates one.
        """
        if torch.is_grad_enabled():
            # The anchor is an argument of its own: autograd looks for tensors that require a
            # gradient among the arguments of `apply` only.
            if bias is None:
                return _apply_linear(x, self.param, self)
            return _apply_linear(x, self.param, self, bias, bias.param)
        weight = self.unsharded_param
        # A copy takes the weight's place, so the weight is not all-gathered.
        if weight is None and self.copy is None:
            weight = self.get()
        # Looked up by dtype: an fp32 operand of a bf16 weight needs a kernel that converts.
        linear = (self._kernels.get(x.dtype) or self._choose_kernel(x.dtype)).linear
        return linear(x, weight, None if bias is None else bias.get(), out=out)

    def _choose_kernel(self, dtype: torch.dtype) -> MatmulKernel:
        """Choose the kernel of products with operands of a dtype, at the first such product."""
        if self.copy is not None:
            kernel = MatmulKernel(self.copy.linear, self.copy.add_product_)
        elif self.row_tiles:
            kernel = batch_invariant_kernel(
                self.product_dtype, self.min_invariant_rows, self.packed
            )
        else:
            kernel = choose_kernel(
                self.shape,
                self.dtype,
                self.anchor.device,
                operand_dtype=dtype,
                product_dtype=self.product_dtype,
            )
        self._kernels[dtype] = kernel
        return kernel

    def multiply_by(self, copy: LowBitCopy) -> None:
        """Multiply by a copy of the weight from now on, outside of autograd."""
        self.copy = copy
        # Kernels chosen before multiply by the weight itself, or by an older copy.
        self._kernels.clear()

    def packs_bf16(self) -> bool:
        """Return whether it is in bf16, and a packed copy is multiplied faster on its CPU."""
        return (
            self.dtype is self.product_dtype is torch.bfloat16
            and self.anchor.device.type == "cpu"
            and agrees(*self.shape, torch.bfloat16, packed=True)
        )

    def min_invariant_rows(self) -> int | None:
        """Minimum rows of a batch-invariant `packed`, see `batch_invariant.min_invariant_rows`."""
        packs = self.product_dtype is torch.float32 and self.anchor.device.type == "cpu"
        return min_invariant_rows(self.shape) if packs else None

    def packed(self) -> PackedMatrix:
        """Return the local weight in oneDNN's layout, if `min_invariant_rows` is not None.

        The packed copy is cached until the weight is written to or `weight_replaced` is called. A
        gathered weight is packed at every use and not cached.
        """
        weight, packed = self.get(), self._packed
        # `is_current` compares torch's version counter, which every in-place update increases.
        if packed is None or not packed.is_current(weight):
            packed = PackedMatrix(weight)
            if self.unsharded_param is not None:
                self._packed = packed
        return packed

    def weight_replaced(self) -> None:
        """Renew what derives from the weight, after a write that torch's version counter misses."""
        self._packed = None
        if self.copy is not None:
            self.multiply_by(LowBitCopy(self.get(), self.copy.dtype, cpu_dtype=self.cpu_dtype))

    def add_product_(
        self, total: torch.Tensor, x: torch.Tensor, *, bias: WeightHandle | None = None
    ) -> None:
        """Add x [t, h] Wᵀ + bias [o] to total [t, o], in place, outside of autograd."""
        # The product is added in the matmul's epilogue if total has x's dtype.
        weight = self.get() if self.copy is None else None
        kernel = self._kernels.get(x.dtype) or self._choose_kernel(x.dtype)
        kernel.add_product_(total, x, weight)
        if bias is not None:
            total.add_(bias.get())

    def embedding(self, ids: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows `ids` [...] of the weight, [..., h]; zero where `valid` is False. Saves
        ids only."""
        if not torch.is_grad_enabled():
            return _embedding_rows(self.get(), ids, valid)
        return _apply_embedding(ids, valid, self.param, self)

    def use(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a small weight (norm, bias, router) as a copy that any op may save for backward.

        With gradients off, a weight that is always in memory is returned itself: do not write to
        it.

        Args:
            dtype: of the copy; None is the dtype of the weight. An fp32 copy receives its gradient
                unrounded.
        """
        if torch.is_grad_enabled():
            return _apply_use(self.param, self, dtype, True)
        if self.unsharded_param is None:
            # A copy even in the same dtype: the gathered buffer is reused after the block is
            # resharded, while the caller still holds the tensor.
            return self.get().to(dtype or self.dtype, copy=True)
        return (
            self.unsharded_param
            if dtype in (None, self.unsharded_param.dtype)
            else self.unsharded_param.to(dtype)
        )

    def read_only(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a small weight as `use` does, for ops that do not write to it: without a copy, if
        the weight is always in memory and has this dtype."""
        if torch.is_grad_enabled():
            return _apply_use(self.param, self, dtype, False)
        return self.use(dtype)

    def stored(self) -> StoredWeight:
        """Return a small weight in its storage dtype: without a copy, if the weight is always in
        memory. Its gradient is accumulated unrounded."""
        value = self.get().clone() if self.unsharded_param is None else self.unsharded_param
        # Every norm of a decode step comes here, so the property is read only to raise.
        anchor = self.anchor if self.param is None else self.param
        return StoredWeight(value, anchor, self.accumulate_grad_sum)

    # --- gradients --------------------------------------------------------------------------------

    @property
    def defers(self) -> bool:
        """Whether a queue defers the accumulation of gradients."""
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
        gather_input: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Accumulate dyᵀ x, immediately or through the queue.

        Args:
            grad: dy [..., o].
            x: [..., h], the same leading shape.
            gather_input: computes the input of the product from x when the gradient is accumulated,
                for instance an all-gather. It is collective: all ranks drain their queues in the
                same order.
        """
        runs_now = self.deferral.queue is None and gather_input is None
        if runs_now and self.gradients is not None and not torch.is_grad_enabled():
            self._accumulate_wgrad(grad, x)  # a closure would double the host time of this path
            return
        # Detached: a queued closure must not keep the microbatch's graph and activations alive.
        grad, x = grad.detach(), x.detach()

        def run() -> None:
            # A queue is drained outside of backward, where grad mode may be on.
            with torch.no_grad():
                self._accumulate_wgrad(grad, x if gather_input is None else gather_input(x))

        self._run_or_defer(run)

    def accumulate_grad(self, grad: torch.Tensor) -> None:
        """Accumulate a computed gradient of the local shape, immediately or through the queue."""
        grad = grad.detach()
        self._run_or_defer(lambda: self._add_grad(grad))

    def accumulate_grad_sum(self, addends: torch.Tensor) -> None:
        """Accumulate the sum of addends [n, ...], or a gradient of the local shape, immediately or
        through the queue."""
        self.accumulate_written_grad(partial(_write_sum, addends.detach()))

    def accumulate_computed_grad(self, compute: Callable[[], torch.Tensor]) -> None:
        """Accumulate a gradient of the local shape that `compute` returns, immediately or through
        the queue."""

        def run() -> None:
            with torch.no_grad():
                grad = compute()
            self._add_grad(grad)

        self._run_or_defer(run)

    def accumulate_written_grad(self, write: Callable[..., None]) -> None:
        """Accumulate a gradient by `write(main_grad, overwrite=...)`, immediately or through the
        queue.

        Args:
            write: writes `main_grad` if `overwrite`, else adds to it. It must not keep an autograd
                graph alive.
        """
        self._run_or_defer(lambda: self._write_grad(write))

    def accumulate_embedding_grad(
        self, ids: torch.Tensor, valid: torch.Tensor | None, grad: torch.Tensor
    ) -> None:
        """Accumulate the gradient rows of an embedding look-up, immediately or through the
        queue."""
        grad = grad.detach()
        self._run_or_defer(lambda: self._add_embedding_grad(ids, valid, grad))

    def gradient_buffer(self) -> torch.Tensor:
        """Return an output buffer for a kernel that cannot accumulate, fp32 of the local shape:
        `main_grad` if the next gradient overwrites it, else a new tensor. The caller passes the
        gradient to `accumulate_written_grad`.

        Raises:
            ValueError: there is no gradient buffer.
        """
        self._check_receives()
        # The kernel may write main_grad itself only while it holds no gradient to add to.
        main_grad = self._get_main_grad()
        return main_grad if self.overwrite_main_grad else torch.empty_like(main_grad)

    def _check_receives(self) -> bool:
        """Return whether gradients accumulate; False for a frozen weight.

        Raises:
            ValueError: the weight is trained but has no gradient buffer.
        """
        if self.gradients is not None or (self.uses_param_grad and self.trainable):
            return True
        if self.trainable:
            raise ValueError(
                f"{self.name} has no gradient buffer: build a DataParallel engine over "
                "its store before backward, or freeze the weight"
            )
        return False

    def _run_or_defer(self, run: Callable[[], None]) -> None:
        if not self._check_receives():
            return
        # First in, first out keeps the summation order of a tied weight.
        if self.deferral.queue is not None:
            self.deferral.queue.push(run)
        else:
            run()

    def _get_main_grad(self) -> torch.Tensor:
        """Return `main_grad`, allocated at the first gradient of its block."""
        if self.gradients is None:  # no engine: a single process
            return self._get_param_grad()
        if self.main_grad is None:  # a pool buffer per microbatch, acquired at its first gradient
            self.gradients.alloc_main_grads()
        assert self.main_grad is not None
        return self.main_grad

    def _get_param_grad(self) -> torch.Tensor:
        """Return `.grad` of the parameter, allocated if the optimizer has set it to None."""
        param = self.anchor
        self.overwrite_main_grad = param.grad is None
        if param.grad is None:
            param.grad = torch.empty_like(param)
        return param.grad

    def _mark_accumulated(self) -> None:
        # Before the notification: the last gradient of a block starts its reduction, which zeroes
        # every main_grad that is still marked for overwriting.
        self.overwrite_main_grad = False
        if self.gradients is not None:
            self.gradients.grad_accumulated(self)

    def _accumulate_wgrad(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Write dyᵀ x to `main_grad` or add it; grad mode must be off."""
        main_grad, dtype = self._get_main_grad(), self.product_dtype
        if x.ndim != 2:
            grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])  # [t, o], [t, h]
        if grad.dtype is not dtype or x.dtype is not dtype:
            grad, x = grad.to(dtype), x.to(dtype)
        # Accumulates in the matrix product (beta = 1): dW is never a tensor of its own.
        add_product_(main_grad, grad.t(), x, overwrite=self.overwrite_main_grad)
        self._mark_accumulated()

    def _add_grad(self, grad: torch.Tensor) -> None:
        main_grad = self._get_main_grad()
        with torch.no_grad():
            if self.overwrite_main_grad:
                main_grad.copy_(grad)
            else:
                main_grad.add_(grad)
        self._mark_accumulated()

    def _write_grad(self, write: Callable[..., None]) -> None:
        main_grad = self._get_main_grad()
        with torch.no_grad():
            write(main_grad, overwrite=self.overwrite_main_grad)
        self._mark_accumulated()

    def _add_embedding_grad(
        self, ids: torch.Tensor, valid: torch.Tensor | None, grad: torch.Tensor
    ) -> None:
        main_grad = self._get_main_grad()
        with torch.no_grad():
            if self.overwrite_main_grad:  # rows that no token looked up have a zero gradient
                main_grad.zero_()
            rows = grad.reshape(-1, grad.shape[-1]).to(main_grad.dtype)  # [t, h]
            if valid is not None:
                rows = rows * valid.reshape(-1, 1)
            main_grad.index_add_(0, ids.reshape(-1), rows)
        self._mark_accumulated()


def _write_sum(addends: torch.Tensor, main_grad: torch.Tensor, *, overwrite: bool) -> None:
    """Write the sum of addends [n, ...] to `main_grad`, or add it."""
    if addends.ndim == main_grad.ndim:
        main_grad.copy_(addends) if overwrite else main_grad.add_(addends)
    elif overwrite:
        torch.sum(addends, 0, dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(addends.sum(0))


class _Linear(torch.autograd.Function):
    """forward y = x Wᵀ + b; dgrad dx = dy W; wgrad dW = dyᵀ x into `main_grad`. Saves x."""

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
        # dgrad first: it reads the unsharded weight, and the weight gradient below may complete
        # the block and start its reduction.
        if ctx.needs_input_grad[0]:
            dx = handle.dgrad(grad)
        accumulate_linear_grads(handle, ctx.bias, grad, x)
        return dx, None, None, None, None


_apply_linear = direct_apply(_Linear)


def accumulate_linear_grads(
    handle: WeightHandle,
    bias: WeightHandle | None,
    grad: torch.Tensor,
    x: torch.Tensor | None,
    *,
    gather_input: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Accumulate the weight's and the bias's gradient of a linear op, skipping frozen weights.

    Args:
        x: None if the weight is frozen.
        gather_input: see `WeightHandle.wgrad`.
    """
    if x is not None:
        handle.wgrad(grad, x, gather_input=gather_input)
    if bias is not None and bias.trainable:
        bias.accumulate_grad(grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32))


def call_with_stored(
    op: Callable[..., Any], x: torch.Tensor, *handles: WeightHandle, **options: Any
) -> Any:
    """Return op(x, *weights) of small weights in their storage dtype, as a norm needs them.

    Without gradients a weight that is always in memory is passed as it is.
    """
    if torch.is_grad_enabled():
        return op(x, *(handle.stored() for handle in handles), **options)
    weights = (h.stored() if h.unsharded_param is None else h.unsharded_param for h in handles)
    return op(x, *weights, **options)


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
        ctx.handle.accumulate_embedding_grad(ids, valid, grad)
        return None, None, None, None


_apply_embedding = direct_apply(_Embedding)


class _Use(torch.autograd.Function):
    """forward a copy of W, or W itself if it is always in memory; wgrad is the gradient of the
    output. Saves nothing."""

    @staticmethod
    def forward(ctx, anchor, handle, dtype, copies):
        ctx.handle = handle
        dtype = dtype or handle.dtype
        if copies or handle.unsharded_param is None:
            return handle.get().to(dtype, copy=True)
        # `detach` gives a new tensor over the same memory: autograd records a history on the
        # output of forward, and the weight itself must stay a leaf.
        return handle.unsharded_param.detach().to(dtype)

    @staticmethod
    def backward(ctx, grad):
        ctx.handle.accumulate_grad(grad)
        return None, None, None, None


_apply_use = direct_apply(_Use)


def grouped_linear(handle: WeightHandle, x: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    """Return [r, o] from rows x [r, h] in x's dtype; row i of run e is multiplied by matrix e.

        forward  y[i] = W_e x[i]            for every row i of run e, the rows of expert e
        dgrad    dx[i] = W_eᵀ dy[i]
        wgrad    dW_e = sum over the rows of run e of dy[i] x[i]ᵀ, into `main_grad`

    Args:
        handle: a weight whose local tensor holds a matrix [o, h] for each run, one after the other:
            [runs · c, o/c, h] for any c. A fused weight interleaves several logical weights by
            expert.
        x: the rows of all runs, in order.
        runs: the number of rows of each run.

    Raises:
        ValueError: the runs do not sum to the rows of x (checked on a CPU only, because a check on
            a GPU would synchronise), or the weight does not have a matrix [o, h] for each run.
    """
    count, shape = len(runs.ends), handle.shape
    if x.ndim != 2 or (reads_counts(x) and not runs.fit(len(x))):
        raise ValueError(
            f"{handle.name}: runs of {sum(runs.counts)} rows for x {tuple(x.shape)}: x must "
            "be [r, h] with as many rows"
        )
    if len(shape) != 3 or not count or shape[0] % count or shape[2] != x.shape[1]:
        raise ValueError(
            f"{handle.name} {list(shape)} must be [{count} · c, o/c, {x.shape[1]}], one "
            f"matrix for each of {count} runs"
        )
    return apply_function(_GroupedLinear, x, handle.anchor, handle, runs)


class _GroupedLinear(torch.autograd.Function):
    """See `grouped_linear`. Saves x."""

    @staticmethod
    def forward(ctx, x, anchor, handle, runs):
        ctx.handle, ctx.runs = handle, runs
        ctx.save_for_backward(x if anchor.requires_grad else None)
        weight = _matrices(handle.get(), runs)  # [runs, o, h]
        return grouped_mm(
            x, weight, runs, transposed=True, dtype=handle.product_dtype, tiles=handle.row_tiles
        )

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        handle, runs = ctx.handle, ctx.runs
        # A reduction after the experts passes expanded gradients, with stride 0.
        grad = grad.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            weight = _matrices(handle.get(backward=True), runs)
            dx = grouped_mm(grad, weight, runs, dtype=handle.product_dtype)
        if x is not None:
            write = partial(
                _wgrad_, grad.detach(), x.detach(), runs=runs, dtype=handle.product_dtype
            )
            handle.accumulate_written_grad(write)
        return dx, None, None, None


def _matrices(weight: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    return weight.view(len(runs.ends), -1, weight.shape[-1])


def _wgrad_(
    grad: torch.Tensor,
    x: torch.Tensor,
    main_grad: torch.Tensor,
    *,
    overwrite: bool,
    runs: RowRuns,
    dtype: torch.dtype,
) -> None:
    """Accumulate dW in main_grad [runs · c, o/c, h] fp32."""
    total = _matrices(main_grad, runs)
    grouped_wgrad_(total, grad.to(dtype), x.to(dtype), runs, overwrite=overwrite)

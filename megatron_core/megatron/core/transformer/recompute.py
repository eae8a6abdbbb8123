# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation (Chen et al. 2016): store fewer activations, recompute the rest in
backward.

Weights are read from handles and dropout has no state, so recomputed activations and all gradients
are bit-identical. Collectives inside are issued again, in the same order on all ranks.

| granularity | stores | recomputes |
|---|---|---|
| full | the inputs of a group of layers, 2 · [s, b, h] | everything inside, once |
| selective | everything except cheap inputs of matrix products | norms, MLP activations |

Selective recomputation of the core attention would save nothing here: attention stores no [s, s]
matrix but its inputs, its log-sum-exp and its output, which the output projection needs as well.
Nor does it save anything for a norm that TransformerEngine fuses with the following product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.autograd.function import once_differentiable

from megatron.core.ops.backend_choice import apply_function

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activation recomputation settings; none by default.

    Args:
        granularity: "full" recomputes whole layers, "selective" norms and MLP activations, None
            nothing.
        method: for full, in each model chunk of a pipeline: "uniform" divides all layers into
            groups of `num_layers`, of which the last may be smaller; "block" recomputes each of the
            first `num_layers` layers separately.
        num_layers: see `method`.

    Raises:
        ValueError: the settings contradict each other.
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None

    def __post_init__(self) -> None:
        full = self.granularity == "full"
        if full and (self.method is None or self.num_layers is None or self.num_layers < 1):
            raise ValueError(
                "full recompute needs recompute-method uniform or block and recompute-num-layers "
                f"above 0, not {self.method} and {self.num_layers}"
            )
        if not full and (self.method is not None or self.num_layers is not None):
            raise ValueError(
                "recompute-method and recompute-num-layers have no effect without "
                "recompute-granularity full"
            )

    def runs(self, num_layers: int) -> list[tuple[int, int, bool]]:
        """Divide layers 0 … num_layers - 1 into (first, end, recompute) groups.

        Raises:
            ValueError: a group is larger than the model.
        """
        if self.granularity != "full":
            return [(0, num_layers, False)]
        assert self.num_layers is not None
        size = self.num_layers
        if size > num_layers:
            raise ValueError(
                f"recompute-num-layers {size} exceeds the number of layers, {num_layers}"
            )
        if self.method == "uniform":
            starts = range(0, num_layers, size)
            return [(start, min(start + size, num_layers), True) for start in starts]
        single = [(layer, layer + 1, True) for layer in range(size)]
        return single + ([(size, num_layers, False)] if size < num_layers else [])


def recomputed(
    run: Callable[[torch.Tensor, torch.Tensor | None], Pair],
    delta: torch.Tensor,
    stream: torch.Tensor | None,
    *,
    anchors: Sequence[torch.Tensor],
) -> Pair:
    """Return run(delta, stream), storing only these two inputs until backward.

    Args:
        run: a deterministic function of its arguments and of weights.
        delta, stream: [s, b, h] ([s/tp, b, h] under sequence parallelism).
        anchors: anchors of the weights inside. A trained one makes the result require a gradient
            even if no input does, as after a frozen embedding.
    """
    anchor = next((anchor for anchor in anchors if anchor.requires_grad), None)
    return apply_function(_Recompute, delta, stream, anchor, run)


class _Recompute(torch.autograd.Function):
    """forward run(delta, stream) without a graph; backward runs it with a graph and backpropagates.

    dgrad: of delta and stream. wgrad: accumulated by the weights' handles. Saves the inputs.
    """

    @staticmethod
    def forward(ctx, delta, stream, anchor, run):
        ctx.run = run
        ctx.save_for_backward(delta, stream)
        ctx.set_materialize_grads(False)
        return run(delta, stream)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        inputs = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.run(*inputs)
        pairs = [
            (y, grad)
            for y, grad in zip(outputs, grads, strict=True)
            if y.requires_grad and grad is not None
        ]
        # Not autograd.grad, which would skip the weights: they are not on a path to the inputs.
        torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs])
        return *(None if x is None else x.grad for x in inputs), None, None


def discard_until_backward(
    x: torch.Tensor, make: Callable[[], torch.Tensor], *, used_by: torch.Tensor
) -> None:
    """Free the memory of `x`, and restore it when the gradient of `used_by` arrives.

    Every tensor saved from `x` in between, views included, has its values back in backward.

    Args:
        x: tensor with its own storage, which no op reads after this call except in backward.
        make: recomputes the values of x from tensors that are stored anyway; must not reference x.
        used_by: a result that depends on every op that has saved x.
    """
    if not used_by.requires_grad:
        return
    storage = x.untyped_storage()
    size = storage.nbytes()
    # Popped when it is restored: the hook lives as long as the graph.
    discarded = [(x.detach(), make)]

    def fill(_: torch.Tensor) -> None:
        if discarded:
            values, make = discarded.pop()
            storage.resize_(size)
            with torch.no_grad():
                values.data.copy_(make())  # .data: what autograd has saved counts as unchanged

    used_by.register_hook(fill)
    storage.resize_(0)

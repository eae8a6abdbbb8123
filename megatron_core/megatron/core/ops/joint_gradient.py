# SPDX-License-Identifier: Apache-2.0
"""The gradient of a fused projection, which the ops that read its slices write in place.

A mixer splits the columns of a fused projection among several ops. Autograd would concatenate the
gradients of the slices. Instead each op writes its slice of one tensor, the gradient of the
projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.core.ops.backend_choice import apply_function


class JointGradient:
    """The gradient of one projection, allocated when the first op requests its slice.

    Args:
        like: the projection [..., w].
        sizes: columns of each slice, w in all.
    """

    def __init__(self, like: torch.Tensor, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._tensor: torch.Tensor | None = None

    def slice(self, index: int) -> torch.Tensor:
        """Return slice `index` [..., size] of the gradient, for an op to write."""
        if self._tensor is None:
            self._tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._tensor.split(self.sizes, dim=-1)[index]

    def collect(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the gradient of the projection, after copying the slices not written in place.

        Args:
            grads: the gradient of each slice.
        """
        joint, self._tensor = self._tensor, None
        if joint is None:
            return torch.cat(list(grads), dim=-1)
        for grad, d_slice in zip(grads, joint.split(self.sizes, dim=-1), strict=True):
            if not _is_same_memory(grad, d_slice):
                d_slice.copy_(grad)
        return joint


def _is_same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype have the same elements at the same addresses."""
    if x.shape != y.shape or x.data_ptr() != y.data_ptr():
        return False
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return all(size == 1 or x_stride == y_stride for size, x_stride, y_stride in strides)


class GradientSlice(NamedTuple):
    """The destination of the gradient of one slice of a projection.

    Args:
        joint: the gradient of the projection.
        index: the index of the slice.
    """

    joint: JointGradient
    index: int

    def memory_like(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the memory for the gradient of x, a view of the slice; None if its strides differ
        from the strides of x."""
        d_x = self.joint.slice(self.index).view(x.shape)
        return d_x if d_x.stride() == x.stride() else None


class ProjectionSlice(NamedTuple):
    """A slice of a projection, or a view of one, for an op that writes its gradient in place.

    Args:
        value: the slice's tensor.
        gradient: the destination of its gradient; None leaves it to autograd.
    """

    value: torch.Tensor
    gradient: GradientSlice | None


def slice_of(x: torch.Tensor | ProjectionSlice) -> ProjectionSlice:
    """Wrap a tensor as a `ProjectionSlice` whose gradient autograd handles; return slices as is."""
    return x if isinstance(x, ProjectionSlice) else ProjectionSlice(x, None)


def split_projection(x: torch.Tensor, sizes: Sequence[int]) -> list[ProjectionSlice]:
    """Split the columns of a projection [..., w] into slices [..., size]."""
    joint = JointGradient(x, sizes)
    values = apply_function(_Split, x, joint)
    return [ProjectionSlice(value, GradientSlice(joint, i)) for i, value in enumerate(values)]


class _Split(torch.autograd.Function):
    """Forward: views of x. dgrad: the joint gradient. Saves nothing."""

    @staticmethod
    def forward(ctx, x, joint):
        ctx.joint = joint
        return x.split(joint.sizes, dim=-1)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.joint.collect(grads), None

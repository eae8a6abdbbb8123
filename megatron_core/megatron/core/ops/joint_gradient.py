# SPDX-License-Identifier: Apache-2.0
"""The gradient of a projection, whose slices the ops that read them write side by side.

A mixer cuts the columns of one product and gives them to different ops. What these ops return in
backward would be concatenated; instead each writes its slice of one tensor, which then is the
gradient of the projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.core.ops.backend_choice import apply_function


class JointGradient:
    """The gradient of one projection, made when the first op asks for its slice.

    Args:
        like: the projection [..., w].
        sizes: columns of each slice, w in all.
    """

    def __init__(self, like: torch.Tensor, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._whole: torch.Tensor | None = None

    def slice(self, index: int) -> torch.Tensor:
        """Return a slice [..., size], to be written."""
        if self._whole is None:
            self._whole = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._whole.split(self.sizes, dim=-1)[index]

    def joined(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the gradient of the projection from those of its slices; those that do not lie in
        it are copied there."""
        whole, self._whole = self._whole, None
        if whole is None:
            return torch.cat(list(grads), dim=-1)
        for grad, part in zip(grads, whole.split(self.sizes, dim=-1), strict=True):
            if not _is_same_memory(grad, part):
                part.copy_(grad)
        return whole


def _is_same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Say whether two tensors of one dtype have the same elements at the same addresses."""
    if x.shape != y.shape or x.data_ptr() != y.data_ptr():
        return False
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return all(size == 1 or mine == other for size, mine, other in strides)


class GradientSlice(NamedTuple):
    """Where the gradient of a slice of a projection goes.

    Args:
        joint: the gradient of the projection.
        index: of the slice.
    """

    joint: JointGradient
    index: int

    def for_strides_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return memory of the gradient of x, a view of the slice; None where that would have
        other strides than x."""
        found = self.joint.slice(self.index).view(x.shape)
        return found if found.stride() == x.stride() else None


class ProjectionSlice(NamedTuple):
    """A slice of a projection, or a view of one, for an op that writes its gradient in place.

    Args:
        value: what is read.
        gradient: where its gradient goes; None leaves that to autograd.
    """

    value: torch.Tensor
    gradient: GradientSlice | None


def slice_of(x: torch.Tensor | ProjectionSlice) -> ProjectionSlice:
    """Return a tensor as a slice whose gradient is left to autograd, and a slice as it is."""
    return x if isinstance(x, ProjectionSlice) else ProjectionSlice(x, None)


def split_projection(x: torch.Tensor, sizes: Sequence[int]) -> list[ProjectionSlice]:
    """Split the columns of a projection [..., w] into slices [..., size]."""
    joint = JointGradient(x, sizes)
    values = apply_function(_Split, x, joint)
    return [ProjectionSlice(value, GradientSlice(joint, i)) for i, value in enumerate(values)]


class _Split(torch.autograd.Function):
    """forward views of x; dgrad is the joint gradient. Saves nothing."""

    @staticmethod
    def forward(ctx, x, joint):
        ctx.joint = joint
        return x.split(joint.sizes, dim=-1)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.joint.joined(grads), None

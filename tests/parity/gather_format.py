# SPDX-License-Identifier: Apache-2.0
"""The single process of rows whose weights are gathered in another format: it computes with weights
that have been encoded and decoded, and updates those that have not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.core.weight_gather import WeightStore
from megatron.core.weight_gather.gather_format import GatherFormat, shard_amax

#: Ranks may be off by so much, relatively, after some steps.
_ERROR = 3e-7


@dataclass
class _BackwardBlock:
    """A weight as backward reads it, which nobody has to gather."""

    views: dict[str, torch.Tensor]
    ready: bool = True
    keeps_quantized: bool = False

    def unshard(self) -> None:
        """Do nothing: it is there."""


def compute_with_encoded(
    store: WeightStore, forms: Sequence[GatherFormat]
) -> tuple[bool, Callable[[], None]]:
    """Replace the weights of a single process that gtp would shard by gathered and decoded ones: in
    the first format for forward, in the last one for backward.

    Returns:
        Whether weights that are off by rounding would be encoded alike; what puts them back.
    """
    saved = [bucket.data.clone() for bucket in store.buckets]
    sure = True
    for handle in store.handles.values():
        if not handle.sharding.gtp:
            continue
        weight = handle.get()
        matrix = weight.view(-1, handle.shape[-1])
        sure = sure and all(_is_sure(form, matrix) for form in forms)
        forward, backward = (_round_trip(form, matrix) for form in (forms[0], forms[-1]))
        matrix.copy_(forward)
        handle.backward_block = _BackwardBlock({handle.name: backward.view(weight.shape)})

    def restore() -> None:
        for bucket, data in zip(store.buckets, saved, strict=True):
            bucket.data.copy_(data)

    return sure, restore


def _round_trip(form: GatherFormat, matrix: torch.Tensor) -> torch.Tensor:
    """Return what a matrix is after it has been encoded and decoded."""
    amax = shard_amax(matrix) if form.needs_amax else None
    encoded = form.encode(matrix.clone(), amax=amax)
    shape = (matrix.shape[0], matrix.shape[1])
    return form.decode(encoded, shape, dtype=matrix.dtype, amax=amax)


def _is_sure(form: GatherFormat, matrix: torch.Tensor) -> bool:
    """Return whether no element hangs between two codes by less than the error of a rank."""
    matrix = matrix.clone()
    amax = shard_amax(matrix) if form.needs_amax else None
    wanted = form.encode(matrix, amax=amax)
    for factor in (1.0 - _ERROR, 1.0 + _ERROR):
        found = [form.encode(matrix * factor, amax=amax)]
        if amax is not None:
            found.append(form.encode(matrix, amax=amax * factor))
        if any(not torch.equal(one, wanted) for one in found):
            return False
    return True

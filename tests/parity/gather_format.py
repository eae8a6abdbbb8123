# SPDX-License-Identifier: Apache-2.0
"""The single process of rows with a gather format: it computes with encoded and decoded weights,
and updates the exact weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.core.weight_gather import WeightStore
from megatron.core.weight_gather.gather_format import GatherFormat, shard_amax

#: Relative error of ranks after some steps.
_ERROR = 3e-7


@dataclass
class _BackwardBlock:
    """The backward view of a weight, which needs no gather."""

    views: dict[str, torch.Tensor]
    ready: bool = True
    keeps_quantized: bool = False

    def unshard(self) -> None:
        """Do nothing: the weight is already whole."""


def compute_with_encoded(
    store: WeightStore, formats: Sequence[GatherFormat]
) -> tuple[bool, Callable[[], None]]:
    """Replace the weights that gtp would shard by encoded and decoded ones: in the first format for
    forward, in the last format for backward.

    Returns:
        Whether rounding of the weights cannot change their codes; a function that restores them.
    """
    saved = [bucket.data.clone() for bucket in store.buckets]
    sure = True
    for handle in store.handles.values():
        if not handle.sharding.gtp:
            continue
        weight = handle.get()
        matrix = weight.view(-1, handle.shape[-1])
        sure = sure and all(_is_sure(gather_format, matrix) for gather_format in formats)
        forward, backward = (
            _round_trip(gather_format, matrix) for gather_format in (formats[0], formats[-1])
        )
        matrix.copy_(forward)
        handle.backward_block = _BackwardBlock({handle.name: backward.view(weight.shape)})

    def restore() -> None:
        for bucket, values in zip(store.buckets, saved, strict=True):
            bucket.data.copy_(values)

    return sure, restore


def _round_trip(gather_format: GatherFormat, matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix after encoding and decoding."""
    amax = shard_amax(matrix) if gather_format.needs_amax else None
    encoded = gather_format.encode(matrix.clone(), amax=amax)
    shape = (matrix.shape[0], matrix.shape[1])
    return gather_format.decode(encoded, shape, dtype=matrix.dtype, amax=amax)


def _is_sure(gather_format: GatherFormat, matrix: torch.Tensor) -> bool:
    """Return whether no element changes its code within the error of a rank."""
    matrix = matrix.clone()
    amax = shard_amax(matrix) if gather_format.needs_amax else None
    codes = gather_format.encode(matrix, amax=amax)
    for factor in (1.0 - _ERROR, 1.0 + _ERROR):
        perturbed_codes = [gather_format.encode(matrix * factor, amax=amax)]
        if amax is not None:
            perturbed_codes.append(gather_format.encode(matrix, amax=amax * factor))
        if any(not torch.equal(perturbed, codes) for perturbed in perturbed_codes):
            return False
    return True

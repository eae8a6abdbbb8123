# SPDX-License-Identifier: Apache-2.0
"""The single process of rows whose weights are gathered in another format: it computes with weights
that have been encoded and decoded, and updates those that have not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.core.weight_gather import WeightStore
from megatron.core.weight_gather.wire import WireFormat, shard_amax, wire_formats

#: Ranks may be off by so much, relatively, after some steps.
_ERROR = 3e-7


def compute_with_encoded(store: WeightStore, name: str) -> tuple[bool, Callable[[], None]]:
    """Replace the weights of a single process that gtp would shard by what comes off the wire.

    Returns:
        Whether weights that are off by rounding would be encoded alike; what puts them back.
    """
    (form,) = wire_formats(name)
    saved = [bucket.data.clone() for bucket in store.buckets]
    sure = True
    for handle in store.handles.values():
        if not handle.sharding.gtp:
            continue
        matrix = handle.get().view(-1, handle.shape[-1])
        sure = sure and _is_sure(form, matrix)
        amax = shard_amax(matrix) if form.needs_amax else None
        encoded = form.encode(matrix.clone(), amax=amax)
        shape = (matrix.shape[0], matrix.shape[1])
        matrix.copy_(form.decode(encoded, shape, dtype=matrix.dtype, amax=amax))

    def restore() -> None:
        for bucket, data in zip(store.buckets, saved, strict=True):
            bucket.data.copy_(data)

    return sure, restore


def _is_sure(form: WireFormat, matrix: torch.Tensor) -> bool:
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

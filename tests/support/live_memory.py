# SPDX-License-Identifier: Apache-2.0
"""Bytes of the live tensors of this process, by owner: counted, not computed.

The garbage collector lists every tensor that Python references; tensors that share a storage count
once. Tensors that only C++ references (a saved activation, a collective's buffer) are not counted,
so measure between steps.

    before a model is built:  before = live_storages()
    after some steps:         sizes = live_bytes({"weights": ..., "optimizer": ...}, before=before)
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping

import torch

#: The owner of every storage that no owner claims.
UNOWNED = "others"


def live_storages() -> dict[int, int]:
    """Return the bytes of every storage that a live tensor uses, by the storage's identity.

    Identities are reused once a storage is freed: keep the tensors alive to compare them later.
    """
    gc.collect()
    bytes_by_storage: dict[int, int] = {}
    for candidate in gc.get_objects():
        # the type and not the object: lazy modules answer isinstance() by importing themselves
        if issubclass(type(candidate), torch.Tensor) and candidate.layout is torch.strided:
            storage = candidate.untyped_storage()
            bytes_by_storage[storage._cdata] = storage.nbytes()
    return bytes_by_storage


def live_bytes(
    owners: Mapping[str, Iterable[torch.Tensor]], *, before: Collection[int] = ()
) -> dict[str, int]:
    """Return the bytes of all live storages by owner, unowned storages under "others".

    Args:
        owners: tensors by owner; each storage counts for the first of its owners.
        before: identities of storages that do not count, from `live_storages`.

    Raises:
        AssertionError: an owner's tensor is not among the live storages.
    """
    unclaimed = live_storages()
    bytes_by_owner = dict.fromkeys([*owners, UNOWNED], 0)
    counted: set[int] = set()
    for owner, tensors in owners.items():
        for tensor in tensors:
            identity = tensor.untyped_storage()._cdata
            if identity in counted:
                continue
            assert identity in unclaimed, (
                f"a tensor of {owner}, {list(tensor.shape)}, was not found"
            )
            counted.add(identity)
            bytes_by_owner[owner] += unclaimed.pop(identity)
    bytes_by_owner[UNOWNED] = sum(
        size for identity, size in unclaimed.items() if identity not in before
    )
    return bytes_by_owner

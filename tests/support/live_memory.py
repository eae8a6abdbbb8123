# SPDX-License-Identifier: Apache-2.0
"""Bytes of the tensors that are alive in this process, by owner: counted, not computed.

Every tensor that Python knows of is in the garbage collector's list of objects; tensors that share
a storage count once. What only C++ holds (a saved activation, a collective's buffer) is not seen,
so measure between steps.

    with no model built:   before = live_storages()
    after some steps:      found = live_bytes({"weights": ..., "optimizer": ...}, before=before)
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping

import torch

#: The owner of every storage that no other was given.
OTHERS = "others"


def live_storages() -> dict[int, int]:
    """Return the bytes of every storage that a live tensor uses, by the storage's identity.

    Identities are reused once a storage is gone: keep what is to stay comparable alive.
    """
    gc.collect()
    found: dict[int, int] = {}
    for one in gc.get_objects():
        # the type and not the object: lazy modules answer isinstance() by importing themselves
        if issubclass(type(one), torch.Tensor) and one.layout is torch.strided:
            storage = one.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def live_bytes(
    owners: Mapping[str, Iterable[torch.Tensor]], *, before: Collection[int] = ()
) -> dict[str, int]:
    """Return the bytes of all live storages by owner, those of no owner under "others".

    Args:
        owners: tensors by owner; each storage counts for the first of its owners.
        before: identities of storages that do not count, from `live_storages`.

    Raises:
        AssertionError: an owner's tensor that is not found alive: the count would be too low.
    """
    left = live_storages()
    found = dict.fromkeys([*owners, OTHERS], 0)
    taken: set[int] = set()
    for owner, tensors in owners.items():
        for tensor in tensors:
            identity = tensor.untyped_storage()._cdata
            if identity in taken:
                continue
            assert identity in left, f"a tensor of {owner}, {list(tensor.shape)}, was not found"
            taken.add(identity)
            found[owner] += left.pop(identity)
    found[OTHERS] = sum(size for identity, size in left.items() if identity not in before)
    return found

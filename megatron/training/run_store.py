# SPDX-License-Identifier: Apache-2.0
"""One client of two key-value stores: the launcher's, which outlives every rank, and rank 0's,
which outlives the launcher.

Everything is written to both and read from the launcher's; once that is gone, from the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RunStore(dist.Store):
    """What ranks write for each other, readable as long as one of the servers lives.

    It is no parent for torch's `PrefixStore`, which cannot delete keys of a store made in Python.

    Args:
        stores: clients, the one to read from first.
        lost: tells whether the first one's server is gone: a client that finds out by itself
            prints a page.
    """

    def __init__(self, stores: Sequence[dist.Store], *, lost: Callable[[], bool]) -> None:
        super().__init__()
        self._stores, self._lost = list(stores), lost
        self._both = len(self._stores) > 1

    def _alive(self) -> list[dist.Store]:
        if self._both and self._lost():
            self._both = False
            self._stores = self._stores[-1:]
        return list(self._stores)

    def _everywhere(self, act: Callable[[dist.Store], T]) -> T:
        """Do something with every store and return what the first one says."""
        found: list[T] = []
        for store in self._alive():
            try:
                found.append(act(store))
            except dist.DistNetworkError as error:
                self._drop(store, error)
        return found[0]

    def _first(self, act: Callable[[dist.Store], T]) -> T:
        """Do something with the first store whose server lives."""
        while True:
            store = self._alive()[0]
            try:
                return act(store)
            except dist.DistNetworkError as error:
                self._drop(store, error)

    def _drop(self, store: dist.Store, error: Exception) -> None:
        """Do without a store whose server is gone. Raises the error if it was the last one."""
        if self._stores == [store]:
            raise error
        self._both = False
        self._stores = [other for other in self._stores if other is not store]

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        """Write a value."""
        self._everywhere(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._first(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._first(lambda store: store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Wait until all keys are there. Raises DistStoreError when the time is over."""
        limit = () if timeout is None else (timeout,)
        self._first(lambda store: store.wait(keys, *limit))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return what it is then."""
        return self._everywhere(lambda store: store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return self._everywhere(lambda store: store.delete_key(key))

# SPDX-License-Identifier: Apache-2.0
"""A client of two key-value stores: the launcher's, which outlives every rank, and rank 0's, which
outlives the launcher.

Values are written to both stores and read from the launcher's store; if its server is lost, from
rank 0's store. A thread writes to rank 0's store, because rank 0 may be stopped (SIGSTOP) and the
other ranks must not wait for its answer.

This module is separate from `launch` because it imports torch, which reading a command line must
not.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

#: Seconds to wait for pending writes to the second store when the first one is lost.
DRAIN_SECONDS = 10.0


class RunStore(dist.Store):
    """A store that can be read as long as one of its two servers lives.

    Do not wrap it in torch's `PrefixStore`, which cannot delete keys of a store written in Python.

    Args:
        store: client of the store to read from first.
        mirror: connects a client to the second store. It runs on the thread that writes to this
            store, because connecting may take seconds where name resolution is slow.
        lost: returns whether the first store's server is lost. A client that discovers this itself
            prints a page of warnings.
    """

    def __init__(
        self, store: dist.Store, mirror: Callable[[], dist.Store], *, lost: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._store, self._lost = store, lost
        self._mirror: dist.Store | None = None
        self._failed_over = False
        self._writes: queue.Queue[Callable[[dist.Store], object]] = queue.Queue()
        self._connected = threading.Event()
        self._failing_over = threading.Lock()
        threading.Thread(target=self._work, args=(mirror,), name="run-store", daemon=True).start()

    def _current(self) -> dist.Store:
        """Return the store to use: the second one once the first one's server is lost."""
        store = self._store
        if not self._failed_over and self._lost():
            self._fail_over(store)
        return self._store

    def _fail_over(self, failed: dist.Store) -> bool:
        """Switch to the second store after its pending writes, unless another thread already has.
        Return whether the second store exists."""
        with self._failing_over:
            if self._store is not failed:
                return True
            deadline = time.monotonic() + DRAIN_SECONDS
            self._connected.wait(DRAIN_SECONDS)
            if self._failed_over or self._mirror is None:
                return False
            while self._writes.unfinished_tasks and time.monotonic() < deadline:
                time.sleep(0.001)
            self._store, self._failed_over = self._mirror, True
            return True

    def _do(self, act: Callable[[dist.Store], T]) -> T:
        """Call `act` with the first store whose server lives. Raises the last store's error."""
        store = self._current()
        try:
            return act(store)
        except dist.DistNetworkError:
            if not self._fail_over(store):
                raise
            return act(self._store)

    def _write(self, act: Callable[[dist.Store], object]) -> None:
        """Queue a write to the second store, as long as both stores are in use."""
        if not self._failed_over:
            self._writes.put(act)

    def _work(self, connect: Callable[[], dist.Store]) -> None:
        try:
            self._mirror = mirror = connect()
        except Exception:  # rank 0 is lost, so the run ends
            return
        finally:
            self._connected.set()
        while True:
            act = self._writes.get()
            try:
                act(mirror)
            except Exception:  # its server, rank 0, is lost, so the run ends
                return
            finally:
                self._writes.task_done()

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        """Write a value."""
        # Queue the mirrored write first, so that a concurrent fail-over waits for it.
        self._write(lambda store: store.set(key, value))
        self._do(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._do(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._do(lambda store: store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Wait until all keys exist. Raises DistStoreError after the timeout."""
        limit = () if timeout is None else (timeout,)
        self._do(lambda store: store.wait(keys, *limit))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        total = self._do(lambda store: store.add(key, amount))
        self._write(lambda store: store.add(key, amount))
        return total

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        existed = self._do(lambda store: store.delete_key(key))
        self._write(lambda store: store.delete_key(key))
        return existed

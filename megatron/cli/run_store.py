# SPDX-License-Identifier: Apache-2.0
"""One client of two key-value stores: the launcher's, which outlives every rank, and rank 0's,
which outlives the launcher.

Everything is written to both and read from the launcher's; once that is gone, from the other one.
A thread writes to the other one: rank 0 may be stopped, and then nobody may wait for its answer.

Apart from `launch`, which a command line is read with, because it imports torch.
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

#: How long the writes that are under way to the second store may take when the first is gone.
DRAIN_SECONDS = 10.0


class RunStore(dist.Store):
    """What ranks write for each other, readable as long as one of the servers lives.

    It is no parent for torch's `PrefixStore`, which cannot delete keys of a store made in Python.

    Args:
        store: a client of the one to read from first.
        mirror: connects a client to the other one; called on the thread that writes to it, as
            connecting may take seconds where names are slow to resolve.
        lost: tells whether the first one's server is gone: a client that finds out by itself
            prints a page.
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
        """Return the store to use: the second one once the first one's server is gone."""
        store = self._store
        if not self._failed_over and self._lost():
            self._fail_over(store)
        return self._store

    def _fail_over(self, failed: dist.Store) -> bool:
        """Use the second store, after the writes that are under way to it; another thread may have
        come first. Return whether there is one."""
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
        """Do something with the first store whose server lives. Raises what the last one does."""
        store = self._current()
        try:
            return act(store)
        except dist.DistNetworkError:
            if not self._fail_over(store):
                raise
            return act(self._store)

    def _write(self, act: Callable[[dist.Store], object]) -> None:
        """Also write to the second store, while there are two."""
        if not self._failed_over:
            self._writes.put(act)

    def _work(self, connect: Callable[[], dist.Store]) -> None:
        try:
            self._mirror = mirror = connect()
        except Exception:  # rank 0 is gone, and the run with it
            return
        finally:
            self._connected.set()
        while True:
            act = self._writes.get()
            try:
                act(mirror)
            except Exception:  # its server is gone: rank 0 is, and the run with it
                return
            finally:
                self._writes.task_done()

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        """Write a value."""
        # First to the queue: a thread that fails over meanwhile then waits for it.
        self._write(lambda store: store.set(key, value))
        self._do(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._do(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._do(lambda store: store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Wait until all keys are there. Raises DistStoreError when the time is over."""
        limit = () if timeout is None else (timeout,)
        self._do(lambda store: store.wait(keys, *limit))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return what it is then."""
        found = self._do(lambda store: store.add(key, amount))
        self._write(lambda store: store.add(key, amount))
        return found

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        found = self._do(lambda store: store.delete_key(key))
        self._write(lambda store: store.delete_key(key))
        return found

# SPDX-License-Identifier: Apache-2.0
"""Microbatches read ahead by threads, in the order in which they would be read without them.

What a microbatch is depends on the number of samples consumed before it and on nothing else, so
threads may read any of them; they are handed out in order. An error is raised where its microbatch
would have been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from megatron.core.datasets.samplers import GPTBatch, GPTBatches

# Per thread: one that is being read, and one that waits to be taken.
_AHEAD = 2


class PrefetchedBatches(Iterator[GPTBatch]):
    """The microbatches of `batches`, read ahead.

    Args:
        batches: where they come from; it moves along as they are taken.
        workers: threads.

    Raises:
        ValueError: no threads.
    """

    def __init__(self, batches: GPTBatches, *, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers read nothing; must be 1 or more")
        self._batches, self._ahead = batches, _AHEAD * workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        self._reading: deque[Future[GPTBatch]] = deque()

    @property
    def consumed_samples(self) -> int:
        """Samples taken by all lanes together, without those that are read ahead."""
        return self._batches.consumed_samples

    def __next__(self) -> GPTBatch:
        """Return the next microbatch.

        Raises:
            StopIteration: as `GPTBatches` does.
        """
        while len(self._reading) < self._ahead and self._batches.has(len(self._reading)):
            places = self._batches.places(len(self._reading))
            self._reading.append(self._pool.submit(self._batches.read, places))
        if not self._reading:
            raise StopIteration
        batch = self._reading.popleft().result()
        self._batches.skip()
        return batch

    def close(self) -> None:
        """Stop reading ahead; a read that has begun ends by itself."""
        self._reading.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

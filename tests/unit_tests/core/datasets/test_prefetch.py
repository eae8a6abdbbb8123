# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: the same microbatches in the same order, errors in their place."""

import threading
import time

import numpy as np
import pytest

from megatron.core.datasets.samplers import CyclicOrder, GPTBatches, PrefetchedBatches
from megatron.core.datasets.token_rows import SampleRows


class Slow:
    """A data set of which early samples take longest; notes which thread read what."""

    def __init__(self, size: int, *, bad: int | None = None) -> None:
        self.size, self.bad = size, bad
        self.threads: set[str] = set()
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def read(self, indices: np.ndarray) -> SampleRows:
        self.threads.add(threading.current_thread().name)
        self.reads.append(int(indices[0]))
        time.sleep(0.004 if indices[0] % 4 == 0 else 0.0)
        if self.bad in indices:
            raise ValueError(f"sample {self.bad} is bad")
        rows = np.repeat(indices[:, None], 4, axis=1)
        return SampleRows(tokens=rows, loss_mask=np.ones((len(rows), 3), np.float32))


def batches(data, *, consumed=0, lane=1, cyclic=False):
    order = CyclicOrder(len(data), 5) if cyclic else None
    return GPTBatches(
        data,
        micro_batch_size=2,
        data_parallel_rank=lane,
        data_parallel_size=3,
        consumed_samples=consumed,
        order=order,
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("cyclic", [False, True])
def test_order_is_that_of_one_thread(workers, cyclic):
    def first_batches(source):
        found = [next(source) for _ in range(9)]
        return [(b.tokens.tolist(), b.sample_ids.tolist()) for b in found], source.consumed_samples

    wanted = first_batches(batches(Slow(60), consumed=6, cyclic=cyclic))
    data = Slow(60)
    ahead = PrefetchedBatches(batches(data, consumed=6, cyclic=cyclic), workers=workers)
    assert first_batches(ahead) == wanted
    assert wanted[1] == 60
    assert threading.current_thread().name not in data.threads
    if not cyclic:
        assert len(data.reads) == 9  # nothing is read twice, and nothing behind the end
        with pytest.raises(StopIteration):
            next(ahead)
    ahead.close()


def test_reading_runs_ahead_by_a_bounded_number():
    data = Slow(600)
    ahead = PrefetchedBatches(batches(data), workers=2)
    next(ahead)
    deadline = time.monotonic() + 5
    while len(data.reads) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(data.reads) == 4
    ahead.close()


def test_an_error_comes_where_its_microbatch_would():
    ahead = PrefetchedBatches(batches(Slow(60, bad=20), lane=1), workers=4)
    for _ in range(3):
        next(ahead)
    with pytest.raises(ValueError, match="sample 20 is bad"):
        next(ahead)
    ahead.close()


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="0 workers"):
        PrefetchedBatches(batches(Slow(6)), workers=0)

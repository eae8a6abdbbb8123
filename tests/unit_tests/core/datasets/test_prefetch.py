# SPDX-License-Identifier: Apache-2.0
"""Prefetching: the same microbatches in the same order, and errors at the same microbatch."""

import threading
import time

import numpy as np
import pytest

from megatron.core.datasets import CyclicOrder, GPTBatches, PrefetchedBatches
from megatron.core.datasets.token_rows import SampleRows


class SlowDataset:
    """A data set with some slow samples that records the threads and the samples they read."""

    def __init__(self, size: int, *, bad_sample: int | None = None) -> None:
        self.size, self.bad_sample = size, bad_sample
        self.threads: set[str] = set()
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def read(self, indices: np.ndarray) -> SampleRows:
        self.threads.add(threading.current_thread().name)
        self.reads.append(int(indices[0]))
        time.sleep(0.004 if indices[0] % 4 == 0 else 0.0)
        if self.bad_sample in indices:
            raise ValueError(f"sample {self.bad_sample} is bad")
        rows = np.repeat(indices[:, None], 4, axis=1)
        return SampleRows(tokens=rows, loss_mask=np.ones((len(rows), 3), np.float32))


def make_batches(dataset, *, consumed=0, dp_rank=1, cyclic=False):
    order = CyclicOrder(len(dataset), 5) if cyclic else None
    return GPTBatches(
        dataset,
        micro_batch_size=2,
        data_parallel_rank=dp_rank,
        data_parallel_size=3,
        consumed_samples=consumed,
        order=order,
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("cyclic", [False, True])
def test_prefetched_order_matches_a_single_thread(workers, cyclic):
    def first_batches(source):
        batches = [next(source) for _ in range(9)]
        return [
            (b.tokens.tolist(), b.sample_ids.tolist()) for b in batches
        ], source.consumed_samples

    expected = first_batches(make_batches(SlowDataset(60), consumed=6, cyclic=cyclic))
    dataset = SlowDataset(60)
    prefetched = PrefetchedBatches(
        make_batches(dataset, consumed=6, cyclic=cyclic), workers=workers
    )
    assert first_batches(prefetched) == expected
    assert expected[1] == 60
    assert threading.current_thread().name not in dataset.threads
    if not cyclic:
        assert len(dataset.reads) == 9  # no sample is read twice or beyond the end
        with pytest.raises(StopIteration):
            next(prefetched)
    prefetched.close()


def test_prefetch_depth_is_bounded():
    dataset = SlowDataset(600)
    prefetched = PrefetchedBatches(make_batches(dataset), workers=2)
    next(prefetched)
    deadline = time.monotonic() + 5
    while len(dataset.reads) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(dataset.reads) == 4
    prefetched.close()


def test_read_error_is_raised_at_its_microbatch():
    prefetched = PrefetchedBatches(
        make_batches(SlowDataset(60, bad_sample=20), dp_rank=1), workers=4
    )
    for _ in range(3):
        next(prefetched)
    with pytest.raises(ValueError, match="sample 20 is bad"):
        next(prefetched)
    prefetched.close()


def test_zero_workers_are_refused():
    with pytest.raises(ValueError, match="0 workers"):
        PrefetchedBatches(make_batches(SlowDataset(6)), workers=0)

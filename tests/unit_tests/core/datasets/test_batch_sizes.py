# SPDX-License-Identifier: Apache-2.0
"""Batch sizes over a run, against a walk from step to step, and what ranks read by them."""

import random

import numpy as np
import pytest

from megatron.core.datasets.batch_sizes import BatchSizes
from megatron.core.datasets.samplers import CyclicOrder, GPTBatches, PrefetchedBatches, SingleOrder
from tests.unit_tests.core.datasets.test_samplers import Numbers

#: 6, 6 (beyond the threshold of 10), 4 for 12 and 16, 9 from 20 on.
UNEVEN = BatchSizes(((0, 6), (10, 4), (20, 9)))


def consumed_after_steps(sizes: BatchSizes, steps: int) -> list[int]:
    """Return the samples consumed after each step, looking up the last threshold each time."""
    found = [0]
    for _ in range(steps):
        found.append(found[-1] + [size for first, size in sizes.stages if first <= found[-1]][-1])
    return found


def test_batch_size_changes_at_first_step_after_threshold():
    assert consumed_after_steps(UNEVEN, 6) == [0, 6, 12, 16, 20, 29, 38]
    assert [UNEVEN.at(n) for n in (0, 9, 10, 12, 19, 20, 10**12)] == [6, 6, 4, 4, 4, 9, 9]


def test_steps_and_samples_are_those_of_a_walk():
    draw = random.Random(3)
    for _ in range(200):
        thresholds = sorted(draw.sample(range(1, 60), draw.randrange(5)))
        sizes = BatchSizes(tuple((t, draw.randrange(1, 20)) for t in (0, *thresholds)))
        seen = consumed_after_steps(sizes, 30)
        assert [sizes.samples(i) for i in range(31)] == seen
        later = range(0, 31 - 4, 3)
        assert [sizes.samples(4, begin=seen[i]) for i in later] == [seen[i + 4] for i in later]
        for n in range(seen[-1]):
            assert sizes.steps(n) == max(i for i, end in enumerate(seen) if end <= n)


@pytest.mark.parametrize(
    ("start", "increment", "samples", "size"),
    [(16, 16, 5859375, 1536), (4, 2, 30, 12), (3, 5, 7, 13), (4, 1, 3, 12), (8, 4, 100, 8)],
)
def test_a_ramp_has_its_increments_at_even_distances(start, increment, samples, size):
    """Megatron's: the increments so far are consumed / (samples / increments), rounded down."""
    sizes, count = BatchSizes.ramp(start, increment, samples=samples, size=size), size - start
    for n in [*range(min(samples + 9, 200)), samples - 1, samples, samples + 1]:
        so_far = n * (count // increment) // samples  # exact where Megatron divides in floats
        assert sizes.at(n) == (size if n >= samples else start + so_far * increment), n


@pytest.mark.parametrize(
    "stages", [(), ((1, 4),), ((0, 4), (0, 8)), ((0, 4), (9, 8), (8, 4)), ((0, 0),)]
)
def test_sizes_that_are_none_are_refused(stages):
    with pytest.raises(ValueError, match="batch size"):
        BatchSizes(stages)


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_ranks_read_each_step_at_its_batch_size(kind, workers):
    """Steps of 6, 6, 4, 4, 9, 9 on 2 lanes in microbatches of 2, with fillers; from each step
    on."""
    ends = consumed_after_steps(UNEVEN, 6)
    order = CyclicOrder(13, seed=7) if kind == "cyclic" else SingleOrder(38)
    whole = order.indices(0, 38)
    for first in range(6):
        runs = []
        for lane in range(2):
            run = GPTBatches(
                Numbers(13 if kind == "cyclic" else 38),
                micro_batch_size=2,
                data_parallel_rank=lane,
                data_parallel_size=2,
                consumed_samples=ends[first],
                order=order,
                batch_sizes=UNEVEN,
            )
            runs.append(PrefetchedBatches(run, workers=workers) if workers else run)
        for begin, end in zip(ends[first:], ends[first + 1 :], strict=False):
            seen, ids, fillers = [], [], []
            for _ in range(-(-(end - begin) // 4)):
                for run in runs:
                    assert run.consumed_samples < end
                    batch = next(run)
                    if batch.is_padding:
                        fillers.append(batch.sample_ids.tolist())
                        assert not batch.loss_mask.any()
                    else:
                        seen += batch.tokens[:, 0].tolist()
                        ids += batch.sample_ids.tolist()
            assert seen == whole[begin:end].tolist()
            assert ids == list(range(begin, end))
            # 6 are blocks of 2 2 2, and 9 of 2 2 2 2 1, which lane 0 has alone.
            assert fillers == {6: [[end - 1] * 2], 4: [], 9: [[end - 1]]}[end - begin]
            assert {run.consumed_samples for run in runs} == {end}
        for run in runs if workers else ():
            run.close()
    assert np.unique(whole).size == (13 if kind == "cyclic" else 38)

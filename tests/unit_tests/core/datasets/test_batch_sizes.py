# SPDX-License-Identifier: Apache-2.0
"""Batch sizes over a run, against a step-by-step walk, and the samples that ranks read by them."""

import random

import numpy as np
import pytest

from megatron.core.datasets import (
    BatchSizes,
    CyclicOrder,
    GPTBatches,
    PrefetchedBatches,
    SingleOrder,
)
from tests.unit_tests.core.datasets.test_samplers import NumberedSamples

#: Steps of 6 and 6 samples (beyond the threshold of 10), of 4 at 12 and 16, and of 9 from 20 on.
UNEVEN = BatchSizes(((0, 6), (10, 4), (20, 9)))


def consumed_after_steps(sizes: BatchSizes, steps: int) -> list[int]:
    """Return the samples consumed after each step, looking up the last threshold each time."""
    consumed = [0]
    for _ in range(steps):
        past = [size for threshold, size in sizes.stages if threshold <= consumed[-1]]
        consumed.append(consumed[-1] + past[-1])
    return consumed


def test_batch_size_changes_at_first_step_after_threshold():
    assert consumed_after_steps(UNEVEN, 6) == [0, 6, 12, 16, 20, 29, 38]
    assert [UNEVEN.at(n) for n in (0, 9, 10, 12, 19, 20, 10**12)] == [6, 6, 4, 4, 4, 9, 9]


def test_steps_and_samples_match_a_step_by_step_walk():
    rng = random.Random(3)
    for _ in range(200):
        thresholds = sorted(rng.sample(range(1, 60), rng.randrange(5)))
        sizes = BatchSizes(tuple((t, rng.randrange(1, 20)) for t in (0, *thresholds)))
        consumed = consumed_after_steps(sizes, 30)
        assert [sizes.samples(i) for i in range(31)] == consumed
        begins = range(0, 31 - 4, 3)
        assert [sizes.samples(4, begin=consumed[i]) for i in begins] == [
            consumed[i + 4] for i in begins
        ]
        for n in range(consumed[-1]):
            assert sizes.steps(n) == max(i for i, end in enumerate(consumed) if end <= n)


@pytest.mark.parametrize(
    ("start", "increment", "samples", "size"),
    [(16, 16, 5859375, 1536), (4, 2, 30, 12), (3, 5, 7, 13), (4, 1, 3, 12), (8, 4, 100, 8)],
)
def test_ramp_increments_are_evenly_spaced_in_samples(start, increment, samples, size):
    """As in Megatron: the number of increments is floor(consumed / (samples / increments))."""
    sizes, count = BatchSizes.ramp(start, increment, samples=samples, size=size), size - start
    for n in [*range(min(samples + 9, 200)), samples - 1, samples, samples + 1]:
        # Exact in integers; Megatron divides in floats.
        num_increments = n * (count // increment) // samples
        assert sizes.at(n) == (size if n >= samples else start + num_increments * increment), n


@pytest.mark.parametrize(
    "stages", [(), ((1, 4),), ((0, 4), (0, 8)), ((0, 4), (9, 8), (8, 4)), ((0, 0),)]
)
def test_invalid_batch_size_stages_are_refused(stages):
    with pytest.raises(ValueError, match="batch size"):
        BatchSizes(stages)


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_ranks_read_each_step_at_its_batch_size(kind, workers):
    """Steps of 6, 6, 4, 4, 9, 9 on 2 data-parallel ranks in microbatches of 2, with padding
    microbatches; started at each step."""
    ends = consumed_after_steps(UNEVEN, 6)
    order = CyclicOrder(13, seed=7) if kind == "cyclic" else SingleOrder(38)
    expected = order.indices(0, 38)
    for first_step in range(6):
        readers = []
        for dp_rank in range(2):
            reader = GPTBatches(
                NumberedSamples(13 if kind == "cyclic" else 38),
                micro_batch_size=2,
                data_parallel_rank=dp_rank,
                data_parallel_size=2,
                consumed_samples=ends[first_step],
                order=order,
                batch_sizes=UNEVEN,
            )
            readers.append(PrefetchedBatches(reader, workers=workers) if workers else reader)
        for begin, end in zip(ends[first_step:], ends[first_step + 1 :], strict=False):
            samples, ids, padding_ids = [], [], []
            for _ in range(-(-(end - begin) // 4)):
                for reader in readers:
                    assert reader.consumed_samples < end
                    batch = next(reader)
                    if batch.is_padding:
                        padding_ids.append(batch.sample_ids.tolist())
                        assert not batch.loss_mask.any()
                    else:
                        samples += batch.tokens[:, 0].tolist()
                        ids += batch.sample_ids.tolist()
            assert samples == expected[begin:end].tolist()
            assert ids == list(range(begin, end))
            # A step of 6 has blocks of 2 2 2, one of 9 has 2 2 2 2 1: rank 0 reads the last block
            # alone.
            assert padding_ids == {6: [[end - 1] * 2], 4: [], 9: [[end - 1]]}[end - begin]
            assert {reader.consumed_samples for reader in readers} == {end}
        for reader in readers if workers else ():
            reader.close()
    assert np.unique(expected).size == (13 if kind == "cyclic" else 38)

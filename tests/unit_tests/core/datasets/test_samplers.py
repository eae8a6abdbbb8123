# SPDX-License-Identifier: Apache-2.0
"""Samples that data-parallel ranks read: the same set at each step on any layout, and exactly the
remaining samples after a resume."""

import itertools

import numpy as np
import pytest
import torch

from megatron.core.datasets import BatchSizes, CyclicOrder, GPTBatches, SingleOrder
from megatron.core.datasets.batch_sizes import Division
from megatron.core.datasets.token_rows import SampleRows


class NumberedSamples:
    """A data set whose sample i holds i, i, i and masks odd samples."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def read(self, indices: np.ndarray) -> SampleRows:
        assert indices.dtype == np.int64
        in_range = ((indices >= 0) & (indices < self.size)).all()
        assert in_range
        rows = np.repeat(indices[:, None], 3, axis=1)
        return SampleRows(tokens=rows, loss_mask=(rows[:, :-1] % 2 == 0).astype(np.float32))


def make_order(kind: str, size: int):
    return CyclicOrder(size, seed=7) if kind == "cyclic" else SingleOrder(size)


def samples_by_step(kind, size, *, micro, dp_size, start=0, global_batch=12, steps=5):
    """Return the data set's samples of each step, as a sorted list."""
    readers = [
        GPTBatches(
            NumberedSamples(size),
            micro_batch_size=micro,
            data_parallel_rank=dp_rank,
            data_parallel_size=dp_size,
            consumed_samples=start,
            order=make_order(kind, size),
        )
        for dp_rank in range(dp_size)
    ]
    sorted_steps = []
    for _ in range(steps):
        step = []
        for _ in range(global_batch // (micro * dp_size)):
            for reader in readers:
                step += next(reader).tokens[:, 0].tolist()
        sorted_steps.append(sorted(step))
    assert {reader.consumed_samples for reader in readers} == {start + steps * global_batch}
    return sorted_steps


LAYOUTS = [(12, 1), (3, 4), (4, 3), (1, 12), (2, 3), (6, 1), (1, 1)]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(("micro", "dp_size"), LAYOUTS[1:])
def test_a_step_consumes_the_same_set_on_any_layout(kind, micro, dp_size):
    # 60 samples for "single"; with 25, "cyclic" starts a new epoch within a step twice.
    size = 60 if kind == "single" else 25
    expected = samples_by_step(kind, size, micro=12, dp_size=1)
    assert samples_by_step(kind, size, micro=micro, dp_size=dp_size) == expected
    if kind == "single":
        assert sorted(itertools.chain(*expected)) == list(range(60))


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("completed_steps", range(6))
def test_resuming_on_another_layout_continues_exactly(kind, completed_steps):
    size = 60 if kind == "single" else 25
    uninterrupted = samples_by_step(kind, size, micro=2, dp_size=3)
    resumed = samples_by_step(
        kind, size, micro=4, dp_size=1, start=12 * completed_steps, steps=5 - completed_steps
    )
    assert resumed == uninterrupted[completed_steps:]


def test_batches_carry_tokens_mask_and_consumption_numbers():
    batches = GPTBatches(
        NumberedSamples(50),
        micro_batch_size=2,
        data_parallel_rank=1,
        data_parallel_size=3,
        order=CyclicOrder(50, seed=3),
    )
    next(batches)
    batch = next(batches)
    assert batch.sample_ids.tolist() == [8, 9]
    chosen = CyclicOrder(50, seed=3).indices(8, 10)
    assert batch.tokens.tolist() == [[number] * 3 for number in chosen]
    assert batch.loss_mask.tolist() == [[1.0 - number % 2] * 2 for number in chosen]
    assert batch.input_ids.shape == batch.labels.shape == (2, 2)
    assert batch.tokens.dtype == batch.sample_ids.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32


def test_incomplete_last_batch_is_dropped():
    for dp_rank in range(3):
        batches = GPTBatches(
            NumberedSamples(20),
            micro_batch_size=2,
            data_parallel_rank=dp_rank,
            data_parallel_size=3,
        )
        assert len(list(batches)) == 3
        assert batches.consumed_samples == 18


def test_cyclic_epochs_are_different_permutations():
    order = CyclicOrder(30, seed=11)
    epochs = [order.indices(30 * e, 30 * (e + 1)).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order.indices(25, 65).tolist() == epochs[0][25:] + epochs[1] + epochs[2][:5]
    assert CyclicOrder(30, seed=12).indices(0, 30).tolist() != epochs[0]
    assert order.indices(5, 5).tolist() == []


def test_impossible_positions_are_refused():
    with pytest.raises(
        ValueError, match="61 samples are consumed already but the data has only 60"
    ):
        GPTBatches(NumberedSamples(60), micro_batch_size=1, consumed_samples=61)
    assert list(GPTBatches(NumberedSamples(60), micro_batch_size=1, consumed_samples=60)) == []
    for rank, size, micro, consumed in [(2, 2, 1, 0), (-1, 2, 1, 0), (0, 1, 0, 0), (0, 1, 1, -1)]:
        with pytest.raises(ValueError, match="impossible"):
            GPTBatches(
                NumberedSamples(60),
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=size,
                consumed_samples=consumed,
            )


#: Samples of a step, samples of a microbatch, data-parallel size.
STEPS = [(11, 2, 3), (11, 2, 4), (10, 2, 3), (7, 3, 2), (8, 8, 1), (5, 1, 3), (13, 4, 1), (9, 2, 2)]


@pytest.mark.parametrize(("samples", "micro", "dp_size"), STEPS)
def test_microbatches_of_a_step_are_independent_of_dp_size(samples, micro, dp_size):
    """Every sample is read once, in blocks of `micro` that go to the ranks round-robin."""
    plan = Division(samples=samples, micro_batch_size=micro, data_parallel_size=dp_size)
    ranges = [
        plan.sample_range(dp_rank, m) for m in range(plan.rounds) for dp_rank in range(dp_size)
    ]
    blocks = [list(samples_of_block) for samples_of_block in ranges if samples_of_block]
    expected = [list(range(samples))[start : start + micro] for start in range(0, samples, micro)]
    assert blocks == expected
    assert len(ranges) - len(blocks) == plan.padding_microbatches < dp_size
    rows = [
        max(len(p) for p in ranges[m * dp_size : (m + 1) * dp_size]) for m in range(plan.rounds)
    ]
    assert [plan.largest(m) for m in range(plan.rounds)] == rows
    assert plan.wasted == pytest.approx(1.0 - samples / (dp_size * sum(rows)))
    assert plan.is_even == (not plan.padding_microbatches and samples % micro == 0)
    assert [plan.consumed(m) for m in (0, plan.rounds)] == [0, samples]
    for dp_rank in range(dp_size):
        for number in range(plan.rounds):
            for p in plan.sample_range(dp_rank, number):
                assert (dp_rank, number) == (p // micro % dp_size, p // (micro * dp_size))


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(("micro", "dp_size"), [(2, 3), (2, 4), (3, 2), (5, 2), (11, 1)])
def test_short_ranks_get_padding_microbatches_without_loss(kind, micro, dp_size):
    """Five steps of 11 samples until the data ends; also resumed after two steps."""
    size, rounds = (56 if kind == "single" else 25), -(-11 // (micro * dp_size))
    # Samples of rank 0 in the last round.
    last_batch_size = min(micro, 11 - (rounds - 1) * micro * dp_size)
    expected = CyclicOrder(25, seed=7).indices(0, 55) if kind == "cyclic" else np.arange(55)
    for start in (0, 22):
        readers = [
            GPTBatches(
                NumberedSamples(size),
                micro_batch_size=micro,
                data_parallel_rank=dp_rank,
                data_parallel_size=dp_size,
                consumed_samples=start,
                order=make_order(kind, size),
                batch_sizes=BatchSizes.constant(11),
            )
            for dp_rank in range(dp_size)
        ]
        for step_start in range(start, 55, 11):
            samples, ids, num_padding = [], [], 0
            for _ in range(rounds):
                batches = [next(reader) for reader in readers]
                has_padding_mask = {batch.padding is not None for batch in batches}
                assert has_padding_mask == {any(batch.is_padding for batch in batches)}
                for batch in batches:
                    if batch.padding is not None:
                        assert batch.padding.shape == batch.loss_mask.shape
                        assert set(batch.padding.flatten().tolist()) == {batch.is_padding}
                    if batch.is_padding:
                        num_padding += 1
                        assert batch.num_samples == 0
                        assert batch.loss_mask.shape == (last_batch_size, 2)
                        assert not batch.loss_mask.any()
                        assert set(batch.sample_ids.tolist()) == {step_start + 10}
                        assert set(batch.tokens.flatten().tolist()) == {expected[step_start + 10]}
                    else:
                        assert batch.num_samples == len(batch.tokens) <= micro
                        samples += batch.tokens[:, 0].tolist()
                        ids += batch.sample_ids.tolist()
            assert samples == expected[step_start : step_start + 11].tolist()
            assert ids == list(range(step_start, step_start + 11))
            assert num_padding == rounds * dp_size - -(-11 // micro)
            assert {reader.consumed_samples for reader in readers} == {step_start + 11}
        if kind == "single":
            # The 56th sample does not fill a step: no rank reads it.
            assert not any(reader.has(rounds - 1) for reader in readers)


def test_sample_ranges_out_of_bounds_are_refused():
    plan = Division(samples=5, micro_batch_size=2, data_parallel_size=2)
    for dp_rank, number in [(2, 0), (-1, 0), (0, 2), (0, -1)]:
        with pytest.raises(ValueError, match="impossible"):
            plan.sample_range(dp_rank, number)

# SPDX-License-Identifier: Apache-2.0
"""What lanes consume: the same set at each step on any layout, and exactly the rest on resume."""

import itertools

import numpy as np
import pytest
import torch

from megatron.core.datasets.batch_sizes import BatchSizes, Division
from megatron.core.datasets.samplers import CyclicOrder, GPTBatches, SingleOrder
from megatron.core.datasets.token_rows import SampleRows


class Numbers:
    """A data set whose sample i holds i, i, i and masks odd samples."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def read(self, indices: np.ndarray) -> SampleRows:
        assert indices.dtype == np.int64
        bounded = ((indices >= 0) & (indices < self.size)).all()
        assert bounded
        rows = np.repeat(indices[:, None], 3, axis=1)
        return SampleRows(tokens=rows, loss_mask=(rows[:, :-1] % 2 == 0).astype(np.float32))


def order_of(kind: str, size: int):
    return CyclicOrder(size, seed=7) if kind == "cyclic" else SingleOrder(size)


def consumed_by_step(kind, size, *, micro, lanes, start=0, global_batch=12, steps=5):
    """Return the data set's samples of each step, as a sorted list."""
    runs = [
        GPTBatches(
            Numbers(size),
            micro_batch_size=micro,
            data_parallel_rank=lane,
            data_parallel_size=lanes,
            consumed_samples=start,
            order=order_of(kind, size),
        )
        for lane in range(lanes)
    ]
    result = []
    for _ in range(steps):
        step = []
        for _ in range(global_batch // (micro * lanes)):
            for run in runs:
                step += next(run).tokens[:, 0].tolist()
        result.append(sorted(step))
    assert {run.consumed_samples for run in runs} == {start + steps * global_batch}
    return result


LAYOUTS = [(12, 1), (3, 4), (4, 3), (1, 12), (2, 3), (6, 1), (1, 1)]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(("micro", "lanes"), LAYOUTS[1:])
def test_a_step_consumes_the_same_set_on_any_layout(kind, micro, lanes):
    # 60 samples for "single"; 25 make "cyclic" cross two borders of epochs inside steps.
    size = 60 if kind == "single" else 25
    expected = consumed_by_step(kind, size, micro=12, lanes=1)
    assert consumed_by_step(kind, size, micro=micro, lanes=lanes) == expected
    if kind == "single":
        assert sorted(itertools.chain(*expected)) == list(range(60))


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("done", range(6))
def test_resuming_on_another_layout_continues_exactly(kind, done):
    size = 60 if kind == "single" else 25
    whole = consumed_by_step(kind, size, micro=2, lanes=3)
    rest = consumed_by_step(kind, size, micro=4, lanes=1, start=12 * done, steps=5 - done)
    assert rest == whole[done:]


def test_batches_carry_tokens_mask_and_consumption_numbers():
    batches = GPTBatches(
        Numbers(50),
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
    for lane in range(3):
        batches = GPTBatches(
            Numbers(20), micro_batch_size=2, data_parallel_rank=lane, data_parallel_size=3
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
        GPTBatches(Numbers(60), micro_batch_size=1, consumed_samples=61)
    assert list(GPTBatches(Numbers(60), micro_batch_size=1, consumed_samples=60)) == []
    for rank, size, micro, consumed in [(2, 2, 1, 0), (-1, 2, 1, 0), (0, 1, 0, 0), (0, 1, 1, -1)]:
        with pytest.raises(ValueError, match="impossible"):
            GPTBatches(
                Numbers(60),
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=size,
                consumed_samples=consumed,
            )


#: Samples of a step, of a microbatch, and lanes.
STEPS = [(11, 2, 3), (11, 2, 4), (10, 2, 3), (7, 3, 2), (8, 8, 1), (5, 1, 3), (13, 4, 1), (9, 2, 2)]


@pytest.mark.parametrize(("samples", "micro", "lanes"), STEPS)
def test_microbatches_of_a_step_are_independent_of_dp_size(samples, micro, lanes):
    """Every sample once, in blocks of b that the lanes take in turn."""
    plan = Division(samples=samples, micro_batch_size=micro, data_parallel_size=lanes)
    given = [plan.sample_range(lane, m) for m in range(plan.rounds) for lane in range(lanes)]
    blocks = [list(places) for places in given if places]
    wanted = [list(range(samples))[first : first + micro] for first in range(0, samples, micro)]
    assert blocks == wanted
    assert len(given) - len(blocks) == plan.padding_microbatches < lanes
    rows = [max(len(p) for p in given[m * lanes : (m + 1) * lanes]) for m in range(plan.rounds)]
    assert [plan.largest(m) for m in range(plan.rounds)] == rows
    assert plan.wasted == pytest.approx(1.0 - samples / (lanes * sum(rows)))
    assert plan.is_even == (not plan.padding_microbatches and samples % micro == 0)
    assert [plan.consumed(m) for m in (0, plan.rounds)] == [0, samples]
    for lane in range(lanes):
        for number in range(plan.rounds):
            for p in plan.sample_range(lane, number):
                assert (lane, number) == (p // micro % lanes, p // (micro * lanes))


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(("micro", "lanes"), [(2, 3), (2, 4), (3, 2), (5, 2), (11, 1)])
def test_short_ranks_get_padding_microbatches_without_loss(kind, micro, lanes):
    """Steps of 11 samples, five of them, then no more; resumed in the middle."""
    size, rounds = (56 if kind == "single" else 25), -(-11 // (micro * lanes))
    last = min(micro, 11 - (rounds - 1) * micro * lanes)  # samples of lane 0 in the last round
    whole = CyclicOrder(25, seed=7).indices(0, 55) if kind == "cyclic" else np.arange(55)
    for start in (0, 22):
        runs = [
            GPTBatches(
                Numbers(size),
                micro_batch_size=micro,
                data_parallel_rank=lane,
                data_parallel_size=lanes,
                consumed_samples=start,
                order=order_of(kind, size),
                batch_sizes=BatchSizes.constant(11),
            )
            for lane in range(lanes)
        ]
        for first in range(start, 55, 11):
            seen, ids, fillers = [], [], 0
            for _ in range(rounds):
                batches = [next(run) for run in runs]
                marks = {batch.padding is not None for batch in batches}
                assert marks == {any(batch.is_padding for batch in batches)}
                for batch in batches:
                    if batch.padding is not None:
                        assert batch.padding.shape == batch.loss_mask.shape
                        assert set(batch.padding.flatten().tolist()) == {batch.is_padding}
                    if batch.is_padding:
                        fillers += 1
                        assert batch.num_samples == 0
                        assert batch.loss_mask.shape == (last, 2)
                        assert not batch.loss_mask.any()
                        assert set(batch.sample_ids.tolist()) == {first + 10}
                        assert set(batch.tokens.flatten().tolist()) == {whole[first + 10]}
                    else:
                        assert batch.num_samples == len(batch.tokens) <= micro
                        seen += batch.tokens[:, 0].tolist()
                        ids += batch.sample_ids.tolist()
            assert seen == whole[first : first + 11].tolist()
            assert ids == list(range(first, first + 11))
            assert fillers == rounds * lanes - -(-11 // micro)
            assert {run.consumed_samples for run in runs} == {first + 11}
        if kind == "single":
            # The 56th sample is no step of all lanes; it never is part of one.
            assert not any(run.has(rounds - 1) for run in runs)


def test_places_that_are_not_are_refused():
    plan = Division(samples=5, micro_batch_size=2, data_parallel_size=2)
    for lane, number in [(2, 0), (-1, 0), (0, 2), (0, -1)]:
        with pytest.raises(ValueError, match="impossible"):
            plan.sample_range(lane, number)

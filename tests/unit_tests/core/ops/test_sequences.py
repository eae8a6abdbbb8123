# SPDX-License-Identifier: Apache-2.0
"""Chunks of packed sequences, and state sweeps over chunks, against loops over tokens."""

from itertools import pairwise

import pytest
import torch

from megatron.core.ops.recurrence import apply_transition
from megatron.core.ops.recurrence.chunks import Chunks, Sweep, SweepBack
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import relative_error
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

BOUNDS = [
    (0, 12),
    (0, 13),
    (0, 3, 3, 14, 15, 31, 35),
    (0, 8, 12, 12),  # sorted already, whole chunks
    (0, 4, 12),  # whole chunks in another order
    (0, 0),
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_chunks_hold_each_token_once_within_its_sequence(bounds):
    sequences = Sequences(bounds)
    chunks = Chunks.of(sequences, 4)
    assert Chunks.of(sequences, 4) is chunks
    x = torch.arange(1.0, sequences.tokens + 1)[:, None] * torch.tensor([1.0, 100.0])
    with nan_memory():
        grid = chunks.to_chunks(x)
    assert grid.shape == (chunks.count, 4, 2)
    assert torch.equal(chunks.from_chunks(grid), x)
    rows = {tuple(row.tolist()) for row in grid[..., 0]}
    expected = set()
    for begin, end in pairwise(bounds):
        for start in range(begin, end, 4):
            tokens = range(start, min(start + 4, end))
            expected.add((*(t + 1.0 for t in tokens), *[0.0] * (4 - len(tokens))))
    assert rows == expected
    assert len(expected) == chunks.count == sum(chunks.steps)


def test_each_step_processes_the_longest_sequences():
    chunks = Chunks.of(Sequences((0, 3, 14, 14, 19)), 4)
    assert chunks.steps == (3, 2, 1)
    assert chunks.order == (1, 3, 0, 2)
    states = torch.arange(4.0)
    assert torch.equal(chunks.sorted(states), torch.tensor([1.0, 3.0, 0.0, 2.0]))
    assert torch.equal(chunks.unsorted(chunks.sorted(states)), states)


def test_values_shared_by_layers_are_computed_once():
    sequences, computed = Sequences((0, 5)), []
    for _ in range(3):
        assert sequences.cached("key", lambda: computed.append(1) or len(computed)) == 1
    assert Chunks.of(sequences, 2).index is Chunks.of(sequences, 2).index


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("block", [1, 2, 100])
@pytest.mark.parametrize("scales", [False, True], ids=["matrices", "numbers"])
def test_sweeps_match_loops_over_chunks(bounds, block, scales):
    sequences = Sequences(bounds)
    chunks, source = Chunks.of(sequences, 4), generator(5)
    n, count, shape = chunks.count, sequences.count, (2, 3, 5)

    def draw(*sizes):
        return torch.randn(sizes, generator=source, dtype=torch.float64)

    transition = draw(n, 2, 1, 1) if scales else draw(n, 2, 3, 3)
    added, d_states = draw(n, *shape), draw(n, *shape)
    initial, d_final = draw(count, *shape), draw(count, *shape)
    blocks = [slice(i, min(i + block, n)) for i in range(0, n, block)]
    with nan_memory():
        sweep, sweep_back = Sweep(chunks, initial), SweepBack(chunks, d_final)
        for chunk_range in blocks:
            sweep.advance(chunk_range, transition[chunk_range], added[chunk_range])
        for chunk_range in reversed(blocks):
            sweep_back.advance(chunk_range, transition[chunk_range], d_states[chunk_range])
    for index, number in enumerate(chunks.order):
        state, gradient, own_chunks = initial[number], d_final[number], []
        for step, size in enumerate(chunks.steps):
            if index < size:
                own_chunks.append(sum(chunks.steps[:step]) + index)
        for chunk in own_chunks:
            assert relative_error(sweep.states_before[chunk], state) <= 1e-12
            state = apply_transition(transition[chunk], state) + added[chunk]
        assert relative_error(sweep.final()[number], state) <= 1e-12
        for chunk in reversed(own_chunks):
            assert relative_error(sweep_back.d_states_after[chunk], gradient) <= 1e-12
            gradient = (
                apply_transition(transition[chunk], gradient, transposed=True) + d_states[chunk]
            )
        assert relative_error(sweep_back.d_initial()[number], gradient) <= 1e-12


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((), "give 0 and the end of each sequence"),
        ((0,), "give 0 and the end"),
        ((1, 4), r"cu_seqlens \[1, 4\]: give 0"),
        ((0, 4, 3), "decreases from 4 to 3 at sequence 1"),
    ],
)
def test_malformed_bounds_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        Sequences(bounds)


def test_bad_chunk_size_and_lengths_are_refused():
    with pytest.raises(ValueError, match="use at least 1"):
        Chunks.of(Sequences((0, 4)), 0)
    with pytest.raises(ValueError, match=r"op: x \(5, 2\) has 5 tokens, the sequences 4"):
        Sequences((0, 4)).check("op", x=torch.zeros(5, 2))

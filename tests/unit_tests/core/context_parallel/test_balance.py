# SPDX-License-Identifier: Apache-2.0
"""The work of ranks by the cut of packed rows: counted as attention's blocks count it, and even."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.blockwise import attention_blocks
from megatron.core.context_parallel.sequence_sharding import (
    PADDING,
    AttentionWork,
    Costs,
    attention_work,
    joined_documents,
    shard_documents,
)
from tests.unit_tests.core.context_parallel.pair_count import pair_count


def log_normal_row(seed: int, length: int) -> tuple[int, ...]:
    """Return a row of documents of log-normal lengths, the last one cut off."""
    lengths = np.random.default_rng(seed).lognormal(6.5, 1.0, length).astype(int) + 1
    ends = [end for end in accumulate(lengths.tolist()) if end < length]
    return (0, *ends, length)


def test_two_documents_of_a_row_cut_as_one_leave_a_rank_waiting():
    documents = [(0, 6144, 8192)]
    row = attention_work(SequenceSharding.of(8192, 2), documents)
    assert row.imbalance == pytest.approx(1.6, abs=0.01)
    cut = shard_documents(documents, 2)
    apart = attention_work(cut, [cut.bounds])
    assert apart.imbalance == pytest.approx(1.0, abs=1e-9)
    assert (apart.padding, apart.tokens, sum(apart.pairs)) == (0, row.tokens, sum(row.pairs))


def test_per_document_cut_balances_log_normal_documents():
    by_row, apart, padding = [], [], []
    for seed in range(64):
        documents = [log_normal_row(seed, 8192)]
        by_row.append(attention_work(SequenceSharding.of(8192, 4), documents).imbalance)
        cut = shard_documents(documents, 4)
        found = attention_work(cut, [cut.bounds])
        apart.append(found.imbalance)
        padding.append(found.padding / len(found.pairs) / found.tokens)
        assert found.padding <= 7 * (len(documents[0]) - 1)
    assert np.mean(by_row) > 1.3, "there is something to even out"
    assert max(apart) <= 1.05
    assert max(padding) < 0.03


@pytest.mark.parametrize("size", [1, 2, 4])
def test_pairs_are_those_of_the_blocks(size):
    draw = random.Random(size)
    for _ in range(30):
        length = draw.choice((8, 24, 40))
        rows = []
        for _ in range(draw.choice((1, 3))):
            inner = draw.sample(range(1, length), draw.randrange(5))
            rows.append((0, *sorted(inner), length))
        window = draw.choice((None, None, 1, 5))
        apart = shard_documents(rows, size, multiple=draw.choice((1, 3)))
        for cut, documents in (
            (SequenceSharding.of(length, size), rows),
            (apart, [joined_documents(rows)]),
        ):
            found = attention_work(cut, documents, window=window)
            for rank in range(size):
                blocks = attention_blocks(
                    cut.runs(rank),
                    SequenceSharding.of(cut.length, 1).runs(0),
                    rows=len(documents),
                    documents=documents,
                    window=window,
                )
                assert found.pairs[rank] == pair_count(blocks, window=window)
                parts = [
                    (row, run.start, sum(end <= place for end in borders[1:]))
                    for row, borders in enumerate(documents)
                    for run in cut.runs(rank)
                    for place in range(run.row_start, run.row_end)
                ]
                assert found.sub_sequences[rank] == len(set(parts))
            heads = attention_work(cut, documents, window=window, by_heads=True)
            assert len(set(heads.pairs)) == 1
            assert sum(found.pairs) <= sum(heads.pairs) < sum(found.pairs) + size
            assert (heads.tokens, heads.padding) == (found.tokens, found.padding)
            assert found.tokens * size - found.padding == length * len(rows)


def test_documents_of_all_rows_are_cut_one_after_another():
    rows = [(0, 3, 12), (0, 12), (0, 4, 4, 12)]
    cut = shard_documents(rows, 2)
    assert cut.bounds == (0, 3, 12, 24, 28, 36)
    assert cut.padded == (0, 4, 16, 28, 32, 40)
    # What is missing to a multiple for sequence parallelism, or to as many as others have, is
    # padding of no document, and every rank has as much of it.
    wider = shard_documents(rows, 2, multiple=3)
    assert (wider.local_length, wider.bounds[-2:], wider.padded[-2:]) == (24, (36, 36), (40, 48))
    assert shard_documents(rows, 2, at_least=42).local_length == 22
    assert shard_documents(rows, 2, at_least=40) == cut


def test_one_row_holds_several_samples():
    cut = shard_documents([(0, 3, 12), (0, 12), (0, 4, 12)], 2, multiple=3)
    plain = SequenceLayout.make(cut, 1, rows=1)
    assert plain.sample_numbers is None
    assert torch.equal(plain.sample_positions, plain.row_indices)
    layout = plain.holding_samples(12)
    real = layout.row_indices >= 0
    assert (layout.sample_numbers[real] * 12 + layout.sample_positions[real]).equal(
        layout.row_indices[real]
    )
    assert layout.sample_numbers.unique().tolist() == [0, 1, 2]
    equal = bool((layout.sample_positions[~real] == PADDING).all())
    assert equal
    assert not real.all()
    x = torch.arange(1, 37).view(3, 12)
    local = layout.local(x)
    assert local.equal(plain.local(x.view(1, -1)))
    assert local[0, real].equal(layout.row_indices[real] + 1)
    assert not local[0, ~real].any()
    with pytest.raises(ValueError, match="samples"):
        layout.local(x.view(1, -1))
    for wrong in (0, 5):
        with pytest.raises(ValueError, match=f"no samples of {wrong}"):
            plain.holding_samples(wrong)
    with pytest.raises(ValueError, match="3 rows of"):
        SequenceLayout.make(cut, 1, rows=3).holding_samples(12)


def test_row_layout_uses_the_latest_sample_length():
    plain = SequenceLayout.make(SequenceSharding.of(12, 1), 0, rows=1)
    for length in (6, 4, 12, 6):  # layouts of one row share what is worked out once
        layout = plain.holding_samples(length)
        assert layout.sample_numbers.tolist() == [place // length for place in range(12)]
        assert layout.sample_positions.tolist() == [place % length for place in range(12)]


def test_what_costs_less_depends_on_what_padding_costs():
    row = AttentionWork(tokens=100, padding=0, pairs=(30, 90), sub_sequences=(1, 1))
    apart = AttentionWork(tokens=104, padding=8, pairs=(60, 60), sub_sequences=(3, 3))
    assert (row.imbalance, apart.imbalance) == (1.5, 1.0)
    for token, piece, less in ((1.0, 0.0, apart), (8.0, 0.0, row), (1.0, 20.0, row)):
        costs = Costs(token=token, pair=1.0, sub_sequence=piece)
        assert min((row, apart), key=lambda work: work.cost(costs)) is less
    empty = AttentionWork(tokens=4, padding=0, pairs=(0, 0), sub_sequences=(0, 0))
    assert empty.imbalance == 0.0

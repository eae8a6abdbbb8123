# SPDX-License-Identifier: Apache-2.0
"""The attention work of each rank by the sharding of packed rows, against attention's blocks."""

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
    """Return cu_seqlens of a row of documents of log-normal lengths, the last one truncated."""
    lengths = np.random.default_rng(seed).lognormal(6.5, 1.0, length).astype(int) + 1
    ends = [end for end in accumulate(lengths.tolist()) if end < length]
    return (0, *ends, length)


def test_row_sharding_of_two_documents_is_imbalanced():
    documents = [(0, 6144, 8192)]
    by_row = attention_work(SequenceSharding.of(8192, 2), documents)
    assert by_row.imbalance == pytest.approx(1.6, abs=0.01)
    sharding = shard_documents(documents, 2)
    per_document = attention_work(sharding, [sharding.bounds])
    assert per_document.imbalance == pytest.approx(1.0, abs=1e-9)
    assert (per_document.padding, per_document.tokens, sum(per_document.pairs)) == (
        0,
        by_row.tokens,
        sum(by_row.pairs),
    )


def test_per_document_sharding_balances_log_normal_lengths():
    by_row, per_document, padding = [], [], []
    for seed in range(64):
        documents = [log_normal_row(seed, 8192)]
        by_row.append(attention_work(SequenceSharding.of(8192, 4), documents).imbalance)
        sharding = shard_documents(documents, 4)
        work = attention_work(sharding, [sharding.bounds])
        per_document.append(work.imbalance)
        padding.append(work.padding / len(work.pairs) / work.tokens)
        assert work.padding <= 7 * (len(documents[0]) - 1)
    assert np.mean(by_row) > 1.3, "the row sharding must be imbalanced"
    assert max(per_document) <= 1.05
    assert max(padding) < 0.03


@pytest.mark.parametrize("size", [1, 2, 4])
def test_pair_counts_match_the_attention_blocks(size):
    rng = random.Random(size)
    for _ in range(30):
        length = rng.choice((8, 24, 40))
        rows = []
        for _ in range(rng.choice((1, 3))):
            splits = rng.sample(range(1, length), rng.randrange(5))
            rows.append((0, *sorted(splits), length))
        window = rng.choice((None, None, 1, 5))
        per_document = shard_documents(rows, size, multiple=rng.choice((1, 3)))
        for sharding, documents in (
            (SequenceSharding.of(length, size), rows),
            (per_document, [joined_documents(rows)]),
        ):
            work = attention_work(sharding, documents, window=window)
            for rank in range(size):
                blocks = attention_blocks(
                    sharding.runs(rank),
                    SequenceSharding.of(sharding.length, 1).runs(0),
                    rows=len(documents),
                    documents=documents,
                    window=window,
                )
                assert work.pairs[rank] == pair_count(blocks, window=window)
                sub_sequences = [
                    (row, run.start, sum(end <= row_index for end in bounds[1:]))
                    for row, bounds in enumerate(documents)
                    for run in sharding.runs(rank)
                    for row_index in range(run.row_start, run.row_end)
                ]
                assert work.sub_sequences[rank] == len(set(sub_sequences))
            heads = attention_work(sharding, documents, window=window, by_heads=True)
            assert len(set(heads.pairs)) == 1
            assert sum(work.pairs) <= sum(heads.pairs) < sum(work.pairs) + size
            assert (heads.tokens, heads.padding) == (work.tokens, work.padding)
            assert work.tokens * size - work.padding == length * len(rows)


def test_documents_of_all_rows_are_sharded_in_sequence():
    rows = [(0, 3, 12), (0, 12), (0, 4, 4, 12)]
    sharding = shard_documents(rows, 2)
    assert sharding.bounds == (0, 3, 12, 24, 28, 36)
    assert sharding.padded == (0, 4, 16, 28, 32, 40)
    # Padding up to a multiple for sequence parallelism, or up to `at_least`, belongs to no
    # document, and every rank has the same amount.
    wider = shard_documents(rows, 2, multiple=3)
    assert (wider.local_length, wider.bounds[-2:], wider.padded[-2:]) == (24, (36, 36), (40, 48))
    assert shard_documents(rows, 2, at_least=42).local_length == 22
    assert shard_documents(rows, 2, at_least=40) == sharding


def test_packed_row_maps_back_to_its_samples():
    sharding = shard_documents([(0, 3, 12), (0, 12), (0, 4, 12)], 2, multiple=3)
    plain = SequenceLayout.make(sharding, 1, rows=1)
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
    for sample_length in (0, 5):
        with pytest.raises(ValueError, match=f"do not split into samples of {sample_length}"):
            plain.holding_samples(sample_length)
    with pytest.raises(ValueError, match="3 rows of"):
        SequenceLayout.make(sharding, 1, rows=3).holding_samples(12)


def test_row_layout_uses_the_latest_sample_length():
    plain = SequenceLayout.make(SequenceSharding.of(12, 1), 0, rows=1)
    for length in (6, 4, 12, 6):  # layouts of one row share cached index maps
        layout = plain.holding_samples(length)
        assert layout.sample_numbers.tolist() == [row_index // length for row_index in range(12)]
        assert layout.sample_positions.tolist() == [row_index % length for row_index in range(12)]


def test_cheapest_sharding_depends_on_padding_cost():
    by_row = AttentionWork(tokens=100, padding=0, pairs=(30, 90), sub_sequences=(1, 1))
    per_document = AttentionWork(tokens=104, padding=8, pairs=(60, 60), sub_sequences=(3, 3))
    assert (by_row.imbalance, per_document.imbalance) == (1.5, 1.0)
    for token, sub_sequence, cheapest in (
        (1.0, 0.0, per_document),
        (8.0, 0.0, by_row),
        (1.0, 20.0, by_row),
    ):
        costs = Costs(token=token, pair=1.0, sub_sequence=sub_sequence)
        assert min((by_row, per_document), key=lambda work: work.cost(costs)) is cheapest
    empty = AttentionWork(tokens=4, padding=0, pairs=(0, 0), sub_sequences=(0, 0))
    assert empty.imbalance == 0.0

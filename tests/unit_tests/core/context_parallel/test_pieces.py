# SPDX-License-Identifier: Apache-2.0
"""Local sub-sequences of documents: packing, state transfers between ranks, and halo tokens."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.packed_tokens import LocalSequences
from tests.unit_tests.core.context_parallel.random_cuts import ShardingCase, random_case

ROWS = 3


def random_documents_case(seed: int) -> tuple[ShardingCase, list[tuple[int, ...]]]:
    """Draw a sharding and the documents of each row, often finer than the sharded sequences."""
    rng = random.Random(seed)
    case = random_case(rng)
    bounds = set(case.sharding().bounds)
    counts = [rng.choice([0, 1, 4]) for _ in range(ROWS)]
    rows = [bounds | {rng.randrange(case.total + 1) for _ in range(count)} for count in counts]
    return case, [tuple(sorted(row)) for row in rows]


CASES = [random_documents_case(seed) for seed in range(120)]


def make_local_sequences(
    case: ShardingCase, documents: list[tuple[int, ...]]
) -> list[LocalSequences]:
    """Return the local sequences of each rank."""
    sharding = case.sharding()
    return [LocalSequences(sharding, rank, documents=documents) for rank in range(case.size)]


def document_start(documents: list[tuple[int, ...]], row: int, row_index: int) -> int:
    """Return the row index at which the document of `row_index` begins."""
    return max(border for border in documents[row] if border <= row_index)


def expected_sub_sequences(
    case: ShardingCase, documents: list[tuple[int, ...]]
) -> list[list[list[tuple[int, int]]]]:
    """Return (row, row index) of each token of each sub-sequence of each rank."""
    ranks = []
    for column in case.row_indices():
        sub_sequences: list[list[tuple[int, int]]] = []
        for row in range(ROWS):
            previous = None
            for row_index in column:
                continues = previous is not None and row_index == previous + 1
                if row_index >= 0 and not (
                    continues and document_start(documents, row, row_index) != row_index
                ):
                    sub_sequences.append([])
                if row_index >= 0:
                    sub_sequences[-1].append((row, row_index))
                previous = row_index if row_index >= 0 else None
        ranks.append(sub_sequences)
    return ranks


def test_local_sequences_are_packed_row_by_row():
    padded = empty = inner = 0
    for case, documents in CASES:
        columns = case.row_indices()
        for local, column, expected in zip(
            make_local_sequences(case, documents),
            columns,
            expected_sub_sequences(case, documents),
            strict=True,
        ):
            x = torch.tensor([[[row, row_index] for row in range(ROWS)] for row_index in column])
            packed = local.pack(x.reshape(len(column), ROWS, 2))  # [t, 2]
            assert packed.tolist() == [list(token) for tokens in expected for token in tokens], case
            lengths = [len(tokens) for tokens in expected]
            assert list(local.sequences.lengths) == (lengths or [0]), case
            unpacked = local.unpack(packed)
            real = torch.tensor(column) >= 0
            assert torch.equal(unpacked[real], x[real]), case
            assert not unpacked[~real].any(), case
            padded, empty = padded + int((~real).sum()), empty + (not expected)
            inner += sum(tokens[0][1] in documents[tokens[0][0]][1:-1] for tokens in expected)
    assert (padded > 100, empty > 2, inner > 100) == (True,) * 3


def test_state_transfers_connect_consecutive_sub_sequences():
    crossing = chained = 0
    for case, documents in CASES:
        local_sequences = make_local_sequences(case, documents)
        by_rank = expected_sub_sequences(case, documents)
        expected = set()
        for rank, sub_sequences in enumerate(by_rank):
            for number, tokens in enumerate(sub_sequences):
                row, row_index = tokens[0]
                if document_start(documents, row, row_index) < row_index:
                    previous = (row, row_index - 1)
                    senders = [
                        (source, index)
                        for source, candidates in enumerate(by_rank)
                        for index, candidate in enumerate(candidates)
                        if candidate[-1] == previous
                    ]
                    expected.add((*senders[0], rank, number))
        assert len({local.chains for local in local_sequences}) == 1, case  # equal on all ranks
        links = [
            (
                link.source,
                local_sequences[link.source].exports[link.export],
                link.target,
                local_sequences[link.target].entries[link.entry],
            )
            for chain in local_sequences[0].chains
            for link in chain
        ]
        assert len(links) == len(set(links)), case
        assert set(links) == expected, case
        for chain in local_sequences[0].chains:
            ends = [(a.target, local_sequences[a.target].entries[a.entry]) for a in chain[:-1]]
            assert ends == [
                (b.source, local_sequences[b.source].exports[b.export]) for b in chain[1:]
            ], case
        receivers = {(link[2], link[3]) for link in links}
        heads = [
            (a.source, local_sequences[a.source].exports[a.export])
            for a, *_ in local_sequences[0].chains
        ]
        assert not receivers & set(heads), case  # a chain begins where its document begins
        assert local_sequences[0].crossed == bool(expected), case
        num_exports = [len(local.exports) for local in local_sequences]
        assert local_sequences[0].export_slots == max(num_exports), case
        num_entries = [len(local.entries) for local in local_sequences]
        assert local_sequences[0].entry_slots == max(num_entries), case
        crossing += bool(expected)
        chained += local_sequences[0].chained
    assert crossing > 40
    assert chained > 20


@pytest.mark.parametrize("width", [1, 3])
def test_halos_hold_preceding_tokens_of_the_same_document(width):
    num_received = 0
    for case, documents in CASES:
        halos = [local.halo(width) for local in make_local_sequences(case, documents)]
        by_rank = expected_sub_sequences(case, documents)
        flat = [
            [token for tokens in sub_sequences for token in tokens] for sub_sequences in by_rank
        ]
        for rank, sub_sequences in enumerate(by_rank):
            received = []
            for source, halo in enumerate(halos):
                start = sum(halo.send_counts[:rank])
                sent = halo.send_index.tolist()[start : start + halo.send_counts[rank]]
                received += [flat[source][token] for token in sent]
                assert halo.send_counts[rank] == halos[rank].receive_counts[source], case
            expected = []
            for tokens in sub_sequences:
                row, row_index = tokens[0]
                start_index = document_start(documents, row, row_index)
                if start_index == row_index:  # the sub-sequence begins its document
                    expected += [None] * width
                    continue
                preceding = range(row_index - width, row_index)
                expected += [
                    (row, column) if column >= start_index else None for column in preceding
                ]
            candidates = [*received, None]
            take, halo_rows = halos[rank].take.tolist(), halos[rank].halo_rows.tolist()
            if not sub_sequences:  # a rank without tokens takes one empty halo
                expected = [None] * width
            assert [candidates[i] for i in take] == expected, case
            assert [take[i] for i in halo_rows] == list(range(len(received))), case
            num_received += len(received)
    assert num_received > 100


def test_layout_builds_local_sequences_once():
    ids = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    layout = SequenceLayout.make(SequenceSharding.of(16, 2), 0, rows=2, document_ids=ids)
    local = layout.local_sequences(2)
    assert layout.local_sequences(2) is local
    assert layout.with_samples(None).local_sequences(2) is local
    assert local.sequences.lengths == (4, 4, 4, 4)
    assert (local.export_slots, local.chained) == (2, True)
    assert local.halo(3) is local.halo(3)


def test_unsharded_rows_are_whole_local_sequences():
    local = SequenceLayout.of_rows(6).local_sequences(2)
    assert local.sequences.lengths == (6, 6)
    assert not local.crossed


def test_documents_given_only_by_ids_are_refused():
    layout = SequenceLayout.of_rows(4, document_ids=torch.tensor([[0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        layout.local_sequences(1)

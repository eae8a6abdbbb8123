# SPDX-License-Identifier: Apache-2.0
"""Pieces of documents: what a rank packs, who continues whom, and which tokens are lent."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.layout import LocalSequences
from tests.unit_tests.core.context_parallel.random_cuts import CutCase, random_case

ROWS = 3


def drawn(seed: int) -> tuple[CutCase, list[tuple[int, ...]]]:
    """Return a cut and the documents of each row: what is cut apart, and often more borders."""
    rng = random.Random(seed)
    case = random_case(rng)
    bounds = set(case.cut().bounds)
    wanted = [rng.choice([0, 1, 4]) for _ in range(ROWS)]
    rows = [bounds | {rng.randrange(case.total + 1) for _ in range(count)} for count in wanted]
    return case, [tuple(sorted(row)) for row in rows]


CASES = [drawn(seed) for seed in range(120)]


def pieces_of(case: CutCase, documents: list[tuple[int, ...]]) -> list[LocalSequences]:
    """Return the pieces of each rank."""
    cut = case.cut()
    return [LocalSequences(cut, rank, documents=documents) for rank in range(case.size)]


def begin(documents: list[tuple[int, ...]], row: int, place: int) -> int:
    """Return where the document of a place begins."""
    return max(border for border in documents[row] if border <= place)


def expected(case: CutCase, documents: list[tuple[int, ...]]) -> list[list[list[tuple[int, int]]]]:
    """Return (row, place) of each token of each piece of each rank, put together token by token."""
    ranks = []
    for column in case.columns():
        pieces: list[list[tuple[int, int]]] = []
        for row in range(ROWS):
            before = None
            for place in column:
                goes_on = before is not None and place == before + 1
                if place >= 0 and not (goes_on and begin(documents, row, place) != place):
                    pieces.append([])
                if place >= 0:
                    pieces[-1].append((row, place))
                before = place if place >= 0 else None
        ranks.append(pieces)
    return ranks


def test_pieces_are_packed_row_after_row():
    padded = empty = inner = 0
    for case, documents in CASES:
        columns = case.columns()
        for pieces, column, wanted in zip(
            pieces_of(case, documents), columns, expected(case, documents), strict=True
        ):
            x = torch.tensor([[[row, place] for row in range(ROWS)] for place in column])
            packed = pieces.pack(x.reshape(len(column), ROWS, 2))  # [t, 2]
            assert packed.tolist() == [list(token) for piece in wanted for token in piece], case
            lengths = [len(piece) for piece in wanted]
            assert list(pieces.sequences.lengths) == (lengths or [0]), case
            back = pieces.unpack(packed)
            real = torch.tensor(column) >= 0
            assert torch.equal(back[real], x[real]), case
            assert not back[~real].any(), case
            padded, empty = padded + int((~real).sum()), empty + (not wanted)
            inner += sum(piece[0][1] in documents[piece[0][0]][1:-1] for piece in wanted)
    assert (padded > 100, empty > 2, inner > 100) == (True,) * 3


def test_state_transfers_lead_to_the_next_subsequence():
    crossing = chained = 0
    for case, documents in CASES:
        made, tokens = pieces_of(case, documents), expected(case, documents)
        wanted = set()
        for rank, pieces in enumerate(tokens):
            for number, piece in enumerate(pieces):
                row, place = piece[0]
                if begin(documents, row, place) < place:
                    before = (row, place - 1)
                    found = [
                        (source, other)
                        for source, others in enumerate(tokens)
                        for other, candidate in enumerate(others)
                        if candidate[-1] == before
                    ]
                    wanted.add((*found[0], rank, number))
        chains = {pieces.chains for pieces in made}
        assert len(chains) == 1, case  # all ranks say the same
        links = [
            (
                link.source,
                made[link.source].exports[link.export],
                link.target,
                made[link.target].entries[link.entry],
            )
            for chain in made[0].chains
            for link in chain
        ]
        assert len(links) == len(set(links)), case
        assert set(links) == wanted, case
        for chain in made[0].chains:
            ends = [(a.target, made[a.target].entries[a.entry]) for a in chain[:-1]]
            assert ends == [(b.source, made[b.source].exports[b.export]) for b in chain[1:]], case
        lasts = {(link[2], link[3]) for link in links}
        heads = [(a.source, made[a.source].exports[a.export]) for a, *_ in made[0].chains]
        assert not lasts & set(heads), case  # a chain begins where its document does
        assert made[0].crossed == bool(wanted), case
        assert made[0].export_slots == max(len(pieces.exports) for pieces in made), case
        assert made[0].entry_slots == max(len(pieces.entries) for pieces in made), case
        crossing += bool(wanted)
        chained += made[0].chained
    assert crossing > 40
    assert chained > 20


@pytest.mark.parametrize("width", [1, 3])
def test_halos_are_the_tokens_before_of_the_same_document(width):
    lent = 0
    for case, documents in CASES:
        made, tokens = pieces_of(case, documents), expected(case, documents)
        halos = [pieces.halo(width) for pieces in made]
        flat = [[token for piece in pieces for token in piece] for pieces in tokens]
        for rank, pieces in enumerate(tokens):
            received = []
            for source, halo in enumerate(halos):
                start = sum(halo.send_counts[:rank])
                sent = halo.send_index.tolist()[start : start + halo.send_counts[rank]]
                received += [flat[source][token] for token in sent]
                assert halo.send_counts[rank] == halos[rank].receive_counts[source], case
            wanted = []
            for piece in pieces:
                row, place = piece[0]
                first = begin(documents, row, place)
                if first == place:  # it begins its document
                    wanted += [None] * width
                    continue
                before = range(place - width, place)
                wanted += [(row, other) if other >= first else None for other in before]
            known = [*received, None]
            take, place = halos[rank].take.tolist(), halos[rank].halo_rows.tolist()
            assert [known[i] for i in take] == wanted + [None] * (width if not pieces else 0), case
            assert [take[i] for i in place] == list(range(len(received))), case
            lent += len(received)
    assert lent > 100


def test_the_layout_makes_them_once():
    ids = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    layout = SequenceLayout.make(SequenceSharding.of(16, 2), 0, rows=2, document_ids=ids)
    pieces = layout.local_sequences(2)
    assert layout.local_sequences(2) is pieces
    assert layout.with_samples(None).local_sequences(2) is pieces
    assert pieces.sequences.lengths == (4, 4, 4, 4)
    assert (pieces.export_slots, pieces.chained) == (2, True)
    assert pieces.halo(3) is pieces.halo(3)


def test_without_a_cut_rows_are_pieces():
    pieces = SequenceLayout.of_rows(6).local_sequences(2)
    assert pieces.sequences.lengths == (6, 6)
    assert not pieces.crossed


def test_documents_given_only_by_ids_are_refused():
    layout = SequenceLayout.of_rows(4, document_ids=torch.tensor([[0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        layout.local_sequences(1)

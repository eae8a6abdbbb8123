# SPDX-License-Identifier: Apache-2.0
"""Muon's plan on simulated ranks: pieces cut anywhere come to their owners and go back."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from megatron.core.boxes import Box
from megatron.core.optimizer.muon import (
    Matrix,
    MatrixShard,
    assign_owners,
    matrices_of,
    plan_rounds,
)

UNLIMITED = 10**9


def drawn_pieces(source: random.Random, world: int, count: int) -> list[MatrixShard]:
    """Return matrices cut into boxes at random, each box on one or several ranks."""
    pieces, held = [], [0] * world

    def hold(matrix: Matrix, offsets: tuple[int, int], sizes: tuple[int, int]) -> None:
        for rank in source.sample(range(world), source.choice([1, 1, min(2, world), world])):
            pieces.append(MatrixShard(matrix, Box(offsets, sizes), rank, held[rank]))
            held[rank] += 1

    for key in range(count):
        matrix = Matrix(1000 - 7 * key, source.randint(1, 9), source.randint(1, 9))
        rows = sorted({0, matrix.rows, *(source.randint(0, matrix.rows) for _ in range(2))})
        for first, last in itertools.pairwise(rows):
            cols = sorted({0, matrix.cols, source.randint(0, matrix.cols)})
            for left, right in itertools.pairwise(cols):
                hold(matrix, (first, left), (last - first, right - left))
    return pieces


def exchanged(parts: dict[tuple[int, int], list[torch.Tensor]], rank: int, world: int):
    """Return what an all-to-all gives a rank, from what (source, destination) sent."""
    flat = [p.flatten() for source in range(world) for p in parts.get((source, rank), [])]
    return torch.cat(flat) if flat else torch.zeros(0)


def carried_out(pieces: list[MatrixShard], world: int, limit: int) -> dict[int, list[list[Matrix]]]:
    """Run every rank's rounds on numbered elements, checking that all comes to where it belongs."""
    owners = assign_owners(pieces, [0] * world)
    matrices = matrices_of(pieces)
    whole = {m: torch.arange(m.numel).view(m.rows, m.cols) + 1000 * m.key for m in matrices}

    def content(piece: MatrixShard) -> torch.Tensor:
        (row, col), (rows, cols) = piece.box
        return whole[piece.matrix][row : row + rows, col : col + cols]

    plans = [plan_rounds(pieces, owners, rank=r, world=world, limit=limit) for r in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    updated = []
    for rounds in zip(*plans, strict=True):
        for way in ("gather", "give_back"):
            sides = [getattr(one, way) for one in rounds]
            assert len({side.local for side in sides}) == 1
            sent: dict[tuple[int, int], list[torch.Tensor]] = {}
            for rank, side in enumerate(sides):
                at = iter(side.sends)
                for other, number in enumerate(side.send_counts):
                    assert not side.local or other == rank or number == 0
                    while number > 0:
                        piece = next(at).piece
                        sent.setdefault((rank, other), []).append(content(piece))
                        number -= piece.box.numel
                    assert number == 0
                assert next(at, None) is None
            for rank, (one, side) in enumerate(zip(rounds, sides, strict=True)):
                got = exchanged(sent, rank, world).split([t.piece.box.numel for t in side.receives])
                for transfer, part in zip(side.receives, got, strict=True):
                    piece = transfer.piece
                    assert torch.equal(part.view(piece.box.sizes), content(piece))
                    if way == "give_back":
                        assert piece.rank == rank
                        updated.append((rank, piece.index))
                if way == "gather":
                    for matrix in one.local_matrices:
                        assert owners[matrix] == rank
                        mine = [t.piece for t in side.receives if t.piece.matrix == matrix]
                        boxes = {p.box for p in mine}
                        assert len(boxes) == len(mine), "a piece came twice"
                        assert sum(p.box.numel for p in mine) == matrix.numel
    assert sorted(updated) == sorted((p.rank, p.index) for p in pieces)
    return {rank: [list(one.local_matrices) for one in plan] for rank, plan in enumerate(plans)}


@pytest.mark.parametrize("limit", [1, 60, UNLIMITED])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_piece_goes_to_its_owner_and_back_to_all_holders(world: int, limit: int):
    for seed in range(8):
        pieces = drawn_pieces(random.Random(100 * world + seed), world, count=9)
        own = carried_out(pieces, world, limit)
        assert sorted(m for rounds in own.values() for r in rounds for m in r) == matrices_of(
            pieces
        )
        number = len(own[0])
        assert number == (9 if limit == 1 else 1) or limit == 60
        if limit == 60:
            assert 1 < number <= 9


def test_a_round_keeps_within_the_limit_on_every_rank():
    pieces = drawn_pieces(random.Random(3), 4, count=40)
    owners, limit = assign_owners(pieces, [0] * 4), 300
    plans = [plan_rounds(pieces, owners, rank=r, world=4, limit=limit) for r in range(4)]
    assert len(plans[0]) < 40, "no round has several matrices"
    together = 0
    for rounds in zip(*plans, strict=True):
        if sum(len(one.local_matrices) for one in rounds) == 1:
            continue  # a matrix alone may need more
        for one in rounds:
            both = one.gather, one.give_back
            buffers = sum(sum(e.send_counts) + sum(e.receive_counts) for e in both)
            assert buffers + sum(m.numel for m in one.local_matrices) <= limit
            together += len(one.local_matrices)
    assert together > 20


def test_the_plan_does_not_depend_on_the_order_of_pieces():
    pieces = drawn_pieces(random.Random(9), 3, count=12)
    mixed = random.Random(1).sample(pieces, len(pieces))
    owners = assign_owners(pieces, [0] * 3)
    assert assign_owners(mixed, [0] * 3) == owners
    for rank in range(3):
        given = {"rank": rank, "world": 3, "limit": 200}
        assert plan_rounds(mixed, owners, **given) == plan_rounds(pieces, owners, **given)


def test_work_is_shared_out_evenly_and_holders_are_preferred():
    source = random.Random(4)
    for world in (2, 3, 8):
        pieces = drawn_pieces(source, world, count=60)
        work = [0] * world
        for matrix, owner in assign_owners(pieces, [0] * world).items():
            work[owner] += matrix.cost
        costliest = max(m.cost for m in matrices_of(pieces))
        assert max(work) - min(work) <= costliest
    equal = [Matrix(key, 4, 6) for key in range(4)]
    pieces = [
        MatrixShard(matrix, Box((0, 0), (4, 6)), rank, 0)
        for matrix, rank in zip(equal, (3, 1, 2, 0), strict=True)
    ]
    assert [assign_owners(pieces, [0] * 4)[m] for m in equal] == [3, 1, 2, 0]
    plan = plan_rounds(pieces, assign_owners(pieces, [0] * 4), rank=0, world=4, limit=UNLIMITED)
    assert plan[0].gather.local
    assert plan[0].give_back.local


def test_a_matrix_stays_on_the_stages_that_hold_it():
    stages = [0, 0, 1, 1, 2, 2]
    matrices = [Matrix(key, 4 + key % 3, 6) for key in range(24)]
    pieces = [
        MatrixShard(m, Box((0, 0), (m.rows, m.cols)), (0, 1, 2, 3)[m.key % 4], m.key // 4)
        for m in matrices
    ]
    owners = assign_owners(pieces, stages)
    assert all(stages[owners[p.matrix]] == stages[p.rank] for p in pieces)
    assert set(owners.values()) == {0, 1, 2, 3}
    both = Matrix(99, 30, 30)
    shared = [MatrixShard(both, Box((0, 0), (30, 30)), rank, 9) for rank in (0, 3)]
    assert assign_owners(shared, stages)[both] == 0
    alone = MatrixShard(Matrix(7, 9, 9), Box((0, 0), (9, 9)), 4, 0)
    assert assign_owners([*pieces, alone], stages)[alone.matrix] == 4


def test_a_matrix_that_is_not_whole_is_refused():
    matrix = Matrix(1, 4, 6)
    half = MatrixShard(matrix, Box((0, 0), (2, 6)), 0, 0)
    with pytest.raises(ValueError, match="ranks hold 12 elements of a matrix of 4 x 6"):
        matrices_of([half])
    with pytest.raises(ValueError, match="ranks hold 30 elements"):
        matrices_of([half, MatrixShard(matrix, Box((1, 0), (3, 6)), 1, 0)])

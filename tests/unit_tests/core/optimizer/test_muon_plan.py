# SPDX-License-Identifier: Apache-2.0
"""Muon's plan on simulated ranks: arbitrary shards reach their owners and updates return."""

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


def random_shards(rng: random.Random, world: int, count: int) -> list[MatrixShard]:
    """Return the shards of matrices split at random, each box on one or several ranks."""
    shards, num_shards = [], [0] * world

    def hold(matrix: Matrix, offsets: tuple[int, int], sizes: tuple[int, int]) -> None:
        for rank in rng.sample(range(world), rng.choice([1, 1, min(2, world), world])):
            shards.append(MatrixShard(matrix, Box(offsets, sizes), rank, num_shards[rank]))
            num_shards[rank] += 1

    for key in range(count):
        matrix = Matrix(1000 - 7 * key, rng.randint(1, 9), rng.randint(1, 9))
        rows = sorted({0, matrix.rows, *(rng.randint(0, matrix.rows) for _ in range(2))})
        for top, bottom in itertools.pairwise(rows):
            cols = sorted({0, matrix.cols, rng.randint(0, matrix.cols)})
            for left, right in itertools.pairwise(cols):
                hold(matrix, (top, left), (bottom - top, right - left))
    return shards


def all_to_all_output(sent: dict[tuple[int, int], list[torch.Tensor]], rank: int, world: int):
    """Return a rank's all-to-all output from the tensors sent by (source, destination)."""
    flat = [p.flatten() for source in range(world) for p in sent.get((source, rank), [])]
    return torch.cat(flat) if flat else torch.zeros(0)


def run_rounds(shards: list[MatrixShard], world: int, limit: int) -> dict[int, list[list[Matrix]]]:
    """Run every rank's rounds on numbered elements and check every transfer; return each rank's
    matrices by round."""
    owners = assign_owners(shards, [0] * world)
    matrices = matrices_of(shards)
    values = {m: torch.arange(m.numel).view(m.rows, m.cols) + 1000 * m.key for m in matrices}

    def content(shard: MatrixShard) -> torch.Tensor:
        (row, col), (rows, cols) = shard.box
        return values[shard.matrix][row : row + rows, col : col + cols]

    plans = [plan_rounds(shards, owners, rank=r, world=world, limit=limit) for r in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    updated = []
    for rounds in zip(*plans, strict=True):
        for direction in ("gather", "give_back"):
            exchanges = [getattr(muon_round, direction) for muon_round in rounds]
            assert len({exchange.local for exchange in exchanges}) == 1
            sent: dict[tuple[int, int], list[torch.Tensor]] = {}
            for rank, exchange in enumerate(exchanges):
                sends = iter(exchange.sends)
                for destination, remaining in enumerate(exchange.send_counts):
                    assert not exchange.local or destination == rank or remaining == 0
                    while remaining > 0:
                        shard = next(sends).piece
                        sent.setdefault((rank, destination), []).append(content(shard))
                        remaining -= shard.box.numel
                    assert remaining == 0
                assert next(sends, None) is None
            for rank, (muon_round, exchange) in enumerate(zip(rounds, exchanges, strict=True)):
                received = all_to_all_output(sent, rank, world).split(
                    [t.piece.box.numel for t in exchange.receives]
                )
                for transfer, received_shard in zip(exchange.receives, received, strict=True):
                    shard = transfer.piece
                    assert torch.equal(received_shard.view(shard.box.sizes), content(shard))
                    if direction == "give_back":
                        assert shard.rank == rank
                        updated.append((rank, shard.index))
                if direction == "gather":
                    for matrix in muon_round.local_matrices:
                        assert owners[matrix] == rank
                        matrix_shards = [
                            t.piece for t in exchange.receives if t.piece.matrix == matrix
                        ]
                        boxes = {p.box for p in matrix_shards}
                        assert len(boxes) == len(matrix_shards), "each shard arrives once"
                        assert sum(p.box.numel for p in matrix_shards) == matrix.numel
    assert sorted(updated) == sorted((p.rank, p.index) for p in shards)
    return {
        rank: [list(muon_round.local_matrices) for muon_round in plan]
        for rank, plan in enumerate(plans)
    }


@pytest.mark.parametrize("limit", [1, 60, UNLIMITED])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_shard_reaches_its_owner_and_all_holders(world: int, limit: int):
    for seed in range(8):
        shards = random_shards(random.Random(100 * world + seed), world, count=9)
        matrices_by_rank = run_rounds(shards, world, limit)
        assert sorted(
            m for rounds in matrices_by_rank.values() for r in rounds for m in r
        ) == matrices_of(shards)
        num_rounds = len(matrices_by_rank[0])
        assert num_rounds == (9 if limit == 1 else 1) or limit == 60
        if limit == 60:
            assert 1 < num_rounds <= 9


def test_rounds_stay_within_the_limit_on_every_rank():
    shards = random_shards(random.Random(3), 4, count=40)
    owners, limit = assign_owners(shards, [0] * 4), 300
    plans = [plan_rounds(shards, owners, rank=r, world=4, limit=limit) for r in range(4)]
    assert len(plans[0]) < 40, "some rounds have several matrices"
    num_shared = 0
    for rounds in zip(*plans, strict=True):
        if sum(len(muon_round.local_matrices) for muon_round in rounds) == 1:
            continue  # a single matrix may exceed the limit
        for muon_round in rounds:
            exchanges = muon_round.gather, muon_round.give_back
            buffers = sum(sum(e.send_counts) + sum(e.receive_counts) for e in exchanges)
            assert buffers + sum(m.numel for m in muon_round.local_matrices) <= limit
            num_shared += len(muon_round.local_matrices)
    assert num_shared > 20


def test_plan_does_not_depend_on_the_order_of_shards():
    shards = random_shards(random.Random(9), 3, count=12)
    shuffled = random.Random(1).sample(shards, len(shards))
    owners = assign_owners(shards, [0] * 3)
    assert assign_owners(shuffled, [0] * 3) == owners
    for rank in range(3):
        options = {"rank": rank, "world": 3, "limit": 200}
        assert plan_rounds(shuffled, owners, **options) == plan_rounds(shards, owners, **options)


def test_work_is_balanced_and_holders_are_preferred():
    rng = random.Random(4)
    for world in (2, 3, 8):
        shards = random_shards(rng, world, count=60)
        work = [0] * world
        for matrix, owner in assign_owners(shards, [0] * world).items():
            work[owner] += matrix.cost
        costliest = max(m.cost for m in matrices_of(shards))
        assert max(work) - min(work) <= costliest
    matrices = [Matrix(key, 4, 6) for key in range(4)]
    shards = [
        MatrixShard(matrix, Box((0, 0), (4, 6)), rank, 0)
        for matrix, rank in zip(matrices, (3, 1, 2, 0), strict=True)
    ]
    assert [assign_owners(shards, [0] * 4)[m] for m in matrices] == [3, 1, 2, 0]
    plan = plan_rounds(shards, assign_owners(shards, [0] * 4), rank=0, world=4, limit=UNLIMITED)
    assert plan[0].gather.local
    assert plan[0].give_back.local


def test_a_matrix_stays_on_the_stages_that_hold_it():
    stages = [0, 0, 1, 1, 2, 2]
    matrices = [Matrix(key, 4 + key % 3, 6) for key in range(24)]
    shards = [
        MatrixShard(m, Box((0, 0), (m.rows, m.cols)), (0, 1, 2, 3)[m.key % 4], m.key // 4)
        for m in matrices
    ]
    owners = assign_owners(shards, stages)
    assert all(stages[owners[p.matrix]] == stages[p.rank] for p in shards)
    assert set(owners.values()) == {0, 1, 2, 3}
    shared_matrix = Matrix(99, 30, 30)
    shared_shards = [MatrixShard(shared_matrix, Box((0, 0), (30, 30)), rank, 9) for rank in (0, 3)]
    assert assign_owners(shared_shards, stages)[shared_matrix] == 0
    lone_shard = MatrixShard(Matrix(7, 9, 9), Box((0, 0), (9, 9)), 4, 0)
    assert assign_owners([*shards, lone_shard], stages)[lone_shard.matrix] == 4


def test_incomplete_matrix_is_refused():
    matrix = Matrix(1, 4, 6)
    half = MatrixShard(matrix, Box((0, 0), (2, 6)), 0, 0)
    with pytest.raises(ValueError, match="ranks hold 12 elements of a matrix of 4 x 6"):
        matrices_of([half])
    with pytest.raises(ValueError, match="ranks hold 30 elements"):
        matrices_of([half, MatrixShard(matrix, Box((1, 0), (3, 6)), 1, 0)])

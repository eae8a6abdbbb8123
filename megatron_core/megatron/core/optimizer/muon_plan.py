# SPDX-License-Identifier: Apache-2.0
"""Which rank orthogonalises which matrix, and what travels for it: arithmetic on boxes.

Ranks hold pieces of matrices, cut anywhere, some of them the same ones. From the pieces of all
ranks, and nothing else, every rank computes the same plan:

    owner      the rank that orthogonalises a matrix; the work is shared out evenly
    rounds     matrices whose pieces travel together, so that buffers stay small
    transfers  piece by piece: from one of its holders to the owner, and back to all holders
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Matrix:
    """A matrix that is updated as a whole.

    Args:
        key: the same number on every rank, another one for every matrix.
        rows, cols: its shape.
    """

    key: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def cost(self) -> int:
        """What its orthogonalisation takes, in multiplications up to a factor."""
        return self.numel * min(self.rows, self.cols)


@dataclass(frozen=True, order=True)
class Piece:
    """A box of a matrix in the memory of one rank.

    Args:
        matrix: whose box it is.
        offsets, sizes: the box, (row, col).
        rank: who holds it.
        index: its number among that rank's pieces.
    """

    matrix: Matrix
    offsets: tuple[int, int]
    sizes: tuple[int, int]
    rank: int
    index: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Transfer:
    """A piece on its way between its holder (`piece.rank`) and the owner of its matrix."""

    piece: Piece
    owner: int


@dataclass(frozen=True)
class Exchange:
    """One all-to-all as one rank sees it.

    Args:
        sends, receives: what leaves and what arrives, in the order of the buffers.
        send_counts, receive_counts: elements to and from each rank.
        local: nothing leaves any rank: no collective is needed.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    local: bool


@dataclass(frozen=True)
class Round:
    """Matrices whose pieces travel together.

    Args:
        own: those that this rank orthogonalises.
        gather: pieces to their owners.
        give_back: updates to all holders.
    """

    own: tuple[Matrix, ...]
    gather: Exchange
    give_back: Exchange


def matrices_of(pieces: Sequence[Piece]) -> list[Matrix]:
    """List the matrices of all ranks' pieces, ascending.

    Raises:
        ValueError: the different pieces of a matrix do not add up to it.
    """
    found: dict[Matrix, int] = {}
    for (matrix, _, _), same in _boxes(pieces):
        found[matrix] = found.get(matrix, 0) + same[0].numel
    for matrix, held in found.items():
        if held != matrix.numel:
            raise ValueError(
                f"ranks hold {held} elements of a matrix of {matrix.rows} x {matrix.cols}: muon "
                "needs each element of a trained matrix on some rank, and replicas cut alike"
            )
    return sorted(found)


def assign_owners(pieces: Sequence[Piece], stages: Sequence[int]) -> dict[Matrix, int]:
    """Give every matrix to a rank, so that all of a pipeline stage have about the same work.

    The costliest first, each to the rank with the least work so far of the stages that hold it, so
    that nothing travels between stages; of several, to the one that holds most of it, then to the
    first.

    Args:
        pieces: of all ranks.
        stages: the stage of every rank.
    """
    held: dict[Matrix, dict[int, int]] = {}
    for piece in pieces:
        ranks = held.setdefault(piece.matrix, {})
        ranks[piece.rank] = ranks.get(piece.rank, 0) + piece.numel
    work, owners = [0] * len(stages), {}
    for matrix in sorted(held, key=lambda m: (-m.cost, m)):
        near = {stages[rank] for rank in held[matrix]}
        able = [rank for rank, stage in enumerate(stages) if stage in near]
        least = min(work[rank] for rank in able)
        idle = [rank for rank in able if work[rank] == least]
        owner = max(idle, key=lambda rank: (held[matrix].get(rank, 0), -rank))
        owners[matrix] = owner
        work[owner] += matrix.cost
    return owners


def plan_rounds(
    pieces: Sequence[Piece],
    owners: Mapping[Matrix, int],
    *,
    rank: int,
    world: int,
    limit: int,
) -> list[Round]:
    """Plan the rounds as `rank` sees them.

    Args:
        pieces: of all ranks.
        limit: elements that the buffers of a round may have on any rank, with its own matrices;
            a matrix that alone needs more makes a round of its own.
    """
    gathers: dict[Matrix, list[Transfer]] = {matrix: [] for matrix in owners}
    returns: dict[Matrix, list[Transfer]] = {matrix: [] for matrix in owners}
    for number, ((matrix, _, _), same) in enumerate(_boxes(pieces)):
        owner = owners[matrix]
        own = [piece for piece in same if piece.rank == owner]
        # holders of the same piece take turns
        source = own[0] if own else same[number % len(same)]
        gathers[matrix].append(Transfer(source, owner))
        returns[matrix] += [Transfer(piece, owner) for piece in same]
    rounds = []
    for group in _batches(owners, gathers, returns, world=world, limit=limit):
        there = [transfer for matrix in group for transfer in gathers[matrix]]
        back = [transfer for matrix in group for transfer in returns[matrix]]
        rounds.append(
            Round(
                own=tuple(matrix for matrix in group if owners[matrix] == rank),
                gather=_exchange(there, rank=rank, world=world, to_owner=True),
                give_back=_exchange(back, rank=rank, world=world, to_owner=False),
            )
        )
    return rounds


def _boxes(pieces: Sequence[Piece]):
    """Return ((matrix, offsets, sizes), the pieces that are this box) in ascending order."""
    return [
        (key, list(same))
        for key, same in itertools.groupby(
            sorted(pieces), key=lambda piece: (piece.matrix, piece.offsets, piece.sizes)
        )
    ]


def _batches(
    owners: Mapping[Matrix, int],
    gathers: Mapping[Matrix, Sequence[Transfer]],
    returns: Mapping[Matrix, Sequence[Transfer]],
    *,
    world: int,
    limit: int,
) -> list[list[Matrix]]:
    """Split matrices into rounds within the limit, each with work for all ranks."""
    queues: list[list[Matrix]] = [[] for _ in range(world)]
    for matrix in sorted(owners, key=lambda m: (-m.cost, m)):
        queues[owners[matrix]].append(matrix)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    batches: list[list[Matrix]] = []
    filled = [0] * world
    for matrix in turns:
        if matrix is None:
            continue
        needs = _needs(matrix, owners[matrix], gathers[matrix], returns[matrix])
        full = any(filled[rank] + size > limit for rank, size in needs.items())
        if not batches or full:
            batches.append([])
            filled = [0] * world
        batches[-1].append(matrix)
        for rank, size in needs.items():
            filled[rank] += size
    return batches


def _needs(
    matrix: Matrix, owner: int, there: Sequence[Transfer], back: Sequence[Transfer]
) -> dict[int, int]:
    """Return the elements of the buffers that a matrix needs, by rank."""
    needs = {owner: matrix.numel}
    for transfer in (*there, *back):
        for rank in (transfer.piece.rank, transfer.owner):
            needs[rank] = needs.get(rank, 0) + transfer.piece.numel
    return needs


def _exchange(transfers: Sequence[Transfer], *, rank: int, world: int, to_owner: bool) -> Exchange:
    """Return what one rank sends and receives, each sorted by the other rank, and for one other
    rank in the order of `transfers` on both sides."""

    def ends(transfer: Transfer) -> tuple[int, int]:
        both = transfer.piece.rank, transfer.owner
        return both if to_owner else (both[1], both[0])

    sends = sorted((t for t in transfers if ends(t)[0] == rank), key=lambda t: ends(t)[1])
    receives = sorted((t for t in transfers if ends(t)[1] == rank), key=lambda t: ends(t)[0])
    send_counts, receive_counts = [0] * world, [0] * world
    for transfer in sends:
        send_counts[ends(transfer)[1]] += transfer.piece.numel
    for transfer in receives:
        receive_counts[ends(transfer)[0]] += transfer.piece.numel
    return Exchange(
        tuple(sends),
        tuple(receives),
        tuple(send_counts),
        tuple(receive_counts),
        local=all(t.piece.rank == t.owner for t in transfers),
    )

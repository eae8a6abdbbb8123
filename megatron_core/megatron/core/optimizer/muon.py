# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum, orthogonalised matrix by matrix (Jordan et al. 2024).

    M <- mu M + G,   U = G + mu M (Nesterov),   W <- (1 - lr decay) W - lr scale NS(U)

Momentum lies like the gradients, in flat shards cut anywhere. Every matrix has an owner among the
ranks; pieces of U travel to it by one all-to-all a round, it orthogonalises the whole, and pieces
of the update travel back to all who hold them. What has several holders gets its update from one
rank, so replicas stay equal in every bit. A weight of experts [e, rows, cols] is e matrices.

Memory beside momentum: the buffers of two rounds (one under way while the other is computed), each
within `round_bytes` or those of one matrix, and for the largest matrix [m, n], m <= n, about
2 m^2 + 2 m n elements of products.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import torch

from megatron.core.comm.collectives import Pending, all_gather, all_reduce, all_to_all_async
from megatron.core.optimizer.config import MuonConfig
from megatron.core.optimizer.elementwise import StepNumbers
from megatron.core.optimizer.muon_plan import (
    Exchange,
    Matrix,
    Piece,
    Round,
    Transfer,
    assign_owners,
    matrices_of,
    plan_rounds,
)
from megatron.core.optimizer.newton_schulz import orthogonalize, update_scale
from megatron.core.optimizer.range_state import RangeState, matrix_boxes
from megatron.core.process_groups import Group
from megatron.core.weight_sharding import Box, WeightSharding

#: Columns of a piece's description: key, matrix rows and cols, row, col, rows, cols.
_COLUMNS = 7


class Muon:
    """Update the matrices of some states. Building one is collective over the group.

    Args:
        states: this rank's, all of kind "muon"; there may be none.
        group: the ranks that hold pieces of the same matrices.
        device: of weights and gradients.
        weights: descriptions of this rank's weights, needed to join what is fused.
        stages: the pipeline stage of every rank of the group: a matrix stays on those that hold it.
            None is one stage.

    Raises:
        ValueError: `split_fused` is off without descriptions, or no rank has a matrix for it.

    Attributes:
        rounds: the plan.
        owned_matrices: how many of the matrices this rank orthogonalises.
    """

    def __init__(
        self,
        states: Sequence[RangeState],
        group: Group,
        *,
        config: MuonConfig,
        device: torch.device,
        weights: Collection[WeightSharding] | None = None,
        stages: Sequence[int] | None = None,
    ) -> None:
        if not config.split_fused and weights is None:
            raise ValueError("muon joins fused weights only if it is given their descriptions")
        self.states, self.group, self.config = tuple(states), group, config
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        joined = {} if config.split_fused else _joined(weights or ())
        self._held = [
            (state, matrix)
            for state in states
            for placed in state.owned.boxes
            for matrix in matrix_boxes(placed)
        ]
        self._factors = [_factors(state, placed.box) for state, placed in self._held]
        pieces = self._all_pieces([_described(placed.box, joined) for _, placed in self._held])
        if not matrices_of(pieces):
            raise ValueError("optimizer muon has no matrix to update: use adam")
        owners = assign_owners(pieces, stages or [0] * group.size)
        self.rounds = plan_rounds(
            pieces, owners, rank=group.rank, world=group.size, limit=config.round_bytes // 4
        )
        self.owned_matrices = sum(len(one.own) for one in self.rounds)

    def update(self, numbers: StepNumbers) -> None:
        """Update momentum and masters in place. Collective, unless no matrix is cut."""
        for state in self.states:
            for alike in state.updates:
                for start, stop in alike.ranges:
                    momentum = state.moments["momentum"][start:stop]
                    gradients = state.owned.gradients[start:stop]
                    momentum.mul_(self.config.momentum).add_(gradients, alpha=1 / numbers.divisor)
        following = self._gather(self.rounds[0], numbers) if self.rounds else None
        for i, one in enumerate(self.rounds):
            assert following is not None
            arrived = following.wait()
            if i + 1 < len(self.rounds):
                following = self._gather(self.rounds[i + 1], numbers)
            updates = {
                matrix: self._orthogonal(matrix, whole)
                for matrix, whole in self._assembled(one, arrived).items()
            }
            self._apply(one.give_back, self._give_back(one, updates).wait(), numbers)

    def _gather(self, one: Round, numbers: StepNumbers) -> Pending:
        """Start to send the pieces of U to the owners of their matrices."""
        sent = self._buffer(one.gather.send_counts)
        for transfer, part in _parts(one.gather.sends, sent):
            state, placed = self._held[transfer.piece.index]
            momentum, gradients = placed.of(state.moments["momentum"]), state.owned.gradients
            if self.config.nesterov:
                torch.mul(momentum, self.config.momentum, out=part)
                part.add_(placed.of(gradients), alpha=1 / numbers.divisor)
            else:
                part.copy_(momentum)
        return self._exchanged(one.gather, sent)

    def _assembled(self, one: Round, arrived: torch.Tensor) -> dict[Matrix, torch.Tensor]:
        """Return this rank's matrices [rows, cols] of a round."""
        found = {m: arrived.new_empty(m.rows, m.cols) for m in one.own}
        for transfer, part in _parts(one.gather.receives, arrived):
            _box_of(found[transfer.piece.matrix], transfer.piece).copy_(part)
        return found

    def _orthogonal(self, matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
        """Return the scaled update of a matrix, fp32 [rows, cols]."""
        update = orthogonalize(whole, steps=self.config.num_ns_steps, dtype=self.dtype)
        scale = update_scale(self.config.scale_mode, matrix.rows, matrix.cols)
        return update.float().mul_(scale * self.config.extra_scale_factor)

    def _give_back(self, one: Round, updates: dict[Matrix, torch.Tensor]) -> Pending:
        """Start to send the pieces of the updates to all who hold them."""
        sent = self._buffer(one.give_back.send_counts)
        for transfer, part in _parts(one.give_back.sends, sent):
            part.copy_(_box_of(updates[transfer.piece.matrix], transfer.piece))
        return self._exchanged(one.give_back, sent)

    def _apply(self, exchange: Exchange, arrived: torch.Tensor, numbers: StepNumbers) -> None:
        """Decay this rank's pieces and move them by their updates."""
        for transfer, part in _parts(exchange.receives, arrived):
            state, placed = self._held[transfer.piece.index]
            lr_factor, decay_factor = self._factors[transfer.piece.index]
            lr = numbers.lr * lr_factor
            master = placed.of(state.master)
            master.mul_(1.0 - lr * numbers.weight_decay * decay_factor).add_(part, alpha=-lr)

    def _buffer(self, counts: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(counts), dtype=torch.float32, device=self.device)

    def _exchanged(self, exchange: Exchange, sent: torch.Tensor) -> Pending:
        if exchange.local:
            return Pending(sent)
        return all_to_all_async(
            sent,
            self.group,
            send_counts=exchange.send_counts,
            receive_counts=exchange.receive_counts,
        )

    def _all_pieces(self, own: Sequence[tuple[int, ...]]) -> list[Piece]:
        """Return the pieces of all ranks, the same list on each."""
        if self.group.size == 1:
            return [_piece(row, 0, index) for index, row in enumerate(own)]
        count = torch.tensor([len(own)], device=self.device)
        most = int(all_reduce(count, self.group, op="max"))
        table = torch.full((1, most, _COLUMNS), -1, dtype=torch.int64, device=self.device)
        if own:
            table[0, : len(own)] = torch.tensor(own, device=self.device)
        return [
            _piece(row, rank, index)
            for rank, rows in enumerate(all_gather(table, self.group).tolist())
            for index, row in enumerate(rows)
            if row[1] >= 0
        ]


def _parts(transfers: Sequence[Transfer], flat: torch.Tensor):
    """Return every transfer with its part of a buffer, a view [rows, cols]."""
    pieces = flat.split([t.piece.numel for t in transfers]) if transfers else ()
    return [(t, part.view(t.piece.sizes)) for t, part in zip(transfers, pieces, strict=True)]


def _box_of(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    (row, col), (rows, cols) = piece.offsets, piece.sizes
    return whole[row : row + rows, col : col + cols]


def _joined(weights: Collection[WeightSharding]) -> dict[str, tuple[str, int, int]]:
    """Return, per logical tensor of a weight of several, the weight's name, the rows before the
    tensor and the rows in all; of experts, expert by expert."""
    found = {}
    for sharding in weights:
        shapes = [segment.shape for segment in sharding.segments]
        row = 0
        total = sum(shape[-2] for shape in shapes if len(shape) > 1)
        for segment, shape in zip(sharding.segments, shapes, strict=True):
            if len(shape) == 2:
                found[segment.name] = (sharding.name, row, total)
            elif len(shape) == 3:
                for e in range(shape[0]):
                    found[f"{segment.name}[{e}]"] = (f"{sharding.name}[{e}]", row, total)
            row += shape[-2] if len(shape) > 1 else 0
    return found


def _described(box: Box, joined: dict[str, tuple[str, int, int]]) -> tuple[int, ...]:
    """Return a box as the numbers that ranks tell each other."""
    name, before, rows = joined.get(box.name, (box.name, 0, box.shape[0]))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big", signed=True)
    return (key, rows, box.shape[1], before + box.offsets[0], box.offsets[1], *box.sizes)


def _piece(row: Sequence[int], rank: int, index: int) -> Piece:
    key, rows, cols, *box = row
    return Piece(Matrix(key, rows, cols), (box[0], box[1]), (box[2], box[3]), rank, index)


def _factors(state: RangeState, box: Box) -> tuple[float, float]:
    """Return the factors of the learning rate and of the decay of a box."""
    for alike in state.updates:
        if any(start <= box.start < stop for start, stop in alike.ranges):
            return alike.lr_factor, alike.decay_factor
    raise AssertionError(f"{box.name} is in no range that is updated")

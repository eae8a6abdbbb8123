# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum, orthogonalised matrix by matrix (Jordan et al. 2024).

    M <- mu M + G,   U = G + mu M (Nesterov),   W <- (1 - lr decay) W - lr scale NS(U)

NS orthogonalises a matrix by Newton-Schulz iterations. With U = G / |G|_F (G transposed if it has
more rows than columns), each step is

    A = U U^T,    U <- a U + (b A + c A^2) U,    (a, b, c) = (3.4445, -4.7750, 2.0315)

a quintic that maps every singular value s in (0, 1] to a s + b s^3 + c s^5, and so, after five
steps, to about 1 (0.68 to 1.21 for s above 0.002): the result has G's singular vectors, with all
singular values near 1. Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural
networks".

Momentum is sharded like the gradients, in flat shards with arbitrary boundaries; several ranks may
hold the same shard. Each matrix has an owner, which orthogonalises it as a whole. Every rank
computes the same plan from the shards of all ranks:

    owner      the rank that orthogonalises a matrix; the work is divided evenly
    rounds     groups of matrices whose shards are exchanged together, to limit buffer sizes
    transfers  per shard: U from one of its holders to the owner, and the update back to all
               holders; one all-to-all in each direction and round

All holders of a shard receive its update from one rank, so replicas stay bit-equal. An expert
weight [e, rows, cols] is e matrices.

Memory in addition to momentum: the buffers of two rounds (one in flight while the other is
computed), each limited by `round_bytes` or by the size of a single matrix, and about 2 m^2 + 2 m n
elements for the products of the largest matrix [m, n], m <= n.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from megatron.core.boxes import Box
from megatron.core.comm.collectives import Pending, all_gather, all_reduce, all_to_all_async
from megatron.core.optimizer.optimizer_config import MuonConfig, StepNumbers, UpdateRanges
from megatron.core.optimizer.range_state import RangeState, is_matrix, matrix_boxes
from megatron.core.process_groups import Group
from megatron.core.weight_sharding import LocalBox, SubWeight, WeightSharding


@dataclass(frozen=True, order=True)
class Matrix:
    """A matrix that is updated as a whole.

    Args:
        key: unique number of the matrix, equal on every rank.
        rows, cols: shape of the matrix.
    """

    key: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def cost(self) -> int:
        """Relative cost of the orthogonalisation, in multiplications."""
        return self.numel * min(self.rows, self.cols)


@dataclass(frozen=True, order=True)
class MatrixShard:
    """A box of a matrix in the memory of one rank.

    Args:
        matrix: the matrix that contains the box.
        box: position and sizes in the matrix.
        rank: rank that holds the shard.
        index: index among the shards of that rank.
    """

    matrix: Matrix
    box: Box
    rank: int
    index: int


@dataclass(frozen=True)
class MomentumTransfer:
    """The transfer of a shard between its holder (`piece.rank`) and the owner of its matrix."""

    piece: MatrixShard
    owner: int


@dataclass(frozen=True)
class Exchange:
    """One all-to-all, as seen by one rank.

    Args:
        sends, receives: outgoing and incoming transfers, in buffer order.
        send_counts, receive_counts: number of elements to and from each rank.
        local: True if no rank sends anything to another, so that no collective is needed.
    """

    sends: tuple[MomentumTransfer, ...]
    receives: tuple[MomentumTransfer, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    local: bool


@dataclass(frozen=True)
class Round:
    """Matrices whose shards are exchanged together.

    Args:
        local_matrices: matrices that this rank orthogonalises.
        gather: shards sent to their owners.
        give_back: updates sent to all holders.
    """

    local_matrices: tuple[Matrix, ...]
    gather: Exchange
    give_back: Exchange


def matrices_of(shards: Sequence[MatrixShard]) -> list[Matrix]:
    """Return the matrices of all ranks' shards, in ascending order.

    Raises:
        ValueError: the distinct shards of a matrix do not cover it.
    """
    matrix_sizes: dict[Matrix, int] = {}
    for (matrix, _), same in _boxes(shards):
        matrix_sizes[matrix] = matrix_sizes.get(matrix, 0) + same[0].box.numel
    for matrix, num_elements in matrix_sizes.items():
        if num_elements != matrix.numel:
            raise ValueError(
                f"ranks hold {num_elements} elements of a matrix of {matrix.rows} x {matrix.cols}: "
                "muon needs all elements of a trained matrix, and the same shards in every replica"
            )
    return sorted(matrix_sizes)


def assign_owners(shards: Sequence[MatrixShard], stages: Sequence[int]) -> dict[Matrix, int]:
    """Assign every matrix to a rank, balancing the work within each pipeline stage.

    Matrices are assigned in order of decreasing cost, each to the rank with the least work so far
    among the stages that hold it, so that nothing is sent between stages; ties go to the rank that
    holds most of the matrix, then to the lowest rank.

    Args:
        shards: shards of all ranks.
        stages: pipeline stage of every rank.
    """
    elements_by_rank: dict[Matrix, dict[int, int]] = {}
    for shard in shards:
        ranks = elements_by_rank.setdefault(shard.matrix, {})
        ranks[shard.rank] = ranks.get(shard.rank, 0) + shard.box.numel
    work, owners = [0] * len(stages), {}
    for matrix in sorted(elements_by_rank, key=lambda m: (-m.cost, m)):
        holder_stages = {stages[rank] for rank in elements_by_rank[matrix]}
        candidates = [rank for rank, stage in enumerate(stages) if stage in holder_stages]
        min_work = min(work[rank] for rank in candidates)
        idle = [rank for rank in candidates if work[rank] == min_work]
        owner = max(idle, key=lambda rank: (elements_by_rank[matrix].get(rank, 0), -rank))
        owners[matrix] = owner
        work[owner] += matrix.cost
    return owners


def plan_rounds(
    shards: Sequence[MatrixShard],
    owners: Mapping[Matrix, int],
    *,
    rank: int,
    world: int,
    limit: int,
) -> list[Round]:
    """Plan the exchange rounds, as seen by `rank`.

    Args:
        shards: shards of all ranks.
        limit: maximum number of buffer elements per round on any rank, including its own matrices;
            a single matrix that needs more has its own round.
    """
    gathers: dict[Matrix, list[MomentumTransfer]] = {matrix: [] for matrix in owners}
    returns: dict[Matrix, list[MomentumTransfer]] = {matrix: [] for matrix in owners}
    for number, ((matrix, _), same) in enumerate(_boxes(shards)):
        owner = owners[matrix]
        owner_shards = [shard for shard in same if shard.rank == owner]
        # holders of the same shard send in turn
        source = owner_shards[0] if owner_shards else same[number % len(same)]
        gathers[matrix].append(MomentumTransfer(source, owner))
        returns[matrix] += [MomentumTransfer(shard, owner) for shard in same]
    rounds = []
    for group in _batches(owners, gathers, returns, world=world, limit=limit):
        transfers = [transfer for matrix in group for transfer in gathers[matrix]]
        return_transfers = [transfer for matrix in group for transfer in returns[matrix]]
        rounds.append(
            Round(
                local_matrices=tuple(matrix for matrix in group if owners[matrix] == rank),
                gather=_exchange(transfers, rank=rank, world=world, to_owner=True),
                give_back=_exchange(return_transfers, rank=rank, world=world, to_owner=False),
            )
        )
    return rounds


def _boxes(shards: Sequence[MatrixShard]):
    """Return ((matrix, box), shards equal to this box) in ascending order."""
    return [
        (key, list(same))
        for key, same in itertools.groupby(
            sorted(shards), key=lambda shard: (shard.matrix, shard.box)
        )
    ]


def _batches(
    owners: Mapping[Matrix, int],
    gathers: Mapping[Matrix, Sequence[MomentumTransfer]],
    returns: Mapping[Matrix, Sequence[MomentumTransfer]],
    *,
    world: int,
    limit: int,
) -> list[list[Matrix]]:
    """Divide matrices into rounds within the limit, each with work for all ranks."""
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
    matrix: Matrix,
    owner: int,
    gathers: Sequence[MomentumTransfer],
    returns: Sequence[MomentumTransfer],
) -> dict[int, int]:
    """Return the number of buffer elements that a matrix needs, by rank."""
    needs = {owner: matrix.numel}
    for transfer in (*gathers, *returns):
        for rank in (transfer.piece.rank, transfer.owner):
            needs[rank] = needs.get(rank, 0) + transfer.piece.box.numel
    return needs


def _exchange(
    transfers: Sequence[MomentumTransfer], *, rank: int, world: int, to_owner: bool
) -> Exchange:
    """Return one rank's sends and receives, sorted by the other rank; transfers between the same
    two ranks keep the order of `transfers` on both sides."""

    def ends(transfer: MomentumTransfer) -> tuple[int, int]:
        ranks = transfer.piece.rank, transfer.owner
        return ranks if to_owner else (ranks[1], ranks[0])

    sends = sorted((t for t in transfers if ends(t)[0] == rank), key=lambda t: ends(t)[1])
    receives = sorted((t for t in transfers if ends(t)[1] == rank), key=lambda t: ends(t)[0])
    send_counts, receive_counts = [0] * world, [0] * world
    for transfer in sends:
        send_counts[ends(transfer)[1]] += transfer.piece.box.numel
    for transfer in receives:
        receive_counts[ends(transfer)[0]] += transfer.piece.box.numel
    return Exchange(
        tuple(sends),
        tuple(receives),
        tuple(send_counts),
        tuple(receive_counts),
        local=all(t.piece.rank == t.owner for t in transfers),
    )


#: a, b, c: the largest slope at 0 for which all singular values converge near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: Lower bound of the norm, so that a zero gradient gives a zero update. A bound rather than an
#: added epsilon makes the result independent of the gradient's scale.
LEAST_NORM = 1e-20
#: Root mean square of AdamW's updates, which mode "rms" matches (Liu et al. 2025, "Muon is scalable
#: for LLM training", arXiv 2502.16982, section 2.2).
ADAMW_RMS = 0.2


def orthogonalize(x: torch.Tensor, *, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return approximately the nearest orthogonal matrix to `x` [rows, cols], in `dtype`.

    Args:
        x: any dtype; its scale does not matter.
        dtype: dtype of the matrix products, bf16 as published or fp32.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    norm = torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=LEAST_NORM)
    u = (x / norm).to(dtype)
    u = u.mT if tall else u  # [m, n] with m <= n, so that the Gram matrix is the smaller one
    for _ in range(steps):
        gram = u @ u.mT  # [m, m]
        u = torch.addmm(u, torch.addmm(gram, gram, gram, beta=b, alpha=c), u, beta=a)
    return u.mT if tall else u


def update_scale(mode: str, rows: int, cols: int) -> float:
    """Return the scale of an orthogonal update of a weight [rows, cols] = [out, in].

    spectral        sqrt(max(rows, cols)): elements have root mean square 1
    shape_scaling   sqrt(max(1, rows / cols)): Jordan et al. 2024
    unit_rms_norm   sqrt(rows / cols): preserves the ratio of output to input root mean square
    rms             0.2 sqrt(max(rows, cols)): elements have the root mean square of AdamW's
    updates,
                    so that learning rates of AdamW apply (arXiv 2502.16982, equation 4)

    Raises:
        ValueError: the mode is unknown.
    """
    match mode:
        case "spectral":
            return math.sqrt(max(rows, cols))
        case "shape_scaling":
            return math.sqrt(max(1.0, rows / cols))
        case "unit_rms_norm":
            return math.sqrt(rows / cols)
        case "rms":
            return ADAMW_RMS * math.sqrt(max(rows, cols))
    raise ValueError(f"unknown scale mode {mode!r} of muon")


#: Columns of a serialized shard: key, matrix rows and cols, row, col, rows, cols.
_COLUMNS = 7


class Muon:
    """Updates the matrices of some states. The constructor is collective over the group.

    Args:
        states: this rank's states of kind "muon"; may be empty.
        group: the ranks that hold shards of the same matrices.
        device: device of weights and gradients.
        weights: descriptions of this rank's weights, which state the logical tensors of each
            matrix. May be None only if `split_matrices` is "all".
        stages: pipeline stage of every rank of the group; matrices are not sent between stages.
            None means one stage.

    Raises:
        ValueError: tensors are to be joined but `weights` is None, or no rank has a matrix.

    Attributes:
        rounds: the exchange plan.
        owned_matrices: number of matrices that this rank orthogonalises.
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
        if config.split_matrices != "all" and weights is None:
            raise ValueError(
                f"muon with split_matrices={config.split_matrices!r} joins tensors of fused "
                "weights: pass Optimizer the sharding of the weights of all stages, weights="
                "[handle.sharding for handle in model.store.handles.values()]"
            )
        self.states, self.group, self.config = tuple(states), group, config
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        joined = _joined_rows(weights or (), config)
        self._local_boxes = [
            (state, matrix)
            for state in states
            for box in state.owned.boxes
            for matrix in matrix_boxes(box)
        ]
        self._updates = [_updates(state, box) for state, box in self._local_boxes]
        shards = self._all_shards([_described(box, joined) for _, box in self._local_boxes])
        if not matrices_of(shards):
            raise ValueError("optimizer muon has no matrix to update: use adam")
        owners = assign_owners(shards, stages or [0] * group.size)
        self.rounds = plan_rounds(
            shards, owners, rank=group.rank, world=group.size, limit=config.round_bytes // 4
        )
        self.owned_matrices = sum(len(muon_round.local_matrices) for muon_round in self.rounds)

    def update(self, numbers: StepNumbers) -> None:
        """Update momentum and masters in place. Collective, unless no matrix is sharded."""
        for state in self.states:
            for alike in state.updates:
                for start, stop in alike.ranges:
                    momentum = state.moments["momentum"][start:stop]
                    gradients = state.owned.gradients[start:stop]
                    momentum.mul_(self.config.momentum).add_(gradients, alpha=1 / numbers.divisor)
        following = self._gather(self.rounds[0], numbers) if self.rounds else None
        for i, muon_round in enumerate(self.rounds):
            assert following is not None
            arrived = following.wait()
            if i + 1 < len(self.rounds):
                following = self._gather(self.rounds[i + 1], numbers)
            updates = {
                matrix: self._orthogonal(matrix, whole)
                for matrix, whole in self._assembled(muon_round, arrived).items()
            }
            self._apply(muon_round.give_back, self._give_back(muon_round, updates).wait(), numbers)

    def _gather(self, muon_round: Round, numbers: StepNumbers) -> Pending:
        """Start sending the shards of U to the owners of their matrices."""
        sent = self._buffer(muon_round.gather.send_counts)
        for transfer, view in _transfer_views(muon_round.gather.sends, sent):
            state, box = self._local_boxes[transfer.piece.index]
            momentum, gradients = box.of(state.moments["momentum"]), state.owned.gradients
            if self.config.nesterov:
                torch.mul(momentum, self.config.momentum, out=view)
                view.add_(box.of(gradients), alpha=1 / numbers.divisor)
            else:
                view.copy_(momentum)
        return self._exchanged(muon_round.gather, sent)

    def _assembled(self, muon_round: Round, arrived: torch.Tensor) -> dict[Matrix, torch.Tensor]:
        """Return this rank's matrices [rows, cols] of a round."""
        matrices = {m: arrived.new_empty(m.rows, m.cols) for m in muon_round.local_matrices}
        for transfer, view in _transfer_views(muon_round.gather.receives, arrived):
            matrices[transfer.piece.matrix][transfer.piece.box.slices].copy_(view)
        return matrices

    def _orthogonal(self, matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
        """Return the scaled update of a matrix, fp32 [rows, cols]."""
        update = orthogonalize(whole, steps=self.config.num_ns_steps, dtype=self.dtype)
        scale = update_scale(self.config.scale_mode, matrix.rows, matrix.cols)
        return update.float().mul_(scale * self.config.extra_scale_factor)

    def _give_back(self, muon_round: Round, updates: dict[Matrix, torch.Tensor]) -> Pending:
        """Start sending the shards of the updates to all holders."""
        sent = self._buffer(muon_round.give_back.send_counts)
        for transfer, view in _transfer_views(muon_round.give_back.sends, sent):
            view.copy_(updates[transfer.piece.matrix][transfer.piece.box.slices])
        return self._exchanged(muon_round.give_back, sent)

    def _apply(self, exchange: Exchange, arrived: torch.Tensor, numbers: StepNumbers) -> None:
        """Apply weight decay and updates to this rank's shards."""
        for transfer, view in _transfer_views(exchange.receives, arrived):
            state, box = self._local_boxes[transfer.piece.index]
            alike = self._updates[transfer.piece.index]
            lr = alike.lr(numbers)
            master = box.of(state.master)
            master.mul_(1.0 - lr * numbers.weight_decay * alike.decay_factor).add_(view, alpha=-lr)

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

    def _all_shards(self, local_rows: Sequence[tuple[int, ...]]) -> list[MatrixShard]:
        """Return the shards of all ranks, in the same order on each."""
        if self.group.size == 1:
            return [_matrix_shard(row, 0, index) for index, row in enumerate(local_rows)]
        count = torch.tensor([len(local_rows)], device=self.device)
        max_rows = int(all_reduce(count, self.group, op="max"))
        table = torch.full((1, max_rows, _COLUMNS), -1, dtype=torch.int64, device=self.device)
        if local_rows:
            table[0, : len(local_rows)] = torch.tensor(local_rows, device=self.device)
        return [
            _matrix_shard(row, rank, index)
            for rank, rows in enumerate(all_gather(table, self.group).tolist())
            for index, row in enumerate(rows)
            if row[1] >= 0
        ]


def _transfer_views(transfers: Sequence[MomentumTransfer], flat: torch.Tensor):
    """Return every transfer with its view [rows, cols] of a buffer."""
    views = flat.split([t.piece.box.numel for t in transfers]) if transfers else ()
    return [(t, view.view(t.piece.box.sizes)) for t, view in zip(transfers, views, strict=True)]


#: Patterns of fused query, key and value weights.
QKV_WEIGHTS = ("qkv.weight", "*.qkv.weight")
#: Patterns of logical tensors that are fused here but separate weights in Megatron-LM: the down
#: projection of queries in latent attention.
SEPARATE_TENSORS = ("query_down.weight", "*.query_down.weight")


@dataclass(frozen=True)
class _JoinedRows:
    """Location of a logical tensor's rows in the matrix that contains it.

    Args:
        matrix: name of the matrix.
        first: first row of the tensor in the matrix.
        rows: number of rows of the whole matrix.
    """

    matrix: str
    first: int
    rows: int


def _joined_rows(weights: Collection[WeightSharding], config: MuonConfig) -> dict[str, _JoinedRows]:
    """Return the location of every logical tensor that is joined with others; expert tensors are
    joined per expert.

    The order of rows does not matter: for a permutation P, the update of P G is P NS(G).
    """
    joined = {}
    for sharding in weights:
        segments = _joined_segments(sharding, config)
        rows, first_row = sum(segment.shape[-2] for segment in segments), 0
        for segment in segments:
            experts = range(segment.shape[0]) if len(segment.shape) == 3 else None
            for suffix in [""] if experts is None else [f"[{e}]" for e in experts]:
                matrix = _JoinedRows(f"{sharding.name}{suffix}", first_row, rows)
                joined[f"{segment.name}{suffix}"] = matrix
            first_row += segment.shape[-2]
    return joined


def _joined_segments(sharding: WeightSharding, config: MuonConfig) -> list[SubWeight]:
    """Return the logical tensors of a weight that form one matrix; empty if each forms its own."""

    def alike(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    segments = [s for s in sharding.sub_weights if is_matrix(s, config.adam_names)]
    if config.split_matrices == "all":
        return []
    if config.split_matrices == "megatron":
        if config.split_qkv and alike(sharding.name, QKV_WEIGHTS):
            return []
        segments = [s for s in segments if not alike(s.name, SEPARATE_TENSORS)]
    return segments


def _described(box: LocalBox, joined: Mapping[str, _JoinedRows]) -> tuple[int, ...]:
    """Serialize a box to integers for the exchange between ranks."""
    joined_rows = joined.get(box.name, _JoinedRows(box.name, 0, box.shape[0]))
    (row, col), sizes = box.box
    digest = hashlib.blake2b(joined_rows.matrix.encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big", signed=True)
    return (key, joined_rows.rows, box.shape[1], joined_rows.first + row, col, *sizes)


def _matrix_shard(row: Sequence[int], rank: int, index: int) -> MatrixShard:
    key, rows, cols, *box = row
    return MatrixShard(
        Matrix(key, rows, cols), Box((box[0], box[1]), (box[2], box[3])), rank, index
    )


def _updates(state: RangeState, box: LocalBox) -> UpdateRanges:
    """Return the update factors of a box."""
    for alike in state.updates:
        if any(start <= box.start < stop for start, stop in alike.ranges):
            return alike
    raise AssertionError(f"{box.name} is not in any updated range")

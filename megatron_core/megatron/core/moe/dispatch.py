# SPDX-License-Identifier: Apache-2.0
"""Dispatch: move tokens to the ranks of their experts and the results back.

Ranks of the group are numbered etp fastest: rank i + etp · j has shard i of the experts j · E/ep up
to (j + 1) · E/ep. With t tokens per rank, k experts per token, h features and n = etp · ep ranks:

| dispatcher | rows that a rank receives, and sends back | how |
|---|---|---|
| alltoall | t · k · etp | each row goes to the ranks of its expert |
| allgather | t · n | every row goes to all ranks, which select rows; the results are summed |

All-gather therefore moves fewer rows if ep < k. A single rank moves nothing.

In generation with at most `MAX_PADDED_ROWS` rows per rank, the host does not wait for the device to
count each expert's rows. Every row goes to all ranks, with each rank's rows padded to the largest
number of rows of any rank. A rank sorts all n · t · k copies by expert, copies for other ranks'
experts last; it multiplies the first ones, up to offsets on the device, and ignores all others. It
copies ep times as many rows as it needs, but does not multiply them. Longer steps, which compute
prompts, wait for the counts.

In training a single rank does not wait either if its experts drop tokens or skip padding: all t · k
copies are sorted, copies without an expert last, and the latter are not multiplied. Several ranks
do not wait if they have a capacity (`RankCapacity`): with all-to-all every rank sends blocks of a
fixed size to all ranks, with all-gather it selects as many rows as its capacity; unused rows are
copied and not multiplied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron.core.comm import all_gather, all_reduce, gather_from_group
from megatron.core.comm.conjugates import (
    finish_collective,
    run_collective,
    split_all_gather,
    split_all_to_all,
    split_reduce_scatter,
    start_collective,
)
from megatron.core.moe.moe_config import DISPATCHERS
from megatron.core.moe.router import Routing
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.process_groups import Group
from megatron.core.weight_gather import RowRuns

#: Rows of a rank that are padded in generation; with more, the host waits for exact counts.
MAX_PADDED_ROWS = 256

#: Maps rows [r, h] in runs, one per local expert, to [r, h].
Experts = Callable[[torch.Tensor, RowRuns], torch.Tensor]


def choose_dispatcher(requested: str, *, topk: int, ep: int) -> str:
    """Return "allgather" or "alltoall"; "auto" chooses the one that moves fewer rows.

    Raises:
        ValueError: unknown dispatcher.
    """
    if requested not in DISPATCHERS:
        raise ValueError(f"moe-token-dispatcher-type {requested!r}: use {', '.join(DISPATCHERS)}")
    if requested != "auto":
        return requested
    return "allgather" if ep < topk else "alltoall"


def dispatched_rows(dispatcher: str, *, tokens: int, topk: int, etp: int, ep: int) -> int:
    """Return the number of hidden rows that a rank receives in a dispatch, none dropped."""
    return tokens * etp * (ep if dispatcher == "allgather" else topk)


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Placement of the experts on the ranks.

    Args:
        group: ranks over which tokens are dispatched.
        etp: adjacent ranks that shard each expert's weights.
        num_experts: E.
    """

    group: Group
    etp: int
    num_experts: int

    @property
    def num_local(self) -> int:
        """Experts of a rank, E/ep."""
        return self.num_experts * self.etp // self.group.size

    @property
    def first_expert(self) -> int:
        """Index of this rank's first expert."""
        return self.group.rank // self.etp * self.num_local


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Padding of a generation step's rows.

    Args:
        rows: number of rows of the rank with the most rows.
        uneven: whether ranks have different numbers of rows.
        exact: wait for the device instead of padding.
    """

    rows: int
    uneven: bool
    exact: bool = False

    @property
    def avoids_waiting(self) -> bool:
        """Whether rows are padded, so that the host does not wait for the device."""
        return not self.exact and self.rows <= MAX_PADDED_ROWS


def dispatch(
    rows: torch.Tensor,
    routing: Routing,
    experts: Experts,
    *,
    ranks: ExpertRanks,
    dispatcher: str,
    overlap_fn: Callable[[], None] | None = None,
    padding: Padding | None = None,
    capacity: RankCapacity | None = None,
) -> torch.Tensor:
    """Return each row's weighted sum of its experts' outputs, [t, h].

    Args:
        rows: this rank's rows [t, h].
        experts: this rank's experts.
        dispatcher: "alltoall" or "allgather".
        overlap_fn: called while rows are in flight to their experts.
        padding: padding of a generation step; with None all ranks have equal numbers of rows, and
            the host may wait for the device.
        capacity: capacity of a rank in training, so that the host never waits; None: no limit.
    """
    overlap_fn = overlap_fn or _no_overlap
    if ranks.group.size == 1:
        overlap_fn()
        return _dispatch_locally(rows, routing, experts, ranks)
    if padding is not None and padding.avoids_waiting:
        return _by_all_gather(rows, routing, experts, ranks, overlap_fn, padding)
    uneven = padding is not None and padding.uneven
    if dispatcher == "allgather" and not uneven:
        return _by_all_gather(rows, routing, experts, ranks, overlap_fn, capacity=capacity)
    if capacity is not None:
        return _by_equal_blocks(rows, routing, experts, ranks, overlap_fn, capacity)
    return _by_all_to_all(rows, routing, experts, ranks, overlap_fn)


def _no_overlap() -> None:
    """Do nothing while rows are in flight."""


@dataclass(frozen=True, eq=False)
class _ExpertOrder:
    """Copies of tokens, sorted by expert.

    Args:
        sources: int64 [r], copy t · k + j of each row; copies without a local expert are omitted,
            or last if `trailing`.
        counts: int64 [experts], on the rows' device.
        trailing: whether copies without a local expert follow.
    """

    sources: torch.Tensor
    counts: torch.Tensor
    trailing: bool = False

    @staticmethod
    def of(experts: torch.Tensor, count: int, *, complete: bool = False) -> _ExpertOrder:
        """Sort the copies [t, k] of experts 0 … count - 1; `count` stands for no expert.

        Args:
            complete: keep all copies, those without an expert last, or assume that there are none;
                otherwise the host waits to learn how many to omit.
        """
        experts = experts.flatten()
        counts = torch.zeros(count + 1, dtype=torch.int64, device=experts.device)
        counts.index_add_(0, experts, torch.ones_like(experts))
        order = experts.argsort(stable=True)
        if not complete:
            order = order[: len(order) - int(counts[-1])]
        return _ExpertOrder(order, counts[:-1])

    @staticmethod
    def local(
        experts: torch.Tensor, ranks: ExpertRanks, *, complete: bool, waits: bool
    ) -> _ExpertOrder:
        """Sort the copies for the experts of this rank.

        Args:
            experts: int64 [t, k], of all E experts; -1 is no expert.
            complete: whether every copy has an expert.
            waits: omit copies for other ranks' experts, for which the host waits; otherwise they
                follow this rank's copies.
        """
        complete = complete and ranks.num_local == ranks.num_experts
        local_experts = experts - ranks.first_expert
        elsewhere = (local_experts < 0) | (local_experts >= ranks.num_local)
        order = _ExpertOrder.of(
            local_experts.masked_fill(elsewhere, ranks.num_local),
            ranks.num_local,
            complete=complete or not waits,
        )
        return replace(order, trailing=not (complete or waits))

    @staticmethod
    def all_experts(routing: Routing, num_experts: int) -> _ExpertOrder:
        """Sort the copies for all experts; copies without an expert are last."""
        experts = routing.experts
        if routing.keep_mask is not None:
            experts = experts.masked_fill(~routing.keep_mask, num_experts)
        order = _ExpertOrder.of(experts, num_experts, complete=True)
        return replace(order, trailing=routing.keep_mask is not None)

    def within(self, count: int) -> _ExpertOrder:
        """Return at most the first `count` copies; unused rows may follow."""
        ends = self.counts.cumsum(0).clamp(max=count)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return _ExpertOrder(self.sources[:count], counts, trailing=True)

    @property
    def runs(self) -> RowRuns:
        """The runs of rows in this order, one per expert."""
        return RowRuns.of(self.counts, trailing=self.trailing)

    def permutation(self, tokens: int, copies: int) -> Permutation:
        """Return the permutation from tokens, with `copies` copies each, to rows in this order."""
        if not self.trailing:
            return Permutation.of(self.sources, tokens, copies)
        present = torch.arange(len(self.sources), device=self.sources.device) < self.counts.sum()
        return Permutation.with_padding(self.sources, present, tokens=tokens, copies=copies)


def _dispatch_locally(
    rows: torch.Tensor, routing: Routing, experts: Experts, ranks: ExpertRanks
) -> torch.Tensor:
    tokens, topk = routing.experts.shape
    order = _ExpertOrder.all_experts(routing, ranks.num_experts)
    permutation = order.permutation(tokens, topk)
    results = experts(take_rows(rows, permutation), order.runs)
    return sum_rows(results, permutation, weights=routing.weights)


def _by_all_gather(
    rows: torch.Tensor,
    routing: Routing,
    experts: Experts,
    ranks: ExpertRanks,
    overlap_fn: Callable[[], None],
    padding: Padding | None = None,
    *,
    capacity: RankCapacity | None = None,
) -> torch.Tensor:
    group, count = ranks.group, len(rows)
    if padding is not None and padding.rows > count:
        rows, routing = _padded(rows, routing, padding.rows)
    collective = split_all_gather(group)
    buffer = start_collective(rows, collective)
    expert_ids = routing.experts
    if routing.keep_mask is not None:
        expert_ids = expert_ids.masked_fill(~routing.keep_mask, -1)
    expert_ids = all_gather(expert_ids, group)  # [n t, k]
    weights = gather_from_group(routing.weights, group, partial_gradient=True)  # [n t, k]
    complete = routing.keep_mask is None and not (padding is not None and padding.uneven)
    # With all experts local, only few rows have no expert, so waiting to omit them does not pay.
    has_remote_experts = ranks.num_local < ranks.num_experts
    waits = padding is None and capacity is None and has_remote_experts
    order = _ExpertOrder.local(expert_ids, ranks, complete=complete, waits=waits)
    if capacity is not None:
        share = expert_ids.numel() * ranks.num_local / ranks.num_experts
        room = capacity.rows(share, len(expert_ids) * min(expert_ids.shape[1], ranks.num_local))
        capacity.record(order.counts.sum(), room, share)
        order = order.within(room)
    permutation = order.permutation(*expert_ids.shape)
    overlap_fn()
    all_rows = finish_collective(buffer, collective)  # [n t, h]
    results = experts(take_rows(all_rows, permutation), order.runs)  # [r, h] partial(etp)
    return run_collective(
        sum_rows(results, permutation, weights=weights), split_reduce_scatter(group)
    )[:count]


def _padded(rows: torch.Tensor, routing: Routing, count: int) -> tuple[torch.Tensor, Routing]:
    """Return `count` rows, padded with rows that have no expert."""
    missing = (0, 0, 0, count - len(rows))
    assert routing.keep_mask is None, "generation has no capacity"
    experts, weights = F.pad(routing.experts, missing, value=-1), F.pad(routing.weights, missing)
    return F.pad(rows, missing), Routing(experts, weights)


def partial_sums(
    all_rows: torch.Tensor, routing: Routing, experts: Experts, *, ranks: ExpertRanks
) -> torch.Tensor:
    """Return each row's weighted sum of the outputs of this rank's experts.

    Args:
        all_rows: [t, h], the same on all ranks.
        routing: of `all_rows`, without drops.
        experts: this rank's experts.

    Returns:
        [t, h] partial(etp, ep).
    """
    waits = len(all_rows) > MAX_PADDED_ROWS * ranks.group.size
    order = _ExpertOrder.local(routing.experts, ranks, complete=True, waits=waits)
    permutation = order.permutation(*routing.experts.shape)
    results = experts(take_rows(all_rows, permutation), order.runs)
    return sum_rows(results, permutation, weights=routing.weights)


def _by_all_to_all(
    rows: torch.Tensor,
    routing: Routing,
    experts: Experts,
    ranks: ExpertRanks,
    overlap_fn: Callable[[], None],
) -> torch.Tensor:
    group, etp = ranks.group, ranks.etp
    tokens, topk = routing.experts.shape
    order = _ExpertOrder.all_experts(routing, ranks.num_experts)
    # Row i: copies of rank i for each expert.
    counts = all_gather(order.counts.unsqueeze(0), group)  # [n, E]
    local_counts = counts[:, ranks.first_expert : ranks.first_expert + ranks.num_local]  # [n, E/ep]
    sizes = torch.cat([local_counts.sum(1), order.counts.view(-1, ranks.num_local).sum(1)])
    sizes = sizes.tolist()  # the layer's only wait for the device: c10d needs sizes on the host
    receive, blocks = sizes[: group.size], sizes[group.size :]
    positions = order.sources[: sum(blocks)]
    if etp > 1:  # one copy for each etp shard of the expert
        block_positions = positions.split(blocks)
        positions = torch.cat([block * etp + i for block in block_positions for i in range(etp)])
    send_permutation = Permutation.of(positions, tokens, topk * etp)
    send = [block for block in blocks for _ in range(etp)]
    forward_exchange, backward_exchange = (
        split_all_to_all(group, send, receive),
        split_all_to_all(group, receive, send),
    )
    buffer = start_collective(take_rows(rows, send_permutation), forward_exchange)
    expert_permutation, runs = _group_by_expert(local_counts, sum(receive))
    overlap_fn()
    results = experts(
        take_rows(finish_collective(buffer, forward_exchange), expert_permutation), runs
    )
    combined = run_collective(sum_rows(results, expert_permutation), backward_exchange)
    weights = _repeat_for_shards(routing.weights, etp)  # [t, k etp]
    return sum_rows(combined, send_permutation, weights=weights)


def _by_equal_blocks(
    rows: torch.Tensor,
    routing: Routing,
    experts: Experts,
    ranks: ExpertRanks,
    overlap_fn: Callable[[], None],
    capacity: RankCapacity,
) -> torch.Tensor:
    group, etp, local = ranks.group, ranks.etp, ranks.num_local
    tokens, topk = routing.experts.shape
    num_blocks = group.size // etp
    order = _ExpertOrder.all_experts(routing, ranks.num_experts)
    counts = all_gather(order.counts.unsqueeze(0), group)  # [n, E]
    share = tokens * topk / num_blocks
    room = capacity.rows(share, tokens * min(topk, local))
    block_rows = order.counts.view(num_blocks, local).sum(1)  # [ep]
    capacity.record(block_rows, room, share)
    slot = torch.arange(room, device=rows.device)
    index = (block_rows.cumsum(0) - block_rows).unsqueeze(1) + slot  # [ep, room]
    positions = order.sources[index.clamp(max=len(order.sources) - 1)].unsqueeze(1)
    positions = positions * etp + torch.arange(etp, device=rows.device).unsqueeze(
        1
    )  # [ep, etp, room]
    present = (slot < block_rows.unsqueeze(1)).unsqueeze(1).expand_as(positions)
    send_permutation = Permutation.with_padding(
        positions.flatten(), present.flatten(), tokens=tokens, copies=topk * etp
    )
    sizes = [room] * group.size
    forward_exchange, backward_exchange = (
        split_all_to_all(group, sizes, sizes),
        split_all_to_all(group, sizes, sizes),
    )
    buffer = start_collective(take_rows(rows, send_permutation), forward_exchange)
    # Each received block has rows of this rank's experts in order, then padding.
    ends = counts[:, ranks.first_expert : ranks.first_expert + local].cumsum(1)  # [n, E/ep]
    expert_of_row = torch.searchsorted(ends, slot.expand(len(ends), room).contiguous(), right=True)
    local_order = replace(_ExpertOrder.of(expert_of_row, local, complete=True), trailing=True)
    expert_permutation = local_order.permutation(expert_of_row.numel(), 1)
    overlap_fn()
    received = finish_collective(buffer, forward_exchange)  # [n room, h]
    results = experts(take_rows(received, expert_permutation), local_order.runs)
    combined = run_collective(sum_rows(results, expert_permutation), backward_exchange)
    return sum_rows(combined, send_permutation, weights=_repeat_for_shards(routing.weights, etp))


def _repeat_for_shards(weights: torch.Tensor, etp: int) -> torch.Tensor:
    """Return weights [t, k] repeated for the etp shards of each expert, [t, k etp]."""
    return weights.repeat_interleave(etp, dim=1) if etp > 1 else weights


def _group_by_expert(counts: torch.Tensor, rows: int) -> tuple[Permutation, RowRuns]:
    """Return the permutation of received rows, sorted by rank and expert, to order by expert.

    Args:
        counts: int64 [n, E/ep], rows from each rank for each local expert.
        rows: the sum of the counts; without it `repeat_interleave` waits for the device.
    """
    ranks, experts = counts.shape
    sizes = counts.sum(0)
    expert_of_row = torch.arange(experts, device=counts.device).repeat(ranks)
    expert_of_row = expert_of_row.repeat_interleave(counts.flatten(), output_size=rows)  # [r]
    positions = expert_of_row.argsort(stable=True)
    return Permutation.of(positions, len(positions), 1), RowRuns.of(sizes)


__all__ = [
    "ExpertRanks",
    "Experts",
    "Padding",
    "choose_dispatcher",
    "dispatch",
    "dispatched_rows",
    "partial_sums",
]


#: `excess` before the first microbatch: less than any number of rows.
_NO_MICROBATCH = -(1 << 62)


class RankCapacity:
    """Capacity of a rank for one layer's rows, and the largest demand so far.

    The even share of a rank is its number of rows under uniform routing: with t tokens per
    rank, k experts per token and ep expert shards, t · k / ep rows from each rank. A rank
    receives a factor times its even share, so the host knows all sizes without waiting for the
    device. Rows that exceed the capacity are dropped, which only the device knows. Every step
    therefore adds `CapacityCheck.count`, which is 0 if no row was dropped, to the sums that it
    reduces anyway. If the sum is not 0, the step raises on every rank before a weight changes.
    An evaluation is recomputed without a capacity.

    Args:
        factor: capacity as a multiple of the even share.

    Attributes:
        excess: int64 scalar, the largest number of rows of a block in a microbatch since `reset`,
            minus the rows that the block holds.
        room, share: rows that a block holds, and the even share; the smallest values if
            microbatches have several shapes.
        in_evaluation: also limit microbatches without samples; see `CapacityCheck.evaluation`.
    """

    def __init__(self, factor: float, device: torch.device | str = "cpu") -> None:
        self.factor = factor
        self.excess = torch.full((), _NO_MICROBATCH, dtype=torch.int64, device=device)
        self.room, self.share = math.inf, math.inf
        self.in_evaluation = False

    def rows(self, share: float, max_rows: int) -> int:
        """Return the capacity in rows.

        Args:
            share: the even share, in rows.
            max_rows: largest possible number of rows.
        """
        return min(math.ceil(self.factor * share), max_rows)

    @torch.no_grad()
    def record(self, rows: torch.Tensor, room: int, share: float) -> None:
        """Record the demand of a microbatch without waiting for the device.

        Args:
            rows: int64 [blocks], demand of each block.
            room: rows that each block holds.
            share: the even share, in rows.
        """
        self.room, self.share = min(room, self.room), min(share, self.share)
        torch.maximum(self.excess, rows.amax() - room, out=self.excess)

    def reset(self) -> None:
        """Forget the recorded demand."""
        self.excess.fill_(_NO_MICROBATCH)

    def needed(self) -> float:
        """Return the factor that would fit every microbatch so far; waits for the device."""
        return (self.room + int(self.excess)) / self.share


class CapacityCheck:
    """Check after a step whether any row exceeded a capacity.

    Args:
        capacities: capacities of this rank's layers, by name.
        names: names of all layers with experts, in order, for error messages; the same on every
            rank.
        world: all ranks.
        device: this rank's device.
    """

    def __init__(
        self,
        capacities: Iterable[tuple[str, RankCapacity]],
        names: Sequence[str],
        *,
        world: Group,
        device: torch.device | str = "cpu",
    ) -> None:
        self.names, self.world, self.device = tuple(names), world, device
        self._layers = [(self.names.index(name), capacity) for name, capacity in capacities]

    def begin(self) -> None:
        """Start a step."""
        for _, capacity in self._layers:
            capacity.reset()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Apply the capacities to an evaluation.

        The caller checks `has_room` and otherwise evaluates again without capacities, because a
        loss must not omit a token.
        """
        sizes = [(capacity.room, capacity.share) for _, capacity in self._layers]
        self.begin()
        for _, capacity in self._layers:
            capacity.in_evaluation = True
        try:
            yield
        finally:
            for (_, capacity), (room, share) in zip(self._layers, sizes, strict=True):
                capacity.in_evaluation = False
                # Training's values: a replayed step does not set them again.
                capacity.room, capacity.share = room, share

    def has_room(self) -> bool:
        """Return whether no rank dropped a row since `begin`; waits for the device."""
        return not float(all_reduce(self.count(), self.world))

    def count(self) -> torch.Tensor:
        """Return the sum over this rank's layers of the largest excess of a block, fp64 [1].

        It is 0 exactly if no row was dropped.
        """
        if not self._layers:
            return torch.zeros(1, dtype=torch.float64, device=self.device)
        excess = torch.stack([capacity.excess for _, capacity in self._layers])
        return excess.clamp(min=0).sum(0, keepdim=True).double()

    def fail(self) -> None:
        """Raise an error that names the layer with the largest demand; every rank calls it.

        Raises:
            ValueError: always.
        """
        table = torch.zeros(len(self.names), 3, dtype=torch.float64, device=self.device)
        for index, capacity in self._layers:
            demand = max(0, int(capacity.excess)), capacity.needed(), capacity.factor
            table[index] = table.new_tensor(demand)
        demands = all_reduce(table, self.world, op="max").tolist()
        full = [(needed, excess, i) for i, (excess, needed, _) in enumerate(demands) if excess]
        needed, excess, worst = max(full)
        others_text = f" (and {len(full) - 1} more layers)" if len(full) > 1 else ""
        raise ValueError(
            f"{self.names[worst]}{others_text}: {excess:,.0f} tokens of a microbatch exceeded "
            "the capacity of an expert rank, which is --moe-expert-rank-capacity-factor "
            f"{demands[worst][2]:g} x its even share, but {needed:.2f} x were routed to it; no "
            f"weight has changed: resume with {math.ceil(needed * 10 + 1) / 10:g} or more, or "
            "without the option"
        )

# SPDX-License-Identifier: Apache-2.0
"""Dispatch: bring tokens to the ranks of their experts and the results back.

Ranks of the group are numbered etp fastest: rank i + etp · j has shard i of the experts j · E/ep up
to (j + 1) · E/ep. With t tokens a rank, k experts a token, h features and n = etp · ep ranks:

| dispatcher | a rank's rows there, and as many back | how |
|---|---|---|
| alltoall | t · k · etp | each row goes to the ranks of its expert |
| allgather | t · n | every row goes to all ranks, which select rows; the results are summed |

So all-gather moves less where ep < k. A single rank moves nothing.

In generation the host does not wait for the device to know how many rows an expert has. Up to
`MOST_PADDED` rows a rank, every row goes to all ranks, each rank's rows padded to those of the rank
that has most; a rank keeps all n · t · k places in the order of its experts, those of other ranks'
experts last, multiplies the first of them, as far as offsets on the device say, and adds nothing of
the others. Of places there are ep times as many as it needs, copied and not multiplied. Longer
steps, those that compute prompts, wait for the counts.

In training a single rank does not wait either where its experts drop tokens or leave out padding:
all t · k places are copied, those that no expert takes last, and these are not multiplied. Nor do
several ranks that have a capacity (`RankCapacity`): by all-to-all every rank sends blocks of one
size to all, by all-gather it copies as many rows as it has room for; what is not filled is copied
and not multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron.core.comm import all_gather, gather_from_group
from megatron.core.comm.conjugates import (
    finish_collective,
    run_collective,
    split_all_gather,
    split_all_to_all,
    split_reduce_scatter,
    start_collective,
)
from megatron.core.moe.capacity import RankCapacity
from megatron.core.moe.moe_config import DISPATCHERS
from megatron.core.moe.router import Routing
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.process_groups import Group
from megatron.core.weight_gather import RowRuns

#: Rows of a rank that are padded in generation; with more, the host waits for exact counts.
MOST_PADDED = 256

#: What experts do: rows [r, h] in runs, one a local expert, to [r, h].
Experts = Callable[[torch.Tensor, RowRuns], torch.Tensor]


def choose_dispatcher(requested: str, *, topk: int, ep: int) -> str:
    """Return "allgather" or "alltoall"; for "auto" what moves fewer rows.

    Raises:
        ValueError: there is no such dispatcher.
    """
    if requested not in DISPATCHERS:
        raise ValueError(f"moe-token-dispatcher-type {requested!r}: use {', '.join(DISPATCHERS)}")
    if requested != "auto":
        return requested
    return "allgather" if ep < topk else "alltoall"


def dispatched_rows(dispatcher: str, *, tokens: int, topk: int, etp: int, ep: int) -> int:
    """Return the rows of hidden features on the wide side of a dispatch, none dropped."""
    return tokens * etp * (ep if dispatcher == "allgather" else topk)


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Who has which experts.

    Args:
        group: the ranks that tokens are dispatched over.
        etp: of them, neighbours that share each expert's weights.
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
    def first(self) -> int:
        """The first of this rank's experts."""
        return self.group.rank // self.etp * self.num_local


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How the rows of a step of generation are padded.

    Args:
        rows: of the rank that has most.
        uneven: whether ranks have different numbers of rows.
        exact: wait for the device rather than pad.
    """

    rows: int
    uneven: bool
    exact: bool = False

    @property
    def avoids_waiting(self) -> bool:
        """Whether rows are padded, and the host does not wait for the device."""
        return not self.exact and self.rows <= MOST_PADDED


def dispatch(
    rows: torch.Tensor,
    routing: Routing,
    experts: Experts,
    *,
    ranks: ExpertRanks,
    dispatcher: str,
    meanwhile: Callable[[], None] | None = None,
    padding: Padding | None = None,
    capacity: RankCapacity | None = None,
) -> torch.Tensor:
    """Return each row's weighted sum of what its experts make of it, [t, h].

    Args:
        rows: [t, h], of this rank.
        experts: of this rank.
        dispatcher: "alltoall" or "allgather".
        meanwhile: called while rows are under way to their experts.
        padding: of a step of generation; None has as many rows on every rank, and may wait for the
            device.
        capacity: of ranks in training, which then wait for nothing; None is without.
    """
    meanwhile = meanwhile or _nothing
    if ranks.group.size == 1:
        meanwhile()
        return _at_home(rows, routing, experts, ranks)
    if padding is not None and padding.avoids_waiting:
        return _by_all_gather(rows, routing, experts, ranks, meanwhile, padding)
    uneven = padding is not None and padding.uneven
    if dispatcher == "allgather" and not uneven:
        return _by_all_gather(rows, routing, experts, ranks, meanwhile, capacity=capacity)
    if capacity is not None:
        return _by_equal_blocks(rows, routing, experts, ranks, meanwhile, capacity)
    return _by_all_to_all(rows, routing, experts, ranks, meanwhile)


def _nothing() -> None:
    """There is nothing to do meanwhile."""


@dataclass(frozen=True, eq=False)
class _Sorted:
    """Places in the order of their experts.

    Args:
        places: int64 [r]; those that no expert here takes are left out.
        counts: int64 [experts], on the rows' device.
        trailing: places of no expert here follow.
    """

    places: torch.Tensor
    counts: torch.Tensor
    trailing: bool = False

    @staticmethod
    def of(experts: torch.Tensor, count: int, *, complete: bool = False) -> _Sorted:
        """Sort the places [t, k] of experts 0 … count - 1; `count` is none of them.

        Args:
            complete: no place is of none, or those stay, after all others; else the host waits to
                know how many are.
        """
        experts = experts.flatten()
        counts = torch.zeros(count + 1, dtype=torch.int64, device=experts.device)
        counts.index_add_(0, experts, torch.ones_like(experts))
        order = experts.argsort(stable=True)
        if not complete:
            order = order[: len(order) - int(counts[-1])]
        return _Sorted(order, counts[:-1])

    @staticmethod
    def here(experts: torch.Tensor, ranks: ExpertRanks, *, complete: bool, waits: bool) -> _Sorted:
        """Sort the places of the experts of this rank.

        Args:
            experts: int64 [t, k], of all E experts; -1 is none.
            complete: every place is of some expert.
            waits: leave out the places of other ranks' experts, for which the host waits; else they
                stay, after those of this rank's.
        """
        complete = complete and ranks.num_local == ranks.num_experts
        local_experts = experts - ranks.first
        elsewhere = (local_experts < 0) | (local_experts >= ranks.num_local)
        order = _Sorted.of(
            local_experts.masked_fill(elsewhere, ranks.num_local),
            ranks.num_local,
            complete=complete or not waits,
        )
        return replace(order, trailing=not (complete or waits))

    @staticmethod
    def everywhere(routing: Routing, num_experts: int) -> _Sorted:
        """Sort the places of all experts, those that no expert takes last."""
        experts = routing.experts
        if routing.kept is not None:
            experts = experts.masked_fill(~routing.kept, num_experts)
        order = _Sorted.of(experts, num_experts, complete=True)
        return replace(order, trailing=routing.kept is not None)

    def within(self, count: int) -> _Sorted:
        """Return the first places, so many at most; others may follow them."""
        ends = self.counts.cumsum(0).clamp(max=count)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return _Sorted(self.places[:count], counts, trailing=True)

    @property
    def runs(self) -> RowRuns:
        """The runs of rows in this order, one an expert."""
        return RowRuns.of(self.counts, trailing=self.trailing)

    def permutation(self, tokens: int, copies: int) -> Permutation:
        """Return the permutation of tokens with so many copies each, to rows in this order."""
        if not self.trailing:
            return Permutation.of(self.places, tokens, copies)
        present = torch.arange(len(self.places), device=self.places.device) < self.counts.sum()
        return Permutation.with_padding(self.places, present, tokens=tokens, copies=copies)


def _at_home(
    rows: torch.Tensor, routing: Routing, experts: Experts, ranks: ExpertRanks
) -> torch.Tensor:
    tokens, topk = routing.experts.shape
    order = _Sorted.everywhere(routing, ranks.num_experts)
    permutation = order.permutation(tokens, topk)
    results = experts(take_rows(rows, permutation), order.runs)
    return sum_rows(results, permutation, weights=routing.weights)


def _by_all_gather(
    rows: torch.Tensor,
    routing: Routing,
    experts: Experts,
    ranks: ExpertRanks,
    meanwhile: Callable[[], None],
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
    if routing.kept is not None:
        expert_ids = expert_ids.masked_fill(~routing.kept, -1)
    expert_ids = all_gather(expert_ids, group)  # [n t, k]
    weights = gather_from_group(routing.weights, group, partial_gradient=True)  # [n t, k]
    complete = routing.kept is None and not (padding is not None and padding.uneven)
    # If all experts are local, few rows are assigned to no expert, and they may stay.
    has_remote_experts = ranks.num_local < ranks.num_experts
    waits = padding is None and capacity is None and has_remote_experts
    order = _Sorted.here(expert_ids, ranks, complete=complete, waits=waits)
    if capacity is not None:
        share = expert_ids.numel() * ranks.num_local / ranks.num_experts
        room = capacity.rows(share, len(expert_ids) * min(expert_ids.shape[1], ranks.num_local))
        capacity.record(order.counts.sum(), room, share)
        order = order.within(room)
    permutation = order.permutation(*expert_ids.shape)
    meanwhile()
    all_rows = finish_collective(buffer, collective)  # [n t, h]
    results = experts(take_rows(all_rows, permutation), order.runs)  # [r, h] partial(etp)
    return run_collective(
        sum_rows(results, permutation, weights=weights), split_reduce_scatter(group)
    )[:count]


def _padded(rows: torch.Tensor, routing: Routing, count: int) -> tuple[torch.Tensor, Routing]:
    """Return `count` rows, the last of which no expert takes."""
    missing = (0, 0, 0, count - len(rows))
    assert routing.kept is None, "generation has no capacity"
    experts, weights = F.pad(routing.experts, missing, value=-1), F.pad(routing.weights, missing)
    return F.pad(rows, missing), Routing(experts, weights)


def partial_sums(
    all_rows: torch.Tensor, routing: Routing, experts: Experts, *, ranks: ExpertRanks
) -> torch.Tensor:
    """Return each row's weighted sum of what the experts of this rank make of it.

    Args:
        all_rows: [t, h], the same on all ranks.
        routing: of these rows, none dropped.
        experts: of this rank.

    Returns:
        [t, h] partial(etp, ep).
    """
    waits = len(all_rows) > MOST_PADDED * ranks.group.size
    order = _Sorted.here(routing.experts, ranks, complete=True, waits=waits)
    permutation = order.permutation(*routing.experts.shape)
    results = experts(take_rows(all_rows, permutation), order.runs)
    return sum_rows(results, permutation, weights=routing.weights)


def _by_all_to_all(
    rows: torch.Tensor,
    routing: Routing,
    experts: Experts,
    ranks: ExpertRanks,
    meanwhile: Callable[[], None],
) -> torch.Tensor:
    group, etp = ranks.group, ranks.etp
    tokens, topk = routing.experts.shape
    order = _Sorted.everywhere(routing, ranks.num_experts)
    # One row of numbers a rank: how many of its places want each expert.
    counts = all_gather(order.counts.unsqueeze(0), group)  # [n, E]
    local_counts = counts[:, ranks.first : ranks.first + ranks.num_local]  # [n, E/ep]
    sizes = torch.cat([local_counts.sum(1), order.counts.view(-1, ranks.num_local).sum(1)])
    sizes = sizes.tolist()  # the layer's one wait for the device: c10d takes sizes from the host
    receive, blocks = sizes[: group.size], sizes[group.size :]
    positions = order.places[: sum(blocks)]
    if etp > 1:  # a row for each part of its expert
        block_positions = positions.split(blocks)
        positions = torch.cat([part * etp + i for part in block_positions for i in range(etp)])
    leaving = Permutation.of(positions, tokens, topk * etp)
    send = [block for block in blocks for _ in range(etp)]
    forward_exchange, backward_exchange = (
        split_all_to_all(group, send, receive),
        split_all_to_all(group, receive, send),
    )
    buffer = start_collective(take_rows(rows, leaving), forward_exchange)
    by_expert, runs = _regrouped(local_counts, sum(receive))
    meanwhile()
    results = experts(take_rows(finish_collective(buffer, forward_exchange), by_expert), runs)
    combined = run_collective(sum_rows(results, by_expert), backward_exchange)
    weights = _for_parts(routing.weights, etp)  # [t, k etp]
    return sum_rows(combined, leaving, weights=weights)


def _by_equal_blocks(
    rows: torch.Tensor,
    routing: Routing,
    experts: Experts,
    ranks: ExpertRanks,
    meanwhile: Callable[[], None],
    capacity: RankCapacity,
) -> torch.Tensor:
    group, etp, local = ranks.group, ranks.etp, ranks.num_local
    tokens, topk = routing.experts.shape
    num_blocks = group.size // etp
    order = _Sorted.everywhere(routing, ranks.num_experts)
    counts = all_gather(order.counts.unsqueeze(0), group)  # [n, E]
    share = tokens * topk / num_blocks
    room = capacity.rows(share, tokens * min(topk, local))
    block_rows = order.counts.view(num_blocks, local).sum(1)  # [ep]
    capacity.record(block_rows, room, share)
    slot = torch.arange(room, device=rows.device)
    index = (block_rows.cumsum(0) - block_rows).unsqueeze(1) + slot  # [ep, room]
    positions = order.places[index.clamp(max=len(order.places) - 1)].unsqueeze(1)
    positions = positions * etp + torch.arange(etp, device=rows.device).unsqueeze(
        1
    )  # [ep, etp, room]
    present = (slot < block_rows.unsqueeze(1)).unsqueeze(1).expand_as(positions)
    leaving = Permutation.with_padding(
        positions.flatten(), present.flatten(), tokens=tokens, copies=topk * etp
    )
    sizes = [room] * group.size
    forward_exchange, backward_exchange = (
        split_all_to_all(group, sizes, sizes),
        split_all_to_all(group, sizes, sizes),
    )
    buffer = start_collective(take_rows(rows, leaving), forward_exchange)
    # Of each block, rows of this rank's experts in order, and then padding.
    ends = counts[:, ranks.first : ranks.first + local].cumsum(1)  # [n, E/ep]
    whose = torch.searchsorted(ends, slot.expand(len(ends), room).contiguous(), right=True)
    local_order = replace(_Sorted.of(whose, local, complete=True), trailing=True)
    by_expert = local_order.permutation(whose.numel(), 1)
    meanwhile()
    arrived = finish_collective(buffer, forward_exchange)  # [n room, h]
    results = experts(take_rows(arrived, by_expert), local_order.runs)
    combined = run_collective(sum_rows(results, by_expert), backward_exchange)
    return sum_rows(combined, leaving, weights=_for_parts(routing.weights, etp))


def _for_parts(weights: torch.Tensor, etp: int) -> torch.Tensor:
    """Return weights [t, k] of what each part of an expert returns, [t, k etp]."""
    return weights.repeat_interleave(etp, dim=1) if etp > 1 else weights


def _regrouped(counts: torch.Tensor, rows: int) -> tuple[Permutation, RowRuns]:
    """Return how rows that came by rank and expert are brought together by expert.

    Args:
        counts: int64 [n, E/ep], rows from each rank for each local expert.
        rows: the sum of the counts; without it `repeat_interleave` waits for the device.
    """
    ranks, experts = counts.shape
    sizes = counts.sum(0)
    whose = torch.arange(experts, device=counts.device).repeat(ranks)
    whose = whose.repeat_interleave(counts.flatten(), output_size=rows)  # [r]
    positions = whose.argsort(stable=True)
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

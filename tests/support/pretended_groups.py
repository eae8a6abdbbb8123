# SPDX-License-Identifier: Apache-2.0
"""The process groups of one rank of many, without the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.process_groups import GROUP_AXES


def pretended_groups(grid: RankGrid, rank: int) -> ProcessGroupCollection:
    """Return the groups of one rank of many; they cannot communicate."""
    groups = {}
    for name, axes in GROUP_AXES.items():
        members = tuple(grid.group_of(rank, axes))
        handle = object() if len(members) > 1 else None
        groups[name] = Group(name, members, members.index(rank), handle)  # type: ignore[arg-type]
    return ProcessGroupCollection(grid, rank, groups)


class IdleCommunicator:
    """A communicator that moves nothing."""

    def start(self, *tensors: object) -> None:
        """Start nothing."""

    allreduce = _allgather_base = _reduce_scatter_base = alltoall_base = start


def groups_over(
    communicator: Callable[[list[int]], object], grid: RankGrid, rank: int = 0
) -> ProcessGroupCollection:
    """Return the groups of one rank, over communicators of the test.

    Args:
        communicator: returns the stand-in for the process group of some ranks; groups with equal
            ranks share it, as in a run.
    """
    with (
        mock.patch("torch.distributed.new_group", lambda ranks, **options: communicator(ranks)),
        mock.patch("torch.distributed.get_world_size", return_value=grid.world_size),
    ):
        return ProcessGroupCollection.create(grid, rank=rank)

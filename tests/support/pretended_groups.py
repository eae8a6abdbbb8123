# SPDX-License-Identifier: Apache-2.0
"""The process groups of one rank of many, without the others."""

from __future__ import annotations

from megatron.core.process_groups import GROUP_AXES, Group, ProcessGroupCollection, RankGrid


def pretended_groups(grid: RankGrid, rank: int) -> ProcessGroupCollection:
    """Return the groups of one rank of many, over which nothing can be sent."""
    groups = {}
    for name, axes in GROUP_AXES.items():
        members = tuple(grid.group_of(rank, axes))
        handle = object() if len(members) > 1 else None
        groups[name] = Group(name, members, members.index(rank), handle)  # type: ignore[arg-type]
    return ProcessGroupCollection(grid, rank, groups)

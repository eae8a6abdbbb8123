# SPDX-License-Identifier: Apache-2.0
"""The process groups of a parallel run, built once from its `RankGrid`.

`ProcessGroupCollection` is the one object that calls `torch.distributed.new_group`; an entry script
builds it and passes it (or single `Group`s of it) down. There is no other way to find a group.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from megatron.core.rank_grid import (
    DENSE_AXES,
    EXPERT_AXES,
    GROUP_AXES,
    GROUP_NAMES,
    TIED,
    RankGrid,
)

__all__ = [
    "DENSE_AXES",
    "EXPERT_AXES",
    "GROUP_AXES",
    "GROUP_NAMES",
    "TIED",
    "TRAFFIC",
    "Group",
    "ProcessGroupCollection",
    "RankGrid",
]

#: Groups whose communicators carry one kind of traffic only, and which kind: what is queued on one
#: communicator runs in turn, so a gather must not stand behind the reduction of a large bucket.
TRAFFIC: Mapping[str, str] = MappingProxyType(
    {
        "lanes": "gradients",
        "inner_lanes": "gradients",
        "expert_lanes": "gradients",
        "expert_inner_lanes": "gradients",
        "gather_lanes": "weights",
        "expert_gather_lanes": "weights",
        "etp_ep": "tokens of experts",
        "pp": "stages",
        "pp_backward": "stages, backward",
    }
)


@dataclass(frozen=True)
class Group:
    """One process group as seen from one of its members.

    `rank` and `size` are local to the group; `ranks` are global. A group of size 1 has no handle,
    and every collective of `megatron.core.comm` is the identity on it, so one process runs the same
    code as many. `observers` (shared by the groups of one collection) are called with a record of
    every collective before it starts; what they return, if not None, is entered as a context while
    its caller waits. The last of `links` (shared likewise) takes every `Transfer` in place of the
    real communicator, and returns what waits for it.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    observers: list[Callable[[object], Any]] = field(
        default_factory=list, repr=False, compare=False
    )
    links: list[Callable[[Any], Any]] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.ranks):
            raise ValueError(f"group {self.name}: local rank {self.rank} of {len(self.ranks)}")
        if len(self.ranks) > 1 and self.handle is None:
            raise ValueError(f"group {self.name} of {len(self.ranks)} ranks needs a process group")

    @property
    def size(self) -> int:
        return len(self.ranks)

    @staticmethod
    def single(name: str = "single", global_rank: int = 0) -> Group:
        """Return the group of one rank, on which collectives are the identity."""
        return Group(name, (global_rank,), 0)


@dataclass(frozen=True)
class ProcessGroupCollection:
    """All groups of one rank: `groups["tp"]`, `groups["lanes"]` …, with the grid they came from.

    Build with `create` (many processes) or `single` (one). Frozen; nothing is looked up anywhere
    else.
    """

    grid: RankGrid
    rank: int
    groups: Mapping[str, Group]
    observers: list[Callable[[object], Any]] = field(
        default_factory=list, repr=False, compare=False
    )
    links: list[Callable[[Any], Any]] = field(default_factory=list, repr=False, compare=False)

    def __getitem__(self, name: str) -> Group:
        """Return a group by name. Raises ValueError if the collection has no such group."""
        if name not in self.groups:
            raise ValueError(f"no group {name!r}: this collection has {', '.join(self.groups)}")
        return self.groups[name]

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of this rank on every axis."""
        return self.grid.coordinates(self.rank)

    @staticmethod
    def single() -> ProcessGroupCollection:
        """Return the collection of a single process; needs no torch.distributed."""
        return ProcessGroupCollection.create(RankGrid(world_size=1), rank=0)

    @staticmethod
    def create(
        grid: RankGrid,
        *,
        rank: int,
        timeout_seconds: float = 600.0,
        names: tuple[str, ...] | None = None,
    ) -> ProcessGroupCollection:
        """Create every named group, in the same order on every rank (collective over the world).

        Groups of equal ranks share one communicator if they carry the same kind of `TRAFFIC`, so
        that gradients, weights and all the rest never queue behind each other. Groups of one rank
        create none.

        Args:
            grid: the layout; `grid.world_size` must be the size of the initialised world if above
                1.
            rank: this process's global rank.
            timeout_seconds: how long a collective may wait for a peer before it raises.
            names: which of `GROUP_NAMES` and the grid's `replica_names` to create, None for all;
                asking for another later is an error.

        Raises:
            ValueError: unknown name, or a world of another size than the grid's.
        """
        if grid.world_size > 1 and dist.get_world_size() != grid.world_size:
            raise ValueError(
                f"the grid is for {grid.world_size} ranks but the world has {dist.get_world_size()}"
            )
        observers: list[Callable[[object], Any]] = []
        links: list[Callable[[Any], Any]] = []
        made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        groups: dict[str, Group] = {}
        timeout = datetime.timedelta(seconds=timeout_seconds)
        for name in (*GROUP_NAMES, *grid.replica_names) if names is None else names:
            for members in grid.named_ranks(name):
                ranks = tuple(sorted(members)) if name == "world" else tuple(members)
                key = (TRAFFIC.get(name, "activations"), ranks)
                if len(ranks) > 1 and key not in made:
                    made[key] = dist.new_group(list(ranks), timeout=timeout)
                if rank in ranks:
                    groups[name] = Group(
                        name, ranks, ranks.index(rank), made.get(key), observers, links
                    )
        return ProcessGroupCollection(grid, rank, MappingProxyType(groups), observers, links)

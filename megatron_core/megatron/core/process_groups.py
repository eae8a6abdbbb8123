# SPDX-License-Identifier: Apache-2.0
"""Rank arithmetic of a parallel run, and the process groups built from it once.

`RankGrid` is pure arithmetic: the sizes of every axis, and from them the ranks of any set of axes.
It is tested without processes. `ProcessGroupCollection` is the one object that calls
`torch.distributed.new_group`; an entry script builds it and passes it (or single `Group`s of it)
down. There is no other way to find a group.

Two factorisations of one world (distributed.md 1.1):

    dense:   tp · gtp · cp · dp · pp          leftmost varies fastest
    expert:  etp · ep · egtp · edp · pp

`dp` alone is ambiguous, so two names are used throughout: `replicate` (dp: the ranks that hold the
same weights and optimizer state when nothing is sharded over data) and `lanes` (gtp × cp × dp: the
ranks that see different tokens).
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

DENSE_AXES = ("tp", "gtp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "egtp", "edp", "pp")

#: Every group a collection offers, by name, with the axes that it spans. Creation follows this
#: order on every rank, which is what makes `new_group` safe.
GROUP_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lanes": ("gtp", "cp", "dp"),
        "dp_cp": ("cp", "dp"),
        "replicate": ("dp",),
        "dp": ("dp",),
        "cp": ("cp",),
        "tp": ("tp",),
        "gtp": ("gtp",),
        "pp": ("pp",),
        "tp_cp": ("tp", "cp"),
        "model": ("tp", "pp"),
        "etp": ("etp",),
        "ep": ("ep",),
        "egtp": ("egtp",),
        "edp": ("edp",),
        "etp_ep": ("etp", "ep"),
        "expert_lanes": ("egtp", "edp"),
        "expert_model": ("etp", "ep", "pp"),
        "world": ("tp", "gtp", "cp", "dp", "pp"),
    }
)

#: The group of the first and the last pipeline stage: the owners of a weight that both use. It is
#: no product of axes; ranks of the stages between have no such group.
TIED = "tied"

GROUP_NAMES = (*GROUP_AXES, TIED)


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Arrange `world_size` ranks on the dense and on the expert axes.

    Args:
        world_size: number of ranks.
        tp, gtp, cp, pp: dense degrees; `dp` = world_size / (tp·gtp·cp·pp) is derived.
        etp: expert tensor-parallel degree; None means tp.
        ep, egtp: expert degrees; `edp` = world_size / (etp·ep·egtp·pp) is derived.

    Raises:
        ValueError: every degree that is not positive and every product that does not divide, in one
            message.
    """

    world_size: int
    tp: int = 1
    gtp: int = 1
    cp: int = 1
    pp: int = 1
    etp: int | None = None
    ep: int = 1
    egtp: int = 1

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """List everything that makes this layout impossible, with its mend; empty if it is fine."""
        degrees = {a: getattr(self, a) for a in ("tp", "gtp", "cp", "pp", "etp", "ep", "egtp")}
        found = [
            f"{axis} size is {size}: use a positive integer"
            for axis, size in {"world": self.world_size, **degrees}.items()
            if size is not None and size < 1
        ]
        if found:
            return found
        for product in (("tp", "gtp", "cp", "pp"), ("etp", "ep", "egtp", "pp")):
            total = math.prod(degrees[a] or 1 for a in product)
            if self.world_size % total:
                shown = " x ".join(f"{a}={degrees[a]}" for a in product)
                found.append(
                    f"{shown} = {total} ranks do not divide the world of {self.world_size}: "
                    f"start a multiple of {total} processes or lower a degree"
                )
        return found

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.gtp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world_size // ((self.etp or self.tp) * self.ep * self.egtp * self.pp)

    def size(self, axis: str) -> int:
        """Return the degree of one axis. Raises ValueError for a name that is no axis."""
        if axis not in DENSE_AXES and axis not in EXPERT_AXES:
            raise ValueError(f"unknown axis {axis!r}: one of {', '.join(DENSE_AXES + EXPERT_AXES)}")
        return int(getattr(self, axis))

    def _order(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the factorisation (dense or expert) that holds all of `axes`."""
        for axis in axes:
            self.size(axis)
        for order in (DENSE_AXES, EXPERT_AXES):
            if set(axes) <= set(order):
                return order
        raise ValueError(f"axes {axes} mix the dense and the expert grid: name axes of one of them")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of global `rank` on every axis, dense and expert."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size}")
        found = {}
        for order in (DENSE_AXES, EXPERT_AXES):
            rest = rank
            for axis in order:
                rest, found[axis] = divmod(rest, self.size(axis))
        return found

    def rank_of(self, **coordinates: int) -> int:
        """Return the global rank at coordinates of one factorisation; absent axes are 0."""
        rank, stride = 0, 1
        for axis in self._order(tuple(coordinates)):
            index = coordinates.get(axis, 0)
            if not 0 <= index < self.size(axis):
                raise ValueError(f"{axis} coordinate {index} is outside 0..{self.size(axis) - 1}")
            rank += index * stride
            stride *= self.size(axis)
        return rank

    def ranks(self, axes: tuple[str, ...]) -> list[list[int]]:
        """List the groups that span `axes`: all other axes fixed, `axes` enumerated in grid order.

        Returns one list of global ranks per group; together they partition the world.
        """
        order = self._order(axes)
        inner = [a for a in order if a in axes]
        outer = [a for a in order if a not in axes]
        groups = []
        for fixed in self._points(outer):
            groups.append([self.rank_of(**fixed, **free) for free in self._points(inner)])
        return groups

    def named_ranks(self, name: str) -> list[list[int]]:
        """List the groups called `name`. Raises ValueError for a name not in `GROUP_NAMES`."""
        if name == TIED:
            return [sorted({stages[0], stages[-1]}) for stages in self.ranks(("pp",))]
        if name not in GROUP_AXES:
            raise ValueError(f"unknown group {name!r}: one of {', '.join(GROUP_NAMES)}")
        return self.ranks(GROUP_AXES[name])

    def group_of(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        """Return the ranks of the group over `axes` that holds `rank`."""
        at = self.coordinates(rank)
        order = self._order(axes)
        fixed = {a: at[a] for a in order if a not in axes}
        return [
            self.rank_of(**fixed, **free) for free in self._points([a for a in order if a in axes])
        ]

    def _points(self, axes: list[str]) -> Iterator[dict[str, int]]:
        """Enumerate coordinates of `axes`, the first axis fastest."""
        for values in itertools.product(*(range(self.size(a)) for a in reversed(axes))):
            yield dict(zip(reversed(axes), values, strict=True))


@dataclass(frozen=True)
class Group:
    """One process group as seen from one of its members.

    `rank` and `size` are local to the group; `ranks` are global. A group of size 1 has no handle,
    and every collective of `megatron.core.comm` is the identity on it, so one process runs the same
    code as many. `observers` (shared by the groups of one collection) are called with a record of
    every collective before it starts; what they return, if not None, is entered as a context while
    its caller waits.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    observers: list[Callable[[object], Any]] = field(
        default_factory=list, repr=False, compare=False
    )

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
        names: tuple[str, ...] = GROUP_NAMES,
    ) -> ProcessGroupCollection:
        """Create every named group, in the same order on every rank (collective over the world).

        Groups of equal ranks share one communicator, except `lanes`, which keeps its own so that
        gradient traffic never queues behind another group's. Groups of one rank create none.

        Args:
            grid: the layout; `grid.world_size` must be the size of the initialised world if above
                1.
            rank: this process's global rank.
            timeout_seconds: how long a collective may wait for a peer before it raises.
            names: which of `GROUP_NAMES` to create; asking for another later is an error.

        Raises:
            ValueError: unknown name, or a world of another size than the grid's.
        """
        if grid.world_size > 1 and dist.get_world_size() != grid.world_size:
            raise ValueError(
                f"the grid is for {grid.world_size} ranks but the world has {dist.get_world_size()}"
            )
        observers: list[Callable[[object], Any]] = []
        made: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}
        groups: dict[str, Group] = {}
        timeout = datetime.timedelta(seconds=timeout_seconds)
        for name in names:
            for members in grid.named_ranks(name):
                ranks = tuple(sorted(members)) if name == "world" else tuple(members)
                key = (name == "lanes", ranks)
                if len(ranks) > 1 and key not in made:
                    made[key] = dist.new_group(list(ranks), timeout=timeout)
                if rank in ranks:
                    groups[name] = Group(name, ranks, ranks.index(rank), made.get(key), observers)
        return ProcessGroupCollection(grid, rank, MappingProxyType(groups), observers)

    def subgroups(self, name: str, size: int, *, timeout_seconds: float = 600.0) -> Group:
        """Create the sub-group of `size` consecutive members of every `name` group (collective).

        Used where an axis is larger than what it cuts: kv heads < tp leaves tp / heads replicas
        each. Returns the one that holds this rank; size 1 creates nothing.

        Raises:
            ValueError: the group does not divide into sub-groups of that size.
        """
        if size < 1 or self[name].size % size:
            raise ValueError(f"{name} of {self[name].size} ranks has no sub-groups of {size}")
        mine = None
        timeout = datetime.timedelta(seconds=timeout_seconds)
        for members in self.grid.named_ranks(name):
            for start in range(0, len(members), size):
                ranks = tuple(members[start : start + size])
                handle = dist.new_group(list(ranks), timeout=timeout) if size > 1 else None
                if self.rank in ranks:
                    at = ranks.index(self.rank)
                    mine = Group(f"{name}/{size}", ranks, at, handle, self.observers)
        assert mine is not None
        return mine

# SPDX-License-Identifier: Apache-2.0
"""Process groups of a parallel run, and the grid of its ranks.

`ProcessGroupCollection` is the one object that calls `torch.distributed.new_group`; an entry script
builds it and passes it (or single `Group`s of it) down. There is no other way to find a group.

`RankGrid` is pure arithmetic on ranks, tested without processes. Two factorisations of one world:

    dense:   tp · gtp · cp · dp_inner · dp_outer · pp          leftmost varies fastest
    expert:  etp · ep · egtp · edp_inner · edp_outer · pp

gtp (generalized tensor parallelism) and egtp, its degree for experts, are data axes that shard
weights: their ranks see different samples, and gather each weight just before it is used.

Hybrid sharding splits data parallelism in two: weights are sharded over the inner axis and
replicated over the outer one (of size `instances`, 1 by default). `dp` = dp_inner · dp_outer and
`edp` name both together.

`dp` alone is ambiguous, so the groups below have explicit names. `dense_dp` are the ranks that see
different tokens: the data-parallel ranks over which gradients are reduced (`expert_dp`: experts).
Hybrid sharding divides them into the `shard` group and the `replicate` group. `samples` (gtp × dp)
are the ranks that see different samples, since cp ranks share a sample.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

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


DENSE_AXES = ("tp", "gtp", "cp", "dp_inner", "dp_outer", "pp")
EXPERT_AXES = ("etp", "ep", "egtp", "edp_inner", "edp_outer", "pp")

#: Names for two axes together, usable wherever an axis is named.
JOINED_AXES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"dp": ("dp_inner", "dp_outer"), "edp": ("edp_inner", "edp_outer")}
)

#: Every group a collection offers, by name, with the axes that it spans. Creation follows this
#: order on every rank, which is what makes `new_group` safe.
GROUP_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dense_dp": ("gtp", "cp", "dp"),
        "dp_cp": ("cp", "dp"),
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
        "expert_dp": ("egtp", "edp"),
        "expert_model": ("etp", "ep", "pp"),
        "world": ("tp", "gtp", "cp", "dp", "pp"),
        "shard": ("gtp", "cp", "dp_inner"),
        "replicate": ("dp_outer",),
        "expert_shard": ("egtp", "edp_inner"),
        "expert_replicate": ("edp_outer",),
        "shard_gather": ("gtp", "cp", "dp_inner"),
        "expert_shard_gather": ("egtp", "edp_inner"),
        "gtp_gather": ("gtp",),
        "egtp_gather": ("egtp",),
        "samples": ("gtp", "dp"),
        "pp_backward": ("pp",),
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
        instances: size of the outer data axis of hybrid sharding (Megatron's distributed-optimizer
            instances); divides dp and edp.

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
    instances: int = 1

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """List everything that makes this layout impossible, with its fix; empty if it is fine."""
        names = ("tp", "gtp", "cp", "pp", "etp", "ep", "egtp", "instances")
        degrees = {name: getattr(self, name) for name in names}
        problems = [
            f"{axis} size is {size}: use a positive integer"
            for axis, size in {"world": self.world_size, **degrees}.items()
            if size is not None and size < 1
        ]
        if problems:
            return problems
        for axes in (("tp", "gtp", "cp", "pp"), ("etp", "ep", "egtp", "pp")):
            total = math.prod(degrees[a] or 1 for a in axes)
            if self.world_size % total:
                degrees_text = " x ".join(f"{a}={degrees[a]}" for a in axes)
                problems.append(
                    f"{degrees_text} = {total} ranks do not divide the world of {self.world_size}: "
                    f"start a multiple of {total} processes or lower a degree"
                )
        for axis, size in () if problems else (("dp", self.dp), ("edp", self.edp)):
            if size % self.instances:
                problems.append(
                    f"{self.instances} optimizer instances do not divide {axis}={size}: "
                    f"use a divisor of {size}"
                )
        return problems

    @cached_property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.gtp * self.cp * self.pp)

    @cached_property
    def edp(self) -> int:
        return self.world_size // ((self.etp or self.tp) * self.ep * self.egtp * self.pp)

    @cached_property
    def dp_inner(self) -> int:
        return self.dp // self.instances

    @property
    def dp_outer(self) -> int:
        return self.instances

    @cached_property
    def edp_inner(self) -> int:
        return self.edp // self.instances

    @property
    def edp_outer(self) -> int:
        return self.instances

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The degree of every axis."""
        names = (*DENSE_AXES, *EXPERT_AXES, *JOINED_AXES)
        return {axis: int(getattr(self, axis)) for axis in names}

    def size(self, axis: str) -> int:
        """Return the degree of one axis. Raises ValueError for a name that is no axis."""
        if (size := self.sizes.get(axis)) is None:
            raise ValueError(f"unknown axis {axis!r}: one of {', '.join(self.sizes)}")
        return size

    def _split(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return `axes` with each joined name replaced by its two axes."""
        return tuple(single for axis in axes for single in JOINED_AXES.get(axis, (axis,)))

    def _order(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the factorisation (dense or expert) that holds all of `axes`."""
        for order in (DENSE_AXES, EXPERT_AXES):
            if set(axes) <= set(order):
                return order
        for axis in axes:
            self.size(axis)
        raise ValueError(f"axes {axes} mix the dense and the expert grid: use axes of one of them")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of global `rank` on every axis, dense and expert.

        "dp" and "edp" are indices over both data axes: inner + outer · inner size.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size}")
        coordinates = {}
        for order in (DENSE_AXES, EXPERT_AXES):
            quotient = rank
            for axis in order:
                quotient, coordinates[axis] = divmod(quotient, self.sizes[axis])
        for joined, (inner, outer) in JOINED_AXES.items():
            coordinates[joined] = coordinates[inner] + coordinates[outer] * self.sizes[inner]
        return coordinates

    def rank_of(self, **coordinates: int) -> int:
        """Return the global rank at coordinates of one factorisation; absent axes are 0."""
        at: dict[str, int] = {}
        for axis, index in coordinates.items():
            if not 0 <= index < (size := self.size(axis)):
                raise ValueError(f"{axis} coordinate {index} is outside 0..{size - 1}")
            inner, outer = JOINED_AXES.get(axis, (axis, None))
            outer_index, at[inner] = divmod(index, self.sizes[inner])
            if outer is not None:
                at[outer] = outer_index
        rank, stride = 0, 1
        for axis in self._order(tuple(at)):
            index = at.get(axis, 0)
            rank += index * stride
            stride *= self.sizes[axis]
        return rank

    def ranks(self, axes: tuple[str, ...]) -> list[list[int]]:
        """List the groups that span `axes`: all other axes fixed, `axes` enumerated in grid order.

        Returns one list of global ranks per group; together they partition the world.
        """
        axes = self._split(axes)
        order = self._order(axes)
        inner = self._offsets(order, axes)
        outer = self._offsets(order, [axis for axis in order if axis not in axes])
        return [[outer_offset + offset for offset in inner] for outer_offset in outer]

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Names of the subgroups of tensor parallel groups: "tp/2" is 2 consecutive ranks of one.

        If tp exceeds the number of sharded units (kv heads), the ranks of a subgroup hold the same
        shard.
        """
        return tuple(f"tp/{n}" for n in range(2, self.tp + 1) if self.tp % n == 0)

    def named_ranks(self, name: str) -> list[list[int]]:
        """List the groups called `name`.

        Raises:
            ValueError: a name neither in `GROUP_NAMES` nor in `replica_names`.
        """
        if name in self.replica_names:
            size = int(name.removeprefix("tp/"))
            groups = self.ranks(("tp",))
            return [ranks[i : i + size] for ranks in groups for i in range(0, self.tp, size)]
        if name == TIED:
            return [sorted({stages[0], stages[-1]}) for stages in self.ranks(("pp",))]
        if name not in GROUP_AXES:
            names = (*GROUP_NAMES, *self.replica_names)
            raise ValueError(f"unknown group {name!r}: one of {', '.join(names)}")
        return self.ranks(GROUP_AXES[name])

    def group_of(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        """Return the ranks of the group over `axes` that holds `rank`."""
        at, axes = self.coordinates(rank), self._split(axes)
        order = self._order(axes)
        base_rank = self.rank_of(**{axis: at[axis] for axis in order if axis not in axes})
        return [base_rank + offset for offset in self._offsets(order, axes)]

    def _offsets(self, order: tuple[str, ...], axes: Container[str]) -> list[int]:
        """List the rank differences that `axes` of a factorisation span, its first axis fastest."""
        offsets, stride = [0], 1
        for axis in order:
            size = self.sizes[axis]
            if axis in axes:
                offsets = [step * stride + offset for step in range(size) for offset in offsets]
            stride *= size
        return offsets


#: The kind of traffic of each group whose communicator carries one kind only. Collectives on one
#: communicator run in turn, so a gather must not queue behind the reduction of a large bucket.
TRAFFIC: Mapping[str, str] = MappingProxyType(
    {
        "dense_dp": "gradients",
        "shard": "gradients",
        "expert_dp": "gradients",
        "expert_shard": "gradients",
        "shard_gather": "weights",
        "expert_shard_gather": "weights",
        "gtp": "gradients of each microbatch",
        "egtp": "gradients of each microbatch",
        "gtp_gather": "weights",
        "egtp_gather": "weights",
        "etp_ep": "tokens of experts",
        "pp": "stages",
        "pp_backward": "stages, backward",
    }
)
#: Kinds of traffic that a layer waits for before its next kernel: those of tp, cp and ep. NCCL runs
#: them on streams of high priority, so that they do not queue behind gathers and reductions.
URGENT_TRAFFIC = frozenset({"activations", "tokens of experts"})


def _backend_options(traffic: str) -> dict[str, Any]:
    """Return the additional options of `new_group` for a kind of traffic; only NCCL has any."""
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    if not is_nccl or traffic not in URGENT_TRAFFIC:
        return {}
    return {"pg_options": dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)}


@dataclass(frozen=True)
class Group:
    """One process group as seen from one of its members.

    `rank` and `size` are local to the group; `ranks` are global. A group of size 1 has no handle,
    and every collective of `megatron.core.comm` is the identity on it, so one process runs the same
    code as many. `observers` (shared by the groups of one collection) are called with a record of
    every collective before it starts; a returned context manager is entered while the caller waits.
    The last of `links` (also shared) receives every `Transfer` in place of the real communicator,
    and returns a handle to wait for it.
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

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @staticmethod
    def single(name: str = "single", global_rank: int = 0) -> Group:
        """Return the group of one rank, on which collectives are the identity."""
        return Group(name, (global_rank,), 0)


@dataclass(frozen=True)
class ProcessGroupCollection:
    """All groups of one rank: `groups["tp"]`, `groups["dense_dp"]` …, and the grid behind them.

    Build with `create` (many processes) or `single` (one). Frozen, and the only source of
    groups.
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
    def num_communicators(self) -> int:
        """Number of communicators of this rank's groups, plus torch's default group."""
        handles = {id(group.handle) for group in self.groups.values() if group.handle is not None}
        return len(handles) + 1 if handles else 0

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of this rank on every axis."""
        return self.grid.coordinates(self.rank)

    def host_group(self, name: str = "world", *, timeout_seconds: float = 600.0) -> Group:
        """Create a gloo group with the ranks of the group `name`, for collectives of CPU tensors;
        all ranks of the world call this.

        No other group shares its communicator, so it may be used while a device or another thread
        communicates, and neither delays it.

        Raises:
            ValueError: an unknown name.
        """
        timeout, group = datetime.timedelta(seconds=timeout_seconds), Group.single("hosts")
        for ranks in self.grid.named_ranks(name):
            if len(ranks) > 1:
                # On ranks outside of the group torch returns a placeholder.
                handle: Any = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
                if self.rank in ranks:
                    group = Group("hosts", tuple(ranks), ranks.index(self.rank), handle)
        return group

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
        that gradients, weights and other traffic never queue behind each other. Groups of one rank
        create none.

        Args:
            grid: the layout; `grid.world_size` must be the size of the initialised world if above
                1.
            rank: this process's global rank.
            timeout_seconds: how long a collective may wait for a peer before it raises.
            names: which of `GROUP_NAMES` and the grid's `replica_names` to create, None for all;
                the collection has no other groups.

        Raises:
            ValueError: unknown name, or a world of another size than the grid's.
        """
        if grid.world_size > 1 and dist.get_world_size() != grid.world_size:
            raise ValueError(
                f"the grid is for {grid.world_size} ranks but the world has {dist.get_world_size()}"
            )
        observers: list[Callable[[object], Any]] = []
        links: list[Callable[[Any], Any]] = []
        handles: dict[tuple[str, tuple[int, ...]], Any] = {}
        groups: dict[str, Group] = {}
        timeout = datetime.timedelta(seconds=timeout_seconds)
        for name in (*GROUP_NAMES, *grid.replica_names) if names is None else names:
            for members in grid.named_ranks(name):
                ranks = tuple(sorted(members)) if name == "world" else tuple(members)
                traffic = TRAFFIC.get(name, "activations")
                key = (traffic, ranks)
                if len(ranks) > 1 and key not in handles:
                    handles[key] = dist.new_group(
                        list(ranks), timeout=timeout, **_backend_options(traffic)
                    )
                if rank in ranks:
                    groups[name] = Group(
                        name, ranks, ranks.index(rank), handles.get(key), observers, links
                    )
        return ProcessGroupCollection(grid, rank, MappingProxyType(groups), observers, links)

# SPDX-License-Identifier: Apache-2.0
"""WeightStore: all weights of a model, declared by its layers and laid out once into flat buckets.

Building a model only declares. `materialize` then decides the layout (`layout`), allocates what
this rank stores, binds every handle and writes the initial values, each a function of (seed, name,
logical index).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.core.initialize import InitSpec, fill_
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.sharded_buffer import BufferLayout, BufferPlacement, ShardedBuffer
from megatron.core.weight_gather.bucket import Bucket
from megatron.core.weight_gather.handle import WeightHandle, WeightParameter
from megatron.core.weight_gather.layout import BucketGroups, BucketPlan, Storage, bucket_plans
from megatron.core.weight_gather.owned import HeldBox, held_boxes
from megatron.core.weight_gather.queue import Deferral, WgradQueue
from megatron.core.weight_sharding import (
    Box,
    GradientPlan,
    Placement,
    WeightSharding,
    check,
    gradient_plan,
    local_boxes,
    local_shape,
)

#: Every shard ends at a multiple of this many elements: 128 bytes of fp32, for vector loads.
_QUANTUM = 32


class WeightStore:
    """Declare weights, then lay them out.

    Args:
        groups: the process groups; their grid decides every local shape.
        seed: of the initial values.
        dtype: of the weights.
        device: where they live.
        cpu_dtype: what a CPU multiplies weights of `dtype` in: that dtype, or fp32. None is what it
            does faster; ranks that must compute alike are told (`ops.dispatch.matmul_dtype`).

    Attributes:
        storage: how they were laid out.
        placement: what of them is cut over the data lanes: nothing on a single lane. Buckets of
            which this rank has no sharers are whole, see `Bucket.placement`.
        states: fp32 tensors of the model that are no weights, by name.
        buckets: none if this rank has no weights, which also is a store.
        materialized: `materialize` has been called.
        has_engine: an engine collects the gradients.
    """

    def __init__(
        self,
        groups: ProcessGroupCollection,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        cpu_dtype: torch.dtype | None = None,
    ) -> None:
        self.groups = groups
        self.cpu_dtype = cpu_dtype
        self.seed, self.dtype, self.device = seed, dtype, torch.device(device)
        self.handles: dict[str, WeightHandle] = {}
        self.states: dict[str, torch.Tensor] = {}
        self.plans: dict[str, GradientPlan] = {}
        self.buckets: list[Bucket] = []
        self.materialized = self.has_engine = False
        self.storage = Storage()
        self.placement = Placement()
        self._deferral = Deferral()
        self._init: dict[str, InitSpec] = {}
        self._units: dict[str, str | None] = {}
        self._unit: str | None = None
        self._parts: dict[str, int] = {}
        self._part = 0

    def declare(
        self, sharding: WeightSharding, init: InitSpec, *, dtype: torch.dtype | None = None
    ) -> WeightHandle:
        """Register a weight and return its handle; the same name again is another use of the same
        weight.

        Args:
            sharding: its description.
            init: its initial values.
            dtype: of a weight that needs more than the others have; None is the store's.

        Raises:
            ValueError: a description that cannot lie on the grid, a name declared differently or
                in another part before.
        """
        if self.materialized:
            raise ValueError(
                f"{sharding.name}: the store is materialised; declare weights before that"
            )
        known = self.handles.get(sharding.name)
        if known is not None:
            if (known.sharding, known.dtype) != (sharding, dtype or self.dtype):
                raise ValueError(f"{sharding.name} is declared twice with different shardings")
            if self._parts[sharding.name] != self._part:
                raise ValueError(
                    f"{sharding.name} is declared in parts {self._parts[sharding.name]} and "
                    f"{self._part}: the uses of a weight on one rank must lie in one part"
                )
            known.uses += 1
            return known
        problems = check(sharding, self.groups.grid)
        if problems:
            raise ValueError("; ".join(problems))
        self.plans[sharding.name] = gradient_plan(sharding, self.groups.grid)
        shape = local_shape(sharding, self.groups.grid)
        handle = WeightHandle(
            sharding,
            shape,
            dtype=dtype or self.dtype,
            deferral=self._deferral,
            cpu_dtype=self.cpu_dtype,
        )
        self.handles[sharding.name] = handle
        self._init[sharding.name] = init
        self._units[sharding.name] = self._unit
        self._parts[sharding.name] = self._part
        return handle

    def declare_state(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return fp32 zeros that belong to the model, and that another rule than the optimizer's
        changes, alike on every rank of this pipeline stage: `states` has them for checkpoints.

        Raises:
            ValueError: a name that is taken.
        """
        if name in self.states or name in self.handles:
            raise ValueError(f"{name} is declared twice")
        self.states[name] = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return self.states[name]

    @property
    def state_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the same states."""
        grid = self.groups.grid
        return tuple(sorted(grid.group_of(self.groups.rank, ("tp", "gtp", "cp", "dp"))))

    @contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """Declare what follows as one unit: weights that are needed together, such as a layer's."""
        outside, self._unit = self._unit, self._unit or name
        try:
            yield
        finally:
            self._unit = outside

    @contextmanager
    def part(self, index: int) -> Iterator[None]:
        """Declare what follows as part `index` of the model: weights whose gradients are done
        together, such as those of a chunk of a pipeline. Outside of any, it is part 0.

        Raises:
            ValueError: a negative index.
        """
        if index < 0:
            raise ValueError(f"part {index} of a weight store: count parts from 0")
        outside, self._part = self._part, index
        try:
            yield
        finally:
            self._part = outside

    def materialize(self, storage: Storage | None = None) -> None:
        """Lay out, allocate and (unless a checkpoint will be loaded) initialise all weights.

        Raises:
            ValueError: that has been done.
        """
        if self.materialized:
            raise ValueError("the store is already materialised")
        self.materialized = True
        self.storage = storage = storage or Storage()
        self.placement = storage.effective(self.groups)
        plans = bucket_plans(
            self.handles.values(),
            self.plans,
            units=self._units,
            parts=self._parts,
            storage=storage,
            cut=bool(self.placement.weight),
        )
        for plan in plans:
            bucket = self._bucket(plan)
            self.buckets.append(bucket)
            for handle, member in bucket.members():
                low, high = bucket.weights.stored_range
                start, stop = max(member.start, low), min(member.stop, high)
                stored = bucket.weights.data[start - low : max(start, stop) - low]
                stored = stored if bucket.sharded else stored.view(member.shape)
                handle.param = WeightParameter.of(handle, stored)
                handle.keeps_grad = self.groups.grid.world_size == 1
                if storage.initialize:
                    self._initialize(handle)

    def give_gradients(self) -> None:
        """Leave the gradients to an engine: parameters have no `.grad` of their own any more."""
        self.has_engine = True
        for handle in self.handles.values():
            handle.keeps_grad = False

    def boxes(self, handle: WeightHandle) -> list[Box]:
        """List the boxes of logical tensors in a whole local weight."""
        return local_boxes(handle.sharding, self.groups.grid, self.groups.coordinates)

    def held(self, handle: WeightHandle) -> list[HeldBox]:
        """List the boxes of logical tensors that this rank stores, as views of its memory."""
        assert handle.param is not None, "the store must be materialised"
        return held_boxes(self, handle)

    def freeze(self, *names: str) -> None:
        """Exclude weights from training; before a data-parallel engine is built over the store.

        Raises:
            ValueError: a name that no layer declared, or a weight that has a gradient buffer.
        """
        for name in names:
            if name not in self.handles:
                raise ValueError(f"no weight {name!r} to freeze: see the names in store.handles")
            if self.handles[name].gradients is not None:
                raise ValueError(f"{name}: freeze it before building DataParallel over its store")
            self.handles[name].anchor.requires_grad_(False)

    @contextmanager
    def defer(self) -> Iterator[WgradQueue]:
        """Split backward: inside, weight gradients are queued; drain the yielded queue for them.

        Raises:
            ValueError: inside of another one.
        """
        if self._deferral.queue is not None:
            raise ValueError("defer inside defer: let one backward end before the next begins")
        self._deferral.queue = queue = WgradQueue()
        try:
            yield queue
        finally:
            self._deferral.queue = None

    @property
    def queue(self) -> WgradQueue | None:
        """Where puts go while backward is split."""
        return self._deferral.queue

    @property
    def splits(self) -> bool:
        """Whether forwards leave all weight gradients to a backward that will be split.

        It is for time and memory only: `defer` splits any backward, and gradients are the same.
        """
        return self._deferral.splits

    @splits.setter
    def splits(self, splits: bool) -> None:
        self._deferral.splits = splits

    @property
    def num_parameters(self) -> int:
        """Logical parameters of all that was declared (each weight once, no padding)."""
        return sum(math.prod(s.shape) for h in self.handles.values() for s in h.sharding.segments)

    def _bucket(self, plan: BucketPlan) -> Bucket:
        """Allocate a bucket."""
        # Weights without decay last: the optimizer then sees two ranges a bucket, not one a weight.
        handles = sorted(plan.handles, key=lambda h: not h.sharding.weight_decay)
        lanes = self.plans[handles[0].name].lanes
        # Experts may have a lane of their own on every rank, and then nobody to share with.
        placement = self.placement if self.groups[lanes].size > 1 else Placement()
        groups = BucketGroups.of(self.groups, lanes, placement)
        layout = BufferLayout.of(
            [(h.name, h.shape) for h in handles],
            parts=groups.shared.size,
            # the ranks of the outer axis may share a shard once more
            shard_quantum=_QUANTUM * groups.outer.size,
        )
        sharded = bool(placement.weight)
        weights = ShardedBuffer.empty(
            layout,
            groups.shared,
            placement=BufferPlacement.SHARDED if sharded else BufferPlacement.REPLICATED,
            dtype=handles[0].dtype,
            device=self.device,
        )
        return Bucket(
            len(self.buckets),
            plan,
            handles=handles,
            layout=layout,
            groups=groups,
            weights=weights,
            placement=placement,
        )

    def _initialize(self, handle: WeightHandle) -> None:
        for held in self.held(handle):
            fill_(
                held.tensor,
                self._init[handle.name],
                seed=self.seed,
                name=held.box.name,
                shape=held.box.shape,
                offsets=held.box.offsets,
            )

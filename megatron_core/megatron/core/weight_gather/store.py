# SPDX-License-Identifier: Apache-2.0
"""WeightStore: all weights of a model in flat buckets, and what a rank's optimizer owns of them.

Building a model only declares weights. `materialize` then decides the layout (`bucket_plans`),
allocates what this rank stores, binds every handle and writes the initial values, each a function
of (seed, name, logical index).

`OwnedRange` is the range of a bucket's weights and gradients that this rank's optimizer updates:
flat tensors and plain data about them. An optimizer thus needs to know nothing of weights, buckets
or strategies, and a checkpoint can name every element of the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from megatron.core.boxes import TensorChunk
from megatron.core.initialize import InitSpec, fill_
from megatron.core.ops.low_bit_copy import CopyDtype, LowBitCopy
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather.bucket import (
    Bucket,
    BucketGroups,
    Storage,
    WeightRange,
    bucket_plans,
)
from megatron.core.weight_gather.handle import Deferral, WeightHandle, WeightParameter, WgradQueue
from megatron.core.weight_sharding import (
    GradientPlan,
    LocalBox,
    WeightSharding,
    check,
    gradient_plan,
    local_boxes,
    local_shape,
    range_boxes,
    replica_ranks,
)


class WeightStore:
    """Declare weights, then lay them out.

    Args:
        groups: the process groups; their grid decides every local shape.
        seed: of the initial values.
        dtype: of the weights.
        device: where they live.
        cpu_dtype: what a CPU multiplies weights of `dtype` in: that dtype, or fp32. None is what it
            does faster; ranks that must agree need it explicitly (`ops.backend_choice`).
        row_tiles: multiply by weights in tiles of rows, see `ops.batch_invariant`.

    Attributes:
        storage: how they were laid out.
        sharded: some role of some weights is sharded over data-parallel ranks, gtp among them; see
            `Bucket.placement`.
        states: fp32 tensors of the model that are no weights, by name.
        optional_states: initial values of those that a checkpoint may lack.
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
        row_tiles: bool = False,
    ) -> None:
        self.groups = groups
        self.cpu_dtype, self.row_tiles = cpu_dtype, row_tiles
        self.seed, self.dtype, self.device = seed, dtype, torch.device(device)
        self.handles: dict[str, WeightHandle] = {}
        self.states: dict[str, torch.Tensor] = {}
        self.optional_states: dict[str, float] = {}
        self.plans: dict[str, GradientPlan] = {}
        self.buckets: list[Bucket] = []
        self.materialized = self.has_engine = self.sharded = False
        self.storage = Storage()
        self._stored: dict[str, tuple[Bucket, WeightRange]] = {}
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
                in another model chunk before.
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
            row_tiles=self.row_tiles,
        )
        self.handles[sharding.name] = handle
        self._init[sharding.name] = init
        self._units[sharding.name] = self._unit
        self._parts[sharding.name] = self._part
        return handle

    def declare_state(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        initial: float = 0.0,
        optional: bool = False,
    ) -> torch.Tensor:
        """Return an fp32 tensor that belongs to the model, and that another rule than the
        optimizer's changes, alike on every rank of this pipeline stage: `states` has them for
        checkpoints.

        Args:
            initial: what it is filled with.
            optional: a checkpoint may lack it, and then it keeps the initial value.

        Raises:
            ValueError: a name that is taken.
        """
        if name in self.states or name in self.handles:
            raise ValueError(f"{name} is declared twice")
        made = torch.full(shape, initial, dtype=torch.float32, device=self.device)
        self.states[name] = made
        if optional:
            self.optional_states[name] = initial
        return made

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
        strategy, grid = storage.effective(self.groups), self.groups.grid
        self.sharded = bool(strategy.optimizer) or grid.gtp * grid.egtp > 1
        plans = bucket_plans(
            self.handles.values(),
            self.plans,
            units=self._units,
            parts=self._parts,
            storage=storage,
            strategy=strategy,
            grid=grid,
        )
        for plan in plans:
            data_group = self.plans[plan.blocks[0][0].name].data_group
            groups = BucketGroups.of(self.groups, data_group, plan.placement)
            bucket = Bucket(
                len(self.buckets), plan, groups, device=self.device, wires=storage.wires
            )
            self.buckets.append(bucket)
            for found in bucket.stored():
                handle = found.handle
                stored = bucket.data[found.at : found.at + found.stop - found.start]
                stored = stored if bucket.sharded else stored.view(handle.shape)
                handle.param = WeightParameter.of(handle, stored)
                handle.keeps_grad = self.groups.grid.world_size == 1
                self._stored[handle.name] = bucket, found
                if storage.initialize:
                    self._initialize(handle)

    def give_gradients(self) -> None:
        """Leave the gradients to an engine: parameters have no `.grad` of their own any more."""
        self.has_engine = True
        for handle in self.handles.values():
            handle.keeps_grad = False

    def tensors(self) -> list[torch.Tensor]:
        """Return what holds all weights and states."""
        return [*(bucket.data for bucket in self.buckets), *self.states.values()]

    def boxes(self, handle: WeightHandle) -> list[LocalBox]:
        """List the boxes of logical tensors in a whole local weight."""
        return local_boxes(handle.sharding, self.groups.grid, self.groups.coordinates)

    def chunks(self, handle: WeightHandle) -> list[TensorChunk]:
        """List the boxes of logical tensors that this rank stores, as views of its memory."""
        assert handle.param is not None, "the store must be materialised"
        bucket, found = self._stored[handle.name]
        if found.start == found.stop:
            return []
        flat = handle.param.detach().view(-1)
        replicas = _replicas(self, handle, bucket.placement.weight)
        return [
            TensorChunk(
                name=held.name,
                shape=held.shape,
                offsets=held.box.offsets,
                tensor=held.of(flat),
                replica_ranks=replicas[held.name],
                is_late=partial(_is_late, bucket),
            )
            for held in range_boxes(self.boxes(handle), found.start, found.stop)
        ]

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

    def _initialize(self, handle: WeightHandle) -> None:
        for chunk in self.chunks(handle):
            fill_(
                chunk.tensor,
                self._init[handle.name],
                seed=self.seed,
                name=chunk.name,
                shape=chunk.shape,
                offsets=chunk.offsets,
            )


#: Groups over which the norms of owned ranges add up.
NORM_GROUPS = ("expert_model", "model", "world")


class RangeOwner(Protocol):
    """Who fills the gradients of owned ranges and passes their updates on: an engine."""

    def check_gradients(self) -> None:
        """See that the gradients are complete. Raises ValueError."""

    def weights_updated(self) -> None:
        """Take note that an optimizer has written the weights."""


@dataclass(frozen=True, eq=False)
class OwnedRange:
    """A range of one bucket.

    Args:
        weights: [k], a view of the bucket's weights.
        gradients: [k], what this rank keeps of the bucket's gradients.
        decayed, undecayed: element ranges with and without weight decay (no padding, no frozen
            weights).
        counted: element ranges that this rank counts in norms; replicas elsewhere do not count
            them.
        boxes: the logical content.
        norm_group: one of `NORM_GROUPS`, the group over which sums of squares of `counted` add up
            to the whole, times `replicas`.
        replicas: ranks of that group that hold the same range.
        owner: the engine; None where gradients are filled by hand.
    """

    weights: torch.Tensor
    gradients: torch.Tensor
    decayed: tuple[tuple[int, int], ...]
    undecayed: tuple[tuple[int, int], ...]
    counted: tuple[tuple[int, int], ...]
    boxes: tuple[LocalBox, ...]
    norm_group: str
    replicas: int = 1
    owner: RangeOwner | None = None


def empty_range(store: WeightStore) -> OwnedRange:
    """Describe what the optimizer of a rank without trained weights updates: nothing, on the
    store's device, and yet it takes part in every sum over all ranks."""
    nothing = torch.empty(0, dtype=store.dtype, device=store.device)
    return OwnedRange(
        weights=nothing,
        gradients=nothing.float(),
        decayed=(),
        undecayed=(),
        counted=(),
        boxes=(),
        norm_group="world" if store.sharded else "model",
    )


def owned_range(
    store: WeightStore,
    bucket: Bucket,
    gradients: torch.Tensor,
) -> OwnedRange:
    """Describe what this rank's optimizer updates of a bucket.

    Args:
        gradients: of the owned range [high - low].
    """
    sharded_axes = bucket.placement.optimizer
    decayed: list[tuple[int, int]] = []
    undecayed: list[tuple[int, int]] = []
    counted: list[tuple[int, int]] = []
    boxes: list[LocalBox] = []
    grid = store.groups.grid
    for found in bucket.owned_weights():
        handle, stop = found.handle, found.at + found.stop - found.start
        if not handle.trainable:
            continue
        _extend(decayed if handle.sharding.weight_decay else undecayed, found.at, stop)
        replicas = _replicas(store, handle, sharded_axes)
        for box in range_boxes(store.boxes(handle), found.start, found.stop):
            box = replace(box, start=box.start + found.at, replica_ranks=replicas[box.name])
            if box.counted:
                _extend(counted, box.start, box.stop)
            boxes.append(box)
    sharding = bucket.handles[0].sharding
    sharded_data_axes = sharding.data_axes_of(sharded_axes)
    uncut = [axis for axis in sharding.data_axes if axis not in sharded_data_axes]
    return OwnedRange(
        weights=bucket.owned,
        gradients=gradients,
        decayed=tuple(decayed),
        undecayed=tuple(undecayed),
        counted=tuple(counted),
        boxes=tuple(boxes),
        norm_group="world" if store.sharded else "expert_model" if sharding.expert else "model",
        replicas=math.prod(grid.size(axis) for axis in uncut) if store.sharded else 1,
    )


def _is_late(bucket: Bucket) -> bool:
    """Return whether updates that other ranks made of what this rank stores have not arrived."""
    return any(b.source is not None and b.source.is_late(b) for b in bucket.blocks)


def _replicas(
    store: WeightStore, handle: WeightHandle, sharded: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold the same boxes, by logical tensor: experts have many boxes."""
    grid, rank = store.groups.grid, store.groups.rank
    return {
        segment.name: replica_ranks(
            handle.sharding, segment.name, grid=grid, rank=rank, sharded=sharded
        )
        for segment in handle.sharding.segments
    }


def _extend(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a range, or lengthen the last one if they touch."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))


@dataclass(frozen=True)
class CopyReport:
    """What copies cost and how far they are from what they were made of.

    Args:
        matrices: that were copied.
        packed: how many of them are in oneDNN's layout.
        nbytes, stored_bytes: of the copies, and of what is stored of the same matrices.
        mean_error, worst_error: of a matrix, relative, Frobenius norms.
    """

    dtype: CopyDtype
    matrices: int
    packed: int
    nbytes: int
    stored_bytes: int
    mean_error: float
    worst_error: float

    def __str__(self) -> str:
        packed = f"{self.packed} packed by oneDNN, " if self.packed else ""
        return (
            f"{self.dtype} weights: copies of {self.matrices} matrices, {packed}"
            f"{self.nbytes / 1e6:,.1f} MB "
            f"next to the stored {self.stored_bytes / 1e6:,.1f} MB; relative error of a matrix "
            f"{self.mean_error:.2%}, at most {self.worst_error:.2%}"
        )


def copy_weights(handles: Iterable[WeightHandle], dtype: CopyDtype) -> CopyReport:
    """Give matrices a copy of what they hold now, which products outside of autograd use from here
    on. It does not follow updates: copy again after them.

    Raises:
        ValueError: a weight is not on a CPU, or is stored in the copy's dtype.
    """
    found = list(dict.fromkeys(handles))
    errors, packed, nbytes, stored = [], 0, 0, 0
    for handle in found:
        weight = handle.get()
        if weight.device.type != "cpu":
            raise ValueError(
                f"--weights-dtype {dtype} multiplies on a CPU, the model is on "
                f"{weight.device.type}: drop it, or give --device cpu"
            )
        if dtype == "bf16" and weight.dtype is torch.bfloat16:
            raise ValueError("--weights-dtype bf16: the weights are bf16 already: drop it")
        handle.copy = LowBitCopy(weight, dtype, cpu_dtype=handle.cpu_dtype)
        errors.append(handle.copy.error(weight))
        packed += handle.copy.packed
        nbytes, stored = nbytes + handle.copy.nbytes, stored + weight.nbytes
    return CopyReport(
        dtype,
        matrices=len(found),
        packed=packed,
        nbytes=nbytes,
        stored_bytes=stored,
        mean_error=sum(errors) / max(1, len(errors)),
        worst_error=max(errors, default=0),
    )

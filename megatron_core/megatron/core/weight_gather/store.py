# SPDX-License-Identifier: Apache-2.0
"""WeightStore: all weights of a model, declared by its layers and laid out once into flat buckets.

Building a model only declares. `materialize` then decides the layout: buckets of about
`bucket_bytes` in reverse order of declaration (backward's order, so that early buckets fill first),
allocates them, binds every handle and writes the initial values, each a function of (seed, name,
logical index).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.initialize import InitSpec, fill_
from megatron.core.process_groups import Group, ProcessGroupCollection
from megatron.core.sharded_buffer import BufferLayout, BufferPlacement, ShardedBuffer
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_gather.queue import WgradQueue
from megatron.core.weight_sharding import (
    Box,
    GradientPlan,
    WeightSharding,
    check,
    gradient_plan,
    local_boxes,
    local_shape,
)


@dataclass
class Bucket:
    """Weights that lie, and whose gradients are reduced, together."""

    index: int
    handles: list[WeightHandle]
    layout: BufferLayout
    group: Group
    weights: ShardedBuffer


class WeightStore:
    """Declare weights, then lay them out.

    Args:
        groups: the process groups; their grid decides every local shape.
        seed: of the initial values.
        dtype: of the weights.
        device: where they live.
    """

    def __init__(
        self,
        groups: ProcessGroupCollection,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.groups = groups
        self.seed, self.dtype, self.device = seed, dtype, torch.device(device)
        self.handles: dict[str, WeightHandle] = {}
        self.plans: dict[str, GradientPlan] = {}
        self.buckets: list[Bucket] = []
        self._init: dict[str, InitSpec] = {}

    def declare(self, sharding: WeightSharding, init: InitSpec) -> WeightHandle:
        """Register a weight and return its handle; the same name again is another use of the same
        weight.

        Raises:
            ValueError: a description that cannot lie on the grid, or a name declared differently
                before.
        """
        if self.buckets:
            raise ValueError(
                f"{sharding.name}: the store is materialised; declare weights before that"
            )
        known = self.handles.get(sharding.name)
        if known is not None:
            if known.sharding != sharding:
                raise ValueError(f"{sharding.name} is declared twice with different shardings")
            known.uses += 1
            return known
        problems = check(sharding, self.groups.grid)
        if problems:
            raise ValueError("; ".join(problems))
        self.plans[sharding.name] = gradient_plan(sharding, self.groups.grid)
        handle = WeightHandle(sharding, local_shape(sharding, self.groups.grid))
        self.handles[sharding.name] = handle
        self._init[sharding.name] = init
        return handle

    def materialize(self, *, bucket_bytes: int = 160_000_000, initialize: bool = True) -> None:
        """Lay out, allocate and (unless a checkpoint will be loaded) initialise all weights.

        Args:
            bucket_bytes: fp32 gradient bytes after which a bucket closes; a weight is never split.
            initialize: write initial values; otherwise zeros.
        """
        if self.buckets:
            raise ValueError("the store is already materialised")
        for handles in self._fill_buckets(bucket_bytes):
            group = self.groups[self.plans[handles[0].name].lanes]
            # Weights without decay last: the optimizer then sees two ranges a bucket, not one a
            # weight.
            handles.sort(key=lambda h: not h.sharding.weight_decay)
            layout = BufferLayout.of([(h.name, h.shape) for h in handles], parts=group.size)
            weights = ShardedBuffer.empty(
                layout,
                group,
                placement=BufferPlacement.REPLICATED,
                dtype=self.dtype,
                device=self.device,
            )
            self.buckets.append(Bucket(len(self.buckets), handles, layout, group, weights))
            for handle, member in zip(handles, layout.members, strict=True):
                handle.param = nn.Parameter(weights.view(member))
                if initialize:
                    self._initialize(handle)

    def boxes(self, handle: WeightHandle) -> list[Box]:
        """List the boxes of logical tensors that this rank's local weight holds."""
        return local_boxes(handle.sharding, self.groups.grid, self.groups.coordinates)

    def logical_names(self) -> list[str]:
        """Return the names of all logical weights, the same on every rank."""
        return [s.name for handle in self.handles.values() for s in handle.sharding.segments]

    def freeze(self, *names: str) -> None:
        """Exclude weights from training; before a data-parallel engine is built over the store.

        Raises:
            ValueError: a name that no layer declared, or a weight that has a gradient buffer.
        """
        for name in names:
            if name not in self.handles:
                raise ValueError(f"no weight {name!r} to freeze: see the names in store.handles")
            if self.handles[name].slot is not None:
                raise ValueError(f"{name}: freeze it before building DataParallel over its store")
            self.handles[name].anchor.requires_grad_(False)

    @contextmanager
    def defer(self) -> Iterator[WgradQueue]:
        """Split backward: inside, weight gradients are queued; drain the yielded queue for them."""
        queue = WgradQueue()
        for handle in self.handles.values():
            handle.queue = queue
        try:
            yield queue
        finally:
            for handle in self.handles.values():
                handle.queue = None

    @property
    def num_parameters(self) -> int:
        """Logical parameters of the whole model (each weight once, no padding)."""
        return sum(math.prod(s.shape) for h in self.handles.values() for s in h.sharding.segments)

    def _fill_buckets(self, bucket_bytes: int) -> list[list[WeightHandle]]:
        """Split the weights into buckets, in reverse order of declaration, by lane group."""
        full: list[list[WeightHandle]] = []
        opened: dict[str, tuple[list[WeightHandle], int]] = {}
        for handle in reversed(self.handles.values()):
            lanes = self.plans[handle.name].lanes
            members, size = opened.get(lanes, ([], 0))
            members.append(handle)
            size += 4 * math.prod(handle.shape)
            opened[lanes] = (members, size)
            if size >= bucket_bytes:
                full.append(members)
                del opened[lanes]
        return full + [members for members, _ in opened.values()]

    def _initialize(self, handle: WeightHandle) -> None:
        flat = handle.get().view(-1)
        for box in self.boxes(handle):
            fill_(
                flat[box.start : box.start + box.numel].view(box.sizes),
                self._init[handle.name],
                seed=self.seed,
                name=box.name,
                shape=box.shape,
                offsets=box.offsets,
            )

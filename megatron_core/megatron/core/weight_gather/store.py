# SPDX-License-Identifier: Apache-2.0
"""WeightStore: all weights of a model in flat buckets, and the ranges that an optimizer updates.

Building a model only declares weights. `materialize` then decides the layout (`bucket_plans`),
allocates this rank's storage, attaches every handle and writes the initial values, each a function
of (seed, name, logical index).

`OwnedRange` is the range of a bucket's weights and gradients that this rank's optimizer updates:
flat tensors and plain data about them. The optimizer thus does not depend on handles, buckets or
strategies, and a checkpoint can name every element of the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from megatron.core.boxes import TensorChunk
from megatron.core.initialize import InitSpec, fill_
from megatron.core.ops.matmul.low_bit import CopyDtype, LowBitCopy
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
        device: of the weights.
        cpu_dtype: dtype of products on a CPU: `dtype`, or fp32. None chooses the faster one, which
            may differ between machines; ranks that must compute the same bits set it
            (`ops.backend_choice.matmul_dtype`).
        row_tiles: multiply by weights in tiles of rows, see `ops.matmul.batch_invariant`.

    Attributes:
        storage: the options of the layout.
        sharded: weights, gradients or optimizer state of some weight are sharded over data-parallel
            or gtp ranks; see `Bucket.placement`.
        states: fp32 tensors of the model other than weights, by name.
        optional_states: initial values of the states that a checkpoint may lack.
        buckets: empty on a rank without weights.
        materialized: `materialize` has been called.
        has_engine: a data-parallel engine collects the gradients.
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
        self._model_chunks: dict[str, int] = {}
        self._model_chunk = 0

    def declare(
        self, sharding: WeightSharding, init: InitSpec, *, dtype: torch.dtype | None = None
    ) -> WeightHandle:
        """Register a weight and return its handle; a repeated name is another use of the weight.

        Args:
            sharding: the description of the weight.
            init: its initial values.
            dtype: of a weight that needs a higher precision; None is the dtype of the store.

        Raises:
            ValueError: a description that does not fit the grid, or a name that was declared
                differently or in another model chunk.
        """
        if self.materialized:
            raise ValueError(
                f"{sharding.name}: the store is materialized; declare weights before that"
            )
        handle = self.handles.get(sharding.name)
        if handle is not None:
            if (handle.sharding, handle.dtype) != (sharding, dtype or self.dtype):
                raise ValueError(f"{sharding.name} is declared twice with different shardings")
            if self._model_chunks[sharding.name] != self._model_chunk:
                raise ValueError(
                    f"{sharding.name} is declared in model chunks "
                    f"{self._model_chunks[sharding.name]} and {self._model_chunk}: the uses of a "
                    "weight on one rank must lie in one model chunk"
                )
            handle.uses += 1
            return handle
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
        self._model_chunks[sharding.name] = self._model_chunk
        return handle

    def declare_state(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        initial: float = 0.0,
        optional: bool = False,
    ) -> torch.Tensor:
        """Return an fp32 tensor of the model that the optimizer does not update, such as a router
        bias. It has the same values on every rank of this pipeline stage; checkpoints save
        `states`.

        Args:
            name: of the state.
            shape: of the state.
            initial: its initial value.
            optional: a checkpoint may lack it; then it keeps the initial value.

        Raises:
            ValueError: the name is already declared.
        """
        if name in self.states or name in self.handles:
            raise ValueError(f"{name} is declared twice")
        state = torch.full(shape, initial, dtype=torch.float32, device=self.device)
        self.states[name] = state
        if optional:
            self.optional_states[name] = initial
        return state

    @property
    def state_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the same states."""
        grid = self.groups.grid
        return tuple(sorted(grid.group_of(self.groups.rank, ("tp", "gtp", "cp", "dp"))))

    @contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """Declare weights inside as one unit: they are used together, such as those in a layer."""
        enclosing, self._unit = self._unit, self._unit or name
        try:
            yield
        finally:
            self._unit = enclosing

    @contextmanager
    def model_chunk(self, index: int) -> Iterator[None]:
        """Declare weights inside as model chunk `index` of an interleaved pipeline, whose gradients
        are complete together. Weights declared outside belong to model chunk 0.

        Raises:
            ValueError: a negative index.
        """
        if index < 0:
            raise ValueError(f"model chunk {index} of a weight store: count model chunks from 0")
        enclosing, self._model_chunk = self._model_chunk, index
        try:
            yield
        finally:
            self._model_chunk = enclosing

    def materialize(self, storage: Storage | None = None) -> None:
        """Lay out, allocate and (unless a checkpoint will be loaded) initialise all weights.

        Raises:
            ValueError: the store is already materialised.
        """
        if self.materialized:
            raise ValueError("the store is already materialized")
        self.materialized = True
        self.storage = storage = storage or Storage()
        strategy, grid = storage.effective(self.groups), self.groups.grid
        self.sharded = bool(strategy.optimizer) or grid.gtp * grid.egtp > 1
        plans = bucket_plans(
            self.handles.values(),
            self.plans,
            units=self._units,
            model_chunks=self._model_chunks,
            storage=storage,
            strategy=strategy,
            grid=grid,
        )
        for plan in plans:
            rank_axes = self.plans[plan.blocks[0][0].name].data_group
            groups = BucketGroups.of(self.groups, rank_axes, plan.placement)
            bucket = Bucket(
                len(self.buckets), plan, groups, device=self.device, formats=storage.gather_formats
            )
            self.buckets.append(bucket)
            for stored_range in bucket.stored_weights():
                handle = stored_range.handle
                numel = stored_range.stop - stored_range.start
                stored = bucket.data[stored_range.offset : stored_range.offset + numel]
                # A view: the optimizer and checkpoints write the bucket, and never the parameter.
                stored = stored if bucket.sharded else stored.view(handle.shape)
                handle.param = WeightParameter.of(handle, stored)
                # Several ranks need an engine, which reduces gradients.
                handle.uses_param_grad = self.groups.grid.world_size == 1
                self._stored[handle.name] = bucket, stored_range
                if storage.initialize:
                    self._initialize(handle)

    def disable_param_grads(self) -> None:
        """Accumulate gradients in an engine's buffers: parameters no longer have a `.grad`."""
        self.has_engine = True
        for handle in self.handles.values():
            handle.uses_param_grad = False

    def tensors(self) -> list[torch.Tensor]:
        """Return the flat tensors of all weights, and all states."""
        return [*(bucket.data for bucket in self.buckets), *self.states.values()]

    def boxes(self, handle: WeightHandle) -> list[LocalBox]:
        """List the boxes of logical tensors in a whole local weight."""
        return local_boxes(handle.sharding, self.groups.grid, self.groups.coordinates)

    def chunks(self, handle: WeightHandle) -> list[TensorChunk]:
        """List the boxes of logical tensors that this rank stores, as views of its memory."""
        assert handle.param is not None, "the store must be materialized"
        bucket, stored_range = self._stored[handle.name]
        if stored_range.start == stored_range.stop:
            return []
        # Views of the storage: loading a checkpoint writes the weights in place.
        flat = handle.param.detach().view(-1)
        replicas = _replicas(self, handle, bucket.placement.weight)
        return [
            TensorChunk(
                name=box.name,
                shape=box.shape,
                offsets=box.box.offsets,
                tensor=box.of(flat),
                replica_ranks=replicas[box.name],
                is_late=partial(_is_stale, bucket),
            )
            for box in range_boxes(self.boxes(handle), stored_range.start, stored_range.stop)
        ]

    def freeze(self, *names: str) -> None:
        """Exclude weights from training; before a data-parallel engine is built over the store.

        Raises:
            ValueError: a name that no layer declared, or a weight that has a gradient buffer.
        """
        # After an engine is built the weight has a main_grad, and other ranks expect its gradient.
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
            ValueError: `defer` is already active.
        """
        if self._deferral.queue is not None:
            raise ValueError("nested defer: end one backward before the next begins")
        self._deferral.queue = queue = WgradQueue()
        try:
            yield queue
        finally:
            self._deferral.queue = None

    @property
    def queue(self) -> WgradQueue | None:
        """The queue of deferred weight gradients while backward is split, else None."""
        return self._deferral.queue

    @property
    def splits(self) -> bool:
        """Whether forward leaves all weight gradients to a backward that will be split.

        This affects time and memory only: `defer` splits any backward, with the same gradients.
        """
        return self._deferral.splits

    @splits.setter
    def splits(self, splits: bool) -> None:
        self._deferral.splits = splits

    @property
    def num_parameters(self) -> int:
        """Logical parameters of all declared weights (each weight once, no padding)."""
        shardings = (handle.sharding for handle in self.handles.values())
        return sum(math.prod(w.shape) for sharding in shardings for w in sharding.sub_weights)

    def _initialize(self, handle: WeightHandle) -> None:
        # Values depend on logical indices, so that every sharding starts from the same weights.
        for chunk in self.chunks(handle):
            fill_(
                chunk.tensor,
                self._init[handle.name],
                seed=self.seed,
                name=chunk.name,
                shape=chunk.shape,
                offsets=chunk.offsets,
            )


#: Groups over which sums of squares of owned ranges are all-reduced for a norm.
NORM_GROUPS = ("expert_model", "model", "world")


class RangeOwner(Protocol):
    """The engine that computes the gradients of owned ranges and all-gathers their updates."""

    def check_gradients(self) -> None:
        """Check that the gradients are complete. Raises ValueError."""

    def weights_updated(self) -> None:
        """Record that an optimizer has written the weights."""


@dataclass(frozen=True, eq=False)
class OwnedRange:
    """A range of one bucket.

    Args:
        weights: [k], a view of the bucket's weights.
        gradients: [k], the reduced gradients of these weights.
        decayed, undecayed: element ranges with and without weight decay, without padding and frozen
            weights.
        counted: element ranges that this rank counts in norms; its replicas do not count them.
        boxes: the boxes of logical tensors in the range.
        norm_group: one of `NORM_GROUPS`: the all-reduced sum of squares of `counted` over this
            group is the square of the norm, times `replicas`.
        replicas: number of ranks of this group that hold the same range.
        owner: the engine; None if gradients are filled without an engine.
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
    """Return an empty range for a rank without trained weights, whose optimizer still takes part in
    the all-reduces of norms."""
    weights = torch.empty(0, dtype=store.dtype, device=store.device)
    return OwnedRange(
        weights=weights,
        gradients=weights.float(),
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
    """Return the range of a bucket that this rank's optimizer updates.

    Args:
        store: the store of the bucket.
        bucket: a bucket with trained weights.
        gradients: gradients of the owned range [high - low].
    """
    sharded_axes = bucket.placement.optimizer
    decayed: list[tuple[int, int]] = []
    undecayed: list[tuple[int, int]] = []
    counted: list[tuple[int, int]] = []
    boxes: list[LocalBox] = []
    grid = store.groups.grid
    for owned in bucket.owned_weights():
        handle, stop = owned.handle, owned.offset + owned.stop - owned.start
        if not handle.trainable:
            continue
        _extend(decayed if handle.sharding.weight_decay else undecayed, owned.offset, stop)
        replicas = _replicas(store, handle, sharded_axes)
        for box in range_boxes(store.boxes(handle), owned.start, owned.stop):
            box = replace(box, start=box.start + owned.offset, replica_ranks=replicas[box.name])
            # A weight replicated over tp or cp is counted once in a norm.
            if box.counted:
                _extend(counted, box.start, box.stop)
            boxes.append(box)
    sharding = bucket.handles[0].sharding
    shard_axes = sharding.data_axes_of(sharded_axes)
    replicate_axes = [axis for axis in sharding.data_axes if axis not in shard_axes]
    return OwnedRange(
        weights=bucket.owned,
        gradients=gradients,
        decayed=tuple(decayed),
        undecayed=tuple(undecayed),
        counted=tuple(counted),
        boxes=tuple(boxes),
        norm_group="world" if store.sharded else "expert_model" if sharding.expert else "model",
        replicas=math.prod(grid.size(axis) for axis in replicate_axes) if store.sharded else 1,
    )


def _is_stale(bucket: Bucket) -> bool:
    """Return whether the storage of a bucket lacks updates that other ranks have made."""
    return any(b.gatherer is not None and b.gatherer.is_stale(b) for b in bucket.blocks)


def _replicas(
    store: WeightStore, handle: WeightHandle, sharded: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks with the same boxes, once per logical tensor: an expert weight has many."""
    grid, rank = store.groups.grid, store.groups.rank
    return {
        segment.name: replica_ranks(
            handle.sharding, segment.name, grid=grid, rank=rank, sharded=sharded
        )
        for segment in handle.sharding.sub_weights
    }


def _extend(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a range, or extend the last range if they are adjacent."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))


@dataclass(frozen=True)
class CopyReport:
    """Size and error of low-precision copies of matrices.

    Args:
        dtype: of the copies.
        matrices: number of copied matrices.
        packed: number of copies in oneDNN's layout.
        nbytes, stored_bytes: bytes of the copies, and bytes of the same matrices in the store.
        mean_error, worst_error: relative error of a matrix in the Frobenius norm.
    """

    dtype: CopyDtype
    matrices: int
    packed: int
    nbytes: int
    stored_bytes: int
    mean_error: float
    worst_error: float

    def __str__(self) -> str:
        error = "the copies are exact"
        if self.worst_error:
            error = (
                f"relative error of a matrix {self.mean_error:.2%}, at most {self.worst_error:.2%}"
            )
        packed = f"{self.packed} packed by oneDNN, " if self.packed else ""
        return (
            f"{self.dtype} weights: copies of {self.matrices} matrices, "
            f"{packed}{self.nbytes / 1000000.0:,.1f} MB in addition to the stored "
            f"{self.stored_bytes / 1000000.0:,.1f} MB; {error}"
        )


def copy_weights(handles: Iterable[WeightHandle], dtype: CopyDtype) -> CopyReport:
    """Copy matrices in a lower precision for products outside of autograd.

    The copies do not follow updates of the weights: call `WeightHandle.weight_replaced` after one.

    Raises:
        ValueError: a weight is not on a CPU, or already has the dtype of the copies.
    """
    matrices = list(dict.fromkeys(handles))
    errors, packed, nbytes, stored = [], 0, 0, 0
    for handle in matrices:
        weight = handle.get()
        if weight.device.type != "cpu":
            raise ValueError(
                f"--weights-dtype {dtype} multiplies on a CPU, the model is on "
                f"{weight.device.type}: drop it, or give --device cpu"
            )
        copy = LowBitCopy(weight, dtype, cpu_dtype=handle.cpu_dtype)
        if dtype == "bf16" and weight.dtype is torch.bfloat16 and not copy.packed:
            raise ValueError(
                "--weights-dtype bf16: the weights are bf16 already, and this CPU does not "
                "multiply packed copies faster: drop it"
            )
        handle.multiply_by(copy)
        errors.append(copy.error(weight))
        packed += copy.packed
        nbytes, stored = nbytes + copy.nbytes, stored + weight.nbytes
    return CopyReport(
        dtype,
        matrices=len(matrices),
        packed=packed,
        nbytes=nbytes,
        stored_bytes=stored,
        mean_error=sum(errors) / max(1, len(errors)),
        worst_error=max(errors, default=0),
    )


class StoreModule(nn.Module):
    """A module whose weights are in `store`: set it, declare the weights, call `materialize`.

        named_parameters()   name of the WeightSharding -> this rank's shard, the memory itself
        named_buffers()      the states of the store
        state_dict()         both, detached; load_state_dict() writes into the same memory

    A parameter is this rank's shard: [o/tp, h] of a weight sharded over tp, and the flat range
    [k] of [o/tp, h] if weights are stored in shards (ZeRO-3). Such a state_dict belongs to one
    rank, and only the same rank of the same layout can load it; `dist_checkpointing` saves for
    other layouts.

    Weights are views of flat buckets at fixed addresses. An operation that would give a
    parameter other memory (another dtype or device, `assign=True`, a copy of the module) raises
    an error that names the call to make instead.
    """

    store: WeightStore

    def materialize(self, storage: Storage | None = None) -> None:
        """Materialise the store: its weights become parameters of this module, its states buffers.

        Raises:
            ValueError: the store is already materialised.
        """
        self.store.materialize(storage)
        # `register_parameter` refuses names with dots, which names of weights have.
        self._parameters.update({n: handle.anchor for n, handle in self.store.handles.items()})
        self._buffers.update(self.store.states)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter by its name. Raises AttributeError."""
        parameter = self._parameters.get(target)
        return super().get_parameter(target) if parameter is None else parameter

    # --- dtype and device -------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Carry out `to`, `half`, `cuda`, `share_memory` on tensors outside the store.

        Raises:
            ValueError: it would move or convert the store's weights.
        """
        store = self.store
        probe = torch.empty(0, dtype=store.dtype, device=store.device)
        converted = fn(probe)
        if converted is not probe:
            changes = [f"dtype={converted.dtype}"] if converted.dtype != store.dtype else []
            if converted.device != store.device:
                changes.append(f"device={str(converted.device)!r}")
            build = f"{type(self).__name__}(..., {', '.join(changes) or 'device=...'})"
            raise ValueError(
                f"{type(self).__name__} holds its weights in flat buckets of {store.dtype} on "
                f"{store.device}, which are not converted or moved in place: build {build}, and "
                "give it these values by load_state_dict(model.state_dict())"
            )
        for bucket in store.buckets:
            fn(bucket.data)  # in place, as share_memory is
        parameters, buffers = self._parameters, self._buffers
        self._parameters = {n: p for n, p in parameters.items() if n not in store.handles}
        self._buffers = {n: b for n, b in buffers.items() if n not in store.states}
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = {**parameters, **self._parameters}
            self._buffers = {**buffers, **self._buffers}
        return self

    # --- state_dict -------------------------------------------------------------------------------

    @property
    def _shard(self) -> str | None:
        """This rank's shard of the logical weights in words; None if it stores whole weights."""
        grid = self.store.groups.grid
        if grid.world_size == 1:
            return None
        coordinates = self.store.groups.coordinates
        shard = " x ".join(f"{a} {coordinates[a]} of {grid.size(a)}" for a in coordinates)
        axes = sorted({axis for b in self.store.buckets for axis in b.placement.weight})
        return f"{shard}, weights {'sharded over ' + ', '.join(axes) if axes else 'whole'}"

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save the parameters and buffers in `destination`.

        Raises:
            ValueError: updates by other ranks have not been gathered.
        """
        blocks = [block for bucket in self.store.buckets for block in bucket.blocks]
        stale = [b.name for b in blocks if b.gatherer is not None and b.gatherer.is_stale(b)]
        if stale:
            raise ValueError(
                f"state_dict: updates from other ranks have not arrived in {stale[0]}"
                + (f" and {len(stale) - 1} more" if len(stale) > 1 else "")
                + ": call complete_weights() of the DataParallel engine on every rank before it"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # torch stores metadata next to the tensors; loading passes it as `local_metadata`.
        metadata: dict[str, dict[str, Any]] | None = vars(destination).get("_metadata")
        if metadata is not None and prefix[:-1] in metadata:
            metadata[prefix[:-1]]["shard"] = self._shard

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Copy into the parameters and buffers; mismatches are added to `error_msgs`.

        Raises:
            ValueError: `assign=True`, or an engine has been built, whose optimizer may have copies.
        """
        if local_metadata.pop("assign_to_params_buffers", False):  # torch's key for assign=True
            raise ValueError(
                "load_state_dict(assign=True): the weights lie in flat buckets and are copied "
                "into, leave out assign"
            )
        if self.store.has_engine:
            raise ValueError(
                "load_state_dict: DataParallel has been built over these weights, and its "
                "optimizer may hold copies of them: load before it is built; or load_checkpoint("
                "folder, weight_chunks(model.store)), then optimizer.after_load(with_state=False)"
            )
        saved = local_metadata.get("shard", self._shard)
        if saved != self._shard:
            error_msgs.append(
                f"the state_dict is of {saved or 'whole weights'}, this rank has "
                f"{self._shard or 'whole weights'}: {_ANY_LAYOUT}"
            )
            return
        before = len(error_msgs)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        # torch takes the text before a dot for the name of a submodule, and reports these names.
        store_keys = {prefix + name for name in (*self._parameters, *self._buffers)}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in store_keys]
        if len(error_msgs) > before and self._shard is not None:
            error_msgs.append(f"this rank has {self._shard}: {_ANY_LAYOUT}")

    # --- copies -----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copy("copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse_copy("pickled or copied")

    def _refuse_copy(self, how: str) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name} is not {how}, as process groups are not: build another {name} and give it "
            "the values by load_state_dict(model.state_dict()), or save by dist_checkpointing"
        )


_ANY_LAYOUT = (
    "to load on another layout use save_checkpoint and load_checkpoint of "
    "megatron.core.dist_checkpointing with weight_chunks(model.store)"
)

# SPDX-License-Identifier: Apache-2.0
"""StoreModule: an `nn.Module` whose parameters are the weights of a store, under their own names.

    named_parameters()   name of the WeightSharding -> this rank's shard, the memory itself
    named_buffers()      the states of the store
    state_dict()         both, detached; load_state_dict() writes into the same memory

A parameter is this rank's shard: [o/tp, h] of a weight sharded over tp, and the flat range [k] of
[o/tp, h] if weights are stored in shards (ZeRO-3). Such a state_dict belongs to one rank, and only
the same rank of the same layout can load it; `dist_checkpointing` saves for other layouts.

Weights are views of flat buckets at fixed addresses. An operation that would give a parameter other
memory (another dtype or device, `assign=True`, a copy of the module) raises an error that names the
call to make instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from megatron.core.weight_gather.bucket import Storage
from megatron.core.weight_gather.store import WeightStore


class StoreModule(nn.Module):
    """A module whose weights are in `store`: set it, declare the weights, call `materialize`."""

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

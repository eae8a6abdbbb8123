# SPDX-License-Identifier: Apache-2.0
"""Optimizer: AdamW, SGD or Muon over flat ranges of weights, with fp32 main weights.

A range has a few contiguous spans (with and without weight decay, and spans selected by name
patterns), so a step launches a handful of fused kernels, independent of the number of weights. fp32
weights are their own main weights. Unscaling and clipping need no separate pass: they are one
factor of the update. Gradients and moments in bf16 are converted to fp32 one range at a time.

The gradient norm counts every weight once: replicas of another model-parallel rank's weights are
excluded; the sum includes the data-parallel ranks only if they hold different ranges, and is
divided by the number of ranks that hold the same range. Every pipeline stage takes part in every
sum, even if it contributes nothing, so that all take the same decision.

`HostUpdates` keeps the main weights and moments of ranges in host memory and updates them there.
For each range, a step copies the gradients to the host, updates, and copies the weights back (Ren
et al. 2021, "ZeRO-Offload"). The copies overlap with the host's computation, with one stream for
each direction: while range i is updated, the gradients of range i + 1 arrive and the weights of
range i - 1 are sent back. On a CPU the same steps are plain copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from megatron.core.comm.collectives import all_reduce
from megatron.core.device import current_stream, new_event, new_stream, on_stream, pin
from megatron.core.optimizer.loss_scaler import ConstantLossScaler, LossScaler
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig, StepNumbers, check_patterns
from megatron.core.optimizer.range_state import (
    RangeState,
    range_states,
    slices,
    update_all,
    update_range,
)
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather.store import NORM_GROUPS, OwnedRange
from megatron.core.weight_sharding import WeightSharding

#: Ranges in flight at a time in each direction.
SLOTS = 2


class HostUpdates:
    """Runs the updates of states in host memory.

    Args:
        states: the states with `on_host`.
        device: device of weights and gradients.

    Attributes:
        bytes_to_host, bytes_to_device: bytes copied so far.
    """

    def __init__(self, states: Sequence[RangeState], device: torch.device) -> None:
        self.states, self.device = tuple(states), device
        self.bytes_to_host = self.bytes_to_device = 0
        self._down, self._up = new_stream(device), new_stream(device)
        largest = max((len(s.master) for s in self.states), default=0)
        dtypes = {s.owned.gradients.dtype for s in self.states}
        self._arrived = [
            {dtype: self._staging(largest, dtype) for dtype in dtypes} for _ in range(SLOTS)
        ]
        # fp32 weights are copied directly from the master
        master_dtypes = {s.owned.weights.dtype for s in self.states if s.saves_master}
        self._leaving = [
            {dtype: self._staging(largest, dtype) for dtype in master_dtypes} for _ in range(SLOTS)
        ]
        self._fetches = [new_event(device) for _ in range(SLOTS)]
        self._sends = [new_event(device) for _ in range(SLOTS)]

    def begin(self) -> None:
        """Start copying the first gradients; call this when all gradients are final.

        No operation enqueued on the device between this and `run` may use the weights.
        """
        if not self.states:
            return
        self._down.wait_stream(current_stream(self.device))
        self._fetch(0)

    def run(self, update: Callable[[RangeState, torch.Tensor], None]) -> None:
        """Update every state after `begin`, and write the weights.

        Args:
            update: called with a state and its gradients [k] in host memory.
        """
        for i, state in enumerate(self.states):
            if i + 1 < len(self.states):
                self._fetch(i + 1)
            self._fetches[i % SLOTS].synchronize()
            update(state, self._staged(self._arrived, i, state.owned.gradients))
            self._send(i)
        if self.states:
            current_stream(self.device).wait_stream(self._up)

    def _fetch(self, index: int) -> None:
        """Start copying the gradients of a state to the host."""
        source = self.states[index].owned.gradients
        with on_stream(self._down):
            self._staged(self._arrived, index, source).copy_(source, non_blocking=True)
            self._fetches[index % SLOTS].record(self._down)
        self.bytes_to_host += source.numel() * source.element_size()

    def _send(self, index: int) -> None:
        """Start copying the updated weights of a state to the device."""
        state = self.states[index]
        source, target = state.master, state.owned.weights
        if state.saves_master:
            if index >= SLOTS:
                self._sends[index % SLOTS].synchronize()
            source = self._staged(self._leaving, index, target).copy_(state.master)
        # The host has waited for this state's gradients. Their copy follows everything enqueued on
        # the device before `begin`: readers of the old weights, and the copies of the last step.
        with on_stream(self._up):
            target.copy_(source, non_blocking=True)
            self._sends[index % SLOTS].record(self._up)
        self.bytes_to_device += target.numel() * target.element_size()

    def _staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return pin(torch.empty(numel, dtype=dtype, device="cpu"), self.device)

    def _staged(
        self, slots: list[dict[torch.dtype, torch.Tensor]], index: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Return the slice of a staging buffer for a tensor of the state at `index`."""
        return slots[index % SLOTS][like.dtype][: len(like)]


@dataclass(frozen=True)
class OptimizerStepResult:
    """The result of one optimizer step.

    Args:
        applied: False if some rank had a non-finite gradient: no rank changed anything.
        grad_norm: L2 norm of the unscaled gradient before clipping.
        num_zeros: number of gradient elements that are exactly zero; None if not counted.
    """

    applied: bool
    grad_norm: float
    num_zeros: int | None = None


class Optimizer:
    """Updates the owned ranges from their gradients.

    The constructor is collective over the pipeline stages; with kind "muon", over the world.

    Args:
        owned: the result of a data-parallel engine's `owned()`.
        groups: process groups for the sums of the norm.
        scaler: the loss scaler whose scale the gradients contain.
        weights: descriptions of the whole model's weights: every pattern of the config must match
            one of their names, and Muon uses them to join logical tensors of fused weights. None:
            the names in `owned`, which need not be complete on one rank of many.

    Raises:
        ValueError: a pattern matches no weight, or Muon needs descriptions.

    Attributes:
        device: device of weights and gradients.
        ranges: the states of all ranges, divided by update rule and memory.
        muon: updates matrices; None for other kinds.
        host: updates the ranges in host memory.
    """

    def __init__(
        self,
        owned: Sequence[OwnedRange],
        groups: ProcessGroupCollection,
        *,
        config: OptimizerConfig | None = None,
        scaler: LossScaler | None = None,
        weights: Collection[WeightSharding] | None = None,
    ) -> None:
        self.config = config or OptimizerConfig()
        names = {box.name for owned_range in owned for box in owned_range.boxes}
        if weights is not None:
            names = {segment.name for sharding in weights for segment in sharding.sub_weights}
        check_patterns(self.config.lr_factors, names, what="learning rate groups")
        check_patterns(self.config.decay_factors, names, what="weight decay groups")
        if self.config.kind == "muon":
            patterns = tuple((pattern, 1.0) for pattern in self.config.muon.adam_names)
            check_patterns(patterns, names, what="matrices that AdamW updates")
        self.groups = groups
        self.scaler: LossScaler = scaler or ConstantLossScaler()
        self.ranges = [
            state for owned_range in owned for state in range_states(owned_range, self.config)
        ]
        self._steps = torch.zeros((), dtype=torch.int64, device="cpu")
        # usually one engine
        self._owners = list(
            dict.fromkeys(
                owned_range.owner for owned_range in owned if owned_range.owner is not None
            )
        )
        self.device = device = owned[0].weights.device if owned else torch.device("cpu")
        self._norm_groups = _norm_groups(owned, groups, device)
        self.host = HostUpdates([s for s in self.ranges if s.on_host], device)
        self.muon: Muon | None = None
        if self.config.kind == "muon":
            matrices = [s for s in self.ranges if s.kind == "muon"]
            world, grid = groups["world"], groups.grid
            self.muon = Muon(
                matrices,
                world,
                config=self.config.muon,
                device=device,
                weights=weights,
                stages=[grid.coordinates(rank)["pp"] for rank in world.ranks],
            )

    @property
    def steps(self) -> int:
        """Number of updates applied so far, used in Adam's bias correction."""
        return int(self._steps)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps.fill_(steps)

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return the state that belongs to no weight, by name: tensors [] in host memory, equal on
        all ranks. They are the state itself: loading writes into them."""
        return {"steps": self._steps, **self.scaler.scalars()}

    @torch.no_grad()
    def step(
        self,
        lr: float,
        weight_decay: float = 0.0,
        *,
        norm: float | None = None,
        decoupled_lr: float | None = None,
    ) -> OptimizerStepResult:
        """Clip and apply one update, or skip it on all ranks.

        Args:
            lr: learning rate of this step, for weights without a factor.
            weight_decay: decoupled weight decay of this step, for the ranges that use it.
            norm: the result of `grad_norm` for these gradients; None computes it here.
            decoupled_lr: learning rate of the decoupled weights in the config.

        Returns:
            The result; the data-parallel engine must then gather the other shards of the weights.

        Raises:
            ValueError: `decoupled_lr` is given without decoupled weights or vice versa; or the
                data-parallel engine has not completed the gradients.
        """
        if (decoupled_lr is not None) != bool(self.config.decoupled):
            raise ValueError(
                f"decoupled_lr is {decoupled_lr} and the decoupled weights are "
                f"{self.config.decoupled}: set both or neither"
            )
        self._check_gradients()
        scale = self.scaler.scale
        norm = (self.grad_norm() if norm is None else norm) / scale
        zeros = self.count_zeros() if self.config.count_zeros else None
        applied = math.isfinite(norm)
        self.scaler.update(not applied)
        if not applied:
            return OptimizerStepResult(False, norm, zeros)
        clip = self.config.clip_grad
        divisor = scale * max(1.0, (norm + 1e-6) / clip) if clip > 0.0 else scale
        self.steps += 1
        decoupled = lr if decoupled_lr is None else decoupled_lr
        self._apply(StepNumbers(lr, weight_decay, divisor, self.steps, decoupled))
        for owner in self._owners:
            owner.weights_updated()
        return OptimizerStepResult(True, norm, zeros)

    def after_load(self, *, with_state: bool, steps: int | None = None) -> None:
        """Update masters and the number of updates after tensors have been loaded.

        Args:
            with_state: whether optimizer state was loaded in addition to weights. Otherwise the
                optimizer restarts with zero moments and no updates.
            steps: number of updates behind the loaded moments, if the checkpoint does not contain
                it; None: it was loaded (`optimizer_chunks`).

        Raises:
            ValueError: non-zero moments have 0 updates, so the number was not loaded; or weights
                were loaded but no state; or `steps` is not a number of updates, or is given without
                state.
        """
        if steps is not None and (type(steps) is not int or steps < 0 or not with_state):
            raise ValueError(
                f"after_load(with_state={with_state}, steps={steps!r}): steps is the number of "
                "updates of the loaded optimizer state, an int of at least 0"
            )
        if not with_state:
            self.steps = 0
        elif steps is not None:
            self.steps = steps
        elif self.steps < 0 or (self.steps == 0 and any(s.has_moments() for s in self.ranges)):
            raise ValueError(
                f"the loaded optimizer state has {self.steps} updates, but its moments are "
                "not zero: the checkpoint does not contain the number of updates; pass it: "
                "after_load(with_state=True, steps=...)"
            )
        elif self.steps == 0 and not all(s.master_is_weights() for s in self.ranges):
            raise ValueError(
                "after_load(with_state=True): weights were loaded, but no optimizer state: the "
                "fp32 main weights are still the old ones, and the next update would restore them. "
                "Load optimizer_chunks(optimizer) too, or call after_load(with_state=False)"
            )
        for state in self.ranges:
            if not with_state:
                state.forget()
            if not (with_state and state.saves_master):
                state.reload_master()

    def state_bytes(self, *, on_host: bool) -> int:
        """Return the size in bytes of masters and moments in host memory, or on the weights'
        device."""
        return sum(state.state_bytes() for state in self.ranges if state.on_host == on_host)

    def grad_norm(self) -> float:
        """Return the L2 norm of all gradients, each weight counted once, loss scale included.

        Raises:
            ValueError: the data-parallel engine has not completed the gradients.
        """
        self._check_gradients()
        return math.sqrt(self._total(_squares))

    def count_zeros(self) -> int:
        """Return the number of gradient elements that are exactly zero, each counted once.

        Raises:
            ValueError: the data-parallel engine has not completed the gradients.
        """
        self._check_gradients()
        return round(self._total(_zeros))

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the L2 norm of the trained fp32 weights, each counted once."""
        return math.sqrt(self._total(_squares, of_weights=True))

    def _check_gradients(self) -> None:
        """Check that every engine has completed its gradients. Raises ValueError."""
        for owner in self._owners:
            owner.check_gradients()

    def _total(
        self,
        measure: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        *,
        of_weights: bool = False,
    ) -> float:
        """Sum a measure of the counted ranges over the ranks that hold different ones.

        Args:
            measure: maps flat tensors on one device to an fp64 scalar, the sum of their measures.
            of_weights: measure the masters instead of the gradients.
        """
        counted_slices: dict[tuple[str, int, torch.device], list[torch.Tensor]] = {}
        for state in self.ranges:
            owned = state.owned
            flat = state.master if of_weights else owned.gradients
            alike = counted_slices.setdefault((owned.norm_group, owned.replicas, flat.device), [])
            alike += slices(flat, owned.counted)
        by_group = {
            name: torch.zeros((), dtype=torch.float64, device=self.device)
            for name in self._norm_groups
        }
        for (name, replicas, _), flats in counted_slices.items():
            if flats:
                by_group[name] += measure(flats) / replicas
        sums = [all_reduce(t, self.groups[g]) for g, t in by_group.items()]
        # One transfer for all sums: each read on the host synchronises with the device.
        return sum(torch.stack(sums).tolist()) if len(sums) > 1 else sum(map(float, sums))

    def _apply(self, numbers: StepNumbers) -> None:
        """Update every range; the device updates its own ranges while the host updates the
        others."""
        self.host.begin()
        device_states = [s for s in self.ranges if not s.on_host and s.kind != "muon"]
        update_all(device_states, numbers, config=self.config)
        if self.muon is not None:
            self.muon.update(numbers)
        for state in self.ranges:
            if state.writes_back and not state.on_host:
                state.owned.weights.copy_(state.master)
        self.host.run(
            lambda state, gradients: update_range(state, gradients, numbers, config=self.config)
        )


def _norm_groups(
    owned: Sequence[OwnedRange], groups: ProcessGroupCollection, device: torch.device
) -> list[str]:
    """Return the groups over which some stage sums norms: all stages must call each of them."""
    local_groups = {owned_range.norm_group for owned_range in owned}
    used = torch.tensor([float(name in local_groups) for name in NORM_GROUPS], device=device)
    used = all_reduce(used, groups["pp"], op="max")
    return [name for name, any_stage in zip(NORM_GROUPS, used.tolist(), strict=True) if any_stage]


def _squares(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of flat tensors; each tensor's norm is computed in fp32."""
    # Not _foreach_norm, which launches a kernel for every 20 M elements.
    norms = torch.empty(len(flats), dtype=torch.float32, device=flats[0].device)
    for flat, norm in zip(flats, norms.unbind(), strict=True):
        torch.linalg.vector_norm(flat, dtype=torch.float32, out=norm)
    return norms.double().square_().sum()


def _zeros(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the number of elements that are exactly zero."""
    return torch.stack([(flat == 0).sum() for flat in flats]).sum().double()

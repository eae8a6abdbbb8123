# SPDX-License-Identifier: Apache-2.0
"""Optimizer: AdamW, SGD or Muon over flat ranges of weights, with fp32 main weights.

A range is a few contiguous spans (with and without weight decay, and those that name patterns
select), so a step is a handful of fused kernels whatever the number of weights. fp32 weights are
their own main weights. Unscaling and clipping need no pass of their own: they are one factor of the
update. Gradients and moments in bf16 are widened one range at a time.

The gradient norm counts every weight once: replicas of another model-parallel rank's weights are
left out; the sum runs over the data-parallel ranks only if they hold different ranges, and where
several hold the same one it is divided by their number. Every pipeline stage takes part in every
sum, also one that has nothing to add, so all take the same decision.

`HostUpdates` keeps the main weights and moments of ranges in host memory and updates them there.
Per range a step copies the gradients to the host, updates, and copies the weights back (Ren et al.
2021, "ZeRO-Offload"). The copies overlap with the host's arithmetic, on one stream for each
direction: while range i is updated, the gradients of i + 1 arrive and the weights of i - 1 leave.
On a CPU the same steps are plain copies.
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

#: Ranges that may be on their way in one direction at a time.
SLOTS = 2


class HostUpdates:
    """Carry out the updates of states in host memory.

    Args:
        states: those with `on_host`.
        device: where weights and gradients are.

    Attributes:
        bytes_to_host, bytes_to_device: copied so far.
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
        # fp32 weights leave from the master itself
        master_dtypes = {s.owned.weights.dtype for s in self.states if s.saves_master}
        self._leaving = [
            {dtype: self._staging(largest, dtype) for dtype in master_dtypes} for _ in range(SLOTS)
        ]
        self._fetches = [new_event(device) for _ in range(SLOTS)]
        self._sends = [new_event(device) for _ in range(SLOTS)]

    def begin(self) -> None:
        """Start to copy the first gradients; to be called when all gradients are final.

        Nothing that is put on the device between this and `run` may use the weights.
        """
        if not self.states:
            return
        self._down.wait_stream(current_stream(self.device))
        self._fetch(0)

    def run(self, update: Callable[[RangeState, torch.Tensor], None]) -> None:
        """Update every state after `begin`, and write the weights.

        Args:
            update: given a state and its gradients [k] in host memory.
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
        """Start to copy the gradients of a state to the host."""
        source = self.states[index].owned.gradients
        with on_stream(self._down):
            self._staged(self._arrived, index, source).copy_(source, non_blocking=True)
            self._fetches[index % SLOTS].record(self._down)
        self.bytes_to_host += source.numel() * source.element_size()

    def _send(self, index: int) -> None:
        """Start to copy the updated weights of a state to the device."""
        state = self.states[index]
        source, target = state.master, state.owned.weights
        if state.saves_master:
            if index >= SLOTS:
                self._sends[index % SLOTS].synchronize()
            source = self._staged(self._leaving, index, target).copy_(state.master)
        # The host has waited for this state's gradients, which left after all that was put on the
        # device before `begin`: readers of the old weights, and the last step's copies.
        with on_stream(self._up):
            target.copy_(source, non_blocking=True)
            self._sends[index % SLOTS].record(self._up)
        self.bytes_to_device += target.numel() * target.element_size()

    def _staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return pin(torch.empty(numel, dtype=dtype, device="cpu"), self.device)

    def _staged(
        self, slots: list[dict[torch.dtype, torch.Tensor]], index: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Return the part of a slot that a tensor of the state at `index` goes through."""
        return slots[index % SLOTS][like.dtype][: len(like)]


@dataclass(frozen=True)
class OptimizerStepResult:
    """What one optimizer step did.

    Args:
        applied: False if a gradient was not finite anywhere: nothing was changed on any rank.
        grad_norm: L2 norm of the unscaled gradient before clipping.
        num_zeros: gradient elements that are exactly zero; None if they are not counted.
    """

    applied: bool
    grad_norm: float
    num_zeros: int | None = None


class Optimizer:
    """Update the owned ranges from their gradients.

    Args:
        owned: what a data-parallel engine's `owned()` returns.
        groups: for the sums of the norm.
        scaler: the loss scaler whose scale is in the gradients.
        weights: descriptions of the whole model's weights: every pattern of the config must match
            the name of one, and Muon needs them to join logical tensors of fused ones. None: what
            `owned` tells, which on one rank of many need not be all.

    Building one is collective over the pipeline's stages, with kind "muon" over the world.

    Raises:
        ValueError: a pattern that matches no weight, or Muon without the descriptions it needs.

    Attributes:
        device: where weights and gradients are.
        ranges: the state of every range, divided where rule or memory change.
        muon: what updates matrices; None for another kind.
        host: what updates the ranges in host memory.
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
            names = {segment.name for sharding in weights for segment in sharding.segments}
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
        # one engine, as a rule
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
        """The number of updates applied so far, which Adam's bias correction needs."""
        return int(self._steps)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps.fill_(steps)

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return the state that belongs to no weight, by name: tensors [] in host memory, equal on
        all ranks. It is the memory itself: loading writes into it."""
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
        """Clip and apply one update, or skip it on all ranks alike.

        Args:
            lr: learning rate of this step, where no pattern gives a factor.
            weight_decay: decoupled decay of this step, for the ranges that take any.
            norm: what `grad_norm` returned for these gradients; None asks it here.
            decoupled_lr: learning rate of the weights that the configuration names as decoupled.

        Returns:
            The result; the weights' other shards must then be gathered by the data-parallel engine.

        Raises:
            ValueError: `decoupled_lr` without such weights, or they without it; or gradients that
                the data-parallel engine has not completed.
        """
        if (decoupled_lr is not None) != bool(self.config.decoupled):
            raise ValueError(
                f"decoupled_lr is {decoupled_lr} and the decoupled weights are "
                f"{self.config.decoupled}: give both or neither"
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
        """Bring masters and the number of updates up to date after tensors have been loaded.

        Args:
            with_state: whether optimizer state was loaded as well as weights. Without it the
                optimizer starts anew: moments of zero, and no update counted.
            steps: the number of updates that the loaded moments come from, where the checkpoint
                does not hold it; None: it was loaded (`optimizer_chunks`).

        Raises:
            ValueError: moments that are not zero come from 0 updates: the number was not loaded.
                Or no state was loaded at all, but other weights. Or `steps` is no number of
                updates, or given without state.
        """
        if steps is not None and (type(steps) is not int or steps < 0 or not with_state):
            raise ValueError(
                f"after_load(with_state={with_state}, steps={steps!r}): steps is the number of "
                "updates, an int from 0 on, of optimizer state that was loaded"
            )
        if not with_state:
            self.steps = 0
        elif steps is not None:
            self.steps = steps
        elif self.steps < 0 or (self.steps == 0 and any(s.has_moments() for s in self.ranges)):
            raise ValueError(
                f"optimizer state was loaded that comes from {self.steps} updates, and its moments "
                "are not zero: the checkpoint does not hold the number of updates, so give it: "
                "after_load(with_state=True, steps=...)"
            )
        elif self.steps == 0 and not all(s.master_is_weights() for s in self.ranges):
            raise ValueError(
                "after_load(with_state=True): weights were loaded and no optimizer state: the "
                "fp32 masters are of other weights, which the next update would write back. Load "
                "optimizer_chunks(optimizer) as well, or call after_load(with_state=False)"
            )
        for state in self.ranges:
            if not with_state:
                state.forget()
            if not (with_state and state.saves_master):
                state.reload_master()

    def state_bytes(self, *, on_host: bool) -> int:
        """Return the bytes of masters and moments in host memory, or where the weights are."""
        return sum(state.state_bytes() for state in self.ranges if state.on_host == on_host)

    def grad_norm(self) -> float:
        """Return the L2 norm of all gradients, each weight counted once, loss scale included.

        Raises:
            ValueError: the data-parallel engine has not completed them.
        """
        self._check_gradients()
        return math.sqrt(self._total(_squares))

    def count_zeros(self) -> int:
        """Return the number of gradient elements that are exactly zero, each counted once.

        Raises:
            ValueError: the data-parallel engine has not completed them.
        """
        self._check_gradients()
        return round(self._total(_zeros))

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the L2 norm of the fp32 weights that are trained, each counted once."""
        return math.sqrt(self._total(_squares, of_weights=True))

    def _check_gradients(self) -> None:
        """See that every engine has completed its gradients. Raises ValueError."""
        for owner in self._owners:
            owner.check_gradients()

    def _total(
        self,
        measure: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        *,
        of_weights: bool = False,
    ) -> float:
        """Sum a measure of the counted pieces over the ranks that hold different ones.

        Args:
            measure: maps flat tensors on one device to fp64 scalar, the sum of their measures.
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
        # The host reads all sums at once: each read waits for the device.
        return sum(torch.stack(sums).tolist()) if len(sums) > 1 else sum(map(float, sums))

    def _apply(self, numbers: StepNumbers) -> None:
        """Update every range; the device works on its own ranges while the host does the others."""
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
    """Return the groups that any stage sums norms over: all stages have to call each of them."""
    local_groups = {owned_range.norm_group for owned_range in owned}
    used = torch.tensor([float(name in local_groups) for name in NORM_GROUPS], device=device)
    used = all_reduce(used, groups["pp"], op="max")
    return [name for name, any_stage in zip(NORM_GROUPS, used.tolist(), strict=True) if any_stage]


def _squares(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of flat tensors, summed in fp32 within each of them."""
    # Not _foreach_norm, which launches a kernel for every 20 M elements.
    norms = torch.empty(len(flats), dtype=torch.float32, device=flats[0].device)
    for flat, norm in zip(flats, norms.unbind(), strict=True):
        torch.linalg.vector_norm(flat, dtype=torch.float32, out=norm)
    return norms.double().square_().sum()


def _zeros(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the number of elements that are exactly zero."""
    return torch.stack([(flat == 0).sum() for flat in flats]).sum().double()

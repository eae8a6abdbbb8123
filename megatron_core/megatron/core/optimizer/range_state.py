# SPDX-License-Identifier: Apache-2.0
"""State and updates of AdamW and SGD on a flat range of weights, with torch's fused kernels.

Updates are computed in fp32 for any dtype of gradients and stored moments: bf16 tensors are
converted one range at a time.

`RangeState` holds the optimizer's tensors for one range with a single update rule and memory; owned
ranges are divided accordingly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.boxes import Box
from megatron.core.device import pin
from megatron.core.optimizer.optimizer_config import (
    TOKEN_MATRICES,
    OptimizerConfig,
    StepNumbers,
    UpdateRanges,
    update_ranges,
)
from megatron.core.weight_gather.store import OwnedRange
from megatron.core.weight_sharding import LocalBox, SubWeight, range_boxes

#: Alignment, in elements, of the split of a range between host and device.
CUT_QUANTUM = 32


class RangeState:
    """The master and the moments of a range, flat [k], and its update factors.

    Args:
        owned: the owned range.
        kind: "adam", "sgd" or "muon".
        on_host: keep master and moments in host memory (pinned if there is a GPU).

    Attributes:
        master: fp32 [k]; the weights themselves if they are fp32 and on the same device.
        writes_back: whether the master is a copy that is written to the weights after an update.
        saves_master: whether the master has a higher precision than the weights.
    """

    def __init__(
        self, owned: OwnedRange, config: OptimizerConfig, *, kind: str, on_host: bool = False
    ) -> None:
        self.owned, self.kind, self.on_host = owned, kind, on_host
        self.saves_master = owned.weights.dtype != torch.float32
        self.writes_back = self.saves_master or on_host
        self.updates = update_ranges(
            owned,
            lr=config.lr_factors,
            weight_decay=config.decay_factors,
            decoupled=config.decoupled,
        )
        self.master = owned.weights
        if on_host:
            self.master = self._stored_dtype_copy(torch.float32).copy_(owned.weights)
        elif self.writes_back:
            self.master = owned.weights.float()
        self.moments: dict[str, torch.Tensor] = {}
        if kind == "adam":
            self.moments = {
                "exp_avg": self._stored_dtype_copy(config.exp_avg_dtype),
                "exp_avg_sq": self._stored_dtype_copy(config.exp_avg_sq_dtype),
            }
        elif kind == "muon" or config.sgd_momentum:
            self.moments = {"momentum": self._stored_dtype_copy(torch.float32)}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the flat tensors to save in a checkpoint, including the master only if the weights
        have another dtype."""
        master = {"master": self.master} if self.saves_master else {}
        return {**master, **self.moments}

    def reload_master(self) -> None:
        """Copy the masters from the weights, after loading weights without optimizer state."""
        if self.writes_back:
            self.master.copy_(self.owned.weights)

    def master_is_weights(self) -> bool:
        """Return whether the weights equal the rounded masters, as after every update."""
        if not self.writes_back:
            return True
        weights = self.owned.weights
        return torch.equal(self.master.to(device=weights.device, dtype=weights.dtype), weights)

    def has_moments(self) -> bool:
        """Return whether any moment is non-zero."""
        return any(bool(moment.any()) for moment in self.moments.values())

    def forget(self) -> None:
        """Reset the moments to zero."""
        for moment in self.moments.values():
            moment.zero_()

    def state_bytes(self) -> int:
        """Return the size in bytes of the moments and, if it is a copy, the master."""
        tensors = [self.master] if self.writes_back else []
        return sum(t.numel() * t.element_size() for t in (*tensors, *self.moments.values()))

    def _stored_dtype_copy(self, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros [k] in this state's memory."""
        device = self.owned.weights.device
        if not self.on_host:
            return torch.zeros(self.owned.weights.shape, dtype=dtype, device=device)
        return pin(torch.zeros(self.owned.weights.shape, dtype=dtype, device="cpu"), device)


def range_states(owned: OwnedRange, config: OptimizerConfig) -> list[RangeState]:
    """Divide an owned range into states with one update rule and one memory each, in order."""
    if config.kind == "muon":
        cuts, kinds = _by_kind(owned, config.muon.adam_names)
        ranges = split_range(owned, cuts)
        return [RangeState(p, config, kind=kind) for p, kind in zip(ranges, kinds, strict=True)]
    numel = len(owned.weights)
    cut = min(numel, round(config.offload_fraction * numel / CUT_QUANTUM) * CUT_QUANTUM)
    if cut == 0:
        return [RangeState(owned, config, kind=config.kind)]
    if cut == numel:
        return [RangeState(owned, config, kind=config.kind, on_host=True)]
    head, tail = split_range(owned, [cut])
    return [
        RangeState(head, config, kind=config.kind, on_host=True),
        RangeState(tail, config, kind=config.kind),
    ]


def is_matrix(tensor: LocalBox | SubWeight, adam_names: Sequence[str]) -> bool:
    """Return whether Muon updates a logical tensor.

    It does if the tensor is a matrix, or contains the matrices of experts, unless its rows belong
    to tokens or a pattern assigns it to AdamW. A depthwise convolution [channels, 1, width] and the
    biases of experts [experts, features] are not matrices.
    """
    if len(tensor.shape) not in (2, 3) or (len(tensor.shape) == 3 and tensor.shape[1] == 1):
        return False
    if tensor.name.endswith(".bias"):
        return False
    return not any(fnmatchcase(tensor.name, p) for p in (*TOKEN_MATRICES, *adam_names))


def matrix_boxes(box: LocalBox) -> list[LocalBox]:
    """Return the boxes of single matrices: a matrix's box as it is, and the box of an expert weight
    [e, rows, cols] divided into a box [rows, cols] per expert, with the expert's name."""
    if len(box.shape) == 2:
        return [box]
    (first_row, *offsets), (count, *sizes) = box.box
    matrix = Box(tuple(offsets), tuple(sizes))
    return [
        replace(
            box,
            name=f"{box.name}[{first_row + i}]",
            shape=box.shape[1:],
            box=matrix,
            start=box.start + i * matrix.numel,
        )
        for i in range(count)
    ]


def split_range(owned: OwnedRange, cuts: Sequence[int]) -> list[OwnedRange]:
    """Divide an owned range into consecutive ranges.

    Args:
        cuts: elements at which a new range starts, ascending, inside the range.

    Returns:
        len(cuts) + 1 ranges, views of the same tensors.
    """
    edges = [0, *cuts, len(owned.weights)]
    return [_sub_range(owned, *edge) for edge in itertools.pairwise(edges)]


def _sub_range(owned: OwnedRange, low: int, high: int) -> OwnedRange:
    def inside(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        clipped = ((max(start, low) - low, min(stop, high) - low) for start, stop in ranges)
        return tuple((start, stop) for start, stop in clipped if start < stop)

    return replace(
        owned,
        weights=owned.weights[low:high],
        gradients=owned.gradients[low:high],
        decayed=inside(owned.decayed),
        undecayed=inside(owned.undecayed),
        counted=inside(owned.counted),
        boxes=tuple(range_boxes(owned.boxes, low, high)),
    )


def _by_kind(owned: OwnedRange, adam_names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the elements at which the update rule of a range changes, and the rules in order."""
    cuts: list[int] = []
    kinds: list[str] = []
    for box in sorted(owned.boxes, key=lambda box: box.start):
        kind = "muon" if is_matrix(box, adam_names) else "adam"
        if kinds and kind != kinds[-1]:
            cuts.append(box.start)
        if not kinds or kind != kinds[-1]:
            kinds.append(kind)
    return cuts, kinds or ["adam"]


def update_all(
    states: Sequence[RangeState], numbers: StepNumbers, *, config: OptimizerConfig
) -> None:
    """Update ranges from their gradients; AdamW ranges entirely in fp32 share kernel launches.

    Args:
        states: states of AdamW or SGD in the memory of their gradients; fp32 gradients may be
            overwritten.
    """
    together: dict[tuple[float, float], tuple[list[torch.Tensor], ...]] = {}
    for state in states:
        flats = [state.master, state.owned.gradients, *state.moments.values()]
        if state.kind != "adam" or any(flat.dtype != torch.float32 for flat in flats):
            update_range(state, state.owned.gradients, numbers, config=config)
            continue
        for alike in state.updates:
            key = alike.lr(numbers), alike.decay_factor
            slice_lists = together.setdefault(key, ([], [], [], []))
            for slice_list, flat in zip(slice_lists, flats, strict=True):
                slice_list += _update_slices(flat, alike)
    for (lr, decay), (masters, gradients, first_moments, second_moments) in together.items():
        _adam(
            masters,
            gradients,
            {"exp_avg": first_moments, "exp_avg_sq": second_moments},
            numbers=numbers,
            lr=lr,
            decay=numbers.weight_decay * decay,
            config=config,
        )


def update_range(
    state: RangeState, gradients: torch.Tensor, numbers: StepNumbers, *, config: OptimizerConfig
) -> None:
    """Update a state's master and moments in place.

    Args:
        gradients: [k] on the state's device, fp32 or bf16; fp32 gradients may be overwritten.
    """
    for alike in state.updates:
        masters = _update_slices(state.master, alike)
        # `float` returns fp32 tensors themselves, without a copy
        gradients_fp32 = [tensor.float() for tensor in _update_slices(gradients, alike)]
        moments = {name: _update_slices(flat, alike) for name, flat in state.moments.items()}
        moments_fp32 = {
            name: [tensor.float() for tensor in stored] for name, stored in moments.items()
        }
        lr = alike.lr(numbers)
        decay = numbers.weight_decay * alike.decay_factor
        if state.kind == "adam":
            _adam(
                masters,
                gradients_fp32,
                moments_fp32,
                numbers=numbers,
                lr=lr,
                decay=decay,
                config=config,
            )
        else:
            if numbers.divisor != 1.0:
                torch._foreach_div_(gradients_fp32, numbers.divisor)
            momenta: list[Any] = moments_fp32.get("momentum", [None] * len(masters))
            sgd(
                masters,
                gradients_fp32,
                momenta,
                foreach=True,
                weight_decay=decay,
                momentum=config.sgd_momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        for name, stored in moments.items():
            if state.moments[name].dtype != torch.float32:
                torch._foreach_copy_(stored, moments_fp32[name])


def slices(flat: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> Sequence[torch.Tensor]:
    """Return views of ascending ranges of a flat tensor [k], with one call: for many small ranges,
    indexing costs more host time than launching the operation on their elements."""
    sizes, position = [], 0
    for start, stop in ranges:
        sizes += [start - position, stop - start]
        position = stop
    return flat.split_with_sizes([*sizes, flat.numel() - position])[1::2]


def _update_slices(flat: torch.Tensor, alike: UpdateRanges) -> list[torch.Tensor]:
    """Return the slices of a flat tensor [k] with the same update factors."""
    return list(slices(flat, alike.ranges))


def _adam(
    masters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: dict[str, list[torch.Tensor]],
    *,
    numbers: StepNumbers,
    lr: float,
    decay: float,
    config: OptimizerConfig,
) -> None:
    """Run AdamW in place on flat fp32 tensors."""
    device, divisor = masters[0].device, numbers.divisor
    # Created on the device: copying a number to a GPU from pageable memory blocks the host. Each
    # tensor has its own count, because the kernel increments it before correcting the bias.
    counts = torch.full((len(masters),), numbers.count - 1.0, device=device)
    adamw(
        masters,
        gradients,
        moments["exp_avg"],
        moments["exp_avg_sq"],
        [],
        list(counts.unbind()),
        fused=True,
        grad_scale=None if divisor == 1.0 else torch.full((), divisor, device=device),
        amsgrad=False,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        lr=lr,
        weight_decay=decay,
        eps=config.adam_eps,
        maximize=False,
    )

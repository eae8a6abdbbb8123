# SPDX-License-Identifier: Apache-2.0
"""RangeState: the optimizer's tensors for one range, with one rule and in one memory; and how owned
ranges are divided until that is so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from megatron.core.device import pin
from megatron.core.optimizer.config import TOKEN_MATRICES, OptimizerConfig
from megatron.core.optimizer.weight_groups import update_ranges
from megatron.core.weight_gather.owned import OwnedRange, PlacedBox
from megatron.core.weight_sharding import Box, range_boxes

#: Where a range is cut between host and device: a multiple of this, so that both start aligned.
CUT_QUANTUM = 32


class RangeState:
    """The master and the moments of a range, flat [k], and what is updated alike.

    Args:
        owned: the range.
        kind: "adam", "sgd" or "muon".
        on_host: keep master and moments in host memory (pinned, where there is a GPU).

    Attributes:
        master: fp32 [k]; the weights themselves where those are fp32 and on the same device.
        writes_back: the master is a copy, to be written to the weights after an update.
        saves_master: the master says more than the weights do.
    """

    def __init__(
        self, owned: OwnedRange, config: OptimizerConfig, *, kind: str, on_host: bool = False
    ) -> None:
        self.owned, self.kind, self.on_host = owned, kind, on_host
        self.saves_master = owned.weights.dtype != torch.float32
        self.writes_back = self.saves_master or on_host
        self.updates = update_ranges(owned, lr=config.lr_factors, weight_decay=config.decay_factors)
        self.master = owned.weights
        if on_host:
            self.master = self._kept(torch.float32).copy_(owned.weights)
        elif self.writes_back:
            self.master = owned.weights.float()
        self.moments: dict[str, torch.Tensor] = {}
        if kind == "adam":
            self.moments = {
                "exp_avg": self._kept(config.exp_avg_dtype),
                "exp_avg_sq": self._kept(config.exp_avg_sq_dtype),
            }
        elif kind == "muon" or config.sgd_momentum:
            self.moments = {"momentum": self._kept(torch.float32)}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the flat tensors that a checkpoint must hold, the master included only if the
        weights are not the same."""
        own = {"master": self.master} if self.saves_master else {}
        return {**own, **self.moments}

    def reload_master(self) -> None:
        """Take the masters from the weights (after loading weights without optimizer state)."""
        if self.writes_back:
            self.master.copy_(self.owned.weights)

    def forget(self) -> None:
        """Set the moments to zero, as they are before the first step."""
        for moment in self.moments.values():
            moment.zero_()

    def state_bytes(self) -> int:
        """Return the bytes of the moments and, where it is a copy, of the master."""
        own = [self.master] if self.writes_back else []
        return sum(t.numel() * t.element_size() for t in (*own, *self.moments.values()))

    def _kept(self, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros [k] in this state's memory."""
        device = self.owned.weights.device
        if not self.on_host:
            return torch.zeros(self.owned.weights.shape, dtype=dtype, device=device)
        return pin(torch.zeros(self.owned.weights.shape, dtype=dtype, device="cpu"), device)


def range_states(owned: OwnedRange, config: OptimizerConfig) -> list[RangeState]:
    """Divide an owned range so that each part has one rule and one memory, in order."""
    if config.kind == "muon":
        cuts, kinds = _by_kind(owned, config.muon.adam_names)
        parts = split_range(owned, cuts)
        return [RangeState(p, config, kind=kind) for p, kind in zip(parts, kinds, strict=True)]
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


def is_matrix(box: Box, adam_names: Sequence[str]) -> bool:
    """Tell whether Muon updates the logical tensor of a box: it is a matrix, or the matrices of
    experts, is no matrix of tokens, and no pattern gives it to AdamW.

    The rows of a depthwise convolution [channels, 1, width] are no matrices.
    """
    if len(box.shape) not in (2, 3) or (len(box.shape) == 3 and box.shape[1] == 1):
        return False
    return not any(fnmatchcase(box.name, p) for p in (*TOKEN_MATRICES, *adam_names))


def matrix_boxes(placed: PlacedBox) -> list[PlacedBox]:
    """Return a box of a matrix as it is, and one of experts' matrices [e, rows, cols] matrix by
    matrix: a box of [rows, cols] each, under the expert's own name."""
    box = placed.box
    if len(box.shape) == 2:
        return [placed]
    numel = math.prod(box.sizes[1:])
    return [
        PlacedBox(
            Box(
                name=f"{box.name}[{box.offsets[0] + i}]",
                shape=box.shape[1:],
                offsets=box.offsets[1:],
                sizes=box.sizes[1:],
                start=box.start + i * numel,
                counted=box.counted,
            ),
            placed.replica_ranks,
        )
        for i in range(box.sizes[0])
    ]


def split_range(owned: OwnedRange, cuts: Sequence[int]) -> list[OwnedRange]:
    """Cut an owned range into consecutive ones.

    Args:
        cuts: elements at which a new range starts, ascending, inside the range.

    Returns:
        One range more than there are cuts, as views of the same tensors.
    """
    edges = [0, *cuts, len(owned.weights)]
    return [_part(owned, *edge) for edge in itertools.pairwise(edges)]


def _part(owned: OwnedRange, low: int, high: int) -> OwnedRange:
    def inside(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        both = ((max(start, low) - low, min(stop, high) - low) for start, stop in ranges)
        return tuple((start, stop) for start, stop in both if start < stop)

    return replace(
        owned,
        weights=owned.weights[low:high],
        gradients=owned.gradients[low:high],
        decayed=inside(owned.decayed),
        undecayed=inside(owned.undecayed),
        counted=inside(owned.counted),
        boxes=tuple(
            PlacedBox(box, placed.replica_ranks)
            for placed in owned.boxes
            for box in range_boxes([placed.box], low, high)
        ),
    )


def _by_kind(owned: OwnedRange, adam_names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return where the rule changes in a range, and the rules in order."""
    cuts: list[int] = []
    kinds: list[str] = []
    for placed in sorted(owned.boxes, key=lambda placed: placed.box.start):
        kind = "muon" if is_matrix(placed.box, adam_names) else "adam"
        if kinds and kind != kinds[-1]:
            cuts.append(placed.box.start)
        if not kinds or kind != kinds[-1]:
            kinds.append(kind)
    return cuts, kinds or ["adam"]

# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a run: a broken memory cell or compute unit changes an activation or a weight.

One bit is flipped that at most halves a value or makes it half as large again, so that no value
becomes Inf or NaN; or an activation becomes NaN. The fault hits the largest element of the first
block's output, or of the first bucket of weights. It runs as a training hook at the begin of each
iteration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.models import GPTModel
from megatron.core.weight_gather import WeightStore
from megatron.training import pretraining
from megatron.training.hooks import TrainingHooks

KINDS = ("activation", "activation-always", "nan", "nan-always", "weight")


@dataclass(frozen=True)
class PlantedFault:
    """A fault.

    Args:
        kind: of KINDS.
        iteration: the first that it hits, counted from 1.
        rank: where.
    """

    kind: str
    iteration: int
    rank: int

    @staticmethod
    def of(words: str) -> PlantedFault:
        """Return the fault of the words KIND@ITERATION:RANK."""
        match = re.fullmatch(r"([a-z-]+)@([1-9]\d*):(\d+)", words)
        assert match is not None, words
        assert match[1] in KINDS, words
        return PlantedFault(match[1], int(match[2]), int(match[3]))


_INTEGERS = {4: torch.int32, 2: torch.int16}
#: The highest bit of the fraction.
_BITS = {torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}


def flip(values: torch.Tensor) -> None:
    """Flip the highest bit of the fraction of a tensor's largest element, in place."""
    words = values.view(_INTEGERS[values.element_size()])
    words[_largest(values)] ^= 1 << _BITS[values.dtype]


def make_nan(values: torch.Tensor) -> None:
    """Make a tensor's largest element NaN, in place."""
    values[_largest(values)] = math.nan


def _largest(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.unravel_index(values.abs().argmax(), values.shape)


def plant(fault: PlantedFault, model: GPTModel, *, rank: int) -> Callable[[int], None]:
    """Return the hook that applies the fault; call it at the begin of each iteration.

    Args:
        rank: this rank.
    """
    if rank != fault.rank:
        return lambda iteration: None
    if fault.kind == "weight":
        return lambda iteration: _hit_weight(fault, model.store, iteration)
    return _ActivationFault(fault, model).on_iteration


def _hit_weight(fault: PlantedFault, store: WeightStore, iteration: int) -> None:
    if iteration == fault.iteration:
        flip(store.buckets[0].data)


class _ActivationFault:
    """Hits what the first block returns, in one forward or in all from a step on."""

    def __init__(self, fault: PlantedFault, model: GPTModel) -> None:
        self._fault, self._armed = fault, False
        self._hit = make_nan if fault.kind.startswith("nan") else flip
        self._always = fault.kind.endswith("always")
        model.decoders[0].blocks[0].register_forward_hook(self._on_forward)

    def on_iteration(self, iteration: int) -> None:
        """Take note of the iteration that begins."""
        at = self._fault.iteration
        self._armed = iteration >= at if self._always else iteration == at

    def _on_forward(
        self, module: nn.Module, inputs: object, output: tuple[torch.Tensor, ...]
    ) -> None:
        if self._armed:
            self._armed = self._always
            # Bypass autograd: a memory fault is no recorded operation.
            self._hit(output[0].data)


class _PlantingHooks(TrainingHooks):
    def __init__(self, on_step_begin: Callable[[int], None]) -> None:
        self.on_step_begin = on_step_begin


def plant_fault(words: str, rank: int) -> None:
    """Plant the fault KIND@ITERATION:RANK in the runs of this process."""
    fault = PlantedFault.of(words)
    whole = pretraining.hooks_of

    def hooks_of(session, *arguments):
        return [*whole(session, *arguments), _PlantingHooks(plant(fault, session.model, rank=rank))]

    pretraining.hooks_of = hooks_of

# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a run: what a broken memory or unit does to an activation, or a weight.

One bit is flipped that halves a value at most or makes it half as large again, so that nothing is
Inf or NaN by it; or an activation becomes NaN. What is hit is the largest element of what the first
block of this rank returns, or of its first bucket of weights. The loop tells the fault of every
iteration that begins, as one of its hooks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.models.gpt import GPTModel
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
        found = re.fullmatch(r"([a-z-]+)@([1-9]\d*):(\d+)", words)
        assert found is not None, words
        assert found[1] in KINDS, words
        return PlantedFault(found[1], int(found[2]), int(found[3]))


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
    """Return what is to be told the iteration that begins, so that the fault is there in it.

    Args:
        rank: this one.
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

    def _on_forward(self, module: nn.Module, given: object, made: tuple[torch.Tensor, ...]) -> None:
        if self._armed:
            self._armed = self._always
            # Not a change that autograd would see: a fault of the memory is none.
            self._hit(made[0].data)


class _PlantingHooks(TrainingHooks):
    def __init__(self, on_step_begin: Callable[[int], None]) -> None:
        self.on_step_begin = on_step_begin


def plant_fault(words: str, rank: int) -> None:
    """Have this process's runs go wrong: the fault KIND@ITERATION:RANK, as its rank."""
    fault = PlantedFault.of(words)
    whole = pretraining.hooks_of

    def hooks_of(session, *rest):
        return [*whole(session, *rest), _PlantingHooks(plant(fault, session.model, rank=rank))]

    pretraining.hooks_of = hooks_of

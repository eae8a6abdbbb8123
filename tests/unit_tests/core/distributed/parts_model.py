# SPDX-License-Identifier: Apache-2.0
"""A small network in four parts on one rank, and steps that run them like chunks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import (
    BACKWARD,
    FORWARD,
    WeightHandle,
    WeightStore,
    WgradQueue,
    segment_name,
)
from megatron.core.weight_sharding import WeightSharding
from tests.unit_tests.core.distributed.small_model import tokens

VOCABULARY, HIDDEN = 13, 6
#: Weights of each part; part 2 has none.
SHAPES = {
    0: {"table": (VOCABULARY, HIDDEN), "first": (HIDDEN, HIDDEN), "first.bias": (HIDDEN,)},
    1: {"scale": (HIDDEN,), "second": (HIDDEN, HIDDEN), "third": (HIDDEN, HIDDEN)},
    2: {},
    3: {"head": (VOCABULARY, HIDDEN)},
}
PARTS = len(SHAPES)


class PartsModel:
    """Declares its parts in some order; `run` computes one."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        config: DataParallelConfig,
        *,
        bucket_bytes: int = 1,
        order: Sequence[int] = range(PARTS),
    ) -> None:
        self.store = WeightStore(groups, seed=9)
        for part in order:
            with self.store.model_chunk(part):
                self._declare(part)
        self.store.materialize(config.storage(bucket_bytes=bucket_bytes))

    def _declare(self, part: int) -> None:
        for name, shape in SHAPES[part].items():
            sharding = WeightSharding.of(name, shape, weight_decay=len(shape) > 1)
            unit = f"unit {name}" if part == 1 else f"unit of {part}"
            if name in ("table", "head"):
                self.store.declare(sharding, InitSpec.normal(0.6))
                continue
            with self.store.unit(unit):
                self.store.declare(sharding, InitSpec.normal(0.6))

    def run(self, part: int, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return what is behind a part; the loss behind the last. `x` are ids in the first."""
        use = self.store.handles
        if part == 0:
            return torch.tanh(use["first"].linear(use["table"].embedding(x), use["first.bias"]))
        if part == 1:
            inner = torch.tanh(use["second"].linear(x * use["scale"].use()))
            return x + use["third"].linear(inner)
        if part == 2:
            return torch.sin(x)
        return F.cross_entropy(use["head"].linear(x), targets, reduction="sum")


def plain_loss(weights: dict[str, torch.Tensor], ids: torch.Tensor, targets: torch.Tensor):
    """Return the same of all parts with autograd alone."""
    x = torch.tanh(
        F.linear(F.embedding(ids, weights["table"]), weights["first"], weights["first.bias"])
    )
    x = x + F.linear(
        torch.tanh(F.linear(x * weights["scale"], weights["second"])), weights["third"]
    )
    return F.cross_entropy(F.linear(torch.sin(x), weights["head"]), targets, reduction="sum")


class PartsReference:
    """The weights in fp64, trained by SGD over the data of all lanes."""

    def __init__(self, handles: dict[str, WeightHandle], lanes: int) -> None:
        self.lanes = lanes
        self.weights = {name: handle.get().double() for name, handle in handles.items()}

    def losses(self, lane: int, index: int) -> float:
        """Return the loss of one lane's microbatch."""
        return plain_loss(self.weights, *tokens(lane, index)).item()

    def gradients(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the gradients of the sum over all lanes' microbatches."""
        leaves = {n: w.clone().requires_grad_() for n, w in self.weights.items()}
        for lane in range(self.lanes):
            for i in indices:
                plain_loss(leaves, *tokens(lane, i)).backward()
        return {name: leaf.grad for name, leaf in leaves.items()}


#: Actions of a step, "kind part microbatch": all parts of a microbatch in turn; parts in turn, as
#: with virtual stages; and backward in halves, the second ones a microbatch or more late.
SCHEDULES = {
    "in turn": "F00 F10 F20 F30 B30 B20 B10 B00 F01 F11 F21 F31 B31 B21 B11 B01 "
    "F02 F12 F22 F32 B32 B22 B12 B02",
    "interleaved": "F00 G10 F01 F10 G20 F11 F20 G30 F21 F30 B30 F02 F31 B31 F12 B20 B10 F22 B21 "
    "F32 B32 B22 B11 B00 B12 B01 B02",
    "split": "F00 F10 F20 F30 F01 F11 F21 F31 I30 I20 I10 I00 I31 I21 W30 I11 W10 I01 W00 "
    "F02 F12 F22 F32 I32 W31 W32 I22 I12 W11 I02 W12 W20 W01 W21 W22 W02",
}


def actions_of(schedule: str) -> list[tuple[str, int, int]]:
    """Return a schedule's actions as (kind, part, microbatch)."""
    return [(word[0], int(word[1]), int(word[2])) for word in schedule.split()]


def program_of(actions: Sequence[tuple[str, int, int]]) -> list[str]:
    """Return the segments of a list of actions in order."""
    kinds = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD}
    return [segment_name(kinds[kind], part) for kind, part, _ in actions if kind in kinds]


def play(
    model: PartsModel, engine: DataParallel, schedule: str, indices: Sequence[int]
) -> list[torch.Tensor]:
    """Run a step's actions up to its gradients; return the losses."""
    actions, lane = actions_of(schedule), engine.groups["dense_dp"].rank
    engine.begin_step(program=program_of(actions))
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    queues: dict[tuple[int, int], WgradQueue] = {}
    losses, final = [], len(indices) - 1
    for kind, part, number in actions:
        at = part, number
        ids, targets = tokens(lane, indices[number])
        if kind == "F":
            engine.enter_segment(segment_name(FORWARD, part))
            x = ids if part == 0 else outputs[part - 1, number].detach().requires_grad_()
            inputs[at], outputs[at] = x, model.run(part, x, targets)
            if part == PARTS - 1:
                losses.append(outputs[at].detach())
        elif kind == "G":
            engine.prefetch_segment(segment_name(FORWARD, part))
        elif kind in "BI":
            if kind == "B" and number == final:
                engine.begin_last_backward(part)
            engine.enter_segment(segment_name(BACKWARD, part))
            out = outputs.pop(at)
            total = out if part == PARTS - 1 else (out * inputs.pop((part + 1, number)).grad).sum()
            if kind == "I":
                with model.store.defer() as queues[at]:
                    total.backward()
            else:
                total.backward()
                engine.post_backward(part)
        else:
            if number == final:
                engine.begin_last_backward(part)
            queues.pop(at).drain()
            engine.post_backward(part)
    assert not queues
    engine.finish()
    return losses

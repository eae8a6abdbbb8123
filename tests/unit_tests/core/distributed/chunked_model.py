# SPDX-License-Identifier: Apache-2.0
"""A small network in four model chunks on one rank, run in the orders of pipeline schedules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron.core import InitSpec, ProcessGroupCollection, WeightSharding
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.weight_gather import (
    BACKWARD,
    FORWARD,
    WeightHandle,
    WeightStore,
    WgradQueue,
    segment_name,
)
from tests.unit_tests.core.distributed.small_model import tokens

VOCABULARY, HIDDEN = 13, 6
#: Weights of each chunk; chunk 2 has none.
SHAPES = {
    0: {"table": (VOCABULARY, HIDDEN), "first": (HIDDEN, HIDDEN), "first.bias": (HIDDEN,)},
    1: {"scale": (HIDDEN,), "second": (HIDDEN, HIDDEN), "third": (HIDDEN, HIDDEN)},
    2: {},
    3: {"head": (VOCABULARY, HIDDEN)},
}
NUM_CHUNKS = len(SHAPES)


class ChunkedModel:
    """Model chunks declared in a given order; `run` computes a chunk."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        config: DataParallelConfig,
        *,
        bucket_bytes: int = 1,
        order: Sequence[int] = range(NUM_CHUNKS),
    ) -> None:
        self.store = WeightStore(groups, seed=9)
        for chunk in order:
            with self.store.model_chunk(chunk):
                self._declare(chunk)
        self.store.materialize(config.storage(bucket_bytes=bucket_bytes))

    def _declare(self, chunk: int) -> None:
        for name, shape in SHAPES[chunk].items():
            sharding = WeightSharding.of(name, shape, weight_decay=len(shape) > 1)
            unit = f"unit {name}" if chunk == 1 else f"unit of chunk {chunk}"
            if name in ("table", "head"):
                self.store.declare(sharding, InitSpec.normal(0.6))
                continue
            with self.store.unit(unit):
                self.store.declare(sharding, InitSpec.normal(0.6))

    def run(self, chunk: int, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a chunk's output, the loss for the last chunk; `x` holds ids for chunk 0."""
        use = self.store.handles
        if chunk == 0:
            return torch.tanh(use["first"].linear(use["table"].embedding(x), use["first.bias"]))
        if chunk == 1:
            inner = torch.tanh(use["second"].linear(x * use["scale"].use()))
            return x + use["third"].linear(inner)
        if chunk == 2:
            return torch.sin(x)
        return F.cross_entropy(use["head"].linear(x), targets, reduction="sum")


def plain_loss(weights: dict[str, torch.Tensor], ids: torch.Tensor, targets: torch.Tensor):
    """Return the loss of all chunks with plain autograd."""
    x = torch.tanh(
        F.linear(F.embedding(ids, weights["table"]), weights["first"], weights["first.bias"])
    )
    x = x + F.linear(
        torch.tanh(F.linear(x * weights["scale"], weights["second"])), weights["third"]
    )
    return F.cross_entropy(F.linear(torch.sin(x), weights["head"]), targets, reduction="sum")


class ChunkedReference:
    """The fp64 weights, trained by SGD over all ranks' data."""

    def __init__(self, handles: dict[str, WeightHandle], num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.weights = {name: handle.get().double() for name, handle in handles.items()}

    def losses(self, dp_rank: int, index: int) -> float:
        """Return the loss of a rank's microbatch."""
        return plain_loss(self.weights, *tokens(dp_rank, index)).item()

    def gradients(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the gradients of the loss summed over all ranks' microbatches."""
        leaves = {n: w.clone().requires_grad_() for n, w in self.weights.items()}
        for dp_rank in range(self.num_ranks):
            for i in indices:
                plain_loss(leaves, *tokens(dp_rank, i)).backward()
        return {name: leaf.grad for name, leaf in leaves.items()}


#: Actions of a step as "kind chunk microbatch": one microbatch after the other; interleaved, as
#: with virtual stages; and split backward, with weight gradients a microbatch or more later.
SCHEDULES = {
    "in turn": "F00 F10 F20 F30 B30 B20 B10 B00 F01 F11 F21 F31 B31 B21 B11 B01 "
    "F02 F12 F22 F32 B32 B22 B12 B02",
    "interleaved": "F00 G10 F01 F10 G20 F11 F20 G30 F21 F30 B30 F02 F31 B31 F12 B20 B10 F22 B21 "
    "F32 B32 B22 B11 B00 B12 B01 B02",
    "split": "F00 F10 F20 F30 F01 F11 F21 F31 I30 I20 I10 I00 I31 I21 W30 I11 W10 I01 W00 "
    "F02 F12 F22 F32 I32 W31 W32 I22 I12 W11 I02 W12 W20 W01 W21 W22 W02",
}


def actions_of(schedule: str) -> list[tuple[str, int, int]]:
    """Return a schedule's actions as (kind, chunk, microbatch)."""
    return [(action[0], int(action[1]), int(action[2])) for action in schedule.split()]


def program_of(actions: Sequence[tuple[str, int, int]]) -> list[str]:
    """Return the segments of the actions, in order."""
    kinds = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD}
    return [segment_name(kinds[kind], chunk) for kind, chunk, _ in actions if kind in kinds]


def run_schedule(
    model: ChunkedModel, engine: DataParallel, schedule: str, indices: Sequence[int]
) -> list[torch.Tensor]:
    """Run the actions of a step up to the gradients; return the losses."""
    actions, dp_rank = actions_of(schedule), engine.groups["dense_dp"].rank
    engine.begin_step(program=program_of(actions))
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    queues: dict[tuple[int, int], WgradQueue] = {}
    losses, last_microbatch = [], len(indices) - 1
    for kind, chunk, microbatch in actions:
        key = chunk, microbatch
        ids, targets = tokens(dp_rank, indices[microbatch])
        if kind == "F":
            engine.enter_segment(segment_name(FORWARD, chunk))
            x = ids if chunk == 0 else outputs[chunk - 1, microbatch].detach().requires_grad_()
            inputs[key], outputs[key] = x, model.run(chunk, x, targets)
            if chunk == NUM_CHUNKS - 1:
                losses.append(outputs[key].detach())
        elif kind == "G":
            engine.prefetch_segment(segment_name(FORWARD, chunk))
        elif kind in "BI":
            if kind == "B" and microbatch == last_microbatch:
                engine.begin_last_backward(chunk)
            engine.enter_segment(segment_name(BACKWARD, chunk))
            out = outputs.pop(key)
            total = (
                out
                if chunk == NUM_CHUNKS - 1
                else (out * inputs.pop((chunk + 1, microbatch)).grad).sum()
            )
            if kind == "I":
                with model.store.defer() as queues[key]:
                    total.backward()
            else:
                total.backward()
                engine.post_backward(chunk)
        else:
            if microbatch == last_microbatch:
                engine.begin_last_backward(chunk)
            queues.pop(key).drain()
            engine.post_backward(chunk)
    assert not queues
    engine.finish()
    return losses

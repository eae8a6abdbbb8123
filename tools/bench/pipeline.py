# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: the executor against its simulator, and the schedules against each other.

python -m tools.bench.pipeline                both, on 4 gloo ranks
python -m tools.bench.pipeline --only timed   sleeping chunks, against the simulated seconds
python -m tools.bench.pipeline --only model   steps of a real model, in turns, against 1F1B

Sleeping chunks use no core, so four chunks run concurrently on any machine, and the time beyond
the simulation is the overhead of the executor and the transfers. A real model's ranks share the
cores: on two cores four stages compute two at a time, so a bubble costs nothing, and the figures
show the additional work of a schedule.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.optimizer import Optimizer
from megatron.core.pipeline_parallel import Schedule, Times, make_schedule, simulate, with_transfers
from megatron.core.pipeline_parallel.runtime import Executor
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.training.step import Microbatch, PipelineForwardBackward, TrainStep
from tools.bench import gloo_ranks, shapes
from tools.bench.gloo_ranks import LOSS, STEP, Measured
from tools.bench.harness import run_rows
from tools.bench.mcore_step import OPTIMIZER, config_of
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row

#: Schedules and their chunks per stage.
SCHEDULES: Mapping[str, int] = MappingProxyType({"1f1b": 1, "interleaved": 2, "zb-h1": 1})
MICROBATCHES = 8
WARMUP_ROUNDS = 2


@dataclass
class Sleeper:
    """The chunks of a rank: each action takes its time, and no processor."""

    times: Times
    chunks: int

    def recv_buffer(self, microbatch: int) -> torch.Tensor:
        """Return room for a boundary tensor."""
        return torch.empty(64, 64)

    def forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Take a forward's time."""
        self._take(self.times.forward)
        return torch.zeros(64, 64)

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, *, split: bool
    ) -> torch.Tensor:
        """Take the time of input gradients, and of weight gradients unless they are put off."""
        weights = 0.0 if split else self.times.weight_gradient
        self._take(self.times.input_gradient + weights)
        return torch.zeros(64, 64)

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Take the time of weight gradients."""
        self._take(self.times.weight_gradient)

    def gather(self, chunk: int, microbatch: int) -> None:
        """Do nothing: no weights."""

    def reduce(self, chunk: int, microbatch: int) -> None:
        """Do nothing: no gradients."""

    def _take(self, seconds: float) -> None:
        time.sleep(seconds / self.chunks)


def schedule_of(name: str, stages: int) -> Schedule:
    """Return a schedule with its transfers."""
    return with_transfers(
        make_schedule(name, stages=stages, microbatches=MICROBATCHES, chunks=SCHEDULES[name])
    )


def slept(rank: int, world: int, times: Times, rounds: int) -> dict[str, list[Measured]]:
    """Run chunks that sleep under every schedule, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)

    def run(name: str, index: int) -> Measured:
        chunks = Sleeper(times, SCHEDULES[name])
        pp, backward = groups["pp"], groups["pp_backward"]
        Executor(schedule_of(name, world), chunks, group=pp, backward_group=backward).run()
        return {}

    variants = {name: partial(run, name) for name in SCHEDULES}
    return gloo_ranks.take_turns(variants, rounds=rounds, warmup=1)


def timed_rows(rounds: int, *, stages: int) -> list[Row]:
    """Run chunks that sleep, and compare with the simulator."""
    times = Times(forward=0.03, input_gradient=0.04, weight_gradient=0.02)
    ranks = gloo_ranks.run(slept, stages, times, rounds)
    table_rows = []
    for name, chunks in SCHEDULES.items():
        of_chunk = Times(**{phase: value / chunks for phase, value in vars(times).items()})
        expected = simulate(schedule_of(name, stages), of_chunk).makespan
        what = f"{stages} ranks: ms of {name}, sleeping/simulated, {rounds} rounds"
        seconds = gloo_ranks.over_ranks(ranks, name, STEP)
        row = gloo_ranks.row("pipeline", what, seconds, [expected] * rounds, target="<= 1.05")
        table_rows.append(row)
    return table_rows


class ModelStep:
    """Steps of one model under one schedule."""

    def __init__(self, shape: Shape, groups: ProcessGroupCollection, name: str) -> None:
        config = DataParallelConfig()
        split = StageSplit.even(shape.layers, groups["pp"].size, chunks=SCHEDULES[name])
        self.model = GPTModel(
            config_of(shape), groups, seed=shapes.SEED, storage=config.storage(), split=split
        )
        engine = DataParallel(self.model.store, groups, config=config)
        self.step = TrainStep(
            self.model,
            engine,
            optimizer=Optimizer(engine.owned(), groups, config=OPTIMIZER),
            groups=groups,
            forward_backward=PipelineForwardBackward(
                self.model, engine, groups=groups, schedule=name
            ),
        )

    def __call__(self, batches: list[Microbatch]) -> float:
        """Train one step; return its loss."""
        report = self.step(batches, lr=shapes.LEARNING_RATE, weight_decay=shapes.WEIGHT_DECAY)
        return report.loss


def batches_of(shape: Shape, index: int) -> list[Microbatch]:
    """Return the microbatches of one step."""
    generator = torch.Generator().manual_seed(index)
    batches = []
    for number in range(MICROBATCHES):
        size = (shape.batch, shape.sequence + 1)
        tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
        batches.append(
            Microbatch(
                tokens=tokens[:, :-1],
                labels=tokens[:, 1:],
                loss_mask=torch.ones(shape.batch, shape.sequence),
                layout=SequenceLayout.of_rows(
                    shape.sequence, sample_ids=torch.arange(shape.batch) + number * shape.batch
                ),
            )
        )
    return batches


def stepped(
    rank: int, world: int, shape: Shape, names: tuple[str, ...], rounds: int
) -> dict[str, list[Measured]]:
    """Train under every schedule, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    steps = {name: ModelStep(shape, groups, name) for name in names}

    def run(name: str, index: int) -> Measured:
        return {LOSS: steps[name](batches_of(shape, index))}

    variants = {name: partial(run, name) for name in names}
    return gloo_ranks.take_turns(variants, rounds=rounds, warmup=WARMUP_ROUNDS)


def model_rows(rounds: int, *, stages: int) -> list[Row]:
    """Race every schedule against 1F1B on a real model."""
    shape = replace(SHAPES["S"], layers=2 * stages, batch=2)
    ranks = gloo_ranks.run(stepped, stages, shape, (*SCHEDULES,), rounds)
    gloo_ranks.check_losses(ranks, (*SCHEDULES,))
    return [
        gloo_ranks.row(
            "pipeline",
            f"{stages} ranks: {unit}, {name}/1f1b, {rounds} rounds",
            gloo_ranks.over_ranks(ranks, name, phase),
            gloo_ranks.over_ranks(ranks, "1f1b", phase),
            target="<= 1.05" if name == "zb-h1" and phase == STEP else "",
        )
        for name in list(SCHEDULES)[1:]
        for phase, unit in gloo_ranks.UNITS.items()
    ]


def rows(
    quick: bool = False, *, only: Sequence[str] = ("timed", "model"), ranks: int = 4
) -> list[Row]:
    """Measure sleeping chunks, and a real model.

    Args:
        only: one of the two.
        ranks: number of pipeline stages.
    """
    sections = {
        "timed": (timed_rows, 2 if quick else 10),
        "model": (model_rows, 4 if quick else 20),
    }
    return [row for name in only for row in sections[name][0](sections[name][1], stages=ranks)]


if __name__ == "__main__":
    run_rows(rows, __doc__)

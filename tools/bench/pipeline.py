# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: the executor against its simulator, and the schedules against each other.

python -m tools.bench.pipeline                both, on 4 gloo ranks
python -m tools.bench.pipeline --timed        sleeping chunks, against the simulated seconds
python -m tools.bench.pipeline --model        steps of a real model, in turns, against 1F1B

Sleeping chunks use no core, so four of them run concurrently on any machine, and the time beyond
the simulation is the overhead of the executor and the transfers. A real model's ranks share the
cores: on two cores four stages compute two at a time, so a bubble costs nothing, and the figures
show the additional work of a schedule.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.distributed as dist

from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.pipeline_parallel import Schedule, Times, make_schedule, simulate, with_transfers
from megatron.core.pipeline_parallel.runtime import Executor
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.training.pipeline_step import PipelineForwardBackward
from megatron.training.step import Microbatch, TrainStep
from tools.bench import gloo_ranks, shapes
from tools.bench.mcore_step import config_of
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared, format_table

#: Schedules and their chunks per stage.
SCHEDULES: Mapping[str, int] = MappingProxyType({"1f1b": 1, "interleaved": 2, "zb-h1": 1})
MICROBATCHES = 8
WARMUP_ROUNDS = 2
LOSS_ERROR = 1e-5  # relative


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


def slept(rank: int, world: int, times: Times, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round of every schedule, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    timings: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for index in range(1 + rounds):
        for name, chunks in SCHEDULES.items():
            schedule = schedule_of(name, world)
            dist.barrier()
            start = time.perf_counter()
            Executor(
                schedule,
                Sleeper(times, chunks),
                group=groups["pp"],
                backward_group=groups["pp_backward"],
            ).run()
            if index:
                timings[name].append(time.perf_counter() - start)
    return timings


def timed_rows(rounds: int, *, stages: int = 4) -> list[Row]:
    """Run chunks that sleep, and compare with the simulator."""
    times = Times(forward=0.03, input_gradient=0.04, weight_gradient=0.02)
    measured = gloo_ranks.run(slept, stages, times, rounds)
    table_rows = []
    for name, chunks in SCHEDULES.items():
        part_times = Times(
            forward=times.forward / chunks,
            input_gradient=times.input_gradient / chunks,
            weight_gradient=times.weight_gradient / chunks,
        )
        expected = simulate(schedule_of(name, stages), part_times).makespan
        seconds = [max(ranks) for ranks in zip(*(rank[name] for rank in measured), strict=True)]
        table_rows.append(
            compared(
                bench="pipeline",
                what=f"{stages} ranks: ms of {name}, sleeping/simulated, {rounds} rounds",
                mcore=1e3 * statistics.median(seconds),
                peer=1e3 * expected,
                ratio=statistics.median(seconds) / expected,
                target="<= 1.05",
            )
        )
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
        settings = OptimizerConfig(
            adam_beta1=shapes.BETAS[0],
            adam_beta2=shapes.BETAS[1],
            adam_eps=shapes.EPSILON,
            clip_grad=shapes.CLIP,
        )
        self.step = TrainStep(
            self.model,
            engine,
            optimizer=Optimizer(engine.owned(), groups, config=settings),
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
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds and processor seconds of every step of every schedule, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    steps = {name: ModelStep(shape, groups, name) for name in names}
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(WARMUP_ROUNDS + rounds):
        batches = batches_of(shape, index)
        turn = index % len(names)
        losses = {}
        for name in (*names[turn:], *names[:turn]):
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            losses[name] = steps[name](batches)
            seconds = time.perf_counter() - start, time.process_time() - used
            if index >= WARMUP_ROUNDS:
                timings[name].append(seconds)
        low, high = min(losses.values()), max(losses.values())
        if high - low > LOSS_ERROR * abs(high):
            raise ValueError(f"step {index}: the losses differ, so the race is void: {losses}")
    return timings


def model_rows(rounds: int, *, stages: int = 4) -> list[Row]:
    """Race every schedule against 1F1B on a real model."""
    shape = replace(SHAPES["S"], layers=2 * stages, batch=2)
    measured = gloo_ranks.run(stepped, stages, shape, (*SCHEDULES,), rounds)

    def over_ranks(name: str, index: int) -> list[float]:
        total = sum if index else max
        steps = zip(*(rank[name] for rank in measured), strict=True)
        return [total(seconds[index] for seconds in step) for step in steps]

    table_rows = []
    for name in SCHEDULES:
        for index, unit in enumerate(("ms", "cpu ms of all ranks")):
            mcore, peer = over_ranks(name, index), over_ranks("1f1b", index)
            if name == "1f1b":
                continue
            table_rows.append(
                compared(
                    bench="pipeline",
                    what=f"{stages} ranks: {unit} of a step, {name}/1f1b, {rounds} rounds",
                    mcore=1e3 * statistics.median(mcore),
                    peer=1e3 * statistics.median(peer),
                    ratio=statistics.median(a / b for a, b in zip(mcore, peer, strict=True)),
                    target="<= 1.05" if name == "zb-h1" and not index else "",
                )
            )
    return table_rows


def rows(quick: bool) -> list[Row]:
    """Measure both."""
    return timed_rows(2 if quick else 10) + model_rows(4 if quick else 20)


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--timed", action="store_true", help="chunks that sleep")
    parser.add_argument("--model", action="store_true", help="a real model")
    arguments = parser.parse_args()
    table_rows = []
    if arguments.timed or not arguments.model:
        table_rows += timed_rows(arguments.rounds, stages=arguments.ranks)
    if arguments.model or not arguments.timed:
        table_rows += model_rows(arguments.rounds, stages=arguments.ranks)
    print(format_table(table_rows))


if __name__ == "__main__":
    main()

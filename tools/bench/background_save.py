# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a background save for a training run.

    python -m tools.bench.background_save [--rounds 7] [--folder DIR]

Each repeat does three things, in rotating order: train some steps, save synchronously, and save in
the background while training continues until the commit. Training is blocked during `save` and
`settle`. Its speed during the save is the rate of whole steps relative to steps without a save, so
copying, hashing and writing all count.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    Solo,
    TensorChunk,
    optimizer_chunks,
    save_checkpoint,
    weight_chunks,
)
from tools.bench import gloo_ranks
from tools.bench.harness import run_rows
from tools.bench.mcore_step import training_parts
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared

#: Steps that are timed without a save, in every repeat.
STEPS = 4

#: 43 million weights: with the moments of Adam 516 MB.
SHAPE = replace(SHAPES["M"], layers=11, batch=2, sequence=256)

SMALL_CHUNKS = 5000


class Trained:
    """Something that trains and is saved.

    Args:
        chunks: what there is to save.
        step: trains one step; calls `before_update` of this object before anything changes.
    """

    def __init__(self) -> None:
        self.settle: Callable[[], None] = lambda: None
        self.held_seconds = 0.0

    def before_update(self) -> None:
        """Wait until the state may change, and count how long."""
        start = time.perf_counter()
        self.settle()
        self.held_seconds += time.perf_counter() - start


def large(shape: Shape, trained: Trained) -> tuple[Callable[[], object], list[TensorChunk]]:
    """Return the step and the state of a model."""
    step, model, optimizer = training_parts(shape, bf16=False, before_update=trained.before_update)
    return step, weight_chunks(model.store) + optimizer_chunks(optimizer)


def many(trained: Trained) -> tuple[Callable[[], object], list[TensorChunk]]:
    """Return a step of matrix products beside thousands of chunks of four numbers."""
    a = torch.randn(1024, 1024)
    tensors = [torch.randn(4) for _ in range(SMALL_CHUNKS)]

    def step() -> None:
        for _ in range(12):
            a @ a
        trained.before_update()
        tensors[0].add_(1.0)

    chunks = [
        TensorChunk(
            name=f"decoder.blocks.{i}.mlp.gate.weight",
            shape=(4,),
            offsets=(0,),
            tensor=tensor,
            replica_ranks=(0,),
        )
        for i, tensor in enumerate(tensors)
    ]
    return step, chunks


def rows(quick: bool = False, *, rounds: int = 0, folder: str = "") -> list[Row]:
    """Measure a large state, which is a model's, and a state of many small chunks.

    Args:
        quick: a smaller model.
        rounds: measurements of each way; 0 is 7, or 1 with `quick`.
        folder: where to write; "" is the system's temporary folder.
    """
    rounds, shape = rounds or (1 if quick else 7), replace(SHAPE, layers=3) if quick else SHAPE
    table_rows: list[Row] = []
    megabytes = f"{shape.parameters * 12 / 1e6:.0f} MB"
    cases = ((partial(large, shape), megabytes), (many, f"{SMALL_CHUNKS} chunks of 16 bytes"))
    for make, what in cases:
        with tempfile.TemporaryDirectory(dir=folder or None, prefix="background-save-") as root:
            seconds = _race(make, Path(root), rounds)
        medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
        blocked = gloo_ranks.ratio(seconds["held"], seconds["sync"])
        speed = gloo_ranks.ratio(seconds["step"], seconds["during"])
        commit = medians["commit"] / medians["sync"]
        for measured, mcore, peer, ratio, target in (
            ("held up, ms / saving at once", "held", "sync", blocked, "<= 0.1"),
            ("step meanwhile, ms / without (ratio of speeds)", "during", "step", speed, ">= 0.9"),
            ("from begin to commit, ms / at once", "commit", "sync", commit, ""),
        ):
            table_rows.append(
                compared(
                    bench="background_save",
                    what=f"{what}: {measured}",
                    mcore=medians[mcore],
                    peer=medians[peer],
                    ratio=ratio,
                    target=target,
                )
            )
    return table_rows


def _race(
    make: Callable[[Trained], tuple[Callable[[], object], list[TensorChunk]]],
    root: Path,
    repeats: int,
) -> dict[str, list[float]]:
    """Return seconds of each repeat: of a step, of saving at once, and of the background."""
    trained = Trained()
    step, chunks = make(trained)
    saver = AsyncSaver(root / "background", chunks, coordinator=Solo())
    saver.wait()
    trained.settle = saver.synchronize_staging
    seconds_by_variant: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):  # the first round warms up
        seconds: dict[str, float] = {}

        def plain(seconds: dict[str, float] = seconds) -> None:
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            seconds["step"] = (time.perf_counter() - start) / STEPS

        def at_once(seconds: dict[str, float] = seconds, repeat: int = repeat) -> None:
            start = time.perf_counter()
            save_checkpoint(root / "sync", repeat, chunks, {}, coordinator=Solo())
            seconds["sync"] = time.perf_counter() - start

        def background(seconds: dict[str, float] = seconds, repeat: int = repeat) -> None:
            trained.held_seconds, count = 0.0, 0
            start = time.perf_counter()
            saver.save(repeat, {})
            blocked = time.perf_counter() - start
            while not (reports := saver.finished()):
                step()
                count += 1
            seconds["during"] = (time.perf_counter() - start) / count
            seconds["held"] = blocked + trained.held_seconds
            seconds["commit"] = reports[0].seconds
            if reports[0].error is not None:
                raise RuntimeError(reports[0].error)

        ways = [plain, at_once, background]
        for way in ways[repeat % 3 :] + ways[: repeat % 3]:
            way()
        for name in ("sync", "background"):
            shutil.rmtree(root / name / f"iter_{repeat:07d}")
        if repeat:
            for name, value in seconds.items():
                seconds_by_variant[name].append(value)
    saver.close()
    return seconds_by_variant


if __name__ == "__main__":
    run_rows(rows, __doc__)

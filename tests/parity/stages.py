# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a parity row: how its model is cut, what a rank has, what runs its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.stages import StageSplit
from megatron.core.pipeline_parallel import Action
from megatron.training.pipeline_step import PipelineForwardBackward
from tests.support.covering_array import Row

CHUNKS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1}


@dataclass(frozen=True)
class StagePart:
    """What of the model a rank has, and the list that it is to carry out.

    Args:
        blocks: how many, over all chunks.
        again: of them, those that are computed again in backward.
        embedding, head: whether it has these.
    """

    blocks: int
    again: int
    embedding: bool
    head: bool
    listed: tuple[Action, ...] = ()


def stage_split(row: Row, layers: int) -> StageSplit:
    """Return which blocks of the model each chunk of each stage has: some have none, and cuts go
    through layers."""
    blocks, stages = 2 * layers, row["pp"] * CHUNKS[row["schedule"]]
    ends = [(2 * i * blocks + stages) // (2 * stages) for i in range(1, stages)]
    if row["cut"] == "uneven":
        ends = [max(0, end - 1) for end in ends]
    symbols = ["*-"[i % 2] for i in range(blocks)]
    for end in reversed(ends):
        symbols.insert(end, "|")
    return StageSplit.from_pattern("".join(symbols), row["pp"])


def pipeline(
    row: Row,
    model: Any,
    engine: DataParallel,
    observe: Callable[[Action], None] | None = None,
) -> PipelineForwardBackward | None:
    """Return what carries out a step on several stages."""
    if engine.groups["pp"].size == 1:
        return None
    size = None
    if row["schedule"] == "interleaved" and row["accumulation"] % row["pp"]:
        size = row["accumulation"]  # a last group of fewer microbatches than stages cannot be
    return PipelineForwardBackward(
        model,
        engine,
        groups=engine.groups,
        schedule=row["schedule"],
        group_size=size,
        observe=observe,
    )


def stage_part(row: Row, model: GPTModel, engine: DataParallel) -> StagePart:
    """Return what of the model this rank has."""
    runs = [run for decoder in model.decoders for run in decoder.runs]
    runner, listed = pipeline(row, model, engine), ()
    if runner is not None:
        listed = runner.schedule(row["accumulation"]).ranks[engine.groups["pp"].rank]
    return StagePart(
        blocks=sum(len(decoder.blocks) for decoder in model.decoders),
        again=sum(last - first for first, last, again in runs if again),
        embedding=model.holds_embedding,
        head=model.holds_head,
        listed=listed,
    )

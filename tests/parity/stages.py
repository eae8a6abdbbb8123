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
from megatron.core.transformer import SelfAttention
from megatron.training.pipeline_step import PipelineForwardBackward
from tests.support.covering_array import Row

CHUNKS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1}


@dataclass(frozen=True)
class StagePart:
    """What of the model a rank has, and the list that it is to carry out.

    Args:
        blocks: how many, over all chunks.
        again: of them, those that are computed again in backward.
        attentions, attentions_again: of these, those that are attention.
        embedding, head: whether it has these.
    """

    blocks: int
    again: int
    attentions: int
    attentions_again: int
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
    return PipelineForwardBackward(
        model,
        engine,
        groups=engine.groups,
        schedule=row["schedule"],
        weight_delay=0 if row["schedule"] == "zb-h1" and row["recompute"] == "full" else None,
        observe=observe,
    )


def stage_part(row: Row, model: GPTModel, engine: DataParallel) -> StagePart:
    """Return what of the model this rank has."""
    blocks = [block for decoder in model.decoders for block in decoder.blocks]
    again = [
        block
        for decoder in model.decoders
        for first, last, is_again in decoder.runs
        if is_again
        for block in list(decoder.blocks)[first:last]
    ]
    runner, listed = pipeline(row, model, engine), ()
    if runner is not None:
        listed = runner.schedule(row["accumulation"]).ranks[engine.groups["pp"].rank]
    return StagePart(
        blocks=len(blocks),
        again=len(again),
        attentions=sum(isinstance(block.mixer, SelfAttention) for block in blocks),
        attentions_again=sum(isinstance(block.mixer, SelfAttention) for block in again),
        embedding=model.holds_embedding,
        head=model.holds_head,
        listed=listed,
    )

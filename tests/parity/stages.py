# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a parity row: the split of its model, a rank's blocks, the schedule."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DataParallel
from megatron.core.models import GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import MoE
from megatron.core.pipeline_parallel import Action
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.transformer import MLP, LatentAttention, SelfAttention
from megatron.training.step import PipelineForwardBackward
from tests.parity.recurrent import parallel_pattern
from tests.support.covering_array import Row

CHUNKS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1}


@dataclass(frozen=True)
class Blocks:
    """Numbers of blocks of a kind on a rank.

    Args:
        count: number over all chunks and MTP layers.
        again: number of recomputed blocks.
    """

    count: int
    again: int


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of a rank's stage, and its list of pipeline actions.

    Args:
        plain: grouped-query attention, recurrent mixers, and MLPs.
        latent: latent attention.
        experts: mixtures of experts.
        shared: mixtures with a shared expert.
        attentions: attention of both kinds.
        recurrent: gated delta nets and Mamba-2.
        embeddings, heads: numbers of uses of the embedding and the head.
    """

    plain: Blocks
    latent: Blocks
    experts: Blocks
    shared: Blocks
    attentions: Blocks
    recurrent: Blocks
    embeddings: int
    heads: int
    listed: tuple[Action, ...] = ()

    @property
    def embedding(self) -> bool:
        return self.embeddings > 0

    @property
    def head(self) -> bool:
        return self.heads > 0


def stage_split(row: Row, pattern: str) -> StageSplit:
    """Return the split of the model's blocks into chunks of stages: some chunks are empty, and cuts
    are within layers, except between parallel blocks."""
    symbols = list(pattern)
    if row["parallel"]:
        symbols = re.findall(r"\(.*?\)", parallel_pattern(pattern))
    blocks, stages = len(symbols), row["pp"] * CHUNKS[row["schedule"]]
    ends = [(2 * i * blocks + stages) // (2 * stages) for i in range(1, stages)]
    if row["cut"] == "uneven":
        ends = [max(0, end - 1) for end in ends]
    for end in reversed(ends):
        symbols.insert(end, "|")
    return StageSplit.from_pattern("".join(symbols), row["pp"])


def pipeline(
    row: Row,
    model: Any,
    engine: DataParallel,
    observe: Callable[[Action], None] | None = None,
) -> PipelineForwardBackward | None:
    """Return the forward and backward of a step on several stages; None for a single stage."""
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


def stage_blocks(row: Row, model: GPTModel, engine: DataParallel) -> StageBlocks:
    """Return the blocks of this rank's stage."""
    depths = [] if model.multi_token is None else list(model.multi_token.layers)
    decoders = [*model.decoders, *(depth.decoder for depth in depths)]
    mixers = [m for decoder in decoders for block in decoder.blocks for m in block.mixers]
    again = [
        mixer
        for decoder in decoders
        for start, stop, is_again in decoder.runs
        if is_again
        for block in list(decoder.blocks)[start:stop]
        for mixer in block.mixers
    ]

    def of(predicate: Callable[[Any], bool]) -> Blocks:
        return Blocks(sum(map(predicate, mixers)), sum(map(predicate, again)))

    runner, listed = pipeline(row, model, engine), ()
    if runner is not None:
        listed = runner.schedule(row["accumulation"]).ranks[engine.groups["pp"].rank]
    return StageBlocks(
        plain=of(lambda mixer: isinstance(mixer, (SelfAttention, MLP, RecurrentMixer))),
        latent=of(lambda mixer: isinstance(mixer, LatentAttention)),
        experts=of(lambda mixer: isinstance(mixer, MoE)),
        shared=of(lambda mixer: isinstance(mixer, MoE) and mixer.shared is not None),
        attentions=of(lambda mixer: isinstance(mixer, (SelfAttention, LatentAttention))),
        recurrent=of(lambda mixer: isinstance(mixer, RecurrentMixer)),
        embeddings=model.holds_embedding + len(depths),
        heads=model.holds_head + len(depths),
        listed=listed,
    )

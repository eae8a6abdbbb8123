# SPDX-License-Identifier: Apache-2.0
"""Options of pipeline parallelism and their checks; `stages.py` checks the layers of each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import not_negative, positive, require_all


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism."""

    pipeline_model_parallel_size: int = 1
    """Number of pipeline stages, each of which holds a contiguous part of the layers."""
    pipeline_schedule: Literal["auto", "1f1b", "interleaved", "zb-h1"] = "auto"
    """Pipeline schedule: 1f1b; interleaved, which needs several virtual stages per rank; zb-h1,
    which splits the backward pass and fills pipeline bubbles with weight gradients. auto is
    interleaved with virtual stages, else 1f1b."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per virtual pipeline stage; the number of virtual stages follows from it."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages (model chunks) per pipeline rank."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Consecutive microbatches that a virtual stage processes before the rank turns to its next
    one; derived: the number of stages."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage; the remaining layers are divided evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage; the remaining layers are divided evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when dividing layers evenly."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output head and the loss as a layer when dividing layers evenly."""
    pipeline_model_parallel_layout: str | None = None
    """Explicit contents of each virtual stage, in the model's order: E embedding, t layer, L loss,
    | between stages, as in Et*3|(tt|)*2tL."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(
                self,
                "pipeline_model_parallel_size",
                "num_layers_per_virtual_pipeline_stage",
                "num_virtual_stages_per_pipeline_rank",
                "microbatch_group_size_per_virtual_pipeline_stage",
            ),
            lambda: not_negative(
                self, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
            ),
        )

    def non_default_flags(self, *names: str) -> list[str]:
        """Return the named options whose value is not the default, as flags with values."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: vars(self)[name] for name in names}
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in values.items()
            if value != defaults[name]
        ]


_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")

_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def problems(config: PipelineConfig, cut_pattern: str | None) -> Iterator[str]:
    """List pipeline options that cannot be combined, each with its fix.

    Args:
        cut_pattern: the layer pattern if it contains stage boundaries, else None.
    """
    pattern_flags = [] if cut_pattern is None else [f"--hybrid-layer-pattern {cut_pattern}"]
    if config.pipeline_model_parallel_size == 1:
        idle = config.non_default_flags(*(field.name for field in dataclasses.fields(config)))
        for flag in idle + pattern_flags:
            yield f"{flag} has no effect without --pipeline-model-parallel-size above 1: raise that"
        return
    ways = config.non_default_flags("pipeline_model_parallel_layout") + pattern_flags
    if len(ways) > 1:
        yield f"{' and '.join(ways)} are mutually exclusive: keep one"
    for flag in config.non_default_flags(*_VIRTUAL, *_UNEVEN) if ways else ():
        yield f"{flag} has no effect with {ways[0]}, which places every layer: drop one"
    if len(virtual := config.non_default_flags(*_VIRTUAL)) > 1:
        yield f"{' and '.join(virtual)} are mutually exclusive: keep one"

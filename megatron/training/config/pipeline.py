# SPDX-License-Identifier: Apache-2.0
"""How the layers are cut into pipeline stages, and in which order the stages work."""

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
    """Pipeline stages: ranks that each have a part of the layers and pass on what comes out."""
    pipeline_schedule: Literal["auto", "1f1b", "interleaved", "zb-h1"] = "auto"
    """In which order a stage works: 1f1b; interleaved, which needs several virtual stages per
    rank; zb-h1, which cuts backward in two and fills waiting with weight gradients. auto is
    interleaved with virtual stages, else 1f1b."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of each virtual stage; a rank has as many as its layers make."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages of each rank, the chunks of layers that it takes turns on."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Microbatches in a row that a virtual stage works on before the rank's next one; derived: the
    number of stages."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first stage; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage; the others share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when layers are split evenly."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the head and the loss as a layer when layers are split evenly."""
    pipeline_model_parallel_layout: str | None = None
    """What each virtual stage has, in the model's order: E the embedding, t a layer, L the loss, |
    between stages, as in Et*3|(tt|)*2tL."""

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

    def given(self, *names: str) -> list[str]:
        """Return those of the named options that have another value than their default, as flags
        with their values."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        found = {name: vars(self)[name] for name in names}
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in found.items()
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
    """Name what does not go together here, each with its mend.

    Args:
        cut_pattern: the layer pattern if it says where stages begin, else None.
    """
    shown = [] if cut_pattern is None else [f"--hybrid-layer-pattern {cut_pattern}"]
    if config.pipeline_model_parallel_size == 1:
        idle = config.given(*(field.name for field in dataclasses.fields(config)))
        for flag in idle + shown:
            yield f"{flag} has no effect without --pipeline-model-parallel-size above 1: raise that"
        return
    ways = config.given("pipeline_model_parallel_layout") + shown
    if len(ways) > 1:
        yield f"{' and '.join(ways)} exclude each other: keep one"
    for flag in config.given(*_VIRTUAL, *_UNEVEN) if ways else ():
        yield f"{flag} has no effect with {ways[0]}, which says where each layer is: drop one"
    if len(virtual := config.given(*_VIRTUAL)) > 1:
        yield f"{' and '.join(virtual)} exclude each other: keep one"

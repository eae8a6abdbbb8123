# SPDX-License-Identifier: Apache-2.0
"""The pipeline that options describe: which layers each stage has, and its order of work."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.datasets.division import Division
from megatron.core.models.pattern import (
    ATTENTION,
    DENSE,
    EXPERTS,
    layer_blocks,
    symbols_of,
)
from megatron.core.models.stages import (
    StageSplit,
    even_problems,
    layout_problems,
    pattern_problems,
)
from megatron.core.pipeline_parallel import schedule
from megatron.training.config import Config, pipeline


def stage_split(config: Config) -> StageSplit:
    """Return the layers of every virtual stage; `problems` must have found nothing."""
    chosen, layers = config.pipeline, config.model.num_layers
    stages = chosen.pipeline_model_parallel_size
    if chosen.pipeline_model_parallel_layout is not None:
        layout = chosen.pipeline_model_parallel_layout
        return StageSplit.from_layout(layout, stages, num_layers=layers)
    if chosen.hybrid_layer_pattern is not None and chosen.cuts_pattern:
        kinds = _layer_kinds(config)
        return StageSplit.from_pattern(chosen.hybrid_layer_pattern, stages, ffn_pattern=kinds)
    chunks = _even_chunks(config)
    assert chunks is not None, "check() asks for chunks of the same size"
    return StageSplit.even(layers, stages, chunks=chunks, **_exceptions(config))


def schedule_name(config: Config) -> str:
    """Return the schedule that the stages of a config without problems follow."""
    return _schedule_name(config, stage_split(config).chunks)


def problems(config: Config, world_size: int) -> Iterator[str]:
    """Name what is wrong with the stages on `world_size` processes, each with its mend."""
    chosen = config.pipeline
    found = [*pipeline.problems(chosen), *_pattern(config)]
    if chosen.pipeline_model_parallel_size > 1:
        found += _layers(config)
        chunks = _chunks(config)
        if chunks is not None:
            found += _order(config, world_size, chunks=chunks)
        if not found:
            found += _recompute(config)
    yield from found


def _schedule_name(config: Config, chunks: int) -> str:
    chosen = config.pipeline.pipeline_schedule
    if chosen != "auto":
        return chosen
    return "interleaved" if chunks > 1 else "1f1b"


def _chunks(config: Config) -> int | None:
    """Return the virtual stages of each rank; None if the options do not say."""
    chosen = config.pipeline
    written = chosen.pipeline_model_parallel_layout
    if written is None and chosen.cuts_pattern:
        written = chosen.hybrid_layer_pattern
    if written is None:
        both = (
            chosen.num_layers_per_virtual_pipeline_stage,
            chosen.num_virtual_stages_per_pipeline_rank,
        )
        return None if None not in both else _even_chunks(config)
    parts, stages = written.count("|") + 1, chosen.pipeline_model_parallel_size
    return None if parts % stages or "(" in written else parts // stages


def _pattern(config: Config) -> Iterator[str]:
    """Compare a pattern that cuts nothing with the model."""
    pattern, cuts = config.pipeline.hybrid_layer_pattern, config.pipeline.cuts_pattern
    if pattern is not None and not cuts:
        for problem in pattern_problems(pattern, 1, ffn_pattern=_layer_kinds(config)):
            yield f"--hybrid-layer-pattern: {problem}"


def _layer_kinds(config: Config) -> str:
    """Return what follows attention in each layer, which the layer pattern says if it says as many.

    Where it has experts and the model none, or not in these layers, `experts.problems` says so.
    """
    pattern, layers = config.pipeline.hybrid_layer_pattern or "", config.model.num_layers
    kinds = symbols_of(pattern).replace(ATTENTION, "")
    return kinds if len(kinds) == layers and EXPERTS in kinds else DENSE * layers


def _layers(config: Config) -> Iterator[str]:
    """Name what is wrong with how layers are cut into stages."""
    chosen, layers = config.pipeline, config.model.num_layers
    stages = chosen.pipeline_model_parallel_size
    if chosen.pipeline_model_parallel_layout is not None:
        flag = "--pipeline-model-parallel-layout"
        layout = chosen.pipeline_model_parallel_layout
        found = layout_problems(layout, stages, num_layers=layers)
    elif chosen.hybrid_layer_pattern is not None and chosen.cuts_pattern:
        flag = "--hybrid-layer-pattern"
        kinds = _layer_kinds(config)
        found = pattern_problems(chosen.hybrid_layer_pattern, stages, ffn_pattern=kinds)
    else:
        flag = f"--pipeline-model-parallel-size {stages}"
        chunks = _even_chunks(config)
        # Chunks that do not come out are an error of their own, unless the stages are not even.
        found = even_problems(layers, stages, chunks=chunks or 1, **_exceptions(config))
        if chunks is None and not found:
            flag = (
                "--num-layers-per-virtual-pipeline-stage "
                f"{chosen.num_layers_per_virtual_pipeline_stage}"
            )
            each, ranks = _shared_layers(config)
            found = [f"a stage has {each // max(1, ranks)} layers: use a divisor of that"]
    yield from (f"{flag}: {problem}" for problem in found)


def _recompute(config: Config) -> Iterator[str]:
    """Name a number of layers that no chunk has."""
    count, layers = config.recompute.recompute_num_layers, config.model.num_layers
    full = config.recompute.recompute_granularity == "full"
    pattern = (ATTENTION + DENSE) * layers
    ranges = stage_split(config).ranges
    most = max(len(layer_blocks(pattern[first:last])) for first, last in ranges)
    if full and count is not None and most < count <= layers:
        yield (
            f"--recompute-num-layers {count} is above the {most} layers of the largest pipeline "
            "stage: lower it"
        )


def _order(config: Config, world_size: int, *, chunks: int) -> Iterator[str]:
    """Name what is wrong with the order of work of so many virtual stages on each rank."""
    chosen, name = config.pipeline, _schedule_name(config, chunks)
    group = chosen.microbatch_group_size_per_virtual_pipeline_stage
    group_flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    found = False
    if name != "interleaved" and chunks > 1:
        found = True
        yield (
            f"--pipeline-schedule {name} has one virtual stage per rank, not {chunks}: take "
            "interleaved, or one virtual stage"
        )
    if name == "interleaved" and chunks == 1:
        found = True
        each = chosen.num_layers_per_virtual_pipeline_stage
        mend = "give --num-virtual-stages-per-pipeline-rank"
        if each is not None:
            mend = f"lower --num-layers-per-virtual-pipeline-stage {each}"
        yield (
            f"--pipeline-schedule interleaved needs several virtual stages per rank: {mend}, or "
            "take 1f1b"
        )
    if name != "interleaved" and group is not None:
        found = True
        yield f"{group_flag} {group} has no effect with --pipeline-schedule {name}: drop it"
    microbatches = _microbatches(config, world_size)
    if not found and microbatches is not None:
        for problem in schedule.problems(
            name,
            stages=chosen.pipeline_model_parallel_size,
            microbatches=microbatches,
            chunks=chunks,
            group_size=group,
        ):
            yield f"{group_flag}: {problem}"


def _microbatches(config: Config, world_size: int) -> int | None:
    """Return the microbatches of a step; None where the batch does not divide and must."""
    training = config.training
    lanes = world_size // config.model_parallel_size
    if world_size % config.model_parallel_size:
        return None
    batch = training.global_batch_size or training.micro_batch_size * lanes
    division = Division(samples=batch, micro_batch_size=training.micro_batch_size, lanes=lanes)
    if not (division.is_even or training.allow_uneven_batch):
        return None
    return division.rounds


def _even_chunks(config: Config) -> int | None:
    """Return the virtual stages of each rank; None if the layers of one are no divisor."""
    chosen = config.pipeline
    if chosen.num_virtual_stages_per_pipeline_rank is not None:
        return chosen.num_virtual_stages_per_pipeline_rank
    each = chosen.num_layers_per_virtual_pipeline_stage
    if each is None:
        return 1
    layers, ranks = _shared_layers(config)
    whole = ranks > 0 and layers > 0 and layers % (ranks * each) == 0
    return layers // (ranks * each) if whole else None


def _shared_layers(config: Config) -> tuple[int, int]:
    """Return the layers that ranks share evenly, with what counts as one, and those ranks."""
    chosen = config.pipeline
    layers = config.model.num_layers + chosen.account_for_embedding_in_pipeline_split
    layers += chosen.account_for_loss_in_pipeline_split
    ranks = chosen.pipeline_model_parallel_size
    for own in (chosen.decoder_first_pipeline_num_layers, chosen.decoder_last_pipeline_num_layers):
        if own is not None:
            layers, ranks = layers - own, ranks - 1
    return layers, ranks


def _exceptions(config: Config) -> dict[str, int | bool | None]:
    """Return what an even split is to leave or count."""
    chosen = config.pipeline
    return {
        "first_layers": chosen.decoder_first_pipeline_num_layers,
        "last_layers": chosen.decoder_last_pipeline_num_layers,
        "count_embedding": chosen.account_for_embedding_in_pipeline_split,
        "count_loss": chosen.account_for_loss_in_pipeline_split,
    }

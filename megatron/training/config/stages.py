# SPDX-License-Identifier: Apache-2.0
"""The pipeline described by the options: the layers of each stage and the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.datasets.batch_sizes import Division
from megatron.core.models.layer_pattern import (
    ATTENTION,
    DENSE,
    EXPERTS,
    STAGE_SEPARATOR,
    StageSplit,
    even_problems,
    ffn_of,
    layer_blocks,
    layer_pattern_problems,
    layout_problems,
    pattern_problems,
    virtual_stage_problems,
)
from megatron.core.pipeline_parallel import schedule
from megatron.training.config import Config, layer_pattern_options
from megatron.training.config.layer_pattern_options import FLAG, is_hybrid
from megatron.training.config.parallel_options import pipeline_problems


def stage_split(config: Config) -> StageSplit:
    """Return the layers of every virtual stage; requires a config without `problems`."""
    chosen, layers, cut = config.pipeline, config.model.num_layers, _cut_pattern(config)
    stages = chosen.pipeline_model_parallel_size
    if chosen.pipeline_model_parallel_layout is not None:
        layout = chosen.pipeline_model_parallel_layout
        return StageSplit.from_layout(layout, stages, num_layers=layers)
    if cut is not None:
        return StageSplit.from_pattern(cut, stages, ffn_pattern=_layer_kinds(config))
    chunks = _even_chunks(config)
    assert chunks is not None, "check() asks for chunks of the same size"
    num_blocks = _blocks_per_layer(config)
    return StageSplit.even(
        layers, stages, chunks=chunks, layer_blocks=num_blocks, **_exceptions(config)
    )


def schedule_name(config: Config) -> str:
    """Return the pipeline schedule of a config without problems: 1f1b, interleaved or zb-h1."""
    return _schedule_name(config, stage_split(config).chunks)


def problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message with a fix for each problem of the pipeline on `world_size` processes."""
    chosen = config.pipeline
    stage_problems = [*pipeline_problems(chosen, _cut_pattern(config)), *_pattern(config)]
    stages, cut = chosen.pipeline_model_parallel_size, _cut_pattern(config)
    if stages > 1 and _is_broken(config) and cut is not None:
        stage_problems += virtual_stage_problems(f"{FLAG} {cut}", cut, stages)
    elif stages > 1 and not _is_broken(config):
        stage_problems += _layers(config)
        chunks = _chunks(config)
        if chunks is not None:
            stage_problems += _order(config, world_size, chunks=chunks)
        if not stage_problems:
            stage_problems += _recompute(config)
    yield from stage_problems


def _cut_pattern(config: Config) -> str | None:
    """Return the layer pattern of the model if it contains stage boundaries, else None."""
    pattern = layer_pattern_options.written(config)
    return None if pattern is None or STAGE_SEPARATOR not in pattern.main else pattern.main


def _blocks_per_layer(config: Config) -> int:
    return 1 if is_hybrid(config) else 2


def _schedule_name(config: Config, chunks: int) -> str:
    chosen = config.pipeline.pipeline_schedule
    if chosen != "auto":
        return chosen
    return "interleaved" if chunks > 1 else "1f1b"


def _chunks(config: Config) -> int | None:
    """Return the virtual stages per rank; None if the options contradict each other."""
    chosen = config.pipeline
    written = chosen.pipeline_model_parallel_layout or _cut_pattern(config)
    if written is None:
        virtual_options = (
            chosen.num_layers_per_virtual_pipeline_stage,
            chosen.num_virtual_stages_per_pipeline_rank,
        )
        return None if None not in virtual_options else _even_chunks(config)
    stages, layers = chosen.pipeline_model_parallel_size, config.model.num_layers
    if chosen.pipeline_model_parallel_layout is not None:
        if layout_problems(written, stages, num_layers=layers):
            return None
        return StageSplit.from_layout(written, stages, num_layers=layers).chunks
    num_virtual_stages = written.count("|") + 1
    return None if num_virtual_stages % stages else num_virtual_stages // stages


def _pattern(config: Config) -> Iterator[str]:
    """Check a pattern without stage boundaries against the model."""
    pattern = layer_pattern_options.written(config)
    if pattern is None or STAGE_SEPARATOR in pattern.main or _is_broken(config):
        return
    for problem in pattern_problems(pattern.main, 1, ffn_pattern=_layer_kinds(config)):
        yield f"{FLAG}: {problem}"


def _is_broken(config: Config) -> bool:
    """Return whether the layer pattern has a syntax error, so that it defines no stages."""
    text = config.hybrid.hybrid_layer_pattern
    return text is not None and bool(layer_pattern_problems(text))


def _layer_kinds(config: Config) -> str | None:
    """Return the block after attention in each layer of a GPT; None for a hybrid.

    The symbols come from the layer pattern if it has experts and the model's number of layers;
    `expert_problems` reports all other differences between pattern and model.
    """
    pattern, layers = layer_pattern_options.written(config), config.model.num_layers
    kinds = DENSE * layers if pattern is None else ffn_of(pattern.blocks)
    if kinds is None:
        return None
    return kinds if len(kinds) == layers and EXPERTS in kinds else DENSE * layers


def _layers(config: Config) -> Iterator[str]:
    """Yield a message for each problem of the division of layers into stages."""
    chosen, layers = config.pipeline, config.model.num_layers
    stages = chosen.pipeline_model_parallel_size
    if chosen.pipeline_model_parallel_layout is not None:
        flag = "--pipeline-model-parallel-layout"
        layout = chosen.pipeline_model_parallel_layout
        layer_problems = layout_problems(layout, stages, num_layers=layers)
        if is_hybrid(config):
            layer_problems = [f"a layout describes a GPT's layers: split {FLAG} by '|' instead"]
    elif (cut := _cut_pattern(config)) is not None:
        flag = FLAG
        layer_problems = pattern_problems(cut, stages, ffn_pattern=_layer_kinds(config))
    else:
        flag = f"--pipeline-model-parallel-size {stages}"
        chunks = _even_chunks(config)
        # Report an uneven division into chunks only if the division into stages is valid.
        num_blocks = _blocks_per_layer(config)
        layer_problems = even_problems(
            layers, stages, chunks=chunks or 1, layer_blocks=num_blocks, **_exceptions(config)
        )
        if chunks is None and not layer_problems:
            flag = (
                "--num-layers-per-virtual-pipeline-stage "
                f"{chosen.num_layers_per_virtual_pipeline_stage}"
            )
            shared, ranks = _shared_layers(config)
            noun = "layers" if num_blocks > 1 else "blocks"
            layer_problems = [
                f"a stage has {shared // max(1, ranks)} {noun}: use a divisor of that"
            ]
    pattern = layer_pattern_options.written(config)
    if not layer_problems and pattern is not None:
        layer_problems = [
            f"the parallel blocks {group} of {FLAG} {pattern.main} are in several stages: write "
            "'|' where stages end"
            for group in stage_split(config).divided_groups(pattern.blocks)[:1]
        ]
    yield from (f"{flag}: {problem}" for problem in layer_problems)


def _recompute(config: Config) -> Iterator[str]:
    """Yield a message if no model chunk has as many layers as --recompute-num-layers."""
    count, layers = config.execution.recompute_num_layers, layer_pattern_options.num_layers(config)
    full = config.execution.recompute_granularity == "full"
    written = layer_pattern_options.written(config)
    pattern = (ATTENTION + DENSE) * layers if written is None else written.blocks
    ranges = stage_split(config).ranges
    spans = layer_blocks(pattern)
    max_layers = max(
        sum(start < end and stop > begin for start, stop in spans) for begin, end in ranges
    )
    if full and count is not None and max_layers < count <= layers:
        yield (
            f"--recompute-num-layers {count} is above the {max_layers} layers of the largest "
            "pipeline stage: lower it"
        )


def _order(config: Config, world_size: int, *, chunks: int) -> Iterator[str]:
    """Yield a message for each problem of the schedule with `chunks` virtual stages per rank."""
    chosen, name = config.pipeline, _schedule_name(config, chunks)
    group = chosen.microbatch_group_size_per_virtual_pipeline_stage
    group_flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    has_problem = False
    if name != "interleaved" and chunks > 1:
        has_problem = True
        yield (
            f"--pipeline-schedule {name} has one virtual stage per rank, not {chunks}: use "
            "interleaved, or one virtual stage"
        )
    if name == "interleaved" and chunks == 1:
        has_problem = True
        layers_per_stage = chosen.num_layers_per_virtual_pipeline_stage
        fix = "give --num-virtual-stages-per-pipeline-rank"
        if layers_per_stage is not None:
            fix = f"lower --num-layers-per-virtual-pipeline-stage {layers_per_stage}"
        yield (
            f"--pipeline-schedule interleaved needs several virtual stages per rank: {fix}, or "
            "use 1f1b"
        )
    if name != "interleaved" and group is not None:
        has_problem = True
        yield f"{group_flag} {group} has no effect with --pipeline-schedule {name}: drop it"
    for microbatches in () if has_problem else _microbatches(config, world_size):
        for problem in schedule.problems(
            name,
            stages=chosen.pipeline_model_parallel_size,
            microbatches=microbatches,
            chunks=chunks,
            group_size=group,
        ):
            yield f"{group_flag}: {problem}"


def _microbatches(config: Config, world_size: int) -> tuple[int, ...]:
    """Return the number of microbatches for each batch size of the run.

    Batch sizes that do not divide evenly are left out unless uneven batches are allowed.
    """
    training = config.training
    dp_size, remainder = divmod(world_size, config.model_parallel_size)
    if remainder:
        return ()
    divisions = [
        Division(
            samples=size, micro_batch_size=training.micro_batch_size, data_parallel_size=dp_size
        )
        for size in training.batch_sizes(dp_size).sizes
    ]
    uneven = training.allow_uneven_batch
    return tuple(dict.fromkeys(d.rounds for d in divisions if d.is_even or uneven))


def _even_chunks(config: Config) -> int | None:
    """Return the virtual stages of each rank; None if the layers do not divide evenly."""
    chosen = config.pipeline
    if chosen.num_virtual_stages_per_pipeline_rank is not None:
        return chosen.num_virtual_stages_per_pipeline_rank
    layers_per_stage = chosen.num_layers_per_virtual_pipeline_stage
    if layers_per_stage is None:
        return 1
    layers, ranks = _shared_layers(config)
    whole = ranks > 0 and layers > 0 and layers % (ranks * layers_per_stage) == 0
    return layers // (ranks * layers_per_stage) if whole else None


def _shared_layers(config: Config) -> tuple[int, int]:
    """Return the number of layers that are divided evenly, counting embedding and loss if the
    options say so, and the number of pipeline ranks that share them."""
    chosen = config.pipeline
    layers = config.model.num_layers + chosen.account_for_embedding_in_pipeline_split
    layers += chosen.account_for_loss_in_pipeline_split
    ranks = chosen.pipeline_model_parallel_size
    for explicit_layers in (
        chosen.decoder_first_pipeline_num_layers,
        chosen.decoder_last_pipeline_num_layers,
    ):
        if explicit_layers is not None:
            layers, ranks = layers - explicit_layers, ranks - 1
    return layers, ranks


def _exceptions(config: Config) -> dict[str, int | bool | None]:
    """Return the arguments of `StageSplit.even` that make stages uneven."""
    chosen = config.pipeline
    return {
        "first_layers": chosen.decoder_first_pipeline_num_layers,
        "last_layers": chosen.decoder_last_pipeline_num_layers,
        "count_embedding": chosen.account_for_embedding_in_pipeline_split,
        "count_loss": chosen.account_for_loss_in_pipeline_split,
    }

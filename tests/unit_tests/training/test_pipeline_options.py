# SPDX-License-Identifier: Apache-2.0
"""Options of pipelines: splits into stages, reported conflicts and accepted combinations."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megatron.core import RankGrid
from megatron.core.pipeline_parallel import make_schedule
from megatron.training.config import PipelineConfig
from megatron.training.config.check import check
from megatron.training.config.resolve import resolve
from megatron.training.config.stages import schedule_name, stage_split
from megatron.training.distributed_context import rank_grid
from tests.unit_tests.training.small_config import small_config

PP = "--pipeline-model-parallel-size"
LAYOUT = "--pipeline-model-parallel-layout"
PATTERN = "--hybrid-layer-pattern"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
VPP_LAYERS = "--num-layers-per-virtual-pipeline-stage"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EIGHT = "--num-layers 8 --global-batch-size 36"


@pytest.mark.parametrize(
    ("flags", "layers", "schedule"),
    [
        (f"{PP} 2", "4|4 layers", "1f1b"),
        (f"{PP} 4 --pipeline-schedule zb-h1", "2|2|2|2 layers", "zb-h1"),
        (f"{PP} 2 {VIRTUAL} 2", "2+2|2+2 layers", "interleaved"),
        (f"{PP} 2 {VIRTUAL} 1", "4|4 layers", "1f1b"),
        (f"{PP} 4 {VPP_LAYERS} 1", "1+1|1+1|1+1|1+1 layers", "interleaved"),
        (f"{PP} 4 {FIRST} 3 {LAST} 1", "3|2|2|1 layers", "1f1b"),
        (f"{PP} 3 {FIRST} 0", "0|4|4 layers", "1f1b"),
        (f"{PP} 3 --account-for-embedding-in-pipeline-split", "2|3|3 layers", "1f1b"),
        (
            f"{PP} 2 --account-for-embedding-in-pipeline-split "
            f"--account-for-loss-in-pipeline-split {VPP_LAYERS} 1",
            "0+1+1+1+1|1+1+1+1+0 layers",
            "interleaved",
        ),
        (f"{PP} 2 {FIRST} 2 {VPP_LAYERS} 3", "1+1|3+3 layers", "interleaved"),
        (f"{PP} 2 {LAYOUT} Et*3|(tt|)*2tL", "3+2|2+1 layers", "interleaved"),
        (f"{PP} 4 {LAYOUT} E|t*4|t*4|L", "0|4|4|0 layers", "1f1b"),
        (f"{PP} 2 {PATTERN} *-*-*-|*-*-*-*-*-", "3|5 layers", "1f1b"),
        (f"{PP} 2 {PATTERN} *-*-*-*|-*-*-*-*-", "7|9 blocks", "1f1b"),
        (f"{PP} 2 {PATTERN} *-*-*-*-*-*-*-*-", "4|4 layers", "1f1b"),
        (f"{PP} 2 {PATTERN} **--*-*-", "4|4 blocks", "1f1b"),
    ],
)
def test_layers_are_split_into_stages_by_options(flags, layers, schedule):
    config, world = small_config(f"{EIGHT} {flags}"), 12
    assert check(config, world) == []
    run = resolve(config, world)
    assert stage_split(run.config).describe() == layers
    assert schedule_name(run.config) == schedule
    stages = config.pipeline.pipeline_model_parallel_size
    assert rank_grid(run) == RankGrid(world_size=world, pp=stages)
    assert run.data_parallel_size == world // stages
    assert run.num_microbatches * run.data_parallel_size * 3 == 36
    assert resolve(run.config, world) == run
    assert check(run.config, world) == []


def test_core_accepts_every_combination_without_problems():
    num_valid, plain = 0, small_config("--num-layers 8 --micro-batch-size 1")
    for stages, virtual, name, group, batch in itertools.product(
        (1, 2, 4), (None, 1, 2), ("auto", "1f1b", "interleaved", "zb-h1"), (None, 2, 4), (4, 5, 8)
    ):
        chosen = PipelineConfig(
            pipeline_model_parallel_size=stages,
            num_virtual_stages_per_pipeline_rank=virtual,
            pipeline_schedule=name,
            microbatch_group_size_per_virtual_pipeline_stage=group,
        )
        training = dataclasses.replace(plain.training, global_batch_size=batch)
        config = dataclasses.replace(plain, pipeline=chosen, training=training)
        if check(config, stages):
            continue
        num_valid += 1
        run = resolve(config, stages)
        if stages == 1:
            continue
        built = make_schedule(
            schedule_name(run.config),
            stages=stages,
            microbatches=run.num_microbatches,
            chunks=stage_split(run.config).chunks,
            group_size=group,
        )
        assert built.microbatches == batch
    # A single stage accepts only auto, for 3 batches. 2 and 4 stages accept 9 settings without
    # chunks for each batch, and with 2 chunks the settings that the groups allow.
    assert num_valid == 3 + 2 * 2 * 3 * 3 + count_valid_groups()


def count_valid_groups() -> int:
    """Count the valid settings with two chunks by the rule itself: auto or interleaved."""
    legal = 0
    for stages, group, batch in itertools.product((2, 4), (None, 2, 4), (4, 5, 8)):
        remainder = batch % (group or batch)  # the default group fits
        legal += group is None or (
            stages <= group <= batch and (remainder == 0 or remainder >= stages)
        )
    return 2 * legal

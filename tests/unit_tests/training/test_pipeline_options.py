# SPDX-License-Identifier: Apache-2.0
"""Options of pipelines: splits into stages, reported conflicts and accepted combinations."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest

from megatron.cli.flags import parse_command_line
from megatron.cli.schema import flatten, options
from megatron.cli.yaml_file import write_options
from megatron.core import RankGrid
from megatron.core.pipeline_parallel import make_schedule
from megatron.training.config import Config, PipelineConfig
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
def test_layers_are_split_into_stages_by_options(flags, layers, schedule, tmp_path):
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
    (tmp_path / "run.yaml").write_text(write_options(flatten(run.config), options(Config)))
    words = ["--config", str(tmp_path / "run.yaml")]
    assert parse_command_line(Config, words, prog="p", description="d").config == run.config


@pytest.mark.parametrize(
    ("flags", "world", "message"),
    [
        (
            f"{PP} 3 --num-layers 3",
            4,
            f"^{PP} 3 does not divide the world of 4 processes: start a multiple of 3 processes",
        ),
        (
            f"{PP} 2 --tensor-model-parallel-size 3",
            4,
            f"--tensor-model-parallel-size 3 x {PP} 2 = 6 does not divide the world of 4",
        ),
        (
            f"{PP} 2 --global-batch-size 10",
            4,
            "10 is not a multiple of --micro-batch-size 3 x data parallel size 2 = 6: use 12",
        ),
        (f"{PP} 4", 4, f"{PP} 4: 2 layers do not divide over 4 virtual pipeline stages"),
        (f"{VIRTUAL} 2", 2, f"{VIRTUAL} 2 has no effect without {PP} above 1: raise that"),
        (f"{VPP_LAYERS} 1", 2, f"{VPP_LAYERS} 1 has no effect without {PP} above 1: raise that"),
        (f"{GROUP} 2", 2, f"{GROUP} 2 has no effect without {PP} above 1: raise that"),
        (f"{FIRST} 1", 2, f"{FIRST} 1 has no effect without {PP} above 1: raise that"),
        (f"{LAYOUT} EttL", 2, f"{LAYOUT} EttL has no effect without {PP} above 1"),
        (f"{PATTERN} *-|*-", 2, "--hybrid-layer-pattern .* has no effect without "),
        ("--pipeline-schedule 1f1b", 2, "--pipeline-schedule 1f1b has no effect without "),
        (
            "--account-for-loss-in-pipeline-split",
            2,
            "^--account-for-loss-in-pipeline-split has no effect without ",
        ),
        (
            f"{PP} 2 {VIRTUAL} 1 {VPP_LAYERS} 1",
            2,
            f"{VPP_LAYERS} 1 and {VIRTUAL} 1 are mutually exclusive: keep",
        ),
        (f"{PP} 2 {VPP_LAYERS} 2", 2, f"{VPP_LAYERS} 2: a stage has 1 layers: use a divisor"),
        (f"{PP} 2 {GROUP} 2", 2, f"{GROUP} 2 has no effect with --pipeline-schedule 1f1b: drop"),
        (
            f"{PP} 2 --num-layers 4 {VIRTUAL} 2 --pipeline-schedule zb-h1",
            2,
            "zb-h1 has one virtual stage per rank, not 2: use interleaved",
        ),
        (
            f"{PP} 2 --pipeline-schedule interleaved",
            2,
            f"interleaved needs several virtual stages per rank: give {VIRTUAL}",
        ),
        (
            f"{PP} 2 --num-layers 4 {VIRTUAL} 2 {GROUP} 3 --global-batch-size 12",
            2,
            f"{GROUP}: groups of 3 of 4 microbatches on 2 stages .* use groups of 2",
        ),
        (f"{PP} 2 {LAYOUT} Et|t", 2, f"{LAYOUT}: .* has 0 L: write the loss once"),
        (f"{PP} 2 {LAYOUT} Ettt|L", 2, f"{LAYOUT}: .* has 3 t for 2 layers"),
        (f"{PP} 2 {LAYOUT} EttL", 2, f"{LAYOUT}: .* has 1 stages for 2 pipeline ranks"),
        (f"{PP} 2 {PATTERN} *-|*-*-", 2, f"{PATTERN}: .* must be '\\*-' for each of the 2 layers"),
        (f"{PATTERN} *-*-*-", 1, f"{PATTERN}: .* must be '\\*-' for each of the 2 layers"),
        (f"{PP} 2 {PATTERN} *-|*-|", 2, f"{PATTERN}: .* has 3 stages for 2 pipeline ranks"),
        (f"{PP} 2 {LAYOUT} Et|tL {FIRST} 1", 2, f"{FIRST} 1 has no effect with {LAYOUT} Et"),
        (f"{PP} 2 {LAYOUT} Et|tL {PATTERN} *-|*-", 2, "are mutually exclusive: keep one"),
        (
            f"{PP} 2 --recompute-granularity full --recompute-method block "
            "--recompute-num-layers 2",
            2,
            "--recompute-num-layers 2 is above the 1 layers of the largest pipeline stage",
        ),
        (
            f"{PP} 2 --cuda-graph-impl full_iteration",
            2,
            f"{PP} 2 sends and receives between stages, .*: drop it or --cuda-graph-impl",
        ),
    ],
)
def test_each_problem_is_reported_once(flags, world, message):
    problems = check(small_config(flags), world)
    assert len(problems) == 1, problems
    with pytest.raises(ValueError, match=message):
        raise ValueError(problems[0])


def test_all_problems_are_reported_together():
    flags = f"{PP} 2 {LAYOUT} Et|(tx {VPP_LAYERS} 1 {VIRTUAL} 2 --tensor-model-parallel-size 2"
    assert len(check(small_config(flags), 6)) == 7
    flags = f"{PP} 2 {LAYOUT} t(|xL) --global-batch-size 7 --schedule-on-load restart"
    assert len(check(small_config(flags), 4)) == 4
    flags = f"{PP} 2 {PATTERN} *-|*-*x| --schedule-on-load restart"
    assert len(check(small_config(flags), 4)) == 3
    flags = f"{PP} 4 --num-layers 6 {VIRTUAL} 2 --pipeline-schedule zb-h1 {GROUP} 3"
    problems = check(small_config(flags), 4)
    assert [problem.split()[0] for problem in problems] == [PP, "--pipeline-schedule", GROUP]


def test_invalid_pipeline_sizes_are_refused():
    for flags in (f"{PP} 0", f"{VIRTUAL} 0", f"{VPP_LAYERS} 0", f"{GROUP} 0"):
        with pytest.raises(ValueError, match="it must be above 0"):
            small_config(flags)
    with pytest.raises(ValueError, match="must not be negative"):
        small_config(f"{FIRST} -1")


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


def test_options_are_checked_without_torch():
    code = (
        "import sys; from megatron.training.config.check import check; "
        "from tests.unit_tests.training.small_config import small_config; "
        f"check(small_config('{PP} 2'), 2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

# SPDX-License-Identifier: Apache-2.0
"""Options that change the global batch size during a run: their schedules and their conflicts."""

from __future__ import annotations

import pytest

from megatron.training.config.check import check
from megatron.training.config.resolve import resolve
from megatron.training.core_configs import learning_rate_schedule
from tests.unit_tests.training.small_config import small_config

#: Samples have 20 tokens, microbatches have 3 samples.
STEPS = "--step-batch-size-schedule 0:6 240:12 0.6K:18"


def test_schedule_thresholds_are_tokens_with_suffixes():
    run = resolve(small_config(STEPS), 2)
    assert run.batch_sizes.stages == ((0, 6), (12, 12), (30, 18))
    assert run.config.training.global_batch_size == 18
    assert (run.train_iters, run.train_samples) == (10, 6 + 6 + 12 + 12 + 6 * 18)
    assert run.num_microbatches == 3
    assert not run.batch_follows_world
    assert resolve(run.config, 2) == run
    assert check(run.config, 2) == []
    large = small_config("--step-batch-size-schedule 0:6,200B:12 1.5T:18")
    assert resolve(large, 1).batch_sizes.stages == ((0, 6), (10**10, 12), (75 * 10**9, 18))


def test_rampup_ends_at_the_global_batch_size():
    run = resolve(small_config("--global-batch-size 18 --rampup-batch-size 6 6 30"), 2)
    assert run.batch_sizes.stages == ((0, 6), (15, 12), (30, 18))
    assert resolve(run.config, 2) == run


@pytest.mark.parametrize("flags", [STEPS, "--global-batch-size 18 --rampup-batch-size 6 6 30"])
def test_lr_schedule_agrees_in_samples_and_iterations(flags):
    by_steps = resolve(small_config(f"{flags} --lr-warmup-iters 3 --lr-decay-iters 7"), 1)
    consumed = [by_steps.batch_sizes.samples(i) for i in range(11)]
    assert (by_steps.warmup_samples, by_steps.decay_samples) == (consumed[3], consumed[7])
    samples = f"--train-samples {consumed[10] + 5} --lr-warmup-samples {consumed[3]}"
    samples += f" --lr-decay-samples {consumed[7]}"
    by_samples = resolve(small_config(f"{flags} {samples}", without=("--train-iters",)), 1)
    assert by_samples.train_iters == 10
    rates = [[learning_rate_schedule(r).lr(n) for n in consumed] for r in (by_steps, by_samples)]
    assert rates[0] == rates[1]
    wsd = "--lr-decay-style WSD --lr-decay-iters 9 --lr-wsd-decay-iters 4"
    assert resolve(small_config(f"{flags} {wsd}"), 1).wsd_decay_samples == consumed[9] - consumed[5]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (f"{STEPS} --global-batch-size 12", "--global-batch-size 12"),
        (f"{STEPS} --global-batch-size 18 --rampup-batch-size 6 6 9", "--rampup-batch-size"),
        ("--step-batch-size-schedule 20:6", "--step-batch-size-schedule 20:6"),
        ("--step-batch-size-schedule 0:6 200:12 100:18", "ascend"),
        ("--step-batch-size-schedule 0:6 19:12", "ascend"),  # both in the first sample
        ("--step-batch-size-schedule 0:6 40", "40 is not"),
        ("--step-batch-size-schedule 0:6 1Q:12", "1Q:12"),
        ("--step-batch-size-schedule 0:0", "batch size of 0"),
        ("--step-batch-size-schedule 0:6.5", "6.5"),
        ("--rampup-batch-size 6 6 30", "--global-batch-size"),
        ("--global-batch-size 18 --rampup-batch-size 6 6", "START INCREMENT SAMPLES"),
        ("--global-batch-size 18 --rampup-batch-size 6 0 30", "START INCREMENT SAMPLES"),
        ("--global-batch-size 18 --rampup-batch-size 6 5 30", "--global-batch-size 18"),
        ("--global-batch-size 18 --rampup-batch-size 24 6 30", "--global-batch-size 18"),
        ("--eval-global-batch-size 0", "--eval-global-batch-size"),
    ],
)
def test_invalid_batch_size_schedule_is_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        small_config(options)


@pytest.mark.parametrize(
    ("options", "world", "expected"),
    [
        ("--step-batch-size-schedule 0:6 240:15", 2, "--step-batch-size-schedule 15"),
        ("--global-batch-size 18 --rampup-batch-size 9 9 30", 2, "--rampup-batch-size 9"),
        ("--global-batch-size 12 --eval-global-batch-size 9", 2, "--eval-global-batch-size 9"),
        ("--global-batch-size 12 --eval-micro-batch-size 4", 2, "--eval-micro-batch-size 4"),
        (f"{STEPS} --cuda-graph-impl full_iteration", 1, "--step-batch-size-schedule"),
        (
            "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-schedule interleaved "
            "--num-virtual-stages-per-pipeline-rank 2 --step-batch-size-schedule 0:3 240:6 "
            "--microbatch-group-size-per-virtual-pipeline-stage 2",
            2,
            "--microbatch-group-size-per-virtual-pipeline-stage",
        ),
    ],
)
def test_batch_size_that_does_not_fit_the_layout_is_reported(options, world, expected):
    assert any(expected in problem for problem in check(small_config(options), world))


def test_eval_batch_defaults_to_the_final_training_batch():
    run = resolve(small_config(f"{STEPS} --eval-micro-batch-size 9"), 1)
    evaluation = run.evaluation
    assert (evaluation.samples, evaluation.micro_batch_size, evaluation.rounds) == (18, 9, 2)
    run = resolve(small_config("--global-batch-size 12 --eval-global-batch-size 30"), 2)
    assert (run.evaluation.samples, run.evaluation.rounds, run.num_microbatches) == (30, 5, 2)

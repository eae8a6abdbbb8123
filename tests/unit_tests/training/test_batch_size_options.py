# SPDX-License-Identifier: Apache-2.0
"""Global batch sizes: schedules during a run, evaluation, and batches uneven over ranks."""

from __future__ import annotations

import pytest

from megatron.training.config.check import check
from megatron.training.config.resolve import resolve
from megatron.training.core_configs import learning_rate_schedule
from megatron.training.startup_report import batch_line, batch_words
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


def test_eval_batch_defaults_to_the_final_training_batch():
    run = resolve(small_config(f"{STEPS} --eval-micro-batch-size 9"), 1)
    evaluation = run.evaluation
    assert (evaluation.samples, evaluation.micro_batch_size, evaluation.rounds) == (18, 9, 2)
    run = resolve(small_config("--global-batch-size 12 --eval-global-batch-size 30"), 2)
    assert (run.evaluation.samples, run.evaluation.rounds, run.num_microbatches) == (30, 5, 2)


def test_stages_run_the_same_number_of_microbatches():
    options = (
        "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-schedule interleaved "
        "--num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 2 --allow-uneven-batch "
    )
    assert check(small_config(f"{options} --global-batch-size 14"), 4) == []
    assert check(small_config(f"{options} --global-batch-size 10"), 4) == []
    assert resolve(small_config(f"{options} --global-batch-size 10"), 4).num_microbatches == 3


@pytest.mark.parametrize(
    ("samples", "world", "line"),
    [
        (12, 3, None),
        (
            1024,
            3,
            "uneven batch: 512 microbatches of 2, on 3 data-parallel ranks, 171 each, 1 padding "
            "microbatch on rank 2; 0.2 % of their time is wasted",
        ),
        (
            8,
            3,
            "uneven batch: 4 microbatches of 2, on 3 data-parallel ranks, 2 each, 1 padding "
            "microbatch on ranks 1-2; 33.3 % of their time is wasted",
        ),
        (
            11,
            3,
            "uneven batch: 6 microbatches of 2, the last one of 1, on 3 data-parallel ranks, "
            "2 each, no padding microbatch; 8.3 % of their time is wasted",
        ),
        (
            7,
            1,
            "uneven batch: 4 microbatches of 2, the last one of 1, on 1 data-parallel rank, "
            "4 each, no padding microbatch; 0.0 % of their time is wasted",
        ),
    ],
)
def test_uneven_batch_cost_is_logged(samples, world, line):
    options = f"--micro-batch-size 2 --global-batch-size {samples} --allow-uneven-batch"
    run = resolve(small_config(options), world)
    assert batch_line(run) == line
    words = (
        "global batch 12 = 3 x 2 x 2 microbatches" if line is None else f"global batch {samples}"
    )
    assert batch_words(run).startswith(words)
    assert run.num_microbatches == -(-samples // (2 * world))

# SPDX-License-Identifier: Apache-2.0
"""Conflicts between options: each one is reported, all together, without false reports."""

from __future__ import annotations

import pytest

from megatron.training.config.check import check
from tests.unit_tests.training.small_config import small_config


@pytest.mark.parametrize(
    ("flags", "world", "message"),
    [
        ("--tensor-model-parallel-size 3", 4, "does not divide the world of 4"),
        (
            "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 21",
            2,
            "--seq-length 21 is not a multiple",
        ),
        ("--global-batch-size 10", 2, "--global-batch-size 10 is not a multiple .* = 6: use 12"),
        ("--tensor-model-parallel-size 4", 4, "--num-attention-heads 6 is not a multiple"),
        ("--group-query-attention", 1, "needs --num-query-groups"),
        (
            "--group-query-attention --num-query-groups 4",
            1,
            "6 is not a multiple of --num-query-groups 4",
        ),
        (
            "--group-query-attention --num-query-groups 3 --tensor-model-parallel-size 2",
            2,
            "one must divide the other",
        ),
        ("--hidden-size 50", 1, "--hidden-size 50 is not a multiple of --num-attention-heads 6"),
        (
            "--tensor-model-parallel-size 2 --ffn-hidden-size 33",
            2,
            "--ffn-hidden-size 33 is not a multiple",
        ),
        ("--rotary-percent 0.4", 1, "3 features per head would be rotated"),
        ("--loss-spike-factor 1", 1, "--loss-spike-factor is 1.0: it must be above 1"),
        (
            "--log-straggler --straggler-factor 0.5",
            1,
            "--straggler-factor is 0.5: it must be above 1",
        ),
        ("--rollback-after-bad-steps 2", 1, "--rollback-after-bad-steps needs --save"),
        ("--save s --rollback-after-bad-steps 10", 1, "10 is never reached with"),
        ("--on-reproduced-fault restart", 1, "--on-reproduced-fault restart needs --save"),
        (
            "--save s --on-reproduced-fault restart --rerun-mode disabled",
            1,
            "needs --rerun-mode validate_results",
        ),
        (
            "--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            1,
            "are mutually exclusive",
        ),
        ("--use-rope-scaling --position-embedding-type yarn", 1, "are mutually exclusive"),
        (
            "--use-rope-scaling --rope-scaling-low-freq-factor 4",
            1,
            "low-freq-factor 4.0 must be below",
        ),
        (
            "--position-embedding-type yarn --yarn-beta-slow 33",
            1,
            "--yarn-beta-slow 33.0 must not be above --yarn-beta-fast 32.0",
        ),
        ("--decoupled-min-lr 1e-4", 1, "has no effect without --decoupled-lr"),
        ("--rope-scaling-factor 3", 1, "has no effect without --use-rope-scaling"),
        ("--yarn-beta-fast 64", 1, "has no effect without --position-embedding-type yarn"),
        ("--rerun-interval 3", 1, "no effect without --rerun-mode report_determinism_stats"),
        ("--loss-spike-window 3", 1, "has no effect without --loss-spike-factor"),
        ("--no-muon-split-qkv", 1, "--no-muon-split-qkv has no effect without --optimizer muon"),
        ("--optimizer-offload-fraction 0.5", 1, "has no effect without --optimizer-cpu-offload"),
        ("--optimizer-cpu-offload --optimizer muon", 1, "drop it or choose adam"),
        ("--exp-avg-sq-dtype bf16", 1, "with --adam-beta2 0.999: rounding loses .* at most 0.992"),
        ("--exp-avg-dtype bf16 --optimizer sgd", 1, "no effect with --optimizer sgd: drop it"),
        ("--straggler-factor 9", 1, "has no effect without --log-straggler"),
        ("--allow-data-change", 1, "has no effect without --load"),
        ("--finetune", 1, "has no effect without --load or --pretrained-checkpoint"),
        ("--profile-step-start 3", 1, "has no effect without --profile"),
        ("--profile-ranks 3", 1, "has no effect without --profile"),
        (
            "--profile --profile-step-start 1 --profile-ranks 5",
            1,
            "--profile-ranks 5: there are ranks",
        ),
        (
            "--profile --use-pytorch-profiler --profile-step-start 500 --profile-step-end 501",
            1,
            "--profile-step-start 500 is not below --train-iters",
        ),
        ("--train-samples 9", 1, "exactly one of --train-iters and --train-samples"),
        (
            "--max-position-embeddings 19",
            1,
            "--seq-length 20 is above --max-position-embeddings 19",
        ),
        (
            "--lr-decay-samples 9",
            1,
            "--lr-decay-samples cannot be combined with --train-iters: use --lr-decay-iters",
        ),
        (
            "--lr-warmup-iters 1 --lr-warmup-fraction 0.1",
            1,
            "--lr-warmup-iters and --lr-warmup-fraction are mutually exclusive",
        ),
        ("--lr-warmup-iters 10", 1, "warm-up of 10 is not shorter than the decay of 10"),
        ("--lr-decay-style WSD", 1, "WSD needs --lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", 1, "WSD decay of 11 does not fit"),
        ("--tokenizer-type hf", 1, "needs --tokenizer-model"),
        ("--start-weight-decay 0.0", 1, "from 0.0 to 0.01 but --weight-decay-incr"),
        (
            "--start-weight-decay 1.0 --weight-decay-incr-style linear",
            1,
            "--start-weight-decay 1.0 is above --end-weight-decay 0.01",
        ),
    ],
)
def test_each_problem_is_reported_once(flags, world, message):
    problems = check(small_config(flags), world)
    assert len(problems) == 1, problems
    with pytest.raises(ValueError, match=message):
        raise ValueError(problems[0])


def test_all_problems_are_reported_together():
    text = "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 21"
    problems = check(small_config(f"{text} --schedule-on-load restart --lr-warmup-iters 99"), 6)
    assert len(problems) == 5, problems


def test_valid_config_has_no_problems():
    assert check(small_config(), 1) == []
    text = "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 12"
    assert check(small_config(text), 4) == []
    multi_query = "--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 3"
    assert check(small_config(multi_query), 3) == []


def test_iteration_flags_are_refused_with_train_samples():
    config = small_config("--train-samples 50 --lr-decay-iters 5", without=("--train-iters",))
    assert check(config, 1) == [
        "--lr-decay-iters cannot be combined with --train-samples: use --lr-decay-samples"
    ]


def test_fewer_samples_than_one_batch_are_a_problem():
    config = small_config("--train-samples 11", without=("--train-iters",))
    assert check(config, 1) == []
    (problem,) = check(config, 4)
    assert problem == "--train-samples 11 is less than one --global-batch-size 12: raise it"

# SPDX-License-Identifier: Apache-2.0
"""Options on both sides of the border at which they begin to contradict each other."""

from __future__ import annotations

import pytest

from megatron.training.config.check import check
from tests.unit_tests.training.small_config import small_config

EXPERTS = "--num-experts 4 --disable-bias-linear"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
LATENT = "--multi-latent-attention --kv-lora-rank 8 --disable-bias-linear"
SAMPLES = "--train-samples 50"
PROFILE = "--profile --profile-step-start 1 --profile-step-end 2"


def problems(more: str, world: int) -> list[str]:
    """Check a small config, of samples instead of iterations if it says so."""
    without = ("--train-iters",) if "--train-samples" in more else ()
    return check(small_config(more, without=without), world)


@pytest.mark.parametrize(
    ("more", "world", "named"),
    [
        ("--attention-backend triton --attention-dropout 0.1", 1, "--attention-dropout 0.1"),
        ("--recompute-granularity full --recompute-num-layers 1", 1, "--recompute-method"),
        ("--recompute-granularity full --recompute-method uniform", 1, "--recompute-num-layers"),
        ("--recompute-method uniform", 1, "--recompute-method"),
        ("--recompute-num-layers 1", 1, "--recompute-num-layers"),
        ("--recompute-num-layers 3", 1, "--recompute-num-layers"),
        (f"{FULL} 3", 1, "--recompute-num-layers 3"),
        (f"--pipeline-model-parallel-size 2 {FULL} 2", 2, "--recompute-num-layers 2"),
        (f"--pipeline-model-parallel-size 2 --num-layers 4 {FULL} 5", 2, "the 4 layers"),
        ("--global-batch-size 3", 2, "--allow-uneven-batch"),
        ("--global-batch-size 3 --allow-uneven-batch", 2, "--global-batch-size 3"),
        ("--global-batch-size 8 --tensor-model-parallel-size 2", 3, "the world of 3"),
        (f"--global-batch-size 7 {EXPERTS}", 2, "--allow-uneven-batch"),
        (f"--global-batch-size 7 {EXPERTS} --allow-uneven-batch", 2, "--num-experts"),
        ("--kv-channels 7", 1, "--kv-channels 7"),
        ("--rotary-percent 0.1", 1, "0 features"),
        ("--train-samples 11 --global-batch-size 12", 1, "--train-samples 11"),
        (f"{SAMPLES} --lr-warmup-iters 5", 1, "--lr-warmup-samples"),
        ("--lr-warmup-samples 5", 1, "--lr-warmup-iters"),
        (f"{SAMPLES} --lr-warmup-samples 50", 1, "warm-up of 50"),
        (f"{SAMPLES} --lr-decay-samples 20 --lr-warmup-samples 20", 1, "decay of 20"),
        ("--lr-decay-iters 5 --lr-warmup-iters 5", 1, "decay of 5"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 3", 1, "decay of 8"),
        (f"{SAMPLES} --lr-decay-style WSD", 1, "--lr-wsd-decay-samples"),
        (f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 51", 1, "decay of 51"),
        ("--end-weight-decay 0.1", 1, "from 0.01 to 0.1"),
        ("--exp-avg-dtype bf16 --adam-beta1 0.999", 1, "--adam-beta1 0.999"),
        ("--hybrid-layer-pattern *-*-/*-/*- --seq-length 2", 1, "samples of 2"),
        (PROFILE.replace("1", "10").replace("2", "11"), 1, "--profile-step-start 10"),
        (f"{PROFILE} --profile-ranks 1", 1, "--profile-ranks 1"),
        ("--record-memory-history --profile-ranks 1", 1, "--profile-ranks 1"),
        ("--plant-fault nan@11:0", 1, "nan@11:0"),
        (f"{EXPERTS} --add-mlp-bias", 1, "--add-mlp-bias"),
    ],
)
def test_one_step_over_the_border_is_one_problem(more, world, named):
    found = problems(more, world)
    assert len(found) == 1, found
    assert named in found[0]


@pytest.mark.parametrize(
    ("more", "world"),
    [
        ("--attention-backend triton --attention-dropout 0", 1),
        ("--attention-backend reference --attention-dropout 0.1", 1),
        (f"{FULL} 2", 1),
        (f"--pipeline-model-parallel-size 2 {FULL} 1", 2),
        ("--global-batch-size 9 --allow-uneven-batch", 2),
        (f"--global-batch-size 9 {EXPERTS} --allow-uneven-batch", 2),
        ("--hidden-size 50 --kv-channels 8", 1),
        ("--kv-channels 7 --position-embedding-type none", 1),
        (f"{LATENT} --hidden-size 50", 1),
        ("--global-batch-size 6 --allow-uneven-batch", 2),
        ("--max-position-embeddings 20", 1),
        ("--train-samples 12 --global-batch-size 12", 4),
        ("--train-samples 11 --global-batch-size 9", 1),
        ("--eval-interval 0 --eval-iters 0", 1),
        (f"{SAMPLES} --lr-decay-samples 20 --lr-warmup-samples 19", 1),
        ("--lr-decay-iters 20 --lr-warmup-iters 12", 1),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 7 --lr-warmup-iters 3", 1),
        (f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 50", 1),
        ("--end-weight-decay 0.1 --weight-decay-incr-style linear", 1),
        ("--start-weight-decay 0.1 --end-weight-decay 0.1", 1),
        ("--rerun-mode disabled", 1),
        ("--hybrid-layer-pattern *-*-/*-/*- --seq-length 3", 1),
        ("--exp-avg-sq-dtype bf16 --adam-beta2 0.9921875", 1),
        (PROFILE.replace("2", "10").replace(" 1 ", " 9 "), 1),
        (f"{PROFILE.replace('1', '500').replace('2', '501')} {SAMPLES}", 1),
        ("--record-memory-history --profile-ranks 0", 1),
        ("--finetune --load x", 1),
        ("--finetune --pretrained-checkpoint x", 1),
        ("--plant-fault nan@10:0", 1),
        (f"--plant-fault nan@11:0 {SAMPLES}", 1),
    ],
)
def test_up_to_the_border_there_is_none(more, world):
    assert problems(more, world) == []


def test_a_schedule_of_a_run_without_length_is_no_problem_of_its_own():
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2"
    (problem,) = check(small_config(wsd, without=("--train-iters",)), 1)
    assert "--train-iters" in problem

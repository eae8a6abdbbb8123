# SPDX-License-Identifier: Apache-2.0
"""Options on both sides of the limit at which they begin to contradict each other."""

from __future__ import annotations

import pytest

from megatron.training.config.check import check
from tests.unit_tests.training.small_config import small_config

EXPERTS = "--num-experts 4 --disable-bias-linear"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
LATENT = "--multi-latent-attention --kv-lora-rank 8 --disable-bias-linear"
SAMPLES = "--train-samples 50"
PP, LAYOUT = "--pipeline-model-parallel-size", "--pipeline-model-parallel-layout"
PATTERN = "--hybrid-layer-pattern"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
VPP_LAYERS = "--num-layers-per-virtual-pipeline-stage"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
FOUR = "--num-layers 4 --global-batch-size 12"  # microbatches of 3, so four of them
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
NONE, TP = "--moe-router-load-balancing-type none", "--tensor-model-parallel-size"
CUT_ROWS = "--context-parallel-cut row"
UNEVEN = "--allow-uneven-batch"
A2A, CP = "--cp-comm-type a2a --seq-length 24", "--context-parallel-size"
GROUPS = "--num-attention-heads 12 --group-query-attention --num-query-groups"
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 9"
DELTA = f"{PATTERN} G*-- --num-layers 4 --linear-num-key-heads 2 --linear-num-value-heads 2"
PROFILE = "--profile --profile-step-start 1 --profile-step-end 2"


def problems(flags: str, world: int) -> list[str]:
    """Check a small config, of samples instead of iterations if it says so."""
    without = ("--train-iters",) if "--train-samples" in flags else ()
    return check(small_config(flags, without=without), world)


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        ("--attention-backend triton --attention-dropout 0.1", 1, "--attention-dropout 0.1"),
        ("--recompute-granularity full --recompute-num-layers 1", 1, "--recompute-method"),
        ("--recompute-granularity full --recompute-method uniform", 1, "--recompute-num-layers"),
        ("--recompute-method uniform", 1, "--recompute-method"),
        ("--recompute-num-layers 1", 1, "--recompute-num-layers"),
        ("--recompute-num-layers 3", 1, "--recompute-num-layers"),
        (f"{FULL} 3", 1, "--recompute-num-layers 3"),
        (f"--pipeline-model-parallel-size 2 {FULL} 2", 2, "--recompute-num-layers 2"),
        (f"--pipeline-model-parallel-size 2 --num-layers 4 {FULL} 5", 2, "the model's 4 layers"),
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
        (f"{EXPERTS} --add-mlp-bias", 1, "--add-mlp-bias"),
        (f"{PP} 2 --num-layers 3 {PATTERN} *-x", 2, "'x' at 3"),
        (f"{PP} 2 {PATTERN} *|x", 2, "'x' at 3"),
        (f"{PP} 2 {LAYOUT} Et|t|t|tL {FOUR} {GROUP} 3", 2, "groups of 3 of 4"),
        (f"{PP} 2 {LAYOUT} E(t|)*3tL {FOUR} {GROUP} 3", 2, "groups of 3 of 4"),
        (f"{PP} 2 {LAYOUT} Et|tL {GROUP} 1", 2, f"{GROUP} 1 has no effect"),
        (f"{PP} 2 {PATTERN} *-|*-|*-|*- {FOUR} {GROUP} 3", 2, "groups of 3 of 4"),
        (f"{PATTERN} *-*E*E {EXPERTS}", 1, "each of the 2 layers"),
        (f"{PP} 2 {PATTERN} **-- --num-layers 4 {VPP_LAYERS} 3", 2, "a stage has 2 blocks"),
        (f"{PP} 2 {FOUR} {VPP_LAYERS} 3", 2, "a stage has 2 layers"),
        (f"{PP} 2 --num-layers 3 {VPP_LAYERS} 1", 2, "3 layers do not divide"),
        (f"{PP} 2 --num-layers 6 {FIRST} 2 {VPP_LAYERS} 3", 2, "a stage has 4 layers"),
        (f"{PP} 2 --num-layers 5 {FIRST} 2 {LAST} 3 {VPP_LAYERS} 1", 2, "a stage has 0 layers"),
        (f"{PP} 3 --num-layers 5 {FIRST} 2 {LAST} 3 {VPP_LAYERS} 1", 3, "a stage has 0 layers"),
        (f"{PP} 2 {FOUR} --num-layers 6 {FIRST} 2 {VPP_LAYERS} 2 {GROUP} 3", 2, "groups of 3 of 4"),
        (f"{PP} 2 {FOUR} --num-layers 8 {VPP_LAYERS} 2 {GROUP} 3", 2, "groups of 3 of 4"),
        (f"{PP} 2 {FOUR} --num-layers 2 {ENDS} {VPP_LAYERS} 1 {GROUP} 3", 2, "groups of 3 of 4"),
        (f"{PP} 2 --num-layers 4 {VIRTUAL} 2 {GROUP} 2", 2, "groups of 2 of 1 microbatches"),
        (f"{PP} 2 --num-layers 4 {VIRTUAL} 2 {GROUP} 2", 4, "groups of 2 of 1 microbatches"),
        (f"{PP} 2 {FOUR} {VIRTUAL} 2 {GROUP} 3 --global-batch-size 10", 2, "allow-uneven-batch"),
        (f"{PP} 2 {FOUR} {PATTERN} *-*-*-|*- {BLOCK} 4", 2, "the 3 layers of the largest"),
        (f"{CP} 2 --seq-length 22", 2, "use 24"),
        (f"{CP} 4 {A2A}", 4, "6 heads do not"),
        (f"{CP} 2 {A2A} {LATENT} --num-attention-heads 5 --hidden-size 50", 2, "5 query heads"),
        (f"{CP} 4 {A2A} {GROUPS} 6", 4, "6 query groups"),
        (f"{CP} 3 {A2A} {GROUPS} 4 {TP} 2", 6, "2 query groups on each"),
        (f"{CP} 2 {A2A} {TP} 4", 8, "--num-attention-heads 6"),
        (f"{GRAPH} {DOCUMENTS} {CP} 2", 2, "--reset-attention-mask attends block by block"),
        (f"{GRAPH} --sft {CP} 2", 2, "--sft attends block by block"),
        (f"{GRAPH} {DOCUMENTS} {DELTA}", 1, "recurrent blocks with --reset-attention-mask"),
        (f"{GRAPH} --sft {DELTA}", 1, "recurrent blocks with --sft"),
        (f"{EXPERTS} --moe-router-topk 1", 1, "--moe-router-topk 1 with normalized scores"),
        (f"{EXPERTS} --moe-ffn-hidden-size 27 {TP} 2", 2, "moe-ffn-hidden-size 27"),
        ("--num-experts 4 --add-mlp-bias", 1, "experts have no biases"),
        (f"{EXPERTS} --moe-aux-loss-coeff 0.1 {NONE}", 1, "--moe-aux-loss-coeff 0.1"),
        ("--cpu-matmul-dtype fp32", 1, "--bf16 or --fp16"),
        ("--mtp-loss-scaling-factor 0.2", 1, "--mtp-num-layers"),
        (f"{LATENT} --mscale 0.7", 1, "--position-embedding-type yarn"),
        ("--position-embedding-type yarn --mscale 0.7", 1, "--multi-latent-attention"),
        (f"{CUT_ROWS} {DOCUMENTS}", 1, "--context-parallel-size above 1"),
        (f"{CUT_ROWS} {CP} 2 --seq-length 24", 2, "--reset-attention-mask or --sft"),
        ("--expert-tensor-parallel-size 2", 2, "--num-experts"),
        (f"--linear-cp-mode segments {DELTA}", 1, "--context-parallel-size above 1"),
        (f"{PP} 2 --num-layers 4 {VIRTUAL} 3", 2, "6 virtual pipeline stages"),
        (f"{PP} 2 --recompute-num-layers 2", 2, "--recompute-num-layers has no effect"),
        (f"{PP} 2 {BLOCK.rpartition(' ')[0]}", 2, "needs --recompute-num-layers"),
        (f"{PP} 2 {FOUR} --global-batch-size 11 {UNEVEN} {VIRTUAL} 2 {GROUP} 3", 2, "of 3 of 4"),
        (f"{PP} 2 --num-layers 5 {FIRST} 2 {LAST} 2 {VPP_LAYERS} 1", 2, "5 layers"),
    ],
)
def test_value_beyond_the_limit_is_one_problem(flags, world, expected):
    reported = problems(flags, world)
    assert len(reported) == 1, reported
    assert expected in reported[0]


@pytest.mark.parametrize(
    ("flags", "world"),
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
        ("--eval-interval 5 --eval-iters 0", 1),
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
        (f"{PP} 2 {LAYOUT} Et|t|t|tL {FOUR} {GROUP} 4", 2),
        (f"{PP} 2 {LAYOUT} E(t|)*3tL {FOUR} {GROUP} 2", 2),
        (f"{PP} 2 {PATTERN} *-|*-|*-|*- {FOUR} {GROUP} 4", 2),
        (f"{PP} 2 {PATTERN} **-- --num-layers 4 {VPP_LAYERS} 1", 2),
        (f"{PP} 2 {FOUR} --num-layers 6 {FIRST} 2 {VPP_LAYERS} 2 {GROUP} 4", 2),
        (f"{PP} 2 --num-layers 2 {ENDS} {VPP_LAYERS} 2", 2),
        (f"{PP} 2 --num-layers 4 {VIRTUAL} 2 {GROUP} 1", 4),
        (f"{PP} 2 {FOUR} {PATTERN} *-*-*-|*- {BLOCK} 3", 2),
        (f"{PP} 2 {FOUR} --recompute-granularity selective", 2),
        (f"{CP} 2 {A2A}", 2),
        (f"{CP} 6 {A2A}", 6),
        (f"{CP} 2 {A2A} {GROUPS} 4", 2),
        (f"{CP} 3 {A2A} {GROUPS} 1", 3),
        (f"{CP} 3 {A2A} {GROUPS} 2 {TP} 4", 12),
        (f"{GRAPH} {CP} 2 --seq-length 24", 2),
        (f"{GRAPH} {DOCUMENTS}", 1),
        (f"{GRAPH} --sft", 1),
        (f"{GRAPH} {DELTA}", 1),
        (f"{GRAPH} --cuda-graph-warmup-steps 500 {SAMPLES}", 1),
        (f"{EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax", 1),
        (f"{EXPERTS} --moe-router-topk 1 --load-hf x", 1),
        (f"{EXPERTS} --moe-router-topk 1 --pretrained-checkpoint x", 1),
        (f"{EXPERTS} --moe-router-topk 1 --use-checkpoint-args --load x", 1),
        (f"{EXPERTS} --moe-ffn-hidden-size 27 {TP} 2 --expert-tensor-parallel-size 1", 2),
        (f"{EXPERTS} --moe-layer-freq 0,1 --add-mlp-bias", 1),
        (f"{EXPERTS} --moe-aux-loss-coeff 0.1", 1),
        (f"{EXPERTS} {NONE}", 1),
        ("--cpu-matmul-dtype fp32 --bf16", 1),
        ("--cpu-matmul-dtype fp32 --fp16", 1),
        ("--mtp-loss-scaling-factor 0.2 --mtp-num-layers 1", 1),
        (f"{LATENT} --position-embedding-type yarn --mscale 0.7", 1),
        (f"{CUT_ROWS} {DOCUMENTS} {CP} 2 --seq-length 24", 2),
        (f"{CUT_ROWS} --sft {CP} 2 --seq-length 24", 2),
        ("--expert-tensor-parallel-size 1", 2),
        (f"{EXPERTS} {TP} 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2", 2),
        (f"--linear-cp-mode segments {DELTA} {CP} 2 --seq-length 24", 2),
        (f"{PP} 2 --num-layers 4 {FIRST} 3 {VPP_LAYERS} 1", 2),
    ],
)
def test_value_at_the_limit_is_accepted(flags, world):
    assert problems(flags, world) == []


def test_schedule_without_train_iters_is_one_problem():
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2"
    (problem,) = check(small_config(wsd, without=("--train-iters",)), 1)
    assert "--train-iters" in problem


def test_missing_attention_heads_is_one_problem():
    config = small_config(f"{CP} 2 {A2A}", without=("--num-attention-heads",))
    (problem,) = check(config, 2)
    assert problem.startswith("missing --num-attention-heads")

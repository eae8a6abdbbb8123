# SPDX-License-Identifier: Apache-2.0
"""The effect of each option: two values, and the observer that shows the difference.

A row is `OBSERVER FLAGS: OPTION VALUE -> VALUE; OPTION`. Both runs have the flags; a switch without
values is compared with itself off, and `none` leaves the option out. After `without` come flags of
the small run that both runs leave out, after `replaces` flags that the second value replaces, after
`world` the number of processes. A word in capitals is short for flags.

Observers, from the cheapest: `plan` is everything derived from the options without a run,
`listeners` are the observers of collectives; `constructors` are the arguments of constructors and
functions of a run; `loss`, `log` and `file` are observed in a run of two steps; `refusal` is the
error message about the options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """The observable effect of one option.

    Args:
        observer: the observation to compare.
        baseline, changed: the option's two values; "" leaves the option out. A switch has no
            values: off is compared with on.
        base: flags of both runs.
        without: flags of the small run that both runs leave out.
        replaces: flags of the small run that the changed value replaces.
        world: number of processes.
    """

    observer: str
    baseline: str = ""
    changed: str = ""
    base: str = ""
    without: str = ""
    replaces: str = ""
    world: int = 1


SHORT = {
    "AVERAGE": "--experiment weight_average",
    "CONV": "--hybrid-layer-pattern C*- --num-layers 3",
    "CP": "--context-parallel-size 2",
    "CUT": "--data-parallel-sharding-strategy optim_grads_params",
    "DELTA": "--hybrid-layer-pattern G*- --num-layers 3 --linear-num-key-heads 4"
    " --linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 8",
    "EVAL": "--eval-interval 1",
    "FULL": "--recompute-granularity full",
    "GATHER": "--overlap-param-gather",
    "GROUPED": "--group-query-attention --num-query-groups",
    "GROUPS": "--num-experts 4 --moe-router-num-groups 2",
    "GTP": "--tensor-parallel-num-weight-shards 2",
    "ITERS": "--train-iters --lr-warmup-iters",
    "LATENT": "--multi-latent-attention --qk-layernorm",
    "LONG": "--pipeline-model-parallel-size 2 --num-layers 6",
    "MAMBA": "--hybrid-layer-pattern M*- --num-layers 3 --mamba-head-dim 12 --mamba-state-dim 8"
    " --mamba-num-groups 2",
    "MOE": "--num-experts 4",
    "MUON": "--optimizer muon",
    # A run whose second step has a NaN loss.
    "NAN": "--lr 1e38 --lr-warmup-iters 0 --lr-decay-style constant --clip-grad 0 --train-iters 4",
    "OPTIM": "--data-parallel-sharding-strategy optim",
    "PP": "--pipeline-model-parallel-size 2",
    "SAMPLES": "--train-samples 96",
    "SAVE": "--save {out}/save",
    "SHARED": "--num-experts 4 --moe-shared-expert-intermediate-size 40",
    "STEPS": "--profile-step-start 0 --profile-step-end 1",
    "TIKTOKEN": "--tokenizer-type tiktoken --tokenizer-model {ranks}",
    "TRACE": "--profile --use-pytorch-profiler --profile-dir {out}/traces",
    "TRAIN": "--train-data-path {data}",
    "WSD": "--lr-decay-style WSD",
    "YARN": "--position-embedding-type yarn",
}

TABLE = r"""
plan: num-layers 2 -> 3; hidden-size 48 -> 64; num-attention-heads 4 -> 8; ffn-hidden-size 64 -> 72;
    group-query-attention; num-query-groups 2 -> 1; kv-channels 12 -> 16;
    normalization RMSNorm -> LayerNorm; apply-layernorm-1p; norm-epsilon 1e-5 -> 1e-6;
    norm-placement pre -> post; swiglu;
    qk-layernorm; disable-bias-linear; add-qkv-bias; add-attention-output-bias; add-mlp-bias;
    untie-embeddings-and-output-weights; attention-output-gate; attention-dropout 0.1 -> 0.2;
    hidden-dropout 0.1 -> 0.2; init-method-std 0.02 -> 0.01; window-size none -> 5;
    softmax-type vanilla -> learnable; rotary-base 10000 -> 500000; rotary-percent 1.0 -> 0.5;
    rotary-seq-len-interpolation-factor none -> 2; use-rope-scaling; rotary-interleaved;
    num-experts 4 -> 8; vocab-size 61 -> 62; make-vocab-size-divisible-by 4 -> 128;
    use-distributed-optimizer; data-parallel-sharding-strategy optim_grads -> optim_grads_params;
    overlap-grad-reduce; ddp-bucket-size 1000 -> 2000; distributed-timeout-minutes 10 -> 20;
    attention-backend auto -> reference; recompute-granularity none -> selective;
    micro-batch-size 2 -> 4; global-batch-size 8 -> 16; step-batch-size-schedule none -> 0:4 48:8;
    rampup-batch-size none -> 4 2 16; train-iters 12 -> 13; bf16; fp16;
    eval-micro-batch-size 2 -> 4; optimizer adam -> sgd; weight-decay 0.01 -> 0.1;
    adam-beta1 0.9 -> 0.8; adam-beta2 0.999 -> 0.95; adam-eps 1e-8 -> 1e-6;
    exp-avg-dtype fp32 -> bf16; weight-decay-group *norm*=0 -> *norm*=0.5; clip-grad 1 -> 0.5;
    optimizer-cpu-offload; lr 5e-3 -> 1e-3; min-lr 0 -> 1e-4; lr-decay-style cosine -> linear;
    lr-decay-iters 12 -> 8; lr-warmup-iters 2 -> 3; lr-warmup-init 0 -> 1e-4
plan without --swiglu: squared-relu; openai-gelu
plan --window-size 5: window-attn-skip-freq none -> 2
plan --window-size 5 --window-attn-skip-freq 2: window-softmax-type vanilla -> learnable;
    window-rotary-base 10000 -> 500
plan --window-size 5 --window-attn-skip-freq 2 --use-rope-scaling:
    window-rope-scaling same -> unscaled
plan: no-rope-freq none -> 2; glu-linear-offset 0 -> 1; activation-func-clamp-value none -> 7
plan: embedding-multiplier 1 -> 12; residual-multiplier 1 -> 0.22; softmax-scale none -> 0.125;
    logit-scale 1 -> 0.125; attn-logit-softcapping none -> 50; final-logit-softcapping none -> 30
plan: attention-output-multiplier 1 -> 0.5; mlp-output-multiplier 1 -> 0.5;
    mlp-gate-multiplier 1 -> 0.5
plan --embedding-multiplier 5.66: round-embedding-multiplier
plan without --swiglu: quick-geglu; geglu
plan --qk-layernorm: qk-layernorm-scope head -> projection
plan --use-rope-scaling: rope-scaling-factor 8 -> 4;
    rope-scaling-original-max-position 8192 -> 4096; rope-scaling-low-freq-factor 1 -> 2;
    rope-scaling-high-freq-factor 4 -> 8
plan YARN: yarn-rotary-scaling-factor 4 -> 8; yarn-original-max-position-embeddings 4096 -> 2048;
    yarn-beta-fast 32 -> 16; yarn-beta-slow 1 -> 2; yarn-attention-factor 1.0 -> 1.2;
    no-yarn-correction-range-round-to-int
plan: rotary-query-scale-beta 0 -> 0.1
plan --rotary-query-scale-beta 0.1: rotary-query-scale-length 8192 -> 4
plan --qk-layernorm without GROUPED: multi-latent-attention
plan --normalization LayerNorm: layernorm-bias
plan LATENT without GROUPED: latent-norm-epsilon none -> 1e-3; q-lora-rank none -> 20;
    kv-lora-rank 32 -> 20; qk-head-dim 128 -> 20;
    qk-pos-emb-head-dim 64 -> 20; v-head-dim 128 -> 20
plan LATENT YARN --yarn-rotary-scaling-factor 4 without GROUPED: mscale 1 -> 2;
    mscale-all-dim 0 -> 1
plan MOE: moe-layer-freq 1 -> 2; moe-ffn-hidden-size none -> 40; moe-router-topk 2 -> 3;
    moe-router-score-function softmax -> sigmoid; moe-router-pre-softmax;
    moe-router-topk-scaling-factor none -> 2.5; moe-router-enable-expert-bias;
    moe-aux-loss-coeff 0 -> 0.01; moe-z-loss-coeff 0 -> 0.01; moe-input-jitter-eps 0 -> 0.01;
    moe-expert-capacity-factor none -> 1.5; moe-shared-expert-intermediate-size none -> 40;
    moe-token-dispatcher-type auto -> alltoall; moe-add-bias
plan MOE --moe-router-group-topk 2: moe-router-num-groups 2 -> 4
plan GROUPS: moe-router-group-topk 1 -> 2
plan GROUPS --moe-router-group-topk 1: moe-router-group-candidates none -> 1
plan MOE: moe-norm-min 0 -> 0.5
plan MOE --moe-router-enable-expert-bias: moe-router-bias-update-rate 0.001 -> 0.01
plan MOE --moe-aux-loss-coeff 0.01: moe-router-load-balancing-type aux_loss -> seq_aux_loss
plan MOE --moe-expert-capacity-factor 1: moe-token-drop-policy probs -> position
plan SHARED: moe-shared-expert-gate; moe-shared-expert-overlap
plan PP world 2: hybrid-layer-pattern *-|*- -> *|-*-; pipeline-schedule 1f1b -> zb-h1;
    pipeline-model-parallel-layout Et|tL -> Ett|L
plan DELTA: linear-num-key-heads 2 -> 4; linear-num-value-heads 16 -> 32;
    linear-key-head-dim 16 -> 32; linear-value-head-dim 16 -> 32; linear-conv-kernel-dim 4 -> 3;
    keep-recurrent-states
plan DELTA CP world 2: linear-cp-mode auto -> segments
plan MAMBA: mamba-num-heads none -> 6; mamba-head-dim 12 -> 24; mamba-state-dim 16 -> 32;
    mamba-num-groups 1 -> 2; mamba-norm-groups none -> 1; mamba-conv-kernel-dim 4 -> 3;
    mamba-conv-bias; add-mamba-bias; mamba-dt-limit 0.001 -> 0.001 0.1; mamba-norm;
    mamba-projection-multipliers none -> 1 2 1 1 3; mamba-output-multiplier 1 -> 0.5
plan CONV: short-conv-kernel-dim 3 -> 4; add-short-conv-bias
plan world 4: tensor-model-parallel-size 1 -> 2; context-parallel-size 1 -> 2
plan world 2: tensor-parallel-num-weight-shards 1 -> 2; pipeline-model-parallel-size 1 -> 2;
    log-straggler
plan --tensor-model-parallel-size 2 world 2: sequence-parallel
plan CP world 2: cp-comm-type auto -> a2a
plan CP --reset-attention-mask world 2: context-parallel-cut row -> documents
plan OPTIM world 4: num-distributed-optimizer-instances 1 -> 2
plan CUT --num-distributed-optimizer-instances 2 world 4:
    outer-dp-sharding-strategy no_shard -> optim
plan OPTIM: overlap-param-gather
plan CUT GATHER: fsdp-all-gather-in-start-param-sync; param-gather-prefetch-bytes 0 -> 4096
plan CUT: param-gather-granularity unit -> weight; check-weight-gather; use-nccl-ub
plan --position-embedding-type learned_absolute --max-position-embeddings 30 GTP world 2:
    gtp-opt-in-modules none -> position_embeddings
plan GTP world 2: weight-gather-format bf16 -> mxfp8; gtp-reduce-scatter-per microbatch -> step
plan GTP --weight-gather-format nvfp4 world 2: weight-gather-scale-blocks 2d -> 1d
plan --bf16: grad-reduce-in-bf16; cpu-matmul-dtype weights -> fp32
plan OPTIM --bf16 --grad-reduce-in-bf16: reduce-scatter-with-fp32-accumulation
plan MOE world 4: expert-model-parallel-size 1 -> 2
plan MOE --tensor-model-parallel-size 2 world 4: expert-tensor-parallel-size none -> 1
plan MOE world 2: expert-tensor-parallel-num-weight-shards none -> 2
plan MOE --expert-model-parallel-size 2 world 2: moe-expert-rank-capacity-factor none -> 2
plan LONG world 2: num-layers-per-virtual-pipeline-stage 1 -> 3;
    num-virtual-stages-per-pipeline-rank 1 -> 3; decoder-first-pipeline-num-layers 1 -> 2;
    decoder-last-pipeline-num-layers 1 -> 2
plan LONG --num-virtual-stages-per-pipeline-rank 3 world 2:
    microbatch-group-size-per-virtual-pipeline-stage 2 -> 4
plan FULL --recompute-num-layers 1: recompute-method uniform -> block
plan FULL --recompute-method uniform: recompute-num-layers 1 -> 2
plan OPTIM GATHER world 2: cuda-graph-impl none -> full_iteration
plan without ITERS: train-samples 80 -> 96
plan --weight-decay-incr-style linear: start-weight-decay 0.0 -> 0.01; end-weight-decay 0.01 -> 0.1
plan --start-weight-decay 0 --end-weight-decay 1: weight-decay-incr-style linear -> cosine
plan --adam-beta2 0.95: exp-avg-sq-dtype fp32 -> bf16
plan --optimizer sgd: sgd-momentum 0.9 -> 0.5
plan MUON: muon-momentum 0.95 -> 0.9; muon-use-nesterov; muon-num-ns-steps 5 -> 6;
    muon-scale-mode spectral -> rms; muon-extra-scale-factor 1 -> 0.2;
    muon-adam-weights *.down.weight -> *.up.weight
plan --optimizer-cpu-offload: optimizer-offload-fraction 1 -> 0.5
plan --fp16: loss-scale none -> 128; initial-loss-scale 1024 -> 2048; min-loss-scale 1 -> 2;
    loss-scale-window 1000 -> 100; hysteresis 2 -> 1
plan SAMPLES without ITERS: lr-decay-samples 96 -> 64; lr-warmup-samples 16 -> 24
plan without --lr-warmup-iters: lr-warmup-fraction 0.1 -> 0.5
plan WSD --lr-wsd-decay-iters 4: lr-wsd-decay-style linear -> cosine
plan WSD: lr-wsd-decay-iters 4 -> 5
plan SAMPLES WSD without ITERS: lr-wsd-decay-samples 32 -> 40
plan --load {saved} --lr 1e-2: use-checkpoint-opt-param-scheduler
plan --log-straggler world 2: straggler-factor 1.5 -> 2
listeners world 2: check-collectives
refusal: max-position-embeddings 24 -> 23; merge-file none -> {tokenizer};
    transformer-impl local -> transformer_engine; fp8-format none -> e4m3; fp8-margin 0 -> 1;
    fp8-amax-history-len 1 -> 2; fp8-amax-compute-algo most_recent -> max; fp4-format none -> e2m1;
    first-last-layers-bf16; num-layers-at-start-in-bf16 1 -> 2; num-layers-at-end-in-bf16 1 -> 2;
    memory-snapshot-path none -> a
refusal --fp8-format e4m3 --hidden-size 48: fp8-recipe tensorwise -> mxfp8
refusal LONG --account-for-loss-in-pipeline-split world 2: account-for-embedding-in-pipeline-split
refusal LONG --account-for-embedding-in-pipeline-split world 2: account-for-loss-in-pipeline-split
refusal --cuda-graph-impl full_iteration: cuda-graph-warmup-steps 3 -> 12
refusal --global-batch-size 7: allow-uneven-batch
refusal --load {saved} without --num-layers: use-checkpoint-args
refusal without --num-layers --hidden-size: load-hf none -> {hf}
constructors --vocab-size 300: tokenizer-type null -> byte
constructors --tokenizer-model {bos} without --vocab-size: tokenizer-hf-no-include-special-tokens
constructors TIKTOKEN without --vocab-size: tiktoken-pattern v1 -> v2;
    tiktoken-num-special-tokens none -> 5; tiktoken-special-tokens a b -> b </s>
constructors without --vocab-size: tokenizer-model {tokenizer} -> {tokenizer2}
constructors: calculate-per-token-loss; deterministic-mode; manual-gc; num-workers 0 -> 1;
    exit-signal SIGTERM -> SIGUSR1; wandb-project none -> a; mlflow-experiment none -> a;
    progress plain -> live
constructors --manual-gc: manual-gc-interval 0 -> 3
constructors SAVE --save-interval 9: on-failed-save continue -> stop
constructors SAVE: exit-signal-handler; exit-grace-seconds 25 -> 20
constructors --wandb-project p: wandb-exp-name none -> a; wandb-entity none -> a
constructors --mlflow-experiment e: mlflow-run-name none -> a; mlflow-tracking-uri none -> a
loss: position-embedding-type rope -> learned_absolute; seq-length 24 -> 16; seed 1234 -> 1235;
    mtp-num-layers none -> 1; lr-group embedding.*=1 -> embedding.*=0.1; decoupled-lr none -> 1e-3;
    data-path {data} -> {data2}; split 90,10 -> 50,50; dataloader-type single -> cyclic;
    eod-mask-loss; reset-position-ids; reset-attention-mask; pretrained-checkpoint none -> {saved}
loss --mtp-num-layers 2: mtp-loss-scaling-factor none -> 0.5
loss --decoupled-lr 5e-3 --train-iters 4: decoupled-min-lr 1e-3 -> 5e-3
loss MUON: muon-split-qkv; muon-split-matrices megatron -> all
loss without --data-path: data-args-path {args} -> {args2}
loss --valid-data-path {data} without --data-path --split: train-data-path {data} -> {data2}
loss without --data-path --split: per-split-data-args-path {splits} -> {splits2}
loss replaces --data-path: mock-data
loss --load {saved} --train-iters 8: reorder-samples
loss --load {saved} --train-iters 4: load-optim; schedule-on-load continue -> restart
loss --loss-spike-window 1 --train-iters 12: loss-spike-factor 1000 -> 1.0001
loss --loss-spike-factor 1.0001 --train-iters 12: loss-spike-window 100 -> 1
log: exit-interval none -> 1; device cpu -> cuda; eval-interval 1 -> 2; sft; load none -> {saved};
    hf-export-check; exit-duration-in-mins none -> 1e-6;
    check-weight-hash-across-dp-replicas-interval none -> 1; log-interval 1 -> 2; log-throughput;
    log-num-zeros-in-grad; log-params-norm; profile; record-memory-history;
    experiment none -> weight_average
log EVAL --eval-iters 1: eval-global-batch-size 8 -> 16
log EVAL: eval-iters 1 -> 2
log NAN: max-consecutive-bad-steps 1 -> 2; rerun-mode disabled -> validate_results
log TRAIN EVAL without --data-path --split: valid-data-path {data} -> {data2};
    test-data-path {data} -> {data2}
log --data-path {chats}: allow-chat-as-text
log --load {saved} --data-path {data2}: allow-data-change
log SAVE --save-interval 9: async-save
log --load {damaged}: load-fallback
log SAVE: save-optim
log --load {saved}: finetune
log --rerun-mode report_determinism_stats: rerun-interval 1 -> 2
log NAN SAVE: on-reproduced-fault skip -> restart; rollback-after-bad-steps none -> 1
log --profile STEPS --profile-dir {out}/traces: use-pytorch-profiler
log TRACE --profile-step-end 2: profile-step-start 0 -> 1
log TRACE --profile-step-start 0: profile-step-end 1 -> 2
log AVERAGE EVAL --eval-iters 1:
    experiment-option weight_average.half_life_samples=1 -> weight_average.half_life_samples=1000
file: data-cache-path none -> {out}/cache; save none -> {out}/save;
    tensorboard-dir none -> {out}/board; metrics-file {out}/metrics.jsonl -> {out}/other.jsonl
file SAVE: save-interval none -> 1
file SAVE --save-interval 1: save-keep-last none -> 1; save-retain-interval none -> 2
file --wandb-project p: wandb-save-dir none -> {out}/wandb
file TRACE STEPS: profile-ranks 0 -> 1; profile-dir {out}/one -> {out}/other
"""

_HEAD = re.compile(r"(\w+)(.*?)(?: without (.*?))?(?: replaces (.*?))?(?: world (\d))?")


def _expanded(text: str | None) -> str:
    return " ".join(SHORT.get(word, word) for word in (text or "").split())


def _effects(table: str) -> dict[str, Effect]:
    """Return the effects of a table's options by name; an indented line continues a row."""
    effects: dict[str, Effect] = {}
    for row in re.sub(r"\n +", " ", table.strip()).splitlines():
        head, _, cells = row.partition(": ")
        match = _HEAD.fullmatch(head)
        assert match, row
        observer, base, without, replaces, world = match.groups()
        flags = {"base": base, "without": without, "replaces": replaces}
        for cell in cells.split("; "):
            name, _, values = cell.partition(" ")
            assert name not in effects, f"{name} has two rows"
            two_values = ["" if value == "none" else value for value in values.split(" -> ")]
            texts = {field: _expanded(text) for field, text in flags.items()}
            effects[name] = Effect(observer, *two_values, **texts, world=int(world or 1))
    return effects


EFFECTS = _effects(TABLE)

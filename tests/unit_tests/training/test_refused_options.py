# SPDX-License-Identifier: Apache-2.0
"""Command lines that options refuse: the flags and values in each error message.

A row is `WORLD FLAGS -> WORDS`: the number of processes, the flags that a small run adds, and the
words of the message, in any order. `;` separates the messages of several problems, which are all
reported together. A word in capitals is short for flags.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron.cli.launch import Launch
from megatron.training.config.check import check
from megatron.training.pretrain_gpt import read_run
from megatron.training.pretrain_hybrid import PRETRAIN_HYBRID
from tests.support.arguments import last_wins
from tests.unit_tests.training.small_config import small_config

SHORT = {
    "BALANCE": "--moe-router-load-balancing-type",
    "BATCH": "--global-batch-size",
    "CAPACITY": "--moe-expert-rank-capacity-factor",
    "COMM": "--cp-comm-type",
    "CP": "--context-parallel-size",
    "DELTA": "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8"
    " --linear-value-head-dim 6 --linear-conv-kernel-dim 3",
    "DOCUMENTS": "--reset-attention-mask",
    "EIGHT": "--num-experts 8 --disable-bias-linear",
    "EMBEDDING": "--account-for-embedding-in-pipeline-split",
    "EP": "--expert-model-parallel-size",
    "ETP": "--expert-tensor-parallel-size",
    "EXPERTS": "--num-experts 4 --disable-bias-linear",
    "FIRST": "--decoder-first-pipeline-num-layers",
    "FP32_SUM": "--reduce-scatter-with-fp32-accumulation",
    "FULL": "--recompute-granularity full",
    "GRAPH": "--cuda-graph-impl full_iteration",
    "GROUP": "--microbatch-group-size-per-virtual-pipeline-stage",
    "GROUPED": "--group-query-attention --num-query-groups",
    "GROUPS": "--num-query-groups",
    "GTP": "--tensor-parallel-num-weight-shards",
    "HEADS": "--num-attention-heads",
    "INSTANCES": "--num-distributed-optimizer-instances",
    "KEYS": "--linear-num-key-heads 2 --linear-num-value-heads 2",
    "LAST": "--decoder-last-pipeline-num-layers",
    "LATENT": "--multi-latent-attention --disable-bias-linear",
    "LAYERS": "--num-layers",
    "LAYOUT": "--pipeline-model-parallel-layout",
    "LENGTH": "--seq-length",
    "LOSS": "--account-for-loss-in-pipeline-split",
    "MAMBA": "--mamba-head-dim 12 --mamba-state-dim 10 --mamba-num-groups 2",
    "METHOD": "--recompute-method",
    "MICRO": "--micro-batch-size",
    "OFFLOAD": "--optimizer-cpu-offload",
    "OUTER": "--outer-dp-sharding-strategy",
    "PATTERN": "--hybrid-layer-pattern",
    "POSITIONS": "--position-embedding-type",
    "PP": "--pipeline-model-parallel-size",
    "RAMPUP": "--rampup-batch-size",
    "RECOMPUTED": "--recompute-num-layers",
    "SAMPLES": "--train-samples",
    "SHARED": "--moe-shared-expert-intermediate-size",
    "SP": "--sequence-parallel",
    "STEPS": "--step-batch-size-schedule",
    "STRATEGY": "--data-parallel-sharding-strategy",
    "TP": "--tensor-model-parallel-size",
    "UNEVEN": "--allow-uneven-batch",
    "VIRTUAL": "--num-virtual-stages-per-pipeline-rank",
    "VPP_LAYERS": "--num-layers-per-virtual-pipeline-stage",
    "WARMUP": "--cuda-graph-warmup-steps",
}

REFUSED = r"""
# Limits of batches, layers, layouts, heads and schedules
1 --attention-backend triton --attention-dropout 0.1 -> --attention-backend triton
1 FULL RECOMPUTED 1 -> FULL METHOD
1 FULL METHOD uniform -> FULL RECOMPUTED
1 METHOD uniform -> METHOD --recompute-granularity
1 RECOMPUTED 1 -> RECOMPUTED --recompute-granularity
1 RECOMPUTED 3 -> RECOMPUTED --recompute-granularity
1 FULL METHOD uniform RECOMPUTED 3 -> RECOMPUTED 3 2
2 PP 2 FULL METHOD uniform RECOMPUTED 2 -> RECOMPUTED 2 1
2 PP 2 LAYERS 4 FULL METHOD uniform RECOMPUTED 5 -> RECOMPUTED 5 4
2 BATCH 3 -> BATCH 3 MICRO 3 2 6 6 UNEVEN
2 BATCH 3 UNEVEN -> BATCH 3 1 3 2 MICRO
3 BATCH 8 TP 2 -> TP 2 3 2
2 BATCH 7 EXPERTS -> BATCH 7 MICRO 3 2 6 6 UNEVEN
2 BATCH 7 EXPERTS UNEVEN -> BATCH 7 MICRO 3 --num-experts UNEVEN
1 --kv-channels 7 -> 7 --kv-channels 7 --rotary-percent 1.0
1 --rotary-percent 0.1 -> 0 --kv-channels 8 --rotary-percent 0.1
1 SAMPLES 11 BATCH 12 -> SAMPLES 11 BATCH 12
1 SAMPLES 50 --lr-warmup-iters 5 -> --lr-warmup-iters SAMPLES --lr-warmup-samples
1 --lr-warmup-samples 5 -> --lr-warmup-samples --train-iters --lr-warmup-iters
1 SAMPLES 50 --lr-warmup-samples 50 -> 50 50
1 SAMPLES 50 --lr-decay-samples 20 --lr-warmup-samples 20 -> 20 20
1 --lr-decay-iters 5 --lr-warmup-iters 5 -> 5 5
1 --lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 3 -> 8 10
1 SAMPLES 50 --lr-decay-style WSD -> --lr-decay-style WSD --lr-wsd-decay-samples
1 SAMPLES 50 --lr-decay-style WSD --lr-wsd-decay-samples 51 -> 51 50
1 --end-weight-decay 0.1 -> 0.01 0.1 --weight-decay-incr-style
1 --exp-avg-dtype bf16 --adam-beta1 0.999 -> --exp-avg-dtype bf16 --adam-beta1 0.999
1 PATTERN *-*-/*-/*- LENGTH 2 -> PATTERN *-*-/*-/*- 2 2
1 --profile --profile-step-start 10 --profile-step-end 11 -> --profile-step-start 10 --train-iters
1 --profile --profile-step-start 1 --profile-step-end 2 --profile-ranks 1 -> --profile-ranks 1
1 --record-memory-history --profile-ranks 1 -> --profile-ranks 1
1 EXPERTS --add-mlp-bias -> --add-mlp-bias
2 PP 2 LAYERS 3 PATTERN *-x -> PATTERN 3
2 PP 2 PATTERN *|x -> PATTERN 3
2 PP 2 LAYOUT Et|t|t|tL LAYERS 4 BATCH 12 GROUP 3 -> GROUP 3 4 2 2
2 PP 2 LAYOUT E(t|)*3tL LAYERS 4 BATCH 12 GROUP 3 -> GROUP 3 4 2 2
2 PP 2 LAYOUT Et|tL GROUP 1 -> GROUP 1 --pipeline-schedule 1f1b
2 PP 2 PATTERN *-|*-|*-|*- LAYERS 4 BATCH 12 GROUP 3 -> GROUP 3 4 2 2
1 PATTERN *-*E*E EXPERTS -> PATTERN 2
2 PP 2 PATTERN **-- LAYERS 4 VPP_LAYERS 3 -> VPP_LAYERS 3 2
2 PP 2 LAYERS 4 BATCH 12 VPP_LAYERS 3 -> VPP_LAYERS 3 2
2 PP 2 LAYERS 3 VPP_LAYERS 1 -> PP 2 3 2
2 PP 2 LAYERS 6 FIRST 2 VPP_LAYERS 3 -> VPP_LAYERS 3 4
2 PP 2 LAYERS 5 FIRST 2 LAST 3 VPP_LAYERS 1 -> VPP_LAYERS 1
3 PP 3 LAYERS 5 FIRST 2 LAST 3 VPP_LAYERS 1 -> VPP_LAYERS 1
2 PP 2 BATCH 12 LAYERS 6 FIRST 2 VPP_LAYERS 2 GROUP 3 -> GROUP 3 4 2 2
2 PP 2 BATCH 12 LAYERS 8 VPP_LAYERS 2 GROUP 3 -> GROUP 3 4 2 2
2 PP 2 BATCH 12 LAYERS 2 EMBEDDING LOSS VPP_LAYERS 1 GROUP 3 -> GROUP 3 4 2 2
2 PP 2 LAYERS 4 VIRTUAL 2 GROUP 2 -> GROUP 2 2
4 PP 2 LAYERS 4 VIRTUAL 2 GROUP 2 -> GROUP 2 2
2 PP 2 LAYERS 4 VIRTUAL 2 GROUP 3 BATCH 10 -> BATCH 10 MICRO 3 1 3 9 UNEVEN
2 PP 2 LAYERS 4 BATCH 12 PATTERN *-*-*-|*- FULL METHOD block RECOMPUTED 4 -> RECOMPUTED 4 3
2 CP 2 LENGTH 22 -> LENGTH 22 2 CP 2 4 24
4 CP 4 COMM a2a LENGTH 24 -> COMM a2a 6 CP 4 COMM p2p
2 CP 2 COMM a2a LENGTH 24 LATENT --kv-lora-rank 8 HEADS 5 --hidden-size 50 ->
    --multi-latent-attention
4 CP 4 COMM a2a LENGTH 24 HEADS 12 GROUPED 6 -> COMM a2a 6 CP 4 COMM p2p
6 CP 3 COMM a2a LENGTH 24 HEADS 12 GROUPED 4 TP 2 -> COMM a2a 2 2 CP 3 COMM p2p
8 CP 2 COMM a2a LENGTH 24 TP 4 -> HEADS 6 TP 4
2 GRAPH WARMUP 9 DOCUMENTS --reset-position-ids CP 2 -> CP 2 DOCUMENTS GRAPH
2 GRAPH WARMUP 9 --sft CP 2 -> CP 2 --sft GRAPH
1 GRAPH WARMUP 9 DOCUMENTS --reset-position-ids PATTERN G*-- LAYERS 4 KEYS -> DOCUMENTS GRAPH
1 GRAPH WARMUP 9 --sft PATTERN G*-- LAYERS 4 KEYS -> --sft GRAPH
1 EXPERTS --moe-router-topk 1 -> --moe-router-topk 1 --moe-router-pre-softmax
2 EXPERTS --moe-ffn-hidden-size 27 TP 2 -> moe-ffn-hidden-size 27 2
1 --num-experts 4 --add-mlp-bias ->
    --disable-bias-linear --add-qkv-bias --add-attention-output-bias
1 EXPERTS --moe-aux-loss-coeff 0.1 BALANCE none -> --moe-aux-loss-coeff 0.1 BALANCE none
1 --cpu-matmul-dtype fp32 -> --cpu-matmul-dtype --bf16 --fp16
1 --mtp-loss-scaling-factor 0.2 -> --mtp-loss-scaling-factor --mtp-num-layers
1 LATENT --kv-lora-rank 8 --mscale 0.7 -> --mscale --multi-latent-attention POSITIONS
1 POSITIONS yarn --mscale 0.7 -> --mscale --multi-latent-attention POSITIONS yarn
1 --context-parallel-cut row DOCUMENTS --reset-position-ids -> --context-parallel-cut CP 1
2 --context-parallel-cut row CP 2 LENGTH 24 -> --context-parallel-cut DOCUMENTS --sft
2 ETP 2 -> ETP --num-experts
1 --linear-cp-mode segments PATTERN G*-- LAYERS 4 KEYS -> --linear-cp-mode CP 1
2 PP 2 LAYERS 4 VIRTUAL 3 -> PP 2 4 6
2 PP 2 RECOMPUTED 2 -> RECOMPUTED --recompute-granularity
2 PP 2 FULL METHOD block -> FULL RECOMPUTED
2 PP 2 LAYERS 4 BATCH 11 UNEVEN VIRTUAL 2 GROUP 3 -> GROUP 3 4 2 2
2 PP 2 LAYERS 5 FIRST 2 LAST 2 VPP_LAYERS 1 -> PP 2 5 2 2
# The run, its schedule and its failures
2 SP TP 2 LENGTH 21 -> LENGTH 21 TP 2 SP
1 --group-query-attention -> GROUPED
1 GROUPED 4 -> HEADS 6 GROUPS 4
2 GROUPED 3 TP 2 -> GROUPS 3 TP 2
1 --hidden-size 50 -> --hidden-size 50 HEADS 6 --kv-channels
2 TP 2 --ffn-hidden-size 33 -> --ffn-hidden-size 33 TP 2
1 --loss-spike-factor 1 -> --loss-spike-factor 1.0
1 --log-straggler --straggler-factor 0.5 -> --straggler-factor 0.5
1 --rollback-after-bad-steps 2 -> --rollback-after-bad-steps --save
1 --save s --rollback-after-bad-steps 10 -> --rollback-after-bad-steps 10
1 --on-reproduced-fault restart -> --on-reproduced-fault restart --save
1 --save s --on-reproduced-fault restart --rerun-mode disabled -> --on-reproduced-fault restart
1 --use-rope-scaling --rotary-seq-len-interpolation-factor 2 ->
    --use-rope-scaling --rotary-seq-len-interpolation-factor
1 --use-rope-scaling POSITIONS yarn -> --use-rope-scaling POSITIONS yarn
1 --use-rope-scaling --rope-scaling-low-freq-factor 4 -> --rope-scaling-low-freq-factor 4.0
1 POSITIONS yarn --yarn-beta-slow 33 -> --yarn-beta-slow 33.0 --yarn-beta-fast 32.0
1 --decoupled-min-lr 1e-4 -> --decoupled-min-lr --decoupled-lr
1 --rope-scaling-factor 3 -> --rope-scaling-factor --use-rope-scaling
1 --yarn-beta-fast 64 -> --yarn-beta-fast POSITIONS
1 --rerun-interval 3 -> --rerun-interval --rerun-mode
1 --loss-spike-window 3 -> --loss-spike-window --loss-spike-factor
1 --no-muon-split-qkv -> --no-muon-split-qkv --optimizer
1 --optimizer-offload-fraction 0.5 -> --optimizer-offload-fraction OFFLOAD
1 OFFLOAD --optimizer muon -> OFFLOAD --optimizer muon
1 --exp-avg-sq-dtype bf16 -> --exp-avg-sq-dtype bf16 --adam-beta2 0.999 --adam-beta2 0.992 fp32
1 --exp-avg-dtype bf16 --optimizer sgd -> --exp-avg-dtype bf16 --optimizer sgd
1 --straggler-factor 9 -> --straggler-factor --log-straggler
1 --allow-data-change -> --allow-data-change --load
1 --finetune -> --finetune --load --pretrained-checkpoint
1 --profile-step-start 3 -> --profile-step-start --profile
1 --profile-ranks 3 -> --profile-ranks --profile --record-memory-history
1 --train-iters 10 SAMPLES 9 -> --train-iters SAMPLES
1 --max-position-embeddings 19 -> LENGTH 20 --max-position-embeddings 19
1 --lr-decay-samples 9 -> --lr-decay-samples --train-iters --lr-decay-iters
1 --lr-warmup-iters 1 --lr-warmup-fraction 0.1 -> --lr-warmup-iters --lr-warmup-fraction
1 --lr-decay-style WSD -> --lr-decay-style WSD --lr-wsd-decay-iters
1 --tokenizer-type hf -> --tokenizer-type hf --tokenizer-model
1 --start-weight-decay 1.0 --weight-decay-incr-style linear -> --start-weight-decay 1.0
6 TP 4 SP LENGTH 21 --schedule-on-load restart --lr-warmup-iters 99 ->
    TP 4 ; LENGTH 21 ; HEADS 6 ; 99 10 ; --schedule-on-load --load
1 SAMPLES 50 --lr-decay-iters 5 -> --lr-decay-iters SAMPLES --lr-decay-samples
# Experts and latent attention
1 --moe-router-topk 1 SHARED 40 -> SHARED --num-experts ; --moe-router-topk --num-experts
4 EP 2 ETP 2 -> EP --num-experts ; ETP --num-experts
1 PATTERN *E*- -> PATTERN *E*- --num-experts
1 EIGHT --moe-layer-freq 0,0 -> --num-experts 8
1 EIGHT PATTERN *EE -> LAYERS 2 PATTERN *EE 3 LAYERS
1 EIGHT --moe-layer-freq a -> --moe-layer-freq a 0 0 1 2 0,1,1 [0]*1+[1]*3
3 EIGHT EP 3 -> num-experts 8 expert-model-parallel-size 3
4 EIGHT TP 2 EP 4 -> ETP 2 EP 4 PP 1 8 4 8
4 EIGHT EP 4 INSTANCES 2 STRATEGY optim -> INSTANCES 2 4 ETP 1 EP 4 PP 1 4 1
1 EIGHT --moe-router-topk 9 -> moe-router-topk 9 8
1 EIGHT --moe-router-group-topk 2 -> moe-router-group-topk
1 EIGHT --moe-shared-expert-gate -> 
2 EIGHT SHARED 401 TP 2 -> 401 tensor-model-parallel-size 2
1 EIGHT --no-moe-shared-expert-overlap --moe-token-drop-policy position
    --moe-router-bias-update-rate 0.1 ->
    --no-moe-shared-expert-overlap SHARED ; --moe-token-drop-policy --moe-expert-capacity-factor ;
    --moe-router-bias-update-rate --moe-router-enable-expert-bias
2 EIGHT GRAPH EP 2 -> 2 GRAPH CAPACITY
1 EIGHT CAPACITY 1.5 -> CAPACITY 1.5 EP
1 --kv-lora-rank 8 --mscale 2 ->
    --kv-lora-rank --multi-latent-attention ; --mscale --multi-latent-attention
1 --multi-latent-attention -> LATENT --add-mlp-bias
1 LATENT GROUPED 2 -> --group-query-attention --multi-latent-attention
1 LATENT --window-size 4 -> --window-size --multi-latent-attention
1 LATENT --softmax-type learnable -> --softmax-type learnable --multi-latent-attention
1 LATENT --add-qkv-bias -> --add-qkv-bias --multi-latent-attention
1 LATENT --add-attention-output-bias -> --add-attention-output-bias --multi-latent-attention
1 LATENT POSITIONS none -> POSITIONS none --multi-latent-attention
4 LATENT TP 4 -> --multi-latent-attention 6 tensor-model-parallel-size 4
1 LATENT --qk-pos-emb-head-dim 7 -> 7 --qk-pos-emb-head-dim 7 --rotary-percent 1.0
1 --moe-token-dispatcher-type flex -> --moe-token-dispatcher-type
1 BALANCE sinkhorn -> BALANCE
# Context parallelism
4 CP 3 LENGTH 24 -> CP 3 4 3
4 CP 2 TP 2 PP 2 -> TP 2 CP 2 PP 2 8 4 8
6 CP 2 TP 3 SP -> LENGTH 20 TP 3 CP 2 SP
4 CP 2 TP 2 COMM a2a -> COMM a2a 3 2 CP 2 COMM p2p
2 COMM p2p -> COMM CP 1
2 CP 2 --attention-backend reference -> --attention-backend reference CP 2
6 CP 4 COMM a2a --attention-backend triton --attention-dropout 0 ->
    CP 4 ; LENGTH 20 ; --attention-backend triton ; COMM a2a
2 INSTANCES 2 LENGTH 32 STRATEGY optim_grads_params -> INSTANCES 2
# Pipeline stages
4 PP 3 LAYERS 3 -> PP 3 4 3
4 PP 2 TP 3 -> TP 3 PP 2 6 4 6
2 VIRTUAL 2 -> VIRTUAL 2 PP 1
2 VPP_LAYERS 1 -> VPP_LAYERS 1 PP 1
2 GROUP 2 -> GROUP 2 PP 1
2 FIRST 1 -> FIRST 1 PP 1
2 LAYOUT EttL -> LAYOUT EttL PP 1
2 PATTERN *-|*- -> PATTERN *-|*- PP 1
2 --pipeline-schedule 1f1b -> --pipeline-schedule 1f1b PP 1
2 LOSS -> LOSS PP 1
2 PP 2 VIRTUAL 1 VPP_LAYERS 1 -> VPP_LAYERS 1 VIRTUAL 1
2 PP 2 LAYERS 4 VIRTUAL 2 --pipeline-schedule zb-h1 -> --pipeline-schedule zb-h1 2
2 PP 2 --pipeline-schedule interleaved -> --pipeline-schedule interleaved VIRTUAL 1f1b
2 PP 2 LAYOUT Et|t -> LAYOUT
2 PP 2 LAYOUT Ettt|L -> LAYOUT 3 2
2 PP 2 LAYOUT EttL -> LAYOUT 2 2
2 PP 2 PATTERN *-|*-*- -> PATTERN 2
1 PATTERN *-*-*- -> PATTERN 2
2 PP 2 PATTERN *-|*-| -> PATTERN 3 2 2
2 PP 2 LAYOUT Et|tL FIRST 1 -> FIRST 1 LAYOUT Et|tL
2 PP 2 LAYOUT Et|tL PATTERN *-|*- -> LAYOUT Et|tL PATTERN *-|*-
2 PP 2 GRAPH -> PP 2 GRAPH
6 PP 2 LAYOUT Et|(tx VPP_LAYERS 1 VIRTUAL 2 TP 2 ->
    TP 2 ; VPP_LAYERS 1 ; VIRTUAL 2 ; VPP_LAYERS 1 ; LAYOUT ; LAYOUT ; LAYOUT
4 PP 2 LAYOUT t(|xL) BATCH 7 --schedule-on-load restart ->
    BATCH 7 ; LAYOUT ; LAYOUT ; --schedule-on-load --load
4 PP 2 PATTERN *-|*-*x| --schedule-on-load restart ->
    PATTERN ; PATTERN *-|*-*x| ; --schedule-on-load --load
4 PP 4 LAYERS 6 VIRTUAL 2 --pipeline-schedule zb-h1 GROUP 3 ->
    PP 4 ; --pipeline-schedule zb-h1 ; GROUP 3
# Batch sizes
1 STEPS 0:6 240:12 0.6K:18 BATCH 12 -> BATCH 12 STEPS 18
1 STEPS 0:6 240:12 0.6K:18 BATCH 18 RAMPUP 6 6 9 -> STEPS RAMPUP
1 STEPS 20:6 -> STEPS 20:6
1 STEPS 0:6 200:12 100:18 -> STEPS 0:6 200:12 100:18 10 5
1 STEPS 0:6 19:12 -> STEPS 0:6 19:12
1 STEPS 0:6 40 -> STEPS 40 200B:768
1 STEPS 0:6 1Q:12 -> STEPS 1Q:12 200B:768
1 STEPS 0:0 -> STEPS 0:0
1 STEPS 0:6.5 -> STEPS 0:6.5 200B:768
1 RAMPUP 6 6 30 -> RAMPUP BATCH
1 BATCH 18 RAMPUP 6 6 -> RAMPUP 6
1 BATCH 18 RAMPUP 6 0 30 -> RAMPUP 6 0 30
1 BATCH 18 RAMPUP 6 5 30 -> RAMPUP 6 5 30 BATCH 18 6 5
2 STEPS 0:6 240:15 -> STEPS 15 MICRO 3 2 6 12 UNEVEN
2 BATCH 18 RAMPUP 9 9 30 -> RAMPUP 9 MICRO 3 2 6 12 UNEVEN
2 BATCH 12 --eval-global-batch-size 9 -> --eval-global-batch-size 9 MICRO 3 2 6 12 UNEVEN
2 BATCH 12 --eval-micro-batch-size 4 -> BATCH 12 --eval-micro-batch-size 4 2 8 16 UNEVEN
1 STEPS 0:6 240:12 0.6K:18 GRAPH -> STEPS GRAPH
2 PP 2 LAYERS 4 --pipeline-schedule interleaved VIRTUAL 2 STEPS 0:3 240:6 GROUP 2 -> GROUP 2 2
# Data parallelism
4 STRATEGY optim_grads_params INSTANCES 3 -> INSTANCES 3 4 2
1 STRATEGY optim_grads_params INSTANCES 2 -> INSTANCES 2 1
2 STRATEGY optim_grads_params --ddp-bucket-size 9 ->
    --ddp-bucket-size 9 STRATEGY optim_grads_params
4 INSTANCES 2 -> INSTANCES 2 STRATEGY
4 STRATEGY optim_grads_params OUTER optim -> OUTER optim INSTANCES 1
4 STRATEGY optim_grads INSTANCES 2 OUTER optim -> OUTER optim STRATEGY optim_grads
2 --overlap-param-gather -> --overlap-param-gather STRATEGY
2 --check-weight-gather -> --check-weight-gather STRATEGY
2 STRATEGY optim --param-gather-granularity weight -> --param-gather-granularity weight STRATEGY
2 STRATEGY optim_grads_params --param-gather-prefetch-bytes 1 -> --param-gather-prefetch-bytes 1
2 --gtp-reduce-scatter-per step -> --gtp-reduce-scatter-per step GTP
2 --gtp-reduce-scatter-per step GTP 2 STRATEGY optim_grads ->
    --gtp-reduce-scatter-per step STRATEGY
2 --grad-reduce-in-bf16 -> --grad-reduce-in-bf16 --bf16
2 STRATEGY optim_grads_params --bf16 FP32_SUM -> FP32_SUM --grad-reduce-in-bf16 fp32 fp32
2 --bf16 --grad-reduce-in-bf16 FP32_SUM -> FP32_SUM STRATEGY
4 INSTANCES 3 OUTER optim --overlap-param-gather FP32_SUM OFFLOAD --optimizer muon
    --exp-avg-sq-dtype bf16 --log-straggler --straggler-factor 1 ->
    INSTANCES 3 ; INSTANCES 3 ; OUTER optim ; --overlap-param-gather STRATEGY ; FP32_SUM
    --grad-reduce-in-bf16 ; FP32_SUM ; --exp-avg-sq-dtype bf16 ; OFFLOAD --optimizer ;
    --straggler-factor 1.0
1 --use-distributed-optimizer STRATEGY no_shard -> --use-distributed-optimizer STRATEGY no_shard
4 --use-nccl-ub STRATEGY optim -> --use-nccl-ub STRATEGY optim GTP
# The optimizer
1 --decoupled-lr 1e-4 --decoupled-min-lr 2e-4 -> --decoupled-min-lr 0.0002 --decoupled-lr 0.0001
1 --decoupled-lr 1e-4 --min-lr 2e-4 -> --min-lr 0.0002 --decoupled-lr 0.0001 --min-lr
1 --decoupled-lr 1e-4 --lr-warmup-init 2e-4 -> --lr-warmup-init 0.0002 --decoupled-lr 0.0001
1 --lr-group embedding -> --lr-group embedding
1 --lr-group a=-1 -> --lr-group a=-1
1 --weight-decay-group a=1 a=2 -> --weight-decay-group
1 --exp-avg-sq-dtype fp16 -> --exp-avg-sq-dtype fp16 fp32 bf16
1 --muon-momentum 1 -> --muon-momentum 1.0
1 --no-muon-split-qkv --muon-split-matrices all -> --no-muon-split-qkv --muon-split-matrices all
1 --adam-beta1 1 --adam-beta2 2 -> --adam-beta1 1.0 ; --adam-beta2 2.0
1 --weight-decay -1 --adam-eps 0 --muon-momentum 1 ->
    --weight-decay -1.0 ; --adam-eps 0.0 ; --muon-momentum 1.0
1 --lr-group a --weight-decay-group b -> --lr-group a ; --weight-decay-group b
# Checkpoints, profiles, logs and experiments
1 --async-save -> --async-save --save-interval
1 --on-failed-save stop -> --on-failed-save stop --save-interval
1 --save-keep-last 2 -> --save-keep-last --save
1 --save-retain-interval 2 -> --save-retain-interval --save
1 --no-load-fallback -> --no-load-fallback --load --pretrained-checkpoint
1 --load-hf a --pretrained-checkpoint b -> --load-hf --pretrained-checkpoint
1 --use-checkpoint-args -> --use-checkpoint-args --load --pretrained-checkpoint
1 --schedule-on-load restart --load a --finetune -> --schedule-on-load --load --finetune
1 --profile --profile-step-start 4 --profile-step-end 4 -> --profile-step-end 4 --profile-step-start
1 --use-pytorch-profiler -> --use-pytorch-profiler --profile
1 --memory-snapshot-path a -> --memory-snapshot-path --record-memory-history
1 --profile --profile-ranks -1 -> --profile-ranks -1
1 --wandb-entity a -> --wandb-entity --wandb-project
1 --mlflow-run-name a -> --mlflow-run-name --mlflow-experiment
1 --experiment ../tests -> --experiment ../tests
1 --experiment weight_average/tests -> --experiment weight_average/tests
1 --experiment /etc -> --experiment /etc
1 --experiment-option a.b=1 -> --experiment-option a.b=1
1 --experiment a --experiment-option a.b -> --experiment-option a.b
1 --experiment a-b -> --experiment a-b
1 --experiment a a -> --experiment a
1 --experiment a --experiment-option b.c=1 -> --experiment-option b.c=1
1 --experiment a --experiment-option a.c=1 a.c=2 -> --experiment-option a.c
1 --save s --no-save-optim --rollback-after-bad-steps 2 -> --no-save-optim
# Values of one group
1 --eval-iters -2 -> --eval-iters -2 -1
1 --mtp-num-layers 20 -> --mtp-num-layers 20
1 --manual-gc-interval 5 -> --manual-gc-interval --manual-gc
1 --bf16 --fp16 -> --bf16 --fp16
1 --yarn-rotary-scaling-factor 0.9 -> --yarn-rotary-scaling-factor 0.9 1
1 --rotary-percent 1.1 -> --rotary-percent 1.1 1
1 --lr-warmup-fraction 1 -> --lr-warmup-fraction 1.0
1 --min-lr 2e-3 -> --min-lr 0.002 --lr 0.001
1 --lr-warmup-init 2e-3 -> --lr-warmup-init 0.002 --lr 0.001
1 POSITIONS learned_absolute --mtp-num-layers 1 -> POSITIONS learned_absolute
1 --tiktoken-special-tokens a a -> --tiktoken-special-tokens
1 POSITIONS none --rotary-base 5000 -> --rotary-base POSITIONS rope yarn
# Weights sharded over gtp
2 TP 2 GTP 3 -> GTP 3 TP 2 4
3 GTP 2 -> GTP 2 3
2 --gtp-opt-in-modules mla_down_proj -> --gtp-opt-in-modules mla_down_proj GTP
2 GTP 2 --gtp-opt-in-modules mla_down_proj -> --gtp-opt-in-modules --multi-latent-attention
2 --gtp-opt-in-modules attention -> --gtp-opt-in-modules attention mla_down_proj
4 GTP 2 INSTANCES 2 STRATEGY optim -> GTP INSTANCES 2
2 --weight-gather-format fp8 -> --weight-gather-format fp8 GTP
2 GTP 2 STRATEGY optim_grads_params --weight-gather-format fp8 -> --weight-gather-format STRATEGY
2 GTP 2 --weight-gather-scale-blocks 1d -> --weight-gather-scale-blocks 1d --weight-gather-format
2 EXPERTS --expert-tensor-parallel-num-weight-shards 2 --weight-gather-format mxfp8 ->
    --weight-gather-format mxfp8 32 48 --hidden-size
2 EXPERTS TP 2 --expert-tensor-parallel-num-weight-shards 3 -> 3 ETP 2 4
3 EXPERTS --expert-tensor-parallel-num-weight-shards 2 -> 3 2 1
2 --expert-tensor-parallel-num-weight-shards 2 -> --num-experts
# FP8 and FP4
1 --fp8-format e4m3 --fp4-format e2m1 --hidden-size 64 HEADS 4 LENGTH 32 ->
    --fp8-format --fp4-format ; --fp8-format --transformer-impl
1 --fp8-format e4m3 --fp8-recipe tensorwise --hidden-size 64 HEADS 4 LENGTH 32
    --first-last-layers-bf16 --num-layers-at-end-in-bf16 1 ->
    --fp8-format --transformer-impl ; 2 2 --num-layers-at-start-in-bf16
1 --fp8-format e4m3 --fp8-recipe tensorwise --hidden-size 64 HEADS 4 EXPERTS SHARED 40
    --moe-ffn-hidden-size 24 -> --fp8-format --transformer-impl ; 16 24 --moe-ffn-hidden-size ;
    16 40 SHARED ; 8 20 3 LENGTH MICRO
1 GRAPH --transformer-impl transformer_engine -> --transformer-impl GRAPH
1 --fp8-recipe mxfp8 -> --fp8-recipe --fp8-format
1 --fp8-margin 1 -> --fp8-margin --fp8-format delayed
1 --first-last-layers-bf16 -> --first-last-layers-bf16 --fp8-format --fp4-format
1 --num-layers-at-end-in-bf16 2 -> --num-layers-at-end-in-bf16 --first-last-layers-bf16
1 --keep-recurrent-states -> --keep-recurrent-states PATTERN
2 CP 2 LENGTH 24 --linear-cp-mode segments -> --linear-cp-mode PATTERN
# CUDA graphs
2 GRAPH --device cpu -> GRAPH --device cpu
2 GRAPH STRATEGY optim_grads_params --check-weight-gather -> --check-weight-gather GRAPH
2 GRAPH --check-collectives -> --check-collectives GRAPH
2 GRAPH --log-straggler -> --log-straggler GRAPH
2 GRAPH WARMUP 10 -> WARMUP 10 --train-iters 10
2 WARMUP 4 -> WARMUP --cuda-graph-impl
2 GRAPH STRATEGY optim_grads_params --device cpu --check-weight-gather --check-collectives
    --log-straggler WARMUP 11 ->
    GRAPH ; --check-weight-gather ; --check-collectives ; --log-straggler ; WARMUP 11
1 GRAPH WARMUP 0 -> WARMUP 0
# Blocks of hybrid models
1 --mamba-dt-limit 0.2 0.1 -> --mamba-dt-limit 0.2 0.1
1 --mamba-dt-limit 1 2 3 -> --mamba-dt-limit 1.0 2.0 3.0
1 --swiglu --squared-relu -> --swiglu --squared-relu
"""

#: Rows of pretrain_hybrid, whose small run has no blocks.
REFUSED_HYBRIDS = r"""
1 PATTERN G-x- DELTA -> PATTERN 3
1 PATTERN GD DELTA -> PATTERN 2
1 PATTERN *-+- HEADS 6 -> PATTERN
1 PATTERN G-/*|- DELTA HEADS 6 -> PATTERN
1 PATTERN G-*- DELTA -> HEADS
1 PATTERN G- DELTA HEADS 6 -> HEADS 6 PATTERN G-
1 PATTERN G- DELTA POSITIONS rope -> POSITIONS rope PATTERN G-
1 PATTERN G-+- DELTA HEADS 6 -> PATTERN G-+- --multi-latent-attention
1 PATTERN G-*- DELTA HEADS 6 LATENT POSITIONS rope --qk-layernorm -> PATTERN G-*-
1 PATTERN GE DELTA -> PATTERN GE --num-experts
1 PATTERN GE DELTA EXPERTS --moe-layer-freq 1 -> --moe-layer-freq PATTERN GE
1 PATTERN G- DELTA --mtp-num-layers 1 -> --mtp-num-layers 1 PATTERN G-
1 PATTERN G-/G-/G- DELTA --mtp-num-layers 1 -> --mtp-num-layers 1 PATTERN G-/G-/G- 2
1 PATTERN M- --mamba-head-dim 36 -> --mamba-head-dim 36 2 --hidden-size 96 --mamba-num-heads
1 PATTERN M- MAMBA --linear-key-head-dim 8 -> --linear-key-head-dim PATTERN
1 PATTERN G- DELTA --no-mamba-conv-bias -> --no-mamba-conv-bias PATTERN
1 PATTERN G- DELTA --add-short-conv-bias -> --add-short-conv-bias PATTERN
2 PATTERN C- CP 2 --linear-cp-mode segments -> --linear-cp-mode PATTERN
1 PATTERN G-*- DELTA HEADS 6 --rotary-base 5000 -> --rotary-base POSITIONS
4 PATTERN G- DELTA TP 4 --ffn-hidden-size 64 ->
    linear-num-key-heads 2 tensor-model-parallel-size 4
4 PATTERN G- DELTA CP 2 --linear-cp-mode headwise TP 2 -> linear-cp-mode 2
2 PATTERN G-M DELTA MAMBA PP 2 -> PP 2 3 2
3 PATTERN (GM)- DELTA MAMBA PP 3 -> PP 3 PATTERN (GM)-
1 PATTERN (G-)/(G-) DELTA -> PATTERN (G-)/(G-)
2 PATTERN G-|M- DELTA MAMBA PP 2 FIRST 1 -> FIRST 1 PATTERN G-|M-
2 PATTERN G-M- DELTA MAMBA PP 2 LAYOUT Ett|ttL -> LAYOUT PATTERN
1 LAYERS 2 HEADS 6 -> PATTERN
1 PATTERN G-x- DELTA --schedule-on-load restart -> PATTERN 'x' 3 ; --schedule-on-load --load
"""

#: Rows without WORDS: values at the limits beyond which REFUSED lists them.
ACCEPTED = r"""
1 --min-lr 1e-3
1 --lr-warmup-init 1e-3
1 --decoupled-lr 1e-4 --decoupled-min-lr 1e-4 --lr-warmup-init 1e-4
1 POSITIONS yarn --yarn-beta-slow 32
1 BATCH 18 RAMPUP 18 6 0
1 --attention-backend triton --attention-dropout 0
1 --attention-backend reference --attention-dropout 0.1
1 FULL METHOD uniform RECOMPUTED 2
2 PP 2 FULL METHOD uniform RECOMPUTED 1
2 BATCH 9 UNEVEN
2 BATCH 9 EXPERTS UNEVEN
1 --hidden-size 50 --kv-channels 8
1 --kv-channels 7 POSITIONS none
1 LATENT --kv-lora-rank 8 --hidden-size 50
2 BATCH 6 UNEVEN
1 --max-position-embeddings 20
4 SAMPLES 12 BATCH 12
1 SAMPLES 11 BATCH 9
1 --eval-interval 0 --eval-iters 0
1 --eval-interval 5 --eval-iters 0
1 SAMPLES 50 --lr-decay-samples 20 --lr-warmup-samples 19
1 --lr-decay-iters 20 --lr-warmup-iters 12
1 --lr-decay-style WSD --lr-wsd-decay-iters 7 --lr-warmup-iters 3
1 SAMPLES 50 --lr-decay-style WSD --lr-wsd-decay-samples 50
1 --end-weight-decay 0.1 --weight-decay-incr-style linear
1 --start-weight-decay 0.1 --end-weight-decay 0.1
1 --rerun-mode disabled
1 PATTERN *-*-/*-/*- LENGTH 3
1 --exp-avg-sq-dtype bf16 --adam-beta2 0.9921875
1 --profile --profile-step-start 9 --profile-step-end 10
1 --profile --profile-step-start 500 --profile-step-end 501 SAMPLES 50
1 --record-memory-history --profile-ranks 0
1 --finetune --load x
1 --finetune --pretrained-checkpoint x
2 PP 2 LAYOUT Et|t|t|tL LAYERS 4 BATCH 12 GROUP 4
2 PP 2 LAYOUT E(t|)*3tL LAYERS 4 BATCH 12 GROUP 2
2 PP 2 PATTERN *-|*-|*-|*- LAYERS 4 BATCH 12 GROUP 4
2 PP 2 PATTERN **-- LAYERS 4 VPP_LAYERS 1
2 PP 2 BATCH 12 LAYERS 6 FIRST 2 VPP_LAYERS 2 GROUP 4
2 PP 2 LAYERS 2 EMBEDDING LOSS VPP_LAYERS 2
4 PP 2 LAYERS 4 VIRTUAL 2 GROUP 1
2 PP 2 LAYERS 4 BATCH 12 PATTERN *-*-*-|*- FULL METHOD block RECOMPUTED 3
2 PP 2 LAYERS 4 BATCH 12 --recompute-granularity selective
2 CP 2 COMM a2a LENGTH 24
6 CP 6 COMM a2a LENGTH 24
2 CP 2 COMM a2a LENGTH 24 HEADS 12 GROUPED 4
3 CP 3 COMM a2a LENGTH 24 HEADS 12 GROUPED 1
12 CP 3 COMM a2a LENGTH 24 HEADS 12 GROUPED 2 TP 4
2 GRAPH WARMUP 9 CP 2 LENGTH 24
1 GRAPH WARMUP 9 DOCUMENTS --reset-position-ids
1 GRAPH WARMUP 9 --sft
1 GRAPH WARMUP 9 PATTERN G*-- LAYERS 4 KEYS
1 GRAPH WARMUP 500 SAMPLES 50
1 EXPERTS --moe-router-topk 1 --moe-router-pre-softmax
1 EXPERTS --moe-router-topk 1 --load-hf x
1 EXPERTS --moe-router-topk 1 --pretrained-checkpoint x
1 EXPERTS --moe-router-topk 1 --use-checkpoint-args --load x
2 EXPERTS --moe-ffn-hidden-size 27 TP 2 ETP 1
1 EXPERTS --moe-layer-freq 0,1 --add-mlp-bias
1 EXPERTS --moe-aux-loss-coeff 0.1
1 EXPERTS BALANCE none
1 --cpu-matmul-dtype fp32 --bf16
1 --cpu-matmul-dtype fp32 --fp16
1 --mtp-loss-scaling-factor 0.2 --mtp-num-layers 1
1 LATENT --kv-lora-rank 8 POSITIONS yarn --mscale 0.7
2 --context-parallel-cut row DOCUMENTS --reset-position-ids CP 2 LENGTH 24
2 --context-parallel-cut row --sft CP 2 LENGTH 24
2 ETP 1
2 EXPERTS TP 2 ETP 1 EP 2
2 --linear-cp-mode segments PATTERN G*-- LAYERS 4 KEYS CP 2 LENGTH 24
2 PP 2 LAYERS 4 FIRST 3 VPP_LAYERS 1
3 MICRO 2 BATCH 8 UNEVEN
4 MICRO 2 BATCH 7 UNEVEN
3 MICRO 2 BATCH 10 EXPERTS UNEVEN
"""

#: Sizes, rates and counts: `VALUE OPTIONS` is the largest refused value of each option.
BELOW_THE_LEAST = """
0 num-layers hidden-size num-attention-heads ffn-hidden-size num-query-groups kv-channels
    max-position-embeddings norm-epsilon init-method-std
-1 hidden-dropout
0 window-size q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
-1 attention-dropout mscale mscale-all-dim
0 rotary-base rotary-percent rotary-seq-len-interpolation-factor rope-scaling-factor
    rope-scaling-original-max-position rope-scaling-low-freq-factor rope-scaling-high-freq-factor
    yarn-rotary-scaling-factor yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow
    yarn-attention-factor
0 num-experts moe-ffn-hidden-size moe-expert-capacity-factor moe-shared-expert-intermediate-size
    moe-router-topk moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor
    moe-router-bias-update-rate
-1 moe-aux-loss-coeff moe-z-loss-coeff moe-input-jitter-eps
0 linear-num-key-heads linear-num-value-heads linear-key-head-dim linear-value-head-dim
    linear-conv-kernel-dim mamba-num-heads mamba-head-dim mamba-state-dim mamba-num-groups
    mamba-norm-groups mamba-conv-kernel-dim short-conv-kernel-dim
0 vocab-size make-vocab-size-divisible-by
0 tensor-model-parallel-size context-parallel-size
0 expert-model-parallel-size expert-tensor-parallel-size
0 tensor-parallel-num-weight-shards
0 expert-tensor-parallel-num-weight-shards
0 moe-expert-rank-capacity-factor
0 distributed-timeout-minutes
0 pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage
    num-virtual-stages-per-pipeline-rank microbatch-group-size-per-virtual-pipeline-stage
-1 decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
0 num-distributed-optimizer-instances ddp-bucket-size
-1 param-gather-prefetch-bytes
0 recompute-num-layers cuda-graph-warmup-steps
0 fp8-amax-history-len
-1 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16
0 seq-length micro-batch-size global-batch-size train-iters train-samples exit-interval
    mtp-num-layers max-consecutive-bad-steps
-1 seed mtp-loss-scaling-factor eval-interval
-1 manual-gc-interval
0 eval-global-batch-size eval-micro-batch-size
0 adam-eps optimizer-offload-fraction
-1 weight-decay start-weight-decay end-weight-decay adam-beta1 adam-beta2 sgd-momentum clip-grad
-1 muon-momentum
0 muon-num-ns-steps muon-extra-scale-factor
0 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
0 lr decoupled-lr lr-decay-iters lr-decay-samples lr-wsd-decay-iters lr-wsd-decay-samples
-1 min-lr decoupled-min-lr lr-warmup-iters lr-warmup-samples lr-warmup-fraction lr-warmup-init
-1 num-workers
0 save-interval save-keep-last save-retain-interval
0 exit-grace-seconds exit-duration-in-mins rerun-interval loss-spike-factor loss-spike-window
    rollback-after-bad-steps check-weight-hash-across-dp-replicas-interval straggler-factor
0 log-interval
-1 profile-step-start
"""

HYBRID_RUN = (
    "--mock-data --tokenizer-type null --vocab-size 61 --hidden-size 48 --seq-length 20 "
    "--micro-batch-size 1 --train-iters 2 --lr 1e-3 --position-embedding-type none"
)


def rows(table: str) -> list[str]:
    """Return the rows of a table; an indented line continues a row."""
    lines = re.sub(r"\n +", " ", table.strip()).splitlines()
    return [line for line in lines if not line.startswith("#")]


def expand(text: str) -> str:
    """Return flags or messages with the words in capitals written out."""
    return " ".join(SHORT.get(word, word) for word in text.split())


def small_problems(row: str) -> list[str]:
    """Return the problems of a row's flags in a small run."""
    world, _, flags = expand(row.partition(" ->")[0]).partition(" ")
    samples = "--train-samples" in flags and "--train-iters" not in flags
    try:
        config = small_config(flags, without=("--train-iters",) if samples else ())
    except ValueError as error:
        return str(error).split("; ")
    return check(config, int(world))


def assert_words(problems: list[str], row: str) -> None:
    """Assert that each problem has the words of its part of the row."""
    expected = row.partition("-> ")[2].split(" ; ")
    assert len(problems) == len(expected), problems
    for problem, words in zip(problems, expected, strict=True):
        for word in expand(words).split():
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", problem), (word, problem)


@pytest.mark.parametrize("row", rows(REFUSED))
def test_refused_options_name_flags_and_values(row):
    assert_words(small_problems(row), row)


@pytest.mark.parametrize("row", rows(REFUSED_HYBRIDS))
def test_refused_hybrid_options_name_flags_and_values(row):
    world, _, flags = expand(row.partition(" ->")[0]).partition(" ")
    words = last_wins(f"{HYBRID_RUN} {flags}".split())
    with pytest.raises(ValueError) as caught:
        read_run(words, Launch(world_size=int(world)), program=PRETRAIN_HYBRID)
    assert_words(str(caught.value).split("; "), row)


@pytest.mark.parametrize("row", rows(BELOW_THE_LEAST))
def test_every_value_below_its_least_is_reported(row):
    value, *names = row.split()
    problems = "; ".join(small_problems("1 " + " ".join(f"--{name} {value}" for name in names)))
    for name in names:
        assert re.search(rf"--{name} is {value}(\.0)?:", problems), (name, problems)


@pytest.mark.parametrize("row", rows(ACCEPTED))
def test_values_at_the_limit_are_accepted(row):
    assert small_problems(row) == []


def test_missing_options_are_one_problem():
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2"
    (problem,) = check(small_config(wsd, without=("--train-iters",)), 1)
    assert "--train-iters" in problem
    shards = "--context-parallel-size 2 --cp-comm-type a2a --seq-length 24"
    (problem,) = check(small_config(shards, without=("--num-attention-heads",)), 2)
    assert problem.startswith("missing --num-attention-heads")


def test_options_are_checked_without_torch():
    code = (
        "import sys; from tests.unit_tests.training.test_refused_options import small_problems; "
        "rows = ['3 EP 3', '3 CP 3 COMM a2a', '2 PP 2', '1 PATTERN G-M* LAYERS 4 DELTA MAMBA', "
        "'1 --fp8-format e4m3 --fp8-recipe mxfp8 --ffn-hidden-size 40']; "
        "problems = [len(small_problems(row)) for row in rows]; "
        "assert [count > 0 for count in problems] == [True, True, False, False, True], problems; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

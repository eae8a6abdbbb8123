# SPDX-License-Identifier: Apache-2.0
"""The effect of each option: two values, and the observer that shows the difference.

Observers, from the cheapest: `plan` is everything derived from the options without a run,
`listeners` are the observers of collectives; `constructors` are the arguments of constructors and
functions of a run; `loss`, `log` and `file` are observed in a run of two steps; `refusal` is the
error message about the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Observer = Literal["plan", "listeners", "constructors", "loss", "log", "file", "refusal"]


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

    observer: Observer
    baseline: str = ""
    changed: str = ""
    base: str = ""
    without: str = ""
    replaces: str = ""
    world: int = 1


#: A run whose second step has a NaN loss.
_NAN = "--lr 1e38 --lr-warmup-iters 0 --lr-decay-style constant --clip-grad 0 --train-iters 4"
_WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 4"
_ITERS = "--train-iters --lr-warmup-iters"
_SAMPLES = "--train-samples 96"
_YARN = "--position-embedding-type yarn"
_TRACE = "--profile --use-pytorch-profiler --profile-dir {out}/traces"
_STEPS = "--profile-step-start 0 --profile-step-end 1"
_OPTIM = "--data-parallel-sharding-strategy optim"
_CUT = "--data-parallel-sharding-strategy optim_grads_params"
_MUON = "--optimizer muon"
_FULL = "--recompute-granularity full"
_DATA = "--data-path --split"
_PP = "--pipeline-model-parallel-size 2"
_LONG = f"{_PP} --num-layers 6"
_TRAIN = "--train-data-path {data}"
_MOE = "--num-experts 4"
_GROUPS = f"{_MOE} --moe-router-num-groups 2"
_SHARED = f"{_MOE} --moe-shared-expert-intermediate-size 40"
_LATENT = "--multi-latent-attention --qk-layernorm"
_DELTA = (
    "--hybrid-layer-pattern G*- --num-layers 3 --linear-num-key-heads 4 --linear-num-value-heads 8 "
    "--linear-key-head-dim 8 --linear-value-head-dim 8"
)
_MAMBA = (
    "--hybrid-layer-pattern M*- --num-layers 3 --mamba-head-dim 12 --mamba-state-dim 8 "
    "--mamba-num-groups 2"
)
_AVERAGE = "--experiment weight_average"
_TIKTOKEN = "--tokenizer-type tiktoken --tokenizer-model {ranks}"
_GROUPED = "--group-query-attention --num-query-groups"

EFFECTS: dict[str, Effect] = {
    # The model
    "num-layers": Effect("plan", "2", "3"),
    "hidden-size": Effect("plan", "48", "64"),
    "num-attention-heads": Effect("plan", "4", "8"),
    "ffn-hidden-size": Effect("plan", "64", "72"),
    "group-query-attention": Effect("plan"),
    "num-query-groups": Effect("plan", "2", "1"),
    "kv-channels": Effect("plan", "12", "16"),
    "max-position-embeddings": Effect("refusal", "24", "23"),
    "normalization": Effect("plan", "RMSNorm", "LayerNorm"),
    "apply-layernorm-1p": Effect("plan"),
    "norm-epsilon": Effect("plan", "1e-5", "1e-6"),
    "swiglu": Effect("plan"),
    "squared-relu": Effect("plan", without="--swiglu"),
    "qk-layernorm": Effect("plan"),
    "disable-bias-linear": Effect("plan"),
    "add-qkv-bias": Effect("plan"),
    "add-attention-output-bias": Effect("plan"),
    "add-mlp-bias": Effect("plan"),
    "untie-embeddings-and-output-weights": Effect("plan"),
    "attention-output-gate": Effect("plan"),
    "attention-dropout": Effect("plan", "0.1", "0.2"),
    "hidden-dropout": Effect("plan", "0.1", "0.2"),
    "init-method-std": Effect("plan", "0.02", "0.01"),
    "window-size": Effect("plan", "", "5"),
    "softmax-type": Effect("plan", "vanilla", "learnable"),
    "position-embedding-type": Effect("loss", "rope", "learned_absolute"),
    "rotary-base": Effect("plan", "10000", "500000"),
    "rotary-percent": Effect("plan", "1.0", "0.5"),
    "rotary-seq-len-interpolation-factor": Effect("plan", "", "2"),
    "use-rope-scaling": Effect("plan"),
    "rope-scaling-factor": Effect("plan", "8", "4", "--use-rope-scaling"),
    "rope-scaling-original-max-position": Effect("plan", "8192", "4096", "--use-rope-scaling"),
    "rope-scaling-low-freq-factor": Effect("plan", "1", "2", "--use-rope-scaling"),
    "rope-scaling-high-freq-factor": Effect("plan", "4", "8", "--use-rope-scaling"),
    "yarn-rotary-scaling-factor": Effect("plan", "4", "8", _YARN),
    "yarn-original-max-position-embeddings": Effect("plan", "4096", "2048", _YARN),
    "yarn-beta-fast": Effect("plan", "32", "16", _YARN),
    "yarn-beta-slow": Effect("plan", "1", "2", _YARN),
    "yarn-attention-factor": Effect("plan", "1.0", "1.2", _YARN),
    "rotary-interleaved": Effect("plan"),
    # Latent attention
    "multi-latent-attention": Effect("plan", base="--qk-layernorm", without=_GROUPED),
    "q-lora-rank": Effect("plan", "", "20", _LATENT, _GROUPED),
    "kv-lora-rank": Effect("plan", "32", "20", _LATENT, _GROUPED),
    "qk-head-dim": Effect("plan", "128", "20", _LATENT, _GROUPED),
    "qk-pos-emb-head-dim": Effect("plan", "64", "20", _LATENT, _GROUPED),
    "v-head-dim": Effect("plan", "128", "20", _LATENT, _GROUPED),
    "mscale": Effect(
        "plan", "1", "2", f"{_LATENT} {_YARN} --yarn-rotary-scaling-factor 4", _GROUPED
    ),
    "mscale-all-dim": Effect(
        "plan", "0", "1", f"{_LATENT} {_YARN} --yarn-rotary-scaling-factor 4", _GROUPED
    ),
    # Experts
    "num-experts": Effect("plan", "4", "8"),
    "moe-layer-freq": Effect("plan", "1", "2", _MOE),
    "moe-ffn-hidden-size": Effect("plan", "", "40", _MOE),
    "moe-router-topk": Effect("plan", "2", "3", _MOE),
    "moe-router-score-function": Effect("plan", "softmax", "sigmoid", _MOE),
    "moe-router-pre-softmax": Effect("plan", base=_MOE),
    "moe-router-num-groups": Effect("plan", "2", "4", f"{_MOE} --moe-router-group-topk 2"),
    "moe-router-group-topk": Effect("plan", "1", "2", _GROUPS),
    "moe-router-topk-scaling-factor": Effect("plan", "", "2.5", _MOE),
    "moe-router-enable-expert-bias": Effect("plan", base=_MOE),
    "moe-router-bias-update-rate": Effect(
        "plan", "0.001", "0.01", f"{_MOE} --moe-router-enable-expert-bias"
    ),
    "moe-router-load-balancing-type": Effect(
        "plan", "aux_loss", "seq_aux_loss", f"{_MOE} --moe-aux-loss-coeff 0.01"
    ),
    "moe-aux-loss-coeff": Effect("plan", "0", "0.01", _MOE),
    "moe-z-loss-coeff": Effect("plan", "0", "0.01", _MOE),
    "moe-input-jitter-eps": Effect("plan", "0", "0.01", _MOE),
    "moe-expert-capacity-factor": Effect("plan", "", "1.5", _MOE),
    "moe-token-drop-policy": Effect(
        "plan", "probs", "position", f"{_MOE} --moe-expert-capacity-factor 1"
    ),
    "moe-shared-expert-intermediate-size": Effect("plan", "", "40", _MOE),
    "moe-shared-expert-gate": Effect("plan", base=_SHARED),
    # Hybrids
    "hybrid-layer-pattern": Effect("plan", "*-|*-", "*|-*-", _PP, world=2),
    "linear-num-key-heads": Effect("plan", "2", "4", _DELTA),
    "linear-num-value-heads": Effect("plan", "16", "32", _DELTA),
    "linear-key-head-dim": Effect("plan", "16", "32", _DELTA),
    "linear-value-head-dim": Effect("plan", "16", "32", _DELTA),
    "linear-conv-kernel-dim": Effect("plan", "4", "3", _DELTA),
    "linear-cp-mode": Effect(
        "plan", "auto", "segments", f"{_DELTA} --context-parallel-size 2", world=2
    ),
    "keep-recurrent-states": Effect("plan", base=_DELTA),
    "mamba-num-heads": Effect("plan", "", "6", _MAMBA),
    "mamba-head-dim": Effect("plan", "12", "24", _MAMBA),
    "mamba-state-dim": Effect("plan", "16", "32", _MAMBA),
    "mamba-num-groups": Effect("plan", "1", "2", _MAMBA),
    "mamba-norm-groups": Effect("plan", "", "1", _MAMBA),
    "mamba-conv-kernel-dim": Effect("plan", "4", "3", _MAMBA),
    "mamba-conv-bias": Effect("plan", base=_MAMBA),
    "add-mamba-bias": Effect("plan", base=_MAMBA),
    "mamba-dt-limit": Effect("plan", "0.001", "0.001 0.1", _MAMBA),
    "tokenizer-type": Effect("constructors", "null", "byte", "--vocab-size 300"),
    "tokenizer-hf-no-include-special-tokens": Effect(
        "constructors", base="--tokenizer-model {bos}", without="--vocab-size"
    ),
    "tiktoken-pattern": Effect("constructors", "v1", "v2", _TIKTOKEN, "--vocab-size"),
    "tiktoken-num-special-tokens": Effect("constructors", "", "5", _TIKTOKEN, "--vocab-size"),
    "tiktoken-special-tokens": Effect("constructors", "a b", "b </s>", _TIKTOKEN, "--vocab-size"),
    "merge-file": Effect("refusal", "", "{tokenizer}"),
    "tokenizer-model": Effect(
        "constructors", "{tokenizer}", "{tokenizer2}", without="--vocab-size"
    ),
    "vocab-size": Effect("plan", "61", "62"),
    "make-vocab-size-divisible-by": Effect("plan", "4", "128"),
    # The layout
    "tensor-model-parallel-size": Effect("plan", "1", "2", world=4),
    "tensor-parallel-num-weight-shards": Effect("plan", "1", "2", world=2),
    "sequence-parallel": Effect("plan", base="--tensor-model-parallel-size 2", world=2),
    "context-parallel-size": Effect("plan", "1", "2", world=4),
    "cp-comm-type": Effect("plan", "auto", "a2a", "--context-parallel-size 2", world=2),
    "context-parallel-cut": Effect(
        "plan", "row", "documents", "--context-parallel-size 2 --reset-attention-mask", world=2
    ),
    "use-distributed-optimizer": Effect("plan"),
    "data-parallel-sharding-strategy": Effect("plan", "optim_grads", "optim_grads_params"),
    "num-distributed-optimizer-instances": Effect("plan", "1", "2", _OPTIM, world=4),
    "outer-dp-sharding-strategy": Effect(
        "plan", "no_shard", "optim", f"{_CUT} --num-distributed-optimizer-instances 2", world=4
    ),
    "overlap-grad-reduce": Effect("plan"),
    "overlap-param-gather": Effect("plan", base=_OPTIM),
    "fsdp-all-gather-in-start-param-sync": Effect("plan", base=f"{_CUT} --overlap-param-gather"),
    "param-gather-granularity": Effect("plan", "unit", "weight", _CUT),
    "param-gather-prefetch-bytes": Effect("plan", "0", "4096", f"{_CUT} --overlap-param-gather"),
    "gtp-opt-in-modules": Effect(
        "plan",
        "",
        "position_embeddings",
        "--position-embedding-type learned_absolute --max-position-embeddings 30 "
        "--tensor-parallel-num-weight-shards 2",
        world=2,
    ),
    "weight-gather-format": Effect(
        "plan", "bf16", "mxfp8", "--tensor-parallel-num-weight-shards 2", world=2
    ),
    "weight-gather-scale-blocks": Effect(
        "plan",
        "2d",
        "1d",
        "--tensor-parallel-num-weight-shards 2 --weight-gather-format nvfp4",
        world=2,
    ),
    "gtp-reduce-scatter-per": Effect(
        "plan", "microbatch", "step", "--tensor-parallel-num-weight-shards 2", world=2
    ),
    "grad-reduce-in-bf16": Effect("plan", base="--bf16"),
    "reduce-scatter-with-fp32-accumulation": Effect(
        "plan", base=f"{_OPTIM} --bf16 --grad-reduce-in-bf16"
    ),
    "check-weight-gather": Effect("plan", base=_CUT),
    "use-nccl-ub": Effect("plan", base=_CUT),
    "ddp-bucket-size": Effect("plan", "1000", "2000"),
    "expert-model-parallel-size": Effect("plan", "1", "2", _MOE, world=4),
    "expert-tensor-parallel-size": Effect(
        "plan", "", "1", f"{_MOE} --tensor-model-parallel-size 2", world=4
    ),
    "expert-tensor-parallel-num-weight-shards": Effect("plan", "", "2", _MOE, world=2),
    "moe-token-dispatcher-type": Effect("plan", "auto", "alltoall", _MOE),
    "moe-expert-rank-capacity-factor": Effect(
        "plan", "", "2", f"{_MOE} --expert-model-parallel-size 2", world=2
    ),
    "moe-shared-expert-overlap": Effect("plan", base=_SHARED),
    "distributed-timeout-minutes": Effect("plan", "10", "20"),
    "transformer-impl": Effect("refusal", "local", "transformer_engine"),
    "attention-backend": Effect("plan", "auto", "reference"),
    # FP8 and FP4: refused without TransformerEngine
    "fp8-format": Effect("refusal", "", "e4m3"),
    "fp8-recipe": Effect("refusal", "tensorwise", "mxfp8", "--fp8-format e4m3 --hidden-size 48"),
    "fp8-margin": Effect("refusal", "0", "1"),
    "fp8-amax-history-len": Effect("refusal", "1", "2"),
    "fp8-amax-compute-algo": Effect("refusal", "most_recent", "max"),
    "fp4-format": Effect("refusal", "", "e2m1"),
    "first-last-layers-bf16": Effect("refusal"),
    "num-layers-at-start-in-bf16": Effect("refusal", "1", "2"),
    "num-layers-at-end-in-bf16": Effect("refusal", "1", "2"),
    # Pipeline stages
    "pipeline-model-parallel-size": Effect("plan", "1", "2", world=2),
    "pipeline-schedule": Effect("plan", "1f1b", "zb-h1", _PP, world=2),
    "num-layers-per-virtual-pipeline-stage": Effect("plan", "1", "3", _LONG, world=2),
    "num-virtual-stages-per-pipeline-rank": Effect("plan", "1", "3", _LONG, world=2),
    "microbatch-group-size-per-virtual-pipeline-stage": Effect(
        "plan", "2", "4", f"{_LONG} --num-virtual-stages-per-pipeline-rank 3", world=2
    ),
    "decoder-first-pipeline-num-layers": Effect("plan", "1", "2", _LONG, world=2),
    "decoder-last-pipeline-num-layers": Effect("plan", "1", "2", _LONG, world=2),
    "account-for-embedding-in-pipeline-split": Effect(
        "refusal", base=f"{_LONG} --account-for-loss-in-pipeline-split", world=2
    ),
    "account-for-loss-in-pipeline-split": Effect(
        "refusal", base=f"{_LONG} --account-for-embedding-in-pipeline-split", world=2
    ),
    "pipeline-model-parallel-layout": Effect("plan", "Et|tL", "Ett|L", _PP, world=2),
    # Activations
    "recompute-granularity": Effect("plan", "", "selective"),
    "recompute-method": Effect("plan", "uniform", "block", f"{_FULL} --recompute-num-layers 1"),
    "recompute-num-layers": Effect("plan", "1", "2", f"{_FULL} --recompute-method uniform"),
    # CUDA graphs
    "cuda-graph-impl": Effect(
        "plan", "none", "full_iteration", f"{_OPTIM} --overlap-param-gather", world=2
    ),
    "cuda-graph-warmup-steps": Effect("refusal", "3", "12", "--cuda-graph-impl full_iteration"),
    "cpu-matmul-dtype": Effect("plan", "weights", "fp32", "--bf16"),
    # Batch, length, numbers
    "seq-length": Effect("loss", "24", "16"),
    "micro-batch-size": Effect("plan", "2", "4"),
    "global-batch-size": Effect("plan", "8", "16"),
    "step-batch-size-schedule": Effect("plan", "", "0:4 48:8"),
    "rampup-batch-size": Effect("plan", "", "4 2 16"),
    "allow-uneven-batch": Effect("refusal", base="--global-batch-size 7"),
    "train-iters": Effect("plan", "12", "13"),
    "train-samples": Effect("plan", "80", "96", without=_ITERS),
    "exit-interval": Effect("log", "", "1"),
    "seed": Effect("loss", "1234", "1235"),
    "bf16": Effect("plan"),
    "fp16": Effect("plan"),
    "mtp-num-layers": Effect("loss", "", "1"),
    "mtp-loss-scaling-factor": Effect("loss", "", "0.5", base="--mtp-num-layers 2"),
    "calculate-per-token-loss": Effect("constructors"),
    "deterministic-mode": Effect("constructors"),
    "device": Effect("log", "cpu", "cuda"),
    "eval-interval": Effect("log", "1", "2"),
    "eval-global-batch-size": Effect("log", "8", "16", "--eval-interval 1 --eval-iters 1"),
    "eval-micro-batch-size": Effect("plan", "2", "4"),
    "eval-iters": Effect("log", "1", "2", "--eval-interval 1"),
    "manual-gc": Effect("constructors"),
    "manual-gc-interval": Effect("constructors", "0", "3", "--manual-gc"),
    "max-consecutive-bad-steps": Effect("log", "1", "2", _NAN),
    # The update and its schedule
    "optimizer": Effect("plan", "adam", "sgd"),
    "weight-decay": Effect("plan", "0.01", "0.1"),
    "start-weight-decay": Effect("plan", "0.0", "0.01", "--weight-decay-incr-style linear"),
    "end-weight-decay": Effect("plan", "0.01", "0.1", "--weight-decay-incr-style linear"),
    "weight-decay-incr-style": Effect(
        "plan", "linear", "cosine", "--start-weight-decay 0 --end-weight-decay 1"
    ),
    "adam-beta1": Effect("plan", "0.9", "0.8"),
    "adam-beta2": Effect("plan", "0.999", "0.95"),
    "adam-eps": Effect("plan", "1e-8", "1e-6"),
    "exp-avg-dtype": Effect("plan", "fp32", "bf16"),
    "exp-avg-sq-dtype": Effect("plan", "fp32", "bf16", "--adam-beta2 0.95"),
    "lr-group": Effect("loss", "embedding.*=1", "embedding.*=0.1"),
    "weight-decay-group": Effect("plan", "*norm*=0", "*norm*=0.5"),
    "decoupled-lr": Effect("loss", "", "1e-3"),
    "decoupled-min-lr": Effect("loss", "1e-3", "5e-3", "--decoupled-lr 5e-3 --train-iters 4"),
    "sgd-momentum": Effect("plan", "0.9", "0.5", "--optimizer sgd"),
    "muon-momentum": Effect("plan", "0.95", "0.9", _MUON),
    "muon-use-nesterov": Effect("plan", base=_MUON),
    "muon-num-ns-steps": Effect("plan", "5", "6", _MUON),
    "muon-scale-mode": Effect("plan", "spectral", "rms", _MUON),
    "muon-extra-scale-factor": Effect("plan", "1", "0.2", _MUON),
    "muon-split-qkv": Effect("loss", base=_MUON),
    "muon-split-matrices": Effect("loss", "megatron", "all", _MUON),
    "muon-adam-weights": Effect("plan", "*.down.weight", "*.up.weight", _MUON),
    "clip-grad": Effect("plan", "1", "0.5"),
    "optimizer-cpu-offload": Effect("plan"),
    "optimizer-offload-fraction": Effect("plan", "1", "0.5", "--optimizer-cpu-offload"),
    "loss-scale": Effect("plan", "", "128", "--fp16"),
    "initial-loss-scale": Effect("plan", "1024", "2048", "--fp16"),
    "min-loss-scale": Effect("plan", "1", "2", "--fp16"),
    "loss-scale-window": Effect("plan", "1000", "100", "--fp16"),
    "hysteresis": Effect("plan", "2", "1", "--fp16"),
    "lr": Effect("plan", "5e-3", "1e-3"),
    "min-lr": Effect("plan", "0", "1e-4"),
    "lr-decay-style": Effect("plan", "cosine", "linear"),
    "lr-decay-iters": Effect("plan", "12", "8"),
    "lr-decay-samples": Effect("plan", "96", "64", _SAMPLES, _ITERS),
    "lr-warmup-iters": Effect("plan", "2", "3"),
    "lr-warmup-samples": Effect("plan", "16", "24", _SAMPLES, _ITERS),
    "lr-warmup-fraction": Effect("plan", "0.1", "0.5", without="--lr-warmup-iters"),
    "lr-warmup-init": Effect("plan", "0", "1e-4"),
    "lr-wsd-decay-style": Effect("plan", "linear", "cosine", _WSD),
    "lr-wsd-decay-iters": Effect("plan", "4", "5", "--lr-decay-style WSD"),
    "lr-wsd-decay-samples": Effect("plan", "32", "40", f"{_SAMPLES} --lr-decay-style WSD", _ITERS),
    # Data
    "data-path": Effect("loss", "{data}", "{data2}"),
    "data-args-path": Effect("loss", "{args}", "{args2}", without="--data-path"),
    "train-data-path": Effect("loss", "{data}", "{data2}", "--valid-data-path {data}", _DATA),
    "valid-data-path": Effect("log", "{data}", "{data2}", f"{_TRAIN} --eval-interval 1", _DATA),
    "test-data-path": Effect("log", "{data}", "{data2}", f"{_TRAIN} --eval-interval 1", _DATA),
    "per-split-data-args-path": Effect(
        "loss", "{splits}", "{splits2}", without="--data-path --split"
    ),
    "mock-data": Effect("loss", replaces="--data-path"),
    "split": Effect("loss", "90,10", "50,50"),
    "data-cache-path": Effect("file", "", "{out}/cache"),
    "dataloader-type": Effect("loss", "single", "cyclic"),
    "num-workers": Effect("constructors", "0", "1"),
    "eod-mask-loss": Effect("loss"),
    "reset-position-ids": Effect("loss"),
    "reset-attention-mask": Effect("loss"),
    "sft": Effect("log"),
    "reorder-samples": Effect("loss", base="--load {saved} --train-iters 8"),
    "allow-chat-as-text": Effect("log", base="--data-path {chats}"),
    "allow-data-change": Effect("log", base="--load {saved} --data-path {data2}"),
    # Checkpoints
    "save": Effect("file", "", "{out}/save"),
    "load": Effect("log", "", "{saved}"),
    "save-interval": Effect("file", "", "1", "--save {out}/save"),
    "async-save": Effect("log", base="--save {out}/save --save-interval 9"),
    "on-failed-save": Effect(
        "constructors", "continue", "stop", "--save {out}/save --save-interval 9"
    ),
    "save-keep-last": Effect("file", "", "1", "--save {out}/save --save-interval 1"),
    "save-retain-interval": Effect("file", "", "2", "--save {out}/save --save-interval 1"),
    "load-fallback": Effect("log", base="--load {damaged}"),
    "save-optim": Effect("log", base="--save {out}/save"),
    "load-optim": Effect("loss", base="--load {saved} --train-iters 4"),
    "schedule-on-load": Effect("loss", "continue", "restart", "--load {saved} --train-iters 4"),
    "use-checkpoint-args": Effect("refusal", base="--load {saved}", without="--num-layers"),
    "use-checkpoint-opt-param-scheduler": Effect("plan", base="--load {saved} --lr 1e-2"),
    "pretrained-checkpoint": Effect("loss", "", "{saved}"),
    "load-hf": Effect("refusal", "", "{hf}", without="--num-layers --hidden-size"),
    "hf-export-check": Effect("log"),
    "finetune": Effect("log", base="--load {saved}"),
    # Signals and bad steps
    "exit-signal-handler": Effect("constructors", base="--save {out}/save"),
    "exit-signal": Effect("constructors", "SIGTERM", "SIGUSR1"),
    "exit-grace-seconds": Effect("constructors", "25", "20", "--save {out}/save"),
    "exit-duration-in-mins": Effect("log", "", "1e-6"),
    "rerun-mode": Effect("log", "disabled", "validate_results", _NAN),
    "rerun-interval": Effect("log", "1", "2", "--rerun-mode report_determinism_stats"),
    "on-reproduced-fault": Effect("log", "skip", "restart", f"{_NAN} --save {{out}}/save"),
    "loss-spike-factor": Effect("loss", "1000", "1.0001", "--loss-spike-window 1 --train-iters 12"),
    "loss-spike-window": Effect("loss", "100", "1", "--loss-spike-factor 1.0001 --train-iters 12"),
    "rollback-after-bad-steps": Effect("log", "", "1", f"{_NAN} --save {{out}}/save"),
    "check-collectives": Effect("listeners", world=2),
    "check-weight-hash-across-dp-replicas-interval": Effect("log", "", "1"),
    "log-straggler": Effect("plan", world=2),
    "straggler-factor": Effect("plan", "1.5", "2", "--log-straggler", world=2),
    # Logs
    "log-interval": Effect("log", "1", "2"),
    "log-throughput": Effect("log"),
    "log-num-zeros-in-grad": Effect("log"),
    "log-params-norm": Effect("log"),
    "tensorboard-dir": Effect("file", "", "{out}/board"),
    "metrics-file": Effect("file", "{out}/metrics.jsonl", "{out}/other.jsonl"),
    "wandb-project": Effect("constructors", "", "a"),
    "wandb-exp-name": Effect("constructors", "", "a", "--wandb-project p"),
    "wandb-entity": Effect("constructors", "", "a", "--wandb-project p"),
    "wandb-save-dir": Effect("file", "", "{out}/wandb", "--wandb-project p"),
    "mlflow-experiment": Effect("constructors", "", "a"),
    "mlflow-run-name": Effect("constructors", "", "a", "--mlflow-experiment e"),
    "mlflow-tracking-uri": Effect("constructors", "", "a", "--mlflow-experiment e"),
    "progress": Effect("constructors", "plain", "live"),
    # Profiles; the run logs what a CPU does not support
    "profile": Effect("log"),
    "use-pytorch-profiler": Effect("log", base=f"--profile {_STEPS} --profile-dir {{out}}/traces"),
    "profile-step-start": Effect("log", "0", "1", f"{_TRACE} --profile-step-end 2"),
    "profile-step-end": Effect("log", "1", "2", f"{_TRACE} --profile-step-start 0"),
    "profile-ranks": Effect("file", "0", "1", f"{_TRACE} {_STEPS}"),
    "profile-dir": Effect("file", "{out}/one", "{out}/other", f"{_TRACE} {_STEPS}"),
    "record-memory-history": Effect("log"),
    "memory-snapshot-path": Effect("refusal", "", "a"),
    # Experiments; only in a checkout
    "experiment": Effect("log", "", "weight_average"),
    "experiment-option": Effect(
        "log",
        "weight_average.half_life_samples=1",
        "weight_average.half_life_samples=1000",
        f"{_AVERAGE} --eval-interval 1 --eval-iters 1",
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's flags of training that have no effect here, one row each.

A row is here only if what the flag asks for happens in every run of ours, or if it concerns what is
reported or how fast a run is. What would change numbers, or when a run stops, resumes, skips or
writes, is never a row: it is an option, or it is refused by `megatron.cli.megatron_names`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.cli.flags import KINDS, Kind, NoEffectFlag, NoEffectTable

_ALREADY_SO, _REPORTING, _SPEED = KINDS

_KERNELS = "each device has one implementation of each operation"
_WRITER = "a process of its own writes checkpoints, each rank its part"
_OVERLAP = "the schedule decides what communication overlaps"
_SCALARS = "TensorBoard gets every number of the log line"
_TIMERS = "the log line has the time of an iteration and no timers per stage"
_TRACKERS = "runs are recorded by TensorBoard, Weights & Biases or MLflow"
_BATCHES = "each stage reads its own batch and knows the shapes of what it receives"
_MASTERS = "main weights are fp32"
_GRADIENTS = "gradients are summed in fp32 unless --grad-reduce-in-bf16 is given"
_NO_STATE = "random numbers follow from --seed and the position in the run: they have no state"

#: (kind, values as in `NoEffectFlag`, reason, flags).
_ROWS: tuple[tuple[Kind, str, str, str], ...] = (
    (_ALREADY_SO, "", "there is one model class", "use-mcore-models"),
    (_ALREADY_SO, "", "attention probabilities are computed in fp32", "attention-softmax-in-fp32"),
    (_ALREADY_SO, "", "attention scores are fp32, scaled by 1 / sqrt(head features)",
     "apply-query-key-layer-scaling no-query-key-layer-scaling"),
    (_ALREADY_SO, "", "GELU is exact, as Megatron's is without that fusion", "no-bias-gelu-fusion"),
    (_ALREADY_SO, "", "initial weights follow from --seed alone, on any device and layout",
     "use-cpu-initialization"),
    (_ALREADY_SO, "nccl", "NCCL on GPUs, gloo on CPUs", "distributed-backend"),
    (_ALREADY_SO, "", "masks are not stored: attention knows where documents end",
     "no-create-attention-mask-in-dataloader"),
    (_ALREADY_SO, "fp32", "routers compute in fp32", "moe-router-dtype"),
    (_ALREADY_SO, "duplicated", "muon multiplies whole matrices, on any ranks", "muon-tp-mode"),
    (_ALREADY_SO, "", "dropout is drawn by position, which CUDA graphs can hold",
     "te-rng-tracker"),
    (_ALREADY_SO, "", _NO_STATE, "no-load-rng no-save-rng"),
    (_ALREADY_SO, "fp32", _MASTERS, "main-params-dtype megatron-fsdp-main-params-dtype"),
    (_ALREADY_SO, "", "checkpoints load on any layout", "dist-ckpt-optim-fully-reshardable"),
    (_ALREADY_SO, "", "a folder in another format is recognised and refused",
     "auto-detect-ckpt-format"),
    (_ALREADY_SO, "", "what is loaded is compared with its digests", "verify-integrity"),
    # Reports
    (_REPORTING, "", _SCALARS,
     "log-memory-to-tensorboard log-validation-ppl-to-tensorboard log-learning-rate-to-tensorboard "
     "log-loss-scale-to-tensorboard log-batch-size-to-tensorboard log-world-size-to-tensorboard"),
    (_REPORTING, "INT", _SCALARS, "tensorboard-log-interval tensorboard-queue-size"),
    (_REPORTING, "", _TIMERS,
     "log-timers-to-tensorboard barrier-with-L1-time no-barrier-with-level-1-timing"),
    (_REPORTING, "0|1|2", _TIMERS, "timing-log-level"),
    (_REPORTING, "max|minmax|all", _TIMERS, "timing-log-option"),
    (_REPORTING, "INT", "messages have no levels", "logging-level"),
    (_REPORTING, "INT", "memory is reported at --log-interval", "log-memory-interval"),
    (_REPORTING, "", "energy is not measured", "log-energy"),
    (_REPORTING, "", "metrics.jsonl has the progress of a run", "log-progress"),
    (_REPORTING, "INT", "--log-straggler needs no server and compares all ranks",
     "straggler-minmax-count straggler-ctrlr-port"),
    (_REPORTING, "", "the log has the load of every expert of every layer",
     "moe-per-layer-logging"),
    (_REPORTING, "", _TRACKERS, "enable-one-logger no-one-logger one-logger-async"),
    (_REPORTING, "TEXT", _TRACKERS,
     "one-logger-project one-logger-run-name app-tag-run-name app-tag-run-version"),
    # Speed
    (_SPEED, "", _KERNELS,
     "no-gradient-accumulation-fusion no-masked-softmax-fusion no-bias-swiglu-fusion "
     "no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm cross-entropy-loss-fusion "
     "use-fused-weighted-squared-relu moe-permute-fusion moe-router-fusion"),
    (_SPEED, "native|te", _KERNELS, "cross-entropy-fusion-impl"),
    (_SPEED, "", "--attention-backend chooses the attention kernel", "use-flash-attn"),
    (_SPEED, "", "all experts of a rank are one grouped product", "moe-grouped-gemm"),
    (_SPEED, "", "token files are mapped", "no-mmap-bin-files"),
    (_SPEED, "INT", "it only says how fast indices are built", "num-dataset-builder-threads"),
    (_SPEED, "", _WRITER,
     "use-persistent-ckpt-worker ckpt-assume-constant-structure async-ckpt-use-cached-structure "
     "async-ckpt-use-cpu-shm ckpt-fully-parallel-load ckpt-fully-parallel-save "
     "no-ckpt-fully-parallel-save"),
    (_SPEED, "mcore|nvrx", _WRITER, "async-strategy"),
    (_SPEED, "0|1|2", "torch's allocator keeps what is free", "empty-unused-memory-level"),
    (_SPEED, "", "ranks are placed in the order tp, cp, dp, pp", "use-tp-pp-dp-mapping"),
    (_SPEED, "", "--data-parallel-sharding-strategy says what is sharded, by one engine",
     "use-megatron-fsdp"),
    (_SPEED, "", "the run makes the groups that it uses", "disable-gloo-process-groups"),
    (_SPEED, "", "gathers over gtp use ordinary buffers",
     "gtp-remat-nccl-ub gtp-expert-remat-nccl-ub"),
    (_SPEED, "TEXT", "the run makes the groups that it uses", "high-priority-stream-groups"),
    (_SPEED, "", _OVERLAP,
     "tp-comm-overlap overlap-moe-expert-parallel-comm delay-wgrad-compute "
     "overlap-param-gather-with-optimizer-step overlap-p2p-communication-warmup-flush "
     "no-overlap-p2p-communication no-align-grad-reduce no-align-param-gather "
     "async-tensor-model-parallel-allreduce no-async-tensor-model-parallel-allreduce"),
    (_SPEED, "", "--pipeline-schedule zb-h1 puts off weight gradients, the head's too",
     "defer-embedding-wgrad-compute"),
    (_SPEED, "INT", "--pipeline-schedule zb-h1 puts off weight gradients, the head's too",
     "wgrad-deferral-limit"),
    (_SPEED, "INT", "buckets are cut by --ddp-bucket-size", "ddp-num-buckets"),
    (_SPEED, "", "buckets are cut by --ddp-bucket-size", "ddp-pad-buckets-for-high-nccl-busbw"),
    (_SPEED, "", _BATCHES, "no-scatter-gather-tensors-in-pipeline"),
)  # fmt: skip


def _rows() -> Iterator[NoEffectFlag]:
    for kind, values, reason, names in _ROWS:
        for name in names.split():
            yield NoEffectFlag(name=name, kind=kind, values=values, reason=reason)
    for name in (
        "main-grads-dtype",
        "megatron-fsdp-main-grads-dtype",
        "megatron-fsdp-grad-comm-dtype",
    ):
        yield NoEffectFlag(
            name=name,
            kind=_ALREADY_SO,
            values="fp32",
            reason=_GRADIENTS,
            unless="grad-reduce-in-bf16",
        )
    yield NoEffectFlag(
        name="accumulate-allreduce-grads-in-fp32",
        kind=_ALREADY_SO,
        reason=_GRADIENTS,
        unless="grad-reduce-in-bf16",
    )
    yield NoEffectFlag(
        name="override-opt-param-scheduler",
        kind=_ALREADY_SO,
        reason="the learning rate follows the flags of this run, not the checkpoint's",
        unless="use-checkpoint-opt-param-scheduler",
    )
    yield NoEffectFlag(
        name="ckpt-format",
        kind=_ALREADY_SO,
        values="torch_dist",
        reason="checkpoints load on any layout, as those of torch_dist do",
        note="checkpoints are written in this project's format, safetensors with a manifest",
    )
    yield NoEffectFlag(
        name="dist-ckpt-strictness",
        kind=_ALREADY_SO,
        values="assume_ok_unexpected|log_unexpected|log_all",
        reason="loading is strict",
        note="a tensor that the model needs and the checkpoint lacks is an error",
    )


#: What an entry script of training accepts without effect.
NO_EFFECT: tuple[NoEffectFlag, ...] = tuple(_rows())

MEGATRON_FLAGS = NoEffectTable(flags=NO_EFFECT)

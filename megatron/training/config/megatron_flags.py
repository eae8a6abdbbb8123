# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's training flags that are accepted without effect, one row each.

A row belongs here only if every run already does what the flag requests, or if the flag concerns
only reporting or speed. A flag that changes results, or when a run stops, resumes, skips or writes,
never belongs here: it is an option, or `megatron.cli.megatron_names` rejects it. A flag that would
have an effect in combination with some options has a `conflict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from megatron.cli.flags import KINDS, AcceptedFlags, Kind, NoEffectFlag
from megatron.training.config.translated_flags import TRANSLATED, StoredOptions, translate

_ALREADY_SO, _REPORTING, _SPEED = KINDS

_KERNELS = "each device has one implementation of each operation"
_WRITER = "a separate process writes checkpoints, each rank its shard"
_OVERLAP = "the schedule decides what communication overlaps"
_SCALARS = "TensorBoard gets every number of the log line"
_TIMERS = "the log line has the time of an iteration and no timers per stage"
_TRACKERS = "runs are recorded by TensorBoard, Weights & Biases or MLflow"
_BATCHES = "each stage reads its own batch and knows the shapes of what it receives"
_MASTERS = "main weights are fp32"
_GRADIENTS = "gradients are summed in fp32 unless --grad-reduce-in-bf16 is given"
_BUFFERS = "gradients are accumulated in flat buffers"
_NO_STATE = "random numbers depend only on --seed and the position in the run: there is no state"

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
    (_ALREADY_SO, "", "masks are not stored: attention reads document boundaries",
     "no-create-attention-mask-in-dataloader"),
    (_ALREADY_SO, "fp32", "routers compute in fp32", "moe-router-dtype"),
    (_ALREADY_SO, "duplicated", "muon orthogonalizes whole matrices, on any ranks", "muon-tp-mode"),
    (_ALREADY_SO, "", "dropout is computed from positions, which CUDA graphs can capture",
     "te-rng-tracker"),
    (_ALREADY_SO, "", _NO_STATE, "no-load-rng no-save-rng"),
    (_ALREADY_SO, "fp32", _MASTERS, "main-params-dtype megatron-fsdp-main-params-dtype"),
    (_ALREADY_SO, "", "checkpoints load on any layout", "dist-ckpt-optim-fully-reshardable"),
    (_ALREADY_SO, "", "a folder in another format is detected and rejected",
     "auto-detect-ckpt-format"),
    (_ALREADY_SO, "", "checkpoints are verified against their digests", "verify-integrity"),
    (_ALREADY_SO, "", "torchrun's variables define the ranks, under MPI too", "use-mpi"),
    (_ALREADY_SO, "local|torch", _GRADIENTS, "DDP-impl"),
    (_ALREADY_SO, "", _BUFFERS,
     "use-contiguous-buffers-in-local-ddp no-contiguous-buffers-in-local-ddp"),
    (_ALREADY_SO, "", "every token of a sample has the next token of the data as its label",
     "no-seq-len-plus-one-tokens"),
    (_ALREADY_SO, "", "files are read from the file system only", "disable-msc"),
    (_ALREADY_SO, "", "--exp-avg-dtype and --exp-avg-sq-dtype set the dtype of moments, and "
     "masters and gradients are fp32", "use-precision-aware-optimizer"),
    (_ALREADY_SO, "moe_latent_proj", "experts read the full hidden state: there is no such matrix",
     "gtp-remat-opt-in-modules"),
    # Forks (Pai-Megatron-Patch): pretraining on .bin and .idx files is the default
    (_ALREADY_SO, "pretrain", "the loss covers the whole sample; fine-tuning on chats is --sft",
     "train-mode"),
    (_ALREADY_SO, "MMAP", "token files are memory-mapped .bin and .idx pairs", "dataset"),
    (_ALREADY_SO, "INT", "samples have --seq-length tokens", "max-padding-length"),
    # Reports
    (_REPORTING, "", _SCALARS,
     "log-memory-to-tensorboard log-validation-ppl-to-tensorboard log-learning-rate-to-tensorboard "
     "log-loss-scale-to-tensorboard log-batch-size-to-tensorboard log-world-size-to-tensorboard "
     "no-log-loss-scale-to-tensorboard no-log-learning-rate-to-tensorboard"),
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
    (_SPEED, "", "all experts of a rank are one grouped GEMM",
     "moe-grouped-gemm moe-use-legacy-grouped-gemm"),
    (_SPEED, "", "the optimizer schedules the copies of offloaded state",
     "overlap-cpu-optimizer-d2h-h2d"),
    (_SPEED, "TEXT", "--linear-cp-mode chooses how recurrent mixers communicate",
     "linear-cp-layout"),
    (_SPEED, "", "token files are memory-mapped", "no-mmap-bin-files"),
    (_SPEED, "INT", "it only affects how fast indices are built", "num-dataset-builder-threads"),
    (_SPEED, "", _WRITER,
     "use-persistent-ckpt-worker ckpt-assume-constant-structure async-ckpt-use-cached-structure "
     "async-ckpt-use-cpu-shm ckpt-fully-parallel-load ckpt-fully-parallel-save "
     "no-ckpt-fully-parallel-save"),
    (_SPEED, "mcore|nvrx", _WRITER, "async-strategy"),
    (_SPEED, "0|1|2", "torch's allocator caches free memory", "empty-unused-memory-level"),
    (_SPEED, "", "ranks are ordered tp, cp, dp, pp", "use-tp-pp-dp-mapping"),
    (_SPEED, "", "--data-parallel-sharding-strategy chooses what is sharded",
     "use-megatron-fsdp"),
    (_SPEED, "", "the run creates only the groups it uses", "disable-gloo-process-groups"),
    (_SPEED, "TEXT", "the run creates only the groups it uses", "high-priority-stream-groups"),
    (_SPEED, "", _OVERLAP,
     "tp-comm-overlap overlap-moe-expert-parallel-comm delay-wgrad-compute "
     "overlap-param-gather-with-optimizer-step overlap-p2p-communication-warmup-flush "
     "overlap-p2p-communication no-overlap-p2p-communication batch-p2p-communication "
     "no-batch-p2p-communication align-grad-reduce no-align-grad-reduce align-param-gather "
     "no-align-param-gather deallocate-pipeline-outputs no-deallocate-pipeline-outputs "
     "async-tensor-model-parallel-allreduce no-async-tensor-model-parallel-allreduce"),
    (_SPEED, "", "--pipeline-schedule zb-h1 defers weight gradients, including the head's",
     "defer-embedding-wgrad-compute"),
    (_SPEED, "INT", "--pipeline-schedule zb-h1 defers weight gradients, including the head's",
     "wgrad-deferral-limit"),
    (_SPEED, "INT", "--ddp-bucket-size sets the bucket size", "ddp-num-buckets"),
    (_SPEED, "", "--ddp-bucket-size sets the bucket size", "ddp-pad-buckets-for-high-nccl-busbw"),
    (_SPEED, "", _BATCHES,
     "no-scatter-gather-tensors-in-pipeline variable-seq-lengths enable-variable-seq-lengths"),
)  # fmt: skip


def _without(flag: str, switch: str) -> Callable[[Mapping[str, Any]], str | None]:
    """Return a conflict check for a flag that contradicts a switch."""

    def conflict(user_values: Mapping[str, Any]) -> str | None:
        return f"--{flag} contradicts --{switch}: keep one" if user_values.get(switch) else None

    return conflict


def _sums_in_bf16(flag: str) -> Callable[[Mapping[str, Any]], str | None]:
    """Return a conflict check for a flag that reduces gradients in fp32, unless options reduce them
    in bf16."""

    def conflict(user_values: Mapping[str, Any]) -> str | None:
        fp32_flag = "reduce-scatter-with-fp32-accumulation"
        if user_values.get("grad-reduce-in-bf16") and not user_values.get(fp32_flag):
            return (
                f"--{flag} reduces gradients in fp32, and --grad-reduce-in-bf16 in bf16: use "
                f"--{fp32_flag} for sums in fp32"
            )
        return None

    return conflict


def _learned_positions(user_values: Mapping[str, Any]) -> str | None:
    """Return the conflict of --no-position-embedding with a model that is not rotary; None without
    one."""
    from_elsewhere = user_values.get("use-checkpoint-args") or user_values.get("load-hf")
    kind = user_values.get("position-embedding-type")
    if kind == "learned_absolute" or (kind is None and not from_elsewhere):
        return (
            "--no-position-embedding removes learned positions, which Megatron-LM accepts only "
            "together with rope: give --position-embedding-type rope, or none for a model without "
            "positions"
        )
    return None


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
            conflict=_without(name, "grad-reduce-in-bf16"),
        )
    yield NoEffectFlag(
        name="accumulate-allreduce-grads-in-fp32",
        kind=_ALREADY_SO,
        reason=_GRADIENTS,
        conflict=_without("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"),
    )
    for name in ("gtp-remat-nccl-ub", "gtp-expert-remat-nccl-ub"):
        yield NoEffectFlag(
            name=name,
            kind=_ALREADY_SO,
            reason="gradients over gtp are summed in fp32, and buffers are ordinary ones",
            conflict=_sums_in_bf16(name),
        )
    yield NoEffectFlag(
        name="no-position-embedding",
        kind=_ALREADY_SO,
        reason="a model with rotations has no learned positions",
        conflict=_learned_positions,
    )
    yield NoEffectFlag(
        name="override-opt-param-scheduler",
        kind=_ALREADY_SO,
        reason="the learning rate follows the flags of this run, not the checkpoint's",
        conflict=_without("override-opt-param-scheduler", "use-checkpoint-opt-param-scheduler"),
    )
    yield from _rows_with_notes()


def _rows_with_notes() -> Iterator[NoEffectFlag]:
    """Yield the flags with an additional note at the start of a run."""
    for name in ("check-for-nan-in-loss-and-grad", "no-check-for-nan-in-loss-and-grad"):
        yield NoEffectFlag(
            name=name,
            kind=_ALREADY_SO,
            reason="every step is checked for NaN and Inf",
            note="a step with a NaN or Inf loss or gradient norm is computed a second time and "
            "skipped if that result is bad too; --max-consecutive-bad-steps of them end the run",
        )
    yield NoEffectFlag(
        name="ckpt-format",
        kind=_ALREADY_SO,
        values="torch_dist|torch|torch_dcp|fsdp_dtensor|zarr",
        reason="checkpoints load on any layout, like torch_dist checkpoints",
        note="checkpoints are written in this project's format, safetensors with a manifest",
    )
    yield NoEffectFlag(
        name="dist-ckpt-strictness",
        kind=_ALREADY_SO,
        values="assume_ok_unexpected|log_unexpected|log_all",
        reason="loading is strict",
        note="a tensor that the model needs and the checkpoint lacks is an error",
    )


#: Flags that a training entry script accepts without effect.
NO_EFFECT: tuple[NoEffectFlag, ...] = tuple(_rows())


def accepted_flags(stored_options: StoredOptions) -> AcceptedFlags:
    """Return the Megatron flags that a training entry script accepts besides its options.

    Args:
        stored_options: reads the options of the checkpoint that the run starts from.
    """
    return AcceptedFlags(
        no_effect=NO_EFFECT,
        translated=tuple(TRANSLATED),
        translate=partial(translate, stored_options=stored_options),
    )

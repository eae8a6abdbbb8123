# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's training flags that are no options: without effect, or translated to options.

A flag has no effect only if every run already does what the flag requests, or if the flag concerns
only reporting or speed. A flag that changes results, or when a run stops, resumes, skips or writes,
is an option, or `megatron.cli.megatron_names` rejects it. A flag that would have an effect in
combination with some options has a `conflict`.

Multi-latent attention (`--multi-latent-attention`) in Megatron-LM uses YaRN unless `--rope-type
rope` is given, regardless of `--position-embedding-type`: factor `--rotary-scaling-factor` (40),
4,096 original positions, mscale 1, mscale of all features 0. It normalises latents only with
`--qk-layernorm`. These rules apply to flags on the command line. A YAML file, a checkpoint and a
Hugging Face folder describe their model with this program's options, and keep it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from megatron.cli.flags import KINDS, AcceptedFlags, Kind, NoEffectFlag
from megatron.cli.schema import Option

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


#: Megatron-LM's default YaRN factor of multi-latent attention.
LATENT_YARN_FACTOR = 40.0

#: The option that sets YaRN's factor.
SCALING_FACTOR = "yarn-rotary-scaling-factor"

Values = dict[str, Any]

#: Returns the checkpoint that a run starts from and its options, given the explicit options; None
#: without one.
StoredOptions: TypeAlias = Callable[[Mapping[str, Any]], tuple[Path, Mapping[str, Any]] | None]


def _flag(name: str, kind: type, *choices: str) -> Option:
    switch = kind is bool
    return Option(name=name, section=None, field=name, kind=kind, choices=choices, one_way=switch)


#: How to parse each flag, and what it is translated to.
TRANSLATED: Mapping[Option, str] = types.MappingProxyType(
    {
        _flag("rope-type", str, "rope", "yarn"): "`--position-embedding-type` of "
        "`--multi-latent-attention`; without this flag it is yarn, whatever other flags are set",
        _flag("rotary-scaling-factor", float): "`--yarn-rotary-scaling-factor` of "
        "`--multi-latent-attention`, which is 40 without it",
        _flag("checkpoint-activations", bool): "`--recompute-granularity full --recompute-method "
        "uniform --recompute-num-layers 1`",
        _flag("checkpoint-num-layers", int): "`--recompute-num-layers` of "
        "`--checkpoint-activations`",
        _flag("activations-checkpoint-method", str, "uniform", "block"): "`--recompute-granularity "
        "full` with this `--recompute-method`",
        _flag("activations-checkpoint-num-layers", int): "its `--recompute-num-layers`",
        _flag("moe-layer-recompute", bool): "`--recompute-granularity selective`, unless whole "
        "layers are recomputed",
        _flag("use-multi-token-prediction", bool): "together with the next, `--mtp-num-layers`",
        _flag("num-mtp-predictor", int): "its value",
    }
)


def translate(flags: Values, file: Values, *, stored_options: StoredOptions) -> list[str]:
    """Replace the translated flags by this program's options.

    Args:
        flags: option values of the command line by name; modified in place.
        file: option values of `--config` by name; modified in place.
        stored_options: reads the options of the checkpoint that the run starts from.

    Returns lines to print at the start of the run.

    Raises:
        ValueError: flags contradict each other, or have no translation; all problems in one line.
    """
    lines: list[str] = []
    problems: list[str] = []
    latent_attention = partial(_latent_attention, stored_options=stored_options)
    for rule in (_recompute, _multi_token_prediction, latent_attention):
        try:
            lines += rule(flags, file)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    return lines


def _take(flags: Values, file: Values, *names: str) -> Values:
    """Remove flags from both mappings and return their values; the command line overrides the
    file."""
    values = {name: source[name] for source in (file, flags) for name in names if name in source}
    for name in names:
        flags.pop(name, None)
        file.pop(name, None)
    return values


def _set(flags: Values, file: Values, options: Mapping[str, Any], *, origin: str) -> str:
    """Set the options that a flag translates to, and return a line that states it.

    Raises:
        ValueError: an option was given with another value.
    """
    user_values = {**file, **flags}
    options_text = " ".join(f"--{name} {value}" for name, value in options.items())
    for name, value in options.items():
        if name in user_values and user_values[name] != value:
            raise ValueError(
                f"{origin} stands for {options_text} and contradicts --{name} "
                f"{user_values[name]}: keep one"
            )
    flags.update(options)
    return f"{origin} is read as {options_text}"


def _recompute(flags: Values, file: Values) -> list[str]:
    """Translate flags of activation recomputation from older Megatron-LM versions."""
    methods = ("checkpoint-activations", "activations-checkpoint-method")
    counts = ("checkpoint-num-layers", "activations-checkpoint-num-layers")
    old = _take(flags, file, *methods, *counts)
    experts = _take(flags, file, "moe-layer-recompute")
    lines = []
    switches = [name for name in methods if name in old]
    for name in counts:
        if name in old and not switches:
            raise ValueError(
                f"--{name} {old[name]} has no effect without --checkpoint-activations: use "
                f"--recompute-num-layers {old[name]}"
            )
    if switches:
        options = {
            "recompute-granularity": "full",
            "recompute-method": old.get("activations-checkpoint-method", "uniform"),
            "recompute-num-layers": next((old[name] for name in counts if name in old), 1),
        }
        lines.append(_set(flags, file, options, origin=f"--{switches[0]}"))
    if experts:
        granularity = flags.get("recompute-granularity", file.get("recompute-granularity"))
        if granularity == "full":
            lines.append("no effect here: --moe-layer-recompute (whole layers are recomputed)")
        else:
            options = {"recompute-granularity": "selective"}
            lines.append(_set(flags, file, options, origin="--moe-layer-recompute"))
    return lines


def _multi_token_prediction(flags: Values, file: Values) -> list[str]:
    """Translate Pai-Megatron-Patch's flags of multi-token prediction."""
    switch, count = "use-multi-token-prediction", "num-mtp-predictor"
    values = _take(flags, file, switch, count)
    if not values:
        return []
    if count not in values:
        raise ValueError(f"--{switch}: use --mtp-num-layers, the number of depths")
    depths = values[count]
    if switch not in values:
        raise ValueError(
            f"--{count} {depths} has no effect without --{switch}: use --mtp-num-layers {depths}"
        )
    origin = f"--{switch} --{count} {depths}"
    return [_set(flags, file, {"mtp-num-layers": depths}, origin=origin)]


def _latent_attention(flags: Values, file: Values, *, stored_options: StoredOptions) -> list[str]:
    """Translate Megatron-LM's flags of multi-latent attention (see the module docstring)."""
    values = _take(flags, file, "rope-type", "rotary-scaling-factor")
    user_values = {**file, **flags}
    from_elsewhere = bool(user_values.get("use-checkpoint-args") or user_values.get("load-hf"))
    if not user_values.get("multi-latent-attention") and not from_elsewhere:
        return _without_latents(values, user_values)
    # A file or folder with latent attention describes it in this program's options.
    by_flag = "multi-latent-attention" in flags and not file.get("multi-latent-attention")
    by_flag = by_flag and user_values.get("load-hf") is None
    if by_flag and "rope-type" not in values:
        lines = _as_stored(flags, stored_options(user_values), values.get("rotary-scaling-factor"))
        if lines is not None:
            return lines
    if by_flag and not user_values.get("qk-layernorm"):
        raise ValueError(
            "--multi-latent-attention without --qk-layernorm: Megatron-LM leaves latents without "
            "norms then, and latents are always normalised here: add --qk-layernorm"
        )
    position = user_values.get("position-embedding-type")
    if not (by_flag or values) or not (position in ("rope", "yarn") or from_elsewhere):
        return []  # the option checks report conflicts with latent attention
    return _rotation(flags, user_values, values, derived=from_elsewhere and not by_flag)


def _without_latents(values: Mapping[str, Any], user_values: Mapping[str, Any]) -> list[str]:
    """Report flags of latent attention without latent attention: they have no effect in Megatron-LM
    either."""
    kind, position = values.get("rope-type"), user_values.get("position-embedding-type")
    if "rotary-scaling-factor" in values:
        raise ValueError(
            "--rotary-scaling-factor has no effect without --multi-latent-attention: drop it, or "
            "give --position-embedding-type yarn --yarn-rotary-scaling-factor"
        )
    if kind is None:
        return []
    if kind != position:
        raise ValueError(
            f"--rope-type {kind} has no effect without --multi-latent-attention: drop it, or give "
            f"--position-embedding-type {kind}"
        )
    return [f"no effect here: --rope-type {kind} (--position-embedding-type says so)"]


def _as_stored(
    flags: Values, stored: tuple[Path, Mapping[str, Any]] | None, factor: float | None
) -> list[str] | None:
    """Use the position embedding of the checkpoint that the run resumes from.

    Args:
        stored: the checkpoint and its options; None without one.
        factor: value of --rotary-scaling-factor, if given.

    Returns a line that says so; None if there is no checkpoint with latent attention, or if its
    factor differs.
    """
    if stored is None or not stored[1].get("multi-latent-attention"):
        return None
    folder, options = stored
    kind, stored_factor = options.get("position-embedding-type"), options.get(SCALING_FACTOR)
    if kind not in ("rope", "yarn") or factor not in (None, stored_factor):
        return None
    flags["position-embedding-type"] = kind
    if kind == "yarn":
        flags.setdefault(SCALING_FACTOR, stored_factor)
    return [f"--position-embedding-type is {kind} as in {folder} (--rope-type changes it)"]


def _rotation(
    flags: Values, user_values: Mapping[str, Any], values: Mapping[str, Any], *, derived: bool
) -> list[str]:
    """Set the position embedding of multi-latent attention, and return lines that state it.

    Args:
        flags: option values of the command line by name; modified in place.
        user_values: all explicit option values by name.
        values: values of the flags of latent attention.
        derived: whether a checkpoint or Hugging Face folder supplies options that are not given.
    """
    position = user_values.get("position-embedding-type")
    by_file = position is not None and "position-embedding-type" not in flags
    kind = values.get("rope-type") or (position if by_file else "yarn")
    if position == "yarn" and kind == "rope":
        raise ValueError("--rope-type rope contradicts --position-embedding-type yarn: keep one")
    if kind == "rope":
        if user_values.get("use-rope-scaling"):
            raise ValueError(
                "--use-rope-scaling has no effect with --multi-latent-attention in Megatron-LM: "
                "drop it, or give --rope-type yarn"
            )
        flags["position-embedding-type"] = "rope"
        ignored = "rotary-scaling-factor" in values
        return ["no effect here: --rotary-scaling-factor (--rope-type is rope)"] if ignored else []
    default = None if derived else LATENT_YARN_FACTOR
    factor = values.get("rotary-scaling-factor", user_values.get(SCALING_FACTOR, default))
    if user_values.get(SCALING_FACTOR, factor) != factor:
        raise ValueError(
            f"--rotary-scaling-factor {factor} contradicts --{SCALING_FACTOR} "
            f"{user_values[SCALING_FACTOR]}: keep one"
        )
    options = {"position-embedding-type": "yarn"} | ({SCALING_FACTOR: factor} if factor else {})
    flags.update(options)
    options_text = " ".join(f"--{name} {value}" for name, value in options.items())
    lines = [
        f"--multi-latent-attention is read with {options_text}, as in Megatron-LM "
        "(--rope-type rope uses rotary embeddings without scaling)"
    ]
    if flags.pop("use-rope-scaling", False):
        lines.append("no effect here: --use-rope-scaling (--multi-latent-attention uses yarn)")
    return lines

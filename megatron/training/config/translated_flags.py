# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's flags that translate to options of other names or to several options.

Multi-latent attention (`--multi-latent-attention`) in Megatron-LM uses YaRN unless `--rope-type
rope` is given, regardless of `--position-embedding-type`: factor `--rotary-scaling-factor` (40),
4,096 original positions, mscale 1, mscale of all features 0. It normalises latents only with
`--qk-layernorm`. These rules apply to flags on the command line. A YAML file, a checkpoint and a
Hugging Face folder describe their model with this program's options, and keep it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from megatron.cli.schema import Option

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

# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding in config.json: read and written."""

from __future__ import annotations

from typing import Any

from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import RopeConfig
from megatron.hf.fields import Fields
from megatron.training.config.model_table import yarn_magnitude


def read_rope(
    fields: Fields,
    max_length: int | None,
    *,
    interleaved: bool = False,
    percent: float | None = None,
) -> RopeConfig:
    """Read rope_parameters, or what stood in its place before: rope_theta and rope_scaling.

    Args:
        fields: of config.json.
        max_length: longest sequence of the model.
        interleaved: whether neighbouring features are paired.
        percent: share of features that rotate where nothing is said, if it can be chosen.

    Raises:
        ValueError: a value that is not supported; it names the field.
    """
    chosen = scaling_fields(fields)
    base = fields.number("rope_theta", 10000.0)
    base = chosen.number("rope_theta", base)
    share = _rotary_share(fields, chosen, percent)
    name = "rope_type" if "rope_type" in chosen.raw else "type"
    kind = chosen.raw.get(name, "default")
    if kind == "default":
        return RopeConfig(base=base, percent=share, interleaved=interleaved)
    if kind not in ("linear", "llama3", "yarn"):
        chosen.refuse(name, "supported are default, linear, llama3, yarn")
    if kind == "linear":
        scaling = RopeScaling(kind="linear", factor=chosen.number("factor"))
        return RopeConfig(base=base, percent=share, interleaved=interleaved, scaling=scaling)
    original = fields.count(
        "original_max_position_embeddings",
        chosen.count("original_max_position_embeddings", max_length),
    )
    try:
        if kind == "llama3":
            scaling = RopeScaling(
                kind="llama3",
                factor=chosen.number("factor"),
                low_freq_factor=chosen.number("low_freq_factor"),
                high_freq_factor=chosen.number("high_freq_factor"),
                original_max_position=original,
            )
        else:
            scaling = _yarn(chosen, original, max_length)
    except ValueError as error:
        raise ValueError(f"{fields.where}: {error}") from None
    return RopeConfig(base=base, percent=share, interleaved=interleaved, scaling=scaling)


def _rotary_share(fields: Fields, chosen: Fields, percent: float | None) -> float:
    """Return the share of a head's features that rotate. Raises ValueError."""
    name = "partial_rotary_factor"
    said = [holder for holder in (chosen, fields) if holder.raw.get(name) is not None]
    for holder in said:
        if percent is None and holder.raw[name] != 1:
            holder.refuse(name, "supported is 1")
    if percent is None or not said:
        return percent or 1.0
    share = said[0].number(name)
    if share > 1.0:
        said[0].refuse(name, "expected at most 1")
    return share


def scaling_fields(fields: Fields) -> Fields:
    """Return the object that says how frequencies are scaled, which may be empty."""
    chosen = fields.inner("rope_scaling") or fields.inner("rope_parameters")
    return chosen or Fields({}, fields.where, prefix="rope_parameters.")


def write_rope(rope: RopeConfig | None) -> dict[str, Any]:
    """Return rope_theta and rope_scaling, which every version of transformers reads."""
    if rope is None:
        return {}
    scaling = rope.scaling
    found: dict[str, Any] = {"rope_theta": rope.base, "rope_scaling": None}
    if scaling is None:
        return found
    described: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        described["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        described["low_freq_factor"] = scaling.low_freq_factor
        described["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        described["beta_fast"], described["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        if scaling.attention_factor is not None:
            described["attention_factor"] = scaling.attention_factor
    return {**found, "rope_scaling": described}


def _yarn(chosen: Fields, original: int, max_length: int | None) -> RopeScaling:
    if not chosen.flag("truncate", True):
        chosen.refuse("truncate", "supported is true")
    factor = chosen.number("factor", (max_length or original) / original)
    attention_factor = chosen.raw.get("attention_factor")
    if attention_factor is not None:
        attention_factor = chosen.number("attention_factor")
    elif chosen.raw.get("mscale") and chosen.raw.get("mscale_all_dim"):
        above, below = chosen.number("mscale"), chosen.number("mscale_all_dim")
        attention_factor = yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=chosen.number("beta_fast", 32.0),
        beta_slow=chosen.number("beta_slow", 1.0),
        attention_factor=attention_factor,
    )

# SPDX-License-Identifier: Apache-2.0
"""The fields of config.json of a known architecture, and their readers and writers.

A reader returns the value of a field of `GPTConfig` from (fields of config.json, name). A writer
returns the value of a field of config.json from (value in `GPTConfig`, the whole `GPTConfig`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron.cli.two_way_table import (
    OMITTED,
    constant,
    yarn_magnitude,
    yarn_weight,
)
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import AttentionConfig
from megatron.hf.architecture import Architecture
from megatron.hf.classifier import default_label, read_labels
from megatron.hf.fields import Fields
from megatron.hf.layer_types import FULL, SLIDING, blocks_fields

#: Upper bound on the number of MTP layers.
MAX_MTP_LAYERS = 64

#: Epsilon of the norms of low-rank vectors in transformers, which ignores rms_norm_eps there.
LOW_RANK_EPSILON = 1e-6

#: Default of the window size in transformers.
WINDOW = 4096

#: DeepSeek-V3 and Nemotron-H rank a group of experts by the sum of this many best scores.
GROUP_CANDIDATES = 2


class ModelFields(Fields):
    """The fields of config.json of a known architecture.

    Args:
        kind: the architecture.
        with_mtp: whether the files contain the MTP layers that config.json specifies.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str, *, kind: Architecture, with_mtp: bool
    ) -> None:
        super().__init__(raw, where, defaults=kind.defaults)
        self.kind, self.has_mtp = kind, with_mtp and bool(kind.mtp_entries)
        self.max_length = self.count("max_position_embeddings", 0) or None
        self.blocks = kind.read_blocks(self)

    @property
    def num_labels(self) -> int | None:
        """Number of labels of a classification head; None without one. Raises ValueError."""
        if self.raw.get("architectures") != [self.kind.classifier_class]:
            return None
        return len(read_labels(self))

    @property
    def scaling(self) -> Fields:
        """The object with the RoPE scaling; it may be empty."""
        outer, parameters = self.inner("rope_scaling"), self.inner("rope_parameters")
        if self.kind.has_ropes_of_types:
            if outer is not None and parameters is not None:
                self.refuse("rope_scaling", "leave it out next to rope_parameters")
            parameters = parameters and parameters.inner(FULL)
        elif parameters is not None and {FULL, SLIDING} & parameters.raw.keys():
            self.refuse("rope_parameters", "one object for all layers is supported")
        scaling = outer or parameters
        default = self.kind.defaults.get("rope_parameters", {})
        return scaling or Fields(default, self.where, prefix="rope_parameters.")

    @property
    def scaling_kind(self) -> str:
        """The type of RoPE scaling. Raises ValueError."""
        scaling = self.scaling
        name = "rope_type" if "rope_type" in scaling.raw else "type"
        kind = scaling.raw.get(name, "default")
        if kind not in ("default", "linear", "llama3", "yarn"):
            scaling.refuse(name, "supported are default, linear, llama3, yarn")
        return str(kind)


def count(fields: ModelFields, name: str) -> int:
    return fields.count(name)


def number(default: float | None = None) -> Callable[[ModelFields, str], float]:
    return lambda fields, name: fields.number(name, default)


def flag(default: bool) -> Callable[[ModelFields, str], bool]:
    return lambda fields, name: fields.flag(name, default)


def count_of(*names: str) -> Callable[[ModelFields, str], int]:
    return lambda fields, _: fields.count_of(*names)


def must_be(*values: Any) -> Callable[[ModelFields, str], None]:
    return lambda fields, name: fields.must_be(name, *values)


def equal_to(field: str) -> Callable[[ModelFields, str], int]:
    """Return a reader of a field that, if present, must equal another field."""

    def read(fields: ModelFields, name: str) -> int:
        value = fields.count(field)
        fields.must_be(name, value)
        return value

    return read


unread = constant(None)
unwritten = constant(OMITTED)


def of_blocks(fields: ModelFields, name: str) -> Any:
    return blocks_fields(fields.blocks).get(name, "")


def mtp_num_layers(fields: ModelFields, _: str) -> int:
    """Return the number of MTP layers."""
    if not fields.has_mtp:
        return 0
    name = "num_mtp_layers" if "num_mtp_layers" in fields.raw else "num_nextn_predict_layers"
    num_layers = fields.count(name, 0, minimum=0)
    if num_layers > MAX_MTP_LAYERS:
        fields.refuse(name, f"more than {MAX_MTP_LAYERS}")
    return num_layers


def tied_head(fields: ModelFields, name: str) -> bool:
    # Classes with a classification head ignore the field.
    return fields.flag(name, False) and fields.num_labels is None


def label_names(num_labels: int | None, _: GPTConfig) -> Any:
    if num_labels is None:
        return OMITTED
    return {str(label): default_label(label) for label in range(num_labels)}


def label_ids(config: GPTConfig, _: GPTConfig) -> Any:
    if config.num_labels is None:
        return OMITTED
    return {default_label(label): label for label in range(config.num_labels)}


def is_null(fields: ModelFields, name: str) -> bool:
    """Return whether a field is null, which differs from an absent field with a default."""
    return name in fields.raw and fields.raw[name] is None


def query_groups(fields: ModelFields, name: str) -> int:
    heads = fields.count("num_attention_heads")
    return heads if is_null(fields, name) else fields.count(name, heads)


def head_dim(fields: ModelFields, name: str) -> int:
    """Return the channels of a head, by default hidden_size / num_attention_heads."""
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    head_dim = 0 if is_null(fields, name) else fields.count(name, 0)
    if not head_dim and hidden % heads:
        fields.refuse(name, "give it, as heads do not divide hidden_size")
    return head_dim or hidden // heads


def quotient_head_dim(fields: ModelFields, name: str) -> int:
    """Return hidden_size / num_attention_heads, the only supported number of channels."""
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    if hidden % heads:
        fields.refuse("num_attention_heads", f"it must divide hidden_size {hidden}")
    fields.must_be(name, hidden // heads)
    return hidden // heads


#: Activations of an MLP without a gate. The first name of an activation is written.
_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "relu2": "squared_relu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu": "gelu",
    }
)


def activation(fields: ModelFields, name: str) -> str:
    """Return the activation of an MLP without a gate."""
    value = fields.find(name)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        fields.refuse(name, f"supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def write_activation(activation: str, _: GPTConfig) -> str:
    names = [name for name, mcore in _ACTIVATIONS.items() if mcore == activation]
    return names[0] if names else activation


def optional_window(fields: ModelFields, name: str) -> int | None:
    """Return the window of all layers, None if absent or null."""
    return None if fields.find(name) is None else fields.count(name)


def fixed_flag(value: bool) -> Callable[[ModelFields, str], bool]:
    """Return a reader of a flag that, if present, must have this value."""

    def read(fields: ModelFields, name: str) -> bool:
        fields.must_be(name, value)
        return value

    return read


def always_window(fields: ModelFields, name: str) -> int | None:
    """Return the window of Mistral's layers, None without one."""
    size = None if is_null(fields, name) else fields.count(name, WINDOW)
    types = fields.raw.get("layer_types") or []
    if any((kind == SLIDING) != (size is not None) for kind in types):
        fields.refuse("layer_types", f"with {name} {size} it is not supported")
    return size


def switched_window(fields: ModelFields, name: str) -> int | None:
    """Return the window of all layers, which `use_sliding_window` switches on."""
    used = fields.flag("use_sliding_window", False) and not is_null(fields, name)
    return fields.count(name, WINDOW) if used else None


def reciprocal(fields: ModelFields, name: str) -> float:
    """Return 1 / a number, by default 1."""
    return 1.0 / fields.number(name, 1.0)


def write_reciprocal(factor: float, _: GPTConfig) -> float:
    return float(f"{1.0 / factor:.8g}")


def write_scale(_: float | None, config: GPTConfig) -> float:
    """Return the factor on the attention logits."""
    assert isinstance(config.attention, AttentionConfig)
    return config.attention.scale


def rope_base(fields: ModelFields, name: str) -> float:
    name = name.rpartition(".")[2]
    return fields.scaling.number(name, fields.number(name, 10000.0))


def window_rope_base(fields: ModelFields, name: str) -> float:
    """Return the base of layers with a window, whose positions are not scaled."""
    name, default = name.rpartition(".")[2], float(fields.kind.defaults["rope_theta"])
    parameters = fields.inner("rope_parameters")
    sliding = parameters and parameters.inner(SLIDING)
    if sliding is None:
        return default
    sliding.must_be("rope_type", "default")
    sliding.must_be("partial_rotary_factor", 1)
    return sliding.number(name, default)


def minimax_rotary_fraction(fields: ModelFields, name: str) -> float:
    """Return the fraction of channels with RoPE, which the field `rotary_dim` may give."""
    fraction = 1.0
    if fields.find("rotary_dim") is not None:
        fraction = fields.count("rotary_dim") / fields.count("head_dim")
    if fraction > 1.0:
        fields.refuse("rotary_dim", "expected at most head_dim")
    return rotary_fraction(fraction)(fields, name)


def rotary_fraction(default: float | None) -> Callable[[ModelFields, str], float]:
    """Return a reader of the fraction of channels with RoPE. With default None it must be 1."""

    def read(fields: ModelFields, name: str) -> float:
        sources = [
            source for source in (fields.scaling, fields) if source.raw.get(name) is not None
        ]
        for source in sources:
            if default is None and source.raw[name] != 1:
                source.refuse(name, "supported is 1")
        if default is None or not sources:
            return default or 1.0
        fraction = sources[0].number(name)
        if fraction > 1.0:
            sources[0].refuse(name, "expected at most 1")
        return fraction

    return read


def scaling_number(
    default: float | None = None, *, minimum: float | None = None
) -> Callable[[ModelFields, str], float]:
    """Return a reader of a number in the RoPE scaling: positive, or at least `minimum`."""

    def read(fields: ModelFields, name: str) -> float:
        name = name.rpartition(".")[2]
        value = fields.scaling.raw.get(name)
        if minimum is not None and not isinstance(value, bool) and value == minimum:
            return minimum
        return fields.scaling.number(name, default)

    return read


def original_length(fields: ModelFields, name: str) -> int:
    name = name.rpartition(".")[2]
    return fields.count(name, fields.scaling.count(name, fields.max_length))


def yarn_factor(fields: ModelFields, name: str) -> float:
    original = original_length(fields, "original_max_position_embeddings")
    return fields.scaling.number("factor", (fields.max_length or original) / original)


def yarn_attention(fields: ModelFields, name: str) -> float | None:
    scaling = fields.scaling
    if scaling.raw.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if not (scaling.raw.get("mscale") and scaling.raw.get("mscale_all_dim")):
        return None
    factor = yarn_factor(fields, name)
    magnitude, all_dim_magnitude = (
        yarn_magnitude(factor, scaling.number(weight)) for weight in ("mscale", "mscale_all_dim")
    )
    return magnitude / all_dim_magnitude


def scale_factor(fields: ModelFields, name: str) -> float:
    """Return the factor of the softmax scale: the square of YaRN's mscale_all_dim magnitude."""
    scaling, kind = fields.scaling, fields.scaling_kind
    if kind == "default" or not scaling.raw.get("mscale_all_dim"):
        return 1.0
    if kind != "yarn":
        scaling.refuse("mscale_all_dim", "supported is yarn's")
    return yarn_magnitude(scaling.number("factor"), scaling.number("mscale_all_dim")) ** 2


def scale_weight(scale_factor: float, config: GPTConfig) -> Any:
    scaling = None if config.rope is None else config.rope.scaling
    if scaling is None or scaling.kind != "yarn":
        return OMITTED
    return yarn_weight(scale_factor, scaling.factor) or OMITTED


def optional_rank(fields: ModelFields, name: str) -> int | None:
    if name not in fields.raw:
        fields.refuse(name, "expected a positive integer, or null")
    return fields.count(name, 0) or None


def rope_channels(fields: ModelFields, _: str) -> int:
    """Return the rotated channels of latent attention; `head_dim` is another name."""
    return fields.count_of("qk_rope_head_dim", "head_dim")


def low_rank_epsilon(fields: ModelFields, name: str) -> float | None:
    same = fields.number("rms_norm_eps", LOW_RANK_EPSILON) == LOW_RANK_EPSILON
    return None if same else LOW_RANK_EPSILON


def group_limit(fields: ModelFields, name: str) -> int | None:
    """Return a field of group-limited routing, None if every token may use all groups."""
    limits = fields.count("n_group") != fields.count("topk_group")
    return fields.count(name) if limits else None


def group_count(count: int | None, _: GPTConfig) -> int:
    return count or 1


def dt_limits(fields: Fields, name: str) -> tuple[float, float]:
    """Return the bounds of dt; infinity has two spellings.

    Nemotron-H's own code clamps dt to these bounds. transformers up to 5.23 applies `time_step_min`
    as a lower bound instead, which differs from how the weights were trained.
    """
    value = fields.find(name)
    if value is None:
        return 0.0, math.inf
    bounds = value if isinstance(value, list | tuple) else []
    bounds = [math.inf if bound == {"__float__": "Infinity"} else bound for bound in bounds]
    if len(bounds) != 2 or any(type(bound) not in (int, float) for bound in bounds):
        fields.refuse(name, "expected the smallest and the largest dt")
    minimum, maximum = map(float, bounds)
    if not 0.0 <= minimum < maximum:
        fields.refuse(name, "expected 0 <= smallest < largest")
    return minimum, maximum


def write_dt_limits(limits: tuple[float, float], _: GPTConfig) -> Any:
    minimum, maximum = limits
    if limits == (0.0, math.inf):
        return OMITTED
    return [minimum, {"__float__": "Infinity"} if maximum == math.inf else maximum]

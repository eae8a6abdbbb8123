# SPDX-License-Identifier: Apache-2.0
"""The table that maps model options to `GPTConfig` and back.

`gpt_config` builds the model config from resolved options; `model_options` returns the options of a
model config, from which `gpt_config` builds the same config again. Options whose value is passed
unchanged are annotations in model_options.py; the rows below are derived from several options or
fields. `to` receives all options; `back` omits a flag whose value is the default for this model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.cli.schema import options
from megatron.cli.two_way_table import (
    OMITTED,
    ConfigSection,
    Row,
    Table,
    annotated_rows,
    build,
    constant,
    describe,
    unless,
    yarn_magnitude,
    yarn_weight,
)
from megatron.core.models.layer_pattern import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    EXPERTS,
    MAMBA,
    MTP_SEPARATOR,
    SHORT_CONV,
    WINDOW,
)
from megatron.training.config import Config
from megatron.training.config.layer_pattern_options import (
    attention_kinds,
    expert_layers,
    has,
    has_attention,
    is_hybrid,
    mamba_heads,
    mtp_num_layers,
    written,
)

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTConfig
    from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, Mamba2Config


class Flags:
    """The values of all options by name, and the config that holds them.

    Args:
        config: the options.
        overrides: values that replace values of the config, by field name.
    """

    def __init__(self, config: Config, **overrides: Any) -> None:
        self.config = config
        sections = [vars(section) for section in vars(config).values()]
        self._values = {
            name: value for fields in sections for name, value in fields.items()
        } | overrides

    def __getitem__(self, name: str) -> Any:
        return self._values[name.replace("-", "_")]


def gpt_config(config: Config, vocab_size: int) -> GPTConfig:
    """Return the model config that resolved options describe.

    Args:
        vocab_size: vocabulary size without padding.
    """
    model: GPTConfig = build(MODEL, Flags(config, vocab_size=vocab_size))
    return model


def part_config(config: Config, path: str) -> Any:
    """Return the section of `GPTConfig` at a path, such as "moe"; None if the model has none.

    Options need not be resolved if the section derives its defaults.
    """
    return build(MODEL, Flags(config), at=path)


def recurrent_shapes(config: Config) -> dict[str, GatedDeltaNetConfig | Mamba2Config]:
    """Return the shapes of the model's blocks with a linear recurrence by display name."""
    names = {"delta_net": "gated delta net", "mamba": "Mamba-2"}
    shapes = {name: part_config(config, path) for path, name in names.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def model_options(config: GPTConfig) -> dict[str, Any]:
    """Return the options that describe a model by name, in the order of the command line.
    `gpt_config` is the inverse."""
    described = describe(MODEL, config)
    return {
        option.name: described[option.name]
        for option in options(Config)
        if option.name in described
    }


def options_problem(config: GPTConfig) -> str | None:
    """Return why training options cannot describe a model; None if they can.

    The message uses the names of Hugging Face's config.json.
    """
    if config.num_labels is not None:
        return "a classification head is not supported in training: the model can be served"
    if config.moe is not None and config.moe.bias != config.moe.router.bias:
        return "training gives biases to both experts and router, or to neither"
    return _window_problem(config)


# --- What follows from several options, or from several fields ------------------------------------


def _biased(flags: Flags, name: str) -> bool:
    return flags[name] or not flags["disable-bias-linear"]


def _all_biases(config: GPTConfig) -> bool:
    """Return whether attention and MLPs have all biases that they support."""
    attention, mlp = config.attention, config.mlp
    biases = [getattr(attention, name, False) for name in ("qkv_bias", "output_bias")]
    return all(biases) and mlp is not None and mlp.bias


def _bias_option(biased: bool, config: GPTConfig) -> bool:
    return biased and not _all_biases(config)


def _activation(flags: Flags, name: str) -> str:
    if flags["quick-geglu"]:
        return "quick_gelu"
    if flags["swiglu"]:
        return "silu"
    if flags["openai-gelu"]:
        return "gelu_tanh"
    return "squared_relu" if flags["squared-relu"] else "gelu"


def _is_gated(flags: Flags, name: str) -> bool:
    return flags["swiglu"] or flags["quick-geglu"] or flags["geglu"]


def _geglu(gated: bool, config: GPTConfig) -> Any:
    shape = config.mlp or config.moe
    return True if gated and shape is not None and shape.activation == "gelu" else OMITTED


def _swiglu(gated: bool, config: GPTConfig) -> bool:
    # A GPT whose layers all have experts has the shape of an MLP that it does not use.
    used = DENSE in config.blocks + config.mtp_blocks
    shape = config.mlp if used or config.moe is None else config.moe
    return gated and shape is not None and shape.activation == "silu"


def _true_if(activation: str) -> Callable[[str, GPTConfig], Any]:
    """Return a writer of a flag that is true for one activation."""
    return lambda value, config: True if value == activation else OMITTED


def _pattern(flags: Flags, name: str) -> str:
    pattern = written(flags.config)
    return pattern.blocks if pattern is not None and is_hybrid(flags.config) else ""


def _depth_pattern(flags: Flags, name: str) -> str:
    pattern = written(flags.config)
    if pattern is None or (
        not is_hybrid(flags.config) and pattern.mtp_blocks == pattern.blocks[-2:]
    ):
        return ""  # the default: the blocks of the last layer
    return pattern.mtp_blocks


def _has_own_depths(config: GPTConfig) -> bool:
    """Return whether the multi-token prediction depths differ from a GPT's last layer."""
    return config.mtp_blocks not in ("", config.blocks[-2:])


def _pattern_text(pattern: str, config: GPTConfig) -> Any:
    if not (pattern or _has_own_depths(config)):
        return OMITTED
    return config.block_pattern + (MTP_SEPARATOR + config.mtp_blocks) * config.mtp_num_layers


def _depths(count: int, config: GPTConfig) -> Any:
    return OMITTED if config.pattern or not count else count


def _frequency(ffn_pattern: str, config: GPTConfig) -> Any:
    if config.moe is None or not ffn_pattern or _has_own_depths(config):  # or in the pattern
        return OMITTED
    return ",".join("01"[ffn == EXPERTS] for ffn in ffn_pattern)


def _has_sinks(flags: Flags, name: str) -> bool:
    return bool((flags[name] or flags["softmax-type"]) == "learnable")


def _softmax(sinks: bool, config: GPTConfig) -> Any:
    return "learnable" if sinks else OMITTED


def _window_softmax(sinks: bool, config: GPTConfig) -> Any:
    if sinks == config.attention.sinks:  # type: ignore[union-attr]
        return OMITTED
    return "learnable" if sinks else "vanilla"


# --- The second kind of attention -----------------------------------------------------------------


def _has_window_blocks(flags: Flags) -> bool:
    return has_attention(flags.config) and attention_kinds(flags.config).has_second


def _window_of(symbol: str) -> Callable[[Flags, str], int | None]:
    """Return a function that derives the window of a kind of attention."""

    def window(flags: Flags, name: str) -> int | None:
        size: int | None = flags[name]
        return size if symbol in attention_kinds(flags.config).windowed else None

    return window


def _rotary_of(symbol: str) -> Callable[[Flags, str], bool]:
    """Return a function that derives whether a kind of attention is rotary."""
    return lambda flags, _: symbol in attention_kinds(flags.config).rotary


def _attention_pattern(flags: Flags, name: str) -> str:
    if is_hybrid(flags.config) or not _has_window_blocks(flags):
        return ""
    return attention_kinds(flags.config).symbols


def _layer_list(config: GPTConfig, distinguishes: Callable[[Any], bool]) -> Any:
    """Return a 1 for each attention block of a kind for which a predicate on its shape holds;
    omitted if it holds for no block, or if the pattern tells."""
    values = {ATTENTION: config.attention, WINDOW: config.second_attention}
    bits = [distinguishes(values[s]) for s in config.blocks if s in values]
    return ",".join("01"[bit] for bit in bits) if any(bits) else OMITTED


def _kinds_are_in_pattern(config: GPTConfig) -> bool:
    """Return whether the layer pattern specifies which blocks are `W` blocks."""
    return bool(config.pattern) or _has_own_depths(config)


def _skip_freq(config: GPTConfig, _: GPTConfig) -> Any:
    if config.second_attention is None or _kinds_are_in_pattern(config):
        return OMITTED
    windows = [kind.window for kind in (config.attention, config.second_attention)]  # type: ignore[union-attr]
    if None not in windows:
        return OMITTED  # all layers have the window
    return _layer_list(config, lambda kind: kind.window is not None)


def _no_rope_freq(config: GPTConfig, _: GPTConfig) -> Any:
    return OMITTED if config.rope is None else _layer_list(config, lambda kind: not kind.rotary)


def _has_window_rope(flags: Flags) -> bool:
    """Return whether the second kind of attention has rotary frequencies of its own."""
    differs = flags["window-rotary-base"] not in (None, flags["rotary-base"])
    return _rotary_of(WINDOW)(flags, "") and (differs or flags["window-rope-scaling"] == "unscaled")


def _window_scaling(flags: Flags, name: str) -> Any:
    return None if flags[name] == "unscaled" else part_config(flags.config, "rope.scaling")


def _window_scaling_option(scaling: Any, config: GPTConfig) -> Any:
    return "unscaled" if scaling is None and config.rope.scaling is not None else OMITTED  # type: ignore[union-attr]


def _window_base_option(base: float, config: GPTConfig) -> Any:
    return OMITTED if base == config.rope.base else base  # type: ignore[union-attr]


def _window_problem(config: GPTConfig) -> str | None:
    """Return why options cannot describe the second kind of attention of a model."""
    second, attention, rope = config.second_attention, config.attention, config.rope
    if second is None:
        return None
    windows = {kind.window for kind in (attention, second)} - {None}  # type: ignore[union-attr]
    if len(windows) > 1:
        return f"the attention windows {windows} differ: training has one --window-size"
    if _kinds_are_in_pattern(config) and attention.window is not None:  # type: ignore[union-attr]
        return "with 'W' blocks in a layer pattern, training gives the window to these blocks only"
    if second.rope is not None and rope is not None:
        same = dataclasses.replace(second.rope, base=rope.base, scaling=rope.scaling)
        if same != rope or second.rope.scaling not in (None, rope.scaling):
            return (
                "the rotary embeddings of two kinds of attention differ in more than their base "
                "and whether they are scaled"
            )
    return None


def _scaling(kind: str, when: Callable[[Flags], bool]) -> ConfigSection:
    return ConfigSection("rope.scaling", "ops.rope:RopeScaling", when, {"kind": kind})


def _position(config: GPTConfig, _: GPTConfig) -> str:
    if config.rope is None:
        return "none" if config.max_position_embeddings is None else "learned_absolute"
    scaling = config.rope.scaling
    return "yarn" if scaling is not None and scaling.kind == "yarn" else "rope"


def _learned_positions(flags: Flags, name: str) -> int | None:
    learned = flags["position-embedding-type"] == "learned_absolute"
    count: int | None = flags[name]
    return count if learned else None


def _is_latent(flags: Flags) -> bool:
    return has_attention(flags.config) and flags["multi-latent-attention"]


def _scale_factor(flags: Flags, name: str) -> float:
    """Return the factor on the softmax scale: the square of yarn's magnitude of all features."""
    if flags["position-embedding-type"] != "yarn":
        return 1.0
    return yarn_magnitude(flags["yarn-rotary-scaling-factor"], flags[name]) ** 2


def _scale_weight(scale_factor: float, config: GPTConfig) -> Any:
    if _position(config, config) != "yarn":
        return OMITTED
    return yarn_weight(scale_factor, config.rope.scaling.factor)  # type: ignore[union-attr]


def _attention_factor(flags: Flags, name: str) -> float | None:
    """Return yarn's factor on cosine and sine; None uses yarn's default.

    With latent attention, the softmax scale already contains the magnitude of all features.
    """
    if flags[name] is not None or not flags["multi-latent-attention"]:
        factor: float | None = flags[name]
        return factor
    grown, all_grown = (
        yarn_magnitude(flags["yarn-rotary-scaling-factor"], flags[weight])
        for weight in ("mscale", "mscale-all-dim")
    )
    return grown / all_grown


def _stored_attention_factor(factor: float | None, config: GPTConfig) -> float | None:
    assert config.rope is not None
    assert config.rope.scaling is not None
    latent = hasattr(config.attention, "scale_factor")
    return config.rope.scaling.magnitude if latent else factor


def _limits(flags: Flags, name: str) -> tuple[float, float]:
    lower_bound, *upper_bounds = flags[name] or (0.0,)
    return lower_bound, upper_bounds[0] if upper_bounds else math.inf


def _dt_limit_option(limits: tuple[float, float], config: GPTConfig) -> Any:
    if limits == (0.0, math.inf):
        return OMITTED
    return limits[:1] if limits[1] == math.inf else limits


def _default_to(default: Callable[[Flags], Any]) -> Callable[[Flags, str], Any]:
    """Return a function that derives a field if its flag is not given."""
    return lambda flags, name: default(flags) if flags[name] is None else flags[name]


def _candidates(flags: Flags) -> int:
    return max(1, flags["moe-router-topk"] // (flags["moe-router-group-topk"] or 1))


def _candidates_option(candidates: int, config: GPTConfig) -> Any:
    router = config.moe.router  # type: ignore[union-attr]
    derived = max(1, router.topk // (router.group_topk or 1))
    return OMITTED if candidates == derived or router.num_groups is None else candidates


def _balance(flags: Flags, name: str) -> str:
    return flags[name] if flags["moe-aux-loss-coeff"] > 0 else "none"


def _load_balancing_option(balance: str, config: GPTConfig) -> Any:
    return OMITTED if balance in ("none", "aux_loss") else balance


# --- The table ------------------------------------------------------------------------------------

_SECTIONS_OF_TABLE = {
    "": ConfigSection("", "models.gpt:GPTConfig"),
    "norm": ConfigSection("norm", "transformer:NormConfig"),
    "multipliers": ConfigSection("multipliers", "models.gpt_config:Multipliers"),
    "mtp": ConfigSection(
        "mtp", "models.gpt_config:MTPConfig", lambda f: mtp_num_layers(f.config) > 0
    ),
    "mlp": ConfigSection(
        "mlp", "transformer:MLPConfig", lambda f: not is_hybrid(f.config) or has(f.config, DENSE)
    ),
    "latent": ConfigSection("attention", "transformer:LatentAttentionConfig", _is_latent),
    "attention": ConfigSection(
        "attention", "transformer:AttentionConfig", lambda f: has_attention(f.config)
    ),
    "rope": ConfigSection(
        "rope", "transformer:RopeConfig", lambda f: f["position-embedding-type"] in ("rope", "yarn")
    ),
    "window": ConfigSection(
        "attention.second", "transformer:WindowAttentionConfig", _has_window_blocks
    ),
    "window_rope": ConfigSection(
        "attention.second.rope", "transformer:RopeConfig", _has_window_rope
    ),
    "linear": _scaling("linear", lambda f: f["rotary-seq-len-interpolation-factor"] is not None),
    "llama3": _scaling("llama3", lambda f: f["use-rope-scaling"]),
    "yarn": _scaling("yarn", lambda f: f["position-embedding-type"] == "yarn"),
    "moe": ConfigSection("moe", "moe:MoEConfig", lambda f: f["num-experts"] is not None),
    "router": ConfigSection("moe.router", "moe:RouterConfig"),
    "delta_net": ConfigSection(
        "delta_net", "ssm.mixer_config:GatedDeltaNetConfig", lambda f: has(f.config, DELTA_NET)
    ),
    "mamba": ConfigSection(
        "mamba", "ssm.mixer_config:Mamba2Config", lambda f: has(f.config, MAMBA)
    ),
    "short_conv": ConfigSection(
        "short_conv", "ssm.mixer_config:ShortConvConfig", lambda f: has(f.config, SHORT_CONV)
    ),
}

MODEL = Table(
    _SECTIONS_OF_TABLE,
    (
        *annotated_rows(Config),
        Row("vocab-size", "vocab_size"),
        Row("disable-bias-linear", "", back=lambda model, _: not _all_biases(model)),
        # MLPs, and what they share with experts
        *(
            Row(flag, f"{section}.activation", _activation, _true_if(activation))
            for section in ("mlp", "moe")
            for flag, activation in (
                ("squared-relu", "squared_relu"),
                ("openai-gelu", "gelu_tanh"),
                ("quick-geglu", "quick_gelu"),
            )
        ),
        Row("add-mlp-bias", "mlp.bias", _biased, _bias_option),
        *(
            Row(flag, f"{section}.gated", _is_gated, back)
            for section in ("mlp", "moe")
            for flag, back in (("swiglu", _swiglu), ("geglu", _geglu))
        ),
        # Latent attention
        Row("mscale-all-dim", "latent.scale_factor", _scale_factor, _scale_weight),
        # Attention
        Row("add-qkv-bias", "attention.qkv_bias", _biased, _bias_option),
        Row("add-attention-output-bias", "attention.output_bias", _biased, _bias_option),
        Row("softmax-type", "attention.sinks", _has_sinks, _softmax),
        Row("window-size", "attention.window", _window_of(ATTENTION), unless(None)),
        Row("", "attention.rotary", _rotary_of(ATTENTION)),
        # The second kind of attention
        Row("window-size", "window.window", _window_of(WINDOW), unless(None)),
        Row("window-attn-skip-freq", "", back=_skip_freq),
        Row("no-rope-freq", "", back=_no_rope_freq),
        Row("window-softmax-type", "window.sinks", _has_sinks, _window_softmax),
        Row("", "window.rotary", _rotary_of(WINDOW)),
        Row("", "window.pattern", _attention_pattern),
        Row(
            "window-rotary-base",
            "window_rope.base",
            _default_to(lambda f: f["rotary-base"]),
            _window_base_option,
        ),
        Row("", "window_rope.percent", lambda f, _: f["rotary-percent"]),
        Row("", "window_rope.interleaved", lambda f, _: f["rotary-interleaved"]),
        Row("", "window_rope.query_scale_beta", lambda f, _: f["rotary-query-scale-beta"]),
        Row("", "window_rope.query_scale_length", lambda f, _: f["rotary-query-scale-length"]),
        Row("window-rope-scaling", "window_rope.scaling", _window_scaling, _window_scaling_option),
        # Experts and multi-token prediction
        Row("mtp-num-layers", "mtp.num_layers", lambda f, _: mtp_num_layers(f.config), _depths),
        Row("moe-layer-freq", "ffn_pattern", lambda f, _: expert_layers(f.config), _frequency),
        Row(
            "moe-ffn-hidden-size",
            "moe.ffn_hidden_size",
            _default_to(lambda f: f.config.model.inner_features),
        ),
        Row(
            "moe-router-group-candidates",
            "router.group_candidates",
            _default_to(_candidates),
            _candidates_option,
        ),
        Row("moe-router-topk-scaling-factor", "router.scaling_factor", _default_to(constant(1.0))),
        Row("moe-router-load-balancing-type", "router.balance", _balance, _load_balancing_option),
        # Positions
        Row("position-embedding-type", "", back=_position),
        Row(
            "max-position-embeddings",
            "max_position_embeddings",
            _learned_positions,
            unless(None),
        ),
        Row(
            "yarn-attention-factor",
            "yarn.attention_factor",
            _attention_factor,
            _stored_attention_factor,
        ),
        # Hybrids
        Row("hybrid-layer-pattern", "pattern", _pattern, _pattern_text),
        Row("", "mtp.pattern", _depth_pattern),
        Row("mamba-num-heads", "mamba.num_heads", lambda f, _: mamba_heads(f.config)),
        Row("mamba-norm-groups", "mamba.norm_groups", back=lambda _, c: c.mamba.normed_groups),
        Row("mamba-dt-limit", "mamba.dt_limit", _limits, _dt_limit_option),
    ),
)

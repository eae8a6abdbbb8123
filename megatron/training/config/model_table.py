# SPDX-License-Identifier: Apache-2.0
"""The shape of a model: the one table between its flags and `GPTConfig`, read both ways.

`gpt_config` makes the model of resolved options, `model_options` the options of a model, which
`gpt_config` makes into the same model again. An option that passes its value as it is has its row
as an annotation, in model_options.py; here are those that follow from several options or fields.
`to` is told all options; `back` leaves a flag out where the model is as without it.
"""

from __future__ import annotations

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
from megatron.core.models.layer_pattern import DELTA_NET, DENSE, EXPERTS, MAMBA, MTP_SEPARATOR
from megatron.training.config import Config
from megatron.training.config.layer_pattern_options import (
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
    """The values of all options by name, and their config.

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
    """Return the model that resolved options describe.

    Args:
        vocab_size: without padding.
    """
    model: GPTConfig = build(MODEL, Flags(config, vocab_size=vocab_size))
    return model


def part_config(config: Config, path: str) -> Any:
    """Return the part of the model at a path in `GPTConfig`, None where it has none.

    Options need not be resolved where the part derives what is not given.
    """
    return build(MODEL, Flags(config), at=path)


def recurrent_shapes(config: Config) -> dict[str, GatedDeltaNetConfig | Mamba2Config]:
    """Return the shapes of the recurrent blocks that there are, by what they are called."""
    names = {"delta_net": "gated delta net", "mamba": "Mamba-2"}
    shapes = {name: part_config(config, path) for path, name in names.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def model_options(config: GPTConfig) -> dict[str, Any]:
    """Return the options that describe a model, by name, in the order of the command line;
    `gpt_config` makes it of them again."""
    described = describe(MODEL, config)
    return {
        option.name: described[option.name]
        for option in options(Config)
        if option.name in described
    }


def options_problem(config: GPTConfig) -> str | None:
    """Return why no options of training describe a model, by their names and those of a Hugging
    Face config.json; None where they do.

    `model_options` leaves out how many scores rank a group of experts: in Megatron-LM that follows
    from two options, in transformers it is 2.
    """
    router = None if config.moe is None else config.moe.router
    if router is None or router.num_groups is None or router.group_topk is None:
        return None
    candidates = _group_candidates(router.topk, router.group_topk)
    if router.group_candidates == candidates or router.num_groups == router.group_topk:
        return None
    return (
        f"num_experts_per_tok {router.topk} / topk_group {router.group_topk} = {candidates}, but "
        f"the model ranks a group of experts by the sum of its {router.group_candidates} best "
        "scores: training ranks groups by as many scores as --moe-router-topk / "
        "--moe-router-group-topk; the model can be served, not trained"
    )


# --- What follows from several options, or from several fields ------------------------------------


def _biased(flags: Flags, name: str) -> bool:
    return flags[name] or not flags["disable-bias-linear"]


def _all_biases(config: GPTConfig) -> bool:
    """Return whether attention and MLPs have all biases that they can have."""
    attention, mlp = config.attention, config.mlp
    biases = [getattr(attention, name, False) for name in ("qkv_bias", "output_bias")]
    return all(biases) and mlp is not None and mlp.bias


def _own_bias(biased: bool, config: GPTConfig) -> bool:
    return biased and not _all_biases(config)


def _activation(flags: Flags, name: str) -> str:
    if flags["swiglu"]:
        return "silu"
    return "squared_relu" if flags["squared-relu"] else "gelu"


def _squared_relu(activation: str, config: GPTConfig) -> Any:
    return True if activation == "squared_relu" else OMITTED


def _pattern(flags: Flags, name: str) -> str:
    pattern = written(flags.config)
    return pattern.blocks if pattern is not None and is_hybrid(flags.config) else ""


def _depth_pattern(flags: Flags, name: str) -> str:
    pattern = written(flags.config)
    if pattern is None or (
        not is_hybrid(flags.config) and pattern.mtp_blocks == pattern.blocks[-2:]
    ):
        return ""  # as it is without a word
    return pattern.mtp_blocks


def _has_own_depths(config: GPTConfig) -> bool:
    """Return whether the blocks of the MTP layers differ from a GPT's last layer."""
    return config.mtp_pattern not in ("", config.blocks[-2:])


def _written_pattern(pattern: str, config: GPTConfig) -> Any:
    if not (pattern or _has_own_depths(config)):
        return OMITTED
    return config.blocks + (MTP_SEPARATOR + config.mtp_blocks) * config.mtp_num_layers


def _depths(count: int, config: GPTConfig) -> Any:
    return OMITTED if config.pattern or not count else count


def _frequency(ffn_pattern: str, config: GPTConfig) -> Any:
    if config.moe is None or not ffn_pattern or _has_own_depths(config):  # the pattern says it
        return OMITTED
    return ",".join("01"[ffn == EXPERTS] for ffn in ffn_pattern)


def _has_sinks(flags: Flags, name: str) -> bool:
    return bool(flags[name] == "learnable")


def _softmax(sinks: bool, config: GPTConfig) -> Any:
    return "learnable" if sinks else OMITTED


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
    """Return the factor of the softmax scale, which yarn's growth of all features squares to."""
    if flags["position-embedding-type"] != "yarn":
        return 1.0
    return yarn_magnitude(flags["yarn-rotary-scaling-factor"], flags[name]) ** 2


def _scale_weight(scale_factor: float, config: GPTConfig) -> Any:
    if _position(config, config) != "yarn":
        return OMITTED
    return yarn_weight(scale_factor, config.rope.scaling.factor)  # type: ignore[union-attr]


def _attention_factor(flags: Flags, name: str) -> float | None:
    """Return what yarn multiplies cosine and sine by; None leaves that to its own rule.

    With latent attention the softmax scale has a part of the growth already.
    """
    if flags[name] is not None or not flags["multi-latent-attention"]:
        factor: float | None = flags[name]
        return factor
    grown, all_grown = (
        yarn_magnitude(flags["yarn-rotary-scaling-factor"], flags[weight])
        for weight in ("mscale", "mscale-all-dim")
    )
    return grown / all_grown


def _written_factor(factor: float | None, config: GPTConfig) -> float | None:
    assert config.rope is not None
    assert config.rope.scaling is not None
    latent = hasattr(config.attention, "scale_factor")
    return config.rope.scaling.magnitude if latent else factor


def _limits(flags: Flags, name: str) -> tuple[float, float]:
    lower_bound, *upper_bounds = flags[name] or (0.0,)
    return lower_bound, upper_bounds[0] if upper_bounds else math.inf


def _written_limits(limits: tuple[float, float], config: GPTConfig) -> Any:
    if limits == (0.0, math.inf):
        return OMITTED
    return limits[:1] if limits[1] == math.inf else limits


def _or(default: Callable[[Flags], Any]) -> Callable[[Flags, str], Any]:
    """Return what derives a field where its flag is not given."""
    return lambda flags, name: default(flags) if flags[name] is None else flags[name]


def _candidates(flags: Flags, name: str) -> int:
    return _group_candidates(flags["moe-router-topk"], flags["moe-router-group-topk"] or 1)


def _group_candidates(topk: int, group_topk: int) -> int:
    return max(1, topk // group_topk)


def _balance(flags: Flags, name: str) -> str:
    return flags[name] if flags["moe-aux-loss-coeff"] > 0 else "none"


def _written_balance(balance: str, config: GPTConfig) -> Any:
    return OMITTED if balance in ("none", "aux_loss") else balance


# --- The table ------------------------------------------------------------------------------------

_SECTIONS_OF_TABLE = {
    "": ConfigSection("", "models.gpt:GPTConfig"),
    "norm": ConfigSection("norm", "transformer:NormConfig"),
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
}

MODEL = Table(
    _SECTIONS_OF_TABLE,
    (
        *annotated_rows(Config),
        Row("vocab-size", "vocab_size"),
        Row("disable-bias-linear", "", back=lambda model, _: not _all_biases(model)),
        # MLPs, and what they share with experts
        Row("squared-relu", "mlp.activation", _activation, _squared_relu),
        Row("squared-relu", "moe.activation", _activation, _squared_relu),
        Row("add-mlp-bias", "mlp.bias", _biased, _own_bias),
        # Latent attention
        Row("mscale-all-dim", "latent.scale_factor", _scale_factor, _scale_weight),
        # Attention
        Row("add-qkv-bias", "attention.qkv_bias", _biased, _own_bias),
        Row("add-attention-output-bias", "attention.output_bias", _biased, _own_bias),
        Row("softmax-type", "attention.sinks", _has_sinks, _softmax),
        # Experts and further prediction
        Row("mtp-num-layers", "mtp_num_layers", lambda f, _: mtp_num_layers(f.config), _depths),
        Row("moe-layer-freq", "ffn_pattern", lambda f, _: expert_layers(f.config), _frequency),
        Row(
            "moe-ffn-hidden-size",
            "moe.ffn_hidden_size",
            _or(lambda f: f.config.model.inner_features),
        ),
        Row("", "router.group_candidates", _candidates),
        Row("moe-router-topk-scaling-factor", "router.scaling_factor", _or(constant(1.0))),
        Row("moe-router-load-balancing-type", "router.balance", _balance, _written_balance),
        # Positions
        Row("position-embedding-type", "", back=_position),
        Row(
            "max-position-embeddings",
            "max_position_embeddings",
            _learned_positions,
            unless(None),
        ),
        Row("yarn-attention-factor", "yarn.attention_factor", _attention_factor, _written_factor),
        # Hybrids
        Row("hybrid-layer-pattern", "pattern", _pattern, _written_pattern),
        Row("", "mtp_pattern", _depth_pattern),
        Row("mamba-num-heads", "mamba.num_heads", lambda f, _: mamba_heads(f.config)),
        Row("mamba-norm-groups", "mamba.norm_groups", back=lambda _, c: c.mamba.normed_groups),
        Row("mamba-dt-limit", "mamba.dt_limit", _limits, _written_limits),
    ),
)

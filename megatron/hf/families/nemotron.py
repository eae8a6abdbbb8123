# SPDX-License-Identifier: Apache-2.0
"""Mamba-2, Nemotron-H, of whose blocks each is a layer, and Bamba. Each sub-weight of Mamba-2 is
contiguous."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS, MAMBA
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    HEAD,
    LAYER,
    MIXER_NORM,
    MLP,
    PROJECTIONS,
    AnyEntry,
    Entry,
    ExpertTensors,
    FusedWeight,
    attention_entries,
    fused_weights,
    shared_expert,
)
from megatron.hf.fields import Fields
from megatron.hf.layer_types import (
    FULL,
    LINEAR,
    check_size,
    layers,
    refuse_windows,
    symbols,
    uniform_layers,
)
from megatron.hf.readers import ModelFields

_BACKBONE = "backbone.layers.{layer}"
_MIXER = f"{_BACKBONE}.mixer"
_NORM = Entry(f"{_BACKBONE}.norm.weight", "{block}.norm.weight", "h")
_ENDS = (
    Entry("backbone.embeddings.weight", "embedding.weight", "Vh"),
    Entry("backbone.norm_f.weight", "decoder.final_norm.weight", "h"),
    HEAD,
)


def mamba_entries(inside: str, norm: Entry) -> tuple[AnyEntry, ...]:
    """Return the entries of Mamba-2 in a module of a layer, with the norm of the block."""
    return (
        norm,
        FusedWeight(
            f"{inside}.in_proj.weight",
            fused_weights("mamba", ("gate", "I"), ("x", "I"), ("B", "G"), ("C", "G"), ("dt", "N")),
            groups="1",
            inner="h",
            biased="use_bias",
        ),
        FusedWeight(
            f"{inside}.conv1d.weight",
            fused_weights("mamba.conv", ("x", "I"), ("B", "G"), ("C", "G")),
            groups="1",
            inner="1w",
            biased="use_conv_bias",
        ),
        Entry(f"{inside}.A_log", "{block}.mamba.A_log", "N", keep_dtype=True),
        Entry(f"{inside}.dt_bias", "{block}.mamba.dt_bias", "N", keep_dtype=True),
        Entry(f"{inside}.D", "{block}.mamba.D", "N", keep_dtype=True),
        Entry(f"{inside}.norm.weight", "{block}.mamba.output_norm.weight", "I", when="mamba_norm"),
        Entry(f"{inside}.out_proj.weight", "{block}.mamba.output.weight", "hI", "use_bias"),
    )


_MAMBA = mamba_entries(_MIXER, _NORM)
_MIXER_BLOCKS = (
    *rows.MODEL,
    Row("num_hidden_layers", "", read.unread, lambda config, _: len(config.blocks)),
    Row("layer_norm_epsilon", "norm.epsilon", read.number(1e-6)),
    Row("rms_norm", "mamba.", read.must_be(True), read.unwritten),
    Row("n_groups", "mamba.num_groups", read.count),
    Row("conv_kernel", "mamba.conv_width", read.count),
    Row("use_conv_bias", "mamba.conv_bias", read.flag(True)),
    Row("use_bias", "mamba.bias", read.flag(False)),
    Row("time_step_limit", "mamba.dt_limit", read.dt_limits, read.write_dt_limits),
)


def _mamba_layers(fields: Fields) -> str:
    """Return the layers of Mamba-2."""
    num_layers = fields.count("num_hidden_layers")
    check_size(fields, num_layers, "num_hidden_layers")
    return MAMBA * num_layers


def _expand(fields: Fields, name: str) -> None:
    inner = fields.count("num_heads") * fields.count("head_dim")
    if fields.count(name) * fields.count("hidden_size") != inner:
        fields.refuse(name, "times hidden_size it must be num_heads times head_dim")


MAMBA2 = Architecture(
    model_type="mamba2",
    class_name="Mamba2ForCausalLM",
    has_classifier=False,
    blocks={MAMBA: _MAMBA},
    ends=_ENDS,
    blocks_per_layer=1,
    rows=(
        *_MIXER_BLOCKS,
        Row("hidden_act", "mamba.", read.must_be("silu", "swish"), read.unwritten),
        Row("num_heads", "mamba.num_heads", read.count),
        Row("head_dim", "mamba.head_channels", read.count),
        Row("state_size", "mamba.state_channels", read.count),
        Row("expand", "mamba.", _expand, lambda m, config: m.inner_channels // config.hidden_size),
    ),
    read_blocks=_mamba_layers,
    defaults=MappingProxyType(
        {"layer_norm_epsilon": 1e-5, "conv_kernel": 4, "expand": 2, "initializer_range": 0.1}
    ),
)

_PLAIN_MLP = (
    _NORM,
    Entry(f"{_MIXER}.up_proj.weight", "{block}.mlp.up.weight", "fh", "mlp_bias"),
    Entry(f"{_MIXER}.down_proj.weight", "{block}.mlp.down.weight", "hf", "mlp_bias"),
)
_ROUTED = (
    _NORM,
    Entry(f"{_MIXER}.gate.weight", "{block}.moe.router.weight", "Eh"),
    Entry(
        f"{_MIXER}.gate.e_score_correction_bias", "{block}.moe.router.expert_bias", "E", fp32=True
    ),
    *shared_expert(f"{_MIXER}.shared_experts", PROJECTIONS[1:]),
)
_PLAIN_EXPERTS = (
    ExpertTensors(f"{_MIXER}.{EXPERT}.up_proj.weight", "{block}.moe.experts.up.weight", "eh"),
    ExpertTensors(f"{_MIXER}.{EXPERT}.down_proj.weight", "{block}.moe.experts.down.weight", "he"),
)
_FUSED_PLAIN_EXPERTS = tuple(
    FusedWeight(
        f"{_MIXER}.experts.{hf_name}",
        ((f"{{block}}.moe.experts.{mcore_name}.weight", rows),),
        groups="E",
        inner=inner,
        stacked=True,
    )
    for hf_name, mcore_name, rows, inner in (
        ("up_proj", "up", "e", "h"),
        ("down_proj", "down", "h", "e"),
    )
)
#: Names of Nemotron-H's layer types in all versions of transformers.
BLOCK_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "mamba": MAMBA,
        LINEAR: MAMBA,
        "attention": ATTENTION,
        FULL: ATTENTION,
        "mlp": DENSE,
        "moe": EXPERTS,
    }
)
_PATTERN = "hybrid_override_pattern"

#: Written instead of a lower bound of 0 on dt, because transformers takes its logarithm.
_NO_FLOOR = 1e-30


def _read_layers(fields: Fields) -> str:
    """Return the layers of Nemotron-H, from any of three fields, which must agree."""
    patterns: dict[str, str] = {}
    for name in ("layers_block_type", "layer_types"):
        if fields.find(name) is not None:
            patterns[name] = symbols(fields, name, BLOCK_TYPES)
    pattern = fields.find(_PATTERN)
    if pattern is not None:
        supported_symbols = set(BLOCK_TYPES.values())
        if not isinstance(pattern, str) or not pattern or set(pattern) - supported_symbols:
            fields.refuse(
                _PATTERN, f"supported are the symbols {', '.join(sorted(supported_symbols))}"
            )
        patterns[_PATTERN] = pattern
    if not patterns:
        fields.refuse(_PATTERN, "it specifies the layers: give it, or layers_block_type")
    name, blocks = next(iter(patterns.items()))
    for field, field_blocks in patterns.items():
        if field_blocks != blocks:
            fields.refuse(field, f"{name} says {blocks}")
    if fields.find("num_hidden_layers") not in (None, len(blocks)):
        fields.refuse("num_hidden_layers", f"{name} has {len(blocks)} layers")
    check_size(fields, len(blocks), "layers_block_type")
    return blocks


def _head_dim(fields: ModelFields, name: str) -> int:
    """Return the channels of a head, from either of two names."""
    old = "attention_head_dim"
    if fields.find(old) is None:
        return read.head_dim(fields, name)
    if fields.raw.get(name) not in (None, fields.count(old)):
        fields.refuse(old, "head_dim is the same field")
    return fields.count(old)


def _no_expert_bias(fields: Fields, name: str) -> None:
    if fields.flag(name, False):
        fields.refuse(name, "with experts it is not supported")


def _dt_floor(fields: Mapping[str, Any]) -> float:
    return read.dt_limits(Fields(fields, "config.json"), "time_step_limit")[0]


NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    class_name="NemotronHForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: (_NORM, *attention_entries(_MIXER)),
        DENSE: _PLAIN_MLP,
        EXPERTS: (*_ROUTED, *_PLAIN_EXPERTS),
        MAMBA: _MAMBA,
    },
    fused={EXPERTS: (*_ROUTED, *_FUSED_PLAIN_EXPERTS)},
    ends=_ENDS,
    blocks_per_layer=1,
    rows=(
        *_MIXER_BLOCKS,
        *rows.SELF_ATTENTION,
        *rows.SIGMOID_EXPERTS,
        Row("head_dim", "attention.kv_channels", _head_dim),
        Row("hybrid_override_pattern", "", read.unread, lambda config, _: config.blocks),
        Row("intermediate_size", "mlp.ffn_hidden_size", read.count),
        *(
            Row("mlp_hidden_act", f"{block}.", read.must_be("relu2"), constant("relu2"))
            for block in ("", "mlp", "moe")
        ),
        Row("mlp_bias", "mlp.bias", read.flag(False)),
        Row("mlp_bias", "moe.", _no_expert_bias, read.unwritten),
        *(Row("", f"{block}.gated", constant(False)) for block in ("mlp", "moe")),
        *(Row("", f"{block}.activation", constant("squared_relu")) for block in ("mlp", "moe")),
        Row("n_shared_experts", "moe.", read.must_be(1), constant(1)),
        Row("moe_shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", read.count),
        Row("mamba_num_heads", "mamba.num_heads", read.count),
        Row("mamba_head_dim", "mamba.head_channels", read.count),
        Row("ssm_state_size", "mamba.state_channels", read.count),
        Row("mamba_hidden_act", "mamba.", read.must_be("silu", "swish"), constant("silu")),
        # See `read.dt_limits`.
        Row("time_step_min", "mamba.", read.unread, lambda m, _: m.dt_limit[0] or _NO_FLOOR),
    ),
    read_blocks=_read_layers,
    check=partial(refuse_windows, typed=False),
    aliases=frozenset({"num_local_experts", "moe_shared_expert_overlap", "layer_types"}),
    defaults=MappingProxyType(
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        }
    ),
    other_prefix=("backbone.", "model."),
    skipped_prefix="mtp.",
    # Up to 5.23, transformers clamps dt to this value instead of the lower time_step_limit.
    reference_fields=lambda fields: {"time_step_min": _dt_floor(fields)},
)


def _bamba_mixers(fields: Fields, num_layers: int) -> str:
    """Return attention in the layers of `attn_layer_indices`, Mamba-2 in all others."""
    name = "attn_layer_indices"
    indices = fields.find(name) or []
    if not isinstance(indices, list) or not all(type(layer) is int for layer in indices):
        fields.refuse(name, "expected numbers of layers")
    mixers = "".join(ATTENTION if layer in indices else MAMBA for layer in range(num_layers))
    for types in ("layer_types", "layers_block_type"):
        present = fields.raw.get(types) is not None
        if present and symbols(fields, types, BLOCK_TYPES, num_layers=num_layers) != mixers:
            fields.refuse(types, f"{name} says otherwise")
    return mixers


def _attention_layers(config: GPTConfig, _: GPTConfig) -> list[int]:
    return [layer for layer, mixer in enumerate(config.blocks[::2]) if mixer == ATTENTION]


def _mamba_head_dim(fields: ModelFields, name: str) -> int:
    """Return the channels of a head of Mamba-2."""
    inner = fields.count("mamba_expand") * fields.count("hidden_size")
    heads = fields.count("mamba_n_heads")
    head_dim = inner // heads if fields.find(name) == "auto" else fields.count(name)
    if head_dim * heads != inner:
        fields.refuse(name, "times mamba_n_heads it must be mamba_expand times hidden_size")
    return head_dim


#: Mamba-2 of Bamba and Granite, and the number of layers of a mixer and an MLP.
BAMBA_MIXER = (
    Row("num_hidden_layers", "", read.unread, lambda config, _: len(config.blocks) // 2),
    Row("mamba_n_heads", "mamba.num_heads", read.count),
    Row("mamba_d_head", "mamba.head_channels", _mamba_head_dim),
    Row("mamba_n_groups", "mamba.num_groups", read.count),
    Row("mamba_d_state", "mamba.state_channels", read.count),
    Row("mamba_d_conv", "mamba.conv_width", read.count),
    Row(
        "mamba_expand",
        "mamba.",
        read.unread,
        lambda m, config: max(1, m.inner_channels // config.hidden_size),
    ),
    Row("mamba_conv_bias", "mamba.conv_bias", read.flag(True)),
    Row("mamba_proj_bias", "mamba.bias", read.flag(False)),
    Row("time_step_limit", "mamba.dt_limit", read.dt_limits, read.write_dt_limits),
)
BAMBA_MLP = tuple(
    entry._replace(
        hf_name=entry.hf_name.replace(".mlp.", ".feed_forward.").replace(
            "post_attention_layernorm", "pre_ff_layernorm"
        )
    )
    for entry in MLP
)
BAMBA = Architecture(
    model_type="bamba",
    class_name="BambaForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: ATTENTION_ENTRIES,
        MAMBA: mamba_entries(f"{LAYER}.mamba", MIXER_NORM),
        DENSE: BAMBA_MLP,
    },
    ends=(EMBEDDING, FINAL_NORM._replace(hf_name="model.final_layernorm.weight"), HEAD),
    rows=(
        *rows.LAYERS,
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.5)),
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        Row("mlp_bias", "mlp.bias", read.flag(False)),
        *BAMBA_MIXER,
        Row("attn_layer_indices", "", read.unread, _attention_layers),
    ),
    read_blocks=layers(uniform_layers(DENSE), _bamba_mixers),
    check=partial(refuse_windows, typed=False),
    aliases=frozenset({"layer_types"}),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        }
    ),
)

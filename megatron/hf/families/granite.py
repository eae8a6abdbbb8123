# SPDX-License-Identifier: Apache-2.0
"""Granite, its mixtures of experts, and the hybrid of Granite 4: factors on embeddings, block
outputs, attention logits and logits."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from megatron.cli.two_way_table import Row
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS, MAMBA
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    ENDS,
    FFN_NORM,
    LAYER,
    MIXER_NORM,
    MLP,
    AnyEntry,
    Entry,
    FusedWeight,
)
from megatron.hf.families.nemotron import BAMBA_MIXER, BLOCK_TYPES, mamba_entries
from megatron.hf.fields import Fields
from megatron.hf.layer_types import layers, refuse_windows, symbols, uniform_layers
from megatron.hf.readers import ModelFields


def _mlp(inside: str, mcore: str, size: str) -> tuple[AnyEntry, ...]:
    """Return the entries of a gated MLP of `size` inner features, gate and up in one tensor."""
    weights = tuple((f"{{block}}.{mcore}.{name}.weight", size) for name in ("gate", "up"))
    return (
        FusedWeight(f"{inside}.input_linear.weight", weights, groups="1", inner="h"),
        Entry(f"{inside}.output_linear.weight", f"{{block}}.{mcore}.down.weight", f"h{size}"),
    )


def _experts(
    router: str, gate_up: str, down: str, *further_entries: AnyEntry
) -> tuple[AnyEntry, ...]:
    """Return the entries of experts, from the names of their tensors."""
    inside, experts = f"{LAYER}.block_sparse_moe", "{block}.moe.experts"
    gate_up_rows = ((f"{experts}.gate.weight", "e"), (f"{experts}.up.weight", "e"))
    down_rows = ((f"{experts}.down.weight", "h"),)
    return (
        FFN_NORM,
        Entry(f"{inside}.{router}.weight", "{block}.moe.router.weight", "Eh"),
        FusedWeight(f"{inside}.{gate_up}", gate_up_rows, groups="E", inner="h", stacked=True),
        FusedWeight(f"{inside}.{down}", down_rows, groups="E", inner="e", stacked=True),
        *further_entries,
    )


#: Names of the tensors of experts on the hub, and in memory.
_STORED = ("router.layer", "input_linear.weight", "output_linear.weight")
_IN_MEMORY = ("router", "experts.gate_up_proj", "experts.down_proj")
_SHARED = _mlp(f"{LAYER}.shared_mlp", "moe.shared", "s")

GRANITE = Architecture(
    model_type="granite",
    class_name="GraniteForCausalLM",
    has_classifier=False,
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *rows.MULTIPLIERS,
        Row("mlp_bias", "mlp.bias", read.flag(False)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
)
_EXPERT_ROWS = (
    Row("num_local_experts", "moe.num_experts", read.count),
    Row("intermediate_size", "moe.ffn_hidden_size", read.count),
    Row("num_experts_per_tok", "router.topk", read.count),
)
GRANITEMOE = dataclasses.replace(
    GRANITE,
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, EXPERTS: _experts(*_STORED)},
    fused={EXPERTS: _experts(*_IN_MEMORY)},
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *rows.MULTIPLIERS,
        *_EXPERT_ROWS,
    ),
    read_blocks=layers(uniform_layers(EXPERTS)),
    defaults=MappingProxyType({"num_local_experts": 8, "num_experts_per_tok": 2}),
)
GRANITEMOESHARED = dataclasses.replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    class_name="GraniteMoeSharedForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, EXPERTS: _experts(*_STORED, *_SHARED)},
    fused={EXPERTS: _experts(*_IN_MEMORY, *_SHARED)},
    rows=(
        *GRANITEMOE.rows,
        Row("shared_intermediate_size", "moe.shared_ffn_hidden_size", read.count),
    ),
)

#: Names of the kinds of mixers.
_MIXER_NAMES = {MAMBA: "mamba", ATTENTION: "attention"}


def _mixers(fields: Fields, num_layers: int) -> str:
    """Return the mixers that `layer_types` names, under either name of the field."""
    old = "layers_block_type"
    name = old if fields.find(old) is not None else "layer_types"
    if fields.find(name) is None:
        return MAMBA * num_layers
    mixers = symbols(fields, name, BLOCK_TYPES, num_layers=num_layers)
    if set(mixers) - _MIXER_NAMES.keys():
        fields.refuse(name, f"supported are {', '.join(_MIXER_NAMES.values())}")
    return mixers


def _ffn(fields: Fields, num_layers: int) -> str:
    return (EXPERTS if fields.count("num_local_experts", minimum=0) else DENSE) * num_layers


def _layer_types(config: GPTConfig, _: GPTConfig) -> list[str]:
    return [_MIXER_NAMES.get(symbol, symbol) for symbol in config.blocks[::2]]


def _is_rotary(fields: Fields) -> bool:
    return fields.find("position_embedding_type") == "rope"


def _positions(fields: ModelFields, name: str) -> None:
    fields.must_be(name, "rope")


def _position_type(config: GPTConfig, _: GPTConfig) -> Any:
    return None if config.rope is None else "rope"


GRANITEMOEHYBRID = Architecture(
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: ATTENTION_ENTRIES,
        MAMBA: mamba_entries(f"{LAYER}.mamba", MIXER_NORM),
        DENSE: (FFN_NORM, *_mlp(f"{LAYER}.shared_mlp", "mlp", "f")),
        EXPERTS: _experts(*_STORED, *_SHARED),
    },
    fused={EXPERTS: _experts(*_IN_MEMORY, *_SHARED)},
    ends=ENDS,
    rows=(
        *rows.MODEL,
        *rows.SILU,
        *rows.RMS_NORM,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *rows.MULTIPLIERS,
        *BAMBA_MIXER,
        Row("layer_types", "", read.unread, _layer_types),
        Row("position_embedding_type", "", _positions, _position_type),
        Row("num_local_experts", "", read.unread, lambda *_: 0),
        *_EXPERT_ROWS,
        Row("shared_intermediate_size", "moe.shared_ffn_hidden_size", read.count),
        Row("shared_intermediate_size", "mlp.ffn_hidden_size", read.count),
    ),
    read_blocks=layers(_ffn, _mixers),
    is_rotary_in=_is_rotary,
    aliases=frozenset({"layers_block_type"}),
    defaults=MappingProxyType(
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        }
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""The mapping tables: one per architecture, from its names of weights to ours.

Queries, keys, values, gate and up are logical weights of their own here, so most entries are two
names and a shape. Experts are slices of one weight here and tensors of their own there; some
tensors of latent attention are several weights here. All are read in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A weight, and perhaps its bias.

    Names have `{layer}`, their number of the layer, or `{mixer}` and `{ffn}`, the names of our two
    blocks of it, or `{depth}`, of further prediction. `shape` has one letter a dimension, see
    `tensor_map.sizes_of`. `biased` names the field of config.json that gives it a bias, `when` what
    else a model must have, see `tensor_map.features_of`.
    """

    theirs: str
    ours: str
    shape: str
    biased: str | None = None
    when: str | None = None
    fp32: bool = False


class Stacked(NamedTuple):
    """A tensor of each expert, `{expert}`, that is a slice of one weight [experts, *shape]."""

    theirs: str
    ours: str
    shape: str


class Rows(NamedTuple):
    """A tensor whose rows are several of our weights', again and again.

    For each index of `groups` it has as many rows of each of `ours`, a name and a letter; `inner`
    is the last dimension. If `stacked`, the index is the first dimension of all, else it is part of
    the rows.
    """

    theirs: str
    ours: tuple[tuple[str, str], ...]
    groups: str
    inner: str
    stacked: bool = False


AnyEntry = Entry | Stacked | Rows


class Experts(NamedTuple):
    """A mixture of experts: entries in the files of the hub, and in those of models as they are in
    memory, which have all experts of a layer in one tensor."""

    single: tuple[AnyEntry, ...]
    fused: tuple[AnyEntry, ...]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One kind of model of `transformers`.

    Args:
        model_type, class_name: as config.json has them.
        attention: entries of a layer's attention.
        has_query_key_norms: whether queries and keys are normalised per head.
        experts: of its mixture of experts, if it has any.
        further: entries of a layer of further prediction beside attention and MLP or experts.
        fields: of config.json that it has and most have not.
        defaults: of fields that are absent.
    """

    model_type: str
    class_name: str
    attention: tuple[AnyEntry, ...]
    has_query_key_norms: bool = False
    experts: Experts | None = None
    further: tuple[AnyEntry, ...] = ()
    fields: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LAYER, _EXPERT = "model.layers.{layer}", "experts.{{expert}}"
_WEIGHT = "{ffn}.moe.experts"

EMBEDDING = Entry("model.embed_tokens.weight", "embedding.weight", "Vh")
FINAL_NORM = Entry("model.norm.weight", "decoder.final_norm.weight", "h")
HEAD = Entry("lm_head.weight", "head.weight", "Vh")

#: What every layer has, and what one without experts has.
NORMS = (
    Entry(f"{_LAYER}.input_layernorm.weight", "{mixer}.norm.weight", "h"),
    Entry(f"{_LAYER}.post_attention_layernorm.weight", "{ffn}.norm.weight", "h"),
)
MLP = (
    Entry(f"{_LAYER}.mlp.gate_proj.weight", "{ffn}.mlp.gate.weight", "fh", "mlp_bias"),
    Entry(f"{_LAYER}.mlp.up_proj.weight", "{ffn}.mlp.up.weight", "fh", "mlp_bias"),
    Entry(f"{_LAYER}.mlp.down_proj.weight", "{ffn}.mlp.down.weight", "hf", "mlp_bias"),
)

_ATTENTION = tuple(
    Entry(
        f"{_LAYER}.self_attn.{theirs}.weight",
        f"{{mixer}}.attention.{ours}.weight",
        shape,
        "attention_bias",
    )
    for theirs, ours, shape in (
        ("q_proj", "query", "nh"),
        ("k_proj", "key", "gh"),
        ("v_proj", "value", "gh"),
        ("o_proj", "output", "hn"),
    )
)
_QUERY_KEY_NORMS = (
    Entry(f"{_LAYER}.self_attn.q_norm.weight", "{mixer}.attention.query_norm.weight", "d"),
    Entry(f"{_LAYER}.self_attn.k_norm.weight", "{mixer}.attention.key_norm.weight", "d"),
)
_LATENT: tuple[AnyEntry, ...] = (
    *(
        Entry(
            f"{_LAYER}.self_attn.{theirs}.weight",
            f"{{mixer}}.attention.{ours}.weight",
            shape,
            when=when,
        )
        for theirs, ours, shape, when in (
            ("q_proj", "query", "nh", "direct_query"),
            ("q_a_proj", "query_down", "qh", "low_rank_query"),
            ("q_a_layernorm", "query_norm", "q", "low_rank_query"),
            ("q_b_proj", "query_up", "nq", "low_rank_query"),
            ("kv_a_layernorm", "kv_norm", "k", None),
            ("o_proj", "output", "ho", None),
        )
    ),
    Rows(
        f"{_LAYER}.self_attn.kv_a_proj_with_mqa.weight",
        (("{mixer}.attention.kv_down.weight", "k"), ("{mixer}.attention.key_rope.weight", "r")),
        groups="1",
        inner="h",
    ),
    Rows(
        f"{_LAYER}.self_attn.kv_b_proj.weight",
        (("{mixer}.attention.key_up.weight", "p"), ("{mixer}.attention.value_up.weight", "v")),
        groups="a",
        inner="k",
    ),
)


def _experts(
    place: str, names: tuple[str, str, str], *more: AnyEntry, fused_place: str = "mlp"
) -> Experts:
    """Return the entries of a mixture of experts: names of gate, up and down in `place`."""
    gate, up, down = (f"{_LAYER}.{place}.{_EXPERT}.{name}.weight" for name in names)
    inside = f"{_LAYER}.{fused_place}"
    router = "{ffn}.moe.router.weight"
    return Experts(
        single=(
            Entry(f"{_LAYER}.{place}.gate.weight", router, "Eh"),
            Stacked(gate, f"{_WEIGHT}.gate.weight", "eh"),
            Stacked(up, f"{_WEIGHT}.up.weight", "eh"),
            Stacked(down, f"{_WEIGHT}.down.weight", "he"),
            *more,
        ),
        fused=(
            Entry(f"{inside}.gate.weight", router, "Eh"),
            Rows(
                f"{inside}.experts.gate_up_proj",
                ((f"{_WEIGHT}.gate.weight", "e"), (f"{_WEIGHT}.up.weight", "e")),
                groups="E",
                inner="h",
                stacked=True,
            ),
            Rows(
                f"{inside}.experts.down_proj",
                ((f"{_WEIGHT}.down.weight", "h"),),
                groups="E",
                inner="e",
                stacked=True,
            ),
            *more,
        ),
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SHARED_EXPERT = tuple(
    Entry(
        f"{_LAYER}.mlp.shared_experts.{theirs}.weight",
        f"{{ffn}}.moe.shared.{ours}.weight",
        shape,
    )
    for theirs, ours, shape in (
        ("gate_proj", "gate", "sh"),
        ("up_proj", "up", "sh"),
        ("down_proj", "down", "hs"),
    )
)
_EXPERT_BIAS = Entry(
    f"{_LAYER}.mlp.gate.e_score_correction_bias", "{ffn}.moe.router.expert_bias", "E", fp32=True
)
#: Copies of the embedding and the head, which is one weight of all layers here.
FURTHER_COPIES = (
    (f"{_LAYER}.embed_tokens.weight", EMBEDDING),
    (f"{_LAYER}.shared_head.head.weight", HEAD),
)
_FURTHER = tuple(
    Entry(f"{_LAYER}.{theirs}.weight", f"mtp.{{depth}}.{ours}.weight", shape)
    for theirs, ours, shape in (
        ("enorm", "embedding_norm", "h"),
        ("hnorm", "hidden_norm", "h"),
        ("eh_proj", "projection", "hH"),
        ("shared_head.norm", "decoder.final_norm", "h"),
    )
)

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    attention=_ATTENTION,
    fields=frozenset({"attention_bias", "mlp_bias"}),
)
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    attention=_ATTENTION + _QUERY_KEY_NORMS,
    has_query_key_norms=True,
    fields=frozenset({"attention_bias"}),
    defaults=MappingProxyType({"head_dim": 128}),
)
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    attention=_ATTENTION,
    experts=_experts("block_sparse_moe", ("w1", "w3", "w2")),
    fields=frozenset({"num_local_experts", "num_experts", "num_experts_per_tok"}),
    defaults=MappingProxyType({"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}),
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    attention=_ATTENTION + _QUERY_KEY_NORMS,
    has_query_key_norms=True,
    experts=_experts("mlp", _PROJECTIONS),
    fields=frozenset(
        {
            "attention_bias",
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
        }
    ),
    defaults=MappingProxyType({"num_key_value_heads": 4}),
)
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    attention=_LATENT,
    experts=_experts("mlp", _PROJECTIONS, _EXPERT_BIAS, *_SHARED_EXPERT),
    further=_FURTHER,
    fields=frozenset(
        {
            "n_routed_experts",
            "num_local_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "moe_layer_freq",
            "q_lora_rank",
            "kv_lora_rank",
        }
    ),
)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {kind.model_type: kind for kind in (LLAMA, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)}
)

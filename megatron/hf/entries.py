# SPDX-License-Identifier: Apache-2.0
"""What the mapping tables consist of, and the entries that several architectures share.

Queries, keys, values, gate and up are logical weights of their own here, so most entries are two
names and a shape. Experts are slices of one weight here and tensors of their own in Hugging Face;
some tensors of latent attention and of recurrent mixers are several weights here. All are mapped in
both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.core.models.layer_pattern import RECURRENT


class Entry(NamedTuple):
    """A weight, and perhaps its bias.

    Names have `{layer}`, their number of the layer, or `{block}`, the name of our block, or
    `{depth}`, of further prediction. `shape` has one letter a dimension, see
    `tensor_map.sizes_of`. `biased` names the field of config.json that gives it a bias, `when` what
    else a model must have, see `tensor_map.features_of`. What is `fp32` is so on both sides; what
    is `kept` stays in the dtype it has. Neither follows the dtype that weights are converted to.
    """

    theirs: str
    ours: str
    shape: str
    biased: str | None = None
    when: str | None = None
    fp32: bool = False
    kept: bool = False


class Stacked(NamedTuple):
    """A tensor of each expert, `{expert}`, that is a slice of one weight [experts, *shape]."""

    theirs: str
    ours: str
    shape: str


class Rows(NamedTuple):
    """A tensor whose rows are several of our weights', again and again.

    For each index of `groups` it has as many rows of each of `ours`, a name and a letter; `inner`
    has a letter for each further dimension. If `stacked`, the index is the first dimension of all,
    else it is part of the rows. `biased` as in `Entry`: the bias has the same rows.
    """

    theirs: str
    ours: tuple[tuple[str, str], ...]
    groups: str
    inner: str
    stacked: bool = False
    biased: str | None = None


AnyEntry = Entry | Stacked | Rows

#: Entries of a kind of block, its norm included, by the symbol of layer patterns.
Blocks = Mapping[str, tuple[AnyEntry, ...]]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One kind of model of `transformers`.

    Args:
        model_type, class_name: as config.json has them.
        blocks: what it is made of, as the hub's files have it.
        fused: of those whose experts are one tensor a layer in files of models as they are in
            memory, the entries there.
        ends: embedding, final norm and head.
        blocks_per_layer: two where a Hugging Face layer is a mixer and what follows it.
        has_query_key_norms: whether queries and keys are normalised per head.
        further: entries of a layer of further prediction in addition to its blocks.
        fields: of config.json that it has and most have not.
        defaults: of fields that are absent.
        other_prefix: what names start by in files of models as they are in memory, in place of
            what the hub's start by: (the hub's, the other).
        left_out: what names of tensors start by that have no place here and are passed over.
    """

    model_type: str
    class_name: str
    blocks: Blocks
    fused: Blocks = field(default_factory=dict)
    ends: tuple[Entry, Entry, Entry]
    blocks_per_layer: int = 2
    has_query_key_norms: bool = False
    further: tuple[AnyEntry, ...] = ()
    fields: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_prefix: tuple[str, str] | None = None
    left_out: str | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether it may have recurrent mixers."""
        return any(symbol in self.blocks for symbol in RECURRENT)


#: Names of a layer and of an expert.
LAYER, EXPERT = "model.layers.{layer}", "experts.{{expert}}"

EMBEDDING = Entry("model.embed_tokens.weight", "embedding.weight", "Vh")
FINAL_NORM = Entry("model.norm.weight", "decoder.final_norm.weight", "h")
HEAD = Entry("lm_head.weight", "head.weight", "Vh")
ENDS = (EMBEDDING, FINAL_NORM, HEAD)

#: The norms of a layer's first and second block, and what follows the second without experts.
MIXER_NORM = Entry(f"{LAYER}.input_layernorm.weight", "{block}.norm.weight", "h")
FFN_NORM = Entry(f"{LAYER}.post_attention_layernorm.weight", "{block}.norm.weight", "h")
MLP = (
    FFN_NORM,
    Entry(f"{LAYER}.mlp.gate_proj.weight", "{block}.mlp.gate.weight", "fh", "mlp_bias"),
    Entry(f"{LAYER}.mlp.up_proj.weight", "{block}.mlp.up.weight", "fh", "mlp_bias"),
    Entry(f"{LAYER}.mlp.down_proj.weight", "{block}.mlp.down.weight", "hf", "mlp_bias"),
)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERT_BIAS = Entry(
    f"{LAYER}.mlp.gate.e_score_correction_bias", "{block}.moe.router.expert_bias", "E", fp32=True
)
_EXPERTS = "{block}.moe.experts"


def attention_entries(
    inside: str, *, names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
) -> tuple[Entry, ...]:
    """Return the entries of attention: as many of query, key, value and output as have a name."""
    biases = ("attention_bias",) * 3 + ("attention_out_bias",)
    ours = (("query", "nh"), ("key", "gh"), ("value", "gh"), ("output", "hn"))
    return tuple(
        Entry(f"{inside}.{theirs}.weight", f"{{block}}.attention.{name}.weight", shape, biased)
        for theirs, (name, shape), biased in zip(
            names, ours[-len(names) :], biases[-len(names) :], strict=True
        )
    )


def gated_shared_expert(inside: str) -> tuple[Entry, ...]:
    """Return the entries of an expert of all tokens whose output a sigmoid gate multiplies."""
    return (
        *shared_expert(inside),
        Entry(f"{inside}_gate.weight", "{block}.moe.shared_gate.weight", "1h"),
    )


QUERY_KEY_NORMS = (
    Entry(f"{LAYER}.self_attn.q_norm.weight", "{block}.attention.query_norm.weight", "d"),
    Entry(f"{LAYER}.self_attn.k_norm.weight", "{block}.attention.key_norm.weight", "d"),
)


def shared_expert(inside: str, names: tuple[str, ...] = PROJECTIONS) -> tuple[Entry, ...]:
    """Return the entries of an expert of all tokens: of gate, up and down, or the last two."""
    ours = (("gate", "sh"), ("up", "sh"), ("down", "hs"))
    return tuple(
        Entry(f"{inside}.{theirs}.weight", f"{{block}}.moe.shared.{name}.weight", shape)
        for theirs, (name, shape) in zip(names, ours[-len(names) :], strict=True)
    )


def experts(place: str, names: tuple[str, str, str], *more: AnyEntry) -> tuple[AnyEntry, ...]:
    """Return the entries of a mixture of experts of one tensor each.

    Args:
        place: inside a layer.
        names: of gate, up and down.
        more: entries in addition to router and experts.
    """
    gate, up, down = (f"{LAYER}.{place}.{EXPERT}.{name}.weight" for name in names)
    return (
        FFN_NORM,
        Entry(f"{LAYER}.{place}.gate.weight", "{block}.moe.router.weight", "Eh"),
        Stacked(gate, f"{_EXPERTS}.gate.weight", "eh"),
        Stacked(up, f"{_EXPERTS}.up.weight", "eh"),
        Stacked(down, f"{_EXPERTS}.down.weight", "he"),
        *more,
    )


def fused_experts(*more: AnyEntry) -> tuple[AnyEntry, ...]:
    """Return the entries of a mixture of experts of two tensors in all, as in memory.

    Args:
        more: entries in addition to router and experts.
    """
    inside = f"{LAYER}.mlp"
    return (
        FFN_NORM,
        Entry(f"{inside}.gate.weight", "{block}.moe.router.weight", "Eh"),
        Rows(
            f"{inside}.experts.gate_up_proj",
            ((f"{_EXPERTS}.gate.weight", "e"), (f"{_EXPERTS}.up.weight", "e")),
            groups="E",
            inner="h",
            stacked=True,
        ),
        Rows(
            f"{inside}.experts.down_proj",
            ((f"{_EXPERTS}.down.weight", "h"),),
            groups="E",
            inner="e",
            stacked=True,
        ),
        *more,
    )

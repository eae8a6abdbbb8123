# SPDX-License-Identifier: Apache-2.0
"""Entries of mapping tables, and the entries that several architectures share.

Query, key, value, gate and up projections are separate logical weights here, so most entries are
two names and a shape. The experts of a layer are one weight here and one tensor each in Hugging
Face; some tensors of latent attention and of recurrent mixers are several weights here. Every entry
is used in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.core.models.layer_pattern import RECURRENT


class Entry(NamedTuple):
    """A weight, and its bias if it has one.

    Names contain the placeholder `{layer}` (Hugging Face's layer index), `{block}` (name of our
    block) or `{depth}` (index of the MTP layer). `shape` has one letter per dimension, see
    `tensor_map.sizes_of`. `biased` is the field of config.json that gives the weight a bias, `when`
    a feature that the model must have, see `tensor_map.features_of`. A tensor with `fp32` is stored
    in fp32 on both sides; with `keep_dtype` it keeps its dtype. Neither is converted to the dtype
    of the weights.
    """

    hf_name: str
    mcore_name: str
    shape: str
    biased: str | None = None
    when: str | None = None
    fp32: bool = False
    keep_dtype: bool = False


class ExpertTensors(NamedTuple):
    """One Hugging Face tensor per expert, `{expert}`: slices of our weight [experts, *shape]."""

    hf_name: str
    mcore_name: str
    shape: str


class FusedWeight(NamedTuple):
    """A Hugging Face tensor that interleaves the rows of several of our weights.

    For each of `groups` it contains the rows of each of `mcore_names`, pairs of a name and the
    letter of its number of rows. `inner` has one letter per trailing dimension. If `stacked`, the
    group is the leading dimension of the tensor and of our weights, otherwise groups follow one
    another along the rows. `biased` is as in `Entry`: the bias has the same rows.
    """

    hf_name: str
    mcore_names: tuple[tuple[str, str], ...]
    groups: str
    inner: str
    stacked: bool = False
    biased: str | None = None


AnyEntry = Entry | ExpertTensors | FusedWeight

#: Entries of each kind of block, its norm included, by its symbol in layer patterns.
Blocks = Mapping[str, tuple[AnyEntry, ...]]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model class of `transformers`.

    Args:
        model_type, class_name: `model_type` and `architectures` in config.json.
        blocks: entries of each kind of block, as published on the hub.
        fused: entries of blocks whose experts are fused into one tensor per layer in files that
            `save_pretrained` writes without converting them back.
        ends: embedding, final norm and head.
        blocks_per_layer: 2 if a Hugging Face layer is a mixer followed by an MLP or experts.
        has_query_key_norms: whether queries and keys are normalised per head.
        mtp_entries: entries of an MTP layer in addition to its blocks.
        fields: fields of config.json that this class reads and most others do not.
        defaults: values of absent fields.
        other_prefix: (prefix on the hub, prefix in files that `save_pretrained` writes without
            converting names back).
        skipped_prefix: prefix of tensors that the model does not use.
    """

    model_type: str
    class_name: str
    blocks: Blocks
    fused: Blocks = field(default_factory=dict)
    ends: tuple[Entry, Entry, Entry]
    blocks_per_layer: int = 2
    has_query_key_norms: bool = False
    mtp_entries: tuple[AnyEntry, ...] = ()
    fields: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_prefix: tuple[str, str] | None = None
    skipped_prefix: str | None = None

    @property
    def classifier_class(self) -> str | None:
        """The class with a classification head; None if `transformers` has none."""
        if self.blocks_per_layer == 1:  # Mamba-2 and Nemotron-H
            return None
        return self.class_name.replace("ForCausalLM", "ForSequenceClassification")

    @property
    def is_hybrid(self) -> bool:
        """Whether models of this class may have recurrent mixers."""
        return any(symbol in self.blocks for symbol in RECURRENT)


#: Prefixes of a layer's and of an expert's tensors.
LAYER, EXPERT = "model.layers.{layer}", "experts.{{expert}}"

EMBEDDING = Entry("model.embed_tokens.weight", "embedding.weight", "Vh")
FINAL_NORM = Entry("model.norm.weight", "decoder.final_norm.weight", "h")
HEAD = Entry("lm_head.weight", "head.weight", "Vh")
ENDS = (EMBEDDING, FINAL_NORM, HEAD)
#: The head of a class `...ForSequenceClassification`, in place of HEAD.
CLASSIFIER = Entry("score.weight", "score.weight", "Lh")

#: Norms of a layer's mixer and of its MLP or experts, and the entries of an MLP.
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
    """Return the entries of attention. Fewer than four names are the last of q, k, v, o."""
    biases = ("attention_bias",) * 3 + ("attention_out_bias",)
    mcore_shapes = (("query", "nh"), ("key", "gh"), ("value", "gh"), ("output", "hn"))
    return tuple(
        Entry(f"{inside}.{hf_name}.weight", f"{{block}}.attention.{name}.weight", shape, biased)
        for hf_name, (name, shape), biased in zip(
            names, mcore_shapes[-len(names) :], biases[-len(names) :], strict=True
        )
    )


def gated_shared_expert(inside: str) -> tuple[Entry, ...]:
    """Return the entries of a shared expert whose output is multiplied by a sigmoid gate."""
    return (
        *shared_expert(inside),
        Entry(f"{inside}_gate.weight", "{block}.moe.shared_gate.weight", "1h"),
    )


QUERY_KEY_NORMS = (
    Entry(f"{LAYER}.self_attn.q_norm.weight", "{block}.attention.query_norm.weight", "d"),
    Entry(f"{LAYER}.self_attn.k_norm.weight", "{block}.attention.key_norm.weight", "d"),
)


def shared_expert(inside: str, names: tuple[str, ...] = PROJECTIONS) -> tuple[Entry, ...]:
    """Return the entries of a shared expert: gate, up and down, or the last two."""
    mcore_shapes = (("gate", "sh"), ("up", "sh"), ("down", "hs"))
    return tuple(
        Entry(f"{inside}.{hf_name}.weight", f"{{block}}.moe.shared.{name}.weight", shape)
        for hf_name, (name, shape) in zip(names, mcore_shapes[-len(names) :], strict=True)
    )


def experts(
    module: str, names: tuple[str, str, str], *further_entries: AnyEntry
) -> tuple[AnyEntry, ...]:
    """Return the entries of a mixture of experts with one tensor per expert and projection.

    Args:
        module: name of the module in a layer.
        names: names of the gate, up and down projections.
        further_entries: entries in addition to router and experts.
    """
    gate, up, down = (f"{LAYER}.{module}.{EXPERT}.{name}.weight" for name in names)
    return (
        FFN_NORM,
        Entry(f"{LAYER}.{module}.gate.weight", "{block}.moe.router.weight", "Eh"),
        ExpertTensors(gate, f"{_EXPERTS}.gate.weight", "eh"),
        ExpertTensors(up, f"{_EXPERTS}.up.weight", "eh"),
        ExpertTensors(down, f"{_EXPERTS}.down.weight", "he"),
        *further_entries,
    )


def fused_experts(*further_entries: AnyEntry) -> tuple[AnyEntry, ...]:
    """Return the entries of a mixture of experts that is fused into two tensors per layer.

    Args:
        further_entries: entries in addition to router and experts.
    """
    inside = f"{LAYER}.mlp"
    return (
        FFN_NORM,
        Entry(f"{inside}.gate.weight", "{block}.moe.router.weight", "Eh"),
        FusedWeight(
            f"{inside}.experts.gate_up_proj",
            ((f"{_EXPERTS}.gate.weight", "e"), (f"{_EXPERTS}.up.weight", "e")),
            groups="E",
            inner="h",
            stacked=True,
        ),
        FusedWeight(
            f"{inside}.experts.down_proj",
            ((f"{_EXPERTS}.down.weight", "h"),),
            groups="E",
            inner="e",
            stacked=True,
        ),
        *further_entries,
    )

# SPDX-License-Identifier: Apache-2.0
"""Entries of mapping tables, and the entries that several architectures share.

Query, key, value, gate and up projections are separate logical weights here, so most entries are
two names and a shape. The experts of a layer are one weight here and one tensor each in Hugging
Face; some tensors of latent attention and of recurrent mixers are several weights here. Every entry
is used in both directions.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A weight, and its bias if it has one.

    Names contain the placeholder `{layer}` (Hugging Face's layer index), `{block}` (name of our
    block) or `{depth}` (index of the MTP layer). `shape` has one letter per dimension, see
    `tensor_map.sizes_of`. `biased` is the field of config.json that gives the weight a bias, `when`
    a feature that the model must have, see `tensor_map.features_of`. A tensor with `fp32` is stored
    in fp32 on both sides; with `keep_dtype` it keeps its dtype. Neither is converted to the dtype
    of the weights. `hf_shape` is the shape in Hugging Face if it has leading dimensions of size 1.
    Files store a weight that is `transposed` with its dimensions swapped.
    """

    hf_name: str
    mcore_name: str
    shape: str
    biased: str | None = None
    when: str | None = None
    fp32: bool = False
    keep_dtype: bool = False
    hf_shape: str | None = None
    transposed: bool = False


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
    another along the rows. `biased` is as in `Entry`: the bias has the same rows. Files store a
    tensor that is `transposed` with its last two dimensions swapped, and an `interleaved` tensor
    with the rows of all weights interleaved instead of one weight after the other. `when` is as in
    `Entry`.
    """

    hf_name: str
    mcore_names: tuple[tuple[str, str], ...]
    groups: str
    inner: str
    stacked: bool = False
    biased: str | None = None
    transposed: bool = False
    interleaved: bool = False
    when: str | None = None


AnyEntry = Entry | ExpertTensors | FusedWeight

#: Prefixes of a layer's and of an expert's tensors.
LAYER, EXPERT = "model.layers.{layer}", "experts.{{expert}}"

EMBEDDING = Entry("model.embed_tokens.weight", "embedding.weight", "Vh")
FINAL_NORM = Entry("model.norm.weight", "decoder.final_norm.weight", "h", "norm_bias")
HEAD = Entry("lm_head.weight", "head.weight", "Vh")
ENDS = (EMBEDDING, FINAL_NORM, HEAD)
#: The head of a class `...ForSequenceClassification`, in place of HEAD.
CLASSIFIER = Entry("score.weight", "score.weight", "Lh")

#: Norms of a layer's mixer and of its MLP or experts, and the entries of an MLP.
MIXER_NORM = Entry(f"{LAYER}.input_layernorm.weight", "{block}.norm.weight", "h", "norm_bias")
FFN_NORM = Entry(
    f"{LAYER}.post_attention_layernorm.weight", "{block}.norm.weight", "h", "norm_bias"
)
MLP_PROJECTIONS = (
    Entry(f"{LAYER}.mlp.gate_proj.weight", "{block}.mlp.gate.weight", "fh", "mlp_bias"),
    Entry(f"{LAYER}.mlp.up_proj.weight", "{block}.mlp.up.weight", "fh", "mlp_bias"),
    Entry(f"{LAYER}.mlp.down_proj.weight", "{block}.mlp.down.weight", "hf", "mlp_bias"),
)
MLP = (FFN_NORM, *MLP_PROJECTIONS)
#: An MLP whose gate and up projections are one tensor.
GATE_UP_MLP = (
    FFN_NORM,
    FusedWeight(
        f"{LAYER}.mlp.gate_up_proj.weight",
        (("{block}.mlp.gate.weight", "f"), ("{block}.mlp.up.weight", "f")),
        groups="1",
        inner="h",
    ),
    Entry(f"{LAYER}.mlp.down_proj.weight", "{block}.mlp.down.weight", "hf"),
)


def output_norm(hf_name: str) -> Entry:
    """Return the entry of the norm of a block's output."""
    return Entry(f"{LAYER}.{hf_name}.weight", "{block}.post_norm.weight", "h", "norm_bias")


def plain_mlp(up: str = "up_proj", down: str = "down_proj") -> tuple[Entry, ...]:
    """Return the entries of an MLP without a gate, from the names of its projections."""
    return (
        FFN_NORM,
        Entry(f"{LAYER}.mlp.{up}.weight", "{block}.mlp.up.weight", "fh", "mlp_bias"),
        Entry(f"{LAYER}.mlp.{down}.weight", "{block}.mlp.down.weight", "hf", "mlp_bias"),
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


def fused_weights(inside: str, *weights: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (name, letter of the number of rows) of each of our weights in a fused tensor."""
    return tuple((f"{{block}}.{inside}.{name}.weight", letter) for name, letter in weights)


def gated_shared_expert(inside: str) -> tuple[Entry, ...]:
    """Return the entries of a shared expert whose output is multiplied by a sigmoid gate."""
    return (
        *shared_expert(inside),
        Entry(f"{inside}_gate.weight", "{block}.moe.shared_gate.weight", "1h"),
    )


def query_key_norms(
    query: str = "q_norm", key: str = "k_norm", *, sizes: tuple[str, str] = ("d", "d")
) -> tuple[Entry, ...]:
    """Return the entries of the norms of queries and keys, for models that have them.

    Args:
        query, key: names of the norms.
        sizes: letters of their sizes: channels of a head, or of all heads.
    """
    return tuple(
        Entry(
            f"{LAYER}.self_attn.{hf_name}.weight",
            f"{{block}}.attention.{mcore_name}.weight",
            size,
            "norm_bias",
            when="query_key_norms",
        )
        for hf_name, mcore_name, size in (
            (query, "query_norm", sizes[0]),
            (key, "key_norm", sizes[1]),
        )
    )


QUERY_KEY_NORMS = query_key_norms()


def shared_expert(inside: str, names: tuple[str, ...] = PROJECTIONS) -> tuple[Entry, ...]:
    """Return the entries of a shared expert: gate, up and down, or the last two."""
    mcore_shapes = (("gate", "sh"), ("up", "sh"), ("down", "hs"))
    return tuple(
        Entry(f"{inside}.{hf_name}.weight", f"{{block}}.moe.shared.{name}.weight", shape)
        for hf_name, (name, shape) in zip(names, mcore_shapes[-len(names) :], strict=True)
    )


def experts(
    module: str, names: tuple[str, str, str], *further_entries: AnyEntry, router: str = "gate"
) -> tuple[AnyEntry, ...]:
    """Return the entries of a mixture of experts with one tensor per expert and projection.

    Args:
        module: name of the module in a layer.
        names: names of the gate, up and down projections.
        further_entries: entries in addition to router and experts.
        router: name of the router.
    """
    gate, up, down = (f"{LAYER}.{module}.{EXPERT}.{name}.weight" for name in names)
    return (
        FFN_NORM,
        Entry(f"{LAYER}.{module}.{router}.weight", "{block}.moe.router.weight", "Eh"),
        ExpertTensors(gate, f"{_EXPERTS}.gate.weight", "eh"),
        ExpertTensors(up, f"{_EXPERTS}.up.weight", "eh"),
        ExpertTensors(down, f"{_EXPERTS}.down.weight", "he"),
        *further_entries,
    )


def fused_experts(*further_entries: AnyEntry, module: str = "mlp") -> tuple[AnyEntry, ...]:
    """Return the entries of a mixture of experts that is fused into two tensors per layer.

    Args:
        further_entries: entries in addition to router and experts.
        module: name of the module in a layer.
    """
    inside = f"{LAYER}.{module}"
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


SELF_ATTENTION = attention_entries(f"{LAYER}.self_attn")
ATTENTION_ENTRIES = (MIXER_NORM, *SELF_ATTENTION)
NORMED_ATTENTION = (*ATTENTION_ENTRIES, *QUERY_KEY_NORMS)
LATENT_ATTENTION: tuple[AnyEntry, ...] = (
    MIXER_NORM,
    *(
        Entry(
            f"{LAYER}.self_attn.{hf_name}.weight",
            f"{{block}}.attention.{mcore_name}.weight",
            shape,
            when=when,
        )
        for hf_name, mcore_name, shape, when in (
            ("q_proj", "query", "nh", "direct_query"),
            ("q_a_proj", "query_down", "qh", "low_rank_query"),
            ("q_a_layernorm", "query_norm", "q", "low_rank_query"),
            ("q_b_proj", "query_up", "nq", "low_rank_query"),
            ("kv_a_layernorm", "kv_norm", "k", None),
            ("o_proj", "output", "ho", None),
        )
    ),
    FusedWeight(
        f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight",
        (("{block}.attention.kv_down.weight", "k"), ("{block}.attention.key_rope.weight", "r")),
        groups="1",
        inner="h",
    ),
    FusedWeight(
        f"{LAYER}.self_attn.kv_b_proj.weight",
        (("{block}.attention.key_up.weight", "p"), ("{block}.attention.value_up.weight", "v")),
        groups="a",
        inner="k",
    ),
)

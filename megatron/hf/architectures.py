# SPDX-License-Identifier: Apache-2.0
"""The mapping tables: one per architecture, from its names of weights to ours.

Every weight of theirs is one of ours, element for element: queries, keys, values, gate and up are
logical weights of their own here too, and rotary features are paired by halves on both sides. So
an entry is two names and a shape, read in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from megatron.core.models.gpt import GPTConfig


class Entry(NamedTuple):
    """A module with a weight, and perhaps a bias.

    `theirs` and `ours` are names without `.weight`, with `{layer}`, or `{attention}` and `{mlp}`,
    which are the numbers of the layer's two blocks. `shape` has one letter a dimension: V
    vocabulary, h hidden, n query features, g key features, d features of a head, f inner features.
    `biased` names the field of config.json that gives it a bias.
    """

    theirs: str
    ours: str
    shape: str
    biased: str | None = None


class MappedTensor(NamedTuple):
    """A tensor by both names."""

    theirs: str
    ours: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One kind of model of `transformers`.

    Args:
        model_type, class_name: as config.json has them.
        entries: its weights; `HEAD` is left out of a tied model.
        has_mlp_bias: whether config.json may have mlp_bias.
        default_head_dim: features per head where config.json has none; None is hidden / heads.
    """

    model_type: str
    class_name: str
    entries: tuple[Entry, ...]
    has_mlp_bias: bool
    default_head_dim: int | None


HEAD = Entry("lm_head", "head", "Vh")
_ATTENTION, _MLP = "decoder.blocks.{attention}", "decoder.blocks.{mlp}"
_LAYER = "model.layers.{layer}"

_LLAMA = (
    Entry("model.embed_tokens", "embedding", "Vh"),
    Entry(f"{_LAYER}.input_layernorm", f"{_ATTENTION}.norm", "h"),
    Entry(f"{_LAYER}.self_attn.q_proj", f"{_ATTENTION}.attention.query", "nh", "attention_bias"),
    Entry(f"{_LAYER}.self_attn.k_proj", f"{_ATTENTION}.attention.key", "gh", "attention_bias"),
    Entry(f"{_LAYER}.self_attn.v_proj", f"{_ATTENTION}.attention.value", "gh", "attention_bias"),
    Entry(f"{_LAYER}.self_attn.o_proj", f"{_ATTENTION}.attention.output", "hn", "attention_bias"),
    Entry(f"{_LAYER}.post_attention_layernorm", f"{_MLP}.norm", "h"),
    Entry(f"{_LAYER}.mlp.gate_proj", f"{_MLP}.mlp.gate", "fh", "mlp_bias"),
    Entry(f"{_LAYER}.mlp.up_proj", f"{_MLP}.mlp.up", "fh", "mlp_bias"),
    Entry(f"{_LAYER}.mlp.down_proj", f"{_MLP}.mlp.down", "hf", "mlp_bias"),
    Entry("model.norm", "decoder.final_norm", "h"),
    HEAD,
)
_QUERY_KEY_NORMS = (
    Entry(f"{_LAYER}.self_attn.q_norm", f"{_ATTENTION}.attention.query_norm", "d"),
    Entry(f"{_LAYER}.self_attn.k_norm", f"{_ATTENTION}.attention.key_norm", "d"),
)

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    entries=_LLAMA,
    has_mlp_bias=True,
    default_head_dim=None,
)
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    entries=_LLAMA + _QUERY_KEY_NORMS,
    has_mlp_bias=False,
    default_head_dim=128,
)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {kind.model_type: kind for kind in (LLAMA, QWEN3)}
)


def mapped_tensors(kind: Architecture, config: GPTConfig) -> Iterator[MappedTensor]:
    """Yield every tensor of a model, its layers in order, by both names."""
    attention = config.attention
    sizes = {
        "V": config.vocab_size,
        "h": config.hidden_size,
        "n": attention.num_attention_heads * attention.kv_channels,
        "g": attention.num_query_groups * attention.kv_channels,
        "d": attention.kv_channels,
        "f": config.mlp.ffn_hidden_size,
    }
    biases = {"attention_bias": attention.qkv_bias, "mlp_bias": config.mlp.bias, None: False}

    def both(entry: Entry, **numbers: int) -> Iterator[MappedTensor]:
        theirs, ours = entry.theirs.format(**numbers), entry.ours.format(**numbers)
        shape = tuple(sizes[letter] for letter in entry.shape)
        yield MappedTensor(f"{theirs}.weight", f"{ours}.weight", shape)
        if biases[entry.biased]:
            yield MappedTensor(f"{theirs}.bias", f"{ours}.bias", shape[:1])

    for entry in kind.entries:
        if "{layer}" not in entry.theirs and not (config.tied and entry is HEAD):
            yield from both(entry)
    for layer in range(config.num_layers):
        for entry in kind.entries:
            if "{layer}" in entry.theirs:
                yield from both(entry, layer=layer, attention=2 * layer, mlp=2 * layer + 1)

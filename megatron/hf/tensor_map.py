# SPDX-License-Identifier: Apache-2.0
"""A mapping table and a configuration to every tensor of the model, by both names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.core.models.gpt import GPTConfig
from megatron.core.models.pattern import EXPERTS
from megatron.core.transformer import LatentAttentionConfig
from megatron.hf.architectures import (
    EMBEDDING,
    FINAL_NORM,
    FURTHER_COPIES,
    HEAD,
    MLP,
    NORMS,
    AnyEntry,
    Architecture,
    Entry,
    Rows,
    Stacked,
)
from megatron.hf.parts import Part, TensorMap


def tensor_map(kind: Architecture, config: GPTConfig, *, fused: bool = False) -> TensorMap:
    """Return every tensor of a model, its layers in order.

    Args:
        kind: the table.
        config: the model.
        fused: all experts of a layer are one tensor there, not one each.
    """
    found = _Mapping(sizes_of(config), features_of(config))
    found.add_all((EMBEDDING, FINAL_NORM) if config.tied else (EMBEDDING, FINAL_NORM, HEAD), {})
    for layer, ffn in enumerate(config.ffn_pattern):
        blocks = {"mixer": f"decoder.blocks.{2 * layer}", "ffn": f"decoder.blocks.{2 * layer + 1}"}
        found.add_all(_layer(kind, ffn, fused=fused), {"layer": str(layer), **blocks})
    for depth in range(config.mtp_num_layers if kind.further else 0):
        layer = config.num_layers + depth
        inside = f"mtp.{depth}.decoder.blocks"
        words = {"layer": str(layer), "depth": str(depth)}
        words |= {"mixer": f"{inside}.0", "ffn": f"{inside}.1"}
        found.add_all(_layer(kind, config.ffn_pattern[-1], fused=fused), words)
        found.add_all(kind.further, words)
        for theirs, source in FURTHER_COPIES:
            ours = EMBEDDING if config.tied else source
            found.map.add_copy(theirs.format(**words), ours.ours)
    return found.map


def holds_further(names: Iterable[str], config: GPTConfig) -> bool:
    """Tell whether files with tensors of these names hold layers of further prediction."""
    prefix = f"model.layers.{config.num_layers}."
    return any(name.startswith(prefix) for name in names)


def holds_fused(names: Iterable[str]) -> bool:
    """Tell whether files with tensors of these names have all experts of a layer in one."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def _layer(kind: Architecture, ffn: str, *, fused: bool) -> tuple[AnyEntry, ...]:
    """Return the entries of a layer whose second block is of a kind of the layer pattern."""
    if ffn != EXPERTS:
        return (*kind.attention, *NORMS, *MLP)
    assert kind.experts is not None, "a model with experts is of an architecture with experts"
    return (*kind.attention, *NORMS, *(kind.experts.fused if fused else kind.experts.single))


def sizes_of(config: GPTConfig) -> Mapping[str, int]:
    """Return the size that each letter of the tables stands for.

    V vocabulary, h hidden, H twice that; a heads, n features of all queries, g of all keys, d of a
    head, o of what all heads put out; f inner features of an MLP, e of an expert, s of the shared
    expert, E experts. Latent attention: q and k features of the low-rank vectors of queries, and of
    keys and values, r rotating features, p features of a head's key that do not rotate, v of its
    value.
    """
    attention, moe = config.attention, config.moe
    heads = attention.num_attention_heads
    sizes = {"1": 1, "V": config.vocab_size, "h": config.hidden_size, "H": 2 * config.hidden_size}
    sizes |= {"a": heads, "f": config.mlp.ffn_hidden_size}
    if isinstance(attention, LatentAttentionConfig):
        sizes |= {"q": attention.q_lora_rank or 0, "k": attention.kv_lora_rank}
        sizes |= {"r": attention.rope_channels, "p": attention.nope_channels}
        sizes |= {"v": attention.value_channels, "o": heads * attention.value_channels}
        sizes["n"] = heads * (attention.nope_channels + attention.rope_channels)
    else:
        sizes |= {"d": attention.kv_channels, "n": heads * attention.kv_channels}
        sizes["g"] = attention.num_query_groups * attention.kv_channels
    if moe is not None:
        sizes |= {"E": moe.num_experts, "e": moe.ffn_hidden_size}
        sizes["s"] = moe.shared_ffn_hidden_size or 0
    return sizes


def features_of(config: GPTConfig) -> frozenset[str]:
    """Return what a model has, of what `biased` and `when` of the tables name."""
    attention = config.attention
    if isinstance(attention, LatentAttentionConfig):
        direct = attention.q_lora_rank is None
        return frozenset({"direct_query" if direct else "low_rank_query"})
    found = {"attention_bias": attention.qkv_bias, "mlp_bias": config.mlp.bias}
    return frozenset(name for name, has in found.items() if has)


class _Mapping:
    """A map that entries are added to."""

    def __init__(self, sizes: Mapping[str, int], features: frozenset[str]) -> None:
        self.map = TensorMap()
        self._sizes, self._features = sizes, features

    def add_all(self, entries: Iterable[AnyEntry], words: Mapping[str, str]) -> None:
        """Add entries whose names have these words."""
        for entry in entries:
            if isinstance(entry, Stacked):
                self._add_experts(entry, words)
            elif isinstance(entry, Rows):
                self._add_rows(entry, words)
            elif entry.when is None or entry.when in self._features:
                self._add_plain(entry, words)

    def _add_plain(self, entry: Entry, words: Mapping[str, str]) -> None:
        theirs, ours = entry.theirs.format(**words), entry.ours.format(**words)
        shape = self._shape(entry.shape)
        self._add(Part(theirs, _zeros(shape), ours, _zeros(shape), shape), shape, shape, entry.fp32)
        if entry.biased in self._features:
            bias = (_bias(theirs), (0,), _bias(ours), (0,), shape[:1])
            self._add(Part(*bias), shape[:1], shape[:1])

    def _add_experts(self, entry: Stacked, words: Mapping[str, str]) -> None:
        ours = entry.ours.format(**words)
        pattern = entry.theirs.format(**words)
        shape, count = self._shape(entry.shape), self._sizes["E"]
        for expert in range(count):
            theirs = pattern.format(expert=expert)
            part = Part(theirs, _zeros(shape), ours, (expert, *_zeros(shape)), shape)
            self._add(part, shape, (count, *shape))

    def _add_rows(self, entry: Rows, words: Mapping[str, str]) -> None:
        theirs = entry.theirs.format(**words)
        groups, inner = self._sizes[entry.groups], self._sizes[entry.inner]
        runs = [(name.format(**words), self._sizes[letter]) for name, letter in entry.ours]
        whole = sum(rows for _, rows in runs)

        def shape(rows: int) -> tuple[int, ...]:
            return (groups, rows, inner) if entry.stacked else (groups * rows, inner)

        def offsets(group: int, rows: int, row: int) -> tuple[int, ...]:
            return (group, row, 0) if entry.stacked else (group * rows + row, 0)

        for group in range(groups):
            row = 0
            for ours, rows in runs:
                place = offsets(group, whole, row)
                part = Part(theirs, place, ours, offsets(group, rows, 0), (rows, inner))
                self._add(part, shape(whole), shape(rows))
                row += rows

    def _add(
        self, part: Part, theirs: tuple[int, ...], ours: tuple[int, ...], fp32: bool = False
    ) -> None:
        self.map.declare((part.theirs, theirs), (part.ours, ours), fp32=fp32)
        self.map.add(part)

    def _shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self._sizes[letter] for letter in letters)


def _zeros(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * len(shape)


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias"

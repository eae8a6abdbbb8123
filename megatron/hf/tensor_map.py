# SPDX-License-Identifier: Apache-2.0
"""A mapping table and a configuration to every tensor of the model, by both names, part by part.

A Hugging Face tensor may be a slice of a tensor here (an expert), or contain several (keys and
values of latent attention). Both are divided into parts: boxes of whole rows, contiguous on both
sides, that together cover each tensor once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.core.boxes import Box, intersect
from megatron.core.models.gpt import GPTConfig
from megatron.core.ssm.config import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import LatentAttentionConfig
from megatron.hf.architectures import FURTHER_COPIES
from megatron.hf.entries import (
    EMBEDDING,
    AnyEntry,
    Architecture,
    Blocks,
    Entry,
    Rows,
    Stacked,
)

#: Parts of all tensors of a model: DeepSeek-V3 has 45,000.
MAX_PARTS = 1 << 19


class Part(NamedTuple):
    """The same elements in a Hugging Face tensor and in one of this project.

    `sizes` are those of the box in the last dimensions of both tensors; before them it has one
    index in either, such as that of an expert.
    """

    theirs: str
    their_offsets: tuple[int, ...]
    ours: str
    our_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def whole(self) -> Box:
        """All of this part, counted from its first element."""
        return Box((0,) * len(self.sizes), self.sizes)

    def in_theirs(self, box: Box) -> Box:
        """Return a box counted from this part's first element as one of the Hugging Face tensor."""
        return _placed(box, self.their_offsets)

    def in_ours(self, box: Box) -> Box:
        """Return a box counted from this part's first element as one of this project's tensor."""
        return _placed(box, self.our_offsets)

    def common(self, ours: Box) -> Box | None:
        """Return this part's share of a box of this project's tensor, from its first element."""
        whole = self.in_ours(self.whole)
        found = intersect(whole, ours)
        if found is None:
            return None
        dims = len(self.our_offsets) - len(self.sizes)
        seen = found.seen_from(self.our_offsets)
        return Box(seen.offsets[dims:], seen.sizes[dims:])


def _placed(box: Box, offsets: tuple[int, ...]) -> Box:
    dims = len(offsets) - len(box.sizes)
    inner = tuple(a + b for a, b in zip(offsets[dims:], box.offsets, strict=True))
    return Box((*offsets[:dims], *inner), ((1,) * dims + box.sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedTensor:
    """A tensor of one side and the parts that cover it, in the order of its elements.

    Args:
        name, shape: of it.
        fp32: it is no weight and is in fp32, whatever weights are converted to.
        kept: it stays in the dtype it has, whatever weights are converted to.
        parts: that cover it.
    """

    name: str
    shape: tuple[int, ...]
    fp32: bool = False
    kept: bool = False
    parts: list[Part] = field(default_factory=list)


class TensorMap:
    """All tensors of a model by both names.

    Args:
        max_tensors: Hugging Face tensors at most, copies not counted; None: any number.

    Attributes:
        theirs, ours: Hugging Face's and this project's tensors, by name. Parts are in the order of
            elements in both.
        copies: Hugging Face tensors that repeat one of this project and that files may omit: name
            and this project's name.
    """

    def __init__(self, max_tensors: int | None = None) -> None:
        self._max_tensors, self._num_parts = max_tensors, 0
        self.theirs: dict[str, MappedTensor] = {}
        self.ours: dict[str, MappedTensor] = {}
        self.copies: dict[str, str] = {}

    def declare(
        self,
        theirs: tuple[str, tuple[int, ...]],
        ours: tuple[str, tuple[int, ...]],
        *,
        fp32: bool,
        kept: bool = False,
    ) -> None:
        """Say name and shape of a tensor on both sides; any number of times.

        Raises:
            ValueError: there are more tensors than `max_tensors`.
        """
        count = len(self.theirs) - len(self.copies)
        full = self._max_tensors is not None and count >= self._max_tensors
        if full and theirs[0] not in self.theirs:
            raise ValueError(f"that has more than {count} tensors")
        for side, (name, shape) in ((self.theirs, theirs), (self.ours, ours)):
            if name not in side:
                side[name] = MappedTensor(name=name, shape=shape, fp32=fp32, kept=kept)

    def add(self, part: Part) -> None:
        """Add the next part of two tensors that have been declared.

        Raises:
            ValueError: there are more parts than any model has.
        """
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ValueError(
                f"that divides its tensors into more than {MAX_PARTS} parts, such as experts or "
                "groups of attention heads"
            )
        self.theirs[part.theirs].parts.append(part)
        self.ours[part.ours].parts.append(part)

    def add_copy(self, theirs: str, ours: str) -> None:
        """Add a Hugging Face tensor that repeats one of this project, whose parts are all there."""
        source = self.ours[ours]
        self.copies[theirs] = ours
        zeros = (0,) * len(source.shape)
        self.theirs[theirs] = MappedTensor(
            name=theirs, shape=source.shape, parts=[Part(theirs, zeros, ours, zeros, source.shape)]
        )


def tensor_map(
    kind: Architecture,
    config: GPTConfig,
    *,
    names: Iterable[str] = (),
    max_tensors: int | None = None,
) -> TensorMap:
    """Return every tensor of a model, its layers in order.

    Args:
        kind: the table.
        config: the model.
        names: of the tensors in their files, which show which of their naming schemes is used; none
            for the hub's.
        max_tensors: how many there may be: a configuration from outside may describe any number.

    Raises:
        ValueError: there are more tensors, or more parts of tensors than any model has.
    """
    names = tuple(names)
    prefix = _other_prefix(kind, names)
    found = _Mapping(sizes_of(config), features_of(config), prefix, TensorMap(max_tensors))
    found.add_all(kind.ends[:2] if config.tied else kind.ends, {})
    head = kind.ends[2]
    if config.tied and isinstance(head, Entry) and head.theirs in names:  # as some tools write it
        found.map.add_copy(head.theirs, EMBEDDING.ours)
    blocks = {**kind.blocks, **(kind.fused if holds_fused(names) else {})}
    for block, symbol in enumerate(config.blocks):
        layer = block // kind.blocks_per_layer
        words = {"layer": str(layer), "block": f"decoder.blocks.{block}"}
        found.add_all(_entries(kind, blocks, symbol), words)
    for depth in range(config.mtp_num_layers if kind.further else 0):
        words = {"layer": str(config.num_layers + depth), "depth": str(depth)}
        for block, symbol in enumerate(config.depth_blocks):
            inside = {"block": f"mtp.{depth}.decoder.blocks.{block}"}
            found.add_all(_entries(kind, blocks, symbol), words | inside)
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
    return any(name.endswith(".experts.down_proj") for name in names)


def _other_prefix(kind: Architecture, names: Iterable[str]) -> tuple[str, str] | None:
    """Return what names start by and what they do so instead in files with these, if they do."""
    if kind.other_prefix is None:
        return None
    _, other = kind.other_prefix
    return kind.other_prefix if any(name.startswith(other) for name in names) else None


def _entries(kind: Architecture, blocks: Blocks, symbol: str) -> tuple[AnyEntry, ...]:
    assert symbol in blocks, f"a model with {symbol!r} is of an architecture that has it"
    return blocks[symbol]


def sizes_of(config: GPTConfig) -> Mapping[str, int]:
    """Return the size that each letter of the tables stands for.

    V vocabulary, h hidden, H twice that; a heads, n features of all queries, g of all keys, d of a
    head, o of what all heads put out; f inner features of an MLP, e of an expert, s of the shared
    expert, E experts. Latent attention: q and k features of the low-rank vectors of queries, and of
    keys and values, r rotating features, p features of a head's key that do not rotate, v of its
    value. Recurrent mixers: see `_delta_net_sizes` and `_mamba_sizes`.
    """
    attention, moe = config.attention, config.moe
    sizes = {"1": 1, "V": config.vocab_size, "h": config.hidden_size, "H": 2 * config.hidden_size}
    if config.mlp is not None:
        sizes["f"] = config.mlp.ffn_hidden_size
    if isinstance(attention, LatentAttentionConfig):
        heads = attention.num_attention_heads
        sizes |= {"q": attention.q_lora_rank or 0, "k": attention.kv_lora_rank, "a": heads}
        sizes |= {"r": attention.rope_channels, "p": attention.nope_channels}
        sizes |= {"v": attention.value_channels, "o": heads * attention.value_channels}
        sizes["n"] = heads * (attention.nope_channels + attention.rope_channels)
    elif attention is not None:
        heads = attention.num_attention_heads
        sizes |= {"a": heads, "d": attention.kv_channels, "n": heads * attention.kv_channels}
        sizes["g"] = attention.num_query_groups * attention.kv_channels
    if moe is not None:
        sizes |= {"E": moe.num_experts, "e": moe.ffn_hidden_size}
        sizes["s"] = moe.shared_ffn_hidden_size or 0
    if config.delta_net is not None:
        sizes |= _delta_net_sizes(config.delta_net)
    if config.mamba is not None:
        sizes |= _mamba_sizes(config.mamba)
    return sizes


def _delta_net_sizes(delta_net: GatedDeltaNetConfig) -> Mapping[str, int]:
    """Return K key heads of c features, Q in all; U value heads of u features, O in all; x value
    heads of a key head, R of their features; w tokens of the convolution."""
    keys, values = delta_net.num_key_heads, delta_net.num_value_heads
    each, wide = values // keys, delta_net.value_channels
    found = {"K": keys, "c": delta_net.key_channels, "Q": keys * delta_net.key_channels}
    found |= {"U": values, "u": wide, "O": values * wide, "x": each, "R": each * wide}
    return found | {"w": delta_net.conv_width}


def _mamba_sizes(mamba: Mamba2Config) -> Mapping[str, int]:
    """Return N heads, I features of all of them, G of what all groups write and read by, w tokens
    of the convolution."""
    groups = mamba.num_groups * mamba.state_channels
    return {"N": mamba.num_heads, "I": mamba.inner_channels, "G": groups, "w": mamba.conv_width}


def features_of(config: GPTConfig) -> frozenset[str]:
    """Return what a model has, of what `biased` and `when` of the tables name."""
    attention, mamba = config.attention, config.mamba
    if isinstance(attention, LatentAttentionConfig):
        direct = attention.q_lora_rank is None
        return frozenset({"direct_query" if direct else "low_rank_query"})
    found = {
        "attention_bias": attention is not None and attention.qkv_bias,
        "attention_out_bias": attention is not None and attention.output_bias,
        "mlp_bias": config.mlp is not None and config.mlp.bias,
        "use_bias": mamba is not None and mamba.bias,
        "use_conv_bias": mamba is not None and mamba.conv_bias,
    }
    return frozenset(name for name, has in found.items() if has)


class _Mapping:
    """A map that entries are added to."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        features: frozenset[str],
        prefix: tuple[str, str] | None,
        empty: TensorMap,
    ) -> None:
        self.map = empty
        self._sizes, self._features, self._prefix = sizes, features, prefix

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
        theirs, ours = self._theirs(entry.theirs, words), entry.ours.format(**words)
        shape = self._shape(entry.shape)
        stays = {"fp32": entry.fp32, "kept": entry.kept}
        self._add(Part(theirs, _zeros(shape), ours, _zeros(shape), shape), shape, shape, **stays)
        if entry.biased in self._features:
            bias = (_bias(theirs), (0,), _bias(ours), (0,), shape[:1])
            self._add(Part(*bias), shape[:1], shape[:1])

    def _add_experts(self, entry: Stacked, words: Mapping[str, str]) -> None:
        ours = entry.ours.format(**words)
        pattern = self._theirs(entry.theirs, words)
        shape, count = self._shape(entry.shape), self._sizes["E"]
        for expert in range(count):
            theirs = pattern.format(expert=expert)
            part = Part(theirs, _zeros(shape), ours, (expert, *_zeros(shape)), shape)
            self._add(part, shape, (count, *shape))

    def _add_rows(self, entry: Rows, words: Mapping[str, str]) -> None:
        theirs = self._theirs(entry.theirs, words)
        runs = [(name.format(**words), self._sizes[letter]) for name, letter in entry.ours]
        groups = self._sizes[entry.groups]
        self._add_runs(theirs, runs, groups, self._shape(entry.inner), stacked=entry.stacked)
        if entry.biased in self._features:
            biases = [(_bias(name), rows) for name, rows in runs]
            self._add_runs(_bias(theirs), biases, groups, (), stacked=False)

    def _add_runs(
        self,
        theirs: str,
        runs: Sequence[tuple[str, int]],
        groups: int,
        inner: tuple[int, ...],
        *,
        stacked: bool,
    ) -> None:
        whole = sum(rows for _, rows in runs)

        def shape(rows: int) -> tuple[int, ...]:
            return (groups, rows, *inner) if stacked else (groups * rows, *inner)

        def offsets(group: int, rows: int, row: int) -> tuple[int, ...]:
            first = (group, row) if stacked else (group * rows + row,)
            return (*first, *_zeros(inner))

        for group in range(groups):
            row = 0
            for ours, rows in runs:
                place = offsets(group, whole, row)
                part = Part(theirs, place, ours, offsets(group, rows, 0), (rows, *inner))
                self._add(part, shape(whole), shape(rows))
                row += rows

    def _add(
        self, part: Part, theirs: tuple[int, ...], ours: tuple[int, ...], **stays: bool
    ) -> None:
        fp32, kept = stays.get("fp32", False), stays.get("kept", False)
        self.map.declare((part.theirs, theirs), (part.ours, ours), fp32=fp32, kept=kept)
        self.map.add(part)

    def _theirs(self, name: str, words: Mapping[str, str]) -> str:
        """Return a Hugging Face name as the files have it."""
        if self._prefix is not None and name.startswith(self._prefix[0]):
            name = self._prefix[1] + name.removeprefix(self._prefix[0])
        return name.format(**words)

    def _shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self._sizes[letter] for letter in letters)


def _zeros(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * len(shape)


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias"

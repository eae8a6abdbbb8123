# SPDX-License-Identifier: Apache-2.0
"""Map every tensor of a model between Hugging Face's names and ours, slice by slice.

A Hugging Face tensor may be a slice of one of our weights (an expert), or contain several of our
weights (keys and values of latent attention). Both are divided into slices: boxes of whole rows,
contiguous on both sides, that together cover each tensor once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.core.boxes import Box, intersect
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, WINDOW
from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import LatentAttentionConfig
from megatron.hf.architecture import Architecture, Blocks
from megatron.hf.entries import (
    CLASSIFIER,
    EMBEDDING,
    AnyEntry,
    Entry,
    ExpertTensors,
    FusedWeight,
)
from megatron.hf.stored_layout import StoredLayout

#: Upper bound on the slices of all tensors of a model. DeepSeek-V3 has 45,000.
MAX_SLICES = 1 << 19


class TensorSlice(NamedTuple):
    """The same elements in a Hugging Face tensor and in one of our weights.

    `sizes` is the shape of the slice in the trailing dimensions of both tensors. In each leading
    dimension, such as the expert dimension, the slice has one index.
    """

    hf_name: str
    hf_offsets: tuple[int, ...]
    mcore_name: str
    mcore_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def whole(self) -> Box:
        """The whole slice as a box whose origin is its first element."""
        return Box((0,) * len(self.sizes), self.sizes)

    def hf_box(self, box: Box) -> Box:
        """Translate a box relative to this slice into one of the Hugging Face tensor."""
        return _placed(box, self.hf_offsets)

    def mcore_box(self, box: Box) -> Box:
        """Translate a box relative to this slice into one of our weight."""
        return _placed(box, self.mcore_offsets)

    def common(self, mcore_box: Box) -> Box | None:
        """Return the overlap with a box of our weight, relative to this slice; None if empty."""
        overlap = intersect(self.mcore_box(self.whole), mcore_box)
        if overlap is None:
            return None
        dims = len(self.mcore_offsets) - len(self.sizes)
        seen = overlap.seen_from(self.mcore_offsets)
        return Box(seen.offsets[dims:], seen.sizes[dims:])


def _placed(box: Box, offsets: tuple[int, ...]) -> Box:
    dims = len(offsets) - len(box.sizes)
    inner = tuple(a + b for a, b in zip(offsets[dims:], box.offsets, strict=True))
    return Box((*offsets[:dims], *inner), ((1,) * dims + box.sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedTensor:
    """A tensor of either side and the slices that cover it, in the order of its elements.

    Args:
        name, shape: name and shape of the tensor.
        fp32: the tensor is a buffer that is always stored in fp32.
        keep_dtype: the tensor keeps its dtype when weights are converted to another one.
        layout: how files store a Hugging Face tensor; None if as `shape`.
        slices: slices that cover the tensor.
    """

    name: str
    shape: tuple[int, ...]
    fp32: bool = False
    keep_dtype: bool = False
    layout: StoredLayout | None = None
    slices: list[TensorSlice] = field(default_factory=list)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in files."""
        return self.shape if self.layout is None else self.layout.shape(self.shape)


class TensorMap:
    """All tensors of a model, by Hugging Face's names and by ours.

    Args:
        max_tensors: largest number of Hugging Face tensors, copies not counted; None: no limit.

    Attributes:
        hf_tensors, mcore_tensors: Hugging Face's tensors and our weights, by name. Slices are in
            the order of elements in both.
        copies: Hugging Face tensors that duplicate one of our weights and that files may omit, by
            name, with the name of our weight.
    """

    def __init__(self, max_tensors: int | None = None) -> None:
        self._max_tensors, self._num_slices = max_tensors, 0
        self.hf_tensors: dict[str, MappedTensor] = {}
        self.mcore_tensors: dict[str, MappedTensor] = {}
        self.copies: dict[str, str] = {}

    def declare(
        self,
        hf_tensor: tuple[str, tuple[int, ...]],
        mcore_tensor: tuple[str, tuple[int, ...]],
        *,
        fp32: bool,
        keep_dtype: bool = False,
        layout: StoredLayout | None = None,
    ) -> None:
        """Declare a tensor on both sides as (name, shape). Repeated declarations are allowed.

        Args:
            hf_tensor, mcore_tensor: the tensor in Hugging Face and here.
            fp32, keep_dtype, layout: see `MappedTensor`.

        Raises:
            ValueError: there are more tensors than `max_tensors`.
        """
        count = len(self.hf_tensors) - len(self.copies)
        full = self._max_tensors is not None and count >= self._max_tensors
        if full and hf_tensor[0] not in self.hf_tensors:
            raise ValueError(f"config.json describes more than {count} tensors")
        for side, (name, shape), stored in (
            (self.hf_tensors, hf_tensor, layout),
            (self.mcore_tensors, mcore_tensor, None),
        ):
            if name not in side:
                side[name] = MappedTensor(
                    name=name, shape=shape, fp32=fp32, keep_dtype=keep_dtype, layout=stored
                )

    def add(self, tensor_slice: TensorSlice) -> None:
        """Append a slice to the two declared tensors that it connects.

        Raises:
            ValueError: there are more than `MAX_SLICES` slices.
        """
        self._num_slices += 1
        if self._num_slices > MAX_SLICES:
            raise ValueError(
                f"config.json divides its tensors into more than {MAX_SLICES} slices, such as "
                "experts or groups of attention heads"
            )
        self.hf_tensors[tensor_slice.hf_name].slices.append(tensor_slice)
        self.mcore_tensors[tensor_slice.mcore_name].slices.append(tensor_slice)

    def add_copy(self, hf_name: str, mcore_name: str) -> None:
        """Add a Hugging Face tensor that duplicates one of our declared weights."""
        source = self.mcore_tensors[mcore_name]
        self.copies[hf_name] = mcore_name
        zeros = (0,) * len(source.shape)
        self.hf_tensors[hf_name] = MappedTensor(
            name=hf_name,
            shape=source.shape,
            slices=[TensorSlice(hf_name, zeros, mcore_name, zeros, source.shape)],
        )


def tensor_map(
    kind: Architecture,
    config: GPTConfig,
    *,
    names: Iterable[str] = (),
    max_tensors: int | None = None,
) -> TensorMap:
    """Return the map of every tensor of a model, in the order of its layers.

    Args:
        kind: the architecture's mapping table.
        config: the model.
        names: names of the tensors in the files. They show which naming scheme the files use;
            without names, the hub's scheme.
        max_tensors: largest number of tensors: an untrusted config.json may describe any number.

    Raises:
        ValueError: there are more tensors than `max_tensors` or more slices than `MAX_SLICES`.
    """
    names = tuple(names)
    prefix = _other_prefix(kind, names)
    mapping = _Mapping(sizes_of(config), features_of(config), prefix, TensorMap(max_tensors))
    embedding, final_norm, head = kind.ends
    if config.num_labels is not None:
        head = CLASSIFIER
    mapping.add_all((embedding, final_norm) if config.tied else (embedding, final_norm, head), {})
    if kind.positions is not None:
        mapping.add_all((kind.positions,), {})
    if config.tied and head.hf_name in names:  # as some tools write it
        mapping.map.add_copy(head.hf_name, EMBEDDING.mcore_name)
    blocks = {**kind.blocks, **(kind.fused if has_fused_experts(names) else {})}
    for block, symbol in enumerate(config.blocks):
        layer = block // kind.blocks_per_layer
        words = {"layer": str(layer), "block": f"decoder.blocks.{block}"}
        mapping.add_all(_entries(kind, blocks, symbol), words)
    for depth in range(config.mtp_num_layers if kind.mtp_entries else 0):
        words = {"layer": str(config.num_layers + depth), "depth": str(depth)}
        for block, symbol in enumerate(config.mtp_blocks):
            inside = {"block": f"mtp.{depth}.decoder.blocks.{block}"}
            mapping.add_all(_entries(kind, blocks, symbol), words | inside)
        mapping.add_all(kind.mtp_entries, words)
        for hf_name, source in kind.mtp_copies:
            entry = EMBEDDING if config.tied else source
            mapping.map.add_copy(hf_name.format(**words), entry.mcore_name)
    return mapping.map


def has_mtp_layers(names: Iterable[str], config: GPTConfig) -> bool:
    """Return whether files that contain tensors with these names contain MTP layers."""
    prefix = f"model.layers.{config.num_layers}."
    return any(name.startswith(prefix) for name in names)


def has_fused_experts(names: Iterable[str]) -> bool:
    """Return whether files that contain tensors with these names fuse the experts of a layer."""
    return any(name.endswith(".experts.down_proj") for name in names)


def _other_prefix(kind: Architecture, names: Iterable[str]) -> tuple[str, str] | None:
    """Return (hub prefix, prefix in these files) if the files use the other naming scheme."""
    if kind.other_prefix is None:
        return None
    is_used = [any(name.startswith(prefix) for name in names) for prefix in kind.other_prefix]
    return kind.other_prefix if is_used == [False, True] else None


def _entries(kind: Architecture, blocks: Blocks, symbol: str) -> tuple[AnyEntry, ...]:
    symbol = ATTENTION if symbol == WINDOW else symbol  # the same weights
    assert symbol in blocks, f"{kind.class_name} has no block {symbol!r}"
    return blocks[symbol]


def sizes_of(config: GPTConfig) -> Mapping[str, int]:
    """Return the size that each letter of the tables stands for.

    Model: V vocabulary size, h hidden size, H 2h, L labels, P learned positions.
    Attention: a query heads, d channels per head, n = a·d, g = key heads · d, o channels of the
    output of all heads.
    MLP: f FFN hidden size, e FFN hidden size of an expert, s of the shared expert, E experts.
    Latent attention: q and k ranks of the query and key-value projections, r RoPE channels, p
    channels of a key without RoPE, v channels of a value.
    Recurrent mixers: see `_delta_net_sizes` and `_mamba_sizes`; w width of a short convolution.
    """
    attention, moe = config.attention, config.moe
    sizes = {"1": 1, "V": config.vocab_size, "h": config.hidden_size, "H": 2 * config.hidden_size}
    if config.max_position_embeddings is not None:
        sizes["P"] = config.max_position_embeddings
    if config.num_labels is not None:
        sizes["L"] = config.num_labels
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
    if config.short_conv is not None:
        sizes["w"] = config.short_conv.conv_width
    return sizes


def _delta_net_sizes(delta_net: GatedDeltaNetConfig) -> Mapping[str, int]:
    """Return K key heads, c channels of each, Q = K·c; U value heads, u channels of each, O = U·u;
    x = U / K value heads per key head, R = x·u; w width of the convolution."""
    keys, values = delta_net.num_key_heads, delta_net.num_value_heads
    values_per_key, value_channels = values // keys, delta_net.value_channels
    sizes = {"K": keys, "c": delta_net.key_channels, "Q": keys * delta_net.key_channels}
    sizes |= {
        "U": values,
        "u": value_channels,
        "O": values * value_channels,
        "x": values_per_key,
        "R": values_per_key * value_channels,
    }
    return sizes | {"w": delta_net.conv_width}


def _mamba_sizes(mamba: Mamba2Config) -> Mapping[str, int]:
    """Return N heads, I inner channels, G = groups · state size (channels of B and of C), w width
    of the convolution."""
    groups = mamba.num_groups * mamba.state_channels
    return {"N": mamba.num_heads, "I": mamba.inner_channels, "G": groups, "w": mamba.conv_width}


def features_of(config: GPTConfig) -> frozenset[str]:
    """Return the features of a model that `biased` and `when` of the tables refer to."""
    attention, mamba = config.attention, config.mamba
    if isinstance(attention, LatentAttentionConfig):
        direct = attention.q_lora_rank is None
        return frozenset({"direct_query" if direct else "low_rank_query"})
    features = {
        "norm_bias": config.norm.has_bias,
        "shared_expert": config.moe is not None and config.moe.shared_ffn_hidden_size is not None,
        "query_key_norms": attention is not None and attention.qk_norm,
        "attention_bias": attention is not None and attention.qkv_bias,
        "attention_out_bias": attention is not None and attention.output_bias,
        "mlp_bias": config.mlp is not None and config.mlp.bias,
        "expert_biases": config.moe is not None and config.moe.bias,
        "router_bias": config.moe is not None and config.moe.router.bias,
        "use_bias": mamba is not None and mamba.bias,
        "mamba_norm": mamba is not None and mamba.norm,
        "use_conv_bias": mamba is not None and mamba.conv_bias,
        "conv_bias": config.short_conv is not None and config.short_conv.bias,
        "expert_bias": config.moe is not None and config.moe.router.expert_bias,
    }
    return frozenset(name for name, is_present in features.items() if is_present)


class _Mapping:
    """Adds the entries of mapping tables to a `TensorMap`."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        features: frozenset[str],
        prefix: tuple[str, str] | None,
        tensor_map: TensorMap,
    ) -> None:
        self.map = tensor_map
        self._sizes, self._features, self._prefix = sizes, features, prefix

    def add_all(self, entries: Iterable[AnyEntry], words: Mapping[str, str]) -> None:
        """Add entries; `words` fills the placeholders in their names."""
        for entry in entries:
            if isinstance(entry, ExpertTensors):
                self._add_experts(entry, words)
            elif entry.when is not None and entry.when not in self._features:
                continue
            elif isinstance(entry, FusedWeight):
                self._add_rows(entry, words)
            else:
                self._add_plain(entry, words)

    def _add_plain(self, entry: Entry, words: Mapping[str, str]) -> None:
        hf_name, mcore_name = self._hf_name(entry.hf_name, words), entry.mcore_name.format(**words)
        shape = self._shape(entry.shape)
        hf_shape = self._shape(entry.hf_shape or entry.shape)
        rules = {
            "fp32": entry.fp32,
            "keep_dtype": entry.keep_dtype,
            "layout": StoredLayout(transposed=True) if entry.transposed else None,
        }
        self._add(
            TensorSlice(hf_name, _zeros(hf_shape), mcore_name, _zeros(shape), shape),
            hf_shape,
            shape,
            **rules,
        )
        if entry.biased in self._features:
            bias = (_bias(hf_name), (0,), _bias(mcore_name), (0,), shape[:1])
            self._add(TensorSlice(*bias), shape[:1], shape[:1])

    def _add_experts(self, entry: ExpertTensors, words: Mapping[str, str]) -> None:
        mcore_name = entry.mcore_name.format(**words)
        pattern = self._hf_name(entry.hf_name, words)
        shape, count = self._shape(entry.shape), self._sizes["E"]
        for expert in range(count):
            hf_name = pattern.format(expert=expert)
            tensor_slice = TensorSlice(
                hf_name, _zeros(shape), mcore_name, (expert, *_zeros(shape)), shape
            )
            self._add(tensor_slice, shape, (count, *shape))

    def _add_rows(self, entry: FusedWeight, words: Mapping[str, str]) -> None:
        hf_name = self._hf_name(entry.hf_name, words)
        runs = [(name.format(**words), self._sizes[letter]) for name, letter in entry.mcore_names]
        groups = self._sizes[entry.groups]
        inner, layout = self._shape(entry.inner), None
        if entry.transposed or entry.interleaved:
            num_interleaved = len(runs) if entry.interleaved else 1
            layout = StoredLayout(entry.transposed, num_interleaved, -1 - len(inner))
        self._add_runs(hf_name, runs, groups, inner, stacked=entry.stacked, layout=layout)
        if entry.biased in self._features:
            biases = [(_bias(name), rows) for name, rows in runs]
            self._add_runs(_bias(hf_name), biases, groups, (), stacked=False)

    def _add_runs(
        self,
        hf_name: str,
        runs: Sequence[tuple[str, int]],
        groups: int,
        inner: tuple[int, ...],
        *,
        stacked: bool,
        layout: StoredLayout | None = None,
    ) -> None:
        num_rows = sum(rows for _, rows in runs)

        def shape(rows: int) -> tuple[int, ...]:
            return (groups, rows, *inner) if stacked else (groups * rows, *inner)

        def offsets(group: int, rows: int, row: int) -> tuple[int, ...]:
            leading = (group, row) if stacked else (group * rows + row,)
            return (*leading, *_zeros(inner))

        for group in range(groups):
            row = 0
            for mcore_name, rows in runs:
                hf_offsets = offsets(group, num_rows, row)
                tensor_slice = TensorSlice(
                    hf_name, hf_offsets, mcore_name, offsets(group, rows, 0), (rows, *inner)
                )
                self._add(tensor_slice, shape(num_rows), shape(rows), layout=layout)
                row += rows

    def _add(
        self,
        tensor_slice: TensorSlice,
        hf_shape: tuple[int, ...],
        mcore_shape: tuple[int, ...],
        *,
        fp32: bool = False,
        keep_dtype: bool = False,
        layout: StoredLayout | None = None,
    ) -> None:
        self.map.declare(
            (tensor_slice.hf_name, hf_shape),
            (tensor_slice.mcore_name, mcore_shape),
            fp32=fp32,
            keep_dtype=keep_dtype,
            layout=layout,
        )
        self.map.add(tensor_slice)

    def _hf_name(self, name: str, words: Mapping[str, str]) -> str:
        """Return a Hugging Face name with the prefix that the files use."""
        if self._prefix is not None and name.startswith(self._prefix[0]):
            name = self._prefix[1] + name.removeprefix(self._prefix[0])
        return name.format(**words)

    def _shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self._sizes[letter] for letter in letters)


def _zeros(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * len(shape)


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias"

# SPDX-License-Identifier: Apache-2.0
"""Convert checkpoints to one file, and foreign folders to checkpoints: streamed, in one process.

A foreign folder is read only if `--from` specifies its format. If the folder does not describe its
model, flags do. Whole tensors are assembled chunk by chunk while they are written to the file or
checkpoint.

In Megatron's `torch_dist` checkpoints, layers are either stacked in one tensor with a leading layer
axis, `decoder.layers.mlp.linear_fc2.weight`, or one tensor each, `decoder.layers.0.mlp...`.
Queries, keys and values are one tensor, whose rows are, for each group, its queries, its key and
its value; gate and up are one tensor, with all rows of the gate first. Vocabulary rows are padded
at the end.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.cli.schema import build, flatten, options
from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointReader,
    Solo,
    TensorChunk,
    list_checkpoints,
    save_checkpoint,
)
from megatron.core.dist_checkpointing.run_folder import MAX_TRACKER_BYTES, TRACKER_NAME
from megatron.core.dist_checkpointing.safetensors_file import DTYPES, as_bytes
from megatron.core.dist_checkpointing.shard_format import ITEM_BYTES, ShardWriter, encode_header
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import AttentionConfig
from megatron.core.untrusted_files import open_to_write, read_regular, sync_folder
from megatron.core.weight_gather import Storage
from megatron.hf.config_json import architecture_of
from megatron.hf.tensor_map import MappedTensor, TensorMap, TensorSlice, tensor_map
from megatron.training.checkpointing.commands.dcp_folder import DcpFolder, DcpTensor
from megatron.training.checkpointing.commands.inspection import (
    existing_folder,
    kind_of_tensor,
    one_checkpoint,
    read_box,
    read_rows,
    size_text,
)
from megatron.training.checkpointing.commands.options import ConvertConfig, ConvertToNativeConfig
from megatron.training.checkpointing.find import METADATA_NAME
from megatron.training.checkpointing.state import FORMAT
from megatron.training.config import Config
from megatron.training.config.check import check
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.data.vocabulary import read_vocabulary

_LAYERS = "decoder.layers"
_EXPERTS = re.compile(r"\.(experts|shared_experts|router)\.")
_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_POSITIONS = "embedding.position_embeddings.weight"  # in both formats
_FINAL = "decoder.final_layernorm.weight"

Tensors = Mapping[str, DcpTensor]


def upstream_map(tensors: Tensors, config: GPTConfig) -> TensorMap:
    """Return the map between upstream's and this project's weight names of a model.

    Args:
        tensors: the folder's tensors, which show how layers are stored and how the vocabulary is
            padded.
        config: the model.

    Raises:
        ValueError: the model has features that cannot be read from such folders.
    """
    expert_names = [name for name in tensors if _EXPERTS.search(name)]
    if expert_names or config.moe is not None or config.mtp_num_layers:
        raise ValueError(
            "mixtures of experts and multi-token prediction layers are not read from torch_dist "
            f"folders{f' ({expert_names[0]})' if expert_names else ''}: convert dense models"
        )
    attention = config.attention
    if config.pattern:
        raise ValueError(
            f"models of the blocks {config.pattern} are not read from torch_dist folders: convert "
            "GPTs"
        )
    has_sinks = config.second_attention is not None and config.second_attention.sinks
    if (
        not isinstance(attention, AttentionConfig)
        or attention.output_gate
        or attention.sinks
        or has_sinks
    ):
        raise ValueError(
            "latent attention, attention sinks and attention gates are not read from torch_dist "
            "folders: "
            "convert models with plain attention"
        )
    if attention.qk_norm_scope != "head":
        raise ValueError(
            f"models with --qk-layernorm-scope {attention.qk_norm_scope} are not read from "
            "torch_dist folders: convert models with norms of each head"
        )
    if config.norm.placement != "pre":
        raise ValueError(
            f"models with --norm-placement {config.norm.placement} are not read from torch_dist "
            "folders: convert models with norms before each block"
        )
    if not config.norm.bias:
        raise ValueError(
            "models with --no-layernorm-bias are not read from torch_dist folders: convert models "
            "whose norms have all their weights"
        )
    upstream = _Map(tensors, config, attention)
    upstream.add_ends()
    for layer in range(config.num_layers):
        upstream.add_attention(layer)
        upstream.add_mlp(layer)
    return upstream.map


def shape_of_folder(tensors: Tensors) -> dict[str, object]:
    """Return the model properties, by flag, that the tensors determine."""
    layers = {int(match[1]) for n in tensors if (match := re.match(r"decoder\.layers\.(\d+)\.", n))}
    shapes = {re.sub(r"\.layers\.\d+\.", ".layers.", n): t.shape for n, t in tensors.items()}
    stacked = [t.shape[0] for n, t in tensors.items() if re.match(r"decoder\.layers\.[a-z]", n)]
    properties: dict[str, object] = {
        "num-layers": max(layers) + 1 if layers else max(stacked, default=0)
    }
    up, down = (shapes.get(f"{_LAYERS}.mlp.linear_{n}.weight") for n in ("fc1", "fc2"))
    if _FINAL in shapes:
        properties["hidden-size"] = shapes[_FINAL][-1]
    if up and down:
        properties["ffn-hidden-size"] = down[-1]
        properties["swiglu"] = up[-2] == 2 * down[-1]
    properties["normalization"] = "LayerNorm" if f"{_FINAL[:-6]}bias" in shapes else "RMSNorm"
    properties["untie-embeddings-and-output-weights"] = _HEAD in shapes
    properties["learned positions"] = shapes[_POSITIONS][0] if _POSITIONS in shapes else None
    properties["qk-layernorm"] = f"{_LAYERS}.self_attention.q_layernorm.weight" in shapes
    for flag, name in (
        ("bias of queries, keys and values", "self_attention.linear_qkv"),
        ("bias of attention's output", "self_attention.linear_proj"),
        ("bias of the MLP", "mlp.linear_fc2"),
    ):
        properties[flag] = f"{_LAYERS}.{name}.bias" in shapes
    return properties


def shape_of_model(config: GPTConfig) -> dict[str, object]:
    """Return the same properties of a model described by flags."""
    attention = config.attention
    assert isinstance(attention, AttentionConfig)
    assert config.mlp is not None
    return {
        "num-layers": config.num_layers,
        "hidden-size": config.hidden_size,
        "ffn-hidden-size": config.mlp.ffn_hidden_size,
        "swiglu": config.mlp.gated,
        "normalization": config.norm.kind,
        "untie-embeddings-and-output-weights": not config.tied,
        "learned positions": config.max_position_embeddings,
        "qk-layernorm": attention.qk_norm,
        "bias of queries, keys and values": attention.qkv_bias,
        "bias of attention's output": attention.output_bias,
        "bias of the MLP": config.mlp.bias,
    }


class _Map:
    """Builds a tensor map block by block."""

    def __init__(self, tensors: Tensors, config: GPTConfig, attention: AttentionConfig) -> None:
        self.map = TensorMap()
        self._tensors, self._config, self._attention = tensors, config, attention

    def add_ends(self) -> None:
        """Add embedding, final norm and head."""
        config = self._config
        shape = (config.vocab_size, config.hidden_size)
        ends = [(_EMBEDDING, "embedding.weight")]
        if not config.tied:
            ends.append((_HEAD, "head.weight"))
        for upstream, mcore in ends:
            stored = self._tensors.get(upstream)
            rows = stored.shape[0] if stored is not None and stored.shape else 0
            padded = (max(rows, shape[0]), shape[1])
            self._add(TensorSlice(upstream, (0, 0), mcore, (0, 0), shape), padded, shape)
        if config.max_position_embeddings is not None:
            table = (config.max_position_embeddings, config.hidden_size)
            self._add(TensorSlice(_POSITIONS, (0, 0), _POSITIONS, (0, 0), table), table, table)
        for kind in self._norm_kinds():
            size = (config.hidden_size,)
            mcore = f"decoder.final_norm.{kind}"
            self._add(TensorSlice(f"{_FINAL[:-6]}{kind}", (0,), mcore, (0,), size), size, size)

    def add_attention(self, layer: int) -> None:
        """Add the attention block of a layer."""
        config, attention = self._config, self._attention
        hidden, channels = config.hidden_size, attention.kv_channels
        block = f"decoder.blocks.{2 * layer}"
        inside = f"{block}.attention"
        self._add_norm(layer, "self_attention.linear_qkv.layer_norm_", "input_layernorm.", block)
        for kind in self._kinds(attention.qkv_bias):
            inner = (hidden,) if kind == "weight" else ()
            self._add_rows(
                layer, f"self_attention.linear_qkv.{kind}", self._runs(inside, kind), inner
            )
        heads = attention.num_attention_heads * channels
        self._whole(
            layer, "self_attention.linear_proj.weight", f"{inside}.output.weight", (hidden, heads)
        )
        if attention.output_bias:
            self._whole(
                layer, "self_attention.linear_proj.bias", f"{inside}.output.bias", (hidden,)
            )
        for kind in self._norm_kinds() if attention.qk_norm else ():
            for suffix, name in (("q_layernorm", "query_norm"), ("k_layernorm", "key_norm")):
                norm_name = f"self_attention.{suffix}.{kind}"
                self._whole(layer, norm_name, f"{inside}.{name}.{kind}", (channels,))

    def add_mlp(self, layer: int) -> None:
        """Add the MLP block of a layer."""
        mlp, hidden = self._config.mlp, self._config.hidden_size
        block = f"decoder.blocks.{2 * layer + 1}"
        self._add_norm(layer, "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.", block)
        for kind in self._kinds(mlp.bias):
            inner = (hidden,) if kind == "weight" else ()
            names = ("gate", "up") if mlp.gated else ("up",)
            runs = [(f"{block}.mlp.{name}.{kind}", mlp.ffn_hidden_size) for name in names]
            self._add_rows(layer, f"mlp.linear_fc1.{kind}", runs, inner)
        shape = (hidden, mlp.ffn_hidden_size)
        self._whole(layer, "mlp.linear_fc2.weight", f"{block}.mlp.down.weight", shape)
        if mlp.bias:
            self._whole(layer, "mlp.linear_fc2.bias", f"{block}.mlp.down.bias", (hidden,))

    def _runs(self, inside: str, kind: str) -> list[tuple[str, int]]:
        """Return the row ranges of queries, keys and values, group by group."""
        attention = self._attention
        query_heads = attention.num_attention_heads // attention.num_query_groups
        heads_per_group = [("query", query_heads), ("key", 1), ("value", 1)]
        return [
            (f"{inside}.{name}.{kind}", count * attention.kv_channels)
            for _ in range(attention.num_query_groups)
            for name, count in heads_per_group
        ]

    def _add_norm(self, layer: int, fused: str, plain: str, block: str) -> None:
        """Add a norm; upstream names a fused norm after the linear layer that follows it."""
        for kind in self._norm_kinds():
            is_fused = self._upstream_name(layer, f"{fused}{kind}")[0] in self._tensors
            upstream = f"{fused}{kind}" if is_fused else f"{plain}{kind}"
            self._whole(layer, upstream, f"{block}.norm.{kind}", (self._config.hidden_size,))

    def _whole(self, layer: int, upstream: str, mcore: str, shape: tuple[int, ...]) -> None:
        self._add_rows(layer, upstream, [(mcore, shape[0])], shape[1:])

    def _add_rows(
        self, layer: int, upstream: str, runs: list[tuple[str, int]], inner: tuple[int, ...]
    ) -> None:
        """Add a tensor that concatenates row ranges of this project's tensors, in this order."""
        name, layer_index, layers = self._upstream_name(layer, upstream)
        rows, totals = 0, dict.fromkeys((mcore for mcore, _ in runs), 0)
        for mcore, count in runs:
            totals[mcore] += count
        whole = (*layers, sum(totals.values()), *inner)
        next_row = dict.fromkeys(totals, 0)
        zeros = (0,) * len(inner)
        for mcore, count in runs:
            tensor_slice = TensorSlice(
                name,
                (*layer_index, rows, *zeros),
                mcore,
                (next_row[mcore], *zeros),
                (count, *inner),
            )
            self._add(tensor_slice, whole, (totals[mcore], *inner))
            rows, next_row[mcore] = rows + count, next_row[mcore] + count

    def _upstream_name(self, layer: int, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return upstream's name of a layer's tensor, and index and size of its layer axis."""
        layer_name = f"{_LAYERS}.{layer}.{name}"
        if layer_name in self._tensors:
            return layer_name, (), ()
        return f"{_LAYERS}.{name}", (layer,), (self._config.num_layers,)

    def _add(
        self, tensor_slice: TensorSlice, hf_shape: tuple[int, ...], mcore_shape: tuple[int, ...]
    ) -> None:
        self.map.declare(
            (tensor_slice.hf_name, hf_shape), (tensor_slice.mcore_name, mcore_shape), fp32=False
        )
        self.map.add(tensor_slice)

    def _norm_kinds(self) -> Iterator[str]:
        yield from self._kinds(self._config.norm.has_bias)

    def _kinds(self, biased: bool) -> Iterator[str]:
        yield from ("weight", "bias") if biased else ("weight",)


_SECTIONS = (
    "model",
    "activations",
    "attention",
    "position",
    "rope_scaling",
    "experts",
    "tokenizer",
)

#: Options that a run requires and a model does not depend on.
_ANY_RUN = {"micro-batch-size": 1, "train-iters": 1, "lr": 1e-3, "mock-data": True}


class DescribedModel(NamedTuple):
    """A model config, its options by flag name, and how to rebuild its tokenizer."""

    config: GPTConfig
    options: Mapping[str, Any]
    tokenizer: Mapping[str, Any]


def described_model(chosen: ConvertToNativeConfig) -> DescribedModel:
    """Return the model that flags describe, as pretraining would build it. Raises ValueError."""
    model_options = [option for option in options(Config) if option.section in _SECTIONS]
    values = flatten(chosen)
    length = chosen.model.max_position_embeddings or 1
    learned = chosen.position.position_embedding_type == "learned_absolute"
    if learned and chosen.model.max_position_embeddings is None:
        raise ValueError(
            "missing --max-position-embeddings: --position-embedding-type learned_absolute "
            "has one vector per position; give it, or another type, such as rope"
        )
    described = {option.name: values[option.name] for option in model_options}
    config = build(Config, {**described, **_ANY_RUN, "seq-length": length})
    if problems := check(config, 1):
        raise ValueError("; ".join(problems))
    if chosen.tokenizer.vocab_size is None and chosen.tokenizer.tokenizer_model is None:
        raise ValueError("missing --vocab-size: give it without padding, or give --tokenizer-model")
    resolved = resolve(config, 1).config
    vocabulary = read_vocabulary(resolved.tokenizer, ())
    resolved_values = flatten(resolved)
    stored_values = {option.name: resolved_values[option.name] for option in model_options}
    if chosen.model.max_position_embeddings is None:
        del stored_values["max-position-embeddings"]  # derived from a placeholder length
    stored_values["vocab-size"] = vocabulary.size
    return DescribedModel(
        gpt_config(resolved, vocabulary.size), stored_values, vocabulary.tokenizer
    )


#: Fills a tensor with a box of a stored tensor.
ReadBox = Callable[[Box, torch.Tensor], None]


class StreamedTensor(NamedTuple):
    """A tensor: dtype by its safetensors name, and an iterator over its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]]


def of_checkpoint(reader: CheckpointReader, name: str) -> StreamedTensor:
    """Return a stream of a tensor of a native checkpoint."""
    stored = reader.manifest.tensors[name]

    def pieces() -> Iterator[memoryview]:
        for box in read_rows(stored.shape, stored.dtype):
            yield as_bytes(read_box(reader, name, box))

    return StreamedTensor(name, stored.dtype, stored.shape, pieces)


def of_folder(folder: DcpFolder, name: str) -> StreamedTensor:
    """Return a stream of a foreign folder's tensor under its own name. Raises ValueError."""
    stored = folder.find(name)
    pieces = partial(_bands, stored.shape, stored.dtype, partial(folder.read_box, name))
    return StreamedTensor(name, stored.dtype, stored.shape, pieces)


def of_slices(folder: DcpFolder, mapped: MappedTensor) -> StreamedTensor:
    """Return a stream of a native tensor assembled from slices of a foreign folder's tensors."""
    dtypes = {folder.tensors[tensor_slice.hf_name].dtype for tensor_slice in mapped.slices}
    dtype = "F32" if mapped.fp32 or len(dtypes) > 1 else dtypes.pop()

    def pieces() -> Iterator[memoryview]:
        for tensor_slice in mapped.slices:
            yield from _bands(tensor_slice.sizes, dtype, partial(_read_slice, folder, tensor_slice))

    return StreamedTensor(mapped.name, dtype, mapped.shape, pieces)


def _read_slice(
    folder: DcpFolder, tensor_slice: TensorSlice, box: Box, target: torch.Tensor
) -> None:
    """Read a box whose offsets are relative to the slice."""
    inner = tensor_slice.hf_box(box)
    folder.read_box(tensor_slice.hf_name, inner, target.view(inner.sizes))


def as_chunk(tensor: StreamedTensor) -> TensorChunk:
    """Return the chunk of a tensor for a checkpoint written by one process."""
    return TensorChunk(
        name=tensor.name,
        shape=tensor.shape,
        offsets=(0,) * len(tensor.shape),
        tensor=torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta"),
        replica_ranks=(0,),
        byte_stream=tensor.pieces,
    )


def write_file(target: Path, tensors: Sequence[StreamedTensor]) -> int:
    """Write a safetensors file atomically and return its size in bytes.

    Raises:
        OSError: the file cannot be written.
    """
    # Large elements first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    header = encode_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered])
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        with open_to_write(temporary, "x") as file:
            output = ShardWriter(file)
            output.write(header)
            for tensor in ordered:
                for block in tensor.pieces():
                    output.write(block)
            output.sync()
        os.rename(temporary, target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return output.position


def _bands(shape: tuple[int, ...], dtype: str, read: ReadBox) -> Iterator[memoryview]:
    """Yield the bytes of a box in blocks of rows; each is valid until the next."""
    if not math.prod(shape):
        return
    for box in row_boxes(shape, ITEM_BYTES[dtype]):
        block = torch.empty(box.sizes, dtype=DTYPES[dtype])
        read(box, block)
        yield as_bytes(block)


#: Number of problems or names listed in one line; others are counted.
MAX_NAMED = 8

_OPTIMIZER = re.compile(r"(^|\.)optim(izer)?[./]")
#: Buffers derived from the configuration, or used by upstream's kernels only.
_DERIVED = re.compile(r"\.inv_freq$|(^|\.|/)_extra_state(/|$)")
_FLOATS = ("F64", "F32", "F16", "BF16")


def convert(chosen: ConvertConfig | ConvertToNativeConfig) -> int:
    """Convert a checkpoint and print a summary of written and omitted tensors. Returns 0.

    Raises:
        ValueError: the source is missing, rejected or does not fit the model, or the target exists.
        CheckpointError: a native checkpoint is corrupt.
    """
    if isinstance(chosen, ConvertConfig):
        _to_file(chosen)
    else:
        _to_native(chosen)
    return 0


def _to_file(chosen: ConvertConfig) -> None:
    target = Path(chosen.target)
    if target.exists():
        raise ValueError(f"{target} exists: name another file, or remove it")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent}: there is no such folder: create it")
    non_tensors: tuple[str, ...] = ()
    if chosen.from_ == "native":
        source = one_checkpoint(chosen.source)
        with CheckpointReader(source) as reader:
            names = list(reader.manifest.tensors)
            exported = _without_optimizer(names, chosen.with_optimizer)
            exported = [
                name for name in exported if not kind_of_tensor(name).startswith("experiment.")
            ]
            size = _write(target, [of_checkpoint(reader, name) for name in exported])
    else:
        source = foreign_folder(chosen.source, chosen.from_)
        with DcpFolder(source, checksums=chosen.checksums) as folder:
            names, non_tensors = list(folder.tensors), folder.others
            exported = _without_optimizer(names, chosen.with_optimizer)
            size = _write(target, [of_folder(folder, name) for name in exported])
    print(f"converted {source} to {target}: {len(exported)} tensors, {size_text(size)}", flush=True)
    _print_left_out(set(names) - set(exported), non_tensors)


def _write(target: Path, tensors: list[StreamedTensor]) -> int:
    if not tensors:
        raise ValueError("the source contains no tensor: name another checkpoint")
    try:
        return write_file(target, tensors)
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror}") from error


def _without_optimizer(names: list[str], with_optimizer: bool) -> list[str]:
    return [name for name in sorted(names) if with_optimizer or not _OPTIMIZER.search(name)]


def _to_native(chosen: ConvertToNativeConfig) -> None:
    conversion = chosen.conversion
    model = described_model(chosen)
    source, root = foreign_folder(conversion.source, conversion.from_), Path(conversion.target)
    # Other checkpoints are rejected too: a run would resume from the new one instead of its latest.
    if checkpoints := list_checkpoints(root):
        raise ValueError(f"{root} already contains {checkpoints[0].name}: name another folder")
    with DcpFolder(source, checksums=conversion.checksums) as folder:
        upstream = conversion.from_ == "torch_dist"
        mapped = _upstream(folder, model) if upstream else _by_name(folder, model.config)
        left_out = _check(folder, mapped, tied=model.config.tied)
        tensors = [of_slices(folder, tensor) for tensor in mapped.mcore_tensors.values()]
        try:
            checkpoint = save_checkpoint(
                root,
                0,
                [as_chunk(tensor) for tensor in tensors],
                _extra(model, tensors),
                coordinator=Solo(),
            )
        except CheckpointError as error:
            raise ValueError(str(error)) from error
        non_tensors = folder.others
    print(f"converted {source} to {checkpoint}: {len(tensors)} weights", flush=True)
    _print_padding(mapped)
    _print_left_out(left_out, non_tensors)


def foreign_folder(text: str, kind: str) -> Path:
    """Return the folder with `.metadata` for a path: the folder itself, or a run's latest
    checkpoint.

    Raises:
        ValueError: there is no such folder.
    """
    path = existing_folder(text)
    if (path / METADATA_NAME).is_file():
        return path
    try:
        latest = read_regular(path / TRACKER_NAME, MAX_TRACKER_BYTES).decode(errors="replace")
    except OSError:
        latest = ""
    latest = latest.strip()
    name = "release" if latest == "release" else ""
    if latest.isascii() and latest.isdigit() and len(latest) < 18:
        name = f"iter_{int(latest):07d}"
    if name and (path / name / METADATA_NAME).is_file():
        return path / name
    raise ValueError(f"{path} contains no {METADATA_NAME}: it is not a {kind} checkpoint")


def _upstream(folder: DcpFolder, model: DescribedModel) -> TensorMap:
    """Return the map of a torch_dist folder. Raises ValueError if the flags describe another
    model."""
    mapped = upstream_map(folder.tensors, model.config)
    stored_shape, model_shape = shape_of_folder(folder.tensors), shape_of_model(model.config)
    differences = [
        f"{name} is {stored_shape[name]} there, {model_shape[name]} by the flags"
        for name in model_shape
        if name in stored_shape and stored_shape[name] != model_shape[name]
    ]
    if differences:
        raise ValueError(f"{folder.path} contains another model: {'; '.join(differences)}")
    return mapped


def _by_name(folder: DcpFolder, config: GPTConfig) -> TensorMap:
    """Return the map of a folder with native names, or with the names of transformers.

    All names may have a common prefix, such as `model.` for a nested dict.

    Raises:
        ValueError: the names are neither.
    """
    mcore_map = _native_map(config)
    for embedding, mapped in (
        ("embedding.weight", lambda: mcore_map),
        (
            "model.embed_tokens.weight",
            lambda: tensor_map(architecture_of(config), config, names=folder.tensors),
        ),
    ):
        names = [
            name for name in folder.tensors if name == embedding or name.endswith(f".{embedding}")
        ]
        names = [name for name in names if not _OPTIMIZER.search(name)]
        if names:
            return _prefixed(mapped(), min(names, key=len).removesuffix(embedding))
    raise ValueError(
        f"{folder.path} has neither embedding.weight nor model.embed_tokens.weight: only native "
        "names and transformers' names are supported, use --to single-file"
    )


def _native_map(config: GPTConfig) -> TensorMap:
    """Return the map of a folder with native names."""
    mcore_map = TensorMap()
    model = GPTModel(
        config,
        ProcessGroupCollection.single(),
        device="meta",
        storage=Storage(initialize=False),
    )
    sub_weights = [s for h in model.store.handles.values() for s in h.sharding.sub_weights]
    shapes = [(sub_weight.name, sub_weight.shape, False) for sub_weight in sub_weights]
    shapes += [(name, tuple(state.shape), True) for name, state in model.store.states.items()]
    for name, shape, fp32 in shapes:
        zeros = (0,) * len(shape)
        mcore_map.declare((name, shape), (name, shape), fp32=fp32)
        mcore_map.add(TensorSlice(name, zeros, name, zeros, shape))
    return mcore_map


def _prefixed(mapped: TensorMap, prefix: str) -> TensorMap:
    """Return a map in which all Hugging Face names have a prefix."""

    def renamed(tensor: MappedTensor, name: str) -> MappedTensor:
        slices = [
            tensor_slice._replace(hf_name=f"{prefix}{tensor_slice.hf_name}")
            for tensor_slice in tensor.slices
        ]
        return MappedTensor(name=name, shape=tensor.shape, fp32=tensor.fp32, slices=slices)

    prefixed_map = TensorMap()
    for name, tensor in mapped.hf_tensors.items():
        prefixed_map.hf_tensors[f"{prefix}{name}"] = renamed(tensor, f"{prefix}{name}")
    for name, tensor in mapped.mcore_tensors.items():
        prefixed_map.mcore_tensors[name] = renamed(tensor, name)
    prefixed_map.copies.update({f"{prefix}{name}": mcore for name, mcore in mapped.copies.items()})
    return prefixed_map


def _check(folder: DcpFolder, mapped: TensorMap, *, tied: bool) -> set[str]:
    """Compare the tensors of a folder with a model's; return the tensors to leave out.

    Raises:
        ValueError: a tensor is missing, is not floating point, has another shape, or does not
            belong to the model.
    """
    problems = []
    for name, tensor in mapped.hf_tensors.items():
        if name not in folder.tensors:
            if name not in mapped.copies:
                problems.append(f"{name} is missing")
            continue
        stored = folder.find(name)
        if stored.shape != tensor.shape:
            problems.append(
                f"{name} is {list(stored.shape)}, the flags require {list(tensor.shape)}"
            )
        elif stored.dtype not in _FLOATS:
            problems.append(f"{name} has dtype {stored.dtype}: supported are {', '.join(_FLOATS)}")
    left_out = folder.tensors.keys() - mapped.hf_tensors.keys()
    problems += [
        f"{name} does not belong to the model of the flags"
        for name in sorted(left_out)
        if not _OPTIMIZER.search(name)
        and not _DERIVED.search(name)
        and not (tied and name.endswith("lm_head.weight"))
    ]
    if problems:
        num_unlisted = len(problems) - MAX_NAMED
        raise ValueError(
            f"{folder.path} contains another model: {'; '.join(problems[:MAX_NAMED])}"
            f"{f'; and {num_unlisted} more' if num_unlisted > 0 else ''}"
        )
    return left_out


def _extra(model: DescribedModel, tensors: list[StreamedTensor]) -> Mapping[str, object]:
    """Return the checkpoint's `extra`: the fields that training writes, without progress."""
    dtypes = {tensor.dtype for tensor in tensors}
    return {
        "format": FORMAT,
        "model": model.config.to_json(),
        "config": {**model.options, "bf16": dtypes == {"BF16"}, "fp16": dtypes == {"F16"}},
        "tokenizer": dict(model.tokenizer),
        "weights_only": True,
    }


def _print_padding(mapped: TensorMap) -> None:
    """Report which foreign rows are treated as padding, as the folder does not specify it."""
    for name, tensor in mapped.hf_tensors.items():
        rows = sum(tensor_slice.sizes[0] for tensor_slice in tensor.slices)
        if len(tensor.shape) == 2 and len(tensor.slices) == 1 and rows < tensor.shape[0]:
            padding = tensor.shape[0] - rows
            print(f"treated the last {padding} rows of {name} as padding", flush=True)


def _print_left_out(tensors: set[str], non_tensors: tuple[str, ...]) -> None:
    for what, names in (
        ("tensors, of an optimizer or derived", sorted(tensors)),
        ("items that are not tensors and were not read", sorted(non_tensors)),
    ):
        if names:
            suffix = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            print(
                f"left out {len(names)} {what}: {', '.join(names[:MAX_NAMED])}{suffix}", flush=True
            )

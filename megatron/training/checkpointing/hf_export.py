# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint of any layout to a Hugging Face folder: streamed, and written atomically."""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing import CheckpointError, CheckpointReader, TensorChunk
from megatron.core.dist_checkpointing.safetensors_file import DTYPE_NAMES, DTYPES, as_bytes
from megatron.core.dist_checkpointing.save import BLOCK_BYTES
from megatron.core.dist_checkpointing.shard_format import encode_header
from megatron.core.models.gpt import GPTConfig
from megatron.core.untrusted_files import (
    MAX_TOKENIZER_BYTES,
    open_to_write,
    parse_json,
    read_regular,
    replace_file,
)
from megatron.hf.config_json import DTYPES as MODEL_DTYPES
from megatron.hf.config_json import architecture_of, check_exportable, write_config
from megatron.hf.folder import (
    CARRIED,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    inside,
    read_object,
)
from megatron.hf.tensor_map import MappedTensor, TensorMap, tensor_map
from megatron.training.checkpointing.hf_import import CARRIED_FOLDER
from megatron.training.checkpointing.stored_model import described_config
from megatron.training.config.model_table import model_options

#: Bytes read together: blocks with digests are read whole, so each about one and a half times.
GROUP_BYTES = BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export: the folder, its weight files, and the number of bytes read.

    `note` is a line about weights that were quantized in the original folder and are not any more.
    """

    folder: Path
    files: tuple[str, ...]
    bytes_read: int
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A tensor to write: its target dtype, and the shapes of the checkpoint tensors it is built
    from."""

    tensor: MappedTensor
    dtype: torch.dtype
    mcore_shapes: Mapping[str, tuple[int, ...]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.tensor.shape) * self.dtype.itemsize


def export_folder(
    checkpoint: Path,
    save: str,
    *,
    like: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int,
) -> Exported:
    """Write a checkpoint's weights, config.json and tokenizer files as a Hugging Face folder.

    Args:
        checkpoint: an `iter_` folder.
        save: the folder to create; it must not exist, or be empty.
        like: folder whose config.json and tokenizer files are copied; None looks for the folder
            that the model was imported from.
        dtype: dtype of the written weights; None keeps their dtype.
        max_shard_bytes: size at which a new file starts.

    Raises:
        CheckpointError: the checkpoint is damaged or lacks a weight.
        ValueError: the model is not supported by transformers, or nothing can be written.
    """
    target = Path(save)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--save {save} exists: name another folder, or remove it")
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        with CheckpointReader(checkpoint) as reader:
            extra = reader.manifest.extra
            config = described_config(checkpoint, reader.manifest)
            check_exportable(config, flags_of=model_options)
            carried = carried_folder(checkpoint, extra, like)
            config_path = inside(carried, CONFIG) if carried is not None else None
            base = read_object(config_path) if config_path is not None else None
            planned = _plan(reader, tensor_map(architecture_of(config, base), config), dtype)
            temporary.mkdir(parents=True)
            _write_texts(temporary, config, planned, extra, carried=carried, base=base)
            files = _write_weights(temporary, reader, planned, max_shard_bytes)
            if target.exists():
                target.rmdir()
            os.rename(temporary, target)
            return Exported(
                folder=target,
                files=files,
                bytes_read=reader.bytes_read,
                note=_dequantized_note(config_path, base, planned),
            )
    except OSError as error:
        raise ValueError(f"--save {save}: {error.strerror}: {error.filename}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def carried_folder(checkpoint: Path, extra: Mapping[str, Any], like: str | None) -> Path | None:
    """Return the folder whose text files are copied: `like`, or the folder of the import.

    Raises:
        ValueError: `like` is not a Hugging Face folder.
    """
    if like is not None:
        if not (Path(like) / CONFIG).is_file():
            raise ValueError(f"--like {like} contains no {CONFIG}: name a Hugging Face folder")
        return Path(like)
    options, tokenizer = extra.get("config"), extra.get("tokenizer")
    folders = [checkpoint.parent / CARRIED_FOLDER]
    if isinstance(options, dict) and isinstance(options.get("load-hf"), str):
        folders.append(Path(options["load-hf"]))
    if isinstance(tokenizer, dict) and isinstance(tokenizer.get("model"), str):
        folders.append(Path(tokenizer["model"]).parent)
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def _plan(reader: CheckpointReader, mapped: TensorMap, dtype: torch.dtype | None) -> list[_Planned]:
    """List the tensors to write, large dtypes first for alignment. Raises ValueError."""
    planned = []
    for tensor in mapped.hf_tensors.values():
        stored_dtypes, shapes = set(), {}
        for name in {tensor_slice.mcore_name for tensor_slice in tensor.slices}:
            stored = reader.manifest.tensors.get(name)
            if stored is None:
                raise CheckpointError(f"it lacks {name}")
            shapes[name] = mapped.mcore_tensors[name].shape
            if stored.shape != shapes[name]:
                raise CheckpointError(
                    f"{name} is {list(stored.shape)}, its model requires {list(shapes[name])}"
                )
            stored_dtypes.add(DTYPES[stored.dtype])
        chosen = None if tensor.keep_dtype else dtype
        target_dtype = (
            torch.float32 if tensor.fp32 else chosen or reduce(torch.promote_types, stored_dtypes)
        )
        planned.append(_Planned(tensor=tensor, dtype=target_dtype, mcore_shapes=shapes))
    planned.sort(key=lambda p: -p.dtype.itemsize)
    return planned


def _write_texts(
    folder: Path,
    config: GPTConfig,
    planned: Sequence[_Planned],
    extra: Mapping[str, Any],
    *,
    carried: Path | None,
    base: Mapping[str, Any] | None,
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files."""
    options, tokenizer = extra.get("config", {}), extra.get("tokenizer", {})
    end = tokenizer.get("eod")
    fields = write_config(
        config,
        max_length=options.get("max-position-embeddings") or options.get("seq-length"),
        dtype=_common_dtype(planned),
        end_tokens=() if end is None else (end,),
        base=base,
        flags_of=model_options,
    )
    _write_json(folder / CONFIG, fields)
    for name in CARRIED:
        path = inside(carried, name) if carried is not None else None
        if path is not None:
            replace_file(folder / name, read_regular(path, MAX_TOKENIZER_BYTES))
    if not (folder / GENERATION_CONFIG).exists():
        special_ids = {
            key: fields.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        _write_json(
            folder / GENERATION_CONFIG, {k: v for k, v in special_ids.items() if v is not None}
        )
    model = tokenizer.get("model")
    if carried is None and isinstance(model, str) and Path(model).name == "tokenizer.json":
        _write_tokenizer(folder, Path(model), end)


def _write_tokenizer(folder: Path, path: Path, end: int | None) -> None:
    """Write the files that let transformers open a tokenizer without a Hugging Face folder."""
    if not path.is_file():
        raise ValueError(f"the model's tokenizer {path} is missing: name its folder with --like")
    content = read_regular(path, MAX_TOKENIZER_BYTES, follow_links=True)
    replace_file(folder / "tokenizer.json", content)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"}
    try:
        added = parse_json(content).get("added_tokens", [])
        names = [token["content"] for token in added if token["id"] == end]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    if names:
        fields["eos_token"] = names[0]
    _write_json(folder / "tokenizer_config.json", fields)


def _common_dtype(planned: Sequence[_Planned]) -> torch.dtype:
    """Return the dtype of most elements, as config.json has a single dtype."""
    sizes: dict[torch.dtype, int] = {}
    for p in planned:
        sizes[p.dtype] = sizes.get(p.dtype, 0) + math.prod(p.tensor.shape)
    common = max(sizes, key=lambda dtype: sizes[dtype])
    if common not in MODEL_DTYPES.values():
        raise ValueError(f"weights of {common} cannot be exported: choose with --dtype")
    return common


def _dequantized_note(
    path: Path | None, base: Mapping[str, Any] | None, planned: Sequence[_Planned]
) -> str | None:
    """Return a line if the original config.json describes quantized weights, else None."""
    if not (base or {}).get("quantization_config"):
        return None
    dtype = next(name for name, d in MODEL_DTYPES.items() if d == _common_dtype(planned))
    return (
        f"{path} has quantization_config: weights are written in {dtype}, not quantized, and "
        "config.json without it"
    )


def _write_weights(
    folder: Path, reader: CheckpointReader, planned: Sequence[_Planned], max_shard_bytes: int
) -> tuple[str, ...]:
    """Write the weight files, and the index if there are several."""
    shards: list[list[_Planned]] = [[]]
    filled = 0
    for p in planned:
        if shards[-1] and filled + p.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(p)
        filled += p.num_bytes
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, reader, shard)
    if count > 1:
        weight_map = {p.tensor.name: n for n, s in zip(names, shards, strict=True) for p in s}
        total = sum(p.num_bytes for p in planned)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX, index)
    return tuple(names)


def _write_file(path: Path, reader: CheckpointReader, shard: Sequence[_Planned]) -> None:
    entries = [(p.tensor.name, DTYPE_NAMES[p.dtype], p.tensor.stored_shape) for p in shard]
    with open_to_write(path, "x") as file:
        file.write(encode_header(entries))
        for has_layout, run in itertools.groupby(shard, key=lambda p: p.tensor.layout is not None):
            if has_layout:
                for p in run:
                    for stored in _stored_blocks(reader, p):
                        file.write(as_bytes(stored))
                continue
            for group in _groups(run):
                reader.read(group)
                for chunk in group:
                    file.write(as_bytes(chunk.tensor))
        file.flush()
        os.fsync(file.fileno())


def _stored_blocks(reader: CheckpointReader, planned: _Planned) -> Iterator[torch.Tensor]:
    """Yield a tensor in the order of its stored layout: whole, or one block for each index of the
    first of three dimensions."""
    tensor = planned.tensor
    layout, stored_shape = tensor.layout, tensor.stored_shape
    assert layout is not None
    is_stacked = len(tensor.shape) + layout.rows_dim > 0
    ranges = [(0, stored_shape[0])]
    if is_stacked:
        ranges = [(index, 1) for index in range(stored_shape[0])]
    for start, size in ranges:
        stored = torch.empty((size, *stored_shape[1:]), dtype=planned.dtype)
        chunks, views = [], []
        for tensor_slice in tensor.slices:
            hf_box = tensor_slice.hf_box(tensor_slice.whole)
            if is_stacked and hf_box.offsets[0] != start:
                continue
            box = tensor_slice.mcore_box(tensor_slice.whole)
            chunks.append(_chunk_of(planned, tensor_slice.mcore_name, box))
            stored_box = layout.stored_box(hf_box, tensor.shape).seen_from(
                (start, *(0,) * (len(stored_shape) - 1))
            )
            views.append(layout.select(stored[stored_box.slices]))
        reader.read(chunks)
        for chunk, view in zip(chunks, views, strict=True):
            view.copy_(chunk.tensor.view(view.shape))
        yield stored


def _chunk_of(planned: _Planned, name: str, box: Box) -> TensorChunk:
    """Return the chunk of a box of one of our weights, to be read."""
    return TensorChunk(
        name=name,
        shape=planned.mcore_shapes[name],
        offsets=box.offsets,
        tensor=torch.empty(box.sizes, dtype=planned.dtype),
        replica_ranks=(0,),
    )


def _groups(shard: Iterable[_Planned]) -> Iterator[list[TensorChunk]]:
    """Yield groups of chunks in write order, about `GROUP_BYTES` each, to read together.

    Small tensors are read with their neighbours, as the checkpoint reads whole blocks.
    """
    group: list[TensorChunk] = []
    filled = 0
    for p in shard:
        for tensor_slice in p.tensor.slices:
            for band in row_boxes(tensor_slice.sizes, p.dtype.itemsize):
                box = tensor_slice.mcore_box(band)
                group.append(_chunk_of(p, tensor_slice.mcore_name, box))
                filled += box.numel * p.dtype.itemsize
                if filled >= GROUP_BYTES:
                    yield group
                    group, filled = [], 0
    if group:
        yield group


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(fields, indent=2, sort_keys=True) + "\n")

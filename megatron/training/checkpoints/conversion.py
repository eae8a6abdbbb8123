# SPDX-License-Identifier: Apache-2.0
"""Checkpoints to one file, and foreign folders to checkpoints: streamed, one process.

A foreign folder is read only where `--from` specifies its kind. Flags describe the model of a
folder that does not. Whole tensors are built when they are written into the file or checkpoint, a
chunk at a time.
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
from megatron.core.dist_checkpointing.run_folder import MAX_TRACKER_BYTES, TRACKER_NAME, sync_folder
from megatron.core.dist_checkpointing.shard_format import ITEM_BYTES, Output, encode_header
from megatron.core.dist_checkpointing.shards import DTYPES, as_bytes
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.untrusted_files import open_to_write, read_regular
from megatron.core.weight_gather import Storage
from megatron.hf.config_json import architecture_of
from megatron.hf.parts import MappedTensor, Part, TensorMap
from megatron.hf.tensor_map import tensor_map
from megatron.training.checkpoint_io import FORMAT
from megatron.training.checkpoints.dcp_folder import DcpFolder
from megatron.training.checkpoints.inspection import (
    digested_rows,
    existing_folder,
    kind_of_tensor,
    one_checkpoint,
    read_box,
    size_text,
)
from megatron.training.checkpoints.options import ConvertConfig, ConvertToNativeConfig
from megatron.training.checkpoints.upstream_names import (
    shape_of_folder,
    shape_of_model,
    upstream_map,
)
from megatron.training.config import Config
from megatron.training.config.check import check
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.data.vocabulary import read_vocabulary
from megatron.training.newest_checkpoint import METADATA_NAME

_SECTIONS = ("model", "attention", "position", "experts", "tokenizer")

#: What a run needs and a model does not depend on.
_ANY_RUN = {"micro-batch-size": 1, "train-iters": 1, "lr": 1e-3, "mock-data": True}


class DescribedModel(NamedTuple):
    """A model, its options by flag name, and how to make its tokenizer again."""

    config: GPTConfig
    options: Mapping[str, Any]
    tokenizer: Mapping[str, Any]


def described_model(chosen: ConvertToNativeConfig) -> DescribedModel:
    """Return the model of some flags, as pretraining would build it. Raises ValueError."""
    wanted = [option for option in options(Config) if option.section in _SECTIONS]
    given = flatten(chosen)
    length = chosen.model.max_position_embeddings or 1
    learned = chosen.position.position_embedding_type == "learned_absolute"
    if learned and chosen.model.max_position_embeddings is None:
        raise ValueError(
            "missing --max-position-embeddings: --position-embedding-type learned_absolute has a "
            "vector for each; give it, or another type, such as rope"
        )
    described = {option.name: given[option.name] for option in wanted}
    config = build(Config, {**described, **_ANY_RUN, "seq-length": length})
    if problems := check(config, 1):
        raise ValueError("; ".join(problems))
    if chosen.tokenizer.vocab_size is None and chosen.tokenizer.tokenizer_model is None:
        raise ValueError("missing --vocab-size: give it without padding, or give --tokenizer-model")
    resolved = resolve(config, 1).config
    vocabulary = read_vocabulary(resolved.tokenizer, ())
    found = flatten(resolved)
    kept = {option.name: found[option.name] for option in wanted}
    if chosen.model.max_position_embeddings is None:
        del kept["max-position-embeddings"]  # derived from a length that nobody gave
    kept["vocab-size"] = vocabulary.size
    return DescribedModel(gpt_config(resolved, vocabulary.size), kept, vocabulary.tokenizer)


#: Fills a tensor with a box of another.
ReadBox = Callable[[Box, torch.Tensor], None]


class WholeTensor(NamedTuple):
    """A tensor: dtype by the safetensors format's name, and what yields its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]]


def of_checkpoint(reader: CheckpointReader, name: str) -> WholeTensor:
    """Return a tensor of one of our checkpoints."""
    stored = reader.manifest.tensors[name]

    def pieces() -> Iterator[memoryview]:
        for box in digested_rows(stored.shape, stored.dtype, reader.manifest):
            yield as_bytes(read_box(reader, name, box))

    return WholeTensor(name, stored.dtype, stored.shape, pieces)


def of_folder(folder: DcpFolder, name: str) -> WholeTensor:
    """Return a tensor of a foreign folder under its own name. Raises ValueError."""
    stored = folder.find(name)
    pieces = partial(_bands, stored.shape, stored.dtype, partial(folder.read_box, name))
    return WholeTensor(name, stored.dtype, stored.shape, pieces)


def of_parts(folder: DcpFolder, mapped: MappedTensor) -> WholeTensor:
    """Return a tensor of this project that consists of parts of a foreign folder's tensors."""
    dtypes = {folder.tensors[part.theirs].dtype for part in mapped.parts}
    dtype = "F32" if mapped.fp32 or len(dtypes) > 1 else dtypes.pop()

    def pieces() -> Iterator[memoryview]:
        for part in mapped.parts:
            yield from _bands(part.sizes, dtype, partial(_read_part, folder, part))

    return WholeTensor(mapped.name, dtype, mapped.shape, pieces)


def _read_part(folder: DcpFolder, part: Part, box: Box, piece: torch.Tensor) -> None:
    """Read a box that counts from the first element of a part."""
    inner = part.in_theirs(box)
    folder.read_box(part.theirs, inner, piece.view(inner.sizes))


def as_chunk(tensor: WholeTensor) -> TensorChunk:
    """Return a tensor for a checkpoint that one process writes."""
    return TensorChunk(
        name=tensor.name,
        shape=tensor.shape,
        offsets=(0,) * len(tensor.shape),
        tensor=torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta"),
        replica_ranks=(0,),
        pieces=tensor.pieces,
    )


def write_file(target: Path, tensors: Sequence[WholeTensor]) -> int:
    """Write a new safetensors file, there whole or not at all, and return its size.

    Raises:
        OSError: it cannot be written.
    """
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    header = encode_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered])
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        with open_to_write(temporary, "x") as file:
            output = Output(file.fileno())
            output.write(memoryview(header))
            for tensor in ordered:
                for piece in tensor.pieces():
                    output.write(piece)
            os.fsync(file.fileno())
        os.rename(temporary, target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return output.position


def _bands(shape: tuple[int, ...], dtype: str, read: ReadBox) -> Iterator[memoryview]:
    """Yield the bytes of a box of this shape in bands of rows, each valid until the next."""
    if not math.prod(shape):
        return
    for box in row_boxes(shape, ITEM_BYTES[dtype]):
        piece = torch.empty(box.sizes, dtype=DTYPES[dtype])
        read(box, piece)
        yield as_bytes(piece)


#: Problems, or names that are left out, in one line; the rest is counted.
MAX_NAMED = 8

_OPTIMIZER = re.compile(r"(^|\.)optim(izer)?[./]")
#: Buffers that follow from the configuration, or that only a kernel of there needs.
_DERIVED = re.compile(r"\.inv_freq$|(^|\.|/)_extra_state(/|$)")
_FLOATS = ("F64", "F32", "F16", "BF16")


def convert(chosen: ConvertConfig | ConvertToNativeConfig) -> int:
    """Convert a checkpoint and print what was written and what was left out. Returns 0.

    Raises:
        ValueError: the source is none, is refused or does not fit, or the target is taken.
        CheckpointError: a checkpoint of this project is corrupt.
    """
    if isinstance(chosen, ConvertConfig):
        _to_file(chosen)
    else:
        _to_native(chosen)
    return 0


def _to_file(chosen: ConvertConfig) -> None:
    target = Path(chosen.target)
    if target.exists():
        raise ValueError(f"{target} is there already: name another file, or remove it")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent}: there is no such folder: make it")
    others: tuple[str, ...] = ()
    if chosen.from_ == "native":
        source = one_checkpoint(chosen.source)
        with CheckpointReader(source) as reader:
            names = list(reader.manifest.tensors)
            kept = _without_optimizer(names, chosen.with_optimizer)
            kept = [name for name in kept if not kind_of_tensor(name).startswith("experiment.")]
            size = _write(target, [of_checkpoint(reader, name) for name in kept])
    else:
        source = foreign_folder(chosen.source, chosen.from_)
        with DcpFolder(source, checksums=chosen.checksums) as folder:
            names, others = list(folder.tensors), folder.others
            kept = _without_optimizer(names, chosen.with_optimizer)
            size = _write(target, [of_folder(folder, name) for name in kept])
    print(f"converted {source} to {target}: {len(kept)} tensors, {size_text(size)}", flush=True)
    _say_left_out(set(names) - set(kept), others)


def _write(target: Path, tensors: list[WholeTensor]) -> int:
    if not tensors:
        raise ValueError("the source holds no tensor: name another checkpoint")
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
    # Not even others: a run would go on from the new one instead of its own last.
    if found := list_checkpoints(root):
        raise ValueError(f"{root} holds {found[0].name} already: name another folder")
    with DcpFolder(source, checksums=conversion.checksums) as folder:
        upstream = conversion.from_ == "torch_dist"
        mapped = _upstream(folder, model) if upstream else _by_name(folder, model.config)
        left = _check(folder, mapped, tied=model.config.tied)
        tensors = [of_parts(folder, tensor) for tensor in mapped.ours.values()]
        try:
            made = save_checkpoint(
                root,
                0,
                [as_chunk(tensor) for tensor in tensors],
                _extra(model, tensors),
                coordinator=Solo(),
            )
        except CheckpointError as error:
            raise ValueError(str(error)) from error
        others = folder.others
    print(f"converted {source} to {made}: {len(tensors)} weights", flush=True)
    _say_padding(mapped)
    _say_left_out(left, others)


def foreign_folder(text: str, kind: str) -> Path:
    """Return the folder with `.metadata` that a path means: itself, or the latest of a run.

    Raises:
        ValueError: there is none.
    """
    path = existing_folder(text)
    if (path / METADATA_NAME).is_file():
        return path
    try:
        latest = read_regular(path / TRACKER_NAME, MAX_TRACKER_BYTES).decode(errors="replace")
    except OSError:
        latest = ""
    latest = latest.strip()
    named = "release" if latest == "release" else ""
    if latest.isascii() and latest.isdigit() and len(latest) < 18:
        named = f"iter_{int(latest):07d}"
    if named and (path / named / METADATA_NAME).is_file():
        return path / named
    raise ValueError(f"{path} holds no {METADATA_NAME}: it is no {kind} checkpoint")


def _upstream(folder: DcpFolder, model: DescribedModel) -> TensorMap:
    """Return the map of a torch_dist folder. Raises ValueError where the flags are of another."""
    mapped = upstream_map(folder.tensors, model.config)
    theirs, ours = shape_of_folder(folder.tensors), shape_of_model(model.config)
    odd = [
        f"{name} is {theirs[name]} there, {ours[name]} by the flags"
        for name in ours
        if name in theirs and theirs[name] != ours[name]
    ]
    if odd:
        raise ValueError(f"{folder.path} is of another model: {'; '.join(odd)}")
    return mapped


def _by_name(folder: DcpFolder, config: GPTConfig) -> TensorMap:
    """Return the map of a folder whose names are this project's, or those of transformers.

    They may stand after one prefix, as `model.` of a dict in a dict.

    Raises:
        ValueError: they are neither.
    """
    own = _own_names(config)
    for first, mapped in (
        ("embedding.weight", lambda: own),
        (
            "model.embed_tokens.weight",
            lambda: tensor_map(architecture_of(config), config, names=folder.tensors),
        ),
    ):
        found = [name for name in folder.tensors if name == first or name.endswith(f".{first}")]
        found = [name for name in found if not _OPTIMIZER.search(name)]
        if found:
            return _prefixed(mapped(), min(found, key=len).removesuffix(first))
    raise ValueError(
        f"{folder.path} has neither embedding.weight nor model.embed_tokens.weight: only our names "
        "and those of transformers are known, use --to single-file"
    )


def _own_names(config: GPTConfig) -> TensorMap:
    """Return the map of a folder with our own names."""
    made = TensorMap()
    model = GPTModel(
        config,
        ProcessGroupCollection.single(),
        device="meta",
        storage=Storage(initialize=False),
    )
    segments = [s for h in model.store.handles.values() for s in h.sharding.segments]
    shapes = [(segment.name, segment.shape, False) for segment in segments]
    shapes += [(name, tuple(state.shape), True) for name, state in model.store.states.items()]
    for name, shape, fp32 in shapes:
        zeros = (0,) * len(shape)
        made.declare((name, shape), (name, shape), fp32=fp32)
        made.add(Part(name, zeros, name, zeros, shape))
    return made


def _prefixed(mapped: TensorMap, prefix: str) -> TensorMap:
    """Return a map in which all Hugging Face names have a prefix."""

    def moved(tensor: MappedTensor, name: str) -> MappedTensor:
        parts = [part._replace(theirs=f"{prefix}{part.theirs}") for part in tensor.parts]
        return MappedTensor(name=name, shape=tensor.shape, fp32=tensor.fp32, parts=parts)

    made = TensorMap()
    for name, tensor in mapped.theirs.items():
        made.theirs[f"{prefix}{name}"] = moved(tensor, f"{prefix}{name}")
    for name, tensor in mapped.ours.items():
        made.ours[name] = moved(tensor, name)
    made.copies.update({f"{prefix}{name}": ours for name, ours in mapped.copies.items()})
    return made


def _check(folder: DcpFolder, mapped: TensorMap, *, tied: bool) -> set[str]:
    """Compare the tensors of a folder with those of a model; return those that are left out.

    Raises:
        ValueError: one is missing, is no float or has another shape, or has no place in the model.
    """
    problems = []
    for name, tensor in mapped.theirs.items():
        if name not in folder.tensors:
            if name not in mapped.copies:
                problems.append(f"{name} is missing")
            continue
        found = folder.find(name)
        if found.shape != tensor.shape:
            problems.append(
                f"{name} is {list(found.shape)}, the flags make it {list(tensor.shape)}"
            )
        elif found.dtype not in _FLOATS:
            problems.append(f"{name} has dtype {found.dtype}: supported are {', '.join(_FLOATS)}")
    left = folder.tensors.keys() - mapped.theirs.keys()
    problems += [
        f"{name} has no place in the model of the flags"
        for name in sorted(left)
        if not _OPTIMIZER.search(name)
        and not _DERIVED.search(name)
        and not (tied and name.endswith("lm_head.weight"))
    ]
    if problems:
        more = len(problems) - MAX_NAMED
        raise ValueError(
            f"{folder.path} is of another model: {'; '.join(problems[:MAX_NAMED])}"
            f"{f'; and {more} more' if more > 0 else ''}"
        )
    return left


def _extra(model: DescribedModel, tensors: list[WholeTensor]) -> Mapping[str, object]:
    """Return what the checkpoint states about itself: as training does, but for its progress."""
    dtypes = {tensor.dtype for tensor in tensors}
    return {
        "format": FORMAT,
        "model": model.config.to_json(),
        "config": {**model.options, "bf16": dtypes == {"BF16"}, "fp16": dtypes == {"F16"}},
        "tokenizer": dict(model.tokenizer),
        "weights_only": True,
    }


def _say_padding(mapped: TensorMap) -> None:
    """Report which foreign rows have been taken for padding: the folder does not specify it."""
    for name, tensor in mapped.theirs.items():
        rows = sum(part.sizes[0] for part in tensor.parts)
        if len(tensor.shape) == 2 and len(tensor.parts) == 1 and rows < tensor.shape[0]:
            print(f"took the last {tensor.shape[0] - rows} rows of {name} for padding", flush=True)


def _say_left_out(tensors: set[str], others: tuple[str, ...]) -> None:
    for what, names in (
        ("tensors, of an optimizer or derived", sorted(tensors)),
        ("items that are no tensors and were not read", sorted(others)),
    ):
        if names:
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            print(f"left out {len(names)} {what}: {', '.join(names[:MAX_NAMED])}{more}", flush=True)

# SPDX-License-Identifier: Apache-2.0
"""Weights of a Hugging Face folder into a model on any layout: every rank reads its own slices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing import CheckpointError, Coordinator, TensorChunk
from megatron.hf.config_json import HuggingFaceModel
from megatron.hf.folder import CONFIG, HuggingFaceFolder, OpenTensors
from megatron.hf.quantized import quantization_of
from megatron.hf.tensor_map import TensorMap, tensor_map

#: Problems named in one error; the rest is counted.
MAX_PROBLEMS = 8

#: Missing tensors up to which they are looked for by name.
MAX_MISSING = 1000

_FLOATS = ("F32", "BF16", "F16", "F64")
_LAYER = re.compile(r"model\.layers\.\d+\.")
#: Written by old versions of transformers; follows from config.json.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def check_tensors(
    folder: HuggingFaceFolder, opened: OpenTensors, model: HuggingFaceModel
) -> TensorMap:
    """Compare the tensors of a folder with those that its config.json needs, and map the latter.

    Raises:
        ValueError: one is missing, has another shape, is no floating-point tensor, or has no place
            in the model; names the first of them.
    """
    if model.config.num_layers > len(opened):
        raise ValueError(
            f"{folder.path} does not hold the weights of its config.json: that has "
            f"{model.config.num_layers} layers, the files {len(opened)} tensors"
        )
    most = len(opened) + MAX_MISSING
    try:
        mapped = tensor_map(model.kind, model.config, names=opened, max_tensors=most)
    except ValueError as error:
        raise ValueError(
            f"{folder.path} does not hold the weights of its config.json: {error}; the files hold "
            f"{len(opened)} tensors"
        ) from None
    problems = _problems(mapped, opened, model)
    named = list(islice(problems, MAX_PROBLEMS))
    if named:
        more = sum(1 for _ in problems)
        raise ValueError(
            f"{folder.path} does not hold the weights of its config.json: "
            f"{'; '.join(named)}{f'; and {more} more' if more else ''}"
        )
    return mapped


def _problems(mapped: TensorMap, opened: OpenTensors, model: HuggingFaceModel) -> Iterator[str]:
    """Yield what is wrong with the tensors of a folder."""
    for name, tensor in mapped.theirs.items():
        if name not in opened:
            if name not in mapped.copies:
                yield f"{name} is missing"
            continue
        found = opened.find(name)
        if found.shape != tensor.shape:
            yield f"{name} is {list(found.shape)}, config.json makes it {list(tensor.shape)}"
        if found.dtype not in _FLOATS:
            yield f"{name} has dtype {found.dtype}: supported are {', '.join(_FLOATS)}"
    for name in opened:
        left_out = _DERIVED.fullmatch(name) or _is_left_out(name, model)
        if name not in mapped.theirs and not left_out:
            yield f"{name} has no place in the model"


def check_copies(
    folder: HuggingFaceFolder,
    opened: OpenTensors,
    mapped: TensorMap,
    *,
    chunks: Sequence[TensorChunk],
) -> None:
    """Compare tensors that repeat another one with it, as far as chunks hold that.

    Raises:
        ValueError: one differs.
    """
    for name, ours in mapped.copies.items():
        source = mapped.ours[ours].parts[0]
        boxes = [chunk.box for chunk in chunks if chunk.name == ours and name in opened]
        for common in filter(None, map(source.common, boxes)):
            for band in row_boxes(common.sizes, torch.float32.itemsize):
                offsets = tuple(a + b for a, b in zip(common.offsets, band.offsets, strict=True))
                both = [torch.empty(band.sizes), torch.empty(band.sizes)]
                for piece, of in zip(both, (name, source.theirs), strict=True):
                    opened.read_box(of, Box(offsets, band.sizes), piece)
                if not torch.equal(*both):
                    raise ValueError(_differing(folder, name, source.theirs))


def _differing(folder: HuggingFaceFolder, name: str, source: str) -> str:
    if _LAYER.match(name):
        return f"{folder.path}: {name} differs from {source}: here they are one weight"
    return (
        f"{folder.path}: {name} differs from {source}, which config.json ties it to: set "
        "tie_word_embeddings to false there, as transformers does when it loads them"
    )


def reading_lines(folder: HuggingFaceFolder, model: HuggingFaceModel) -> list[str]:
    """Return lines about the tensors of a folder that are passed over, and about quantized ones."""
    found = []
    if count := sum(_is_left_out(name, model) for name in folder.files):
        found.append(
            f"left out {count} tensors under {model.kind.left_out}, layers of further prediction "
            f"that {model.kind.class_name} has no part for"
        )
    quantization = quantization_of(folder.config, where=CONFIG)
    if quantization is not None:
        found.append(quantization.line(folder.files))
    return found


def _is_left_out(name: str, model: HuggingFaceModel) -> bool:
    return model.kind.left_out is not None and name.startswith(model.kind.left_out)


class _Read(NamedTuple):
    """A box of a Hugging Face tensor, and the view of a local tensor that it is copied to."""

    name: str
    box: Box
    target: torch.Tensor


def _reads(mapped: TensorMap, chunk: TensorChunk) -> Iterator[_Read]:
    """Yield what makes up a chunk."""
    for part in mapped.ours[chunk.name].parts:
        common = part.common(chunk.box)
        if common is None:
            continue
        place = part.in_ours(common).seen_from(chunk.box.offsets)
        box = part.in_theirs(common)
        target = chunk.tensor.detach()[place.slices]
        yield _Read(part.theirs, box, target.view(box.sizes))


def read_weights(
    folder: HuggingFaceFolder,
    model: HuggingFaceModel,
    chunks: Sequence[TensorChunk],
    *,
    coordinator: Coordinator,
) -> int:
    """Fill a model's weights from a folder. Every rank calls this with the chunks it holds.

    Args:
        folder: where from.
        model: what its config.json specifies.
        chunks: boxes of logical weights, under our names; converted to the dtype of each.

    Returns:
        How many bytes this rank has read.

    Raises:
        ValueError: on every rank alike: the folder is damaged, or holds another model.
    """
    counts: list[int] = []

    def read() -> None:
        with folder.open_tensors() as opened:
            mapped = check_tensors(folder, opened, model)
            reads = [read for chunk in chunks for read in _reads(mapped, chunk)]
            for name, box, target in sorted(reads, key=lambda r: opened.find(r.name).begin):
                opened.read_box(name, box, target)
            check_copies(folder, opened, mapped, chunks=chunks)
            counts.append(opened.bytes_read)

    coordinator.begin(f"reading {folder.path.name}")
    try:
        coordinator.agree("read", read, lambda answers: None)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    return counts[0]

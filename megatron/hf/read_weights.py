# SPDX-License-Identifier: Apache-2.0
"""Load a Hugging Face folder into a model on any layout; each rank reads only its shards."""

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
from megatron.hf.quantization_config import quantization_of
from megatron.hf.tensor_map import TensorMap, tensor_map

#: Problems listed in one error; further ones are counted.
MAX_PROBLEMS = 8

#: With more missing tensors than this, only their number is reported.
MAX_MISSING = 1000

_FLOATS = ("F32", "BF16", "F16", "F64")
_LAYER = re.compile(r"model\.layers\.\d+\.")
#: Buffers that old versions of transformers wrote; config.json determines them.
_DERIVED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    r"|(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
)


def check_tensors(
    folder: HuggingFaceFolder, opened: OpenTensors, model: HuggingFaceModel
) -> TensorMap:
    """Check the tensors of a folder against its config.json and return their map.

    Raises:
        ValueError: a tensor is missing, has the wrong shape, is not floating-point, or does not
            belong to the model. The message lists the first few such tensors.
    """
    if model.config.num_layers > len(opened):
        raise ValueError(
            f"{folder.path} does not contain the weights of its config.json: it "
            f"specifies {model.config.num_layers} layers, the files contain {len(opened)} tensors"
        )
    max_tensors = len(opened) + MAX_MISSING
    try:
        mapped = tensor_map(model.kind, model.config, names=opened, max_tensors=max_tensors)
    except ValueError as error:
        raise ValueError(
            f"{folder.path} does not contain the weights of its config.json: {error}; the files "
            f"contain {len(opened)} tensors"
        ) from None
    problems = _problems(mapped, opened, model)
    first_problems = list(islice(problems, MAX_PROBLEMS))
    if first_problems:
        num_others = sum(1 for _ in problems)
        raise ValueError(
            f"{folder.path} does not contain the weights of its config.json: "
            f"{'; '.join(first_problems)}{f'; and {num_others} more' if num_others else ''}"
        )
    return mapped


def _problems(mapped: TensorMap, opened: OpenTensors, model: HuggingFaceModel) -> Iterator[str]:
    """Yield one message per invalid tensor of a folder."""
    for name, tensor in mapped.hf_tensors.items():
        if name not in opened:
            if name not in mapped.copies:
                yield f"{name} is missing"
            continue
        tensor_info = opened.find(name)
        shape = opened.stored_shape(tensor)
        if tensor_info.shape != shape:
            yield f"{name} is {list(tensor_info.shape)}, config.json requires {list(shape)}"
        if tensor_info.dtype not in _FLOATS:
            yield f"{name} has dtype {tensor_info.dtype}: supported are {', '.join(_FLOATS)}"
    for name in opened:
        is_ignored = _DERIVED.fullmatch(name) or _is_left_out(name, model)
        if name not in mapped.hf_tensors and not is_ignored and not opened.is_zero_bias(name):
            yield f"{name} does not belong to the model"


def check_copies(
    folder: HuggingFaceFolder,
    opened: OpenTensors,
    mapped: TensorMap,
    *,
    chunks: Sequence[TensorChunk],
) -> None:
    """Check that tensors which duplicate another one are equal to it, within the chunks' boxes.

    Raises:
        ValueError: a copy differs.
    """
    for name, mcore_name in mapped.copies.items():
        source = mapped.mcore_tensors[mcore_name].slices[0]
        boxes = [chunk.box for chunk in chunks if chunk.name == mcore_name and name in opened]
        for common in filter(None, map(source.common, boxes)):
            for band in row_boxes(common.sizes, torch.float32.itemsize):
                offsets = tuple(a + b for a, b in zip(common.offsets, band.offsets, strict=True))
                values = [torch.empty(band.sizes), torch.empty(band.sizes)]
                for target, tensor_name in zip(values, (name, source.hf_name), strict=True):
                    opened.read_box(tensor_name, Box(offsets, band.sizes), target)
                if not torch.equal(*values):
                    raise ValueError(_differing(folder, name, source.hf_name))


def _differing(folder: HuggingFaceFolder, name: str, source: str) -> str:
    if _LAYER.match(name):
        return f"{folder.path}: {name} differs from {source}: here they are one weight"
    return (
        f"{folder.path}: {name} differs from {source}, which config.json ties it to: set "
        "tie_word_embeddings to false there, as transformers does when it loads them"
    )


def reading_lines(folder: HuggingFaceFolder, model: HuggingFaceModel) -> list[str]:
    """Return lines for the log about skipped and about quantized tensors of a folder."""
    lines = []
    if count := sum(_is_left_out(name, model) for name in folder.files):
        lines.append(
            f"skipped {count} tensors under {model.kind.skipped_prefix}: MTP layers, which "
            f"{model.kind.class_name} does not have"
        )
    if folder.num_left_out:
        lines.append(
            f"left out {folder.num_left_out} tensors that process images: the model is "
            f"{model.kind.class_name}"
        )
    quantization = quantization_of(folder.config, where=CONFIG)
    if quantization is not None:
        lines.append(quantization.line(folder.files))
    return lines


def _is_left_out(name: str, model: HuggingFaceModel) -> bool:
    return model.kind.skipped_prefix is not None and name.startswith(model.kind.skipped_prefix)


class _Read(NamedTuple):
    """A box of a Hugging Face tensor and the view of a local tensor to copy it into."""

    name: str
    box: Box
    target: torch.Tensor


def _reads(mapped: TensorMap, chunk: TensorChunk) -> Iterator[_Read]:
    """Yield the reads that fill a chunk."""
    for tensor_slice in mapped.mcore_tensors[chunk.name].slices:
        common = tensor_slice.common(chunk.box)
        if common is None:
            continue
        target_box = tensor_slice.mcore_box(common).seen_from(chunk.box.offsets)
        box = tensor_slice.hf_box(common)
        target = chunk.tensor.detach()[target_box.slices]
        yield _Read(tensor_slice.hf_name, box, target.view(box.sizes))


def read_weights(
    folder: HuggingFaceFolder,
    model: HuggingFaceModel,
    chunks: Sequence[TensorChunk],
    *,
    coordinator: Coordinator,
) -> int:
    """Load a model's weights from a folder. Collective: every rank passes its own chunks.

    Args:
        folder: the folder.
        model: the model that its config.json specifies.
        chunks: boxes of logical weights, by our names. Values are converted to each chunk's dtype.

    Returns:
        The number of bytes that this rank has read.

    Raises:
        ValueError: on every rank: the folder is corrupt or contains another model.
    """
    bytes_read: list[int] = []

    def read() -> None:
        with folder.open_tensors() as opened:
            mapped = check_tensors(folder, opened, model)
            reads = [box_read for chunk in chunks for box_read in _reads(mapped, chunk)]
            for name, box, target in sorted(reads, key=lambda r: opened.find(r.name).begin):
                opened.read_mapped(mapped.hf_tensors[name], box, target)
            check_copies(folder, opened, mapped, chunks=chunks)
            bytes_read.append(opened.bytes_read)

    coordinator.begin(f"reading {folder.path.name}")
    try:
        coordinator.agree("read", read, lambda answers: None)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    return bytes_read[0]

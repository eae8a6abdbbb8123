# SPDX-License-Identifier: Apache-2.0
"""Weights of a Hugging Face folder into a model on any layout: every rank reads its own slices."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.core.dist_checkpointing import CheckpointError, Coordinator, TensorChunk
from megatron.hf.architectures import MappedTensor, mapped_tensors
from megatron.hf.folder import HuggingFaceFolder, OpenTensors
from megatron.hf.model_config import HuggingFaceModel

#: Problems named in one error; the rest is counted.
MAX_PROBLEMS = 8

_FLOATS = ("F32", "BF16", "F16", "F64")
#: Written by old versions of transformers; follows from config.json.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def check_tensors(
    folder: HuggingFaceFolder, opened: OpenTensors, model: HuggingFaceModel
) -> list[MappedTensor]:
    """Compare the tensors of a folder with those that its config.json needs, and list the latter.

    Raises:
        ValueError: one is missing, has another shape, is no floating-point tensor, or has no place
            in the model; names the first of them.
    """
    wanted = list(mapped_tensors(model.kind, model.config))
    problems = []
    for tensor in wanted:
        if tensor.theirs not in opened:
            problems.append(f"{tensor.theirs} is missing")
            continue
        found = opened.find(tensor.theirs)
        if found.shape != tensor.shape:
            problems.append(
                f"{tensor.theirs} is {list(found.shape)}, config.json makes it {list(tensor.shape)}"
            )
        if found.dtype not in _FLOATS:
            problems.append(
                f"{tensor.theirs} has dtype {found.dtype}: supported are {', '.join(_FLOATS)}"
            )
    known = {tensor.theirs for tensor in wanted}
    if model.config.tied:
        known.add("lm_head.weight")  # a copy of the embedding, as some tools write it
    problems += [
        f"{name} has no place in the model"
        for name in opened
        if name not in known and not _DERIVED.fullmatch(name)
    ]
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise ValueError(
            f"{folder.path} does not hold the weights of its config.json: "
            f"{'; '.join(problems[:MAX_PROBLEMS])}{f'; and {more} more' if more > 0 else ''}"
        )
    return wanted


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
        model: what its config.json says.
        chunks: boxes of logical weights, under our names; converted to the dtype of each.

    Returns:
        How many bytes this rank has read.

    Raises:
        ValueError: on every rank alike: the folder is damaged, or holds another model.
    """
    counts: list[int] = []

    def read() -> None:
        with folder.open_tensors() as opened:
            names = {t.ours: t.theirs for t in check_tensors(folder, opened, model)}
            order = sorted(chunks, key=lambda c: opened.find(names[c.name]).begin)
            for chunk in order:
                name = names[chunk.name]
                opened.file(name).read_box(name, chunk.box, chunk.tensor.detach())
            counts.append(opened.bytes_read)

    coordinator.begin(f"reading {folder.path.name}")
    try:
        coordinator.agree("read", read, lambda answers: None)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    return counts[0]

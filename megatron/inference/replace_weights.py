# SPDX-License-Identifier: Apache-2.0
"""Weights of a checkpoint, or of a training run, into a model that is loaded: all, or none.

What a checkpoint replaces is kept in the host's memory, and put back after any error. What comes
from a training run is in the host's memory before any of it is put in.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.boxes import TensorChunk
from megatron.core.dist_checkpointing import (
    CheckpointError,
    TransferGroup,
    load_checkpoint,
    weight_chunks,
)
from megatron.core.dist_checkpointing.manifest import compare_architecture
from megatron.core.models.gpt import GPTConfig
from megatron.hf.folder import is_folder
from megatron.hf.read_weights import read_weights
from megatron.inference.checkpoint_model import CheckpointModel, generating
from megatron.training.checkpoints.hf_options import open_model
from megatron.training.newest_checkpoint import load_newest, read_together
from megatron.training.stored_model import stored_model

# In the names of fields that say nothing about what a model computes once it is trained.
_TRAINING_ONLY = ("dropout", "init_std", "loss")


@contextlib.contextmanager
def all_or_none(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put back what tensors held if the block fails."""
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        yield
    except BaseException:
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.detach().copy_(values)
        raise


def replace_weights(loaded: CheckpointModel, load: str) -> Path:
    """Read the weights of a checkpoint or a Hugging Face folder; all ranks call it.

    Args:
        loaded: the model; after an error it has the weights of before.
        load: what `--load` may be. No older checkpoint is taken for a damaged one.

    Returns:
        The folder that they came from.

    Raises:
        ValueError: there are none, they are damaged, or of another model; one line, on every rank.
    """
    try:
        with all_or_none(loaded.model.store.tensors()):
            return _from_folder(loaded, load) if is_folder(load) else _from_run(loaded, load)
    except CheckpointError as error:
        raise ValueError(f"load: {error}") from None
    except OSError as error:
        raise ValueError(f"load {load} cannot be read: {error.strerror or error}") from None


def receive_weights(
    loaded: CheckpointModel, address: str, *, senders: int, timeout_seconds: float
) -> tuple[list[TensorChunk], int]:
    """Receive weights from the ranks of a training run; all ranks call it, in any thread.

    Args:
        loaded: the model, which keeps the weights that it has.
        address, senders, timeout_seconds: as in `TransferGroup`.

    Returns:
        The weights in the host's memory, for `take_weights`, and the bytes received.

    Raises:
        ValueError: they do not come, are lost, or are of another model; one line, on every rank.
    """
    group = TransferGroup(
        address=address,
        rank=loaded.coordinator.rank,
        senders=senders,
        receivers=loaded.coordinator.world_size,
        timeout_seconds=timeout_seconds,
    )
    received = [
        dataclasses.replace(chunk, tensor=torch.empty(chunk.tensor.shape, dtype=chunk.tensor.dtype))
        for chunk in weight_chunks(loaded.model.store)
    ]
    return received, group.receive(received)


@torch.no_grad()
def take_weights(loaded: CheckpointModel, received: Sequence[TensorChunk]) -> None:
    """Copy weights from `receive_weights` into the model."""
    for held, new in zip(weight_chunks(loaded.model.store), received, strict=True):
        held.tensor.copy_(new.tensor)


def _from_folder(loaded: CheckpointModel, load: str) -> Path:
    folder, described = open_model(load, flag="load")
    _check_model(loaded, described.config, load)
    chunks = weight_chunks(loaded.model.store)
    read_weights(folder, described, chunks, coordinator=loaded.coordinator)
    return folder.path


def _from_run(loaded: CheckpointModel, load: str) -> Path:
    def use(folder: Path) -> None:
        config = stored_model(folder, read_together(folder, loaded.coordinator))
        _check_model(loaded, config, load)
        chunks = weight_chunks(loaded.model.store)
        load_checkpoint(folder, chunks, coordinator=loaded.coordinator, convert_dtype=True)

    found = load_newest(load, use, loaded.coordinator, flag="load", fall_back=False)
    if found is None:
        raise ValueError(f"load {load}: there is no checkpoint")
    return found[0]


def _check_model(loaded: CheckpointModel, config: GPTConfig, load: str) -> None:
    """Raise ValueError for weights of another model."""
    mine = loaded.model.config
    theirs = generating(config, further=bool(mine.mtp_num_layers))
    different = [
        line
        for line in compare_architecture(theirs.to_json(), mine.to_json())
        if not any(word in line.split(":")[0] for word in _TRAINING_ONLY)
    ]
    if different:
        raise ValueError(f"load {load} is of another model: {'; '.join(different)}")

# SPDX-License-Identifier: Apache-2.0
"""Replace the weights of a loaded model from a checkpoint or a training run: all or none.

Before a checkpoint is read, the old weights are copied to host memory and restored after any error.
Weights of a training run are received in host memory before any weight of the model changes.
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
from megatron.inference.checkpoint_model import CheckpointModel
from megatron.inference.rank_context import inference_model_config
from megatron.training.checkpointing.find import load_newest, read_together
from megatron.training.checkpointing.hf_import import open_model
from megatron.training.checkpointing.stored_model import stored_model

# Words in the names of config fields that only training uses; they may differ between the models.
_TRAINING_ONLY = ("dropout", "init_std", "loss")


@contextlib.contextmanager
def restore_on_error(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of tensors if the block fails."""
    saved = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        yield
    except BaseException:
        for tensor, values in zip(tensors, saved, strict=True):
            tensor.detach().copy_(values)
        raise


def replace_weights(loaded: CheckpointModel, load: str) -> Path:
    """Read the weights of a checkpoint or a Hugging Face folder; all ranks call it.

    Args:
        loaded: the model; after an error it has its old weights.
        load: a path as for `--load`. An older checkpoint does not replace a corrupt one.

    Returns:
        The folder that was read.

    Raises:
        ValueError: the weights are missing, corrupt, or of another model; one line, on every rank.
    """
    try:
        with restore_on_error(loaded.model.store.tensors()):
            return _from_folder(loaded, load) if is_folder(load) else _from_checkpoint(loaded, load)
    except CheckpointError as error:
        raise ValueError(f"load: {error}") from None
    except OSError as error:
        raise ValueError(f"load {load} cannot be read: {error.strerror or error}") from None


def receive_weights(
    loaded: CheckpointModel, address: str, *, senders: int, timeout_seconds: float
) -> tuple[list[TensorChunk], int]:
    """Receive weights from the ranks of a training run; all ranks call it, in any thread.

    Args:
        loaded: the model; its weights do not change.
        address, senders, timeout_seconds: as in `TransferGroup`.

    Returns:
        The weights in host memory, for `copy_received_weights`, and the bytes received.

    Raises:
        ValueError: the transfer fails or is for another model; one line, on every rank.
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
def copy_received_weights(loaded: CheckpointModel, received: Sequence[TensorChunk]) -> None:
    """Copy the weights of `receive_weights` into the model."""
    for target, source in zip(weight_chunks(loaded.model.store), received, strict=True):
        target.tensor.copy_(source.tensor)


def _from_folder(loaded: CheckpointModel, load: str) -> Path:
    folder, hf_model = open_model(load, flag="load")
    _check_model(loaded, hf_model.config, load)
    chunks = weight_chunks(loaded.model.store)
    read_weights(folder, hf_model, chunks, coordinator=loaded.coordinator)
    return folder.path


def _from_checkpoint(loaded: CheckpointModel, load: str) -> Path:
    def load_folder(folder: Path) -> None:
        config = stored_model(folder, read_together(folder, loaded.coordinator))
        _check_model(loaded, config, load)
        chunks = weight_chunks(loaded.model.store)
        load_checkpoint(folder, chunks, coordinator=loaded.coordinator, convert_dtype=True)

    newest = load_newest(load, load_folder, loaded.coordinator, flag="load", fall_back=False)
    if newest is None:
        raise ValueError(f"load {load}: there is no checkpoint")
    return newest[0]


def _check_model(loaded: CheckpointModel, config: GPTConfig, load: str) -> None:
    """Raise ValueError for weights of another model."""
    model_config = loaded.model.config
    new_config = inference_model_config(config, keep_mtp=bool(model_config.mtp_num_layers))
    differences = [
        line
        for line in compare_architecture(new_config.to_json(), model_config.to_json())
        if not any(word in line.split(":")[0] for word in _TRAINING_ONLY)
    ]
    if differences:
        raise ValueError(f"load {load} is another model: {'; '.join(differences)}")

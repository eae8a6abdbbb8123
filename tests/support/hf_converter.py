# SPDX-License-Identifier: Apache-2.0
"""Run the converter of Hugging Face folders in tests, and read its results for comparison."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.dist_checkpointing import (
    Solo,
    TensorChunk,
    load_checkpoint,
    read_extra,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.weight_gather import Storage
from megatron.hf import open_folder, read_folder
from megatron.hf.convert import main
from megatron.hf.read_weights import read_weights
from tests.support.hf_folders import LENGTH, make_model, save_folder
from tests.support.inputs import generator


def convert(*words: object, code: int = 0) -> str:
    """Run the converter and assert its exit code; return its stdout, or its stderr on an error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        exit_code = main([str(word) for word in words], {})
    assert exit_code == code, err.getvalue()
    return err.getvalue() if code else out.getvalue()


def checkpoint_model(checkpoint: Path) -> GPTModel:
    """Return the model of a checkpoint, in a single process."""
    config = GPTConfig.from_json(read_extra(checkpoint)["model"])
    model = GPTModel(config, ProcessGroupCollection.single(), storage=Storage(initialize=False))
    load_checkpoint(checkpoint, weight_chunks(model.store))
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    named_tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        named_tensors |= load_file(path)
    return named_tensors


def imported(folder: Path, save: Path) -> Path:
    """Import a folder and return the checkpoint."""
    convert("import", "--hf", folder, "--save", save)
    return save / "iter_0000000"


def read_by_a_rank(
    rank: int, path: Path, grid: RankGrid
) -> tuple[GPTModel, list[TensorChunk], int]:
    """Read a folder as one rank of a grid; return the model, its chunks and the bytes read."""
    groups = ProcessGroupCollection.create(grid, rank=rank, timeout_seconds=30)
    folder = open_folder(path)
    described = read_folder(folder)
    model = GPTModel(described.config, groups, storage=Storage(initialize=False))
    chunks = weight_chunks(model.store)
    return model, chunks, read_weights(folder, described, chunks, coordinator=Solo())


def checkpoint_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all weights and buffers of a checkpoint."""
    return whole(checkpoint_model(checkpoint))


def whole(model: GPTModel) -> dict[str, torch.Tensor]:
    """Return all weights and buffers of a single-process model, as logical tensors."""
    weights: dict[str, torch.Tensor] = {}
    for chunk in weight_chunks(model.store):
        tensor = weights.setdefault(chunk.name, torch.full(chunk.shape, torch.nan))
        tensor[chunk.box.slices] = chunk.tensor.detach()
    return weights


def folder_with_further_layers(path: Path, case: str = "deepseek", *, tied: bool = False) -> Path:
    """Write a folder with two multi-token-prediction layers and random weights."""
    source = save_folder(make_model(case, tie_word_embeddings=tied), path / "plain")
    plain = checkpoint_model(imported(source, path / "plain-checkpoint"))
    config = replace(plain.config, mtp=MTPConfig(num_layers=2))
    model = GPTModel(config, ProcessGroupCollection.single(), storage=Storage(initialize=False))
    plain_weights = checkpoint_weights(path / "plain-checkpoint/iter_0000000")
    chunks, random = weight_chunks(model.store), generator(8)
    for chunk in chunks:
        center = float(chunk.tensor.ndim == 1)
        chunk.tensor.copy_(center + 0.3 * torch.randn(chunk.tensor.shape, generator=random))
        if chunk.name in plain_weights:
            chunk.tensor.copy_(plain_weights[chunk.name][chunk.box.slices])
    options = {"max-position-embeddings": LENGTH}
    extra = {"format": 1, "model": config.to_json(), "config": options, "tokenizer": {}}
    save_checkpoint(path / "checkpoint", 0, chunks, extra, coordinator=Solo())
    convert("export", "--load", path / "checkpoint", "--save", path / "folder")
    return path / "folder"

# SPDX-License-Identifier: Apache-2.0
"""The converter of Hugging Face folders as tests run it, and what they compare of its results."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron.core.dist_checkpointing import load_checkpoint, read_extra
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import Storage
from megatron.hf.convert import main
from megatron.training.checkpoint_io import weight_chunks


def convert(*words: object, code: int = 0) -> str:
    """Run the converter, which must end with `code`; return what it printed, or its errors."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        found = main([str(word) for word in words], {})
    assert found == code, err.getvalue()
    return err.getvalue() if code else out.getvalue()


def checkpoint_model(checkpoint: Path) -> GPTModel:
    """Return the model of a checkpoint, in a single process."""
    config = GPTConfig.from_json(read_extra(checkpoint)["model"])
    model = GPTModel(config, ProcessGroupCollection.single(), storage=Storage(initialize=False))
    load_checkpoint(checkpoint, weight_chunks(model.store))
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found

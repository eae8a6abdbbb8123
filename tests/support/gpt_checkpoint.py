# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a small GPT as training saves them, and damaged ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.core import ProcessGroupCollection
from megatron.core.dist_checkpointing import Solo, save_checkpoint, weight_chunks
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    vocab_size=259,  # larger than the tokenizer's, and uneven over two ranks
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=8),
    mlp=MLPConfig(ffn_hidden_size=48),
    init_std=0.3,
)
BYTES = {"type": "byte", "model": None, "vocab_size": 257, "fingerprint": "byte-257", "eod": 256}


def make_model(seed: int = 1, *, dtype: torch.dtype = torch.float32, **changes: Any) -> GPTModel:
    """Return a model of `CONFIG` with some fields changed."""
    config = replace(CONFIG, **changes)
    return GPTModel(config, ProcessGroupCollection.single(), seed=seed, dtype=dtype)


def save(
    root: Path, gpt: GPTModel, *, iteration: int = 7, length: int = 40, **changes: Any
) -> Path:
    """Save a checkpoint as training does, with some of its metadata changed.

    Args:
        root: folder of checkpoints.
        gpt: the model.
        iteration: number of the checkpoint.
        length: `max-position-embeddings`.
        changes: metadata by name; None removes it.
    """
    extra = {
        "model": gpt.config.to_json(),
        "config": {"bf16": False, "max-position-embeddings": length},
        "tokenizer": BYTES,
        **changes,
    }
    # JSON turns tuples into lists, as a stored checkpoint does.
    extra = json.loads(json.dumps({k: v for k, v in extra.items() if v is not None}))
    return save_checkpoint(root, iteration, weight_chunks(gpt.store), extra, coordinator=Solo())


def damage(checkpoint: Path) -> Path:
    """Flip a bit of a checkpoint's only file of weights; return the file."""
    (shard,) = checkpoint.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    return shard

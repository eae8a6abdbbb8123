# SPDX-License-Identifier: Apache-2.0
"""Training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import not_negative


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    data_path: tuple[str, ...] | None = None
    """Prefixes of .bin/.idx pairs, cut by --split: PREFIX..., or WEIGHT PREFIX WEIGHT PREFIX ...
    for a blend."""
    data_args_path: str | None = None
    """File that holds the words of --data-path."""
    train_data_path: tuple[str, ...] | None = None
    """Training data of its own, whole, instead of a share of --data-path."""
    valid_data_path: tuple[str, ...] | None = None
    """Validation data of its own; with --train-data-path."""
    test_data_path: tuple[str, ...] | None = None
    """Test data of its own; with --train-data-path."""
    per_split_data_args_path: str | None = None
    """JSON file that holds the words of these three: {"train": [...], "valid": [...], "test":
    [...]}."""
    mock_data: bool = False
    """Train on made-up tokens, without any file; needs --vocab-size or a tokenizer."""
    split: str = "969,30,1"
    """Shares of documents of --data-path for training, validation and test."""
    data_cache_path: str | None = None
    """Folder of sample index caches, of each node's own; None = keep them in memory."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single reads samples in order; cyclic permutes them anew in every epoch."""
    num_workers: int = 2
    """Threads that read batches ahead, in the same order; 0 reads when a batch is needed."""
    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""
    reset_position_ids: bool = False
    """Count positions anew behind every end-of-document token."""
    reset_attention_mask: bool = False
    """Let tokens attend to their own document only, up to its end-of-document token."""
    sft: bool = False
    """Fine-tune on conversations that preprocess_data --chat wrote: packed into samples, each
    attends to itself alone, and only the assistant's tokens are learnt."""
    allow_data_change: bool = False
    """Resume on other data than the checkpoint's, from the same number of samples on."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")

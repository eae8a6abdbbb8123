# SPDX-License-Identifier: Apache-2.0
"""The options of the checkpoint commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config import (
    AttentionOptions,
    ExpertConfig,
    ModelConfig,
    PositionConfig,
    TokenizerConfig,
)
from megatron.training.config.values import not_negative, require, require_all


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """The checkpoints of a run."""

    root: str
    """Folder of checkpoints."""
    verify: bool = False
    """Read every byte; else sizes and the manifest are checked."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """What a checkpoint holds."""

    folder: str
    """One iter_ folder, or a folder of checkpoints, of which the one that a run would load."""
    tensors: str | None = None
    """List tensors too: those whose names match this pattern of * and ?, all if there is none."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Read every byte and compare it with its digest."""

    folder: str
    """One iter_ folder, or a folder of checkpoints, which are all verified."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Two checkpoints of any layouts, field by field and tensor by tensor."""

    first: str
    """One iter_ folder, or a folder of checkpoints, of which the one that a run would load."""
    second: str
    """The other one."""
    tolerance: float = 0.0
    """Largest difference that still counts as equal, as a share of the largest element of the
    tensor; 0 = equal bits. Above 0, tensors whose gradient is zero up to rounding do not count."""
    all: bool = False
    """List all tensors, equal ones too; else the first that differ."""

    def __post_init__(self) -> None:
        not_negative(self, "tolerance")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Checkpoint to another format."""

    source: str
    """Checkpoint, or folder of checkpoints, of which the latest."""
    target: str
    """Folder of checkpoints to write iter_0000000 into, or the file to make."""
    from_: Literal["native", "torch_dist", "dcp"]
    """What the source is: one of ours, one of upstream Megatron, or any of
    torch.distributed.checkpoint."""
    to: Literal["native", "single-file"]
    """What to make: a checkpoint of weights, for which the flags of pretrain_gpt say what the model
    is (sections model, attention, position, experts and tokenizer), or one safetensors file of
    whole tensors."""
    with_optimizer: bool = False
    """Put optimizer state into the file too."""
    checksums: bool = True
    """Compare the checksums that torch has written into a foreign folder."""

    def __post_init__(self) -> None:
        require_all(
            lambda: require(
                (self.from_, self.to) != ("native", "native"),
                "--from native --to native: a checkpoint is loaded on any layout as it is",
            ),
            lambda: require(
                not self.with_optimizer or self.to == "single-file",
                "--with-optimizer has an effect with --to single-file only: leave it out",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ConvertToNativeConfig:
    """Checkpoint to another format; with --to native, flags say what the model is."""

    conversion: ConvertConfig
    model: ModelConfig
    attention: AttentionOptions
    position: PositionConfig
    experts: ExpertConfig
    tokenizer: TokenizerConfig

# SPDX-License-Identifier: Apache-2.0
"""The options of the checkpoint commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config import (
    ActivationOptions,
    AttentionOptions,
    ExpertConfig,
    ModelConfig,
    PositionConfig,
    RopeScalingOptions,
    TokenizerConfig,
)
from megatron.training.config.values import not_negative, require, require_all


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """List the checkpoints of a run."""

    root: str
    """Folder of checkpoints."""
    verify: bool = False
    """Read and verify every byte; otherwise only sizes and the manifest are checked."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show the contents of a checkpoint."""

    folder: str
    """One iter_ folder, or a folder of checkpoints, of which the one that a run would load."""
    tensors: str | None = None
    """List tensors too: those whose names match this pattern of * and ?; without a pattern, all."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Read every byte and compare it with its digest."""

    folder: str
    """One iter_ folder, or a folder of checkpoints, which are all verified."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare two checkpoints of any layouts, field by field and tensor by tensor."""

    first: str
    """One iter_ folder, or a folder of checkpoints, of which the one that a run would load."""
    second: str
    """The checkpoint to compare with, in the same form."""
    tolerance: float = 0.0
    """Largest difference that counts as equal, relative to the largest element of the tensor; 0 =
    bitwise equality. Above 0, tensors whose gradient is zero up to rounding are ignored."""
    all: bool = False
    """List all tensors, including equal ones; otherwise the first that differ."""

    def __post_init__(self) -> None:
        not_negative(self, "tolerance")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Convert a checkpoint to another format."""

    source: str
    """Checkpoint, or folder of checkpoints, of which the latest."""
    target: str
    """Folder of checkpoints in which to write iter_0000000, or the file to write."""
    from_: Literal["native", "torch_dist", "dcp"]
    """Format of the source: native, upstream Megatron's torch_dist, or any
    torch.distributed.checkpoint."""
    to: Literal["native", "single-file"]
    """Format of the target: a native checkpoint of weights, whose model the flags of pretrain_gpt
    describe (sections model, attention, position, experts and tokenizer), or one safetensors file
    of whole tensors."""
    with_optimizer: bool = False
    """Include optimizer state in the file."""
    checksums: bool = True
    """Verify the checksums that torch wrote into a foreign folder."""

    def __post_init__(self) -> None:
        require_all(
            lambda: require(
                (self.from_, self.to) != ("native", "native"),
                "--from native --to native: a checkpoint loads on any layout without conversion",
            ),
            lambda: require(
                not self.with_optimizer or self.to == "single-file",
                "--with-optimizer has an effect with --to single-file only: drop it",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ConvertToNativeConfig:
    """Convert a checkpoint to another format; with --to native, flags describe the model."""

    conversion: ConvertConfig
    model: ModelConfig
    activations: ActivationOptions
    attention: AttentionOptions
    position: PositionConfig
    rope_scaling: RopeScalingOptions
    experts: ExpertConfig
    tokenizer: TokenizerConfig

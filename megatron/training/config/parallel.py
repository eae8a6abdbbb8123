# SPDX-License-Identifier: Apache-2.0
"""How a run is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the run is spread over processes."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each weight matrix."""
    sequence_parallel: bool = False
    """Also cut activations outside of matrix products along the sequence over the tensor parallel
    ranks."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of each sample; attention alone needs those of the others."""
    cp_comm_type: Literal["auto", "p2p", "all_gather", "a2a"] = "auto"
    """How attention meets the tokens of other ranks: by p2p keys and values go round; all_gather
    has those of all ranks at once; a2a cuts heads instead of tokens; auto takes what moves
    least."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for a peer before the run stops, in minutes."""
    transformer_impl: Literal["local"] = "local"
    """Which backend builds the layers."""
    attention_backend: Literal["auto", "reference", "triton"] = "auto"
    """Which kernel computes attention; auto is triton on a GPU where it covers the case, else
    reference."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size", "context_parallel_size")
        positive(self, "distributed_timeout_minutes")

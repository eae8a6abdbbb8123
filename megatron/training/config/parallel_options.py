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
    context_parallel_cut: Literal["auto", "row", "documents"] = "auto"
    """How rows that hold several documents are cut over context parallel ranks: row cuts each as
    one, documents spreads every document evenly over all ranks, with padding; auto takes for each
    microbatch what costs the slowest rank less."""
    linear_cp_mode: Literal["auto", "headwise", "segments"] = "auto"
    """How a recurrence meets the tokens of other ranks: headwise cuts heads instead of tokens;
    segments passes states from each part of a document to the next; auto takes what moves least."""
    linear_recurrence_splits: int = 1
    """Parts of each sequence that a rank runs a recurrence on side by side, for few long sequences;
    parts are cut at multiples of 128 tokens, so that a short sequence has fewer."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer, each with some of them."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share the weight matrices of each expert; derived: the tensor parallel size."""
    moe_token_dispatcher_type: Literal["auto", "allgather", "alltoall"] = "auto"
    """How tokens come to the ranks of their experts: allgather brings all tokens to all ranks,
    alltoall to each what it needs; auto takes what moves fewer bytes."""
    moe_shared_expert_overlap: bool = True
    """Compute the shared expert while tokens are on their way."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for a peer before the run stops, in minutes."""
    transformer_impl: Literal["local"] = "local"
    """Which backend builds the layers."""
    attention_backend: Literal["auto", "reference", "triton"] = "auto"
    """Which kernel computes attention; auto is triton on a GPU where it covers the case, else
    reference."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size", "context_parallel_size")
        positive(self, "expert_model_parallel_size", "expert_tensor_parallel_size")
        positive(self, "distributed_timeout_minutes", "linear_recurrence_splits")

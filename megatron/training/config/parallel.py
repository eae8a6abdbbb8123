# SPDX-License-Identifier: Apache-2.0
"""How a run is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive, require


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the run is spread over processes."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each weight matrix."""
    sequence_parallel: bool = False
    """Also cut activations outside of matrix products along the sequence over the tensor parallel
    ranks."""
    use_distributed_optimizer: bool = False
    """Cut optimizer state over the data parallel ranks (the same as
    --data-parallel-sharding-strategy optim)."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim"] | None = None
    """What is cut over the data parallel ranks; derived: no_shard, or optim with
    --use-distributed-optimizer."""
    overlap_grad_reduce: bool = False
    """Reduce gradient buckets while the backward pass still runs."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket; derived: 40,000,000 or 1,000,000 per data parallel rank,
    whichever is more."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for a peer before the run stops, in minutes."""
    transformer_impl: Literal["local"] = "local"
    """Which backend builds the layers."""
    attention_backend: Literal["auto", "reference", "triton"] = "auto"
    """Which kernel computes attention; auto is triton on a GPU where it covers the case, else
    reference."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size", "ddp_bucket_size")
        positive(self, "distributed_timeout_minutes")
        require(
            not (
                self.use_distributed_optimizer
                and self.data_parallel_sharding_strategy == "no_shard"
            ),
            "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy "
            "no_shard: keep one",
        )

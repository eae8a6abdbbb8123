# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights are sharded over the tensor-parallel group, sequence parallel or not."""

from megatron.core.tensor_parallel.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    TensorParallelRegion,
)
from megatron.core.tensor_parallel.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "TensorParallelRegion",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "vocab_parallel_cross_entropy",
]

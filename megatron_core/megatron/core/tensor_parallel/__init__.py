# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights are cut over the tensor-parallel group, sequence parallel or not."""

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.core.tensor_parallel.head import VocabParallelHead
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.tensor_parallel.replicated import ReplicatedLinear

__all__ = [
    "ColumnParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "TensorParallelRegion",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "vocab_parallel_cross_entropy",
]

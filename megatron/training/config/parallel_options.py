# SPDX-License-Identifier: Apache-2.0
"""Options of model parallelism and of the implementation of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive, require

#: Module names that `Backend.gtp_opt_in_modules` accepts.
GTP_OPT_IN_MODULES = ("mla_down_proj", "position_embeddings")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Model parallelism, and the implementation of its layers."""

    tensor_model_parallel_size: int = 1
    """Degree of tensor model parallelism: ranks that share each weight matrix."""
    tensor_parallel_num_weight_shards: int | None = None
    """Generalized tensor parallelism: number of shards of each weight matrix, a multiple of the
    tensor parallel size. Each tensor-parallel slice is sharded further over ranks with different
    samples and gathered just before use; derived: the tensor parallel size."""
    gtp_opt_in_modules: tuple[str, ...] | None = None
    """With --tensor-parallel-num-weight-shards, additional modules to shard that are replicated
    over tensor-parallel ranks: mla_down_proj (down projections of latent attention),
    position_embeddings (learned absolute positions)."""
    sequence_parallel: bool = False
    """Shard activations along the sequence dimension over the tensor-parallel group (sequence
    parallelism)."""
    context_parallel_size: int = 1
    """Degree of context parallelism: ranks that share the tokens of each sample."""
    cp_comm_type: Literal["auto", "p2p", "all_gather", "a2a"] = "auto"
    """How attention exchanges data over context-parallel ranks: p2p sends keys and values around a
    ring; all_gather gathers them from all ranks; a2a redistributes heads instead of tokens; auto
    chooses the one that communicates least."""
    context_parallel_cut: Literal["auto", "row", "documents"] = "auto"
    """How rows of several documents are divided over context-parallel ranks: row divides the row as
    one sequence, documents divides every document evenly over all ranks, with padding; auto picks
    for each microbatch the division whose slowest rank is faster."""
    linear_cp_mode: Literal["auto", "headwise", "segments"] = "auto"
    """How recurrent mixers exchange data over context-parallel ranks: headwise redistributes heads
    instead of tokens; segments passes states from each segment of a document to the next; auto
    chooses the one that communicates least."""
    expert_model_parallel_size: int = 1
    """Degree of expert parallelism: ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: int | None = None
    """Degree of tensor parallelism within each expert; derived: the tensor parallel size."""
    expert_tensor_parallel_num_weight_shards: int | None = None
    """Generalized tensor parallelism of experts: number of shards of each expert matrix, a multiple
    of the expert tensor parallel size; derived: the expert tensor parallel size."""
    moe_token_dispatcher_type: Literal["auto", "allgather", "alltoall"] = "auto"
    """How tokens reach the ranks of their experts: allgather sends all tokens to all ranks,
    alltoall sends each rank only the tokens it needs; auto chooses the one that moves fewer
    bytes."""
    moe_expert_rank_capacity_factor: float | None = None
    """In training, buffers of an expert-parallel rank hold this times its even share of tokens; a
    step that exceeds it is an error before weights change. The host then never reads token counts,
    so that steps can be captured in CUDA graphs. None = no limit."""
    moe_shared_expert_overlap: bool = True
    """Overlap the shared expert's computation with the token dispatch."""
    distributed_timeout_minutes: float = 10.0
    """Timeout of collectives, in minutes."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Implementation of linear layers, norms and attention: local is this package's,
    transformer_engine is TransformerEngine's (extra te). Weights, checkpoints and initial values
    are the same."""
    attention_backend: Literal["auto", "reference", "triton"] = "auto"
    """Attention kernel. auto is TransformerEngine's with --transformer-impl transformer_engine;
    otherwise, on a GPU, cuDNN's or FlashAttention-2's for 16-bit attention without sinks and
    dropout (packed documents not under --cuda-graph-impl), else triton if it supports the case,
    else reference."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size", "context_parallel_size")
        positive(self, "expert_model_parallel_size", "expert_tensor_parallel_size")
        positive(self, "moe_expert_rank_capacity_factor")
        positive(
            self, "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"
        )
        positive(self, "distributed_timeout_minutes")
        unknown = [name for name in self.gtp_opt_in_modules or () if name not in GTP_OPT_IN_MODULES]
        require(
            not unknown,
            f"--gtp-opt-in-modules {' '.join(unknown)}: use {' or '.join(GTP_OPT_IN_MODULES)}",
        )

    @property
    def gtp_size(self) -> int:
        """Ranks over which generalized tensor parallelism shards a tensor-parallel slice of a
        matrix."""
        tp = self.tensor_model_parallel_size
        return (self.tensor_parallel_num_weight_shards or tp) // tp

    @property
    def requests_gtp(self) -> bool:
        """Whether the options request more shards than tensor-parallel ranks, for experts or other
        weights; the number may still be invalid."""
        tp = self.tensor_model_parallel_size
        etp = self.expert_tensor_parallel_size or tp
        experts = self.expert_tensor_parallel_num_weight_shards or etp
        return (self.tensor_parallel_num_weight_shards or tp) > tp or experts > etp

    @property
    def expert_gtp_size(self) -> int:
        """Ranks over which a tensor-parallel slice of an expert's matrix is sharded."""
        etp = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return (self.expert_tensor_parallel_num_weight_shards or etp) // etp

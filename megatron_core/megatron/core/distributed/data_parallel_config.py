# SPDX-License-Identifier: Apache-2.0
"""DataParallelConfig: the settings of the data-parallel engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from megatron.core.weight_gather import GRANULARITIES, Storage
from megatron.core.weight_gather.bucket import Granularity
from megatron.core.weight_gather.gather_format import GatherFormatName, ScaleBlocks, gather_formats
from megatron.core.weight_sharding import OuterStrategy, Placement, Strategy, placement

GRADIENT_DTYPES = (torch.float32, torch.bfloat16)
ReduceScatterPer: TypeAlias = Literal["microbatch", "step"]
REDUCE_SCATTER_PER: tuple[ReduceScatterPer, ...] = get_args(ReduceScatterPer)


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Settings of the data-parallel engine.

    Args:
        strategy: "no_shard" (gradients are all-reduced, every rank updates all weights), "optim"
            (ZeRO-1: shards the optimizer state), "optim_grads" (ZeRO-2: shards gradients too),
            "optim_grads_params" (ZeRO-3: shards weights too).
        outer: over the outer axis of hybrid sharding, all state is replicated ("no_shard") or the
            optimizer state is sharded once more ("optim").
        overlap_grad_reduce: start the reduction of a bucket as soon as backward has filled it.
            False waits for the end of backward, or with sharded gradients for each reduction.
        overlap_param_gather: overlap all-gathers of weights with computation. False gathers all
            weights after the optimizer step, or with sharded weights each block at its use.
        fsdp_all_gather_in_start_param_sync: with `overlap_param_gather`, start the first
            all-gathers at the end of the optimizer step. False starts them in the next forward,
            which whole iterations captured in a CUDA graph need.
        granularity: with sharded weights, an all-gather covers a "unit" (a layer) or a "weight".
        prefetch_bytes: bytes to gather ahead beyond the next block, with `overlap_param_gather`,
            and for weights sharded over gtp always.
        grad_dtype: of the gradient buffers that backward fills.
        fp32_accumulation: with bf16 gradients, send bf16 but sum in fp32.
        gtp_reduce_scatter_per: gradients of weights sharded over gtp are reduce-scattered in every
            "microbatch", or once a "step", until which each rank stores them unreduced.
        gather_format: format of the all-gather of weights sharded over gtp: "bf16" (their own
            dtype), "fp8", "mxfp8" or "nvfp4".
        gather_scale_blocks: scale blocks of mxfp8 or nvfp4: "2d" squares, or "1d" blocks, with
            separate encodings for forward and backward.
        use_nccl_ub: allocate the buffers of all-gathers and reductions in memory registered with
            NCCL, see `comm.symmetric_memory`.
        debug: fill unused buffers with NaN, and compare the order of all-gathers between ranks.

    Raises:
        ValueError: all invalid combinations, in one message.
    """

    strategy: Strategy = "no_shard"
    outer: OuterStrategy = "no_shard"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    granularity: Granularity = "unit"
    prefetch_bytes: int = 0
    grad_dtype: torch.dtype = torch.float32
    fp32_accumulation: bool = False
    gtp_reduce_scatter_per: ReduceScatterPer = "microbatch"
    gather_format: GatherFormatName = "bf16"
    gather_scale_blocks: ScaleBlocks = "2d"
    use_nccl_ub: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        problems = []
        try:
            strategy_placement = placement(self.strategy, self.outer)
        except ValueError as error:
            problems.append(str(error))
            strategy_placement = Placement()
        if self.grad_dtype not in GRADIENT_DTYPES:
            problems.append(f"grad_dtype is {self.grad_dtype}: use torch.float32 or torch.bfloat16")
        if self.fp32_accumulation and self.grad_dtype is not torch.bfloat16:
            problems.append("fp32_accumulation is for bf16 gradients: drop it or set grad_dtype")
        if self.fp32_accumulation and not strategy_placement.optimizer:
            problems.append("fp32_accumulation needs a strategy that reduce-scatters: use optim")
        if self.gtp_reduce_scatter_per not in REDUCE_SCATTER_PER:
            names = " or ".join(REDUCE_SCATTER_PER)
            problems.append(f"gtp_reduce_scatter_per {self.gtp_reduce_scatter_per!r}: use {names}")
        if self.gtp_reduce_scatter_per == "step" and strategy_placement.gradient:
            problems.append(
                "gtp_reduce_scatter_per step needs unsharded gradients, which "
                f"{self.strategy} shards: use no_shard or optim, or drop it"
            )
        try:
            gather_formats(self.gather_format, scale_blocks=self.gather_scale_blocks)
        except ValueError as error:
            problems.append(str(error))
        if self.granularity not in GRANULARITIES:
            problems.append(f"granularity {self.granularity!r}: use {' or '.join(GRANULARITIES)}")
        if self.granularity != "unit" and not strategy_placement.weight and not problems:
            problems.append(f"granularity {self.granularity} has no effect with {self.strategy}")
        if self.prefetch_bytes < 0:
            problems.append(f"prefetch_bytes is {self.prefetch_bytes}: use 0 or more")
        if self.overlap_param_gather and not strategy_placement.optimizer and not problems:
            problems.append("overlap_param_gather has no effect with no_shard: nothing is gathered")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def placement(self) -> Placement:
        return placement(self.strategy, self.outer)

    def storage(self, **options: int | bool) -> Storage:
        """Return how a model that this engine will train must store its weights.

        Args:
            options: `bucket_bytes` and `initialize` of `Storage`.
        """
        return Storage(
            strategy=self.strategy,
            outer=self.outer,
            granularity=self.granularity,
            gather_format=self.gather_format,
            gather_scale_blocks=self.gather_scale_blocks,
            **options,  # type: ignore[arg-type]
        )

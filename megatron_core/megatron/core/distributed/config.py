# SPDX-License-Identifier: Apache-2.0
"""DataParallelConfig: how weights, gradients and optimizer state go over the data lanes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.weight_gather import GRANULARITIES, Storage
from megatron.core.weight_sharding import Placement, placement

GRADIENT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Settings of the data-parallel engine.

    Args:
        strategy: "no_shard" (gradients are all-reduced, every rank updates everything), "optim"
            (ZeRO-1: each rank keeps 1/lanes of the optimizer state), "optim_grads" (ZeRO-2: and of
            the gradients), "optim_grads_params" (ZeRO-3: and of the weights).
        outer: over the outer axis of hybrid sharding, everything is repeated ("no_shard") or the
            optimizer state is cut once more ("optim").
        overlap_grad_reduce: reduce a bucket as soon as backward has filled it; False waits: for
            the end of backward, or where gradients are cut, for each reduction.
        overlap_param_gather: gather weights while something else is computed; False gathers all
            after the optimizer step, or where weights are cut, each when it is needed.
        fsdp_all_gather_in_start_param_sync: with `overlap_param_gather`, start the first gathers at
            the end of the optimizer step; False starts none before the next forward, which whole
            iterations captured in a CUDA graph need.
        granularity: what is gathered at a time where weights are cut: a "unit" (a layer) or a
            "weight".
        prefetch_bytes: gathered ahead beyond the next bucket, with `overlap_param_gather`.
        grad_dtype: of the gradient buffers that backward fills.
        fp32_accumulation: with bf16 gradients, send bf16 but sum in fp32.
        debug: fill unused buffers with NaN, and compare between the ranks what was gathered.

    Raises:
        ValueError: everything that does not go together, in one message.
    """

    strategy: str = "no_shard"
    outer: str = "no_shard"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    granularity: str = "unit"
    prefetch_bytes: int = 0
    grad_dtype: torch.dtype = torch.float32
    fp32_accumulation: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        found = []
        try:
            cut = placement(self.strategy, self.outer)
        except ValueError as error:
            found.append(str(error))
            cut = Placement()
        if self.grad_dtype not in GRADIENT_DTYPES:
            found.append(f"grad_dtype is {self.grad_dtype}: use torch.float32 or torch.bfloat16")
        if self.fp32_accumulation and self.grad_dtype is not torch.bfloat16:
            found.append("fp32_accumulation is for bf16 gradients: drop it or set grad_dtype")
        if self.fp32_accumulation and not cut.optimizer:
            found.append("fp32_accumulation needs a strategy that reduce-scatters: use optim")
        if self.granularity not in GRANULARITIES:
            found.append(f"granularity {self.granularity!r}: use {' or '.join(GRANULARITIES)}")
        if self.granularity != "unit" and not cut.weight and not found:
            found.append(f"granularity {self.granularity} has no effect with {self.strategy}")
        if self.prefetch_bytes < 0:
            found.append(f"prefetch_bytes is {self.prefetch_bytes}: use 0 or more")
        if self.prefetch_bytes and not self.overlap_param_gather:
            found.append("prefetch_bytes has no effect without overlap_param_gather")
        if self.overlap_param_gather and not cut.optimizer and not found:
            found.append("overlap_param_gather has no effect with no_shard: nothing is gathered")
        if found:
            raise ValueError("; ".join(found))

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
            **options,  # type: ignore[arg-type]
        )

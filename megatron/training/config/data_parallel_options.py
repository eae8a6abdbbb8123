# SPDX-License-Identifier: Apache-2.0
"""Options of data parallelism: sharding, communication and gradients, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.training.config.values import not_negative, positive, require, require_all

ShardingStrategy: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """Data parallelism."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks; without --data-parallel-sharding-strategy
    this means optim."""
    data_parallel_sharding_strategy: ShardingStrategy | None = None
    """What is sharded over data-parallel ranks: nothing, optimizer state, optimizer state and
    gradients, or weights as well; derived: no_shard, or optim with --use-distributed-optimizer."""
    num_distributed_optimizer_instances: int = 1
    """Hybrid sharding: number of replicas, within each of which state is sharded."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = "no_shard"
    """What is additionally sharded over the instances: nothing, or with optim_grads_params the
    optimizer state."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the all-gather of weights with the computation of preceding layers."""
    fsdp_all_gather_in_start_param_sync: bool = True
    """With --overlap-param-gather, start the first all-gathers at the end of the optimizer step;
    off, they start with the next forward pass."""
    param_gather_prefetch_bytes: int = 0
    """With --overlap-param-gather or weights sharded over gtp, bytes of weights to prefetch beyond
    the next unit or matrix."""
    param_gather_granularity: Literal["unit", "weight"] = "unit"
    """What is gathered at a time with optim_grads_params: a layer, or one weight matrix after the
    other, which takes less memory and more messages."""
    grad_reduce_in_bf16: bool = False
    """With --bf16, accumulate and reduce gradients in bf16 instead of fp32."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """With --grad-reduce-in-bf16, communicate gradients in bf16 and sum them in fp32."""
    gtp_reduce_scatter_per: Literal["microbatch", "step"] = "microbatch"
    """With --tensor-parallel-num-weight-shards, how often the gradient of a matrix is
    reduce-scattered over gtp: in every microbatch, or once per step, for which each rank keeps it
    unsharded."""
    weight_gather_format: Literal["bf16", "fp8", "mxfp8", "nvfp4"] = "bf16"
    """With --tensor-parallel-num-weight-shards, the format in which matrices are gathered over gtp:
    bf16 is the dtype of the weights; fp8 has one scale per matrix, mxfp8 one per 32 x 32 elements,
    nvfp4 one per 16 x 16. Storage does not change. TransformerEngine layers whose recipe has the
    same format use the gathered values directly; all others dequantize them first."""
    weight_gather_scale_blocks: Literal["2d", "1d"] = "2d"
    """With --weight-gather-format mxfp8 or nvfp4, the blocks that share a scale: 2d blocks are
    squares, so that forward and backward use the same values; 1d blocks are 32 (16) consecutive
    elements along the dimension of the reduction, rows in forward and columns in backward."""
    use_nccl_ub: bool = False
    """With optim_grads, optim_grads_params or weights sharded over gtp, on GPUs: allocate
    all-gather and reduce-scatter buffers in memory registered with NCCL, so that its kernels copy
    less and use fewer SMs."""
    check_weight_gather: bool = False
    """Debug the weight gathering: fill free buffers with NaN, and compare the gathered weights
    between ranks."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket; derived: 40,000,000 or 1,000,000 per data-parallel rank,
    whichever is more; not used with optim_grads_params, where a bucket is a layer."""

    def __post_init__(self) -> None:
        contradiction = self.data_parallel_sharding_strategy == "no_shard"
        require_all(
            lambda: positive(self, "num_distributed_optimizer_instances", "ddp_bucket_size"),
            lambda: not_negative(self, "param_gather_prefetch_bytes"),
            lambda: require(
                not (self.use_distributed_optimizer and contradiction),
                "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy "
                "no_shard: keep one",
            ),
        )

    @property
    def strategy(self) -> ShardingStrategy:
        """The sharding strategy, explicit or derived."""
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        return "optim" if self.use_distributed_optimizer else "no_shard"


def problems(
    config: DataParallelOptions,
    *,
    data_parallel_size: int,
    bf16: bool,
    context_size: int = 1,
    over_gtp: bool = False,
) -> Iterator[str]:
    """Yield a message for each combination of options that cannot work, with its fix.

    Args:
        data_parallel_size: number of data-parallel ranks.
        bf16: whether weights are bf16.
        context_size: number of context-parallel ranks.
        over_gtp: whether generalized tensor parallelism shards weights.
    """
    yield from _instances(config, data_parallel_size, context_size)
    strategy = config.strategy
    if strategy == "optim_grads_params" and config.ddp_bucket_size is not None:
        yield (
            f"--ddp-bucket-size {config.ddp_bucket_size} has no effect with "
            "--data-parallel-sharding-strategy optim_grads_params, where a bucket is a layer: drop "
            "it"
        )
    if strategy == "no_shard":
        for flag, on in (
            ("--overlap-param-gather", config.overlap_param_gather),
            ("--check-weight-gather", config.check_weight_gather and not over_gtp),
        ):
            if on:
                yield (
                    f"{flag} has no effect with --data-parallel-sharding-strategy no_shard, where "
                    "no weight is gathered: drop it or choose optim"
                )
    if config.use_nccl_ub and strategy in ("no_shard", "optim") and not over_gtp:
        yield (
            f"--use-nccl-ub has no effect with --data-parallel-sharding-strategy {strategy}, which "
            "has no communication buffers: drop it, choose optim_grads or optim_grads_params, or "
            "add "
            "--tensor-parallel-num-weight-shards"
        )
    if config.param_gather_granularity != "unit" and strategy != "optim_grads_params":
        yield (
            f"--param-gather-granularity {config.param_gather_granularity} has no effect with "
            f"--data-parallel-sharding-strategy {strategy}, which shards no weight: drop it or "
            "choose optim_grads_params"
        )
    yield from _gtp_reduce_scatter(config, over_gtp)
    yield from _gather_format(config, over_gtp)
    ahead = config.overlap_param_gather or (over_gtp and strategy != "optim_grads_params")
    if config.param_gather_prefetch_bytes and not ahead:
        yield (
            f"--param-gather-prefetch-bytes {config.param_gather_prefetch_bytes} has no effect "
            "without --overlap-param-gather: add that"
        )
    if config.grad_reduce_in_bf16 and not bf16:
        yield "--grad-reduce-in-bf16 needs --bf16: gradients are not kept narrower than weights"
    if config.reduce_scatter_with_fp32_accumulation:
        name = "--reduce-scatter-with-fp32-accumulation"
        if not config.grad_reduce_in_bf16:
            yield f"{name} needs --grad-reduce-in-bf16: sums of fp32 gradients are fp32 already"
        if strategy == "no_shard":
            yield (
                f"{name} needs gradients that are reduce-scattered: choose "
                "--data-parallel-sharding-strategy optim"
            )


def _gtp_reduce_scatter(config: DataParallelOptions, over_gtp: bool) -> Iterator[str]:
    """Yield a message if gradients of weights sharded over gtp cannot be reduced once per step."""
    flag, strategy = f"--gtp-reduce-scatter-per {config.gtp_reduce_scatter_per}", config.strategy
    if config.gtp_reduce_scatter_per == "microbatch":
        return
    if strategy in ("optim_grads", "optim_grads_params"):
        yield (
            f"{flag} needs unsharded gradients, which --data-parallel-sharding-strategy {strategy} "
            "shards: drop it or choose no_shard or optim"
        )
    if not over_gtp:
        yield f"{flag} has no effect without --tensor-parallel-num-weight-shards: drop it"


def _gather_format(config: DataParallelOptions, over_gtp: bool) -> Iterator[str]:
    """Yield a message if weights cannot be gathered in the chosen format."""
    flag = f"--weight-gather-format {config.weight_gather_format}"
    has_blocks = config.weight_gather_format in ("mxfp8", "nvfp4")
    if config.weight_gather_scale_blocks != "2d" and not has_blocks:
        yield (
            f"--weight-gather-scale-blocks {config.weight_gather_scale_blocks} has no effect with "
            f"{flag}, whose scales do not belong to blocks: drop it or choose mxfp8 or nvfp4"
        )
    if config.weight_gather_format == "bf16":
        return
    if not over_gtp:
        yield f"{flag} has no effect without --tensor-parallel-num-weight-shards: drop it"
    elif config.strategy == "optim_grads_params":
        yield (
            f"{flag} has no effect with --data-parallel-sharding-strategy optim_grads_params, "
            "which gathers layers: drop it or choose no_shard, optim or optim_grads"
        )


def _instances(config: DataParallelOptions, size: int, context_size: int) -> Iterator[str]:
    """Yield a message for each problem of hybrid sharding.

    Args:
        size: number of data-parallel ranks.
        context_size: number of context-parallel ranks per data-parallel rank; an instance shards
            over them too.
    """
    instances, strategy = config.num_distributed_optimizer_instances, config.strategy
    flag = f"--num-distributed-optimizer-instances {instances}"
    if instances > 1:
        if size % instances:
            fitting = [str(n) for n in range(2, size) if size % n == 0]
            fix = f"use {' or '.join(fitting)}, or drop it" if fitting else "drop it"
            yield f"{flag} does not divide the data parallel size of {size}: {fix}"
        elif size == instances and context_size == 1:
            yield (
                f"{flag} leaves each instance one of the {size} data parallel ranks, so that "
                "nothing is sharded: lower it"
            )
        if strategy == "no_shard":
            yield (
                f"{flag} has no effect with --data-parallel-sharding-strategy no_shard: drop it or "
                "choose what an instance shards"
            )
    if config.outer_dp_sharding_strategy == "optim":
        outer = "--outer-dp-sharding-strategy optim"
        if instances == 1:
            yield f"{outer} needs --num-distributed-optimizer-instances above 1: raise that"
        if strategy != "optim_grads_params":
            yield (
                f"{outer} with --data-parallel-sharding-strategy {strategy} is the same as one "
                "instance: drop both instance options, or choose optim_grads_params"
            )

# SPDX-License-Identifier: Apache-2.0
"""What is cut over the data parallel ranks, and when they talk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.training.config.values import not_negative, positive, require, require_all

ShardingStrategy: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Data parallelism."""

    use_distributed_optimizer: bool = False
    """Cut optimizer state over the data parallel ranks; means --data-parallel-sharding-strategy
    optim where none is given."""
    data_parallel_sharding_strategy: ShardingStrategy | None = None
    """What is cut over the data parallel ranks: nothing, optimizer state, also gradients, also
    weights; derived: no_shard, or optim with --use-distributed-optimizer."""
    num_distributed_optimizer_instances: int = 1
    """Hybrid sharding: cut over the ranks of one instance, repeat over so many instances."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = "no_shard"
    """What is cut once more over the instances: nothing, or with optim_grads_params the optimizer
    state."""
    overlap_grad_reduce: bool = False
    """Reduce gradient buckets while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather weights just before they are needed, while the ones before them are computed with."""
    fsdp_all_gather_in_start_param_sync: bool = True
    """With --overlap-param-gather, start the first gathers at the end of the optimizer step; off,
    nothing is gathered before the next forward pass."""
    param_gather_prefetch_bytes: int = 0
    """With --overlap-param-gather, bytes of weights that are gathered ahead beyond the next
    unit."""
    param_gather_granularity: Literal["unit", "weight"] = "unit"
    """What is gathered at a time with optim_grads_params: a layer, or one weight matrix after the
    other, which takes less memory and more messages."""
    grad_reduce_in_bf16: bool = False
    """With --bf16, keep and reduce gradients in bf16 instead of fp32."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """With --grad-reduce-in-bf16, send gradients in bf16 and sum them in fp32."""
    check_weight_gather: bool = False
    """Search for faults of gathering: fill buffers that nobody holds with NaN, and compare what
    the ranks gather."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket; derived: 40,000,000 or 1,000,000 per data parallel rank,
    whichever is more; none with optim_grads_params, where a bucket is a layer."""

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
        """The strategy, given or derived."""
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        return "optim" if self.use_distributed_optimizer else "no_shard"


def problems(
    config: DataParallelConfig, *, data_parallel_size: int, bf16: bool, context_size: int = 1
) -> Iterator[str]:
    """Name what does not go together, each with its mend."""
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
            ("--check-weight-gather", config.check_weight_gather),
        ):
            if on:
                yield (
                    f"{flag} has no effect with --data-parallel-sharding-strategy no_shard, where "
                    "no weight is gathered: drop it or choose optim"
                )
    if config.param_gather_granularity != "unit" and strategy != "optim_grads_params":
        yield (
            f"--param-gather-granularity {config.param_gather_granularity} has no effect with "
            f"--data-parallel-sharding-strategy {strategy}, which cuts no weight: drop it or "
            "choose optim_grads_params"
        )
    if config.param_gather_prefetch_bytes and not config.overlap_param_gather:
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


def _instances(config: DataParallelConfig, size: int, context_size: int) -> Iterator[str]:
    """Name what is wrong with hybrid sharding on `size` data parallel ranks, each of so many
    context parallel ones, over which an instance cuts as well."""
    instances, strategy = config.num_distributed_optimizer_instances, config.strategy
    flag = f"--num-distributed-optimizer-instances {instances}"
    if instances > 1:
        if size % instances:
            fitting = [str(n) for n in range(2, size) if size % n == 0]
            mend = f"use {' or '.join(fitting)}, or drop it" if fitting else "drop it"
            yield f"{flag} does not divide the data parallel size of {size}: {mend}"
        elif size == instances and context_size == 1:
            yield (
                f"{flag} leaves each instance one of the {size} data parallel ranks, so that "
                "nothing is cut: lower it"
            )
        if strategy == "no_shard":
            yield (
                f"{flag} has no effect with --data-parallel-sharding-strategy no_shard: drop it or "
                "choose what an instance cuts"
            )
    if config.outer_dp_sharding_strategy == "optim":
        outer = "--outer-dp-sharding-strategy optim"
        if instances == 1:
            yield f"{outer} needs --num-distributed-optimizer-instances above 1: raise that"
        if strategy != "optim_grads_params":
            yield (
                f"{outer} with --data-parallel-sharding-strategy {strategy} is the same as one "
                "instance: drop both options of instances, or choose optim_grads_params"
            )

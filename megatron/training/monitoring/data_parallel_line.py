# SPDX-License-Identifier: Apache-2.0
"""The line of a run's log that says what data parallelism cuts, and what is left on each rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.comm import all_reduce
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.optimizer import Optimizer


def data_parallel_line(engine: DataParallel, optimizer: Optimizer) -> str:
    """Return the strategy in effect, its buckets, and the bytes of one rank by role.

    With several pipeline stages, each number is the largest of all of them; every rank calls this.
    Bytes of weights and gradients are the formula's; those of optimizer state are counted, in
    device and host memory, since weights may have states of different kinds.

    Raises:
        ValueError: another strategy is in effect than the one that was asked for.
    """
    config = engine.config
    if engine.groups["lanes"].size == engine.groups["expert_lanes"].size == 1:
        scope = "one rank"
        if idle := _idle_flags(config):
            verb = "has" if len(idle) == 1 else "have"
            scope += f", so that {', '.join(idle)} {verb} nothing to do"
    elif engine.placement != config.placement:
        raise ValueError(
            f"data parallelism cuts {engine.placement} but {config.strategy} was asked for, which "
            f"is {config.placement}"
        )
    else:
        scope = f"{config.strategy} over {_scope(engine)}"
    buckets = [BucketSize.of(bucket) for bucket in engine.store.buckets]
    of = ElementBytes(
        weight=engine.store.dtype.itemsize,
        gradient=config.grad_dtype.itemsize,
        optimizer=0,
        wide_sum=config.fp32_accumulation and engine.sharded,
    )
    rank = bytes_per_rank(
        buckets,
        engine.placement,
        of=of,
        prefetch=config.overlap_param_gather,
        ahead=config.prefetch_bytes,
        overlap=config.overlap_grad_reduce,
    )
    most = of.weight * max((bucket.numel for bucket in buckets), default=0)
    states = [optimizer.state_bytes(on_host=host) for host in (False, True)]
    count, largest, weights, gradients, state, on_host, gathered, reducing = _most_of_stages(
        engine,
        [len(buckets), most, rank.weights, rank.gradients, *states]
        + [rank.gathered, rank.reducing],
    )
    stages = engine.groups["pp"].size
    line = (
        f"data parallel: {scope}; {count} bucket{'s' * (count != 1)} of up to {_size(largest)}; "
        f"per rank {'at most ' if stages > 1 else ''}{_size(weights)} of weights, "
        f"{_size(gradients)} of gradients, {_size(state)} of optimizer state"
    )
    if on_host:
        line += f" on the device and {_size(on_host)} in host memory"
    if gathered:
        line += f", at most {_size(gathered)} of gathered weights"
    if reducing:
        line += f", at most {_size(reducing)} of gradients that are being reduced"
    return line


def _most_of_stages(engine: DataParallel, numbers: Sequence[int]) -> list[int]:
    """Return for each number the largest of all pipeline stages."""
    own = torch.tensor(numbers, dtype=torch.int64, device=engine.store.device)
    return [int(number) for number in all_reduce(own, engine.groups["pp"], op="max").tolist()]


def _idle_flags(config: DataParallelConfig) -> list[str]:
    """Return the flags that say how lanes share, of those that are set."""
    flags = {
        f"--data-parallel-sharding-strategy {config.strategy}": config.strategy != "no_shard",
        "--overlap-grad-reduce": config.overlap_grad_reduce,
        "--overlap-param-gather": config.overlap_param_gather,
        f"--param-gather-prefetch-bytes {config.prefetch_bytes}": config.prefetch_bytes > 0,
        f"--param-gather-granularity {config.granularity}": config.granularity != "unit",
        "--reduce-scatter-with-fp32-accumulation": config.fp32_accumulation,
        "--check-weight-gather": config.debug,
    }
    return [flag for flag, given in flags.items() if given]


def _scope(engine: DataParallel) -> str:
    """Return over how many lanes the strategy cuts; experts may have other lanes."""
    groups, instances = engine.groups, engine.groups.grid.instances
    lanes, experts = (groups[name].size // instances for name in ("lanes", "expert_lanes"))
    text = f"{lanes} rank{'s' if lanes > 1 else ''}"
    if experts != lanes:
        text += f" of dense weights and {experts} of experts"
    if instances == 1:
        return text
    text = f"the {text} in each" if experts != lanes else f"the {text} of each"
    text += f" of {instances} instances"
    if engine.config.outer == "optim":
        text += ", optimizer state over all of them"
    return text


def _size(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"

# SPDX-License-Identifier: Apache-2.0
"""The line of a run's log that says what data parallelism cuts, and what is left on each rank."""

from __future__ import annotations

from megatron.core.distributed import DataParallel
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.optimizer import Optimizer


def data_parallel_line(engine: DataParallel, optimizer: Optimizer) -> str:
    """Return the strategy in effect, its buckets, and the bytes of one rank by role.

    Bytes of weights and gradients are the formula's; those of optimizer state are counted, since
    weights may have states of different kinds.

    Raises:
        ValueError: another strategy is in effect than the one that was asked for.
    """
    config, lanes = engine.config, engine.groups["lanes"].size
    if lanes == 1:
        scope = "one lane"
        if config.strategy != "no_shard":
            scope += f", so that {config.strategy} has nobody to share with"
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
        wide_sum=config.fp32_accumulation,
    )
    rank = bytes_per_rank(
        buckets,
        engine.placement,
        of=of,
        prefetch=config.overlap_param_gather,
        ahead=config.prefetch_bytes,
        overlap=config.overlap_grad_reduce,
    )
    state = sum(
        tensor.nbytes for one in optimizer.ranges for tensor in one.named_tensors().values()
    )
    largest = of.weight * max(bucket.numel for bucket in buckets)
    line = (
        f"data parallel: {scope}; {len(buckets)} buckets of up to {_size(largest)}; per rank "
        f"{_size(rank.weights)} of weights, {_size(rank.gradients)} of gradients, {_size(state)} "
        "of optimizer state"
    )
    if rank.gathered:
        line += f", at most {_size(rank.gathered)} of gathered weights"
    if rank.reducing:
        line += f", at most {_size(rank.reducing)} of gradients that are being reduced"
    return line


def _scope(engine: DataParallel) -> str:
    """Return over how many lanes the strategy cuts."""
    grid, lanes = engine.groups.grid, engine.groups["lanes"].size
    if grid.instances == 1:
        return f"{lanes} lanes"
    text = f"the {lanes // grid.instances} lanes of each of {grid.instances} instances"
    if engine.config.outer == "optim":
        text += ", optimizer state over all of them"
    return text


def _size(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"

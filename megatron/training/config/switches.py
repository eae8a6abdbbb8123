# SPDX-License-Identifier: Apache-2.0
"""Options that only mean something beside another one: given without it, they are an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.config import Config


def _dependents(config: Config) -> Iterator[tuple[object, str, bool, str]]:
    """Yield (section, beginning of its fields' names, whether the switch is on, the switch)."""
    position, failures = config.position, config.failures
    checkpoint, profiling = config.checkpoint, config.profiling
    yield position, "rope_scaling_", position.use_rope_scaling, "--use-rope-scaling"
    yarn = position.position_embedding_type == "yarn"
    yield position, "yarn_", yarn, "--position-embedding-type yarn"
    graphs = config.cuda_graphs.cuda_graph_impl != "none"
    cuts = config.parallel.context_parallel_size > 1
    yield config.parallel, "cp_comm_type", cuts, "--context-parallel-size above 1"
    yield config.cuda_graphs, "cuda_graph_warmup_", graphs, "--cuda-graph-impl full_iteration"
    spikes = failures.loss_spike_factor is not None
    yield failures, "loss_spike_window", spikes, "--loss-spike-factor"
    yield failures, "straggler_factor", failures.log_straggler, "--log-straggler"
    optimizer = config.optimizer
    yield config.muon, "muon_", optimizer.optimizer == "muon", "--optimizer muon"
    offloads = optimizer.optimizer_cpu_offload
    yield optimizer, "optimizer_offload_fraction", offloads, "--optimizer-cpu-offload"
    loads = checkpoint.load is not None
    yield config.data, "allow_data_change", loads, "--load"
    some = loads or checkpoint.pretrained_checkpoint is not None
    yield checkpoint, "finetune", some, "--load or --pretrained-checkpoint"
    yield profiling, "profile_step_", profiling.profile, "--profile"
    watched = profiling.profile or profiling.record_memory_history
    yield profiling, "profile_ranks", watched, "--profile or --record-memory-history"


def without_switch(config: Config) -> Iterator[str]:
    """Name every option that has another value than its default and no effect."""
    for section, start, on, switch in _dependents(config):
        for field in () if on else dataclasses.fields(section):  # type: ignore[arg-type]
            if field.name.startswith(start) and vars(section)[field.name] != field.default:
                off = "no-" if field.default is True else ""
                flag = off + field.name.replace("_", "-")
                yield f"--{flag} has no effect without {switch}: add that"


def beyond_the_run(config: Config, world_size: int) -> Iterator[str]:
    """Name what profiling asks for and the run does not have."""
    profiling, iterations = config.profiling, config.training.train_iters
    watched = profiling.profile or profiling.record_memory_history
    far = [rank for rank in profiling.profile_ranks if rank >= world_size]
    if watched and far:
        yield f"--profile-ranks {far[0]}: there are ranks 0 to {world_size - 1}: name one of them"
    start = profiling.profile_step_start
    if profiling.profile and iterations is not None and start >= iterations:
        yield f"--profile-step-start {start} is not below --train-iters {iterations}: lower it"

# SPDX-License-Identifier: Apache-2.0
"""Process groups of a run: joining and leaving them, with a store and a watch over peers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from megatron.cli.errors import PeerLost, is_communication_error
from megatron.cli.launch import Launch
from megatron.cli.rank_agreement import StartFacts, check_same_start
from megatron.core.device import choose_device
from megatron.core.dist_checkpointing import Coordinator, Solo, StoreCoordinator
from megatron.core.models.layer_pattern import MAMBA
from megatron.core.process_groups import GROUP_NAMES, ProcessGroupCollection, RankGrid
from megatron.training.config.layer_pattern_options import has, has_attention
from megatron.training.config.resolve import ResolvedRun
from megatron.training.fault_tolerance.collective_check import CollectiveCheck
from megatron.training.fault_tolerance.hang_files import enable_flight_recorder
from megatron.training.fault_tolerance.peers import Diagnosis, PeerWatch
from megatron.training.fault_tolerance.restart import RestartRecord
from megatron.training.fault_tolerance.stopping import StopRequests

#: Minimum timeout for agreement between ranks in a background save, in seconds.
BACKGROUND_SECONDS = 3600.0

#: Seconds to search for the rank at fault after a collective has failed.
DIAGNOSIS_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """The process groups and coordination of a run, as seen by one process.

    Args:
        groups: the process groups.
        device: device of this process.
        coordinator: agreement between ranks on saves and loads.
        background: coordinator of the background saves' thread; None without background saves.
        watch: which ranks are alive; None for a single process.
        stop: requests to end the run early.
        restarts: records that this job has saved a checkpoint.
        attempt: number of restarts by the launcher.
    """

    groups: ProcessGroupCollection
    device: torch.device
    coordinator: Coordinator
    watch: PeerWatch | None
    stop: StopRequests
    restarts: RestartRecord
    attempt: int = 0
    background: Coordinator | None = None


def rank_grid(run: ResolvedRun) -> RankGrid:
    """Return the rank layout of a run's parallel sizes."""
    parallel, has_experts = run.config.parallel, run.config.experts.num_experts is not None
    return RankGrid(
        world_size=run.world_size,
        etp=parallel.expert_tensor_parallel_size if has_experts else None,
        ep=parallel.expert_model_parallel_size,
        egtp=parallel.expert_gtp_size if has_experts else 1,
        tp=parallel.tensor_model_parallel_size,
        gtp=parallel.gtp_size,
        cp=parallel.context_parallel_size,
        pp=run.config.pipeline.pipeline_model_parallel_size,
        instances=run.config.data_parallel.num_distributed_optimizer_instances,
    )


def group_names(run: ResolvedRun) -> tuple[str, ...]:
    """Return the names of the process groups a run needs; groups of ranks that replicate key and
    value heads or Mamba-2 groups exist only if tp exceeds their number."""
    config, tp = run.config, run.config.parallel.tensor_model_parallel_size
    counts = {config.model.num_query_groups} if has_attention(config) else set()
    if has(config, MAMBA):
        counts.add(config.hybrid.mamba_num_groups)
    shared = sorted(tp // count for count in counts if count is not None and count < tp)
    return (*GROUP_NAMES, *(f"tp/{ranks}" for ranks in shared))


@contextlib.contextmanager
def join_run(
    run: ResolvedRun, launch: Launch, facts: StartFacts, *, stop: StopRequests
) -> Iterator[DistributedContext]:
    """Create the process groups of a run, and destroy them at the end.

    Args:
        facts: values that must be equal on all ranks.
        stop: signal handling of this process, with its watch already running.

    Raises:
        ValueError: the device does not exist, or the ranks were not started alike.
    """
    seconds = run.config.parallel.distributed_timeout_minutes * 60.0
    device = choose_device(run.config.training.device, launch.local_rank)
    watch = stop.watch
    context = partial(
        DistributedContext,
        device=device,
        watch=watch,
        stop=stop,
        restarts=RestartRecord(launch, timeout_seconds=seconds),
        attempt=launch.attempt,
    )
    if watch is None:
        yield context(
            groups=ProcessGroupCollection.single(),
            coordinator=Solo(),
            background=Solo() if run.config.checkpoint.async_save else None,
        )
        return
    if device.type == "cuda":
        # A hang on a GPU raises nothing in Python; NCCL's watchdog then kills the process silently.
        watch.guard(0.8 * seconds, stop.lose)

    def coordinator(timeout_seconds: float, **prefix: str) -> Coordinator:
        return StoreCoordinator(
            launch.open_store(timeout_seconds=seconds),
            launch.rank,
            launch.world_size,
            timeout_seconds=timeout_seconds,
            on_missing_rank=partial(_check_alive, watch),
            **prefix,
        )

    foreground, background = coordinator(seconds), None
    check_same_start(foreground, facts)
    _init_process_group(launch, device, seconds)
    groups = ProcessGroupCollection.create(
        rank_grid(run), rank=launch.rank, timeout_seconds=seconds, names=group_names(run)
    )
    groups.observers.append(watch.collectives)
    if run.config.pipeline.pipeline_model_parallel_size > 1:
        grid, stage = groups.grid, groups.coordinates["pp"]
        stage_ranks = [r for r in range(run.world_size) if grid.coordinates(r)["pp"] == stage]
        watch.join_pipeline(groups["pp"].ranks, stage_ranks)
    if run.config.failures.check_collectives:
        store = launch.open_store(timeout_seconds=seconds)
        check = CollectiveCheck(store, rank=launch.rank, timeout_seconds=seconds, watch=watch)
        groups.observers.append(check)
    if run.config.checkpoint.async_save:
        # Writing a shard may take long, and no collective waits for it. But the trainer may wait
        # for a background save, so the save itself must detect a dead peer.
        background = coordinator(max(seconds, BACKGROUND_SECONDS), prefix="background")
    yield context(groups=groups, coordinator=foreground, background=background)
    # Only after success: with a dead peer, destroying the groups would block.
    dist.destroy_process_group()
    watch.close()


def _init_process_group(launch: Launch, device: torch.device, seconds: float) -> None:
    """Initialise torch.distributed with the other processes.

    Args:
        seconds: timeout of a collective.
    """
    if device.type == "cuda":
        enable_flight_recorder(os.environ)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(
            "groups", launch.attempt_keys(launch.connect(timeout_seconds=seconds))
        ),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=seconds),
        # NCCL then connects communicators at creation, and fails there.
        device_id=device if device.type == "cuda" else None,
    )


def _check_alive(watch: PeerWatch, rank: int) -> None:
    """Raise PeerLost if a rank whose answer this rank awaits has died."""
    if failure := watch.diagnose_rank(rank):
        text = f"{failure.text}; the others wait for it to agree on a save or a load"
        raise PeerLost(
            f"{text}; this run cannot continue{watch.pointer}", is_reported=failure.is_reported
        )


@contextlib.contextmanager
def blaming_peers(watch: PeerWatch | None) -> Iterator[None]:
    """Turn the failure of a collective into an error about the rank that caused it.

    A rank whose own work fails leaves its error for the other ranks to quote.

    Raises:
        PeerLost: a collective failed because another rank has died.
    """
    if watch is None:
        yield
        return
    try:
        yield
    except PeerLost as lost:
        watch.write_diagnostics(str(lost), lost, is_reported=lost.is_reported)
        raise
    except RuntimeError as error:
        failure = _diagnose(watch) if is_communication_error(error) else None
        if failure is None:
            watch.report_failure(error)
            raise
        watch.write_diagnostics(failure.text, error, is_reported=failure.is_reported)
        where = f"the others wait in {watch.collectives.name} of iteration {watch.iteration}"
        text = f"{failure.text}; {where}; this run cannot continue{watch.pointer}"
        raise PeerLost(text, is_reported=failure.is_reported) from error
    except BaseException as error:
        watch.report_failure(error)
        raise


def _diagnose(watch: PeerWatch) -> Diagnosis | None:
    return watch.diagnose(DIAGNOSIS_SECONDS) or watch.diagnose_lagging()

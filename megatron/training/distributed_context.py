# SPDX-License-Identifier: Apache-2.0
"""Process groups of a run: joining and leaving them, with a store, a watch over peers, and a
comparison of collectives between ranks before they start."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from megatron.cli.errors import ExitCode, PeerLost, RunStopped, is_communication_error
from megatron.cli.launch import Launch
from megatron.cli.rank_agreement import StartFacts, check_same_start
from megatron.core.comm import CollectiveRecord
from megatron.core.device import choose_device
from megatron.core.dist_checkpointing import Coordinator, Solo, StoreCoordinator
from megatron.core.models.layer_pattern import MAMBA
from megatron.core.process_groups import GROUP_NAMES, ProcessGroupCollection, RankGrid
from megatron.training.config.layer_pattern_options import has, has_attention
from megatron.training.config.resolve import ResolvedRun
from megatron.training.fault_tolerance.hang_files import (
    POINT_TO_POINT,
    describe,
    enable_flight_recorder,
)
from megatron.training.fault_tolerance.peers import Diagnosis, PeerWatch
from megatron.training.fault_tolerance.restart import RestartRecord
from megatron.training.fault_tolerance.stopping import StopRequests

#: Seconds to wait for other ranks before checking whether they are alive.
POLL_SECONDS = 1.0


class CollectiveCheck:
    """Observer of process groups that raises if ranks enter different collectives
    (`--check-collectives`).

    Ranks that enter different collectives wait for each other forever, or exchange wrong data. So
    each rank of a group writes the collective that it is about to enter to the store, and reads
    what the other ranks wrote for the same position in the group's sequence. All ranks see a
    difference before any data is sent. Sends and receives are not compared, between pipeline stages
    and in a ring of context-parallel ranks: a schedule fixes their order, and both ends reach them
    at different times.

    Args:
        store: a client of the run's store, used by this observer alone.
        rank: global rank of this process.
        timeout_seconds: how long to wait for the slowest rank.
        watch: which ranks are alive, and the current iteration of this rank.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        timeout_seconds: float,
        watch: PeerWatch,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        # torch's PrefixStore cannot delete keys of a store that was created in Python.
        self._store = store
        self._rank, self._timeout_seconds, self._watch = rank, timeout_seconds, watch
        self._now = now
        self._counts: dict[str, int] = {}
        self.compared = 0
        """Number of collectives compared so far."""

    def __call__(self, record: object) -> None:
        """Compare a collective that is about to start.

        Raises:
            RunStopped: the ranks of its group differ.
            PeerLost: a rank of its group has died, or has entered another group's collective.
        """
        assert isinstance(record, CollectiveRecord)
        if record.kind in POINT_TO_POINT:
            return
        group = f"{record.group}/{'-'.join(map(str, record.ranks))}"
        number = self._counts.get(group, 0) + 1
        self._counts[group] = number
        local_text = f"{describe(record)} in iteration {self._watch.iteration}"
        self._store.set(_key(group, number, self._rank), local_text)
        self._store.set(_key("at", self._rank), json.dumps([group, number, local_text]))
        keys = [_key(group, number, rank) for rank in record.ranks]
        self._wait(keys, record, local_text)
        texts = [self._store.get(key).decode() for key in keys]
        # All ranks have arrived here, so all have read the entries of the previous collective.
        if number > 1:
            self._store.delete_key(_key(group, number - 1, self._rank))
        self.compared += 1
        if len(set(texts)) > 1:
            raise RunStopped(ExitCode.COLLECTIVES_DIFFER, _difference(record, number, texts))

    def _wait(self, keys: list[str], record: CollectiveRecord, local_text: str) -> None:
        """Wait until every rank of the group has arrived."""
        deadline = self._now() + self._timeout_seconds
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=POLL_SECONDS))
                return
            except dist.DistStoreError:
                if failure := self._watch.diagnose(0.0):
                    raise PeerLost(
                        f"{failure.text}; the others wait in {local_text}",
                        is_reported=failure.is_reported,
                    ) from None
            late_ranks = self._late_ranks(keys, record)
            stuck = any(waits for _, waits in late_ranks.values())
            if late_ranks and (stuck or self._now() > deadline):
                where = {
                    self._rank: local_text,
                    **{rank: text for rank, (text, _) in late_ranks.items()},
                }
                ranks_text = "; ".join(f"rank {rank}: {where[rank]}" for rank in sorted(where))
                end = "they wait for each other" if stuck else "the timeout has expired"
                raise RunStopped(
                    ExitCode.COLLECTIVES_DIFFER,
                    f"ranks called different collectives and {end}: {ranks_text}",
                ) from None

    def _late_ranks(self, keys: list[str], record: CollectiveRecord) -> dict[int, tuple[str, bool]]:
        """Return the last collective of each rank that has not arrived, and whether that collective
        includes this rank: then the two ranks wait for each other forever."""
        late_ranks = {}
        for rank, key in zip(record.ranks, keys, strict=True):
            if self._store.check([key]):
                continue
            text, waits = "no collective yet", False
            if self._store.check([_key("at", rank)]):
                group, number, text = json.loads(self._store.get(_key("at", rank)))
                members = group.rpartition("/")[2].split("-")
                waits = str(self._rank) in members and self._counts.get(group, 0) < number
            late_ranks[rank] = (text, waits)
        return late_ranks


def _difference(record: CollectiveRecord, number: int, texts: list[str]) -> str:
    """Describe the different collectives, with the ranks that are about to enter each."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in zip(record.ranks, texts, strict=True):
        ranks_by_text.setdefault(text, []).append(rank)
    rank_texts = [
        f"rank{'s' * (len(text_ranks) > 1)} {', '.join(map(str, text_ranks))}: {text}"
        for text, text_ranks in sorted(ranks_by_text.items(), key=lambda entry: entry[1])
    ]
    return f"ranks differ in collective {number} over {record.group}: {'; '.join(rank_texts)}"


def _key(*segments: object) -> str:
    """Return the key of a value in the store."""
    return "/".join(map(str, ("collectives", *segments)))


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

# SPDX-License-Identifier: Apache-2.0
"""The distributed context of a run: store, peer watch and process groups.

With `--check-collectives` every collective is compared between its ranks before it starts. Ranks
that enter different collectives deadlock or mix up their values. So each rank of a group writes the
collective that it is about to enter to the store, and reads the entries of the other ranks for the
same position in the group's sequence. All ranks detect a difference before anything is sent. Sends
and receives between pipeline stages and in a ring of context-parallel ranks are not compared: their
order is fixed by a schedule, and both ends reach them at different times.
"""

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
from megatron.training.failures.hang_files import BETWEEN_TWO, ask_for_record, describe
from megatron.training.failures.peers import Diagnosis, PeerWatch
from megatron.training.failures.restart import RestartRecord
from megatron.training.failures.stopping import StopRequests

#: Seconds to wait for other ranks between two checks that they are alive.
POLL_SECONDS = 1.0


class CollectiveCheck:
    """An observer of process groups that raises if ranks enter different collectives.

    Args:
        store: a client of the run's store that only this object uses.
        rank: this process's rank.
        timeout_seconds: how long to wait for the slowest rank.
        watch: monitors the other ranks, and knows this rank's iteration.
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
            PeerLost: a rank of its group is gone, or waits in a collective of another group.
        """
        assert isinstance(record, CollectiveRecord)
        if record.kind in BETWEEN_TWO:
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
        # All ranks have written their entry, so all have read the previous one.
        if number > 1:
            self._store.delete_key(_key(group, number - 1, self._rank))
        self.compared += 1
        if len(set(texts)) > 1:
            raise RunStopped(ExitCode.COLLECTIVES_DIFFER, _difference(record, number, texts))

    def _wait(self, keys: list[str], record: CollectiveRecord, local_text: str) -> None:
        """Wait until every rank of the group has written its entry."""
        deadline = self._now() + self._timeout_seconds
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=POLL_SECONDS))
                return
            except dist.DistStoreError:
                if gone := self._watch.diagnose(0.0):
                    raise PeerLost(
                        f"{gone.text}; the others wait in {local_text}",
                        is_reported=gone.is_reported,
                    ) from None
            other_ranks = self._elsewhere(keys, record)
            stuck = any(waits for _, waits in other_ranks.values())
            if other_ranks and (stuck or self._now() > deadline):
                where = {
                    self._rank: local_text,
                    **{rank: text for rank, (text, _) in other_ranks.items()},
                }
                ranks_text = "; ".join(f"rank {rank}: {where[rank]}" for rank in sorted(where))
                end = "these wait for each other" if stuck else "the time for it is over"
                raise RunStopped(
                    ExitCode.COLLECTIVES_DIFFER,
                    f"ranks came to different collectives and {end}: {ranks_text}",
                ) from None

    def _elsewhere(self, keys: list[str], record: CollectiveRecord) -> dict[int, tuple[str, bool]]:
        """Return (last collective, whether it waits for this rank) of each missing rank.

        If a missing rank waits for this rank, both are deadlocked.
        """
        other_ranks = {}
        for rank, key in zip(record.ranks, keys, strict=True):
            if self._store.check([key]):
                continue
            text, waits = "no collective yet", False
            if self._store.check([_key("at", rank)]):
                group, number, text = json.loads(self._store.get(_key("at", rank)))
                members = group.rpartition("/")[2].split("-")
                waits = str(self._rank) in members and self._counts.get(group, 0) < number
            other_ranks[rank] = (text, waits)
        return other_ranks


def _difference(record: CollectiveRecord, number: int, texts: list[str]) -> str:
    """Describe the collectives of a group's ranks, with equal ranks grouped."""
    ranks: dict[str, list[int]] = {}
    for rank, text in zip(record.ranks, texts, strict=True):
        ranks.setdefault(text, []).append(rank)
    rank_texts = [
        f"rank{'s' * (len(text_ranks) > 1)} {', '.join(map(str, text_ranks))}: {text}"
        for text, text_ranks in sorted(ranks.items(), key=lambda item: item[1])
    ]
    return f"ranks differ in collective {number} over {record.group}: {'; '.join(rank_texts)}"


def _key(*segments: object) -> str:
    """Return a key of the store."""
    return "/".join(map(str, ("collectives", *segments)))


#: Minimum timeout between ranks in an asynchronous save, in seconds.
BACKGROUND_SECONDS = 3600.0

#: Seconds to look for the rank at fault after a collective has failed.
DIAGNOSIS_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """Process groups, device and coordination of one process of a run.

    Args:
        groups: the process groups.
        device: device of this process.
        coordinator: agreement of the ranks on saves and loads.
        background: agreement on asynchronous saves, which use a thread; None without them.
        watch: monitors the other ranks; None for a single process.
        stop: requests to stop the run early.
        restarts: whether this job has saved a checkpoint in an earlier start.
        attempt: number of restarts by the launcher so far.
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
    """Return the run's parallel layout."""
    parallel, experts = run.config.parallel, run.config.experts.num_experts is not None
    return RankGrid(
        world_size=run.world_size,
        etp=parallel.expert_tensor_parallel_size if experts else None,
        ep=parallel.expert_model_parallel_size,
        egtp=parallel.expert_gtp_size if experts else 1,
        tp=parallel.tensor_model_parallel_size,
        gtp=parallel.gtp_size,
        cp=parallel.context_parallel_size,
        pp=run.config.pipeline.pipeline_model_parallel_size,
        instances=run.config.data_parallel.num_distributed_optimizer_instances,
    )


def group_names(run: ResolvedRun) -> tuple[str, ...]:
    """Return the names of the run's process groups.

    Groups of ranks that share key and value heads, or groups of Mamba-2, exist only if several
    tensor-parallel ranks hold the same ones.
    """
    config, tp = run.config, run.config.parallel.tensor_model_parallel_size
    counts = {config.model.num_query_groups} if has_attention(config) else set()
    if has(config, MAMBA):
        counts.add(config.hybrid.mamba_num_groups)
    shared = sorted(tp // count for count in counts if count is not None and count < tp)
    return (*GROUP_NAMES, *(f"tp/{ranks}" for ranks in shared))


@contextlib.contextmanager
def join_run(
    run: ResolvedRun,
    launch: Launch,
    facts: StartFacts,
    *,
    watch: PeerWatch | None,
    stop: StopRequests,
) -> Iterator[DistributedContext]:
    """Create the process groups of a run and destroy them at the end.

    Args:
        facts: inputs that must be equal on all ranks.
        watch: this process's running watch; None for a single process.
        stop: stop requests of this process.

    Raises:
        ValueError: the device does not exist, or the ranks were started with different inputs.
    """
    seconds = run.config.parallel.distributed_timeout_minutes * 60.0
    device = choose_device(run.config.training.device, launch.local_rank)
    restarts = RestartRecord(launch, timeout_seconds=seconds)
    if watch is None:
        yield DistributedContext(
            groups=ProcessGroupCollection.single(),
            device=device,
            coordinator=Solo(),
            watch=None,
            stop=stop,
            restarts=restarts,
            attempt=launch.attempt,
            background=Solo() if run.config.checkpoint.async_save else None,
        )
        return
    if device.type == "cuda":
        # A collective that hangs on a GPU raises nothing here, and torch aborts the process.
        watch.guard(0.8 * seconds, stop.lose)
    coordinator = StoreCoordinator(
        launch.open_store(timeout_seconds=seconds),
        launch.rank,
        launch.world_size,
        timeout_seconds=seconds,
        on_missing_rank=partial(_check_alive, watch),
    )
    check_same_start(coordinator, facts)
    _init_process_group(launch, device, seconds)
    groups = ProcessGroupCollection.create(
        rank_grid(run), rank=launch.rank, timeout_seconds=seconds, names=group_names(run)
    )
    groups.observers.append(watch.collectives)
    if run.config.pipeline.pipeline_model_parallel_size > 1:
        stage = groups.coordinates["pp"]
        alike = [r for r in range(run.world_size) if groups.grid.coordinates(r)["pp"] == stage]
        watch.join_pipeline(groups["pp"].ranks, alike)
    if run.config.failures.check_collectives:
        store = launch.open_store(timeout_seconds=seconds)
        check = CollectiveCheck(store, rank=launch.rank, timeout_seconds=seconds, watch=watch)
        groups.observers.append(check)
    yield DistributedContext(
        groups=groups,
        device=device,
        coordinator=coordinator,
        watch=watch,
        stop=stop,
        restarts=restarts,
        attempt=launch.attempt,
        background=_background(run, launch, seconds, watch),
    )
    # Only after success: with a dead peer this would wait for it.
    dist.destroy_process_group()
    watch.close()


def _background(
    run: ResolvedRun, launch: Launch, seconds: float, watch: PeerWatch
) -> Coordinator | None:
    """Return the coordinator of asynchronous saves, with a store client of its own."""
    if not run.config.checkpoint.async_save:
        return None
    return StoreCoordinator(
        launch.open_store(timeout_seconds=seconds),
        launch.rank,
        launch.world_size,
        # writing a shard may take long, and no collective waits for it
        timeout_seconds=max(seconds, BACKGROUND_SECONDS),
        # the trainer may be waiting for this save, so the save must detect a lost rank
        on_missing_rank=partial(_check_alive, watch),
        prefix="background",
    )


def _init_process_group(launch: Launch, device: torch.device, seconds: float) -> None:
    """Initialize torch.distributed.

    Args:
        seconds: timeout of a collective.
    """
    if device.type == "cuda":
        ask_for_record(os.environ)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", launch.own_keys(launch.connect(timeout_seconds=seconds))),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=seconds),
        # With a device id NCCL connects communicators eagerly, so errors appear here.
        device_id=device if device.type == "cuda" else None,
    )


def _check_alive(watch: PeerWatch, rank: int) -> None:
    """Raise PeerLost if the rank that this rank waits for is gone."""
    if failure := watch.look_at(rank):
        text = f"{failure.text}; the others wait for it to agree on a save or a load"
        raise PeerLost(
            f"{text}; this run cannot go on{watch.pointer}", is_reported=failure.is_reported
        )


@contextlib.contextmanager
def blaming_peers(watch: PeerWatch | None) -> Iterator[None]:
    """Convert a failed collective into a PeerLost error that names the rank at fault.

    A rank that fails by itself reports its error to the store, where other ranks read it.

    Raises:
        PeerLost: a collective failed because another rank is gone.
    """
    if watch is None:
        yield
        return
    try:
        yield
    except PeerLost as lost:
        watch.leave_evidence(str(lost), lost, is_reported=lost.is_reported)
        raise
    except RuntimeError as error:
        failure = _diagnose(watch) if is_communication_error(error) else None
        if failure is None:
            watch.report_failure(error)
            raise
        watch.leave_evidence(failure.text, error, is_reported=failure.is_reported)
        where = f"the others wait in {watch.collectives.name} of iteration {watch.iteration}"
        text = f"{failure.text}; {where}; this run cannot go on{watch.pointer}"
        raise PeerLost(text, is_reported=failure.is_reported) from error
    except BaseException as error:
        watch.report_failure(error)
        raise


def _diagnose(watch: PeerWatch) -> Diagnosis | None:
    return watch.diagnose(DIAGNOSIS_SECONDS) or watch.behind()

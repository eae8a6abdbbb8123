# SPDX-License-Identifier: Apache-2.0
"""Fault handling of a training session: stragglers, bad steps, rollback and replica checks.

Straggler detection (`--log-straggler`): a step takes equally long on every rank, since each waits
for the slowest in its collectives. So the measure is the time of a step without that spent waiting,
taken where the waiting is done: by the clock on a CPU, by events of the stream on a GPU.

Replicas are compared across ranks (`--check-weight-hash-across-dp-replicas-interval`), and
differences reported. Those of weights and of optimizer state start equal and get equal updates, so
they stay bit-equal; where they do not, a machine has computed or stored a value wrongly. Checkpoint
metadata lists the ranks that hold the same data (`TensorChunk.replica_ranks`); the boxes of equal
ranks are compared as one set. A comparison is one gather of three numbers per set. Only where those
differ, a second gather compares all tensors by number, and names those that differ.

In host memory a tensor's number is its digest. On a GPU it is two sums over its elements as
integers, computed on the device modulo 2^64, and so in any order:

    sum of x_i (2i + 1)                     of every span, spans joined by an odd factor
    sum of x_i w_i, w_i odd and irregular

A change of one bit changes x_i by a power of two below 2^33, and that times an odd number is not 0
modulo 2^64: it is always detected. Elements that trade places change both sums, except by chance.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron.cli.errors import ExitCode, RunStopped
from megatron.core.comm import all_gather
from megatron.core.dist_checkpointing import (
    CheckpointError,
    Coordinator,
    TensorChunk,
    optimizer_chunks,
    weight_chunks,
)
from megatron.core.dist_checkpointing.shard_format import default_digest_algorithm, digest
from megatron.core.process_groups import DENSE_AXES, Group, RankGrid
from megatron.training.failures.faults import FaultLog, FaultRecord, Faults, Suspect, SuspectStep
from megatron.training.hooks import TrainingHooks
from megatron.training.monitoring.metrics import Metrics
from megatron.training.monitoring.step_window import StepOutcome
from megatron.training.newest_checkpoint import load_newest
from megatron.training.progress_state import Progress
from megatron.training.saves import Saves
from megatron.training.session import Session, load_session

#: Elements that are summed at once; each takes 24 bytes with its weights.
CHUNK_ELEMENTS = 1 << 22

#: Odd, from the golden ratio and from SplitMix64, as int64.
_JOIN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a signed 64-bit checksum for each tensor.

    Tensors on a GPU are summed there, and all sums come to the host in one copy.
    """
    sums: dict[int, torch.Tensor] = {}
    weights: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            if tensor.device not in weights:
                weights[tensor.device] = sum_weights(tensor.device)
            sums[i] = weighted_sums(tensor, weights[tensor.device])
    sums_on_host = (
        dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}
    )
    return [
        number(b"".join(value.to_bytes(8, "little", signed=True) for value in sums_on_host[i]))
        if i in sums_on_host
        else number(bits(tensor))
        for i, tensor in enumerate(tensors)
    ]


def number(data: bytes | memoryview) -> int:
    """Return the digest of bytes as a signed number of 64 bits."""
    digits = int(digest(data).rpartition(":")[2], 16)
    return digits - (1 << 64) if digits >> 63 else digits


def bits(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, row-major."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def sum_weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the odd factors of a chunk's elements, int64 [chunk] twice."""
    odd_factors = 2 * torch.arange(CHUNK_ELEMENTS, dtype=torch.int64, device=device) + 1
    mixed = odd_factors * _MIX
    return odd_factors, (mixed ^ (mixed >> 29)) * _JOIN | 1


def weighted_sums(tensor: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return both sums of a tensor's bits, int64 [2], on its device."""
    elements = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for chunk in elements.split(CHUNK_ELEMENTS):
        integers = chunk.to(torch.int64)
        sums = [(integers * weight[: chunk.numel()]).sum() for weight in weights]
        total = total * _JOIN + torch.stack(sums)
    return total


#: How many tensors and groups of ranks an error names.
NAMED = 4


@dataclass(frozen=True, eq=False)
class ReplicaSet:
    """Tensors that are replicated on the same ranks.

    Args:
        ranks: ascending.
        chunks: by name and place, as all of the ranks order them.
        start: position of the first among all chunks of this rank.
    """

    ranks: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]
    start: int

    @property
    def layout(self) -> int:
        """Return a number for what is held and where it belongs, without the values."""
        return number(
            repr(
                [(c.name, c.shape, c.box.offsets, c.box.sizes, str(c.tensor.dtype)) for c in self]
            ).encode()
        )

    @property
    def key(self) -> int:
        """Return a number for the ranks."""
        return number(repr(self.ranks).encode())

    def __iter__(self):
        return iter(self.chunks)


def replica_sets(chunks: Sequence[TensorChunk]) -> list[ReplicaSet]:
    """Put what other ranks hold too in order, by those ranks."""

    def ranks(chunk: TensorChunk) -> tuple[int, ...]:
        return chunk.replica_ranks

    shared = [chunk for chunk in chunks if len(chunk.replica_ranks) > 1]
    shared.sort(key=lambda c: (c.replica_ranks, c.name, c.box.offsets, c.box.sizes))
    sets, start = [], 0
    for members, group in groupby(shared, key=ranks):
        replicated = tuple(group)
        sets.append(ReplicaSet(members, replicated, start))
        start += len(replicated)
    return sets


@dataclass(frozen=True)
class Difference:
    """Tensors whose replicas differ between ranks.

    Args:
        parties: ranks that agree with one another, the largest party first.
        tensors: names, each with the place of what is held if that is a part.
    """

    parties: tuple[tuple[int, ...], ...]
    tensors: tuple[str, ...]

    @property
    def is_clear(self) -> bool:
        """Return whether most ranks agree, so that the others are to blame."""
        majority, *minorities = self.parties
        return len(majority) > sum(map(len, minorities))

    @property
    def blamed(self) -> tuple[int, ...]:
        """Return the ranks outside of the majority; all of them if there is none."""
        parties = self.parties[1:] if self.is_clear else self.parties
        return tuple(sorted(rank for party in parties for rank in party))

    def text(self, host_of: Callable[[int], str]) -> str:
        """Say who differs from whom, and in what."""
        tensors = _some(self.tensors)
        if self.is_clear:
            verb = "differs" if len(self.blamed) == 1 else "differ"
            wrong = _party(self.blamed, host_of)
            return f"{wrong} {verb} from {_party(self.parties[0])} in {tensors}"
        text = " against ".join(_party(party, host_of) for party in self.parties[:NAMED])
        more = f" and {len(self.parties) - NAMED} more" if len(self.parties) > NAMED else ""
        return f"{text}{more} differ in {tensors}: one of them is wrong"


def _some(words: Sequence[str]) -> str:
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _party(ranks: Sequence[int], host_of: Callable[[int], str] | None = None) -> str:
    """Name ranks, and their machines if those are asked for."""
    if host_of is None:
        return f"rank{'s' * (len(ranks) > 1)} {_some([str(rank) for rank in ranks])}"
    return _some([f"rank {rank} on {host_of(rank)}" for rank in ranks])


def differences(
    sets: Sequence[ReplicaSet], numbers: Mapping[int, Sequence[int]], starts: Mapping[int, int]
) -> list[Difference]:
    """Return the differences between the replicas of this rank's sets.

    Args:
        numbers: of the tensors of each rank, in its order.
        starts: where the set begins there; of one set only.
    """
    names_by_parties: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for replicas in sets:
        for i, chunk in enumerate(replicas):
            parties: dict[int, list[int]] = {}
            for rank in replicas.ranks:
                parties.setdefault(numbers[rank][starts[rank] + i], []).append(rank)
            if len(parties) > 1:
                order = sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))
                names_by_parties.setdefault(tuple(map(tuple, order)), []).append(_named(chunk))
    return [Difference(parties, tuple(names)) for parties, names in names_by_parties.items()]


def _named(chunk: TensorChunk) -> str:
    if chunk.box.sizes == chunk.shape:
        return chunk.name
    sizes = " x ".join(map(str, chunk.box.sizes))
    return f"{chunk.name} ({sizes} at {list(chunk.box.offsets)})"


class ReplicaCheck:
    """Compares replicas; every rank makes one and calls it at the same steps.

    Args:
        chunks: lists what this rank holds, as views of its memory.
        world: all ranks.
        device: where numbers travel.
        coordinator: how ranks agree at the start, and what they report of a difference.
        host_of: returns a rank's machine.
        complete: has all updates arrive in what is stored.
        record: keeps what differs after an iteration.

    Raises:
        ValueError: digests of ranks cannot be compared.
    """

    def __init__(
        self,
        chunks: Callable[[], list[TensorChunk]],
        world: Group,
        *,
        device: torch.device,
        coordinator: Coordinator,
        host_of: Callable[[int], str],
        complete: Callable[[], None],
        record: Callable[[int, Sequence[Difference]], None],
    ) -> None:
        self._chunks, self._world, self._device = chunks, world, device
        self._coordinator, self._host_of = coordinator, host_of
        self._complete, self._record = complete, record
        self.compared = 0
        """Comparisons so far."""
        sets = replica_sets(chunks())
        coordinator.begin("looking for replicas")
        try:
            agreed = coordinator.agree("replicas", lambda: _describe_replicas(sets), _agree)
        except CheckpointError as error:
            raise ValueError(str(error)) from error
        self._most_sets, self._most_chunks = agreed["sets"], agreed["chunks"]
        self._bytes: dict[str, int] = agreed["bytes"]

    def line(self, interval: int) -> str:
        """Return the log line about what is compared."""
        interval_text = "every step" if interval == 1 else f"every {interval} steps"
        if not self._most_sets:
            return "replica check: no rank holds what another one holds, so nothing is compared"
        sizes = " and ".join(f"{n:,} bytes of {kind}" for kind, n in self._bytes.items() if n)
        return (
            f"replica check: {interval_text}; up to {self._most_chunks:,} tensors of a rank, "
            f"{sizes}, have replicas and are compared"
        )

    def __call__(self, iteration: int) -> None:
        """Compare the replicas after a step.

        Raises:
            RunStopped: it differs.
        """
        if not self._most_sets:
            return
        self._complete()
        sets = replica_sets(self._chunks())
        numbers = numbers_of([chunk.tensor for replicas in sets for chunk in replicas])
        self.compared += 1
        rows = self._gather(
            [x for replicas in sets for x in _row(replicas, numbers)], self._most_sets * 3
        )
        # By set: the ranks' numbers, and where it begins in their lists.
        values_by_set: dict[int, dict[int, tuple[int, int]]] = {}
        for rank, row in enumerate(rows):
            for at in range(0, len(row), 3):
                key, value, start = row[at : at + 3]
                if start >= 0:
                    values_by_set.setdefault(key, {})[rank] = (value, start)
        unlike = {
            key
            for key, ranks in values_by_set.items()
            if len({value for value, _ in ranks.values()}) > 1
        }
        if unlike:
            raise self._stopped(iteration, sets, numbers, unlike=unlike, found=values_by_set)

    def _gather(self, numbers: Sequence[int], width: int) -> list[list[int]]:
        """Return the numbers of every rank, padded to the same width."""
        padded = [*numbers, *[-1] * (width - len(numbers))]
        local_numbers = torch.tensor([padded], dtype=torch.int64, device=self._device)
        rows: list[list[int]] = all_gather(local_numbers, self._world).tolist()
        return rows

    def _stopped(
        self,
        iteration: int,
        sets: Sequence[ReplicaSet],
        numbers: Sequence[int],
        *,
        unlike: set[int],
        found: Mapping[int, Mapping[int, tuple[int, int]]],
    ) -> RunStopped:
        """Find out what differs, keep it, and return how the run ends, the same on every rank."""
        rows = dict(enumerate(self._gather(numbers, self._most_chunks)))

        def mine() -> list[list[object]]:
            told = []
            for held in sets:
                # One rank speaks for a set.
                if held.key in unlike and held.ranks[0] == self._world.ranks[self._world.rank]:
                    starts = {rank: start for rank, (_, start) in found[held.key].items()}
                    told += differences([held], rows, starts)
            return [[one.parties, one.tensors] for one in told]

        self._coordinator.begin(f"comparing replicas behind iteration {iteration}")
        plain = self._coordinator.agree("name", mine, lambda all_: [x for one in all_ for x in one])
        told = [
            Difference(tuple(tuple(party) for party in parties), tuple(tensors))
            for parties, tensors in plain
        ]
        shown = "; ".join(one.text(self._host_of) for one in told[:NAMED])
        more = f"; and {len(told) - NAMED} more differences" if len(told) > NAMED else ""
        text = (
            f"replicas differ behind iteration {iteration}: {shown}{more}; nothing was saved: "
            "start again from the last checkpoint, without the machine to blame"
        )
        self._record(iteration, told)
        return RunStopped(ExitCode.REPLICAS_DIFFER, text)


def _row(held: ReplicaSet, numbers: Sequence[int]) -> tuple[int, int, int]:
    """Return what a rank reports of one set: which it is, its content, and where that begins."""
    own = numbers[held.start : held.start + len(held.chunks)]
    return held.key, number(repr(own).encode()), held.start


def _describe_replicas(sets: Sequence[ReplicaSet]) -> dict[str, object]:
    """Return what a rank holds together with others, as JSON."""
    sizes = {"weights": 0, "optimizer state": 0}
    for chunk in (chunk for held in sets for chunk in held):
        kind = "optimizer state" if chunk.name.startswith("optimizer.") else "weights"
        sizes[kind] += chunk.tensor.numel() * chunk.tensor.element_size()
    return {
        "kind": default_digest_algorithm(),
        "sets": [[held.key, len(held.ranks), held.layout, len(held.chunks)] for held in sets],
        "bytes": sizes,
    }


def _agree(ranks: Sequence[dict]) -> dict[str, object]:
    """Check that the ranks of each set list the same tensors; return the largest counts.

    Raises:
        ValueError: they do not, or not all have the package that makes digests.
    """
    if len({rank["kind"] for rank in ranks}) > 1:
        raise ValueError(
            "some machines have the package xxhash and some lack it, so that digests of replicas "
            "cannot be compared: install it on all of them"
        )
    layouts: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank, report in enumerate(ranks):
        for key, *facts in report["sets"]:
            layouts.setdefault(key, {})[rank] = tuple(facts)
    for layout_by_rank in layouts.values():
        if {len(layout_by_rank)} != {size for size, *_ in layout_by_rank.values()} or len(
            set(layout_by_rank.values())
        ) > 1:
            raise RuntimeError(
                f"ranks {sorted(layout_by_rank)} should hold the same tensors and do not"
            )
    return {
        "sets": max(len(report["sets"]) for report in ranks),
        "chunks": max(sum(count for *_, count in report["sets"]) for report in ranks),
        "bytes": {
            kind: max(report["bytes"][kind] for report in ranks) for kind in ranks[0]["bytes"]
        },
    }


class _Event:
    """A moment on a CPU, with the interface of a GPU's."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1000.0 * (end.at - self.at)


class WaitClock:
    """An observer of process groups, and the context that a rank waits in: it adds up the time.

    Args:
        device: where the run computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._device = device
        self._in_step = False
        self._waits: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []

    def _moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True) if self._gpu else _Event()
        event.record()
        return event

    def __call__(self, record: object) -> WaitClock | None:
        """Ask to be entered while the caller waits for a collective of a step."""
        return self if self._in_step else None

    def __enter__(self) -> None:
        self._begun = self._moment()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Note one wait."""
        self._waits.append((self._begun, self._moment()))

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._in_step, self._step_begun = True, self._moment()

    def end_step(self) -> None:
        """Note that a step has ended."""
        self._in_step = False
        self._steps.append((self._step_begun, self._moment()))

    def compute_seconds(self) -> float:
        """Return the mean time that a step since the last call has computed; 0.0 without one."""
        if self._gpu:
            torch.cuda.synchronize(self._device)
        steps = sum(begin.elapsed_time(end) for begin, end in self._steps)
        waits = sum(begin.elapsed_time(end) for begin, end in self._waits)
        count = len(self._steps)
        self._steps.clear()
        self._waits.clear()
        return max(0.0, steps - waits) / 1000.0 / count if count else 0.0


def slow_ranks(
    seconds: Sequence[float], factor: float, *, alike: Sequence[Sequence[int]] | None = None
) -> dict[int, float]:
    """Return the medians of the ranks whose time is above `factor` of them, the slowest first.

    The lower median, so that of two ranks one can be slow.

    Args:
        alike: ranks that are to take the same time, each with its own median; None is all.
    """
    medians = {}
    for ranks in [range(len(seconds))] if alike is None else alike:
        middle = statistics.median_low([seconds[rank] for rank in ranks])
        medians.update({rank: middle for rank in ranks if 0.0 < factor * middle < seconds[rank]})
    slow = sorted(medians, key=lambda rank: -seconds[rank] / medians[rank])
    return {rank: medians[rank] for rank in slow}


def straggler_text(
    seconds: Sequence[float],
    factor: float,
    host_of: Callable[[int], str],
    *,
    alike: Sequence[Sequence[int]] | None = None,
) -> str | None:
    """Return a line about the slow ranks; None if there are none."""
    medians = slow_ranks(seconds, factor, alike=alike)
    if not medians:
        return None
    slow = list(medians)
    stage_text = "of its stage " if alike is not None and len(alike) > 1 else ""
    descriptions = ", ".join(
        f"rank {rank} on {host_of(rank)} computes {seconds[rank] / medians[rank]:.1f} times as "
        f"long as the median {stage_text}({1000.0 * seconds[rank]:.1f} ms a step, median "
        f"{1000.0 * medians[rank]:.1f} ms)"
        for rank in slow[:4]
    )
    return f"straggler: {descriptions}" + (f", and {len(slow) - 4} more" if len(slow) > 4 else "")


class StragglerReport(TrainingHooks):
    """Compare ranks at every log line: one gather of a number.

    Args:
        clock: of this rank.
        world: all ranks.
        device: where the run computes.
        factor: how many medians make a rank slow.
        host_of: returns a rank's machine.
        say: shows one line.
        record: keeps of an iteration, by rank, its seconds a step and the median's.
        alike: ranks that compute the same; None is all.
    """

    def __init__(
        self,
        clock: WaitClock,
        world: Group,
        *,
        device: torch.device,
        factor: float,
        host_of: Callable[[int], str],
        say: Callable[[str], None],
        record: Callable[[int, dict[str, list[float]]], None],
        alike: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._alike, self._record = alike, record
        self._clock, self._world, self._device, self._factor = clock, world, device, factor
        self._host_of, self._say = host_of, say

    def on_step_begin(self, iteration: int) -> None:
        """Start the clock."""
        self._iteration = iteration
        self._clock.begin_step()

    def on_step_computed(self, progress: Progress, outcome: StepOutcome, loss_limit: float) -> None:
        """Stop the clock."""
        self._clock.end_step()

    def on_log(self) -> None:
        """Compare the ranks' times since the last call; every rank calls it."""
        local_seconds = torch.tensor(
            [self._clock.compute_seconds()], dtype=torch.float64, device=self._device
        )
        seconds = all_gather(local_seconds, self._world).tolist()
        if text := straggler_text(seconds, self._factor, self._host_of, alike=self._alike):
            self._say(text)
            medians = slow_ranks(seconds, self._factor, alike=self._alike)
            slow = {str(rank): [seconds[rank], middle] for rank, middle in medians.items()}
            self._record(self._iteration, slow)


def arm_stop(session: Session) -> None:
    """From here on, let signals and the time limit stop the run with a save."""
    failures, save = session.run.config.failures, session.run.config.checkpoint.save
    minutes = failures.exit_duration_in_mins
    # Without a checkpoint there is nothing to be gained by going on for a step.
    orderly = failures.exit_signal_handler and save is not None
    session.context.stop.arm(
        grace_seconds=failures.exit_grace_seconds if orderly else None,
        limit_seconds=None if minutes is None else 60.0 * minutes,
    )


def session_faults(
    session: Session,
    *,
    say: Callable[[str], None],
    metrics: Metrics,
    saves: Saves | None,
) -> Faults:
    """Return the hooks that handle bad steps.

    Args:
        say: shows one line.
        metrics: where events are kept.
        saves: writes checkpoints; None without --save.
    """
    config, context = session.run.config, session.context
    folder, log = config.checkpoint.save, fault_log(session, say=say, metrics=metrics)

    def record(noted: Suspect, verdict: str, hosts: Mapping[int, str], *, loss: float) -> None:
        values = (*noted.values, loss)
        log.add(FaultRecord(noted.iteration, noted.kind, verdict, hosts, values=values))

    suspect = None
    if folder is not None:
        suspect = SuspectStep(folder, context.coordinator, say=say, record=record)
    return Faults(
        config=config,
        say=say,
        log=log,
        host_of=host_names(session),
        save=None if saves is None else saves.finish,
        judge=None if suspect is None else suspect.judge,
        acquit=(lambda iteration, loss: None) if suspect is None else suspect.acquit,
        roll_back=lambda: roll_back(session, saves),
    )


def failure_hooks(
    session: Session,
    *,
    say: Callable[[str], None],
    metrics: Metrics,
    saves: Saves | None,
) -> list[TrainingHooks]:
    """Return what a session does about slow ranks, bad steps, failed saves and replicas that
    differ, in the order in which the loop is to call it.

    Args:
        say: shows one line.
        metrics: where events are kept.
        saves: writes checkpoints; None without --save.
    """
    candidates = [
        straggler_report(session, say=say, metrics=metrics),
        session_faults(session, say=say, metrics=metrics, saves=saves),
        saves,
        replica_hooks(session, say=say, metrics=metrics),
    ]
    return [hooks for hooks in candidates if hooks is not None]


def fault_log(session: Session, *, say: Callable[[str], None], metrics: Metrics) -> FaultLog:
    """Return where a session keeps faults: rank 0 writes the lines of the save folder."""
    folder = session.run.config.checkpoint.save if session.context.coordinator.rank == 0 else None
    return FaultLog(folder, record=metrics.write, warn=say)


def host_names(session: Session) -> Callable[[int], str]:
    """Return a function that names the machine of a rank."""
    watch = session.context.watch
    return (lambda rank: socket.gethostname()) if watch is None else watch.host_of


def straggler_report(
    session: Session, *, say: Callable[[str], None], metrics: Metrics
) -> StragglerReport | None:
    """Return the straggler detector; None if the options do not enable it.

    Args:
        say: shows one line.
        metrics: where slow ranks are kept.
    """
    failures, context = session.run.config.failures, session.context
    if not failures.log_straggler or session.run.world_size == 1:
        return None
    clock = WaitClock(context.device)
    context.groups.observers.append(clock)

    def record(iteration: int, slow: dict[str, list[float]]) -> None:
        count = float(len(slow))
        numbers = {"slow_ranks": count, "seconds_and_median_by_rank": slow}
        metrics.write("straggler", iteration, numbers)

    return StragglerReport(
        clock,
        context.groups["world"],
        device=context.device,
        factor=failures.straggler_factor,
        host_of=host_names(session),
        say=say,
        record=record,
        alike=_alike(context.groups.grid),
    )


def _alike(grid: RankGrid) -> list[list[int]]:
    """Return the ranks that compute the same: those of a pipeline stage, if it has several."""
    stages = grid.ranks(tuple(axis for axis in DENSE_AXES if axis != "pp"))
    return stages if len(stages[0]) > 1 else [list(range(grid.world_size))]


def roll_back(session: Session, saves: Saves | None) -> Progress | None:
    """Load weights and optimizer of the last checkpoint in the save folder; every rank calls this.

    Returns the checkpoint's progress, None if there is none. The log window stays as it is.
    """
    context, folder = session.context, session.run.config.checkpoint.save
    if saves is not None:
        saves.wait()
    if folder is None:
        return None

    def load(checkpoint: Path) -> Progress | None:
        # A pending weight all-gather would overwrite the loaded weights.
        session.step.engine.complete_weights()
        return load_session(session, checkpoint)

    window = session.window.to_json()
    loaded = load_newest(
        folder, load, context.coordinator, fall_back=session.run.config.checkpoint.load_fallback
    )
    if loaded is None:
        return None
    session.step.engine.start_param_sync()
    session.window.restore(window)
    return loaded[1] or Progress()


class ReplicaHooks(TrainingHooks):
    """Compares replicas at an interval, before a save of them.

    Args:
        check: compares them after the step of a number, and raises RunStopped if they differ.
        interval: in iterations.
    """

    def __init__(self, check: Callable[[int], None], interval: int) -> None:
        self._check, self._interval = check, interval

    def on_step_end(self, progress: Progress, outcome: StepOutcome) -> None:
        """Compare them if it is time."""
        if progress.iteration % self._interval == 0:
            self._check(progress.iteration)


def replica_hooks(
    session: Session, *, say: Callable[[str], None], metrics: Metrics
) -> ReplicaHooks | None:
    """Return the replica check, and log it; None if the options do not enable it.

    Args:
        say: shows one line.
        metrics: where a difference is kept.
    """
    interval = session.run.config.failures.check_weight_hash_across_dp_replicas_interval
    if interval is None:
        return None
    context = session.context

    log, host_of = fault_log(session, say=say, metrics=metrics), host_names(session)

    def record(iteration: int, found: Sequence[Difference]) -> None:
        tensors = [name for one in found for name in one.tensors]
        log.add(
            FaultRecord(
                iteration,
                "replicas",
                "persistent" if all(one.is_clear for one in found) else "undecided",
                {rank: host_of(rank) for one in found for rank in one.blamed},
                tensors=tensors,
                numbers={"tensors": float(len(tensors))},
            )
        )

    check = ReplicaCheck(
        lambda: (
            weight_chunks(session.model.store) + optimizer_chunks(session.optimizer, scalars=False)
        ),
        context.groups["world"],
        device=context.device,
        coordinator=context.coordinator,
        host_of=host_of,
        complete=session.step.engine.complete_weights,
        record=record,
    )
    say(check.line(interval))
    return ReplicaHooks(check, interval)

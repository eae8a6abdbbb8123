# SPDX-License-Identifier: Apache-2.0
"""Comparison of weights and optimizer state that several ranks hold.

Replicas are compared across ranks (`--check-weight-hash-across-dp-replicas-interval`), and
differences reported. Replicas of weights and optimizer state start equal and get equal updates, so
they remain bit-equal unless a machine computes or stores a value wrongly. Checkpoint chunks list
the ranks that hold the same data (`TensorChunk.replica_ranks`); chunks with equal ranks are
compared as one set. A comparison gathers three numbers per set. Only if they differ, a second
gather compares the checksums of all tensors to name the tensors that differ.

In host memory a tensor's checksum is its digest. On a GPU it is two sums over its elements as
integers, computed on the device modulo 2^64, which makes them independent of the order:

    sum of x_i (2i + 1)                     of every span, spans joined by an odd factor
    sum of x_i w_i, w_i odd and irregular

A change of one bit changes x_i by a power of two below 2^33, and that times an odd number is not 0
modulo 2^64: it is always detected. Swapped elements change both sums, except by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from megatron.cli.errors import ExitCode, RunStopped
from megatron.core.comm import all_gather
from megatron.core.dist_checkpointing import CheckpointError, Coordinator, TensorChunk
from megatron.core.dist_checkpointing.shard_format import default_digest_algorithm, digest
from megatron.core.process_groups import Group
from megatron.training.fault_tolerance.faults import FaultLog, FaultRecord
from megatron.training.hooks import Progress, StepReport, TrainingHooks

#: Elements per summation; each takes 24 bytes with its weights.
CHUNK_ELEMENTS = 1 << 22

#: Odd constants, from the golden ratio and from SplitMix64, as int64.
_JOIN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a signed 64-bit checksum for each tensor.

    Tensors on a GPU are summed on the device, and one copy brings all sums to the host.
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
        digest_number(
            b"".join(value.to_bytes(8, "little", signed=True) for value in sums_on_host[i])
        )
        if i in sums_on_host
        else digest_number(tensor_bytes(tensor))
        for i, tensor in enumerate(tensors)
    ]


def digest_number(payload: bytes | memoryview) -> int:
    """Return the digest of bytes as a signed 64-bit integer."""
    digits = int(digest(payload).rpartition(":")[2], 16)
    return digits - (1 << 64) if digits >> 63 else digits


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, row-major."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def sum_weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both vectors of odd factors of a chunk's elements, int64 [chunk]."""
    odd_factors = 2 * torch.arange(CHUNK_ELEMENTS, dtype=torch.int64, device=device) + 1
    mixed = odd_factors * _MIX
    return odd_factors, (mixed ^ (mixed >> 29)) * _JOIN | 1


def weighted_sums(tensor: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return both weighted sums of a tensor's bits, int64 [2], on its device."""
    elements = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for chunk in elements.split(CHUNK_ELEMENTS):
        integers = chunk.to(torch.int64)
        sums = [(integers * weight[: chunk.numel()]).sum() for weight in weights]
        total = total * _JOIN + torch.stack(sums)
    return total


#: Tensors and groups of ranks named in one error.
MAX_NAMED = 4


@dataclass(frozen=True, eq=False)
class ReplicaSet:
    """Tensors that are replicated on the same ranks.

    Args:
        ranks: the ranks, ascending.
        chunks: the tensors, ordered by name and box, equally on all ranks.
        start: index of the set's first chunk among all chunks of this rank.
    """

    ranks: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]
    start: int

    @property
    def layout(self) -> int:
        """Return a digest of names, shapes, boxes and dtypes, without the values."""
        return digest_number(
            repr(
                [(c.name, c.shape, c.box.offsets, c.box.sizes, str(c.tensor.dtype)) for c in self]
            ).encode()
        )

    @property
    def key(self) -> int:
        """Return a digest of the ranks."""
        return digest_number(repr(self.ranks).encode())

    def __iter__(self):
        return iter(self.chunks)


def replica_sets(chunks: Sequence[TensorChunk]) -> list[ReplicaSet]:
    """Group the chunks that other ranks also hold by their replica ranks."""

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
        parties: groups of ranks with equal values, the largest group first.
        tensors: names of the tensors, with sizes and offsets of a chunk that is not the whole.
    """

    parties: tuple[tuple[int, ...], ...]
    tensors: tuple[str, ...]

    @property
    def has_majority(self) -> bool:
        """Return whether a majority of ranks agrees, so that the other ranks are at fault."""
        majority, *minorities = self.parties
        return len(majority) > sum(map(len, minorities))

    @property
    def blamed(self) -> tuple[int, ...]:
        """Return the ranks outside the majority; all ranks without a majority."""
        parties = self.parties[1:] if self.has_majority else self.parties
        return tuple(sorted(rank for party in parties for rank in party))

    def text(self, host_of: Callable[[int], str]) -> str:
        """Describe which ranks differ, and in which tensors."""
        tensors = _list_text(self.tensors)
        if self.has_majority:
            verb = "differs" if len(self.blamed) == 1 else "differ"
            wrong = _party(self.blamed, host_of)
            return f"{wrong} {verb} from {_party(self.parties[0])} in {tensors}"
        text = " against ".join(_party(party, host_of) for party in self.parties[:MAX_NAMED])
        num_unlisted = (
            f" and {len(self.parties) - MAX_NAMED} more" if len(self.parties) > MAX_NAMED else ""
        )
        return f"{text}{num_unlisted} differ in {tensors}: one of them is wrong"


def _list_text(words: Sequence[str]) -> str:
    num_unlisted = len(words) - MAX_NAMED
    return ", ".join(words[:MAX_NAMED]) + (f" and {num_unlisted} more" if num_unlisted > 0 else "")


def _party(ranks: Sequence[int], host_of: Callable[[int], str] | None = None) -> str:
    """Return ranks as text, with their machines if `host_of` is set."""
    if host_of is None:
        return f"rank{'s' * (len(ranks) > 1)} {_list_text([str(rank) for rank in ranks])}"
    return _list_text([f"rank {rank} on {host_of(rank)}" for rank in ranks])


def differences(
    sets: Sequence[ReplicaSet], checksums: Mapping[int, Sequence[int]], starts: Mapping[int, int]
) -> list[Difference]:
    """Return the differences between the replicas of this rank's sets.

    Args:
        checksums: checksums of each rank's tensors, in its order.
        starts: index of the set's first tensor on each rank; for a single set.
    """
    names_by_parties: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for replicas in sets:
        for i, chunk in enumerate(replicas):
            parties: dict[int, list[int]] = {}
            for rank in replicas.ranks:
                parties.setdefault(checksums[rank][starts[rank] + i], []).append(rank)
            if len(parties) > 1:
                order = sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))
                names_by_parties.setdefault(tuple(map(tuple, order)), []).append(_named(chunk))
    return [Difference(parties, tuple(names)) for parties, names in names_by_parties.items()]


def _named(chunk: TensorChunk) -> str:
    if chunk.box.sizes == chunk.shape:
        return chunk.name
    sizes = " x ".join(map(str, chunk.box.sizes))
    return f"{chunk.name} ({sizes} at {list(chunk.box.offsets)})"


class ReplicaCheck(TrainingHooks):
    """Compares replicas at an interval, before they are saved.

    Args:
        chunks: lists this rank's chunks, as views of its memory.
        world: all ranks.
        interval: iterations between comparisons.
        device: device of the gathers.
        coordinator: agreement of the ranks at the start, and after a difference.
        host_of: returns a rank's machine.
        complete: completes pending weight updates before a comparison.
        log: records differences.

    Raises:
        ValueError: the ranks' digests are not comparable.
    """

    def __init__(
        self,
        chunks: Callable[[], list[TensorChunk]],
        world: Group,
        *,
        interval: int,
        device: torch.device,
        coordinator: Coordinator,
        host_of: Callable[[int], str],
        complete: Callable[[], None],
        log: FaultLog,
    ) -> None:
        self._chunks, self._world, self._device = chunks, world, device
        self._interval = interval
        self._coordinator, self._host_of = coordinator, host_of
        self._complete, self._log = complete, log
        self.compared = 0
        """Number of comparisons so far."""
        sets = replica_sets(chunks())
        coordinator.begin("looking for replicas")
        try:
            agreed = coordinator.agree("replicas", lambda: _describe_replicas(sets), _agree)
        except CheckpointError as error:
            raise ValueError(str(error)) from error
        self._max_sets, self._max_chunks = agreed["sets"], agreed["chunks"]
        self._bytes: dict[str, int] = agreed["bytes"]

    def line(self) -> str:
        """Return a log line about the compared tensors."""
        interval = "every step" if self._interval == 1 else f"every {self._interval} steps"
        if not self._max_sets:
            return (
                "replica check: no rank stores a replica of another rank's data, so "
                "nothing is compared"
            )
        sizes = " and ".join(f"{n:,} bytes of {kind}" for kind, n in self._bytes.items() if n)
        return (
            f"replica check: {interval}; up to {self._max_chunks:,} tensors per rank, "
            f"{sizes}, have replicas and are compared"
        )

    def on_step_end(self, progress: Progress, outcome: StepReport) -> None:
        """Compare replicas at every multiple of the interval.

        Raises:
            RunStopped: replicas differ.
        """
        iteration = progress.iteration
        if iteration % self._interval or not self._max_sets:
            return
        self._complete()
        sets = replica_sets(self._chunks())
        checksums = tensor_checksums([chunk.tensor for replicas in sets for chunk in replicas])
        self.compared += 1
        rows = self._gather(
            [x for replicas in sets for x in _row(replicas, checksums)], self._max_sets * 3
        )
        # By set key: {rank: (digest of the set's checksums, index of its first tensor)}.
        values_by_set: dict[int, dict[int, tuple[int, int]]] = {}
        for rank, row in enumerate(rows):
            for offset in range(0, len(row), 3):
                key, value, start = row[offset : offset + 3]
                if start >= 0:
                    values_by_set.setdefault(key, {})[rank] = (value, start)
        differing_keys = {
            key
            for key, values_by_rank in values_by_set.items()
            if len({value for value, _ in values_by_rank.values()}) > 1
        }
        if differing_keys:
            raise self._stop_for_differences(
                iteration,
                sets,
                checksums,
                differing_keys=differing_keys,
                values_by_set=values_by_set,
            )

    def _gather(self, numbers: Sequence[int], width: int) -> list[list[int]]:
        """Return the numbers of every rank, padded to the same width."""
        padded = [*numbers, *[-1] * (width - len(numbers))]
        local_numbers = torch.tensor([padded], dtype=torch.int64, device=self._device)
        rows: list[list[int]] = all_gather(local_numbers, self._world).tolist()
        return rows

    def _stop_for_differences(
        self,
        iteration: int,
        sets: Sequence[ReplicaSet],
        checksums: Sequence[int],
        *,
        differing_keys: set[int],
        values_by_set: Mapping[int, Mapping[int, tuple[int, int]]],
    ) -> RunStopped:
        """Find and record the differences; return how the run ends, equal on all ranks."""
        checksums_by_rank = dict(enumerate(self._gather(checksums, self._max_chunks)))
        this_rank = self._world.ranks[self._world.rank]

        def local_differences() -> list[list[object]]:
            # The first rank of a set reports its differences.
            local = []
            for replicas in sets:
                if replicas.key in differing_keys and replicas.ranks[0] == this_rank:
                    by_rank = values_by_set[replicas.key]
                    starts = {rank: start for rank, (_, start) in by_rank.items()}
                    local += differences([replicas], checksums_by_rank, starts)
            return [[difference.parties, difference.tensors] for difference in local]

        self._coordinator.begin(f"comparing replicas after iteration {iteration}")
        reported = self._coordinator.agree(
            "name", local_differences, lambda by_rank: [x for local in by_rank for x in local]
        )
        all_differences = [
            Difference(tuple(tuple(party) for party in parties), tuple(tensors))
            for parties, tensors in reported
        ]
        listed = "; ".join(
            difference.text(self._host_of) for difference in all_differences[:MAX_NAMED]
        )
        num_unlisted = len(all_differences) - MAX_NAMED
        suffix = f"; and {num_unlisted} more differences" if num_unlisted > 0 else ""
        text = (
            f"replicas differ after iteration {iteration}: {listed}{suffix}; nothing was "
            "saved: restart from the last checkpoint, without the faulty machine"
        )
        self._add_fault(iteration, all_differences)
        return RunStopped(ExitCode.REPLICAS_DIFFER, text)

    def _add_fault(self, iteration: int, unequal: Sequence[Difference]) -> None:
        """Record the differences after an iteration."""
        tensors = [name for difference in unequal for name in difference.tensors]
        has_majority = all(difference.has_majority for difference in unequal)
        hosts = {rank: self._host_of(rank) for difference in unequal for rank in difference.blamed}
        self._log.add(
            FaultRecord(
                iteration,
                "replicas",
                "persistent" if has_majority else "undecided",
                hosts,
                tensors=tensors,
                numbers={"tensors": float(len(tensors))},
            )
        )


def _row(replica_set: ReplicaSet, checksums: Sequence[int]) -> tuple[int, int, int]:
    """Return a rank's entry for one set: (key, digest of its checksums, start)."""
    set_checksums = checksums[replica_set.start : replica_set.start + len(replica_set.chunks)]
    return replica_set.key, digest_number(repr(set_checksums).encode()), replica_set.start


def _describe_replicas(sets: Sequence[ReplicaSet]) -> dict[str, object]:
    """Return a rank's replica sets as JSON."""
    sizes = {"weights": 0, "optimizer state": 0}
    for chunk in (chunk for replica_set in sets for chunk in replica_set):
        kind = "optimizer state" if chunk.name.startswith("optimizer.") else "weights"
        sizes[kind] += chunk.tensor.numel() * chunk.tensor.element_size()
    return {
        "kind": default_digest_algorithm(),
        "sets": [
            [replica_set.key, len(replica_set.ranks), replica_set.layout, len(replica_set.chunks)]
            for replica_set in sets
        ],
        "bytes": sizes,
    }


def _agree(ranks: Sequence[dict]) -> dict[str, object]:
    """Check that the ranks of each set list the same tensors; return the largest counts.

    Raises:
        ValueError: some machines lack the package xxhash.
        RuntimeError: the ranks of a set list different tensors.
    """
    if len({rank["kind"] for rank in ranks}) > 1:
        raise ValueError(
            "some machines have the package xxhash and some lack it, so digests of replicas "
            "cannot be compared: install it on all of them"
        )
    layouts: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank, report in enumerate(ranks):
        for key, *layout in report["sets"]:
            layouts.setdefault(key, {})[rank] = tuple(layout)
    for layout_by_rank in layouts.values():
        if {len(layout_by_rank)} != {size for size, *_ in layout_by_rank.values()} or len(
            set(layout_by_rank.values())
        ) > 1:
            raise RuntimeError(
                f"ranks {sorted(layout_by_rank)} should store the same tensors, but do not"
            )
    return {
        "sets": max(len(report["sets"]) for report in ranks),
        "chunks": max(sum(count for *_, count in report["sets"]) for report in ranks),
        "bytes": {
            kind: max(report["bytes"][kind] for report in ranks) for kind in ranks[0]["bytes"]
        },
    }

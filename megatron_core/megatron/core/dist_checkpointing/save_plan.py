# SPDX-License-Identifier: Apache-2.0
"""The plan of a save (the rank, file and byte range of every box), and its steps on disk.

Planning is pure: no files, no messages. A rank plans its own shard from its own chunks
(`plan_shard`). Rank 0 checks the plans of all ranks together before anything is written: no element
may be missing or written twice (`check_plans`). After the shards are written, it joins plans and
digests into the tables of the manifest (`stored_tables`).

`SaveSteps` opens the folder, writes a shard and commits. A synchronous save takes these steps in
its own process, and its bytes come from the tensors. An asynchronous save takes them in the writer
process, and its bytes come from a staging copy. A shard is written sequentially in small buffers,
which are digested as they are written, and synced at the end.

Nothing here imports torch, because writer processes use this module.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.boxes import Box, TensorChunk, chunk_key, first_overlap, tiles
from megatron.core.dist_checkpointing.manifest import (
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    problem_of_count,
    problem_of_name,
    problem_of_shape,
)
from megatron.core.dist_checkpointing.run_folder import (
    check_save_folder_lock,
    checkpoint_folder,
    existing_note,
    open_temporary,
    publish,
    write_tracker,
)
from megatron.core.dist_checkpointing.shard_format import (
    TORCH_NAMES,
    BlockDigester,
    CheckpointError,
    ShardWriter,
    digest,
    encode_header,
    encode_json,
    tensor_bytes,
)
from megatron.core.untrusted_files import open_to_write, sync_folder

if TYPE_CHECKING:
    import torch


#: Dtype names of the format by the text of a torch dtype.
_NAMES_BY_TEXT: Mapping[str, str] = MappingProxyType(
    {f"torch.{torch_name}": name for name, torch_name in TORCH_NAMES.items()}
)


class PlannedChunk(NamedTuple):
    """A box of a logical tensor that will be written to `file` at bytes [begin, end)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The plan of the file that one rank writes.

    Args:
        file: the shard's file name.
        header_bytes: size of length field and safetensors header.
        total_bytes: size of the file. A rank without chunks writes no file.
        chunks: position of each chunk in the file, in file order.
        shared: a summary of each replica set with more than one rank, see `check_replicas`.
    """

    file: str
    header_bytes: int
    total_bytes: int
    chunks: tuple[PlannedChunk, ...]
    shared: tuple[tuple[Any, ...], ...]

    def encode(self) -> str:
        """Return the plan as the text that rank 0 collects: JSON, one line per chunk."""
        chunks = ((c.name, c.dtype, c.shape, *c.box, c.begin, c.end) for c in self.chunks)
        head = (self.file, self.header_bytes, self.total_bytes, self.shared)
        return "\n".join(map(encode_json, itertools.chain([head], chunks)))

    @classmethod
    def decode(cls, text: str) -> ShardPlan:
        """Return the plan of a text by `encode`."""
        # Line by line: a list of all chunks as JSON objects takes twice the memory of the plan.
        head, *lines = text.split("\n")
        file, header_bytes, total_bytes, shared = json.loads(head)
        chunks = tuple(
            PlannedChunk(
                name=name,
                dtype=dtype,
                shape=tuple(shape),
                box=Box(tuple(offsets), tuple(sizes)),
                file=file,
                begin=begin,
                end=end,
            )
            for name, dtype, shape, offsets, sizes, begin, end in map(json.loads, lines)
        )
        return cls(
            file=file,
            header_bytes=header_bytes,
            total_bytes=total_bytes,
            chunks=chunks,
            shared=tuple(map(tuple, shared)),
        )


class ShardDigests(NamedTuple):
    """The digests of a written shard: of its header, and of the blocks of each chunk."""

    header: str = ""
    chunks: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class RankShard:
    """The shard of this rank: its plan, its header, and the tensors of `plan.chunks`."""

    plan: ShardPlan
    header: bytes
    source_chunks: tuple[TensorChunk, ...]


def replica_sets(
    chunks: Sequence[TensorChunk], rank: int
) -> dict[tuple[int, ...], list[TensorChunk]]:
    """Group this rank's chunks by replica ranks, largest first, in the same order on all ranks.

    Raises:
        ValueError: a chunk's `replica_ranks` do not contain `rank`.
    """
    sets: dict[tuple[int, ...], list[TensorChunk]] = {}
    for chunk in chunks:
        if rank not in chunk.replica_ranks:
            raise ValueError(
                f"chunk of {chunk.name}: replica_ranks {list(chunk.replica_ranks)} does not "
                f"contain rank {rank}, which declares it"
            )
        sets.setdefault(tuple(chunk.replica_ranks), []).append(chunk)
    for set_chunks in sets.values():
        set_chunks.sort(key=lambda c: (-c.tensor.numel() * c.tensor.itemsize, c.name, c.box))
    return sets


def chunks_to_write(
    sets: Mapping[tuple[int, ...], Sequence[TensorChunk]], rank: int
) -> list[TensorChunk]:
    """Return the chunks that `rank` writes, balanced greedily within each replica set.

    All members of a replica set declare the same chunks for it (`check_replicas`), so all compute
    the same assignment without communication: each chunk goes to the member with the fewest bytes,
    on a tie to the lowest rank.
    """
    assigned = []
    for ranks, set_chunks in sets.items():
        loads = [(0, r) for r in ranks]  # ascending, and so a heap
        for chunk in set_chunks:
            load, writer = loads[0]
            heapq.heapreplace(loads, (load + chunk.tensor.numel() * chunk.tensor.itemsize, writer))
            if writer == rank:
                assigned.append(chunk)
    return assigned


def _summary(ranks: tuple[int, ...], chunks: Sequence[TensorChunk]) -> tuple[Any, ...]:
    """Return (ranks, number of chunks, first name, digest) of this rank's view of a replica set."""
    text = repr([(c.name, c.shape, c.box, c.tensor.dtype) for c in chunks])
    return ranks, len(chunks), chunks[0].name, digest(text.encode())


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Return the format's name of `dtype`. Raises ValueError if it has none."""
    if str(dtype) not in _NAMES_BY_TEXT:
        raise ValueError(
            f"{tensor_name} has dtype {dtype}, which a checkpoint cannot store; convert it to "
            f"one of {', '.join(TORCH_NAMES)}"
        )
    return _NAMES_BY_TEXT[str(dtype)]


def plan_shard(chunks: Sequence[TensorChunk], rank: int) -> RankShard:
    """Plan the file that `rank` writes.

    Chunks are ordered by descending element size, so every tensor is aligned to its element size.

    Raises:
        ValueError: a name, a shape or a dtype cannot be stored, or this rank declares one box
            twice.
    """
    file = f"shard-{rank:05d}.safetensors"
    sets = replica_sets(chunks, rank)
    for name, shape in {chunk.name: tuple(chunk.shape) for chunk in chunks}.items():
        if problem := problem_of_name(name) or problem_of_shape(shape):
            raise ValueError(f"{name:.80} cannot be saved: it {problem}")
    assigned = [chunk for chunk in chunks_to_write(sets, rank) if _is_stored(chunk)]
    assigned.sort(key=lambda c: (-c.tensor.itemsize, c.name, c.box))
    entries = [
        (
            chunk_key(chunk.name, tuple(chunk.shape), chunk.box),
            dtype_name(chunk.tensor.dtype, chunk.name),
            chunk.box.sizes,
        )
        for chunk in assigned
    ]
    for (key, _, _), (following, _, _) in itertools.pairwise(entries):
        if key == following:
            raise ValueError(f"rank {rank} declares {key} twice; give each chunk once")
    header = encode_header(entries)
    planned = []
    begin = len(header)
    for chunk, (_, dtype, sizes) in zip(assigned, entries, strict=True):
        end = begin + tensor_bytes(dtype, sizes)
        planned.append(
            PlannedChunk(
                name=chunk.name,
                dtype=dtype,
                shape=tuple(chunk.shape),
                box=chunk.box,
                file=file,
                begin=begin,
                end=end,
            )
        )
        begin = end
    plan = ShardPlan(
        file=file,
        header_bytes=len(header),
        total_bytes=begin,
        chunks=tuple(planned),
        shared=tuple(_summary(ranks, c) for ranks, c in sets.items() if len(ranks) > 1),
    )
    return RankShard(plan=plan, header=header, source_chunks=tuple(assigned))


def check_updates_complete(shard: RankShard) -> None:
    """Check that a rank has received all updates of the chunks it writes.

    Raises:
        ValueError: updates by other ranks are pending.
    """
    pending = [c.name for c in shard.source_chunks if c.is_late is not None and c.is_late()]
    if pending:
        raise ValueError(
            f"updates from other ranks have not arrived in {pending[0]}"
            + (f" and {len(pending) - 1} more" if len(pending) > 1 else "")
            + ": call complete_weights() of the DataParallel engine on every rank before a save"
        )


def _is_stored(chunk: TensorChunk) -> bool:
    """Return whether a chunk has elements, or is all of a tensor without elements."""
    return chunk.tensor.numel() > 0 or chunk.box.sizes == tuple(chunk.shape)


def check_plans(plans: Sequence[ShardPlan]) -> None:
    """Check the plans of all ranks together, before anything is written.

    Raises:
        CheckpointError: the plans contradict each other, an element is missing or written twice, or
            there are more chunks than a manifest may list.
    """
    check_replicas(plans)
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    check_coverage(group_by_tensor(chunks))
    shard_bytes = sum(plan.total_bytes for plan in plans)
    num_files = sum(bool(plan.chunks) for plan in plans)
    if problem := problem_of_count(num_files + len(chunks), shard_bytes):
        raise CheckpointError(f"nothing is saved: {problem}; join small tensors")


def check_replicas(plans: Sequence[ShardPlan]) -> None:
    """Check that all members of every replica set declare the same chunks for it.

    Otherwise a chunk could be assigned to a rank that does not declare it.

    Raises:
        CheckpointError: two ranks of a set differ.
    """
    declared = [{tuple(ranks): summary for ranks, *summary in plan.shared} for plan in plans]
    for rank, sets in enumerate(declared):
        for ranks, expected in sets.items():
            for peer in ranks:
                actual = declared[peer].get(ranks) if peer < len(declared) else None
                if actual != expected:
                    count, name, _ = expected
                    raise CheckpointError(
                        f"rank {rank} declares {count} chunks, {name} among them, with "
                        f"replica_ranks {list(ranks)}, but rank {peer} declares "
                        f"{f'{actual[0]} different chunks' if actual else 'none'} for these ranks"
                    )


def group_by_tensor(chunks: Sequence[PlannedChunk]) -> dict[str, list[PlannedChunk]]:
    """Return the chunks of every logical tensor, ascending by offsets."""
    tensors: dict[str, list[PlannedChunk]] = {}
    for chunk in chunks:
        tensors.setdefault(chunk.name, []).append(chunk)
    for group in tensors.values():
        group.sort(key=lambda c: c.box)
    return tensors


def check_coverage(tensors: dict[str, list[PlannedChunk]]) -> None:
    """Check that every element of every logical tensor is written exactly once.

    Raises:
        CheckpointError: an element is missing or written twice, or ranks differ in dtype or shape.
    """
    for name, chunks in tensors.items():
        shape, dtype = chunks[0].shape, chunks[0].dtype
        for chunk in chunks:
            if (chunk.shape, chunk.dtype) != (shape, dtype):
                raise CheckpointError(
                    f"{name} is {dtype} {list(shape)} in {chunks[0].file} but "
                    f"{chunk.dtype} {list(chunk.shape)} in {chunk.file}; ranks must agree"
                )
        boxes = [chunk.box for chunk in chunks]
        if tiles(boxes, shape):
            continue
        if overlap := first_overlap(boxes):
            a, b = (chunks[i] for i in overlap)
            raise CheckpointError(
                f"{name} would be written twice: {a.box} in {a.file} and {b.box} in {b.file}; "
                "name all ranks that hold the same box in its replica_ranks"
            )
        covered = sum(box.numel for box in boxes)
        raise CheckpointError(
            f"{name} {list(shape)} has {math.prod(shape)} elements but the ranks "
            f"declare only {covered}: a chunk of it is missing on some rank"
        )


def stored_tables(
    plans: Iterable[ShardPlan], digests: Iterable[ShardDigests]
) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Join every rank's plan with its digests into the manifest's two tables."""
    files: dict[str, StoredFile] = {}
    chunks: dict[str, list[StoredChunk]] = {}
    layouts: dict[str, tuple[str, tuple[int, ...]]] = {}
    for plan, shard_digests in zip(plans, digests, strict=True):
        if not plan.chunks:
            continue
        files[plan.file] = StoredFile(
            bytes=plan.total_bytes,
            header_bytes=plan.header_bytes,
            header_xxh3=shard_digests.header,
        )
        for chunk, xxh3 in zip(plan.chunks, shard_digests.chunks, strict=True):
            layouts[chunk.name] = (chunk.dtype, chunk.shape)
            chunks.setdefault(chunk.name, []).append(
                StoredChunk(
                    file=chunk.file,
                    box=chunk.box,
                    begin=chunk.begin,
                    end=chunk.end,
                    xxh3=tuple(xxh3),
                )
            )
    tensors = {
        name: StoredTensor(
            dtype=layouts[name][0],
            shape=layouts[name][1],
            chunks=tuple(sorted(group, key=lambda c: c.box)),
        )
        for name, group in chunks.items()
    }
    return files, tensors


class SaveSteps:
    """The steps of one rank's saves; only rank 0 takes `plans`, `open` and `commit`.

    Arguments and results are plain JSON data, as they may come from another process.

    Args:
        root: folder of all checkpoints.
        plan: of this rank's shard.
        header: length field and safetensors header of the shard.
        buffers: yields the bytes of a chunk of `plan.chunks`, by its index; a buffer is valid until
            the next is yielded.
        heartbeat: called after each buffer is written.
    """

    def __init__(
        self,
        root: Path,
        plan: ShardPlan,
        header: bytes | memoryview,
        buffers: Callable[[int], Iterable[memoryview]],
        *,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._plan, self._header = root, plan, header
        self._buffers, self._heartbeat = buffers, heartbeat
        self._plans: Sequence[str] = ()  # as text, which takes less memory than objects

    def execute(self, step: str, **arguments: Any) -> Any:
        """Take the step of this name. Raises CheckpointError, OSError, ValueError."""
        steps: Mapping[str, Callable[..., Any]] = {
            "plans": self.plans,
            "open": self.open,
            "write": self.write,
            "commit": self.commit,
        }
        return steps[step](**arguments)

    def plans(self, texts: Sequence[str]) -> None:
        """Check and store the plans of all ranks; no element may be missing or written twice."""
        check_plans(list(self._decoded(texts)))
        self._plans = texts

    def _decoded(self, texts: Sequence[str]) -> Iterator[ShardPlan]:
        yield self._plan  # rank 0 takes the steps that need the plans of all ranks
        yield from map(ShardPlan.decode, texts[1:])

    def open(
        self, iteration: int, name: str, *, folder_locked: bool, skip_existing: bool
    ) -> str | None:
        """Create the temporary folder `name`.

        If the step has already been saved and `skip_existing`, return a line about it instead.
        """
        if folder_locked:
            check_save_folder_lock(self._root)
        folder = checkpoint_folder(self._root, iteration)
        if skip_existing and folder.is_dir():
            return f"{folder} exists already{existing_note(folder)}; it is not saved again"
        open_temporary(self._root, iteration, name=name)
        return None

    def write(self, name: str, *, block_bytes: int, digests: bool) -> str:
        """Write and sync this rank's shard in the folder `name`; return its digests as JSON.

        Raises:
            CheckpointError: the file exists, or the disk is full, read-only or broken.
        """
        plan = self._plan
        if not plan.chunks:
            return json.dumps(ShardDigests())
        path = self._root / name / plan.file
        try:
            with open_to_write(path, "x", root=self._root) as file:
                writer = ShardWriter(file)
                writer.write(self._header)
                chunks = self._write_chunks(writer, path, block_bytes, digests=digests)
                writer.sync()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"cannot create {path}: its folder is missing, or is not on a file system that "
                "all ranks share"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path} ({plan.total_bytes} bytes): {error.strerror}; nothing was "
                "saved, earlier checkpoints are intact"
            ) from error
        sync_folder(path.parent)
        header = digest(self._header) if digests else ""
        return json.dumps(ShardDigests(header, chunks), separators=(",", ":"))

    def _write_chunks(
        self, writer: ShardWriter, path: Path, block_bytes: int, *, digests: bool
    ) -> list[list[str]]:
        """Write all chunks, each buffer right after its digest; return the digests by chunk."""
        digests_by_chunk = []
        for index, chunk in enumerate(self._plan.chunks):
            digester = BlockDigester(block_bytes)
            for buffer in self._buffers(index):
                if digests:
                    digester.update(buffer)
                writer.write(buffer)
                self._heartbeat()
            digests_by_chunk.append(digester.finish())
            if writer.position != chunk.end:
                raise CheckpointError(
                    f"{chunk.name} ends at byte {writer.position} of {path}, not at "
                    f"{chunk.end}: its pieces do not fit its shape"
                )
        return digests_by_chunk

    def commit(
        self,
        iteration: int,
        name: str,
        *,
        written: Sequence[str],
        block_bytes: int,
        digests: bool,
        extra: Mapping[str, Any],
    ) -> None:
        """Publish the checkpoint, then make the tracker name it.

        Args:
            written: the digests of every rank's shard, as `write` returned them.
        """
        files, tensors = stored_tables(
            self._decoded(self._plans),
            (ShardDigests(*json.loads(text)) for text in written),
        )
        manifest = Manifest(
            iteration=iteration,
            world_size=len(self._plans),
            block_bytes=block_bytes,
            digests=digests,
            files=files,
            tensors=tensors,
            extra=extra,
        )
        publish(self._root / name, manifest)
        write_tracker(self._root, iteration)

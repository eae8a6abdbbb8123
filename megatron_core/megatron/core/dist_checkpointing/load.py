# SPDX-License-Identifier: Apache-2.0
"""Loading: any boxes of the stored logical tensors, on any layout, reading only what is needed.

A checkpoint may be kept open to read box after box, for tensors that do not fit in memory whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from megatron.core.boxes import BoxIndex, TensorChunk, tiles
from megatron.core.dist_checkpointing.coordinator import Coordinator, Solo
from megatron.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from megatron.core.dist_checkpointing.manifest import Manifest, StoredTensor, read_manifest
from megatron.core.dist_checkpointing.run_folder import reading
from megatron.core.dist_checkpointing.shards import (
    DTYPES,
    ChunkPart,
    ChunkRead,
    Scratch,
    ShardReader,
    reads_of,
)

#: Parts of chunks and blocks that a `CheckpointReader` reads: so many of any checkpoint, and one
#: more for so many bytes. A part takes tens of microseconds, and rows of a tensor that is stored in
#: columns need a part of every column.
MIN_PART_LIMIT, BYTES_PER_PART = 10_000, 8192

#: Shards that a `CheckpointReader` keeps open: processes may often have 1,024 files open.
MAX_OPEN_SHARDS = 256

#: Problems named in one error; the rest is counted.
MAX_PROBLEMS = 8


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did on this rank.

    Args:
        bytes_read: bytes read from shards, digested surroundings and headers included.
        bytes_verified: how many of them matched a digest.
        missing: names that were wanted but are not in the checkpoint.
        unused: names in the checkpoint that this rank did not want.
    """

    bytes_read: int
    bytes_verified: int
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def load_checkpoint(
    folder: Path | str,
    chunks: Sequence[TensorChunk],
    *,
    coordinator: Coordinator | None = None,
    verify: bool = True,
    missing: Literal["error", "keep"] = "error",
    convert_dtype: bool = False,
) -> LoadReport:
    """Fill the tensors of `chunks` from a checkpoint saved on any layout.

    After an error the tensors' content is undefined.

    Args:
        folder: an `iter_...` folder.
        chunks: what this rank wants; `replica_ranks` plays no part.
        coordinator: if given, every rank calls this, and an error on one is raised on all.
        verify: whether to compare digests; only blocks that are read are verified.
        missing: what to do about a name the checkpoint lacks: raise, or keep the tensor's content
            and list it in the report.
        convert_dtype: whether a tensor may be stored in another dtype than it is wanted in.

    Raises:
        ValueError: `missing` is none of these.
        DamagedCheckpointError: the checkpoint is damaged or incomplete.
        CheckpointError: it is of another model, or another rank failed.
    """
    if missing not in ("error", "keep"):
        raise ValueError(f"missing must be 'error' or 'keep', got {missing!r}")
    folder = Path(folder)
    coordinator = coordinator or Solo()
    reports: list[LoadReport] = []
    held = contextlib.ExitStack()

    def load() -> str:
        held.enter_context(reading(folder))
        manifest = read_manifest(folder)
        if verify and not manifest.digests:
            raise CheckpointError(
                f"{folder} was saved without digests and cannot be verified; load it with "
                "verify=False"
            )
        tensors, absent = wanted_tensors(
            manifest, chunks, missing=missing, convert_dtype=convert_dtype
        )
        reads = plan_reads(tensors, chunks)
        bytes_read, bytes_verified = _carry_out(folder, manifest, reads, verify)
        reports.append(
            LoadReport(
                bytes_read=bytes_read,
                bytes_verified=bytes_verified,
                missing=absent,
                unused=tuple(sorted(manifest.tensors.keys() - tensors.keys())),
            )
        )
        return manifest.xxh3

    def compare(identities: list[str]) -> None:
        different = [r for r, identity in enumerate(identities) if identity != identities[0]]
        if different:
            raise CheckpointError(
                f"ranks {different} see another {folder} than rank 0: all ranks must see the same "
                "file system"
            )

    coordinator.begin(f"loading {folder.name}")
    with held:  # until the last rank has read
        coordinator.agree("load", load, compare)
    return reports[0]


def wanted_tensors(
    manifest: Manifest, chunks: Sequence[TensorChunk], *, missing: str, convert_dtype: bool
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the stored tensors that `chunks` name, and the names that are absent.

    Raises:
        CheckpointError: a shape or a dtype differs, or a name is absent and `missing` is "error".
    """
    tensors: dict[str, StoredTensor] = {}
    absent: set[str] = set()
    problems: dict[str, str] = {}
    for chunk in chunks:
        stored = manifest.tensors.get(chunk.name)
        if stored is None:
            absent.add(chunk.name)
            if missing == "error":
                fix = f": {chunk.if_missing}" if chunk.if_missing else ""
                problems[chunk.name] = f"{chunk.name} is not in it{fix}"
        elif stored.shape != tuple(chunk.shape):
            problems[chunk.name] = (
                f"{chunk.name} is {list(stored.shape)} in it but {list(chunk.shape)} in the model"
            )
        elif DTYPES[stored.dtype] != chunk.tensor.dtype and not convert_dtype:
            problems[chunk.name] = (
                f"{chunk.name} is {DTYPES[stored.dtype]} in it but {chunk.tensor.dtype} in the "
                "model (allow it with convert_dtype=True)"
            )
        else:
            tensors[chunk.name] = stored
    if problems:
        listed = "; ".join(list(problems.values())[:MAX_PROBLEMS])
        rest = len(problems) - MAX_PROBLEMS
        more = f"; and {rest} tensors more" if rest > 0 else ""
        raise CheckpointError(f"the checkpoint does not fit the model: {listed}{more}")
    return tensors, tuple(sorted(absent))


def plan_reads(
    tensors: dict[str, StoredTensor],
    chunks: Sequence[TensorChunk],
    *,
    index_of: Callable[[str], BoxIndex] | None = None,
    max_parts: int | None = None,
) -> dict[str, list[ChunkRead]]:
    """Return, for every file, what is to be read from it, ascending by position.

    Every stored chunk is read at most once, however many chunks want parts of it.

    Args:
        tensors: stored ones by name.
        chunks: what is wanted of them.
        index_of: returns `stored_index` of a tensor by name, for callers that plan many reads.
        max_parts: parts of stored chunks that may be read; None: any number.

    Raises:
        DamagedCheckpointError: an element is stored never, or more than once.
        CheckpointError: there are more than `max_parts` parts.
    """
    num_parts = 0
    wanted: dict[str, list[TensorChunk]] = {}
    for chunk in chunks:
        if chunk.name in tensors and chunk.tensor.numel():
            wanted.setdefault(chunk.name, []).append(chunk)
    reads: dict[str, list[ChunkRead]] = {}
    for name, members in wanted.items():
        stored = tensors[name]
        index = index_of(name) if index_of is not None else stored_index(name, stored)
        by_chunk: dict[int, list[ChunkPart]] = {}
        for chunk in members:
            overlaps = index.overlaps(chunk.box)
            num_parts += len(overlaps)
            if max_parts is not None and num_parts > max_parts:
                raise CheckpointError(too_many_parts(name))
            for i, common in overlaps:
                target = chunk.tensor.detach()[common.seen_from(chunk.box.offsets).slices]
                origin = stored.chunks[i].box.offsets
                part = ChunkPart(box=common.seen_from(origin), target=target)
                by_chunk.setdefault(i, []).append(part)
        for i, parts in by_chunk.items():
            piece = stored.chunks[i]
            read = ChunkRead(name=name, dtype=stored.dtype, chunk=piece, parts=parts)
            reads.setdefault(piece.file, []).append(read)
    for group in reads.values():
        group.sort(key=lambda read: read.chunk.begin)
    return reads


def too_many_parts(name: str) -> str:
    """Return why a tensor is not read."""
    return (
        f"{name} and other tensors are stored in too many small parts to be read in rows: load the "
        "checkpoint in a run, and save it again"
    )


def stored_index(name: str, stored: StoredTensor) -> BoxIndex:
    """Return an index of the boxes in which a tensor is stored.

    Raises:
        DamagedCheckpointError: they do not hold every element exactly once.
    """
    boxes = [chunk.box for chunk in stored.chunks]
    if not tiles(boxes, stored.shape):
        raise DamagedCheckpointError(
            f"the manifest does not store every element of {name} exactly once"
        )
    return BoxIndex(boxes)


def _carry_out(
    folder: Path, manifest: Manifest, reads: dict[str, list[ChunkRead]], verify: bool
) -> tuple[int, int]:
    """Read file after file and return the bytes read and the bytes verified."""
    bytes_read = bytes_verified = 0
    scratch = Scratch()
    with one_torch_thread():
        for name, group in sorted(reads.items()):
            with ShardReader(
                folder / name,
                manifest.files[name],
                block_bytes=manifest.block_bytes,
                verify=verify,
                scratch=scratch,
            ) as reader:
                for read in group:
                    reader.read(read)
            bytes_read += reader.bytes_read
            bytes_verified += reader.bytes_verified
    return bytes_read, bytes_verified


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Copy on the calling thread only: waking others for strided copies of a block costs more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class CheckpointReader:
    """Read boxes of a checkpoint's tensors, verified, in any number of steps.

    From here to the end of its `with` block retention does not remove the checkpoint.

    Args:
        folder: an `iter_...` folder.

    Attribute `manifest` describes its contents.

    Raises:
        CheckpointError: it is no undamaged checkpoint, or was saved without digests.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._scratch = Scratch()
        self._readers: dict[str, ShardReader] = {}  # the one used last is the last
        self._header_verified: set[str] = set()
        self._bytes_read = 0  # by readers that are closed
        self._part_limit = float(MIN_PART_LIMIT)
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading(folder))
            self.manifest = read_manifest(folder)
            if not self.manifest.digests:
                raise CheckpointError(f"{folder} was saved without digests and cannot be verified")
            self._stack = stack.pop_all()
        tensors = self.manifest.tensors
        self._index_of = lru_cache(maxsize=64)(lambda name: stored_index(name, tensors[name]))

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            while self._readers:
                self._close(next(iter(self._readers)))

    @property
    def bytes_read(self) -> int:
        """Return how many bytes of shards have been read, digested surroundings included."""
        return self._bytes_read + sum(reader.bytes_read for reader in self._readers.values())

    def read(self, chunks: Sequence[TensorChunk]) -> None:
        """Fill the tensors of `chunks`, converting dtypes.

        Raises:
            CheckpointError: one is not in the checkpoint, what it needs is damaged, or the
                checkpoint is stored in too small parts to be read so.
        """
        tensors, _ = wanted_tensors(self.manifest, chunks, missing="error", convert_dtype=True)
        with one_torch_thread():
            self._part_limit += sum(chunk.tensor.nbytes for chunk in chunks) / BYTES_PER_PART
            plan = plan_reads(
                tensors, chunks, index_of=self._index_of, max_parts=int(self._part_limit)
            )
            block_bytes = self.manifest.block_bytes
            for reads in plan.values():
                self._part_limit -= sum(reads_of(read, block_bytes) for read in reads)
            if self._part_limit < 0:
                raise CheckpointError(too_many_parts(chunks[0].name))
            for file, reads in sorted(plan.items()):
                reader = self._open(file)
                for read in reads:
                    reader.read(read)

    def _open(self, file: str) -> ShardReader:
        reader = self._readers.pop(file, None)
        if reader is None:
            if len(self._readers) == MAX_OPEN_SHARDS:
                self._close(next(iter(self._readers)))
            reader = ShardReader(
                self._folder / file,
                self.manifest.files[file],
                block_bytes=self.manifest.block_bytes,
                verify=True,
                scratch=self._scratch,
                header_verified=file in self._header_verified,
            )
            self._header_verified.add(file)
        self._readers[file] = reader
        return reader

    def _close(self, file: str) -> None:
        reader = self._readers.pop(file)
        self._bytes_read += reader.bytes_read
        reader.close()

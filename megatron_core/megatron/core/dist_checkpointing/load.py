# SPDX-License-Identifier: Apache-2.0
"""Loading with resharding: any boxes of the stored tensors, on any layout; reads only their bytes.

`CheckpointReader` keeps a checkpoint open to read box after box, for tensors that do not fit in
memory as a whole. A read of a box reads only the blocks that overlap it, straight into the target
if its layout allows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from megatron.core.boxes import (
    Box,
    BoxIndex,
    TensorChunk,
    boxes_of_range,
    flat_index,
    intersect,
    tiles,
)
from megatron.core.dist_checkpointing.coordinator import Coordinator, Solo
from megatron.core.dist_checkpointing.manifest import (
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    read_manifest,
)
from megatron.core.dist_checkpointing.run_folder import reading
from megatron.core.dist_checkpointing.safetensors_file import (
    DTYPES,
    Scratch,
    as_bytes,
    is_contiguous_cpu,
)
from megatron.core.dist_checkpointing.shard_file import ShardFile
from megatron.core.dist_checkpointing.shard_format import (
    CheckpointError,
    DamagedCheckpointError,
)

#: Scratch bytes for a block that is read in part: a multiple of every element size.
SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class ReadItem:
    """One copy of a load plan: a box in a stored chunk's coordinates, and its target view."""

    box: Box
    target: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkReadRequest:
    """A stored chunk of a named tensor, and the boxes to read from it."""

    name: str
    dtype: str
    chunk: StoredChunk
    read_items: Sequence[ReadItem]


def read_cost(request: ChunkReadRequest, block_bytes: int) -> float:
    """Return the cost of a request in blocks; a block that is read whole costs little."""
    itemsize = DTYPES[request.dtype].itemsize
    cost = 0.0
    for read_item in request.read_items:
        span = begin, end = _element_range(request.chunk.box.sizes, read_item.box)
        blocks = (end * itemsize - 1) // block_bytes - begin * itemsize // block_bytes + 1
        is_whole = _direct_bytes(read_item, span, request.dtype) is not None
        cost += 1 + blocks / (_WHOLE_BLOCKS if is_whole else 1)
    return cost


#: Number of whole blocks that are read in the time that one partial block takes.
_WHOLE_BLOCKS = 64


class ShardReader(ShardFile):
    """An open shard that reads boxes into tensors; see `ShardFile`.

    Args:
        path: the shard.
        file: the shard's entry in the manifest.
        block_bytes: bytes per digest.
        verify: whether to compare digests.
        scratch: buffer shared by the readers of one load.
        header_verified: whether the header's digest has already been compared.

    Raises:
        CheckpointError: the file is missing, has another size, or its header is damaged.
    """

    def __init__(
        self,
        path: Path,
        file: StoredFile,
        *,
        block_bytes: int,
        verify: bool,
        scratch: Scratch,
        header_verified: bool = False,
    ) -> None:
        super().__init__(
            path, file, block_bytes=block_bytes, verify=verify, header_verified=header_verified
        )
        self._scratch = scratch

    def read(self, request: ChunkReadRequest) -> None:
        """Fill all targets of `request`. Raises CheckpointError for a damaged or short file."""
        itemsize = DTYPES[request.dtype].itemsize
        spans = [
            _element_range(request.chunk.box.sizes, read_item.box)
            for read_item in request.read_items
        ]
        first_block = min(begin for begin, _ in spans) * itemsize // self.block_bytes
        last_byte = max(end for _, end in spans) * itemsize
        direct_targets = [
            _direct_bytes(read_item, span, request.dtype)
            for read_item, span in zip(request.read_items, spans, strict=True)
        ]
        chunk_bytes = request.chunk.end - request.chunk.begin
        start, stop = (element * itemsize for element in spans[0])
        for begin in range(first_block * self.block_bytes, last_byte, self.block_bytes):
            end = min(begin + self.block_bytes, chunk_bytes)
            if len(spans) == 1 and direct_targets[0] is not None and start <= begin and end <= stop:
                # The common case: one item covers the whole block, so read it in place.
                target = direct_targets[0][begin - start : end - start]
                self.read_bytes(request.name, request.chunk, begin, target)
            else:
                self._read_block(request, begin, end, spans, direct_targets)

    def _read_block(
        self,
        request: ChunkReadRequest,
        begin: int,
        end: int,
        spans: Sequence[tuple[int, int]],
        direct_targets: Sequence[memoryview | None],
    ) -> None:
        """Read the bytes [begin, end) of a stored chunk and copy them to the overlapping items."""
        itemsize = DTYPES[request.dtype].itemsize
        overlapping = [
            i for i, (a, b) in enumerate(spans) if a * itemsize < end and begin < b * itemsize
        ]
        if len(overlapping) == 1:
            start, stop = (element * itemsize for element in spans[overlapping[0]])
            target = direct_targets[overlapping[0]]
            if not self.verifies:  # nothing forces whole blocks
                begin, end = max(begin, start), min(end, stop)
            if target is not None and start <= begin and end <= stop:
                self.read_bytes(
                    request.name, request.chunk, begin, target[begin - start : end - start]
                )
                return
        if not self._has_overlap(request, begin, end, overlapping):
            return  # no item overlaps this block: it lies between the requested columns
        raw = self._scratch.take(min(SCRATCH_BYTES, end - begin))
        scratch = as_bytes(raw)
        for position, buffer in self.stream(request.name, request.chunk, (begin, end), scratch):
            elements = raw[: len(buffer)].view(DTYPES[request.dtype])
            begin_element = position // itemsize
            for box, common, read_item in _overlaps(
                request, begin_element, begin_element + len(elements), overlapping
            ):
                offset = flat_index(request.chunk.box.sizes, box.offsets) - begin_element
                source = elements[offset : offset + box.numel].view(box.sizes)
                read_item.target[common.seen_from(read_item.box.offsets).slices].copy_(
                    source[common.seen_from(box.offsets).slices]
                )

    def _has_overlap(
        self, request: ChunkReadRequest, begin: int, end: int, item_indices: Sequence[int]
    ) -> bool:
        """Return whether the bytes [begin, end) of a chunk overlap any item."""
        itemsize = DTYPES[request.dtype].itemsize
        return any(
            True for _ in _overlaps(request, begin // itemsize, end // itemsize, item_indices)
        )


def _overlaps(
    request: ChunkReadRequest, begin: int, end: int, item_indices: Sequence[int]
) -> Iterator[tuple[Box, Box, ReadItem]]:
    """Yield the overlaps of a request's items with the elements [begin, end) of its chunk.

    An overlap is (a contiguous box of the chunk, its intersection with an item, the item).
    """
    for box in boxes_of_range(request.chunk.box.sizes, begin, end):
        for i in item_indices:
            if common := intersect(box, request.read_items[i].box):
                yield box, common, request.read_items[i]


def _element_range(sizes: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the smallest row-major element range of a tensor of `sizes` that covers `box`."""
    last_index = tuple(o + n - 1 for o, n in zip(*box, strict=True))
    return flat_index(sizes, box.offsets), flat_index(sizes, last_index) + 1


def _direct_bytes(read_item: ReadItem, span: tuple[int, int], dtype: str) -> memoryview | None:
    """Return the target's memory if stored bytes can be read straight into it, else None."""
    target = read_item.target
    is_contiguous_range = span[1] - span[0] == math.prod(read_item.box.sizes)
    if is_contiguous_range and is_contiguous_cpu(target) and target.dtype == DTYPES[dtype]:
        return as_bytes(target)
    return None


#: Budget of a `CheckpointReader`'s read items and blocks: a minimum for every checkpoint, plus one
#: per so many bytes read. An item takes tens of microseconds, and reading rows of a tensor that is
#: stored in columns takes one item per column.
MIN_READ_ITEM_LIMIT, BYTES_PER_READ_ITEM = 10_000, 8192

#: Shards that a `CheckpointReader` keeps open; a process may often open 1,024 files at most.
MAX_OPEN_SHARDS = 256

#: Problems listed in one error; further problems are only counted.
MAX_PROBLEMS = 8


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Statistics of a load on this rank.

    Args:
        bytes_read: bytes read from shards, including headers and the remainder of digested blocks.
        bytes_verified: bytes that matched a digest.
        missing: requested names that the checkpoint lacks.
        unused: names in the checkpoint that this rank did not request.
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
        chunks: the boxes that this rank loads; their `replica_ranks` are ignored.
        coordinator: if set, every rank calls this, and an error on one rank is raised on all.
        verify: whether to compare digests; only blocks that are read are verified.
        missing: what to do about a name the checkpoint lacks: raise, or keep the tensor's content
            and list it in the report.
        convert_dtype: whether the stored dtype may differ from the tensor's dtype.

    Raises:
        ValueError: `missing` is neither "error" nor "keep".
        DamagedCheckpointError: the checkpoint is damaged or incomplete.
        CheckpointError: it is of another model, or another rank failed.
    """
    if missing not in ("error", "keep"):
        raise ValueError(f"missing must be 'error' or 'keep', got {missing!r}")
    folder = Path(folder)
    coordinator = coordinator or Solo()
    reports: list[LoadReport] = []
    read_lock = contextlib.ExitStack()

    def load() -> str:
        read_lock.enter_context(reading(folder))
        manifest = read_manifest(folder)
        if verify and not manifest.digests:
            raise CheckpointError(
                f"{folder} was saved without digests and cannot be verified; load it with "
                "verify=False"
            )
        tensors, missing_names = match_stored_tensors(
            manifest, chunks, missing=missing, convert_dtype=convert_dtype
        )
        reads = plan_reads(tensors, chunks)
        bytes_read, bytes_verified = _execute_reads(folder, manifest, reads, verify)
        reports.append(
            LoadReport(
                bytes_read=bytes_read,
                bytes_verified=bytes_verified,
                missing=missing_names,
                unused=tuple(sorted(manifest.tensors.keys() - tensors.keys())),
            )
        )
        return manifest.xxh3

    def compare(identities: list[str]) -> None:
        different_ranks = [r for r, identity in enumerate(identities) if identity != identities[0]]
        if different_ranks:
            raise CheckpointError(
                f"ranks {different_ranks} see a different {folder} than rank 0: all ranks must see "
                "the same file system"
            )

    coordinator.begin(f"loading {folder.name}")
    with read_lock:  # retention must not remove files until the last rank has read
        coordinator.agree("load", load, compare)
    return reports[0]


def match_stored_tensors(
    manifest: Manifest, chunks: Sequence[TensorChunk], *, missing: str, convert_dtype: bool
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the stored tensors that `chunks` name, and the names that the checkpoint lacks.

    Raises:
        CheckpointError: a shape or a dtype differs, or a name is absent and `missing` is "error".
    """
    tensors: dict[str, StoredTensor] = {}
    missing_names: set[str] = set()
    problems: dict[str, str] = {}
    for chunk in chunks:
        stored = manifest.tensors.get(chunk.name)
        if stored is None:
            missing_names.add(chunk.name)
            if missing == "error":
                fix = f": {chunk.if_missing}" if chunk.if_missing else ""
                problems[chunk.name] = f"{chunk.name} is missing from the checkpoint{fix}"
        elif stored.shape != tuple(chunk.shape):
            problems[chunk.name] = (
                f"{chunk.name} is {list(stored.shape)} in the checkpoint but "
                f"{list(chunk.shape)} in the model"
            )
        elif DTYPES[stored.dtype] != chunk.tensor.dtype and not convert_dtype:
            problems[chunk.name] = (
                f"{chunk.name} is {DTYPES[stored.dtype]} in the checkpoint but "
                f"{chunk.tensor.dtype} in the model (allow it with convert_dtype=True)"
            )
        else:
            tensors[chunk.name] = stored
    if problems:
        listed = "; ".join(list(problems.values())[:MAX_PROBLEMS])
        num_unlisted = len(problems) - MAX_PROBLEMS
        unlisted = f"; and {num_unlisted} tensors more" if num_unlisted > 0 else ""
        raise CheckpointError(f"the checkpoint does not fit the model: {listed}{unlisted}")
    return tensors, tuple(sorted(missing_names))


def plan_reads(
    tensors: dict[str, StoredTensor],
    chunks: Sequence[TensorChunk],
    *,
    index_of: Callable[[str], BoxIndex] | None = None,
    max_read_items: int | None = None,
) -> dict[str, list[ChunkReadRequest]]:
    """Return the load plan: read requests by file, ascending by position.

    Every stored chunk is read at most once, however many chunks overlap it.

    Args:
        tensors: stored tensors by name.
        chunks: boxes to load.
        index_of: returns `stored_index` of a tensor by name, for callers that plan many reads.
        max_read_items: limit of overlaps with stored chunks; None: no limit.

    Raises:
        DamagedCheckpointError: the stored chunks of a tensor leave a gap or overlap.
        CheckpointError: there are more than `max_read_items` overlaps.
    """
    num_read_items = 0
    chunks_by_name: dict[str, list[TensorChunk]] = {}
    for chunk in chunks:
        if chunk.name in tensors and chunk.tensor.numel():
            chunks_by_name.setdefault(chunk.name, []).append(chunk)
    reads: dict[str, list[ChunkReadRequest]] = {}
    for name, targets in chunks_by_name.items():
        stored = tensors[name]
        index = index_of(name) if index_of is not None else stored_index(name, stored)
        items_by_chunk: dict[int, list[ReadItem]] = {}
        for chunk in targets:
            overlaps = index.overlaps(chunk.box)
            num_read_items += len(overlaps)
            if max_read_items is not None and num_read_items > max_read_items:
                raise CheckpointError(too_many_read_items(name))
            for i, common in overlaps:
                target = chunk.tensor.detach()[common.seen_from(chunk.box.offsets).slices]
                origin = stored.chunks[i].box.offsets
                read_item = ReadItem(box=common.seen_from(origin), target=target)
                items_by_chunk.setdefault(i, []).append(read_item)
        for i, read_items in items_by_chunk.items():
            stored_chunk = stored.chunks[i]
            request = ChunkReadRequest(
                name=name, dtype=stored.dtype, chunk=stored_chunk, read_items=read_items
            )
            reads.setdefault(stored_chunk.file, []).append(request)
    for requests in reads.values():
        requests.sort(key=lambda request: request.chunk.begin)
    return reads


def too_many_read_items(name: str) -> str:
    """Return the error text for a tensor that is stored in too many small chunks."""
    return (
        f"{name} and other tensors are stored in too many small pieces to be read by rows: "
        "load the checkpoint in a run, and save it again"
    )


def stored_index(name: str, stored: StoredTensor) -> BoxIndex:
    """Return an index of a tensor's stored boxes.

    Raises:
        DamagedCheckpointError: the boxes do not cover every element exactly once.
    """
    boxes = [chunk.box for chunk in stored.chunks]
    if not tiles(boxes, stored.shape):
        raise DamagedCheckpointError(
            f"the manifest does not store every element of {name} exactly once"
        )
    return BoxIndex(boxes)


def _execute_reads(
    folder: Path, manifest: Manifest, reads: dict[str, list[ChunkReadRequest]], verify: bool
) -> tuple[int, int]:
    """Execute a load plan file by file; return (bytes read, bytes verified)."""
    bytes_read = bytes_verified = 0
    scratch = Scratch()
    with one_torch_thread():
        for name, requests in sorted(reads.items()):
            with ShardReader(
                folder / name,
                manifest.files[name],
                block_bytes=manifest.block_bytes,
                verify=verify,
                scratch=scratch,
            ) as reader:
                for request in requests:
                    reader.read(request)
            bytes_read += reader.bytes_read
            bytes_verified += reader.bytes_verified
    return bytes_read, bytes_verified


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Copy on the calling thread only: for strided copies of one block, waking threads costs more
    than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class CheckpointReader:
    """Reads and verifies boxes of a checkpoint's tensors, in any number of calls.

    Retention does not remove the checkpoint before the end of the reader's `with` block.

    Args:
        folder: an `iter_...` folder.

    Attribute `manifest` describes the checkpoint's contents.

    Raises:
        CheckpointError: the folder is no undamaged checkpoint, or was saved without digests.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._scratch = Scratch()
        self._readers: dict[str, ShardReader] = {}  # in order of use, most recent last
        self._header_verified: set[str] = set()
        self._bytes_read = 0  # by closed readers
        self._read_items_left = float(MIN_READ_ITEM_LIMIT)
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
        """The bytes read from shards, including the remainder of digested blocks."""
        return self._bytes_read + sum(reader.bytes_read for reader in self._readers.values())

    def read(self, chunks: Sequence[TensorChunk]) -> None:
        """Fill the tensors of `chunks`, converting dtypes.

        Raises:
            CheckpointError: a tensor is not in the checkpoint, its bytes are damaged, or it is
                stored in too many small chunks.
        """
        tensors, _ = match_stored_tensors(
            self.manifest, chunks, missing="error", convert_dtype=True
        )
        with one_torch_thread():
            self._read_items_left += (
                sum(chunk.tensor.nbytes for chunk in chunks) / BYTES_PER_READ_ITEM
            )
            plan = plan_reads(
                tensors, chunks, index_of=self._index_of, max_read_items=int(self._read_items_left)
            )
            block_bytes = self.manifest.block_bytes
            for requests in plan.values():
                self._read_items_left -= sum(
                    read_cost(request, block_bytes) for request in requests
                )
            if self._read_items_left < 0:
                raise CheckpointError(too_many_read_items(chunks[0].name))
            for file, requests in sorted(plan.items()):
                reader = self._open(file)
                for request in requests:
                    reader.read(request)

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

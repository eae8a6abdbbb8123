# SPDX-License-Identifier: Apache-2.0
"""Chunks of a model's state, the save plan (which rank writes which chunk), and shard files.

A rank saves chunks of logical tensors: views of the memory of the model and of its optimizer.

    >>> chunks = weight_chunks(model.store)
    >>> folder = save_checkpoint(root, 100, chunks, {}, coordinator=Solo())
    >>> loaded = load_checkpoint(latest_checkpoint(root), chunks)

Tensors have logical names, so any layout loads a checkpoint of any other. A weight keeps its name;
its optimizer state is `optimizer.KIND/WEIGHT`. Optimizer state that belongs to no weight, such as
the number of updates, is a tensor [] called `optimizer.NAME`. After loading, call
`Optimizer.after_load` of an optimizer over the weights.

Planning is pure: no files, no messages. A rank plans its own shard from its own chunks; rank 0
checks the plans of all ranks together (`manifest.check_plans`).

A shard is written sequentially in small buffers, which are digested as they are written, and synced
at the end. The tensors are not copied as a whole: a contiguous CPU tensor is written from its own
memory, any other tensor passes through one scratch buffer. A read of a tensor's box reads only the
blocks that overlap it, straight into the target if its layout allows.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from megatron.core.boxes import Box, TensorChunk, boxes_of_range, chunk_key, flat_index, intersect
from megatron.core.dist_checkpointing.checkpoint_errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import (
    PlannedChunk,
    StoredChunk,
    StoredFile,
    problem_of_name,
    problem_of_shape,
)
from megatron.core.dist_checkpointing.shard_file import ShardFile
from megatron.core.dist_checkpointing.shard_format import (
    WRITE_BUFFER_BYTES,
    BlockDigester,
    ShardWriter,
    digest,
    encode_header,
    tensor_bytes,
)
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.untrusted_files import open_to_write
from megatron.core.weight_gather import OwnedRange, WeightStore

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
#: Scratch bytes for a block that is read in part: a multiple of every element size.
SCRATCH_BYTES = 1 << 20

DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({d: n for n, d in DTYPES.items()})


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Return the format's name of `dtype`. Raises ValueError if it has none."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{tensor_name} has dtype {dtype}, which a checkpoint cannot store; convert it to "
            f"one of {', '.join(DTYPES)}"
        )
    return DTYPE_NAMES[dtype]


class StateRange(Protocol):
    """An optimizer's state for one range of weights."""

    @property
    def owned(self) -> OwnedRange:
        """The range."""

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the flat tensors [k] of the range by kind."""


class RangedOptimizer(Protocol):
    """An optimizer over ranges, such as `megatron.core.optimizer.Optimizer`."""

    @property
    def ranges(self) -> Sequence[StateRange]:
        """The optimizer's state, one entry per range."""

    @property
    def groups(self) -> ProcessGroupCollection:
        """The groups of the ranks that train together."""

    def scalars(self) -> Mapping[str, torch.Tensor]:
        """Return the state that belongs to no weight: tensors [] by name, equal on all ranks."""


def weight_chunks(store: WeightStore) -> list[TensorChunk]:
    """List this rank's boxes of logical weights, and its states, as views of its memory.

    Args:
        store: the model's weights. With overlapped gathers, call `DataParallel.complete_weights()`
            before each save. Otherwise updates by other ranks may be pending, and the save is
            refused.
    """
    states = [
        TensorChunk(
            name=name,
            shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            tensor=tensor,
            replica_ranks=store.state_ranks,
        )
        for name, tensor in store.states.items()
    ]
    return states + [c for handle in store.handles.values() for c in store.chunks(handle)]


def optimizer_chunks(optimizer: RangedOptimizer, *, scalars: bool = True) -> list[TensorChunk]:
    """List this rank's boxes of optimizer state, as views of its memory.

    Args:
        scalars: whether to include the state that belongs to no weight: the number of updates, and
            the state of a dynamic loss scaler. Pass False if it is stored elsewhere.
    """
    chunks = [
        TensorChunk(
            name=f"optimizer.{kind}/{weight_box.name}",
            shape=weight_box.shape,
            offsets=weight_box.box.offsets,
            tensor=weight_box.of(flat),
            replica_ranks=weight_box.replica_ranks,
        )
        for state in optimizer.ranges
        for kind, flat in state.named_tensors().items()
        for weight_box in state.owned.boxes
    ]
    ranks = tuple(sorted(optimizer.groups["world"].ranks))
    for name, tensor in optimizer.scalars().items() if scalars else ():
        chunks.append(
            TensorChunk(
                name=f"optimizer.{name}",
                shape=(),
                offsets=(),
                tensor=tensor,
                replica_ranks=ranks,
                if_missing=_NO_SCALARS,
            )
        )
    return chunks


#: Advice for a checkpoint without the optimizer state that belongs to no weight.
_NO_SCALARS = (
    "load optimizer_chunks(optimizer, scalars=False) instead, and give the number of updates "
    "that had been applied: optimizer.after_load(with_state=True, steps=...)"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardPlan:
    """The plan of the file that one rank writes.

    Args:
        file: the shard's file name.
        header: length field and safetensors header.
        total_bytes: size of the file. A rank without chunks writes no file.
        chunks: position of each chunk in the file, in file order.
        source_chunks: the tensors to write, one per entry of `chunks`.
        shared: a summary of each replica set with more than one rank, see `check_replicas`.
    """

    file: str
    header: bytes
    total_bytes: int
    chunks: tuple[PlannedChunk, ...]
    source_chunks: tuple[TensorChunk, ...]
    shared: tuple[tuple[Any, ...], ...]


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


def plan_shard(chunks: Sequence[TensorChunk], rank: int) -> ShardPlan:
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
    return ShardPlan(
        file=file,
        header=header,
        total_bytes=begin,
        chunks=tuple(planned),
        source_chunks=tuple(assigned),
        shared=tuple(_summary(ranks, c) for ranks, c in sets.items() if len(ranks) > 1),
    )


def check_updates_complete(plan: ShardPlan) -> None:
    """Check that a rank has received all updates of the chunks it writes.

    Raises:
        ValueError: updates by other ranks are pending.
    """
    pending = [c.name for c in plan.source_chunks if c.is_late is not None and c.is_late()]
    if pending:
        raise ValueError(
            f"updates from other ranks have not arrived in {pending[0]}"
            + (f" and {len(pending) - 1} more" if len(pending) > 1 else "")
            + ": call complete_weights() of the DataParallel engine on every rank before a save"
        )


def _is_stored(chunk: TensorChunk) -> bool:
    """Return whether a chunk has elements, or is all of a tensor without elements."""
    return chunk.tensor.numel() > 0 or chunk.box.sizes == tuple(chunk.shape)


def encode_plan(plan: ShardPlan) -> dict[str, Any]:
    """Return a shard plan as the JSON message that rank 0 collects."""
    return {
        "file": plan.file,
        "total_bytes": plan.total_bytes,
        "header_bytes": len(plan.header),
        "shared": plan.shared,
        "chunks": [(c.name, c.dtype, c.shape, *c.box, c.begin, c.end) for c in plan.chunks],
    }


def write_shard(path: Path, plan: ShardPlan, *, block_bytes: int, digests: bool) -> list[list[str]]:
    """Write a new shard file and return the digests of each chunk's blocks.

    Raises:
        CheckpointError: the file exists, or the disk is full, read-only or broken.
    """
    try:
        with open_to_write(path, "x", root=path.parent.parent) as file:
            writer = ShardWriter(file.fileno())
            writer.write(memoryview(plan.header))
            digests_by_chunk = []
            scratch = torch.empty(0, dtype=torch.uint8)
            for chunk, planned in zip(plan.source_chunks, plan.chunks, strict=True):
                tensor = chunk.tensor.detach()
                if (
                    chunk.byte_stream is None
                    and not _is_contiguous_cpu(tensor)
                    and not scratch.numel()
                ):
                    scratch = torch.empty(WRITE_BUFFER_BYTES, dtype=torch.uint8)
                digester = BlockDigester(block_bytes)
                for buffer in (
                    chunk.byte_stream() if chunk.byte_stream else _stream_bytes(tensor, scratch)
                ):
                    if digests:
                        digester.update(buffer)
                    writer.write(buffer)
                digests_by_chunk.append(digester.finish())
                if writer.position != planned.end:
                    raise CheckpointError(
                        f"{planned.name} ends at byte {writer.position} of {path}, not at "
                        f"{planned.end}: its pieces do not fit its shape"
                    )
            os.fsync(file.fileno())
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
    return digests_by_chunk


def _is_contiguous_cpu(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as a writable memoryview."""
    # A tensor of one element is contiguous whatever its strides; a byte view needs stride 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _stream_bytes(tensor: torch.Tensor, scratch: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order; a buffer is valid until the next is yielded."""
    if not tensor.numel():
        return
    if _is_contiguous_cpu(tensor):
        memory = as_bytes(tensor)
        for begin in range(0, len(memory), WRITE_BUFFER_BYTES):
            yield memory[begin : begin + WRITE_BUFFER_BYTES]
        return
    for block in _row_blocks(tensor, WRITE_BUFFER_BYTES // tensor.itemsize):
        target = scratch[: block.numel() * block.itemsize]
        target.view(block.dtype).view(block.shape).copy_(block)
        yield as_bytes(target)


def _row_blocks(tensor: torch.Tensor, max_elements: int) -> Iterator[torch.Tensor]:
    """Split a tensor into views of at most `max_elements`, in row-major order."""
    if tensor.numel() <= max_elements:
        yield tensor
        return
    rows = max_elements // math.prod(tensor.shape[1:])
    if rows:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from _row_blocks(row, max_elements)


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


class Scratch:
    """One CPU buffer that all reads reuse; it grows to the largest requested size."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, valid until the next call."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size]


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
    is_contiguous_cpu = target.is_contiguous() and target.device.type == "cpu"
    if is_contiguous_range and is_contiguous_cpu and target.dtype == DTYPES[dtype]:
        return as_bytes(target)
    return None

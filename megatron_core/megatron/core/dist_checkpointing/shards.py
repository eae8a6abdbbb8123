# SPDX-License-Identifier: Apache-2.0
"""What a rank saves of a model, which rank writes which chunk, and the shard files that they go to.

A rank saves chunks of logical tensors, views of memory, of the model and of its optimizer:

    >>> chunks = weight_chunks(model.store)
    >>> folder = save_checkpoint(root, 100, chunks, {}, coordinator=Solo())
    >>> loaded = load_checkpoint(latest_checkpoint(root), chunks)

Tensors have logical names, a weight its own and optimizer state `optimizer.KIND/WEIGHT`, so any
layout loads what another has saved. Optimizer state that belongs to no weight, such as the number
of updates, is a tensor [] called `optimizer.NAME`. After loading, call `Optimizer.after_load` of an
optimizer over the weights.

Planning is pure: no files, no messages. A rank lays out its own shard from its own chunks; rank 0
checks the layouts of all ranks together (`manifest.check_plans`).

A shard is written as a stream of small chunks, digested as they pass, synced at the end, without a
second copy of the tensors: a contiguous CPU tensor is written from its own memory, any other goes
through one scratch buffer chunk by chunk. A read of boxes of tensors reads the blocks that it
needs, straight to their destination.
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
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import (
    PlannedChunk,
    StoredChunk,
    StoredFile,
    problem_of_name,
    problem_of_shape,
)
from megatron.core.dist_checkpointing.shard_file import ShardFile
from megatron.core.dist_checkpointing.shard_format import (
    PIECE_BYTES,
    BlockDigester,
    Output,
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
#: A block of which a part is wanted passes through so much memory: a multiple of every element.
SCRATCH_BYTES = 1 << 20

DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({d: n for n, d in DTYPES.items()})


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Return the format's name of `dtype`. Raises ValueError if it has none."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{tensor_name} has dtype {dtype}, which a checkpoint cannot hold; "
            f"convert it to one of {', '.join(DTYPES)}"
        )
    return DTYPE_NAMES[dtype]


class StateRange(Protocol):
    """The state of an optimizer for one range of weights."""

    @property
    def owned(self) -> OwnedRange:
        """The range."""

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the flat tensors [k] of the range by kind."""


class RangedOptimizer(Protocol):
    """An optimizer over ranges, such as `megatron.core.optimizer.Optimizer`."""

    @property
    def ranges(self) -> Sequence[StateRange]:
        """Its state, a range at a time."""

    @property
    def groups(self) -> ProcessGroupCollection:
        """The groups of the ranks that train together."""

    def scalars(self) -> Mapping[str, torch.Tensor]:
        """Return its state that belongs to no weight, equal on all ranks, tensors [] by name."""


def weight_chunks(store: WeightStore) -> list[TensorChunk]:
    """List the boxes of logical weights, and the states, that this rank holds, as views of its
    memory.

    Args:
        store: of a model. With gathers that overlap, call `DataParallel.complete_weights()` before
            each save: other ranks' updates may not have arrived, and the save is refused.
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
    """List the boxes of optimizer state that this rank holds, as views of its memory.

    Args:
        scalars: also the state that belongs to no weight: the number of updates, and the state of a
            dynamic loss scaler. False leaves it out, where it is kept elsewhere.
    """
    found = [
        TensorChunk(
            name=f"optimizer.{kind}/{held.name}",
            shape=held.shape,
            offsets=held.box.offsets,
            tensor=held.of(flat),
            replica_ranks=held.replica_ranks,
        )
        for state in optimizer.ranges
        for kind, flat in state.named_tensors().items()
        for held in state.owned.boxes
    ]
    ranks = tuple(sorted(optimizer.groups["world"].ranks))
    for name, tensor in optimizer.scalars().items() if scalars else ():
        found.append(
            TensorChunk(
                name=f"optimizer.{name}",
                shape=(),
                offsets=(),
                tensor=tensor,
                replica_ranks=ranks,
                if_missing=_NO_SCALARS,
            )
        )
    return found


#: What to do about a checkpoint that lacks optimizer state which belongs to no weight.
_NO_SCALARS = (
    "load optimizer_chunks(optimizer, scalars=False) in its place, and give the number of updates "
    "that had been applied: optimizer.after_load(with_state=True, steps=...)"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardPlan:
    """The file one rank writes: its header, then the data of `held`, which lies as `chunks` say.

    `total_bytes` is the file's size. A rank without anything to write has no chunks and no file.
    `shared` sums up what this rank declares to hold together with others.
    """

    file: str
    header: bytes
    total_bytes: int
    chunks: tuple[PlannedChunk, ...]
    held: tuple[TensorChunk, ...]
    shared: tuple[tuple[Any, ...], ...]


def replica_sets(
    chunks: Sequence[TensorChunk], rank: int
) -> dict[tuple[int, ...], list[TensorChunk]]:
    """Return this rank's chunks by the ranks that hold them, largest first, in one order for all.

    Raises:
        ValueError: a chunk does not name `rank` among its holders.
    """
    sets: dict[tuple[int, ...], list[TensorChunk]] = {}
    for chunk in chunks:
        if rank not in chunk.replica_ranks:
            raise ValueError(
                f"chunk of {chunk.name}: replica_ranks {list(chunk.replica_ranks)} does not "
                f"contain rank {rank}, which holds it"
            )
        sets.setdefault(tuple(chunk.replica_ranks), []).append(chunk)
    for members in sets.values():
        members.sort(key=lambda c: (-c.tensor.numel() * c.tensor.itemsize, c.name, c.box))
    return sets


def chunks_to_write(
    sets: Mapping[tuple[int, ...], Sequence[TensorChunk]], rank: int
) -> list[TensorChunk]:
    """Return the chunks that `rank` writes: every replica set shares its bytes out greedily.

    All members of a replica set declare the same chunks for it (`check_replicas`), so all compute
    the same assignment without a message: each chunk goes to the member with the fewest bytes, the
    first of several.
    """
    mine = []
    for ranks, members in sets.items():
        loads = [(0, r) for r in ranks]  # ascending, and so a heap
        for chunk in members:
            load, writer = loads[0]
            heapq.heapreplace(loads, (load + chunk.tensor.numel() * chunk.tensor.itemsize, writer))
            if writer == rank:
                mine.append(chunk)
    return mine


def _summary(ranks: tuple[int, ...], members: Sequence[TensorChunk]) -> tuple[Any, ...]:
    """Return (ranks, count, first name, digest) of a replica set as this rank declares it."""
    text = repr([(c.name, c.shape, c.box, c.tensor.dtype) for c in members])
    return ranks, len(members), members[0].name, digest(text.encode())


def plan_shard(chunks: Sequence[TensorChunk], rank: int) -> ShardPlan:
    """Lay out the file that `rank` writes.

    Wide dtypes come first, so that every tensor lies at a multiple of its own element size.

    Raises:
        ValueError: a name, a shape or a dtype that cannot be stored, or one box declared twice on
            this rank.
    """
    file = f"shard-{rank:05d}.safetensors"
    sets = replica_sets(chunks, rank)
    for name, shape in {chunk.name: tuple(chunk.shape) for chunk in chunks}.items():
        if problem := problem_of_name(name) or problem_of_shape(shape):
            raise ValueError(f"{name:.80} cannot be saved: it {problem}")
    mine = [chunk for chunk in chunks_to_write(sets, rank) if _is_stored(chunk)]
    mine.sort(key=lambda c: (-c.tensor.itemsize, c.name, c.box))
    entries = [
        (
            chunk_key(chunk.name, tuple(chunk.shape), chunk.box),
            dtype_name(chunk.tensor.dtype, chunk.name),
            chunk.box.sizes,
        )
        for chunk in mine
    ]
    for (key, _, _), (following, _, _) in itertools.pairwise(entries):
        if key == following:
            raise ValueError(f"rank {rank} declares {key} twice; give each chunk once")
    header = encode_header(entries)
    planned = []
    begin = len(header)
    for chunk, (_, dtype, sizes) in zip(mine, entries, strict=True):
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
        held=tuple(mine),
        shared=tuple(_summary(*item) for item in sets.items() if len(item[0]) > 1),
    )


def check_arrived(plan: ShardPlan) -> None:
    """See that all updates of what a rank writes have arrived.

    Raises:
        ValueError: some are on their way from other ranks.
    """
    late = [chunk.name for chunk in plan.held if chunk.is_late is not None and chunk.is_late()]
    if late:
        raise ValueError(
            f"updates that other ranks made have not arrived in {late[0]}"
            + (f" and {len(late) - 1} more" if len(late) > 1 else "")
            + ": call complete_weights() of the DataParallel engine on every rank before a save"
        )


def _is_stored(chunk: TensorChunk) -> bool:
    """Return whether a chunk has elements, or stands for a tensor that has none at all."""
    return chunk.tensor.numel() > 0 or chunk.box.sizes == tuple(chunk.shape)


def encode_plan(plan: ShardPlan) -> dict[str, Any]:
    """Return the message to rank 0 about a shard."""
    return {
        "file": plan.file,
        "total_bytes": plan.total_bytes,
        "header_bytes": len(plan.header),
        "shared": plan.shared,
        "chunks": [(c.name, c.dtype, c.shape, *c.box, c.begin, c.end) for c in plan.chunks],
    }


def write_shard(path: Path, plan: ShardPlan, *, block_bytes: int, digests: bool) -> list[list[str]]:
    """Write a new file at `path` and return the digests of each chunk's blocks.

    Raises:
        CheckpointError: the file exists, or the disk is full, read-only or broken.
    """
    try:
        with open_to_write(path, "x", root=path.parent.parent) as file:
            output = Output(file.fileno())
            output.write(memoryview(plan.header))
            found = []
            scratch = torch.empty(0, dtype=torch.uint8)
            for chunk, planned in zip(plan.held, plan.chunks, strict=True):
                tensor = chunk.tensor.detach()
                if chunk.pieces is None and not _is_plain(tensor) and not scratch.numel():
                    scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
                digester = BlockDigester(block_bytes)
                for piece in chunk.pieces() if chunk.pieces else _pieces(tensor, scratch):
                    if digests:
                        digester.update(piece)
                    output.write(piece)
                found.append(digester.finish())
                if output.position != planned.end:
                    raise CheckpointError(
                        f"{planned.name} ends at byte {output.position} of {path}, not at "
                        f"{planned.end}: its pieces do not fit its shape"
                    )
            os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"cannot create {path}: its folder is gone, or is not on a file system that all ranks "
            "share"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({plan.total_bytes} bytes): {error.strerror}; nothing was "
            "saved, earlier checkpoints are intact"
        ) from error
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable."""
    # A tensor of one element is contiguous whatever its strides; a byte view wants stride 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _pieces(tensor: torch.Tensor, scratch: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's elements in row-major order; each chunk is valid until the next."""
    if not tensor.numel():
        return
    if _is_plain(tensor):
        data = as_bytes(tensor)
        for begin in range(0, len(data), PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]
        return
    for band in _bands(tensor, PIECE_BYTES // tensor.itemsize):
        target = scratch[: band.numel() * band.itemsize]
        target.view(band.dtype).view(band.shape).copy_(band)
        yield as_bytes(target)


def _bands(tensor: torch.Tensor, max_elements: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into views of at most `max_elements`, in row-major order."""
    if tensor.numel() <= max_elements:
        yield tensor
        return
    rows = max_elements // math.prod(tensor.shape[1:])
    if rows:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from _bands(row, max_elements)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkPart:
    """A box, in the coordinates of a stored chunk, and the view that its elements go to."""

    box: Box
    target: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkRead:
    """A stored chunk of a named tensor, and everything that is wanted from it."""

    name: str
    dtype: str
    chunk: StoredChunk
    parts: Sequence[ChunkPart]


def reads_of(request: ChunkRead, block_bytes: int) -> float:
    """Return how many blocks a request reads; those that it takes whole count little."""
    itemsize = DTYPES[request.dtype].itemsize
    count = 0.0
    for part in request.parts:
        span = begin, end = _span(request.chunk.box.sizes, part.box)
        blocks = (end * itemsize - 1) // block_bytes - begin * itemsize // block_bytes + 1
        is_whole = _direct_bytes(part, span, request.dtype) is not None
        count += 1 + blocks / (_WHOLE_BLOCKS if is_whole else 1)
    return count


#: Blocks that are read whole, in the time in which parts of one block are copied.
_WHOLE_BLOCKS = 64


class Scratch:
    """One CPU buffer that all reads reuse, grown to the largest size seen."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, valid until the next call."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size]


class ShardReader(ShardFile):
    """An open shard whose boxes are read into tensors; see `ShardFile`.

    Args:
        path: the shard.
        file: what the manifest states about it.
        block_bytes: bytes under one digest.
        verify: whether to compare digests.
        scratch: buffer shared by the readers of one load.
        header_verified: whether the header's digest has been compared before.

    Raises:
        CheckpointError: the file is missing, of another size, or its header is damaged.
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

    def read(self, request: ChunkRead) -> None:
        """Fill every target of `request`. Raises CheckpointError for a damaged or short file."""
        itemsize = DTYPES[request.dtype].itemsize
        spans = [_span(request.chunk.box.sizes, part.box) for part in request.parts]
        first = min(begin for begin, _ in spans) * itemsize // self.block_bytes
        last = max(end for _, end in spans) * itemsize
        direct = [
            _direct_bytes(part, span, request.dtype)
            for part, span in zip(request.parts, spans, strict=True)
        ]
        whole = request.chunk.end - request.chunk.begin
        start, stop = (position * itemsize for position in spans[0])
        for begin in range(first * self.block_bytes, last, self.block_bytes):
            end = min(begin + self.block_bytes, whole)
            if len(spans) == 1 and direct[0] is not None and start <= begin and end <= stop:
                # The common case, without looking for who else wants a part of this block.
                target = direct[0][begin - start : end - start]
                self.read_bytes(request.name, request.chunk, begin, target)
            else:
                self._read_block(request, begin, end, spans, direct)

    def _read_block(
        self,
        request: ChunkRead,
        begin: int,
        end: int,
        spans: Sequence[tuple[int, int]],
        direct: Sequence[memoryview | None],
    ) -> None:
        """Read the bytes [begin, end) of a stored chunk to where they are wanted."""
        itemsize = DTYPES[request.dtype].itemsize
        touching = [
            i for i, (a, b) in enumerate(spans) if a * itemsize < end and begin < b * itemsize
        ]
        if len(touching) == 1:
            start, stop = (position * itemsize for position in spans[touching[0]])
            target = direct[touching[0]]
            if not self.verifies:  # nothing forces whole blocks
                begin, end = max(begin, start), min(end, stop)
            if target is not None and start <= begin and end <= stop:
                self.read_bytes(
                    request.name, request.chunk, begin, target[begin - start : end - start]
                )
                return
        if not self._touches(request, begin, end, touching):
            return  # this block lies between the wanted columns
        raw = self._scratch.take(min(SCRATCH_BYTES, end - begin))
        scratch = as_bytes(raw)
        for at, piece in self.stream(request.name, request.chunk, (begin, end), scratch):
            elements = raw[: len(piece)].view(DTYPES[request.dtype])
            first = at // itemsize
            for box, common, part in _common(request, first, first + len(elements), touching):
                start = flat_index(request.chunk.box.sizes, box.offsets) - first
                source = elements[start : start + box.numel].view(box.sizes)
                part.target[common.seen_from(part.box.offsets).slices].copy_(
                    source[common.seen_from(box.offsets).slices]
                )

    def _touches(self, request: ChunkRead, begin: int, end: int, parts: Sequence[int]) -> bool:
        """Return whether the bytes [begin, end) of a chunk hold an element of any of the parts."""
        itemsize = DTYPES[request.dtype].itemsize
        return any(True for _ in _common(request, begin // itemsize, end // itemsize, parts))


def _common(
    request: ChunkRead, first: int, last: int, parts: Sequence[int]
) -> Iterator[tuple[Box, Box, ChunkPart]]:
    """Yield what parts of a request share with the elements [first, last) of its chunk: a box of
    these elements, its part that is wanted, and by whom."""
    for box in boxes_of_range(request.chunk.box.sizes, first, last):
        for i in parts:
            if common := intersect(box, request.parts[i].box):
                yield box, common, request.parts[i]


def _span(sizes: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the smallest row-major element range of a tensor of `sizes` that contains `box`."""
    last = tuple(o + n - 1 for o, n in zip(*box, strict=True))
    return flat_index(sizes, box.offsets), flat_index(sizes, last) + 1


def _direct_bytes(part: ChunkPart, span: tuple[int, int], dtype: str) -> memoryview | None:
    """Return the target's memory if the stored bytes can be read straight into it."""
    target = part.target
    in_one_piece = span[1] - span[0] == math.prod(part.box.sizes)
    plain = target.is_contiguous() and target.device.type == "cpu"
    if in_one_piece and plain and target.dtype == DTYPES[dtype]:
        return as_bytes(target)
    return None

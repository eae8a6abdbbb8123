# SPDX-License-Identifier: Apache-2.0
"""Weights from the ranks of one run to those of another, whatever both layouts are, without a
folder between them.

Senders and receivers join a group of their own by an address, besides the groups that each has. All
tell each other the boxes of logical tensors that they hold, so all know the same plan: for each box
of a receiver the parts of it, each from one of the senders that hold it. Only these parts travel,
one after the other.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.core.boxes import Box, BoxIndex, TensorChunk


class ChunkTransfer(NamedTuple):
    """Elements that go from one rank's chunk to another's; the box is of the logical tensor."""

    source: int
    source_chunk: int
    target: int
    target_chunk: int
    box: Box
    dtype: str


class ChunkHeader(NamedTuple):
    """A chunk as others are told of it: the logical tensor's name and shape, the box, the dtype."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str


# By the names that travel; a name of another run is looked up, never evaluated.
_DTYPES = MappingProxyType(
    {
        str(dtype): dtype
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int64,
            torch.int32,
            torch.uint8,
            torch.bool,
        )
    }
)


@dataclass(frozen=True, kw_only=True)
class TransferGroup:
    """Who sends to whom, as seen from one of them.

    Args:
        address: HOST:PORT, where sender 0 listens.
        rank: among the senders, or among the receivers.
        senders, receivers: how many there are.
        timeout_seconds: for the others to come, and for each part.
    """

    address: str
    rank: int
    senders: int
    receivers: int
    timeout_seconds: float = 60.0

    def send(self, chunks: Sequence[TensorChunk]) -> int:
        """Give the receivers what they want of a sender's chunks; return the bytes sent.

        Every sender calls it, when its weights are complete (see `weight_chunks`).

        Raises:
            ValueError: the others do not come or are lost, or they want what nobody has.
        """
        return self._run(chunks, rank=self.rank)

    def receive(self, chunks: Sequence[TensorChunk]) -> int:
        """Fill a receiver's chunks; return the bytes received. After an error their content is
        undefined; an error of one receiver is one of all.

        Raises:
            ValueError: as in `send`.
        """
        return self._run(chunks, rank=self.senders + self.rank)

    def _run(self, chunks: Sequence[TensorChunk], *, rank: int) -> int:
        host, colon, port = self.address.rpartition(":")
        if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"address {self.address}: give HOST:PORT")
        limit, size = timedelta(seconds=self.timeout_seconds), self.senders + self.receivers
        try:
            store = dist.TCPStore(
                host.strip("[]"), int(port), size, is_master=rank == 0, timeout=limit
            )
            told = self._told(store, chunks, rank)
            try:
                plan = transfers(told, senders=self.senders)
            except ValueError:  # of all ranks alike
                self._part(store, rank)
                raise
            group = dist.ProcessGroupGloo(dist.PrefixStore("transfer", store), rank, size, limit)
            moved = _carry_out(group, plan, chunks, rank)
            self._part(store, rank)
        except RuntimeError as error:
            line = str(error).strip().split("\n")[0]
            raise ValueError(
                f"address {self.address}: a rank of the {size} was lost, or did not come within "
                f"{self.timeout_seconds:g} s ({line[:200]})"
            ) from None
        return moved

    def _told(
        self, store: dist.Store, chunks: Sequence[TensorChunk], rank: int
    ) -> list[list[ChunkHeader]]:
        """Return the chunks of every rank."""
        mine = [(c.name, c.shape, *c.box, str(c.tensor.dtype)) for c in chunks]
        store.set(f"chunks/{rank}", zlib.compress(json.dumps(mine).encode()))
        found = []
        for other in range(self.senders + self.receivers):
            told = json.loads(zlib.decompress(store.get(f"chunks/{other}")))
            found.append(
                [ChunkHeader(n, tuple(s), Box(tuple(o), tuple(z)), d) for n, s, o, z, d in told]
            )
        return found

    def _part(self, store: dist.Store, rank: int) -> None:
        """Leave when all have what they want; sender 0, which has the store, as the last."""
        size = self.senders + self.receivers
        store.set(f"done/{rank}", "")
        store.wait([f"done/{other}" for other in range(size)])
        if store.add("left", 1) == size:
            store.set("all left", "")
        if rank == 0:
            store.wait(["all left"])


def transfers(chunks: Sequence[Sequence[ChunkHeader]], *, senders: int) -> list[ChunkTransfer]:
    """Return what goes from whom to whom, in one order for all.

    Args:
        chunks: of every rank, senders first.
        senders: how many ranks send.

    Raises:
        ValueError: receivers want what no sender has.
    """
    held: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for source, told in enumerate(chunks[:senders]):
        for number, (name, shape, box, _) in enumerate(told):
            shapes[name] = shape
            held.setdefault(name, {}).setdefault(box, []).append((source, number))
    indices = {name: (list(boxes), BoxIndex(list(boxes))) for name, boxes in held.items()}
    found, problems = [], []
    for target, told in enumerate(chunks[senders:], senders):
        for number, (name, shape, box, _) in enumerate(told):
            if shapes.get(name) != shape:
                sent = f"shape {list(shapes[name])}" if name in shapes else "no such tensor"
                problems.append(f"{name}: shape {list(shape)} is wanted, the senders have {sent}")
                continue
            boxes, index = indices[name]
            parts = index.overlaps(box)
            if sum(common.numel for _, common in parts) != box.numel:
                problems.append(f"{name}: the senders do not hold each element of {box} once")
            for which, common in parts:
                copies = held[name][boxes[which]]
                source, source_chunk = copies[target % len(copies)]
                dtype = chunks[source][source_chunk].dtype
                if dtype not in _DTYPES:
                    problems.append(f"{name}: of the unknown dtype {dtype[:40]!r}")
                found.append(ChunkTransfer(source, source_chunk, target, number, common, dtype))
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError("the weights do not fit: " + "; ".join(problems[:3]) + more)
    return found


@torch.no_grad()
def _carry_out(
    group: dist.ProcessGroup,
    plan: Sequence[ChunkTransfer],
    chunks: Sequence[TensorChunk],
    rank: int,
) -> int:
    """Send and receive this rank's parts of a plan; return their bytes. Through the host's memory,
    as the two sides may have devices that do not reach each other."""
    moved = 0
    for tag, part in enumerate(plan):
        if rank == part.source:
            chunk = chunks[part.source_chunk]
            data = chunk.tensor[part.box.seen_from(chunk.box.offsets).slices]
            data = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            group.send([data], part.target, tag).wait()
            moved += data.numel()
        elif rank == part.target:
            chunk = chunks[part.target_chunk]
            data = torch.empty(part.box.numel, dtype=_DTYPES[part.dtype])
            group.recv([data.view(torch.uint8)], part.source, tag).wait()
            place = chunk.tensor[part.box.seen_from(chunk.box.offsets).slices]
            place.copy_(data.view(part.box.sizes))
            moved += data.numel() * data.itemsize
    return moved

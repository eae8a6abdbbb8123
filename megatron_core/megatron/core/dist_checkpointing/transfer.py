# SPDX-License-Identifier: Apache-2.0
"""Transfer of weights between two runs with any parallel layouts, without a checkpoint folder.

Senders and receivers join a process group of their own by an address. All ranks exchange the boxes
of their logical tensors, so all compute the same plan: each box of a receiver is split into its
overlaps with senders' boxes, and one sender sends each overlap. The overlaps are sent one by one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.boxes import Box, BoxIndex, TensorChunk


class ChunkTransfer(NamedTuple):
    """A box of a logical tensor that is sent from one rank's chunk to another rank's chunk."""

    source: int
    source_chunk: int
    target: int
    target_chunk: int
    box: Box
    dtype: str


class ChunkHeader(NamedTuple):
    """A chunk's metadata: name and shape of the logical tensor, the box, the dtype."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str


# Dtypes by the names in messages; a name from another run is looked up, never evaluated.
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
    """The senders and receivers of a transfer, and this process's rank.

    Args:
        address: HOST:PORT, where sender 0 listens.
        rank: this rank among the senders, or among the receivers.
        senders, receivers: numbers of ranks.
        timeout_seconds: limit for all ranks to join, and for each message.
    """

    address: str
    rank: int
    senders: int
    receivers: int
    timeout_seconds: float = 60.0

    def send(self, chunks: Sequence[TensorChunk]) -> int:
        """Send this sender's overlaps with the receivers' chunks; return the bytes sent.

        Every sender calls this, when its weights are complete (see `weight_chunks`).

        Raises:
            ValueError: a rank does not join or is lost, or the senders lack a requested element.
        """
        return self._run(chunks, rank=self.rank)

    def receive(self, chunks: Sequence[TensorChunk]) -> int:
        """Fill this receiver's chunks; return the bytes received.

        After an error the content of the chunks is undefined. An error of one receiver is raised on
        all.

        Raises:
            ValueError: as in `send`.
        """
        return self._run(chunks, rank=self.senders + self.rank)

    def _run(self, chunks: Sequence[TensorChunk], *, rank: int) -> int:
        host, colon, port = self.address.rpartition(":")
        if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"address {self.address}: give HOST:PORT")
        timeout, size = timedelta(seconds=self.timeout_seconds), self.senders + self.receivers
        try:
            store = dist.TCPStore(
                host.strip("[]"), int(port), size, is_master=rank == 0, timeout=timeout
            )
            headers = self._exchange_headers(store, chunks, rank)
            try:
                plan = plan_transfers(headers, senders=self.senders)
            except ValueError:  # raised on all ranks: the plan is the same
                self._leave(store, rank)
                raise
            # It is a ProcessGroup, which torch does not declare.
            prefix_store = dist.PrefixStore("transfer", store)
            group: Any = dist.ProcessGroupGloo(prefix_store, rank, size, timeout)
            num_bytes = _execute_transfers(group, plan, chunks, rank)
            self._leave(store, rank)
        except RuntimeError as error:
            line = str(error).strip().split("\n")[0]
            raise ValueError(
                f"address {self.address}: one of the {size} ranks was lost, or did not "
                f"connect within {self.timeout_seconds:g} s ({line[:200]})"
            ) from None
        return num_bytes

    def _exchange_headers(
        self, store: dist.Store, chunks: Sequence[TensorChunk], rank: int
    ) -> list[list[ChunkHeader]]:
        """Return the chunk headers of every rank."""
        local_headers = [(c.name, c.shape, *c.box, str(c.tensor.dtype)) for c in chunks]
        # A store takes bytes as well, which torch does not declare.
        headers_json: Any = zlib.compress(json.dumps(local_headers).encode())
        store.set(f"chunks/{rank}", headers_json)
        headers = []
        for peer in range(self.senders + self.receivers):
            message = json.loads(zlib.decompress(store.get(f"chunks/{peer}")))
            headers.append(
                [ChunkHeader(n, tuple(s), Box(tuple(o), tuple(z)), d) for n, s, o, z, d in message]
            )
        return headers

    def _leave(self, store: dist.Store, rank: int) -> None:
        """Wait until all ranks are done; sender 0, which serves the store, leaves last."""
        size = self.senders + self.receivers
        store.set(f"done/{rank}", "")
        store.wait([f"done/{peer}" for peer in range(size)])
        if store.add("left", 1) == size:
            store.set("all left", "")
        if rank == 0:
            store.wait(["all left"])


def plan_transfers(
    headers: Sequence[Sequence[ChunkHeader]], *, senders: int
) -> list[ChunkTransfer]:
    """Return the transfer plan, in the same order on all ranks.

    Args:
        headers: chunk headers of every rank, senders first.
        senders: number of senders.

    Raises:
        ValueError: the senders lack a requested element.
    """
    holders_by_box: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for source, rank_headers in enumerate(headers[:senders]):
        for chunk_index, (name, shape, box, _) in enumerate(rank_headers):
            shapes[name] = shape
            holders_by_box.setdefault(name, {}).setdefault(box, []).append((source, chunk_index))
    indices = {name: (list(boxes), BoxIndex(list(boxes))) for name, boxes in holders_by_box.items()}
    transfers, problems = [], []
    for target, rank_headers in enumerate(headers[senders:], senders):
        for chunk_index, (name, shape, box, _) in enumerate(rank_headers):
            if shapes.get(name) != shape:
                provided = f"shape {list(shapes[name])}" if name in shapes else "no such tensor"
                problems.append(
                    f"{name}: shape {list(shape)} is requested, but the senders have {provided}"
                )
                continue
            boxes, index = indices[name]
            overlaps = index.overlaps(box)
            if sum(common.numel for _, common in overlaps) != box.numel:
                problems.append(
                    f"{name}: the senders do not provide each element of {box} exactly once"
                )
            for box_index, common in overlaps:
                holders = holders_by_box[name][boxes[box_index]]
                source, source_chunk = holders[target % len(holders)]
                dtype = headers[source][source_chunk].dtype
                if dtype not in _DTYPES:
                    problems.append(f"{name} has the unknown dtype {dtype[:40]!r}")
                transfers.append(
                    ChunkTransfer(source, source_chunk, target, chunk_index, common, dtype)
                )
    if problems:
        unlisted = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError("the weights do not fit: " + "; ".join(problems[:3]) + unlisted)
    return transfers


@torch.no_grad()
def _execute_transfers(
    group: dist.ProcessGroup,
    plan: Sequence[ChunkTransfer],
    chunks: Sequence[TensorChunk],
    rank: int,
) -> int:
    """Execute this rank's sends and receives; return their bytes.

    The payloads pass through host memory, because the devices of the two runs may not reach each
    other.
    """
    num_bytes = 0
    for tag, transfer in enumerate(plan):
        if rank == transfer.source:
            chunk = chunks[transfer.source_chunk]
            payload = chunk.tensor[transfer.box.seen_from(chunk.box.offsets).slices]
            payload = payload.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            group.send([payload], transfer.target, tag).wait()
            num_bytes += payload.numel()
        elif rank == transfer.target:
            chunk = chunks[transfer.target_chunk]
            payload = torch.empty(transfer.box.numel, dtype=_DTYPES[transfer.dtype])
            group.recv([payload.view(torch.uint8)], transfer.source, tag).wait()
            target = chunk.tensor[transfer.box.seen_from(chunk.box.offsets).slices]
            target.copy_(payload.view(transfer.box.sizes))
            num_bytes += payload.numel() * payload.itemsize
    return num_bytes

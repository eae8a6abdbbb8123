# SPDX-License-Identifier: Apache-2.0
"""The process that writes a rank's asynchronous saves: `python -c`, started by `WriterProcess`.

It has no torch and none of the trainer's locks. Bytes come through shared memory that holds the
shard in its layout on disk, orders through a socket as JSON. It starts in milliseconds, runs at low
priority, and ends with its trainer, however that ends, so that no orphan finishes a save while
another run has begun on the same folder.

Orders, each answered with {"value": ...} or {"error": text}, after any number of {"beat": true}:

    shard   how the bytes in shared memory are divided into header and chunks
    plans   the shards of all ranks, compared with each other            (rank 0)
    open    make the temporary folder; null if the step has been saved   (rank 0)
    write   write this rank's shard durably, return its digests as JSON text
    commit  manifest, rename, tracker                                    (rank 0)
    prune   retention; returns lines to log                              (rank 0)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError, describe
from megatron.core.dist_checkpointing.manifest import (
    Manifest,
    check_plans,
    stored_tables,
)
from megatron.core.dist_checkpointing.run_folder import (
    checkpoint_folder,
    damage_of,
    open_temporary,
    prune_checkpoints,
    publish,
    see_claim,
    sync_folder,
    write_tracker,
)
from megatron.core.dist_checkpointing.shard_format import PIECE_BYTES, BlockDigester, Output, digest
from megatron.core.untrusted_files import open_to_write

#: Time between two signs of life during long work, in seconds.
BEAT_SECONDS = 1.0

_LENGTH = struct.Struct("<Q")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_LAST_IN_TURN = 2 << 13 | 7  # of ioprio_set(2): best effort, behind all others
_IOPRIO_SET = MappingProxyType({"x86_64": 251, "aarch64": 30})


def send(end: socket.socket, message: Any) -> None:
    """Send a message: its length, then JSON."""
    data = json.dumps(message, separators=(",", ":")).encode()
    end.sendall(_LENGTH.pack(len(data)))
    end.sendall(data)


def receive(end: socket.socket) -> Any:
    """Return the next message. Raises EOFError if the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    return json.loads(_exactly(end, length))


def _exactly(end: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        found = end.recv_into(view)
        if not found:
            raise EOFError("the other side is gone")
        view = view[found:]
    return data


class Writer:
    """Carries out orders.

    Args:
        memory_fd: shared memory with the shard, whose layout the order `shard` tells.
        root: folder of all checkpoints.
        beat: called now and then during long work, as a sign of life.
    """

    def __init__(self, memory_fd: int, root: Path, beat: Callable[[], None]) -> None:
        self._memory_fd, self._root, self._beat = memory_fd, root, beat
        self._ends: list[int] = []
        self._begin = self._total = 0
        self._memory: mmap.mmap | None = None
        self._plans: list[dict[str, Any]] = []

    def carry_out(self, order: Mapping[str, Any]) -> Any:
        """Return what an order results in. Raises CheckpointError, OSError, ValueError."""
        orders: Mapping[str, Callable[..., Any]] = {
            "shard": self.shard,
            "plans": self.plans,
            "open": self.open,
            "write": self.write,
            "commit": self.commit,
            "prune": self.prune,
        }
        return orders[order["do"]](**order["with"])

    def shard(self, begin: int, ends: list[int]) -> None:
        """Take note of where header and chunks end in shared memory.

        Args:
            begin: bytes of the header.
            ends: of the chunks, ascending; each begins where the one before ends.
        """
        self._begin, self._ends = begin, ends
        self._total = ends[-1] if ends else begin
        self._memory = mmap.mmap(self._memory_fd, self._total, prot=mmap.PROT_READ)

    def plans(self, texts: list[str]) -> None:
        """Take note of all ranks' plans, if nothing is missing or written twice."""
        plans = [json.loads(text) for text in texts]
        check_plans(plans)
        self._plans = plans

    def open(self, iteration: int, name: str, *, claimed: bool) -> dict[str, str]:
        """Create the temporary folder `name`; answer with why not if the step is there already."""
        if claimed:
            see_claim(self._root)
        folder = checkpoint_folder(self._root, iteration)
        if folder.is_dir():
            return {"exists": f"{folder} exists already{damage_of(folder)}; it is not saved again"}
        open_temporary(self._root, iteration, name=name)
        return {}

    def write(self, path: str, block_bytes: int) -> str:
        """Write the shard to a new file; return what the manifest needs of it, as JSON."""
        assert self._memory is not None
        try:
            with open_to_write(path, "x", root=Path(path).parent.parent) as file:
                with memoryview(self._memory) as whole, whole[: self._total] as data:
                    found = self._stream(file.fileno(), data, block_bytes)
                    with data[: self._begin] as header:
                        head = digest(header)
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path} ({self._total} bytes): {error.strerror}; nothing was "
                "saved, earlier checkpoints are intact"
            ) from error
        sync_folder(Path(path).parent)
        return json.dumps({"header_xxh3": head, "xxh3": found}, separators=(",", ":"))

    def _stream(self, fd: int, data: memoryview, block_bytes: int) -> list[list[str]]:
        """Write all bytes, those of a chunk right after they were digested."""
        output, begin, found = Output(fd), self._begin, []
        for end in self._ends:
            digester = BlockDigester(block_bytes)
            for at in range(begin, end, PIECE_BYTES):
                upto = min(at + PIECE_BYTES, end)
                digester.update(data[at:upto])
                if upto - output.position >= PIECE_BYTES:
                    output.write(data[output.position : upto])
                    self._beat()
            found.append(digester.finish())
            begin = end
        output.write(data[output.position :])
        return found

    def commit(
        self,
        temporary: str,
        iteration: int,
        *,
        written: list[str],
        block_bytes: int,
        extra: str,
    ) -> None:
        """Make the checkpoint appear and the tracker name it."""
        files, tensors = stored_tables(self._plans, [json.loads(text) for text in written])
        publish(
            self._root / temporary,
            Manifest(
                iteration=iteration,
                world_size=len(self._plans),
                block_bytes=block_bytes,
                digests=True,
                files=files,
                tensors=tensors,
                extra=json.loads(extra),
            ),
        )
        write_tracker(self._root, iteration)

    def prune(self, keep: Mapping[str, Any]) -> list[str]:
        """Remove what is not kept; return lines to log."""
        lines: list[str] = []
        prune_checkpoints(self._root, say=lines.append, **keep)
        return lines


def step_back(niceness: int) -> None:
    """Leave processor and disk to the trainer, and end when it does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a scheduler sends these to all processes; the trainer decides for both.
        signal.signal(number, signal.SIG_IGN)
    os.nice(niceness)
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    # Only cores that nobody wants: by niceness alone, training on all cores of a CPU still runs at
    # 0.75 to 0.85 of its speed. While it waits for a save, cores are free.
    with contextlib.suppress(OSError):  # some containers allow no call of that kind
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if (number := _IOPRIO_SET.get(os.uname().machine)) is not None:
        libc.syscall(number, 1, 0, _LAST_IN_TURN)


def main(socket_fd: int, memory_fd: int, root: str, *, niceness: int) -> None:
    """Carry out orders until the trainer is gone."""
    step_back(niceness)
    end = socket.socket(fileno=socket_fd)
    last = [0.0]

    def beat() -> None:
        if time.monotonic() - last[0] > BEAT_SECONDS:
            last[0] = time.monotonic()
            send(end, {"beat": True})

    writer = Writer(memory_fd, Path(root), beat)
    with end, contextlib.suppress(EOFError, ConnectionError):
        send(end, {"value": os.getpid()})
        while True:
            order = receive(end)
            try:
                answer = {"value": writer.carry_out(order)}
            except Exception as error:
                answer = {"error": describe(error)}
            send(end, answer)

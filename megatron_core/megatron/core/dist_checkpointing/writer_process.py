# SPDX-License-Identifier: Apache-2.0
"""The process that writes a rank's asynchronous saves: `python -c`, started by `WriterProcess`.

The process imports no torch and holds none of the trainer's locks. It reads the shard from shared
memory, in its layout on disk, and receives commands as JSON through a socket. It starts in
milliseconds and runs at low priority. The kernel kills it when the trainer ends for any reason, so
no orphan completes a save after another run has started in the same folder.

Commands, each answered with {"value": ...} or {"error": text}, after any number of {"beat": true}:

    shard   map the shared memory, remember the ends of header and chunks
    plans   check and store the shard plans of all ranks                 (rank 0)
    open    create the temporary folder, unless the step has been saved  (rank 0)
    write   write this rank's shard durably, return its digests as JSON text
    commit  write the manifest, rename the folder, update the tracker    (rank 0)
    prune   apply retention, return lines to log                         (rank 0)
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

from megatron.core.dist_checkpointing.checkpoint_errors import CheckpointError, describe
from megatron.core.dist_checkpointing.manifest import (
    Manifest,
    check_plans,
    stored_tables,
)
from megatron.core.dist_checkpointing.run_folder import (
    check_save_folder_lock,
    checkpoint_folder,
    existing_note,
    open_temporary,
    prune_checkpoints,
    publish,
    sync_folder,
    write_tracker,
)
from megatron.core.dist_checkpointing.shard_format import (
    WRITE_BUFFER_BYTES,
    BlockDigester,
    ShardWriter,
    digest,
)
from megatron.core.untrusted_files import open_to_write

#: Seconds between two heartbeats during long work.
HEARTBEAT_SECONDS = 1.0

_LENGTH = struct.Struct("<Q")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_LOWEST_BEST_EFFORT = 2 << 13 | 7  # ioprio_set(2): class best effort, lowest priority
_IOPRIO_SET = MappingProxyType({"x86_64": 251, "aarch64": 30})


def send(connection: socket.socket, message: Any) -> None:
    """Send a message: its length, then JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(body)))
    connection.sendall(body)


def receive(connection: socket.socket) -> Any:
    """Return the next message. Raises EOFError if the peer has closed the connection."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    return json.loads(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        num_received = connection.recv_into(view)
        if not num_received:
            raise EOFError("the peer is gone")
        view = view[num_received:]
    return buffer


class CommandExecutor:
    """Executes the commands of one trainer process.

    Args:
        memory_fd: descriptor of shared memory with the shard; command `shard` sends its layout.
        root: folder of all checkpoints.
        heartbeat: called after each write during long work.
    """

    def __init__(self, memory_fd: int, root: Path, heartbeat: Callable[[], None]) -> None:
        self._memory_fd, self._root, self._heartbeat = memory_fd, root, heartbeat
        self._chunk_ends: list[int] = []
        self._begin = self._total = 0
        self._memory: mmap.mmap | None = None
        self._plans: list[dict[str, Any]] = []

    def execute(self, command: Mapping[str, Any]) -> Any:
        """Execute a command and return its result.

        Raises CheckpointError, OSError, ValueError.
        """
        commands: Mapping[str, Callable[..., Any]] = {
            "shard": self.shard,
            "plans": self.plans,
            "open": self.open,
            "write": self.write,
            "commit": self.commit,
            "prune": self.prune,
        }
        return commands[command["do"]](**command["with"])

    def shard(self, begin: int, ends: list[int]) -> None:
        """Map the shared memory and remember the layout of the shard in it.

        Args:
            begin: size of the header, where the first chunk begins.
            ends: end of each chunk, ascending; chunks are adjacent.
        """
        self._begin, self._chunk_ends = begin, ends
        self._total = ends[-1] if ends else begin
        self._memory = mmap.mmap(self._memory_fd, self._total, prot=mmap.PROT_READ)

    def plans(self, texts: list[str]) -> None:
        """Check and store the plans of all ranks; no element may be missing or written twice."""
        plans = [json.loads(text) for text in texts]
        check_plans(plans)
        self._plans = plans

    def open(self, iteration: int, name: str, *, folder_locked: bool) -> dict[str, str]:
        """Create the temporary folder `name`; return {"exists": text} if the step is saved."""
        if folder_locked:
            check_save_folder_lock(self._root)
        folder = checkpoint_folder(self._root, iteration)
        if folder.is_dir():
            note = existing_note(folder)
            return {"exists": f"{folder} exists already{note}; it is not saved again"}
        open_temporary(self._root, iteration, name=name)
        return {}

    def write(self, path: str, block_bytes: int) -> str:
        """Write and sync the shard; return its digests for the manifest, as JSON."""
        assert self._memory is not None
        try:
            with open_to_write(path, "x", root=Path(path).parent.parent) as file:
                with memoryview(self._memory) as shared, shared[: self._total] as shard:
                    digests = self._stream(file.fileno(), shard, block_bytes)
                    with shard[: self._begin] as header:
                        header_digest = digest(header)
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path} ({self._total} bytes): {error.strerror}; nothing was "
                "saved, earlier checkpoints are intact"
            ) from error
        sync_folder(Path(path).parent)
        return json.dumps({"header_xxh3": header_digest, "xxh3": digests}, separators=(",", ":"))

    def _stream(self, fd: int, shard: memoryview, block_bytes: int) -> list[list[str]]:
        """Write all bytes, each buffer right after its digest; return the digests by chunk."""
        writer, begin, digests = ShardWriter(fd), self._begin, []
        for chunk_end in self._chunk_ends:
            digester = BlockDigester(block_bytes)
            for position in range(begin, chunk_end, WRITE_BUFFER_BYTES):
                stop = min(position + WRITE_BUFFER_BYTES, chunk_end)
                digester.update(shard[position:stop])
                if stop - writer.position >= WRITE_BUFFER_BYTES:
                    writer.write(shard[writer.position : stop])
                    self._heartbeat()
            digests.append(digester.finish())
            begin = chunk_end
        writer.write(shard[writer.position :])
        return digests

    def commit(
        self,
        temporary: str,
        iteration: int,
        *,
        written: list[str],
        block_bytes: int,
        extra: str,
    ) -> None:
        """Publish the checkpoint and make the tracker name it."""
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
        """Apply retention; return lines to log."""
        lines: list[str] = []
        prune_checkpoints(self._root, say=lines.append, **keep)
        return lines


def lower_priority(niceness: int) -> None:
    """Yield CPU and disk to the trainer, and die with it."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a scheduler sends these to all processes; the trainer handles them.
        signal.signal(signal_number, signal.SIG_IGN)
    os.nice(niceness)
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    # SCHED_IDLE uses idle cores only. With niceness alone, training on all cores of a CPU slows
    # down to 0.75 to 0.85 of its speed. While the trainer waits for a save, cores are idle.
    with contextlib.suppress(OSError):  # some containers allow no call of that kind
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if (ioprio_set := _IOPRIO_SET.get(os.uname().machine)) is not None:
        libc.syscall(ioprio_set, 1, 0, _LOWEST_BEST_EFFORT)


def main(socket_fd: int, memory_fd: int, root: str, *, niceness: int) -> None:
    """Execute commands until the trainer closes the connection."""
    lower_priority(niceness)
    connection = socket.socket(fileno=socket_fd)
    last_sent = [0.0]

    def heartbeat() -> None:
        if time.monotonic() - last_sent[0] > HEARTBEAT_SECONDS:
            last_sent[0] = time.monotonic()
            send(connection, {"beat": True})

    executor = CommandExecutor(memory_fd, Path(root), heartbeat)
    with connection, contextlib.suppress(EOFError, ConnectionError):
        send(connection, {"value": os.getpid()})
        while True:
            command = receive(connection)
            try:
                answer = {"value": executor.execute(command)}
            except Exception as error:
                answer = {"error": describe(error)}
            send(connection, answer)

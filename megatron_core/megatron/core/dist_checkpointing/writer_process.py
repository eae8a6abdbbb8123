# SPDX-License-Identifier: Apache-2.0
"""The process that writes a rank's asynchronous saves: `python -c`, started by `WriterProcess`.

The process imports no torch and holds none of the trainer's locks. It reads the shard from shared
memory, in its layout on disk, and receives commands as JSON through a socket. It starts in
milliseconds and runs at low priority. The kernel kills it when the trainer ends for any reason, so
no orphan completes a save after another run has started in the same folder.

Commands, each answered with {"value": ...} or {"error": text}, after any number of {"beat": true}:

    shard   map the shared memory of a shard plan
    plans, open, write, commit   the steps of a save, see `SaveSteps`
    prune   apply retention, return lines to log
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.dist_checkpointing.run_folder import prune_checkpoints
from megatron.core.dist_checkpointing.save_plan import SaveSteps, ShardPlan
from megatron.core.dist_checkpointing.shard_format import WRITE_BUFFER_BYTES, describe

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
        memory_fd: descriptor of shared memory with the shard; command `shard` sends its plan.
        root: folder of all checkpoints.
        heartbeat: called after each write during long work.
    """

    def __init__(self, memory_fd: int, root: Path, heartbeat: Callable[[], None]) -> None:
        self._memory_fd, self._root, self._heartbeat = memory_fd, root, heartbeat
        self._steps: SaveSteps | None = None

    def execute(self, command: Mapping[str, Any]) -> Any:
        """Execute a command and return its result.

        Raises CheckpointError, OSError, ValueError.
        """
        name, arguments = command["do"], command["with"]
        if name == "shard":
            return self._map_shard(**arguments)
        if name == "prune":
            return self._prune(**arguments)
        assert self._steps is not None, "the first command must be `shard`"
        return self._steps.execute(name, **arguments)

    def _map_shard(self, plan: str) -> None:
        """Map the shared memory of the shard."""
        shard_plan = ShardPlan.decode(plan)
        size = shard_plan.total_bytes
        shard = memoryview(mmap.mmap(self._memory_fd, size, prot=mmap.PROT_READ))

        def buffers(index: int) -> Iterator[memoryview]:
            chunk = shard_plan.chunks[index]
            for begin in range(chunk.begin, chunk.end, WRITE_BUFFER_BYTES):
                yield shard[begin : min(begin + WRITE_BUFFER_BYTES, chunk.end)]

        header = shard[: shard_plan.header_bytes]
        self._steps = SaveSteps(self._root, shard_plan, header, buffers, heartbeat=self._heartbeat)

    def _prune(self, keep: Mapping[str, Any]) -> list[str]:
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

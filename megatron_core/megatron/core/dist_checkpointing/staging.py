# SPDX-License-Identifier: Apache-2.0
"""Staging: a copy of exactly the bytes a rank writes, in shared memory, as they shall lie on disk.

The memory is allocated once and used for every save. On the CPU a thread copies, without Python's
lock, while the trainer goes on; on a GPU the copies are put on a stream of their own, into pinned
memory. Either way the tensors may not change before `settle` has returned.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from megatron.core.device import (
    current_stream,
    new_event,
    new_stream,
    on_stream,
    pin_in_place,
    unpin_in_place,
)
from megatron.core.dist_checkpointing.planner import ShardPlan
from megatron.core.dist_checkpointing.shard_writer import as_bytes

#: From here on a chunk is copied by itself. Smaller ones are gathered by one system call for many:
#: 5,000 of 16 bytes take 0.6 ms like that, one by one 5 ms.
LARGE_BYTES = 64 << 10

#: Buffers that the kernel takes in one call (IOV_MAX).
MOST_BUFFERS = 1024


class Staging:
    """Shared memory with one rank's shard.

    Args:
        plan: what the shard holds; its tensors are copied whenever `begin` is called.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.bytes, self._header_bytes = plan.total_bytes, len(plan.header)
        self.fd = _shared_memory()
        try:
            os.ftruncate(self.fd, self.bytes)
            self._map = mmap.mmap(self.fd, self.bytes)
        except OSError as error:
            raise ValueError(
                f"saving in the background needs {self.bytes} bytes of shared memory, which the "
                f"machine refuses ({error.strerror}): raise its limits, or save at once"
            ) from error
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        os.pwrite(self.fd, plan.header, 0)
        devices = {chunk.tensor.device for chunk in plan.held} - {torch.device("cpu")}
        self._device = devices.pop() if devices else torch.device("cpu")
        if self._on_gpu:
            pin_in_place(self._memory)
        self._stream, self._copied = new_stream(self._device), new_event(self._device)
        self._from_device: list[Callable[[], object]] = []
        self._from_host: list[Callable[[], object]] = []
        self._list_copies(plan)
        self._settled = threading.Event()
        self._settled.set()

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def touch(self) -> None:
        """Have the kernel find all pages, so that the first copy is as fast as the others."""
        size = self.bytes - self._header_bytes
        ctypes.memset(self._memory.data_ptr() + self._header_bytes, 0, size)

    def begin(self) -> None:
        """Begin a copy, on the trainer's thread: what lies on a GPU is in its stream then."""
        self._settled.clear()
        if not self._on_gpu:
            return
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            for copy in self._from_device:
                copy()
        self._copied.record(self._stream)

    def carry_out(self) -> None:
        """Complete the copy, on another thread; always called behind `begin`."""
        try:
            for copy in self._from_host:
                copy()
        finally:
            self._settled.set()
        if self._on_gpu:
            self._copied.synchronize()

    def release(self) -> None:
        """Hold nobody up any longer, whatever became of the copy."""
        self._settled.set()

    def settle(self) -> None:
        """Return when the tensors may change: on a GPU, by work that is put on the current stream
        from now on."""
        if self._on_gpu:
            current_stream(self._device).wait_event(self._copied)
        self._settled.wait()

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last mapping."""
        if self.fd >= 0:
            if self._on_gpu:
                unpin_in_place(self._memory)
            os.close(self.fd)
            self.fd = -1

    def _list_copies(self, plan: ShardPlan) -> None:
        """Find out what fills the memory, small neighbours together."""
        small: list[memoryview] = []
        for chunk, planned in zip(plan.held, plan.chunks, strict=True):
            source, size = chunk.tensor.detach(), planned.end - planned.begin
            on_host = source.device.type == "cpu"
            if on_host and source.is_contiguous() and size < LARGE_BYTES:
                small.append(as_bytes(source))
                continue
            self._from_host += self._gathers(small, planned.begin)
            small = []
            target = self._memory[planned.begin : planned.end]
            if on_host and source.is_contiguous():
                move = partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size)
                self._from_host.append(move)
            elif size:
                target = target.view(source.dtype).view(source.shape)
                copy = partial(target.copy_, source, non_blocking=True)
                (self._from_host if on_host else self._from_device).append(copy)
        self._from_host += self._gathers(small, plan.total_bytes)

    def _gathers(self, small: Sequence[memoryview], end: int) -> Iterator[Callable[[], object]]:
        """Yield calls that write neighbours, the last of which ends at byte `end`."""
        begin = end - sum(map(len, small))
        for i in range(0, len(small), MOST_BUFFERS):
            batch = small[i : i + MOST_BUFFERS]
            yield partial(self._gather, batch, begin)
            begin += sum(map(len, batch))

    def _gather(self, batch: Sequence[memoryview], begin: int) -> None:
        wanted = sum(map(len, batch))
        if os.pwritev(self.fd, batch, begin) != wanted:
            raise OSError(f"shared memory took less than {wanted} bytes")


def _shared_memory() -> int:
    """Return the descriptor of memory that has no name in any folder."""
    if sys.platform == "linux":
        return os.memfd_create("megatron-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

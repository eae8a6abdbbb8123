# SPDX-License-Identifier: Apache-2.0
"""Memory that communicators share: symmetric memory for inference, buffers registered with NCCL.

`SequenceParallelComm` has low-latency collectives for sequence-parallel inference, over symmetric
memory if available.

    >>> comm = SequenceParallelComm.create(group, TorchMemory(device), max_bytes=1 << 20)
    >>> comm.explain()
    'torch.distributed (one rank)'
    >>> comm.begin_step()
    >>> shard = comm.reduce_scatter(addends)  # [n * tp, h] -> this rank's [n, h] of the sum
    >>> full = comm.all_gather(shard)  # [n, h] of every rank -> [n * tp, h]
    >>> if comm.fuses(addends):  # reduce-scatter, add, RMSNorm and all-gather in one kernel
    ...     full = comm.reduce_norm_gather(addends, stream, norm)
    >>> full = comm.all_gather_v(x, rows)  # the first rows[r] of rank r's [n, h], then zeros
    >>> shard = comm.reduce_scatter_v(full, rows)  # back: this rank's rows of the sum, then zeros

Three transports; the first one that all ranks support is used:

| way | needs |
|---|---|
| multimem | NVLink SHARP: the switch copies and sums; symmetric memory with a multicast address |
| p2p | every rank maps every other rank's memory |
| torch.distributed | nothing: NCCL or gloo |

After each check the ranks agree on the result (the first problem of any rank), so all ranks use the
same transport, and no rank waits for a peer that has given up. A transport is used only after a
probe with a bounded wait agreed with torch.distributed.

The arena has two buffers, which alternate. A collective waits for its peers at its start or at its
end, so a rank that has passed it knows that the peers have read the previous collective's buffer. A
step begins with a reduction and the first buffer, whatever the previous step ended with, so that
CUDA graphs of steps can follow each other: a reduction writes only this rank's memory, and waits
before it reads other ranks' memory.

`RegisteredMemory` has the buffers of other collectives. A collective on a buffer that is registered
with NCCL reads and writes it directly, and needs fewer SMs than a collective that copies through
NCCL's own buffers (*user buffer registration*). Registered memory comes from `ncclMemAlloc` through
a pool of torch's allocator. All ranks of a communicator must register the same buffers, so all
ranks must allocate the same sizes in the same order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron.core.comm.collectives import all_gather, all_reduce, observe, reduce_scatter
from megatron.core.device import current_stream, pin
from megatron.core.ops.backend_choice import triton_is_installed
from megatron.core.ops.nvls import PACK_BYTES, PeerGroup, RowNorm
from megatron.core.ops.nvls.naive import pack_rows, unpack_rows
from megatron.core.process_groups import Group

logger = logging.getLogger(__name__)

Mode = Literal["auto", "require", "off"]
Way = Literal["multimem", "p2p", "torch.distributed"]

#: Most programs of a kernel: the barrier needs all programs to be resident at once.
MAX_PROGRAMS = 32
#: Polls of a signal-pad slot in a probe, about a second.
TRIES = 1 << 20
#: Elements of each rank in a probe.
PROBE_ELEMENTS = 16
#: Bytes of a problem's text that ranks exchange.
REASON_BYTES = 256
#: Longest row of the fused kernel, which a program holds in registers.
MAX_FEATURES = 16384


@dataclass(frozen=True, eq=False)
class SymmetricBuffers:
    """A symmetric allocation: the same number of bytes on every rank.

    Args:
        local: uint8 [bytes], this rank's memory.
        buffers: int64 [world], addresses of all ranks' memory, on the device.
        pads: int64 [world], addresses of the ranks' signal pads, on the device.
        pad_bytes: size of a signal pad.
        multicast: multicast address of all ranks' memory; 0 if there is none.
        owner: keeps the other ranks' memory mapped.
    """

    local: torch.Tensor
    buffers: torch.Tensor
    pads: torch.Tensor
    pad_bytes: int
    multicast: int
    owner: object = None


class SymmetricMemory(Protocol):
    """Provider of symmetric memory."""

    def problem(self) -> str:
        """Return why this rank cannot allocate; "" if it can. A local check."""
        ...

    def multicast_problem(self) -> str:
        """Return why this rank has no multicast; "" if it has. A local check."""
        ...

    def allocate(self, size: int, pad_bytes: int) -> torch.Tensor:
        """Return uint8 [size] of this rank, with a signal pad, without communication.

        Raises:
            RuntimeError: out of memory.
        """
        ...

    def exchange(self, local: torch.Tensor, group: Group) -> SymmetricBuffers:
        """Map the memory of every rank of a group; a collective call.

        Raises:
            RuntimeError: a rank cannot map it.
        """
        ...


class TorchMemory:
    """`torch.distributed._symmetric_memory` on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def problem(self) -> str:
        """See `SymmetricMemory`."""
        if self.device.type != "cuda":
            return f"the model is on {self.device.type}, not on a CUDA device"
        try:
            import torch.distributed._symmetric_memory as _  # noqa: F401
        except ImportError:
            return f"torch {torch.__version__} has no symmetric memory"
        return "" if triton_is_installed() else "Triton is not installed"

    def multicast_problem(self) -> str:
        """See `SymmetricMemory`."""
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        index = self.device.index or 0
        if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, index):
            return "the device has no NVLink SHARP multicast"
        return ""

    def allocate(self, size: int, pad_bytes: int) -> torch.Tensor:
        """See `SymmetricMemory`."""
        import torch.distributed._symmetric_memory as symmetric

        symmetric.set_signal_pad_size(pad_bytes)  # applies to later allocations
        return symmetric.empty(size, dtype=torch.uint8, device=self.device)

    def exchange(self, local: torch.Tensor, group: Group) -> SymmetricBuffers:
        """See `SymmetricMemory`."""
        import torch.distributed._symmetric_memory as symmetric

        assert group.handle is not None
        # Exchanges handles with all ranks: a rank that does not call it makes its peers wait.
        handle = symmetric.rendezvous(local, group.handle)
        return SymmetricBuffers(
            local=local,
            buffers=torch.tensor(handle.buffer_ptrs, device=self.device),
            pads=torch.tensor(handle.signal_pad_ptrs, device=self.device),
            pad_bytes=handle.signal_pad_size,
            multicast=handle.multicast_ptr,
            owner=handle,
        )


class Arena:
    """Two alternating buffers of symmetric memory, and the kernels over them.

    Args:
        halves: the two buffers, of the same size; their pads may be the same memory.
        way: transport of the kernels.
        tries: number of polls of a signal-pad slot; 0 polls for ever.
    """

    def __init__(
        self,
        group: Group,
        halves: tuple[SymmetricBuffers, SymmetricBuffers],
        way: Literal["multimem", "p2p"],
        *,
        tries: int = 0,
    ) -> None:
        self.way: Literal["multimem", "p2p"] = way
        self.group, self.tries = group, tries
        # Index of the buffer of the next collective; all ranks alternate in the same order.
        self._halves, self._next = halves, 0
        self.device, self._traps = halves[0].local.device, False
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        pad_bytes = min(half.pad_bytes for half in halves)
        # A pad has an int32 slot for each program and source rank.
        self.programs = min(MAX_PROGRAMS, pad_bytes // (4 * group.size))
        if self.programs < 1:
            raise RuntimeError(f"signal pads of {pad_bytes} bytes for {group.size} ranks")

    def supports(self, dtype: torch.dtype, full_bytes: int) -> bool:
        """Return whether the arena supports a transfer: the same result on all ranks for one shape.

        Args:
            full_bytes: bytes of the larger one of input and output.
        """
        # Every term is equal on all ranks: otherwise some would wait in a kernel for the others.
        return (
            0 < full_bytes <= self.nbytes
            and dtype in (torch.float32, torch.bfloat16)
            and full_bytes % (self.group.size * PACK_BYTES) == 0
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer: the largest full tensor of a transfer."""
        return self._halves[0].local.numel()

    def limit_tries(self, tries: int) -> None:
        """Time out after a number of polls from now on; 0 disables the timeout.

        On a timeout a GPU kernel traps and the device's memory is lost, so the status is then in
        pinned host memory.
        """
        self.tries = tries
        self._traps = tries > 0 and self.device.type == "cuda"
        if self._traps:
            # After a trap the device's memory cannot be read; the kernel writes to pinned memory.
            self.status = pin(torch.zeros(1, dtype=torch.int32), self.device)

    def check(self) -> None:
        """Raise RuntimeError if a peer timed out; without a limit, do nothing."""
        if not self.tries:
            return
        # A trapped kernel raises here, after it has written the status.
        device_error: RuntimeError | None = None
        try:
            current_stream(self.device).synchronize()
        except RuntimeError as error:
            device_error = error
        missing = int(self.status)
        if missing:
            raise RuntimeError(
                f"timeout: rank {self.group.ranks[missing - 1]} did not reach a collective of "
                f"{self.way} within {self.tries} polls of its slot: see that rank's log"
            ) from device_error
        if device_error is not None:
            raise device_error

    def begin_step(self) -> None:
        """Use the first buffer for the next collective."""
        self._next = 0

    def next_addends(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the start of the next buffer, where the next reduction's input may be written."""
        return self._view(self._halves[self._next], dtype, shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n * size, ...] in the arena from x [n, ...]."""
        from megatron.core.ops.nvls import triton as kernels

        x, half = _aligned(x), self._next_buffers()
        out = self._view(half, x.dtype, (x.shape[0] * self.group.size, *x.shape[1:]))
        observe("all_gather", self.group, out, how=self.way)
        if self.way == "multimem":
            kernels.multimem_all_gather(x, half.multicast, self._peers(half))
        else:
            kernels.peer_all_gather(x, half.buffers, self._peers(half))
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's [n, ...] of the sum of x [n * size, ...] over the ranks."""
        from megatron.core.ops.nvls import triton as kernels

        half = self._fill_next(x, self.way)
        out = x.new_empty((x.shape[0] // self.group.size, *x.shape[1:]))
        if self.way == "multimem":
            kernels.multimem_reduce_scatter(half.multicast, out, self._peers(half))
        else:
            kernels.peer_reduce_scatter(half.buffers, out, self._peers(half))
        return out

    def all_gather_v(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return [n * size, h] in the arena from x [n, h]; see `SequenceParallelComm`."""
        from megatron.core.ops.nvls import triton as kernels

        x, half = _aligned(x), self._next_buffers()
        out = self._view(half, x.dtype, (x.shape[0] * self.group.size, *x.shape[1:]))
        observe("all_gather", self.group, out, how=f"{self.way} v")
        if self.way == "multimem":
            kernels.multimem_all_gather_v(x, rows, half.multicast, out, self._peers(half))
        else:
            kernels.peer_all_gather_v(x, rows, half.buffers, out, self._peers(half))
        return out

    def reduce_scatter_v(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return [n, h] from x [n * size, h]; see `SequenceParallelComm`."""
        from megatron.core.ops.nvls import triton as kernels

        half = self._fill_next(x, f"{self.way} v")
        out = x.new_empty((x.shape[0] // self.group.size, *x.shape[1:]))
        if self.way == "multimem":
            kernels.multimem_reduce_scatter_v(half.multicast, rows, out, self._peers(half))
        else:
            kernels.peer_reduce_scatter_v(half.buffers, rows, out, self._peers(half))
        return out

    def reduce_norm_gather(
        self, x: torch.Tensor, stream: torch.Tensor, norm: RowNorm
    ) -> torch.Tensor:
        """Return the normalised rows of all ranks, in the arena; see `SequenceParallelComm`."""
        from megatron.core.ops.nvls import triton as kernels

        how = f"{self.way} fused"
        # Different buffers: a peer may store its rows before this rank has read its addends.
        source, target = self._fill_next(x, how), self._next_buffers()
        out = self._view(target, x.dtype, x.shape)
        observe("all_gather", self.group, out, how=how)
        if self.way == "multimem":
            kernels.multimem_reduce_norm_gather(
                source.multicast, target.multicast, stream, norm, self._peers(source)
            )
        else:
            kernels.peer_reduce_norm_gather(
                source.buffers, target.buffers, stream, norm, self._peers(source)
            )
        return out

    def _fill_next(self, x: torch.Tensor, how: str) -> SymmetricBuffers:
        """Return the next buffer, filled with x; x may already be a view of it (`next_addends`)."""
        half = self._next_buffers()
        source = self._view(half, x.dtype, x.shape)
        if not (x.is_contiguous() and x.data_ptr() == source.data_ptr()):
            source.copy_(x)
        observe("reduce_scatter", self.group, source, how=how)
        return half

    @staticmethod
    def _view(half: SymmetricBuffers, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a view of the start of a buffer."""
        return half.local[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _next_buffers(self) -> SymmetricBuffers:
        half = self._halves[self._next]
        self._next = 1 - self._next
        return half

    def _peers(self, half: SymmetricBuffers) -> PeerGroup:
        return PeerGroup(
            half.pads,
            self.status,
            self.group.rank,
            self.group.size,
            self.programs,
            self.tries,
            self._traps,
        )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x contiguous, at an address aligned to a pack."""
    # Kernels load whole packs of 16 bytes.
    if x.is_contiguous() and x.data_ptr() % PACK_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class SequenceParallelComm:
    """Collectives of one group; see `create`."""

    def __init__(self, group: Group, arena: Arena | None, reason: str) -> None:
        self.group, self._arena, self._reason = group, arena, reason
        self._logged_overflow = False  # whether a transfer larger than the arena was logged

    @property
    def way(self) -> Way:
        """The transport that all ranks use."""
        return "torch.distributed" if self._arena is None else self._arena.way

    @staticmethod
    def plain(group: Group) -> SequenceParallelComm:
        """Return the collectives over torch.distributed."""
        return SequenceParallelComm(group, None, "")

    @staticmethod
    def create(
        group: Group,
        memory: SymmetricMemory,
        *,
        max_bytes: int,
        mode: Mode = "auto",
        tries: int = TRIES,
        limit: int = 0,
    ) -> SequenceParallelComm:
        """Choose a transport that all ranks support; a collective call with equal arguments.

        Args:
            max_bytes: largest full tensor of a transfer; larger ones use torch.distributed.
            mode: "auto" uses the best transport, "off" uses torch.distributed, "require" raises
                unless the transport is multimem.
            tries: number of polls of a signal-pad slot in a probe before it times out.
            limit: number of polls in every later collective; 0 waits for ever. For debugging:
                `check` then makes the host wait for the device. On a time-out a GPU traps; on a
                CPU the results are invalid from then on.

        Raises:
            ValueError: "require", and multimem is not available; on all ranks, with the reason.
        """
        if group.size == 1 or mode == "off":
            comm = SequenceParallelComm(
                group, None, "one rank" if group.size == 1 else "--nvls off"
            )
        else:
            arena, reason = _create_arena(group, memory, max_bytes, tries)
            if arena is not None:
                arena.limit_tries(limit)
            comm = SequenceParallelComm(group, arena, reason)
        if mode == "require" and comm.way != "multimem":
            raise ValueError(
                f"--nvls require: the collectives would go through {comm.explain()}: use --nvls "
                "auto, or a machine whose GPUs of a tensor parallel group share an NVSwitch"
            )
        return comm

    def explain(self) -> str:
        """Return the transport, and why no better one is used, in one line."""
        return f"{self.way} ({self._reason})" if self._reason else self.way

    def begin_step(self) -> None:
        """Start a step, whose first collective is a reduction."""
        if self._arena is not None:
            self._arena.begin_step()

    def check(self) -> None:
        """With a limit, check that all peers joined all collectives so far.

        Raises:
            RuntimeError: names a peer that timed out.
        """
        if self._arena is not None:
            self._arena.check()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate x [n, ...] of every rank to [n * size, ...].

        The result may be in the arena, where peers write again: it is valid until this rank
        starts its next collective.
        """
        if self._arena is None or not self._supports(x.dtype, x.nbytes * self.group.size):
            return all_gather(x, self.group)
        return self._arena.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [n * size, ...] over the group and return this rank's [n, ...]."""
        if self._arena is None or not self._supports_scatter(x.shape, x.dtype):
            return reduce_scatter(x, self.group)
        return self._arena.reduce_scatter(x)

    def all_gather_v(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Gather the first `rows[rank]` rows of every rank's x [n, h], then zeros.

        The host does not read the counts. They may come from the plan or be computed on the
        device; they must be equal on all ranks and between 0 and n.

        Args:
            rows: int32 [size], on the device.

        Returns:
            [n * size, h], in the arena as in `all_gather`.
        """
        if self._arena is None or not self._supports_rows(x, x.nbytes * self.group.size):
            return pack_rows(all_gather(x, self.group), rows)
        return self._arena.all_gather_v(x, rows)

    def reduce_scatter_v(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Sum x [n * size, h], laid out as `all_gather_v` returns it, over the group.

        Returns:
            This rank's rows [n, h], with zeros after its real rows.
        """
        if self._arena is None or not self._supports_rows(x, x.nbytes):
            return reduce_scatter(unpack_rows(x, rows), self.group)
        return self._arena.reduce_scatter_v(x, rows)

    def _supports_rows(self, x: torch.Tensor, full_bytes: int) -> bool:
        """Return whether the arena supports any number of rows of x [n, h]."""
        whole_packs = x.ndim == 2 and x.shape[1] * x.element_size() % PACK_BYTES == 0
        return whole_packs and self._supports(x.dtype, full_bytes)

    def fuses(self, x: torch.Tensor) -> bool:
        """Return whether `reduce_norm_gather` supports x [n * size, h]; the same on all ranks."""
        return (
            self._arena is not None
            and x.shape[-1] <= MAX_FEATURES
            and self._supports_rows(x, x.nbytes)
            and self._supports_scatter(x.shape, x.dtype)
        )

    def addends(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory [n * size, ...] for the input of the next reduction, which saves a copy.

        None if the reduction uses torch.distributed. No other collective may start in between.
        The caller may write there at once: peers read this buffer before the previous gather,
        which waited for them.
        """
        if self._arena is None or not self._supports_scatter(shape, dtype):
            return None
        return self._arena.next_addends(shape, dtype)

    def _supports_scatter(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Return whether the arena supports x [n * size, ...] with an equal shard per rank."""
        assert self._arena is not None
        full_bytes = math.prod(shape) * dtype.itemsize
        return shape[0] % self.group.size == 0 and self._supports(dtype, full_bytes)

    def _supports(self, dtype: torch.dtype, full_bytes: int) -> bool:
        """See `Arena.supports`; log once that a transfer is too large."""
        assert self._arena is not None
        arena_bytes = self._arena.nbytes
        if full_bytes > arena_bytes and not self._logged_overflow:
            self._logged_overflow = True
            if self.group.rank == 0:
                logger.warning(
                    "sequence parallel collectives: a transfer of %d bytes exceeds the %d "
                    "bytes of symmetric memory: such transfers use torch.distributed",
                    full_bytes,
                    arena_bytes,
                )
        return self._arena.supports(dtype, full_bytes)

    def reduce_norm_gather(
        self, x: torch.Tensor, stream: torch.Tensor, norm: RowNorm
    ) -> torch.Tensor:
        """Reduce-scatter, add to the residual stream, normalise and all-gather, in one kernel.

        Args:
            x: [n * size, h], addends of the ranks, for which `fuses` holds.
            stream: residual [n, h] of this rank, contiguous, in x's dtype; updated in place.
            norm: of the updated residual, in fp32.

        Returns:
            Normalised rows of all ranks [n * size, h], in the arena as in `all_gather`.
        """
        assert self._arena is not None
        return self._arena.reduce_norm_gather(x, stream, norm)


def _create_arena(
    group: Group, memory: SymmetricMemory, max_bytes: int, tries: int
) -> tuple[Arena | None, str]:
    """Return the arena of the best transport that all ranks support, and why not a better one."""
    problem = _first_problem(memory.problem(), group)
    if problem:
        return None, problem
    halves, problem = _allocate_buffers(group, memory, max_bytes)
    if halves is None:
        return None, problem
    no_multicast_reason = memory.multicast_problem()
    if not no_multicast_reason and any(half.multicast == 0 for half in halves):
        no_multicast_reason = "the ranks' devices are not in one multicast domain"
    no_multicast_reason = _first_problem(no_multicast_reason, group)
    if not no_multicast_reason:
        no_multicast_reason = _first_problem(
            _probe(Arena(group, halves, "multimem", tries=tries)), group
        )
        if not no_multicast_reason:
            return Arena(group, halves, "multimem"), ""
        # A failed probe may have left slots set: allocate new pads, which are zero.
        halves, problem = _allocate_buffers(group, memory, max_bytes)
        if halves is None:
            return None, f"{no_multicast_reason}; {problem}"
    problem = _first_problem(_probe(Arena(group, halves, "p2p", tries=tries)), group)
    if problem:
        return None, f"{no_multicast_reason}; {problem}"
    return Arena(group, halves, "p2p"), no_multicast_reason


def _allocate_buffers(
    group: Group, memory: SymmetricMemory, max_bytes: int
) -> tuple[tuple[SymmetricBuffers, SymmetricBuffers] | None, str]:
    """Return two symmetric buffers, or None and the reason, the same on all ranks."""
    # Whole packs, and room for the probe.
    size = max(-(-max_bytes // PACK_BYTES), PROBE_ELEMENTS * group.size) * PACK_BYTES
    pad_bytes = 4 * MAX_PROGRAMS * group.size
    local_buffers: list[torch.Tensor] = []
    halves: list[SymmetricBuffers] = []
    problem = ""
    # In two steps: a rank without memory must not leave its peers waiting in the rendezvous.
    try:
        local_buffers += [memory.allocate(size, pad_bytes) for _ in range(2)]
    except RuntimeError as error:
        problem = f"no symmetric memory of {2 * size:,} bytes: {_first_line(error)}"
    problem = _first_problem(problem, group)
    if problem:
        return None, problem
    try:
        halves += [memory.exchange(local, group) for local in local_buffers]
    except RuntimeError as error:
        problem = f"the ranks cannot map each other's memory: {_first_line(error)}"
    problem = _first_problem(problem, group)
    return (None, problem) if problem else ((halves[0], halves[1]), "")


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _probe(arena: Arena) -> str:
    """Return why a probe of an arena's reduction and gather failed; "" if it passed."""
    group, device = arena.group, arena.status.device
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.arange(PROBE_ELEMENTS * group.size, device=device) % 16 + group.rank
        addends = values.to(dtype)
        # A copy: the next dtype's collectives write to the same buffers.
        gathered = arena.all_gather(arena.reduce_scatter(addends)).clone()
        expected = all_reduce(addends, group)
        # Waits for the device, so the probe has ended or timed out.
        missing = int(arena.status)
        if missing:
            return f"{arena.way}: rank {group.ranks[missing - 1]} did not take part in the probe"
        if not torch.allclose(gathered.float(), expected.float(), rtol=2**-6, atol=0.0):
            return f"{arena.way}: the probe's sum differs from torch.distributed's"
    return ""


def _first_problem(problem: str, group: Group) -> str:
    """Return the problem of the lowest rank that has one, the same on all ranks; "" if none has."""
    assert group.handle is not None
    # NCCL gathers only CUDA tensors.
    device = "cuda" if "nccl" in group.handle.name().lower() else "cpu"
    encoded = torch.zeros(REASON_BYTES, dtype=torch.uint8)
    raw = problem.encode()[:REASON_BYTES]
    encoded[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    for rank, row in enumerate(all_gather(encoded.unsqueeze(0).to(device), group).tolist()):
        text = bytes(row).rstrip(b"\0").decode(errors="ignore")
        if text:
            return f"rank {group.ranks[rank]}: {text}"
    return ""


#: Ring channels of a communicator over NVLink, and connections of each: to send and to receive.
CHANNELS, CONNECTIONS = 16, 2
#: Bytes of a connection: the buffer that NCCL_BUFFSIZE sets, and the buffers of the protocols LL
#: (512 KiB) and LL128 (4,800 KiB).
BUFFER_BYTES, LOW_LATENCY_BYTES = 4 << 20, (512 + 4800) << 10


def communicator_bytes(environment: Mapping[str, str]) -> int:
    """Return an estimate of the device memory of an NCCL communicator after its first use.

    channels · connections · (buffer + low-latency buffers): 0.3 GB. NCCL's documentation gives the
    default of the buffer and names the variables; the other sizes are from NCCL 2.2x. Trees and
    NVLink SHARP need more. torch's allocator does not account for this memory.

    Args:
        environment: NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS change the estimate.
    """
    channels = min(CHANNELS, _number(environment, "NCCL_MAX_NCHANNELS", CHANNELS))
    buffer_bytes = _number(environment, "NCCL_BUFFSIZE", BUFFER_BYTES)
    return channels * CONNECTIONS * (buffer_bytes + LOW_LATENCY_BYTES)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return an NCCL variable; like NCCL, ignore a value that is not a number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


class RegisteredMemory:
    """Memory from NCCL's allocator that communicators have registered.

    Args:
        groups: groups whose collectives use the buffers; a group of one rank has no communicator.
        device: device of the buffers.

    Raises:
        ValueError: the device is not a GPU, or a group's backend is not NCCL.
    """

    def __init__(self, groups: Iterable[Group], device: torch.device) -> None:
        # Groups may share a communicator, which can register a pool only once.
        handles = {id(g.handle): g for g in groups if g.handle is not None}
        if device.type != "cuda":
            raise ValueError(
                f"--use-nccl-ub needs NCCL, but this run uses {device.type}: leave it out"
            )
        backends = []
        for group in handles.values():
            assert group.handle is not None
            backend = group.handle._get_backend(device)
            if "nccl" not in backend.name().lower():
                raise ValueError(
                    f"--use-nccl-ub needs NCCL, but group {group.name} uses {backend.name()}: "
                    "leave it out"
                )
            backends.append(backend)
        self._device = device
        self._pool = torch.cuda.MemPool(backends[0].mem_allocator) if backends else None
        # Registered while empty: torch registers each later segment of the pool itself.
        for backend in backends:
            backend.register_mem_pool(self._pool)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized flat tensor [numel]."""
        if self._pool is None:
            return torch.empty(numel, dtype=dtype, device=self._device)
        # Collective registration: every rank must allocate here in the same order.
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.empty(numel, dtype=dtype, device=self._device)

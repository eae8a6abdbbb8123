# SPDX-License-Identifier: Apache-2.0
"""Low-latency collectives of sequence parallel inference, over symmetric memory where it exists.

    >>> comm = SequenceParallelComm.create(group, TorchMemory(device), max_bytes=1 << 20)
    >>> comm.explain()
    'torch.distributed (one rank)'
    >>> comm.begin_step()
    >>> shard = comm.reduce_scatter(addends)  # [n * tp, h] -> the sum of this rank's [n, h]
    >>> full = comm.all_gather(shard)  # [n, h] of every rank -> [n * tp, h]
    >>> if comm.fuses(addends):  # reduce-scatter, add, RMSNorm and all-gather in one kernel
    ...     full = comm.reduce_norm_gather(addends, stream, norm)
    >>> full = comm.all_gather_v(x, rows)  # the first rows[r] of rank r's [n, h], then zeros
    >>> shard = comm.reduce_scatter_v(full, rows)  # back: the sum of this rank's rows, then zeros

Three ways, the first that all ranks can take:

| way | needs |
|---|---|
| multimem | NVLink SHARP: the switch copies and sums; symmetric memory with a multicast address |
| p2p | every rank maps every other rank's memory |
| torch.distributed | nothing: NCCL or gloo |

What the ranks find is put to a vote (the minimum) after each check, so all of them take the same
way, and none waits for a peer that has given up. A way is taken after it has reduced a probe, with
a bounded wait, to what torch.distributed says.

The arena has two buffers, used in turns. A collective waits for its peers at its start or its end:
whoever has passed it knows that they have read what the one before it left in the other buffer. A
step begins with a reduction and the first buffer, whatever the last one ended with, so that CUDA
graphs of steps can follow each other: a reduction writes this rank's own memory only, and waits
before that of others is read.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron.core.comm.collectives import all_gather, all_reduce, observe, reduce_scatter
from megatron.core.device import current_stream, pin
from megatron.core.ops.backend_choice import triton_is_installed
from megatron.core.ops.nvls import PACK_BYTES, PeerGroup, RowNorm, pack_rows, unpack_rows
from megatron.core.process_groups import Group

logger = logging.getLogger(__name__)

Mode = Literal["auto", "require", "off"]
Way = Literal["multimem", "p2p", "torch.distributed"]

#: Programs of a kernel at most: all of them are resident at once on a device that serves.
MAX_PROGRAMS = 32
#: How often a slot of the signal pad is tried while probing, about a second.
TRIES = 1 << 20
#: Elements of each rank in a probe.
PROBE_ELEMENTS = 16
#: Bytes of a reason that ranks exchange.
REASON_BYTES = 256
#: Longest row of the fused kernel: a program has it in registers.
MAX_FEATURES = 16384


@dataclass(frozen=True, eq=False)
class SymmetricBuffers:
    """The same bytes on every rank, as one of them sees them.

    Args:
        local: uint8 [bytes], this rank's.
        buffers: int64 [world], addresses of all ranks' bytes, on the device.
        pads: int64 [world], addresses of their signal pads, on the device.
        pad_bytes: size of a signal pad.
        multicast: address that stands for all ranks' bytes; 0 if there is none.
        owner: what keeps the other ranks' memory mapped.
    """

    local: torch.Tensor
    buffers: torch.Tensor
    pads: torch.Tensor
    pad_bytes: int
    multicast: int
    owner: object = None


class SymmetricMemory(Protocol):
    """Where symmetric memory comes from."""

    def problem(self) -> str:
        """Return why this rank has none; "" if it may have. Asks no other rank."""
        ...

    def multicast_problem(self) -> str:
        """Return why this rank has no multicast; "" if it may have. Asks no other rank."""
        ...

    def allocate(self, size: int, pad_bytes: int) -> torch.Tensor:
        """Return uint8 [size] of this rank, with a signal pad. Asks no other rank.

        Raises:
            RuntimeError: there is not so much.
        """
        ...

    def exchange(self, local: torch.Tensor, group: Group) -> SymmetricBuffers:
        """Map the memory that every rank of a group has allocated; all of them call it.

        Raises:
            RuntimeError: they cannot.
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

        symmetric.set_signal_pad_size(pad_bytes)  # of what is allocated from here on
        return symmetric.empty(size, dtype=torch.uint8, device=self.device)

    def exchange(self, local: torch.Tensor, group: Group) -> SymmetricBuffers:
        """See `SymmetricMemory`."""
        import torch.distributed._symmetric_memory as symmetric

        assert group.handle is not None
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
    """Two buffers of symmetric memory in turns, and the kernels over them.

    Args:
        halves: of the same allocation size; their pads may be the same memory.
        way: of the kernels.
        tries: how often a slot of a signal pad is tried; 0 is for ever.
    """

    def __init__(
        self,
        group: Group,
        halves: tuple[SymmetricBuffers, SymmetricBuffers],
        way: Literal["multimem", "p2p"],
        *,
        tries: int = 0,
    ) -> None:
        self.group, self.way, self.tries = group, way, tries
        self._halves, self._next = halves, 0
        self.device, self._traps = halves[0].local.device, False
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        pad = min(half.pad_bytes for half in halves)
        self.programs = min(MAX_PROGRAMS, pad // (4 * group.size))
        if self.programs < 1:
            raise RuntimeError(f"signal pads of {pad} bytes for {group.size} ranks")

    def takes(self, dtype: torch.dtype, wide_bytes: int) -> bool:
        """Whether a transfer goes through the arena: the same answer on all ranks for one shape.

        Args:
            wide_bytes: of its wide side.
        """
        return (
            0 < wide_bytes <= self.nbytes
            and dtype in (torch.float32, torch.bfloat16)
            and wide_bytes % (self.group.size * PACK_BYTES) == 0
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer: the widest side that a transfer may have."""
        return self._halves[0].local.numel()

    def limit_tries(self, tries: int) -> None:
        """Give a peer up after so many tries from here on, 0 for never. A GPU is then stopped,
        whose memory is lost; so the peer is noted in the host's."""
        self.tries = tries
        self._traps = tries > 0 and self.device.type == "cuda"
        if self._traps:
            self.status = pin(torch.zeros(1, dtype=torch.int32), self.device)

    def check(self) -> None:
        """Raise RuntimeError if a peer has been given up; without a limit, do nothing."""
        if not self.tries:
            return
        stopped: RuntimeError | None = None
        try:
            current_stream(self.device).synchronize()
        except RuntimeError as error:
            stopped = error
        late = int(self.status)
        if late:
            raise RuntimeError(
                f"timeout: rank {self.group.ranks[late - 1]} did not come to a collective of "
                f"{self.way} within {self.tries} tries of its slot: see what that one does"
            ) from stopped
        if stopped is not None:
            raise stopped

    def begin_step(self) -> None:
        """Use the first buffer next."""
        self._next = 0

    def next_addends(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the beginning of the buffer that is next, to write to it what is reduced next."""
        return self._view(self._halves[self._next], dtype, shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n * size, ...] in the arena from x [n, ...]."""
        from megatron.core.ops.nvls import triton as kernels

        x, half = _aligned(x), self._turn()
        out = self._view(half, x.dtype, (x.shape[0] * self.group.size, *x.shape[1:]))
        observe("all_gather", self.group, out, how=self.way)
        if self.way == "multimem":
            kernels.multimem_all_gather(x, half.multicast, self._peers(half))
        else:
            kernels.peer_all_gather(x, half.buffers, self._peers(half))
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of this rank's [n, ...] of x [n * size, ...]."""
        from megatron.core.ops.nvls import triton as kernels

        half = self._filled(x, self.way)
        out = x.new_empty((x.shape[0] // self.group.size, *x.shape[1:]))
        if self.way == "multimem":
            kernels.multimem_reduce_scatter(half.multicast, out, self._peers(half))
        else:
            kernels.peer_reduce_scatter(half.buffers, out, self._peers(half))
        return out

    def all_gather_v(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return [n * size, h] in the arena from x [n, h]; see `SequenceParallelComm`."""
        from megatron.core.ops.nvls import triton as kernels

        x, half = _aligned(x), self._turn()
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

        half = self._filled(x, f"{self.way} v")
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
        source, target = self._filled(x, how), self._turn()
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

    def _filled(self, x: torch.Tensor, how: str) -> SymmetricBuffers:
        """Return the next buffer, with x in it; x may have been written there to begin with."""
        half = self._turn()
        source = self._view(half, x.dtype, x.shape)
        if not (x.is_contiguous() and x.data_ptr() == source.data_ptr()):
            source.copy_(x)
        observe("reduce_scatter", self.group, source, how=how)
        return half

    @staticmethod
    def _view(half: SymmetricBuffers, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the beginning of a buffer."""
        return half.local[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _turn(self) -> SymmetricBuffers:
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
    """Return x contiguous, from an address that packs can be loaded from."""
    if x.is_contiguous() and x.data_ptr() % PACK_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class SequenceParallelComm:
    """The collectives of one group; see `create`."""

    def __init__(self, group: Group, arena: Arena | None, reason: str) -> None:
        self.group, self._arena, self._reason = group, arena, reason
        self._logged_overflow = False  # that a transfer is over the arena's size

    @property
    def way(self) -> Way:
        """The way that all ranks take."""
        return "torch.distributed" if self._arena is None else self._arena.way

    @staticmethod
    def plain(group: Group) -> SequenceParallelComm:
        """Return those that go through torch.distributed."""
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
        """Find the way that all ranks can take; all of them call it, with equal arguments.

        Args:
            max_bytes: of the wide side of a transfer; a wider one goes through torch.distributed.
            mode: "auto" takes the best way, "off" takes torch.distributed, "require" is for those
                who want multimem or nothing.
            tries: how often a probe tries a slot of the signal pad before it gives a peer up.
            limit: how often any collective does; 0 waits for ever. For debugging: `check` then
                makes the host wait for the device. A GPU traps where a peer is given up; on a CPU
                results are void from there on.

        Raises:
            ValueError: "require", and multimem cannot be taken; on all ranks, with the reason.
        """
        if group.size == 1 or mode == "off":
            comm = SequenceParallelComm(
                group, None, "one rank" if group.size == 1 else "--nvls off"
            )
        else:
            arena, reason = _find(group, memory, max_bytes, tries)
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
        """Return the way and why not a better one, in one line."""
        return f"{self.way} ({self._reason})" if self._reason else self.way

    def begin_step(self) -> None:
        """Say that the next collective is a step's first, a reduction."""
        if self._arena is not None:
            self._arena.begin_step()

    def check(self) -> None:
        """With a limit, say whether all peers came to the collectives so far.

        Raises:
            RuntimeError: one was given up; naming it.
        """
        if self._arena is not None:
            self._arena.check()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate x [n, ...] of every rank to [n * size, ...].

        The result may be memory of the arena, which peers write to again: it holds until this rank
        begins its next collective.
        """
        if self._arena is None or not self._takes(x.dtype, x.nbytes * self.group.size):
            return all_gather(x, self.group)
        return self._arena.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [n * size, ...] over the group and return this rank's [n, ...]."""
        if self._arena is None or not self._cuts(x.shape, x.dtype):
            return reduce_scatter(x, self.group)
        return self._arena.reduce_scatter(x)

    def all_gather_v(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Gather the first `rows[rank]` of every rank's x [n, h], one after the other, then zeros.

        The host does not read the numbers. They may be the plan's or computed on the device, and
        must be the same on all ranks, from 0 to n each.

        Args:
            rows: int32 [size], on the device.

        Returns:
            [n * size, h], memory of the arena as in `all_gather`.
        """
        if self._arena is None or not self._takes_rows(x, x.nbytes * self.group.size):
            return pack_rows(all_gather(x, self.group), rows)
        return self._arena.all_gather_v(x, rows)

    def reduce_scatter_v(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Sum x [n * size, h] over the group, whose rows stand as `all_gather_v` returns them, and
        return this rank's [n, h], zeros after its own rows."""
        if self._arena is None or not self._takes_rows(x, x.nbytes):
            return reduce_scatter(unpack_rows(x, rows), self.group)
        return self._arena.reduce_scatter_v(x, rows)

    def _takes_rows(self, x: torch.Tensor, wide_bytes: int) -> bool:
        """Whether the arena takes any rows of x [n, h]."""
        whole = x.ndim == 2 and x.shape[1] * x.element_size() % PACK_BYTES == 0
        return whole and self._takes(x.dtype, wide_bytes)

    def fuses(self, x: torch.Tensor) -> bool:
        """Whether `reduce_norm_gather` takes addends [n * size, h]; the same on all ranks."""
        return (
            self._arena is not None
            and x.shape[-1] <= MAX_FEATURES
            and self._takes_rows(x, x.nbytes)
            and self._cuts(x.shape, x.dtype)
        )

    def addends(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory [n * size, ...] for what `reduce_scatter` or `reduce_norm_gather` is given
        next, which then copies nothing; None where that goes through torch.distributed.

        No other collective may begin in between. A product may be written there at once: what
        peers read of this buffer was before the last gather, which has waited for them.
        """
        if self._arena is None or not self._cuts(shape, dtype):
            return None
        return self._arena.next_addends(shape, dtype)

    def _cuts(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether the arena takes x [n * size, ...] and cuts it between rows."""
        assert self._arena is not None
        full_bytes = math.prod(shape) * dtype.itemsize
        return shape[0] % self.group.size == 0 and self._takes(dtype, full_bytes)

    def _takes(self, dtype: torch.dtype, wide_bytes: int) -> bool:
        """See `Arena.takes`; say once that a transfer is over its size."""
        assert self._arena is not None
        arena_bytes = self._arena.nbytes
        if wide_bytes > arena_bytes and not self._logged_overflow:
            self._logged_overflow = True
            if self.group.rank == 0:
                logger.warning(
                    "sequence parallel collectives: a transfer of %d bytes is over the %d of the "
                    "symmetric memory: such ones go through torch.distributed",
                    wide_bytes,
                    arena_bytes,
                )
        return self._arena.takes(dtype, wide_bytes)

    def reduce_norm_gather(
        self, x: torch.Tensor, stream: torch.Tensor, norm: RowNorm
    ) -> torch.Tensor:
        """Reduce-scatter, add to the residual stream, normalise and all-gather, in one kernel.

        Args:
            x: [n * size, h], addends of the ranks, such that `fuses` holds.
            stream: [n, h] of this rank, contiguous, in x's dtype; the sum is added in place.
            norm: of the new stream, in fp32.

        Returns:
            Normalised rows of all ranks [n * size, h], memory of the arena as in `all_gather`.
        """
        assert self._arena is not None
        return self._arena.reduce_norm_gather(x, stream, norm)


def _find(
    group: Group, memory: SymmetricMemory, max_bytes: int, tries: int
) -> tuple[Arena | None, str]:
    """Return the arena of the best way that all ranks can take, and why not a better one."""
    problem = _first_problem(memory.problem(), group)
    if problem:
        return None, problem
    halves, problem = _exchanged(group, memory, max_bytes)
    if halves is None:
        return None, problem
    no_multicast = memory.multicast_problem()
    if not no_multicast and any(half.multicast == 0 for half in halves):
        no_multicast = "the ranks' devices are not in one multicast domain"
    no_multicast = _first_problem(no_multicast, group)
    if not no_multicast:
        no_multicast = _first_problem(_probed(Arena(group, halves, "multimem", tries=tries)), group)
        if not no_multicast:
            return Arena(group, halves, "multimem"), ""
        # A probe that failed may have left slots set: begin with pads of zeros.
        halves, problem = _exchanged(group, memory, max_bytes)
        if halves is None:
            return None, f"{no_multicast}; {problem}"
    problem = _first_problem(_probed(Arena(group, halves, "p2p", tries=tries)), group)
    if problem:
        return None, f"{no_multicast}; {problem}"
    return Arena(group, halves, "p2p"), no_multicast


def _exchanged(
    group: Group, memory: SymmetricMemory, max_bytes: int
) -> tuple[tuple[SymmetricBuffers, SymmetricBuffers] | None, str]:
    """Return two buffers of symmetric memory, or None and the reason, the same on all ranks."""
    size = max(-(-max_bytes // PACK_BYTES), PROBE_ELEMENTS * group.size) * PACK_BYTES
    pad_bytes = 4 * MAX_PROGRAMS * group.size
    locals_: list[torch.Tensor] = []
    halves: list[SymmetricBuffers] = []
    problem = ""
    # In two steps: a rank without memory must not leave the others waiting in an exchange.
    try:
        locals_ += [memory.allocate(size, pad_bytes) for _ in range(2)]
    except RuntimeError as error:
        problem = f"no symmetric memory of {2 * size:,} bytes: {_line(error)}"
    problem = _first_problem(problem, group)
    if problem:
        return None, problem
    try:
        halves += [memory.exchange(local, group) for local in locals_]
    except RuntimeError as error:
        problem = f"the ranks cannot map each other's memory: {_line(error)}"
    problem = _first_problem(problem, group)
    return (None, problem) if problem else ((halves[0], halves[1]), "")


def _line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _probed(arena: Arena) -> str:
    """Return what is wrong with a reduction and a gather of an arena; "" if nothing is."""
    group, device = arena.group, arena.status.device
    for dtype in (torch.float32, torch.bfloat16):
        numbers = torch.arange(PROBE_ELEMENTS * group.size, device=device) % 16 + group.rank
        addends = numbers.to(dtype)
        whole = arena.all_gather(arena.reduce_scatter(addends)).clone()
        expected = all_reduce(addends, group)
        late = int(arena.status)
        if late:
            return f"{arena.way}: rank {group.ranks[late - 1]} did not come to the probe"
        if not torch.allclose(whole.float(), expected.float(), rtol=2**-6, atol=0.0):
            return f"{arena.way}: the probe's sum is not that of torch.distributed"
    return ""


def _first_problem(problem: str, group: Group) -> str:
    """Return the problem of the first rank that has one, the same on all ranks; "" if none has."""
    assert group.handle is not None
    device = "cuda" if "nccl" in group.handle.name().lower() else "cpu"
    said = torch.zeros(REASON_BYTES, dtype=torch.uint8)
    raw = problem.encode()[:REASON_BYTES]
    said[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    for rank, row in enumerate(all_gather(said.unsqueeze(0).to(device), group).tolist()):
        text = bytes(row).rstrip(b"\0").decode(errors="ignore")
        if text:
            return f"rank {group.ranks[rank]}: {text}"
    return ""

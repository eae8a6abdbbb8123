# SPDX-License-Identifier: Apache-2.0
"""Gatherer: all-gathers blocks of weights before their use, into pool buffers or in place.

The first step gathers on demand and records the order in which every segment (forward, backward)
uses the blocks. The plan of the next step (`plan`) is compiled from this trace and followed as long
as the uses match it. After a mismatch the rest of the step gathers on demand, the mismatch is
counted, and the step after it gets a new plan. A plan decides only the time of an all-gather, never
its contents, so results do not depend on it.

Two kinds of blocks are gathered:

- stored in shards: unsharded in a pool buffer and resharded again, within a budget of bytes;
- stored whole, with one range updated by each rank's optimizer: gathered in place, once a step.

A gatherer has blocks of one kind and a plan of its own. A model with both kinds, as under
generalized tensor parallelism, has two gatherers, so unsharding a block of one kind never reshards
a block of the other.

The ranks that own the shards of a block encode them in its gather format (`gather_format`), once
after every optimizer step. The encoded shards are all-gathered, and then decoded into the unsharded
buffer, or copied there in quantized form for a kernel that multiplies in this format. Formats that
scale by a weight's amax get it from one all-reduce per shard group, for all its changed blocks.
With 1-D scale blocks, forward and backward gather a weight in different formats: each direction is
a block of its own (`BucketBlock.directions`), encoded, gathered and resharded when it is used.

If the outer ranks own different ranges of a shard that they all store (hybrid sharding with a
sharded optimizer, replicas of weights over gtp), an all-gather has two stages: over the outer
ranks, for a whole bucket, once after every optimizer step; then over the shard group of the block.

`BufferPool` hands out flat buffers for unsharded weights and for gradients in reduction. A buffer
belongs to its user from `acquire` to `release`. Free buffers are kept by size and dtype, so a
training run allocates only in its first steps. On a GPU a released buffer carries an event: the
stream of the next user waits until the last reader has run. With `poison`, buffers are filled with
NaN by `acquire` and again by `release`. A read before the all-gather or after the release then
shows in the loss. Poisoning writes in place, so autograd's version check raises if backward reads a
saved view.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron.core.comm.collectives import (
    Pending,
    all_gather,
    all_gather_async,
    all_reduce,
    poison_,
)
from megatron.core.comm.symmetric_memory import RegisteredMemory
from megatron.core.device import Event, current_stream, new_event, new_stream, on_stream
from megatron.core.process_groups import Group
from megatron.core.weight_gather.bucket import Bucket, BucketBlock
from megatron.core.weight_gather.gather_format import shard_amax
from megatron.core.weight_gather.plan import GatherPlan, Trace, compile_plan, max_adjacent_bytes

#: Size classes exceed a requested size by at most 1/64, in multiples of _ALIGNMENT elements.
_STEPS_PER_OCTAVE_LOG2 = 6
_ALIGNMENT = 16


@dataclass
class _Buffer:
    """Storage [size class], and the event after which it may be reused."""

    data: torch.Tensor
    released: Event


class BufferPool:
    """A pool of flat buffers on one device.

    Args:
        device: of the buffers.
        poison: fill buffers with NaN (integers: the largest value) in `acquire` and in `release`.
        memory: allocator of the buffers; None is torch's allocator.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        poison: bool = False,
        memory: RegisteredMemory | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.poison, self._memory = poison, memory
        self.live_bytes = 0
        self.peak_bytes = 0
        self._free: dict[tuple[int, torch.dtype], list[_Buffer]] = {}
        # Keyed by id(tensor). The tensor is kept here too: Python reuses the id of a dead object.
        self._in_use: dict[int, tuple[torch.Tensor, _Buffer]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers, in use or free, in their rounded sizes."""
        free_buffers = [buffer for free in self._free.values() for buffer in free]
        used_buffers = [buffer for _, buffer in self._in_use.values()]
        return sum(b.data.numel() * b.data.element_size() for b in free_buffers + used_buffers)

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised flat tensor [numel], in use until `release`.

        Call this on the stream that first writes the buffer: it waits for the last user's work.
        """
        free = self._free.get((size_class(numel), dtype))
        if free:
            buffer = free.pop()
            # Device-side wait: the buffer's last readers may still be running on another stream.
            current_stream(self.device).wait_event(buffer.released)
        else:
            data = self._allocated(size_class(numel), dtype)
            buffer = _Buffer(data, new_event(self.device))
        if self.poison:
            poison_(buffer.data)
        tensor = buffer.data[:numel]
        self._in_use[id(tensor)] = (tensor, buffer)
        self.live_bytes += tensor.numel() * tensor.element_size()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return tensor

    def _allocated(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._memory is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self._memory.empty(numel, dtype)

    def release(self, tensor: torch.Tensor) -> None:
        """Return a buffer to the pool; call this on the stream of its last reader.

        Args:
            tensor: the tensor that `acquire` returned, not a view of it.

        Raises:
            ValueError: the tensor is not in use: released before, or from another pool.
        """
        entry = self._in_use.pop(id(tensor), None)
        if entry is None:
            raise ValueError(
                f"this tensor of {tensor.numel()} elements is not a buffer in use of this "
                "pool: release each buffer once, by the tensor that acquire() returned"
            )
        buffer = entry[1]
        if self.poison:
            poison_(buffer.data)
        # The host frees the buffer before the device has read it. The event orders the next
        # user's writes, which may be on another stream, after the reads of this stream.
        buffer.released.record(current_stream(self.device))
        self._free.setdefault((buffer.data.numel(), buffer.data.dtype), []).append(buffer)
        self.live_bytes -= tensor.numel() * tensor.element_size()

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        self.peak_bytes = self.live_bytes

    def trim(self) -> None:
        """Return the memory of all free buffers to the allocator."""
        for free in self._free.values():
            for buffer in free:
                # The allocator knows nothing of streams that have read the buffer.
                buffer.released.synchronize()
        self._free.clear()

    def take_free_buffers(self) -> list[torch.Tensor]:
        """Remove the free buffers from the pool and return them: their memory is not reused.

        A buffer that was used while a CUDA graph was captured belongs to that graph: replays write
        it, and its event was recorded in the graph, so no stream outside may wait for it.

        Raises:
            ValueError: a buffer is in use.
        """
        if self._in_use:
            raise ValueError(
                f"{len(self._in_use)} buffers of the pool are in use: release them first"
            )
        buffers = [buffer.data for free in self._free.values() for buffer in free]
        self._free.clear()
        return buffers


def size_class(numel: int) -> int:
    """Return `numel` rounded up to a size of pool buffers, by at most 1/64 or 15 elements."""
    step = max(_ALIGNMENT, 1 << max(0, numel.bit_length() - 1 - _STEPS_PER_OCTAVE_LOG2))
    return -(-numel // step) * step


#: Segments of a training step, and of a forward without backward.
FORWARD, BACKWARD, EVALUATION = "forward", "backward", "evaluation"


def segment_name(kind: str, model_chunk: int) -> str:
    """Return the name of a segment of one model chunk: "forward", "forward.1" …"""
    return kind if model_chunk == 0 else f"{kind}.{model_chunk}"


@dataclass
class _Gathered:
    """An unsharded block: its all-gather is in flight while `pending` is not None.

    Args:
        unsharded: the buffer of the unsharded weights.
        pending: the all-gather; None once it has been waited for.
        encoded: the buffer of the encoded shards, until they are decoded.
    """

    unsharded: torch.Tensor
    pending: Pending | None
    encoded: torch.Tensor | None = None


@dataclass
class _Encoded:
    """This rank's shard of a block in its gather format, for one direction.

    Args:
        block: the block of this direction.
        bytes: [encoded_bytes] uint8.
        version: torch's version counter of the block's storage when it was encoded; -1 before that.
        is_stale: an optimizer step has written the shard since it was encoded.
    """

    block: BucketBlock
    bytes: torch.Tensor
    version: int = -1
    is_stale: bool = False

    @property
    def is_current(self) -> bool:
        """Whether `bytes` encode the present values of the shard."""
        return not self.is_stale and self.version == self.block.data._version


@dataclass
class GatherCounts:
    """Counters of a gatherer.

    Args:
        gathers: all-gathers started.
        prefetched: all-gathers started before the block was used.
        on_demand: all-gathers started at a use without a matching plan.
        mismatches: steps whose uses differed from the plan.
        encodes: encodings of shards, counted per direction.
        peak_bytes: peak bytes of pool buffers in use, for unsharded weights and encoded shards; 0
            for blocks stored whole.
    """

    gathers: int = 0
    prefetched: int = 0
    on_demand: int = 0
    mismatches: int = 0
    encodes: int = 0
    peak_bytes: int = 0


@dataclass
class _RunningStep:
    """The running step: its segments, its plan if there is one, and the position in the plan."""

    segments: tuple[str, ...]
    plan: GatherPlan | None
    cursor: int = 0
    segment: str | None = None
    trace: list[int] = field(default_factory=list)
    traces: dict[str, Trace] = field(default_factory=dict)


class Gatherer:
    """Unshard the blocks of some buckets of a store.

    Args:
        buckets: buckets that are all stored in shards, or all stored whole; buckets of a single
            rank are not gathered.
        prefetch: start all-gathers before their blocks are used; False starts each at its use.
        prefetch_bytes: bytes to prefetch beyond the next block.
        poison: fill unused buffers with NaN.
        register_buffers: gather into buffers registered with NCCL, see `RegisteredMemory`.

    Attributes:
        blocks: the blocks of each direction, by their number in plans and traces.
        reshards: blocks are stored in shards and resharded after use; False gathers in place.
        budget: limit on the bytes of gathered blocks: `unsharded_budget`, plus `prefetch_bytes`
            with `prefetch`. With `prefetch`, a plan of gtp weights raises it to fit any two
            consecutive weights plus `prefetch_bytes`. Only a single block in use may exceed it.
        counts: see `GatherCounts`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        prefetch: bool,
        prefetch_bytes: int = 0,
        poison: bool = False,
        register_buffers: bool = False,
    ) -> None:
        self.buckets = {bucket.index: bucket for bucket in buckets}
        blocks = [block for bucket in buckets for block in bucket.blocks]
        self.blocks = [directed for block in blocks for directed in block.directions]
        self.prefetch, self.prefetch_bytes = prefetch, prefetch_bytes
        device = buckets[0].data.device
        memory = None
        if register_buffers:
            memory = RegisteredMemory((bucket.groups.gather for bucket in buckets), device)
        self.pool = BufferPool(device, poison=poison, memory=memory)
        self.stream = new_stream(device)
        self.counts = GatherCounts()
        self.reshards = any(bucket.sharded for bucket in buckets)
        self.sizes = [gathered_bytes(block) for block in self.blocks]
        self.budget = sum(self.sizes)
        if self.reshards:
            self.budget = unsharded_budget(buckets, prefetch=prefetch) + prefetch_bytes * prefetch
        self._gathered: dict[int, _Gathered] = {}
        # All-gathers over the outer ranks by number of the bucket: in flight, and not yet started.
        self._outer: dict[int, Pending] = {}
        self._outer_stale: set[int] = set()
        self._encoded: dict[int, _Encoded] = {}
        # Largest magnitudes by name of the block, until the next update. All ranks of a shard
        # group hold the same entries, so they agree on whether the all-reduce runs.
        self._amax: dict[str, torch.Tensor] = {}
        self._current: BucketBlock | None = None
        self._traces: dict[str, Trace] = {}
        self._plans: dict[tuple[str, ...], GatherPlan] = {}
        self._running_step = _RunningStep((), None)
        for index, block in enumerate(self.blocks):
            block.gatherer, block.index = self, index

    @property
    def max_unsharded_bytes(self) -> int:
        """Maximum bytes of unsharded weights at a time, as far as the order of use is known."""
        shared = [i for i, block in enumerate(self.blocks) if not block.bucket.single_rank]
        return min(self.budget, sum(self.sizes[i] for i in shared)) if self.reshards else 0

    @property
    def current_plan(self) -> GatherPlan | None:
        """The plan of this step, or of the last step; None if it gathers on demand."""
        return self._running_step.plan

    @property
    def in_flight(self) -> list[int]:
        """The blocks whose all-gather is in flight, in the order of their start; then the blocks
        whose shards are being gathered over the outer ranks."""
        started = [i for i, g in self._gathered.items() if g.pending is not None]
        outer = [block.index for i in self._outer for block in self.buckets[i].blocks]
        return started + [i for i in outer if i not in started]

    # --- a step -----------------------------------------------------------------------------------

    def begin(self, segments: Sequence[str]) -> None:
        """Start a step that runs these segments, and the all-gathers of its first blocks."""
        self._leave_segment()
        program = tuple(segments)
        if not self.reshards:  # blocks stay gathered, so later runs of a segment gather nothing
            program = tuple(dict.fromkeys(program))
        # Shards are written on the current stream and read by all-gathers on the gather stream.
        self.stream.wait_stream(current_stream(self.pool.device))
        plan = self._plan(program)
        self._running_step = _RunningStep(program, plan)
        # All-gathers that the end of the last step started stay; all other blocks make room.
        early = set(self.in_flight if plan is None else plan.prologue)
        for index in [i for i in self._gathered if i not in early] if self.reshards else ():
            self._reshard(index)
        self._start_stale_outer_all_gathers()
        if plan is not None:
            self._prefetch(plan.prologue)

    def enter_segment(self, name: str) -> None:
        """Declare that segment `name` runs from now on."""
        if self._current is not None and self.reshards:
            self._current.ready = False
        self._close_trace()
        self._running_step.segment = name

    def prefetch_segment(self, name: str) -> None:
        """Start the first all-gathers of a segment without waiting for them: of its first block, or
        of all its blocks if they are stored whole. A plan starts the all-gathers of sharded blocks
        by itself.

        Nothing is started with `prefetch` off, or for a segment that no step has run yet.
        """
        trace = self._traces.get(name, ()) if self.prefetch else ()
        if not self.reshards:
            self._prefetch([index for index in trace if not self.blocks[index].ready])
        elif self._running_step.plan is None:
            num_bytes = sum(self.sizes[i] for i in self._gathered)
            self._prefetch([i for i in trace[:1] if num_bytes + self.sizes[i] <= self.budget])

    def finish(self) -> None:
        """End a step: wait for all-gathers in flight, reshard all blocks, and keep the traces of
        the step for the next plan."""
        self._leave_segment()
        self._finish_all()
        for name, trace in self._running_step.traces.items():
            # The trace of blocks stored whole is empty while all of them are still gathered. The
            # previous trace stays: the step after the next update gathers them again.
            previous = self._traces.get(name)
            if previous is None or (trace and trace != previous):
                self._traces[name] = trace
                self._plans.clear()  # any program may contain this segment

    def check_order(self) -> None:
        """Check that all ranks of a shard group used the blocks in the same order in this step.

        Raises:
            ValueError: the orders differ, so all-gathers of different blocks were matched.
        """
        order = repr(sorted(self._running_step.traces.items())).encode()
        # Python's hash() differs between processes. Seven bytes fit into an int64.
        digest = int.from_bytes(hashlib.blake2b(order, digest_size=7).digest())
        local_digest = torch.tensor([digest], device=self.pool.device)
        gather_groups = [bucket.groups.gather for bucket in self.buckets.values()]
        groups = {group.name: group for group in gather_groups}
        orders = [all_gather(local_digest, group) for _, group in sorted(groups.items())]
        if any((order != digest).any() for order in orders):
            raise ValueError(
                "the ranks that share weights needed them in different orders in this step: "
                f"here {self._running_step.traces}; every rank must run the same layers"
            )

    def abort(self) -> None:
        """Leave a step that failed: wait for all-gathers in flight and reshard all blocks. Its
        traces are dropped."""
        self._leave_segment()
        self._finish_all()
        self._running_step = _RunningStep((), None)

    def unshard(self, block: BucketBlock) -> None:
        """Gather a block if needed and make it readable: on a GPU the current stream waits for the
        all-gather, on a CPU the host does. Other blocks may be resharded, the previous one too."""
        # The previous block stays in memory, but is no longer ready: its next use must come
        # through this method, which advances the plan and records the trace.
        if self._current is not None and self.reshards:
            self._current.ready = False
        again = self._current is block and block.index in self._gathered
        self._current = block
        running = self._running_step
        if not running.trace or running.trace[-1] != block.index:
            running.trace.append(block.index)
        if not again and not self._follow(block):
            self._all_gather_on_demand(block)
        self._finish_all_gather(block.index)
        block.ready = True

    # --- between steps ----------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Drop all unsharded weights, because the optimizer has written the owned ranges."""
        self._leave_segment()
        self._finish_all()
        # The next all-gathers read the shards after the optimizer, on the current stream, has
        # written them.
        self.stream.wait_stream(current_stream(self.pool.device))
        self._gathered.clear()
        for block in self.blocks:
            if block.gather_format is not None and block.trainable:
                self._amax.pop(block.name, None)
                if block.index in self._encoded:
                    self._encoded[block.index].is_stale = True
        for bucket in self.buckets.values():
            if bucket.single_rank or not bucket.trainable:
                continue  # no other rank has written it
            for block in bucket.blocks:
                block.ready = False
            if bucket.outer_shards:
                self._outer_stale.add(bucket.index)

    def is_stale(self, block: BucketBlock) -> bool:
        """Return whether this rank's storage lacks updates that other ranks have made."""
        bucket = block.bucket
        return bucket.index in self._outer_stale or not (bucket.sharded or block.ready)

    def prefetch_next_step(self) -> None:
        """Start the all-gathers of the next step's first blocks without waiting for them."""
        plan = self._plan(self._running_step.segments)
        if plan is not None:
            indices = plan.prologue
        else:  # no trace yet: the first declared block that is not gathered
            blocks = [block for bucket in self.buckets.values() for block in bucket.blocks]
            indices = tuple(b.index for b in reversed(blocks) if not b.ready)[:1]
        # The all-gather of a block waits for the all-gather of its bucket over the outer ranks,
        # and that wait would block here. So a bucket whose outer all-gather starts in this loop
        # leaves the all-gathers of all its blocks to the next step.
        stale = frozenset(self._outer_stale)
        for index in indices:
            bucket = self.blocks[index].bucket
            if bucket.index in self._outer_stale:
                self._start_outer_all_gather(bucket)
            elif bucket.index not in stale:
                self._prefetch((index,))

    def gather_all(self) -> None:
        """All-gather every block in the order of forward and wait (`force_sync`). Blocks stored in
        shards are resharded immediately; the others stay gathered."""
        self._start_stale_outer_all_gathers()
        # Buckets are in the order of backward, so the reverse is the order of forward.
        for block in reversed(self.blocks):
            if not block.ready and block.index not in self._gathered:
                self._start_all_gather(block)
                if self.reshards:
                    self._reshard(block.index)
        self.wait()
        for index in self._gathered:
            self.blocks[index].ready = not self.reshards

    def wait(self) -> None:
        """Wait for the all-gathers in flight; their blocks stay unsharded."""
        for index in self._gathered:
            self._finish_all_gather(index)
        for index in list(self._outer):
            self._outer.pop(index).wait()

    def sync_storage(self) -> None:
        """Wait until this rank stores the latest values, also of ranges that others update."""
        if not self.reshards:
            self.gather_all()
            return
        self._start_stale_outer_all_gathers()
        self.wait()

    # --- inside -----------------------------------------------------------------------------------

    def _plan(self, program: tuple[str, ...]) -> GatherPlan | None:
        # No plan before every segment has a trace, nor if all traces are empty: a model chunk
        # without weights, or blocks stored whole that stay gathered until the next update.
        if any(name not in self._traces for name in program):
            return None
        if not any(self._traces[name] for name in program):
            return None
        if program not in self._plans:
            if self.reshards and self.prefetch and all(b.gtp for b in self.buckets.values()):
                adjacent_bytes = max_adjacent_bytes(self._traces, program, sizes=self.sizes)
                self.budget = max(self.budget, adjacent_bytes + self.prefetch_bytes)
            self._plans[program] = compile_plan(
                self._traces,
                program,
                sizes=self.sizes,
                budget=self.budget,
                prefetch_bytes=self.prefetch_bytes,
                prefetch=self.prefetch,
            )
        return self._plans[program]

    def _follow(self, block: BucketBlock) -> bool:
        """Run the plan's entry for this use; False if the plan does not match it."""
        running = self._running_step
        if running.plan is None or running.segment is None:
            return False
        uses = running.plan.uses
        if running.cursor >= len(uses) or uses[running.cursor].block != block.index:
            self.counts.mismatches += 1
            running.plan = None
            return False
        use = uses[running.cursor]
        running.cursor += 1
        # Reshard first: the all-gathers reuse these buffers, and together they stay in the budget.
        for index in use.reshard if self.reshards else ():
            self._reshard(index)
        self._prefetch(use.all_gather)
        return True

    def _all_gather_on_demand(self, block: BucketBlock) -> None:
        """Gather a block without a plan, resharding the blocks that were gathered first."""
        if block.index in self._gathered:
            return
        self.counts.on_demand += 1
        # Outside a step no `begin` has ordered the gather stream after the shards' last writer.
        self.stream.wait_stream(current_stream(self.pool.device))
        if self.reshards:
            num_bytes = sum(self.sizes[i] for i in self._gathered)
            for index in list(self._gathered):
                if num_bytes + self.sizes[block.index] <= self.budget:
                    break
                self._reshard(index)
                num_bytes -= self.sizes[index]
        self._start_all_gather(block)

    def _prefetch(self, blocks: Sequence[int]) -> None:
        for index in blocks:
            if index not in self._gathered:
                block = self.blocks[index]
                self.counts.prefetched += block is not self._current
                self._start_all_gather(block)

    def _start_all_gather(self, block: BucketBlock) -> None:
        """Start a block's all-gather on the gather stream."""
        bucket = block.bucket
        # The pool buffers are acquired on the gather stream, which writes them first.
        with on_stream(self.stream):
            self._finish_outer_all_gather(bucket)
            unsharded, shard, encoded = block.data, block.shard, None
            if self.reshards:
                unsharded = self.pool.acquire(*block.buffer_spec)
            if block.gather_format is not None:
                shard = self._encode(block)
                size = len(shard) * bucket.group.size
                encoded = self.pool.acquire(size, torch.uint8)
            output = unsharded if encoded is None else encoded
            pending = all_gather_async(shard, bucket.groups.gather, out=output)
        self._gathered[block.index] = _Gathered(unsharded, pending, encoded)
        self.counts.gathers += 1
        if self.reshards:
            if not block.keeps_quantized:
                block.attach(unsharded)
            self.counts.peak_bytes = max(self.counts.peak_bytes, self.pool.live_bytes)

    def _finish_all_gather(self, index: int) -> None:
        """Make the current stream wait for a block's all-gather, and decode its output."""
        gathered, block = self._gathered[index], self.blocks[index]
        if gathered.pending is None:
            return
        # The current stream waits, not the host: later kernels read the unsharded weights.
        gathered.pending.wait()
        gathered.pending = None
        if gathered.encoded is not None:
            block.decode(gathered.encoded, gathered.unsharded, amax=self._amax.get(block.name))
            # The encoded buffer is free after the decoding kernels of the current stream.
            self.pool.release(gathered.encoded)
            gathered.encoded = None

    def _encode(self, block: BucketBlock) -> torch.Tensor:
        """Return this rank's shard of a block in its gather format, encoded again if the weights
        have changed."""
        assert block.gather_format is not None
        if block.index not in self._encoded:
            shard = torch.empty(block.encoded_bytes, dtype=torch.uint8, device=block.data.device)
            self._encoded[block.index] = _Encoded(block, shard)
        encoded = self._encoded[block.index]
        if encoded.is_current:  # the same bytes serve all gathers of a step
            return encoded.bytes
        if block.gather_format.needs_amax and block.name not in self._amax:
            self._reduce_amax(block.bucket.groups.gather)
        shard = block.shard.detach().view(-1, block.columns)
        block.gather_format.encode(shard, amax=self._amax.get(block.name), out=encoded.bytes)
        encoded.version, encoded.is_stale = block.data._version, False
        self.counts.encodes += 1
        return encoded.bytes

    def _reduce_amax(self, group: Group) -> None:
        """Reduce the largest magnitudes of a group's changed blocks over its ranks.

        This is collective: all ranks of the group call it at the same block.
        """
        buckets = [b for b in self.buckets.values() if b.groups.gather is group]
        missing = [b for bucket in buckets for b in bucket.blocks if b.name not in self._amax]
        for bucket in {block.bucket.index: block.bucket for block in missing}.values():
            self._finish_outer_all_gather(bucket)
        # One all-reduce for all blocks: a small collective costs its latency.
        largest = torch.stack([shard_amax(block.shard) for block in missing])
        all_reduce(largest, group, op="max", out=largest)
        self._amax |= zip((block.name for block in missing), largest, strict=True)

    def _finish_outer_all_gather(self, bucket: Bucket) -> None:
        """Wait for the outer ranks' updates of a bucket's shards."""
        if bucket.index in self._outer_stale:
            self._start_outer_all_gather(bucket)
        if bucket.index in self._outer:
            self._outer.pop(bucket.index).wait()

    def _start_outer_all_gather(self, bucket: Bucket) -> None:
        """Start the all-gather of a bucket's shards over the outer ranks."""
        self._outer_stale.discard(bucket.index)
        shards = bucket.data if bucket.sharded else bucket.blocks[0].shard
        with on_stream(self.stream):
            pending = all_gather_async(bucket.owned, bucket.outer, out=shards)
        self._outer[bucket.index] = pending

    def _start_stale_outer_all_gathers(self) -> None:
        for bucket in reversed(self.buckets.values()):
            if bucket.index in self._outer_stale:
                self._start_outer_all_gather(bucket)

    def _reshard(self, index: int) -> None:
        """Free the unsharded weights of a block; its buffers return to the pool."""
        gathered = self._gathered.pop(index)
        if gathered.pending is not None:
            # Never used. Its buffer may be reused only after the all-gather has written it.
            gathered.pending.wait()
        if gathered.encoded is not None:
            self.pool.release(gathered.encoded)
        self.blocks[index].reshard()
        self.pool.release(gathered.unsharded)

    def _finish_all(self) -> None:
        """Wait for all all-gathers in flight and reshard the blocks that are stored in shards."""
        for index, gathered in list(self._gathered.items()):
            if self.reshards:
                self._reshard(index)
            elif gathered.pending is not None:
                self._finish_all_gather(index)
                self.blocks[index].ready = True
        for index in list(self._outer):
            self._outer.pop(index).wait()

    def _close_trace(self) -> None:
        running = self._running_step
        if running.segment is not None and (running.trace or running.segment not in running.traces):
            running.traces[running.segment] = tuple(running.trace)
        running.segment, running.trace = None, []

    def _leave_segment(self) -> None:
        self._close_trace()
        if self._current is not None and self.reshards:
            self._current.ready = False
        self._current = None


def gathered_bytes(block: BucketBlock) -> int:
    """Return the bytes of pool buffers of an all-gather: the unsharded block, and the encoded
    shards if it has a gather format."""
    numel, dtype = block.buffer_spec
    encoded_bytes = (
        0 if block.gather_format is None else block.encoded_bytes * block.bucket.group.size
    )
    return numel * dtype.itemsize + encoded_bytes


def unsharded_budget(buckets: Sequence[Bucket], *, prefetch: bool) -> int:
    """Return the budget in bytes of unsharded weights at a time, before the order of use is known.

    It covers the blocks outside units and the largest unit, with its dense weights and its experts.
    With `prefetch` it covers another unit. For weights sharded over gtp it covers the largest
    weight, or with `prefetch` the largest pair of weights that are stored one after the other.
    """
    shared = [bucket for bucket in buckets if not bucket.single_rank]
    if all(bucket.gtp for bucket in shared):
        blocks = [block for bucket in shared for block in bucket.blocks]
        sizes = [max(map(gathered_bytes, block.directions)) for block in blocks]
        pairs = [a + b for a, b in itertools.pairwise(sizes)] if prefetch else []
        return max([*sizes, *pairs], default=0)
    root = 0
    largest = {False: 0, True: 0}
    for bucket in shared:
        (block,) = bucket.blocks
        if bucket.unit is None:
            root += block.unsharded_bytes
        else:
            largest[bucket.expert] = max(largest[bucket.expert], block.unsharded_bytes)
    return root + (1 + prefetch) * sum(largest.values())

# SPDX-License-Identifier: Apache-2.0
"""Gatherer: unshards blocks of weights just before use, in buffers leased from a pool.

The first step gathers on demand and records which block every segment (forward, backward) needs,
and when. The next step's plan (`plan`) is compiled from this trace and followed as long as the
requests match it. After a mismatch everything is gathered on demand until the step ends, the
mismatch is counted, and the step after that gets a new plan. A plan changes when a block is
gathered, never what is gathered, so results do not depend on it.

Two kinds of blocks are gathered:

- stored in shards: gathered into a leased buffer and released again, within a budget of bytes;
- stored whole, with one range updated by each rank's optimizer: gathered in place, once a step.

A gatherer has blocks of one kind and follows a plan of its own: where a model has both, as under
generalized tensor parallelism, reading a weight of one kind never ends the lease of another.

A block with a wire format (`wire`) is encoded by the ranks that hold its shards, once after every
optimizer step; the encoded shards are gathered, and decoded into the leased buffer where the block
is needed, or copied there as they are, for a kernel that multiplies in that format. A largest
magnitude that a format scales by is found for all blocks by one all-reduce.
With 1-D scale blocks a weight has two planes, one for forward and one for backward, each of which
is encoded, gathered and released by itself, and only where it is needed.

Where the outer ranks own different ranges of the same shards (hybrid sharding with a sharded
optimizer, replicas of weights over gtp) a gather has two stages: over the outer ranks, once after
every optimizer step and of a whole bucket, then over the ranks that share the block.

`BufferPool` leases flat buffers for gathered weights and for gradients in flight. A lease belongs
to its holder until it is given back; no storage is leased twice at a time. Buffers are kept by size
and dtype, so a training run allocates only in its first steps. On a GPU a returned buffer carries
an event: the stream of its next holder waits until its last reader has run. With `poison`, buffers
hold NaN when they are leased and again when they are given back, so a read before the gather or
after the release shows in the loss, and autograd refuses a saved view.
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
from megatron.core.comm.nccl_memory import RegisteredMemory
from megatron.core.device import Event, current_stream, new_event, new_stream, on_stream
from megatron.core.process_groups import Group
from megatron.core.weight_gather.bucket import Bucket, BucketBlock
from megatron.core.weight_gather.plan import GatherPlan, Trace, bytes_of_neighbours, compile_plan
from megatron.core.weight_gather.wire import shard_amax

#: A size class is at most 1/64 above what was asked for, and a multiple of so many elements.
_STEPS_PER_OCTAVE_LOG2 = 6
_ALIGNMENT = 16


@dataclass
class _Buffer:
    """Storage [size class], and the event after which it may be written again."""

    data: torch.Tensor
    released: Event


class BufferPool:
    """Lease flat buffers on one device.

    Args:
        device: where they are.
        poison: fill buffers with NaN (integers: their largest value) at lease and at release.
        memory: where they are allocated; None is torch's allocator.
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
        # The leased tensor is kept with its buffer: its id stays its own while the lease lasts.
        self._leased: dict[int, tuple[torch.Tensor, _Buffer]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers, leased or kept for the next lease, sizes rounded up."""
        kept = [buffer for free in self._free.values() for buffer in free]
        leased = [buffer for _, buffer in self._leased.values()]
        return sum(b.data.numel() * b.data.element_size() for b in kept + leased)

    def lease(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor [numel] with no defined content, until `release`; call it where the
        current stream writes it first, which waits for the last holder's work."""
        free = self._free.get((size_class(numel), dtype))
        if free:
            buffer = free.pop()
            current_stream(self.device).wait_event(buffer.released)
        else:
            data = self._allocated(size_class(numel), dtype)
            buffer = _Buffer(data, new_event(self.device))
        if self.poison:
            poison_(buffer.data)
        tensor = buffer.data[:numel]
        self._leased[id(tensor)] = (tensor, buffer)
        self.live_bytes += tensor.numel() * tensor.element_size()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return tensor

    def _allocated(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._memory is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self._memory.empty(numel, dtype)

    def release(self, tensor: torch.Tensor) -> None:
        """Give a lease back; call it where the current stream waits for the last reader.

        Args:
            tensor: what `lease` returned, itself and not a view of it.

        Raises:
            ValueError: the tensor is not leased: given back before, or never this pool's.
        """
        found = self._leased.pop(id(tensor), None)
        if found is None:
            raise ValueError(
                f"this tensor of {tensor.numel()} elements is not leased from the pool: release "
                "each lease once, by the tensor that lease() returned"
            )
        buffer = found[1]
        if self.poison:
            poison_(buffer.data)
        buffer.released.record(current_stream(self.device))
        self._free.setdefault((buffer.data.numel(), buffer.data.dtype), []).append(buffer)
        self.live_bytes -= tensor.numel() * tensor.element_size()

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        self.peak_bytes = self.live_bytes

    def trim(self) -> None:
        """Give the memory of all buffers that nobody leases back to the allocator."""
        for free in self._free.values():
            for buffer in free:
                buffer.released.synchronize()
        self._free.clear()

    def detach(self) -> list[torch.Tensor]:
        """Hand over the buffers that nobody leases: no later lease gets their memory.

        A buffer that was leased while a CUDA graph was captured belongs to that graph: replays
        write it, and nothing outside may wait for the event that it carries.

        Raises:
            ValueError: something is leased.
        """
        if self._leased:
            raise ValueError(
                f"{len(self._leased)} buffers are leased from the pool: release them first"
            )
        found = [buffer.data for free in self._free.values() for buffer in free]
        self._free.clear()
        return found


def size_class(numel: int) -> int:
    """Return `numel` rounded up to the size in which buffers are kept, at most 1/64 or 15 more."""
    step = max(_ALIGNMENT, 1 << max(0, numel.bit_length() - 1 - _STEPS_PER_OCTAVE_LOG2))
    return -(-numel // step) * step


#: Segments of a training step, and of a forward without backward.
FORWARD, BACKWARD, EVALUATION = "forward", "backward", "evaluation"


def segment_name(kind: str, part: int) -> str:
    """Return the name of what runs through one model chunk: "forward", "forward.1" …"""
    return kind if part == 0 else f"{kind}.{part}"


@dataclass
class _Gathered:
    """A block's gather: under way while it is pending, else done."""

    whole: torch.Tensor
    pending: Pending | None
    encoded: torch.Tensor | None = None


@dataclass
class _Encoded:
    """This rank's shard of a block in its wire format: of one plane, if it has two.

    Args:
        bytes: [wire_bytes] uint8.
        version: of the block's storage when it was encoded, which counts writes; -1 is never.
        is_stale: ranks that own the shard have written it since it was encoded.
    """

    block: BucketBlock
    bytes: torch.Tensor
    version: int = -1
    is_stale: bool = False

    @property
    def is_current(self) -> bool:
        """Whether `bytes` are those of the shard as it is."""
        return not self.is_stale and self.version == self.block.data._version


@dataclass
class GatherCounts:
    """What happened since the counts were made.

    Args:
        gathers: that were started.
        prefetched: of them, started before the block was needed.
        on_demand: needs that no plan foresaw.
        mismatches: steps in which something else was needed than planned.
        encodes: of blocks into their wire format, of each plane.
        peak_bytes: most bytes of leased weights at a time.
    """

    gathers: int = 0
    prefetched: int = 0
    on_demand: int = 0
    mismatches: int = 0
    encodes: int = 0
    peak_bytes: int = 0


@dataclass
class _Program:
    """The step under way: its plan, if there is one, and how far it has come."""

    segments: tuple[str, ...]
    plan: GatherPlan | None
    cursor: int = 0
    segment: str | None = None
    trace: list[int] = field(default_factory=list)
    traces: dict[str, Trace] = field(default_factory=dict)


class Gatherer:
    """Gather the blocks of some buckets of a store.

    Args:
        buckets: all stored in shards, or none of them; those that are alone stay as they are.
        prefetch: gather ahead of need; False gathers when a block is needed.
        ahead: bytes gathered ahead beyond the next block.
        poison: fill unused buffers with NaN.
        registers: gather to buffers that NCCL has registered, see `RegisteredMemory`.

    Attributes:
        blocks: by their number in plans and traces, each plane of them.
        budget: bytes that leased weights may take: two units, the weights outside units, `ahead`;
            where each weight is gathered by itself over gtp, two neighbours in the order of use and
            `ahead`.
        counts: see `GatherCounts`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        prefetch: bool,
        ahead: int = 0,
        poison: bool = False,
        registers: bool = False,
    ) -> None:
        self.buckets = {bucket.index: bucket for bucket in buckets}
        blocks = [block for bucket in buckets for block in bucket.blocks]
        self.blocks = [plane for block in blocks for plane in block.planes]
        self.prefetch, self.ahead = prefetch, ahead
        device = buckets[0].data.device
        memory = None
        if registers:
            memory = RegisteredMemory((bucket.groups.gather for bucket in buckets), device)
        self.pool = BufferPool(device, poison=poison, memory=memory)
        self.stream = new_stream(device)
        self.counts = GatherCounts()
        self.leases = any(bucket.sharded for bucket in buckets)
        self.sizes = [gathered_bytes(block) for block in self.blocks]
        self.budget = sum(self.sizes)
        if self.leases:
            self.budget = bytes_leased(buckets, prefetch=prefetch) + ahead * prefetch
        self._gathered: dict[int, _Gathered] = {}
        # Gathers over the outer ranks, by number of the bucket: under way, and still to start.
        self._outer: dict[int, Pending] = {}
        self._outer_stale: set[int] = set()
        self._encoded: dict[int, _Encoded] = {}
        # By name, the largest magnitudes of blocks that ranks have not written since. All ranks
        # that share a block know its, or none.
        self._amax: dict[str, torch.Tensor] = {}
        self._current: BucketBlock | None = None
        self._traces: dict[str, Trace] = {}
        self._plans: dict[tuple[str, ...], GatherPlan] = {}
        self._program = _Program((), None)
        for index, block in enumerate(self.blocks):
            block.source, block.index = self, index

    @property
    def most_bytes(self) -> int:
        """Bytes of leased weights at a time, at most, as far as the order of use is known."""
        shared = [i for i, block in enumerate(self.blocks) if not block.bucket.alone]
        return min(self.budget, sum(self.sizes[i] for i in shared)) if self.leases else 0

    @property
    def planned(self) -> GatherPlan | None:
        """The plan that is being followed, or was in the last step; None on demand."""
        return self._program.plan

    @property
    def in_flight(self) -> list[int]:
        """The blocks whose gather is under way, in the order in which they were started; those
        whose shards are being gathered over the outer ranks last."""
        flying = [i for i, g in self._gathered.items() if g.pending is not None]
        outer = [block.index for i in self._outer for block in self.buckets[i].blocks]
        return flying + [i for i in outer if i not in flying]

    # --- a step -----------------------------------------------------------------------------------

    def begin(self, segments: Sequence[str]) -> None:
        """Start a step that runs these segments, and the gathers that its first need waits for."""
        self._leave_segment()
        program = tuple(segments)
        if not self.leases:  # what the first run of a segment has needed stays
            program = tuple(dict.fromkeys(program))
        self.stream.wait_stream(current_stream(self.pool.device))
        plan = self._plan(program)
        self._program = _Program(program, plan)
        early = set(self.in_flight if plan is None else plan.prologue)
        for index in [i for i in self._gathered if i not in early] if self.leases else ():
            self._release(index)
        self._start_outer()
        if plan is not None:
            self._start(plan.prologue)

    def segment(self, name: str) -> None:
        """Say which segment runs from now on."""
        if self._current is not None and self.leases:
            self._current.current = False
        self._close_trace()
        self._program.segment = name

    def start_segment(self, name: str) -> None:
        """Start the gathers that a segment needs first, without waiting: of all its blocks if they
        are stored whole. Where they are leased, a plan that is being followed has started them.

        Nothing is started with `prefetch` off, or for a segment that no step has run yet.
        """
        trace = self._traces.get(name, ()) if self.prefetch else ()
        if not self.leases:
            self._start([index for index in trace if not self.blocks[index].current])
        elif self._program.plan is None:
            held = sum(self.sizes[i] for i in self._gathered)
            self._start([i for i in trace[:1] if held + self.sizes[i] <= self.budget])

    def finish(self) -> None:
        """End a step: wait for what is under way, release what is leased, and keep what the step
        has taught for the next plan."""
        self._leave_segment()
        self._settle()
        for name, trace in self._program.traces.items():
            # Nothing is needed where all is still there: that does not unteach what is needed else.
            known = self._traces.get(name)
            if known is None or (trace and trace != known):
                self._traces[name] = trace
                self._plans.clear()

    def check_order(self) -> None:
        """Compare with the other ranks in which order the step needed its blocks.

        Raises:
            ValueError: it was another one: gathers of different blocks have met each other.
        """
        order = repr(sorted(self._program.traces.items())).encode()
        digest = int.from_bytes(hashlib.blake2b(order, digest_size=7).digest())
        mine = torch.tensor([digest], device=self.pool.device)
        found = [bucket.groups.gather for bucket in self.buckets.values()]
        groups = {group.name: group for group in found}
        orders = [all_gather(mine, group) for _, group in sorted(groups.items())]
        if any((order != digest).any() for order in orders):
            raise ValueError(
                "the ranks that share weights needed them in different orders in this step: "
                f"here {self._program.traces}; every rank must run the same layers"
            )

    def abort(self) -> None:
        """Leave a step that failed: wait for what is under way, release everything, learn
        nothing."""
        self._leave_segment()
        self._settle()
        self._program = _Program((), None)

    def consume(self, block: BucketBlock) -> None:
        """Make a block current; what was current before may be released."""
        if self._current is not None and self.leases:
            self._current.current = False
        again = self._current is block and block.index in self._gathered
        self._current = block
        program = self._program
        if not program.trace or program.trace[-1] != block.index:
            program.trace.append(block.index)
        if not again and not self._follow(block):
            self._on_demand(block)
        self._arrive(block.index)
        block.current = True

    # --- between steps ----------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Forget everything gathered: the optimizer has written the owned ranges."""
        self._leave_segment()
        self._settle()
        self.stream.wait_stream(current_stream(self.pool.device))
        self._gathered.clear()
        for block in self.blocks:
            if block.wire is not None and block.trainable:
                self._amax.pop(block.name, None)
                if block.index in self._encoded:
                    self._encoded[block.index].is_stale = True
        for bucket in self.buckets.values():
            if bucket.alone or not bucket.trainable:
                continue  # nobody else has written it
            for block in bucket.blocks:
                block.current = False
            if bucket.outer_shards:
                self._outer_stale.add(bucket.index)

    def is_late(self, block: BucketBlock) -> bool:
        """Return whether updates by other ranks of what this rank stores have not arrived."""
        bucket = block.bucket
        return bucket.index in self._outer_stale or not (bucket.sharded or block.current)

    def start_early(self) -> None:
        """Start the gathers of the next step's first need without waiting for any."""
        plan = self._plan(self._program.segments)
        if plan is not None:
            first = plan.prologue
        else:  # what was declared first and is not here
            blocks = [block for bucket in self.buckets.values() for block in bucket.blocks]
            first = tuple(b.index for b in reversed(blocks) if not b.current)[:1]
        # A block waits for the gather of its bucket over the outer ranks: where that starts here,
        # the block's own gather is left to the next step, of several blocks of the bucket as well.
        stale = frozenset(self._outer_stale)
        for index in first:
            bucket = self.blocks[index].bucket
            if bucket.index in self._outer_stale:
                self._gather_outer(bucket)
            elif bucket.index not in stale:
                self._start((index,))

    def gather_all(self) -> None:
        """Gather every block in the order of forward and wait, releasing leases on the way."""
        self._start_outer()
        for block in reversed(self.blocks):
            if not block.current and block.index not in self._gathered:
                self._issue(block)
                if self.leases:
                    self._release(block.index)
        self.wait()
        for index in self._gathered:
            self.blocks[index].current = not self.leases

    def wait(self) -> None:
        """Wait for the gathers under way; what they bring stays."""
        for index in self._gathered:
            self._arrive(index)
        for index in list(self._outer):
            self._outer.pop(index).wait()

    def complete_stored(self) -> None:
        """Wait until this rank holds the latest values of all that it stores."""
        if not self.leases:
            self.gather_all()
            return
        self._start_outer()
        self.wait()

    # --- inside -----------------------------------------------------------------------------------

    def _plan(self, program: tuple[str, ...]) -> GatherPlan | None:
        # A model chunk without weights needs nothing; if none does, all is there until an update.
        if any(name not in self._traces for name in program):
            return None
        if not any(self._traces[name] for name in program):
            return None
        if program not in self._plans:
            if self.leases and self.prefetch and all(b.gtp for b in self.buckets.values()):
                most = bytes_of_neighbours(self._traces, program, sizes=self.sizes)
                self.budget = max(self.budget, most + self.ahead)
            self._plans[program] = compile_plan(
                self._traces,
                program,
                sizes=self.sizes,
                budget=self.budget,
                ahead=self.ahead,
                prefetch=self.prefetch,
            )
        return self._plans[program]

    def _follow(self, block: BucketBlock) -> bool:
        """Follow the plan for this request; False if the plan does not foresee it."""
        program = self._program
        if program.plan is None or program.segment is None:
            return False
        planned = program.plan.consumes
        if program.cursor >= len(planned) or planned[program.cursor].block != block.index:
            self.counts.mismatches += 1
            program.plan = None
            return False
        step = planned[program.cursor]
        program.cursor += 1
        for index in step.release if self.leases else ():
            self._release(index)
        self._start(step.issue)
        return True

    def _on_demand(self, block: BucketBlock) -> None:
        """Gather a block that no plan foresaw, releasing what has been there longest."""
        if block.index in self._gathered:
            return
        self.counts.on_demand += 1
        self.stream.wait_stream(current_stream(self.pool.device))
        if self.leases:
            held = sum(self.sizes[i] for i in self._gathered)
            for index in list(self._gathered):
                if held + self.sizes[block.index] <= self.budget:
                    break
                self._release(index)
                held -= self.sizes[index]
        self._issue(block)

    def _start(self, blocks: Sequence[int]) -> None:
        for index in blocks:
            if index not in self._gathered:
                block = self.blocks[index]
                self.counts.prefetched += block is not self._current
                self._issue(block)

    def _issue(self, block: BucketBlock) -> None:
        """Start a block's gather on the gather stream."""
        bucket = block.bucket
        with on_stream(self.stream):
            self._complete_shards(bucket)
            whole, shard, encoded = block.data, block.shard, None
            if self.leases:
                whole = self.pool.lease(*block.lease)
            if block.wire is not None:
                shard = self._encode(block)
                size = len(shard) * bucket.group.size
                encoded = self.pool.lease(size, torch.uint8)
            into = whole if encoded is None else encoded
            pending = all_gather_async(shard, bucket.groups.gather, out=into)
        self._gathered[block.index] = _Gathered(whole, pending, encoded)
        self.counts.gathers += 1
        if self.leases:
            if not block.keeps_codes:
                block.bind(whole)
            self.counts.peak_bytes = max(self.counts.peak_bytes, self.pool.live_bytes)

    def _arrive(self, index: int) -> None:
        """Wait for a block's gather, and decode what it brings."""
        gathered, block = self._gathered[index], self.blocks[index]
        if gathered.pending is None:
            return
        gathered.pending.wait()
        gathered.pending = None
        if gathered.encoded is not None:
            block.arrive(gathered.encoded, gathered.whole, amax=self._amax.get(block.name))
            self.pool.release(gathered.encoded)
            gathered.encoded = None

    def _encode(self, block: BucketBlock) -> torch.Tensor:
        """Return this rank's shard of a block in its wire format, encoded anew if the weights have
        changed since."""
        assert block.wire is not None
        if block.index not in self._encoded:
            wire = torch.empty(block.wire_bytes, dtype=torch.uint8, device=block.data.device)
            self._encoded[block.index] = _Encoded(block, wire)
        found = self._encoded[block.index]
        if found.is_current:
            return found.bytes
        if block.wire.needs_amax and block.name not in self._amax:
            self._find_amax(block.bucket.groups.gather)
        shard = block.shard.detach().view(-1, block.columns)
        block.wire.encode(shard, amax=self._amax.get(block.name), out=found.bytes)
        found.version, found.is_stale = block.data._version, False
        self.counts.encodes += 1
        return found.bytes

    def _find_amax(self, group: Group) -> None:
        """Find the largest magnitudes of the blocks of a group that have changed, over its ranks,
        all of which call this at the same block."""
        buckets = [b for b in self.buckets.values() if b.groups.gather is group]
        missing = [b for bucket in buckets for b in bucket.blocks if b.name not in self._amax]
        for bucket in {block.bucket.index: block.bucket for block in missing}.values():
            self._complete_shards(bucket)
        largest = torch.stack([shard_amax(block.shard) for block in missing])
        all_reduce(largest, group, op="max", out=largest)
        self._amax |= zip((block.name for block in missing), largest, strict=True)

    def _complete_shards(self, bucket: Bucket) -> None:
        """Have the outer ranks' updates of a bucket's shards arrive."""
        if bucket.index in self._outer_stale:
            self._gather_outer(bucket)
        if bucket.index in self._outer:
            self._outer.pop(bucket.index).wait()

    def _gather_outer(self, bucket: Bucket) -> None:
        """Start the gather of a bucket's shards over the outer ranks."""
        self._outer_stale.discard(bucket.index)
        shards = bucket.data if bucket.sharded else bucket.blocks[0].shard
        with on_stream(self.stream):
            pending = all_gather_async(bucket.owned, bucket.outer, out=shards)
        self._outer[bucket.index] = pending

    def _start_outer(self) -> None:
        for bucket in reversed(self.buckets.values()):
            if bucket.index in self._outer_stale:
                self._gather_outer(bucket)

    def _release(self, index: int) -> None:
        gathered = self._gathered.pop(index)
        if gathered.pending is not None:
            gathered.pending.wait()
        if gathered.encoded is not None:
            self.pool.release(gathered.encoded)
        self.blocks[index].unbind()
        self.pool.release(gathered.whole)

    def _settle(self) -> None:
        """Wait for what is under way and release what is leased."""
        for index, gathered in list(self._gathered.items()):
            if self.leases:
                self._release(index)
            elif gathered.pending is not None:
                self._arrive(index)
                self.blocks[index].current = True
        for index in list(self._outer):
            self._outer.pop(index).wait()

    def _close_trace(self) -> None:
        program = self._program
        if program.segment is not None and (program.trace or program.segment not in program.traces):
            program.traces[program.segment] = tuple(program.trace)
        program.segment, program.trace = None, []

    def _leave_segment(self) -> None:
        self._close_trace()
        if self._current is not None and self.leases:
            self._current.current = False
        self._current = None


def gathered_bytes(block: BucketBlock) -> int:
    """Return the bytes that a gather leases: the whole block, and what arrives if that is
    encoded."""
    numel, dtype = block.lease
    arriving = 0 if block.wire is None else block.wire_bytes * block.bucket.group.size
    return numel * dtype.itemsize + arriving


def bytes_leased(buckets: Sequence[Bucket], *, prefetch: bool) -> int:
    """Return the bytes that gathered weights need at a time, of the buckets that ranks share.

    The blocks outside units and one unit, its dense weights and its experts, which it needs in
    turn; of weights sharded over gtp the largest one. With `prefetch` another unit, or of weights
    over gtp the largest two that are stored one after the other, as long as no order of use is
    known.
    """
    shared = [bucket for bucket in buckets if not bucket.alone]
    if all(bucket.gtp for bucket in shared):
        blocks = [block for bucket in shared for block in bucket.blocks]
        sizes = [max(map(gathered_bytes, block.planes)) for block in blocks]
        pairs = [a + b for a, b in itertools.pairwise(sizes)] if prefetch else []
        return max([*sizes, *pairs], default=0)
    root = 0
    largest = {False: 0, True: 0}
    for bucket in shared:
        (block,) = bucket.blocks
        if bucket.unit is None:
            root += block.whole_bytes
        else:
            largest[bucket.expert] = max(largest[bucket.expert], block.whole_bytes)
    return root + (1 + prefetch) * sum(largest.values())

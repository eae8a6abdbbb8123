# SPDX-License-Identifier: Apache-2.0
"""StreamModel: a fake GPU whose streams run late, in any order that CUDA allows.

Every op on a tensor is put in the queue of the current stream and carried out at some later time,
drawn at random: between the ops of one stream the order is the program's, between streams only
waits order anything, and the host reads nothing of a tensor before it has waited for its stream. A
program whose waits suffice computes the same bits in every interleaving.

- A stream is eager, lazy or in between, which the seed decides and changes now and then. A lazy
  one runs only what somebody waits for.
- Memory belongs to the stream that allocated it, as in torch's caching allocator: once nobody
  holds a tensor, later work of that stream may have its memory at once, and does: it writes
  poison there, which `check_freed` looks for at the end. Nothing else delays it but `record_use`.
  New memory is what an earlier tensor of that stream had, so poison is written there as well, in
  the order of that stream.
- A collective runs on a stream of its communicator, which waits for the current one when it starts.
  Its output is poison from its beginning to its end. The peers send what this rank sends, so one
  process plays one rank of many; the content of a message depends only on its number.
- Memory that torch did not allocate here (`torch.from_numpy`, pinned memory) is the host's: ops
  between such tensors run at once, copies with `non_blocking` in their stream.

    model = StreamModel(seed=3)        # None: everything in program order
    with model.enforced():
        groups = model.groups(RankGrid(world_size=4))
        ...

`without=site` leaves out one wait of the program, a key of `model.sites`. `CaptureRules` checks
something else: what may be called while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core import device as device_module
from megatron.core.comm.collectives import poison_
from tests.support.pretended_groups import groups_over

aten = torch.ops.aten

#: Ops whose result the host needs, in value or in shape: CUDA waits for the stream.
READS = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2,
    aten.unique_consecutive, aten.bincount, aten.repeat_interleave,
}  # fmt: skip
#: Ops that change what a tensor is, not what its memory holds.
METADATA = {aten.resize_, aten.set_, aten.detach_, aten.as_strided_, aten.t_, aten.transpose_}
EMPTY = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}
#: What memory holds that is free: NaN of every dtype, and numbers that are no index.
FREED = 0xFF
#: Seldom enough to let one stream run far ahead of another.
CHANGE = 1 / 200
#: Modules that move tensors for others: a collective that is waited for in there is their caller's.
_TRANSPORT = ("collectives.py", "stream_model.py")


class _Node:
    """Something in a queue: work, or only a wait for other nodes."""

    __slots__ = ("done", "run", "stream", "waits")

    def __init__(
        self, stream: LateStream, run: Callable[[], object] | None, waits: Sequence[_Node]
    ) -> None:
        self.stream, self.run = stream, run
        self.waits = [node for node in waits if not node.done]
        self.done = False


class LateStream:
    """A stream of the model."""

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        self.queue: deque[_Node] = deque()
        self.last: _Node | None = None
        self.eagerness = model.draw_eagerness()

    def wait_stream(self, stream: LateStream) -> None:
        """Wait for all work of another stream."""
        if self.model.waits_here("wait_stream"):
            self.model.put(self, None, [stream.last])

    def wait_event(self, event: LateEvent) -> None:
        """Wait for the work that preceded the event's record on its stream."""
        if self.model.waits_here("wait_event"):
            self.model.put(self, None, [event.node])

    def synchronize(self) -> None:
        """Let the host wait."""
        if self.model.waits_here("synchronize"):
            self.model.run_until(self.last)


class LateEvent:
    """An event: the last node of its stream when it was recorded."""

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        self.node: _Node | None = None

    def record(self, stream: LateStream | None = None) -> None:
        """Record the stream's position."""
        self.node = (stream or self.model.current).last

    def wait(self, stream: LateStream | None = None) -> None:
        """Let a stream wait."""
        if self.model.waits_here("wait"):
            self.model.put(stream or self.model.current, None, [self.node])

    def synchronize(self) -> None:
        """Let the host wait."""
        if self.model.waits_here("synchronize"):
            self.model.run_until(self.node)

    def query(self) -> bool:
        """Return whether the recorded work has run."""
        return self.node is None or self.node.done


class LateWork:
    """A collective under way."""

    def __init__(self, model: StreamModel, node: _Node) -> None:
        self.model, self.node = model, node

    def wait(self) -> None:
        """Let the current stream wait."""
        if self.model.waits_here("wait"):
            self.model.put(self.model.current, None, [self.node])

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self.node.done


class _Block:
    """Memory of a tensor: `raw` outlives the tensor until its last use has run."""

    def __init__(self, size: int, stream: LateStream) -> None:
        # MKL's sums depend on where a matrix starts within a cache line.
        room = np.empty(max(size, 1) + 64, dtype=np.uint8)
        start = -room.ctypes.data % 64
        self.bytes = room[start : start + max(size, 1)]
        self.raw = torch.from_numpy(self.bytes)
        self.stream = stream
        self.users: list[LateStream] = []
        self.holder: weakref.ref[np.ndarray] | None = None


class StreamModel(TorchDispatchMode):
    """The pretended GPU of one rank.

    Args:
        seed: of the interleaving; None runs everything at once, in program order.
        without: the site whose waits do nothing.

    Attributes:
        sites: `file:line` of every wait so far, and how often.
        late: ops that ran after the host had gone on.
        sent: what messages held when they left.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it is to import it first, for seconds

    def __init__(self, seed: int | None, *, without: str | None = None) -> None:
        super().__init__()
        self.random = None if seed is None else random.Random(seed)
        self.without = without
        self.sites: dict[str, int] = {}
        self.late = 0
        self.sent: list[Tensor] = []
        self._messages = 0
        self._streams: list[LateStream] = []
        self._blocks: dict[int, _Block] = {}
        self._freed: list[_Block] = []
        self._shapes: dict[Any, Any] = {}
        self._running = False
        # Another thread may wait while this one goes on; collecting garbage frees tensors anywhere.
        self._lock = threading.RLock()
        self.current = self.new_stream()

    # --- the device -------------------------------------------------------------------------------

    def new_stream(self, device: object = None, *, priority: int = 0) -> LateStream:
        """Make a stream."""
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def new_event(self, device: object = None, *, timing: bool = False) -> LateEvent:
        """Make an event."""
        return LateEvent(self)

    @contextlib.contextmanager
    def on_stream(self, stream: LateStream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def record_use(self, tensor: Tensor, stream: LateStream) -> None:
        """Delay the reuse of freed memory until the work then queued on `stream` has run."""
        if self.waits_here("record_use"):
            block = self._block(tensor)
            assert block is not None, "memory of the host"
            block.users.append(stream)

    def pin(self, tensor: Tensor, device: object = None) -> Tensor:
        """Return a tensor's values in memory of the host."""
        if self._block(tensor) is None:
            return tensor
        self.run_until(self.current.last)
        return self._quietly(lambda: self._host_like(tensor).copy_(tensor))

    def to_host(self, tensor: Tensor) -> Tensor:
        """Put a copy to the host's memory in the current stream."""
        if self._block(tensor) is None:
            return tensor
        target = self._quietly(lambda: poison_(self._host_like(tensor)))
        source = self.alias(tensor)
        self.put(self.current, lambda: target.copy_(source))
        return target

    def to_device(self, tensor: Tensor) -> Tensor:
        """Put a copy of a tensor of the host in the current stream."""
        target = self._new(tensor.shape, tensor.stride(), tensor.dtype)
        raw = self.alias(target)
        self.put(self.current, lambda: raw.copy_(tensor))
        return target

    def groups(self, grid: RankGrid, rank: int = 0) -> ProcessGroupCollection:
        """Return the groups of one rank of a grid, over communicators of this device."""
        return groups_over(lambda ranks: Communicator(self, len(ranks)), grid, rank)

    @contextlib.contextmanager
    def enforced(self) -> Iterator[StreamModel]:
        """Run the program on this device, then run the work left in the queues."""
        replaced = {
            "new_stream": self.new_stream,
            "new_event": self.new_event,
            "on_stream": self.on_stream,
            "current_stream": lambda device: self.current,
            "record_use": self.record_use,
            "pin": self.pin,
            "to_host": self.to_host,
            "runs_ahead": lambda device: True,
            "pin_in_place": lambda tensor: None,
            "unpin_in_place": lambda tensor: None,
        }
        with contextlib.ExitStack() as stack:
            for name, function in replaced.items():
                real = getattr(device_module, name)
                for module in list(sys.modules.values()):
                    if vars(module).get(name) is real:
                        stack.enter_context(mock.patch.object(module, name, function))
            stack.enter_context(self._host_reads())
            stack.enter_context(self._numpy_memory())
            stack.enter_context(self)
            yield self
            self.run_all()

    # --- time -------------------------------------------------------------------------------------

    def waits_here(self, kind: str) -> bool:
        """Note the site of a wait; return whether it is to wait."""
        frame = sys._getframe(2)
        passed = _TRANSPORT if kind == "wait" else _TRANSPORT[-1:]
        while frame.f_code.co_filename.endswith(passed) and frame.f_back is not None:
            frame = frame.f_back
        name = Path(frame.f_code.co_filename).name
        site = f"{name}:{frame.f_lineno} {frame.f_code.co_qualname}: {kind}"
        self.sites[site] = self.sites.get(site, 0) + 1
        return site != self.without

    def draw_eagerness(self) -> float:
        """Draw the probability that a stream runs its next runnable work."""
        return 1.0 if self.random is None else self.random.choice((0.0, 0.0, 0.3, 1.0))

    def put(
        self,
        stream: LateStream,
        run: Callable[[], object] | None,
        waits: Sequence[_Node | None] = (),
    ) -> _Node:
        """Put work at the end of a queue, and let time pass."""
        with self._lock:
            node = self._append(stream, run, waits)
            self._pass_time()
            self.late += not node.done
        return node

    def run_until(self, node: _Node | None) -> None:
        """Run the dependencies of a node, then the node."""
        with self._lock:
            while node is not None and not node.done:
                head = node.stream.queue[0]
                while waits := [n for n in head.waits if not n.done]:
                    dependency = waits[0] if self.random is None else self.random.choice(waits)
                    head = dependency.stream.queue[0]
                self._run(head)

    def run_all(self) -> None:
        """Run everything."""
        while busy := [s.last for s in self._streams if s.queue]:
            self.run_until(busy[0] if self.random is None else self.random.choice(busy))

    def check_freed(self) -> None:
        """Run everything, then raise RuntimeError if memory was written after it was free."""
        self.run_all()
        if not all(bool((block.bytes == FREED).all()) for block in self._freed):
            raise RuntimeError("memory was written after a later tensor could have had it")

    def _append(
        self, stream: LateStream, run: Callable[[], object] | None, waits: Sequence[_Node | None]
    ) -> _Node:
        node = _Node(stream, run, [n for n in waits if n is not None])
        stream.queue.append(node)
        stream.last = node
        return node

    def _pass_time(self) -> None:
        drawn = self.random
        if drawn is None:
            self.run_all()
            return
        if drawn.random() < CHANGE:
            for stream in self._streams:
                stream.eagerness = self.draw_eagerness()
        for stream in drawn.sample(self._streams, len(self._streams)):
            while stream.queue and drawn.random() < stream.eagerness:
                if any(not n.done for n in stream.queue[0].waits):
                    break
                self._run(stream.queue[0])

    def _run(self, node: _Node) -> None:
        assert node is node.stream.queue.popleft()
        if node.run is not None:
            self._quietly(node.run)
        node.done, node.run, node.waits = True, None, []

    def _quietly(self, run: Callable[[], Any]) -> Any:
        """Call a function whose ops are the device's own."""
        before, self._running = self._running, True
        try:
            with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
                return run()
        finally:
            self._running = before

    # --- memory -----------------------------------------------------------------------------------

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not hold it as the program's do."""
        block = self._block(tensor)
        if block is None:
            return tensor.detach() if tensor.requires_grad else tensor
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._quietly(
                lambda: torch.empty(0, dtype=tensor.dtype).set_(
                    block.raw.untyped_storage(),
                    tensor.storage_offset(),
                    tensor.shape,
                    tensor.stride(),
                )
            )

    def _block(self, tensor: Tensor) -> _Block | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def _new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor on the current stream."""
        last_offset = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        size = 0 if 0 in shape else (last_offset + 1) * dtype.itemsize
        block = _Block(size, self.current)
        holder = block.bytes[:]
        address = holder.ctypes.data
        self._blocks[address] = block
        block.holder = weakref.ref(holder, lambda _: self._free(address))

        def tensor() -> Tensor:
            poison_(block.raw.view(dtype) if size else block.raw)
            storage = torch.frombuffer(holder, dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))

        return self._quietly(tensor)

    def _free(self, address: int) -> None:
        with self._lock:
            block = self._blocks.pop(address)
            reuse, waits = block.stream, [s.last for s in block.users]
            if block.users:  # the allocator asks, and no stream waits
                waits.append(reuse.last)
                reuse = self.new_stream()
            self._append(reuse, partial(block.raw.fill_, FREED), waits)
            self._freed.append(block)

    def _host_like(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        memory = torch.from_numpy(np.empty(max(size, 1), dtype=np.uint8))
        return memory[:size].view(tensor.dtype).view(tensor.shape)

    # --- ops --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._running:
            return function(*args, **kwargs)
        with self._lock:
            return self._submit(function, args, kwargs)

    def _submit(self, function, args, kwargs):
        packet, schema = function.overloadpacket, function._schema
        values = tree_flatten((args, kwargs))[0]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if packet is aten.lift_fresh:
            return self.to_device(args[0])
        if packet in EMPTY and (not tensors or self._block(tensors[0]) is not None):
            return self._empty(function, args, kwargs)
        if not tensors:
            return tree_map_only(Tensor, self.to_device, function(*args, **kwargs))
        on_host = all(self._block(tensor) is None for tensor in tensors)
        if on_host or packet in METADATA or _is_view(schema):
            return function(*args, **kwargs)
        if packet in READS:
            self.run_until(self.current.last)
            results = self._quietly(lambda: function(*args, **kwargs))
            return tree_map_only(Tensor, self.to_device, results)
        written = _written(schema, args, kwargs)
        if written:
            return self._write(function, args, kwargs, written)
        return self._compute(function, args, kwargs)

    def _empty(self, function, args, kwargs):
        target = self._new(*self._shape_of(function, args, kwargs)[0][0])
        raw = self.alias(target)
        self.put(self.current, lambda: poison_(raw))
        return target

    def _write(self, function, args, kwargs, written: dict[str, Tensor | Sequence[Tensor]]):
        """Put an op that writes its arguments in the queue."""
        to_host = any(self._block(t) is None for t in tree_flatten(list(written.values()))[0])
        is_copy = function.overloadpacket is aten.copy_
        asynchronous = is_copy and (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        returns = function._schema.returns
        assert all(r.alias_info is not None for r in returns), f"{function} writes and returns"
        if is_copy and not asynchronous and self._block(args[1]) is None:
            # A copy that blocks reads the host's memory now.
            args = (args[0], self._quietly(args[1].clone), *args[2:])
        inside = tree_map_only(Tensor, self.alias, (args, kwargs))
        node = self.put(self.current, lambda: function(*inside[0], **inside[1]))
        if to_host and not asynchronous:
            self.run_until(node)
        results = [
            next(v for names, v in written.items() if set(names.split()) & r.alias_info.before_set)
            for r in returns
        ]
        return results[0] if len(results) == 1 else (tuple(results) or None)

    def _compute(self, function, args, kwargs):
        """Put an op in the queue that returns new tensors."""
        shapes, tree = self._shape_of(function, args, kwargs)
        results = [s if s is None or not isinstance(s, tuple) else self._new(*s) for s in shapes]
        raws = [self.alias(r) if isinstance(r, Tensor) else None for r in results]
        inside = tree_map_only(Tensor, self.alias, (args, kwargs))

        def run() -> None:
            values = tree_flatten(function(*inside[0], **inside[1]))[0]
            for raw, value in zip(raws, values, strict=True):
                if raw is not None:
                    raw.copy_(value)

        self.put(self.current, run)
        return tree_unflatten(results, tree)

    def _shape_of(self, function, args, kwargs):
        """Return (shape, stride, dtype) of all tensors that an op returns, and their tree."""
        flat, tree = tree_flatten((args, kwargs))
        key: Any = (
            function,
            str(tree),
            *(
                (v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else (type(v), str(v))
                for v in flat
            ),
        )
        if key not in self._shapes:

            def shape() -> Any:
                meta = [
                    torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
                    if isinstance(v, Tensor)
                    else (torch.device("meta") if isinstance(v, torch.device) else v)
                    for v in flat
                ]
                meta_args, meta_kwargs = tree_unflatten(meta, tree)
                if function.overloadpacket in EMPTY:
                    meta_kwargs["device"] = torch.device("meta")
                results, results_tree = tree_flatten(function(*meta_args, **meta_kwargs))
                return [
                    (tuple(r.shape), r.stride(), r.dtype) if isinstance(r, Tensor) else r
                    for r in results
                ], results_tree

            self._shapes[key] = self._quietly(shape)
        return self._shapes[key]

    def _host_reads(self) -> contextlib.AbstractContextManager[None]:
        """Make methods that read a tensor's memory without an op wait, as `item` does."""
        real = {name: getattr(Tensor, name) for name in ("tolist", "numpy", "cpu", "to")}

        def waiting(name: str) -> Callable[..., Any]:
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if not self._running and self._block(tensor) is not None:
                    self.run_until(self.current.last)
                return real[name](tensor, *args, **kwargs)

            return read

        def to_cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._running or self._block(tensor) is None:
                return real["cpu"](tensor, *args, **kwargs)
            host_tensor = self.to_host(tensor)
            self.run_until(self.current.last)
            return host_tensor

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target = args[0] if args else kwargs.get("device")
            moves = isinstance(target, torch.device) and self._block(tensor) is None
            if self._running or not moves:
                return real["to"](tensor, *args, **kwargs)
            return self.to_device(tensor if kwargs.get("non_blocking") else tensor.clone())

        patches = {"tolist": waiting("tolist"), "numpy": waiting("numpy"), "cpu": to_cpu, "to": to}
        return mock.patch.multiple(Tensor, **patches)

    def _numpy_memory(self) -> contextlib.AbstractContextManager[object]:
        """Leave `torch.from_numpy` in the host's memory: it calls `lift_fresh` as `torch.tensor`
        does, and a copy to the device would hide what reads that memory late."""
        from_numpy = torch.from_numpy

        def on_host(array: np.ndarray) -> Tensor:
            return self._quietly(lambda: from_numpy(array))

        return mock.patch.object(torch, "from_numpy", on_host)


class Communicator:
    """A communicator of the model, as much of `torch.distributed.ProcessGroup` as is used."""

    def __init__(self, model: StreamModel, size: int) -> None:
        self.model, self.size = model, size
        self.stream = model.new_stream()

    def allreduce(self, tensors: list[Tensor], options: Any) -> LateWork:
        """Sum what all ranks hold: so many times what this one does."""
        return self._start(tensors[0], tensors[0], lambda x: x * self.size)

    def _allgather_base(self, output: Tensor, source: Tensor) -> LateWork:
        return self._start(output, source, lambda x: torch.cat([x.view(-1)] * self.size))

    def _reduce_scatter_base(self, output: Tensor, source: Tensor) -> LateWork:
        rows = output.numel()
        return self._start(output, source, lambda x: x.view(-1)[:rows] * self.size)

    def alltoall_base(self, output, source, receives, sends, options) -> LateWork:
        """Return every rank's part of this rank's rows to it."""
        return self._start(output, source, lambda x: x.view(-1)[: output.numel()])

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> LateWork:
        """Send a tensor."""
        source, sent = self.model.alias(tensors[0]), torch.full_like(tensors[0], torch.nan)
        self.model.sent.append(sent)
        sent = self.model.alias(sent)
        return self._put(lambda: sent.copy_(source))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> LateWork:
        """Receive a tensor that depends on the number of the message."""
        self.model._messages += 1
        number, target = self.model._messages, self.model.alias(tensors[0])
        self._put(lambda: poison_(target))
        return self._put(lambda: target.fill_(number / 8))

    def _start(
        self, output: Tensor, source: Tensor, result: Callable[[Tensor], Tensor]
    ) -> LateWork:
        """Put a collective on the communicator's stream: poison first, later its result."""
        target, read = self.model.alias(output), self.model.alias(source)
        early = self.model.random is None or self.model.random.random() < 0.5
        early |= target.untyped_storage().data_ptr() == read.untyped_storage().data_ptr()
        values: list[Tensor] = []

        def begin() -> None:
            if early:
                values.append(result(read).clone())
            poison_(target)

        def end() -> None:
            target.view(-1).copy_((values[0] if early else result(read)).view(-1))

        self._put(begin)
        return self._put(end)

    def _put(self, run: Callable[[], object]) -> LateWork:
        waits = [self.model.current.last]
        return LateWork(self.model, self.model.put(self.stream, run, waits))


def _is_view(schema: torch.FunctionSchema) -> bool:
    """Whether an op returns tensors over the memory of its arguments and writes nothing."""
    effects = [r.alias_info for r in schema.returns]
    return bool(effects) and all(e is not None and not e.is_write for e in effects)


def _written(schema, args, kwargs) -> dict[str, Any]:
    """Return the arguments that an op writes, by the names of their alias sets."""
    written_arguments = {}
    for i, argument in enumerate(schema.arguments):
        effect = argument.alias_info
        if effect is not None and effect.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if value is not None:
                written_arguments[" ".join(sorted(effect.before_set))] = value
    return written_arguments

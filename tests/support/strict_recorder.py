# SPDX-License-Identifier: Apache-2.0
"""Recorders of steps that refuse operations that a CUDA graph cannot capture.

host_reads_refused()   no value reaches the host: item, tolist, cpu, bool of a tensor, masks
StrictTape             an `OpTape` in which the host reads nothing
StrictRerun            runs the function itself at each replay, for operations that no tape can
                       record, such as copies inside gloo; the host reads nothing, and tensors
                       that a replay allocates are freed
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.cpu_graph import reads_on_host
from megatron.core.tensor_parallel import vocab_parallel
from tests.support.op_tape import OpTape, TapeRecorder

#: Methods of a tensor that make the host of a GPU wait.
READS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip


class HostRead(Exception):
    """The host reads a device value."""


class MemoryGrowth(Exception):
    """Tensors that replays allocate are not freed."""


@contextmanager
def host_reads_refused() -> Iterator[None]:
    """Refuse operations that would make the host wait for a GPU, in this thread."""
    thread_id = threading.get_ident()

    def refused(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            if threading.get_ident() == thread_id:
                raise HostRead(name)
            return original(tensor, *args, **named)

        return method

    with (
        mock.patch.multiple(torch.Tensor, **{name: refused(name) for name in READS}),
        mock.patch.object(vocab_parallel, "check_ids"),  # looks at ids on a CPU alone
    ):
        yield


class StrictTape(TapeRecorder):
    """A tape in which the host reads nothing."""

    def __init__(self) -> None:
        super().__init__(OpTape())

    def capture(self, run: Callable[[], None]) -> None:
        with host_reads_refused():
            super().capture(run)


class _Allocations(TorchDispatchMode):
    """Record allocations, and refuse operations that return a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self._allocated: list[weakref.ref[torch.Tensor]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as `CpuGraph` has it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if reads_on_host(function, args):
            raise HostRead(str(function))
        results = function(*args, **(kwargs or {}))
        input_storages = {_memory(t) for t in tree_leaves([args, kwargs]) if torch.is_tensor(t)}
        self._allocated += [
            weakref.ref(t)
            for t in tree_leaves(results)
            if torch.is_tensor(t) and _memory(t) not in input_storages
        ]
        return results

    def count_alive(self) -> int:
        """Return the number of live allocations."""
        self._allocated = [reference for reference in self._allocated if reference() is not None]
        return len(
            {
                _memory(tensor)
                for reference in self._allocated
                if (tensor := reference()) is not None
            }
        )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


#: Replays whose results may be alive at a time: a step in flight keeps its results.
HELD_REPLAYS = 3


class StrictRerun:
    """Run the function itself instead of a recording, as strict as a CUDA graph.

    Attributes:
        replays: number of replays after recording.
    """

    def __init__(self) -> None:
        self._run: Callable[[], None] = lambda: None
        self._allocations = _Allocations()
        self._recorded = self.replays = 0

    def capture(self, run: Callable[[], None]) -> None:
        """Run it once. Raises HostRead."""
        self._run = run
        self._recorded = self._carry_out()

    def replay(self) -> None:
        """Run it again. Raises HostRead or MemoryGrowth."""
        self.replays += 1
        alive, limit = self._carry_out(), HELD_REPLAYS * self._recorded
        if alive > limit:
            gc.collect()  # what only cycles hold is not held
            alive = self._allocations.count_alive()
        if alive > limit:
            raise MemoryGrowth(
                f"{alive} tensors are held after {self.replays} replays, {self._recorded} after "
                "recording"
            )

    def _carry_out(self) -> int:
        """Run the function; return the number of its allocations that are alive."""
        with host_reads_refused(), self._allocations:
            self._run()
        return self._allocations.count_alive()

# SPDX-License-Identifier: Apache-2.0
"""Recorders of steps that refuse what a CUDA graph cannot hold.

host_reads_refused()   no value reaches the host: item, tolist, cpu, bool of a tensor, masks
StrictTape             an `OpTape` in which the host reads nothing
StrictRerun            runs the function itself at each replay, for what no tape can hold, such
                       as copies inside gloo; the host reads nothing, and what a replay
                       allocates is not held for ever
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
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


class HostRead(Exception):
    """The host reads what is on the device."""


class MemoryGrowth(Exception):
    """What replays allocate is held, more with each of them."""


@contextmanager
def host_reads_refused() -> Iterator[None]:
    """Refuse what would make the host of a GPU wait, in this thread."""
    here = threading.get_ident()

    def refused(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            if threading.get_ident() == here:
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
    """Note what is allocated, and refuse operations that give the host a value."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as `CpuGraph` has it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if reads_on_host(function, args):
            raise HostRead(str(function))
        results = function(*args, **(kwargs or {}))
        given = {_memory(t) for t in tree_leaves([args, kwargs]) if torch.is_tensor(t)}
        self._made += [
            weakref.ref(t)
            for t in tree_leaves(results)
            if torch.is_tensor(t) and _memory(t) not in given
        ]
        return results

    def count_alive(self) -> int:
        """Return how many of the allocations are still held."""
        self._made = [made for made in self._made if made() is not None]
        return len({_memory(tensor) for made in self._made if (tensor := made()) is not None})


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


#: Replays whose results may be held at a time: a reader keeps those of a step in flight.
HELD_REPLAYS = 3


class StrictRerun:
    """Run the function itself instead of a recording, as strict as a CUDA graph.

    Attributes:
        replays: how often it was run after recording.
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
        alive, most = self._carry_out(), HELD_REPLAYS * self._recorded
        if alive > most:
            gc.collect()  # what only cycles hold is not held
            alive = self._allocations.count_alive()
        if alive > most:
            raise MemoryGrowth(
                f"{alive} tensors are held after {self.replays} replays, {self._recorded} after "
                "recording"
            )

    def _carry_out(self) -> int:
        """Run the function; return how many tensors that it has ever allocated are held."""
        with host_reads_refused(), self._allocations:
            self._run()
        return self._allocations.count_alive()

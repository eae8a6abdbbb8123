# SPDX-License-Identifier: Apache-2.0
"""OpTape: a CpuGraph as strict as a CUDA graph, for tests of CUDA graph capture on a CPU.

Collectives are recorded as well. After recording, every allocated tensor holds NaN, so reading a
result before the first replay fails, as on a GPU, where capture runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron.core.cpu_graph import CpuGraph, reads_on_host

#: Methods that hand a tensor's values to the host without an operation.
READS = (torch.Tensor.tolist, torch.Tensor.numpy)


class OpTape(CpuGraph):
    """Record inside a `with`; `replay()` any number of times afterwards.

    Attributes:
        syncs: operations that returned a value to the host.
        replays: number of replays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []
        self.replays = 0
        self._sends: list[Any] = []
        self._fresh: list[torch.Tensor] = []
        self._reads = MethodReads(self.read)

    def __enter__(self) -> OpTape:
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def read(self, name: str) -> None:
        """Record a host read."""
        if not self._paused:
            self.syncs.append(name)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        named = kwargs or {}
        results = function(*args, **named)
        if self._paused:
            return results
        if reads_on_host(function, args):
            self.syncs.append(str(function).rsplit(".", 1)[0])
        if function.namespace == "c10d":
            self._calls.append((self._collective, (function, args, named), {}))
            return results
        self.record(function, args, named, results)
        if not function._schema.is_mutable:
            input_storages = {_storage(t) for t in tree_leaves([args, named]) if torch.is_tensor(t)}
            outputs = [t for t in tree_leaves(results) if torch.is_tensor(t)]
            self._fresh += [t for t in outputs if _storage(t) not in input_storages]
        return results

    def poison(self) -> None:
        """Overwrite the tensors that recording allocated."""
        for tensor in self._fresh:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype is not torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)

    def replay(self) -> None:
        """Run the operations again."""
        self.replays += 1
        self._captured = True  # by a `with`
        super().replay()
        for work in self._sends:
            work.wait()
        self._sends.clear()

    def _collective(self, function: Any, args: Any, named: Any) -> None:
        returned_values = function(*args, **named)
        work = returned_values[-1] if isinstance(returned_values, tuple) else returned_values
        if "send" in str(
            function
        ):  # a send ends when the peer receives it, maybe after our own receives
            self._sends.append(work)
        else:
            work.wait()


class MethodReads(TorchFunctionMode):
    """Report methods that read values on the host without a dispatched operation.

    Args:
        read: called with the method's name.
    """

    def __init__(self, read: Callable[[str], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self._read(function.__name__)
        return function(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeRecorder:
    """An `OpTape` as a recorder of steps.

    Args:
        begin, end: called before and after recording.
    """

    def __init__(
        self,
        tape: OpTape,
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.tape = tape
        self.captures = 0
        self._begin, self._end = begin, end

    def capture(self, run: Callable[[], None]) -> None:
        """Record the operations of `run`."""
        self.captures += 1
        self._begin()
        with self.tape:
            run()
        self._end()
        self.tape.poison()

    def replay(self) -> None:
        """Replay the recorded operations."""
        self.tape.replay()

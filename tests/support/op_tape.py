# SPDX-License-Identifier: Apache-2.0
"""OpTape: record the ops of a function and run them again without its Python, as a CUDA graph does.

Ops run again on the same tensors: what was allocated while recording is written again, what was
there before is read as it is then, numbers that Python passed are what they were. Collectives are
ops as well. After recording, everything that was allocated holds NaN: who reads a result before the
first replay gets that, as on a GPU, where recording runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: What makes a GPU's host wait for a value.
SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select")


@dataclass(frozen=True)
class _Op:
    function: Any
    args: Sequence[Any]
    named: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]


class OpTape(TorchDispatchMode):
    """Record inside a `with`; `replay()` any number of times afterwards.

    Attributes:
        syncs: ops that gave the host a value.
        replays: how often it was run.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it is to import it first, for seconds in every rank

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []
        self.replays = 0
        self._paused = False
        self._ops: list[_Op] = []
        self._fresh: list[torch.Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        named = kwargs or {}
        results = function(*args, **named)
        if self._paused:
            return results
        name = str(function).rsplit(".", 1)[0]
        self.syncs += [name] * (name in SYNCS)
        effects = [a.alias_info for a in function._schema.arguments]
        writes = any(e is not None and e.is_write for e in effects)
        views = bool(function._schema.returns) and all(
            r.alias_info is not None for r in function._schema.returns
        )
        if function.namespace == "c10d" or writes:
            self._ops.append(_Op(function, args, named, ()))
        elif not views:
            made = tuple(t for t in tree_leaves(results) if isinstance(t, torch.Tensor))
            self._ops.append(_Op(function, args, named, made))
            given = {_storage(t) for t in tree_leaves([args, named]) if torch.is_tensor(t)}
            self._fresh += [t for t in made if _storage(t) not in given]
        return results

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs inside: how gloo's wait ends a collective, which as a whole is an
        op."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def poison(self) -> None:
        """Overwrite what was allocated while recording."""
        for tensor in self._fresh:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype is not torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the ops again."""
        self.replays += 1
        sends = []
        for op in self._ops:
            found = op.function(*op.args, **op.named)
            if op.function.namespace == "c10d":
                work = found[-1] if isinstance(found, tuple) else found
                if "send" in str(op.function):  # ends when it is received: not before own receives
                    sends.append(work)
                else:
                    work.wait()
                continue
            made = (t for t in tree_leaves(found) if isinstance(t, torch.Tensor))
            for tensor, value in zip(op.results, made, strict=False):
                if tensor.numel():
                    tensor.copy_(value)
        for work in sends:
            work.wait()


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
        """Record the ops of `run`."""
        self.captures += 1
        self._begin()
        with self.tape:
            run()
        self._end()
        self.tape.poison()

    def replay(self) -> None:
        """Run them."""
        self.tape.replay()

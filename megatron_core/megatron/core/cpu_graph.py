# SPDX-License-Identifier: Apache-2.0
"""CpuGraph: record the operations of a function on a CPU and run them again without its Python.

The counterpart of `torch.cuda.CUDAGraph`, with the same contract: operations run again on the same
tensors. What was allocated while recording is written again, what was there before is read as it is
then, and numbers that Python passed are what they were. A small operation on a CPU takes no longer
than the Python around it.

    graph = CpuGraph()
    graph.capture(step)  # runs it once
    inputs.copy_(others)
    graph.replay()

Operations are recorded below autograd (`__torch_dispatch__`), as these calls:

| operation | recorded as |
|---|---|
| writes to an argument, as `add_` or `mm(out=)` do | itself |
| returns views of its arguments | nothing: the views stay |
| returns a new tensor | itself with `out=` that tensor; copied to it where it takes no `out=` |
| allocates memory without writing to it | nothing |

What cannot be recorded is refused: a value that the host has read, as Python may have acted on it,
and collectives. A part that follows values, as attention follows the lengths of its contexts, is
called anew at each replay (`CpuGraph.call`): graphs are piecewise there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations whose result is memory with anything in it.
_EMPTY = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"})

#: Operations whose result is their first argument in other memory or another dtype.
_COPIES = frozenset({"aten::_to_copy", "aten::clone"})

#: Marks of operations that give the host a value, or a shape that depends on values.
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

#: Where torch has functions that call an operation with less around it than `torch.ops` has.
_DIRECT = ((torch, ""), (torch._C.TensorBase, ""), (torch._C._nn, ""), (torch.linalg, "linalg_"))
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType)


class CaptureError(RuntimeError):
    """A function does what cannot be recorded."""


class CpuGraph(TorchDispatchMode):
    """Record by `capture`, then `replay` any number of times; a `megatron.core.device.Recorder`.

    Operations run while they are recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]] = []
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it is to import it first, for seconds in every rank

    def capture(self, run: Callable[[], None]) -> None:
        """Run a function and record its operations.

        Raises:
            CaptureError: the host reads a value, or there is a collective.
        """
        with _NoHostReads(self), self:
            run()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function now, inside `capture`, and at each replay. Its operations are not
        recorded, and it may read values; what it finds it writes to tensors that stay."""
        self._calls.append((function, (), {}))
        with self.paused():
            function()

    def call_for(self, function: Callable[[], Tensor]) -> Tensor:
        """Return what a function returns now; at each replay what it returns is written there."""
        with self.paused():
            result = function().clone()
        self._calls.append((lambda: result.copy_(function()), (), {}))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs inside."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again."""
        for function, args, named in self._calls:
            function(*args, **named)

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and record it."""
        if self._paused:
            return function(*args, **(kwargs or {}))
        if reads_on_host(function, args):
            raise CaptureError(f"{function} gives the host a value")
        if function.namespace == "c10d":
            raise CaptureError(f"{function} is a collective")
        results = function(*args, **(kwargs or {}))
        self.record(function, args, kwargs or {}, results)
        return results

    def record(
        self,
        function: torch._ops.OpOverload,
        args: Sequence[Any],
        named: Mapping[str, Any],
        results: Any,
    ) -> None:
        """Record an operation that has run."""
        if function._schema.is_mutable:
            self._calls.append((_direct(function), args, named))
            return
        made = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        given = {_memory(t) for t in tree_leaves([args, named]) if isinstance(t, Tensor)}
        if function._schema.name in _EMPTY or all(_memory(t) in given for t in made):
            return
        if function._schema.name in _COPIES:
            self._calls.append((Tensor.copy_, (made[0], args[0]), {}))
            return
        direct = _direct(function)
        if not isinstance(results, Tensor):
            self._calls.append((_copy_results, (made, direct, args, named), {}))
            return
        out = {**named, "out": results}
        try:
            direct(*args, **out)
        except (TypeError, RuntimeError):  # it takes no such argument
            self._calls.append((_copy_result, (results, direct, args, named), {}))
        else:
            self._calls.append((direct, args, out))


def reads_on_host(function: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operation gives the host a value, or a tensor whose shape depends on values."""
    if function is torch.ops.aten.index.Tensor:  # only by masks
        return any(t is not None and t.dtype is torch.bool for t in args[1])
    return not _READS.isdisjoint(function.tags)


def _copy_result(
    result: Tensor, function: Callable[..., Tensor], args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Run an operation and copy what it returns to where it was when it was recorded."""
    result.copy_(function(*args, **named))


def _copy_results(
    results: Sequence[Tensor],
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> None:
    """Do the same with several results."""
    found = (t for t in tree_leaves(function(*args, **named)) if isinstance(t, Tensor))
    for result, value in zip(results, found, strict=True):
        if result.numel():
            result.copy_(value)


def _memory(tensor: Tensor) -> int:
    """Return what tells whose memory a tensor has. Those of oneDNN have no storage to share."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


def _direct(function: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the function of torch that calls an operation, such as `torch.mm`; itself if there is
    none."""
    name = function._schema.name.removeprefix("aten::")
    for place, prefix in _DIRECT:
        found = vars(place).get(name.removeprefix(prefix))
        if name.startswith(prefix) and isinstance(found, _BUILTIN):
            return found
    return function


class _NoHostReads(TorchFunctionMode):
    """Refuse what reads a tensor's values without an operation, where a graph is recorded."""

    _READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})

    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self._READS and not self._graph._paused:
            raise CaptureError(f"{function.__name__} gives the host a value")
        return function(*args, **(kwargs or {}))

# SPDX-License-Identifier: Apache-2.0
"""CpuGraph: record the operations of a function on a CPU and run them again without its Python.

The counterpart of `torch.cuda.CUDAGraph`, with the same contract: a replay runs the operations on
the same tensors. Tensors that were allocated during the recording are overwritten, older tensors
are read with their current values, and Python numbers keep their recorded values. This pays off
because a small operation on a CPU takes no longer than the Python around it.

    >>> inputs, outputs = torch.ones(3), torch.empty(3)
    >>> graph = CpuGraph()
    >>> graph.capture(lambda: torch.mul(inputs, 2, out=outputs))  # runs the function once
    >>> _ = inputs.copy_(torch.arange(3))
    >>> graph.replay()
    >>> outputs
    tensor([0., 2., 4.])

Operations are recorded below autograd (`__torch_dispatch__`), as these calls:

| operation | recorded as |
|---|---|
| writes to an argument, like `add_` or `mm(out=)` | itself |
| returns views of its arguments | nothing: the views stay |
| returns a new tensor | itself and a copy to that tensor; if in `_OUT`, itself with `out=` |
| makes a tensor of Python numbers | a copy of the numbers to it |
| allocates memory without writing to it | nothing |

Operations that cannot be recorded raise `CaptureError`: reads of a value by the host, because
Python may branch on it; random numbers; collectives. Operations of other threads are not recorded.
A function that depends on values, such as attention on context lengths, is called at each replay
(`CpuGraph.call`): the graph is then piecewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations whose result is uninitialised memory.
_EMPTY = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)

#: Operations that return a copy of their first argument, possibly in another dtype.
_COPIES = frozenset({"aten::_to_copy", "aten::clone"})

#: Tags of operations that give the host a value, or a shape that depends on values.
_VALUE_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

#: Functions of torch that call an operation with less overhead than `torch.ops`. They take the same
#: arguments with the same defaults, and also `out=`.
_OUT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        f"aten::{name}": getattr(torch, name)
        for name in (
            "add",
            "addcdiv",
            "addcmul",
            "addmm",
            "bmm",
            "cat",
            "div",
            "exp",
            "gather",
            "index_select",
            "mm",
            "mul",
            "neg",
            "rsqrt",
            "sigmoid",
            "sub",
        )
    }
    | {"aten::linalg_vector_norm": torch.linalg.vector_norm}
    # torch does not declare `_nn`.
    | {
        "aten::gelu": torch._C._nn.gelu,  # pyright: ignore[reportAttributeAccessIssue]
        "aten::silu": torch._C._nn.silu,  # pyright: ignore[reportAttributeAccessIssue]
    }
)
#: The same for operations that write to their first argument.
_IN_PLACE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        f"aten::{name}": getattr(Tensor, name)
        for name in (
            "add_",
            "addcdiv_",
            "addcmul_",
            "addmm_",
            "clamp_",
            "copy_",
            "div_",
            "fill_",
            "hypot_",
            "index_copy_",
            "masked_fill_",
            "mul_",
            "rsqrt_",
            "sub_",
            "zero_",
        )
    }
)


class CaptureError(RuntimeError):
    """A function does something that cannot be recorded, or a graph is used out of order."""


class CpuGraph(TorchDispatchMode):
    """Call `capture` once and `replay` any number of times; a `megatron.core.device.Recorder`.

    Operations run while they are recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]] = []
        self._paused = self._captured = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would make torch import dynamo when the mode is entered: seconds in every rank.
        return False

    def capture(self, run: Callable[[], None]) -> None:
        """Run a function and record its operations.

        Raises:
            CaptureError: the host reads a value or draws random numbers, or there is a collective;
                or something was recorded before.
        """
        if self._calls:
            raise CaptureError("a CpuGraph records once: create another one")
        with _NoHostReads(self), self:
            run()
        self._captured = True

    def call(self, function: Callable[[], None]) -> None:
        """Call a function now, inside `capture`, and at each replay.

        Its operations are not recorded. It may read values, and must write its results to
        persistent tensors.
        """
        if not self._paused:
            self._calls.append((function, (), {}))
        with self.paused():
            function()

    def call_for(self, function: Callable[[], Tensor]) -> Tensor:
        """Call a function and return its result.

        Each replay calls it again and copies the new result into the same memory.
        """
        with self.paused():
            result = function()
        if not self._paused:
            self._calls.append((lambda: result.copy_(function()), (), {}))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operations inside without recording them."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again.

        Raises:
            CaptureError: no capture has completed.
        """
        if not self._captured:
            raise CaptureError("replay of a CpuGraph before its capture has ended")
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
            raise CaptureError(f"{function} returns a value to the host")
        if function.namespace == "c10d":
            raise CaptureError(f"{function} is a collective")
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise CaptureError(f"{function} draws random numbers")
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
        name = function._schema.name
        if function._schema.is_mutable:
            self._calls.append((_IN_PLACE.get(name, _OUT.get(name, function)), args, named))
            return
        outputs = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        if name == "aten::lift_fresh":  # a tensor of Python numbers
            self._calls.append((Tensor.copy_, (outputs[0], outputs[0].clone()), {}))
            return
        input_memory = {_memory(t) for t in tree_leaves([args, named]) if isinstance(t, Tensor)}
        if name in _EMPTY or all(_memory(t) in input_memory for t in outputs):
            return
        if name in _COPIES:
            self._calls.append((Tensor.copy_, (outputs[0], args[0]), {}))
        elif name in _OUT:
            self._calls.append((_OUT[name], args, {**named, "out": results}))
        elif isinstance(results, Tensor):
            self._calls.append((_copy_result, (results, function, args, named), {}))
        else:
            self._calls.append((_copy_results, (outputs, function, args, named), {}))


def reads_on_host(function: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operation gives the host a value, or a tensor whose shape depends on values."""
    if function is torch.ops.aten.index.Tensor:  # masks only
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return not _VALUE_TAGS.isdisjoint(function.tags)


def _copy_result(
    result: Tensor, function: Callable[..., Tensor], args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Run an operation and copy its result into the recorded result."""
    result.copy_(function(*args, **named))


def _copy_results(
    results: Sequence[Tensor],
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> None:
    """Run an operation and copy its results into the recorded results."""
    tensors = (t for t in tree_leaves(function(*args, **named)) if isinstance(t, Tensor))
    for result, value in zip(results, tensors, strict=True):
        if result.numel():
            result.copy_(value)


def _memory(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory; oneDNN tensors have no storage, so use `id`."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


class _NoHostReads(TorchFunctionMode):
    """Refuse functions that read a tensor's values without an operation, during a capture."""

    _READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})

    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self._READS and not self._graph._paused:
            raise CaptureError(f"{function.__name__} returns a value to the host")
        return function(*args, **(kwargs or {}))

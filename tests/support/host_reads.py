# SPDX-License-Identifier: Apache-2.0
"""HostReads: what a computation reads on the host, where a GPU would be waited for.

On a CPU nothing waits, so reads are found by the operations that need a value: `item`, `tolist`,
and those whose result's shape depends on values. An `output_size` makes such an operation no read.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.cpu_graph import reads_on_host
from tests.support.op_tape import READS


class HostReads(TorchDispatchMode):
    """Note reads inside of a `with`.

    Attributes:
        names: of the operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._methods = _Methods(self.names)

    def __enter__(self) -> HostReads:
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        named = kwargs or {}
        if reads_on_host(function, args) and named.get("output_size") is None:
            self.names.append(str(function).rsplit(".", 1)[0])
        return function(*args, **named)


class _Methods(TorchFunctionMode):
    """Note methods that read a tensor without an operation."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self._names.append(function.__name__)
        return function(*args, **(kwargs or {}))

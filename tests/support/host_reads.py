# SPDX-License-Identifier: Apache-2.0
"""HostReads: the values that a computation reads on the host, where the host would wait for a GPU.

A CPU run does not wait, so reads are detected by their operations: `item`, `tolist`, and
operations with a data-dependent output shape. With an `output_size` such an operation reads
nothing.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.cpu_graph import reads_on_host
from tests.support.op_tape import MethodReads


class HostReads(TorchDispatchMode):
    """Record host reads inside a `with` block.

    Attributes:
        names: names of the reading operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._methods = MethodReads(self.names.append)

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

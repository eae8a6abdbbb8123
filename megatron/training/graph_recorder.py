# SPDX-License-Identifier: Apache-2.0
"""CudaRecorder: record GPU work once as a CUDA graph, launch all of it again in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Recorder(Protocol):
    """What records work and carries it out again, on the same addresses."""

    def capture(self, run: Callable[[], None]) -> None:
        """Record what `run` puts on the device, without carrying it out."""

    def replay(self) -> None:
        """Carry out what was recorded, behind what was put on the current stream."""


class CudaRecorder:
    """Record on a stream and with memory of its own.

    Threads that read data or watch NCCL go on calling the driver, so only this thread is held to
    what a recording allows. A graph that has failed to record cannot be used again.

    Args:
        device: a GPU.

    Raises:
        ValueError: the device is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                "--cuda-graph-impl full_iteration needs a GPU, and this run computes on the "
                f"{device.type}: choose none"
            )
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], None]) -> None:
        """Record what `run` puts on the device, without carrying it out."""
        failures: list[BaseException] = []
        context = torch.cuda.graph(
            self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with context:
                try:
                    run()
                except BaseException as error:
                    failures.append(error)
                    raise
        except Exception as error:
            # Ending a recording that has failed raises once more, and says less.
            if failures and failures[0] is not error:
                raise failures[0] from error
            raise

    def replay(self) -> None:
        """Carry out what was recorded, behind what was put on the current stream."""
        self._graph.replay()

# SPDX-License-Identifier: Apache-2.0
"""StepRecording: make a data-parallel engine's step self-contained while a CUDA graph captures it.

A captured step runs no Python when it is replayed, and must not wait for GPU work outside the
capture. So, between `begin_step` and `finish` of the captured step:

- it waits for no earlier event: no collective is in flight, and the pools start empty, because a
  buffer released earlier carries an event;
- side streams fork from the capturing stream inside the capture and join it before its end;
- every use of an unsharded weight follows the plan;
- all weights are stale as after an applied update, so that a replay gathers every weight, also
  if the captured step follows a skipped update.

Afterwards the buffers acquired during the capture belong to the recording, and eager steps acquire
others. A weight that the engine counts as stale after a replay may be up to date, never the
reverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.core.device import NullStream, Stream, current_stream
from megatron.core.distributed.data_parallel import DataParallel


def num_unplanned_uses(engine: DataParallel) -> int:
    """Return the number of uses of weights so far that no plan foresaw."""
    counts = [gatherer.counts for gatherer in engine.gatherers]
    return sum(count.on_demand + count.mismatches for count in counts)


def unrecordable(engine: DataParallel) -> str | None:
    """Return why an engine's step cannot be recorded, and the fix; None if it can."""
    config = engine.config
    prefetch = any(gatherer.prefetch for gatherer in engine.gatherers)
    if (config.overlap_param_gather or prefetch) and config.fsdp_all_gather_in_start_param_sync:
        return (
            "a recorded step cannot wait for an all-gather that was started before it: set "
            "fsdp_all_gather_in_start_param_sync to False"
        )
    if config.debug:
        return "debug compares orders on the host, which a recorded step cannot do: set it to False"
    return None


class StepRecording:
    """The recording of one step of an engine, from `prepare` to `close`.

    Args:
        engine: an engine between two steps.

    Raises:
        ValueError: collectives of the engine span two steps, or it reads gradients on the host.

    Attributes:
        buffers: pool buffers that replays write, reserved for the recording.
    """

    def __init__(self, engine: DataParallel) -> None:
        if reason := unrecordable(engine):
            raise ValueError(reason)
        self.engine = engine
        self.buffers: list[torch.Tensor] = []
        self._num_unplanned = 0
        self._counts: list[tuple[int, int]] = []

    @property
    def _streams(self) -> list[Stream]:
        streams = [gatherer.stream for gatherer in self.engine.gatherers]
        streams += [bucket.stream for bucket in self.engine.buckets[:1]]
        return [stream for stream in streams if not isinstance(stream, NullStream)]

    def prepare(self) -> None:
        """Bring the engine to its state after an applied update, with no collective in flight.

        This is collective: every rank calls it for the same step, as `start_param_sync`.
        """
        engine = self.engine
        engine.start_param_sync()
        # A free buffer carries an event of an eager step, which a capture may not wait for.
        engine.pool.trim()
        for gatherer in engine.gatherers:
            assert not gatherer.in_flight
            gatherer.pool.trim()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Enclose the captured step, on the capturing stream."""
        self._note()
        yield
        capturing = current_stream(self.engine.store.device)
        # A capture must end on the stream where it began, with all forked streams joined.
        for stream in self._streams:
            capturing.wait_stream(stream)

    def close(self) -> None:
        """Reserve the pool buffers of the captured step for its replays.

        Raises:
            ValueError: the captured step used weights in another order than the step before it.
        """
        engine = self.engine
        # Replays write these addresses, so no eager step may acquire them.
        self.buffers += engine.pool.take_free_buffers()
        for gatherer in engine.gatherers:
            self.buffers += gatherer.pool.take_free_buffers()
        # An unplanned use would have waited for an event that is not part of the graph.
        if num_unplanned_uses(engine) != self._num_unplanned:
            raise ValueError(
                "the recorded step needed weights in another order than the step before: a "
                "recorded step must run the same layers every time"
            )
        for i, (gatherer, before) in enumerate(zip(engine.gatherers, self._counts, strict=True)):
            counts = gatherer.counts
            self._counts[i] = counts.gathers - before[0], counts.prefetched - before[1]
            # The capture has only recorded these all-gathers: the first replay starts them.
            counts.gathers, counts.prefetched = before

    def replayed(self) -> None:
        """Count the all-gathers of a replay."""
        for gatherer, (gathers, prefetched) in zip(
            self.engine.gatherers, self._counts, strict=True
        ):
            gatherer.counts.gathers += gathers
            gatherer.counts.prefetched += prefetched

    def _note(self) -> None:
        self._num_unplanned = num_unplanned_uses(self.engine)
        self._counts = [(g.counts.gathers, g.counts.prefetched) for g in self.engine.gatherers]

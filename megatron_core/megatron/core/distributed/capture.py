# SPDX-License-Identifier: Apache-2.0
"""StepRecording: make a data-parallel engine's step self-contained while a CUDA graph captures it.

A captured step runs no Python when it is replayed, and must not touch work that was put on the GPU
outside. So, between `begin_step` and `finish` of the captured step:

- it waits for no earlier event: nothing is in flight, and the pools start empty, as a buffer given
  back earlier carries an event;
- the side streams, which the step itself starts after the capturing stream, end before it;
- every request for a gathered weight is one that the plan foresaw;
- what is stale is what is stale after an applied update, so that a replay gathers all of that,
  also if the captured step follows a skipped one.

Afterwards the buffers that were leased meanwhile belong to the recording, and eager steps lease
others. What the engine calls stale after a replay may already be up to date, never the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.core.device import NullStream, Stream, current_stream
from megatron.core.distributed.data_parallel import DataParallel


def unforeseen_needs(engine: DataParallel) -> int:
    """Return how often so far a weight was needed that no plan foresaw."""
    counts = [gatherer.counts for gatherer in engine.gatherers]
    return sum(count.on_demand + count.mismatches for count in counts)


def unrecordable(engine: DataParallel) -> str | None:
    """Return why an engine's step cannot be recorded, and the fix; None if it can."""
    config = engine.config
    ahead = config.overlap_param_gather or any(gatherer.prefetch for gatherer in engine.gatherers)
    if ahead and config.fsdp_all_gather_in_start_param_sync:
        return (
            "a recorded step cannot wait for a gather that was started before it: set "
            "fsdp_all_gather_in_start_param_sync to False"
        )
    if config.debug:
        return "debug compares orders on the host, which a recorded step cannot: set it to False"
    return None


class StepRecording:
    """The recording of one step of an engine, from `prepare` to `close`.

    Args:
        engine: between two steps.

    Raises:
        ValueError: the engine communicates across the border of steps, or reads on the host.

    Attributes:
        buffers: what replays write and nothing else may.
    """

    def __init__(self, engine: DataParallel) -> None:
        if reason := unrecordable(engine):
            raise ValueError(reason)
        self.engine = engine
        self.buffers: list[torch.Tensor] = []
        self._unforeseen = 0
        self._counts: list[tuple[int, int]] = []

    @property
    def _streams(self) -> list[Stream]:
        streams = [gatherer.stream for gatherer in self.engine.gatherers]
        streams += [bucket.stream for bucket in self.engine.buckets[:1]]
        return [stream for stream in streams if not isinstance(stream, NullStream)]

    def prepare(self) -> None:
        """Bring the engine to its state after every applied update, with nothing under way.

        Every rank calls this for the same step: it gathers what `start_param_sync` does.
        """
        engine = self.engine
        engine.start_param_sync()
        engine.pool.trim()
        for gatherer in engine.gatherers:
            assert not gatherer.in_flight
            gatherer.pool.trim()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Surround the recorded work, on the stream that records."""
        self._note()
        yield
        here = current_stream(self.engine.store.device)
        for stream in self._streams:
            here.wait_stream(stream)

    def close(self) -> None:
        """Take the buffers of what was recorded out of the pools.

        Raises:
            ValueError: weights were needed in another order than the step before needed them.
        """
        engine = self.engine
        self.buffers += engine.pool.take_free_buffers()
        for gatherer in engine.gatherers:
            self.buffers += gatherer.pool.take_free_buffers()
        if unforeseen_needs(engine) != self._unforeseen:
            raise ValueError(
                "the step that was recorded needed weights in another order than the one before "
                "it: a recorded step must run the same layers every time"
            )
        for i, (gatherer, before) in enumerate(zip(engine.gatherers, self._counts, strict=True)):
            counts = gatherer.counts
            self._counts[i] = counts.gathers - before[0], counts.prefetched - before[1]
            # Recording has started none of them: the first replay does.
            counts.gathers, counts.prefetched = before

    def replayed(self) -> None:
        """Count what a replay gathers."""
        for gatherer, (gathers, prefetched) in zip(
            self.engine.gatherers, self._counts, strict=True
        ):
            gatherer.counts.gathers += gathers
            gatherer.counts.prefetched += prefetched

    def _note(self) -> None:
        self._unforeseen = unforeseen_needs(self.engine)
        self._counts = [(g.counts.gathers, g.counts.prefetched) for g in self.engine.gatherers]

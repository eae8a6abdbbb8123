# SPDX-License-Identifier: Apache-2.0
"""Blocks encoded by several processes, and handed back in order.

Each worker has a pipe of its own and takes blocks in turn, two at a time at most: one that it
encodes and one that waits. Processes, not threads: reading JSON and turning tokens into arrays is
Python's own work, and a tokenizer with one thread of its own is faster than with shared ones.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from megatron.training.data.preprocessing.blocks import Block
from megatron.training.data.preprocessing.encoder import Encoded, Encoder

_BLOCKS_EACH = 2


class WorkerLost(ValueError):
    """A worker died; the text is one line."""


@dataclass(frozen=True)
class _Fault:
    """Why a worker could not encode a block; `expected` if it is the user's to mend."""

    text: str
    expected: bool


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def send(self, block: Block) -> None:
        """Hand over a block."""
        try:
            self.connection.send(block)
        except OSError:
            raise self._lost() from None

    def receive(self) -> Encoded:
        """Wait for the next block that is done."""
        try:
            found = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if not isinstance(found, _Fault):
            return found
        if found.expected:
            raise ValueError(found.text)
        raise RuntimeError(f"an encoding process failed:\n{found.text}")

    def _lost(self) -> WorkerLost:
        self.process.join()
        return WorkerLost(
            f"an encoding process died (exit code {self.process.exitcode}), perhaps for want of "
            "memory: what is committed is kept; go on with --resume and fewer --workers"
        )


def encode_in_order(
    blocks: Iterator[Block], encoder: Encoder, *, workers: int
) -> Iterator[Encoded]:
    """Encode blocks.

    Args:
        blocks: in order.
        encoder: how; workers make their own from its options.
        workers: processes; with one, or for a single block, the work is done in this process.

    Yields:
        The blocks' documents, in order.

    Raises:
        ValueError: a block cannot be read or encoded.
        WorkerLost: a worker died.
    """
    first = list(islice(blocks, 2))
    everything = chain(first, blocks)
    if workers == 1 or len(first) < 2:
        yield from map(encoder.encode, everything)
        return
    with _started(encoder, workers) as team:
        busy: deque[_Worker] = deque()
        for number, block in enumerate(everything):
            if len(busy) == _BLOCKS_EACH * workers:
                yield busy.popleft().receive()
            worker = team[number % workers]
            worker.send(block)
            busy.append(worker)
        while busy:
            yield busy.popleft().receive()


@contextmanager
def _started(encoder: Encoder, workers: int) -> Iterator[list[_Worker]]:
    """Start workers and end them."""
    context = multiprocessing.get_context("spawn")
    team: list[_Worker] = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, encoder.config, encoder.tokenizer.fingerprint),
                daemon=True,
            )
            process.start()
            theirs.close()
            team.append(_Worker(process, ours))
        yield team
    finally:
        for worker in team:
            worker.connection.close()
            worker.process.terminate()
        for worker in team:
            worker.process.join()


def _work(connection: Connection, config: object, fingerprint: str) -> None:
    """Encode what comes until nothing more can come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    # Read by the tokenizer library when it starts its threads: the workers are the parallelism.
    os.environ["RAYON_NUM_THREADS"] = "1"
    waiting: queue.SimpleQueue[Block] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, waiting), daemon=True).start()
    encoder: Encoder | None = None
    while True:
        block = waiting.get()
        try:
            if encoder is None:
                encoder = Encoder(config, fingerprint=fingerprint)  # type: ignore[arg-type]
            found: Encoded | _Fault = encoder.encode(block)
        except ValueError as error:
            found = _Fault(str(error), expected=True)
        except Exception:
            found = _Fault(traceback.format_exc(), expected=False)
        connection.send(found)


def _receive(connection: Connection, waiting: queue.SimpleQueue[Block]) -> None:
    """Take blocks off the pipe, so that neither side ever waits for the other to read.

    When the other side is gone, killed perhaps, so is this process.
    """
    try:
        while True:
            waiting.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)

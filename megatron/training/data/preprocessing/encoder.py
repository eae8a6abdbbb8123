# SPDX-License-Identifier: Apache-2.0
"""Blocks of input files to tokens, in several processes.

Every worker encodes one block at a time into the tokens of its documents; results are returned in
order. Each worker has a pipe of its own and takes blocks in turn, two at a time at most: one that
it encodes and one that waits. Processes, not threads: reading JSON and turning tokens into arrays
is Python's own work, and a tokenizer with one thread of its own is faster than with shared ones.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

import numpy as np

from megatron.cli.tokenizers import ArrayTokenizer, Tokenizer, build_tokenizer
from megatron.core.datasets.indexed_dataset import token_type_for
from megatron.training.data.documents import Block, Position, Record, Tally, read_records
from megatron.training.data.preprocessing.options import PreprocessConfig

if TYPE_CHECKING:
    from megatron.training.data.chat import ChatTemplate

_REFUSED = "refused by the tokenizer"
# Tokens back to back [t], and the length of each document [n].
_Flat = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One of the data sets that are written together, document by document.

    Args:
        suffix: after the output prefix.
        dtype: token type.
        described: whether a `<prefix>.json` says what wrote it; a mask has none.
    """

    suffix: str
    dtype: np.dtype
    described: bool = True


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The documents of one block.

    Args:
        tokens: of each stream, documents back to back, [t] in the stream's type.
        lengths: of each stream, tokens of each document, [n].
        tally: what was read and rejected.
        size: of the block, in bytes.
        end: where to go on.
    """

    tokens: tuple[np.ndarray, ...]
    lengths: tuple[np.ndarray, ...]
    tally: Tally
    size: int
    end: Position


class Encoder:
    """Encodes blocks as the options specify.

    Args:
        config: options.
        tokenizer: to use; None makes the one of the options.
        fingerprint: that the tokenizer made must have.

    Raises:
        ValueError: the tokenizer cannot be made, has no end-of-document token to append, or is
            another one by now.
    """

    def __init__(
        self,
        config: PreprocessConfig,
        *,
        tokenizer: Tokenizer | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer or build_tokenizer(
            config.kind,
            model=config.tokenizer_model,
            vocab_size=config.vocab_size,
            add_special_tokens=not config.tokenizer_hf_no_include_special_tokens,
            tiktoken=config.tiktoken.options,
        )
        if fingerprint not in (None, self.tokenizer.fingerprint):
            raise ValueError(f"the tokenizer {config.tokenizer_model} changed just now: start anew")
        if config.append_eod and self.tokenizer.eod is None:
            raise ValueError("--append-eod: the tokenizer has no end-of-document token")
        dtype = token_type_for(self.tokenizer.vocab_size)
        self.template: ChatTemplate | None = None
        if config.chat:
            self.template = _template(config)
            self.streams = (
                Stream(suffix="", dtype=dtype),
                Stream(suffix=".mask", dtype=np.dtype("u1"), described=False),
            )
        else:
            keys = config.keys
            suffixes = [""] if len(keys) == 1 else [f"_{key}" for key in keys]
            self.streams = tuple(Stream(suffix=suffix, dtype=dtype) for suffix in suffixes)

    def encode(self, block: Block) -> Encoded:
        """Encode the documents of a block.

        Raises:
            ValueError: a record holds no document, and the options are strict.
        """
        tally = Tally(strict=self.config.strict)
        records = list(
            read_records(
                block,
                tally,
                keys=self.config.keys,
                max_document_bytes=self.config.max_document_bytes,
                texts=self.template is None,
            )
        )
        encoded = (
            self._conversations(records, tally) if self.template else self._texts(records, tally)
        )
        return Encoded(
            tokens=tuple(tokens for tokens, _ in encoded),
            lengths=tuple(lengths for _, lengths in encoded),
            tally=tally,
            size=block.size,
            end=block.end,
        )

    def _texts(self, records: Sequence[Record], tally: Tally) -> list[_Flat]:
        if self.config.kind == "null":  # the one that takes no other text than numbers
            records = [record for record in records if self._takes(record, tally)]
        ending = self.tokenizer.eod if self.config.append_eod else None
        return [
            encode_flat(
                self.tokenizer,
                [r.values[index] for r in records],
                dtype=stream.dtype,
                ending=ending,
            )
            for index, stream in enumerate(self.streams)
        ]

    def _conversations(self, records: Sequence[Record], tally: Tally) -> list[_Flat]:
        from megatron.training.data.chat import MalformedConversation, encode_conversations

        assert self.template is not None
        encoded: tuple[list[list[int]], list[list[int]]] = ([], [])
        talks = [record.values[0] for record in records]
        found = encode_conversations(talks, self.tokenizer, self.template)
        for record, both in zip(records, found, strict=True):
            if isinstance(both, MalformedConversation):
                tally.take_back(both.reason, record.place, detail=both.detail)
                continue
            for numbers, learnt in zip(encoded, both, strict=True):
                numbers.append(learnt)
        return [
            _flatten(numbers, stream.dtype)
            for numbers, stream in zip(encoded, self.streams, strict=True)
        ]

    def _takes(self, record: Record, tally: Tally) -> bool:
        try:
            self.tokenizer.encode_batch(record.values)
        except ValueError:
            tally.take_back(_REFUSED, record.place)
            return False
        return True


def encode_flat(
    tokenizer: Tokenizer, texts: Sequence[str], *, dtype: np.dtype, ending: int | None
) -> _Flat:
    """Encode texts to tokens back to back.

    Args:
        tokenizer: encodes.
        texts: n documents.
        dtype: of the tokens.
        ending: a token to put after each text that does not end with it; None for none.

    Returns:
        Tokens [t] and the length of each document [n].
    """
    if isinstance(tokenizer, ArrayTokenizer):
        arrays = tokenizer.encode_arrays(texts)
        lengths = np.fromiter(map(len, arrays), np.int64, count=len(arrays))
        flat = np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="unsafe")
    else:
        flat, lengths = _flatten(tokenizer.encode_batch(texts), dtype)
    if ending is not None:
        ends = np.cumsum(lengths)
        missing = lengths == 0
        missing[~missing] = flat[ends[~missing] - 1] != ending
        flat = np.insert(flat, ends[missing], ending)
        lengths = lengths + missing
    return flat, lengths


def _flatten(lists: Sequence[Sequence[int]], dtype: np.dtype) -> _Flat:
    lengths = np.fromiter(map(len, lists), np.int64, count=len(lists))
    return np.fromiter(chain.from_iterable(lists), dtype, count=int(lengths.sum())), lengths


def _template(config: PreprocessConfig) -> ChatTemplate:
    from megatron.training.data.chat import read_chat_template

    return read_chat_template(config.chat_template, tokenizer_model=config.tokenizer_model)


_BLOCKS_EACH = 2


class WorkerLost(ValueError):
    """A worker died; the text is one line."""


@dataclass(frozen=True)
class _Fault:
    """Why a worker could not encode a block; `expected` if it is the user's to fix."""

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

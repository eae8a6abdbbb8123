# SPDX-License-Identifier: Apache-2.0
"""Encode blocks of input files to tokens in several processes.

Each worker encodes one block at a time; results are returned in order. Workers are assigned blocks
round robin over separate pipes, at most two at a time: one in work and one waiting. Workers are
processes, not threads, because parsing JSON and building arrays hold the GIL, and because a
tokenizer with one thread per process is faster than one that shares threads.
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
# Concatenated tokens [t] and the length of each document [n].
_Flat = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One of the data sets that are written together, document by document.

    Args:
        suffix: suffix to the output prefix.
        dtype: token type.
        has_description: whether a `<prefix>.json` describes the tokenizer; a mask has none.
    """

    suffix: str
    dtype: np.dtype
    has_description: bool = True


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The encoded documents of one block.

    Args:
        tokens: for each stream the concatenated documents, [t] in the stream's type.
        lengths: for each stream the number of tokens of each document, [n].
        tally: counts of accepted and rejected records.
        size: size of the block, in bytes.
        end: position after the block.
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
        tokenizer: tokenizer to use; None builds it from the options.
        fingerprint: expected fingerprint of the tokenizer; None skips the check.

    Raises:
        ValueError: the tokenizer cannot be built, has no end-of-document token to append, or has
            another fingerprint.
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
            raise ValueError(f"the tokenizer {config.tokenizer_model} has changed: start again")
        if config.append_eod and self.tokenizer.eod is None:
            raise ValueError("--append-eod: the tokenizer has no end-of-document token")
        dtype = token_type_for(self.tokenizer.vocab_size)
        self.template: ChatTemplate | None = None
        if config.chat:
            self.template = _template(config)
            self.streams = (
                Stream(suffix="", dtype=dtype),
                Stream(suffix=".mask", dtype=np.dtype("u1"), has_description=False),
            )
        else:
            keys = config.keys
            suffixes = [""] if len(keys) == 1 else [f"_{key}" for key in keys]
            self.streams = tuple(Stream(suffix=suffix, dtype=dtype) for suffix in suffixes)

    def encode(self, block: Block) -> Encoded:
        """Encode the documents of a block.

        Raises:
            ValueError: a record is rejected, and the options are strict.
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
            self._encode_conversations(records, tally)
            if self.template
            else self._encode_texts(records, tally)
        )
        return Encoded(
            tokens=tuple(tokens for tokens, _ in encoded),
            lengths=tuple(lengths for _, lengths in encoded),
            tally=tally,
            size=block.size,
            end=block.end,
        )

    def _encode_texts(self, records: Sequence[Record], tally: Tally) -> list[_Flat]:
        if self.config.kind == "null":  # the null tokenizer accepts only numbers
            records = [record for record in records if self._accepts(record, tally)]
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

    def _encode_conversations(self, records: Sequence[Record], tally: Tally) -> list[_Flat]:
        from megatron.training.data.chat import MalformedConversation, encode_conversations

        assert self.template is not None
        encoded: tuple[list[list[int]], list[list[int]]] = ([], [])
        conversations = [record.values[0] for record in records]
        outcomes = encode_conversations(conversations, self.tokenizer, self.template)
        for record, outcome in zip(records, outcomes, strict=True):
            if isinstance(outcome, MalformedConversation):
                tally.reject_accepted(outcome.reason, record.location, detail=outcome.detail)
                continue
            for sequences, sequence in zip(encoded, outcome, strict=True):
                sequences.append(sequence)
        return [
            _flatten(sequences, stream.dtype)
            for sequences, stream in zip(encoded, self.streams, strict=True)
        ]

    def _accepts(self, record: Record, tally: Tally) -> bool:
        try:
            self.tokenizer.encode_batch(record.values)
        except ValueError:
            tally.reject_accepted(_REFUSED, record.location)
            return False
        return True


def encode_flat(
    tokenizer: Tokenizer, texts: Sequence[str], *, dtype: np.dtype, ending: int | None
) -> _Flat:
    """Encode texts to one array of concatenated tokens.

    Args:
        tokenizer: the tokenizer.
        texts: n documents.
        dtype: token type.
        ending: token to append to each text that does not end with it; None for no token.

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
        needs_ending = lengths == 0
        needs_ending[~needs_ending] = flat[ends[~needs_ending] - 1] != ending
        flat = np.insert(flat, ends[needs_ending], ending)
        lengths = lengths + needs_ending
    return flat, lengths


def _flatten(lists: Sequence[Sequence[int]], dtype: np.dtype) -> _Flat:
    lengths = np.fromiter(map(len, lists), np.int64, count=len(lists))
    return np.fromiter(chain.from_iterable(lists), dtype, count=int(lengths.sum())), lengths


def _template(config: PreprocessConfig) -> ChatTemplate:
    from megatron.training.data.chat import read_chat_template

    return read_chat_template(config.chat_template, tokenizer_model=config.tokenizer_model)


_MAX_BLOCKS_PER_WORKER = 2


class WorkerLost(ValueError):
    """A worker died; the text is one line."""


@dataclass(frozen=True)
class _Fault:
    """Why a worker could not encode a block; `expected` if the user can fix it."""

    text: str
    expected: bool


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def send(self, block: Block) -> None:
        """Send a block to the worker."""
        try:
            self.connection.send(block)
        except OSError:
            raise self._lost_error() from None

    def receive(self) -> Encoded:
        """Wait for the next encoded block."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost_error() from None
        if not isinstance(answer, _Fault):
            return answer
        if answer.expected:
            raise ValueError(answer.text)
        raise RuntimeError(f"an encoding process failed:\n{answer.text}")

    def _lost_error(self) -> WorkerLost:
        self.process.join()
        return WorkerLost(
            f"an encoding process died (exit code {self.process.exitcode}), perhaps out of "
            "memory: committed output is kept; continue with --resume and fewer --workers"
        )


def encode_in_order(
    blocks: Iterator[Block], encoder: Encoder, *, workers: int
) -> Iterator[Encoded]:
    """Encode blocks.

    Args:
        blocks: blocks in order.
        encoder: encoder of this process; each worker builds its own from the same options.
        workers: number of processes; with one, or for a single block, this process encodes.

    Yields:
        The encoded blocks, in order.

    Raises:
        ValueError: a block cannot be read or encoded.
        WorkerLost: a worker died.
    """
    first_blocks = list(islice(blocks, 2))
    all_blocks = chain(first_blocks, blocks)
    if workers == 1 or len(first_blocks) < 2:
        yield from map(encoder.encode, all_blocks)
        return
    with _start_workers(encoder, workers) as pool:
        pending: deque[_Worker] = deque()
        for number, block in enumerate(all_blocks):
            if len(pending) == _MAX_BLOCKS_PER_WORKER * workers:
                yield pending.popleft().receive()
            worker = pool[number % workers]
            worker.send(block)
            pending.append(worker)
        while pending:
            yield pending.popleft().receive()


@contextmanager
def _start_workers(encoder: Encoder, workers: int) -> Iterator[list[_Worker]]:
    """Start worker processes and terminate them on exit."""
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    try:
        for _ in range(workers):
            parent_end, worker_end = context.Pipe()
            process = context.Process(
                target=_run_worker,
                args=(worker_end, encoder.config, encoder.tokenizer.fingerprint),
                daemon=True,
            )
            process.start()
            worker_end.close()
            pool.append(_Worker(process, parent_end))
        yield pool
    finally:
        for worker in pool:
            worker.connection.close()
            worker.process.terminate()
        for worker in pool:
            worker.process.join()


def _run_worker(connection: Connection, config: object, fingerprint: str) -> None:
    """Encode blocks until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # One tokenizer thread per worker. The library reads this when it starts its threads.
    os.environ["RAYON_NUM_THREADS"] = "1"
    waiting: queue.SimpleQueue[Block] = queue.SimpleQueue()
    threading.Thread(target=_receive_blocks, args=(connection, waiting), daemon=True).start()
    encoder: Encoder | None = None
    while True:
        block = waiting.get()
        try:
            if encoder is None:
                encoder = Encoder(config, fingerprint=fingerprint)  # type: ignore[arg-type]
            answer: Encoded | _Fault = encoder.encode(block)
        except ValueError as error:
            answer = _Fault(str(error), expected=True)
        except Exception:
            answer = _Fault(traceback.format_exc(), expected=False)
        connection.send(answer)


def _receive_blocks(connection: Connection, waiting: queue.SimpleQueue[Block]) -> None:
    """Move blocks from the pipe to a queue, so that neither side blocks on a full pipe.

    The process exits when the parent closes the pipe or is killed.
    """
    try:
        while True:
            waiting.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)

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

from megatron.cli.tokenizers import (
    ArrayTokenizer,
    TiktokenOptions,
    TiktokenPattern,
    Tokenizer,
    TokenizerType,
    build_tokenizer,
    guess_type,
    merge_file_problem,
)
from megatron.core.datasets.indexed_dataset import token_type_for
from megatron.training.data.documents import (
    MAX_DOCUMENT_BYTES,
    Block,
    Position,
    Record,
    Tally,
    read_records,
)

if TYPE_CHECKING:
    from megatron.training.data.chat import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class TiktokenFlags:
    """Options of --tokenizer-type tiktoken."""

    tiktoken_pattern: TiktokenPattern | None = None
    """Pre-tokenization pattern of --tokenizer-type tiktoken; derived: v2 for Megatron's JSON,
    llama3 (also GPT-4's) for a file with one rank per line."""
    tiktoken_num_special_tokens: int | None = None
    """Number of ids that --tokenizer-type tiktoken reserves for special tokens, before the ranks of
    Megatron's JSON, after the ranks of a file with one rank per line; derived: 1000, or the number
    of named ones."""
    tiktoken_special_tokens: tuple[str, ...] | None = None
    """Names of the first special tokens; derived: unk, s, /s, mask, pad, cls and sep in <> for
    Megatron's JSON, none for a file with one rank per line."""

    def __post_init__(self) -> None:
        """Check what can be checked without the file."""
        _ = self.options

    @property
    def options(self) -> TiktokenOptions:
        """Return the tokenizer's options. Raises ValueError."""
        return TiktokenOptions(
            pattern=self.tiktoken_pattern,
            num_special_tokens=self.tiktoken_num_special_tokens,
            special_tokens=self.tiktoken_special_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """Options of preprocess_data."""

    input: tuple[str, ...]
    """Files, folders or glob patterns: JSON lines (.jsonl, .jsonl.gz), Parquet tables, and .txt
    files of one document each."""
    output_prefix: str
    """Path prefix of the data set to write, without .bin or .idx; for use as --data-path."""
    tokenizer_type: TokenizerType | None = None
    """Type of tokenizer: a Hugging Face tokenizer.json, a SentencePiece .model, a tiktoken
    vocabulary, UTF-8 bytes, or plain numbers; derived from --tokenizer-model."""
    tokenizer_model: str | None = None
    """Path of a tokenizer.json, of a folder that contains one, of a vocab.json, of a SentencePiece
    .model, or of a tiktoken vocabulary: Megatron's JSON, or a file with one rank per line."""
    merge_file: str | None = None
    """Merges file of a vocab.json, in the same folder: gpt2-merges.txt for gpt2-vocab.json."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Encode texts without the special tokens that the tokenizer adds around them, such as BOS."""
    tiktoken: TiktokenFlags = TiktokenFlags()
    vocab_size: int | None = None
    """Vocabulary size, for --tokenizer-type null; maximum vocabulary size, for tiktoken."""
    json_keys: tuple[str, ...] = ("text",)
    """Key or column of the document's text; each of several keys writes PREFIX_KEY.bin and .idx."""
    append_eod: bool = False
    """Append the tokenizer's end-of-document token to every document that does not end with it."""
    chat: bool = False
    """Documents are conversations; in addition to the tokens, write PREFIX.mask.bin and .idx, 1 for
    the assistant's tokens, as --sft needs."""
    chat_template: str | None = None
    """Chat template: a file, or one of chatml, llama3, plain; derived: the tokenizer's own."""
    chat_key: str = "messages"
    """Key or column of the conversation, a list of objects with role and content."""
    workers: int | None = None
    """Number of encoding processes; derived: one per core, but one for the byte tokenizer, which
    encodes as fast as files are read."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Maximum size of a line, text or row, in bytes; limits memory. Longer records are rejected."""
    strict: bool = False
    """Stop at the first rejected record, instead of counting and skipping it."""
    resume: bool = False
    """Continue a killed run with the same options; no effect if the run has finished; starts from
    scratch if there was none."""
    overwrite: bool = False
    """Replace an existing data set under --output-prefix; otherwise it is an error."""
    shuffle_seed: int | None = None
    """Shuffle the documents with this seed, since --split takes validation and test from the end;
    derived: the order of the input. Needs twice the disk space."""

    def __post_init__(self) -> None:
        """Check the options that can be checked without files."""
        kind = self.kind
        problems = []
        if self.workers is not None and self.workers < 1:
            problems.append(f"--workers {self.workers}: must be 1 or more")
        if self.max_document_bytes < 1:
            problems.append(f"--max-document-bytes {self.max_document_bytes}: must be 1 or more")
        if self.tokenizer_model is not None and kind in ("byte", "null"):
            problems.append(f"--tokenizer-type {kind} does not take a --tokenizer-model")
        if problem := merge_file_problem(self.tokenizer_model, self.merge_file):
            problems.append(problem)
        if self.vocab_size is not None and kind not in ("null", "tiktoken"):
            problems.append("--vocab-size is for --tokenizer-type null or tiktoken")
        if kind != "tiktoken":
            flags_set = (name for name, value in vars(self.tiktoken).items() if value is not None)
            problems += [
                f"--{name.replace('_', '-')} is for --tokenizer-type tiktoken" for name in flags_set
            ]
        if self.chat and self.append_eod:
            problems.append("--append-eod is useless with --chat: the template ends a conversation")
        if not self.chat and self.chat_template is not None:
            problems.append("--chat-template has no effect without --chat")
        if len(set(self.json_keys)) < len(self.json_keys):
            problems.append(f"--json-keys {' '.join(self.json_keys)}: a key is named twice")
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 1 << 32:
            problems.append(f"--shuffle-seed {self.shuffle_seed}: must be from 0 to 4294967295")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the values that a record must hold."""
        return (self.chat_key,) if self.chat else self.json_keys

    @property
    def kind(self) -> TokenizerType:
        """Return the kind of tokenizer."""
        return self.tokenizer_type or guess_type(self.tokenizer_model)

    @property
    def num_workers(self) -> int:
        """Return the number of processes that encode."""
        if self.workers is not None:
            return self.workers
        return 1 if self.kind == "byte" else _cores()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


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

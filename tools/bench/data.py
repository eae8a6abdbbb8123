# SPDX-License-Identifier: Apache-2.0
"""Measure the data path in one table: writing, sample indices, reading, encoding.

    python -m tools.bench.data [--quick] [--clock cpu]

Each line is the median of repeats that take turns, so that a busy moment hits all lines alike. Two
lines are yardsticks made of plain calls, to judge the others by on any machine: copying one slice
of a mapped file per sample, and the tokenizer library's own batch call. Targets of the other lines
are half or twice what megatron-core 0.16.1 reached on 2 cores.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Literal

import numpy as np

from megatron.cli.tokenizers import train_bpe
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.training.data.documents import Tally, read_documents
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from megatron.training.quickstart import build_corpus
from tools.bench.harness import run_rows
from tools.bench.table import Row, compared

SEQUENCE_LENGTH = 1024
VOCAB_SIZE = 4096
TOKENS = 20_000_000
# Documents for the indices: about 5 samples each, as in web text of some length.
INDEX_DOCUMENTS = 400_000
INDEX_DOCUMENT_TOKENS = 10_000
READ_SAMPLES = 4096
# Some seconds' work, so that starting workers counts as little as it does in real work.
ENCODED_BYTES = 48_000_000

# What is counted, its target, and a call that does the work and returns how much of it there was.
Case = tuple[str, str, Callable[[], float]]


def _writing(folder: Path) -> list[Case]:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 2 * SEQUENCE_LENGTH, TOKENS // SEQUENCE_LENGTH)
    uint16_tokens = random.integers(0, VOCAB_SIZE, lengths.sum(), dtype=np.uint16)
    int64_tokens = uint16_tokens.astype(np.int64)

    def write(tokens: np.ndarray, name: str) -> float:
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            writer.add_documents(tokens, lengths)
        return len(tokens) / 1e6

    return [
        ("write .bin/.idx, uint16 tokens, Mtok/s", ">= 74", lambda: write(uint16_tokens, "narrow")),
        ("write .bin/.idx, int64 tokens, Mtok/s", ">= 74", lambda: write(int64_tokens, "wide")),
    ]


def _indexing() -> list[Case]:
    random = np.random.default_rng(1)
    lengths = random.integers(1, INDEX_DOCUMENT_TOKENS, INDEX_DOCUMENTS).astype(np.int32)
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), SEQUENCE_LENGTH, None)
    documents = np.arange(len(lengths))
    order = build_document_index(documents, plan, np.random.RandomState(0))

    def sample_index() -> float:
        build_sample_index(lengths, order, plan, sequence_length=SEQUENCE_LENGTH)
        return plan.num_samples / 1e6

    def all_indices() -> float:
        state = np.random.RandomState(0)
        build_sample_index(
            lengths,
            build_document_index(documents, plan, state),
            plan,
            sequence_length=SEQUENCE_LENGTH,
        )
        build_shuffle_index(plan, state)
        return plan.num_samples / 1e6

    return [
        ("sample index, M samples/s", ">= 4", sample_index),
        ("document, sample and shuffle index, M samples/s", ">= 4", all_indices),
    ]


def _reading(folder: Path) -> list[Case]:
    source = IndexedDataset(folder / "narrow")
    config = GPTDatasetConfig(sequence_length=SEQUENCE_LENGTH, seed=1, vocab_size=VOCAB_SIZE)
    data = GPTDataset(source, config, sequences=range(len(source)))
    picks = np.random.default_rng(2).integers(0, len(data), READ_SAMPLES)

    def read(batch: int) -> float:
        for start in range(0, READ_SAMPLES, batch):
            data.batch(picks[start : start + batch])
        return READ_SAMPLES / 1e3

    def items() -> float:
        for pick in picks.tolist():
            data[pick]
        return READ_SAMPLES / 1e3

    def slices() -> float:
        for pick in picks.tolist():
            start = pick * SEQUENCE_LENGTH
            source.tokens[start : start + SEQUENCE_LENGTH + 1].astype(np.int64)
        return READ_SAMPLES / 1e3

    return [
        ("yardstick: one slice per sample, k samples/s", "", slices),
        ("read batches of 32, k samples/s", ">= 58", lambda: read(32)),
        ("read batches of 4, k samples/s", ">= 58", lambda: read(4)),
        ("read single items, k samples/s", "", items),
    ]


def _encoding(folder: Path, most_bytes: int) -> list[Case]:
    build_corpus(folder / "corpus.jsonl")
    texts, size = [], 0
    for text in cycle(read_documents([folder / "corpus.jsonl"], Tally())):
        texts.append(text)
        size += len(text.encode())
        if size > most_bytes:
            break
    sample_file = folder / "part.jsonl"
    sample_file.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    tokenizer = train_bpe(texts[:4000], VOCAB_SIZE, folder / "tokenizer.json")
    config = PreprocessConfig(
        overwrite=True,
        input=(str(sample_file),),
        output_prefix=str(folder / "encoded"),
        tokenizer_model=str(folder / "tokenizer.json"),
    )

    def plain() -> float:
        tokenizer.encode_batch(texts)
        return size / 1e6

    def prepare() -> float:
        preprocess(config)
        return size / 1e6

    return [
        ("yardstick: the library's encode_batch, MB/s", "", plain),
        ("preprocess_data / encode_batch, MB/s", ">= 0.8", prepare),
    ]


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its workers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


CLOCKS = {"wall": time.perf_counter, "cpu": _cpu_seconds}


def measure(cases: list[Case], seconds: float, clock: Callable[[], float]) -> list[list[float]]:
    """Run the cases in turns until the time is up.

    Args:
        cases: the cases.
        seconds: time limit of all cases together; each case runs at least three times.
        clock: reads the seconds that count.

    Returns:
        The rates of each case, by round.
    """
    rates: list[list[float]] = [[] for _ in cases]
    end = time.perf_counter() + seconds
    while len(rates[-1]) < 3 or time.perf_counter() < end:
        for (_, _, work), case_rates in zip(cases, rates, strict=True):
            begin = clock()
            amount = work()
            case_rates.append(amount / (clock() - begin))
    return rates


def rows(quick: bool = False, *, clock: Literal["wall", "cpu"] = "wall") -> list[Row]:
    """Measure everything.

    Args:
        quick: three rounds only, and a quarter of the text to encode.
        clock: which seconds count.
    """
    table_rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writing = _writing(folder)
        writing[0][2]()  # what the reading cases read
        encoding = _encoding(folder, ENCODED_BYTES // 4 if quick else ENCODED_BYTES)
        cases = [*writing, *_indexing(), *_reading(folder), *encoding]
        rates = measure(cases, 0.0 if quick else 30.0, CLOCKS[clock])
        for (what, target, _), mcore in zip(cases, rates, strict=True):
            median = statistics.median(mcore)
            table_rows.append(compared(bench="data", what=what, mcore=median, target=target))
        # Encoding, the last case, against the library's own call, the one before it.
        ratios = [
            mcore_rate / library_rate
            for mcore_rate, library_rate in zip(rates[-1], rates[-2], strict=True)
        ]
        what, target, _ = cases[-1]
        table_rows[-1] = compared(
            bench="data",
            what=what,
            mcore=statistics.median(rates[-1]),
            peer=statistics.median(rates[-2]),
            ratio=statistics.median(ratios),
            target=target,
        )
    return table_rows


if __name__ == "__main__":
    run_rows(rows, __doc__)

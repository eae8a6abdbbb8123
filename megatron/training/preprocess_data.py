# SPDX-License-Identifier: Apache-2.0
"""Turn text files into the `.bin/.idx` token files that training reads.

    python -m megatron.training.preprocess_data --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type hf --tokenizer-model tokenizer.json --append-eod
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import numpy as np

from megatron.core.datasets.atomic_file import atomic_write
from megatron.core.datasets.indexed_dataset import token_type_for
from megatron.core.datasets.indexed_writer import IndexedDatasetWriter
from megatron.training.documents import Tally, read_documents, total_bytes
from megatron.training.errors import run_entry_point
from megatron.training.flags import parse_command_line
from megatron.training.schema import flatten, options
from megatron.training.tokenizers import Tokenizer, build_tokenizer
from megatron.training.yaml_file import write_options

# Characters encoded at a time. The library's encodings take some 100 bytes per token until they are
# dropped, so this, not the size of the input, is what memory depends on.
_CHARACTERS_AT_ONCE = 1 << 20
_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """Options of preprocess_data."""

    input: tuple[str, ...]
    """Files of JSON lines, or .txt files of one document each."""
    output_prefix: str
    """Path of the data set to write, without .bin or .idx; what --data-path is given."""
    tokenizer_type: Literal["hf", "byte", "null"] = "hf"
    """Kind of tokenizer: a Hugging Face tokenizer.json, UTF-8 bytes, or numbers as they are."""
    tokenizer_model: str | None = None
    """Path of a Hugging Face tokenizer.json."""
    vocab_size: int | None = None
    """Number of ids, for --tokenizer-type null."""
    json_keys: str = "text"
    """Key that holds the document in a JSON line."""
    append_eod: bool = False
    """End every document with the tokenizer's end-of-document token."""
    workers: int | None = None
    """Threads of the hf tokenizer; none means one per core."""

    def __post_init__(self) -> None:
        """Check the options that can be checked without files."""
        problems = []
        if self.workers is not None and self.workers < 1:
            problems.append(f"--workers {self.workers}: must be 1 or more")
        if self.workers is not None and self.tokenizer_type != "hf":
            problems.append(f"--workers has no effect on --tokenizer-type {self.tokenizer_type}")
        if self.tokenizer_model is not None and self.tokenizer_type != "hf":
            problems.append(f"--tokenizer-type {self.tokenizer_type} takes no --tokenizer-model")
        if self.vocab_size is not None and self.tokenizer_type != "null":
            problems.append("--vocab-size is for --tokenizer-type null")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class PreprocessResult:
    """What was written; also the content of `<prefix>.json`.

    Args:
        tokenizer: kind, fingerprint, vocab_size and eod of the tokenizer.
        dtype: token type of the .bin.
        append_eod: whether every document ends with eod.
        documents: written.
        tokens: written, end-of-document tokens included.
        rejected: input lines without a document, by reason.
    """

    tokenizer: dict[str, Any]
    dtype: str
    append_eod: bool
    documents: int
    tokens: int
    rejected: dict[str, int]


class Report(Protocol):
    """Told after every chunk how far the work is."""

    def __call__(self, *, read_bytes: int, tokens: int) -> None:
        """Show it, or not."""


def _silent(*, read_bytes: int, tokens: int) -> None:
    """Show nothing."""


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    chunk, characters = [], 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if characters >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def preprocess(
    config: PreprocessConfig,
    *,
    tokenizer: Tokenizer,
    tally: Tally | None = None,
    report: Report = _silent,
) -> PreprocessResult:
    """Encode all documents of the input files in order.

    Args:
        config: files and options; its tokenizer options are taken as done.
        tokenizer: encodes.
        tally: filled with what was read and rejected.
        report: called after every chunk.

    Returns:
        What was written.

    Raises:
        ValueError: a file is missing, no document is left, or the tokenizer has no
            end-of-document token to append. Nothing is written then.
    """
    tally = Tally() if tally is None else tally
    total_bytes(config.input)
    if config.append_eod and tokenizer.eod is None:
        raise ValueError("--append-eod: the tokenizer has no end-of-document token")
    prefix = Path(config.output_prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    ending = [tokenizer.eod] if config.append_eod else []
    with IndexedDatasetWriter(prefix, token_type_for(tokenizer.vocab_size)) as writer:
        for texts in _chunks(read_documents(config.input, tally, key=config.json_keys)):
            encoded = [ids + ending for ids in tokenizer.encode_batch(texts)]
            lengths = np.array([len(ids) for ids in encoded])
            flat = np.fromiter(chain.from_iterable(encoded), dtype=np.int64, count=lengths.sum())
            writer.add_documents(flat, lengths)
            report(read_bytes=tally.read_bytes, tokens=writer.num_tokens)
        if writer.num_documents == 0:
            raise ValueError(
                f"no document in {', '.join(config.input)}; {tally.describe_rejected() or 'empty'}"
            )
        result = PreprocessResult(
            tokenizer={
                "type": config.tokenizer_type,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "eod": tokenizer.eod,
            },
            dtype=str(token_type_for(tokenizer.vocab_size)),
            append_eod=config.append_eod,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            rejected=dict(tally.rejected),
        )
        # Before the pair's names: where there is an index, there is its description.
        writer.prepare()
        with atomic_write(Path(f"{prefix}.json")) as stream:
            stream.write(json.dumps(asdict(result), indent=1).encode() + b"\n")
    return result


@contextmanager
def show_progress(total: int, out: TextIO) -> Iterator[Report]:
    """Show progress: a bar on a terminal, a line every few seconds elsewhere.

    Args:
        total: bytes of all inputs.
        out: where to show it.

    Yields:
        What `preprocess` reports to.
    """
    if not out.isatty():
        yield _Lines(total, out)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [
        TextColumn("encoding"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task("", total=total, tokens=0)

        def show(*, read_bytes: int, tokens: int) -> None:
            bar.update(task, completed=read_bytes, tokens=tokens)

        yield show


class _Lines:
    """Prints a line every few seconds."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._begin = self._said = time.monotonic()

    def __call__(self, *, read_bytes: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        speed = read_bytes / 1e6 / (now - self._begin)
        print(
            f"encoded {read_bytes / 1e6:.1f} of {self._total / 1e6:.1f} MB "
            f"({read_bytes / max(self._total, 1):.0%}), {tokens:,} tokens, {speed:.1f} MB/s",
            file=self._out,
            flush=True,
        )


def _main(argv: Sequence[str]) -> None:
    command = parse_command_line(
        PreprocessConfig,
        argv,
        prog="python -m megatron.training.preprocess_data",
        description="Turn text files into the .bin/.idx token files that training reads.",
    )
    config = command.config
    if command.invocation.print_config:
        print(write_options(flatten(config), options(PreprocessConfig)), end="")
        return
    if config.workers is not None:
        # Read by the library's thread pool when it starts, with the first batch.
        os.environ["RAYON_NUM_THREADS"] = str(config.workers)
    total = total_bytes(config.input)
    tokenizer = build_tokenizer(
        config.tokenizer_type, model=config.tokenizer_model, vocab_size=config.vocab_size
    )
    tally, begin = Tally(), time.monotonic()
    try:
        with show_progress(total, sys.stdout) as report:
            result = preprocess(config, tokenizer=tokenizer, tally=tally, report=report)
    except OSError as error:
        raise ValueError(
            f"{error.filename or config.output_prefix}: {error.strerror}; nothing was written, "
            "give --output-prefix a folder with room that you may write"
        ) from None
    if tally.rejected:
        print(tally.describe_rejected(), flush=True)
    seconds = time.monotonic() - begin
    print(
        f"wrote {config.output_prefix}.bin and .idx: {result.documents:,} documents, "
        f"{result.tokens:,} tokens in {seconds:.1f} s ({total / 1e6 / seconds:.1f} MB/s)"
    )


if __name__ == "__main__":
    sys.exit(
        run_entry_point(
            lambda: _main(sys.argv[1:]), prog="python -m megatron.training.preprocess_data"
        )
    )

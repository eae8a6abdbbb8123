# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level BPE tokenizer on files of text.

    python -m megatron.training.train_tokenizer --input texts/ --vocab-size 32000 \\
        --output data/tokenizer.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megatron.cli.errors import run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.standard_streams import run_command
from megatron.cli.tokenizers import train_bpe
from megatron.training.data.documents import Tally, find_inputs, read_documents
from megatron.training.data.progress_display import Report, show_progress

PROG = "python -m megatron.training.train_tokenizer"


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig:
    """Options of train_tokenizer."""

    input: tuple[str, ...]
    """Files, folders or glob patterns, as for preprocess_data."""
    output: str
    """Path of the tokenizer.json to write, for use as --tokenizer-model."""
    vocab_size: int
    """Vocabulary size, the 256 bytes and the end-of-document token included."""
    json_key: str = "text"
    """Key or column of the document's text."""
    train_bytes: int = 200_000_000
    """Maximum size of the training text, in bytes; further text is not read. Memory grows with
    it."""
    overwrite: bool = False
    """Replace --output if it exists; otherwise an existing file is an error."""


def _until_size(texts: Iterable[str], size: int, report: Report) -> Iterator[str]:
    """Yield texts until their total size reaches `size` bytes."""
    read = documents = 0
    for text in texts:
        if read >= size:
            return
        yield text
        read, documents = read + len(text.encode()), documents + 1
        report(read_bytes=read, documents=documents)


def _main(argv: Sequence[str]) -> None:
    command = parse_command_line(
        TrainTokenizerConfig,
        argv,
        prog=PROG,
        description="Train a byte-level BPE tokenizer on files of text.",
    )
    config = command.config
    if Path(config.output).exists() and not config.overwrite:
        raise ValueError(
            f"{config.output} exists: give another --output, or --overwrite to replace it (token "
            "files encoded with it still need it)"
        )
    inputs = find_inputs(config.input)
    if inputs.left_out:
        print(inputs.describe_left_out(), flush=True)
    tally, begin = Tally(), time.monotonic()
    texts = read_documents([f.path for f in inputs.files], tally, key=config.json_key)
    first_text = next(texts, None)
    if first_text is None:
        raise ValueError(
            f"no document in {', '.join(config.input)}; {tally.describe_rejected() or 'empty'}"
        )
    size = min(config.train_bytes, inputs.total_bytes)
    bars = sys.stderr.isatty()
    try:
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)
        with show_progress(size, sys.stdout, label="reading", line_prefix="read") as report:
            training_texts = list(
                _until_size(chain([first_text], texts), config.train_bytes, report)
            )
        print(
            f"training up to {config.vocab_size:,} ids on {len(training_texts):,} documents",
            flush=True,
        )
        tokenizer = train_bpe(training_texts, config.vocab_size, config.output, show_progress=bars)
    except OSError as error:
        raise ValueError(
            f"{error.filename or config.output}: {error.strerror}; give --output a writable path"
        ) from None
    if tally.rejected:
        print(tally.describe_rejected())
    print(
        f"wrote {config.output}: {tokenizer.vocab_size:,} ids from {tally.documents:,} documents "
        f"in {time.monotonic() - begin:.1f} s"
    )


if __name__ == "__main__":
    run_command(lambda: run_entry_point(lambda: _main(sys.argv[1:]), prog=PROG))

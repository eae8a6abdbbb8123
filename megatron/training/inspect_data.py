# SPDX-License-Identifier: Apache-2.0
"""Show the contents of token files: `python -m megatron.training.inspect_data PREFIX ...`.

python -m megatron.training.inspect_data data/my --document 3
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli.errors import run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.standard_streams import run_command
from megatron.cli.tokenizers import (
    SpecialTokens,
    TiktokenOptions,
    Tokenizer,
    TokenizerType,
    build_tokenizer,
    guess_type,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, bin_path
from megatron.training.data.vocabulary import describe_files

PROG = "python -m megatron.training.inspect_data"
_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class InspectDataConfig:
    """Options of inspect_data."""

    data_path: tuple[str, ...]
    """Prefixes of .bin/.idx pairs; may also be given first, without the flag."""
    document: int = 0
    """Index of the document to show, from 0."""
    max_tokens: int = 200
    """Maximum number of tokens to show."""
    tokenizer_type: TokenizerType | None = None
    """Type of tokenizer; derived: the one that wrote the files, if recorded."""
    tokenizer_model: str | None = None
    """Path of a tokenizer.json, of its folder, of a SentencePiece .model, or of a tiktoken
    vocabulary."""
    vocab_size: int | None = None
    """Vocabulary size, for --tokenizer-type null."""


def describe(prefix: str, config: InspectDataConfig) -> Iterator[str]:
    """Describe one pair of token files.

    Args:
        prefix: path prefix of the pair.
        config: the document to show, and how to decode it.

    Yields:
        Lines of text.

    Raises:
        ValueError: the pair is missing or damaged, or has no such document.
    """
    data = IndexedDataset(prefix)
    written = describe_files(prefix)
    yield (
        f"{prefix}: {data.num_documents:,} documents, {data.num_tokens:,} tokens of {data.dtype} "
        f"({bin_path(prefix).stat().st_size / 1e6:.1f} MB)"
    )
    if data.num_tokens == 0:
        return
    ends = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])
    lengths = np.diff(ends[data.documents])
    yield (
        f"  tokens per document: {lengths.min():,} to {lengths.max():,}, "
        f"median {int(np.median(lengths)):,}; largest id {_max_token_id(data):,}"
    )
    if written:
        named = " ".join(filter(None, [written.get("type"), written.get("model")]))
        yield (
            f"  written with: {named} (vocabulary {written.get('vocab_size')}, "
            f"end of document {written.get('eod')}{_special_tokens(written)})"
        )
    if Path(f"{prefix}.mask.idx").exists():
        learnt = int(IndexedDataset(f"{prefix}.mask").tokens.sum(dtype=np.int64))
        yield f"  learnt from: {learnt:,} tokens ({learnt / data.num_tokens:.0%})"
    yield from _document(data, config, _tokenizer(written, config))


def _special_tokens(written: dict[str, Any]) -> str:
    if written["special_tokens"] is None:
        return ", special tokens of the template"
    special_tokens = SpecialTokens.from_json(written["special_tokens"])
    return f", {special_tokens}" if special_tokens else ""


def _max_token_id(data: IndexedDataset) -> int:
    blocks = range(0, data.num_tokens, _SCAN_TOKENS)
    return max(int(data.tokens[start : start + _SCAN_TOKENS].max()) for start in blocks)


def _document(
    data: IndexedDataset, config: InspectDataConfig, tokenizer: Tokenizer | None
) -> Iterator[str]:
    number = config.document
    if not 0 <= number < data.num_documents:
        raise ValueError(
            f"--document {number}: {data.prefix} has the documents 0 to {data.num_documents - 1}"
        )
    begin, end = int(data.documents[number]), int(data.documents[number + 1])
    ids = [int(token) for index in range(begin, end) for token in data.get(index)]
    displayed_ids = ids[: config.max_tokens]
    cut = f", the first {len(displayed_ids):,} of them" if len(displayed_ids) < len(ids) else ""
    yield f"  document {number}, {len(ids):,} tokens{cut}:"
    yield f"    {' '.join(map(str, displayed_ids))}"
    if tokenizer is None:
        yield "    (give --tokenizer-type and --tokenizer-model to see its text)"
    else:
        yield f"    {json.dumps(tokenizer.detokenize(displayed_ids), ensure_ascii=False)}"


def _tokenizer(written: dict[str, Any], config: InspectDataConfig) -> Tokenizer | None:
    """Return the requested tokenizer, or the one that wrote the files if it still exists."""
    tiktoken = TiktokenOptions.from_json(written.get("tiktoken"))
    if config.tokenizer_type or config.tokenizer_model:
        kind = config.tokenizer_type or guess_type(config.tokenizer_model)
        return build_tokenizer(
            kind, model=config.tokenizer_model, vocab_size=config.vocab_size, tiktoken=tiktoken
        )
    kind, model = written.get("type"), written.get("model")
    if kind is None or (model is not None and not Path(model).exists()):
        return None
    size = written["vocab_size"] - 1 if kind == "null" else None
    tokenizer = build_tokenizer(kind, model=model, vocab_size=size, tiktoken=tiktoken)
    return tokenizer if tokenizer.fingerprint == written.get("fingerprint") else None


def _main(argv: Sequence[str]) -> None:
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--data-path")
    command = parse_command_line(
        InspectDataConfig, words, prog=PROG, description="Show the contents of token files."
    )
    for prefix in command.config.data_path:
        for line in describe(prefix, command.config):
            print(line)


if __name__ == "__main__":
    run_command(lambda: run_entry_point(lambda: _main(sys.argv[1:]), prog=PROG))

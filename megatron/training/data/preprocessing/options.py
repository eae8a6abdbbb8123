# SPDX-License-Identifier: Apache-2.0
"""The options of preprocess_data."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron.cli.tokenizers import (
    TiktokenOptions,
    TiktokenPattern,
    TokenizerType,
    guess_type,
    merge_file_problem,
)
from megatron.training.data.documents import MAX_DOCUMENT_BYTES


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

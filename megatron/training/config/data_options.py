# SPDX-License-Identifier: Apache-2.0
"""Options of the training data and of the tokenizer. `data.data_paths` checks the data options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import not_negative, positive


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    data_path: tuple[str, ...] | None = None
    """Prefixes of .bin/.idx pairs, divided by --split into training, validation and test data:
    PREFIX..., or WEIGHT PREFIX WEIGHT PREFIX ... for a blend."""
    data_args_path: str | None = None
    """File that holds the arguments of --data-path."""
    train_data_path: tuple[str, ...] | None = None
    """Prefixes of the training data, used whole, instead of a share of --data-path."""
    valid_data_path: tuple[str, ...] | None = None
    """Prefixes of the validation data; requires --train-data-path."""
    test_data_path: tuple[str, ...] | None = None
    """Prefixes of the test data; requires --train-data-path."""
    per_split_data_args_path: str | None = None
    """JSON file that holds the arguments of --train-data-path, --valid-data-path and
    --test-data-path: {"train": [...], "valid": [...], "test": [...]}."""
    mock_data: bool = False
    """Train on synthetic tokens, without any data file; needs --vocab-size or a tokenizer."""
    split: str = "969,30,1"
    """Relative shares of the documents of --data-path for training, validation and test."""
    data_cache_path: str | None = None
    """Folder for cached sample indices, local to each node or shared; None = keep them in
    memory."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single reads samples in order; cyclic shuffles them again in every epoch."""
    num_workers: int = 2
    """Threads that prefetch batches, in the same order; 0 reads each batch when it is needed."""
    eod_mask_loss: bool = False
    """Exclude end-of-document tokens from the loss."""
    reset_position_ids: bool = False
    """Restart position ids after every end-of-document token."""
    reset_attention_mask: bool = False
    """Mask attention at document boundaries: a token attends only to its own document, whose
    end-of-document token included."""
    sft: bool = False
    """Supervised fine-tuning on conversations written by preprocess_data --chat: conversations are
    packed into samples, attend only to themselves, and only the assistant's tokens count in the
    loss."""
    reorder_samples: bool = False
    """On resume, shuffle samples for the current length of the run, as Megatron-LM does, instead of
    keeping the order that the run started with."""
    allow_chat_as_text: bool = False
    """Allow training on conversations without --sft, as plain text with a loss on every token."""
    allow_data_change: bool = False
    """Allow resuming on other data than the checkpoint's, starting after the same number of
    samples."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer and vocabulary."""

    tokenizer_type: Literal["hf", "sentencepiece", "tiktoken", "byte", "null"] | None = None
    """Type of tokenizer; derived from --tokenizer-model: sentencepiece for a .model, tiktoken for a
    .tiktoken, else hf."""
    tokenizer_model: str | None = None
    """Path of a tokenizer.json, of a folder that contains one, of a vocab.json, of a SentencePiece
    .model, or of a tiktoken vocabulary: Megatron's JSON, or a file with one rank per line."""
    merge_file: str | None = None
    """Merges file of a vocab.json, in the same folder: gpt2-merges.txt for gpt2-vocab.json."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Do not add the tokenizer's special tokens, such as BOS, to prompts; the token files were
    written without them."""
    tiktoken_pattern: Literal["v1", "v2", "llama3"] | None = None
    """Pre-tokenization pattern of --tokenizer-type tiktoken; derived: v2 for Megatron's JSON,
    llama3 (also GPT-4's) for a file with one rank per line."""
    tiktoken_num_special_tokens: int | None = None
    """Number of ids that --tokenizer-type tiktoken reserves for special tokens, before the ranks of
    Megatron's JSON, after the ranks of a file with one rank per line; derived: 1000, or the number
    of named ones."""
    tiktoken_special_tokens: tuple[str, ...] | None = None
    """Names of the first special tokens; derived: unk, s, /s, mask, pad, cls and sep in <> for
    Megatron's JSON, none for a file with one rank per line."""
    vocab_size: int | None = None
    """Vocabulary size before padding; derived: the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor parallel size; padding does not
    change results."""

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "make_vocab_size_divisible_by")


def vocabulary_problems(tokenizer: TokenizerConfig) -> Iterator[str]:
    """Yield a message for each problem of the tokenizer options, without reading its files."""
    files = {"hf": "a tokenizer.json", "sentencepiece": "a .model", "tiktoken": "a .tiktoken"}
    if tokenizer.tokenizer_type in files and tokenizer.tokenizer_model is None:
        yield (
            f"--tokenizer-type {tokenizer.tokenizer_type} needs --tokenizer-model: name "
            f"{files[tokenizer.tokenizer_type]}"
        )
    if tokenizer.merge_file is not None:
        from megatron.cli.tokenizers import merge_file_problem

        if problem := merge_file_problem(tokenizer.tokenizer_model, tokenizer.merge_file):
            yield problem
    if tiktoken_flags(tokenizer):
        from megatron.cli.tokenizers import TiktokenOptions

        try:
            TiktokenOptions(
                pattern=tokenizer.tiktoken_pattern,
                num_special_tokens=tokenizer.tiktoken_num_special_tokens,
                special_tokens=tokenizer.tiktoken_special_tokens,
            )
        except ValueError as error:
            yield str(error)


def tiktoken_flags(tokenizer: TokenizerConfig) -> list[str]:
    """Return the tiktoken flags that the user gave."""
    names = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
    values = vars(tokenizer)
    return [f"--{name.replace('_', '-')}" for name in names if values[name] is not None]

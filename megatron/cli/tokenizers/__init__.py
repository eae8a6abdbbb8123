# SPDX-License-Identifier: Apache-2.0
"""Tokenizers behind one protocol: `tokenizer.json`, SentencePiece, tiktoken, bytes, and numbers."""

from megatron.cli.tokenizers.base import (
    END_OF_DOCUMENT,
    ArrayTokenizer,
    ByteTable,
    ByteTokenizer,
    NullTokenizer,
    SpecialTokens,
    Tokenizer,
)
from megatron.cli.tokenizers.build import (
    TokenizerType,
    build_tokenizer,
    choose_tokenizer,
    guess_type,
)
from megatron.cli.tokenizers.huggingface import (
    HuggingFaceTokenizer,
    merge_file_problem,
    train_bpe,
)
from megatron.cli.tokenizers.sentencepiece import (
    SentencePieceTokenizer,
)
from megatron.cli.tokenizers.tiktoken import (
    TiktokenOptions,
    TiktokenPattern,
    TiktokenTokenizer,
    is_tiktoken_file,
    tiktoken_record,
)

__all__ = [
    "END_OF_DOCUMENT",
    "ArrayTokenizer",
    "ByteTable",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "SpecialTokens",
    "TiktokenOptions",
    "TiktokenPattern",
    "TiktokenTokenizer",
    "Tokenizer",
    "TokenizerType",
    "build_tokenizer",
    "choose_tokenizer",
    "guess_type",
    "is_tiktoken_file",
    "merge_file_problem",
    "tiktoken_record",
    "train_bpe",
]

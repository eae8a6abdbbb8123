# SPDX-License-Identifier: Apache-2.0
"""Tokenizers by one protocol: Hugging Face `tokenizer.json`, bytes, and numbers as they are.

This is the one module that imports the library `tokenizers`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

END_OF_DOCUMENT = "<|endoftext|>"
# What other tokenizers call the end of a document, the likeliest first.
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

TokenizerType = Literal["hf", "byte", "null"]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, if there is one."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special tokens are left out."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""


class HuggingFaceTokenizer:
    """A `tokenizer.json` file, run by the library `tokenizers` with its own threads.

    Args:
        path: the file, or a folder that holds it.

    Raises:
        ValueError: there is no such file, or it is none.
    """

    def __init__(self, path: str | Path) -> None:
        import tokenizers

        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"tokenizer {path}: {error.strerror}; give --tokenizer-model a tokenizer.json"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer {path} is no tokenizer.json: {error}") from None
        self._fingerprint = hashlib.sha256(content).hexdigest()
        ids = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
        self._eod: int | None = next((number for number in ids if number is not None), None)
        # Ids need not be contiguous: the largest counts.
        self._vocab_size: int = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """Return the largest id + 1."""
        return self._vocab_size

    @property
    def eod(self) -> int | None:
        """Return the id of the first of the usual end-of-document tokens that is there."""
        return self._eod

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the file."""
        return self._fingerprint

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, encoded in parallel."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]


class ByteTokenizer:
    """The bytes of the UTF-8 text, and one id for the end of a document."""

    vocab_size = 257
    eod = 256
    fingerprint = "byte-257"

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some bytes; what is no UTF-8 becomes a replacement character."""
        return bytes(number for number in ids if number < self.eod).decode(errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of several texts."""
        return [self.tokenize(text) for text in texts]


class NullTokenizer:
    """Text that already is token ids, written as numbers with blanks between them.

    Args:
        vocab_size: ids the text may hold; the end of a document is the id after the last of them.

    Raises:
        ValueError: the vocabulary is empty.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size}: must be 1 or more")
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.fingerprint = f"null-{vocab_size}"

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers of a text.

        Raises:
            ValueError: a word is no number, or a number is no id.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(f"{text[:40]!r}: the null tokenizer takes numbers only") from None
        wrong = [number for number in ids if not 0 <= number < self.eod]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is not below the vocabulary size {self.eod}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the numbers with blanks between them, without the end of the document."""
        return " ".join(str(number) for number in ids if number != self.eod)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers of several texts."""
        return [self.tokenize(text) for text in texts]


def build_tokenizer(
    kind: TokenizerType, *, model: str | Path | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """Make the tokenizer that some flags describe.

    Args:
        kind: `--tokenizer-type`.
        model: `--tokenizer-model`, for hf.
        vocab_size: `--vocab-size`, for null.

    Raises:
        ValueError: what the kind needs is missing.
    """
    if kind == "hf":
        if model is None:
            raise ValueError("--tokenizer-type hf needs --tokenizer-model PATH of a tokenizer.json")
        return HuggingFaceTokenizer(model)
    if kind == "byte":
        return ByteTokenizer()
    if kind != "null":
        raise ValueError(f"--tokenizer-type {kind!r}: use one of hf, byte, null")
    if vocab_size is None:
        raise ValueError("--tokenizer-type null needs --vocab-size: how many ids the data uses")
    return NullTokenizer(vocab_size)


def train_bpe(texts: Iterable[str], vocab_size: int, output: str | Path) -> HuggingFaceTokenizer:
    """Train a byte-level BPE tokenizer with an end-of-document token.

    All 256 bytes are tokens, so any text can be encoded and comes back unchanged.

    Args:
        texts: documents; read once, in order, which makes the result repeatable.
        vocab_size: number of ids, end of document included; at least 257.
        output: the `tokenizer.json` to write.

    Returns:
        The tokenizer read back from the file. It has fewer ids if the texts have too few pairs.

    Raises:
        ValueError: the vocabulary cannot hold all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from megatron.core.datasets.atomic_file import atomic_write

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise ValueError(
            f"a byte-level vocabulary of {vocab_size} is too small: it needs {len(alphabet)} bytes "
            f"and {END_OF_DOCUMENT}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    with atomic_write(Path(output)) as stream:
        described = json.loads(tokenizer.to_str())
        stream.write(json.dumps(described, ensure_ascii=False, indent=1).encode())
    return HuggingFaceTokenizer(output)

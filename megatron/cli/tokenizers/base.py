# SPDX-License-Identifier: Apache-2.0
"""The protocol of tokenizers, their special tokens, and tokenizers of bytes and of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megatron.core.untrusted_files import read_json

END_OF_DOCUMENT = "<|endoftext|>"

# Names of the end-of-document token in common tokenizers, in order of preference.
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The special tokens that a tokenizer adds around a text, such as BOS before it.

    Args:
        before: ids in front of the text.
        after: ids that follow the text.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Return whether any special tokens are added."""
        return bool(self.before or self.after)

    def __str__(self) -> str:
        """Return the special tokens as text, for messages."""
        if not self:
            return "no special tokens"
        ids_by_position = (("before", self.before), ("after", self.after))
        ids = [
            f"{' '.join(map(str, token_ids))} {name} each text"
            for name, token_ids in ids_by_position
            if token_ids
        ]
        return f"special tokens {' and '.join(ids)}"

    def to_json(self) -> dict[str, list[int]]:
        """Return the JSON form in token files and checkpoints."""
        return {"before": list(self.before), "after": list(self.after)}

    @classmethod
    def from_json(cls, recorded: Mapping[str, Any] | None) -> SpecialTokens:
        """Parse the JSON form.

        Args:
            recorded: the JSON form; None in files that are older than this record, whose texts
                were encoded without special tokens.

        Raises:
            ValueError: `recorded` is invalid.
        """
        if recorded is None:
            return cls()
        try:
            before: tuple[Any, ...]
            after: tuple[Any, ...]
            before, after = (tuple(recorded[name]) for name in ("before", "after"))
        except (KeyError, TypeError):
            before, after = (None,), ()
        if not all(type(number) is int for number in (*before, *after)):
            raise ValueError(f"{recorded!r:.80} is not a record of special tokens")
        return cls(before=before, after=after)


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        ...

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, if there is one."""

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal ids, except for special tokens."""
        ...

    @property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens that are added around a text."""
        ...

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: the text to encode.
            add_special_tokens: False adds no `special_tokens`, for a text that contains them.
        """
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special tokens are left out."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, with special tokens."""
        ...

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token within a text, which may be a part of a character; None for
        special tokens, invalid ids, and tokens whose bytes are unknown."""

    def name_of(self, token: int) -> str | None:
        """Return the name of a token in the vocabulary; None if it has no name."""


@runtime_checkable
class ArrayTokenizer(Protocol):
    """A tokenizer that returns arrays, without a Python int for every token."""

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, with special tokens, each [t], of any integer type."""
        ...


@runtime_checkable
class ByteTable(Protocol):
    """A tokenizer with a table of the bytes of each token."""

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each id in a text, None for special tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class PairTokens:
    """The special tokens around and between the two texts of a pair."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    def join(
        self, text_1: Sequence[int], text_2: Sequence[int], *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a pair.

        Args:
            text_1, text_2: ids of the texts, without special tokens.
            max_tokens: most ids; the end of the longer text is removed until both texts have the
                same length, then the end of both, as transformers truncates pairs by default.
        """
        if max_tokens is not None:
            space = max(0, max_tokens - len(self.before) - len(self.between) - len(self.after))
            if len(text_1) + len(text_2) > space:
                short = min(len(text_1), len(text_2), space // 2)
                sizes = short, space - short
                if len(text_1) > len(text_2):
                    sizes = space - short, short
                text_1, text_2 = text_1[: sizes[0]], text_2[: sizes[1]]
        return [*self.before, *text_1, *self.between, *text_2, *self.after]


@runtime_checkable
class PairTokenizer(Protocol):
    """A tokenizer with its own special tokens for pairs of texts."""

    @property
    def pair_tokens(self) -> PairTokens:
        """The special tokens of a pair of texts. Raises ValueError."""
        ...


def pair_tokens(tokenizer: Tokenizer) -> PairTokens:
    """Return the special tokens of a pair of texts; by default each text has its own.

    Raises:
        ValueError: the tokenizer's file is damaged.
    """
    if isinstance(tokenizer, PairTokenizer):
        return tokenizer.pair_tokens
    special = tokenizer.special_tokens
    return PairTokens(
        before=special.before, between=special.after + special.before, after=special.after
    )


def config_field(path: Path, name: str) -> Any:
    """Return a field of a `tokenizer_config.json`; None without the file or the field.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.exists() and not path.is_symlink():
        return None
    try:
        return read_json(path).get(name)
    except (OSError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): repair or remove it") from None


class ByteTokenizer:
    """The bytes of the UTF-8 text, and one id for the end of a document."""

    vocab_size = 257
    eod = 256
    fingerprint = "byte-257"
    special_tokens = SpecialTokens()

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some bytes, with replacement characters for invalid UTF-8."""
        return bytes(number for number in ids if number < self.eod).decode(errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of several texts."""
        return [self.tokenize(text) for text in texts]

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each id."""
        return [self.bytes_of(number) for number in range(self.vocab_size)]

    def bytes_of(self, token: int) -> bytes | None:
        """Return a byte."""
        return bytes([token]) if token < self.eod else None

    def name_of(self, token: int) -> str | None:
        """Return None: no token has a name."""
        return None

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of several texts."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class NullTokenizer:
    """Text that already is token ids, written as numbers with blanks between them.

    Args:
        vocab_size: number of ids that a text may contain; the next id is the end of a document.

    Raises:
        ValueError: the vocabulary is empty.
    """

    special_tokens = SpecialTokens()

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size}: must be 1 or more")
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.fingerprint = f"null-{vocab_size}"

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the numbers of a text.

        Raises:
            ValueError: a word is not a number, or a number is not a valid id.
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

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a number."""
        return str(token).encode() if token != self.eod else None

    def name_of(self, token: int) -> str | None:
        """Return None: no token has a name."""
        return None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers of several texts."""
        return [self.tokenize(text) for text in texts]

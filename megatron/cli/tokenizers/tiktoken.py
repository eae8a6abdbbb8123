# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of tiktoken: Megatron's vocabulary JSON, and ranks by line.

Only this module imports the library `tiktoken`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron.cli.tokenizers.base import END_NAMES, SpecialTokens, Tokenizer
from megatron.core.untrusted_files import MAX_TOKENIZER_BYTES, parse_json, read_regular

# Patterns that split a text before tiktoken merges bytes: Megatron's v1 and v2, and the pattern of
# Llama 3 and GPT-4.
TiktokenPattern = Literal["v1", "v2", "llama3"]
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_PATTERNS: Mapping[TiktokenPattern, str] = {
    "v1": (r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    "v2": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}

# Defaults of a vocabulary JSON: special tokens, number of ids reserved for them, vocabulary size.
_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_NUM_SPECIALS, _MAX_SPECIALS = 1000, 100_000
_TIKTOKEN_VOCABULARY = 1 << 17

# Longest run of blanks, or of other characters, that the regex engine of the library accepts.
_MAX_RUN = 100_000


@dataclass(frozen=True, kw_only=True)
class TiktokenOptions:
    """Options of a tiktoken vocabulary that its file does not contain.

    Args:
        pattern: `--tiktoken-pattern`; None = v2 for a vocabulary JSON, llama3 for ranks by line.
        num_special_tokens: `--tiktoken-num-special-tokens`; None = 1000 for a vocabulary JSON, the
            number of special tokens for ranks by line.
        special_tokens: `--tiktoken-special-tokens`; None = Megatron's tokens for a vocabulary
            JSON, none for ranks by line.
        vocab_size: maximum number of ids, special tokens included; further ranks of a vocabulary
            JSON are dropped. None = 131072. Ranks by line ignore it.

    Raises:
        ValueError: the options contradict each other or are out of range.
    """

    pattern: TiktokenPattern | None = None
    num_special_tokens: int | None = None
    special_tokens: tuple[str, ...] | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Check the options, as far as possible without the file."""
        names, number = self.special_tokens or (), self.num_special_tokens
        if self.pattern is not None and self.pattern not in _PATTERNS:
            patterns = ", ".join(_PATTERNS)
            raise ValueError(f"--tiktoken-pattern {self.pattern!r:.40}: use one of {patterns}")
        if number is not None and not 0 <= number <= _MAX_SPECIALS:
            raise ValueError(
                f"--tiktoken-num-special-tokens {number}: must be from 0 to {_MAX_SPECIALS}"
            )
        if "" in names or len(set(names)) < len(names):
            raise ValueError("--tiktoken-special-tokens: a token is empty or named twice")
        if number is not None and len(names) > number:
            raise ValueError(
                f"--tiktoken-special-tokens names {len(names)}, --tiktoken-num-special-tokens is "
                f"{number}: raise it"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form in token files and checkpoints."""
        options = dataclasses.asdict(self)
        names = self.special_tokens
        return {**options, "special_tokens": None if names is None else list(names)}

    @classmethod
    def from_json(cls, recorded: Mapping[str, Any] | None) -> TiktokenOptions:
        """Parse the JSON form; None gives the defaults.

        Raises:
            ValueError: `recorded` is invalid.
        """
        recorded_fields = {} if recorded is None else recorded
        numbers = ("num_special_tokens", "vocab_size")
        try:
            fields = {
                field.name: recorded_fields.get(field.name) for field in dataclasses.fields(cls)
            }
            names = fields["special_tokens"]
            fields["special_tokens"] = None if names is None else tuple(names)
        except (AttributeError, TypeError):
            raise ValueError(f"{recorded!r:.80} is not a record of tiktoken options") from None
        words = (fields["pattern"] or "", *(fields["special_tokens"] or ()))
        if not all(isinstance(word, str) for word in words) or not all(
            fields[name] is None or type(fields[name]) is int for name in numbers
        ):
            raise ValueError(f"{recorded!r:.80} is not a record of tiktoken options")
        return cls(**fields)


class TiktokenTokenizer:
    """A vocabulary of byte pairs, run by the library `tiktoken`.

    Two kinds of files. A vocabulary JSON of Megatron, a list of objects with `rank`, `token_bytes`
    (base64) and `token_str`: special tokens have the first ids, and the ranks follow them. Ranks
    by line, as published by OpenAI and Llama 3, base64 and rank: special tokens have the ids after
    the ranks. Special tokens without a name are called `<SPECIAL_i>`, where i is their index.

    No special tokens are added to a text. Special tokens spelled in a text are encoded as plain
    text, unless `add_special_tokens` is False, which means that the text contains them.

    Args:
        path: the file.
        options: options that the file does not specify.

    Raises:
        ValueError: the library is not installed, the file does not exist or is invalid, or the
            options do not fit the file.
    """

    special_tokens = SpecialTokens()

    def __init__(self, path: str | Path, options: TiktokenOptions) -> None:
        try:
            import tiktoken
        except ImportError:
            raise ValueError(
                f"tokenizer {path}: vocabularies of tiktoken need tiktoken: pip install tiktoken"
            ) from None
        try:
            content = read_regular(Path(path), MAX_TOKENIZER_BYTES, follow_links=True)
        except OSError as error:
            raise ValueError(
                f"tokenizer {path}: {error.strerror}; give --tokenizer-model a file of tiktoken"
            ) from None
        is_json = content.lstrip()[:1] == b"["
        try:
            tokens = _json_tokens(content) if is_json else _line_tokens(content)
            _check_bytes(tokens)
        except ValueError as error:
            raise ValueError(f"tokenizer {path} is not a tiktoken vocabulary: {error}") from None
        options = _derived(options, is_json=is_json, num_ranks=len(tokens))
        assert options.num_special_tokens is not None
        assert options.special_tokens is not None
        assert options.pattern is not None
        number, names = options.num_special_tokens, options.special_tokens
        if is_json:
            assert options.vocab_size is not None
            tokens = tokens[: options.vocab_size - number]
            try:
                _check_bytes(tokens)
            except ValueError as error:
                raise ValueError(
                    f"tokenizer {path}: of its first {len(tokens)} ranks {error}: raise "
                    "--vocab-size"
                ) from None
        special_begin = 0 if is_json else len(tokens)
        unnamed = [f"<SPECIAL_{i}>" for i in range(len(names), number)]
        special = {name: special_begin + i for i, name in enumerate((*names, *unnamed))}
        self._ranks_begin = number if is_json else 0
        self._end = self._ranks_begin + len(tokens)
        self._encoding: Any = tiktoken.Encoding(
            name=Path(path).name,
            pat_str=_PATTERNS[options.pattern],
            mergeable_ranks={token: self._ranks_begin + i for i, token in enumerate(tokens)},
            special_tokens=special,
        )
        ends = ("</s>", *END_NAMES) if is_json else END_NAMES
        self.eod: int | None = next((special[name] for name in ends if name in special), None)
        self.vocab_size = len(tokens) + number
        self.options = dataclasses.replace(options, vocab_size=self.vocab_size)
        inputs = (content, json.dumps(self.options.to_json(), sort_keys=True).encode())
        digests = b"".join(hashlib.sha256(input_bytes).digest() for input_bytes in inputs)
        self.fingerprint = hashlib.sha256(digests).hexdigest()

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        A run of more than 100,000 blanks, or other characters, is split every 100,000 characters.
        """
        encode = self._encoding.encode_ordinary
        if not add_special_tokens:
            encode = partial(self._encoding.encode, allowed_special="all", disallowed_special=())
        if len(text) <= _MAX_RUN:
            return encode(text)
        return [number for segment in _cut(text) for number in encode(segment)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special tokens and ids beyond the last are left out."""
        text_ids = [number for number in ids if self._ranks_begin <= number < self._end]
        return self._encoding.decode(text_ids)

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each id."""
        return [self.bytes_of(number) for number in range(self.vocab_size)]

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token."""
        if not self._ranks_begin <= token < self._end:
            return None
        return self._encoding.decode_single_token_bytes(token)

    def name_of(self, token: int) -> str | None:
        """Return the name of a special token, or the text of another token."""
        if token >= self.vocab_size:
            return None
        return self._encoding.decode_single_token_bytes(token).decode(errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""
        return [self.tokenize(text) for text in texts]


def tiktoken_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the additional fields of the record of a tiktoken tokenizer; empty for others."""
    if not isinstance(tokenizer, TiktokenTokenizer):
        return {}
    return {"tiktoken": tokenizer.options.to_json()}


def is_tiktoken(content: bytes) -> bool:
    """Return whether a file looks like a vocabulary of tiktoken."""
    start = content[:4096].lstrip()
    is_json = start[:1] == b"[" and b'"token_bytes"' in start
    return is_json or re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", start) is not None


def is_tiktoken_file(path: str | Path) -> bool:
    """Return whether the file exists and looks like a vocabulary of tiktoken."""
    try:
        return is_tiktoken(read_regular(Path(path), MAX_TOKENIZER_BYTES, follow_links=True))
    except (OSError, ValueError):
        return False


def _derived(options: TiktokenOptions, *, is_json: bool, num_ranks: int) -> TiktokenOptions:
    """Return the options with the defaults for the kind of the file. Raises ValueError."""
    names = options.special_tokens
    if names is None:
        names = _SPECIALS if is_json else ()
    number = options.num_special_tokens
    if number is None:
        number = _NUM_SPECIALS if is_json else len(names)
    size = (options.vocab_size or _TIKTOKEN_VOCABULARY) if is_json else num_ranks + number
    pattern = options.pattern or ("v2" if is_json else "llama3")
    if is_json and size < number + 256:
        raise ValueError(
            f"--vocab-size {size} is too small: --tiktoken-num-special-tokens is {number}, and 256 "
            "bytes are tokens"
        )
    return TiktokenOptions(
        pattern=pattern, num_special_tokens=number, special_tokens=names, vocab_size=size
    )


def _json_tokens(content: bytes) -> list[bytes]:
    """Return the tokens of a vocabulary JSON in the order of their ranks. Raises ValueError."""
    entries = parse_json(content)
    for index, entry in enumerate(entries):
        text = entry.get("token_bytes") if isinstance(entry, dict) else None
        if not isinstance(text, str) or entry.get("rank") != index:
            raise ValueError(f"entry {index} needs rank {index} and token_bytes")
    return _distinct([_from_base64(entry["token_bytes"]) for entry in entries])


def _line_tokens(content: bytes) -> list[bytes]:
    """Return the tokens of a file of ranks by line. Raises ValueError."""
    tokens: dict[int, bytes] = {}
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        words = line.split()
        if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 9:
            raise ValueError(f"{line[:40]!r} is not a base64 token and its rank")
        tokens[int(words[1])] = _from_base64(words[0])
    lines = sum(1 for line in content.split(b"\n") if line.strip())
    if len(tokens) < lines or set(tokens) != set(range(len(tokens))):
        raise ValueError(f"its {lines} ranks are not 0 to {lines - 1}")
    return _distinct([tokens[rank] for rank in range(len(tokens))])


def _check_bytes(tokens: Sequence[bytes]) -> None:
    """Raise ValueError unless every byte is a token: the library panics on a text with any other
    byte."""
    if missing := 256 - len({token for token in tokens if len(token) == 1}):
        raise ValueError(f"{missing} of the 256 bytes are not tokens")


def _from_base64(text: str | bytes) -> bytes:
    """Return the bytes of a token. Raises ValueError."""
    try:
        token = base64.b64decode(text, validate=True)
    except ValueError:
        token = b""
    if not token:
        raise ValueError(f"{text[:40]!r} is not a base64 token")
    return token


def _distinct(tokens: list[bytes]) -> list[bytes]:
    """Return the tokens. Raises ValueError for duplicates."""
    if len(set(tokens)) < len(tokens):
        raise ValueError("a token has two ranks")
    return tokens


def _cut(text: str) -> list[str]:
    """Split a text so that no run is longer than `_MAX_RUN`."""
    cuts = [0]
    for run in re.finditer(r"\S+|\s+", text):
        cuts += range(run.start() + _MAX_RUN, run.end(), _MAX_RUN)
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]

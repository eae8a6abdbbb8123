# SPDX-License-Identifier: Apache-2.0
"""Tokenizers behind one protocol: `tokenizer.json`, SentencePiece, tiktoken, bytes, and numbers.

Only this module imports the libraries `tokenizers`, `sentencepiece` and `tiktoken`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from megatron.cli.tokenizers.huggingface_checks import (
    UnusableText,
    check_description,
    check_growth,
    library_errors,
    quiet_panics,
)
from megatron.core.untrusted_files import MAX_TOKENIZER_BYTES, parse_json, read_json, read_regular

END_OF_DOCUMENT = "<|endoftext|>"
_LONG_RUN = re.compile(r"\S{513,}|\s{513,}")
# Names of the end-of-document token in common tokenizers, in order of preference.
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

# Byte-level BPE in two files: suffixes of the file names (as in gpt2-vocab.json), the supported
# tokenizer classes of transformers, and the pre-tokenizer pattern of Qwen2.
_VOCABULARY, _MERGES = "vocab.json", "merges.txt"
_BPE_CLASSES = ("GPT2Tokenizer", "Qwen2Tokenizer")
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TOKEN_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
_SPECIAL_NAMES = ("unk_token", "bos_token", "eos_token", "pad_token")


# A text that shows which special tokens are added around it, and texts that show whether the
# library panics.
_PROBE = "a"
_PROBES = ("a", "b é\n", "日本 1")

# The replacement character of invalid UTF-8; pieces that stand for a byte; and the characters that
# stand for bytes in byte-level BPE (Radford et al. 2019): a printable character stands for its own
# byte, and the characters from U+0100 on stand for the remaining bytes, in order.
_REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER_BYTES = tuple(code for code in range(256) if code not in _VISIBLE)
_BYTE_LEVEL: Mapping[str, int] = MappingProxyType(
    {chr(code): code for code in _VISIBLE}
    | {chr(0x100 + offset): code for offset, code in enumerate(_OTHER_BYTES)}
)

TokenizerType = Literal["hf", "sentencepiece", "tiktoken", "byte", "null"]

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
_LONGEST_RUN = 100_000


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

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, if there is one."""

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal ids, except for special tokens."""

    @property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens that are added around a text."""

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: the text to encode.
            add_special_tokens: False adds no `special_tokens`, for a text that contains them.
        """

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special tokens are left out."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, with special tokens."""

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


@runtime_checkable
class ByteTable(Protocol):
    """A tokenizer with a table of the bytes of each token."""

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each id in a text, None for special tokens."""


class HuggingFaceTokenizer:
    """A `tokenizer.json` file, run by the library `tokenizers` with its own threads.

    A `vocab.json` next to a `merges.txt`, or a `gpt2-vocab.json` next to a `gpt2-merges.txt`, is
    also accepted: byte-level BPE with the pre-tokenizer of GPT-2 or Qwen2, selected by
    `tokenizer_class` in `tokenizer_config.json`. Without this file, a `path` to the vocabulary
    itself selects GPT-2.

    `eos_token` in a `tokenizer_config.json` in the same folder is the end-of-document token; the
    default is the first of the common names that the vocabulary contains. The post-processor of the
    file specifies the special tokens around a text, as in `transformers`.

    Args:
        path: path of the file, or of its folder.
        add_special_tokens: False adds no special tokens to texts.

    Raises:
        ValueError: the file does not exist or is invalid.
    """

    def __init__(self, path: str | Path, *, add_special_tokens: bool = True) -> None:
        import tokenizers

        path = Path(path)
        is_file_path = not os.path.isdir(path)
        path = path if is_file_path else _in_folder(path)
        merges = None
        try:
            content = read_regular(path, MAX_TOKENIZER_BYTES, follow_links=is_file_path)
            if (merges_path := merges_of(path)) is not None:
                merges = read_regular(merges_path, MAX_TOKENIZER_BYTES)
        except OSError as error:
            raise ValueError(
                f"tokenizer {path}: {error.strerror}; give --tokenizer-model a tokenizer.json"
            ) from None
        self._tokenizer: Any
        if merges is not None:
            default = "GPT2Tokenizer" if is_file_path else None
            self._tokenizer, config_fields = _byte_level_bpe(path, content, merges, default=default)
            # A digest of the files, because the library's JSON may differ between releases.
            inputs = (content, merges, json.dumps(config_fields, sort_keys=True).encode())
            content = b"".join(hashlib.sha256(input_bytes).digest() for input_bytes in inputs)
        else:
            check_description(path, content)
            try:
                with quiet_panics():
                    self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            except Exception as error:  # the library raises plain Exception
                fix = "--tokenizer-type tiktoken reads it" if is_tiktoken(content) else error
                raise ValueError(f"tokenizer {path} is not a tokenizer.json: {fix}") from None
        # A file may request truncation and padding, which would change the token ids of texts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        check_growth(path, self._tokenizer)
        self._library_errors = partial(library_errors, path)
        self._probe()
        self._fingerprint = hashlib.sha256(content).hexdigest()
        self._eod = self._end(path)
        # Ids need not be contiguous: the largest counts.
        self._vocab_size: int = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._special = self._added_special_tokens() if add_special_tokens else SpecialTokens()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(number for number, token in added.items() if token.special)
        self._probe_ids: list[int] = []
        with contextlib.suppress(UnusableText), self._library_errors(), quiet_panics():
            self._probe_ids = self._tokenizer.encode(_PROBE, add_special_tokens=False).ids
        self._probe_text = self.detokenize(self._probe_ids)

    def _probe(self) -> None:
        """Encode and decode a few texts. Raises ValueError if the library panics."""
        with self._library_errors(), quiet_panics():
            add = self._tokenizer.num_special_tokens_to_add(False) > 0
        for text in _PROBES:
            with contextlib.suppress(UnusableText), self._library_errors(), quiet_panics():
                encoding = self._tokenizer.encode(text, add_special_tokens=add)
                self._tokenizer.decode(encoding.ids, skip_special_tokens=True)

    def _added_special_tokens(self) -> SpecialTokens:
        """Return the special tokens that the post-processor adds around a text."""
        if self._tokenizer.num_special_tokens_to_add(False) == 0:
            return SpecialTokens()
        with self._library_errors():
            encoding = self._tokenizer.encode(_PROBE)
        mask = encoding.special_tokens_mask
        text_begin = mask.index(0) if 0 in mask else len(mask)
        text_end = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
        return SpecialTokens(
            before=tuple(encoding.ids[:text_begin]), after=tuple(encoding.ids[text_end:])
        )

    def _end(self, path: Path) -> int | None:
        eos_token = _eos_token_of(path.with_name("tokenizer_config.json"))
        if eos_token is not None:
            eos_id: int | None = self._tokenizer.token_to_id(eos_token)
            if eos_id is None:
                raise ValueError(
                    f"{path.with_name('tokenizer_config.json')} names {eos_token!r} as eos_token, "
                    f"which {path} does not have: fix one of them"
                )
            return eos_id
        ids = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
        return next((number for number in ids if number is not None), None)

    @property
    def vocab_size(self) -> int:
        """Return the largest id + 1."""
        return self._vocab_size

    @property
    def eod(self) -> int | None:
        """Return the id of the end-of-document token, if there is one."""
        return self._eod

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the file.

        For byte-level BPE, return the SHA-256 of the SHA-256s of its inputs: vocabulary, merges,
        and the fields of `tokenizer_config.json` about splitting and added tokens.
        """
        return self._fingerprint

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens that are added around a text."""
        return self._special

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        add = add_special_tokens and bool(self._special)
        with self._library_errors():
            return self._tokenizer.encode(text, add_special_tokens=add).ids

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and the (first, last + 1) characters that each covers.

        Special tokens are not added: the text is a segment, or contains them.
        """
        with self._library_errors():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def to_json(self) -> str:
        """Return the whole tokenizer in the library's JSON."""
        return self._tokenizer.to_str()

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special tokens are left out."""
        with self._library_errors():
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token within a text."""
        name = self.name_of(token)
        if name is None or token in self._special_ids:
            return None
        # After a word: a decoder drops the blank that begins a text.
        text = self.detokenize([*self._probe_ids, token])
        if text.startswith(self._probe_text):
            text = text[len(self._probe_text) :]
        else:
            text = self.detokenize([token])
        if _REPLACEMENT not in text:
            return text.encode()
        if byte := _BYTE_PIECE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        codes = [_BYTE_LEVEL.get(char) for char in name]
        return None if None in codes else bytes(code for code in codes if code is not None)

    def name_of(self, token: int) -> str | None:
        """Return the name of a token in the file."""
        return self._tokenizer.id_to_token(token)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, with special tokens, encoded in parallel."""
        add = bool(self._special)
        with self._library_errors():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add)
        return [encoding.ids for encoding in encodings]


def _in_folder(folder: Path) -> Path:
    """Return the path of a folder's tokenizer.json, or of its vocab.json next to a merges.txt."""
    has_json = (folder / "tokenizer.json").exists() or not (folder / _MERGES).exists()
    return folder / ("tokenizer.json" if has_json else _VOCABULARY)


def merges_of(vocabulary: Path) -> Path | None:
    """Return the path of the merges of a byte-level BPE vocabulary; None for other files."""
    if not vocabulary.name.endswith(_VOCABULARY):
        return None
    return vocabulary.with_name(vocabulary.name.removesuffix(_VOCABULARY) + _MERGES)


def merge_file_problem(model: str | None, merge_file: str | None) -> str | None:
    """Return the problem with `--merge-file` for a `--tokenizer-model`; None without one.

    Checkpoints and token files record one path, so the merges must be in the vocabulary's folder.
    """
    if merge_file is None:
        return None
    expected = None if model is None else merges_of(Path(model))
    if expected is None:
        return f"--merge-file {merge_file} needs --vocab-file PATH of a vocab.json: give both"
    if os.path.abspath(merge_file) != os.path.abspath(expected):
        return f"--merge-file {merge_file}: the merges of --vocab-file {model} must be {expected}"
    return None


def _byte_level_bpe(
    path: Path, vocabulary: bytes, merges: bytes, *, default: str | None = None
) -> tuple[Any, list[Any]]:
    """Return the tokenizer of a `vocab.json` and a `merges.txt` (Radford et al. 2019, section 2.2),
    and the config fields that its ids depend on, as JSON.

    Args:
        default: the tokenizer class without a `tokenizer_config.json`.

    Raises:
        ValueError: the files do not match, or `tokenizer_config.json` has an unsupported value.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    config_path = path.with_name("tokenizer_config.json")
    has_config = config_path.exists() or config_path.is_symlink()
    kind = config_field(config_path, "tokenizer_class") if has_config else default
    family = kind.removesuffix("Fast") if isinstance(kind, str) else None
    if family not in _BPE_CLASSES:
        raise ValueError(
            f"{config_path}: tokenizer_class is {kind!r}: with {_VOCABULARY} and {_MERGES} "
            f"supported are {' and '.join(_BPE_CLASSES)}; for other classes give a tokenizer.json"
        )
    for name in ("add_bos_token", "add_eos_token", "add_prefix_space"):
        if config_field(config_path, name):
            raise ValueError(f"{config_path}: {name} is not supported without a tokenizer.json")
    try:
        ids = parse_json(vocabulary)
        lines = merges.decode().split("\n")
        lines = lines[1:] if lines[0].startswith("#version") else lines
        pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines if line.strip()]
        with quiet_panics():
            tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer {path} and {_MERGES}: {error}") from None
    split = None
    if family == "Qwen2Tokenizer":
        tokenizer.normalizer = normalizers.NFC()
        split = Split(Regex(_QWEN2_WORDS), behavior="isolated")
    byte_level = ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = Sequence([split, byte_level]) if split is not None else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    added = _added_tokens(config_path)
    config_fields = [family, [[number, dict(token)] for number, token in added]]
    for number, token in added:
        content, options = token.pop("content"), {k: token[k] for k in _TOKEN_FLAGS if k in token}
        tokenizer.add_tokens([AddedToken(content, **options)])
        if tokenizer.token_to_id(content) != number:
            raise ValueError(
                f"{config_path}: {content!r} cannot have the id {number} with the vocabulary {path}"
            )
    for name in (*_SPECIAL_NAMES, None):
        special_token = END_OF_DOCUMENT if name is None else config_field(config_path, name)
        content = special_token.get("content") if isinstance(special_token, dict) else special_token
        if isinstance(content, str) and tokenizer.token_to_id(content) is not None:
            tokenizer.add_special_tokens([content])
    return tokenizer, config_fields


def _added_tokens(config_path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the tokens that `tokenizer_config.json` adds, by id. Raises ValueError."""
    entries = config_field(config_path, "added_tokens_decoder")
    if entries is None:
        if config_path.with_name("added_tokens.json").exists():
            raise ValueError(
                f"{config_path} has no added_tokens_decoder: added_tokens.json alone does not say "
                "which tokens are special; save the tokenizer as a tokenizer.json"
            )
        return []
    try:
        listed = sorted((int(number), dict(token)) for number, token in entries.items())
    except (AttributeError, TypeError, ValueError):
        listed = [(0, {})]
    if any(not isinstance(token.get("content"), str) for _, token in listed):
        raise ValueError(f"{config_path}: each entry of added_tokens_decoder needs a content")
    return listed


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


def _eos_token_of(path: Path) -> str | None:
    """Return the `eos_token` of a `tokenizer_config.json`, if the file exists and has one."""
    token = config_field(path, "eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


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


def guess_type(model: str | Path | None) -> TokenizerType:
    """Return the type of a tokenizer file by its suffix: hf, unless it is .model or .tiktoken."""
    kinds: dict[str, TokenizerType] = {".model": "sentencepiece", ".tiktoken": "tiktoken"}
    return "hf" if model is None else kinds.get(Path(model).suffix, "hf")


def build_tokenizer(
    kind: TokenizerType,
    *,
    model: str | Path | None = None,
    vocab_size: int | None = None,
    add_special_tokens: bool = True,
    tiktoken: TiktokenOptions | None = None,
) -> Tokenizer:
    """Build the tokenizer that the flags specify.

    Args:
        kind: `--tokenizer-type`.
        model: `--tokenizer-model`, for hf, sentencepiece and tiktoken.
        vocab_size: `--vocab-size`, for null, and for tiktoken if its options have no size.
        add_special_tokens: False for `--tokenizer-hf-no-include-special-tokens`.
        tiktoken: options of a tiktoken vocabulary; None: the defaults.

    Raises:
        ValueError: an argument that the kind needs is missing, or the file is invalid.
    """
    if kind == "hf":
        if model is None:
            raise ValueError("--tokenizer-type hf needs --tokenizer-model PATH of a tokenizer.json")
        return HuggingFaceTokenizer(model, add_special_tokens=add_special_tokens)
    if kind == "sentencepiece":
        if model is None:
            raise ValueError("--tokenizer-type sentencepiece needs --tokenizer-model PATH.model")
        return SentencePieceTokenizer(model, add_special_tokens=add_special_tokens)
    if kind == "tiktoken":
        if model is None:
            raise ValueError("--tokenizer-type tiktoken needs --tokenizer-model PATH of its file")
        options = tiktoken or TiktokenOptions()
        if options.vocab_size is None:
            options = dataclasses.replace(options, vocab_size=vocab_size)
        return TiktokenTokenizer(model, options)
    if kind == "byte":
        return ByteTokenizer()
    if kind != "null":
        names = ", ".join(typing.get_args(TokenizerType))
        raise ValueError(f"--tokenizer-type {kind!r}: use one of {names}")
    if vocab_size is None:
        raise ValueError("--tokenizer-type null needs --vocab-size: how many ids the data uses")
    return NullTokenizer(vocab_size)


def train_bpe(
    texts: Iterable[str], vocab_size: int, output: str | Path, *, show_progress: bool = False
) -> HuggingFaceTokenizer:
    """Train a byte-level BPE tokenizer with an end-of-document token.

    All 256 bytes are tokens, so every text survives encoding and decoding unchanged. Runs of
    blanks, or of other characters, are truncated to 512 characters, because the training time of a
    word grows with the square of its length.

    Args:
        texts: documents, read once; the same documents in the same order give the same tokenizer.
        vocab_size: number of ids, end of document included; at least 257.
        output: the `tokenizer.json` to write.
        show_progress: whether the library draws progress bars on stderr.

    Returns:
        The tokenizer, loaded from the file. It has fewer ids if the texts contain too few pairs.

    Raises:
        ValueError: the vocabulary size is too small for all bytes.
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
        show_progress=show_progress,
    )
    truncated = (_LONG_RUN.sub(lambda run: run[0][:512], text) for text in texts)
    tokenizer.train_from_iterator(truncated, trainer)
    with atomic_write(Path(output)) as stream:
        tokenizer_json = json.loads(tokenizer.to_str())
        stream.write(json.dumps(tokenizer_json, ensure_ascii=False, indent=1).encode())
    return HuggingFaceTokenizer(output)


class SentencePieceTokenizer:
    """A SentencePiece model, run by the library `sentencepiece`.

    Most models normalise text: a run of blanks may be decoded as one blank. Special tokens are
    added to a text only if a `tokenizer_config.json` in the same folder enables them
    (`add_bos_token`, `add_eos_token`), as in `transformers`.

    Args:
        path: a `.model` file, or a folder that contains `tokenizer.model`.
        add_special_tokens: False adds no special tokens to texts.

    Raises:
        ValueError: the library is not installed, or the file does not exist or is invalid.
    """

    def __init__(self, path: str | Path, *, add_special_tokens: bool = True) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise ValueError(
                f"tokenizer {path}: SentencePiece models need sentencepiece: pip install "
                "sentencepiece"
            ) from None
        path = Path(path)
        is_file_path = not os.path.isdir(path)
        path = path if is_file_path else path / "tokenizer.model"
        try:
            content = read_regular(path, MAX_TOKENIZER_BYTES, follow_links=is_file_path)
        except OSError as error:
            raise ValueError(
                f"tokenizer {path}: {error.strerror}; give --tokenizer-model a SentencePiece .model"
            ) from None
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
            self._size: int = self._processor.get_piece_size()
        except RuntimeError:
            self._size = 0
        if self._size == 0:
            fix = ": --tokenizer-type tiktoken reads it" if is_tiktoken(content) else ""
            raise ValueError(f"tokenizer {path} is not a SentencePiece model{fix}")
        self._fingerprint = hashlib.sha256(content).hexdigest()
        self._special = self._special_tokens_of(path) if add_special_tokens else SpecialTokens()

    def _special_tokens_of(self, path: Path) -> SpecialTokens:
        """Return the special tokens that `tokenizer_config.json` enables."""
        config_path = path.with_name("tokenizer_config.json")

        def ids_if_enabled(name: str, number: int) -> tuple[int, ...]:
            return (number,) if number >= 0 and config_field(config_path, name) is True else ()

        return SpecialTokens(
            before=ids_if_enabled("add_bos_token", self._processor.bos_id()),
            after=ids_if_enabled("add_eos_token", self._processor.eos_id()),
        )

    @property
    def vocab_size(self) -> int:
        """Return the number of pieces."""
        return self._size

    @property
    def eod(self) -> int | None:
        """Return the id of the model's end-of-sentence piece, if it has one."""
        eos_id: int = self._processor.eos_id()
        return eos_id if eos_id >= 0 else None

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the file."""
        return self._fingerprint

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens that are added around a text."""
        return self._special

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        special = self._special if add_special_tokens else SpecialTokens()
        return [*special.before, *self._processor.encode(text), *special.after]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special pieces and ids beyond the last are left out."""
        return self._processor.decode([number for number in ids if number < self._size])

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each piece within a text."""
        return [self.bytes_of(number) for number in range(self._size)]

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a piece within a text."""
        name, processor = self.name_of(token), self._processor
        if name is None:
            return None
        if processor.is_byte(token):
            return bytes([int(name[3:-1], 16)])  # <0x0A>
        no_text = (processor.is_control, processor.is_unknown, processor.is_unused)
        if any(is_kind(token) for is_kind in no_text):
            return None
        return name.replace("\u2581", " ").encode()

    def name_of(self, token: int) -> str | None:
        """Return the name of a piece in the model."""
        return self._processor.id_to_piece(token) if token < self._size else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, with special tokens."""
        before, after = self._special.before, self._special.after
        ids_by_text = self._processor.encode(list(texts), num_threads=1)
        return [[*before, *ids, *after] for ids in ids_by_text] if self._special else ids_by_text

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, with special tokens, each [t]."""
        try:
            ids_by_text = self._processor.encode(list(texts), out_type="numpy", num_threads=1)
        except RuntimeError:  # releases before 0.2.3 may not know this type
            return [np.array(ids, dtype=np.int32) for ids in self.encode_batch(texts)]
        if not self._special:
            return ids_by_text
        before, after = (np.array(ids, np.int32) for ids in self._special.to_json().values())
        return [np.concatenate([before, ids, after], dtype=np.int32) for ids in ids_by_text]


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
        self._first_rank_id = number if is_json else 0
        self._end = self._first_rank_id + len(tokens)
        self._encoding: Any = tiktoken.Encoding(
            name=Path(path).name,
            pat_str=_PATTERNS[options.pattern],
            mergeable_ranks={token: self._first_rank_id + i for i, token in enumerate(tokens)},
            special_tokens=special,
        )
        ends = ("</s>", *_END_NAMES) if is_json else _END_NAMES
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
        if len(text) <= _LONGEST_RUN:
            return encode(text)
        return [number for segment in _cut(text) for number in encode(segment)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special tokens and ids beyond the last are left out."""
        text_ids = [number for number in ids if self._first_rank_id <= number < self._end]
        return self._encoding.decode(text_ids)

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each id."""
        return [self.bytes_of(number) for number in range(self.vocab_size)]

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token."""
        if not self._first_rank_id <= token < self._end:
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
    """Split a text so that no run is longer than `_LONGEST_RUN`."""
    cuts = [0]
    for run in re.finditer(r"\S+|\s+", text):
        cuts += range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN)
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]

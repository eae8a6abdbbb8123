# SPDX-License-Identifier: Apache-2.0
"""Hugging Face tokenizers: a `tokenizer.json` or byte-level BPE in two files, and their training.

Only this module imports the library `tokenizers`, which is Rust code. If a file violates its
assumptions, it panics, which is not an Exception in Python and prints its own lines, or it kills
the process. Files that would kill the process are rejected before they are parsed; a panic becomes
a ValueError.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.cli.gguf_file import SUFFIX
from megatron.cli.tokenizers.base import (
    END_NAMES,
    END_OF_DOCUMENT,
    PairTokens,
    SpecialTokens,
    config_field,
)
from megatron.cli.tokenizers.gguf_metadata import gguf_chat_fields, gguf_tokenizer_json
from megatron.cli.tokenizers.tiktoken import is_tiktoken
from megatron.core.untrusted_files import MAX_TOKENIZER_BYTES, parse_json, read_regular

_REPAIR = "repair the tokenizer.json"


class UnusableText(ValueError):
    """A text that a tokenizer cannot encode."""


class LibraryPanic(ValueError):
    """A panic of the library, with the library's message."""


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # raised by PyO3, which exports no class


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Raise ValueError if the library raises Exception, or panics.

    Raises:
        ValueError: names the tokenizer and quotes the library.
    """
    try:
        yield
    except BaseException as error:
        if _is_panic(error) or isinstance(error, LibraryPanic):
            raise ValueError(
                f"tokenizer {path}: the library tokenizers panics ({error}): {_REPAIR}"
            ) from None
        if type(error) is Exception:  # the only type that the library raises for a text
            raise UnusableText(f"tokenizer {path} cannot encode a text: {error}") from None
        raise


@contextlib.contextmanager
def quiet_panics() -> Iterator[None]:
    """Turn a panic of the library into a LibraryPanic, and keep its lines off stderr.

    Other output is forwarded at the end. Not thread-safe: one thread at a time.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # stderr is closed
        stderr = os.open(os.devnull, os.O_WRONLY)
    panic = None
    with os.fdopen(stderr, "wb", buffering=0) as stream, tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if not _is_panic(error):
                raise
            panic = str(error)
        finally:
            os.dup2(stderr, 2)
            output.seek(0)
            if panic is None:
                with contextlib.suppress(OSError):
                    stream.write(output.read())
    if panic is not None:
        raise LibraryPanic(panic)


# Names of fields to check, and escaped letters, which may hide such a name.
_FIELDS = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]|"precompiled_charsmap"|\\u00[4-7]')


def check_description(path: Path, content: bytes) -> None:
    """Check that a tokenizer.json does not crash the process that parses it.

    Raises:
        ValueError: the file would crash the process.
    """
    if not _FIELDS.search(content):
        return
    try:
        tokenizer_json = parse_json(content)
        model = tokenizer_json["model"]
        prefix, merges = model.get("continuing_subword_prefix"), model.get("merges") or []
        maps = list(_charsmaps(tokenizer_json.get("normalizer")))
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError):
        return  # the library reports the error
    except ValueError as error:
        raise ValueError(f"tokenizer {path} is not a tokenizer.json: {error}") from None
    if any(not _is_charsmap(value) for value in maps):
        raise ValueError(f"tokenizer {path}: its precompiled_charsmap is damaged: {_REPAIR}")
    if isinstance(prefix, str) and prefix and isinstance(merges, list):
        _check_merges(path, prefix, merges)


def _check_merges(path: Path, prefix: str, merges: list[Any]) -> None:
    """Check that the second half of each BPE merge starts with the continuing subword prefix: the
    library removes that many bytes without a check."""
    for merge in merges:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(halves, list) or len(halves) != 2:
            return  # the library reports the error
        if not isinstance(halves[1], str) or not halves[1].startswith(prefix):
            raise ValueError(
                f"tokenizer {path}: its continuing_subword_prefix is {prefix!r:.40}, and the merge "
                f"{merge!r:.80} has a second half without it: {_REPAIR}"
            )


def _charsmaps(step: Any) -> Iterator[Any]:
    """Yield the character map of every SentencePiece normalizer."""
    if isinstance(step, dict):
        if "precompiled_charsmap" in step:
            yield step["precompiled_charsmap"]
        for inner in step.get("normalizers") or []:
            yield from _charsmaps(inner)


def _is_charsmap(value: Any) -> bool:
    """Return whether a text is base64 of a trie's size, the trie, and its strings.

    The library allocates memory for a trie of the claimed size.
    """
    try:
        content = base64.b64decode(value, validate=True)
    except (TypeError, ValueError):
        return False
    size = int.from_bytes(content[:4], "little")
    return size % 4 == 0 and 0 < size <= len(content) - 4


#: Limit on the factor by which the steps of a tokenizer may lengthen a text together.
_MAX_GROWTH = 1024


def check_growth(path: Path, tokenizer: Any) -> None:
    """Check that consecutive replacements do not lengthen a text without limit.

    Args:
        path: path of the file.
        tokenizer: a `tokenizers.Tokenizer`.

    Raises:
        ValueError: the steps of a component exceed the limit.
    """
    for component_name in ("normalizer", "post_processor", "decoder"):
        component = getattr(tokenizer, component_name)
        if component is not None and _growth(json.loads(component.__getstate__())) > _MAX_GROWTH:
            raise ValueError(
                f"tokenizer {path}: the steps of its {component_name} lengthen a text more than "
                f"{_MAX_GROWTH} times: {_REPAIR}"
            )


def _growth(step: Any) -> float:
    """Return the factor by which a step of the library can lengthen a text, or its ids."""
    kind = step.get("type")
    if kind == "Sequence":
        names = ("normalizers", "processors", "decoders")
        inner = next((step[name] for name in names if name in step), [])
        return math.prod(min(_growth(inner_step), 2.0 * _MAX_GROWTH) for inner_step in inner)
    if kind == "Replace":
        pattern, content = step["pattern"], step["content"]
        if pattern.get("String"):
            return max(1.0, len(content) / len(pattern["String"]))
        return 1.0 + len(content)
    if kind == "TemplateProcessing":
        return max(1.0, sum("Sequence" in item_template for item_template in step["single"]))
    return 1.0


_LONG_RUN = re.compile(r"\S{513,}|\s{513,}")

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
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_UNPRINTABLE_BYTES = tuple(code for code in range(256) if code not in _VISIBLE)

_BYTE_LEVEL: Mapping[str, int] = MappingProxyType(
    {chr(code): code for code in _VISIBLE}
    | {chr(0x100 + offset): code for offset, code in enumerate(_UNPRINTABLE_BYTES)}
)


class HuggingFaceTokenizer:
    """A `tokenizer.json` file, run by the library `tokenizers` with its own threads.

    A `vocab.json` next to a `merges.txt`, or a `gpt2-vocab.json` next to a `gpt2-merges.txt`, is
    also accepted: byte-level BPE with the pre-tokenizer of GPT-2 or Qwen2, selected by
    `tokenizer_class` in `tokenizer_config.json`. Without this file, a `path` to the vocabulary
    itself selects GPT-2.

    A GGUF file is accepted if it contains a tokenizer.

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
            if path.suffix == SUFFIX:
                content = gguf_tokenizer_json(path)
            else:
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

    @property
    def pair_tokens(self) -> PairTokens:
        """Return the special tokens that the post-processor adds to a pair of texts."""
        if not self._special:
            return PairTokens(before=(), between=(), after=())
        with self._library_errors(), quiet_panics():
            encoding = self._tokenizer.encode(_PROBE, _PROBE)
        texts = encoding.sequence_ids  # 0, 1, or None for a special token
        ids, starts = encoding.ids, [texts.index(text) for text in (0, 1) if text in texts]
        ends = [len(texts) - texts[::-1].index(text) for text in (0, 1) if text in texts]
        if len(starts) < 2 or ends[0] > starts[1]:
            raise ValueError("the tokenizer's post-processor drops or exchanges a text of a pair")
        before, between, after = ids[: starts[0]], ids[ends[0] : starts[1]], ids[ends[1] :]
        return PairTokens(before=tuple(before), between=tuple(between), after=tuple(after))

    def _end(self, path: Path) -> int | None:
        if path.suffix == SUFFIX:
            eos_token = gguf_chat_fields(path).get("eos_token")
        else:
            eos_token = _eos_token_of(path.with_name("tokenizer_config.json"))
        if eos_token is not None:
            eos_id: int | None = self._tokenizer.token_to_id(eos_token)
            if eos_id is None:
                raise ValueError(
                    f"{path.with_name('tokenizer_config.json')} names {eos_token!r} as eos_token, "
                    f"which {path} does not have: fix one of them"
                )
            return eos_id
        ids = (self._tokenizer.token_to_id(name) for name in END_NAMES)
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
        if byte := _BYTE_TOKEN.fullmatch(name):
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
        pairs: list[Any] = [tuple(line.rstrip("\r").split(" ")) for line in lines if line.strip()]
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


def _eos_token_of(path: Path) -> str | None:
    """Return the `eos_token` of a `tokenizer_config.json`, if the file exists and has one."""
    token = config_field(path, "eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


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

    from megatron.core.untrusted_files import atomic_write

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

# SPDX-License-Identifier: Apache-2.0
"""Guard the process against a harmful tokenizer.json: checks before and after the library parses
it.

The library `tokenizers` is Rust code. If a file violates its assumptions, it panics, which is not
an Exception in Python and prints its own lines, or it kills the process. Files that would kill the
process are rejected before they are parsed; a panic becomes a ValueError.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.untrusted_files import parse_json

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

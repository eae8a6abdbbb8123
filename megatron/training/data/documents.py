# SPDX-License-Identifier: Apache-2.0
"""The documents in blocks of input files; what cannot be one is counted, never lost.

A record is a line of a JSONL file, a row of a Parquet table or a whole `.txt` file. It holds one
value under each key that is asked for; a `.txt` file's only value is its text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.data.preprocessing.blocks import MAX_DOCUMENT_BYTES, Block, Part, read_blocks
from megatron.training.data.preprocessing.inputs import Kind, find_inputs

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Rejected(ValueError):
    """A record that holds no document; the text is the reason."""


@dataclass
class Tally:
    """What was read so far.

    Args:
        documents: accepted.
        read_bytes: of the input files as they lie on the disk, rejected records included.
        rejected: records that hold no document, by reason.
        examples: the first place of each reason, `file:line`, and its detail.
        strict: whether a record that holds no document is an error.
    """

    documents: int = 0
    read_bytes: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    strict: bool = False

    def reject(self, reason: str, place: str, *, detail: str = "") -> None:
        """Count a record that holds no document; the first of each reason is kept with its detail.

        Raises:
            ValueError: the tally is strict; names the place and the reason.
        """
        if self.strict:
            raise ValueError(
                f"{place}: {reason}{detail and f': {detail}'}; mend it, or leave --strict out to "
                "count and skip such records"
            )
        self.rejected[reason] += 1
        self.examples.setdefault(reason, f"{place}{detail and f': {detail}'}")

    def take_back(self, reason: str, place: str, *, detail: str = "") -> None:
        """Count a record as rejected that had been accepted. Raises as `reject` does."""
        self.documents -= 1
        self.reject(reason, place, detail=detail)

    def add(self, other: Tally) -> None:
        """Count what another tally has, as read after this one's; `read_bytes` is the larger."""
        self.documents += other.documents
        self.read_bytes = max(self.read_bytes, other.read_bytes)
        self.rejected.update(other.rejected)
        for reason, place in other.examples.items():
            self.examples.setdefault(reason, place)

    def describe_rejected(self) -> str:
        """Return one line on what was rejected; empty if nothing was."""
        parts = [
            f"{count} {reason} (first: {self.examples[reason]})"
            for reason, count in self.rejected.most_common()
        ]
        return f"rejected {self.rejected.total()} lines: {', '.join(parts)}" if parts else ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The values of one record.

    Args:
        values: one per key.
        place: `file:line`.
    """

    values: tuple[Any, ...]
    place: str


def read_records(
    block: Block,
    tally: Tally,
    *,
    keys: Sequence[str],
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    texts: bool = True,
) -> Iterator[Record]:
    """Read the records of a block.

    Args:
        block: of input files.
        tally: counts as the records are taken.
        keys: under which a record holds its values.
        max_document_bytes: longest record, in bytes.
        texts: whether each value must be a text that is not empty.

    Yields:
        Records whose values can be used. Those of a `.txt` file have one value, whatever the keys.
    """
    too_long = f"over --max-document-bytes {max_document_bytes}"
    for part in block.parts:
        if part.kind is None:
            tally.reject(too_long, f"{part.path}:{part.first}")
            continue
        for number, content in enumerate(_contents(part, keys), start=part.first):
            try:
                if _size(content) > max_document_bytes:
                    raise Rejected(too_long)
                values = _parse(content, part.kind, keys)
                if values is None:
                    continue
                if texts:
                    values = tuple(
                        _usable(value, key) for value, key in zip(values, keys, strict=False)
                    )
            except Rejected as reason:
                tally.reject(str(reason), f"{part.path}:{number}")
                continue
            tally.documents += 1
            yield Record(values=values, place=f"{part.path}:{number}")
    tally.read_bytes = block.read_bytes


def read_documents(
    files: Sequence[str | Path], tally: Tally, *, key: str = "text"
) -> Iterator[str]:
    """Read documents in the order of the files and lines.

    Args:
        files: files, folders and patterns, as `find_inputs` takes them.
        tally: counts as the documents are taken.
        key: where a JSON object or a row holds its document.

    Yields:
        Texts that are not empty and can be encoded in UTF-8.

    Raises:
        ValueError: a file is missing or cannot be read.
    """
    for block in read_blocks(find_inputs(files).files, columns=[key]):
        for record in read_records(block, tally, keys=[key]):
            yield record.values[0]


def _contents(part: Part, keys: Sequence[str]) -> Iterator[Any]:
    """Yield the records of a part: lines, a text, or tuples of a row's values."""
    if part.kind is Kind.ROWS:
        assert not isinstance(part.content, bytes)
        return zip(*(part.content[key] for key in keys), strict=True)
    assert isinstance(part.content, bytes)
    # Not splitlines(): that also cuts at a carriage return.
    return iter(part.content.split(b"\n") if part.kind is Kind.LINES else [part.content])


def _size(content: bytes | tuple[Any, ...]) -> int:
    if isinstance(content, bytes):
        return len(content)
    return sum(len(v) for v in content if isinstance(v, str | bytes))


def _parse(content: Any, kind: Kind, keys: Sequence[str]) -> tuple[Any, ...] | None:
    """Return a record's values, None for a blank line."""
    if kind is Kind.ROWS:
        return content
    if kind is Kind.TEXT:
        return (content,)
    line = content.removeprefix(_BYTE_ORDER_MARK)
    if not line or line.isspace():
        return None
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        raise Rejected("not UTF-8") from None
    except (ValueError, RecursionError):
        raise Rejected("not JSON") from None
    if not isinstance(record, dict):
        raise Rejected("not a JSON object")
    for key in keys:
        if key not in record:
            raise Rejected(f"without key {key!r}")
    return tuple(record[key] for key in keys)


def _usable(value: Any, key: str) -> str:
    """Return a text that is not empty and can be encoded."""
    if isinstance(value, bytes):
        try:
            value = value.removeprefix(_BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError:
            raise Rejected("not UTF-8") from None
    if not isinstance(value, str):
        raise Rejected(f"with a {key!r} that is no text")
    if not value:
        raise Rejected("empty")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:  # JSON can write half of a surrogate pair
        raise Rejected("with half a surrogate pair") from None
    return value

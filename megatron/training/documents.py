# SPDX-License-Identifier: Apache-2.0
"""The documents of JSONL and text files, one at a time; what cannot be one is counted, never lost.

A line of a `.jsonl` file (any ending but `.txt`) is a JSON object with a document under a key. A
`.txt` file is one document.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Tally:
    """What was read so far.

    Args:
        documents: accepted.
        read_bytes: of the input files, rejected lines included.
        rejected: lines that hold no document, by reason.
        examples: the first place of each reason, `file:line`.
    """

    documents: int = 0
    read_bytes: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def reject(self, reason: str, place: str) -> None:
        """Count a line that holds no document."""
        self.rejected[reason] += 1
        self.examples.setdefault(reason, place)

    def describe_rejected(self) -> str:
        """Return one line on what was rejected; empty if nothing was."""
        parts = [
            f"{count} {reason} (first: {self.examples[reason]})"
            for reason, count in self.rejected.most_common()
        ]
        return f"rejected {self.rejected.total()} lines: {', '.join(parts)}" if parts else ""


def total_bytes(files: Sequence[str | Path]) -> int:
    """Return the size of all input files.

    Raises:
        ValueError: a file is missing; names all that are.
    """
    missing = [str(path) for path in files if not Path(path).is_file()]
    if missing:
        raise ValueError(f"no such input file: {', '.join(missing)}")
    return sum(Path(path).stat().st_size for path in files)


def read_documents(
    files: Sequence[str | Path], tally: Tally, *, key: str = "text"
) -> Iterator[str]:
    """Read documents in the order of the files and lines.

    Args:
        files: `.txt` files and files of JSON lines, in UTF-8.
        tally: counts as the documents are taken.
        key: where a JSON object holds its document.

    Yields:
        Texts that are not empty and can be encoded in UTF-8.
    """
    for path in files:
        if Path(path).suffix == ".txt":
            content = Path(path).read_bytes()
            lines, parse = iter([content]), _plain
        else:
            lines, parse = _lines(path), _from_json
        for number, line in enumerate(lines, start=1):
            tally.read_bytes += len(line)
            try:
                text = parse(line, key)
            except ValueError as reason:
                tally.reject(str(reason), f"{path}:{number}")
                continue
            if text is not None:
                tally.documents += 1
                yield text


def _lines(path: str | Path) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        yield from stream


def _plain(content: bytes, key: str) -> str | None:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    return _usable(text)


def _from_json(line: bytes, key: str) -> str | None:
    """Return the document of a line, None for a blank one; a ValueError's text is the reason."""
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (json.JSONDecodeError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if key not in record:
        raise ValueError(f"without key {key!r}")
    if not isinstance(record[key], str):
        raise ValueError(f"with a {key!r} that is no text")
    return _usable(record[key])


def _usable(text: str) -> str:
    if not text:
        raise ValueError("empty")
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:  # JSON can write half of a surrogate pair
        raise ValueError("with half a surrogate pair") from None
    return text

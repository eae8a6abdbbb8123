# SPDX-License-Identifier: Apache-2.0
"""Input files cut into blocks: about a MiB of whole records, and where to go on after them.

Blocks are what workers encode and what a journal counts. How files are cut changes neither the
documents nor their order. Memory is bounded by the block and by the longest document allowed: a
longer one is skipped over as it is read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from megatron.core.untrusted_files import open_regular, read_regular
from megatron.training.data.preprocessing.inputs import InputFile, Kind

BLOCK_BYTES = 1 << 20
#: Longest document by default. For each of its bytes the library `tokenizers` takes about 120 until
#: it is encoded: 2 GB for this one.
MAX_DOCUMENT_BYTES = 16 << 20
#: Longest padding between members of a gzip file, and longest name in a member's header: `gzip`
#: reads both byte by byte, which takes minutes for a sparse file.
MAX_GZIP_PADDING = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place between two records.

    Args:
        file: number of the input file.
        offset: in it, after decompression: bytes of lines and text, rows of a table.
        record: number of the next line or row, from 1.
    """

    file: int = 0
    offset: int = 0
    record: int = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """Records of one file.

    Args:
        path: of the file.
        kind: of the file; None for one record that is too long and was skipped.
        first: number of the first record, from 1.
        content: whole lines, or the text; columns by name, for rows.
    """

    path: str
    kind: Kind | None
    first: int
    content: bytes | Mapping[str, Sequence[Any]] = b""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some records, in order.

    Args:
        parts: of one file or of several small ones.
        size: of the records, in bytes.
        end: where to go on.
        read_bytes: how much of all input files, as they lie on the disk, is read by then.
    """

    parts: tuple[Part, ...]
    size: int
    end: Position
    read_bytes: int


# A part with its size in bytes, the position after it, and the file's bytes read by then.
_Step = tuple[Part | None, int, Position, int]


def read_blocks(
    files: Sequence[InputFile],
    *,
    columns: Sequence[str],
    start: Position = Position(),
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """Read files from a position on.

    Args:
        files: in order.
        columns: to read of tables.
        start: a block's `end`.
        max_document_bytes: a longer line or text is skipped; its part has no kind.
        block_bytes: least size of a block, save for the last.

    Yields:
        Blocks that together hold every record behind the position once.

    Raises:
        ValueError: a file cannot be read; names the file.
    """
    parts: list[Part] = []
    size, before, end, read_bytes = 0, sum(f.size for f in files[: start.file]), start, 0
    for number in range(start.file, len(files)):
        file = files[number]
        begin = start if number == start.file else Position(file=number)
        for part, part_size, end, file_bytes in _read(
            file, begin, (max_document_bytes, block_bytes), columns=columns
        ):
            size += part_size
            read_bytes = before + file_bytes
            if part is not None:
                parts.append(part)
            if size >= block_bytes:
                yield Block(parts=tuple(parts), size=size, end=end, read_bytes=read_bytes)
                parts, size = [], 0
        before += file.size
        end = Position(file=number + 1)
    if parts:
        yield Block(parts=tuple(parts), size=size, end=end, read_bytes=before)


def _read(
    file: InputFile, begin: Position, limits: tuple[int, int], *, columns: Sequence[str]
) -> Iterator[_Step]:
    """Read one file; `limits` are the longest document and the size to cut at, in bytes."""
    try:
        if file.kind is Kind.TEXT:
            yield _text(file, begin, limits[0])
        elif file.kind is Kind.ROWS:
            yield from _rows(file, begin, limits[1], columns=columns)
        else:
            with open_regular(file.path, follow_links=True) as raw:
                packed = file.kind is Kind.GZIP_LINES
                stream = gzip.GzipFile(fileobj=_BoundedPadding(raw)) if packed else raw
                yield from _lines(file, begin, limits, stream=stream, raw=raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file.path} is damaged: {error}; copy or pack it anew") from None
    except OSError as error:
        raise ValueError(f"cannot read {file.path}: {error.strerror or error}") from None


class _BoundedPadding:
    """A file for `gzip.GzipFile` that refuses more than `MAX_GZIP_PADDING` reads of one byte."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.seek = raw.seek
        self._raw, self._single = raw, 0

    def read(self, size: int = -1) -> bytes:
        self._single = self._single + 1 if size == 1 else 0
        if self._single > MAX_GZIP_PADDING:
            raise gzip.BadGzipFile(f"more than {MAX_GZIP_PADDING:,} bytes of padding or header")
        return self._raw.read(size)


def _text(file: InputFile, begin: Position, longest: int) -> _Step:
    after = Position(file=begin.file + 1)
    if file.size > longest:
        return Part(path=file.path, kind=None, first=1), 0, after, file.size
    content = read_regular(file.path, longest, follow_links=True)
    part = Part(path=file.path, kind=Kind.TEXT, first=1, content=content)
    return part, len(content), after, file.size


def _rows(
    file: InputFile, begin: Position, block_bytes: int, *, columns: Sequence[str]
) -> Iterator[_Step]:
    from megatron.training.data.preprocessing.parquet import read_rows

    for rows in read_rows(file.path, columns, first=begin.offset, block_bytes=block_bytes):
        part = Part(path=file.path, kind=Kind.ROWS, first=rows.first + 1, content=rows.columns)
        after = Position(file=begin.file, offset=rows.end, record=rows.end + 1)
        yield part, rows.size, after, int(file.size * rows.share)


def _lines(
    file: InputFile,
    begin: Position,
    limits: tuple[int, int],
    *,
    stream: IO[bytes],
    raw: IO[bytes],
) -> Iterator[_Step]:
    longest, block_bytes = limits
    stream.seek(begin.offset)
    offset, record, held, skipping = begin.offset, begin.record, b"", False

    def step(part: Part | None, size: int) -> _Step:
        return part, size, Position(file=begin.file, offset=offset, record=record), raw.tell()

    while chunk := stream.read(block_bytes):
        cut = chunk.rfind(b"\n") + 1
        if skipping:  # inside a line that is too long already
            head = chunk.find(b"\n") + 1
            offset += head or len(chunk)
            if not head:
                continue
            skipping = False
            part = Part(path=file.path, kind=None, first=record)
            record += 1
            yield step(part, 0)
            chunk, cut = chunk[head:], cut - head
        if cut:
            content = held + chunk[:cut]
            held = chunk[cut:]
            part = Part(path=file.path, kind=Kind.LINES, first=record, content=content)
            offset += len(content)
            record += content.count(b"\n")
            yield step(part, len(content))
        else:
            held += chunk
        if len(held) > longest:
            offset += len(held)
            held, skipping = b"", True
    if skipping:
        yield step(Part(path=file.path, kind=None, first=record), 0)
    elif held:
        part = Part(path=file.path, kind=Kind.LINES, first=record, content=held)
        offset += len(held)
        record += 1
        yield step(part, len(held))

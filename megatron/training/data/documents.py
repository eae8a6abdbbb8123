# SPDX-License-Identifier: Apache-2.0
"""From input files to documents: the files, their blocks of records, the documents in them.

An `--input` may be files, folders and patterns; the order of the files never varies. Input files
are read in blocks: about a MiB of whole records, and the position after them. Workers encode blocks
and a journal counts them. How files are divided changes neither the documents nor their order.

A record is a line of a JSONL file, a row of a Parquet table (read a few rows at a time) or a whole
`.txt` file. It holds one value under each key that is asked for; a `.txt` file's only value is its
text. A record that cannot be a document is counted, never lost. Memory is bounded by the block and
by the longest document allowed: a longer one is skipped as it is read.

This is the one module that imports the library `pyarrow`.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Any

from megatron.core.untrusted_files import open_regular, read_regular

#: Endings of files that a folder stands for.
_LINES = (".jsonl", ".ndjson", ".json")
_KNOWN = (*_LINES, *(ending + ".gz" for ending in _LINES), ".txt", ".parquet")
# Endings that are surely not lines of JSON, and what to do about a file that has one.
_REFUSED = {
    ".zst": "unpack it first (zstd -d)",
    ".xz": "unpack it first (xz -d)",
    ".bz2": "unpack it first (bunzip2)",
    ".zip": "unpack it first (unzip)",
    ".tar": "unpack it first (tar -xf)",
    ".tgz": "unpack it first (tar -xzf)",
}


class Kind(Enum):
    """How documents are stored in a file."""

    LINES = "lines"
    """A JSON object per line."""
    GZIP_LINES = "gzip lines"
    """The same, compressed."""
    TEXT = "text"
    """The whole file is one document."""
    ROWS = "rows"
    """A Parquet table, a document per row."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One input file.

    Args:
        path: as it was named or found.
        kind: how documents are stored in it.
        size: of the file, in bytes.
        modified_ns: time of its last change; with the size it tells whether it is still the same.
    """

    path: str
    kind: Kind
    size: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All input files.

    Args:
        files: in the order in which they are read.
        left_out: files of folders whose endings say that they are no input.
    """

    files: tuple[InputFile, ...]
    left_out: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.size for file in self.files)

    def describe_left_out(self) -> str:
        """Return one line on the files that were left out; empty if none was."""
        if not self.left_out:
            return ""
        return (
            f"left out {len(self.left_out)} files of other kinds (first: {self.left_out[0]}); "
            f"read are {' '.join(_KNOWN)}"
        )


def kind_of(path: str | Path) -> Kind:
    """Return how a file stores documents, by its ending; an unknown ending means lines of JSON."""
    name = Path(path).name.lower()
    if name.endswith(".txt"):
        return Kind.TEXT
    if name.endswith(".parquet"):
        return Kind.ROWS
    return Kind.GZIP_LINES if name.endswith(".gz") else Kind.LINES


def find_inputs(names: Sequence[str | Path]) -> Inputs:
    """Find the files that some names stand for.

    Args:
        names: a file; a folder, which stands for the files of known endings in it and below; or a
            pattern of `*`, `?`, `[...]` and `**`. Each name's files come in sorted order, one
            name's after the other's.

    Raises:
        ValueError: a name stands for nothing, a file is named twice, or it is of a kind that
            cannot be read; names all that are.
    """
    found: list[str] = []
    left_out: list[str] = []
    missing: list[str] = []
    for name in map(str, names):
        here = list(_expand(name, left_out))
        found += here
        if not here:
            missing.append(name)
    if missing:
        raise ValueError(f"no such input file: {', '.join(missing)}")
    twice = sorted({name for name in found if found.count(name) > 1}) if _repeats(found) else []
    if twice:
        raise ValueError(f"named twice as --input: {', '.join(twice)}")
    refused = [
        f"{name}: {_REFUSED[Path(name).suffix.lower()]}"
        for name in found
        if Path(name).suffix.lower() in _REFUSED
    ]
    if refused:
        raise ValueError(f"cannot read {'; '.join(refused)}")
    files = []
    for name in found:
        status = Path(name).stat()
        files.append(
            InputFile(
                path=name,
                kind=kind_of(name),
                size=status.st_size,
                modified_ns=status.st_mtime_ns,
            )
        )
    return Inputs(files=tuple(files), left_out=tuple(left_out))


def _repeats(found: Sequence[str]) -> bool:
    return len(set(found)) < len(found)


def _expand(name: str, left_out: list[str]) -> Iterator[str]:
    """Yield the files a name stands for; files of a folder that are no input go to `left_out`."""
    path = Path(name)
    if path.is_file():
        yield name
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if hidden or not file.is_file():
                continue
            if file.name.lower().endswith(_KNOWN):
                yield str(file)
            else:
                left_out.append(str(file))
    elif glob.has_magic(name):
        yield from sorted(
            match for match in glob.glob(name, recursive=True) if Path(match).is_file()
        )


# Rows decoded at a time at most: with more, the call's own cost gets no smaller.
_ROWS_AT_ONCE = 1024
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows.

    Args:
        first: number of the first one, from 0.
        end: number of the one after the last.
        columns: values by name, in the order of the rows; texts are UTF-8 bytes, perhaps bad ones.
        size: in memory, in bytes.
        share: of the file's rows that are read by then.
    """

    first: int
    end: int
    columns: Mapping[str, Sequence[Any]]
    size: int
    share: float


def read_rows(path: str, columns: Sequence[str], *, first: int, block_bytes: int) -> Iterator[Rows]:
    """Read columns from a row on; memory holds the pages at hand, not the file.

    Args:
        path: of the file.
        columns: names of the columns wanted.
        first: number of the first row wanted, from 0.
        block_bytes: about how much to yield at once.

    Raises:
        ValueError: pyarrow is not installed, the file is no Parquet file, or lacks a column.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        # Pages are read as they come, not all of a row group at once.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=_BUFFER_BYTES, pre_buffer=False
        ) as table:
            names = table.schema_arrow.names
            missing = [name for name in columns if name not in names]
            if missing:
                raise ValueError(
                    f"{path} has no column {', '.join(missing)}: it has {', '.join(names)}; name "
                    "one as the key"
                )
            yield from _batches(table, columns, first, block_bytes=block_bytes)
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {path} as Parquet: {error}") from None


def _batches(table: Any, columns: Sequence[str], first: int, *, block_bytes: int) -> Iterator[Rows]:
    total = table.metadata.num_rows
    group, begin = 0, 0  # skip whole row groups without reading them
    while group < table.num_row_groups:
        count = table.metadata.row_group(group).num_rows
        if begin + count > first:
            break
        group, begin = group + 1, begin + count
    groups = list(range(group, table.num_row_groups))
    if not groups:
        return
    at_once = _rows_at_once(table, columns, block_bytes)
    batches = table.iter_batches(
        at_once, row_groups=groups, columns=list(columns), use_threads=False
    )
    for batch in batches:
        skipped = min(max(first - begin, 0), batch.num_rows)
        begin += batch.num_rows
        batch = batch.slice(skipped)
        if batch.num_rows == 0:
            continue
        # A batch of long documents is split further; nbytes counts the slice only.
        pieces = max(1, round(batch.nbytes / block_bytes))
        step = -(-batch.num_rows // pieces)
        start = begin - batch.num_rows
        for at in range(0, batch.num_rows, step):
            piece = batch.slice(at, step)
            yield Rows(
                first=start + at,
                end=start + at + piece.num_rows,
                columns={name: _values(piece.column(name)) for name in columns},
                size=piece.nbytes,
                share=(start + at + piece.num_rows) / total,
            )


def _rows_at_once(table: Any, columns: Sequence[str], block_bytes: int) -> int:
    """Return how many rows make about a block where they are longest."""
    longest = 1.0
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        parts = [group.column(index) for index in range(group.num_columns)]
        size = sum(
            part.total_uncompressed_size
            for part in parts
            if part.path_in_schema.split(".")[0] in columns
        )
        longest = max(longest, size / max(group.num_rows, 1))
    return max(1, min(_ROWS_AT_ONCE, int(block_bytes / longest)))


def _values(column: Any) -> list[Any]:
    """Return a column's values; texts as bytes, since a file can call anything a text."""
    import pyarrow

    if pyarrow.types.is_string(column.type):
        column = column.cast(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    return column.to_pylist()


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
        read_bytes: how much of all input files, as stored on the disk, is read by then.
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
        Blocks that together hold every record after the position once.

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
    """Read one file; `limits` are the longest document and the size to split at, in bytes."""
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


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Rejected(ValueError):
    """A record that holds no document; the text is the reason."""


@dataclass
class Tally:
    """What was read so far.

    Args:
        documents: accepted.
        read_bytes: of the input files as stored on the disk, rejected records included.
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
    # Not splitlines(): that also splits at a carriage return.
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

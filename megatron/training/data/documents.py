# SPDX-License-Identifier: Apache-2.0
"""Read documents from input files: list the files, read blocks of records, parse the documents.

`--input` takes files, folders and patterns; the order of the files is deterministic. Files are read
in blocks of about 1 MiB of whole records, each with the position after it. Workers encode blocks
and a journal records them. The block size changes neither the documents nor their order.

A record is a line of a JSONL file, a row of a Parquet table or a whole `.txt` file. It has one
value per requested key; the only value of a `.txt` file is its text. Records that are not documents
are counted by reason. Memory is bounded by the block size and the longest document allowed: a
longer document is skipped while it is read.

This is the only module that imports `pyarrow`.
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

# Files with these endings are read from an input folder.
_JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")
_SUPPORTED_ENDINGS = (
    *_JSONL_ENDINGS,
    *(ending + ".gz" for ending in _JSONL_ENDINGS),
    ".txt",
    ".parquet",
)
# Endings of files that are not JSON lines, and how to convert such a file.
_UNSUPPORTED_ENDINGS = {
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
    """A JSON object per line, compressed with gzip."""
    TEXT = "text"
    """The whole file is one document."""
    ROWS = "rows"
    """A Parquet table, a document per row."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One input file.

    Args:
        path: path as named by the user or found in a folder.
        kind: how documents are stored in the file.
        size: size of the file, in bytes.
        modified_ns: modification time in ns; together with the size it detects a changed file.
    """

    path: str
    kind: Kind
    size: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All input files.

    Args:
        files: files in reading order.
        left_out: files of input folders that are skipped because of their endings.
    """

    files: tuple[InputFile, ...]
    left_out: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Return the size of all files, in bytes."""
        return sum(file.size for file in self.files)

    def describe_left_out(self) -> str:
        """Return one line on the skipped files; empty if there are none."""
        if not self.left_out:
            return ""
        return (
            f"left out {len(self.left_out)} files of other kinds (first: {self.left_out[0]}); "
            f"supported are {' '.join(_SUPPORTED_ENDINGS)}"
        )


def kind_of(path: str | Path) -> Kind:
    """Return how a file stores documents, by its ending; any other ending means JSON lines."""
    name = Path(path).name.lower()
    if name.endswith(".txt"):
        return Kind.TEXT
    if name.endswith(".parquet"):
        return Kind.ROWS
    return Kind.GZIP_LINES if name.endswith(".gz") else Kind.LINES


def find_inputs(names: Sequence[str | Path]) -> Inputs:
    """Expand `--input` names to files.

    Args:
        names: files, folders (all files below with supported endings) and patterns of `*`, `?`,
            `[...]` and `**`. The files of each name are sorted; names keep their order.

    Raises:
        ValueError: a name matches nothing, a file is named twice, or files have an unsupported
            format; the message lists all of them.
    """
    paths: list[str] = []
    left_out: list[str] = []
    missing: list[str] = []
    for name in map(str, names):
        matches = list(_expand(name, left_out))
        paths += matches
        if not matches:
            missing.append(name)
    if missing:
        raise ValueError(f"no such input file: {', '.join(missing)}")
    duplicates = (
        sorted({name for name in paths if paths.count(name) > 1}) if _has_duplicates(paths) else []
    )
    if duplicates:
        raise ValueError(f"named twice as --input: {', '.join(duplicates)}")
    unsupported = [
        f"{name}: {_UNSUPPORTED_ENDINGS[Path(name).suffix.lower()]}"
        for name in paths
        if Path(name).suffix.lower() in _UNSUPPORTED_ENDINGS
    ]
    if unsupported:
        raise ValueError(f"cannot read {'; '.join(unsupported)}")
    files = []
    for name in paths:
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


def _has_duplicates(paths: Sequence[str]) -> bool:
    return len(set(paths)) < len(paths)


def _expand(name: str, left_out: list[str]) -> Iterator[str]:
    """Yield the files that a name matches; append a folder's unsupported files to `left_out`."""
    path = Path(name)
    if path.is_file():
        yield name
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            hidden = any(component.startswith(".") for component in file.relative_to(path).parts)
            if hidden or not file.is_file():
                continue
            if file.name.lower().endswith(_SUPPORTED_ENDINGS):
                yield str(file)
            else:
                left_out.append(str(file))
    elif glob.has_magic(name):
        yield from sorted(
            match for match in glob.glob(name, recursive=True) if Path(match).is_file()
        )


# Upper bound for rows per batch: larger batches do not reduce the overhead per row.
_MAX_ROWS_PER_BATCH = 1024
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RowSlice:
    """Consecutive rows of a table.

    Args:
        start: index of the first row, from 0.
        end: index after the last row.
        columns: values by column name; texts are bytes that may be invalid UTF-8.
        num_bytes: size in memory.
        file_fraction: fraction of the file's rows before `end`.
    """

    start: int
    end: int
    columns: Mapping[str, Sequence[Any]]
    num_bytes: int
    file_fraction: float


def read_rows(
    path: str, columns: Sequence[str], *, start_row: int, block_bytes: int
) -> Iterator[RowSlice]:
    """Read columns of a Parquet file from a row on, page by page.

    Args:
        path: path of the file.
        columns: names of the columns to read.
        start_row: index of the first row to read, from 0.
        block_bytes: approximate size of each slice, in bytes.

    Raises:
        ValueError: pyarrow is not installed, the file is not Parquet, or it lacks a column.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        # pre_buffer=False reads page by page; the default would read a whole row group at once.
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
            yield from _read_row_slices(table, columns, start_row, block_bytes=block_bytes)
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {path} as Parquet: {error}") from None


def _read_row_slices(
    table: Any, columns: Sequence[str], start_row: int, *, block_bytes: int
) -> Iterator[RowSlice]:
    total = table.metadata.num_rows
    group, next_row = 0, 0  # skip whole row groups without reading them
    while group < table.num_row_groups:
        num_rows = table.metadata.row_group(group).num_rows
        if next_row + num_rows > start_row:
            break
        group, next_row = group + 1, next_row + num_rows
    groups = list(range(group, table.num_row_groups))
    if not groups:
        return
    rows_per_batch = _rows_per_batch(table, columns, block_bytes)
    batches = table.iter_batches(
        rows_per_batch, row_groups=groups, columns=list(columns), use_threads=False
    )
    for batch in batches:
        num_skipped = min(max(start_row - next_row, 0), batch.num_rows)
        next_row += batch.num_rows
        batch = batch.slice(num_skipped)
        if batch.num_rows == 0:
            continue
        # Split batches of long documents further. nbytes counts only the slice.
        num_slices = max(1, round(batch.nbytes / block_bytes))
        step = -(-batch.num_rows // num_slices)
        start = next_row - batch.num_rows
        for offset in range(0, batch.num_rows, step):
            row_slice = batch.slice(offset, step)
            yield RowSlice(
                start=start + offset,
                end=start + offset + row_slice.num_rows,
                columns={name: _column_values(row_slice.column(name)) for name in columns},
                num_bytes=row_slice.nbytes,
                file_fraction=(start + offset + row_slice.num_rows) / total,
            )


def _rows_per_batch(table: Any, columns: Sequence[str], block_bytes: int) -> int:
    """Return the rows per block in the row group with the longest rows."""
    max_row_bytes = 1.0
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        column_chunks = [group.column(column_index) for column_index in range(group.num_columns)]
        size = sum(
            column_chunk.total_uncompressed_size
            for column_chunk in column_chunks
            if column_chunk.path_in_schema.split(".")[0] in columns
        )
        max_row_bytes = max(max_row_bytes, size / max(group.num_rows, 1))
    return max(1, min(_MAX_ROWS_PER_BATCH, int(block_bytes / max_row_bytes)))


def _column_values(column: Any) -> list[Any]:
    """Return a column's values; texts as bytes, because a file may contain invalid UTF-8."""
    import pyarrow

    if pyarrow.types.is_string(column.type):
        column = column.cast(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    return column.to_pylist()


BLOCK_BYTES = 1 << 20
#: Default longest document. While it encodes, the library `tokenizers` needs about 120 bytes of
#: memory per byte of text: 2 GB for a document of this length.
MAX_DOCUMENT_BYTES = 16 << 20
#: Longest padding between members of a gzip file, and longest name in a member header: `gzip` reads
#: both byte by byte, which takes minutes on a sparse file.
MAX_GZIP_PADDING = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position between two records.

    Args:
        file: index of the input file.
        offset: offset in the decompressed file: in bytes, or in rows of a table.
        record: number of the next line or row, from 1.
    """

    file: int = 0
    offset: int = 0
    record: int = 1


@dataclass(frozen=True, kw_only=True)
class RecordChunk:
    """Consecutive records of one file.

    Args:
        path: path of the file.
        kind: kind of the file; None for a skipped record that is too long.
        first_record: number of the first record, from 1.
        content: whole lines or the text as bytes; columns by name for a table.
    """

    path: str
    kind: Kind | None
    first_record: int
    content: bytes | Mapping[str, Sequence[Any]] = b""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive records of the input: the unit of work of one encoding process.

    Args:
        chunks: records of one file or of several small files.
        size: size of the records, in bytes.
        end: position after the block.
        read_bytes: bytes of the input files read up to `end`, as stored on disk.
    """

    chunks: tuple[RecordChunk, ...]
    size: int
    end: Position
    read_bytes: int


# A chunk, its size in bytes, the position after it, and the file's bytes read so far.
_ReadStep = tuple[RecordChunk | None, int, Position, int]


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
        files: input files in order.
        columns: table columns to read.
        start: the `end` of a block, or the beginning.
        max_document_bytes: a longer line or text is skipped; its chunk has no kind.
        block_bytes: minimum size of each block except the last one.

    Yields:
        Blocks that together contain every record after `start` exactly once.

    Raises:
        ValueError: a file cannot be read; the message names the file.
    """
    chunks: list[RecordChunk] = []
    size, previous_bytes, end, read_bytes = 0, sum(f.size for f in files[: start.file]), start, 0
    for index in range(start.file, len(files)):
        file = files[index]
        file_start = start if index == start.file else Position(file=index)
        for chunk, chunk_bytes, end, file_bytes in _read(
            file, file_start, (max_document_bytes, block_bytes), columns=columns
        ):
            size += chunk_bytes
            read_bytes = previous_bytes + file_bytes
            if chunk is not None:
                chunks.append(chunk)
            if size >= block_bytes:
                yield Block(chunks=tuple(chunks), size=size, end=end, read_bytes=read_bytes)
                chunks, size = [], 0
        previous_bytes += file.size
        end = Position(file=index + 1)
    if chunks:
        yield Block(chunks=tuple(chunks), size=size, end=end, read_bytes=previous_bytes)


def _read(
    file: InputFile, file_start: Position, limits: tuple[int, int], *, columns: Sequence[str]
) -> Iterator[_ReadStep]:
    """Read one file; `limits` are max_document_bytes and block_bytes."""
    try:
        if file.kind is Kind.TEXT:
            yield _read_text_file(file, file_start, limits[0])
        elif file.kind is Kind.ROWS:
            yield from _read_row_chunks(file, file_start, limits[1], columns=columns)
        else:
            with open_regular(file.path, follow_links=True) as raw:
                is_compressed = file.kind is Kind.GZIP_LINES
                stream = gzip.GzipFile(fileobj=_BoundedPadding(raw)) if is_compressed else raw
                yield from _read_line_chunks(file, file_start, limits, stream=stream, raw=raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file.path} is damaged: {error}; copy or compress it again") from None
    except OSError as error:
        raise ValueError(f"cannot read {file.path}: {error.strerror or error}") from None


class _BoundedPadding:
    """A file for `gzip.GzipFile` that raises after `MAX_GZIP_PADDING` single-byte reads."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.seek = raw.seek
        self._raw, self._single = raw, 0

    def read(self, size: int = -1) -> bytes:
        self._single = self._single + 1 if size == 1 else 0
        if self._single > MAX_GZIP_PADDING:
            raise gzip.BadGzipFile(f"more than {MAX_GZIP_PADDING:,} bytes of padding or header")
        return self._raw.read(size)


def _read_text_file(file: InputFile, begin: Position, max_bytes: int) -> _ReadStep:
    end = Position(file=begin.file + 1)
    if file.size > max_bytes:
        return RecordChunk(path=file.path, kind=None, first_record=1), 0, end, file.size
    content = read_regular(file.path, max_bytes, follow_links=True)
    chunk = RecordChunk(path=file.path, kind=Kind.TEXT, first_record=1, content=content)
    return chunk, len(content), end, file.size


def _read_row_chunks(
    file: InputFile, begin: Position, block_bytes: int, *, columns: Sequence[str]
) -> Iterator[_ReadStep]:

    for rows in read_rows(file.path, columns, start_row=begin.offset, block_bytes=block_bytes):
        chunk = RecordChunk(
            path=file.path, kind=Kind.ROWS, first_record=rows.start + 1, content=rows.columns
        )
        end = Position(file=begin.file, offset=rows.end, record=rows.end + 1)
        yield chunk, rows.num_bytes, end, int(file.size * rows.file_fraction)


def _read_line_chunks(
    file: InputFile,
    begin: Position,
    limits: tuple[int, int],
    *,
    stream: IO[bytes],
    raw: IO[bytes],
) -> Iterator[_ReadStep]:
    max_bytes, block_bytes = limits
    stream.seek(begin.offset)
    offset, record, incomplete, skipping = begin.offset, begin.record, b"", False

    def read_step(lines: RecordChunk | None, size: int) -> _ReadStep:
        return lines, size, Position(file=begin.file, offset=offset, record=record), raw.tell()

    while chunk := stream.read(block_bytes):
        lines_end = chunk.rfind(b"\n") + 1
        if skipping:  # inside a line that exceeds max_bytes
            skipped_end = chunk.find(b"\n") + 1
            offset += skipped_end or len(chunk)
            if not skipped_end:
                continue
            skipping = False
            lines = RecordChunk(path=file.path, kind=None, first_record=record)
            record += 1
            yield read_step(lines, 0)
            chunk, lines_end = chunk[skipped_end:], lines_end - skipped_end
        if lines_end:
            content = incomplete + chunk[:lines_end]
            incomplete = chunk[lines_end:]
            lines = RecordChunk(
                path=file.path, kind=Kind.LINES, first_record=record, content=content
            )
            offset += len(content)
            record += content.count(b"\n")
            yield read_step(lines, len(content))
        else:
            incomplete += chunk
        if len(incomplete) > max_bytes:
            offset += len(incomplete)
            incomplete, skipping = b"", True
    if skipping:
        yield read_step(RecordChunk(path=file.path, kind=None, first_record=record), 0)
    elif incomplete:
        lines = RecordChunk(
            path=file.path, kind=Kind.LINES, first_record=record, content=incomplete
        )
        offset += len(incomplete)
        record += 1
        yield read_step(lines, len(incomplete))


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Rejected(ValueError):
    """A record that is not a document; the message is the reason."""


@dataclass
class Tally:
    """Counts of accepted and rejected records.

    Args:
        documents: accepted documents.
        read_bytes: bytes read of the input files as stored on disk, rejected records included.
        rejected: number of rejected records by reason.
        examples: location (`file:line`) and detail of the first rejected record by reason.
        strict: whether a rejected record is an error.
    """

    documents: int = 0
    read_bytes: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    strict: bool = False

    def reject(self, reason: str, location: str, *, detail: str = "") -> None:
        """Count a rejected record and remember the first example of each reason.

        Raises:
            ValueError: the tally is strict; the message has location and reason.
        """
        if self.strict:
            raise ValueError(
                f"{location}: {reason}{detail and f': {detail}'}; fix it, or drop --strict to "
                "count and skip such records"
            )
        self.rejected[reason] += 1
        self.examples.setdefault(reason, f"{location}{detail and f': {detail}'}")

    def reject_accepted(self, reason: str, location: str, *, detail: str = "") -> None:
        """Reject a record that was already counted as accepted. Raises as `reject` does."""
        self.documents -= 1
        self.reject(reason, location, detail=detail)

    def add(self, other: Tally) -> None:
        """Add the counts of a later block; `read_bytes` becomes the larger value."""
        self.documents += other.documents
        self.read_bytes = max(self.read_bytes, other.read_bytes)
        self.rejected.update(other.rejected)
        for reason, location in other.examples.items():
            self.examples.setdefault(reason, location)

    def describe_rejected(self) -> str:
        """Return one line on rejected records; empty if there are none."""
        reasons = [
            f"{count} {reason} (first: {self.examples[reason]})"
            for reason, count in self.rejected.most_common()
        ]
        return f"rejected {self.rejected.total()} lines: {', '.join(reasons)}" if reasons else ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The values of one record.

    Args:
        values: one value per key.
        location: `file:line`.
    """

    values: tuple[Any, ...]
    location: str


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
        block: block of input records.
        tally: updated as the records are consumed.
        keys: keys of a record's values.
        max_document_bytes: longest record, in bytes.
        texts: whether each value must be a non-empty text.

    Yields:
        Valid records. The record of a `.txt` file always has one value.
    """
    too_long = f"over --max-document-bytes {max_document_bytes}"
    for chunk in block.chunks:
        if chunk.kind is None:
            tally.reject(too_long, f"{chunk.path}:{chunk.first_record}")
            continue
        for number, content in enumerate(_chunk_records(chunk, keys), start=chunk.first_record):
            try:
                if _content_bytes(content) > max_document_bytes:
                    raise Rejected(too_long)
                values = _parse_record(content, chunk.kind, keys)
                if values is None:
                    continue
                if texts:
                    values = tuple(
                        _decode_text(value, key) for value, key in zip(values, keys, strict=False)
                    )
            except Rejected as reason:
                tally.reject(str(reason), f"{chunk.path}:{number}")
                continue
            tally.documents += 1
            yield Record(values=values, location=f"{chunk.path}:{number}")
    tally.read_bytes = block.read_bytes


def read_documents(
    files: Sequence[str | Path], tally: Tally, *, key: str = "text"
) -> Iterator[str]:
    """Read documents in the order of the files and lines.

    Args:
        files: files, folders and patterns, as `find_inputs` takes them.
        tally: updated as the documents are consumed.
        key: key or column of the document.

    Yields:
        Non-empty texts that can be encoded in UTF-8.

    Raises:
        ValueError: a file is missing or cannot be read.
    """
    for block in read_blocks(find_inputs(files).files, columns=[key]):
        for record in read_records(block, tally, keys=[key]):
            yield record.values[0]


def _chunk_records(chunk: RecordChunk, keys: Sequence[str]) -> Iterator[Any]:
    """Return the records of a chunk: lines, a text, or a tuple of values per row."""
    if chunk.kind is Kind.ROWS:
        assert not isinstance(chunk.content, bytes)
        return zip(*(chunk.content[key] for key in keys), strict=True)
    assert isinstance(chunk.content, bytes)
    # splitlines() would also split at a carriage return.
    return iter(chunk.content.split(b"\n") if chunk.kind is Kind.LINES else [chunk.content])


def _content_bytes(content: bytes | tuple[Any, ...]) -> int:
    if isinstance(content, bytes):
        return len(content)
    return sum(len(v) for v in content if isinstance(v, str | bytes))


def _parse_record(content: Any, kind: Kind, keys: Sequence[str]) -> tuple[Any, ...] | None:
    """Return a record's values; None for a blank line."""
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


def _decode_text(value: Any, key: str) -> str:
    """Return the value as a non-empty text that can be encoded in UTF-8."""
    if isinstance(value, bytes):
        try:
            value = value.removeprefix(_BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError:
            raise Rejected("not UTF-8") from None
    if not isinstance(value, str):
        raise Rejected(f"with a {key!r} that is not text")
    if not value:
        raise Rejected("empty")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:  # JSON escapes can contain half of a surrogate pair
        raise Rejected("with half a surrogate pair") from None
    return value

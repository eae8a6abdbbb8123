# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet files, a few at a time; the one module that imports the library `pyarrow`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        # A batch of long documents is cut further; nbytes counts the slice only.
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

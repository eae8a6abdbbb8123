# SPDX-License-Identifier: Apache-2.0
"""Which files an `--input` means: files, folders and patterns, in an order that never varies."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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
    """How documents lie in a file."""

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
        kind: how documents lie in it.
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
    """Return how documents lie in a file, by its ending; an unknown ending means lines of JSON."""
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

# SPDX-License-Identifier: Apache-2.0
"""A cache of index arrays on a node's disk: content-addressed, written atomically, validated.

The files of an entry share the name `<digest>-<kind>`. The digest is computed from a JSON
description of everything that determines the arrays, so that all writers write the same bytes. A
lock only saves time and memory: the other processes of a node wait for the first writer and map its
files. The kernel releases the lock when its holder dies, so it cannot go stale. Nodes may use
separate folders.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from megatron.core.untrusted_files import atomic_write, open_lock, open_regular, read_json

logger = logging.getLogger(__name__)

# numpy parses a dtype name that is not simple as Python, which may raise SyntaxError.
_DAMAGED = (OSError, EOFError, ValueError, KeyError, TypeError, SyntaxError)

# Increase when the same description denotes different arrays.
FORMAT = 1


def describe(description: Mapping[str, object]) -> str:
    """Return a description as the text that names and validates an entry.

    Args:
        description: JSON values that determine the arrays completely.

    Returns:
        JSON with sorted keys.
    """
    return json.dumps({"format": FORMAT, **description}, sort_keys=True, indent=1)


def digest_of(description: Mapping[str, object]) -> str:
    """Return a name for a description: 32 hexadecimal digits.

    Args:
        description: JSON values that determine some arrays completely.
    """
    return hashlib.md5(describe(description).encode(), usedforsecurity=False).hexdigest()


class IndexCache:
    """A folder of index arrays.

    Args:
        folder: folder of the files, created if missing; None builds the arrays in memory each time.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)

    def load_or_build(
        self,
        kind: str,
        description: Mapping[str, object],
        build: Callable[[], dict[str, np.ndarray]],
        *,
        names: Collection[str],
    ) -> dict[str, np.ndarray]:
        """Return the arrays of an entry, from the disk if a valid entry exists.

        Concurrent callers build an entry once. A corrupt entry or an unwritable folder is logged
        and otherwise harmless.

        Args:
            kind: readable part of the file names, for instance "GPTDataset-train".
            description: JSON values that determine the arrays completely.
            build: returns the arrays by name; must be deterministic.
            names: names of the arrays.

        Returns:
            The arrays by name, memory-mapped read-only if they are on the disk.
        """
        if self.folder is None:
            return build()
        text = describe(description)
        stem = f"{digest_of(description)}-{kind}"
        try:
            cached = self._load(stem, text, names)
        except _DAMAGED:
            cached = None  # another process may be repairing it: reported below
        if cached is not None:
            return cached
        with self._alone(stem):
            try:
                cached = self._load(stem, text, names)
            except _DAMAGED as error:
                logger.warning(
                    "index cache %s/%s is damaged (%s): rebuilding", self.folder, stem, error
                )
            if cached is not None:
                return cached
            arrays = build()
            try:
                self._store(stem, text, arrays)
                # Map the files instead of returning the arrays: all processes share the page cache.
                return self._load(stem, text, names) or arrays
            except _DAMAGED as error:
                logger.warning(
                    "index cache %s cannot be written (%s): kept in memory", self.folder, error
                )
                return arrays

    @contextlib.contextmanager
    def _alone(self, stem: str) -> Iterator[None]:
        """Hold the lock of an entry, if the folder supports locks."""
        assert self.folder is not None
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                fd = open_lock(self.folder / f"{stem}.lock")
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    def _load(self, stem: str, text: str, names: Collection[str]) -> dict[str, np.ndarray] | None:
        assert self.folder is not None
        manifest_path = self.folder / f"{stem}.json"
        if not manifest_path.exists():
            return None
        manifest = read_json(manifest_path)
        if manifest["description"] != text:
            raise ValueError("it has another description")
        arrays = {}
        for name in names:
            entry = manifest["arrays"][name]
            path = self.folder / f"{stem}-{name}.npy"
            dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
            header = _header(dtype, shape)
            with open_regular(path) as stream:
                if stream.read(len(header)) != header:
                    raise ValueError(f"{name} has another header")
                array = np.memmap(stream, dtype, mode="r", offset=len(header), shape=shape)
            array = array.view(np.ndarray)
            if _checksum(array) != entry["crc32"]:
                raise ValueError(f"{name} does not match its checksum")
            arrays[name] = array
        return arrays

    def _store(self, stem: str, text: str, arrays: dict[str, np.ndarray]) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = {}
        for name, array in arrays.items():
            entries[name] = {
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "crc32": _checksum(array),
            }
            with atomic_write(self.folder / f"{stem}-{name}.npy") as stream:
                stream.write(_header(array.dtype, array.shape))
                stream.write(_bytes(array))
        # Written last: an entry without a manifest does not exist.
        with atomic_write(self.folder / f"{stem}.json") as stream:
            manifest = {"description": text, "arrays": entries}
            stream.write(json.dumps(manifest, indent=1).encode())


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the header of an array's .npy file.

    Headers are compared and never parsed: numpy parses them as Python, which is not thread-safe in
    CPython 3.11 (gh-106905).

    Raises:
        ValueError: an array of objects.
    """
    if dtype.hasobject:
        raise ValueError(f"arrays of {dtype} are not cached")
    stream = io.BytesIO()
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(_bytes(array))

# SPDX-License-Identifier: Apache-2.0
"""Files in folders that somebody else may have made: regular, bounded, and reached by no link.

Everything that is installed opens files through this module; `tools/security_rules.py` checks
this.

Reading: a file is opened without blocking and must be a regular one, so that a pipe or a device
under its name neither hangs nor answers. Its size is compared with a limit before a byte is read. A
link is followed only to a file in the folder that holds the link, or where the cache of the Hugging
Face hub keeps the files of the same model: `snapshots/REVISION/NAME` to `blobs/DIGEST`.

Writing: the folder is opened first, the name is opened in it, and no link is followed: a link in
the place of a file that is to be replaced is replaced itself, and one in the place of a file that
is to be continued is an error. So is a file with several names (hard links). Only the folder that
the caller names may be reached through links, as it is the user's choice.

All refusals are `UnsafeFileError`, an OSError whose `strerror` states the problem and its fix.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal, Self, cast

#: Largest JSON file that is parsed, in bytes; its values take up to thirty times the memory.
MAX_JSON_BYTES = 16 << 20

#: Largest tokenizer file, in bytes, which a library parses: the largest known has 33 MB.
MAX_TOKENIZER_BYTES = 64 << 20

#: Nesting depth of JSON objects and lists. Code that walks through JSON recurses once per level.
MAX_JSON_DEPTH = 64

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

WriteMode = Literal["x", "w", "a", "r+", "a+"]


class UnsafeFileError(OSError):
    """A file that must not be read or written; `strerror` is the reason, `filename` its path."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_regular(path: Path | str, *, follow_links: bool = False) -> BinaryIO:
    """Open a regular file to read.

    Args:
        path: of the file.
        follow_links: follow a link wherever it leads: only for a file that the user has named.

    Raises:
        UnsafeFileError: it is no regular file, or a link that leads elsewhere.
        OSError: it is not there or cannot be opened.
    """
    return os.fdopen(regular_fd(path, follow_links=follow_links), "rb")


def regular_fd(path: Path | str, *, follow_links: bool = False) -> int:
    """Open a regular file and return its descriptor; see `open_regular`."""
    path = _checked_name(path)
    if follow_links:
        fd = os.open(path, _READ)
    else:
        try:
            fd = os.open(path, _READ | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
            fd = os.open(_target(path), _READ | os.O_NOFOLLOW)
    try:
        _check_kind(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


class PositionedFile:
    """An open regular file that is read by position; counts the bytes read.

    Reads do not use a memory mapping. If a mapped file is truncated, the process dies with SIGBUS,
    whereas a short read is an error that names the file.

    Args:
        path: of the file.
        follow_links: see `open_regular`.

    Attributes:
        size: size of the file in bytes, when it was opened.

    Raises:
        OSError: see `open_regular`.
    """

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        self.path, self.bytes_read = path, 0
        self._fd = regular_fd(path, follow_links=follow_links)
        self.size = os.fstat(self._fd).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def read_into(self, target: memoryview, offset: int) -> int:
        """Read bytes from `offset` on; return their number, which is less than the length of
        `target` only if the file ends. Raises OSError."""
        position = 0
        while position < len(target):
            count = os.preadv(self._fd, [target[position:]], offset + position)
            if not count:
                break
            position += count
        self.bytes_read += position
        return position


def regular_size(path: Path | str) -> int:
    """Return the size of a regular file without opening it; see `open_regular`."""
    path = _checked_name(path)
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        status = os.lstat(_target(path))
    _check_kind(status, path)
    return status.st_size


def read_regular(path: Path | str, limit: int, *, follow_links: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        UnsafeFileError: it is longer, no regular file, or a link that leads elsewhere.
        OSError: it is not there or cannot be read.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UnsafeFileError(path, f"it has {size} bytes, more than the limit of {limit}")
        return file.read(size)


def read_text(path: Path | str, limit: int, *, follow_links: bool = False) -> str:
    """Return the UTF-8 text of a file; see `read_regular`.

    Raises OSError, as an UnsafeFileError if it is no UTF-8.
    """
    return _decoded(read_regular(path, limit, follow_links=follow_links), path)


def read_named(path: Path | str, limit: int) -> str:
    """Return the UTF-8 text of a file that the user names on the command line: a regular one, a
    link to one, or a pipe, as of a shell's `<(command)`.

    Raises:
        UnsafeFileError: it is longer than `limit` bytes, something else, or no UTF-8.
        OSError: it is not there or cannot be read.
    """
    path = _checked_name(path)
    fd = os.open(path, _READ)  # does not wait for a pipe's writer; without one the pipe is empty
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISFIFO(status.st_mode):
            _check_kind(status, path)
        os.set_blocking(fd, True)
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UnsafeFileError(path, f"it exceeds the read limit of {limit} bytes")
    return _decoded(content, path)


def read_json(
    path: Path | str,
    limit: int = MAX_JSON_BYTES,
    *,
    max_depth: int = MAX_JSON_DEPTH,
    follow_links: bool = False,
) -> Any:
    """Return the value of a JSON file; see `read_regular`.

    Raises OSError, as an UnsafeFileError if it is no JSON or nested too deeply.
    """
    try:
        content = read_regular(path, limit, follow_links=follow_links)
        return parse_json(content, max_depth=max_depth)
    except ValueError as error:
        raise UnsafeFileError(path, f"it is not valid JSON: {error}") from None


def parse_json(text: bytes | str, *, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is no JSON, its objects and lists are nested deeper than `max_depth`,
            or they would take much more memory than the text.
    """
    _check_values(text)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {max_depth}") from None
    check_depth(value, max_depth=max_depth)
    return value


# Bytes of the Python values that a JSON character stands for: a list, a dict, a key with its dict
# entry, half a string (a string has two quotes), an element.
_BYTES_OF = (("[", 64), ("{", 64), (":", 104), ('"', 28), (",", 32))
_BASE_JSON_BYTES, _JSON_BYTES_PER_BYTE = 60_000_000, 7


def _check_values(text: bytes | str) -> None:
    """Estimate the memory of a JSON text's values before it is parsed. Raises ValueError."""
    memory_bytes = sum(
        value_bytes * (text.count(c) if isinstance(text, str) else text.count(c.encode()))
        for c, value_bytes in _BYTES_OF
    )
    if memory_bytes > _BASE_JSON_BYTES + _JSON_BYTES_PER_BYTE * len(text):
        raise ValueError(f"its {len(text)} characters contain more values than the limit")


def check_depth(value: Any, *, max_depth: int) -> None:
    """Raise ValueError if dicts and lists are nested deeper than `max_depth`."""
    level = [value]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {max_depth}")


def _decoded(content: bytes, path: Path | str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnsafeFileError(path, f"it is not UTF-8 text: {error}") from None


def _checked_name(path: Path | str) -> Path:
    if "\0" in os.fspath(path):
        raise UnsafeFileError(repr(os.fspath(path)), "there is no file with such a name")
    return Path(path)


def _check_kind(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        raise UnsafeFileError(path, f"it is {kind}, not a regular file")


def link_target(link: Path) -> tuple[Path, bool]:
    """Return where a link leads, and whether a link may lead there. Raises UnsafeFileError."""
    try:
        target = Path(os.path.realpath(link, strict=True))
        home = Path(os.path.realpath(link.parent, strict=True))
    except OSError:
        raise UnsafeFileError(link, "it is a broken link") from None
    snapshots = next((p for p in home.parents if p.name == "snapshots"), None)
    cached = snapshots is not None and target.parent == snapshots.parent / "blobs"
    return target, cached or target.is_relative_to(home)


def _target(link: Path) -> Path:
    target, allowed = link_target(link)
    if not allowed:
        raise UnsafeFileError(
            link, f"it is a link to {target}, outside its folder: put the file itself there"
        )
    return target


def open_to_write(path: Path | str, mode: WriteMode, *, root: Path | str | None = None) -> BinaryIO:
    """Open a file to write, following no link.

    Args:
        path: of the file.
        mode: as for the built-in `open`, always binary. "w" replaces an existing file by a new one
            and does not write into it.
        root: the folder that the user has named, in which `path` lies; folders between the two
            must not be links, see `make_folder`. None: the folder of the file.

    Raises:
        UnsafeFileError: there is a link, a pipe, a folder or a file of several names.
        OSError: it cannot be opened; FileExistsError if it is there and mode is "x".
    """
    path = _checked_name(path)
    flags = {
        "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        "w": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        "r+": os.O_RDWR,
        "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    }[mode]
    with _folder_of(path, root) as folder:
        if mode == "w":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
        fd = _open_no_links(path, flags, folder)
    if mode == "r+":
        return cast(BinaryIO, os.fdopen(fd, "r+b"))
    return cast(BinaryIO, os.fdopen(fd, {"a": "ab", "a+": "a+b"}.get(mode, "wb")))


def open_lock(path: Path | str, *, make: bool = True) -> int:
    """Open a file to be locked and return its descriptor; see `open_to_write`.

    It is opened for writing too, because NFS grants exclusive locks only to writers.

    Args:
        path: of the file.
        make: create the file if it is absent; otherwise it must exist, and may have several names.
    """
    path = _checked_name(path)
    flags = os.O_RDWR | os.O_CREAT if make else os.O_RDWR
    with _folder_of(path, None) as folder:
        return _open_no_links(path, flags, folder, several_names=not make)


def replace_file(
    path: Path | str, content: bytes | str, *, root: Path | str | None = None, sync: bool = False
) -> None:
    """Atomically replace a file's content, text as UTF-8.

    If `sync`, the content is on the disk when this returns. `root`: see `open_to_write`.
    """
    path = _checked_name(path)
    draft = f"{path.name}.{secrets.token_hex(6)}.tmp"
    with _folder_of(path, root) as folder:
        try:
            fd = _open_no_links(path.with_name(draft), os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder)
            with os.fdopen(fd, "wb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                if sync:
                    os.fsync(fd)
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if sync:
                os.fsync(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Let a library that takes a path write a file: yield an unguessable path in the same
    folder, which is renamed to `path` when the block ends without an error. The folder must exist.

    Raises:
        OSError: it cannot be written.
    """
    path = _checked_name(path)
    draft = path.with_name(f"{path.stem}.{secrets.token_hex(6)}{path.suffix}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def write_to(path: Path | str, mode: WriteMode, *, root: Path | str | None = None) -> IO[str]:
    """Open a file to write UTF-8 text; see `open_to_write`."""
    return io.TextIOWrapper(open_to_write(path, mode, root=root), encoding="utf-8")


def make_folder(path: Path | str, *, root: Path | str) -> None:
    """Create a folder, `root` and the folders between them; none below `root` may be a link.

    Raises:
        UnsafeFileError: one is a link, or no folder.
        OSError: one cannot be made.
    """
    os.makedirs(root, exist_ok=True)
    with _folder_of(_checked_name(path) / "any", root, make=True):
        pass


@contextlib.contextmanager
def _folder_of(path: Path, root: Path | str | None, *, make: bool = False) -> Iterator[int]:
    """Open the folder of a file below `root`, see `open_to_write`; yield its descriptor."""
    if root is None:
        fd = os.open(path.parent, _FOLDER)
        names: tuple[str, ...] = ()
    else:
        fd = os.open(root, _FOLDER)
        names = path.parent.relative_to(root).parts
    try:
        for i, name in enumerate(names):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
            try:
                subfolder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
                    raise
                where = Path(cast(str, root), *names[: i + 1])
                raise UnsafeFileError(where, f"{name} is a link or a file: remove it") from None
            os.close(fd)
            fd = subfolder
        yield fd
    finally:
        os.close(fd)


def _open_no_links(path: Path, flags: int, folder: int, *, several_names: bool = False) -> int:
    """Open a name in an open folder; refuse links and files of several names."""
    try:
        fd = os.open(path.name, flags | _WRITE, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise UnsafeFileError(
                path, f"{path.name} is a link, and links are not written through: remove it"
            ) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise UnsafeFileError(path, f"{path.name} is not a regular file: remove it") from None
        error.filename = os.fspath(path)
        raise
    try:
        status = os.fstat(fd)
        _check_kind(status, path)
        if status.st_nlink > 1 and not several_names:
            raise UnsafeFileError(
                path, f"{path.name} has {status.st_nlink} names (hard links): copy or remove it"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, _FOLDER)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, target: Path) -> None:
    """Give a closed, flushed temporary file in the folder of `target` its final name.

    An existing file is replaced. A reader sees the old file, the new file or none, and any number
    of writers of the same content need no lock.
    """
    os.replace(temporary, target)
    sync_folder(target.parent)


@contextlib.contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content becomes `target`, durably, when the block ends without an error.

    The folder of `target` must exist. An exception in the block removes the temporary file.
    """
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open_to_write(temporary, "x") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        publish(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

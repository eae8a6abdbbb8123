# SPDX-License-Identifier: Apache-2.0
"""The manifest: what a checkpoint holds and where, as JSON with its own digest.

`manifest.json` is one JSON object whose first field, named after the algorithm, is the digest of
all bytes after that field, so that an edited or corrupt manifest is refused. It names the files
with their sizes, and for every logical tensor its boxes with their byte ranges and one digest per
block.

Ranks send rank 0 the plans of their shards before they write, and the digests after. Rank 0 checks
in the plans that nothing is missing and nothing written twice, and joins them with the digests into
the manifest's tables. Nothing here needs torch: a writer process does it, too.

When a model loads a checkpoint, it is compared with the model that was saved.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import scanstring
from operator import add, gt
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron.core import __version__
from megatron.core.boxes import Box, first_overlap, tiles
from megatron.core.dist_checkpointing.errors import (
    CheckpointError,
    DamagedCheckpointError,
    RemovedCheckpointError,
)
from megatron.core.dist_checkpointing.shard_format import (
    BLAKE2B,
    ITEM_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_ITEM_BYTES,
    XXH3,
    digest,
    tensor_bytes,
)
from megatron.core.untrusted_files import MAX_JSON_DEPTH, UnsafeFileError, check_depth, open_regular

MANIFEST_NAME = "manifest.json"
FORMAT = "megatron.core.dist_checkpointing"
VERSION = 1

#: Bytes of a manifest that are read whatever the shards; of a larger one, at most a 64th of theirs
#: (a box takes some 200 bytes, and 20 for every block of it), and never more than the last number.
MAX_MANIFEST_BYTES, MANIFEST_SHARE, LARGEST_MANIFEST_BYTES = 32 << 20, 64, 1 << 30

#: Characters of a reason, which may quote the manifest.
MAX_SHOWN = 400

#: Dimensions of a tensor, and characters of its name.
MAX_DIMENSIONS, MAX_NAME = 8, 1024

#: Files and chunks of tensors: so many in any checkpoint, and another one for so many bytes of its
#: shards. Reading one takes tens of microseconds, whatever it describes.
MIN_CHUNK_LIMIT, BYTES_PER_CHUNK = 110_000, 4096

#: Bytes and values of the JSON in addition to the tensors.
MAX_EXTRA_BYTES, MAX_EXTRA_VALUES = 8 << 20, 1 << 17

#: A block is read whole.
MAX_BLOCK_BYTES = 256 << 20

_FOLDER = re.compile(r"iter_([0-9]{7,})")
_HEAD = b'{"%s":"%s",\n'
_HEX_DIGITS = 16
_HEAD_BYTES = 64
_COUNT_LIMIT = 1 << 63
_COUNTED_TOGETHER = 1024
_CACHED_SHAPES = 4096
_ORIGINS = tuple((0,) * dims for dims in range(MAX_DIMENSIONS + 1))
_JSON = json.JSONDecoder()


def iteration_of(folder: Path) -> int | None:
    """Return the iteration a folder's name stands for, or None if it is not a checkpoint's."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A shard: its size, and the size and digest of its safetensors header ("" if not taken)."""

    bytes: int
    header_bytes: int
    header_xxh3: str


class StoredChunk(NamedTuple):
    """A box of a logical tensor in a file, at bytes [begin, end), with a digest per block."""

    file: str
    box: Box
    begin: int
    end: int
    xxh3: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A logical tensor: dtype name, shape and the chunks that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a checkpoint states about itself.

    `digests` records whether blocks of `block_bytes` have been digested; `xxh3` is the identity of
    the manifest as read ("" before it is written); `extra` is the caller's JSON.
    """

    iteration: int
    world_size: int
    block_bytes: int
    digests: bool
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    extra: Mapping[str, Any]
    xxh3: str = ""


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise ValueError unless a manifest can hold this JSON in addition to the tensors."""
    check_json(dict(extra), "extra")
    check_extra_size(extra)
    if len(_dump(extra)) > MAX_EXTRA_BYTES:
        raise ValueError(f"extra has more than {MAX_EXTRA_BYTES} bytes: store arrays as tensors")


def check_json(value: Any, where: str) -> None:
    """Raise ValueError, naming the place, for what JSON would not give back equal."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys must be strings")
            check_json(inner, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            check_json(inner, f"{where}[{i}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which JSON cannot hold; store None or a string")
    elif value is not None and type(value) not in (str, int, bool):
        raise ValueError(
            f"{where} is a {type(value).__name__}; only dict, list, str, int, float, bool and None "
            "can be stored beside the tensors: convert it"
        )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest.json`: one line per file and per tensor."""
    files = {
        name: {"bytes": f.bytes, "header_bytes": f.header_bytes, "header_xxh3": f.header_xxh3}
        for name, f in sorted(manifest.files.items())
    }
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "chunks": [_encode_chunk(chunk) for chunk in tensor.chunks],
        }
        for name, tensor in sorted(manifest.tensors.items())
    }
    fields = [
        f'"format":{_dump(FORMAT)}',
        f'"version":{VERSION}',
        f'"iteration":{manifest.iteration}',
        f'"world_size":{manifest.world_size}',
        f'"block_bytes":{manifest.block_bytes}',
        f'"digests":{_dump(manifest.digests)}',
        f'"files":{_dump_lines(files)}',
        f'"tensors":{_dump_lines(tensors)}',
        f'"extra":{_dump(manifest.extra)}',
    ]
    body = (",\n".join(fields) + "\n}\n").encode()
    found = digest(body)
    kind = BLAKE2B if found.startswith(BLAKE2B) else XXH3
    return _HEAD % (kind.encode(), found[-_HEX_DIGITS:].encode()) + body


def read_manifest(folder: Path | str) -> Manifest:
    """Return the manifest of a checkpoint folder.

    Raises:
        RemovedCheckpointError: there is no such folder.
        DamagedCheckpointError: it is missing, damaged or edited.
        CheckpointError: it is of another format or version.
    """
    path = Path(folder, MANIFEST_NAME)
    try:
        raw = _read_bounded(path)
    except FileNotFoundError:
        if not os.path.lexists(path.parent):
            raise RemovedCheckpointError(f"{path.parent} does not exist") from None
        raise DamagedCheckpointError(
            f"{path} does not exist: {path.parent} is not a complete checkpoint"
        ) from None
    except OSError as error:
        raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
    except MemoryError:
        raise DamagedCheckpointError(f"cannot read {path}: there is not enough memory") from None
    kind, found, body = _split_head(raw, path)
    wanted = digest(body, kind)[-_HEX_DIGITS:]
    if found != wanted:
        raise DamagedCheckpointError(
            f"{path} has changed since it was written (its digest is {wanted}, not "
            f"{found}): use another checkpoint"
        )
    try:
        text = str(raw, "ascii")  # as `json.dumps` writes it
        del raw, body
        manifest = _ManifestDecoder(path, text).manifest(wanted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DamagedCheckpointError(f"{path} cannot be understood ({reason})") from error
    named = iteration_of(path.parent)
    if named not in (None, manifest.iteration):
        raise DamagedCheckpointError(
            f"{path} is of iteration {manifest.iteration}, its folder's name is of {named}: give "
            "the folder its name again, or use another checkpoint"
        )
    return manifest


def max_manifest_bytes(shard_bytes: int) -> int:
    """Return how long a manifest may be that describes shards of so many bytes."""
    return min(MAX_MANIFEST_BYTES + shard_bytes // MANIFEST_SHARE, LARGEST_MANIFEST_BYTES)


def _read_bounded(path: Path) -> bytes:
    """Return the bytes of a manifest of a size that can be. Raises OSError, CheckpointError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        _split_head(file.read(_HEAD_BYTES), path)  # before memory is taken for the rest
        shards = 0
        if size > MAX_MANIFEST_BYTES:
            with os.scandir(path.parent) as entries:
                files = [e for e in entries if e.is_file(follow_symlinks=False)]
                shards = sum(e.stat().st_size for e in files if e.name != path.name)
        if size > max_manifest_bytes(shards):
            raise UnsafeFileError(path, f"it has {size} bytes, too many for what it describes")
        file.seek(0)
        return file.read(size)


def _split_head(raw: bytes, path: Path) -> tuple[str, str, memoryview]:
    """Return the kind of digest a manifest starts with, its digits, and the bytes after it."""
    for kind in (XXH3, BLAKE2B):
        length = len(_HEAD % (kind.encode(), b"0" * _HEX_DIGITS))
        found = raw[length - _HEX_DIGITS - 3 : length - 3]
        if raw[:length] == _HEAD % (kind.encode(), found):
            return kind, found.decode(errors="replace"), memoryview(raw)[length:]
    raise DamagedCheckpointError(
        f"{path} is not a manifest written by this library, or it is damaged"
    )


def read_extra(folder: Path | str) -> Mapping[str, Any]:
    """Return the JSON that was saved in addition to the tensors. Raises CheckpointError."""
    return read_manifest(folder).extra


def _encode_chunk(chunk: StoredChunk) -> dict[str, Any]:
    return {
        "file": chunk.file,
        "offsets": chunk.box.offsets,
        "sizes": chunk.box.sizes,
        "bytes": (chunk.begin, chunk.end),
        "xxh3": chunk.xxh3,
    }


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _dump_lines(table: Mapping[str, Any]) -> str:
    if not table:
        return "{}"
    return "{\n" + ",\n".join(f"{_dump(key)}:{_dump(value)}" for key, value in table.items()) + "}"


class _JsonCursor:
    """Reads JSON member by member: only the value at the cursor is in memory as objects, which take
    up to thirty times the memory of their text.

    Raises ValueError for text that is no JSON.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def members(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads each value before the next key."""
        seen: set[str] = set()
        for _ in self._separated("{", "}"):
            if self._next() != '"':
                raise ValueError(f"no key before character {self._at}")
            key, self._at = scanstring(self._text, self._at)
            if key in seen:
                raise ValueError(f"{key[:80]!r} is there twice")
            seen.add(key)
            if self._next() != ":":
                raise ValueError(f"':' is missing before character {self._at}")
            yield key

    def items(self) -> Iterator[None]:
        """Yield once per item of a list; the caller reads each item before the next."""
        return self._separated("[", "]")

    def scalar(self) -> Any:
        """Return a value that is neither an object nor a list."""
        if self._peek() in ("", "{", "["):
            raise ValueError(f"no plain value at character {self._at}")
        return self.tree()

    def span(self, closing: str) -> str:
        """Return the text of a value that ends with the next `closing`: an object or a list in
        which no other one ends so."""
        self._peek()
        end = self._text.find(closing, self._at) + 1
        if not end:
            raise ValueError(f"{closing!r} is missing after character {self._at}")
        start, self._at = self._at, end
        return self._text[start:end]

    def tree(self) -> Any:
        """Return a value of any kind, all of it."""
        self._peek()
        value, self._at = _JSON.raw_decode(self._text, self._at)
        return value

    def rest(self) -> int:
        """Return how many characters are left."""
        return len(self._text) - self._at

    def finish(self) -> None:
        """Check that nothing follows."""
        if self._peek():
            raise ValueError(f"text follows the JSON at character {self._at}")

    def _separated(self, opening: str, closing: str) -> Iterator[None]:
        if self._next() != opening:
            raise ValueError(f"{opening!r} is missing before character {self._at}")
        if self._peek() == closing:
            self._at += 1
            return
        while True:
            yield
            mark = self._next()
            if mark == closing:
                return
            if mark != ",":
                raise ValueError(f"{closing!r} is missing before character {self._at}")

    def _next(self) -> str:
        """Move past the next character that is no space, and return it; "" at the end."""
        mark = self._peek()
        self._at += 1
        return mark

    def _peek(self) -> str:
        """Move to the next character that is no space, and return it; "" at the end."""
        mark = self._text[self._at : self._at + 1]
        while mark and mark in " \t\n\r":
            self._at += 1
            mark = self._text[self._at : self._at + 1]
        return mark


class _ManifestDecoder:
    """Turns the text of a manifest into a Manifest and trusts nothing in it.

    The fields come in the order in which `encode_manifest` writes them: what limits the tensors,
    their files, comes before them.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._cursor = _JsonCursor(text)
        self._digested_block_bytes = 0
        self._files: dict[str, StoredFile] = {}
        self._num_chunks = 0
        # Equal values of many chunks are kept once.
        self._file_names: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def manifest(self, xxh3: str) -> Manifest:
        fields: dict[str, Any] = {}
        for name in self._cursor.members():
            if name == "files":
                self._files = {file: self._file(file) for file in self._cursor.members()}
                self._file_names = {file: file for file in self._files}
                self._check_count()
            elif name == "tensors":
                self._digested_block_bytes = (
                    self._block_bytes(fields) if fields["digests"] is True else 0
                )
                fields[name] = {tensor: self._tensor(tensor) for tensor in self._cursor.members()}
                self._check_count()
            elif name == "extra":
                fields[name] = self._extra()
            else:
                fields[name] = self._cursor.scalar()
            if name == "version":
                self._check_version(fields)
        self._cursor.finish()
        self._check_version(fields)
        return Manifest(
            iteration=self._count(fields["iteration"], "iteration"),
            world_size=self._count(fields["world_size"], "world_size"),
            block_bytes=self._block_bytes(fields),
            digests=fields["digests"] is True,
            files=self._files,
            tensors=fields["tensors"],
            extra=fields["extra"],
            xxh3=xxh3,
        )

    def _check_version(self, fields: Mapping[str, Any]) -> None:
        if fields["format"] != FORMAT or fields["version"] != VERSION:
            raise CheckpointError(
                f"{self._path} cannot be used: it is of format {fields['format']!r:.80} version "
                f"{fields['version']!r:.80}, this library reads {FORMAT!r} version {VERSION}: use "
                f"the megatron-core that wrote it or a later one, this is {__version__}"
            )

    def _block_bytes(self, fields: Mapping[str, Any]) -> int:
        block_bytes = self._count(fields["block_bytes"], "block_bytes")
        if not 16 <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 16:
            self._refuse(
                f"block_bytes is {block_bytes}, not a multiple of 16 up to {MAX_BLOCK_BYTES}"
            )
        return block_bytes

    def _extra(self) -> dict[str, Any]:
        if self._cursor.rest() > MAX_EXTRA_BYTES:
            self._refuse(f"extra has more than {MAX_EXTRA_BYTES} bytes")
        extra = self._cursor.tree()
        if not isinstance(extra, dict):
            self._refuse("extra is not an object")
        check_depth(extra, max_depth=MAX_JSON_DEPTH)
        check_extra_size(extra)
        return extra

    def _file(self, name: str) -> StoredFile:
        # A name with a folder in it could make a load read, or a copy write, anywhere.
        plain = Path(name).name == name and name.isprintable() and len(name) < 256
        if not plain or name in (MANIFEST_NAME, "", ".", ".."):
            self._refuse(f"{name!r} is not the plain name of a shard file")
        fields = self._object(name)
        size = self._count(fields["bytes"], name)
        header = self._count(fields["header_bytes"], name)
        if not LENGTH_BYTES <= header <= min(size, MAX_HEADER_BYTES + LENGTH_BYTES):
            self._refuse(f"{name} has an impossible header of {header} bytes")
        if not isinstance(fields["header_xxh3"], str):
            self._refuse(f"{name}: {fields['header_xxh3']!r} is not text")
        return StoredFile(bytes=size, header_bytes=header, header_xxh3=fields["header_xxh3"])

    def _tensor(self, name: str) -> StoredTensor:
        if problem := problem_of_name(name):
            self._refuse(f"{name!r:.80} {problem}")
        fields: dict[str, Any] = {}
        for field in self._cursor.members():
            if field == "dtype":
                fields[field] = dtype = self._cursor.scalar()
                if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
                    self._refuse(f"{name} has the unknown dtype {dtype!r}")
            elif field == "shape":
                fields[field] = self._shape(name)
            elif field == "chunks":
                dtype, shape = fields["dtype"], fields["shape"]
                fields[field] = tuple(self._chunk(name, dtype, shape) for _ in self._cursor.items())
            else:
                self._refuse(f"{name} has the unknown field {field!r}")
        if not fields["chunks"]:
            self._refuse(f"{name} lies in no file")
        return StoredTensor(**fields)

    def _shape(self, name: str) -> tuple[int, ...]:
        text = self._cursor.span("]")
        if text in self._shapes:
            return self._shapes[text]
        if text.count(",") >= MAX_DIMENSIONS or len(text) > MAX_SHOWN:  # parse no more than that
            count = text.count(",") + 1
            self._refuse(f"{name} has a shape of {count} dimensions: {MAX_DIMENSIONS} at most")
        shape = self._counts(json.loads(text), name)
        if problem := problem_of_shape(shape):
            self._refuse(f"{name} {problem}")
        if len(self._shapes) < _CACHED_SHAPES:
            self._shapes[text] = shape
        return shape

    def _chunk(self, name: str, dtype: str, shape: tuple[int, ...]) -> StoredChunk:
        self._num_chunks += 1
        if not self._num_chunks % _COUNTED_TOGETHER:
            self._check_count()
        row = self._object(name)
        dims = len(shape)
        offsets, sizes, span = row["offsets"], row["sizes"], row["bytes"]
        if not (list is type(offsets) is type(sizes) is type(span) and len(span) == 2):
            self._refuse(f"{name} lacks a list of numbers in {row}")
        if not dims == len(offsets) == len(sizes):
            self._refuse(f"{name} has a box {offsets}, {sizes} outside its shape {list(shape)}")
        numbers = self._counts(offsets + sizes + span, name)
        begin, end = numbers[2 * dims :]
        box = self._box(numbers[:dims], numbers[dims : 2 * dims], shape)
        file = self._file_names.get(row["file"])
        if file is None:
            self._refuse(f"{name} lies in {row['file']!r}, which is not in the list of files")
        if any(map(gt, map(add, *box), shape)):
            self._refuse(f"{name} has a box {box} outside its shape {list(shape)}")
        stored = self._files[file]
        inside = stored.header_bytes <= begin and end <= stored.bytes
        if not inside or end - begin != tensor_bytes(dtype, box.sizes):
            self._refuse(f"{name} has the impossible byte range [{begin}, {end}) in {file}")
        xxh3, block_bytes = row["xxh3"], self._digested_block_bytes
        if type(xxh3) is not list or not {*map(type, xxh3)} <= {str}:
            self._refuse(f"{name} has {xxh3!r} in place of digests")
        if len(xxh3) != (-(-(end - begin) // block_bytes) if block_bytes else 0):
            self._refuse(f"{name} has {len(xxh3)} digests for {end - begin} bytes")
        return StoredChunk(file=file, box=box, begin=begin, end=end, xxh3=tuple(xxh3))

    def _box(self, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Return a box whose numbers are those of others where they are equal."""
        return Box(
            _ORIGINS[len(shape)] if not any(offsets) else offsets,
            shape if sizes == shape else sizes,
        )

    def _check_count(self) -> None:
        shards = sum(file.bytes for file in self._files.values())
        if problem := problem_of_count(len(self._files) + self._num_chunks, shards):
            self._refuse(problem)

    def _object(self, where: str) -> dict[str, Any]:
        """Return a small object of numbers, texts and lists of these."""
        text = self._cursor.span("}")
        # Numbers and empty lists take ten and twenty times their text; digests do not.
        if text.count("[") > 4 or text.count(",") > 64 + len(text) // _HEX_DIGITS:
            self._refuse(f"{where} has the field {text}")
        fields, end = _JSON.raw_decode(text)
        if end != len(text):
            raise ValueError(f"text follows the object {text[:end]:.80}")
        return fields

    def _counts(self, values: Any, where: str) -> tuple[int, ...]:
        # Called for every chunk of a checkpoint: set, min and max do the loop in C.
        numbers = type(values) is list and {*map(type, values)} <= {int}
        if not numbers or min(values, default=0) < 0 or max(values, default=0) >= _COUNT_LIMIT:
            self._refuse(f"{where}: {values!r} is not a list of numbers of things")
        return tuple(values)

    def _count(self, value: Any, where: str) -> int:
        if type(value) is not int or not 0 <= value < _COUNT_LIMIT:
            self._refuse(f"{where}: {value!r} is not a number of things")
        return value

    def _refuse(self, why: str) -> NoReturn:
        shown = why if len(why) <= MAX_SHOWN else f"{why[:MAX_SHOWN]}..."
        raise DamagedCheckpointError(f"{self._path} cannot be used: {shown}")


def problem_of_name(name: str) -> str:
    """Return why no tensor of a checkpoint has such a name; "" if one may."""
    if name.isprintable() and len(name) <= MAX_NAME:
        return ""
    return f"has a name that is not printable, or longer than {MAX_NAME} characters"


def problem_of_shape(shape: Sequence[int]) -> str:
    """Return why no tensor of a checkpoint has such a shape; "" if one may."""
    if len(shape) > MAX_DIMENSIONS:
        return f"has {len(shape)} dimensions, more than the {MAX_DIMENSIONS} of a checkpoint"
    # Also of a tensor without elements: libraries multiply its other sizes.
    if math.prod(size or 1 for size in shape) * MAX_ITEM_BYTES >= _COUNT_LIMIT:
        return f"has the shape {list(shape)}, whose product is 2^60 or more"
    return ""


def problem_of_count(num_described: int, shard_bytes: int) -> str:
    """Return why no checkpoint consists of so many files and chunks; "" if one may."""
    limit = MIN_CHUNK_LIMIT + shard_bytes // BYTES_PER_CHUNK
    if num_described <= limit:
        return ""
    return (
        f"it has more than {limit} files and chunks of tensors, the most in shards of "
        f"{shard_bytes} bytes"
    )


def check_extra_size(extra: Mapping[str, Any]) -> None:
    """Raise ValueError if JSON has too many values, or fields of too long dotted names."""
    values, characters = 0, 0
    level: list[tuple[int, Any]] = [(0, extra)]
    while level:
        prefix, outer = level.pop()
        values += len(outer)
        if isinstance(outer, Mapping):
            lengths = {key: prefix + len(key) + 1 for key in outer}
            characters += sum(lengths.values())
            level += [(lengths[k], v) for k, v in outer.items() if isinstance(v, Mapping | list)]
        else:
            level += [(prefix, item) for item in outer if isinstance(item, Mapping | list)]
        if values > MAX_EXTRA_VALUES or characters > MAX_EXTRA_BYTES:
            raise ValueError(
                f"extra has more than {MAX_EXTRA_VALUES} values, or dotted names of more than "
                f"{MAX_EXTRA_BYTES} characters: store arrays as tensors"
            )


class PlannedChunk(NamedTuple):
    """A box of a logical tensor that goes to `file` at bytes [begin, end)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str
    begin: int
    end: int


def decode_chunks(message: dict[str, Any]) -> list[PlannedChunk]:
    """Return the chunks of a shard from the message about it."""
    return [
        PlannedChunk(
            name=name,
            dtype=dtype,
            shape=tuple(shape),
            box=Box(tuple(offsets), tuple(sizes)),
            file=message["file"],
            begin=begin,
            end=end,
        )
        for name, dtype, shape, offsets, sizes, begin, end in message["chunks"]
    ]


def check_plans(messages: Sequence[dict[str, Any]]) -> None:
    """Check the plans of all ranks together, before anything is written.

    Raises:
        CheckpointError: they contradict each other, miss an element or have it twice, or describe
            more than a manifest may.
    """
    check_replicas(messages)
    chunks = [chunk for message in messages for chunk in decode_chunks(message)]
    check_coverage(group_by_tensor(chunks))
    shard_bytes = sum(message["total_bytes"] for message in messages)
    num_files = sum(bool(message["chunks"]) for message in messages)
    if problem := problem_of_count(num_files + len(chunks), shard_bytes):
        raise CheckpointError(f"nothing is saved: {problem}; join small tensors")


def check_replicas(messages: Sequence[dict[str, Any]]) -> None:
    """Check that all members of every replica set declare the same chunks for it.

    Otherwise a chunk could be left to a rank that does not know of it.

    Raises:
        CheckpointError: naming the set and two ranks that differ.
    """
    told = [{tuple(ranks): summary for ranks, *summary in m["shared"]} for m in messages]
    for rank, sets in enumerate(told):
        for ranks, summary in sets.items():
            for other in ranks:
                theirs = told[other].get(ranks) if other < len(told) else None
                if theirs != summary:
                    count, name, _ = summary
                    raise CheckpointError(
                        f"rank {rank} declares {count} chunks, {name} among them, with "
                        f"replica_ranks {list(ranks)}, but rank {other} declares "
                        f"{theirs[0] if theirs else 'none'}, or other ones, for these ranks"
                    )


def group_by_tensor(chunks: Sequence[PlannedChunk]) -> dict[str, list[PlannedChunk]]:
    """Return the chunks of every logical tensor, ascending by offsets."""
    tensors: dict[str, list[PlannedChunk]] = {}
    for chunk in chunks:
        tensors.setdefault(chunk.name, []).append(chunk)
    for group in tensors.values():
        group.sort(key=lambda c: c.box)
    return tensors


def check_coverage(tensors: dict[str, list[PlannedChunk]]) -> None:
    """Check that every element of every logical tensor is written exactly once.

    Raises:
        CheckpointError: naming the tensor and the files concerned.
    """
    for name, chunks in tensors.items():
        first = chunks[0]
        for chunk in chunks:
            if (chunk.shape, chunk.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{name} is {first.dtype} {list(first.shape)} in {first.file} but "
                    f"{chunk.dtype} {list(chunk.shape)} in {chunk.file}; ranks must agree"
                )
        boxes = [chunk.box for chunk in chunks]
        if tiles(boxes, first.shape):
            continue
        if overlap := first_overlap(boxes):
            a, b = (chunks[i] for i in overlap)
            raise CheckpointError(
                f"{name} would be written twice: {a.box} in {a.file} and {b.box} in {b.file}; "
                "name all ranks that hold the same box in its replica_ranks"
            )
        covered = sum(box.numel for box in boxes)
        raise CheckpointError(
            f"{name} {list(first.shape)} has {math.prod(first.shape)} elements but the ranks "
            f"declare only {covered}: a chunk of it is missing on some rank"
        )


def stored_tables(
    planned: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]]
) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Join every rank's plan with its digests into the manifest's two tables."""
    files: dict[str, StoredFile] = {}
    chunks: dict[str, list[StoredChunk]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for plan, result in zip(planned, written, strict=True):
        if not plan["chunks"]:
            continue
        files[plan["file"]] = StoredFile(
            bytes=plan["total_bytes"],
            header_bytes=plan["header_bytes"],
            header_xxh3=result["header_xxh3"],
        )
        for chunk, xxh3 in zip(decode_chunks(plan), result["xxh3"], strict=True):
            kinds[chunk.name] = (chunk.dtype, chunk.shape)
            chunks.setdefault(chunk.name, []).append(
                StoredChunk(
                    file=chunk.file,
                    box=chunk.box,
                    begin=chunk.begin,
                    end=chunk.end,
                    xxh3=tuple(xxh3),
                )
            )
    tensors = {
        name: StoredTensor(
            dtype=kinds[name][0],
            shape=kinds[name][1],
            chunks=tuple(sorted(group, key=lambda c: c.box)),
        )
        for name, group in chunks.items()
    }
    return files, tensors


def compare_architecture(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return one line per field in which two models differ, e.g. from `extra["model"]`.

    Nested mappings are compared field by field under dotted names. A tuple equals the list that
    JSON makes of it.
    """
    before, after = (
        {name: _as_json(value) for name, value in flatten(fields).items()}
        for fields in (saved, wanted)
    )
    return [
        f"{name}: {_shown(before, name)} in the checkpoint, {_shown(after, name)} in the model"
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or before[name] != after[name]
    ]


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of nested mappings under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _as_json(value: Any) -> Any:
    return [_as_json(item) for item in value] if isinstance(value, tuple | list) else value


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name]) if name in fields else "absent"

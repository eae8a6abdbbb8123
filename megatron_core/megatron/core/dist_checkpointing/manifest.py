# SPDX-License-Identifier: Apache-2.0
"""The manifest: a checkpoint's metadata (files, tensors, extra state), as JSON with its own digest.

`manifest.json` is one JSON object. Its first field, named after the digest algorithm, is the digest
of all bytes after that field, so an edited or corrupt manifest is refused. The manifest lists the
files with their sizes, and for every logical tensor its boxes with their byte ranges and one digest
per block.

Nothing here imports torch, because writer processes use this module.

`compare_architecture` compares the saved model with the model that loads a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]  # undeclared
from operator import add, gt
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron.core import __version__
from megatron.core.boxes import Box
from megatron.core.dist_checkpointing.shard_format import (
    BLAKE2B,
    ITEM_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_ITEM_BYTES,
    XXH3,
    CheckpointError,
    DamagedCheckpointError,
    RemovedCheckpointError,
    digest,
    tensor_bytes,
)
from megatron.core.untrusted_files import MAX_JSON_DEPTH, UnsafeFileError, check_depth, open_regular

MANIFEST_NAME = "manifest.json"
FORMAT = "megatron.core.dist_checkpointing"
VERSION = 1

#: Limits of a manifest's size: a minimum for any checkpoint, plus a 64th of the shards' bytes (a
#: box takes some 200 bytes, and 20 bytes per block), up to a maximum.
MIN_MANIFEST_LIMIT, SHARD_BYTES_PER_MANIFEST_BYTE, MAX_MANIFEST_LIMIT = 32 << 20, 64, 1 << 30

#: Maximum length of an error's reason, which may quote the manifest.
MAX_REASON_CHARS = 400

#: Maximum number of dimensions of a tensor, and length of its name.
MAX_DIMENSIONS, MAX_NAME = 8, 1024

#: Limit of files and chunks: a minimum for any checkpoint, plus one per so many bytes of its
#: shards. Decoding one entry takes tens of microseconds, whatever its size.
MIN_CHUNK_LIMIT, BYTES_PER_CHUNK = 110_000, 4096

#: Maximum bytes and values of `extra`.
MAX_EXTRA_BYTES, MAX_EXTRA_VALUES = 8 << 20, 1 << 17

#: Maximum bytes per digest; a block is read as a whole.
MAX_BLOCK_BYTES = 256 << 20

_FOLDER = re.compile(r"iter_([0-9]{7,})")
_HEAD = b'{"%s":"%s",\n'
_HEX_DIGITS = 16
_HEAD_BYTES = 64
_COUNT_LIMIT = 1 << 63
_CHUNKS_PER_CHECK = 1024
_CACHED_SHAPES = 4096
_ORIGINS = tuple((0,) * dims for dims in range(MAX_DIMENSIONS + 1))
_JSON = json.JSONDecoder()


def iteration_of(folder: Path) -> int | None:
    """Return the iteration in a checkpoint folder's name, or None for any other name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A shard: its size, and the size and digest of its header ("" without digests)."""

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
    """A logical tensor: dtype name, global shape, and the chunks that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's metadata.

    `digests` records whether blocks of `block_bytes` have been digested. `xxh3` is the digest of
    the manifest as read ("" before it is written). `extra` is the caller's JSON.
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
    """Raise ValueError unless a manifest can store `extra`."""
    check_json(dict(extra), "extra")
    check_extra_size(extra)
    if len(_dump(extra)) > MAX_EXTRA_BYTES:
        raise ValueError(f"extra has more than {MAX_EXTRA_BYTES} bytes: store arrays as tensors")


def check_json(value: Any, where: str) -> None:
    """Raise ValueError, with its path, for a value that JSON does not round-trip."""
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
            raise ValueError(
                f"{where} is {value}, which JSON cannot represent; store None or a string"
            )
    elif value is not None and type(value) not in (str, int, bool):
        raise ValueError(
            f"{where} is a {type(value).__name__}; only dict, list, str, int, float, bool and None "
            "can be stored in addition to the tensors: convert it"
        )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest.json`: one line per file and per tensor."""
    fields = [
        f'"format":{_dump(FORMAT)}',
        f'"version":{VERSION}',
        f'"iteration":{manifest.iteration}',
        f'"world_size":{manifest.world_size}',
        f'"block_bytes":{manifest.block_bytes}',
        f'"digests":{_dump(manifest.digests)}',
        f'"files":{_dump_lines(manifest.files, _encode_file)}',
        f'"tensors":{_dump_lines(manifest.tensors, _encode_tensor)}',
        f'"extra":{_dump(manifest.extra)}',
    ]
    body = (",\n".join(fields) + "\n}\n").encode()
    body_digest = digest(body)
    algorithm = BLAKE2B if body_digest.startswith(BLAKE2B) else XXH3
    return _HEAD % (algorithm.encode(), body_digest[-_HEX_DIGITS:].encode()) + body


def read_manifest(folder: Path | str) -> Manifest:
    """Return the manifest of a checkpoint folder.

    Raises:
        RemovedCheckpointError: the folder does not exist.
        DamagedCheckpointError: the manifest is missing, damaged or edited.
        CheckpointError: the manifest has another format or version.
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
        raise DamagedCheckpointError(f"cannot read {path}: not enough memory") from None
    algorithm, recorded_digest, body = _split_head(raw, path)
    body_digest = digest(body, algorithm)[-_HEX_DIGITS:]
    if recorded_digest != body_digest:
        raise DamagedCheckpointError(
            f"{path} has changed since it was written (its digest is {body_digest}, not "
            f"{recorded_digest}): use another checkpoint"
        )
    try:
        text = str(raw, "ascii")  # as `json.dumps` writes it
        del raw, body
        manifest = _ManifestDecoder(path, text).manifest(body_digest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DamagedCheckpointError(f"{path} cannot be parsed ({reason})") from error
    folder_step = iteration_of(path.parent)
    if folder_step not in (None, manifest.iteration):
        raise DamagedCheckpointError(
            f"{path} is of iteration {manifest.iteration}, but its folder is named for "
            f"{folder_step}: rename the folder, or use another checkpoint"
        )
    return manifest


def max_manifest_bytes(shard_bytes: int) -> int:
    """Return the maximum size of a manifest for shards of `shard_bytes` in all."""
    return min(
        MIN_MANIFEST_LIMIT + shard_bytes // SHARD_BYTES_PER_MANIFEST_BYTE, MAX_MANIFEST_LIMIT
    )


def _read_bounded(path: Path) -> bytes:
    """Return the bytes of a manifest within its size limit. Raises OSError, CheckpointError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        _split_head(file.read(_HEAD_BYTES), path)  # before memory is allocated for the whole file
        shard_bytes = 0
        if size > MIN_MANIFEST_LIMIT:
            with os.scandir(path.parent) as entries:
                files = [e for e in entries if e.is_file(follow_symlinks=False)]
                shard_bytes = sum(e.stat().st_size for e in files if e.name != path.name)
        if size > max_manifest_bytes(shard_bytes):
            raise UnsafeFileError(path, f"it has {size} bytes, more than its content can need")
        file.seek(0)
        return file.read(size)


def _split_head(raw: bytes, path: Path) -> tuple[str, str, memoryview]:
    """Return the digest's algorithm and digits from the first field, and the remaining bytes."""
    for algorithm in (XXH3, BLAKE2B):
        length = len(_HEAD % (algorithm.encode(), b"0" * _HEX_DIGITS))
        hex_digits = raw[length - _HEX_DIGITS - 3 : length - 3]
        if raw[:length] == _HEAD % (algorithm.encode(), hex_digits):
            return algorithm, hex_digits.decode(errors="replace"), memoryview(raw)[length:]
    raise DamagedCheckpointError(
        f"{path} is not a manifest written by this library, or it is damaged"
    )


def read_extra(folder: Path | str) -> Mapping[str, Any]:
    """Return a checkpoint's `extra` JSON. Raises CheckpointError."""
    return read_manifest(folder).extra


def _encode_file(file: StoredFile) -> dict[str, Any]:
    return {
        "bytes": file.bytes,
        "header_bytes": file.header_bytes,
        "header_xxh3": file.header_xxh3,
    }


def _encode_tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "chunks": [_encode_chunk(chunk) for chunk in tensor.chunks],
    }


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


def _dump_lines(table: Mapping[str, Any], encode: Callable[[Any], dict[str, Any]]) -> str:
    if not table:
        return "{}"
    # Only one entry at a time exists as JSON objects, which take ten times the memory of the text.
    lines = (f"{_dump(key)}:{_dump(encode(value))}" for key, value in sorted(table.items()))
    return "{\n" + ",\n".join(lines) + "}"


class _JsonCursor:
    """Reads JSON member by member, so that only the value at the cursor exists as Python objects,
    which take up to thirty times the memory of their text.

    Raises ValueError for invalid JSON.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def members(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads each value before the next key."""
        seen: set[str] = set()
        for _ in self._separated("{", "}"):
            if self._next() != '"':
                raise ValueError(f"no key before character {self._position}")
            key, self._position = scanstring(self._text, self._position)
            if key in seen:
                raise ValueError(f"{key[:80]!r} is duplicated")
            seen.add(key)
            if self._next() != ":":
                raise ValueError(f"':' is missing before character {self._position}")
            yield key

    def items(self) -> Iterator[None]:
        """Yield once per item of a list; the caller reads each item before the next."""
        return self._separated("[", "]")

    def scalar(self) -> Any:
        """Return a value that is neither an object nor a list."""
        if self._peek() in ("", "{", "["):
            raise ValueError(f"no JSON value at character {self._position}")
        return self.tree()

    def span(self, closing: str) -> str:
        """Return the text of an object or a list up to the next `closing`; it must not contain
        another value that ends with `closing`."""
        self._peek()
        end = self._text.find(closing, self._position) + 1
        if not end:
            raise ValueError(f"{closing!r} is missing after character {self._position}")
        start, self._position = self._position, end
        return self._text[start:end]

    def tree(self) -> Any:
        """Return a value of any type, fully decoded."""
        self._peek()
        value, self._position = _JSON.raw_decode(self._text, self._position)
        return value

    def remaining_chars(self) -> int:
        """Return the number of characters after the cursor."""
        return len(self._text) - self._position

    def finish(self) -> None:
        """Check that no text follows."""
        if self._peek():
            raise ValueError(f"text follows the JSON at character {self._position}")

    def _separated(self, opening: str, closing: str) -> Iterator[None]:
        if self._next() != opening:
            raise ValueError(f"{opening!r} is missing before character {self._position}")
        if self._peek() == closing:
            self._position += 1
            return
        while True:
            yield
            character = self._next()
            if character == closing:
                return
            if character != ",":
                raise ValueError(f"{closing!r} is missing before character {self._position}")

    def _next(self) -> str:
        """Move past the next non-space character and return it; "" at the end."""
        character = self._peek()
        self._position += 1
        return character

    def _peek(self) -> str:
        """Move to the next non-space character and return it; "" at the end."""
        character = self._text[self._position : self._position + 1]
        while character and character in " \t\n\r":
            self._position += 1
            character = self._text[self._position : self._position + 1]
        return character


class _ManifestDecoder:
    """Decodes a manifest's text without trusting it.

    The fields have the order in which `encode_manifest` writes them: the files come before the
    tensors, because their sizes limit the number of tensors.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._cursor = _JsonCursor(text)
        self._digested_block_bytes = 0
        self._files: dict[str, StoredFile] = {}
        self._num_chunks = 0
        # Chunks share equal file names and shapes, to save memory.
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
                f"{self._path} cannot be used: its format is {fields['format']!r:.80} version "
                f"{fields['version']!r:.80}, but this library reads {FORMAT!r} version "
                f"{VERSION}: use the megatron-core that wrote it or a later one, this is "
                f"{__version__}"
            )

    def _block_bytes(self, fields: Mapping[str, Any]) -> int:
        block_bytes = self._count(fields["block_bytes"], "block_bytes")
        if not 16 <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 16:
            self._reject(
                f"block_bytes is {block_bytes}, not a multiple of 16 up to {MAX_BLOCK_BYTES}"
            )
        return block_bytes

    def _extra(self) -> dict[str, Any]:
        if self._cursor.remaining_chars() > MAX_EXTRA_BYTES:
            self._reject(f"extra has more than {MAX_EXTRA_BYTES} bytes")
        extra = self._cursor.tree()
        if not isinstance(extra, dict):
            self._reject("extra is not an object")
        check_depth(extra, max_depth=MAX_JSON_DEPTH)
        check_extra_size(extra)
        return extra

    def _file(self, name: str) -> StoredFile:
        # A name that contains a folder could make a load read, or a copy write, anywhere.
        is_plain_name = Path(name).name == name and name.isprintable() and len(name) < 256
        if not is_plain_name or name in (MANIFEST_NAME, "", ".", ".."):
            self._reject(f"{name!r} is not the plain name of a shard file")
        fields = self._object(name)
        size = self._count(fields["bytes"], name)
        header_bytes = self._count(fields["header_bytes"], name)
        if not LENGTH_BYTES <= header_bytes <= min(size, MAX_HEADER_BYTES + LENGTH_BYTES):
            self._reject(f"{name} has an impossible header of {header_bytes} bytes")
        if not isinstance(fields["header_xxh3"], str):
            self._reject(f"{name}: {fields['header_xxh3']!r} is not text")
        return StoredFile(bytes=size, header_bytes=header_bytes, header_xxh3=fields["header_xxh3"])

    def _tensor(self, name: str) -> StoredTensor:
        if problem := problem_of_name(name):
            self._reject(f"{name!r:.80} {problem}")
        fields: dict[str, Any] = {}
        for field in self._cursor.members():
            if field == "dtype":
                fields[field] = dtype = self._cursor.scalar()
                if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
                    self._reject(f"{name} has the unknown dtype {dtype!r}")
            elif field == "shape":
                fields[field] = self._shape(name)
            elif field == "chunks":
                dtype, shape = fields["dtype"], fields["shape"]
                fields[field] = tuple(self._chunk(name, dtype, shape) for _ in self._cursor.items())
            else:
                self._reject(f"{name} has the unknown field {field!r}")
        if not fields["chunks"]:
            self._reject(f"{name} is not stored in any file")
        return StoredTensor(**fields)

    def _shape(self, name: str) -> tuple[int, ...]:
        text = self._cursor.span("]")
        if text in self._shapes:
            return self._shapes[text]
        if text.count(",") >= MAX_DIMENSIONS or len(text) > MAX_REASON_CHARS:  # limits parsing
            count = text.count(",") + 1
            self._reject(f"{name} has a shape of {count} dimensions: the limit is {MAX_DIMENSIONS}")
        shape = self._counts(json.loads(text), name)
        if problem := problem_of_shape(shape):
            self._reject(f"{name} {problem}")
        if len(self._shapes) < _CACHED_SHAPES:
            self._shapes[text] = shape
        return shape

    def _chunk(self, name: str, dtype: str, shape: tuple[int, ...]) -> StoredChunk:
        self._num_chunks += 1
        if not self._num_chunks % _CHUNKS_PER_CHECK:
            self._check_count()
        fields = self._object(name)
        dims = len(shape)
        offsets, sizes, span = fields["offsets"], fields["sizes"], fields["bytes"]
        if not (list is type(offsets) is type(sizes) is type(span) and len(span) == 2):
            self._reject(f"{name} lacks a list of numbers in {fields}")
        if not dims == len(offsets) == len(sizes):
            self._reject(f"{name} has a box {offsets}, {sizes} outside its shape {list(shape)}")
        numbers = self._counts(offsets + sizes + span, name)
        begin, end = numbers[2 * dims :]
        box = self._box(numbers[:dims], numbers[dims : 2 * dims], shape)
        file = self._file_names.get(fields["file"])
        if file is None:
            self._reject(
                f"{name} is stored in {fields['file']!r}, which is not in the list of files"
            )
        if any(map(gt, map(add, *box), shape)):
            self._reject(f"{name} has a box {box} outside its shape {list(shape)}")
        stored_file = self._files[file]
        is_inside = stored_file.header_bytes <= begin and end <= stored_file.bytes
        if not is_inside or end - begin != tensor_bytes(dtype, box.sizes):
            self._reject(f"{name} has the impossible byte range [{begin}, {end}) in {file}")
        xxh3, block_bytes = fields["xxh3"], self._digested_block_bytes
        if type(xxh3) is not list or not {*map(type, xxh3)} <= {str}:
            self._reject(f"{name} has {xxh3!r} instead of digests")
        if len(xxh3) != (-(-(end - begin) // block_bytes) if block_bytes else 0):
            self._reject(f"{name} has {len(xxh3)} digests for {end - begin} bytes")
        return StoredChunk(file=file, box=box, begin=begin, end=end, xxh3=tuple(xxh3))

    def _box(self, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Return a box that shares equal tuples with other boxes, to save memory."""
        return Box(
            _ORIGINS[len(shape)] if not any(offsets) else offsets,
            shape if sizes == shape else sizes,
        )

    def _check_count(self) -> None:
        shard_bytes = sum(file.bytes for file in self._files.values())
        if problem := problem_of_count(len(self._files) + self._num_chunks, shard_bytes):
            self._reject(problem)

    def _object(self, where: str) -> dict[str, Any]:
        """Return a small object of numbers, strings, and lists of numbers or strings."""
        text = self._cursor.span("}")
        # Decoded numbers and empty lists take ten and twenty times the memory of their text,
        # digests do not.
        if text.count("[") > 4 or text.count(",") > 64 + len(text) // _HEX_DIGITS:
            self._reject(f"{where} has the field {text}")
        fields, end = _JSON.raw_decode(text)
        if end != len(text):
            raise ValueError(f"text follows the object {text[:end]:.80}")
        return fields

    def _counts(self, values: Any, where: str) -> tuple[int, ...]:
        # Called for every chunk of a checkpoint, so set, min and max loop in C.
        numbers = type(values) is list and {*map(type, values)} <= {int}
        if not numbers or min(values, default=0) < 0 or max(values, default=0) >= _COUNT_LIMIT:
            self._reject(f"{where}: {values!r} is not a list of counts")
        return tuple(values)

    def _count(self, value: Any, where: str) -> int:
        if type(value) is not int or not 0 <= value < _COUNT_LIMIT:
            self._reject(f"{where}: {value!r} is not a count")
        return value

    def _reject(self, reason: str) -> NoReturn:
        quoted = reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}..."
        raise DamagedCheckpointError(f"{self._path} cannot be used: {quoted}")


def problem_of_name(name: str) -> str:
    """Return the problem with a tensor's name; "" if it is valid."""
    if name.isprintable() and len(name) <= MAX_NAME:
        return ""
    return f"has a name that is not printable, or longer than {MAX_NAME} characters"


def problem_of_shape(shape: Sequence[int]) -> str:
    """Return the problem with a tensor's shape; "" if it is valid."""
    if len(shape) > MAX_DIMENSIONS:
        return f"has {len(shape)} dimensions, more than the limit of {MAX_DIMENSIONS}"
    # Also for a tensor without elements, because libraries multiply its non-zero sizes.
    if math.prod(size or 1 for size in shape) * MAX_ITEM_BYTES >= _COUNT_LIMIT:
        return f"has the shape {list(shape)}, whose product is 2^60 or more"
    return ""


def problem_of_count(num_entries: int, shard_bytes: int) -> str:
    """Return the problem with a number of files and chunks; "" if it is within the limit."""
    limit = MIN_CHUNK_LIMIT + shard_bytes // BYTES_PER_CHUNK
    if num_entries <= limit:
        return ""
    return (
        f"it has more than {limit} files and chunks of tensors, the limit for shards of "
        f"{shard_bytes} bytes"
    )


def check_extra_size(extra: Mapping[str, Any]) -> None:
    """Raise ValueError if `extra` has too many values or too long dotted names."""
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
            level += [(prefix, inner) for inner in outer if isinstance(inner, Mapping | list)]
        if values > MAX_EXTRA_VALUES or characters > MAX_EXTRA_BYTES:
            raise ValueError(
                f"extra has more than {MAX_EXTRA_VALUES} values, or dotted names of more than "
                f"{MAX_EXTRA_BYTES} characters: store arrays as tensors"
            )


def compare_architecture(saved: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """Return one line per field in which two models differ, e.g. from `extra["model"]`.

    Nested mappings are compared field by field under dotted names. A tuple equals a list, as JSON
    stores it.
    """
    saved_fields, model_fields = (
        {name: _as_json(value) for name, value in flatten(fields).items()}
        for fields in (saved, model)
    )
    return [
        f"{name}: {_repr_of(saved_fields, name)} in the checkpoint, "
        f"{_repr_of(model_fields, name)} in the model"
        for name in sorted(saved_fields.keys() | model_fields.keys())
        if name not in saved_fields
        or name not in model_fields
        or saved_fields[name] != model_fields[name]
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
    return [_as_json(element) for element in value] if isinstance(value, tuple | list) else value


def _repr_of(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name]) if name in fields else "absent"

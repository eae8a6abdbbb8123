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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron.core import __version__
from megatron.core.boxes import Box, first_overlap
from megatron.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from megatron.core.dist_checkpointing.shard_format import (
    BLAKE2B,
    ITEM_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
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

#: A block is read whole.
MAX_BLOCK_BYTES = 256 << 20

_FOLDER = re.compile(r"iter_([0-9]{7,})")
_HEAD = b'{"%s":"%s",\n'
_HEX_DIGITS = 16
_HEAD_BYTES = 64


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


@dataclass(frozen=True, kw_only=True)
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
        DamagedCheckpointError: it is missing, damaged or edited.
        CheckpointError: it is of another format or version.
    """
    path = Path(folder, MANIFEST_NAME)
    try:
        raw = _read_bounded(path)
    except FileNotFoundError:
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
        manifest = _ManifestDecoder(path).manifest(json.loads(raw), wanted)
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


def _read_bounded(path: Path) -> bytes:
    """Return the bytes of a manifest of a size that can be. Raises OSError, CheckpointError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        _split_head(file.read(_HEAD_BYTES), path)  # before memory is taken for the rest
        limit = MAX_MANIFEST_BYTES
        if size > limit:
            with os.scandir(path.parent) as found:
                shards = sum(entry.stat().st_size for entry in found if entry.is_file())
            limit += (shards - size) // MANIFEST_SHARE
        if size > min(limit, LARGEST_MANIFEST_BYTES):
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


class _ManifestDecoder:
    """Turns parsed JSON into a Manifest and trusts nothing in it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def manifest(self, fields: dict[str, Any], xxh3: str) -> Manifest:
        if fields["format"] != FORMAT or fields["version"] != VERSION:
            raise CheckpointError(
                f"{self._path} cannot be used: it is of format {fields['format']!r} version "
                f"{fields['version']!r}, this library reads {FORMAT!r} version {VERSION}: use the "
                f"megatron-core that wrote it or a later one, this is {__version__}"
            )
        digests = fields["digests"] is True
        block_bytes = self._count(fields["block_bytes"], "block_bytes")
        if not 16 <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 16:
            self._refuse(
                f"block_bytes is {block_bytes}, not a multiple of 16 up to {MAX_BLOCK_BYTES}"
            )
        files = {name: self._file(name, file) for name, file in fields["files"].items()}
        tensors = {
            name: self._tensor(name, tensor, files, block_bytes if digests else 0)
            for name, tensor in fields["tensors"].items()
        }
        if not isinstance(fields["extra"], dict):
            self._refuse("extra is not an object")
        check_depth(fields["extra"], max_depth=MAX_JSON_DEPTH)
        return Manifest(
            iteration=self._count(fields["iteration"], "iteration"),
            world_size=self._count(fields["world_size"], "world_size"),
            block_bytes=block_bytes,
            digests=digests,
            files=files,
            tensors=tensors,
            extra=fields["extra"],
            xxh3=xxh3,
        )

    def _file(self, name: str, fields: dict[str, Any]) -> StoredFile:
        # A name with a folder in it could make a load read, or a copy write, anywhere.
        plain = Path(name).name == name and name.isprintable() and len(name) < 256
        if not plain or name in (MANIFEST_NAME, "", ".", ".."):
            self._refuse(f"{name!r} is not the plain name of a shard file")
        size = self._count(fields["bytes"], name)
        header = self._count(fields["header_bytes"], name)
        if not LENGTH_BYTES <= header <= min(size, MAX_HEADER_BYTES + LENGTH_BYTES):
            self._refuse(f"{name} has an impossible header of {header} bytes")
        return StoredFile(
            bytes=size, header_bytes=header, header_xxh3=self._text(fields["header_xxh3"], name)
        )

    def _tensor(
        self, name: str, fields: dict[str, Any], files: Mapping[str, StoredFile], block_bytes: int
    ) -> StoredTensor:
        if not name.isprintable():
            self._refuse(f"{name!r} is no name of a tensor")
        dtype = fields["dtype"]
        if dtype not in ITEM_BYTES:
            self._refuse(f"{name} has the unknown dtype {dtype!r}")
        shape = self._counts(fields["shape"], name)
        chunks = []
        for row in fields["chunks"]:
            sizes, file = self._counts(row["sizes"], name), row["file"]
            box = Box(self._counts(row["offsets"], name), sizes)
            begin, end = self._counts(row["bytes"], name)
            if file not in files:
                self._refuse(f"{name} lies in {file!r}, which is not in the list of files")
            if not len(shape) == len(sizes) == len(box.offsets) or any(
                o + n > whole for o, n, whole in zip(*box, shape, strict=True)
            ):
                self._refuse(f"{name} has a box {box} outside its shape {list(shape)}")
            inside = files[file].header_bytes <= begin and end <= files[file].bytes
            if not inside or end - begin != tensor_bytes(dtype, sizes):
                self._refuse(f"{name} has the impossible byte range [{begin}, {end}) in {file}")
            xxh3 = row["xxh3"]
            if type(xxh3) is not list or not {*map(type, xxh3)} <= {str}:
                self._refuse(f"{name} has {xxh3!r} in place of digests")
            if len(xxh3) != (-(-(end - begin) // block_bytes) if block_bytes else 0):
                self._refuse(f"{name} has {len(xxh3)} digests for {end - begin} bytes")
            chunks.append(StoredChunk(file=file, box=box, begin=begin, end=end, xxh3=tuple(xxh3)))
        return StoredTensor(dtype=dtype, shape=shape, chunks=tuple(chunks))

    def _counts(self, values: Any, where: str) -> tuple[int, ...]:
        # Called for every chunk of a checkpoint: set and min do the loop in C.
        numbers = type(values) is list and {*map(type, values)} <= {int}
        if not numbers or min(values, default=0) < 0:
            self._refuse(f"{where}: {values!r} is not a list of numbers of things")
        return tuple(values)

    def _count(self, value: Any, where: str) -> int:
        if type(value) is not int or value < 0:
            self._refuse(f"{where}: {value!r} is not a number of things")
        return value

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self._refuse(f"{where}: {value!r} is not text")
        return value

    def _refuse(self, why: str) -> NoReturn:
        shown = why if len(why) <= MAX_SHOWN else f"{why[:MAX_SHOWN]}..."
        raise DamagedCheckpointError(f"{self._path} cannot be used: {shown}")


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
        if overlap := first_overlap([chunk.box for chunk in chunks]):
            a, b = (chunks[i] for i in overlap)
            raise CheckpointError(
                f"{name} would be written twice: {a.box} in {a.file} and {b.box} in {b.file}; "
                "name all ranks that hold the same box in its replica_ranks"
            )
        whole = Box((0,) * len(first.shape), first.shape).numel
        covered = sum(chunk.box.numel for chunk in chunks)
        if covered != whole:
            raise CheckpointError(
                f"{name} {list(first.shape)} has {whole} elements but the ranks declare only "
                f"{covered}: a chunk of it is missing on some rank"
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

# SPDX-License-Identifier: Apache-2.0
"""Implementation of the checkpoint commands list, inspect and verify.

- list: the checkpoints of a run: which are complete, which one a run would load, and the writer.
- inspect: the contents of one checkpoint, from its manifest alone; no tensor is read.
- verify: every byte of one checkpoint, or of all checkpoints in a folder, against its digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import math
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointReader,
    DamagedCheckpointError,
    Manifest,
    RemovedCheckpointError,
    TensorChunk,
    VerifyReport,
    latest_checkpoint,
    list_checkpoints,
    read_manifest,
    reading,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    VERSION,
    StoredTensor,
    flatten,
    iteration_of,
)
from megatron.core.dist_checkpointing.run_folder import (
    ATTEMPTS,
    LOCK_NAME,
    MAX_TRACKER_BYTES,
    TRACKER_NAME,
    check_link,
    is_temporary,
    verify_contents,
)
from megatron.core.dist_checkpointing.safetensors_file import DTYPES
from megatron.core.dist_checkpointing.shard_format import ITEM_BYTES, describe, tensor_bytes
from megatron.core.untrusted_files import read_regular, regular_fd
from megatron.training.checkpointing.commands.options import (
    InspectConfig,
    ListConfig,
    VerifyConfig,
)
from megatron.training.checkpointing.find import foreign_kind, foreign_line
from megatron.training.checkpointing.stored_model import check_stored

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def existing_folder(text: str) -> Path:
    """Return the path of an existing folder. Raises ValueError."""
    path = Path(text)
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder")
    return path


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is one checkpoint, damaged or not, rather than a folder of
    checkpoints."""
    return iteration_of(path) is not None or os.path.lexists(path / MANIFEST_NAME)


def one_checkpoint(text: str) -> Path:
    """Return the checkpoint of a path: the folder itself, or the one that a run would load.

    Raises:
        ValueError: there is no checkpoint.
        CheckpointError: all checkpoints are damaged.
    """
    path = existing_folder(text)
    if is_checkpoint(path):
        return path
    checkpoint = latest_checkpoint(path, say=lambda line: print(line, file=sys.stderr, flush=True))
    if checkpoint is None:
        raise ValueError(f"{path} contains no checkpoint: name another folder")
    return checkpoint


def problem_of(error: CheckpointError) -> str:
    """Return one line about a checkpoint's error: damage, or why it cannot be read."""
    what = "DAMAGED" if isinstance(error, DamagedCheckpointError) else "UNREADABLE"
    return f"{what}: {describe(error)}"


def size_text(size: int) -> str:
    """Return a human-readable size in bytes, in powers of 1000."""
    value, unit = float(size), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size} {_UNITS[0]}"


#: Bytes of a tensor read at a time. Blocks are always read whole: smaller boxes would read each
#: block more often.
_READ_BYTES = 8 << 20


def read_rows(shape: tuple[int, ...], dtype: str) -> Iterator[Box]:
    """Divide a tensor into boxes of whole rows to read one after the other.

    Args:
        shape, dtype: shape and safetensors dtype of the tensor.
    """
    if not math.prod(shape):
        return iter(())
    return row_boxes(shape, ITEM_BYTES[dtype], box_bytes=_READ_BYTES)


def read_box(reader: CheckpointReader, name: str, box: Box) -> torch.Tensor:
    """Return a box of a tensor. Raises CheckpointError."""
    stored = reader.manifest.tensors[name]
    values = torch.empty(box.sizes, dtype=DTYPES[stored.dtype])
    where = {"shape": stored.shape, "offsets": box.offsets, "replica_ranks": (0,)}
    reader.read([TensorChunk(name=name, tensor=values, **where)])
    return values


#: Sections of `extra` in display order; others follow.
_SECTIONS = ("model", "progress", "optimizer", "data", "tokenizer", "config")


def inspect_folder(config: InspectConfig) -> int:
    """Print the contents of a checkpoint. Raises ValueError, CheckpointError."""
    folder = one_checkpoint(config.folder)
    manifest = read_manifest(folder)
    pattern = config.tensors
    chosen = {
        name: tensor
        for name, tensor in sorted(manifest.tensors.items())
        if pattern is not None and fnmatch.fnmatchcase(name, pattern)
    }
    if pattern is not None and not chosen:
        raise ValueError(f"--tensors {pattern}: {folder} has no tensor with such a name")
    if config.json:
        _print_json(folder, manifest, chosen)
    else:
        for line in (*_lines(folder, manifest), *_tensor_lines(chosen)):
            print(line)
    return 0


def kind_of_tensor(name: str) -> str:
    """Return the kind of a tensor, by its name: `weights`, optimizer state as `optimizer.KIND`, or
    the state of `experiment.NAME`."""
    kind, slash, _ = name.partition("/")
    return kind if slash else "weights"


def totals(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Return the number of tensors, elements and bytes of each kind."""
    totals_by_kind: dict[str, dict[str, int]] = {}
    for name, tensor in sorted(manifest.tensors.items()):
        kind = kind_of_tensor(name)
        row = totals_by_kind.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += tensor_bytes("U8", tensor.shape)
        row["bytes"] += tensor_bytes(tensor.dtype, tensor.shape)
    return dict(sorted(totals_by_kind.items(), key=lambda item: (item[0] != "weights", item[0])))


def _sections(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    extra_sections = sorted(manifest.extra.keys() - set(_SECTIONS))
    for name in (*_SECTIONS, *extra_sections):
        if name in manifest.extra:
            yield name, manifest.extra[name]


def _lines(folder: Path, manifest: Manifest) -> Iterator[str]:
    size = size_text(sum(file.bytes for file in manifest.files.values()))
    digests = f"digests per {size_text(manifest.block_bytes)}" if manifest.digests else "no digests"
    yield (
        f"{folder}: iteration {manifest.iteration}, {size} in {len(manifest.files)} files, saved "
        f"by {manifest.world_size} ranks, format {VERSION}, {digests}"
    )
    for kind, row in totals(manifest).items():
        yield (
            f"  {kind}: {row['tensors']} tensors, {row['elements']:,} elements, "
            f"{size_text(row['bytes'])}"
        )
    for name, section in _sections(manifest):
        if not isinstance(section, Mapping):
            yield f"{name}: {json.dumps(section)}"
            continue
        yield f"{name}:"
        for field, value in flatten(section).items():
            yield f"  {field}: {json.dumps(value)}"


def _tensor_lines(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    if tensors:
        yield "tensors:"
    for name, tensor in tensors.items():
        size = size_text(tensor_bytes(tensor.dtype, tensor.shape))
        yield f"  {name}  {tensor.dtype} {list(tensor.shape)}, {size}"
        for chunk in tensor.chunks:
            yield f"    {chunk.box} in {chunk.file} at bytes [{chunk.begin}, {chunk.end})"


def _print_json(folder: Path, manifest: Manifest, tensors: Mapping[str, StoredTensor]) -> None:
    """Print one JSON object tensor by tensor, as all tensors at once take many times the memory."""
    fields = {
        "folder": str(folder),
        "iteration": manifest.iteration,
        "world_size": manifest.world_size,
        "format": VERSION,
        "digests": manifest.digests,
        "block_bytes": manifest.block_bytes,
        "files": {name: file.bytes for name, file in sorted(manifest.files.items())},
        "totals": totals(manifest),
        **dict(_sections(manifest)),
    }
    print(json.dumps(fields, indent=2).removesuffix("\n}"), end=',\n  "tensors": {')
    separator = ""
    for name, tensor in tensors.items():
        print(f"{separator}\n    {json.dumps(name)}: ", end="")
        for text in json.JSONEncoder(indent=2).iterencode(_tensor_json(tensor)):
            sys.stdout.write(text.replace("\n", "\n    "))
        separator = ","
    print("\n  }\n}" if tensors else "}\n}")


def _tensor_json(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "chunks": [
            {
                "offsets": chunk.box.offsets,
                "sizes": chunk.box.sizes,
                "file": chunk.file,
                "bytes": [chunk.begin, chunk.end],
            }
            for chunk in tensor.chunks
        ],
    }


_HEAD = ("iteration", "size", "ranks", "saved", "format", "state")

_ASIDE = re.compile(r"iter_\d{7,}\.damaged-[0-9a-f]+")

#: `struct flock` of Linux: type, whence, start, length, process.
_FLOCK = "hhqqi4x"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A checkpoint of a run.

    Args:
        iteration: iteration in its name.
        num_bytes: size of all files in the folder.
        saved: modification time of the manifest, in seconds since 1970; None without one.
        world_size: number of ranks that saved it; None if the manifest cannot be read.
        problem: its problem, see `problem_of`; "" without any.
        verified: result of its verification, or the error.
    """

    iteration: int
    num_bytes: int
    saved: float | None
    world_size: int | None
    problem: str
    verified: VerifyReport | CheckpointError


def list_root(config: ListConfig) -> int:
    """Print the checkpoints of a folder. Returns 1 if one is damaged. Raises ValueError."""
    root = existing_folder(config.root)
    if is_checkpoint(root):
        raise ValueError(
            f"{root} is one checkpoint: name the folder that contains it, or use inspect"
        )
    listed: dict[Path, Listed] = {}
    for folder in list_checkpoints(root):
        with contextlib.suppress(RemovedCheckpointError):  # removed by the run that saves here
            listed[folder] = _list_entry(folder, digests=config.verify)
    checked = "every byte read" if config.verify else "sizes checked"
    total = size_text(sum(row.num_bytes for row in listed.values()))
    print(f"{root}: {len(listed)} checkpoint{'s' * (len(listed) != 1)}, {total}, {checked}")
    if listed:
        print("\n".join(_table([_HEAD, *map(_row, listed.values())])))

    def verify(folder: Path) -> VerifyReport:
        if folder not in listed:  # saved since then
            return verify_checkpoint(folder, digests=config.verify, follow_links=False)
        verified = listed[folder].verified
        if isinstance(verified, CheckpointError):
            raise verified
        return verified

    for line in (*_selection_lines(root, verify), *_leftover_lines(root), _lock_line(root)):
        print(line)
    return int(any(row.problem for row in listed.values()))


def _list_entry(folder: Path, *, digests: bool) -> Listed:
    """Return the list entry of a checkpoint. Raises RemovedCheckpointError."""
    iteration = iteration_of(folder)
    assert iteration is not None, "list_checkpoints returns iter_ folders only"
    world_size, problem = None, ""
    verified: VerifyReport | CheckpointError | None = None
    try:
        check_link(folder)
        with reading(folder) if digests else contextlib.nullcontext():
            manifest = read_manifest(folder)
            world_size = manifest.world_size
            verified = verify_contents(folder, manifest, digests=digests)
            if digests:
                check_stored(folder, manifest)
    except RemovedCheckpointError:
        raise
    except CheckpointError as error:
        verified, problem = verified or error, problem_of(error)
        if not os.path.lexists(folder / MANIFEST_NAME) and foreign_kind(folder):
            problem = "FOREIGN: of torch.distributed.checkpoint, see convert"
    assert verified is not None
    return Listed(
        iteration=iteration,
        num_bytes=folder_bytes(folder),
        saved=_saved_at(folder),
        world_size=world_size,
        problem=problem,
        verified=verified,
    )


def _saved_at(folder: Path) -> float | None:
    """Return the modification time of a manifest; None without one."""
    try:
        return (folder / MANIFEST_NAME).lstat().st_mtime
    except OSError:
        return None


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder; 0 for a link, or for a folder removed meanwhile."""
    total = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(folder) if not folder.is_symlink() else ():
            with contextlib.suppress(OSError):
                total += (folder / name).lstat().st_size
    return total


def _row(listed: Listed) -> tuple[str, ...]:
    is_complete = listed.world_size is not None
    when = "-"
    if listed.saved is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(listed.saved))
    return (
        str(listed.iteration),
        size_text(listed.num_bytes),
        str(listed.world_size) if is_complete else "-",
        when,
        str(VERSION) if is_complete else "-",
        listed.problem or "whole",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines with aligned columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {"iteration", "size", "ranks", "format"}
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, _HEAD, strict=True)
        ).rstrip()
        for row in rows
    ]


def _selection_lines(root: Path, verify: Callable[[Path], VerifyReport]) -> Iterator[str]:
    """Yield the tracker's content, and the checkpoint that a run would load."""
    try:
        tracker = read_regular(root / TRACKER_NAME, MAX_TRACKER_BYTES)
        text = tracker.decode(errors="replace").strip()
        yield f"tracker: {text[:40]}" if text.isdigit() else f"tracker: {text[:40]!r}"
    except OSError:
        yield f"tracker: none ({TRACKER_NAME})"
    messages: list[str] = []
    foreign = foreign_line(root)
    try:
        checkpoint = latest_checkpoint(root, verify=verify, say=messages.append)
    except CheckpointError as error:
        yield f"a run would load: none, and stop: {foreign or ' '.join(str(error).split())}"
        return
    if checkpoint is None and foreign:
        yield f"a run would load: none, and stop: {foreign}"
        return
    choice = "none, and start from scratch" if checkpoint is None else checkpoint.name
    yield f"a run would load: {choice}"
    yield from (f"  {line}" for line in messages)


def _leftover_lines(root: Path) -> Iterator[str]:
    """Yield lines about unfinished saves and about damaged checkpoints that a run renamed."""
    for path in sorted(root.iterdir()):
        if is_temporary(path):
            size = size_text(folder_bytes(path))
            yield f"temporary: {path.name}, {size}: of a running or interrupted save"
        elif _ASIDE.fullmatch(path.name):
            yield f"renamed: {path.name}, {size_text(folder_bytes(path))}: it was damaged"


def _lock_line(root: Path) -> str:
    """Return a line about the process that has locked the folder for saving.

    Queries the lock without taking it, so that a run that starts at this moment is not disturbed.
    """
    path = root / LOCK_NAME
    try:
        fd = regular_fd(path)
    except OSError:
        return "in use by: nobody"
    try:
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, process = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, request))
        if kind == fcntl.F_UNLCK:
            return "in use by: nobody"
        text = os.pread(fd, 200, 0).decode(errors="replace").strip()
        text = "".join(c if c.isprintable() else " " for c in text)
        return f"in use by: {text or f'pid {process}'}"
    finally:
        os.close(fd)


def verify_folders(config: VerifyConfig) -> int:
    """Verify checkpoints and print the results. Returns 1 if anything is damaged. Raises
    ValueError."""
    path = existing_folder(config.folder)
    if is_checkpoint(path):
        return int(not _verify(path))
    for _ in range(ATTEMPTS):
        results = [_verify_listed(folder) for folder in list_checkpoints(path)]
        verified = [is_whole for is_whole in results if is_whole is not None]
        if verified:
            return int(not all(verified))
    raise ValueError(f"{path} contains no checkpoint: name another folder")


def _verify_listed(folder: Path) -> bool | None:
    """Verify a checkpoint of a run that may still be running; None if it was removed meanwhile."""
    try:
        check_link(folder)
        return _verify(folder)
    except RemovedCheckpointError:
        print(f"removed meanwhile: {folder}", flush=True)
        return None
    except CheckpointError as error:
        print(problem_of(error), file=sys.stderr, flush=True)
        return False


def _verify(folder: Path) -> bool:
    """Verify one checkpoint, print the result, and return whether it is intact.

    Raises RemovedCheckpointError.
    """
    try:
        with reading(folder):
            manifest = read_manifest(folder)
            report = verify_contents(folder, manifest, digests=True)
            problem = check_stored(folder, manifest)
    except RemovedCheckpointError:
        raise
    except CheckpointError as error:
        print(problem_of(error), file=sys.stderr, flush=True)
        return False
    print(
        f"whole {folder}: {size_text(report.bytes_verified)} of {len(manifest.tensors)} tensors "
        f"in {len(manifest.files)} files verified",
        flush=True,
    )
    if problem:
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    for name in report.unexpected_files:
        path = folder / name
        print(f"warning: {path} is not part of the checkpoint", file=sys.stderr, flush=True)
    return True

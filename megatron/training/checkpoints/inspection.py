# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint commands list, inspect, verify and compare.

- list: the checkpoints of a run: which are complete, which one a run would load, who is writing.
- inspect: the contents of one checkpoint, from its manifest alone; no tensor is read.
- verify: every byte of one checkpoint, or of all in a folder, against its digest.
- compare: two checkpoints by their logical tensors, whatever layouts they were saved on. Tensors
  are read in chunks that match their digests.
"""

from __future__ import annotations

import fcntl
import fnmatch
import json
import math
import os
import re
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron.core.boxes import ROW_BOX_BYTES, Box, row_boxes
from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointReader,
    Manifest,
    TensorChunk,
    latest_checkpoint,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing.errors import DamagedCheckpointError, describe
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    VERSION,
    StoredTensor,
    flatten,
    iteration_of,
)
from megatron.core.dist_checkpointing.run_folder import (
    LOCK_NAME,
    MAX_TRACKER_BYTES,
    TRACKER_NAME,
    is_temporary,
)
from megatron.core.dist_checkpointing.shard_format import ITEM_BYTES, tensor_bytes
from megatron.core.dist_checkpointing.shards import DTYPES
from megatron.core.untrusted_files import read_regular, regular_fd
from megatron.training.checkpoints.options import (
    CompareConfig,
    InspectConfig,
    ListConfig,
    VerifyConfig,
)
from megatron.training.newest_checkpoint import foreign_kind, foreign_line
from megatron.training.stored_model import check_stored

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def existing_folder(text: str) -> Path:
    """Return a folder that is there. Raises ValueError."""
    path = Path(text)
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder")
    return path


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is one checkpoint, damaged or not, rather than a folder of some."""
    return iteration_of(path) is not None or (path / MANIFEST_NAME).exists()


def one_checkpoint(text: str) -> Path:
    """Return the checkpoint that a path means: itself, or the one that a run would load.

    Raises:
        ValueError: there is none.
        CheckpointError: there are, and all are damaged.
    """
    path = existing_folder(text)
    if is_checkpoint(path):
        return path
    found = latest_checkpoint(path, say=lambda line: print(line, file=sys.stderr, flush=True))
    if found is None:
        raise ValueError(f"{path} holds no checkpoint: name another folder")
    return found


def problem_of(error: CheckpointError) -> str:
    """Return what is wrong with a checkpoint on one line: damage, or why it cannot be judged."""
    what = "DAMAGED" if isinstance(error, DamagedCheckpointError) else "UNREADABLE"
    return f"{what}: {describe(error)}"


def size_text(size: int) -> str:
    """Return a number of bytes for people, in powers of 1000."""
    value, unit = float(size), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size} {_UNITS[0]}"


def digested_rows(shape: tuple[int, ...], dtype: str, *manifests: Manifest) -> Iterator[Box]:
    """Cut a tensor into boxes of whole rows that take two digested blocks each.

    A block is read whole, whatever is wanted of it: with smaller boxes most would be read more
    than twice.

    Args:
        shape, dtype: of the tensor.
        manifests: of the checkpoints that the boxes are read from.
    """
    if not math.prod(shape):
        return iter(())
    wanted = max(ROW_BOX_BYTES, *(2 * manifest.block_bytes for manifest in manifests))
    return row_boxes(shape, ITEM_BYTES[dtype], piece_bytes=wanted)


def read_box(reader: CheckpointReader, name: str, box: Box) -> torch.Tensor:
    """Return a box of a tensor. Raises CheckpointError."""
    stored = reader.manifest.tensors[name]
    piece = torch.empty(box.sizes, dtype=DTYPES[stored.dtype])
    where = {"shape": stored.shape, "offsets": box.offsets, "replica_ranks": (0,)}
    reader.read([TensorChunk(name=name, tensor=piece, **where)])
    return piece


#: Parts of `extra` in the order they are shown; others follow.
_SECTIONS = ("model", "progress", "optimizer", "data", "tokenizer", "config")


def inspect_folder(config: InspectConfig) -> int:
    """Print what a checkpoint holds. Raises ValueError, CheckpointError."""
    folder = one_checkpoint(config.folder)
    manifest = read_manifest(folder)
    pattern = config.tensors
    chosen = {
        name: tensor
        for name, tensor in sorted(manifest.tensors.items())
        if pattern is not None and fnmatch.fnmatchcase(name, pattern)
    }
    if pattern is not None and not chosen:
        raise ValueError(f"--tensors {pattern}: {folder} has no tensor of such a name")
    if config.json:
        print(json.dumps(_as_json(folder, manifest, chosen), indent=2))
    else:
        for line in (*_lines(folder, manifest), *_tensor_lines(chosen)):
            print(line)
    return 0


def kind_of_tensor(name: str) -> str:
    """Return what a tensor is by its name: `weights`, optimizer state as `optimizer.exp_avg`, or
    the state of `experiment.NAME`."""
    kind, slash, _ = name.partition("/")
    return kind if slash else "weights"


def totals(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Return tensors, elements and bytes of each kind."""
    found: dict[str, dict[str, int]] = {}
    for name, tensor in sorted(manifest.tensors.items()):
        kind = kind_of_tensor(name)
        row = found.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += tensor_bytes("U8", tensor.shape)
        row["bytes"] += tensor_bytes(tensor.dtype, tensor.shape)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "weights", item[0])))


def _sections(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    rest = sorted(manifest.extra.keys() - set(_SECTIONS))
    for name in (*_SECTIONS, *rest):
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


def _as_json(
    folder: Path, manifest: Manifest, tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "iteration": manifest.iteration,
        "world_size": manifest.world_size,
        "format": VERSION,
        "digests": manifest.digests,
        "block_bytes": manifest.block_bytes,
        "files": {name: file.bytes for name, file in sorted(manifest.files.items())},
        "totals": totals(manifest),
        **dict(_sections(manifest)),
        "tensors": {
            name: {
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
            for name, tensor in tensors.items()
        },
    }


#: Lines of one kind that are printed without --all.
MAX_LINES = 20

#: Elements that are compared at a time: in fp64 they take several times their memory.
MAX_ELEMENTS = 1 << 18

#: Parts of `extra` that may differ between equal checkpoints: how it was run, and sums of a log
#: line that is being gathered.
_BESIDE = ("config", "window")
_BITS: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)


@dataclass(kw_only=True)
class Difference:
    """How a tensor differs, gathered chunk by chunk.

    Args:
        differing: elements of other bits.
        largest: the largest absolute difference; infinite where only one has a NaN.
        scale: the largest finite element of either tensor.
    """

    differing: int = 0
    largest: float = 0.0
    scale: float = 0.0

    @property
    def relative(self) -> float:
        """The largest difference as a share of the largest element."""
        if not self.largest:
            return 0.0
        return self.largest / self.scale if self.scale else math.inf

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Take in the same elements of both tensors."""
        if first.dtype == second.dtype:
            bits = _BITS[first.itemsize]
            others = first.view(bits) != second.view(bits)
        else:
            others = first.double() != second.double()
        count = int(others.sum())
        a, b = first.double(), second.double()
        for values in (a, b):
            finite = values[values.isfinite()]
            if finite.numel():
                self.scale = max(self.scale, float(finite.abs().max()))
        if not count:
            return
        self.differing += count
        a, b = a[others], b[others]
        gaps = (a - b).abs()
        gaps[(a == b) | (a.isnan() & b.isnan())] = 0.0  # other bits of the same value, infinities
        gaps[gaps.isnan()] = math.inf
        self.largest = max(self.largest, float(gaps.max()))


def compare_folders(config: CompareConfig) -> int:
    """Print how two checkpoints differ. Returns 0 if they are equal, else 1. Raises ValueError."""
    folders = [one_checkpoint(config.first), one_checkpoint(config.second)]
    limit = None if config.all else MAX_LINES
    with CheckpointReader(folders[0]) as first, CheckpointReader(folders[1]) as second:
        manifests = (first.manifest, second.manifest)
        counted, beside = _fields(*manifests)
        _print("fields that differ", counted, limit)
        _print("options and log sums that differ, which does not count", beside, limit)
        names = [set(manifest.tensors) for manifest in manifests]
        alone = [sorted(names[0] - names[1]), sorted(names[1] - names[0])]
        for folder, lone in zip(folders, alone, strict=True):
            _print(f"tensors of {folder} only", lone, limit)
        both = sorted(names[0] & names[1])
        texts: dict[bool, list[str]] = {False: [], True: []}
        for name in both:
            equal, text = _compare(first, second, name, config.tolerance)
            texts[equal].append(text)
    _print("tensors that differ", texts[False], limit)
    if config.all:
        _print("equal tensors", texts[True], None)
    same = not (counted or any(alone) or texts[False])
    within = f" within {config.tolerance:g}" if config.tolerance else ""
    print(
        f"{'equal' if same else 'different'}: {len(texts[True])} of {len(both)} common tensors are "
        f"equal{within}, {len(counted)} fields differ"
    )
    return 0 if same else 1


def _print(title: str, lines: list[str], limit: int | None) -> None:
    if not lines:
        return
    print(f"{title}:")
    for line in lines[:limit]:
        print(f"  {line}")
    if limit is not None and len(lines) > limit:
        print(f"  and {len(lines) - limit} more: see them with --all")


def _fields(first: Manifest, second: Manifest) -> tuple[list[str], list[str]]:
    """Return a line per field that differs: those that count, and those that do not."""
    sides = [flatten({"iteration": m.iteration, **m.extra}) for m in (first, second)]
    counted, beside = [], []
    for name in sorted(sides[0].keys() | sides[1].keys()):
        if name in sides[0] and name in sides[1] and sides[0][name] == sides[1][name]:
            continue
        line = f"{name}: {_shown(sides[0], name)} and {_shown(sides[1], name)}"
        (beside if name.partition(".")[0] in _BESIDE else counted).append(line)
    return counted, beside


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name]) if name in fields else "absent"


def _compare(
    first: CheckpointReader, second: CheckpointReader, name: str, tolerance: float
) -> tuple[bool, str]:
    """Return whether a tensor counts as equal, and a line about it."""
    a, b = first.manifest.tensors[name], second.manifest.tensors[name]
    if a.shape != b.shape:
        return False, f"{name}: {list(a.shape)} and {list(b.shape)}"
    found = Difference()
    wider = max((a.dtype, b.dtype), key=lambda dtype: ITEM_BYTES[dtype])
    for box in digested_rows(a.shape, wider, first.manifest, second.manifest):
        _add_box(found, first, second, name=name, box=box)
    dtypes = f"{a.dtype} and {b.dtype}, " if a.dtype != b.dtype else ""
    if not found.differing:
        equal = not dtypes or tolerance > 0
        return equal, f"{name}: {dtypes}equal {'values' if dtypes else 'bits'}"
    total = math.prod(a.shape)
    text = (
        f"{name}: {dtypes}{found.differing} of {total} elements differ, by at most "
        f"{found.largest:.3g}, {found.relative:.3g} of the largest element"
    )
    return bool(tolerance) and found.relative <= tolerance, text


def _add_box(
    found: Difference, first: CheckpointReader, second: CheckpointReader, *, name: str, box: Box
) -> None:
    """Take in a box of both tensors; what has been read is gone before the next is."""
    pieces = [read_box(reader, name, box).flatten() for reader in (first, second)]
    for one, other in zip(*(piece.split(MAX_ELEMENTS) for piece in pieces), strict=True):
        found.add(one, other)


_HEAD = ("iteration", "size", "ranks", "saved", "format", "state")

_ASIDE = re.compile(r"iter_\d{7,}\.damaged-[0-9a-f]+")

#: `struct flock` of Linux: type, whence, start, length, process.
_FLOCK = "hhqqi4x"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A checkpoint of a run.

    Args:
        iteration: by its name.
        num_bytes: of all files in the folder.
        saved: when its manifest was written, in seconds since 1970; None without one.
        world_size: ranks that saved it; None if that cannot be read.
        problem: what is wrong with it, see `problem_of`; "" if nothing is.
    """

    iteration: int
    num_bytes: int
    saved: float | None
    world_size: int | None
    problem: str


def list_root(config: ListConfig) -> int:
    """Print the checkpoints of a folder. Returns 1 if one is damaged. Raises ValueError."""
    root = existing_folder(config.root)
    if is_checkpoint(root):
        raise ValueError(
            f"{root} is one checkpoint: name the folder that it lies in, or use inspect"
        )
    found = [_look_at(folder, digests=config.verify) for folder in list_checkpoints(root)]
    checked = "every byte read" if config.verify else "sizes checked"
    total = size_text(sum(listed.num_bytes for listed in found))
    print(f"{root}: {len(found)} checkpoint{'s' * (len(found) != 1)}, {total}, {checked}")
    if found:
        print("\n".join(_table([_HEAD, *map(_row, found)])))
    for line in (*_chosen(root, digests=config.verify), *_remains(root), _owner(root)):
        print(line)
    return int(any(listed.problem for listed in found))


def _look_at(folder: Path, *, digests: bool) -> Listed:
    iteration = iteration_of(folder)
    assert iteration is not None, "list_checkpoints finds no others"
    world_size, saved, problem = None, None, ""
    try:
        saved = (folder / MANIFEST_NAME).stat().st_mtime
        world_size = read_manifest(folder).world_size
        verify_checkpoint(folder, digests=digests)
        if digests:
            check_stored(folder)
    except FileNotFoundError:
        problem = f"DAMAGED: {folder / MANIFEST_NAME} does not exist"
        if foreign_kind(folder):
            problem = "FOREIGN: of torch.distributed.checkpoint, see convert"
    except CheckpointError as error:
        problem = problem_of(error)
    return Listed(
        iteration=iteration,
        num_bytes=folder_bytes(folder),
        saved=saved,
        world_size=world_size,
        problem=problem,
    )


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder; one that is removed meanwhile has none."""
    found = 0
    for name in os.listdir(folder) if folder.is_dir() else ():
        try:
            found += (folder / name).lstat().st_size
        except OSError:
            continue
    return found


def _row(listed: Listed) -> tuple[str, ...]:
    known = listed.world_size is not None
    when = "-"
    if listed.saved is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(listed.saved))
    return (
        str(listed.iteration),
        size_text(listed.num_bytes),
        str(listed.world_size) if known else "-",
        when,
        str(VERSION) if known else "-",
        listed.problem or "whole",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines with columns under each other, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {"iteration", "size", "ranks", "format"}
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, _HEAD, strict=True)
        ).rstrip()
        for row in rows
    ]


def _chosen(root: Path, *, digests: bool) -> Iterator[str]:
    """Say what the tracker holds, and which checkpoint a run would load."""
    try:
        tracker = read_regular(root / TRACKER_NAME, MAX_TRACKER_BYTES)
        text = tracker.decode(errors="replace").strip()
        yield f"tracker: {text[:40]}" if text.isdigit() else f"tracker: {text[:40]!r}"
    except OSError:
        yield f"tracker: none ({TRACKER_NAME})"
    said: list[str] = []
    foreign = foreign_line(root)
    try:
        found = latest_checkpoint(root, digests=digests, say=said.append)
    except CheckpointError as error:
        yield f"a run would load: none, and stop: {foreign or ' '.join(str(error).split())}"
        return
    if found is None and foreign:
        yield f"a run would load: none, and stop: {foreign}"
        return
    yield f"a run would load: {'none, and start anew' if found is None else found.name}"
    yield from (f"  {line}" for line in said)


def _remains(root: Path) -> Iterator[str]:
    """Name what a save is working on or has left behind, and what a run has put aside."""
    for path in sorted(root.iterdir()):
        if is_temporary(path):
            size = size_text(folder_bytes(path))
            yield f"temporary: {path.name}, {size}: of a save that runs or was interrupted"
        elif _ASIDE.fullmatch(path.name):
            yield f"put aside: {path.name}, {size_text(folder_bytes(path))}: it was damaged"


def _owner(root: Path) -> str:
    """Say who may write into the folder: the process that holds its lock.

    Asks without taking the lock: a run that starts at this moment is not disturbed.
    """
    path = root / LOCK_NAME
    try:
        fd = regular_fd(path)
    except OSError:
        return "in use by: nobody"
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, process = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return "in use by: nobody"
        text = os.pread(fd, 200, 0).decode(errors="replace").strip()
        text = "".join(c if c.isprintable() else " " for c in text)
        return f"in use by: {text or f'pid {process}'}"
    finally:
        os.close(fd)


def verify_folders(config: VerifyConfig) -> int:
    """Print what was verified. Returns 1 if anything is damaged. Raises ValueError."""
    path = existing_folder(config.folder)
    folders = [path] if is_checkpoint(path) else list_checkpoints(path)
    if not folders:
        raise ValueError(f"{path} holds no checkpoint: name another folder")
    # Not all(): one that is damaged shall not hide another.
    return int(not min([_verify(folder) for folder in folders]))


def _verify(folder: Path) -> bool:
    """Verify one checkpoint, print the result, and return whether it is whole."""
    try:
        manifest = read_manifest(folder)
        report = verify_checkpoint(folder)
        odd = check_stored(folder)
    except CheckpointError as error:
        print(problem_of(error), file=sys.stderr, flush=True)
        return False
    print(
        f"whole {folder}: {size_text(report.bytes_verified)} of {len(manifest.tensors)} tensors "
        f"in {len(manifest.files)} files verified",
        flush=True,
    )
    if odd:
        print(f"warning: {odd}", file=sys.stderr, flush=True)
    for name in report.unexpected_files:
        print(f"warning: {folder / name} is no part of the checkpoint", file=sys.stderr, flush=True)
    return True

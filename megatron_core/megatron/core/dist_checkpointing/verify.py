# SPDX-License-Identifier: Apache-2.0
"""Checking a whole checkpoint without a model: sizes always, every byte on request.

Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.boxes import first_overlap
from megatron.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    Manifest,
    StoredChunk,
    read_manifest,
)
from megatron.core.dist_checkpointing.readers import reading
from megatron.core.dist_checkpointing.shard_file import ShardFile, check_size


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was verified, and files that lie in the folder without belonging to the checkpoint."""

    bytes_verified: int
    unexpected_files: tuple[str, ...]


def verify_checkpoint(folder: Path | str, *, digests: bool = True) -> VerifyReport:
    """Check that a checkpoint is complete and undamaged.

    Args:
        folder: an `iter_...` folder.
        digests: whether to read everything and compare digests; else the manifest, its coverage
            of every tensor and the size of every file are checked.

    Raises:
        CheckpointError: naming the first thing that is wrong.
    """
    folder = Path(folder)
    if digests:
        with reading(folder):  # it takes a while
            return _verify(folder, digests=True)
    return _verify(folder, digests=False)


def _verify(folder: Path, *, digests: bool) -> VerifyReport:
    manifest = read_manifest(folder)
    if digests and not manifest.digests:
        raise CheckpointError(f"{folder} was saved without digests: only sizes can be checked")
    for name, file in manifest.files.items():
        check_size(folder / name, file)
    _check_whole(folder, manifest)
    return VerifyReport(
        bytes_verified=_verify_bytes(folder, manifest) if digests else 0,
        unexpected_files=unexpected_files(folder, manifest),
    )


def unexpected_files(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """List what lies in a checkpoint's folder without belonging to it."""
    known = {MANIFEST_NAME, *manifest.files}
    return tuple(sorted(path.name for path in folder.iterdir() if path.name not in known))


def _check_whole(folder: Path, manifest: Manifest) -> None:
    """Check that the chunks of every tensor cover it, and those of every file that, exactly once:
    a tensor that the manifest no longer names leaves a gap in a file."""
    ends: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        boxes = [chunk.box for chunk in tensor.chunks]
        covered = sum(box.numel for box in boxes)
        whole = 1
        for size in tensor.shape:
            whole *= size
        if covered != whole or first_overlap(boxes):
            raise DamagedCheckpointError(
                f"{folder} does not hold every element of {name} exactly once"
            )
        for chunk in tensor.chunks:
            ends[chunk.file].append((chunk.begin, chunk.end))
    for file, spans in ends.items():
        position = manifest.files[file].header_bytes
        for begin, end in sorted(spans):
            if begin != position:
                break
            position = end
        if position != manifest.files[file].bytes:
            raise DamagedCheckpointError(
                f"{folder / file} holds bytes from {position} on that are of no tensor in "
                f"{MANIFEST_NAME}, or of two"
            )


def _verify_bytes(folder: Path, manifest: Manifest) -> int:
    """Read every file and return how many bytes matched their digests."""
    by_file: dict[str, list[tuple[str, StoredChunk]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            by_file[chunk.file].append((name, chunk))
    largest = max((c.end - c.begin for chunks in by_file.values() for _, c in chunks), default=0)
    scratch = memoryview(bytearray(min(manifest.block_bytes, largest)))
    verified = 0
    for file, chunks in sorted(by_file.items()):
        path, block_bytes = folder / file, manifest.block_bytes
        with ShardFile(path, manifest.files[file], block_bytes=block_bytes, verify=True) as reader:
            for name, chunk in sorted(chunks, key=lambda pair: pair[1].begin):
                reader.verify(name, chunk, scratch)
        verified += reader.bytes_verified
    return verified


def damage_of(folder: Path) -> str:
    """Return what to add about a folder that is kept: nothing if it is whole."""
    try:
        verify_checkpoint(folder, digests=False)
    except CheckpointError as error:
        return f" but is damaged ({error}): remove it"
    return " and is kept"

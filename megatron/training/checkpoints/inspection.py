# SPDX-License-Identifier: Apache-2.0
"""What one checkpoint holds, from its manifest alone: no tensor is read."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import Manifest, read_manifest
from megatron.core.dist_checkpointing.manifest import VERSION, StoredTensor
from megatron.core.dist_checkpointing.shard_header import tensor_bytes
from megatron.training.checkpoints.options import InspectConfig
from megatron.training.checkpoints.places import one_checkpoint, size_text

#: Parts of `extra` in the order they are shown; others follow.
_SECTIONS = ("model", "progress", "optimizer", "data", "tokenizer", "config")
_OPTIMIZER = "optimizer."


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
    """Return what a tensor is by its name: `weights`, or optimizer state as `optimizer.exp_avg`."""
    return name.partition("/")[0] if name.startswith(_OPTIMIZER) else "weights"


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


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of nested mappings under dotted names."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


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
        for field, value in flat(section).items():
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

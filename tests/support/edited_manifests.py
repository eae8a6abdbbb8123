# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with an edited manifest, whose digest matches again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.shard_format import digest


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the fields of a checkpoint's manifest and update its digest, as an attacker would."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["xxh3"]
    change(fields)
    seal_manifest(path, json.dumps(fields).encode()[1:])


def seal_manifest(path: Path, body: bytes) -> None:
    """Write a manifest: the digest of `body`, then the body."""
    path.write_bytes(b'{"xxh3":"%s",\n' % digest(body).encode() + body)


def leave_out(folder: Path, section: str, *names: str) -> None:
    """Remove names that later versions added from a section of a checkpoint's `extra`."""

    def change(fields: dict[str, Any]) -> None:
        for name in names:
            del fields["extra"][section][name]

    edit_manifest(folder, change)

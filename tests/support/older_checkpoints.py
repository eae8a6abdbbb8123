# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an earlier version, without the names that later versions added."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.core.dist_checkpointing.shard_format import digest


def leave_out(folder: Path, section: str, *names: str) -> None:
    """Remove names from a section of a checkpoint's `extra`, such as options of its config."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["xxh3"]
    for name in names:
        del fields["extra"][section][name]
    body = json.dumps(fields).encode()[1:]
    path.write_bytes(b'{"xxh3":"%s",\n' % digest(body).encode() + body)

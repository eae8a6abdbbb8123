# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as an earlier version has saved them: without what came later."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.core.dist_checkpointing.shard_format import digest


def leave_out(folder: Path, part: str, *names: str) -> None:
    """Take names out of a part of a checkpoint's `extra`, such as options out of its config."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["xxh3"]
    for name in names:
        del fields["extra"][part][name]
    body = json.dumps(fields).encode()[1:]
    path.write_bytes(b'{"xxh3":"%s",\n' % digest(body).encode() + body)

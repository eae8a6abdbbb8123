# SPDX-License-Identifier: Apache-2.0
"""Digests with and without xxhash: both verify; xxh3 digests cannot be read without xxhash."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest
import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    Solo,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from tests.unit_tests.core.dist_checkpointing.layouts import empty_like, full_chunks, same_bits

TENSORS = {"first.weight": torch.arange(1000.0), "second.weight": torch.arange(500)}


@pytest.fixture
def no_xxhash(monkeypatch):
    """Return a function that makes the import of xxhash fail, as if it were not installed."""

    def hide():
        monkeypatch.setitem(sys.modules, "xxhash", None)

    return hide


def save(root):
    return save_checkpoint(root, 5, full_chunks(TENSORS), {}, coordinator=Solo(), block_bytes=512)


def test_blake2b_digests_replace_missing_xxhash(tmp_path, no_xxhash):
    no_xxhash()
    folder = save(tmp_path)
    raw = (folder / "manifest.json").read_bytes()
    head, body = raw.split(b"\n", 1)
    assert head == b'{"blake2b":"%s",' % hashlib.blake2b(body, digest_size=8).hexdigest().encode()
    chunk = read_manifest(folder).tensors["first.weight"].chunks[0]
    content = (folder / chunk.file).read_bytes()[chunk.begin : chunk.end]
    expected = [
        f"blake2b:{hashlib.blake2b(content[begin : begin + 512], digest_size=8).hexdigest()}"
        for begin in range(0, len(content), 512)
    ]
    assert list(chunk.xxh3) == expected
    loaded = empty_like(TENSORS)
    assert load_checkpoint(folder, full_chunks(loaded)).bytes_verified == 8000
    assert all(same_bits(loaded[name], TENSORS[name]) for name in TENSORS)
    with (folder / chunk.file).open("r+b") as file:
        file.seek(chunk.begin + 700)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"first.weight.* does not match its digest"):
        load_checkpoint(folder, full_chunks(empty_like(TENSORS)))


def test_written_without_xxhash_and_read_with_it(tmp_path, no_xxhash, monkeypatch):
    no_xxhash()
    folder = save(tmp_path)
    monkeypatch.undo()
    loaded = empty_like(TENSORS)
    assert load_checkpoint(folder, full_chunks(loaded)).bytes_verified == 8000


def test_xxh3_cannot_be_read_without_xxhash(tmp_path, no_xxhash):
    folder = save(tmp_path)
    assert json.loads((folder / "manifest.json").read_text()).keys() >= {"xxh3"}
    no_xxhash()
    with pytest.raises(CheckpointError, match="pip install xxhash"):
        load_checkpoint(folder, full_chunks(empty_like(TENSORS)))

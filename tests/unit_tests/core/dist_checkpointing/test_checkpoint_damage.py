# SPDX-License-Identifier: Apache-2.0
"""Damaged, edited, incomplete and foreign checkpoints: refused, naming the file and the tensor."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointReader,
    Solo,
    load_checkpoint,
    read_extra,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing import load as load_module
from megatron.core.dist_checkpointing import manifest as manifest_module
from tests.support.edited_manifests import edit_manifest, seal_manifest
from tests.support.stored_structures import Structure, Tensor, write_structure
from tests.unit_tests.core.dist_checkpointing.layouts import empty_like, full_chunks

SHARD = "shard-00000.safetensors"
TENSORS = {"first.weight": torch.arange(1000.0), "second.weight": torch.arange(500)}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two tensors under blocks of 512 bytes."""
    return save_checkpoint(
        tmp_path, 5, full_chunks(TENSORS), {"step": 5}, coordinator=Solo(), block_bytes=512
    )


def load(folder: Path, **options) -> None:
    load_checkpoint(folder, full_chunks(empty_like(TENSORS)), **options)


def patch(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip_bit(path: Path, offset: int) -> None:
    patch(path, offset, bytes([path.read_bytes()[offset] ^ 1]))


def test_flipped_bit_is_reported_with_its_tensor(folder):
    manifest = read_manifest(folder)
    for name, tensor in manifest.tensors.items():
        chunk = tensor.chunks[0]
        for position in (chunk.begin, (chunk.begin + chunk.end) // 2, chunk.end - 1):
            flip_bit(folder / SHARD, position)
            for check in (load, verify_checkpoint):
                with pytest.raises(CheckpointError, match=f"{SHARD} is damaged: {name}"):
                    check(folder)
            load(folder, verify=False)
            flip_bit(folder / SHARD, position)
    load(folder)


def test_partial_load_ignores_damage_in_other_tensors(folder):
    flip_bit(folder / SHARD, read_manifest(folder).tensors["second.weight"].chunks[0].begin)
    load_checkpoint(folder, full_chunks({"first.weight": torch.zeros(1000)}))
    with pytest.raises(CheckpointError, match=r"second\.weight"):
        load_checkpoint(folder, full_chunks({"second.weight": torch.zeros(500).long()}))


def truncate(keep: int):
    return lambda folder: os.truncate(folder / SHARD, keep % (folder / SHARD).stat().st_size)


def replace_by_pipe(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


@pytest.mark.parametrize(
    ("damage", "text", "always"),
    [
        *((lambda f, at=at: flip_bit(f / SHARD, at), "header", False) for at in (8, 60)),
        *((lambda f, at=at: flip_bit(f / SHARD, at), "header", True) for at in (0, 7)),
        (lambda f: patch(f / SHARD, 0, struct.pack("<Q", 1 << 60)), "a header of 11529", True),
        *((truncate(keep), r"has \d+ bytes", True) for keep in (0, 5, 100, -1)),
        (lambda f: os.truncate(f / SHARD, (f / SHARD).stat().st_size + 1), r"has \d+ bytes", True),
        (lambda f: (f / SHARD).unlink(), "No such file", True),
        (replace_by_pipe, "not a regular file", True),
    ],
)
def test_damaged_shard_is_refused_by_name(folder, damage, text, always):
    """Damage that is found `always` is found without digests, too."""
    damage(folder)
    for check in (load, verify_checkpoint):
        with pytest.raises(CheckpointError, match=f"{SHARD}.*{text}"):
            check(folder)
    with pytest.raises(CheckpointError, match=SHARD) if always else contextlib.nullcontext():
        load(folder, verify=False)


def test_a_foreign_file_is_reported(folder):
    shutil.copy(folder / SHARD, folder / "shard-00001.safetensors")
    assert verify_checkpoint(folder).unexpected_files == ("shard-00001.safetensors",)
    load(folder)


def test_any_edit_of_the_manifest_is_refused(folder):
    path = folder / "manifest.json"
    raw = path.read_bytes()
    for old, new in (
        (b'"step":5', b'"step":6'),
        (b'"iteration":5', b'"iteration":7'),
        (b"F32", b"I32"),
        (raw[9:11], b"zz"),
    ):
        path.write_bytes(raw.replace(old, new, 1))
        for check in (load, read_extra, verify_checkpoint):
            with pytest.raises(CheckpointError, match=r"manifest\.json has changed"):
                check(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\x80\x04K\x00.", b"[" * 1_000_000])
def test_malformed_manifest_is_refused(folder, content):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a manifest written by this library"):
        load(folder)
    body = content + b"}"
    seal_manifest(folder / "manifest.json", body)
    with pytest.raises(CheckpointError, match="cannot be parsed"):
        load(folder)


def _rename_shard(name):
    def change(fields):
        fields["files"] = {name: fields["files"][SHARD]}
        for tensor in fields["tensors"].values():
            tensor["chunks"][0]["file"] = name

    return change


def _chunk(**changes):
    def change(fields):
        fields["tensors"]["first.weight"]["chunks"][0].update(changes)

    return change


def _shorten(fields):
    fields["tensors"]["first.weight"]["chunks"][0]["bytes"][1] -= 4


def _tensor(**changes):
    return lambda fields: fields["tensors"]["first.weight"].update(changes)


def _nested(key):
    fields = {str(i): 0 for i in range(100)}
    for _ in range(50):
        fields = {key[: len(key) // 50]: fields}
    return fields


def _field(name, value):
    return lambda fields: fields.update({name: value})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_rename_shard("../shard"), "not the plain name"),
        (_rename_shard("/etc/passwd"), "not the plain name"),
        (_rename_shard(".."), "not the plain name"),
        (_rename_shard(""), "not the plain name"),
        (_chunk(file="other"), "not in the list of files"),
        (_chunk(bytes=[0, 4000]), "impossible byte range"),
        (_chunk(bytes=[10**9, 10**9 + 4000]), "impossible byte range"),
        (_shorten, "impossible byte range"),
        (_chunk(bytes=[-4000, 0]), "not a list of counts"),
        (_chunk(sizes=[10**12]), "outside its shape"),
        (_chunk(offsets=[1]), "outside its shape"),
        (_chunk(offsets=[True]), "not a list of counts"),
        (_chunk(offsets=[0, 0]), "cannot be understood|outside its shape"),
        (_chunk(xxh3=[]), "0 digests for 4000 bytes"),
        (_chunk(offsets=[1 << 63]), "not a list of counts"),
        (_tensor(shape=[1000, *[1] * 8]), "9 dimensions"),
        (_tensor(shape=[1] * 400_000), "400000 dimensions"),
        (_tensor(shape=[1 << 63]), "not a list of counts"),
        (_tensor(shape=[0, 1 << 40, 1 << 40]), "product"),
        (_tensor(chunks=[]), r"first\.weight is not stored in any file"),
        (_field("tensors", {"n" * 1025: {}}), "longer than 1024"),
        (_field("extra", {"a": [0] * (1 << 17)}), "more than 131072 values"),
        (_field("extra", _nested("k" * 100_000)), "dotted names"),
        (_field("extra", {"a": "x" * (8 << 20)}), "more than 8388608 bytes"),
        (_field("unknown", [[]]), "cannot be parsed"),
        (_field("version", 2), "this library reads"),
        (_field("format", "other"), "this library reads"),
        (_field("block_bytes", 0), "not a multiple of 16"),
        (_field("extra", []), "extra is not an object"),
        (_field("tensors", []), "cannot be parsed"),
        (lambda fields: fields.pop("files"), "not in the list of files"),
    ],
)
def test_a_forged_manifest_is_refused(folder, change, text):
    edit_manifest(folder, change)
    with pytest.raises(CheckpointError, match=text):
        load(folder)


def test_forged_digest_in_manifest_does_not_match_bytes(folder):
    edit_manifest(folder, _chunk(xxh3=["0" * 16] * 8))
    with pytest.raises(CheckpointError, match=r"first\.weight\[0:1000\] does not match"):
        load(folder)


def test_gaps_and_overlaps_in_the_manifest_are_refused(folder):
    def hole(fields):
        tensor_fields = fields["tensors"]["first.weight"]
        tensor_fields["shape"] = [1001]

    edit_manifest(folder, hole)
    with pytest.raises(CheckpointError, match=r"every element of first\.weight exactly once"):
        verify_checkpoint(folder, digests=False)
    with pytest.raises(CheckpointError, match=r"every element of first\.weight exactly once"):
        load_checkpoint(folder, full_chunks({"first.weight": torch.zeros(1001)}))

    def twice(fields):
        tensor_fields = fields["tensors"]["first.weight"]
        tensor_fields["shape"] = [1000]
        tensor_fields["chunks"] *= 2

    edit_manifest(folder, twice)
    with pytest.raises(CheckpointError, match=r"every element of first\.weight exactly once"):
        load(folder)


def test_without_digests_only_unverified_loads_work(tmp_path):
    folder = save_checkpoint(
        tmp_path, 1, full_chunks(TENSORS), {}, coordinator=Solo(), digests=False
    )
    load(folder, verify=False)
    for check in (load, verify_checkpoint):
        with pytest.raises(CheckpointError, match="without digests"):
            check(folder)
    verify_checkpoint(folder, digests=False)


def test_save_refuses_manifests_over_the_read_limits(tmp_path):
    for tensors, extra, text in (
        ({"w": torch.zeros((1,) * 9)}, {}, "9 dimensions"),
        ({"n" * 1025: torch.zeros(1)}, {}, "longer than 1024"),
        (TENSORS, {"a": [0] * (1 << 17)}, "more than 131072 values"),
        (TENSORS, {"a": "x" * (8 << 20)}, "more than 8388608 bytes"),
    ):
        with pytest.raises(CheckpointError, match=text):
            save_checkpoint(tmp_path, 5, full_chunks(tensors), extra, coordinator=Solo())
    assert not list(tmp_path.glob("iter_*"))


def test_number_of_chunks_is_limited_by_shard_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "MIN_CHUNK_LIMIT", 4)
    folder = save_checkpoint(tmp_path, 5, full_chunks(TENSORS), {}, coordinator=Solo())
    load(folder)  # 1 file, 2 chunks
    many = {f"{i}": torch.zeros(1) for i in range(4)}
    with pytest.raises(CheckpointError, match="more than 4 files and chunks"):
        save_checkpoint(tmp_path, 6, full_chunks(many), {}, coordinator=Solo())
    large = {**many, "large": torch.zeros(2048)}  # 8 kB raise the limit by 2
    load_checkpoint(
        save_checkpoint(tmp_path, 6, full_chunks(large), {}, coordinator=Solo()), full_chunks(many)
    )
    monkeypatch.setattr(manifest_module, "MIN_CHUNK_LIMIT", 3)
    with pytest.raises(CheckpointError, match="more than 5 files and chunks"):
        read_manifest(tmp_path / "iter_0000006")


def test_shards_beyond_the_open_file_limit_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(load_module, "MAX_OPEN_SHARDS", 3)
    tensors = {f"{i}": Tensor(shape=(2,)) for i in range(12)}
    folder = write_structure(tmp_path, Structure(tensors=tensors, num_files=6))
    targets = {name: torch.ones(2, dtype=torch.uint8) for name in tensors}
    with CheckpointReader(folder) as reader:
        for name in [*targets, *targets]:
            reader.read(full_chunks({name: targets[name]}))
        assert not any(target.any() for target in targets.values())
        headers = sum(file.header_bytes for file in reader.manifest.files.values())
        assert reader.bytes_read < 2 * headers, "headers are verified again"

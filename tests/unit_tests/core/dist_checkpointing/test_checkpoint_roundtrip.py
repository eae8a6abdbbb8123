# SPDX-License-Identifier: Apache-2.0
"""A checkpoint saved on one layout loads bit for bit on any other layout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from megatron.core.dist_checkpointing import (
    CheckpointError,
    Solo,
    load_checkpoint,
    read_extra,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing.safetensors_file import DTYPES
from megatron.core.dist_checkpointing.save_plan import chunks_to_write, replica_sets
from tests.unit_tests.core.dist_checkpointing.layouts import (
    Tensors,
    chunk_of,
    empty_like,
    full_chunks,
    on_threads,
    raise_errors,
    random_layout,
    same_bits,
)

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool)


def save(root: Path, tensors: Tensors, **options: Any) -> Path:
    """Save whole tensors from one process."""
    return save_checkpoint(root, 1, full_chunks(tensors), {}, coordinator=Solo(), **options)


def random_tensors(rng: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    tensors = {}
    for i in range(4):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3)))
        values = torch.randint(0, 2 if i == 3 else 100, shape, generator=generator)
        tensors[f"layer.{i}/weight"] = values.to(rng.choice(KINDS) if i < 3 else torch.bool)
    return tensors


@given(st.integers(0, 1_000_000))
@settings(max_examples=20, deadline=None)
def test_checkpoint_loads_on_any_other_layout(tmp_path_factory, seed):
    rng = random.Random(seed)
    tensors = random_tensors(rng)
    root = tmp_path_factory.mktemp("root")
    num_savers, num_loaders = rng.randint(1, 4), rng.randint(1, 3)
    saved = random_layout(tensors, num_savers, rng, fill=True)
    block_bytes = rng.choice([16, 48, 1 << 20])
    folders = raise_errors(
        on_threads(
            num_savers,
            lambda rank, c: save_checkpoint(
                root, seed, saved[rank], {"seed": seed}, coordinator=c, block_bytes=block_bytes
            ),
        )
    )
    targets = random_layout(tensors, num_loaders, rng, fill=False)
    verify = rng.random() < 0.7
    reports = raise_errors(
        on_threads(
            num_loaders,
            lambda rank, c: load_checkpoint(
                folders[0], targets[rank], coordinator=c, verify=verify
            ),
        )
    )
    for chunk in (chunk for rank in targets for chunk in rank):
        assert same_bits(chunk.tensor, tensors[chunk.name][chunk.box.slices]), chunk.name
    assert read_extra(folders[0]) == {"seed": seed}
    stored = sum(t.numel() * t.itemsize for t in tensors.values())
    assert verify_checkpoint(folders[0]).bytes_verified == stored  # replicas are written once
    if not verify:
        assert all(report.bytes_verified == 0 for report in reports)


def test_loading_keeps_memory_between_strided_elements(tmp_path):
    source = torch.arange(12.0).view(3, 4)
    folder = save(tmp_path, {"w": source})
    buffer = torch.full((3, 8), -1.0)
    load_checkpoint(folder, full_chunks({"w": buffer[:, ::2]}))
    assert torch.equal(buffer[:, ::2], source)
    assert torch.equal(buffer[:, 1::2], torch.full((3, 4), -1.0))


def test_every_dtype_round_trips_and_loads_with_safetensors(tmp_path):
    tensors = {
        name: torch.randint(0, 2, (7, 3), generator=torch.Generator().manual_seed(i)).to(dtype)
        for i, (name, dtype) in enumerate(DTYPES.items())
    }
    tensors |= {"scalar": torch.tensor(-0.0), "none": torch.empty(0, 4)}
    folder = save(tmp_path, tensors)
    opened = load_file(folder / "shard-00000.safetensors")
    assert opened.keys() == tensors.keys()
    targets = empty_like(tensors)
    load_checkpoint(folder, full_chunks(targets))
    for name, tensor in tensors.items():
        assert same_bits(opened[name], tensor), name
        assert same_bits(targets[name], tensor), name
    for name, stored in read_manifest(folder).tensors.items():
        # aligned, so that a reader that maps the file can use the tensor in place
        assert stored.chunks[0].begin % tensors[name].itemsize == 0, name
    (shard,) = read_manifest(folder).files.values()
    assert shard.header_bytes % 64 == 0, "tensors start at a cache line"


def test_chunks_are_named_by_offset_in_safetensors(tmp_path):
    tensor = torch.arange(6.0).view(2, 3)
    rows = [chunk_of("w", (2, 3), (row, 0), tensor[row : row + 1]) for row in range(2)]
    folder = save_checkpoint(tmp_path, 1, rows, {}, coordinator=Solo())
    with safe_open(folder / "shard-00000.safetensors", "pt") as file:
        assert list(file.keys()) == ["w@0,0", "w@1,0"]
        assert torch.equal(file.get_tensor("w@1,0"), tensor[1:])


def test_large_strided_tensors_are_copied_in_scratch_bands(tmp_path):
    source = torch.arange(3 * 700_000, dtype=torch.int32).view(3, 700_000)
    tall = torch.arange(700_000, dtype=torch.int64).view(350_000, 2)
    sources = {"w": source.t().contiguous().t(), "tall": tall[:, :1]}
    folder = save(tmp_path, sources)
    targets = {
        "w": torch.zeros(700_000, 3, dtype=torch.int32).t(),
        "tall": torch.zeros(350_000, 2, dtype=torch.int64)[:, 1:],
    }
    load_checkpoint(folder, full_chunks(targets))
    assert torch.equal(targets["w"], source)
    assert torch.equal(targets["tall"], tall[:, :1])


def test_a_partial_load_reads_only_the_blocks_it_touches(tmp_path):
    rows = torch.arange(1000 * 16, dtype=torch.float32).view(1000, 16)  # 64 bytes per row
    folder = save(tmp_path, {"w": rows}, block_bytes=640)
    header = read_manifest(folder).files["shard-00000.safetensors"].header_bytes

    def load(offsets, sizes, verify):
        target = torch.zeros(sizes)
        chunk = chunk_of("w", (1000, 16), offsets, target)
        report = load_checkpoint(folder, [chunk], verify=verify)
        assert torch.equal(target, rows[chunk.box.slices])
        return report

    # rows 15 … 34 lie in blocks 1, 2 and 3 of 10 rows each
    verified = load((15, 0), (20, 16), True)
    assert (verified.bytes_read, verified.bytes_verified) == (header + 3 * 640, 3 * 640)
    assert load((15, 0), (20, 16), False).bytes_read == 8 + 20 * 64
    assert load((0, 3), (1000, 1), True).bytes_read == header + 1000 * 64


def test_blocks_between_requested_columns_are_not_read(tmp_path):
    source = torch.arange(4 * 4096, dtype=torch.float32).view(4, 4096)  # 16 KiB per row
    folder = save(tmp_path, {"w": source}, block_bytes=1024)
    target = torch.zeros(4, 256)
    report = load_checkpoint(folder, [chunk_of("w", (4, 4096), (0, 512), target)])
    assert torch.equal(target, source[:, 512:768])
    assert report.bytes_verified == 4 * 1024


def test_stored_chunk_is_read_once_for_all_overlapping_targets(tmp_path):
    rows = torch.randn(64, 8)
    folder = save(tmp_path, {"w": rows})
    targets = [torch.zeros(16, 8) for _ in range(4)]
    chunks = [chunk_of("w", (64, 8), (16 * i, 0), t) for i, t in enumerate(targets)]
    report = load_checkpoint(folder, chunks)
    assert torch.equal(torch.cat(targets), rows)
    assert report.bytes_verified == rows.numel() * 4


def test_another_dtype_is_loaded_only_on_request(tmp_path):
    source = torch.randn(33, 7)
    folder = save(tmp_path, {"w": source})
    target = torch.zeros(33, 7, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"w is torch\.float32 .* but torch\.bfloat16"):
        load_checkpoint(folder, full_chunks({"w": target}))
    load_checkpoint(folder, full_chunks({"w": target}), convert_dtype=True)
    assert torch.equal(target, source.bfloat16())


def test_missing_tensor_raises_and_unused_is_reported(tmp_path):
    source = {"a": torch.ones(2), "b": torch.ones(2)}
    folder = save(tmp_path, source)
    targets = {"a": torch.zeros(2), "new": torch.full((3,), 5.0)}
    with pytest.raises(CheckpointError, match="new is missing from"):
        load_checkpoint(folder, full_chunks(targets))
    report = load_checkpoint(folder, full_chunks(targets), missing="keep")
    assert (report.missing, report.unused) == (("new",), ("b",))
    assert torch.equal(targets["new"], torch.full((3,), 5.0))
    with pytest.raises(CheckpointError, match=r"a is \[2\] in the checkpoint but \[4\]"):
        load_checkpoint(folder, full_chunks({"a": torch.zeros(4)}))
    with pytest.raises(ValueError, match="missing must be"):
        load_checkpoint(folder, [], missing="ignore")


@pytest.mark.parametrize("seed", range(4))
def test_chunk_is_written_by_first_replica_with_fewest_bytes(seed):
    rng = random.Random(seed)
    ranks = (2, 3, 7, 8, 11)
    tensors = {f"w{i}": torch.zeros(rng.randint(1, 9)) for i in range(40)}
    chunks = full_chunks(tensors, ranks)
    load = dict.fromkeys(ranks, 0)
    expected = {rank: [] for rank in ranks}
    for chunk in sorted(chunks, key=lambda c: (-c.tensor.nbytes, c.name)):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += chunk.tensor.nbytes
        expected[writer].append(chunk)
    for rank in ranks:
        assert chunks_to_write(replica_sets(chunks, rank), rank) == expected[rank]


def test_load_restores_the_number_of_torch_threads(tmp_path):
    folder = save(tmp_path, {"w": torch.ones(2)})
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        load_checkpoint(folder, full_chunks({"w": torch.zeros(2)}))
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)

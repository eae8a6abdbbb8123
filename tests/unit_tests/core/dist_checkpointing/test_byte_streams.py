# SPDX-License-Identifier: Apache-2.0
"""Saving a tensor from a byte stream, and reading a checkpoint box by box."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    CheckpointReader,
    Solo,
    TensorChunk,
    load_checkpoint,
    save_checkpoint,
)

VALUES = torch.arange(30, dtype=torch.float32).view(6, 5)


def chunk(
    tensor: torch.Tensor, offsets: tuple[int, int] = (0, 0), **options: object
) -> TensorChunk:
    """Return a box of `w`, a tensor of shape [6, 5]."""
    return TensorChunk(
        name="w", shape=(6, 5), offsets=offsets, tensor=tensor, replica_ranks=(0,), **options
    )


def streamed(rows: int) -> TensorChunk:
    """Return a chunk that streams `rows` rows in blocks of two."""

    def row_blocks() -> Iterator[memoryview]:
        for first_row in range(0, rows, 2):
            block = VALUES.repeat(2, 1)[first_row : first_row + 2].contiguous()
            yield memoryview(block.view(torch.uint8).numpy()).cast("B")

    return chunk(torch.empty(6, 5, device="meta"), byte_stream=row_blocks)


def save(root: Path, rows: int = 6) -> Path:
    return save_checkpoint(root, 3, [streamed(rows)], {}, coordinator=Solo(), block_bytes=32)


def test_byte_stream_is_saved_like_its_tensor(tmp_path: Path) -> None:
    unstreamed = save_checkpoint(tmp_path / "a", 3, [chunk(VALUES)], {}, coordinator=Solo())
    folder = save(tmp_path / "b")
    for path in unstreamed.glob("*.safetensors"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    loaded = torch.zeros(6, 5)
    report = load_checkpoint(folder, [chunk(loaded)])
    assert torch.equal(loaded, VALUES)
    assert report.bytes_verified >= 120


@pytest.mark.parametrize("rows", [4, 8])
def test_byte_stream_of_wrong_length_saves_nothing(tmp_path: Path, rows: int) -> None:
    with pytest.raises(CheckpointError, match=r"w ends at byte .* its pieces do not fit its shape"):
        save(tmp_path, rows)
    assert list(tmp_path.iterdir()) == []


def test_asynchronous_saves_take_no_byte_stream(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w is streamed in pieces"):
        AsyncSaver(tmp_path, [streamed(6)], coordinator=Solo())


def test_reader_reads_boxes_and_verifies_their_blocks(tmp_path: Path) -> None:
    folder = save(tmp_path)
    with CheckpointReader(folder) as reader:
        for row in range(6):
            target = torch.zeros(1, 2, dtype=torch.float64)
            reader.read([chunk(target, (row, 3))])
            assert torch.equal(target, VALUES[row : row + 1, 3:].double())
        assert 0 < reader.bytes_read < 2000
        with pytest.raises(CheckpointError, match="v is missing from"):
            reader.read(
                [
                    TensorChunk(
                        name="v", shape=(1,), offsets=(0,), tensor=target[0, :1], replica_ranks=(0,)
                    )
                ]
            )
    (shard,) = folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with CheckpointReader(folder) as reader:
        reader.read([chunk(torch.zeros(1, 5))])  # the first row's block is intact
        with pytest.raises(CheckpointError, match="does not match its digest"):
            reader.read([chunk(torch.zeros(1, 5), (5, 0))])

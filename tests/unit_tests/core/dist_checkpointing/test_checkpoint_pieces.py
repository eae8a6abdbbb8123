# SPDX-License-Identifier: Apache-2.0
"""Saving what comes in pieces, and reading a checkpoint box by box."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointReader,
    Solo,
    TensorChunk,
    load_checkpoint,
    save_checkpoint,
)

VALUES = torch.arange(30, dtype=torch.float32).view(6, 5)


def chunk(tensor: torch.Tensor, offsets: tuple[int, int] = (0, 0), **more: object) -> TensorChunk:
    """Return a box of the one tensor of these tests."""
    return TensorChunk(
        name="w", shape=(6, 5), offsets=offsets, tensor=tensor, replica_ranks=(0,), **more
    )


def streamed(rows: int) -> TensorChunk:
    """Return the tensor in pieces of two rows, `rows` of them all together."""

    def pieces() -> Iterator[memoryview]:
        for first in range(0, rows, 2):
            band = VALUES.repeat(2, 1)[first : first + 2].contiguous()
            yield memoryview(band.view(torch.uint8).numpy()).cast("B")

    return chunk(torch.empty(6, 5, device="meta"), byte_stream=pieces)


def save(root: Path, rows: int = 6) -> Path:
    return save_checkpoint(root, 3, [streamed(rows)], {}, coordinator=Solo(), block_bytes=32)


def test_pieces_are_saved_as_the_tensor_would_be(tmp_path: Path) -> None:
    whole = save_checkpoint(tmp_path / "a", 3, [chunk(VALUES)], {}, coordinator=Solo())
    folder = save(tmp_path / "b")
    names = [path.name for path in whole.glob("*.safetensors")]
    assert [(folder / n).read_bytes() for n in names] == [(whole / n).read_bytes() for n in names]
    found = torch.zeros(6, 5)
    report = load_checkpoint(folder, [chunk(found)])
    assert torch.equal(found, VALUES)
    assert report.bytes_verified >= 120


@pytest.mark.parametrize("rows", [4, 8])
def test_pieces_that_do_not_fit_save_nothing(tmp_path: Path, rows: int) -> None:
    with pytest.raises(CheckpointError, match=r"w ends at byte .* its pieces do not fit its shape"):
        save(tmp_path, rows)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_reads_box_after_box_and_verifies(tmp_path: Path) -> None:
    folder = save(tmp_path)
    with CheckpointReader(folder) as reader:
        for row in range(6):
            found = torch.zeros(1, 2, dtype=torch.float64)
            reader.read([chunk(found, (row, 3))])
            assert torch.equal(found, VALUES[row : row + 1, 3:].double())
        assert 0 < reader.bytes_read < 2000
        with pytest.raises(CheckpointError, match="v is not in it"):
            reader.read(
                [
                    TensorChunk(
                        name="v", shape=(1,), offsets=(0,), tensor=found[0, :1], replica_ranks=(0,)
                    )
                ]
            )
    (shard,) = folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with CheckpointReader(folder) as reader:
        reader.read([chunk(torch.zeros(1, 5))])  # its block is sound
        with pytest.raises(CheckpointError, match="does not match its digest"):
            reader.read([chunk(torch.zeros(1, 5), (5, 0))])

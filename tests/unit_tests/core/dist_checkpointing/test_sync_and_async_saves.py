# SPDX-License-Identifier: Apache-2.0
"""Synchronous and asynchronous saves: equal bytes, equal refusals, nothing left of a failure."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    Solo,
    TensorChunk,
    list_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing.async_save import MIN_SINGLE_COPY_BYTES
from tests.unit_tests.core.dist_checkpointing.layouts import full_chunks

SHARD = "shard-00000.safetensors"


class Saves:
    """Saves of one process in `root`; `writer` is the process that writes the files."""

    def __init__(self, root: Path, chunks: list[TensorChunk], **options: Any) -> None:
        self.root, self.chunks, self.options, self.writer = root, chunks, options, os.getpid()

    def save(self, iteration: int, extra: dict[str, Any] | None = None) -> list[str]:
        """Save and return the lines for the user. Raises CheckpointError."""
        lines: list[str] = []
        save_checkpoint(
            self.root,
            iteration,
            self.chunks,
            extra or {},
            coordinator=Solo(lines.append),
            existing="skip",
            **self.options,
        )
        return lines

    def close(self) -> None:
        """End the saves."""


class AsyncSaves(Saves):
    """The same, in the background."""

    def __init__(self, root: Path, chunks: list[TensorChunk], **options: Any) -> None:
        self.saver = AsyncSaver(root, chunks, coordinator=Solo(), **options)
        self.saver.wait()  # until the writer has started
        self.writer, self.close = self.saver.writer.pid, self.saver.close

    def save(self, iteration: int, extra: dict[str, Any] | None = None) -> list[str]:
        self.saver.save(iteration, extra or {})
        self.saver.wait()
        (report,) = self.saver.finished()
        if report.error is not None:
            raise CheckpointError(report.error)
        return list(report.lines)


Open = Callable[..., contextlib.AbstractContextManager[Saves]]


@pytest.fixture(params=[Saves, AsyncSaves], ids=["sync", "async"])
def open_saves(request: pytest.FixtureRequest) -> Open:
    """Return a function that opens saves in a folder."""

    @contextlib.contextmanager
    def opened(root: Path, chunks: list[TensorChunk], **options: Any) -> Iterator[Saves]:
        with contextlib.closing(request.param(root, chunks, **options)) as saves:
            yield saves

    return opened


def many_kinds() -> dict[str, torch.Tensor]:
    """Return tensors above and below the size of a single copy, with various strides."""
    large = MIN_SINGLE_COPY_BYTES // 4
    return {
        "a": torch.randn(large + 3),
        "b": torch.randn(large - 1),
        "c": torch.tensor(3.5),
        "d": torch.zeros(0, 4),
        "e": torch.randn(70, 9)[:, ::2],
        "f": torch.randn(3 * large, 2).t(),
        "g": torch.randn(5).to(torch.bfloat16),
        "h": torch.arange(7),
        "i": torch.tensor([True, False]),
        "large": torch.randn(3, 700_001),
        **{f"small.{i}": torch.randn(i % 5 + 1) for i in range(1500)},
    }


@pytest.mark.parametrize("options", [{}, {"block_bytes": 4096}], ids=["default", "small blocks"])
def test_synchronous_and_asynchronous_saves_write_equal_bytes(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    chunks = full_chunks(many_kinds())
    for kind in (Saves, AsyncSaves):
        saves = kind(tmp_path / kind.__name__, chunks, **options)
        assert saves.save(7, {"x": [1, None]}) == []
        saves.close()
    files = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*")}
        for root in sorted(tmp_path.iterdir())
    ]
    assert len(files[0]) == 3, "manifest, shard and tracker"
    assert files[0] == files[1]


def test_full_disk_leaves_no_files(tmp_path: Path, open_saves: Open) -> None:
    with open_saves(tmp_path, full_chunks({"a": torch.randn(90_000)})) as saves:
        # Of the writer's files only: the shared memory of a staging copy is a file, too.
        soft, hard = resource.prlimit(saves.writer, resource.RLIMIT_FSIZE)
        resource.prlimit(saves.writer, resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(CheckpointError, match=rf"cannot write .*{SHARD} \(360"):
                saves.save(1)
        finally:
            resource.prlimit(saves.writer, resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []
        saves.save(1)
    verify_checkpoint(tmp_path / "iter_0000001")


def test_saved_step_is_kept(tmp_path: Path, open_saves: Open) -> None:
    tensor = torch.zeros(3)
    shard = tmp_path / "iter_0000001" / SHARD
    with open_saves(tmp_path, full_chunks({"a": tensor})) as saves:
        saves.save(1)
        content = shard.read_bytes()
        tensor.fill_(1.0)
        (line,) = saves.save(1)
        assert "iter_0000001 exists already and is kept" in line
        assert shard.read_bytes() == content
        os.truncate(shard, 3)
        (line,) = saves.save(1)
        assert "iter_0000001 exists already but is damaged" in line
        assert shard.stat().st_size == 3


def test_missing_element_is_refused_at_each_save(tmp_path: Path, open_saves: Open) -> None:
    half = TensorChunk(name="w", shape=(4,), offsets=(0,), tensor=torch.ones(2), replica_ranks=(0,))
    with open_saves(tmp_path, [half]) as saves:
        for iteration in (1, 2):
            with pytest.raises(CheckpointError, match=r"w \[4\] has 4 elements but .* only 2"):
                saves.save(iteration)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({"a": float("nan")}, r"extra\['a'\]"),
        ({"a": [{3: 1}]}, r"extra\['a'\]\[0\]"),
        ({"a": (1, 2)}, r"extra\['a'\]"),
        ({"a": torch.ones(1)}, r"extra\['a'\]"),
    ],
)
def test_extra_that_json_would_change_is_refused(
    tmp_path: Path, open_saves: Open, extra: dict[str, Any], where: str
) -> None:
    with (
        open_saves(tmp_path, []) as saves,
        pytest.raises((CheckpointError, ValueError), match=where),
    ):
        saves.save(1, extra)
    assert list_checkpoints(tmp_path) == []


def test_file_in_place_of_the_folder_is_named(tmp_path: Path, open_saves: Open) -> None:
    root = tmp_path / "file"
    root.write_text("")
    refused = pytest.raises(CheckpointError, match=f"cannot save under {root}")
    with open_saves(root, full_chunks({"a": torch.ones(3)})) as saves, refused:
        saves.save(1)

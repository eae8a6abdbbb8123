# SPDX-License-Identifier: Apache-2.0
"""A checkpoint held open to read box after box, for what must not be in memory whole."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from megatron.core.dist_checkpointing.chunk import TensorChunk
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.load import one_torch_thread, plan_reads, wanted_tensors
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.dist_checkpointing.readers import reading
from megatron.core.dist_checkpointing.shard_reader import Scratch, ShardReader


class CheckpointReader:
    """Read boxes of a checkpoint's tensors, verified, in any number of steps.

    From here to the end of its `with` block retention does not remove the checkpoint.

    Args:
        folder: an `iter_...` folder.

    Attribute `manifest` says what it holds.

    Raises:
        CheckpointError: it is no undamaged checkpoint, or was saved without digests.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._scratch = Scratch()
        self._readers: dict[str, ShardReader] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading(folder))
            self.manifest = read_manifest(folder)
            if not self.manifest.digests:
                raise CheckpointError(f"{folder} was saved without digests and cannot be verified")
            self._stack = stack.pop_all()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def bytes_read(self) -> int:
        """Return how many bytes of shards have been read, digested surroundings included."""
        return sum(reader.bytes_read for reader in self._readers.values())

    def read(self, chunks: Sequence[TensorChunk]) -> None:
        """Fill the tensors of `chunks`, converting dtypes.

        Raises:
            CheckpointError: one is not in the checkpoint, or what it needs is damaged.
        """
        tensors, _ = wanted_tensors(self.manifest, chunks, missing="error", convert_dtype=True)
        with one_torch_thread():
            for file, reads in sorted(plan_reads(tensors, chunks).items()):
                reader = self._open(file)
                for read in reads:
                    reader.read(read)

    def _open(self, file: str) -> ShardReader:
        if file not in self._readers:
            self._readers[file] = self._stack.enter_context(
                ShardReader(
                    self._folder / file,
                    self.manifest.files[file],
                    block_bytes=self.manifest.block_bytes,
                    verify=True,
                    scratch=self._scratch,
                )
            )
        return self._readers[file]

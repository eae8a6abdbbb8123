# SPDX-License-Identifier: Apache-2.0
"""The steps of a save on disk: check the plans, open the folder, write a shard, commit.

A synchronous save takes these steps in its own process, and its bytes come from the tensors. An
asynchronous save takes them in the writer process, and its bytes come from a staging copy.

A shard is written sequentially in small buffers, which are digested as they are written, and synced
at the end. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.run_folder import (
    check_save_folder_lock,
    checkpoint_folder,
    existing_note,
    open_temporary,
    publish,
    write_tracker,
)
from megatron.core.dist_checkpointing.save_plan import (
    ShardDigests,
    ShardPlan,
    check_plans,
    stored_tables,
)
from megatron.core.dist_checkpointing.shard_format import BlockDigester, ShardWriter, digest
from megatron.core.untrusted_files import open_to_write, sync_folder


class SaveSteps:
    """The steps of one rank's saves; only rank 0 takes `plans`, `open` and `commit`.

    Arguments and results are plain JSON data, as they may come from another process.

    Args:
        root: folder of all checkpoints.
        plan: of this rank's shard.
        header: length field and safetensors header of the shard.
        buffers: yields the bytes of a chunk of `plan.chunks`, by its index; a buffer is valid until
            the next is yielded.
        heartbeat: called after each buffer is written.
    """

    def __init__(
        self,
        root: Path,
        plan: ShardPlan,
        header: bytes | memoryview,
        buffers: Callable[[int], Iterable[memoryview]],
        *,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._plan, self._header = root, plan, header
        self._buffers, self._heartbeat = buffers, heartbeat
        self._plans: Sequence[str] = ()  # as text, which takes less memory than objects

    def execute(self, step: str, **arguments: Any) -> Any:
        """Take the step of this name. Raises CheckpointError, OSError, ValueError."""
        steps: Mapping[str, Callable[..., Any]] = {
            "plans": self.plans,
            "open": self.open,
            "write": self.write,
            "commit": self.commit,
        }
        return steps[step](**arguments)

    def plans(self, texts: Sequence[str]) -> None:
        """Check and store the plans of all ranks; no element may be missing or written twice."""
        check_plans(list(self._decoded(texts)))
        self._plans = texts

    def _decoded(self, texts: Sequence[str]) -> Iterator[ShardPlan]:
        yield self._plan  # rank 0 takes the steps that need the plans of all ranks
        yield from map(ShardPlan.decode, texts[1:])

    def open(
        self, iteration: int, name: str, *, folder_locked: bool, skip_existing: bool
    ) -> str | None:
        """Create the temporary folder `name`.

        If the step has already been saved and `skip_existing`, return a line about it instead.
        """
        if folder_locked:
            check_save_folder_lock(self._root)
        folder = checkpoint_folder(self._root, iteration)
        if skip_existing and folder.is_dir():
            return f"{folder} exists already{existing_note(folder)}; it is not saved again"
        open_temporary(self._root, iteration, name=name)
        return None

    def write(self, name: str, *, block_bytes: int, digests: bool) -> str:
        """Write and sync this rank's shard in the folder `name`; return its digests as JSON.

        Raises:
            CheckpointError: the file exists, or the disk is full, read-only or broken.
        """
        plan = self._plan
        if not plan.chunks:
            return json.dumps(ShardDigests())
        path = self._root / name / plan.file
        try:
            with open_to_write(path, "x", root=self._root) as file:
                writer = ShardWriter(file)
                writer.write(self._header)
                chunks = self._write_chunks(writer, path, block_bytes, digests=digests)
                writer.sync()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"cannot create {path}: its folder is missing, or is not on a file system that "
                "all ranks share"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path} ({plan.total_bytes} bytes): {error.strerror}; nothing was "
                "saved, earlier checkpoints are intact"
            ) from error
        sync_folder(path.parent)
        header = digest(self._header) if digests else ""
        return json.dumps(ShardDigests(header, chunks), separators=(",", ":"))

    def _write_chunks(
        self, writer: ShardWriter, path: Path, block_bytes: int, *, digests: bool
    ) -> list[list[str]]:
        """Write all chunks, each buffer right after its digest; return the digests by chunk."""
        digests_by_chunk = []
        for index, chunk in enumerate(self._plan.chunks):
            digester = BlockDigester(block_bytes)
            for buffer in self._buffers(index):
                if digests:
                    digester.update(buffer)
                writer.write(buffer)
                self._heartbeat()
            digests_by_chunk.append(digester.finish())
            if writer.position != chunk.end:
                raise CheckpointError(
                    f"{chunk.name} ends at byte {writer.position} of {path}, not at "
                    f"{chunk.end}: its pieces do not fit its shape"
                )
        return digests_by_chunk

    def commit(
        self,
        iteration: int,
        name: str,
        *,
        written: Sequence[str],
        block_bytes: int,
        digests: bool,
        extra: Mapping[str, Any],
    ) -> None:
        """Publish the checkpoint, then make the tracker name it.

        Args:
            written: the digests of every rank's shard, as `write` returned them.
        """
        files, tensors = stored_tables(
            self._decoded(self._plans),
            (ShardDigests(*json.loads(text)) for text in written),
        )
        manifest = Manifest(
            iteration=iteration,
            world_size=len(self._plans),
            block_bytes=block_bytes,
            digests=digests,
            files=files,
            tensors=tensors,
            extra=extra,
        )
        publish(self._root / name, manifest)
        write_tracker(self._root, iteration)

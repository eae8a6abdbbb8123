# SPDX-License-Identifier: Apache-2.0
"""Saving: chunks of a run's state; plan, write and commit, whose outcome all ranks agree on.

    >>> chunks = weight_chunks(model.store)
    >>> folder = save_checkpoint(root, 100, chunks, {}, coordinator=Solo())
    >>> loaded = load_checkpoint(latest_checkpoint(root), chunks)

A chunk is a view of the memory of a model or its optimizer. Tensors have logical names, so any
layout loads a checkpoint of any other. A weight keeps its name; its optimizer state is
`optimizer.KIND/WEIGHT`. Optimizer state that belongs to no weight, such as the number of updates,
is a tensor [] called `optimizer.NAME`. After loading, call `Optimizer.after_load` of an optimizer
over the weights.

`CoordinatedSave` is the save of one rank among all, synchronous or asynchronous. The two ways
differ in where the steps are taken (`SaveSteps`), where the bytes come from, and how a failure is
reported: `save_checkpoint` streams from the tensors and raises.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from megatron.core.boxes import TensorChunk
from megatron.core.dist_checkpointing.coordinator import Coordinator
from megatron.core.dist_checkpointing.manifest import MAX_BLOCK_BYTES, check_extra
from megatron.core.dist_checkpointing.run_folder import checkpoint_folder, temporary_folder
from megatron.core.dist_checkpointing.safetensors_file import Scratch, stream_bytes
from megatron.core.dist_checkpointing.save_plan import SaveSteps, check_updates_complete, plan_shard
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import OwnedRange, WeightStore

#: Bytes per digest, and so the least that a verified read takes from a file.
BLOCK_BYTES = 16 << 20

#: Advice for a checkpoint without the optimizer state that belongs to no weight.
_NO_SCALARS = (
    "load optimizer_chunks(optimizer, scalars=False) instead, and give the number of updates "
    "that had been applied: optimizer.after_load(with_state=True, steps=...)"
)


class StateRange(Protocol):
    """An optimizer's state for one range of weights."""

    @property
    def owned(self) -> OwnedRange:
        """The range."""
        ...

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the flat tensors [k] of the range by kind."""
        ...


class RangedOptimizer(Protocol):
    """An optimizer over ranges, such as `megatron.core.optimizer.Optimizer`."""

    @property
    def ranges(self) -> Sequence[StateRange]:
        """The optimizer's state, one entry per range."""
        ...

    @property
    def groups(self) -> ProcessGroupCollection:
        """The groups of the ranks that train together."""
        ...

    def scalars(self) -> Mapping[str, torch.Tensor]:
        """Return the state that belongs to no weight: tensors [] by name, equal on all ranks."""
        ...


def weight_chunks(store: WeightStore) -> list[TensorChunk]:
    """List this rank's boxes of logical weights, and its states, as views of its memory.

    Args:
        store: the model's weights. With overlapped gathers, call `DataParallel.complete_weights()`
            before each save. Otherwise updates by other ranks may be pending, and the save is
            refused.
    """
    states = [
        TensorChunk(
            name=name,
            shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            tensor=tensor,
            replica_ranks=store.state_ranks,
        )
        for name, tensor in store.states.items()
    ]
    return states + [c for handle in store.handles.values() for c in store.chunks(handle)]


def optimizer_chunks(optimizer: RangedOptimizer, *, scalars: bool = True) -> list[TensorChunk]:
    """List this rank's boxes of optimizer state, as views of its memory.

    Args:
        scalars: whether to include the state that belongs to no weight: the number of updates, and
            the state of a dynamic loss scaler. Pass False if it is stored elsewhere.
    """
    chunks = [
        TensorChunk(
            name=f"optimizer.{kind}/{weight_box.name}",
            shape=weight_box.shape,
            offsets=weight_box.box.offsets,
            tensor=weight_box.of(flat),
            replica_ranks=weight_box.replica_ranks,
        )
        for state in optimizer.ranges
        for kind, flat in state.named_tensors().items()
        for weight_box in state.owned.boxes
    ]
    ranks = tuple(sorted(optimizer.groups["world"].ranks))
    for name, tensor in optimizer.scalars().items() if scalars else ():
        chunks.append(
            TensorChunk(
                name=f"optimizer.{name}",
                shape=(),
                offsets=(),
                tensor=tensor,
                replica_ranks=ranks,
                if_missing=_NO_SCALARS,
            )
        )
    return chunks


@dataclass(kw_only=True)
class CoordinatedSave:
    """The saves of one rank among all ranks of a run.

    Args:
        root: folder of all checkpoints of a run.
        coordinator: connects the ranks.
        execute: takes a step of `SaveSteps`, in this process or in another.
        block_bytes, digests: see `save_checkpoint`.
        skip_existing: whether a step that has already been saved is skipped.
        folder_locked: whether the run has a `SaveFolderLock` on `root`.

    Attributes:
        plans: on rank 0, the plans of all ranks from the latest save.
    """

    root: Path
    coordinator: Coordinator
    execute: Callable[..., Any]
    block_bytes: int
    digests: bool
    skip_existing: bool
    folder_locked: bool = False
    plans: list[str] = field(default_factory=list)
    _plan_sent: bool = False

    def run(
        self,
        iteration: int,
        extra: Mapping[str, Any],
        prepare: Callable[[], tuple[str, str]],
        *,
        say: Callable[[str], None],
    ) -> bool:
        """Plan, write and commit; return whether there is a new checkpoint.

        Args:
            iteration, extra: see `save_checkpoint`.
            prepare: makes this rank ready to write; returns its plan as text, and a line to report
                or "".
            say: receives lines to report to the user.

        Raises:
            CheckpointError: on all ranks alike; earlier checkpoints are intact.
        """
        ranks, folder = self.coordinator, checkpoint_folder(self.root, iteration)
        # Rank 0 chooses the name: a process that creates the folder may die before it answers.
        temporary = temporary_folder(folder).name

        def plan() -> tuple[str, str]:
            text, line = prepare()
            return "" if self._plan_sent else text, line

        ranks.begin(f"saving {folder.name}")
        try:
            opened = ranks.agree(
                "plan", plan, lambda messages: self._open(messages, iteration, temporary)
            )
            self._plan_sent = True
            for line in opened["lines"]:
                say(line)
            if opened["exists"]:
                return False
            ranks.agree(
                "write",
                lambda: self.execute(
                    "write",
                    name=opened["name"],
                    block_bytes=self.block_bytes,
                    digests=self.digests,
                ),
                lambda written: self.execute(
                    "commit",
                    iteration=iteration,
                    name=temporary,
                    written=written,
                    block_bytes=self.block_bytes,
                    digests=self.digests,
                    extra=extra,
                ),
            )
        except BaseException:
            if ranks.rank == 0:
                # If only the tracker failed, the folder has its final name by now and stays.
                shutil.rmtree(self.root / temporary, ignore_errors=True)
            raise
        return True

    def _open(
        self, messages: Sequence[Sequence[str]], iteration: int, temporary: str
    ) -> dict[str, Any]:
        """Check new plans and create the temporary folder; on rank 0."""
        if any(text for text, _ in messages):
            previous_plans = self.plans or [""] * len(messages)
            plans = [new or old for (new, _), old in zip(messages, previous_plans, strict=True)]
            self.execute("plans", texts=plans)
            self.plans = plans
        existing_line = self.execute(
            "open",
            iteration=iteration,
            name=temporary,
            folder_locked=self.folder_locked,
            skip_existing=self.skip_existing,
        )
        lines = [line for _, line in messages if line]
        return {
            "name": temporary,
            "exists": existing_line is not None,
            "lines": lines if existing_line is None else [*lines, existing_line],
        }


def save_checkpoint(
    root: Path | str,
    iteration: int,
    chunks: Sequence[TensorChunk],
    extra: Mapping[str, Any],
    *,
    coordinator: Coordinator,
    digests: bool = True,
    existing: Literal["error", "skip"] = "error",
    block_bytes: int = BLOCK_BYTES,
) -> Path:
    """Write `root/iter_0000100/` and make the tracker name it. Every rank calls this.

    Replicas are written once. Before any write, rank 0 checks that every element of every logical
    tensor will be written exactly once. The tensors must not change until this returns.

    Args:
        root: folder of all checkpoints of a run, on a file system that all ranks share.
        iteration: the step that the state belongs to.
        chunks: this rank's boxes of the logical tensors.
        extra: JSON to store in addition to the tensors; rank 0's is stored.
        coordinator: connects the ranks; `Solo()` for one process.
        digests: whether to store digests, which loading verifies.
        existing: if this step has already been saved: "error" raises, "skip" reports it in one
            line and leaves folder and tracker unchanged.
        block_bytes: bytes per digest, a multiple of 16.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: `block_bytes`, `iteration` or `existing` is impossible.
        CheckpointError: on all ranks alike; earlier checkpoints are intact.
    """
    if not 16 <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 16:
        raise ValueError(
            f"block_bytes must be a multiple of 16 up to {MAX_BLOCK_BYTES}, got {block_bytes}"
        )
    if existing not in ("error", "skip"):
        raise ValueError(f"existing must be 'error' or 'skip', got {existing!r}")
    root = Path(root)
    steps: list[SaveSteps] = []

    def prepare() -> tuple[str, str]:
        if coordinator.rank == 0:
            check_extra(extra)
        shard = plan_shard(chunks, coordinator.rank)
        check_updates_complete(shard)
        scratch = Scratch()

        def buffers(index: int) -> Iterable[memoryview]:
            chunk = shard.source_chunks[index]
            if chunk.byte_stream is not None:
                return chunk.byte_stream()
            return stream_bytes(chunk.tensor.detach(), scratch)

        steps.append(SaveSteps(root, shard.plan, shard.header, buffers))
        return shard.plan.encode(), ""

    save = CoordinatedSave(
        root=root,
        coordinator=coordinator,
        execute=lambda step, **arguments: steps[0].execute(step, **arguments),
        block_bytes=block_bytes,
        digests=digests,
        skip_existing=existing == "skip",
    )
    save.run(iteration, extra, prepare, say=coordinator.say)
    return checkpoint_folder(root, iteration)

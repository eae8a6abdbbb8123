# SPDX-License-Identifier: Apache-2.0
"""Profiles of a few iterations, and the history of the GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.values import not_negative, require, require_all


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiles of a few iterations, and the history of the GPU's memory."""

    profile: bool = False
    """Profile some iterations: for Nsight Systems (nsys profile --capture-range=cudaProfilerApi),
    or by torch with --use-pytorch-profiler."""
    use_pytorch_profiler: bool = False
    """Let --profile write a Chrome trace per rank by torch's own profiler; the only kind on a
    CPU."""
    profile_step_start: int = 10
    """Profile from the end of this iteration on."""
    profile_step_end: int = 12
    """Profile up to the end of this iteration."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that profile and that keep a memory history."""
    profile_dir: str | None = None
    """Folder for traces and snapshots; derived: profile in --save, else in --tensorboard-dir, else
    in runs."""
    record_memory_history: bool = False
    """Keep the history of GPU allocations, and write it at the end or at an error, running out of
    memory included; for https://pytorch.org/memory_viz."""
    memory_snapshot_path: str | None = None
    """File for that history, the rank is added to its name; derived: memory_snapshot.pickle in
    --profile-dir."""

    def __post_init__(self) -> None:
        require_all(
            lambda: not_negative(self, "profile_step_start"),
            lambda: require(
                self.profile_step_end > self.profile_step_start,
                f"--profile-step-end {self.profile_step_end} is not above --profile-step-start "
                f"{self.profile_step_start}: raise it",
            ),
            lambda: require(
                self.profile or not self.use_pytorch_profiler,
                "--use-pytorch-profiler has no effect without --profile: add that",
            ),
            lambda: require(
                self.record_memory_history or self.memory_snapshot_path is None,
                "--memory-snapshot-path has no effect without --record-memory-history: add that",
            ),
            lambda: require(
                all(rank >= 0 for rank in self.profile_ranks),
                f"--profile-ranks {min(self.profile_ranks)}: ranks start at 0",
            ),
        )

# SPDX-License-Identifier: Apache-2.0
"""Options of logging and profiling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import not_negative, positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: int = 100
    """Iterations between log lines."""
    log_throughput: bool = False
    """Log TFLOP/s per device, and the share of the device's peak if it is known."""
    log_num_zeros_in_grad: bool = False
    """Log the number of zero elements of the gradient."""
    log_params_norm: bool = False
    """Log the L2 norm of all weights."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project to log to; the API key is read from WANDB_API_KEY."""
    wandb_exp_name: str | None = None
    """Name of the Weights & Biases run."""
    wandb_entity: str | None = None
    """Weights & Biases user or team; None = the API key's own."""
    wandb_save_dir: str | None = None
    """Folder for local files of Weights & Biases; None = ./wandb."""
    mlflow_experiment: str | None = None
    """MLflow experiment to log to; user and password are read from MLflow's environment
    variables."""
    mlflow_run_name: str | None = None
    """Name of the MLflow run."""
    mlflow_tracking_uri: str | None = None
    """Address of the MLflow server or file store; None = MLflow's default."""
    metrics_file: str | None = None
    """File for metrics, one JSON line per logged step; derived: metrics.jsonl in --save, else in
    --tensorboard-dir, else in a new folder runs/START-TIME."""
    progress: Literal["auto", "plain", "live"] = "auto"
    """Live progress bar or plain lines; auto is live on a terminal."""

    def __post_init__(self) -> None:
        positive(self, "log_interval")
        for tracker, needed in (("wandb", "wandb_project"), ("mlflow", "mlflow_experiment")):
            for name, value in vars(self).items():
                idle = name.startswith(f"{tracker}_") and value is not None
                require(
                    not idle or vars(self)[needed] is not None,
                    f"--{name.replace('_', '-')} has no effect without "
                    f"--{needed.replace('_', '-')}: add that",
                )


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiles of a few iterations, and the history of GPU memory."""

    profile: bool = False
    """Profile a few iterations: for Nsight Systems (nsys profile --capture-range=cudaProfilerApi),
    or with torch's profiler by --use-pytorch-profiler."""
    use_pytorch_profiler: bool = False
    """Let --profile write one Chrome trace per rank with torch's profiler; the only profiler on a
    CPU."""
    profile_step_start: int = 10
    """Start the profile at the end of this iteration."""
    profile_step_end: int = 12
    """Stop the profile at the end of this iteration."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks to profile and to record the memory history of."""
    profile_dir: str | None = None
    """Folder for traces and memory snapshots; derived: profile in --save, else in
    --tensorboard-dir, else in runs."""
    record_memory_history: bool = False
    """Record the history of GPU allocations, and write it at the end of the run or at an error, out
    of memory included; for https://pytorch.org/memory_viz."""
    memory_snapshot_path: str | None = None
    """File for the memory history; the rank is added to its name; derived: memory_snapshot.pickle
    in --profile-dir."""

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


def profiling_problems(
    profiling: ProfilingConfig, *, train_iters: int | None, world_size: int
) -> Iterator[str]:
    """Yield a message for profiling of ranks or iterations that the run does not have."""
    is_profiled = profiling.profile or profiling.record_memory_history
    unknown_ranks = [rank for rank in profiling.profile_ranks if rank >= world_size]
    if is_profiled and unknown_ranks:
        yield (
            f"--profile-ranks {unknown_ranks[0]}: there are ranks 0 to {world_size - 1}: name one "
            "of them"
        )
    start = profiling.profile_step_start
    if profiling.profile and train_iters is not None and start >= train_iters:
        yield f"--profile-step-start {start} is not below --train-iters {train_iters}: lower it"

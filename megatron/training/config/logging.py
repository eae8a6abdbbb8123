# SPDX-License-Identifier: Apache-2.0
"""What a run prints and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive, require


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run prints and records."""

    log_interval: int = 100
    """Iterations between log lines."""
    log_throughput: bool = False
    """Show TFLOP/s per device in the log line, and the share of its peak where that is known."""
    log_num_zeros_in_grad: bool = False
    """Show how many gradient elements are exactly zero."""
    log_params_norm: bool = False
    """Show the L2 norm of all weights."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard scalars."""
    wandb_project: str | None = None
    """Project to record in at Weights & Biases; the key comes from its own WANDB_API_KEY."""
    wandb_exp_name: str | None = None
    """Name of the run there."""
    wandb_entity: str | None = None
    """User or team there; None = the key's own."""
    wandb_save_dir: str | None = None
    """Folder for its local files; None = ./wandb."""
    mlflow_experiment: str | None = None
    """Experiment to record in at MLflow; user and password come from its own variables."""
    mlflow_run_name: str | None = None
    """Name of the run there."""
    mlflow_tracking_uri: str | None = None
    """Address of its server or file store; None = its own default."""
    metrics_file: str | None = None
    """File for one JSON line per logged step; derived: metrics.jsonl in --save, else in
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

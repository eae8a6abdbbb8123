# SPDX-License-Identifier: Apache-2.0
"""The metrics writers of a run, opened from its options."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megatron.training.config import LoggingConfig
from megatron.training.monitoring.background import MetricsWriter
from megatron.training.monitoring.metrics import Metrics, open_metrics
from megatron.training.monitoring.mlflow_writer import mlflow_writer
from megatron.training.monitoring.tracked_run import TrackedRun, without_secrets
from megatron.training.monitoring.wandb_writer import wandb_writer


def new_metrics_file(now: datetime.datetime) -> str:
    """Return where a run that names no folder records: a folder of its own under runs/."""
    return str(Path("runs", f"{now:%Y-%m-%dT%H-%M-%S}-{os.getpid()}", "metrics.jsonl"))


def run_metrics(
    config: LoggingConfig,
    *,
    options: Mapping[str, Any],
    resume_iteration: int,
    warn: Callable[[str], None],
    now: datetime.datetime,
    again: Collection[str] = (),
) -> tuple[Metrics, str]:
    """Open every writer that a run's options ask for; the metrics file always.

    Args:
        config: of the run, resolved.
        options: all its options by flag name, for the trackers.
        resume_iteration: iteration the run goes on from.
        warn: prints one line; secrets are taken out of what it is given.
        now: names the folder of a run that has none.
        again: kinds of events of that iteration that the run is about to write once more.

    Returns:
        The writers, and the path of the metrics file.
    """
    path = config.metrics_file or new_metrics_file(now)
    tracked = TrackedRun(
        options=options, folder=Path(path).parent, resume_iteration=resume_iteration
    )
    trackers: dict[str, Callable[[], Callable[[], MetricsWriter]]] = {}
    if config.wandb_project is not None:
        trackers["W&B"] = lambda: wandb_writer(config, tracked)
    if config.mlflow_experiment is not None:
        trackers["MLflow"] = lambda: mlflow_writer(config, tracked)
    metrics = open_metrics(
        metrics_file=path,
        tensorboard_dir=config.tensorboard_dir,
        resume_iteration=resume_iteration,
        warn=without_secrets(warn),
        again=again,
        trackers=trackers,
    )
    return metrics, path

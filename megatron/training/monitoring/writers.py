# SPDX-License-Identifier: Apache-2.0
"""Metrics writers for Weights & Biases and MLflow; the only module that imports them.

API keys and passwords come from the libraries' own configuration (WANDB_API_KEY, ~/.netrc,
MLFLOW_TRACKING_USERNAME and so on) and are never options here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.training.config import LoggingConfig
from megatron.training.monitoring.metrics import MetricsWriter, TrackedRun

WANDB = "wandb"


def wandb_writer(config: LoggingConfig, tracked: TrackedRun) -> Callable[[], MetricsWriter]:
    """Import the library and return a function that connects to the server.

    Raises:
        ImportError: the library is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise ImportError("--wandb-project needs wandb: pip install wandb") from None
    return lambda: WandB(wandb, config, tracked)


class WandB:
    """A run of Weights & Biases; the x axis is `iteration`, so that a resumed run can rewind.

    Args:
        library: the module wandb.
        config: project, entity, names.
        tracked: options and tracker ids of the run.
    """

    def __init__(self, library: Any, config: LoggingConfig, tracked: TrackedRun) -> None:
        run_id = tracked.known_id(WANDB)
        if config.wandb_save_dir is not None:
            Path(config.wandb_save_dir).mkdir(parents=True, exist_ok=True)
        # Do not capture the console. Without an API key the library would prompt on the terminal.
        settings = library.Settings(console="off", login_timeout=1)
        self._run = library.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_exp_name,
            dir=config.wandb_save_dir,
            config=dict(tracked.options),
            id=run_id,
            resume="allow" if run_id else None,
            settings=settings,
        )
        tracked.remember(WANDB, self._run.id)
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Log one point of every curve."""
        prefixed = {f"{kind}/{name}": value for name, value in values.items()}
        self._run.log({"iteration": iteration, **prefixed})

    def close(self) -> None:
        """Send pending data and mark the run as finished."""
        self._run.finish()


MLFLOW = "mlflow"
#: The server's limits: parameters per call, characters per value.
PARAMS_PER_CALL, PARAM_CHARACTERS = 100, 500


def mlflow_writer(config: LoggingConfig, tracked: TrackedRun) -> Callable[[], MetricsWriter]:
    """Import the library and return a function that connects to the server.

    Raises:
        ImportError: the library is not installed.
    """
    try:
        import mlflow
        import mlflow.entities
    except ImportError:
        raise ImportError("--mlflow-experiment needs MLflow: pip install mlflow-skinny") from None
    return lambda: MLflow(mlflow, config, tracked)


class MLflow:
    """A run of MLflow, through its own client: the library's global state is not used.

    Args:
        library: the module mlflow.
        config: address and names.
        tracked: options and tracker ids of the run.
    """

    def __init__(self, library: Any, config: LoggingConfig, tracked: TrackedRun) -> None:
        self._entities = library.entities
        self._client = library.MlflowClient(tracking_uri=config.mlflow_tracking_uri)
        run_id = tracked.known_id(MLFLOW)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return
        experiment = self._client.get_experiment_by_name(config.mlflow_experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(config.mlflow_experiment)
        else:
            experiment_id = experiment.experiment_id
        run = self._client.create_run(experiment_id, run_name=config.mlflow_run_name)
        self._run_id = run.info.run_id
        tracked.remember(MLFLOW, self._run_id)
        params = [
            self._entities.Param(name, str(value)[:PARAM_CHARACTERS])
            for name, value in tracked.options.items()
        ]
        for batch in _slices(params, PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=batch)

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Log one point of every curve, in one call."""
        timestamp_ms = int(time.time() * 1000)  # milliseconds
        points = [
            self._entities.Metric(f"{kind}/{name}", value, timestamp_ms, iteration)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=points)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def _slices(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

# SPDX-License-Identifier: Apache-2.0
"""Metrics to Weights & Biases and to MLflow; the one module that imports them, when asked for.

Keys and passwords come from the libraries' own places (WANDB_API_KEY, ~/.netrc,
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
    """Import the library and return what connects to the server.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise ImportError("--wandb-project needs wandb: pip install wandb") from None
    return lambda: WandB(wandb, config, tracked)


class WandB:
    """One run of the server; curves over `iteration`, so that a resumed run may go back a little.

    Args:
        library: the module wandb.
        config: project, entity, names.
        tracked: what to report of the run.
    """

    def __init__(self, library: Any, config: LoggingConfig, tracked: TrackedRun) -> None:
        known = tracked.known_id(WANDB)
        if config.wandb_save_dir is not None:
            Path(config.wandb_save_dir).mkdir(parents=True, exist_ok=True)
        # The console stays the run's. Without a key the library would ask the terminal for one.
        settings = library.Settings(console="off", login_timeout=1)
        self._run = library.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_exp_name,
            dir=config.wandb_save_dir,
            config=dict(tracked.options),
            id=known,
            resume="allow" if known else None,
            settings=settings,
        )
        tracked.remember(WANDB, self._run.id)
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Log one point of every curve."""
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self._run.log({"iteration": iteration, **named})

    def close(self) -> None:
        """Send what is left and report that the run has ended."""
        self._run.finish()


MLFLOW = "mlflow"
#: What the server takes in one call, and of one value.
PARAMS_PER_CALL, PARAM_CHARACTERS = 100, 500


def mlflow_writer(config: LoggingConfig, tracked: TrackedRun) -> Callable[[], MetricsWriter]:
    """Import the library and return what connects to the server.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import mlflow
        import mlflow.entities
    except ImportError:
        raise ImportError("--mlflow-experiment needs MLflow: pip install mlflow-skinny") from None
    return lambda: MLflow(mlflow, config, tracked)


class MLflow:
    """One run of the server, through a client of its own: no state of the library is touched.

    Args:
        library: the module mlflow.
        config: address and names.
        tracked: what to report of the run.
    """

    def __init__(self, library: Any, config: LoggingConfig, tracked: TrackedRun) -> None:
        self._entities = library.entities
        self._client = library.MlflowClient(tracking_uri=config.mlflow_tracking_uri)
        known = tracked.known_id(MLFLOW)
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._run_id = known
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
        for some in _slices(params, PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=some)

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Log one point of every curve, in one call."""
        now = int(time.time() * 1000)  # milliseconds
        points = [
            self._entities.Metric(f"{kind}/{name}", value, now, iteration)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=points)

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._run_id)


def _slices(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

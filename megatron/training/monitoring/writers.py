# SPDX-License-Identifier: Apache-2.0
"""Metrics to Weights & Biases; the one module that imports wandb.

The key comes from the library's own places (WANDB_API_KEY, ~/.netrc) and is never an option here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.training.config import LoggingConfig
from megatron.training.monitoring.metrics import MetricsWriter, TrackedRun

TRACKER = "wandb"


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
        known = tracked.known_id(TRACKER)
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
        tracked.remember(TRACKER, self._run.id)
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Log one point of every curve."""
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self._run.log({"iteration": iteration, **named})

    def close(self) -> None:
        """Send what is left and report that the run has ended."""
        self._run.finish()

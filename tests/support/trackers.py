# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for experiment-tracking libraries, with the functions that this package calls.

Each records its calls in `calls` as (function name, arguments).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def fake_wandb(*, init: Callable[[], None] = lambda: None) -> types.SimpleNamespace:
    """Return a module like wandb; `init` runs first when it connects."""
    calls: list[tuple[str, Any]] = []

    class Run:
        def __init__(self, run_id: str) -> None:
            self.id = run_id

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            calls.append(("define_metric", (name, step_metric)))

        def log(self, values: dict[str, Any]) -> None:
            calls.append(("log", values))

        def finish(self) -> None:
            calls.append(("finish", None))

    def start(*, id: str | None, **options: Any) -> Run:
        init()
        calls.append(("init", {"id": id, **options}))
        return Run(id or f"made{len(calls)}")

    return types.SimpleNamespace(
        __name__="wandb",
        init=start,
        Settings=lambda **settings: types.SimpleNamespace(**settings),
        calls=calls,
    )


def fake_mlflow(*, connect: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return modules like mlflow and mlflow.entities, by name; the first has `calls`."""
    calls: list[tuple[str, Any]] = []

    class Client:
        def __init__(self, tracking_uri: str | None) -> None:
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> None:
            connect()
            calls.append(("get_experiment_by_name", name))

        def create_experiment(self, name: str) -> str:
            calls.append(("create_experiment", name))
            return "7"

        def create_run(self, experiment_id: str, run_name: str | None) -> Any:
            calls.append(("create_run", (experiment_id, run_name)))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="run1"))

        def update_run(self, run_id: str, status: str) -> None:
            calls.append(("update_run", (run_id, status)))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100
            calls.append(("log_batch", (run_id, list(metrics), list(params))))

        def set_terminated(self, run_id: str) -> None:
            calls.append(("set_terminated", run_id))

    entities = types.SimpleNamespace(
        Metric=lambda key, value, timestamp, step: (key, value, step),
        Param=lambda key, value: (key, value),
    )
    module = types.SimpleNamespace(MlflowClient=Client, entities=entities, calls=calls)
    return {"mlflow": module, "mlflow.entities": entities}

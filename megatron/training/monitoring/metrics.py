# SPDX-License-Identifier: Apache-2.0
"""Metrics writers: JSON lines, TensorBoard, W&B and MLflow. A failing writer stops no run.

`metrics.jsonl` has one object per line, `{"kind": "train", "iteration": 100, "lm_loss": 3.2,
...}`, where `kind` is `train`, `validation` or `test`, or `start`, `save`, `fault`, `straggler`,
`output` or `end` for other events. Only metrics.jsonl has tables: rows of numbers by name, such as
the load of experts. When a run resumes at iteration n, lines after n are removed first, so that
every iteration is recorded once.

Every other writer runs in its own thread, so that a server or disk that does not answer delays no
step. Events wait in a bounded queue. When the queue is full, new events are dropped and one warning
is printed; at its end the run waits a bounded time for the queue to drain. Trackers get the run's
options, and an id by which a resumed run continues. API keys and passwords come from the
libraries' own configuration (WANDB_API_KEY, ~/.netrc, MLFLOW_TRACKING_USERNAME and so on) and are
never options here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.core.untrusted_files import parse_json, read_text, replace_file, write_to
from megatron.training.config import LoggingConfig

#: Maximum number of queued events per writer.
CAPACITY = 1000
#: Total time that the end of a run waits for all its writers, in seconds.
CLOSE_SECONDS = 20.0


class MetricsWriter(Protocol):
    """Writes the numbers of events."""

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Record values by name."""

    def close(self) -> None:
        """Flush pending events."""


class Background:
    """Runs a writer in a thread, so that a writer that blocks or fails does not affect the run.

    Args:
        name: name of the writer in messages.
        open_writer: connects and returns the writer; called on the thread.
        warn: prints one line; called from both threads.
        capacity: maximum number of queued events.
        close_seconds: longest time from `stop` to the return of `close`.

    Attributes:
        dropped: number of events dropped because the queue was full.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], MetricsWriter],
        *,
        warn: Callable[[str], None],
        capacity: int = CAPACITY,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._name, self._open_writer, self._warn = name, open_writer, warn
        self._close_seconds = close_seconds
        self._queue: queue.Queue[tuple[str, int, Mapping[str, float]] | None]
        self._queue = queue.Queue(capacity)
        self._failed = threading.Event()
        self._deadline: float | None = None
        self.dropped = 0
        # A daemon thread: a server that never answers must not block interpreter shutdown.
        self._thread = threading.Thread(target=self._run, name=f"metrics: {name}", daemon=True)
        self._thread.start()

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Queue one event, or drop it if the queue is full."""
        if self._failed.is_set():
            return
        try:
            self._queue.put_nowait((kind, iteration, values))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._warn(
                    f"metrics: {self._name} does not keep up: {self._queue.maxsize} events are "
                    "queued, "
                    "further ones are dropped; training continues"
                )

    def stop(self) -> None:
        """Ask the thread to end after the queued events; returns immediately."""
        if self._deadline is not None:
            return
        self._deadline = time.monotonic() + self._close_seconds
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                self._drop_one()

    def close(self) -> None:
        """Wait for the thread to end, at most until the deadline."""
        self.stop()
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(
                f"metrics: {self._name} has not written everything within "
                f"{self._close_seconds:g} s; the run ends without the rest"
            )

    def _drop_one(self) -> None:
        try:
            self._queue.get_nowait()
            self.dropped += 1
        except queue.Empty:  # the thread emptied the queue first
            pass

    def _run(self) -> None:
        try:
            writer = self._open_writer()
            while (event := self._queue.get()) is not None:
                writer.write(*event)
            writer.close()
        except BaseException as error:  # SystemExit too: some libraries raise it
            self._failed.set()
            self._warn(failure_line(self._name, error))


def failure_line(name: str, error: BaseException) -> str:
    """Return the warning about a failed writer."""
    text = " ".join(str(error).split())
    return f"metrics: {name} is disabled: {type(error).__name__}: {text}; training continues"


_SECRET_NAME = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The description of a run for experiment trackers.

    Args:
        options: the run's resolved options, by flag name.
        folder: folder of metrics.jsonl, where tracker ids are stored; None stores none.
        resume_iteration: iteration the run resumes from; 0 is a new run.
    """

    options: Mapping[str, Any]
    folder: Path | None
    resume_iteration: int

    def known_id(self, tracker: str) -> str | None:
        """Return the tracker's id of the run that this run resumes; None if there is none."""
        path = self._path(tracker)
        if self.resume_iteration == 0 or path is None or not path.is_file():
            return None
        return read_text(path, 4096).strip() or None

    def remember(self, tracker: str, run_id: str) -> None:
        """Store the tracker's id for a resumed run."""
        path = self._path(tracker)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, run_id + "\n")

    def _path(self, tracker: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{tracker}_run_id"


def redacted(text: str, environment: Mapping[str, str]) -> str:
    """Return the text with secrets of the environment and user names in URLs masked."""
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return _USER_IN_ADDRESS.sub("***@", text)


def without_secrets(log: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap `log` to mask secrets: messages of external libraries may quote keys."""
    return lambda text: log(redacted(text, os.environ))


#: Name of the table with the load of every expert by layer, as a multiple of the layer's mean.
EXPERT_LOAD = "expert_load"

#: Largest metrics file that is read.
MAX_METRICS_BYTES = 1 << 30

#: Rows of numbers, by name.
Table = Mapping[str, Sequence[float]]


class JsonLines:
    """Appends to metrics.jsonl, one flushed line per event.

    Args:
        path: path of the file; earlier lines of a resumed run are preserved.
        resume_iteration: later lines are removed; 0 removes all.
        rewritten_kinds: kinds of events at `resume_iteration` that the resumed run writes again.
    """

    def __init__(
        self, path: str | Path, *, resume_iteration: int, rewritten_kinds: Collection[str] = ()
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        retained = [
            event
            for event in _read_events(path)
            if event["iteration"] < resume_iteration
            or (event["iteration"] == resume_iteration and event.get("kind") not in rewritten_kinds)
        ]
        if resume_iteration == 0:
            retained = []
        text = "".join(json.dumps(event) + "\n" for event in retained)
        replace_file(path, text)
        self._file = write_to(path, "a")

    def write(self, kind: str, iteration: int, values: Mapping[str, float | Table]) -> None:
        """Append one line; NaN and Inf become strings, because JSON has no such numbers."""
        clean = {
            name: _json_number(value) if isinstance(value, float) else _json_table(value)
            for name, value in values.items()
        }
        print(
            json.dumps({"kind": kind, "iteration": iteration, **clean}), file=self._file, flush=True
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _json_table(table: Table) -> dict[str, list[float | str]]:
    return {name: [_json_number(value) for value in row] for name, row in table.items()}


def _read_events(path: Path, *, follow_links: bool = False) -> list[dict[str, Any]]:
    """Read the events of a metrics file; a line truncated by a crash is dropped."""
    if not path.exists():
        return []
    events = []
    text = read_text(path, MAX_METRICS_BYTES, follow_links=follow_links)
    for line in text.splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("iteration"), int):
            events.append(value)
    return events


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a metrics.jsonl in order, NaN and Inf as floats again."""
    events = _read_events(Path(path), follow_links=True)
    for event in events:
        for name, value in event.items():
            if value in ("nan", "inf", "-inf"):
                event[name] = float(value)
    return events


def tensorboard_writer(folder: str | Path, *, resume_iteration: int) -> Callable[[], MetricsWriter]:
    """Import the library and return a function that opens the folder.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    from torch.utils.tensorboard import SummaryWriter

    purge = resume_iteration + 1 if resume_iteration else None
    return lambda: TensorBoard(SummaryWriter(log_dir=str(folder), purge_step=purge))


class TensorBoard:
    """Writes scalars for TensorBoard, `train/lm_loss` and so on.

    Args:
        writer: torch's SummaryWriter.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Add one scalar per value."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, iteration)

    def close(self) -> None:
        """Flush pending events."""
        self._writer.close()


class Metrics:
    """Passes numbers to all writers; a failing writer is dropped with one warning.

    Args:
        makers: functions that open each writer, by name.
        warn: prints one line.
    """

    def __init__(
        self, makers: Mapping[str, Callable[[], MetricsWriter]], warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._writers: dict[str, MetricsWriter] = {}
        for name, make in makers.items():
            self._guard(name, lambda name=name, make=make: self._writers.update({name: make()}))

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the writers that have not failed."""
        return tuple(self._writers)

    def write(self, kind: str, iteration: int, values: Mapping[str, float | Table | None]) -> None:
        """Write the values that are not None; tables go to the metrics file only."""
        scalars: dict[str, float] = {}
        tables: dict[str, Table] = {}
        for name, value in values.items():
            if isinstance(value, Mapping):
                tables[name] = value
            elif value is not None:
                scalars[name] = float(value)
        for name, writer in list(self._writers.items()):
            extra = tables if isinstance(writer, JsonLines) else {}
            self._guard(
                name,
                lambda writer=writer, extra=extra: writer.write(
                    kind, iteration, {**scalars, **extra}
                ),
            )

    def close(self) -> None:
        """Close every writer; background writers share one time limit."""
        for writer in self._writers.values():
            if isinstance(writer, Background):
                writer.stop()
        for name, writer in list(self._writers.items()):
            self._guard(name, writer.close)
        self._writers.clear()

    def _guard(self, name: str, action: Callable[[], object]) -> None:
        """Call a writer's action and catch every exception, so that no failure reaches the run."""
        try:
            action()
        except Exception as error:
            dropped = self._writers.pop(name, None)
            if dropped is not None:
                with contextlib.suppress(Exception):
                    dropped.close()
            self._warn(failure_line(name, error))


def open_metrics(
    *,
    metrics_file: str | None,
    tensorboard_dir: str | None,
    resume_iteration: int,
    warn: Callable[[str], None],
    rewritten_kinds: Collection[str] = (),
    trackers: Mapping[str, Callable[[], Callable[[], MetricsWriter]]] | None = None,
) -> Metrics:
    """Open the writers of the options. All except the metrics file run in their own thread.

    Args:
        metrics_file: path of metrics.jsonl, or None.
        tensorboard_dir: folder for TensorBoard, or None.
        resume_iteration: iteration the run resumes from; 0 starts new files.
        rewritten_kinds: see `JsonLines`.
        warn: prints one line about a writer that fails.
        trackers: by name, a function that imports the library on this thread and returns the
            function that connects on the writer's thread.
    """
    importers = dict(trackers or {})
    if tensorboard_dir is not None:
        importers["TensorBoard"] = lambda: tensorboard_writer(
            tensorboard_dir, resume_iteration=resume_iteration
        )
    makers: dict[str, Callable[[], MetricsWriter]] = {}
    if metrics_file is not None:
        makers["metrics file"] = lambda: JsonLines(
            metrics_file, resume_iteration=resume_iteration, rewritten_kinds=rewritten_kinds
        )
    for name, import_tracker in importers.items():
        # Import on this thread: concurrent imports in several threads can deadlock.
        makers[name] = lambda name=name, import_tracker=import_tracker: Background(
            name, import_tracker(), warn=warn
        )
    return Metrics(makers, warn)


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

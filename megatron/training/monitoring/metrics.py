# SPDX-License-Identifier: Apache-2.0
"""Where a run's numbers go: JSON lines, TensorBoard, trackers; a failing writer stops no run.

`metrics.jsonl` has one object per line, `{"kind": "train", "iteration": 100, "lm_loss": 3.2,
...}`, `kind` being `train`, `validation` or `test`. Only there a value may be a table, rows of
numbers by name, as the load of experts is. When a run resumes at iteration n, lines after n are
removed first, so that no iteration is there twice.

A writer has its own thread, so that a server or disk that does not answer delays no step. Events
wait in a bounded queue. When it is full, new events are dropped, with one line; at the end the run
waits a bounded time for the rest. A tracking server gets the run's description, and an id under
which a resumed run continues.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.core.untrusted_files import parse_json, read_text, replace_file, write_to

#: Events that may wait for a writer.
CAPACITY = 1000
#: How long the end of a run waits for its writers, all of them together.
CLOSE_SECONDS = 20.0


class MetricsWriter(Protocol):
    """Takes the numbers of one event."""

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Record values by name."""

    def close(self) -> None:
        """Write out what is pending."""


class Background:
    """Passes events on to a writer that may block or fail; itself it does neither.

    Args:
        name: of the writer, for messages.
        make: connects and returns the writer; called on the thread.
        warn: prints one line; called from either thread.
        capacity: events that may wait.
        close_seconds: the longest that `close` takes, from `stop` on.

    Attributes:
        dropped: events that found the queue full.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], MetricsWriter],
        *,
        warn: Callable[[str], None],
        capacity: int = CAPACITY,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._name, self._make, self._warn = name, make, warn
        self._close_seconds = close_seconds
        self._waiting: queue.Queue[tuple[str, int, Mapping[str, float]] | None]
        self._waiting = queue.Queue(capacity)
        self._failed = threading.Event()
        self._deadline: float | None = None
        self.dropped = 0
        # A daemon: a server that never answers must not hold the interpreter's end either.
        self._thread = threading.Thread(target=self._work, name=f"metrics: {name}", daemon=True)
        self._thread.start()

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Hand over one event, or drop it."""
        if self._failed.is_set():
            return
        try:
            self._waiting.put_nowait((kind, iteration, values))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._warn(
                    f"metrics: {self._name} does not keep up: {self._waiting.maxsize} events wait, "
                    "further ones are dropped; training goes on"
                )

    def stop(self) -> None:
        """Let the thread end after the events that wait; returns at once."""
        if self._deadline is not None:
            return
        self._deadline = time.monotonic() + self._close_seconds
        while True:
            try:
                self._waiting.put_nowait(None)
                return
            except queue.Full:
                self._drop_one()

    def close(self) -> None:
        """Wait for the thread to end, but not for ever."""
        self.stop()
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(
                f"metrics: {self._name} has not taken everything within "
                f"{self._close_seconds:g} s; the run ends without it"
            )

    def _drop_one(self) -> None:
        try:
            self._waiting.get_nowait()
            self.dropped += 1
        except queue.Empty:  # the thread was quicker
            pass

    def _work(self) -> None:
        try:
            writer = self._make()
            while (event := self._waiting.get()) is not None:
                writer.write(*event)
            writer.close()
        except BaseException as error:  # SystemExit too: some libraries raise it
            self._failed.set()
            self._warn(off(self._name, error))


def off(name: str, error: BaseException) -> str:
    """Return the line about a writer that failed."""
    text = " ".join(str(error).split())
    return f"metrics: {name} is off: {type(error).__name__}: {text}; training goes on"


_SECRET_NAME = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as a tracking server sees it.

    Args:
        options: the run's resolved options, by flag name.
        folder: where ids are kept, next to metrics.jsonl; None keeps none.
        resume_iteration: iteration the run goes on from; 0 is a new run.
    """

    options: Mapping[str, Any]
    folder: Path | None
    resume_iteration: int

    def known_id(self, tracker: str) -> str | None:
        """Return the id that a tracker gave the run which this one goes on with, if any."""
        path = self._path(tracker)
        if self.resume_iteration == 0 or path is None or not path.is_file():
            return None
        return read_text(path, 4096).strip() or None

    def remember(self, tracker: str, run_id: str) -> None:
        """Keep the id for when the run is resumed."""
        path = self._path(tracker)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, run_id + "\n")

    def _path(self, tracker: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{tracker}_run_id"


def redacted(text: str, environment: Mapping[str, str]) -> str:
    """Return a text without the secrets that the environment holds or an address carries."""
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return _USER_IN_ADDRESS.sub("***@", text)


def without_secrets(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for texts of foreign libraries, which may quote keys."""
    return lambda text: say(redacted(text, os.environ))


#: Under this name is the load of every expert, by layer, as a multiple of the layer's mean.
EXPERT_LOAD = "expert_load"

#: Of a metrics file that is read.
MAX_METRICS_BYTES = 1 << 30

#: Rows of numbers, by name.
Table = Mapping[str, Sequence[float]]


class JsonLines:
    """Appends to metrics.jsonl, one flushed line per event.

    Args:
        path: of the file; what it holds of a run that goes on is kept.
        resume_iteration: after which lines are removed; 0 removes all.
        again: kinds of events of that iteration that the run is about to write once more.
    """

    def __init__(
        self, path: str | Path, *, resume_iteration: int, again: Collection[str] = ()
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [
            line
            for line in _lines(path)
            if line["iteration"] < resume_iteration
            or (line["iteration"] == resume_iteration and line.get("kind") not in again)
        ]
        if resume_iteration == 0:
            kept = []
        text = "".join(json.dumps(line) + "\n" for line in kept)
        replace_file(path, text)
        self._file = write_to(path, "a")

    def write(self, kind: str, iteration: int, values: Mapping[str, float | Table]) -> None:
        """Append one line; NaN and Inf become strings, which JSON can hold."""
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


def _lines(path: Path, *, follow_links: bool = False) -> list[dict[str, Any]]:
    """Read the whole lines of a metrics file; a line cut short by a crash is dropped."""
    if not path.exists():
        return []
    found = []
    text = read_text(path, MAX_METRICS_BYTES, follow_links=follow_links)
    for line in text.splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("iteration"), int):
            found.append(value)
    return found


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a metrics.jsonl in order, NaN and Inf as floats again."""
    events = _lines(Path(path), follow_links=True)
    for event in events:
        for name, value in event.items():
            if value in ("nan", "inf", "-inf"):
                event[name] = float(value)
    return events


def tensorboard_writer(folder: str | Path, *, resume_iteration: int) -> Callable[[], MetricsWriter]:
    """Import the library and return what opens the folder.

    Raises:
        ImportError: it is not installed.
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
        """Write out pending events."""
        self._writer.close()


class Metrics:
    """Passes numbers to every writer that works; a writer that fails is dropped with one line.

    Args:
        makers: how to make each writer, by name.
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
        """Names of the writers that work."""
        return tuple(self._writers)

    def write(self, kind: str, iteration: int, values: Mapping[str, float | Table | None]) -> None:
        """Record what is not None; tables go to the metrics file alone."""
        known: dict[str, float] = {}
        tables: dict[str, Table] = {}
        for name, value in values.items():
            if isinstance(value, Mapping):
                tables[name] = value
            elif value is not None:
                known[name] = float(value)
        for name, writer in list(self._writers.items()):
            more = tables if isinstance(writer, JsonLines) else {}
            self._guard(
                name,
                lambda writer=writer, more=more: writer.write(kind, iteration, {**known, **more}),
            )

    def close(self) -> None:
        """Close every writer; those on threads of their own share one time limit."""
        for writer in self._writers.values():
            if isinstance(writer, Background):
                writer.stop()
        for name, writer in list(self._writers.items()):
            self._guard(name, writer.close)
        self._writers.clear()

    def _guard(self, name: str, action: Callable[[], object]) -> None:
        """Do something with a writer; no failure may reach the run, so all are caught."""
        try:
            action()
        except Exception as error:
            dropped = self._writers.pop(name, None)
            if dropped is not None:
                with contextlib.suppress(Exception):
                    dropped.close()
            self._warn(off(name, error))


def open_metrics(
    *,
    metrics_file: str | None,
    tensorboard_dir: str | None,
    resume_iteration: int,
    warn: Callable[[str], None],
    again: Collection[str] = (),
    trackers: Mapping[str, Callable[[], Callable[[], MetricsWriter]]] | None = None,
) -> Metrics:
    """Open the writers that the options name. All but the metrics file get a thread of their own.

    Args:
        metrics_file: path of metrics.jsonl, or None.
        tensorboard_dir: folder for TensorBoard, or None.
        resume_iteration: iteration the run goes on from; 0 starts the files anew.
        again: see `JsonLines`.
        warn: prints one line about a writer that fails.
        trackers: by name, what imports a library here and returns what connects on the thread.
    """
    prepare = dict(trackers or {})
    if tensorboard_dir is not None:
        prepare["TensorBoard"] = lambda: tensorboard_writer(
            tensorboard_dir, resume_iteration=resume_iteration
        )
    makers: dict[str, Callable[[], MetricsWriter]] = {}
    if metrics_file is not None:
        makers["metrics file"] = lambda: JsonLines(
            metrics_file, resume_iteration=resume_iteration, again=again
        )
    for name, ready in prepare.items():
        # Imported here, not on the thread: two threads that import at once can trip each other.
        makers[name] = lambda name=name, ready=ready: Background(name, ready(), warn=warn)
    return Metrics(makers, warn)

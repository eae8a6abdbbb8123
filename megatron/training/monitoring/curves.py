# SPDX-License-Identifier: Apache-2.0
"""The curves of recorded runs: found by name, smoothed, and their last values compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.monitoring.metrics import EXPERT_LOAD, read_metrics

_LARGEST_NUMBER = 1e100  # that is drawn


@dataclass(frozen=True)
class Quantity:
    """What is drawn of a run.

    Args:
        key: its name in metrics.jsonl, behind the kind of event: `train/lm_loss`.
        title: of its panel.
        unit: of its values.
        factor: recorded value to shown value.
        logarithmic: whether its axis is.
    """

    key: str
    title: str
    unit: str
    factor: float = 1.0
    logarithmic: bool = False


QUANTITIES = (
    Quantity("train/lm_loss", "training loss", "nats per token"),
    Quantity("validation/lm_loss", "validation loss", "nats per token"),
    Quantity("train/mtp_1_loss", "loss one token further ahead", "nats per token"),
    Quantity("train/mtp_2_loss", "loss two tokens further ahead", "nats per token"),
    Quantity("train/learning_rate", "learning rate", ""),
    Quantity("train/grad_norm", "gradient norm", "before clipping", logarithmic=True),
    Quantity("train/expert_load_max", "load of the busiest expert", "of the mean"),
    Quantity("train/router_entropy", "entropy of routers", "nats"),
    Quantity("train/tokens_dropped", "dropped by full experts", "%", 100.0),
    Quantity("train/aux_loss", "loss of uneven load", "without its coefficient"),
    Quantity("train/z_loss", "loss of large router logits", "without its coefficient"),
    Quantity("train/tokens_per_second", "speed", "tokens/s"),
    Quantity("train/tflops", "speed per device", "TFLOP/s"),
    Quantity("train/memory_bytes", "memory", "MB", 1e-6),
    Quantity("train/peak_memory_bytes", "peak memory", "MB", 1e-6),
)


@dataclass(frozen=True)
class Curve:
    """Values over iterations; only finite ones."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class RecordedRun:
    """A run's name, its curves by `Quantity.key`, and the last load of its experts, by layer."""

    name: str
    curves: dict[str, Curve]
    loads: dict[str, list[float]] = field(default_factory=dict)
    loads_at: int = 0


def metrics_file(given: str) -> Path:
    """Return the metrics.jsonl that a path means: itself, or one in a run's folder.

    Raises:
        ValueError: there is none.
    """
    path = Path(given)
    if path.is_dir():
        inside = (path / "metrics.jsonl", path / "checkpoints" / "metrics.jsonl")
        path = next((p for p in inside if p.is_file()), inside[0])
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name a metrics.jsonl or the folder of a run")
    return path


def read_run(given: str, name: str) -> RecordedRun:
    """Read the curves of a run.

    Raises:
        ValueError: no such file, or it holds no losses.
    """
    path = metrics_file(given)
    points: dict[str, dict[int, float]] = {}
    loads, loads_at = {}, 0
    try:
        events = read_metrics(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    for event in events:
        if _is_table(event.get(EXPERT_LOAD)):
            loads, loads_at = event[EXPERT_LOAD], event["iteration"]
        for quantity in QUANTITIES:
            kind, _, key = quantity.key.partition("/")
            value: Any = event.get(key)
            if event.get("kind") == kind and _is_number(value):
                found = points.setdefault(quantity.key, {})
                found[event["iteration"]] = value * quantity.factor
    if not {"train/lm_loss", "validation/lm_loss"} & points.keys():
        raise ValueError(f"{path} holds no losses: name the metrics.jsonl of a run that trained")
    curves = {key: Curve(tuple(p), tuple(p.values())) for key, p in points.items()}
    return RecordedRun(name, curves, loads, loads_at)


def _is_number(value: object) -> bool:
    """Say whether a value can be drawn: an integer of JSON may have any size."""
    return isinstance(value, (int, float)) and abs(value) < _LARGEST_NUMBER


def _is_table(value: object) -> bool:
    """Say whether a value is rows of numbers by name, equally long."""
    if not isinstance(value, dict) or not all(isinstance(row, list) for row in value.values()):
        return False
    numbers = [number for row in value.values() for number in row]
    return (
        bool(numbers) and all(map(_is_number, numbers)) and len(set(map(len, value.values()))) == 1
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that tell them apart."""
    parts = [[p for p in Path(path).parts if p != "metrics.jsonl"] or [path] for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{i + 1}: {'/'.join(p)}" for i, p in enumerate(parts)]


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential mean of values, corrected for its start: weight of the past in
    [0, 1)."""
    mean, total, found = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1.0 - weight) * value
        total = weight * total + (1.0 - weight)
        found.append(mean / total)
    return found


def comparison(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return a table of last values: a header, then a row per quantity; other runs against the
    first."""
    table = [["last value", *(run.name for run in runs)]]
    for quantity in QUANTITIES:
        lasts = [_last(run, quantity.key) for run in runs]
        if all(last is None for last in lasts):
            continue
        unit = f" ({quantity.unit})" if quantity.unit else ""
        row = [f"{quantity.title}{unit}"]
        for place, last in enumerate(lasts):
            row.append(_cell(last, lasts[0] if place else None))
        table.append(row)
    lasts_at = [max(c.steps[-1] for c in run.curves.values()) for run in runs]
    table.append(["iteration", *map(str, lasts_at)])
    return table


def _last(run: RecordedRun, key: str) -> float | None:
    return run.curves[key].values[-1] if key in run.curves else None


def _cell(value: float | None, first: float | None) -> str:
    if value is None:
        return "—"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if first is None or first == 0:
        return text
    return f"{text} ({(value - first) / abs(first):+.2%})"

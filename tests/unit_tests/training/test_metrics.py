# SPDX-License-Identifier: Apache-2.0
"""Metrics files: their contents, the events a resumed run keeps, and failing writers."""

from __future__ import annotations

import json
import math

import pytest

from megatron.training.monitoring.metrics import JsonLines, Metrics, open_metrics, read_metrics


def _write(path, iterations, resume=0, **values):
    metrics = open_metrics(
        metrics_file=str(path), tensorboard_dir=None, resume_iteration=resume, warn=pytest.fail
    )
    for iteration in iterations:
        metrics.write("train", iteration, {"lm_loss": float(iteration), "none": None, **values})
    metrics.close()


def test_metrics_lines_are_json_and_read_back(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    _write(path, [1, 2], grad_norm=math.inf)
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert lines[0] == {"kind": "train", "iteration": 1, "lm_loss": 1.0, "grad_norm": "inf"}
    assert read_metrics(path)[1]["grad_norm"] == math.inf


def test_resumed_run_records_each_iteration_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2, 3, 4])
    with path.open("a") as file:
        file.write('{"kind": "train", "iter')  # cut short by a crash
    _write(path, [3, 4, 5], resume=2)
    assert [e["iteration"] for e in read_metrics(path)] == [1, 2, 3, 4, 5]
    _write(path, [1], resume=0)
    assert [e["iteration"] for e in read_metrics(path)] == [1]


def test_repeated_validation_is_recorded_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path, resume_iteration=0)
    for kind, iteration in (("train", 1), ("validation", 1), ("train", 2), ("validation", 2)):
        writer.write(kind, iteration, {})
    writer.close()
    JsonLines(path, resume_iteration=2, rewritten_kinds=("validation",)).close()
    events = [(e["kind"], e["iteration"]) for e in read_metrics(path)]
    assert events == [("train", 1), ("validation", 1), ("train", 2)]
    JsonLines(path, resume_iteration=1).close()
    assert [e["kind"] for e in read_metrics(path)] == ["train", "validation"]


def test_failing_metrics_writer_is_dropped_with_one_warning():
    class WorkingWriter:
        def __init__(self):
            self.seen = []

        def write(self, kind, iteration, values):
            self.seen.append((kind, iteration, values))

        def close(self):
            pass

    class FailingWriter(WorkingWriter):
        def write(self, kind, iteration, values):
            raise OSError("No space left\non device")

    def absent():
        raise ImportError("no such module")

    good, warnings = WorkingWriter(), []
    metrics = Metrics({"a": absent, "b": FailingWriter, "c": lambda: good}, warnings.append)
    metrics.write("train", 1, {"x": 1})
    metrics.write("train", 2, {"x": 2})
    metrics.close()
    assert [i for _, i, _ in good.seen] == [1, 2]
    assert len(warnings) == 2
    assert "a is disabled: ImportError" in warnings[0]
    assert "b is disabled: OSError: No space left on device" in warnings[1]


def test_unwritable_metrics_file_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    warnings = []
    metrics = open_metrics(
        metrics_file=str(tmp_path / "file" / "metrics.jsonl"),
        tensorboard_dir=None,
        resume_iteration=0,
        warn=warnings.append,
    )
    metrics.write("train", 1, {"x": 1.0})
    assert metrics.active == ()
    assert len(warnings) == 1


def test_tensorboard_drops_repeated_iterations_on_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, iterations in ((0, [1, 2, 3]), (2, [3, 4])):
        metrics = open_metrics(
            metrics_file=None,
            tensorboard_dir=str(tmp_path),
            resume_iteration=resume,
            warn=pytest.fail,
        )
        for iteration in iterations:
            metrics.write("train", iteration, {"lm_loss": iteration + resume / 10})
        metrics.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("train/lm_loss")
    assert [s.step for s in scalars] == [1, 2, 3, 4]
    assert [round(s.value, 3) for s in scalars] == [1.0, 2.0, 3.2, 4.2]

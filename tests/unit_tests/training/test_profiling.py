# SPDX-License-Identifier: Apache-2.0
"""Profiles: which iterations a trace holds, which ranks write one, and what a CPU has none of."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from megatron.training.monitoring.observation import profiling
from tests.unit_tests.training.small_config import small_config

CPU = torch.device("cpu")


def config(flags, **more):
    return dataclasses.replace(small_config(flags).profiling, **more)


def run(options, *, rank=0, iterations=range(1, 7)):
    said = []
    with profiling(options, rank=rank, device=CPU, log=said.append) as on_iteration:
        for iteration in iterations:
            on_iteration(iteration)
            with torch.profiler.record_function(f"iteration {iteration}"):
                torch.ones(3).sum()
    return said


def traced(folder):
    (path,) = folder.glob("*.json")
    events = json.loads(path.read_text())["traceEvents"]
    return path, {e["name"] for e in events if e.get("name", "").startswith("iteration ")}


FLAGS = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4"


def test_trace_contains_the_requested_iterations(tmp_path):
    said = run(config(f"{FLAGS} --profile-ranks 0 3 --profile-dir {tmp_path}"), rank=3)
    path, names = traced(tmp_path)
    assert path.name == "trace_rank3_iterations3-4.json"
    assert names == {"iteration 3", "iteration 4"}
    assert said == [f"profile in {path}"]


def test_a_run_that_ends_inside_the_window_writes_what_it_has(tmp_path):
    run(config(f"{FLAGS} --profile-dir {tmp_path}"), iterations=range(1, 4))
    assert traced(tmp_path)[1] == {"iteration 3"}


@pytest.mark.parametrize("flags", ["", FLAGS + " --profile-ranks 1"])
def test_other_ranks_and_other_runs_write_nothing(tmp_path, flags):
    assert run(config(flags, profile_dir=str(tmp_path))) == []
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    (said,) = run(config(f"{FLAGS} --profile-dir {tmp_path}/file/x"))
    assert "cannot write" in said
    assert "training continues" in said


def test_what_only_a_gpu_has():
    with pytest.raises(ValueError, match="add --use-pytorch-profiler"):
        run(config("--profile"), rank=5)
    with pytest.raises(ValueError, match="--record-memory-history records GPU memory"):
        run(config("--record-memory-history"), rank=5)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--profile-step-end 10", "--profile-step-end 10 is not above --profile-step-start 10"),
        ("--use-pytorch-profiler", "no effect without --profile"),
        ("--profile-ranks -1", "ranks start at 0"),
    ],
)
def test_options_that_cannot_be(flags, text):
    with pytest.raises(ValueError, match=text):
        small_config(flags)

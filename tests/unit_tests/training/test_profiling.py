# SPDX-License-Identifier: Apache-2.0
"""Profiles: the iterations in a trace, the ranks that write one, and options for GPUs only."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from megatron.training.observation import profiling
from tests.unit_tests.training.small_config import small_config

CPU = torch.device("cpu")


def config(flags, **changes):
    return dataclasses.replace(small_config(flags).profiling, **changes)


def run(options, *, rank=0, iterations=range(1, 7)):
    messages = []
    with profiling(options, rank=rank, device=CPU, log=messages.append) as on_iteration:
        for iteration in iterations:
            on_iteration(iteration)
            with torch.profiler.record_function(f"iteration {iteration}"):
                torch.ones(3).sum()
    return messages


def read_trace(folder):
    (path,) = folder.glob("*.json")
    events = json.loads(path.read_text())["traceEvents"]
    return path, {e["name"] for e in events if e.get("name", "").startswith("iteration ")}


FLAGS = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4"


def test_trace_contains_the_requested_iterations(tmp_path):
    messages = run(config(f"{FLAGS} --profile-ranks 0 3 --profile-dir {tmp_path}"), rank=3)
    path, names = read_trace(tmp_path)
    assert path.name == "trace_rank3_iterations3-4.json"
    assert names == {"iteration 3", "iteration 4"}
    assert messages == [f"profile in {path}"]


def test_run_that_ends_inside_the_window_writes_a_trace(tmp_path):
    run(config(f"{FLAGS} --profile-dir {tmp_path}"), iterations=range(1, 4))
    assert read_trace(tmp_path)[1] == {"iteration 3"}


@pytest.mark.parametrize("flags", ["", FLAGS + " --profile-ranks 1"])
def test_unprofiled_ranks_and_runs_write_nothing(tmp_path, flags):
    assert run(config(flags, profile_dir=str(tmp_path))) == []
    assert list(tmp_path.iterdir()) == []


def test_unwritable_profile_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (message,) = run(config(f"{FLAGS} --profile-dir {tmp_path}/file/x"))
    assert "cannot write" in message
    assert "training continues" in message


def test_gpu_only_profiling_is_refused_on_cpu():
    with pytest.raises(ValueError, match="add --use-pytorch-profiler"):
        run(config("--profile"), rank=5)
    with pytest.raises(ValueError, match="--record-memory-history records GPU memory"):
        run(config("--record-memory-history"), rank=5)

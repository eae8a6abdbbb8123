# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the GPU suite: memory, time, and the rows that survive a dead process."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import gpu
from tools.bench import gpu_train, gpu_workers
from tools.bench.harness import Bench
from tools.gpu_stages import Stage, run_stage

ROOT = Path(__file__).parents[2]


def options(**changes) -> argparse.Namespace:
    values = {"rehearse": True, "quick": False, "part": None, "seconds": 60.0, "size": 2}
    return argparse.Namespace(
        **values | {"rounds": 2, "steps": 1, "all": True, "model": "llama"} | changes
    )


WORKER = """
import sys
from tools.bench.turns import serve
name = sys.argv[sys.argv.index("--worker") + 1]
turns = []
def step():
    turns.append(name)
    if name.endswith("bf16") and len(turns) > 3:
        sys.exit(9)
    return 6.0
def facts():
    return {"micro_batch_size": 2, "kernels": [], "peak_device_bytes": 10**9, "steps": len(turns)}
if name.endswith("autocast"):
    sys.exit(7)
serve(lambda: step, facts)
"""


def test_megatron_row_survives_failing_peers(tmp_path, monkeypatch, capfd):
    """One peer dies at its start, one in its second turn; the third one completes."""
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(gpu_workers, "device_bytes", lambda: 85 * 10**9)
    monkeypatch.setattr(gpu_workers, "WORKER", "fake_worker")
    bench = Bench("training", options())
    bench.rates = {"matmul_flops": 1e12}
    model = gpu_train.model_of("llama", rehearse=True)
    gpu_train.llama(bench, options(rehearse=False), *model)
    (speed, memory) = bench.rows
    assert speed["ours"] > 0
    assert memory["ours"] == 1.0
    assert list(speed["peers"]) == ["transformers compiled"]
    assert set(bench.problems) == {"transformers autocast", "transformers bf16"}
    errors = capfd.readouterr().err
    assert "autocast ended with exit code 7" in errors
    assert "bf16 ended with exit code 9" in errors


def test_illegal_access_ends_the_bench_and_keeps_its_rows(tmp_path, monkeypatch):
    """Triton reports an illegal access as RuntimeError; later cases would fail as well."""
    bench = Bench("some", options(part=str(tmp_path / "part.json")))

    def good(bench):
        bench.add("a row", 1.0, unit="ms")

    def lost(bench):
        def wait():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(bench.watch, "wait", wait)
        monkeypatch.setattr(bench, "_free", wait)
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    assert bench.run([("good", good), ("lost", lost), ("never", good)]) == 1
    written = json.loads((tmp_path / "part.json").read_text())
    assert [row["what"] for row in written["rows"]] == ["a row"]
    assert set(written["problems"]) == {"lost", "device"}


def test_failed_tests_are_problems_by_name(tmp_path):
    script = (
        "print('FAILED tests/gpu/test_a.py::test_b[x] - ValueError: no')\n"
        "print('ERROR tests/gpu/test_a.py::test_c')\nraise SystemExit(1)"
    )
    stage = Stage("tests", {"tests": [sys.executable, "-c", script]}, 30.0)
    outcome = run_stage(
        stage, folder=tmp_path, environment=os.environ, deadline=time.monotonic() + 30
    )
    assert outcome.problems == {
        "tests": "failed with exit code 1",
        "tests/gpu/test_a.py::test_b[x]": "ValueError: no",
        "tests/gpu/test_a.py::test_c": "failed",
    }


LOSES_THE_DEVICE = """
import pytest, torch
pytestmark = getattr(pytest.mark, "gpu")
lost = False

def synchronize(device=None):
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = synchronize

@pytest.mark.parametrize("number", range(12))
def test_one(number):
    global lost
    assert not lost, "runs on a device that is lost"
    if number == 3:
        lost = True
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert number != 7
"""


@pytest.mark.slow(seconds=20)
def test_lost_device_ends_its_worker_but_not_the_suite(tmp_path):
    folder = tmp_path / "tests/gpu"
    folder.mkdir(parents=True)
    for name in ("conftest.py", "pytest.ini"):
        (folder / name).write_text((ROOT / "tests/gpu" / name).read_text())
    (folder / "test_lost.py").write_text(LOSES_THE_DEVICE)
    command = gpu.test_command("tests/gpu", "-q", "-p", "xdist", "-n", "2", "--dist", "worksteal")
    environment = {k: v for k, v in gpu.environment().items() if k != "PYTEST_XDIST_WORKER"}
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert "2 failed, 10 passed" in process.stdout, process.stdout + process.stderr
    failed = re.findall(r"^FAILED \S+::(\S+)", process.stdout, re.MULTILINE)
    assert sorted(failed) == ["test_one[3]", "test_one[7]"]
    assert "the device is lost" in process.stdout + process.stderr


@pytest.mark.parametrize("path", ["/bin/true", "/no/such/file", __file__])
def test_invalid_ptxas_path_is_refused(monkeypatch, capsys, path):
    """Otherwise each launch would fail, or Triton would silently use its bundled ptxas."""
    monkeypatch.setenv("TRITON_PTXAS_PATH", path)
    monkeypatch.setattr(gpu, "missing_gpu", lambda: None)
    monkeypatch.setattr(gpu, "run", lambda *_: pytest.fail("the suite was started"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--stages", "tests"])
    assert gpu.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"TRITON_PTXAS_PATH={path}" in line

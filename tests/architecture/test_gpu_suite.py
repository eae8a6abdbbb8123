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
import torch

from megatron.core import ProcessGroupCollection
from tools import gpu
from tools.bench import gpu_engine, gpu_train, gpu_workers, rehearsal
from tools.bench.gpu_train import LLAMA_1_3B
from tools.bench.harness import Bench
from tools.gpu_stages import Stage, run_stage

ROOT = Path(__file__).parents[2]
#: Peaks of a step of 1.34 B weights at 4,096 tokens by microbatch, in GB (allocator, one device).
MEGATRON = {1: 32.3, 2: 39.9, 4: 55.1}
TRANSFORMERS = {1: 34.0, 2: 48.1, 4: 73.4}
IDLE_GB = 27.0
CARDS = {"H200": 150.1, "B200": 191.0, "H100": 85.0, "A100 80 GB": 84.9}


@pytest.mark.parametrize("card", CARDS)
def test_step_fits_in_memory_next_to_an_idle_worker(card):
    """A step at a card's microbatch fits a worker's share, next to the idle worker's states."""
    size, total = gpu_workers.microbatch_for(CARDS[card] * 1e9), CARDS[card]
    share = gpu_workers.memory_share(total * 1e9, LLAMA_1_3B.parameters)
    for peak in (MEGATRON[size], TRANSFORMERS[size]):
        assert peak < share * total, (card, size)
        assert peak + IDLE_GB < total
    if size < 4:
        assert TRANSFORMERS[2 * size] + IDLE_GB > total, "a larger one would fit"


def test_decode_step_bytes_are_weights_and_kv_cache():
    """A token reads one row of the embedding."""
    shape, tokens = gpu_engine.TINY, 12
    config = gpu_engine.config_of("gpt", shape, tiny=True)
    model = gpu_engine.GPTModel(config, ProcessGroupCollection.single(), seed=1)
    context = gpu_engine.SHORTEST_PROMPT + 1 + (tokens + gpu_engine.WARMUP_STEPS) / 2
    head = shape.hidden // shape.heads
    cache = 3 * context * shape.layers * 2 * shape.kv_heads * head
    weights = shape.parameters - shape.vocabulary * shape.hidden
    assert gpu_engine.step_bytes(model, torch.bfloat16, 3, tokens) == 2 * (weights + cache)


def test_microbatch_is_halved_on_out_of_memory():
    sizes, messages = [], []

    def build(size):
        sizes.append(size)

        def step():
            if size > 2:
                raise torch.OutOfMemoryError("no memory")
            return 1.0

        return step

    cpu = torch.device("cpu")
    size, step = gpu_workers.largest_step(8, build, device=cpu, say=messages.append)
    assert (size, sizes, step()) == (2, [8, 4, 2], 1.0)
    assert messages == [
        "microbatch 8: out of memory; takes 4",
        "microbatch 4: out of memory; takes 2",
    ]
    with pytest.raises(ValueError, match="microbatch of 1"):
        gpu_workers.largest_step(1, lambda _: build(8), device=cpu, say=messages.append)


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


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [("3.7.1", "2.5.2", True), ("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False)],
)
def test_rehearsal_refuses_a_broken_interpreter(monkeypatch, capsys, triton, numpy, works):
    """Triton's interpreter before 3.7 fails in every kernel with numpy 2.4 and later."""
    versions = {"triton": triton, "numpy": numpy}
    monkeypatch.setattr(rehearsal.importlib.metadata, "version", versions.__getitem__)
    problem = rehearsal.interpreter_problem()
    assert (problem is None) == works
    if not works:
        assert "numpy" in problem
        assert "2.4.0" in problem
        monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--stages", "tests"])
        assert gpu.main() == 1
        assert problem in capsys.readouterr().err
        with pytest.raises(SystemExit, match="numpy"):
            rehearsal.be_interpreted()

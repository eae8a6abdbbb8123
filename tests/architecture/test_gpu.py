# SPDX-License-Identifier: Apache-2.0
"""`make gpu`: what it runs needs no library but those of a GPU machine, and it says if there is no
GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import gpu, gpu_peers
from tools.bench import gpu_bench, rehearsal
from tools.bench.gpu_results import rows_of

ROOT = Path(__file__).parents[2]
#: What such a machine does not have.
ABSENT = (
    "xxhash tyro rich yaml hypothesis xdist pytest_timeout tensorboard matplotlib pyarrow "
    "sentencepiece tiktoken wandb mlflow"
)
HIDE = """
import sys
from importlib.machinery import PathFinder

class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in %r:
            return None
        return PathFinder.find_spec(name, path, target)

    find_distributions = PathFinder.find_distributions
    invalidate_caches = PathFinder.invalidate_caches

sys.meta_path[:] = [Hiding if f is PathFinder else f for f in sys.meta_path]
"""


def bare(folder: Path, absent: str = ABSENT) -> dict[str, str]:
    """Return the environment of a Python that lacks some libraries, and all pytest plugins."""
    (folder / "sitecustomize.py").write_text(HIDE % absent.split())
    found = {**gpu.environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    kept = {k: v for k, v in found.items() if not k.startswith(("COVERAGE_", "PYTEST_ADDOPTS"))}
    return {**kept, "PYTHONPATH": f"{folder}{os.pathsep}{found['PYTHONPATH']}"}


def run(command, environment, timeout=110):
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_gpu_tests_are_collected_without_optional_libraries(tmp_path):
    done = run(gpu.test_command(gpu.TESTS, "--collect-only", "-q"), bare(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) tests collected", done.stdout)
    assert found, done.stdout
    assert int(found.group(1)) >= 40


def test_every_gpu_test_is_where_make_gpu_looks():
    marked = [p for p in (ROOT / "tests").rglob("*.py") if re.search(r"mark\.gpu\b", p.read_text())]
    others = {p for p in marked if p.parent != ROOT / gpu.TESTS}
    quoted = {ROOT / "tests/unit_tests/support/test_complete.py"}
    ranks_on_gpus = {ROOT / "tests/parity/test_parity.py"}  # make functional-gpu
    assert others == quoted | ranks_on_gpus


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path):
    for words in (["-m", "tools.gpu"], ["-m", "tools.bench.gpu_train"]):
        done = run([sys.executable, *words], bare(tmp_path))
        assert done.returncode == 0
        assert "sees no GPU" in done.stdout
    done = run([sys.executable, "-m", "tools.gpu", "--require-gpu"], bare(tmp_path))
    assert done.returncode == 1
    assert "sees no GPU" in done.stderr


#: Libraries that no test machine has, as far as the suite calls them.
STAND_INS = {
    "fla/ops/gated_delta_rule": """
import torch
from megatron.core.ops.gated_delta_rule import gated_delta_rule
from megatron.core.ops.sequences import Sequences

def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=None):
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = (x[0] for x in (q, k, v, g, beta))
    out, last = gated_delta_rule(*parts, sequences=Sequences(bounds))
    return out[None], last
""",
    "mamba_ssm/ops/triton/ssd_combined": """
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.state_space_dual import state_space_dual

def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size):
    parts = (C[0], B[0], x[0], dt[0].float() * A, dt[0])
    out, _ = state_space_dual(*parts, sequences=Sequences((0, x.shape[1])))
    return out[None]
""",
}


def put_stand_ins(folder: Path) -> None:
    """Let the peers that are raced where they can be imported be importable."""
    for name, text in STAND_INS.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)


def test_peers_that_cannot_be_imported_are_named_with_the_reason(tmp_path):
    put_stand_ins(tmp_path)
    environment = bare(tmp_path)
    found = gpu_peers.refusals(["tests", "kernels"], environment)
    assert found == {"flash-linear-attention": None, "mamba_ssm": None}
    assert gpu_peers.refusals(["tests", "decode"], environment) == {}
    (tmp_path / "fla/__init__.py").write_text("import no_such_library\n")
    (tmp_path / "mamba_ssm/__init__.py").write_text("import time\ntime.sleep(60)\n")
    found = gpu_peers.refusals(["kernels"], environment, seconds=3)
    assert found == {
        "flash-linear-attention": "ModuleNotFoundError: No module named 'no_such_library'",
        "mamba_ssm": "not imported within 3 s",
    }


def test_what_is_documented_of_make_gpu_is_understood():
    texts = [
        (ROOT / name).read_text()
        for name in (
            "Makefile",
            ".github/workflows/gpu.yml",
            "bench_results/README.md",
            "docs/performance.md",
        )
    ]
    found = re.findall(r'GPU_FLAGS=(?:"([^"]+)"|(\S+))', "\n".join(texts))
    assert len(found) >= 6
    for quoted, plain in found:
        gpu.command_line().parse_args((quoted or plain).split())


def test_a_rehearsal_turns_the_interpreter_on(monkeypatch):
    started = []
    monkeypatch.setattr(rehearsal.os, "execve", lambda *words: started.append(words))
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "tools.bench.some", "--rehearse"])
    monkeypatch.setattr(sys, "argv", ["some", "--rehearse"])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu_bench.options_of(argparse.ArgumentParser())
    ((python, command, environment),) = started
    assert [python, command[1:]] == [sys.executable, ["-m", "tools.bench.some", "--rehearse"]]
    assert environment["TRITON_INTERPRET"] == "1"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    gpu_bench.options_of(argparse.ArgumentParser())
    monkeypatch.setattr(sys, "argv", ["some"])
    monkeypatch.delenv("TRITON_INTERPRET")
    gpu_bench.options_of(argparse.ArgumentParser())
    assert len(started) == 1


QUICK = ["-m", "tools.gpu", "--rehearse", "--quick", "--stages", "tests", "kernels"]


def results_of(done, folder) -> dict:
    """Return the one file that a suite has left."""
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    assert f"gpu: written to {path}" in done.stdout
    return json.loads(path.read_text())


@pytest.mark.slow
def test_the_quickest_part_of_a_rehearsal(tmp_path):
    done = run([sys.executable, *QUICK, "--output", str(tmp_path / "out")], bare(tmp_path))
    found = results_of(done, tmp_path / "out")
    assert {name: stage["problems"] for name, stage in found["stages"].items()} == {
        "tests": {},
        "kernels": {},
    }
    assert [row["what"].split()[0] for row in rows_of(found)] == ["RMSNorm", "RMSNorm"]
    assert "RMSNorm" in done.stdout
    first = done.stdout.splitlines()[: len(found["peers"])]
    assert first == [f"gpu: {gpu_peers.said_of(*each)}" for each in found["peers"].items()]
    assert set(found["peers"]) == {"flash-linear-attention", "mamba_ssm"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_can_be_rehearsed_without_other_libraries(tmp_path):
    # transformers, which training races, brings yaml.
    words = ["-m", "tools.gpu", "--rehearse", "--output", str(tmp_path / "out")]
    environment = bare(tmp_path, ABSENT.replace("yaml", ""))
    put_stand_ins(tmp_path)
    done = run([sys.executable, *words], environment, timeout=1700)
    found = results_of(done, tmp_path / "out")
    assert list(found["stages"]) == list(gpu.STAGES)
    assert not any(stage["problems"] for stage in found["stages"].values())
    benches = {row["bench"] for row in rows_of(found)}
    assert benches == {"training", "kernels", "engine", "decode", "hybrid"}
    raced = {peer for row in rows_of(found) for peer in row["peers"]}
    assert raced >= {"fla", "mamba_ssm", "reference", "torch.compile", "SDPA"}
    for op in ("gated delta rule", "state-space dual", "prologue", "paged decode", "hybrid"):
        assert op in done.stdout, op

# SPDX-License-Identifier: Apache-2.0
"""`make gpu` needs only the libraries of a GPU machine and reports a missing GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import gpu, gpu_peers
from tools.bench.results import rows_of

ROOT = Path(__file__).parents[2]
#: Libraries that a GPU machine does not have.
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
    """Return the environment of a Python without the libraries `absent` and without plugins."""
    (folder / "sitecustomize.py").write_text(HIDE % absent.split())
    variables = {**gpu.environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    remaining = {
        k: v for k, v in variables.items() if not k.startswith(("COVERAGE_", "PYTEST_ADDOPTS"))
    }
    return {**remaining, "PYTHONPATH": f"{folder}{os.pathsep}{variables['PYTHONPATH']}"}


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
    process = run(gpu.test_command(gpu.TESTS, "--collect-only", "-q"), bare(tmp_path))
    assert process.returncode == 0, process.stdout + process.stderr
    match = re.search(r"(\d+) tests collected", process.stdout)
    assert match, process.stdout
    assert int(match.group(1)) >= 40


def test_gpu_marked_tests_are_in_the_gpu_folder():
    marked = [p for p in (ROOT / "tests").rglob("*.py") if re.search(r"mark\.gpu\b", p.read_text())]
    outside = {p for p in marked if p.parent != ROOT / gpu.TESTS}
    quoted = {ROOT / "tests/unit_tests/support/test_complete.py"}
    ranks_on_gpus = {ROOT / "tests/parity/test_parity.py"}  # make functional-gpu
    assert outside == quoted | ranks_on_gpus


#: Fakes of libraries that no test machine has, with the functions that the suite calls.
STAND_INS = {
    "fla/ops/gated_delta_rule": """
import torch
from megatron.core.ops.recurrence import gated_delta_rule
from megatron.core.ops.sequences import Sequences

def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=None):
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = (x[0] for x in (q, k, v, g, beta))
    out, last = gated_delta_rule(*parts, sequences=Sequences(bounds))
    return out[None], last
""",
    "mamba_ssm/ops/triton/ssd_combined": """
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.recurrence import state_space_dual

def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size):
    parts = (C[0], B[0], x[0], dt[0].float() * A, dt[0])
    out, _ = state_space_dual(*parts, sequences=Sequences((0, x.shape[1])))
    return out[None]
""",
}


def put_stand_ins(folder: Path) -> None:
    """Make the optional peers importable."""
    for name, text in STAND_INS.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)


def test_documented_gpu_flags_parse():
    texts = [
        (ROOT / name).read_text()
        for name in (
            "Makefile",
            ".github/workflows/gpu.yml",
            "bench_results/README.md",
            "docs/performance.md",
        )
    ]
    documented = re.findall(r'GPU_FLAGS=(?:"([^"]+)"|(\S+))', "\n".join(texts))
    assert len(documented) >= 6
    for quoted, plain in documented:
        gpu.command_line().parse_args((quoted or plain).split())


QUICK = ["-m", "tools.gpu", "--rehearse", "--quick", "--stages", "tests", "kernels"]


def results_of(process, folder) -> dict:
    """Return the report that a suite has written."""
    assert process.returncode == 0, process.stdout + process.stderr
    (path,) = folder.iterdir()
    assert f"gpu: written to {path}" in process.stdout
    return json.loads(path.read_text())


@pytest.mark.slow
def test_quick_rehearsal_runs_tests_and_kernels(tmp_path):
    process = run([sys.executable, *QUICK, "--output", str(tmp_path / "out")], bare(tmp_path))
    report = results_of(process, tmp_path / "out")
    assert {name: stage["problems"] for name, stage in report["stages"].items()} == {
        "tests": {},
        "kernels": {},
    }
    assert [row["what"].split()[0] for row in rows_of(report)] == ["RMSNorm", "RMSNorm"]
    assert "RMSNorm" in process.stdout
    head_lines = process.stdout.splitlines()[: len(report["peers"])]
    assert head_lines == [
        f"gpu: {gpu_peers.said_of(*refusal)}" for refusal in report["peers"].items()
    ]
    assert set(report["peers"]) == {"flash-linear-attention", "mamba_ssm"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_full_rehearsal_runs_without_optional_libraries(tmp_path):
    # transformers, a peer of the training bench, requires yaml.
    words = ["-m", "tools.gpu", "--rehearse", "--output", str(tmp_path / "out")]
    environment = bare(tmp_path, ABSENT.replace("yaml", ""))
    put_stand_ins(tmp_path)
    process = run([sys.executable, *words], environment, timeout=1700)
    report = results_of(process, tmp_path / "out")
    assert list(report["stages"]) == list(gpu.STAGES)
    assert not any(stage["problems"] for stage in report["stages"].values())
    benches = {row["bench"] for row in rows_of(report)}
    assert benches == {"training", "kernels", "engine", "decode", "hybrid"}
    raced = {peer for row in rows_of(report) for peer in row["peers"]}
    assert raced >= {"fla", "mamba_ssm", "reference", "torch.compile", "SDPA"}
    for op in ("gated delta rule", "state-space dual", "prologue", "paged decode", "hybrid"):
        assert op in process.stdout, op

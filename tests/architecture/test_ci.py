# SPDX-License-Identifier: Apache-2.0
"""The workflows have the jobs that branch protection counts on, and call commands that exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github/workflows"
JOBS = {
    "lint",
    "unit-cpu",
    "dist-cpu",
    "functional-cpu",
    "wheel",
    "unit-gpu",
    "functional-gpu",
}
GPU_JOBS = {"unit-gpu", "functional-gpu"}


def workflow(name: str) -> dict:
    """Return a parsed workflow; YAML reads its key `on` as the truth value."""
    parsed = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    parsed["on"] = parsed.pop(True)
    return parsed


def steps(parsed: dict) -> list[dict]:
    """Return the steps of all jobs."""
    return [step for job in parsed["jobs"].values() for step in job["steps"]]


def make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_a_change_runs_these_jobs() -> None:
    ci = workflow("ci.yml")
    assert set(ci["jobs"]) == JOBS | {"required"}
    assert set(ci["on"]) == {"pull_request", "merge_group", "push"}
    assert "labeled" in ci["on"]["pull_request"]["types"]
    assert ci["on"]["push"] == {"branches": ["main"]}
    required = ci["jobs"]["required"]
    assert set(required["needs"]) == JOBS
    assert required["if"] == "always()"


def test_gpu_jobs_wait_for_the_queue_or_a_label() -> None:
    jobs = workflow("ci.yml")["jobs"]
    for name in GPU_JOBS:
        assert "merge_group" in jobs[name]["if"]
        assert "'run-gpu'" in jobs[name]["if"]
        assert "self-hosted" in jobs[name]["runs-on"]
    assert not any("if" in jobs[name] for name in JOBS - GPU_JOBS)


def test_every_night_runs_these_jobs() -> None:
    nightly = workflow("nightly.yml")
    assert set(nightly["jobs"]) == {"test-all", "coverage", "soak", "torch-2-10"}
    assert "schedule" in nightly["on"]


@pytest.mark.parametrize("name", ["ci.yml", "nightly.yml"])
def test_workflows_call_what_exists_and_may_do_little(name: str) -> None:
    parsed = workflow(name)
    commands = [step["run"] for step in steps(parsed) if "run" in step]
    called = {m[1] for c in commands for m in re.finditer(r"\bmake ([a-z-]+)", c)}
    assert called
    assert called <= make_targets()
    folders = {w for c in commands for w in re.findall(r"\b(?:tests|experimental)[\w/]*", c)}
    assert all((ROOT / folder).is_dir() for folder in folders), folders
    assert parsed["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in parsed["jobs"].values())
    uses = [step["uses"] for step in steps(parsed) if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", use) for use in uses), uses


@pytest.mark.parametrize(
    ("event", "results", "passes"),
    [
        ("pull_request", {}, True),
        ("pull_request", {"unit-gpu": "skipped", "functional-gpu": "skipped"}, True),
        ("merge_group", {}, True),
        ("merge_group", {"unit-gpu": "skipped"}, False),
        ("pull_request", {"unit-gpu": "failure"}, False),
        ("pull_request", {"unit-cpu": "skipped"}, False),
        ("push", {"lint": "cancelled"}, False),
    ],
)
def test_required_judges_the_other_jobs(event: str, results: dict, passes: bool) -> None:
    (step,) = workflow("ci.yml")["jobs"]["required"]["steps"]
    needs = {name: {"result": results.get(name, "success")} for name in JOBS}
    environment = {**os.environ, "NEEDS": json.dumps(needs), "EVENT": event}
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], env=environment, capture_output=True, timeout=60
    )
    assert (done.returncode == 0) == passes, done.stderr


def test_every_part_of_core_has_an_owner() -> None:
    lines = (ROOT / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    owned = {line.split()[0].rstrip("/") for line in lines if line.startswith("/")}
    core = ROOT / "megatron_core/megatron/core"
    parts = {p for p in core.iterdir() if p.is_dir() or p.suffix == ".py"}
    parts = {f"/{p.relative_to(ROOT).as_posix()}" for p in parts if not p.name.startswith("__")}
    assert parts <= owned, parts - owned

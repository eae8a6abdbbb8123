# SPDX-License-Identifier: Apache-2.0
"""The workflows define the jobs that branch protection requires, and call existing commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tools import gpu

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github/workflows"


def workflow(name: str) -> dict:
    """Return a parsed workflow; YAML reads the key `on` as True."""
    parsed = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    parsed["on"] = parsed.pop(True)
    return parsed


def steps(parsed: dict) -> list[dict]:
    """Return the steps of all jobs."""
    return [step for job in parsed["jobs"].values() for step in job.get("steps", [])]


def make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_privileged_jobs_start_only_by_a_maintainer() -> None:
    """GPU machines run only the merge queue and labelled changes; few tokens may write."""
    ci, label, drop, release = (
        workflow(f"{name}.yml") for name in ("ci", "gpu-label", "drop-gpu-label", "release")
    )
    assert ci["jobs"]["gpu"]["if"] == "github.event_name == 'merge_group'"
    assert label["on"] == {"pull_request": {"types": ["labeled"]}}
    assert label["jobs"]["gpu"]["if"] == "github.event.label.name == 'run-gpu'"
    assert "synchronize" in drop["on"]["pull_request_target"]["types"]
    assert not any("uses" in step for step in steps(drop)), "it checks out no code"
    assert (drop["permissions"], release["permissions"]) == ({}, {"contents": "read"})
    assert "permissions" not in release["jobs"]["build"]


def test_gpu_jobs_fail_without_a_gpu(tmp_path: Path) -> None:
    """Each job runs its tests with the Python of `make venv`, and the tests need a GPU.

    This test runs each job's command with a torch that sees no GPU, and without torch.
    """
    without_torch = tmp_path / "bin/python"
    without_torch.parent.mkdir()
    without_torch.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    without_torch.chmod(0o755)
    commands = [step.get("run", "") for step in steps(workflow("gpu.yml"))]
    stages = re.findall(r"--stages ([a-z ]+)", " ".join(commands))
    assert sorted(" ".join(stages).split()) == sorted(gpu.STAGES), "a stage runs in no job"
    for name, job in workflow("gpu.yml")["jobs"].items():
        (setup, suite) = [step["run"] for step in job["steps"] if "run" in step]
        assert setup in {"make venv", "make pretrain"}
        assert "PYTHON=.venv/bin/python" in suite
        for python in (sys.executable, str(without_torch)):
            process = subprocess.run(
                ["bash", "-e", "-c", suite.replace(".venv/bin/python", python)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT, capture_output=True,
                text=True, timeout=60,
            )  # fmt: skip
            assert process.returncode != 0, (name, python, process.stdout)
            missing = "pytest" if "functional" in suite and python != sys.executable else "GPU"
            assert missing in process.stderr, (name, python, process.stderr)


def test_nightly_covers_every_test_folder() -> None:
    jobs = workflow("nightly.yml")["jobs"]
    named = " ".join(jobs["test-all"]["strategy"]["matrix"]["tests"]).split()
    shards = jobs["parity"]["strategy"]["matrix"]["part"]
    (command,) = [s["run"] for s in jobs["parity"]["steps"] if "run" in s]
    assert f"--part ${{{{ matrix.part }}}}/{len(shards)}" in command
    assert shards == list(range(1, len(shards) + 1))
    for name in ("test-all", "parity", "coverage", "torch-2-10"):
        command = next(s["run"] for s in jobs[name]["steps"] if "run" in s)
        assert "-p tests.support.complete" in command, "a run that leaves tests out would pass"
    assert any(step.get("run") == "make clients" for step in jobs["clients"]["steps"])
    run = {*named, "tests/parity", "tests/gpu", "tests/clients"}
    for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("experimental/**/test_*.py")]:
        folders = {str(folder) for folder in path.relative_to(ROOT).parents}
        assert len(folders & run) == 1, path


@pytest.mark.parametrize(
    "name", sorted(path.name for path in WORKFLOWS.glob("*.yml")), ids=lambda name: name
)
def test_actions_are_pinned_and_persist_no_token(name: str) -> None:
    text = (WORKFLOWS / name).read_text(encoding="utf-8")
    lines = [line for line in re.findall(r"uses: (.*)", text) if not line.startswith("./")]
    pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
    assert all(re.fullmatch(pinned, line) for line in lines), lines
    for step in steps(workflow(name)):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_branch_protection_requires_an_existing_job() -> None:
    ruleset = json.loads((WORKFLOWS.parent / "rulesets/main.json").read_text(encoding="utf-8"))
    rules = {rule["type"]: rule.get("parameters", {}) for rule in ruleset["rules"]}
    assert ruleset["enforcement"] == "active"
    assert {"deletion", "non_fast_forward", "pull_request", "merge_queue"} <= set(rules)
    assert rules["pull_request"]["require_code_owner_review"] is True
    assert rules["pull_request"]["dismiss_stale_reviews_on_push"] is True
    checks = rules["required_status_checks"]["required_status_checks"]
    jobs = workflow("ci.yml")["jobs"]
    assert [check["context"] for check in checks] == ["required"]
    assert {"required", *jobs["required"]["needs"]} == set(jobs)
    assert jobs["required"]["if"] == "always()"
    running = [*jobs.values(), *workflow("gpu.yml")["jobs"].values()]
    slowest = max(job["timeout-minutes"] for job in running if "uses" not in job)
    timeout = rules["merge_queue"]["check_response_timeout_minutes"]
    assert timeout >= slowest + jobs["required"]["timeout-minutes"]


@pytest.mark.parametrize(("tag", "passes"), [("right", True), ("v9.9.9", False)])
def test_release_tag_must_match_the_version(tag: str, passes: bool) -> None:
    (step,) = [s for s in steps(workflow("release.yml")) if "the tag is" in s.get("name", "")]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ref = f"v{version.split('!')[-1]}" if tag == "right" else tag
    environment = {**os.environ, "GITHUB_REF_NAME": ref}
    process = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        env=environment, cwd=ROOT, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (process.returncode == 0) == passes, process.stderr


@pytest.mark.parametrize("name", ["ci.yml", "gpu.yml", "nightly.yml"])
def test_workflows_call_existing_targets_with_read_permission(name: str) -> None:
    parsed = workflow(name)
    commands = [step["run"] for step in steps(parsed) if "run" in step]
    called = {m[1] for c in commands for m in re.finditer(r"\bmake ([a-z-]+)", c)}
    assert called
    assert called <= make_targets()
    folders = {w for c in commands for w in re.findall(r"\b(?:tests|experimental)[\w/]*", c)}
    assert all((ROOT / folder).is_dir() for folder in folders), folders
    assert parsed["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job or "uses" in job for job in parsed["jobs"].values())


@pytest.mark.parametrize(
    ("event", "results", "passes"),
    [
        ("pull_request", {}, True),
        ("pull_request", {"gpu": "skipped"}, True),
        ("merge_group", {}, True),
        ("merge_group", {"gpu": "skipped"}, False),
        ("pull_request", {"gpu": "failure"}, False),
        ("pull_request", {"unit-cpu": "skipped"}, False),
        ("push", {"lint": "cancelled"}, False),
    ],
)
def test_required_job_fails_if_another_job_fails(event: str, results: dict, passes: bool) -> None:
    required = workflow("ci.yml")["jobs"]["required"]
    (step,) = required["steps"]
    needs = {name: {"result": results.get(name, "success")} for name in required["needs"]}
    environment = {**os.environ, "NEEDS": json.dumps(needs), "EVENT": event}
    process = subprocess.run(
        ["bash", "-e", "-c", step["run"]], env=environment, capture_output=True, timeout=60
    )
    assert (process.returncode == 0) == passes, process.stderr


def test_every_core_module_has_an_owner() -> None:
    lines = (ROOT / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    owned = {line.split()[0].rstrip("/") for line in lines if line.startswith("/")}
    core = ROOT / "megatron_core/megatron/core"
    modules = {p for p in core.iterdir() if p.is_dir() or p.suffix == ".py"}
    modules = {f"/{p.relative_to(ROOT).as_posix()}" for p in modules if not p.name.startswith("__")}
    assert modules <= owned, modules - owned

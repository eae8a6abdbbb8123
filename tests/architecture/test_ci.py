# SPDX-License-Identifier: Apache-2.0
"""The workflows have the jobs that branch protection counts on, and call commands that exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
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
    """The label counts when it is set, so commits pushed after it do not run on our machines."""
    jobs = workflow("ci.yml")["jobs"]
    for name in GPU_JOBS:
        queue, label = " ".join(jobs[name]["if"].split()).split(" || ")
        assert queue == "github.event_name == 'merge_group'"
        assert label.strip("()").split(" && ") == [
            "github.event.action == 'labeled'",
            "github.event.label.name == 'run-gpu'",
        ]
        assert "self-hosted" in jobs[name]["runs-on"]
    assert not any("if" in jobs[name] for name in JOBS - GPU_JOBS)


def test_every_night_runs_these_jobs() -> None:
    nightly = workflow("nightly.yml")
    tested = {"test-all", "parity", "coverage", "torch-2-10"}
    assert set(nightly["jobs"]) == tested | {"status", "soak"}
    assert "schedule" in nightly["on"]
    for name in tested:
        (command,) = [s["run"] for s in nightly["jobs"][name]["steps"] if "run" in s]
        assert "-p tests.support.complete" in command, "what leaves tests out would pass"
    assert set(nightly["jobs"]["status"]["needs"]) == {"test-all", "parity"}


def test_every_night_runs_every_folder_of_tests() -> None:
    jobs = workflow("nightly.yml")["jobs"]
    named = " ".join(jobs["test-all"]["strategy"]["matrix"]["tests"]).split()
    parts = jobs["parity"]["strategy"]["matrix"]["part"]
    (command,) = [s["run"] for s in jobs["parity"]["steps"] if "run" in s]
    assert f"--part ${{{{ matrix.part }}}}/{len(parts)}" in command
    assert parts == list(range(1, len(parts) + 1))
    run = {*named, "tests/parity", "tests/gpu"}
    for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("experimental/**/test_*.py")]:
        folders = {str(folder) for folder in path.relative_to(ROOT).parents}
        assert len(folders & run) == 1, path


def test_new_commits_drop_the_gpu_label() -> None:
    """With a token that may write, so no code of the pull request is checked out."""
    drop = workflow("drop-gpu-label.yml")
    assert "synchronize" in drop["on"]["pull_request_target"]["types"]
    assert drop["permissions"] == {}
    assert drop["jobs"]["drop"]["permissions"] == {"pull-requests": "write"}
    assert not any("uses" in step for step in steps(drop))
    assert any("--remove-label run-gpu" in step["run"] for step in steps(drop))


@pytest.mark.parametrize(
    "name", sorted(path.name for path in WORKFLOWS.glob("*.yml")), ids=lambda name: name
)
def test_actions_are_pinned_and_leave_no_token(name: str) -> None:
    text = (WORKFLOWS / name).read_text(encoding="utf-8")
    lines = re.findall(r"uses: (.*)", text)
    pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
    assert all(re.fullmatch(pinned, line) for line in lines), lines
    for step in steps(workflow(name)):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_branch_protection_asks_for_the_job_that_exists() -> None:
    ruleset = json.loads((WORKFLOWS.parent / "rulesets/main.json").read_text(encoding="utf-8"))
    rules = {rule["type"]: rule.get("parameters", {}) for rule in ruleset["rules"]}
    assert ruleset["enforcement"] == "active"
    assert {"deletion", "non_fast_forward", "pull_request", "merge_queue"} <= set(rules)
    assert rules["pull_request"]["require_code_owner_review"] is True
    assert rules["pull_request"]["dismiss_stale_reviews_on_push"] is True
    checks = rules["required_status_checks"]["required_status_checks"]
    jobs = workflow("ci.yml")["jobs"]
    assert [check["context"] for check in checks] == ["required"]
    slowest = max(jobs[name]["timeout-minutes"] for name in JOBS)
    waited = rules["merge_queue"]["check_response_timeout_minutes"]
    assert waited >= slowest + jobs["required"]["timeout-minutes"]


@pytest.mark.parametrize(("tag", "passes"), [("right", True), ("v9.9.9", False)])
def test_a_release_is_of_the_version_that_its_tag_names(tag: str, passes: bool) -> None:
    (step,) = [s for s in steps(workflow("release.yml")) if "the tag is" in s.get("name", "")]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ref = f"v{version.split('!')[-1]}" if tag == "right" else tag
    environment = {**os.environ, "GITHUB_REF_NAME": ref}
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        env=environment, cwd=ROOT, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode == 0) == passes, done.stderr


def test_only_publishing_may_write() -> None:
    release = workflow("release.yml")
    assert release["on"] == {"push": {"tags": ["v*"]}}
    assert release["permissions"] == {"contents": "read"}
    assert "permissions" not in release["jobs"]["build"]
    assert set(release["jobs"]["publish"]["permissions"]) == {
        "contents",
        "id-token",
        "attestations",
    }
    attested = [s["uses"].split("@")[0] for s in steps(release) if "attest" in s.get("uses", "")]
    assert attested == ["actions/attest-build-provenance", "actions/attest-sbom"]


def test_forms_for_issues_and_pull_requests_parse() -> None:
    folder = WORKFLOWS.parent
    for path in sorted((folder / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form)
    asked = (folder / "pull_request_template.md").read_text(encoding="utf-8").lower()
    for word in ("unit", "functional", "typing", "docs", "format", "issue"):
        assert re.search(rf"- \[ \] .*\b{word}", asked), word
    ecosystems = yaml.safe_load((folder / "dependabot.yml").read_text(encoding="utf-8"))["updates"]
    assert {e["package-ecosystem"] for e in ecosystems} == {"github-actions", "pip"}


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

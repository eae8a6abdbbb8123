# SPDX-License-Identifier: Apache-2.0
"""The set-up commands print help, pin their installs and refuse unsupported machines."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, Requirement]:
    """Return the pinned requirement of every package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): r for r in requirements}


def requested_packages() -> set[str]:
    """Return the packages that make venv requests: dependencies and the chosen extras."""
    script = (ROOT / "tools/make_venv.sh").read_text(encoding="utf-8")
    extras = re.search(r"'\.\[([\w,]+)\]'", script)[1].split(",")
    names = set()
    for project in (ROOT / "pyproject.toml", ROOT / "megatron_core/pyproject.toml"):
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        offered = table["optional-dependencies"]
        groups = [table["dependencies"], *(offered[e] for e in extras if e in offered)]
        names |= {canonicalize_name(Requirement(t).name) for group in groups for t in group}
    return names - {"megatron-core"}


def test_all_transitive_dependencies_are_pinned() -> None:
    pinned = pins()
    assert all(re.fullmatch(r"==[\w.]+", str(r.specifier)) for r in pinned.values())
    todo, seen = list(requested_packages() | {"setuptools"}), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        assert name in pinned, f"{name} is installed unpinned: add it to constraints.txt"
        for text in importlib.metadata.distribution(name).requires or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(need.name))
        # CUDA builds of torch require further libraries, at versions that torch pins.
        todo = [n for n in todo if not n.startswith(("nvidia-", "cuda-"))]
    assert set(pinned) - seen <= {"triton"}, "pinned, but needed by nothing"


def test_distributions_share_version_and_licence() -> None:
    tables = [
        tomllib.loads((ROOT / p / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for p in (".", "megatron_core")
    ]
    assert tables[0]["version"] == tables[1]["version"]
    assert f"megatron-core=={tables[1]['version']}" in tables[0]["dependencies"]
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "megatron_core/LICENSE").read_bytes()


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """Return a folder for PATH with the shell's tools but no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "grep", "rm", "touch"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def make_venv(path: Path, cwd: Path, python: str = "") -> subprocess.CompletedProcess[str]:
    """Run the set-up script with `path` as the whole PATH."""
    environment = {"PATH": str(path), "PYTHON": python, "TORCH_VERSION": "2.13.0"}
    return subprocess.run(
        ["/bin/sh", str(ROOT / "tools/make_venv.sh")],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_missing_python_is_reported_in_one_line(bare_path: Path, tmp_path: Path) -> None:
    process = make_venv(bare_path, tmp_path)
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert "Python 3.11 or 3.12" in process.stderr
    assert "make PYTHON=" in process.stderr
    assert not (tmp_path / ".venv").exists()


def test_wrong_python_is_refused_and_missing_compiler_reported(
    bare_path: Path, tmp_path: Path
) -> None:
    (bare_path / "python3.10").write_text("#!/bin/sh\nexit 1\n")
    (bare_path / "python3.10").chmod(0o755)
    process = make_venv(bare_path, tmp_path, python="python3.10")
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert "PYTHON=python3.10" in process.stderr

    # A suitable Python without the venv module, and no C compiler.
    fits = bare_path / "python3.11"
    fits.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n')
    fits.chmod(0o755)
    process = make_venv(bare_path, tmp_path)
    assert process.returncode == 1
    assert "no C compiler" in process.stdout
    assert "lacks the venv module" in process.stderr


def test_help_lists_every_public_target() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    process = subprocess.run(
        ["make", "-s"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    listed = set(re.findall(r"^  make ([a-z-]+)", process.stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert listed == set(phony[1].split())
    assert {"pretrain", "test", "venv", "lint", "test-all", "bench", "soak", "help"} <= listed

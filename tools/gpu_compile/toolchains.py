# SPDX-License-Identifier: Apache-2.0
"""The releases of Triton and of ptxas that kernels are compiled with, installed from PyPI.

Each has a separate folder under build/gpu-compile, so none replaces the Triton of the environment.
An existing folder is reused.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Triton of CUDA builds of torch 2.11; the pinned release is constraints.txt's.
OTHER_TRITONS = ("3.6.0",)
#: ptxas by CUDA release: 12.8.93 and 13.1.80 come with Triton 3.7.1, 13.0.88 with torch 2.11.
ASSEMBLERS: Mapping[str, str] = {
    "12.8": "nvidia-cuda-nvcc-cu12==12.8.93",
    "13.0": "nvidia-cuda-nvcc==13.0.88",
    "13.1": "nvidia-cuda-nvcc==13.1.80",
}
Run = Callable[..., subprocess.CompletedProcess]


class MissingToolError(Exception):
    """A release cannot be installed or does not run; the message says what to do."""


@dataclass(frozen=True)
class Toolchains:
    """The installed releases.

    Args:
        tritons: the folder to put first on PYTHONPATH by release; None is the environment's own.
        assemblers: the ptxas programs by CUDA release.
    """

    tritons: Mapping[str, Path | None]
    assemblers: Mapping[str, Path]


def pinned_triton(root: Path = ROOT) -> str:
    """Return the release of Triton that constraints.txt pins."""
    text = (root / "constraints.txt").read_text("utf-8")
    return re.search(r"^triton==(\S+)", text, re.MULTILINE)[1]


def installed(folder: Path, *, run: Run = subprocess.run) -> Toolchains:
    """Install missing releases under `folder` and return all.

    Args:
        folder: install folder, usually build/gpu-compile.
        run: `subprocess.run` or a stand-in.

    Raises:
        MissingToolError: a release cannot be installed, or its program does not run.
    """
    pinned = pinned_triton()
    tritons: dict[str, Path | None] = {pinned: None}
    for release in OTHER_TRITONS:
        tritons[release] = _install(folder / f"triton-{release}", f"triton=={release}", run)
        if not (tritons[release] / "triton/__init__.py").is_file():
            raise MissingToolError(f"no Triton in {tritons[release]}: delete the folder, run again")
    completed = run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.stdout.strip() != pinned:
        raise MissingToolError(
            f"this environment has Triton {completed.stdout.strip() or 'absent'}, not the pinned"
            f" {pinned}: pip install -c constraints.txt triton=={pinned}"
        )
    assemblers = {}
    for release, requirement in ASSEMBLERS.items():
        target = _install(folder / f"ptxas-{release}", requirement, run)
        assemblers[release] = _ptxas(target, release, run)
    return Toolchains(tritons, assemblers)


def _install(target: Path, requirement: str, run: Run) -> Path:
    """Install a wheel into a folder, unless the folder exists."""
    if target.is_dir():
        return target
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    process = run([*command, str(target), requirement], capture_output=True, text=True, check=False)
    if process.returncode:
        raise MissingToolError(
            f"{requirement} cannot be installed: with a network, pip install --no-deps --target"
            f" {target} {requirement}"
        )
    return target


def _ptxas(target: Path, release: str, run: Run) -> Path:
    """Return the ptxas in a folder.

    Raises:
        MissingToolError: there is none, or it is of another release.
    """
    path = next(iter(sorted(target.glob("nvidia/*/bin/ptxas"))), None)
    if path is None:
        raise MissingToolError(f"no ptxas in {target}: delete the folder and run again")
    path.chmod(0o755)  # zip archives lose the bit
    text = run([str(path), "--version"], capture_output=True, text=True, check=False).stdout
    if f"release {release}," not in text:
        raise MissingToolError(f"{path} is not ptxas {release}: delete {target} and run again")
    return path

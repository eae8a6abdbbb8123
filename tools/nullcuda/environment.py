# SPDX-License-Identifier: Apache-2.0
"""The environment of the null device: a Python with torch's CUDA wheel, which needs no GPU."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/nullcuda"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
#: The CPU builds of torch that other indices have would be of no use.
INDEX = "https://pypi.org/simple"
PYTHONS = ("python3.12", "python3.11", "python3", sys.executable)
#: What the environment takes, with what pip unpacks meanwhile.
NEEDED_BYTES = 9 << 30


class SetupError(Exception):
    """The null device cannot be built on this machine; the message says what to do."""


def check_machine(
    *,
    system: str = platform.system(),
    machine: str = platform.machine(),
    programs: Sequence[str] = ("gcc", "nm"),
) -> None:
    """Raise SetupError where the null device cannot be built.

    Args:
        system, machine: of this computer, as `platform` names them.
        programs: that must be found.
    """
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupError(
            f"the null device needs torch's CUDA wheel, and {system} on {machine} has none: "
            "run it on Linux on x86-64"
        )
    for program in programs:
        if shutil.which(program) is None:
            raise SetupError(
                f"{program} is not on the PATH: install a C compiler and binutils "
                "(Debian: apt-get install gcc binutils)"
            )


def check_disk(folder: Path, free_bytes: int | None = None) -> None:
    """Raise SetupError unless a folder has room for the environment."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{folder} has {free / 1e9:.1f} GB free, and torch's CUDA wheel takes "
            f"{NEEDED_BYTES / 1e9:.1f} GB: free some, or make build/nullcuda a link to another disk"
        )


def supported_python() -> str:
    """Return a Python 3.12, else 3.11, by which the environment is made.

    Raises:
        SetupError: there is none.
    """
    code = "import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))"
    for name in (os.environ.get("NULLCUDA_PYTHON", ""), *PYTHONS):
        path = shutil.which(name) if name else None
        if path and subprocess.run([path, "-c", code], capture_output=True).returncode == 0:
            return path
    raise SetupError(
        "found no Python 3.12 or 3.11 with the venv module: install one, or name it "
        "(make gpu-null PYTHON=/path/to/python3.12)"
    )


def build_environment(folder: Path = FOLDER) -> Path:
    """Make the environment once for each list of requirements; return its Python.

    Raises:
        SetupError: no Python, no room, or a package that cannot be had.
    """
    venv = folder / "venv"
    python, stamp = venv / "bin/python", folder / "installed.txt"
    version = REQUIREMENTS.read_text(encoding="utf-8")
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == version:
        return python
    check_disk(folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"gpu-null: installing torch's CUDA wheel into {venv} (3 GB to download) ...", flush=True)
    if not python.exists():
        subprocess.run([supported_python(), "-m", "venv", str(venv)], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--index-url", INDEX]
    process = subprocess.run([*command, "-r", str(REQUIREMENTS)])
    if process.returncode:
        raise SetupError(
            f"pip could not install {REQUIREMENTS.relative_to(ROOT)} (see above): "
            f"is {INDEX} reachable, and is there room in {folder}?"
        )
    stamp.write_text(version, encoding="utf-8")
    return python


def site_packages(python: Path) -> Path:
    """Return the folder of an environment that holds its packages."""
    (folder,) = (python.parents[1] / "lib").glob("python3.*/site-packages")
    return folder


def device_environment(
    library: Path, *, memory_bytes: int, compiles: bool = False, cache: Path | None = None
) -> dict[str, str]:
    """Return the environment of a process that runs over the null device.

    Args:
        library: the stand-in for CUDA's libraries.
        memory_bytes: memory of the device.
        compiles: let Triton compile launched kernels; otherwise kernels are launched uncompiled.
        cache: folder of compiled kernels.
    """
    site = Path(__file__).with_name("site")
    paths = [str(site), str(ROOT), str(ROOT / "megatron_core")]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST"))
    }
    environment |= {
        "NULLCUDA_LIBRARY": str(library),
        "LD_PRELOAD": ":".join(map(str, (library, *library.parent.glob("libnvrtc.*")))),
        "LD_LIBRARY_PATH": str(library.parent),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NULLCUDA_BYTES": str(memory_bytes),
        # Kernels that torch would compile by itself must not stay where a GPU finds them.
        "USE_PYTORCH_KERNEL_CACHE": "0",
        "TRITON_LIBCUDA_PATH": str(library.parent),
    }
    if compiles:
        environment["NULLCUDA_COMPILES"] = "1"
        # Triton finds no kernel again that another ptxas assembled.
        if "TRITON_PTXAS_PATH" in os.environ:
            environment["TRITON_PTXAS_PATH"] = os.environ["TRITON_PTXAS_PATH"]
        environment["TRITON_STORE_BINARY_ONLY"] = "1"
        environment["TRITON_CACHE_DIR"] = str(cache or FOLDER / "triton")
    return environment

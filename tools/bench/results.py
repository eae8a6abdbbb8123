# SPDX-License-Identifier: Apache-2.0
"""One file of results per device and day: figures of `make gpu`, the machine, and open targets.

    {"when", "machine": {...}, "peers": {name: why it cannot be imported, or null},
     "stages": {name: {"when", "seconds", "commands", "problems", "rates",
                       "rows": [Row], "kernels"}}}

Stages of separate runs on one day share one file; a repeated stage replaces its results.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from tools.bench.table import Row, format_table, open_targets, rates_text
from tools.gpu_peers import said_of

#: Whose versions a reader needs, those of peers too; the names of their distributions.
PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "pytest")
PEERS = ("flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d")
KERNELS_SHOWN = 12


def machine() -> dict[str, str]:
    """Return the machine and the versions of a measurement."""
    description = {"device": platform.processor() or "cpu", "python": platform.python_version()}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        description |= {
            "device": torch.cuda.get_device_name(),
            "capability": f"{major}.{minor}",
            "cuda": torch.version.cuda or "",
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": driver_version(),
        }
    description["ptxas"] = ptxas_version()
    for package in (*PACKAGES, *PEERS):
        try:
            description[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in PACKAGES:
                description[package] = "absent"
    return description


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(command) or "unknown"


def ptxas_version() -> str:
    """Return the version of the assembler that Triton calls, or "absent".

    Triton uses `TRITON_PTXAS_PATH` if set, else the assembler in its package. The assembler's
    bugs depend on its own version, not on Triton's.
    """
    spec = importlib.util.find_spec("triton")
    paths = [os.environ.get("TRITON_PTXAS_PATH")]
    if spec is not None and spec.origin is not None:
        paths.append(str(Path(spec.origin).parent / "backends/nvidia/bin/ptxas"))
    versions = (program_version(path) for path in paths if path)
    return next((version for version in versions if version), "absent")


def program_version(ptxas: str) -> str | None:
    """Return the version of a ptxas, or None if the file is no ptxas: Triton then uses its own."""
    version = re.search(r"release .*V([\d.]+)", _output([ptxas, "--version"]))
    return version[1] if version else None


def _output(command: list[str]) -> str:
    """Return the output of a command, or "" if it cannot run."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).strip().splitlines()), "").strip()


def joined(
    ended: Mapping[str, dict],
    stage_folder: Path,
    folder: Path,
    *,
    peers: Mapping[str, str | None] | None = None,
) -> tuple[Path, dict]:
    """Merge outcomes and figures of stages into the file of this device and day.

    Args:
        ended: "when", "seconds", "commands" and "problems" of each stage.
        parts: folder with what each bench left.
        folder: of the results.
        peers: the reason why each peer cannot be imported; None if it can.

    Returns:
        (the file, its content).
    """
    about = machine()
    when = max(stage["when"] for stage in ended.values())
    device = "-".join(about["device"].split()).lower()
    path = folder / f"{device}-{when[:10]}.json"
    results = json.loads(path.read_text("utf-8")) if path.is_file() else {"stages": {}}
    results |= {"when": when, "machine": about}
    results["peers"] = results.get("peers", {}) | dict(peers or {})
    for name, stage in ended.items():
        stage_file = stage_folder / f"{name}.json"
        left = json.loads(stage_file.read_text("utf-8")) if stage_file.is_file() else {}
        problems = stage["problems"] | left.pop("problems", {})
        results["stages"][name] = stage | left | {"problems": problems}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return path, results


def rows_of(results: Mapping) -> list[Row]:
    """Return the rows of all stages."""
    return [row for stage in results["stages"].values() for row in stage.get("rows", [])]


def text_of(results: Mapping) -> str:
    """Return the results as Markdown: the table, stage outcomes and open targets."""
    about, rows = results["machine"], rows_of(results)
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name != "device")
    lines = [f"## {about['device']}, {results['when'][:10]}", "", versions + "."]
    for peer, refusal in results.get("peers", {}).items():
        lines += ["", f"{said_of(peer, refusal)}."]
    for name, stage in results["stages"].items():
        rates = rates_text(stage.get("rates", {}))
        if rates:
            lines += ["", f"While `{name}` ran, the device {rates}: rooflines are made of these."]
    lines += ["", format_table(rows)] if rows else ["", "No bench has run."]
    lines += ["", "| stage | seconds | commands | problems |", "|---|---|---|---|"]
    for name, stage in results["stages"].items():
        problems = "; ".join(f"{what}: {why}" for what, why in stage["problems"].items())
        lines.append(
            f"| {name} | {stage['seconds']:g} | {stage['commands']} | "
            f"{problems.replace('|', '/') or 'none'} |"
        )
    still = open_targets(rows)
    if still:
        lines += ["", "Open, because nothing was measured for it:", "", *(f"- {x}" for x in still)]
    for stage in results["stages"].values():
        for title, kernels in stage.get("kernels", {}).items():
            lines += ["", *_kernels(title, kernels)]
    return "\n".join(lines) + "\n"


def _kernels(title: str, kernels: list[dict]) -> list[str]:
    """Return where a step spends its time, as a table."""
    lines = [f"Where {title} spends its time:", "", "| ms | share | calls | kernel |"]
    lines.append("|---|---|---|---|")
    for row in kernels[:KERNELS_SHOWN]:
        kernel = row["kernel"].replace("|", "/")[:90]
        lines.append(f"| {row['ms']:.3f} | {row['share']:.1%} | {row['calls']:g} | `{kernel}` |")
    return lines

# SPDX-License-Identifier: Apache-2.0
"""Run measured steps, tests of GPUs and GPU benches over a CUDA device that computes nothing.

python -m tools.nullcuda                            everything
python -m tools.nullcuda --only steps tests         some parts
python -m tools.nullcuda --only steps --record      put the measured steps on record
python -m tools.nullcuda --cache FILE               compile as well; pack what Triton compiled

See the docstring of tools/nullcuda/__init__.py. Needs Linux on x86-64 and a C compiler; the first
run downloads torch's CUDA wheel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tools.gpu import BENCHES
from tools.nullcuda import record, triton_cache
from tools.nullcuda.environment import (
    FOLDER,
    ROOT,
    SetupError,
    build_environment,
    check_machine,
    device_environment,
    site_packages,
)
from tools.nullcuda.libraries import build_library

PARTS = ("steps", "tests", "runs", *BENCHES)
#: Tests of whole runs on GPUs have this mark.
RUNS, RUNS_MARK = ROOT / "tests/functional_tests", "pytest.mark.gpus"
UNITS = {"GB": 10**9, "GiB": 1 << 30}
#: Seconds after which a part hangs.
PART_SECONDS = 3600
MAX_CACHE_BYTES = 15 << 20


def memory_size(text: str) -> int:
    """Return the bytes of a size such as 80GiB; for argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(GB|GiB)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size of memory: write 80GiB or 141GB")
    return int(float(match[1]) * UNITS[match[2]])


def command_line() -> argparse.ArgumentParser:
    """Return the options there are."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.nullcuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"which to run: {' '.join(PARTS)}",
    )
    parser.add_argument(
        "--memory",
        type=memory_size,
        default=80 << 30,
        help="of the device, as 141GiB; 80GiB by default",
    )
    parser.add_argument(
        "--steps", nargs="+", default=None, help="steps whose names contain one of these"
    )
    parser.add_argument("--trace", type=int, default=0, help="lines of calls that a step makes")
    parser.add_argument("--record", action="store_true", help="write record.json")
    parser.add_argument(
        "--cache", type=Path, default=None, help="compile kernels and pack them into this archive"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of the tests")
    return parser


class NullDevice:
    """Runs programs over the null device.

    Args:
        python: of the environment with torch's CUDA wheel.
        environment: of the programs.
    """

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        self.python, self.environment = python, environment

    def run(self, *words: str, devices: int = 1) -> int:
        """Run the Python with some words; return its exit code.

        Args:
            words: of the command line.
            devices: that it sees.
        """
        command = [str(self.python), *words]
        environment = {**self.environment, "NULLCUDA_DEVICES": str(devices)}
        try:
            process = subprocess.run(command, cwd=ROOT, env=environment, timeout=PART_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"gpu-null: not finished after {PART_SECONDS} s: {' '.join(words)}")
            return 1
        return process.returncode

    def tests(self, jobs: int) -> list[str]:
        """Run tests/gpu; return the problems."""
        return self.pytest("tests/gpu", "-c", "tests/gpu/pytest.ini", "-m", "gpu", jobs=jobs)

    def runs(self, jobs: int) -> list[str]:
        """Run the tests of tests/functional_tests for four GPUs; return the problems."""
        files = [
            str(path.relative_to(ROOT))
            for path in sorted(RUNS.glob("**/test_*.py"))
            if RUNS_MARK in path.read_text(encoding="utf-8")
        ]
        words = ["-c", "pyproject.toml", "-m", "not slow", "--device", "cuda", "--gpus", "4"]
        return self.pytest(*files, *words, jobs=jobs)

    def pytest(self, *words: str, jobs: int) -> list[str]:
        """Run tests on four devices; return the problems."""
        options = ["--rootdir", ".", "-p", "no:cacheprovider", "-p", "tools.nullcuda.plugin", "-q"]
        options += ["--tb=short", "--durations=3", "-p", "timeout", "--timeout", "900"]
        if jobs > 1:
            options += ["-p", "xdist", "-n", str(jobs), "--dist", "worksteal"]
        code = self.run("-m", "pytest", *words, *options, devices=4)
        return [f"pytest {words[0]}: exit code {code}"] if code else []

    def bench(self, name: str) -> list[str]:
        """Run a bench; return the problems."""
        code = self.run("-m", "tools.nullcuda.benches", *BENCHES[name].split(), "--seconds", "900")
        return [f"{name}: exit code {code}: see above"] if code else []

    def steps(self, only: list[str] | None, *, trace: int = 0) -> tuple[dict, list[str]]:
        """Measure steps; return the figures, and the steps that did not run.

        Args:
            only: substrings of the names of the measured steps.
            trace: number of printed call lines for each step.
        """
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "steps.json"
            words = ["-m", "tools.nullcuda.steps", "--output", str(output)]
            words += ["--trace", str(trace)]
            words += ["--only", *only] if only else []
            code = self.run(*words)
            if not output.exists():
                return {}, [f"steps: exit code {code}, nothing was measured: see above"]
            report = json.loads(output.read_text(encoding="utf-8"))
        return report, [f"{name}: {problem}" for name, problem in report["problems"].items()]


def judge(report: dict, options: argparse.Namespace) -> list[str]:
    """Compare measured steps with the record, or write the record; return the problems."""
    recorded = record.read() if record.RECORD.exists() else {}
    measured = report["steps"]
    if options.record:
        record.write({**recorded, **measured}, versions=report["versions"])
        print(f"gpu-null: {len(measured)} steps written to {record.RECORD.relative_to(ROOT)}")
        recorded = {**recorded, **measured}
    for line in record.improvements(measured, recorded):
        print(f"gpu-null: less than on record: {line}")
    return record.problems(measured, recorded, complete=options.steps is None)


def pack_cache(
    device: NullDevice, folder: Path, archive: Path, options: argparse.Namespace
) -> list[str]:
    """Pack the compiled kernels, and run the parts again with the archive at another path.

    Returns:
        The problems.
    """
    size = triton_cache.pack(folder, archive)
    print(f"gpu-null: {size / 1e6:.1f} MB of compiled kernels in {archive}")
    problems = []
    if size > MAX_CACHE_BYTES:
        problems.append(f"{archive}: {size / 1e6:.1f} MB, at most {MAX_CACHE_BYTES / 1e6:.1f}")
    with tempfile.TemporaryDirectory() as moved:
        kernels = triton_cache.unpack(archive, Path(moved) / "triton")
        log = Path(moved) / "compiled.txt"
        variables = {"TRITON_CACHE_DIR": f"{moved}/triton", "NULLCUDA_COMPILE_LOG": str(log)}
        run_parts(NullDevice(device.python, {**device.environment, **variables}), options)
        lines = log.read_text().splitlines() if log.exists() else []
    compiled = [line for line in lines if line.startswith("compiled ")]
    print(
        f"gpu-null: after a move {kernels} kernels were asked for {len(lines)} times, "
        f"{len(compiled)} of them compiled again"
    )
    problems += [f"after a move: {line}" for line in compiled]
    return problems if lines else [*problems, "after a move: no kernel was asked for"]


def run_parts(device: NullDevice, options: argparse.Namespace) -> list[str]:
    """Run the selected parts; return the problems."""
    problems: list[str] = []
    for part in (part for part in PARTS if part in options.only):
        if part == "runs" and options.cache:
            continue  # no machine needs the kernels of their tiny models
        start = time.monotonic()
        print(f"gpu-null: {part}", flush=True)
        if part == "tests":
            wrong = device.tests(options.jobs)
        elif part == "runs":
            wrong = device.runs(options.jobs)
        elif part in BENCHES:
            wrong = device.bench(part)
        else:
            report, wrong = device.steps(options.steps, trace=options.trace)
            if report and not options.cache:
                wrong += judge(report, options)
        problems += wrong
        seconds = time.monotonic() - start
        print(f"gpu-null: {part}: {len(wrong)} problems in {seconds:.0f} s", flush=True)
    return problems


def run(options: argparse.Namespace) -> list[str]:
    """Build missing files and run the parts; return the problems.

    Raises:
        SetupError: the null device cannot be built here.
    """
    check_machine()
    python = build_environment()
    library = build_library(site_packages(python), FOLDER)
    cache = FOLDER / "triton"
    environment = device_environment(
        library,
        memory_bytes=options.memory,
        compiles=options.cache is not None,
        cache=cache,
    )
    device = NullDevice(python, environment)
    problems = run_parts(device, options)
    if options.cache is not None:
        problems += pack_cache(device, cache, options.cache, options)
    return problems


def main() -> int:
    """Run the selected parts and return the exit code."""
    parser = command_line()
    options = parser.parse_args()
    if options.record and "steps" not in options.only:
        parser.error("--record: the steps are on record: add steps to --only")
    try:
        problems = run(options)
    except SetupError as error:
        print(f"gpu-null: error: {error}", file=sys.stderr)
        return 1
    for problem in problems:
        print(f"gpu-null: {problem}")
    print(f"gpu-null: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

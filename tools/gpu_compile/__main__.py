# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for sm_90 and sm_100 without a GPU, and check the code.

python -m tools.gpu_compile                      everything, with each Triton and each ptxas
python -m tools.gpu_compile --part 1/4           a fourth of it
python -m tools.gpu_compile --only attention     launches whose name has that in it
python -m tools.gpu_compile --record             shrink the record; --raise NAME lets one grow,
                                                 --raise-all all new entries

Compiled are the kernels that tests/unit_tests/core/ops/aot describes, every candidate of every
`Launches`, and each launch that tests/gpu and the benches make, in fp32 and bf16. Each is compiled
by the pinned Triton and by the Triton of an older torch, and assembled by ptxas 12.8, 13.0 and
13.1, which the first run installs under build/gpu-compile. Unchanged launches are not
compiled again.
`tools.gpu_compile.faults` says what fails. The report, report.md and report.json, goes to --output.
Exit code: 1 for a fault that is not on record, 2 for a release that cannot be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tools.gpu_compile import faults, launch, toolchains
from tools.gpu_compile.compiler import Cache, Outcome
from tools.gpu_compile.launch import Launch

ROOT = toolchains.ROOT
FOLDER = ROOT / "build/gpu-compile"
#: Folders and files whose code decides what is launched.
RECORDED_FROM = (
    "megatron_core/megatron",
    "megatron",
    "experimental",
    "tests/gpu",
    "tests/support",
    "tools/bench",
    "tools/gpu_compile/launch.py",
    "tools/gpu_compile/record_benches.py",
)
Job = tuple[Launch, int]
Results = Mapping[str, tuple[Sequence[Job], Sequence[Outcome]]]


def environment(triton: Path | None, **variables: str) -> dict[str, str]:
    """Return the environment of a process that compiles with a release of Triton."""
    folders = [str(triton or ""), str(ROOT), str(ROOT / "megatron_core")]
    folders.append(os.environ.get("PYTHONPATH", ""))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    environ |= {"OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", **variables}
    environ.pop("TRITON_INTERPRET", None)
    return environ


def recorded(cache: Cache) -> tuple[list[Launch], list[str]]:
    """Return what tests/gpu and the benches launch, and problems; from the cache where no source
    has changed."""
    code = hashlib.sha256()
    for name in RECORDED_FROM:
        file = ROOT / name
        for path in [file] if file.is_file() else sorted(file.rglob("*.py")):
            code.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    key = f"launches-{code.hexdigest()}"
    stored = cache.get(key)
    if stored is None:
        launches, problems = record_launches()
        cache.put(key, [[asdict(one_launch) for one_launch in launches], problems])
        return launches, problems
    return [Launch(**values) for values in stored[0]], stored[1]


def record_launches() -> tuple[list[Launch], list[str]]:
    """Run tests/gpu and the benches without a device; return their launches, and problems."""
    tests = ["-q", "-p", "tests.support.compile_only", "-c", "tests/gpu/pytest.ini", "--rootdir"]
    tests += [".", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    commands = {"tests": ["pytest", *tests], "benches": ["tools.gpu_compile.record_benches"]}
    launches, problems = [], []
    with tempfile.TemporaryDirectory() as folder:
        for architecture in launch.ARCHITECTURES:
            running = {}
            for name, command in commands.items():
                path = Path(folder) / f"{name}-{architecture}"
                words = [sys.executable, "-m", *command]
                variables = {"RECORD_LAUNCHES": str(path), "COMPILE_FOR": str(architecture)}
                running[path] = subprocess.Popen(
                    words + ([str(path)] if name == "benches" else []),
                    cwd=ROOT,
                    env=environment(None, **variables),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            for path, process in running.items():
                text = process.communicate()[0]
                if not path.is_file():
                    raise RuntimeError(f"launches of {path.name} not recorded: {text[-2000:]}")
                # A test that expects a wrong result fails, as nothing computes one.
                if process.returncode and path.name.startswith("benches"):
                    lines = [x for x in text.splitlines() if x.startswith("problem: ")]
                    problems += [f"sm_{architecture}: {line}" for line in lines]
                recorded_launches = launch.read(path)
                launches += [replace(x, architectures=(architecture,)) for x in recorded_launches]
    return launches, problems


def jobs_of(launches: Sequence[Launch], options: argparse.Namespace) -> list[Job]:
    """Return the distinct (launch, architecture) pairs of the requested part."""
    jobs = {}
    for one_launch in launches:
        for architecture in one_launch.architectures:
            code = json.dumps([asdict(replace(one_launch, architectures=())), architecture])
            if options.only in one_launch.name or options.only in one_launch.kernel:
                jobs.setdefault(code, (one_launch, architecture))
    number, count = options.part
    return [jobs[code] for code in sorted(jobs)][number - 1 :: count]


def compiled(
    jobs: Sequence[Job], triton: Path | None, tools: toolchains.Toolchains, processes: int
) -> list[Outcome]:
    """Compile with one release of Triton in several processes; return outcomes in order."""
    assemblers = json.dumps({release: str(path) for release, path in tools.assemblers.items()})
    command = [
        sys.executable,
        "-m",
        "tools.gpu_compile.compiler",
        str(FOLDER / "cache"),
        assemblers,
    ]
    compilers = threading.local()  # a process for each thread

    def outcome(job: Job) -> Outcome:
        process = vars(compilers).get("process")
        if process is None or process.poll() is not None:  # a compiler may abort
            process = compilers.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(triton),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            running.append(process)
        try:
            process.stdin.write(json.dumps([asdict(job[0]), job[1]]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            return Outcome(error="the compiler aborted", seconds=0.0)

    running: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(processes) as pool:
        outcomes = list(pool.map(outcome, jobs))
    for process in running:
        process.communicate()
    return outcomes


def found_faults(
    jobs: Sequence[Job], outcomes: Sequence[Outcome], triton: str
) -> dict[str, dict[str, int]]:
    """Return the faults of each entry, the largest counts of its launches."""
    budget, faults_by_entry = faults.budget_of(triton), {}
    for (one_launch, architecture), outcome in zip(jobs, outcomes, strict=True):
        entry = faults.entry_of(one_launch, architecture)
        new = faults.faults_of(one_launch, architecture, outcome, triton=triton, budget=budget)
        faults_by_entry[entry] = faults.merged(faults_by_entry.get(entry, {}), new)
    return faults_by_entry


def report(output: Path, results: Results, lines: Sequence[str]) -> None:
    """Write report.md and report.json."""
    output.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"differences": list(lines), "launches": {}}
    rows = [["Triton", "kernel", "dtype", "sm", "shared KB", "registers / stack by ptxas"]]
    rows[0] += ["tensor cores", "faults"]
    for triton, (jobs, outcomes) in results.items():
        data["launches"][triton] = [
            {
                "name": one_launch.name,
                "source": one_launch.source,
                "architecture": architecture,
                **outcome,
            }
            for (one_launch, architecture), outcome in zip(jobs, outcomes, strict=True)
        ]
        for (one_launch, architecture), outcome in zip(jobs, outcomes, strict=True):
            bad = outcome.get("error") or outcome["faults"]
            if one_launch.source != launch.DESCRIBED and not bad:
                continue
            rows.append(_row(triton, one_launch, architecture, outcome))
    text = "# Compile-only report\n\n" + "\n".join(f"- {line}" for line in lines)
    text += (
        "\n\nDescribed kernels, and other launches with a fault; all launches are in report.json."
    )
    (output / "report.md").write_text(f"{text}\n\n{faults.tabulated(rows)}\n", encoding="utf-8")
    (output / "report.json").write_text(json.dumps(data, indent=1), encoding="utf-8")


def _row(triton: str, one_launch: Launch, architecture: int, outcome: Outcome) -> list[str]:
    """Return a row of the report."""
    head = [triton, one_launch.name, one_launch.dtype, str(architecture)]
    if "error" in outcome:
        return [*head, "", "", "", outcome["error"]]
    needs = "; ".join(f"{k}: {r}/{s}" for k, (r, s) in outcome["needs"].items())
    cores = ", ".join(f"{n} {name}" for name, n in outcome["instructions"].items() if n)
    if outcome["register_operands"]:
        cores += f" ({outcome['register_operands']} products read registers)"
    bad = ", ".join(f"{name} {count}" for name, count in outcome["faults"].items())
    return [*head, f"{outcome['shared_bytes'] / 1024:.0f}", needs, cores, bad]


def part_of(text: str) -> tuple[int, int]:
    """Read i/n."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with 1 <= i <= n")
    return int(match[1]), int(match[2])


def command_line() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="I/N", help="compile the I-th of N shares"
    )
    parser.add_argument("--only", default="", help="launches whose name contains this")
    parser.add_argument(
        "--sources",
        nargs="+",
        choices=launch.SOURCES,
        default=list(launch.SOURCES),
        metavar="SOURCE",
        help=f"where launches come from: {' '.join(launch.SOURCES)}",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--output", type=Path, default=FOLDER / "report", help="folder")
    parser.add_argument("--record", action="store_true", help="bring record.json up to date")
    parser.add_argument(
        "--raise",
        dest="raising",
        action="append",
        default=[],
        metavar="NAME",
        help="with --record: let the entries of this kernel grow",
    )
    parser.add_argument("--raise-all", action="store_true", help="let every entry grow")
    return parser


def main() -> int:
    """Compile, compare with the record and return the exit code."""
    parser = command_line()
    options = parser.parse_args()
    if (options.raising or options.raise_all) and not options.record:
        parser.error("--raise and --raise-all change the record: add --record")
    start = time.monotonic()
    try:
        tools = toolchains.installed(FOLDER)
    except toolchains.MissingToolError as error:
        print(f"gpu-compile: error: {error}", file=sys.stderr)
        return 2
    launches, new = launch.described() if launch.DESCRIBED in options.sources else [], []
    if set(options.sources) - {launch.DESCRIBED}:
        described_launches, new = recorded(Cache(FOLDER / "cache"))
        launches += [x for x in described_launches if x.source in options.sources]
        print(f"gpu-compile: recorded in {time.monotonic() - start:.0f} s", flush=True)
    jobs = jobs_of(launch.named(launches), options)
    whole = (
        not options.only and options.part == (1, 1) and len(options.sources) == len(launch.SOURCES)
    )
    record, results, gone = faults.read_record(), {}, []
    for triton, folder in tools.tritons.items():
        begun = time.monotonic()
        outcomes = compiled(jobs, folder, tools, options.jobs)
        results[triton] = (jobs, outcomes)
        faults_by_entry = found_faults(jobs, outcomes, triton)
        if whole and folder is None:
            faults_by_entry |= faults.untested(launches)
        recorded_faults = record.get(triton, {})
        if options.record:
            try:
                raising = None if options.raise_all else options.raising
                recorded_faults = faults.updated(
                    faults_by_entry, recorded_faults, whole=whole, raising=raising
                )
            except ValueError as error:
                print(f"gpu-compile: error: {error}", file=sys.stderr)
                return 1
            record[triton] = recorded_faults
            faults.write_record(record)
        lines = faults.differences(faults_by_entry, recorded_faults, whole=whole)
        new += [f"Triton {triton}: {line}" for line in lines[0]]
        gone += [f"Triton {triton}: {line}: run with --record" for line in lines[1]]
        spent = sum(outcome.get("seconds", 0.0) for outcome in outcomes)
        print(
            f"gpu-compile: Triton {triton}: {len(jobs)} launches in"
            f" {time.monotonic() - begun:.0f} s, {spent:.0f} s over all processes",
            flush=True,
        )
    report(options.output, results, new + gone)
    for line in new + gone:
        print(line)
    print(f"gpu-compile: {len(new) + len(gone)} differences; {options.output}/report.md")
    return 1 if new or gone else 0


if __name__ == "__main__":
    sys.exit(main())

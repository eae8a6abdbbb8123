# SPDX-License-Identifier: Apache-2.0
"""The program of `make gpu`: a training step, the tests marked gpu, then the other benches, in
9 minutes.

python -m tools.gpu                         everything; a table and bench_results/<gpu>-<day>.json
python -m tools.gpu --stages tests decode   some stages, which share all of the time; their results
                                            join the results of the same day
python -m tools.gpu --rehearse              everything tiny, on a CPU, in Triton's interpreter
python -m tools.gpu --rehearse --quick      the stages that take seconds

It runs in the current Python, without a virtual environment or network, and needs torch, triton,
numpy, safetensors, pytest and transformers. flash-linear-attention and mamba_ssm are raced if they
can be imported; the first lines of the output list them.
All stages share one deadline; later stages share the time that a stage leaves. A failing stage does
not stop the next stage, and the exit code is 1. Without a GPU the exit code is 0, or 1 under
--require-gpu, which CI uses.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench.rehearsal import INTERPRETED, interpreter_problem
from tools.gpu_peers import refusals, said_of
from tools.gpu_stages import Outcome, Stage, run_stage

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/gpu"
RESULTS, REHEARSED = "bench_results", "build/rehearsal"
#: Seconds of everything: a little less than ten minutes.
DEADLINE = 530
#: Stages in their order, what tells most first: how a step trains, whether kernels are right, how
#: fast they are. The seconds are shares of what is left when a stage begins; most of them go into
#: compilation, and for kernels into the configurations that peers try out.
STAGES = {
    "training": 120,
    "tests": 150,
    "kernels": 110,
    "engine": 60,
    "decode": 35,
    "hybrid": 55,
}
#: The benchmark of each stage but the tests, and its arguments.
BENCHES = {
    "training": "gpu_train",
    "kernels": "ops",
    "engine": "gpu_engine",
    "decode": "ops --decode",
    "hybrid": "gpu_train --model hybrid",
}
#: A rehearsal is bound by the interpreter: how many times longer it may take.
PATIENCE = 4
#: Processes of the tests. Compiling takes one core each, the device's memory is enough for all.
JOBS = 10
#: Seconds after which a test hangs.
TEST_TIMEOUT = 100
QUICK_TESTS = "tests/gpu/test_launches_gpu.py"


def missing_gpu() -> str | None:
    """Return why nothing can run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return None


def ptxas_problem(ptxas: str) -> str | None:
    """Return why Triton cannot use this TRITON_PTXAS_PATH, or None.

    Triton silently uses its assembler instead of a file that is no ptxas, and every launch fails
    if the file cannot be executed.
    """
    from tools.bench.results import program_version

    if program_version(ptxas) is not None:
        return None
    return f"TRITON_PTXAS_PATH={ptxas} is no ptxas that runs here: correct it or unset it"


def environment(*, rehearse: bool = False) -> dict[str, str]:
    """Return the environment in which this checkout's packages are found."""
    paths = [str(ROOT), str(ROOT / "megatron_core"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    # Products have one order where a test asks for one.
    variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    variables.pop("TRITON_INTERPRET", None)
    if rehearse:
        variables |= INTERPRETED
    return variables


def compilers_line(variables: Mapping[str, str]) -> str | None:
    """Return which Triton and ptxas compile the kernels, with their known faults; None on a CPU.

    Another process asks: a CUDA context of this one would take memory from every stage.

    Args:
        variables: the environment of the stages, whose TRITON_PTXAS_PATH counts.
    """
    code = (
        "import torch; from megatron.core.ops.backend_choice import explain_compilers;"
        " device = torch.device('cuda' if torch.cuda.is_available() else 'cpu');"
        " print(explain_compilers(device) or '')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    if process.returncode:
        error = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return f"the compilers of the kernels are unknown: {error}"
    return f"kernels: {process.stdout.strip()}" if process.stdout.strip() else None


def test_command(*words: str) -> list[str]:
    """Return the command that runs the GPU tests with their pytest.ini, which needs no plugin."""
    settings = ["-c", f"{TESTS}/pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *settings, "-m", "gpu", *words]


def stage_seconds(name: str, names: Sequence[str], seconds: float) -> float:
    """Return how much of the time that is left a stage may take.

    Args:
        name: of the stage.
        names: of it and of all that follow it.
        seconds: that are left for them.
    """
    return seconds * STAGES[name] / sum(STAGES[stage] for stage in names)


def test_stage(options: argparse.Namespace, seconds: float) -> Stage:
    """Return the stage of the tests: one run of pytest in several processes where it has the plugin
    for that, else a run for each file, the largest first."""
    jobs = 2 if options.rehearse else JOBS
    words = ["-q", "--tb=short", "--durations=3"]
    if importlib.util.find_spec("pytest_timeout"):
        words += ["-p", "timeout", "--timeout", str(TEST_TIMEOUT * (10 if options.rehearse else 1))]
    files = [ROOT / QUICK_TESTS] if options.quick else list((ROOT / TESTS).glob("test_*.py"))
    if importlib.util.find_spec("xdist") and not options.quick:
        words += ["-p", "xdist", "-n", str(jobs), "--dist", "worksteal"]
        return Stage("tests", {"tests": test_command(TESTS, *words)}, seconds)
    files = sorted(files, key=lambda path: -path.stat().st_size)
    names = [path.relative_to(ROOT).as_posix() for path in files]
    commands = {Path(name).name: test_command(name, *words) for name in names}
    return Stage("tests", commands, seconds, jobs)


def stage_of(name: str, options: argparse.Namespace, folder: Path, seconds: float) -> Stage:
    """Return a stage with a time limit.

    Args:
        name: name of the stage.
        options: command line options.
        folder: folder of the benches' result files.
        seconds: time limit.
    """
    if name == "tests":
        return test_stage(options, seconds)
    words = ["--part", str(folder / f"{name}.json"), "--seconds", str(max(seconds - 5, 1))]
    words += ["--rehearse"] if options.rehearse else []
    words += ["--quick"] if options.quick else []
    command = [sys.executable, "-m", *f"tools.bench.{BENCHES[name]}".split(), *words]
    return Stage(name, {name: command}, seconds)


def run(options: argparse.Namespace, folder: Path) -> tuple[dict[str, str | None], list[Outcome]]:
    """Say what compiles the kernels and which peers there are, then run the stages in order.

    Returns:
        (why each peer cannot be imported, None where it can; how the stages ended).
    """
    deadline = time.monotonic() + options.seconds * (PATIENCE if options.rehearse else 1)
    if (compilers := compilers_line(environment(rehearse=options.rehearse))) is not None:
        print(f"gpu: {compilers}", flush=True)
    peers = refusals(options.stages, environment(rehearse=options.rehearse))
    for peer, refusal in peers.items():
        print(f"gpu: {said_of(peer, refusal)}", flush=True)
    outcomes = []
    names = [name for name in STAGES if name in options.stages]
    for position, name in enumerate(names):
        left = max(deadline - time.monotonic(), 0.0)
        stage = stage_of(name, options, folder, stage_seconds(name, names[position:], left))
        print(f"gpu: {stage.name}: at most {stage.seconds:.0f} s", flush=True)
        outcomes.append(
            run_stage(
                stage,
                folder=ROOT,
                environment=environment(rehearse=options.rehearse),
                deadline=deadline,
            )
        )
    return peers, outcomes


def report(
    peers: Mapping[str, str | None], outcomes: list[Outcome], folder: Path, output: Path
) -> None:
    """Print the table, open targets and stage outcomes; write the results of the benches."""
    from tools.bench.results import joined, text_of

    when = datetime.datetime.now().isoformat(timespec="seconds")
    ended: Mapping[str, dict] = {
        o.name: {"when": when, "seconds": round(o.seconds, 1), "problems": o.problems}
        | {"commands": len(o.last_lines)}
        for o in outcomes
    }
    path, results = joined(ended, folder, output, peers=peers)
    print(text_of(results))
    print(f"gpu: written to {path}")


def command_line() -> argparse.ArgumentParser:
    """Return the options there are."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=list(STAGES),
        default=list(STAGES),
        metavar="STAGE",
        help=f"which to run, in this order: {' '.join(STAGES)}",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEADLINE,
        help=f"deadline of all stages together; {DEADLINE} by default",
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU, interpreted")
    parser.add_argument("--quick", action="store_true", help="of a rehearsal the quickest part")
    parser.add_argument("--output", default=None, help=f"folder for the results; else {RESULTS}")
    parser.add_argument(
        "--require-gpu", action="store_true", help="exit with 1 where there is no GPU (for CI)"
    )
    return parser


def main() -> int:
    """Run the selected stages and return the exit code."""
    parser = command_line()
    options = parser.parse_args()
    if options.quick and not options.rehearse:
        parser.error("--quick is of a rehearsal: add --rehearse")
    if options.require_gpu and options.rehearse:
        parser.error("--require-gpu: a rehearsal runs on a CPU: drop one of the two")
    if options.rehearse and (problem := interpreter_problem()) is not None:
        print(f"gpu: error: {problem}", file=sys.stderr)
        return 1
    reason = None if options.rehearse else missing_gpu()
    if reason is not None:
        if options.require_gpu:
            print(
                f"gpu: error: {reason}, and --require-gpu was given: run it on a machine with a "
                "GPU, by a Python whose torch sees it (make gpu PYTHON=.venv/bin/python)",
                file=sys.stderr,
            )
            return 1
        print(f"gpu: {reason}: nothing to run here")
        return 0
    ptxas = os.environ.get("TRITON_PTXAS_PATH")
    if ptxas and not options.rehearse and (problem := ptxas_problem(ptxas)) is not None:
        print(f"gpu: error: {problem}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        peers, outcomes = run(options, Path(folder))
        output = options.output or (REHEARSED if options.rehearse else RESULTS)
        report(peers, outcomes, Path(folder), Path(output))
    failed = [o for o in outcomes if o.problems]
    for outcome in outcomes:
        state = f"{len(outcome.problems)} problems" if outcome.problems else "passed"
        print(f"gpu: {outcome.name}: {state} in {outcome.seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

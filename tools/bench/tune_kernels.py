# SPDX-License-Identifier: Apache-2.0
"""Write `ops/launches.json`: prove every candidate of every kernel's launch, time the right ones.

python -m tools.bench.tune_kernels                      everything, on this GPU
python -m tools.bench.tune_kernels --only rms_norm      names that begin so
python -m tools.bench.tune_kernels --rehearse           two of each, tiny, in Triton's interpreter

A candidate is compared with the fp64 reference on a small and on an irregular problem before it is
timed. A candidate that differs, or does not start, is dropped with a message. The other candidates
take turns with the default, and the fastest is written if it is more than 3 % faster. A rehearsal
writes nothing; it skips features that the interpreter lacks, above all 16-bit operands.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megatron.core.ops.launches import Launches
from tools.bench import trials_recurrences, trials_tokens
from tools.bench.rehearsal import be_interpreted
from tools.bench.timing import Stopwatch
from tools.bench.trials import Problem, Trial, all_launches, started_with

TABLE = Path(__file__).parents[2] / "megatron_core/megatron/core/ops/launches.json"
TRIALS: tuple[Trial, ...] = (*trials_tokens.TRIALS, *trials_recurrences.TRIALS)
#: A candidate must beat the default by this much: less is the noise of a device.
MARGIN = 1.03
#: Launches for 16-bit operands only, and those whose tiles take the interpreter minutes.
UNREHEARSED = (
    "recurrence_sweep",
    "recurrence_sweep_dual",
    "recurrence_reverse",
    "recurrence_gradients",
    "recurrence_gradients_dual",
    "prologue_backward",
    "grouped_mm",
    "grouped_wgrad",
)
Race = Callable[[Mapping[str, Callable[[], object]]], Mapping[str, list[float]]]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What became of one candidate.

    Args:
        launch: the candidate.
        error: against the reference, the greatest of all problems.
        wrong: why it was dropped, or None.
        seconds: of each turn.
    """

    launch: Mapping[str, int]
    error: float = 0.0
    wrong: str | None = None
    seconds: tuple[float, ...] = ()


def fastest(tried: Sequence[Tried], margin: float = MARGIN) -> Tried | None:
    """Return the right candidate that beats the default most, by more than `margin`, or None.

    Args:
        tried: the default first. Turns are compared one by one: a device's clock drifts.
        margin: default's seconds over candidate's, at least.

    Raises:
        ValueError: the default is wrong.
    """
    default = tried[0]
    if default.wrong is not None:
        raise ValueError(f"the default {dict(default.launch)} is wrong: {default.wrong}")
    gains = [
        (
            statistics.median(b / a for a, b in zip(attempt.seconds, default.seconds, strict=True)),
            attempt,
        )
        for attempt in tried[1:]
        if attempt.wrong is None
    ]
    gain, best = max(gains, key=lambda item: item[0], default=(0.0, default))
    return best if gain > margin else None


def proved(
    launches: Launches,
    candidate: Mapping[str, int],
    problems: Sequence[Problem],
    dtype: torch.dtype,
) -> tuple[Tried, set[str]]:
    """Compare a candidate with the reference on all problems.

    Returns:
        (outcome, the keys that the kernel requested).

    Raises:
        torch.AcceleratorError: the device is lost, so no further candidate can run.
    """
    with started_with(launches, candidate) as keys:
        try:
            error = max(problem.error(dtype) for problem in problems)
        except torch.AcceleratorError:
            raise
        except Exception as problem:
            lines = str(problem).strip().splitlines() or [""]
            return Tried(launch=candidate, wrong=f"{type(problem).__name__}: {lines[0]}"), keys
    return Tried(launch=candidate, error=error), keys


class Tuner:
    """Tries candidates.

    Args:
        device: to make problems on.
        dtype: of their inputs.
        race: takes calls by name, returns the seconds of each one's turns.
        rehearse: whether shapes are tiny.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, race: Race, *, rehearse: bool = False
    ) -> None:
        self.device, self.dtype, self.race, self.rehearse = device, dtype, race, rehearse
        self.dropped: list[str] = []

    def problems(self, trial: Trial, shape: Mapping[str, int]) -> tuple[Problem, ...]:
        """Make the small problem, the irregular problem and the timed problem."""
        generator = torch.Generator(self.device).manual_seed(1234)
        make = partial(torch.randn, generator=generator, device=self.device)
        counts = trial.few if self.rehearse else trial.tokens
        return tuple(trial.build(lambda *s: make(s), count, **shape) for count in counts)

    def tried(
        self, launches: Launches, trial: Trial, shape: Mapping[str, int]
    ) -> tuple[str, list[Tried]]:
        """Prove and time every candidate.

        Returns:
            (name and key in the table, all candidates, the default first).

        Raises:
            ValueError: the trial does not start the kernel, or with several keys.
        """
        *rehearsed, timed = self.problems(trial, shape)
        attempts, seen_keys = [], set()
        for candidate in launches.candidates[: 2 if self.rehearse else None]:
            outcome, keys = proved(launches, candidate, rehearsed, self.dtype)
            attempts.append(outcome)
            seen_keys |= keys
            if outcome.wrong is not None:
                self.dropped.append(f"{launches.name} {dict(candidate)}: {outcome.wrong}")
                print(f"DROPPED: {self.dropped[-1]}", file=sys.stderr, flush=True)
        if len(seen_keys) != 1:
            raise ValueError(
                f"the trial of {launches.name} with {dict(shape)} must start it with one key, not"
                f" {sorted(seen_keys)}"
            )
        calls = {
            str(index): self._call(launches, attempt.launch, timed, trial.launches[launches.name])
            for index, attempt in enumerate(attempts)
            if attempt.wrong is None
        }
        if len(calls) > 1 and attempts[0].wrong is None:
            for index, seconds in self.race(calls).items():
                attempts[int(index)] = replace(attempts[int(index)], seconds=tuple(seconds))
        return f"{launches.name} {seen_keys.pop()}".strip(), attempts

    def _call(
        self, launches: Launches, candidate: Mapping[str, int], problem: Problem, way: str
    ) -> Callable[[], object]:
        """Return a call of the problem that starts with the candidate."""
        with started_with(launches, candidate):
            call = problem.call(self.dtype, way)

        def run() -> object:
            with started_with(launches, candidate):
                return call()

        return run


def versions() -> dict[str, str]:
    """Return the versions that a measurement is of."""
    version_by_name = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    try:
        version_by_name["triton"] = version("triton")
    except PackageNotFoundError:
        version_by_name["triton"] = ""
    return version_by_name


def entry(tried: Sequence[Tried], best: Tried) -> dict:
    """Return the table entry of the best candidate."""
    best_seconds, default_seconds = (
        statistics.median(attempt.seconds) for attempt in (best, tried[0])
    )
    return {
        "launch": dict(best.launch),
        "milliseconds": round(1e3 * best_seconds, 5),
        "default_milliseconds": round(1e3 * default_seconds, 5),
        "error": float(f"{best.error:.3g}"),
        "versions": versions(),
    }


def updated(table: Mapping[str, dict], device_name: str, name: str, new_entry: dict | None) -> dict:
    """Return the table with one entry in place of the old one; None leaves the default."""
    entries = {key: value for key, value in table.get(device_name, {}).items() if key != name}
    if new_entry is not None:
        entries[name] = new_entry
    other_devices = {key: value for key, value in table.items() if key != device_name}
    if not entries:
        return other_devices
    return dict(sorted((other_devices | {device_name: dict(sorted(entries.items()))}).items()))


def tunable(*, rehearse: bool) -> list[str]:
    """Return the names of launches with candidates; in a rehearsal, only of the tried launches."""
    launches = all_launches()
    names = {name for trial in TRIALS for name in trial.launches if launches[name].alternatives}
    return sorted(names - set(UNREHEARSED if rehearse else ()))


def tune(
    tuner: Tuner,
    device_name: str,
    *,
    only: str,
    end: float,
    write: Callable[[dict], None],
    table: dict,
) -> list[str]:
    """Try all launches that begin with `only`; return what went wrong.

    Args:
        tuner: what tries them.
        device_name: the device, in the table.
        only: the beginning of names.
        end: of `time.monotonic`; nothing is begun after it.
        write: called with the table whenever it may have changed.
        table: from before.
    """
    problems = []
    launch_tables, names = all_launches(), tunable(rehearse=tuner.rehearse)
    for trial in TRIALS:
        shapes = (trial.tiny,) if tuner.rehearse else trial.shapes
        work = [
            (launch_tables[name], s)
            for name in trial.launches
            for s in shapes
            if name in names and name.startswith(only)
        ]
        for launches, shape in work:
            if time.monotonic() > end:
                problems.append(f"{launches.name} {dict(shape)}: not tried: no time left")
                continue
            try:
                key, tried = tuner.tried(launches, trial, shape)
                best = fastest(tried)
            except torch.AcceleratorError:
                raise
            except Exception as problem:
                lines = str(problem).strip().splitlines() or [""]
                problems.append(
                    f"{launches.name} {dict(shape)}: {type(problem).__name__}: {lines[0]}"
                )
                print(f"PROBLEM: {problems[-1]}", file=sys.stderr, flush=True)
                continue
            new_entry = None if best is None else entry(tried, best)
            table = updated(table, device_name, key, new_entry)
            write(table)
            print(
                f"{key}: {'the default' if new_entry is None else json.dumps(new_entry)}",
                flush=True,
            )
            gc.collect()
    return problems


def main() -> int:
    """Tune and return the exit code: 1 where a candidate was wrong or a trial failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="the beginning of the names to try")
    parser.add_argument("--seconds", type=float, default=600.0, help="nothing is begun after these")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU, interpreted")
    parser.add_argument("--output", type=Path, default=TABLE, help="the table to bring up to date")
    options = parser.parse_args()
    if options.rehearse:
        be_interpreted()
    names = tunable(rehearse=options.rehearse) if options.only else [""]
    if not any(name.startswith(options.only) for name in names):
        parser.exit(2, f"tune_kernels: no name begins with {options.only!r}: {' '.join(names)}\n")
    if not options.rehearse and not torch.cuda.is_available():
        print("tune_kernels: torch sees no GPU here: nothing is measured")
        return 0
    device = torch.device("cpu" if options.rehearse else "cuda")
    dtype = torch.float32 if options.rehearse else torch.bfloat16
    watch = Stopwatch(
        device, rounds=1 if options.rehearse else 20, warmup=1 if options.rehearse else 3
    )
    tuner = Tuner(device, dtype, watch.race, rehearse=options.rehearse)
    table = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {}

    def write(table: dict) -> None:
        if not options.rehearse:
            options.output.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")

    problems = tune(
        tuner,
        "rehearsal" if options.rehearse else torch.cuda.get_device_name(device),
        only=options.only,
        end=time.monotonic() + options.seconds,
        write=write,
        table=table,
    )
    for line in (*(f"DROPPED: {x}" for x in tuner.dropped), *(f"PROBLEM: {x}" for x in problems)):
        print(line)
    return 1 if tuner.dropped or problems else 0


if __name__ == "__main__":
    sys.exit(main())

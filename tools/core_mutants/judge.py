# SPDX-License-Identifier: Apache-2.0
"""Judge mutants in copies of the checkout, each by the tests that execute its lines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.source_text import source_of
from tools.core_mutants.contexts import Contexts
from tools.core_mutants.progress import PROGRESS, TESTS
from tools.core_mutants.record import (
    KILLED,
    NOT_COVERED,
    SURVIVED,
    Mutant,
    Site,
    lines_of,
)

ROOT = Path(__file__).resolve().parents[2]

#: For one mutant, the start of pytest included; the tests are chosen by the seconds that they took
#: under coverage, so that a busy machine chooses the same ones.
SECONDS = 90.0

#: What a run costs before its first test, and for each file of tests, in seconds.
_START_SECONDS, _FILE_SECONDS = 8.0, 0.15

#: A test hangs that takes so many times its seconds, and so many seconds more.
_HANG_FACTOR, _HANG_SECONDS = 3.0, 10.0

#: What follows the name of a test that hangs in a verdict.
HANGS = " (hangs)"

#: All tests that have killed a mutant, on the code as it is.
_CONFIRM_SECONDS = 900.0


@dataclass(frozen=True)
class Outcome:
    """How a run of pytest ended: `failed` and `running` name tests or are empty."""

    code: int
    timed_out: bool = False
    failed: tuple[str, ...] = ()
    broken: str = ""
    running: str = ""
    running_seconds: float = 0.0
    ended: int = 0
    log: str = ""


class Checkout:
    """A copy of the checkout to plant mutants in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        # Mutants of one second and one size must not share byte code: it goes by a hash.
        compile_all = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode"]
        subprocess.run([*compile_all, "checked-hash", "megatron_core"], cwd=self.root, check=True)

    @contextlib.contextmanager
    def planted(self, site: Site) -> Iterator[None]:
        """Hold a mutant on disk."""
        text, origin = source_of(site.mutation.module)
        path = self.root / Path(origin).resolve().relative_to(ROOT)
        mutation = site.mutation
        edited = text[: mutation.start] + mutation.text + text[mutation.stop :]
        path.write_text(edited, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def run(self, tests: Sequence[str], seconds: float, *, stop: bool = True) -> Outcome:
        """Run tests in this order, to the first failure or to the last test."""
        scratch = self.folder / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        chosen, progress, log = (self.folder / name for name in ("tests", "progress", "log"))
        chosen.write_text(json.dumps(list(tests)), encoding="utf-8")
        progress.unlink(missing_ok=True)
        paths = [str(self.root), str(self.root / "megatron_core")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(scratch),
            TESTS: str(chosen),
            PROGRESS: str(progress),
        }
        # Without -c, tests of tests/gpu alone are named from the folder of its pytest.ini.
        line = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml"]
        line += ["-p", "no:cacheprovider"]
        line += ["-p", "tools.core_mutants.progress", *(["-x"] if stop else [])]
        line += sorted({test.split("::")[0] for test in tests})
        with log.open("wb") as file:
            process = subprocess.Popen(
                line,
                cwd=self.root,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            timed_out = False
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what tests have left running, too
                process.wait()
        return self._outcome(process.returncode, timed_out)

    def _outcome(self, code: int, timed_out: bool) -> Outcome:
        log = (self.folder / "log").read_text(errors="replace")[-3000:]
        progress = self.folder / "progress"
        if not progress.exists():
            raise RuntimeError(f"pytest did not start, exit code {code}:\n{log}")
        lines = progress.read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines if line.endswith("]")]
        if not Path(events[0][1]).is_relative_to(self.root.resolve()):
            raise RuntimeError(f"tests import {events[0][1]}, which is not in {self.root}")
        names: dict[str, list[str]] = {}
        for event, name, _ in events:
            names.setdefault(event, []).append(name)
        last_event, test, at = events[-1]
        return Outcome(
            code=code,
            timed_out=timed_out,
            failed=tuple(dict.fromkeys(names.get("failed", []))),
            broken=names.get("broken", [""])[0],
            running=test if last_event == "start" else "",
            running_seconds=time.time() - at,
            ended=len(names.get("end", [])),
            log=log,
        )


def affordable(tests: Sequence[str], seconds: dict[str, float], limit: float) -> list[str]:
    """Return as many of the tests, in their order, as fit into `limit` seconds; at least one."""
    chosen: list[str] = []
    files: set[str] = set()
    spent = _START_SECONDS
    for test in tests:
        file = test.split("::")[0]
        spent += seconds[test] + (0.0 if file in files else _FILE_SECONDS)
        if chosen and spent > limit:
            break
        chosen.append(test)
        files.add(file)
    return chosen


@dataclass(frozen=True)
class Case:
    """A mutant with its location and the tests to run: the previous killer, then the fastest.

    `covering` is the number of all tests that execute it.
    """

    mutant: Mutant
    site: Site
    tests: list[str]
    covering: int

    @property
    def is_open(self) -> bool:
        """Whether it has no verdict, or survived because time ran out on a busy machine."""
        cut_off = self.mutant.verdict == SURVIVED and self.mutant.ran < len(self.tests)
        return cut_off or not self.mutant.verdict


def cases(
    mutants: Sequence[Mutant], locate_site: Callable[[Mutant], Site | None], contexts: Contexts
) -> list[Case]:
    """Look up the tests of every mutant.

    Raises:
        ValueError: the code of a mutant is gone.
    """
    case_list = []
    for mutant in mutants:
        site = locate_site(mutant)
        if site is None:
            raise ValueError(f"gone, run draw to replace it: {mutant}")
        covering = contexts.tests_of(*lines_of(site))
        killer = mutant.by.removesuffix(HANGS)
        ordered = sorted(
            covering, key=lambda test, killer_first=killer: test != killer_first
        )  # stable
        tests = affordable(ordered, contexts.seconds, SECONDS)
        case_list.append(Case(mutant, site, tests, len(covering)))
    return case_list


def rechecks(
    mutants: Sequence[Mutant], locate_site: Callable[[Mutant], Site | None], contexts: Contexts
) -> list[Case]:
    """Return the mutants that a test has killed and that are still there, with that test alone.

    A test whose file has moved is looked for by the name of the file. The seconds of a test are
    not known here: one that hangs is given `_HANG_SECONDS` in `contexts`.

    Raises:
        ValueError: the test that has killed a mutant is gone.
    """
    case_list = []
    for mutant in mutants:
        site, killer = locate_site(mutant), mutant.by.removesuffix(HANGS)
        if site is None or "::" not in killer:
            continue
        name, _, test_name = killer.partition("::")
        if not (ROOT / name).is_file():
            moved = list((ROOT / "tests").rglob(Path(name).name))
            if len(moved) != 1:
                raise ValueError(f"{name} is gone: judge {mutant} by contexts")
            killer = f"{moved[0].relative_to(ROOT)}::{test_name}"
        contexts.seconds[killer] = _HANG_SECONDS
        case_list.append(Case(mutant, site, [killer], mutant.tests))
    return case_list


def judge_one(checkout: Checkout, case: Case, contexts: Contexts, seconds: float) -> Mutant:
    """Return the mutant with its verdict."""
    tests = case.tests
    fresh = replace(case.mutant, verdict="", by="", tests=case.covering, ran=0)
    if not tests:
        return replace(fresh, verdict=NOT_COVERED)
    with checkout.planted(case.site):
        outcome = checkout.run(tests, seconds)
    fresh = replace(fresh, ran=outcome.ended)
    if outcome.failed:
        return replace(fresh, verdict=KILLED, by=outcome.failed[0])
    if outcome.timed_out:
        by = _hangs(checkout, outcome, contexts)
        return replace(fresh, verdict=KILLED if by else SURVIVED, by=by)
    if outcome.code == 0:
        return replace(fresh, verdict=SURVIVED)
    healthy = checkout.run(tests, seconds)
    if healthy.code != 0 and not healthy.timed_out:
        raise RuntimeError(f"{tests} do not pass without the mutant:\n{healthy.log}")
    how = f"import of {outcome.broken}" if outcome.broken else f"exit code {outcome.code}"
    return replace(fresh, verdict=KILLED, by=how)


def _hangs(checkout: Checkout, outcome: Outcome, contexts: Contexts) -> str:
    """Say which test hung, if it passes without the mutant in the time that it had; else nothing.

    To run out of time between tests, or in one that is long, is to survive.
    """
    if not outcome.running:
        return ""
    usual = contexts.seconds[outcome.running]
    if outcome.running_seconds < _HANG_FACTOR * usual + _HANG_SECONDS:
        return ""
    healthy = checkout.run([outcome.running], outcome.running_seconds)
    return f"{outcome.running}{HANGS}" if healthy.code == 0 else ""


@contextlib.contextmanager
def checkouts(count: int) -> Iterator[queue.Queue[Checkout]]:
    """Copy the checkout `count` times, and remove the copies on exit."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: queue.Queue[Checkout] = queue.Queue()
        for number in range(count):
            free.put(Checkout(Path(folder, str(number))))
        yield free


def judge(
    case_list: Sequence[Case],
    contexts: Contexts,
    free: queue.Queue[Checkout],
    on_judged: Callable[[Mutant], None],
    *,
    seconds: float = SECONDS,
) -> None:
    """Judge mutants, as many at a time as there are copies, and call `on_judged` with each."""

    def judge_case(case: Case) -> Mutant:
        checkout = free.get()
        try:
            return judge_one(checkout, case, contexts, seconds)
        finally:
            free.put(checkout)

    with ThreadPoolExecutor(free.qsize()) as pool:
        for verdict in as_completed([pool.submit(judge_case, case) for case in case_list]):
            on_judged(verdict.result())


def failing_without(case_list: Sequence[Case], checkout: Checkout) -> list[str]:
    """Run the first tests of each mutant on the unchanged code, and return the failing tests."""
    tests = dict.fromkeys(test for case in case_list for test in case.tests[:5])
    return _failures(checkout, list(tests))


def unconfirmed(mutants: Sequence[Mutant], checkout: Checkout) -> list[Mutant]:
    """Return the mutants whose killer also fails on the unmutated code."""
    killers = {m.by.removesuffix(HANGS) for m in mutants if m.verdict == KILLED}
    tests = sorted(killer for killer in killers if "::" in killer)
    failing = _failures(checkout, tests) if tests else []
    return [m for m in mutants if m.by.removesuffix(HANGS) in failing]


def _failures(checkout: Checkout, tests: list[str]) -> list[str]:
    outcome = checkout.run(tests, _CONFIRM_SECONDS, stop=False)
    if outcome.timed_out or outcome.broken or (outcome.code and not outcome.failed):
        raise RuntimeError(f"{len(tests)} tests did not end well:\n{outcome.log}")
    if outcome.ended < len(tests):
        raise RuntimeError(f"{len(tests) - outcome.ended} tests are gone: run contexts again")
    return list(outcome.failed)

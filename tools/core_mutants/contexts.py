# SPDX-License-Identifier: Apache-2.0
"""pytest -p tools.core_mutants.contexts: record the lines of megatron.core that each test runs.

Lines that ranks execute (`tests.support.ranks`), and forked children of ranks or tests, count for
the test that started them. Programs that a test starts by a command line are not recorded. Neither
are killed ranks, which cannot write their lines.

The environment variable `OUT` names the file. Each of its lines is one JSON object: of a test
{"test", "seconds", "passed"}, or of the lines that one process executed for one test
{"test", "lines": {path below megatron.core: [line numbers]}}; the test "" is the import of modules.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

OUT = "CORE_MUTANTS_OUT"

#: What counts for lines that are executed when a module is imported.
IMPORT = ""


def core_folder() -> Path:
    """Return the folder of megatron.core without importing it."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))).resolve()


@dataclass
class Contexts:
    """Tests with their seconds, and the tests that execute a line: `covering[path][line]`."""

    seconds: dict[str, float] = field(default_factory=dict)
    covering: dict[str, dict[int, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )

    @classmethod
    def read(cls, path: Path) -> Contexts:
        """Read what this plugin wrote. Tests that failed or were skipped cover nothing."""
        contexts, executed = cls(), []
        with path.open(encoding="utf-8") as file:
            for text in file:
                entry = json.loads(text)
                if "lines" in entry:
                    executed.append(entry)
                elif entry["passed"]:
                    contexts.seconds[entry["test"]] = entry["seconds"]
        for entry in executed:
            if entry["test"] in contexts.seconds or entry["test"] == IMPORT:
                for name, lines in entry["lines"].items():
                    for line in lines:
                        contexts.covering[name][line].add(entry["test"])
        return contexts

    def tests_of(self, path: str, *line_ranges: range) -> list[str]:
        """Return the tests that execute a line of the first executed range, the fastest first.

        If only imports execute it, return the tests that execute any function of the module.
        """
        lines = self.covering.get(path, {})
        tests_by_range = (
            set().union(*(lines.get(line, set()) for line in line_range))
            for line_range in line_ranges
        )
        tests: set[str] = next(filter(None, tests_by_range), set())
        if tests == {IMPORT}:
            tests = set().union(*lines.values())
        return sorted(tests - {IMPORT}, key=lambda test: (self.seconds[test], test))


def _append(out: str, entry: dict[str, Any]) -> None:
    """Append one line in one call, so that processes do not mix theirs."""
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(entry, separators=(",", ":")).encode() + b"\n")
    finally:
        os.close(descriptor)


def _watch() -> Any:
    """Start coverage of megatron.core in this process."""
    from coverage import Coverage

    watched = Coverage(
        data_file=None, include=[f"{core_folder()}/*"], config_file=False, messages=False
    )
    watched.set_option("run:core", "ctrace")
    watched.start()
    return watched


def _executed(watched: Any, context: str | None) -> dict[str, list[int]]:
    """Return the lines that were executed, of one context or of all."""
    data, core = watched.get_data(), core_folder()
    data.set_query_contexts(None if context is None else [f"^{re.escape(context)}$"])
    lines = {
        Path(name).relative_to(core).as_posix(): sorted(data.lines(name) or ())
        for name in data.measured_files()
    }
    return {name: numbers for name, numbers in lines.items() if numbers}


def _tell_before_exit(tell: Callable[[], None]) -> None:
    """Have `tell` called before os._exit, which is how ranks and forked children leave."""
    leave = os._exit

    def exit_after_report(code: int) -> NoReturn:
        try:
            tell()
        finally:
            leave(code)

    os._exit = exit_after_report


def be_rank(test: str, out: str, *args: Any) -> None:
    """Be a rank of `tests.support.ranks` whose lines count for `test`."""
    from tests.support import ranks

    watched = _watch()
    _tell_before_exit(
        lambda: _append(out, {"test": test, "lines": _executed(watched, context=None)})
    )
    ranks._rank_main(*args)


class Recorder:
    """Watch the tests of this process, and the ranks that it starts."""

    def __init__(self, out: str) -> None:
        self.out = out
        self.test = IMPORT
        self.pid = os.getpid()
        self.passed = True
        self.watched = _watch()
        _tell_before_exit(self._tell_of_fork)

    def _tell_of_fork(self) -> None:
        if os.getpid() != self.pid:
            _append(self.out, {"test": self.test, "lines": _executed(self.watched, context=None)})

    def pytest_collection_finish(self) -> None:
        """Write down what imports have executed."""
        _append(self.out, {"test": IMPORT, "lines": _executed(self.watched, context=None)})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch one test with its fixtures."""
        from tests.support import ranks

        self.test, self.passed = item.nodeid, True
        original = ranks._rank_main
        ranks._rank_main = functools.partial(be_rank, self.test, self.out)
        self.watched.switch_context(self.test)
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            seconds = round(time.perf_counter() - begin, 3)
            ranks._rank_main = original
            lines = _executed(self.watched, self.test)
            _append(self.out, {"test": self.test, "lines": lines})
            record = {"test": self.test, "seconds": seconds, "passed": self.passed}
            _append(self.out, record)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure or a skip."""
        if report.nodeid == self.test and report.outcome != "passed":
            self.passed = False


def pytest_configure(config: pytest.Config) -> None:
    """Watch this process, if it runs tests itself."""
    if "workerinput" not in vars(config) and config.getoption("numprocesses", None):
        return
    from tests.support import ranks

    ranks.PRELOAD = (*ranks.PRELOAD, "coverage", "coverage.sqldata", __name__)
    config.pluginmanager.register(Recorder(os.environ[OUT]), "core-mutants-contexts")

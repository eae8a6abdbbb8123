# SPDX-License-Identifier: Apache-2.0
"""Record the features of tests and the layouts that they train, for `tools/write_status.py`.

pytest --status-out FILE                                    in tests, in ranks and in torchrun jobs
python -m tests.support.status_record MODULE ARGUMENTS      a module as a recorded program

A test has a feature by its mark `covers`. A layout is read from the objects of an applied training
step, or of a forward pass with a cache, so no layout is recorded that did not run. The session
fails if a test file with a feature ran no layout.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

#: The environment variable with the file's path; a line is one layout.
VARIABLE = "MEGATRON_TEST_LAYOUTS"


def install() -> None:
    """Wrap the models and steps of this process."""
    # Imported here, because a process without the recorder must not load these modules.
    from megatron.core.models import GPTModel
    from megatron.training.step import TrainStep

    models: WeakKeyDictionary[Any, tuple[bool, bool]] = WeakKeyDictionary()
    build, generate, train = GPTModel.__init__, GPTModel.forward, TrainStep.__call__
    lines: set[tuple[str, str]] = set()

    def write(store: Any, groups: Any, **names: str) -> None:
        grid, (has_experts, sequence_parallel) = groups.grid, models[store]
        expert_sizes = {"ep": grid.ep, "etp": grid.size("etp")} if has_experts else {}
        sizes = {"world": grid.world_size, **{axis: grid.size(axis) for axis in ("tp", "cp", "pp")}}
        layout = {**sizes, "dp": grid.dp, **expert_sizes, "sp": sequence_parallel, **names}
        path, line = os.environ.get(VARIABLE), json.dumps(layout, sort_keys=True)
        if path is not None and (path, line) not in lines:
            lines.add((path, line))
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    @functools.wraps(build)
    def built(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        build(self, config, *args, **kwargs)
        models[self.store] = (config.moe is not None, self.region.scatters)

    @functools.wraps(generate)
    def generated(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is not None:
            write(self.store, self.groups, strategy="generation")
        return generate(self, *args, cache=cache, **kwargs)

    @functools.wraps(train)
    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        report, engine = train(self, *args, **kwargs), self.engine
        strategy = engine.config.strategy
        if strategy != "no_shard" and not engine.placement.optimizer:
            return report  # a single data-parallel rank shards nothing
        if report.applied and engine.store in models:
            schedule = self.forward_backward.name if engine.groups["pp"].size > 1 else ""
            strategy = "hybrid" if engine.groups.grid.instances > 1 else strategy
            write(engine.store, engine.groups, strategy=strategy, schedule=schedule)
        return report

    GPTModel.__init__, GPTModel.forward, TrainStep.__call__ = built, generated, trained


def read(path: Path) -> list[dict[str, Any]]:
    """Return the distinct recorded layouts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in sorted(set(lines))]


def features_of(item: pytest.Item) -> list[str]:
    """Return the features that a test is marked with."""
    return [name for mark in item.iter_markers("covers") for name in mark.args]


class StatusRecord:
    """Collect the layouts of tests with features, and write them to a file.

    Args:
        out: output file of the reporting process; None in an xdist worker.
    """

    def __init__(self, out: Path | None) -> None:
        self.out, self.tests, self.failed = out, {}, set()
        self.complaints: list[str] = []
        self.folder, self.count = Path(tempfile.mkdtemp(prefix="layouts-")), 0
        install()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Let the processes of a test write to a separate file."""
        self.count += 1
        os.environ[VARIABLE] = str(self.folder / f"test{self.count}.jsonl")
        try:
            return (yield)
        finally:
            del os.environ[VARIABLE]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        """Attach features and layouts to the tear-down report."""
        if call.when == "teardown" and (features := features_of(item)):
            layouts = read(Path(os.environ[VARIABLE]))
            item.user_properties.append(("status", {"features": features, "layouts": layouts}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the layouts of a test, and whether it passed, set-up and tear-down included."""
        if not report.passed:
            self.failed.add(report.nodeid)
        properties = dict(report.user_properties) if report.when == "teardown" else {}
        if "status" in properties:
            outcome = {
                "passed": report.nodeid not in self.failed,
                "slow": "slow" in report.keywords,
            }
            self.tests[report.nodeid] = {**outcome, **properties["status"]}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, and fail an otherwise good session if a file's feature ran no layout.

        Counted by file, because a shared fixture trains only during the first test.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.out is None:
            return
        layouts: dict[tuple[str, str], int] = {}
        for nodeid, test in self.tests.items():
            for feature in test["features"] if test["passed"] else ():
                key = (nodeid.split("::")[0], feature)
                layouts[key] = layouts.get(key, 0) + len(test["layouts"])
        self.complaints = [
            f"{file} covers {feature!r} and ran no layout"
            for (file, feature), count in layouts.items()
            if not count
        ]
        if self.complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.tests), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the complaints."""
        for complaint in self.complaints:
            terminalreporter.write_line(f"status: {complaint}", red=True)


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

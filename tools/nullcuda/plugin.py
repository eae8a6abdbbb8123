# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs tests of GPUs over the null device, where no value means anything.

A test fails by an exception or by the exit code of a run, but not by wrong values: after a failed
`assert` the test continues, so that its last line runs too, and the comparisons of tests/support
return at once. Launches are the launches that the device has seen, by name.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch

from tools.nullcuda.device import calls, counters
from tools.nullcuda.values import plausible_tokens

#: Modules whose assertions are about values; those of tests/support say what a comparison says.
JUDGES = ("tests.gpu.", "tests.unit_tests.", "tests.functional_tests.")

#: Parts of names of whole runs that go on by what other ranks have sent: Muon by the sizes of their
#: matrices, a run that is stopped by control flags; and one that draws with matplotlib.
NOT_HERE = ("muon", "test_stopped_pipeline_run", "test_a_run_over_four_ranks_of_experts")
RUNS = "tests/functional_tests/"
#: What assertions that hold on any device speak of.
ENDS = {"code", "exit_code", "run_in_process"}


class _Unjudged(ast.NodeTransformer):
    """Wraps each `assert` so that it cannot fail a test, except asserts about exit codes."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert | ast.Try:
        names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
        if names & ENDS:
            return node
        handler = ast.ExceptHandler(
            type=ast.Name("AssertionError", ast.Load()), name=None, body=[ast.Pass()]
        )
        wrapped = ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[])
        return ast.fix_missing_locations(ast.copy_location(wrapped, node))


class _Loader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, **options: Any) -> CodeType:  # type: ignore[override]
        """Return the code of a test module without its judgement."""
        return compile(_Unjudged().visit(ast.parse(data)), path, "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        """Compile from the source: compiled files have the judgement."""
        return self.source_to_code(self.get_data(self.path), self.path)


class _Finder:
    """Finds tests for the null device before pytest rewrites their assertions."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a test module."""
        if not name.startswith(JUDGES):
            return None
        for folder in path or ():
            file = Path(folder) / f"{name.rpartition('.')[2]}.py"
            if file.is_file():
                loader = _Loader(name, str(file))
                return importlib.util.spec_from_file_location(name, file, loader=loader)
        return None


def _launched(function: Callable[[], object]) -> Any:
    """Return the launches of a call, like `tests.support.launch_kernels.launched`."""
    launch_kernels = importlib.import_module("tests.support.launch_kernels")
    function()
    with calls() as seen:
        function()
    kernels: Counter[str] = Counter()
    other_launches: Counter[str] = Counter()
    for (counter, name, _), count in seen.items():
        if counter == "triton_launches":
            kernels[name] += count
        elif counter in ("torch_launches", "fills") or counter.startswith("copies"):
            other_launches[name] += count
    return launch_kernels.Launched(kernels, other_launches)


def _agrees(*values: object, **options: object) -> float:
    """Compare nothing: the error is 0."""
    return 0.0


@contextlib.contextmanager
def _may_raise_assertion_error() -> Iterator[None]:
    with contextlib.suppress(AssertionError):
        yield


def _raises(expected: Any, *arguments: Any, **options: Any) -> Any:
    """Be `pytest.raises`, but for comparisons, which raise nothing here."""
    if expected is AssertionError and not arguments:
        return _may_raise_assertion_error()
    return _RAISES(expected, *arguments, **options)


_RAISES = pytest.raises


def pytest_configure(config: pytest.Config) -> None:
    """Replace what compares, before tests import it."""
    closeness = importlib.import_module("tests.support.closeness")
    for name in ("relative_error", "assert_close_by_metric", "assert_all_close"):
        setattr(closeness, name, _agrees)
    torch.testing.assert_close = _agrees
    torch.distributed.init_process_group = _without_peers
    pytest.raises = _raises  # type: ignore[assignment]
    importlib.import_module("tests.support.launch_kernels").launched = _launched
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


def _without_peers(backend: str | None = None, *arguments: Any, **options: Any) -> Any:
    """Be `init_process_group`; skip a test of symmetric memory, which the driver maps."""
    if backend == "nccl" and options.get("world_size") == 1 and "device_id" in options:
        pytest.skip("no memory of peers here")
    return _INIT_PROCESS_GROUP(backend, *arguments, **options)


_INIT_PROCESS_GROUP = torch.distributed.init_process_group


@pytest.fixture(autouse=True)
def _tokens_that_were_drawn() -> Any:
    with plausible_tokens():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out runs that cannot be here."""
    left_out = [
        item
        for item in items
        if item.nodeid.startswith(RUNS) and any(pattern in item.nodeid for pattern in NOT_HERE)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a test in which CUDA refused a call, or the device did not know one."""
    before = counters()
    result = yield
    after = counters()
    refuses = item.get_closest_marker("refused") is not None
    for fault in ("unsupported",) if refuses else ("refused", "unsupported"):
        if after[fault] > before[fault]:
            raise RuntimeError(f"{after[fault] - before[fault]} calls {fault}: see stderr")
    return result

# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that compiles every launch of a Triton kernel for a GPU, and launches none.

    TRITON_CACHE_DIR=/tmp/cache python -m pytest -p tests.support.compile_only FILES
    RECORD_LAUNCHES=launches.jsonl python -m pytest -p tests.support.compile_only FILES

The second form compiles nothing: it writes each launch as `tools.gpu_compile.launch` describes it.

The interpreter takes what the compiler refuses: an argument of 1, which becomes a constant, a type
that changes in a loop, a mask of another shape. Here the very calls of a test are compiled, with
what their arguments are. As nothing runs, results mean nothing: a test passes if it compiles.
No GPU is needed. The first lines of each failure are listed at the end.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

import megatron.core.ops
from megatron.core.ops import recurrence
from tests.support import closeness
from tools.gpu_compile.launch import CANDIDATE, TEST, Launch, write

CAPABILITY = int(os.environ.get("COMPILE_FOR", "90"))


class FakeDriver:
    """A Triton driver that reports a GPU of the given capability."""

    def get_current_target(self) -> GPUTarget:
        """Return the compilation target."""
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        """Return device 0."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


class Compiled:
    """The kernels that were compiled in this process.

    Attributes:
        kernels: hashes of the compiled variants, by kernel.
        problems: failed compilations: (kernel, error) -> test.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, set[str]] = {}
        self.problems: dict[tuple[str, str], str] = {}
        self.test = ""

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Compile a kernel launch."""
        name = kernel.fn.__name__
        try:
            compiled_kernel = _RUN(kernel, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # whatever the compiler says
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.problems.setdefault((name, (lines or [repr(error)])[-1][:200]), self.test)
        else:
            self.kernels.setdefault(name, set()).add(compiled_kernel.hash)


class Recorded(Compiled):
    """The launches of this process, recorded without compiling.

    Args:
        path: output file.

    Attributes:
        launches: launches by their JSON.
        source: the source of the launches that follow.
        candidate: the launch options of a tuning trial in progress; empty outside a trial.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.launches, self.source, self.candidate = path, {}, TEST, {}
        triton.knobs.runtime.jit_cache_hook = self._record

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Record a kernel launch."""
        args = [_stand_in(x) for x in args]
        options = {name: _stand_in(x) for name, x in options.items()}
        _RUN(kernel, *args, grid=grid, warmup=True, **options)

    def _record(self, *, fn: Any, compile: dict, **_: Any) -> bool:
        """Record a specialization; return True, which tells Triton to skip the compilation."""
        options = json.loads(compile["specialization_data"])["options"]
        (attributes,) = compile["configs"]
        launch = Launch.of_call(
            fn.jit_function, compile["signature"], compile["constants"], attributes, options
        )
        if self.candidate and launch.started_with(self.candidate):
            words = (f"{k}={v}" for k, v in self.candidate.items())
            name = f"{launch.kernel} {' '.join(words)}"
            launch = replace(launch, name=name, source=CANDIDATE)
        else:
            launch = replace(launch, source=self.source)
        key = json.dumps(asdict(launch), sort_keys=True)
        self.launches.setdefault(key, launch)
        self.kernels.setdefault(launch.kernel, set()).add(key)
        return True

    def write(self) -> None:
        """Write the launches."""
        write(self.path, self.launches.values())


def _stand_in(value: Any) -> Any:
    """Replace a fake tensor by a mock that Triton can specialize."""
    return MockTensor(value.dtype, value.shape) if isinstance(value, FakeTensor) else value


_RUN = JITFunction.run


def replace_launches(run: Callable[..., None]) -> None:
    """Call `run` for every launch.

    Kernels are imported for the compiler first; tests then see the interpreter's environment.
    """
    for module in pkgutil.walk_packages(megatron.core.ops.__path__, "megatron.core.ops."):
        if module.name.endswith(("triton", "kernels")):
            importlib.import_module(module.name)
    os.environ["TRITON_INTERPRET"] = "1"
    if CAPABILITY >= 100:
        sweep = importlib.import_module("megatron.core.ops.recurrence.sweep.triton")
        for module in (sweep, recurrence):
            module.uses_tensor_memory = lambda x: x.dtype != torch.float32
    triton.runtime.driver.set_active(FakeDriver())
    JITFunction.run = lambda kernel, *args, **options: run(kernel, *args, **options)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replace kernel launches and disable the comparison of results."""
    path = os.environ.get("RECORD_LAUNCHES")
    compiled = Recorded(Path(path)) if path else Compiled()
    early_config.stash[_COMPILED] = compiled
    replace_launches(compiled.run)

    # Before tests import the comparisons: with no mismatch a test runs to its last launch.
    closeness.relative_error = lambda *_, **__: 0.0
    closeness.assert_close_by_metric = lambda *_, **__: 0.0
    torch.testing.assert_close = lambda *_, **__: None
    gpu_agreement = importlib.import_module("tests.support.gpu_agreement")
    gpu_agreement.DTYPES = (torch.float32, torch.bfloat16)


_COMPILED = pytest.StashKey[Compiled]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Ignore failures of a test: its results have no meaning."""
    item.config.stash[_COMPILED].test = item.nodeid
    try:
        yield
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a kernel did not compile, or if none was launched."""
    compiled = session.config.stash[_COMPILED]
    if isinstance(compiled, Recorded):
        compiled.write()
    if compiled.problems or not compiled.kernels:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the number of compiled variants and the failures."""
    compiled = config.stash[_COMPILED]
    for (name, problem), test in sorted(compiled.problems.items()):
        terminalreporter.write_line(f"not compiled: {name}: {problem} ({test})")
    variants = sum(map(len, compiled.kernels.values()))
    verb = "recorded" if isinstance(compiled, Recorded) else "compiled"
    terminalreporter.write_line(
        f"{verb} {variants} variants of {len(compiled.kernels)} kernels for sm_{CAPABILITY}"
    )

# SPDX-License-Identifier: Apache-2.0
"""The device of the GPU tests: a GPU, or in a rehearsal the CPU, without tests that need a GPU;
and the implementations that the test module of an op compares with its equation."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest
import torch

from megatron.core import choose_device
from tests.support.gpu_agreement import DTYPES, REHEARSES, Backend

if REHEARSES:
    from tests.support.tensor_core_rounding import round_like_a_gpu

    round_like_a_gpu()

#: Exit code of a process whose device refuses all further work.
DEVICE_LOST = 70


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU, or the CPU in a rehearsal."""
    return choose_device("cpu" if REHEARSES else "cuda")


#: The interpreter computes bf16 in fp32, and takes twice the time for both.
BACKENDS = [
    *(pytest.param(("reference", x), id=f"cpu-{str(x)[6:]}") for x in (*DTYPES, torch.float64)),
    pytest.param(("triton", torch.float32), id="kernel-float32", marks=pytest.mark.gpu),
    pytest.param(
        ("triton", torch.bfloat16), id="kernel-bfloat16", marks=[pytest.mark.gpu, pytest.mark.slow]
    ),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """An implementation of ops, its device and its dtype."""
    implementation, dtype = request.param
    on_gpu = implementation == "triton" and not REHEARSES
    return Backend(implementation, choose_device("cuda" if on_gpu else "cpu"), dtype)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of the machine in a rehearsal."""
    if not REHEARSES:
        return
    machines = [item for item in items if item.get_closest_marker("machine")]
    config.hook.pytest_deselected(items=machines)
    items[:] = [item for item in items if item not in machines]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End this process after a failure that the device does not recover from.

    An illegal access makes every later call of the process fail, so no later test would count.
    pytest-xdist reports the test as failed and continues in a new process.
    """
    report = yield
    if call.excinfo is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            capture = item.config.pluginmanager.getplugin("capturemanager")
            if capture is not None:
                capture.suspend_global_capture(in_=True)
            print(f"{item.nodeid}: the device is lost: {error}", file=sys.stderr)
            print(report.longreprtext, file=sys.stderr, flush=True)
            os._exit(DEVICE_LOST)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a file with only tests of the machine pass a rehearsal."""
    if REHEARSES and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK

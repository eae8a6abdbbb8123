# SPDX-License-Identifier: Apache-2.0
"""The device of the tests that need one; in a rehearsal the CPU, without what only a GPU can do."""

from __future__ import annotations

import pytest
import torch

from megatron.core.device import choose_device
from tests.support.gpu_agreement import REHEARSES


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU, or where a rehearsal runs."""
    return choose_device("cpu" if REHEARSES else "cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of the machine itself out of a rehearsal."""
    if not REHEARSES:
        return
    machines = [item for item in items if item.get_closest_marker("machine")]
    config.hook.pytest_deselected(items=machines)
    items[:] = [item for item in items if item not in machines]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a file pass a rehearsal that has only tests of the machine itself."""
    if REHEARSES and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK

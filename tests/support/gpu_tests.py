# SPDX-License-Identifier: Apache-2.0
"""pytest --device cuda: run the tests with the mark `gpus` with one GPU per rank, over NCCL.

`gpus(2)` states the number of GPUs that a test needs, `gpus("world")` the parameter that holds this
number. Tests without the mark are deselected, and tests that need more GPUs than the machine has
are skipped. `--gpus 2` fails the session on a machine with fewer GPUs, instead of skipping.
"""

from __future__ import annotations

import pytest

from tests.support import ranks


class GpuTests:
    """Select the tests of a GPU session.

    Args:
        least: minimum number of GPUs of the session.

    Raises:
        pytest.UsageError: torch sees fewer.
    """

    def __init__(self, least: int = 1) -> None:
        self.count = ranks.gpu_count()
        if not self.count:
            raise pytest.UsageError("--device cuda: torch sees no GPU")
        if self.count < least:
            raise pytest.UsageError(f"--gpus {least}: torch sees {self.count} of them")
        ranks.DEVICES.append("cuda")

    def pytest_unconfigure(self) -> None:
        """Restore the device of ranks."""
        ranks.DEVICES.pop()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Select the tests marked `gpus`; skip a test that needs more GPUs than there are."""
        needed = {item: gpus_of(item) for item in items}
        config.hook.pytest_deselected(items=[i for i, n in needed.items() if n is None])
        items[:] = [item for item, n in needed.items() if n is not None]
        for item, count in needed.items():
            if count is not None and count > self.count:
                reason = f"needs {count} GPUs, and torch sees {self.count}"
                item.add_marker(pytest.mark.skip(reason=reason))


def gpus_of(item: pytest.Item) -> int | None:
    """Return the number of GPUs that a test needs; None for a CPU test."""
    mark = item.get_closest_marker("gpus")
    if mark is None:
        return None
    (count,) = mark.args
    return item.callspec.params[count] if isinstance(count, str) else count  # type: ignore

# SPDX-License-Identifier: Apache-2.0
"""pytest --device cuda: tests that carry the mark gpus run with a GPU for every rank, over NCCL.

`gpus(2)` says how many GPUs a test needs, `gpus("world")` which of its parameters says it. Tests
without the mark are deselected, those that need more GPUs than there are skipped. `--gpus 2` ends
the session where there are fewer, which would skip what it is for.
"""

from __future__ import annotations

import pytest

from tests.support import ranks


class GpuTests:
    """Choose the tests of a session on GPUs.

    Args:
        least: how many GPUs the session is for.

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
        """Leave ranks where they were."""
        ranks.DEVICES.pop()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the tests that say how many GPUs they need; skip those that need more."""
        needed = {item: gpus_of(item) for item in items}
        config.hook.pytest_deselected(items=[i for i, n in needed.items() if n is None])
        items[:] = [item for item, n in needed.items() if n is not None]
        for item, count in needed.items():
            if count is not None and count > self.count:
                reason = f"needs {count} GPUs, and torch sees {self.count}"
                item.add_marker(pytest.mark.skip(reason=reason))


def gpus_of(item: pytest.Item) -> int | None:
    """Return the number of GPUs that a test needs; None if it is for CPUs alone."""
    mark = item.get_closest_marker("gpus")
    if mark is None:
        return None
    (count,) = mark.args
    return item.callspec.params[count] if isinstance(count, str) else count  # type: ignore

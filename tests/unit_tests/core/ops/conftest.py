# SPDX-License-Identifier: Apache-2.0
"""Processes beside the tests, the interpreter's and the compiler's: each on a core, two at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

AT_ONCE = 2


class Beside:
    """Calls that wait for a process of their own.

    All that the collected tests will ask for begin when the first of them asks.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._begun: dict[Any, Future] = {}

    def begin(self, key: Any, call: Callable[[], Any]) -> None:
        """Start a call unless it has begun."""
        if key not in self._begun:
            self._begun[key] = self._pool.submit(call)

    def result(self, key: Any) -> Any:
        """Return what the call returned, or raise what it raised."""
        return self._begun[key].result()


@pytest.fixture(scope="session")
def beside(request: pytest.FixtureRequest) -> Iterator[Beside]:
    """Start what tests marked `beside(key, call)` wait for, in their order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = Beside(pool)
        for item in request.session.items:
            for mark in item.iter_markers("beside"):
                found.begin(*mark.args)
        yield found

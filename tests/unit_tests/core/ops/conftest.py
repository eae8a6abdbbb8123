# SPDX-License-Identifier: Apache-2.0
"""Processes beside the tests, the interpreter's and the compiler's: two at once, at low priority.

They begin with the session, long before a test asks for what they say: other tests wait for ranks,
signals and files, and leave a core idle. In a worker of xdist, which runs a part of the tests
beside other workers, each begins when a test asks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.tensor_core_rounding import round_like_a_gpu

    round_like_a_gpu()

AT_ONCE = 2

#: Tests that hold ranks to seconds go first. On Linux a thread has a priority of its own, and the
#: processes that it starts inherit it.
NICENESS = 5

#: Seconds after which a test that waits for such a process hangs: it may have the least of a core.
TIMEOUT = 600


_BACKGROUND: pytest.StashKey[BackgroundCalls] = pytest.StashKey()


class BackgroundCalls:
    """Calls that wait for a process of their own."""

    def __init__(self, pool: ThreadPoolExecutor, session: pytest.Session) -> None:
        self._pool = pool
        self._calls = dict(
            mark.args for item in session.items for mark in item.iter_markers("background")
        )
        self._begun: dict[Any, Future] = {}

    def begin_all(self) -> None:
        """Start the calls that collected tests are marked with, in their order, each once."""
        for key in self._calls:
            self._begin(key)

    def result(self, key: Any) -> Any:
        """Return what the call returned, or raise what it raised."""
        return self._begin(key).result()

    def _begin(self, key: Any) -> Future:
        if key not in self._begun:
            self._begun[key] = self._pool.submit(self._calls[key])
        return self._begun[key]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that wait for a process the time that it may need, where they set none."""
    for item in items:
        if item.get_closest_marker("background") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Begin what any test will ask for, unless this is a worker of xdist."""
    works = "PYTEST_XDIST_WORKER" in os.environ
    niceness = 0 if works else NICENESS
    with ThreadPoolExecutor(AT_ONCE, initializer=os.nice, initargs=(niceness,)) as pool:
        background = session.stash[_BACKGROUND] = BackgroundCalls(pool, session)
        if not session.config.option.collectonly and not works:
            background.begin_all()
        try:
            return (yield)
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def background(request: pytest.FixtureRequest) -> BackgroundCalls:
    """Return what tests marked `background(key, call)` wait for."""
    return request.session.stash[_BACKGROUND]

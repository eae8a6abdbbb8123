# SPDX-License-Identifier: Apache-2.0
"""Background processes of the tests, for the interpreter and the compiler.

Two run at a time, at low priority. They start with the session, long before a test needs their
output, because other tests wait for ranks, signals and files and leave a core idle. In an xdist
worker, which runs a subset of the tests, each process starts when a test requests its output.
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

MAX_PROCESSES = 2

#: Tests with time limits on ranks have priority. On Linux a thread has its own niceness, which the
#: processes that it starts inherit.
NICENESS = 5

#: Seconds after which a waiting test fails: at low priority a process gets little of a core.
TIMEOUT = 600


_BACKGROUND: pytest.StashKey[BackgroundCalls] = pytest.StashKey()


class BackgroundCalls:
    """Calls that each run a process and wait for it."""

    def __init__(self, pool: ThreadPoolExecutor, session: pytest.Session) -> None:
        self._pool = pool
        self._calls = dict(
            mark.args for test in session.items for mark in test.iter_markers("background")
        )
        self._futures: dict[Any, Future] = {}

    def start_all(self) -> None:
        """Start the calls of all collected tests, in order, each once."""
        for key in self._calls:
            self._start(key)

    def result(self, key: Any) -> Any:
        """Return the return value of the call, or raise its exception."""
        return self._start(key).result()

    def _start(self, key: Any) -> Future:
        if key not in self._futures:
            self._futures[key] = self._pool.submit(self._calls[key])
        return self._futures[key]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the timeout of tests that wait for a process, unless they set one."""
    for test in items:
        if test.get_closest_marker("background") and not test.get_closest_marker("timeout"):
            test.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Start the calls of all tests, unless this is an xdist worker."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    niceness = 0 if is_worker else NICENESS
    with ThreadPoolExecutor(MAX_PROCESSES, initializer=os.nice, initargs=(niceness,)) as pool:
        background = session.stash[_BACKGROUND] = BackgroundCalls(pool, session)
        if not session.config.option.collectonly and not is_worker:
            background.start_all()
        try:
            return (yield)
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def background(request: pytest.FixtureRequest) -> BackgroundCalls:
    """Return the calls of tests marked `background(key, call)`."""
    return request.session.stash[_BACKGROUND]

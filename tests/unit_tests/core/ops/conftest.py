# SPDX-License-Identifier: Apache-2.0
"""Processes beside the tests, the interpreter's and the compiler's: two at once, at low priority.

They begin with the session, long before a test asks for what they say: other tests wait for ranks,
signals and files, and leave a core idle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

AT_ONCE = 2

#: Tests that hold ranks to seconds go first. On Linux a thread has a priority of its own, and the
#: processes that it starts inherit it.
NICENESS = 5


_BESIDE: pytest.StashKey[Beside] = pytest.StashKey()


class Beside:
    """Calls that wait for a process of their own."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._begun: dict[Any, Future] = {}

    def begin_all(self, session: pytest.Session) -> None:
        """Start the calls that collected tests are marked with, in their order, each once."""
        for item in session.items:
            for mark in item.iter_markers("beside"):
                self._begin(*mark.args)

    def _begin(self, key: Any, call: Callable[[], Any]) -> None:
        if key not in self._begun:
            self._begun[key] = self._pool.submit(call)

    def result(self, key: Any) -> Any:
        """Return what the call returned, or raise what it raised."""
        return self._begun[key].result()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Begin what any test will ask for; in a worker of xdist, which runs a part of the tests, when
    the first of them asks."""
    with ThreadPoolExecutor(AT_ONCE, initializer=os.nice, initargs=(NICENESS,)) as pool:
        beside = session.stash[_BESIDE] = Beside(pool)
        if not session.config.option.collectonly and "PYTEST_XDIST_WORKER" not in os.environ:
            beside.begin_all(session)
        try:
            return (yield)
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def beside(request: pytest.FixtureRequest) -> Beside:
    """Return what tests marked `beside(key, call)` wait for."""
    found = request.session.stash[_BESIDE]
    found.begin_all(request.session)
    return found

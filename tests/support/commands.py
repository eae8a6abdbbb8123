# SPDX-License-Identifier: Apache-2.0
"""Run entry points in tests: in this process, or on ranks that one launcher starts."""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tests.support.launchers import serve_store
from tests.support.optimized_steps import note_optimized_steps
from tests.support.ranks import start_ranks

Main = Callable[[Sequence[str], Mapping[str, str]], int]


class Outcome(NamedTuple):
    """How a command ended; `steps` counts steps of the optimized forward, on ranks only."""

    code: int
    out: str
    err: str
    steps: int = 0


def run(
    main: Main, words: Sequence[object], environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run an entry point in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words], environment or {})
    return Outcome(code, out.getvalue(), err.getvalue())


def run_rank(
    rank: int, world: int, main: Main, words: Sequence[object], launcher: Mapping[str, str]
) -> Outcome:
    """Run an entry point as a rank of a launcher, in a process of its own."""
    steps: list[int] = []
    note_optimized_steps(steps)
    outcome = run(main, words, {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    return outcome._replace(steps=len(steps))


def run_on_ranks(main: Main, words: Sequence[object], world: int = 2) -> list[Outcome]:
    """Run an entry point on ranks; return each rank's outcome."""
    _store, launcher = serve_store(world)
    with start_ranks(run_rank, world, main, list(words), launcher, init=False) as ranks:
        return ranks.values(timeout=60.0)


def refusal(outcome: Outcome) -> str:
    """Check that a command refused its options or files in one line; return the line."""
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert outcome.err.count("\n") == 1, outcome.err
    return outcome.err


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]

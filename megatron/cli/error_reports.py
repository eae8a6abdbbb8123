# SPDX-License-Identifier: Apache-2.0
"""Decide which rank prints an error, and delay the exit of ranks that print nothing.

A launcher kills all processes as soon as one has exited. A rank that exits silently could thus kill
the rank that is about to print the reason, and the run would end without one. So a rank exits only
after the reason has been printed:

- Before the ranks share a store, rank 0 prints. The first rank of every other machine prints too,
  if rank 0 has not ended the run by then. All other ranks wait for a few seconds.
- As soon as the ranks share a store, the first rank that reports a text prints it, and every other
  rank that reports the same text waits until it is printed. If all ranks exit together, rank 0
  reports first, and a rank that exits waits a moment for other ranks' errors.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from megatron.cli.other_launchers import other_launcher

if TYPE_CHECKING:
    import torch.distributed as dist

#: Seconds that ranks other than 0 hold back an error before the ranks share a store.
PATIENCE_SECONDS = 5.0

#: Seconds that a rank waits until another rank has printed an error.
PRINTED_SECONDS = 5.0

#: Seconds that a rank which exits with an error waits for other ranks' errors.
OTHERS_SECONDS = 2.0

_LOOK_SECONDS = 0.01


class Claims:
    """Texts claimed and printed by some rank, recorded in a store that all ranks share.

    Methods do not fail if the store is lost: a text printed twice is better than one never printed.

    Args:
        store: a client of the store, with keys of this attempt alone.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def claim(self, text: str) -> bool:
        """Return True on the first rank that claims `text`, False on all later ones."""
        try:
            return self._store.add(f"said/{text[:200]}", 1) == 1
        except Exception:
            return True

    def note_printed(self, text: str) -> None:
        """Record that `text` has been printed."""
        with contextlib.suppress(Exception):
            self._store.set(f"printed/{text[:200]}", "1")
            self._store.set("printed", "1")

    def wait_until_printed(
        self, text: str | None = None, *, seconds: float = PRINTED_SECONDS
    ) -> None:
        """Wait until a rank has printed `text` (None: any text), at most `seconds`."""
        key = "printed" if text is None else f"printed/{text[:200]}"
        self._wait(lambda: self._store.check([key]), seconds)

    def wait_for_others(self, world_size: int) -> None:
        """Wait until every rank has exited with an error, at most `OTHERS_SECONDS`."""
        with contextlib.suppress(Exception):
            self._store.add("ended", 1)
        self._wait(lambda: self._store.add("ended", 0) >= world_size, OTHERS_SECONDS)

    @staticmethod
    def _wait(is_done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Exception):
            while not is_done() and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)


class ErrorReports:
    """Decides whether this process prints a text.

    Args:
        environment: environment variables, in which the launcher passes the rank.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._rank, self._local_rank = _rank_of_process(environment)
        self._speaking = threading.Lock()
        self._joining = False
        self.claims: Claims | None = None
        """Claims shared with the other ranks; None before the ranks share a store."""
        self.waits_for = 1
        """Number of ranks that exit together with this one after an error."""

    def join(self) -> None:
        """Record that this process is about to join the other ranks: an error from now on concerns
        this process alone, so it prints the error."""
        self._joining = True

    def share(self, store: dist.Store, *, world_size: int = 1) -> None:
        """Coordinate with the other ranks from now on.

        Args:
            store: see `Claims`.
            world_size: number of ranks whose errors are awaited; 1 awaits none.
        """
        self.claims, self.waits_for = Claims(store), world_size

    @contextlib.contextmanager
    def report(self, text: str) -> Iterator[bool]:
        """Yield whether this process prints `text`; the process exits afterwards."""
        claims, together = self.claims, self.waits_for > 1
        with contextlib.suppress(KeyboardInterrupt):
            if claims is None and self._rank:
                time.sleep(PATIENCE_SECONDS)
            elif claims is not None and self._rank and together:
                claims.wait_until_printed(text, seconds=OTHERS_SECONDS)
        with self.line(text) as prints:
            yield prints
        if claims is not None and together:
            with contextlib.suppress(KeyboardInterrupt):
                claims.wait_for_others(self.waits_for)

    @contextlib.contextmanager
    def line(self, text: str) -> Iterator[bool]:
        """Yield whether this process prints `text`; may be called from another thread."""
        claims = self.claims
        with self._speaking:
            prints = self._is_first_of_machine() if claims is None else claims.claim(text)
            try:
                yield prints
            finally:
                if prints and claims is not None:
                    claims.note_printed(text)
        if not prints and claims is not None:
            with contextlib.suppress(KeyboardInterrupt):
                claims.wait_until_printed(text)

    def wait_for_line(self, seconds: float) -> None:
        """Let a thread that has claimed a text print it before the process exits."""
        self._speaking.acquire(timeout=seconds)

    def _is_first_of_machine(self) -> bool:
        # Every rank of a machine has the same errors in the same options.
        return self._joining or self._local_rank == 0


def _rank_of_process(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank, local rank); (0, 0), a rank that prints, if they cannot be read."""
    try:
        return int(environment["RANK"]), int(environment["LOCAL_RANK"])
    except KeyError:
        launcher = other_launcher(environment)
        return (0, 0) if launcher is None else (launcher.rank, launcher.rank)
    except ValueError:
        return 0, 0

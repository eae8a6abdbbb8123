# SPDX-License-Identifier: Apache-2.0
"""Which rank prints an error, and how long the ranks that print nothing stay.

A launcher ends all processes as soon as one has ended. A rank that ends in silence could thus end
the rank that is about to print why, and the run would end without a reason. So a rank only ends
after the reason has been printed:

- Before the ranks share a store, rank 0 prints, and the first rank of every other machine if rank 0
  has ended nothing by then: all other ranks wait for a few seconds.
- As soon as the ranks share a store, the first rank that comes with a text prints it, and every
  other rank that comes with the same text waits until it is printed. Where all ranks end together,
  rank 0 comes first, and a rank that ends waits a moment for what the other ranks have to print.
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

#: How long a rank other than 0 keeps an error to itself before the ranks share a store, in seconds.
PATIENCE_SECONDS = 5.0

#: How long a rank waits until another rank has printed an error, in seconds.
PRINTED_SECONDS = 5.0

#: How long a rank that ends with an error waits for the errors of the other ranks, in seconds.
OTHERS_SECONDS = 2.0

_LOOK_SECONDS = 0.01


class Claims:
    """Which texts have been claimed and printed by some rank, in a store that all ranks share.

    Nothing here fails when the store is gone: better a text is printed twice than never.

    Args:
        store: a client of the store, with keys of this start alone.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def claim(self, text: str) -> bool:
        """Return True on the first rank that wants to print `text`, False on all later ones."""
        try:
            return self._store.add(f"said/{text[:200]}", 1) == 1
        except Exception:
            return True

    def note_printed(self, text: str) -> None:
        """Tell the other ranks that `text` has been printed."""
        with contextlib.suppress(Exception):
            self._store.set(f"printed/{text[:200]}", "1")
            self._store.set("printed", "1")

    def wait_until_printed(
        self, text: str | None = None, *, seconds: float = PRINTED_SECONDS
    ) -> None:
        """Wait until a rank has printed `text`, or so long; None for any text."""
        key = "printed" if text is None else f"printed/{text[:200]}"
        self._wait(lambda: self._store.check([key]), seconds)

    def wait_for_others(self, world_size: int) -> None:
        """Wait until every rank has ended with an error, at most `OTHERS_SECONDS`."""
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
    """Decide for the texts of one process whether it prints them.

    Args:
        environment: of this process, where its launcher gives its rank.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._rank, self._local_rank = _rank_of_process(environment)
        self._speaking = threading.Lock()
        self._joining = False
        self.claims: Claims | None = None
        """Shared with the other ranks; None before the ranks share a store."""
        self.waits_for = 1
        """Ranks that end together with this one when it ends with an error."""

    def join(self) -> None:
        """Take note that this process is about to meet the others: what keeps it from that concerns
        it alone, and it prints that."""
        self._joining = True

    def share(self, store: dist.Store, *, world_size: int = 1) -> None:
        """Agree with the other ranks from here on.

        Args:
            store: see `Claims`.
            world_size: ranks whose errors are waited for; 1 waits for none.
        """
        self.claims, self.waits_for = Claims(store), world_size

    @contextlib.contextmanager
    def report(self, text: str) -> Iterator[bool]:
        """Yield whether this process prints `text`, with which it ends."""
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
        """Yield whether this process prints `text`; another thread may call this."""
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
        """Let a thread that has claimed a text print it, before the process ends at once."""
        self._speaking.acquire(timeout=seconds)

    def _is_first_of_machine(self) -> bool:
        # Every rank of a machine meets the same faults in the same options.
        return self._joining or self._local_rank == 0


def _rank_of_process(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank, local rank); (0, 0) where they cannot be read, which is what is printed."""
    try:
        return int(environment["RANK"]), int(environment["LOCAL_RANK"])
    except KeyError:
        launcher = other_launcher(environment)
        return (0, 0) if launcher is None else (launcher.rank, launcher.rank)
    except ValueError:
        return 0, 0

# SPDX-License-Identifier: Apache-2.0
"""Compare every collective between its ranks before it starts (`--check-collectives`).

Ranks that enter different collectives wait for each other without end, or mix up numbers. With the
check each rank of a group writes the collective that it is about to enter to the store, and reads
what the others wrote about the same position in the group's sequence. All ranks see a difference
before anything is sent. Sends and receives are left out, between pipeline stages and in a ring of
context-parallel ranks: their order is fixed by a schedule, and the two ends reach them at different
times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megatron.cli.errors import ExitCode, PeerLost, RunStopped
from megatron.core.comm import CollectiveRecord
from megatron.training.failures.hang_files import BETWEEN_TWO, describe
from megatron.training.failures.peers import PeerWatch

#: How long to wait for the others before looking whether they live, in seconds.
SLICE_SECONDS = 1.0


class CollectiveCheck:
    """An observer of process groups that raises where ranks differ.

    Args:
        store: a client of the run's store for this alone.
        rank: of this process.
        timeout_seconds: how long to wait for the slowest rank.
        watch: who lives, and which iteration this rank is in.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        timeout_seconds: float,
        watch: PeerWatch,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        # Not torch's PrefixStore: that cannot delete keys of a store made in Python.
        self._store = store
        self._rank, self._timeout_seconds, self._watch = rank, timeout_seconds, watch
        self._now = now
        self._counts: dict[str, int] = {}
        self.compared = 0
        """Collectives that were compared so far."""

    def __call__(self, record: object) -> None:
        """Compare a collective that is about to start.

        Raises:
            RunStopped: the ranks of its group differ.
            PeerLost: a rank of its group is gone, or has come to another group's collective.
        """
        assert isinstance(record, CollectiveRecord)
        if record.kind in BETWEEN_TWO:
            return
        group = f"{record.group}/{'-'.join(map(str, record.ranks))}"
        number = self._counts.get(group, 0) + 1
        self._counts[group] = number
        mine = f"{describe(record)} in iteration {self._watch.iteration}"
        self._store.set(_key(group, number, self._rank), mine)
        self._store.set(_key("at", self._rank), json.dumps([group, number, mine]))
        keys = [_key(group, number, rank) for rank in record.ranks]
        self._wait(keys, record, mine)
        found = [self._store.get(key).decode() for key in keys]
        # All have come here, so all have read what was written about the one before.
        if number > 1:
            self._store.delete_key(_key(group, number - 1, self._rank))
        self.compared += 1
        if len(set(found)) > 1:
            raise RunStopped(ExitCode.COLLECTIVES_DIFFER, _difference(record, number, found))

    def _wait(self, keys: list[str], record: CollectiveRecord, mine: str) -> None:
        """Wait until every rank of the group has come."""
        deadline = self._now() + self._timeout_seconds
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=SLICE_SECONDS))
                return
            except dist.DistStoreError:
                if gone := self._watch.diagnose(0.0):
                    raise PeerLost(
                        f"{gone.text}; the others wait in {mine}", told=gone.told
                    ) from None
            found = self._elsewhere(keys, record)
            stuck = any(waits for _, waits in found.values())
            if found and (stuck or self._now() > deadline):
                where = {self._rank: mine, **{rank: text for rank, (text, _) in found.items()}}
                shown = "; ".join(f"rank {rank}: {where[rank]}" for rank in sorted(where))
                end = "these wait for each other" if stuck else "the time for it is over"
                raise RunStopped(
                    ExitCode.COLLECTIVES_DIFFER,
                    f"ranks came to different collectives and {end}: {shown}",
                ) from None

    def _elsewhere(self, keys: list[str], record: CollectiveRecord) -> dict[int, tuple[str, bool]]:
        """Return what the ranks that have not come did last, and whether each waits for this rank
        there: then neither can ever go on."""
        found = {}
        for rank, key in zip(record.ranks, keys, strict=True):
            if self._store.check([key]):
                continue
            text, waits = "no collective yet", False
            if self._store.check([_key("at", rank)]):
                group, number, text = json.loads(self._store.get(_key("at", rank)))
                members = group.rpartition("/")[2].split("-")
                waits = str(self._rank) in members and self._counts.get(group, 0) < number
            found[rank] = (text, waits)
        return found


def _difference(record: CollectiveRecord, number: int, found: list[str]) -> str:
    """Name what ranks are about to do, ranks of the same mind together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in zip(record.ranks, found, strict=True):
        ranks.setdefault(text, []).append(rank)
    shown = [
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {text}"
        for text, who in sorted(ranks.items(), key=lambda item: item[1])
    ]
    return f"ranks differ in collective {number} over {record.group}: {'; '.join(shown)}"


def _key(*parts: object) -> str:
    """Return the name of a value in the store."""
    return "/".join(map(str, ("collectives", *parts)))

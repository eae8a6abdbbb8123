# SPDX-License-Identifier: Apache-2.0
"""Comparison of collectives between their ranks before they start (`--check-collectives`).

Ranks that enter different collectives wait for each other forever, or exchange wrong data. So each
rank of a group writes the collective that it is about to enter to the store, and reads what the
other ranks wrote for the same position in the group's sequence. All ranks see a difference before
any data is sent. Sends and receives are not compared, between pipeline stages and in a ring of
context-parallel ranks: a schedule fixes their order, and both ends reach them at different times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megatron.cli.errors import ExitCode, PeerLost, RunStopped
from megatron.core.comm import CollectiveRecord
from megatron.training.fault_tolerance.hang_files import POINT_TO_POINT, describe
from megatron.training.fault_tolerance.peers import PeerWatch

#: Seconds to wait for other ranks before checking whether they are alive.
POLL_SECONDS = 1.0


class CollectiveCheck:
    """Observer of process groups that raises if ranks enter different collectives.

    Args:
        store: a client of the run's store, used by this observer alone.
        rank: global rank of this process.
        timeout_seconds: how long to wait for the slowest rank.
        watch: which ranks are alive, and the current iteration of this rank.
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
        # torch's PrefixStore cannot delete keys of a store that was created in Python.
        self._store = store
        self._rank, self._timeout_seconds, self._watch = rank, timeout_seconds, watch
        self._now = now
        self._counts: dict[str, int] = {}
        self.compared = 0
        """Number of collectives compared so far."""

    def __call__(self, record: object) -> None:
        """Compare a collective that is about to start.

        Raises:
            RunStopped: the ranks of its group differ.
            PeerLost: a rank of its group has died, or has entered another group's collective.
        """
        assert isinstance(record, CollectiveRecord)
        if record.kind in POINT_TO_POINT:
            return
        group = f"{record.group}/{'-'.join(map(str, record.ranks))}"
        number = self._counts.get(group, 0) + 1
        self._counts[group] = number
        local_text = f"{describe(record)} in iteration {self._watch.iteration}"
        self._store.set(_key(group, number, self._rank), local_text)
        self._store.set(_key("at", self._rank), json.dumps([group, number, local_text]))
        keys = [_key(group, number, rank) for rank in record.ranks]
        self._wait(keys, record, local_text)
        texts = [self._store.get(key).decode() for key in keys]
        # All ranks have arrived here, so all have read the entries of the previous collective.
        if number > 1:
            self._store.delete_key(_key(group, number - 1, self._rank))
        self.compared += 1
        if len(set(texts)) > 1:
            raise RunStopped(ExitCode.COLLECTIVES_DIFFER, _difference(record, number, texts))

    def _wait(self, keys: list[str], record: CollectiveRecord, local_text: str) -> None:
        """Wait until every rank of the group has arrived."""
        deadline = self._now() + self._timeout_seconds
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=POLL_SECONDS))
                return
            except dist.DistStoreError:
                if failure := self._watch.diagnose(0.0):
                    raise PeerLost(
                        f"{failure.text}; the others wait in {local_text}",
                        is_reported=failure.is_reported,
                    ) from None
            late_ranks = self._late_ranks(keys, record)
            stuck = any(waits for _, waits in late_ranks.values())
            if late_ranks and (stuck or self._now() > deadline):
                where = {
                    self._rank: local_text,
                    **{rank: text for rank, (text, _) in late_ranks.items()},
                }
                ranks_text = "; ".join(f"rank {rank}: {where[rank]}" for rank in sorted(where))
                end = "they wait for each other" if stuck else "the timeout has expired"
                raise RunStopped(
                    ExitCode.COLLECTIVES_DIFFER,
                    f"ranks called different collectives and {end}: {ranks_text}",
                ) from None

    def _late_ranks(self, keys: list[str], record: CollectiveRecord) -> dict[int, tuple[str, bool]]:
        """Return the last collective of each rank that has not arrived, and whether that collective
        includes this rank: then the two ranks wait for each other forever."""
        late_ranks = {}
        for rank, key in zip(record.ranks, keys, strict=True):
            if self._store.check([key]):
                continue
            text, waits = "no collective yet", False
            if self._store.check([_key("at", rank)]):
                group, number, text = json.loads(self._store.get(_key("at", rank)))
                members = group.rpartition("/")[2].split("-")
                waits = str(self._rank) in members and self._counts.get(group, 0) < number
            late_ranks[rank] = (text, waits)
        return late_ranks


def _difference(record: CollectiveRecord, number: int, texts: list[str]) -> str:
    """Describe the different collectives, with the ranks that are about to enter each."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in zip(record.ranks, texts, strict=True):
        ranks_by_text.setdefault(text, []).append(rank)
    rank_texts = [
        f"rank{'s' * (len(text_ranks) > 1)} {', '.join(map(str, text_ranks))}: {text}"
        for text, text_ranks in sorted(ranks_by_text.items(), key=lambda entry: entry[1])
    ]
    return f"ranks differ in collective {number} over {record.group}: {'; '.join(rank_texts)}"


def _key(*segments: object) -> str:
    """Return the key of a value in the store."""
    return "/".join(map(str, ("collectives", *segments)))

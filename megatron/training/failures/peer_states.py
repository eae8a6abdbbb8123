# SPDX-License-Identifier: Apache-2.0
"""What the other ranks have written down about themselves, and what became of their processes.

Each rank beats in the run's store: where it is, and that it lives. A rank of the same machine is
also looked up in the process table, which tells at once.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch.distributed as dist

from megatron.training.failures.collective_log import CollectiveLog, describe
from megatron.training.failures.launcher import process_state

#: After this long in a collective a beat says who takes part in it, in seconds.
LONG_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class Identity:
    """Where a rank runs."""

    host: str
    pid: int


@dataclass(frozen=True)
class Wait:
    """A collective that a rank waits in.

    Args:
        group: its name.
        number: among those of the group; 0 for what is between two ranks.
        text: which it is.
        seconds: for how long.
        ranks: who takes part, once the wait is long.
    """

    group: str
    number: int
    text: str
    seconds: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank says of itself at one time.

    Args:
        count: of beats.
        iteration: that it works on.
        collectives: that it has come to.
        last: the last of them.
        at: when, by the clock of its machine.
        in_group: collectives by group.
        wait: where it waits.
    """

    count: int
    iteration: int
    collectives: int = 0
    last: str = "no collective yet"
    at: float | None = None
    in_group: dict[str, int]
    wait: Wait | None = None

    @staticmethod
    def now(count: int, iteration: int, log: CollectiveLog, *, final: bool = False) -> Beat:
        """Return that of this rank.

        Args:
            final: name those who take part in a collective however short the wait.
        """
        entry, wait = log.stuck(), None
        if entry is not None:
            seconds = (entry.ended or time.monotonic()) - entry.waited
            ranks = entry.record.ranks if final or seconds > LONG_WAIT_SECONDS else ()
            text = describe(entry.record)
            wait = Wait(entry.record.group, entry.number, text, round(seconds, 1), tuple(ranks))
        return Beat(
            count=count,
            iteration=iteration,
            collectives=log.count,
            last=log.name,
            at=time.time(),
            in_group=dict(log.in_group),
            wait=wait,
        )

    def to_text(self) -> str:
        """Return it as it stands in the store."""
        wait = None if self.wait is None else list(vars(self.wait).values())
        head = [self.count, self.iteration, self.collectives, self.last]
        return json.dumps([*head, self.at, self.in_group, wait])

    @staticmethod
    def of(text: str) -> Beat:
        """Read it again; what is missing at the end stays unknown."""
        values = [*json.loads(text), *[None] * 7][:7]
        count, iteration, collectives, last, at, in_group, wait = values
        return Beat(
            count=count,
            iteration=iteration,
            collectives=collectives or 0,
            last=last or "no collective yet",
            at=at,
            in_group=in_group or {},
            wait=None if wait is None else Wait(*wait[:4], tuple(wait[4])),
        )


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What is known of one rank.

    Args:
        state: of its process, or what it has said of its end.
        beat: its last one; None if it has none.
        age: of that, in seconds.
    """

    rank: int
    host: str
    pid: int | None
    state: str
    beat: Beat | None
    age: float | None


class Peers:
    """Reads what ranks have written, with a client of the store that no other thread uses.

    Args:
        store: the client.
        rank, world_size: of the run.
        host: this rank's machine.
        beat_seconds: time between beats.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, host: str, beat_seconds: float
    ) -> None:
        self.store = store
        self._rank, self._world_size = rank, world_size
        self._host, self._beat_seconds = host, beat_seconds

    def get(self, key: str) -> str | None:
        """Return what is under a key; None if nothing is."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def others(self) -> list[int]:
        """Return the other ranks but those that have left in good order."""
        ranks = (rank for rank in range(self._world_size) if rank != self._rank)
        return [rank for rank in ranks if not self.store.check([f"left/{rank}"])]

    def identity(self, rank: int) -> Identity | None:
        """Return where a rank runs; None if it has not said so."""
        text = self.get(f"peer/{rank}")
        return None if text is None else Identity(**json.loads(text))

    def beats(self) -> dict[int, str | None]:
        """Return the last beats of the others."""
        return {rank: self.get(f"beat/{rank}") for rank in self.others()}

    def failures(self) -> list[str]:
        """Quote ranks that have failed with an error."""
        texts = {rank: self.get(f"failure/{rank}") for rank in self.others()}
        return [f"rank {rank} failed: {text}" for rank, text in texts.items() if text]

    def given_up(self) -> str | None:
        """Return what another rank has found wrong before it ended; None if none has."""
        texts = (self.get(f"gave_up/{rank}") for rank in self.others())
        return next((text for text in texts if text), None)

    def state_here(self, rank: int) -> str | None:
        """Name a rank of this machine whose process has ended or is stopped; else None."""
        peer = self.identity(rank)
        if peer is None or peer.host != self._host:
            return None
        state = process_state(peer.pid)
        named = f"rank {rank} (process {peer.pid} on {peer.host}) is {state}"
        return None if state == "running" else named

    def gone_here(self) -> list[str]:
        """Name ranks of this machine whose process has ended or is stopped."""
        found = (self.state_here(rank) for rank in self.others())
        return [text for text in found if text is not None]

    def silent(self, before: dict[int, str | None]) -> list[str]:
        """Name ranks whose beat has not moved."""
        return [
            f"rank {rank} is silent since iteration {Beat.of(now).iteration}"
            for rank, now in self.beats().items()
            if now is not None and now == before.get(rank)
        ]

    def states(self, own: Beat) -> list[RankState]:
        """Return what is known of every rank.

        Args:
            own: what this one would say now.
        """
        return [
            self._state(rank, own if rank == self._rank else None)
            for rank in range(self._world_size)
        ]

    def _state(self, rank: int, beat: Beat | None) -> RankState:
        if beat is None and (text := self.get(f"beat/{rank}")) is not None:
            beat = Beat.of(text)
        peer = self.identity(rank)
        age = None if beat is None or beat.at is None else max(0.0, time.time() - beat.at)
        if failure := self.get(f"failure/{rank}"):
            state = f"failed: {failure}"
        elif self.store.check([f"left/{rank}"]):
            state = "has left"
        elif peer is None:
            state = "never came"
        elif peer.host == self._host and (found := process_state(peer.pid)) != "running":
            state = found
        else:
            quiet = age is None or age > 3.0 * self._beat_seconds
            state = "silent" if quiet else "running"
        return RankState(
            rank=rank,
            host="?" if peer is None else peer.host,
            pid=None if peer is None else peer.pid,
            state=state,
            beat=beat,
            age=age,
        )

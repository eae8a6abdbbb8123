# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a save or a load agree: JSON through a key-value store, no collectives.

There is one primitive, `agree`: every rank does some work, rank 0 decides from what all of them
returned, and all ranks get the decision, or the same CheckpointError if any of them failed. A
rank that died is noticed after a time limit instead of hanging the others.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core.dist_checkpointing.errors import (
    CheckpointError,
    DamagedCheckpointError,
    describe,
    print_to_stderr,
)
from megatron.core.process_groups import ProcessGroupCollection

#: A TCPStore drops the connection of a client that sends more than 8 MiB at once.
PIECE_BYTES = 4 << 20

#: How long to wait for a rank before asking what has become of it, again and again, in seconds.
#: At first; then twice as long each time, up to the latter.
SLICE_SECONDS, MOST_SLICE_SECONDS = 1.0, 30.0

Decide = Callable[[list[Any]], Any]


class Coordinator(ABC):
    """Agreement between the ranks of one save or load at a time.

    Args:
        rank: this rank, counted from 0 over all ranks that save or load together.
        world_size: how many there are.
        say: receives the few lines meant for people; used on rank 0 only.
    """

    def __init__(self, rank: int, world_size: int, say: Callable[[str], None]) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not exist in a world of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self._say = say

    @staticmethod
    def of(
        groups: ProcessGroupCollection,
        *,
        timeout_seconds: float = 600.0,
        say: Callable[[str], None] = print_to_stderr,
    ) -> Coordinator:
        """Return the coordinator of all ranks of a run, over the store of their process group.

        Every rank calls this, as often as the others do. It is for one thread; a save in the
        background needs another one.

        Args:
            groups: the run's process groups; one process needs none of torch.distributed.
            timeout_seconds, say: see `StoreCoordinator`.
        """
        world = groups["world"]
        if world.handle is None:
            return Solo(say)
        store = world.handle.get_group_store()
        # The keys of two coordinators over one store must differ, and those of the ranks agree.
        number = store.add(f"dist_checkpointing/coordinators/{world.rank}", 1)
        return StoreCoordinator(
            store,
            world.rank,
            world.size,
            timeout_seconds=timeout_seconds,
            say=say,
            prefix=f"dist_checkpointing/{number}",
        )

    def say(self, line: str) -> None:
        """Tell the user, once for all ranks."""
        if self.rank == 0:
            self._say(line)

    @abstractmethod
    def begin(self, label: str) -> None:
        """Start a save or a load, named `label` in errors: every rank does so, in one order."""

    @abstractmethod
    def _exchange(self, stage: str, message: Any, decide: Decide) -> Any:
        """Return to every rank what rank 0's `decide` made of all messages, in rank order."""

    def agree(self, stage: str, work: Callable[[], Any], decide: Decide) -> Any:
        """Run `work` on every rank and return `decide(results)`, computed on rank 0, to all.

        Args:
            stage: what is being done, in words: it is part of error texts.
            work: returns plain JSON data.
            decide: takes the results in rank order, returns plain JSON data.

        Raises:
            CheckpointError: on every rank alike, with the text of each rank that failed; a
                DamagedCheckpointError if that is what each of them met.
        """
        cause: Exception | None = None
        try:
            message = {"value": work()}
        except Exception as error:
            cause = error
            message = _failure(describe(error), damaged=_is_damage(error))

        def decide_or_fail(messages: list[Any]) -> Any:
            nonlocal cause
            if failures := self._failures(messages):
                # An older checkpoint helps only if nothing else is wrong.
                damaged = all(m["damaged"] for m in messages if "error" in m)
                return _failure(failures, damaged=damaged)
            try:
                return {"value": decide([m["value"] for m in messages])}
            except Exception as error:
                cause = error
                return _failure(describe(error), damaged=_is_damage(error))

        answer = self._exchange(stage, message, decide_or_fail)
        if "error" in answer:
            kind = DamagedCheckpointError if answer["damaged"] else CheckpointError
            raise kind(answer["error"]) from cause
        return answer["value"]

    def _failures(self, messages: Sequence[Any]) -> str:
        """Return one line with every distinct error and the ranks that had it."""
        ranks: dict[str, list[int]] = {}
        for rank, message in enumerate(messages):
            if "error" in message:
                ranks.setdefault(message["error"], []).append(rank)
        if self.world_size == 1:
            return next(iter(ranks), "")
        return "; ".join(f"{_named(who)}: {text}" for text, who in ranks.items())


class Solo(Coordinator):
    """The coordinator of a single process: no messages."""

    def __init__(self, say: Callable[[str], None] = print_to_stderr) -> None:
        super().__init__(0, 1, say)

    def begin(self, label: str) -> None:
        """Start a save or a load."""

    def _exchange(self, stage: str, message: Any, decide: Decide) -> Any:
        return decide([message])


class StoreCoordinator(Coordinator):
    """Agreement through a `torch.distributed.Store` that all ranks reach.

    The process that serves the store must outlive the last read: use the launcher's store, or a
    barrier before rank 0 leaves. A store that has served an earlier start of the job must come
    with a fresh prefix (`torch.distributed.PrefixStore`), as torchrun's does.

    Args:
        store: this process's own client; one client must not be shared by threads.
        rank, world_size: see `Coordinator`.
        timeout_seconds: how long rank 0 waits for the slowest rank at each stage, counted from
            its own arrival. The others wait half as long again for its answer, so that they
            hear which rank it missed.
        say: see `Coordinator`.
        missed: called again and again with a rank that is waited for; raises if that is gone.
        prefix: of keys; coordinators that share a store have different ones.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        timeout_seconds: float,
        say: Callable[[str], None] = print_to_stderr,
        missed: Callable[[int], None] = lambda rank: None,
        prefix: str = "dist_checkpointing",
    ) -> None:
        super().__init__(rank, world_size, say)
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")
        # Not torch's PrefixStore: that cannot delete keys of a store made in Python.
        self._store, self._prefix = store, prefix
        self._timeout_seconds, self._missed = timeout_seconds, missed
        self._sessions = 0
        self._label = ""
        self._answer_keys: list[str] = []

    def begin(self, label: str) -> None:
        """Start a save or a load: its keys are used by no earlier one, a failed one included."""
        self._sessions += 1
        self._label = label

    def _exchange(self, stage: str, message: Any, decide: Decide) -> Any:
        prefix = f"{self._prefix}/{self._sessions}/{self._label}/{stage}"
        try:
            if self.rank:
                self._put(f"{prefix}/{self.rank}", message)
                return self._await_answer(stage, f"{prefix}/answer")
            return self._lead(stage, prefix, message, decide)
        except RuntimeError as error:  # the store's server is gone
            raise CheckpointError(
                f"{self._label}: rank {self.rank} lost the store while it agreed on {stage!r} "
                f"({str(error).splitlines()[0]}); the rank or launcher that serves it has ended"
            ) from error

    def _lead(self, stage: str, prefix: str, message: Any, decide: Decide) -> Any:
        """Collect every rank's message, decide, and publish the answer."""
        messages, silent = [message], []
        deadline = time.monotonic() + self._timeout_seconds
        for rank in range(1, self.world_size):
            key = f"{prefix}/{rank}"
            # Once one rank is known to be late the others are only looked at, not waited for.
            left = 0.001 if silent else deadline - time.monotonic()
            if self._wait(key, left, of=rank):
                messages.append(self._take(key))
            else:
                silent.append(rank)
        if silent:
            limit = f"{self._timeout_seconds:g} s"
            text = f"{self._label}: no word from {_named(silent)} about {stage!r} within {limit}"
            answer: Any = _failure(text)
        else:
            # Every rank has come here, so every rank has read the previous answer.
            for key in self._answer_keys:
                self._store.delete_key(key)
            self._answer_keys = []
            answer = decide(messages)
        self._answer_keys += self._put(f"{prefix}/answer", answer)
        return answer

    def _await_answer(self, stage: str, key: str) -> Any:
        limit = 1.5 * self._timeout_seconds
        if not self._wait(key, limit, of=0):
            return _failure(
                f"{self._label}: rank {self.rank} had no answer from rank 0 about {stage!r} "
                f"within {limit:g} s"
            )
        return self._read(key)[0]

    def _wait(self, key: str, seconds: float, *, of: int) -> bool:
        """Return whether `key`, which is written by rank `of`, appeared in time."""
        if self._store.check([key]):
            return True
        deadline, piece = time.monotonic() + max(seconds, 0.001), SLICE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._store.wait([key], timedelta(seconds=max(min(left, piece), 0.001)))
                return True
            except dist.DistStoreError:
                self._missed(of)
            # torch prints two lines for each wait that ends without an answer.
            piece = min(2.0 * piece, MOST_SLICE_SECONDS)
        return False

    def _put(self, key: str, message: Any) -> list[str]:
        """Write `message` under `key` and return the keys used: the head last, as it is awaited."""
        text = json.dumps(message, separators=(",", ":"))  # ASCII, so characters are bytes
        pieces = [text[i : i + PIECE_BYTES] for i in range(0, len(text), PIECE_BYTES)]
        keys = [f"{key}.{i}" for i in range(1, len(pieces))]
        for name, piece in zip(keys, pieces[1:], strict=True):
            self._store.set(name, piece)
        self._store.set(key, f"{len(pieces)}\n{pieces[0]}")
        return [*keys, key]

    def _read(self, key: str) -> tuple[Any, list[str]]:
        count, text = self._store.get(key).decode().split("\n", 1)
        keys = [f"{key}.{i}" for i in range(1, int(count))]
        parts = [text, *(self._store.get(name).decode() for name in keys)]
        return json.loads("".join(parts)), [*keys, key]

    def _take(self, key: str) -> Any:
        message, keys = self._read(key)
        for name in keys:
            self._store.delete_key(name)
        return message


def _failure(text: str, *, damaged: bool = False) -> dict[str, Any]:
    return {"error": text, "damaged": damaged}


def _is_damage(error: Exception) -> bool:
    return isinstance(error, DamagedCheckpointError)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

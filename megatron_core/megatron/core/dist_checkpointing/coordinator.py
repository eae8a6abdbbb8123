# SPDX-License-Identifier: Apache-2.0
"""Agreement between the ranks of a save or a load: JSON through a key-value store, no collectives.

The only primitive is `agree`: every rank does some work, rank 0 decides from the results of all
ranks, and every rank gets the decision, or the same CheckpointError if any rank failed. If a rank
dies, the other ranks get an error after a timeout instead of hanging.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core.dist_checkpointing.shard_format import (
    CheckpointError,
    DamagedCheckpointError,
    describe,
    print_to_stderr,
)
from megatron.core.process_groups import ProcessGroupCollection

#: A TCPStore drops the connection of a client that sends more than 8 MiB at once.
MAX_VALUE_BYTES = 4 << 20

#: Seconds to wait for a rank between two calls of `on_missing_rank`. The wait doubles from the
#: minimum to the maximum.
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 30.0

Decide = Callable[[list[Any]], Any]


class Coordinator(ABC):
    """Agreement between the ranks of one save or load at a time.

    Args:
        rank: this rank, counted from 0 over all ranks that save or load together.
        world_size: number of all ranks that save or load together.
        say: receives lines for the user; called on rank 0 only.
    """

    def __init__(self, rank: int, world_size: int, say: Callable[[str], None]) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not exist in a world of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self._say = say

    @staticmethod
    def from_groups(
        groups: ProcessGroupCollection,
        *,
        timeout_seconds: float = 600.0,
        say: Callable[[str], None] = print_to_stderr,
    ) -> Coordinator:
        """Return a coordinator of all ranks of a run, over the store of their process group.

        All ranks must call this equally often. A coordinator serves one thread; an asynchronous
        save needs a second coordinator.

        Args:
            groups: the run's process groups; a single process does not use torch.distributed.
            timeout_seconds, say: see `StoreCoordinator`.
        """
        world = groups["world"]
        if world.handle is None:
            return Solo(say)
        store = world.handle.get_group_store()
        # Two coordinators over one store need different keys, and all ranks the same keys.
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
        """Report a line to the user, on rank 0 only."""
        if self.rank == 0:
            self._say(line)

    @abstractmethod
    def begin(self, label: str) -> None:
        """Start a save or a load, named `label` in errors. All ranks call this in one order."""

    @abstractmethod
    def _exchange(self, stage: str, message: Any, decide: Decide) -> Any:
        """Return rank 0's `decide(messages in rank order)` to every rank."""

    def agree(self, stage: str, work: Callable[[], Any], decide: Decide) -> Any:
        """Run `work` on every rank and return `decide(results)`, computed on rank 0, to all.

        Args:
            stage: a name of the work, for error texts.
            work: returns plain JSON data.
            decide: takes the results in rank order, returns plain JSON data.

        Raises:
            CheckpointError: on every rank, with the text of each rank that failed; a
                DamagedCheckpointError if every failed rank raised one.
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
                # Falling back to an older checkpoint helps only if damage is the only problem.
                damaged = all(m["damaged"] for m in messages if "error" in m)
                return _failure(failures, damaged=damaged)
            try:
                return {"value": decide([m["value"] for m in messages])}
            except Exception as error:
                cause = error
                return _failure(describe(error), damaged=_is_damage(error))

        answer = self._exchange(stage, message, decide_or_fail)
        if "error" in answer:
            error_class = DamagedCheckpointError if answer["damaged"] else CheckpointError
            raise error_class(answer["error"]) from cause
        return answer["value"]

    def _failures(self, messages: Sequence[Any]) -> str:
        """Return one line with every distinct error and its ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, message in enumerate(messages):
            if "error" in message:
                ranks.setdefault(message["error"], []).append(rank)
        if self.world_size == 1:
            return next(iter(ranks), "")
        return "; ".join(f"{_ranks_text(failed)}: {text}" for text, failed in ranks.items())


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
    barrier before rank 0 exits. If the store has served an earlier start of the job, wrap it with a
    new prefix (`torch.distributed.PrefixStore`), as torchrun does.

    Args:
        store: this process's client; threads must not share a client.
        rank, world_size: see `Coordinator`.
        timeout_seconds: how long rank 0 waits for the slowest rank at each stage, from its own
            arrival. The other ranks wait 1.5 times as long for rank 0's answer, which names the
            missing ranks.
        say: see `Coordinator`.
        on_missing_rank: called repeatedly with a rank that has not sent its message yet; raises if
            that rank is gone.
        prefix: prefix of all keys; coordinators that share a store need different prefixes.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        timeout_seconds: float,
        say: Callable[[str], None] = print_to_stderr,
        on_missing_rank: Callable[[int], None] = lambda rank: None,
        prefix: str = "dist_checkpointing",
    ) -> None:
        super().__init__(rank, world_size, say)
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")
        # torch's PrefixStore cannot delete keys of a store that was created in Python.
        self._store, self._prefix = store, prefix
        self._timeout_seconds, self._on_missing_rank = timeout_seconds, on_missing_rank
        self._sessions = 0
        self._label = ""
        self._answer_keys: list[str] = []

    def begin(self, label: str) -> None:
        """Start a save or a load; its keys differ from the keys of all earlier sessions."""
        self._sessions += 1
        self._label = label

    def _exchange(self, stage: str, message: Any, decide: Decide) -> Any:
        prefix = f"{self._prefix}/{self._sessions}/{self._label}/{stage}"
        try:
            if self.rank:
                self._put(f"{prefix}/{self.rank}", message)
                return self._await_answer(stage, f"{prefix}/answer")
            return self._collect_and_decide(stage, prefix, message, decide)
        except RuntimeError as error:  # the store's server is gone
            raise CheckpointError(
                f"{self._label}: rank {self.rank} lost the store during {stage!r} "
                f"({str(error).splitlines()[0]}); the rank or launcher that serves it has "
                "ended"
            ) from error

    def _collect_and_decide(self, stage: str, prefix: str, message: Any, decide: Decide) -> Any:
        """Collect every rank's message, decide, and publish the answer."""
        messages, missing = [message], []
        deadline = time.monotonic() + self._timeout_seconds
        for rank in range(1, self.world_size):
            key = f"{prefix}/{rank}"
            # After one rank has timed out, do not wait for further ranks, only check them.
            seconds_left = 0.001 if missing else deadline - time.monotonic()
            if self._wait(key, seconds_left, rank=rank):
                messages.append(self._pop(key))
            else:
                missing.append(rank)
        if missing:
            text = (
                f"{self._label}: no message from {_ranks_text(missing)} about {stage!r} "
                f"within {self._timeout_seconds:g} s"
            )
            answer: Any = _failure(text)
        else:
            # All ranks have sent a message, so all have read the previous answer.
            for key in self._answer_keys:
                self._store.delete_key(key)
            self._answer_keys = []
            answer = decide(messages)
        self._answer_keys += self._put(f"{prefix}/answer", answer)
        return answer

    def _await_answer(self, stage: str, key: str) -> Any:
        timeout_seconds = 1.5 * self._timeout_seconds
        if not self._wait(key, timeout_seconds, rank=0):
            return _failure(
                f"{self._label}: rank {self.rank} had no reply from rank 0 about {stage!r} "
                f"within {timeout_seconds:g} s"
            )
        return self._read(key)[0]

    def _wait(self, key: str, seconds: float, *, rank: int) -> bool:
        """Return whether `key`, which `rank` writes, appeared in time."""
        if self._store.check([key]):
            return True
        deadline, wait_seconds = time.monotonic() + max(seconds, 0.001), MIN_WAIT_SECONDS
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                self._store.wait([key], timedelta(seconds=max(min(remaining, wait_seconds), 0.001)))
                return True
            except dist.DistStoreError:
                self._on_missing_rank(rank)
            # torch prints two lines for each wait that times out, so wait longer each time.
            wait_seconds = min(2.0 * wait_seconds, MAX_WAIT_SECONDS)
        return False

    def _put(self, key: str, message: Any) -> list[str]:
        """Write `message` under `key`, which readers await, so it is set last; return all keys."""
        text = json.dumps(message, separators=(",", ":"))  # ASCII, so characters are bytes
        fragments = [text[i : i + MAX_VALUE_BYTES] for i in range(0, len(text), MAX_VALUE_BYTES)]
        keys = [f"{key}.{i}" for i in range(1, len(fragments))]
        for name, fragment in zip(keys, fragments[1:], strict=True):
            self._store.set(name, fragment)
        self._store.set(key, f"{len(fragments)}\n{fragments[0]}")
        return [*keys, key]

    def _read(self, key: str) -> tuple[Any, list[str]]:
        count, text = self._store.get(key).decode().split("\n", 1)
        keys = [f"{key}.{i}" for i in range(1, int(count))]
        fragments = [text, *(self._store.get(name).decode() for name in keys)]
        return json.loads("".join(fragments)), [*keys, key]

    def _pop(self, key: str) -> Any:
        message, keys = self._read(key)
        for name in keys:
            self._store.delete_key(name)
        return message


def _failure(text: str, *, damaged: bool = False) -> dict[str, Any]:
    return {"error": text, "damaged": damaged}


def _is_damage(error: Exception) -> bool:
    return isinstance(error, DamagedCheckpointError)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

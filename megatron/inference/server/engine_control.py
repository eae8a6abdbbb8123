# SPDX-License-Identifier: Apache-2.0
"""What administration has an engine do between two steps; every rank does the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.inference.engine import Completion
from megatron.core.inference.router import Replicas
from megatron.inference.llm import weights_of_level

if TYPE_CHECKING:
    from megatron.core.boxes import TensorChunk
    from megatron.inference.checkpoint_model import CheckpointModel

#: Rows of a profile.
_PROFILE_ROWS = 40


class EngineControl:
    """Administration of the engine of one rank.

    Args:
        replicas: as this rank knows them.
        loaded: its model; None where weights cannot be replaced.
    """

    def __init__(self, replicas: Replicas, loaded: CheckpointModel | None = None) -> None:
        self._replicas, self._engine, self._loaded = replicas, replicas.engine, loaded
        self._receiver = ThreadPoolExecutor(1, "receive-weights")
        self._receiving: Future[tuple[list[TensorChunk], int]] | None = None

    @property
    def receiving(self) -> bool:
        """Whether weights are on their way from a training run."""
        return self._receiving is not None

    @property
    def received(self) -> str | None:
        """Why weights did not come to this rank, "" if they are there; None before that."""
        if self._receiving is None or not self._receiving.done():
            return None
        error = self._receiving.exception()
        if error is not None and not isinstance(error, ValueError):
            raise error
        return "" if error is None else str(error)

    def receive(self, order: Mapping[str, Any]) -> None:
        """Start to receive weights from a training run, while steps go on with the old ones.

        Raises:
            ValueError: the engine is asleep, or others are on their way.
        """
        from megatron.inference.replace_weights import receive_weights

        self._check_replaceable()
        self._receiving = self._receiver.submit(
            receive_weights,
            self._model(),
            order["address"],
            senders=order["senders"],
            timeout_seconds=order["timeout_seconds"],
        )

    def take_received(self, refused: str) -> dict[str, Any]:
        """Put received weights in; return what there is to tell. All ranks call it before one step.

        Args:
            refused: why they did not come to some rank; "" if all have them.

        Raises:
            ValueError: `refused`, or the engine has been put to sleep; nothing has changed.
        """
        from megatron.inference.replace_weights import copy_received_weights

        assert self._receiving is not None
        work, self._receiving = self._receiving, None
        if refused:
            raise ValueError(refused)
        self._check_replaceable()
        received, nbytes = work.result()
        with self._replacing():
            copy_received_weights(self._model(), received)
        return {**self._state(), "received_bytes": nbytes}

    def apply(self, order: Mapping[str, Any]) -> tuple[dict[str, Any], list[Completion]]:
        """Do what an order says; return what there is to tell, and outputs that have news.

        Raises:
            ValueError: it cannot be done, and nothing has changed; one line.
        """
        action, news = order["action"], list[Completion]()
        more: dict[str, Any] = {}
        if action == "pause":
            self._replicas.pause(keep_cache=order["mode"] != "recompute")
        elif action == "resume":
            self._engine.resume()
        elif action == "sleep":
            level = order["level"]
            self._replicas.sleep(weights_of_level(self._model(), level) if level > 1 else ())
        elif action == "wake":
            self._engine.wake()
        elif action == "weights":
            more = self._replace(order)
        else:
            assert action == "profile", order
            more, news = self._profile(order["steps"])
        return {**self._state(), **more}, news

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        return {"paused": engine.paused, "asleep": engine.asleep, "weight_epoch": engine.epoch}

    def _model(self) -> CheckpointModel:
        if self._loaded is None:
            raise ValueError("the weights of this engine are not its own")
        return self._loaded

    def _replace(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Put the weights of a folder in; what steps compute is of one epoch or the other."""
        from megatron.inference.replace_weights import replace_weights

        self._check_replaceable()
        with self._replacing():
            return {"loaded": str(replace_weights(self._model(), order["load"]))}

    def _check_replaceable(self) -> None:
        """Raise ValueError where weights cannot be replaced now."""
        if self._engine.asleep:
            raise ValueError("the engine is asleep: wake it before its weights are replaced")
        if self.receiving:
            raise ValueError("weights are on their way already: wait for the answer to that order")

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Compute nothing in the block, which replaces the weights unless it fails."""
        paused = self._engine.paused
        self._engine.pause()
        try:
            yield
            self._replicas.weights_replaced()
        finally:
            if not paused:
                self._engine.resume()

    def _profile(self, steps: int) -> tuple[dict[str, Any], list[Completion]]:
        """Take some steps under torch's profiler. Raises ValueError if it would see none."""
        if not self._replicas.unfinished or self._engine.paused:
            raise ValueError("no request runs: send some, and profile while they are answered")
        if self._engine.config.asynchronous and self._engine.device.type == "cpu":
            raise ValueError(
                "on a CPU, asynchronous steps run in a thread that the profiler does not see: "
                "start the server without --async-scheduling"
            )
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._engine.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        found: dict[int, Completion] = {}
        taken = 0
        with torch.profiler.profile(activities=activities) as profiler:
            while taken < steps and self._replicas.unfinished and not self._engine.paused:
                found |= {c.request_id: c for c in self._replicas.step()}
                taken += 1
            self._engine.drain()  # what a step has started must not outlive the profiler
        rows = sorted(
            profiler.key_averages(),
            key=lambda row: -max(row.self_cpu_time_total, row.self_device_time_total),
        )
        operations = [
            {
                "name": row.key,
                "calls": row.count,
                "cpu_microseconds": round(row.self_cpu_time_total, 1),
                "device_microseconds": round(row.self_device_time_total, 1),
            }
            for row in rows[:_PROFILE_ROWS]
        ]
        return {"steps": taken, "operations": operations}, list(found.values())

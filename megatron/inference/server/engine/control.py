# SPDX-License-Identifier: Apache-2.0
"""Administration commands that an engine executes between two steps, the same on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.inference.requests import OutputDelta
from megatron.core.inference.router import Replicas
from megatron.inference.build_engine import weights_of_level

if TYPE_CHECKING:
    from megatron.core.boxes import TensorChunk
    from megatron.inference.checkpoint_model import CheckpointModel

#: Most operations in a profile.
_PROFILE_ROWS = 40


class EngineControl:
    """Administration of the engine of one rank.

    Args:
        replicas: the engines of all data-parallel ranks.
        loaded: the model; None if its weights cannot be replaced.
    """

    def __init__(self, replicas: Replicas, loaded: CheckpointModel | None = None) -> None:
        self._replicas, self._engine, self._loaded = replicas, replicas.engine, loaded
        self._receiver = ThreadPoolExecutor(1, "receive-weights")
        self._receiving: Future[tuple[list[TensorChunk], int]] | None = None

    @property
    def receiving(self) -> bool:
        """Whether a transfer of weights from a training run is in progress."""
        return self._receiving is not None

    @property
    def received(self) -> str | None:
        """Error of the transfer of weights to this rank; "" after success, None in progress."""
        if self._receiving is None or not self._receiving.done():
            return None
        error = self._receiving.exception()
        if error is not None and not isinstance(error, ValueError):
            raise error
        return "" if error is None else str(error)

    def receive(self, message: Mapping[str, Any]) -> None:
        """Start to receive weights from a training run; steps continue with the old weights.

        Raises:
            ValueError: the engine is asleep, or another transfer is in progress.
        """
        from megatron.inference.replace_weights import receive_weights

        self._check_replaceable()
        self._receiving = self._receiver.submit(
            receive_weights,
            self._model(),
            message["address"],
            senders=message["senders"],
            timeout_seconds=message["timeout_seconds"],
        )

    def install_received(self, error: str) -> dict[str, Any]:
        """Install received weights and return the reply. All ranks call it before the same step.

        Args:
            error: error of the transfer on some rank; "" after success on all ranks.

        Raises:
            ValueError: the transfer failed, or the engine is asleep; the weights have not changed.
        """
        from megatron.inference.replace_weights import copy_received_weights

        assert self._receiving is not None
        transfer, self._receiving = self._receiving, None
        if error:
            raise ValueError(error)
        self._check_replaceable()
        received, nbytes = transfer.result()
        with self._replacing():
            copy_received_weights(self._model(), received)
        return {**self._state(), "received_bytes": nbytes}

    def apply(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], list[OutputDelta]]:
        """Execute a command; return the reply, and the deltas of its steps.

        Raises:
            ValueError: the command is invalid now, and nothing has changed; one line.
        """
        action, deltas = message["action"], list[OutputDelta]()
        extra_fields: dict[str, Any] = {}
        if action == "pause":
            self._replicas.pause(keep_cache=message["mode"] != "recompute")
        elif action == "resume":
            self._engine.resume()
        elif action == "sleep":
            level = message["level"]
            self._replicas.sleep(weights_of_level(self._model(), level) if level > 1 else ())
        elif action == "wake":
            self._engine.wake()
        elif action == "weights":
            extra_fields = self._replace(message)
        else:
            assert action == "profile", message
            extra_fields, deltas = self._profile(message["steps"])
        return {**self._state(), **extra_fields}, deltas

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        return {"paused": engine.paused, "asleep": engine.asleep, "weight_epoch": engine.epoch}

    def _model(self) -> CheckpointModel:
        if self._loaded is None:
            raise ValueError("the engine does not own these weights")
        return self._loaded

    def _replace(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Load the weights of a folder. No step mixes old and new weights."""
        from megatron.inference.replace_weights import replace_weights

        self._check_replaceable()
        with self._replacing():
            return {"loaded": str(replace_weights(self._model(), message["load"]))}

    def _check_replaceable(self) -> None:
        """Raise ValueError where weights cannot be replaced now."""
        if self._engine.asleep:
            raise ValueError("the engine is asleep: wake it before its weights are replaced")
        if self.receiving:
            raise ValueError("a weight update is already in progress: wait for its response")

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Pause the engine during the block, which replaces the weights."""
        paused = self._engine.paused
        self._engine.pause()
        try:
            yield
            self._replicas.weights_replaced()
        finally:
            if not paused:
                self._engine.resume()

    def _profile(self, steps: int) -> tuple[dict[str, Any], list[OutputDelta]]:
        """Run steps under torch's profiler. Raises ValueError if it would record nothing."""
        if not self._replicas.unfinished or self._engine.paused:
            raise ValueError(
                "no request is running: send some requests, and profile while they run"
            )
        if self._engine.config.asynchronous and self._engine.device.type == "cpu":
            raise ValueError(
                "on a CPU, asynchronous steps run in a thread that the profiler does not see: "
                "start the server without --async-scheduling"
            )
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._engine.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        deltas: list[OutputDelta] = []
        num_steps = 0
        with torch.profiler.profile(activities=activities) as profiler:
            while num_steps < steps and self._replicas.unfinished and not self._engine.paused:
                deltas += self._replicas.step()
                num_steps += 1
            self._engine.drain()  # work of a step in flight must end inside the profiler
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
        return {"steps": num_steps, "operations": operations}, deltas

# SPDX-License-Identifier: Apache-2.0
"""What administration has an engine do between two steps; every rank does the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.inference.engine import Completion
from megatron.core.inference.router import Replicas
from megatron.inference.llm import weights_of_level

if TYPE_CHECKING:
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
        engine = self._engine
        state = {"paused": engine.paused, "asleep": engine.asleep, "weight_epoch": engine.epoch}
        return {**state, **more}, news

    def _model(self) -> CheckpointModel:
        if self._loaded is None:
            raise ValueError("the weights of this engine are not its own")
        return self._loaded

    def _replace(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Put other weights in; what steps compute is of one epoch or the other."""
        from megatron.inference.replace_weights import receive_weights, replace_weights

        engine, loaded = self._engine, self._model()
        if engine.asleep:
            raise ValueError("the engine is asleep: wake it before its weights are replaced")
        paused = engine.paused
        engine.pause()
        try:
            if order["load"] is not None:
                told: dict[str, Any] = {"loaded": str(replace_weights(loaded, order["load"]))}
            else:
                told = {
                    "received_bytes": receive_weights(
                        loaded,
                        order["address"],
                        senders=order["senders"],
                        timeout_seconds=order["timeout_seconds"],
                    )
                }
            self._replicas.weights_replaced()
        finally:
            if not paused:
                engine.resume()
        return told

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

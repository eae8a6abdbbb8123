# SPDX-License-Identifier: Apache-2.0
"""A witness of what tests train: the grid, the strategy and the settings of every applied step.

Installed only where `VARIABLE` names a file (`pytest --status-out`), in the test's own process, in
ranks and in jobs of torchrun. It reads the parts of the step that has just been applied, so that a
layout which did not train is not in the file, whatever flags a test gave.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.status_rows import Ran

#: The environment variable with the file's path; a line is one `Ran`.
VARIABLE = "MEGATRON_TEST_WITNESS"


@dataclass
class _Built:
    """How a model was made, beside what it says itself."""

    config: Any
    backend: Any
    sequence_parallel: bool
    recompute: Any


@dataclass
class _Memory:
    """What one process has built: models by their weights, runs by their step; and the optimizer
    that moved weights last."""

    models: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary)
    runs: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary)
    resumed: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    told: set[tuple[str, str]] = field(default_factory=set)
    optimizer: Any = None

    def tell(self, ran: Ran) -> None:
        """Write a line, once for each file."""
        path, line = os.environ.get(VARIABLE), json.dumps(asdict(ran), sort_keys=True)
        if path is not None and (path, line) not in self.told:
            self.told.add((path, line))
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def read(path: Path) -> list[Ran]:
    """Return what was seen, each once."""
    if not path.exists():
        return []
    return [Ran.of(json.loads(line)) for line in sorted(set(path.read_text().splitlines()))]


def install() -> None:
    """Watch the models, steps and runs of this process."""
    # Only here: a process without a witness must not pay for these.
    from megatron.core.backend import LOCAL
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import Optimizer
    from megatron.core.transformer import Recompute
    from megatron.training import pretraining, session
    from megatron.training.step import TrainStep

    memory = _Memory()

    def built(model: Any, made: None, /, config: Any, groups: Any, **options: Any) -> None:
        memory.models[model.store] = _Built(
            config,
            options.get("backend", LOCAL),
            options.get("sequence_parallel", False),
            Recompute(),
        )

    def recomputed(model: Any, made: None, /, recompute: Any) -> None:
        memory.models[model.store].recompute = recompute

    def stepped(step: Any, report: Any, /, microbatches: Sequence[Any], **more: Any) -> None:
        if report.applied and step.engine.store in memory.models:
            memory.tell(_trained(memory, step, microbatches))

    def generated(model: Any, made: Any, /, *tokens: Any, cache: Any = None, **more: Any) -> None:
        if cache is not None:
            memory.tell(_layout(model.groups, memory.models[model.store], "no_shard", ()))

    def moved(optimizer: Any, *rest: Any, **named: Any) -> None:
        memory.optimizer = optimizer  # a step may be given a stand-in before it

    def began(steps: Any, made: None, /, session: Any, *rest: Any) -> None:
        memory.runs[session.step] = session.run

    _behind(GPTModel, "__init__", built)
    _behind(GPTModel, "set_recompute", recomputed)
    _behind(GPTModel, "forward", generated)
    _behind(Optimizer, "step", moved)
    _behind(TrainStep, "__call__", stepped)
    _behind(session.SessionSteps, "__init__", began)
    restore = pretraining.restore

    def restored(session: Any) -> Any:
        progress, text = restore(session)
        if progress.iteration > 0:
            memory.resumed.add(session.step)
        return progress, text

    pretraining.restore = restored


def _behind(owner: type, name: str, tell: Callable[..., None]) -> None:
    """Have `tell` called with the object, the result and the arguments behind every call."""
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = whole(self, *args, **kwargs)
        tell(self, result, *args, **kwargs)
        return result

    setattr(owner, name, watched)


def _trained(memory: _Memory, step: Any, microbatches: Sequence[Any]) -> Ran:
    """Return what a step was made of and, in a run of the entry point, what else the run did."""
    from tests.support.settings_seen import (
        model_paths,
        model_settings,
        step_settings,
        training_settings,
    )

    engine, built = step.engine, memory.models[step.engine.store]
    settings = (
        *model_settings(built.config, tp=engine.groups["tp"].size),
        *training_settings(engine, memory.optimizer),
        *model_paths(built.config, engine, built.backend),
        *step_settings(step, microbatches, built.recompute),
    )
    schedule = step.forward_backward.name if engine.groups["pp"].size > 1 else ""
    did = ["replays"] if "replayed graph (stand-in)" in settings else []
    if step in memory.runs:
        run = memory.runs[step]
        checkpoint = run.config.checkpoint
        did += ["saves"] * (checkpoint.save is not None) + ["async"] * checkpoint.async_save
        did += ["loads"] * (step in memory.resumed)
        settings += () if run.final_division.is_even else ("uneven batch",)
    strategy = engine.config.strategy
    if strategy != "no_shard" and not engine.placement.optimizer:
        strategy = ""  # alone on its lanes it cuts nothing
    elif engine.groups.grid.instances > 1:
        strategy = "hybrid"
    return _layout(engine.groups, built, strategy, settings, schedule=schedule, did=did)


def _layout(
    groups: Any,
    built: _Built,
    strategy: str,
    settings: Sequence[str],
    *,
    schedule: str = "",
    did: Sequence[str] = ("generates",),
) -> Ran:
    grid = groups.grid
    experts = built.config.moe is not None
    return Ran(
        world=grid.world_size,
        tp=grid.tp,
        cp=grid.cp,
        pp=grid.pp,
        dp=grid.dp,
        ep=grid.ep if experts else 1,
        etp=grid.size("etp") if experts else 1,
        sequence_parallel=built.sequence_parallel and grid.tp > 1,
        schedule=schedule,
        strategy=strategy,
        settings=tuple(sorted(set(settings))),
        did=tuple(did),
    )

# SPDX-License-Identifier: Apache-2.0
"""Record the grid, strategy and settings of every training step that a test applies.

The recorder is installed only if `VARIABLE` names a file (`pytest --status-out`): in the test's own
process, in ranks and in torchrun jobs. It reads the objects of the step that was just applied, so
the file never contains a layout that did not train, whatever the test's flags.
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
VARIABLE = "MEGATRON_TEST_COVERAGE"


@dataclass
class _Built:
    """Constructor arguments of a model that the model does not store."""

    config: Any
    backend: Any
    sequence_parallel: bool
    recompute: Any


@dataclass
class _Memory:
    """The models of this process by weight store, its runs by step, and the last optimizer."""

    models: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary)
    runs: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary)
    resumed: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    written_lines: set[tuple[str, str]] = field(default_factory=set)
    optimizer: Any = None

    def tell(self, ran: Ran) -> None:
        """Write a line, once for each file."""
        path, line = os.environ.get(VARIABLE), json.dumps(asdict(ran), sort_keys=True)
        if path is not None and (path, line) not in self.written_lines:
            self.written_lines.add((path, line))
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def read(path: Path) -> list[Ran]:
    """Return the distinct recorded layouts."""
    if not path.exists():
        return []
    return [Ran.of(json.loads(line)) for line in sorted(set(path.read_text().splitlines()))]


def install() -> None:
    """Wrap the models, steps and runs of this process."""
    # Imported here, because a process without the recorder must not load these modules.
    from megatron.core.backend import LOCAL
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import Optimizer
    from megatron.core.transformer import Recompute
    from megatron.training import pretraining, session
    from megatron.training.step import TrainStep

    memory = _Memory()

    def built(
        model: Any, returned_value: None, /, config: Any, groups: Any, **options: Any
    ) -> None:
        memory.models[model.store] = _Built(
            config,
            options.get("backend", LOCAL),
            options.get("sequence_parallel", False),
            Recompute(),
        )

    def recomputed(model: Any, returned_value: None, /, recompute: Any) -> None:
        memory.models[model.store].recompute = recompute

    def stepped(step: Any, report: Any, /, microbatches: Sequence[Any], **options: Any) -> None:
        if report.applied and step.engine.store in memory.models:
            memory.tell(_trained(memory, step, microbatches))

    def generated(
        model: Any, returned_value: Any, /, *tokens: Any, cache: Any = None, **options: Any
    ) -> None:
        if cache is not None:
            memory.tell(_layout(model.groups, memory.models[model.store], "no_shard", ()))

    def moved(optimizer: Any, *args: Any, **options: Any) -> None:
        memory.optimizer = optimizer  # a step may be given a stand-in before it

    def began(steps: Any, returned_value: None, /, session: Any, *args: Any) -> None:
        memory.runs[session.step] = session.run

    _call_after(GPTModel, "__init__", built)
    _call_after(GPTModel, "set_recompute", recomputed)
    _call_after(GPTModel, "forward", generated)
    _call_after(Optimizer, "step", moved)
    _call_after(TrainStep, "__call__", stepped)
    _call_after(session.SessionSteps, "__init__", began)
    restore = pretraining.restore

    def restored(session: Any) -> Any:
        progress, text = restore(session)
        if progress.iteration > 0:
            memory.resumed.add(session.step)
        return progress, text

    pretraining.restore = restored


def _call_after(owner: type, name: str, tell: Callable[..., None]) -> None:
    """Call `tell` with the object, the result and the arguments after every call."""
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = whole(self, *args, **kwargs)
        tell(self, result, *args, **kwargs)
        return result

    setattr(owner, name, watched)


def _trained(memory: _Memory, step: Any, microbatches: Sequence[Any]) -> Ran:
    """Return the layout and settings of a step and the other actions of its run."""
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
        strategy = ""  # a single data-parallel rank shards nothing
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

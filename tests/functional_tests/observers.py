# SPDX-License-Identifier: Apache-2.0
"""Observations of a run's options: derived values, constructor arguments, log, losses and files."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.cli.launch import Launch
from megatron.core import ProcessGroupCollection
from megatron.core.dist_checkpointing import Solo
from megatron.training import (
    core_configs,
    distributed_context,
    failure_hooks,
    observation,
    save_hooks,
    session,
)
from megatron.training.config import model_table
from megatron.training.config.resolve import ResolvedRun, padded_vocab_size
from megatron.training.data import data_sets
from megatron.training.data.vocabulary import Vocabulary
from megatron.training.fault_tolerance.stopping import StopRequests
from megatron.training.layouts import packed_cuts
from megatron.training.monitoring.metrics import read_metrics
from megatron.training.pretrain_gpt import read_run, start_watch
from tests.functional_tests.small_run import program_of, run_in_process

#: Timestamps and measured times of log lines.
_TIMINGS = re.compile(
    r"^ \[.*?\] |elapsed time per iteration \(ms\): [\d.]+|tokens per second[^|]*|"
    r"throughput[^|]*|memory \(MB\)[^|]*"
)


class _ConstructorCalled(Exception):
    """Carries the arguments of a constructor."""


def _stop(*args: Any, **kwargs: Any) -> None:
    raise _ConstructorCalled(_plain(kwargs))


def _plain(value: Any) -> Any:
    """Return a value as text that is equal for equal options; an object becomes its class name."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if is_dataclass(value) and not isinstance(value, ResolvedRun | type):
        return [type(value).__name__] + [
            (field.name, _plain(vars(value).get(field.name)))
            for field in fields(value)
            if field.name != "config" or type(value).__module__.startswith("megatron.core")
        ]
    if isinstance(value, int | float | str | None | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, partial):
        return _plain(value.keywords)
    return type(value).__name__


def plan(argv: list[str], world: int) -> Any:
    """Return all values derived from options without a run: sizes, schedules, core configs."""
    run = read_run(argv, Launch(world_size=world), program=program_of(argv))
    samples = range(0, run.train_samples, 4)
    lr, decay = core_configs.learning_rate_schedule(run), core_configs.weight_decay_schedule(run)
    scaler = core_configs.loss_scaler(run.config)
    vocab_size = run.config.tokenizer.vocab_size or 61
    return {
        "run": {k: v for k, v in vars(run).items() if k != "config"},
        "model": repr(model_table.gpt_config(run.config, vocab_size)),
        "made with": _model_arguments(run, vocab_size),
        "padded": padded_vocab_size(run.config, vocab_size),
        "dtype": core_configs.weight_dtype(run.config),
        "recompute": repr(core_configs.recompute(run.config)),
        "grid": repr(distributed_context.rank_grid(run)),
        "cuts": _cuts(run, vocab_size),
        "engine": repr(core_configs.data_parallel_config(run.config)),
        "order": _order(run),
        "optimizer": repr(core_configs.optimizer_config(run.config)),
        "scaler": [type(scaler).__name__, _plain(vars(scaler))],
        "lr": [lr.lr(n) for n in samples],
        "weight decay": [decay.weight_decay(n) for n in samples],
        "timeout": _timeout(run),
        "stragglers": _straggler_factor(run),
    }


def _order(run: ResolvedRun) -> Any:
    has_stages = run.config.pipeline.pipeline_model_parallel_size > 1
    return core_configs.pipeline_order(run.config) if has_stages else None


def _cuts(run: ResolvedRun, vocab_size: int) -> Any:
    context: Any = SimpleNamespace(
        groups=ProcessGroupCollection.single(), device=torch.device("cpu")
    )
    model = model_table.gpt_config(run.config, vocab_size)
    packed_chunks = packed_cuts(run, context, model)
    return None if packed_chunks is None else _plain(vars(packed_chunks))


def _model_arguments(run: ResolvedRun, vocab_size: int) -> Any:
    context: Any = SimpleNamespace(
        groups=ProcessGroupCollection.single(), device=torch.device("cpu"), coordinator=Solo()
    )
    vocabulary = Vocabulary(size=vocab_size, eod=None, tokenizer={})
    no_collector: Any = None
    with mock.patch.object(session, "GPTModel", _stop):
        try:
            session.build_session(run, context, vocabulary, no_collector)
        except _ConstructorCalled as called:
            return called.args
    raise AssertionError("no model was made")


def _timeout(run: ResolvedRun) -> Any:
    launch: Any = SimpleNamespace(world_size=2, rank=0, attempt=0, connect=_stop)
    try:
        start_watch(run, launch, mock.Mock())
    except _ConstructorCalled as called:
        return called.args
    raise AssertionError("no store was opened")


def _straggler_factor(run: ResolvedRun) -> Any:
    groups = ProcessGroupCollection.single()
    context: Any = SimpleNamespace(groups=groups, device=torch.device("cpu"), watch=None)
    session: Any = SimpleNamespace(run=run, context=context)
    with mock.patch.object(failure_hooks, "StragglerReport", _stop):
        try:
            failure_hooks.straggler_report(session, str, say=print, metrics=mock.Mock())
        except _ConstructorCalled as called:
            return called.args
    return None


def listeners(argv: list[str], world: int) -> list[str]:
    """Return the classes of the objects that observe the collectives of a run on several ranks."""
    launch = Launch(world_size=world)
    run = read_run(argv, launch)
    groups = SimpleNamespace(observers=[])
    fakes = dict.fromkeys(("dist", "StoreCoordinator", "check_same_start"), mock.MagicMock())
    fakes["ProcessGroupCollection"] = mock.MagicMock(create=lambda *a, **k: groups)
    with (
        mock.patch.multiple(distributed_context, **fakes),
        mock.patch.object(Launch, "open_store", return_value=dist.HashStore()),
        distributed_context.join_run(run, launch, mock.MagicMock(), stop=mock.MagicMock()),
    ):
        return [type(observer).__name__ for observer in groups.observers]


@dataclass(frozen=True)
class RunObservation:
    """Observations of one run.

    Args:
        code: exit code.
        lines: printed lines, without measured times and output paths.
        losses: training losses by iteration.
        files: names of the written files.
        constructors: names and arguments of the observed constructors.
    """

    code: int
    lines: tuple[str, ...]
    losses: dict[int, float | None]
    files: frozenset[str]
    constructors: tuple[Any, ...]


def _losses(metrics: Path) -> dict[int, float | None]:
    """Return the losses of training by iteration; None where they are NaN."""
    events = [event for event in read_metrics(metrics) if event["kind"] == "train"]
    return {event["iteration"]: event.get("lm_loss") for event in events}


#: The constructors and functions whose arguments are recorded.
_CONSTRUCTORS = (
    (session, "DataParallel"),
    (session, "Optimizer"),
    (session, "TrainStep"),
    (observation, "open_display"),
    (observation, "scheduled_collection"),
    (data_sets, "read_vocabulary"),
    (save_hooks, "Saves"),
    (data_sets, "PrefetchedBatches"),
    (torch, "use_deterministic_algorithms"),
    (signal, "siginterrupt"),
)


def _trackers(record: Callable[..., Any]) -> dict[str, Any]:
    """Return fakes of the tracking libraries that record how they are started."""

    def init(*, config: Any, **named: Any) -> Any:
        return record("wandb", lambda **n: mock.MagicMock(id="w"))(**named)

    mlflow_run = mock.MagicMock(**{"info.run_id": "m"})
    client = SimpleNamespace(
        get_experiment_by_name=record("experiment", lambda name: mock.MagicMock(experiment_id=1)),
        create_run=record("run", lambda experiment, run_name: mlflow_run),
        log_batch=lambda *args, **named: None,
        set_terminated=lambda run: None,
    )
    entities = mock.MagicMock()
    mlflow = mock.MagicMock(
        MlflowClient=record("mlflow", lambda tracking_uri: client), entities=entities
    )
    wandb = mock.MagicMock(init=init)
    return {"wandb": wandb, "mlflow": mlflow, "mlflow.entities": entities}


@contextlib.contextmanager
def _record_constructors(recorded: list[Any]) -> Iterator[None]:
    """Record the arguments of the constructors of a run."""

    def record(constructor_name: str, constructor: Callable[..., Any]) -> Callable[..., Any]:
        def recorded_constructor(*args: Any, **kwargs: Any) -> Any:
            recorded.append((constructor_name, _plain(args), _plain(kwargs)))
            constructed = constructor(*args, **kwargs)
            if constructor_name == "read_vocabulary":
                recorded.append((constructor_name, _plain(constructed)))
            return constructed

        return recorded_constructor

    with contextlib.ExitStack() as stack:
        for module, constructor_name in _CONSTRUCTORS:
            wrapped = record(constructor_name, getattr(module, constructor_name))
            stack.enter_context(mock.patch.object(module, constructor_name, wrapped))
        stack.enter_context(mock.patch.dict(sys.modules, _trackers(record)))
        arm = record("arm", StopRequests.arm)
        stack.enter_context(
            mock.patch.object(StopRequests, "arm", lambda self, **kwargs: arm(self, **kwargs))
        )
        yield


def observe_run(argv: list[str], out: Path) -> RunObservation:
    """Run in this process and return the observations.

    Args:
        argv: arguments; `{out}` stands for the folder `out`.
        out: empty folder for the files of the run.
    """
    metrics = out / "metrics.jsonl"
    words = [word.replace("{out}", str(out)) for word in argv]
    if "--metrics-file" not in words:
        words += ["--metrics-file", str(metrics)]
    text = io.StringIO()
    constructors: list[Any] = []
    with (
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        _record_constructors(constructors),
    ):
        code = run_in_process(words)
    torch.use_deterministic_algorithms(False)
    lines = (_TIMINGS.sub("", line) for line in text.getvalue().splitlines())
    return RunObservation(
        code=code,
        lines=tuple(line.replace(str(out), "OUT") for line in lines),
        losses=_losses(metrics) if metrics.exists() else {},
        files=frozenset(str(file.relative_to(out)) for file in out.rglob("*")),
        constructors=tuple(constructors),
    )

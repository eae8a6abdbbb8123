# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as lists of actions, their simulation, and one executor.

schedule    the computes of every rank in order: 1F1B, interleaved 1F1B, ZB-H1
transfers   adds sends, receives, all-gathers and reductions to these lists
simulate    timing and checks of schedules on their dependency graph, without processes
runtime     execution of a schedule; AutogradWorker computes a model's chunks

The first three are pure Python: torch is imported with the first access to a name of `runtime`.
"""

from typing import TYPE_CHECKING

from megatron.core.pipeline_parallel.schedule import (
    COMPUTES,
    FORWARD_TRANSFERS,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    ActionKind,
    Schedule,
    make_schedule,
    problems,
)
from megatron.core.pipeline_parallel.simulate import (
    DeadlockError,
    Event,
    Timeline,
    Times,
    check,
    simulate,
)
from megatron.core.pipeline_parallel.transfers import with_transfers, with_weight_traffic

if TYPE_CHECKING:
    from megatron.core.pipeline_parallel.runtime import AutogradWorker, Executor, Worker, program

__all__ = [
    "COMPUTES",
    "FORWARD_TRANSFERS",
    "RECEIVES",
    "SENDS",
    "TRANSFERS",
    "Action",
    "ActionKind",
    "AutogradWorker",
    "DeadlockError",
    "Event",
    "Executor",
    "Schedule",
    "Timeline",
    "Times",
    "Worker",
    "check",
    "make_schedule",
    "problems",
    "program",
    "simulate",
    "with_transfers",
    "with_weight_traffic",
]


def __getattr__(name: str) -> object:
    """Return a name of the modules that import torch."""
    if name in ("Executor", "Worker") or name in ("AutogradWorker", "program"):
        import megatron.core.pipeline_parallel.runtime as module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(module)[name]

# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as lists of actions, their simulation, and one executor.

schedule    what every rank computes, in order: 1F1B, interleaved, ZB-H1
transfers   sends, receives, gathers and reductions added to these lists
simulate    timing without processes, on the graph of dependences; mistakes in lists
runtime     execution: one executor over a worker; AutogradWorker computes a model's chunks

The first three are pure: torch is imported when a name of `runtime` is asked for.
"""

from typing import TYPE_CHECKING

from megatron.core.pipeline_parallel.schedule import (
    AHEAD,
    COMPUTES,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
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
    "AHEAD",
    "COMPUTES",
    "RECEIVES",
    "SENDS",
    "TRANSFERS",
    "Action",
    "AutogradWorker",
    "DeadlockError",
    "Event",
    "Executor",
    "Kind",
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

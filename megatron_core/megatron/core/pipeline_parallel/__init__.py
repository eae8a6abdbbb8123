# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Pipeline parallelism: schedules as lists of actions, their simulation, and one executor.

schedule    the computes of every rank in order: 1F1B, interleaved 1F1B, ZB-H1
transfers   adds sends, receives, all-gathers and reductions to these lists
simulate    timing and checks of schedules on their dependency graph, without processes
runtime     execution of a schedule; AutogradWorker computes a model's chunks

The first three are pure Python: torch is imported with the first access to a name of `runtime`.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports
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
    from megatron.core.pipeline_parallel.runtime import AutogradWorker as AutogradWorker
    from megatron.core.pipeline_parallel.runtime import Executor as Executor
    from megatron.core.pipeline_parallel.runtime import Worker as Worker
    from megatron.core.pipeline_parallel.runtime import program as program

__getattr__, __dir__, __all__ = lazy_exports(__name__)

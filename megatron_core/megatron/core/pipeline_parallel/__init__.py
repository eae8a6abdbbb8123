# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as lists of actions, their simulation, and one executor.

schedule    what every rank computes, in order: 1F1B, interleaved, ZB-H1
transfers   sends, receives, gathers and reductions added to that
simulate    checked and timed without processes
runtime     carried out: one executor over a worker
stage       the worker of a model's chunks, by autograd
"""

from megatron.core.pipeline_parallel.runtime import Executor, Worker
from megatron.core.pipeline_parallel.schedule import (
    Action,
    Kind,
    Schedule,
    make_schedule,
    problems,
)
from megatron.core.pipeline_parallel.simulate import Times, simulate
from megatron.core.pipeline_parallel.stage import AutogradWorker, program
from megatron.core.pipeline_parallel.transfers import with_transfers, with_weight_traffic

__all__ = [
    "Action",
    "AutogradWorker",
    "Executor",
    "Kind",
    "Schedule",
    "Times",
    "Worker",
    "make_schedule",
    "problems",
    "program",
    "simulate",
    "with_transfers",
    "with_weight_traffic",
]

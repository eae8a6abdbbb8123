# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as lists of actions, their simulation, and one executor.

    schedule, transfers      the lists: what every rank computes, sends and receives
    dependence, simulate     how long they take, what they idle and keep
    check                    what is wrong with lists
    runtime, stage           carry out a rank's list; all the others are pure and need no torch
"""

from megatron.core.pipeline_parallel.check import check
from megatron.core.pipeline_parallel.schedule import (
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
    simulate,
)
from megatron.core.pipeline_parallel.transfers import with_transfers, with_weight_traffic

__all__ = [
    "COMPUTES",
    "RECEIVES",
    "SENDS",
    "TRANSFERS",
    "Action",
    "DeadlockError",
    "Event",
    "Kind",
    "Schedule",
    "Timeline",
    "Times",
    "check",
    "make_schedule",
    "problems",
    "simulate",
    "with_transfers",
    "with_weight_traffic",
]

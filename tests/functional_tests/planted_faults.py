# SPDX-License-Identifier: Apache-2.0
"""The small run with a fault planted in its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch.distributed as dist

from megatron.training import train_steps
from megatron.training.step import Microbatch
from tests.functional_tests import small_run
from tests.support.ranks import Outcome, RankSet, start_ranks


def _planted_rank(
    rank: int, world: int, port: int, argv: list[str], plant: Callable[[int], None]
) -> NoReturn:
    plant(rank)
    small_run.rank_process(rank, world, port, argv)


@contextlib.contextmanager
def running_with(
    plant: Callable[[int], None], argv: list[str], *, world: int = 2
) -> Iterator[RankSet]:
    """Start a run with a planted fault; see `run_with`."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start_ranks(_planted_rank, world, server.port, argv, plant, init=False) as ranks:
        yield ranks
    del server


def run_with(
    plant: Callable[[int], None], argv: list[str], *, world: int = 2, timeout: float = 60.0
) -> tuple[list[Outcome], list[str]]:
    """Run with a planted fault and return the outcomes and logs of the ranks.

    Args:
        plant: module-level function that is called in every rank, with the rank, before the run.
    """
    with running_with(plant, argv, world=world) as ranks:
        outcomes = ranks.outcomes(timeout=timeout)
        return outcomes, [ranks.log(rank) for rank in range(world)]


def on_microbatch(number: int, fault: Callable[[Microbatch], None]) -> None:
    """Apply `fault` to this process's microbatch `number`, counted from 1."""
    count = [0]
    build_microbatch = train_steps.microbatch

    def faulty(batch, device, **kwargs):
        microbatch = build_microbatch(batch, device, **kwargs)
        count[0] += 1
        if count[0] == number:
            fault(microbatch)
        return microbatch

    train_steps.microbatch = faulty


def at_step(number: int, fault: Callable[[train_steps.SessionSteps], None]) -> None:
    """Apply `fault` before this process takes step `number`, counted from 1."""
    count = [0]
    take_step = train_steps.SessionSteps.take_step

    def faulty(self, *args, **kwargs):
        count[0] += 1
        if count[0] == number:
            fault(self)
        return take_step(self, *args, **kwargs)

    train_steps.SessionSteps.take_step = faulty

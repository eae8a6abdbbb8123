# SPDX-License-Identifier: Apache-2.0
"""The small run with a fault planted in its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch.distributed as dist

from megatron.training import session
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
    """Start a run with a fault; see `run_with`."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start_ranks(_planted_rank, world, server.port, argv, plant, init=False) as ranks:
        yield ranks
    del server


def run_with(
    plant: Callable[[int], None], argv: list[str], *, world: int = 2, timeout: float = 60.0
) -> tuple[list[Outcome], list[str]]:
    """Run with a fault, and return how the ranks ended and what they printed.

    Args:
        plant: called in every rank with its number, before it starts; a module-level function.
    """
    with running_with(plant, argv, world=world) as ranks:
        found = ranks.outcomes(timeout=timeout)
        return found, [ranks.log(rank) for rank in range(world)]


def on_microbatch(number: int, fault: Callable[[session.Microbatch], None]) -> None:
    """Have `fault` change this process's microbatch of this number, from 1."""
    count = [0]
    whole = session.microbatch

    def faulty(batch, device, **more):
        made = whole(batch, device, **more)
        count[0] += 1
        if count[0] == number:
            fault(made)
        return made

    session.microbatch = faulty

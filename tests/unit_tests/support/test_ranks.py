# SPDX-License-Identifier: Apache-2.0
"""Ranks return values, report the first failure and the stack of a hang, and can be killed."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, run_ranks


def _sum_of_ranks(rank, world, start):
    value = torch.full((3,), float(rank + start))
    dist.all_reduce(value)
    return {"sum": value, "threads": torch.get_num_threads(), "pid": os.getpid()}


def test_values_return_in_rank_order_from_fresh_processes():
    first_run = run_ranks(_sum_of_ranks, 4, 10)
    second_run = run_ranks(_sum_of_ranks, 4, 10)
    assert all(torch.equal(v["sum"], torch.full((3,), 46.0)) for v in first_run)
    assert {v["threads"] for v in first_run} == {1}
    assert len({v["pid"] for v in first_run + second_run}) == 8


def _rank_and_cpu_seconds(rank, world):
    return rank, time.process_time()


def test_eight_ranks_start_without_importing_torch():
    ranks, seconds = zip(*run_ranks(_rank_and_cpu_seconds, 8), strict=True)
    assert ranks == tuple(range(8))
    assert max(seconds) < 0.5, seconds  # CPU time: 0.02 s, and 2 s if every rank imported torch


def _fail_on_two(rank, world):
    if rank == 2:
        raise RuntimeError("the reason")
    dist.barrier()


def test_exception_fails_at_once_with_its_own_traceback():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 2 of 4 failed first") as caught:
        run_ranks(_fail_on_two, 4)
    assert "RuntimeError: the reason" in str(caught.value)
    assert "_fail_on_two" in str(caught.value)
    assert time.monotonic() - start < 10


def _warn(rank, world):
    warnings.warn("careless", UserWarning, stacklevel=1)


def test_warning_on_a_rank_is_an_error():
    with pytest.raises(RankFailure, match="UserWarning: careless"):
        run_ranks(_warn, 1)


def _wait_alone(rank, world):
    if rank == 0:
        dist.barrier()
    return rank


def test_hang_shows_the_stack_of_waiting_ranks():
    with pytest.raises(RankFailure, match=r"no end after 1\.5 s") as caught:
        run_ranks(_wait_alone, 2, timeout=1.5)
    assert "--- rank 0" in str(caught.value)
    assert "_wait_alone" in str(caught.value)
    assert "--- rank 1" not in str(caught.value)


def _die(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_killed_rank_is_named_before_errors_of_its_peers():
    with pytest.raises(RankFailure, match="rank 1 of 2 failed first:\ndied with exit code -9"):
        run_ranks(_die, 2)

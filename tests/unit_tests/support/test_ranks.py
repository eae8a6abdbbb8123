# SPDX-License-Identifier: Apache-2.0
"""Ranks return values, show the first failure, show where they hang, and can be killed."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, run_ranks, start_ranks


def _sum_of_ranks(rank, world, start):
    value = torch.full((3,), float(rank + start))
    dist.all_reduce(value)
    return {"sum": value, "threads": torch.get_num_threads(), "pid": os.getpid()}


def test_values_return_in_rank_order_from_fresh_processes():
    first = run_ranks(_sum_of_ranks, 4, 10)
    second = run_ranks(_sum_of_ranks, 4, 10)
    assert all(torch.equal(v["sum"], torch.full((3,), 46.0)) for v in first)
    assert {v["threads"] for v in first} == {1}
    assert len({v["pid"] for v in first + second}) == 8


def _begun(rank, world):
    return rank, time.process_time()


def test_eight_ranks_start_without_importing_torch():
    ranks, seconds = zip(*run_ranks(_begun, 8), strict=True)
    assert ranks == tuple(range(8))
    assert max(seconds) < 0.5, seconds  # of CPU time: 0.02, and 2 where each imports torch


def _fail_on_two(rank, world):
    if rank == 2:
        raise RuntimeError("the reason")
    dist.barrier()


def test_an_exception_fails_with_its_own_traceback_at_once():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 2 of 4 failed first") as caught:
        run_ranks(_fail_on_two, 4)
    assert "RuntimeError: the reason" in str(caught.value)
    assert "_fail_on_two" in str(caught.value)
    assert time.monotonic() - start < 10


def _warn(rank, world):
    warnings.warn("careless", UserWarning, stacklevel=1)


def test_a_warning_on_a_rank_is_an_error():
    with pytest.raises(RankFailure, match="UserWarning: careless"):
        run_ranks(_warn, 1)


def _wait_for_nobody(rank, world):
    if rank == 0:
        dist.barrier()
    return rank


def test_a_hang_shows_where_the_ranks_stand():
    with pytest.raises(RankFailure, match=r"no end after 1\.5 s") as caught:
        run_ranks(_wait_for_nobody, 2, timeout=1.5)
    assert "--- rank 0" in str(caught.value)
    assert "_wait_for_nobody" in str(caught.value)
    assert "--- rank 1" not in str(caught.value)


def _die(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_silent_death_is_named_before_the_errors_it_causes():
    with pytest.raises(RankFailure, match="rank 1 of 2 failed first:\ndied with exit code -9"):
        run_ranks(_die, 2)


def _count(rank, world):
    value = torch.zeros(1)
    for step in range(10_000):
        dist.all_reduce(value)
        print(f"step {step}", flush=True)
        time.sleep(0.005)
    return "done"


def test_a_test_can_kill_one_rank_and_watch_the_others():
    # A survivor may wait for the other one, which waits no more: only its own timeout ends that.
    with start_ranks(_count, 3, collective_timeout=5.0) as ranks:
        ranks.wait_for_line(2, "step 3")
        ranks.kill(1)
        found = ranks.outcomes(timeout=20)
    assert found[1].exit_code == -signal.SIGKILL
    assert found[1].error is None
    assert all("step 3" not in found[r].error and "all_reduce" in found[r].error for r in (0, 2))


def test_a_stopped_rank_makes_its_peers_time_out():
    with start_ranks(_count, 2, collective_timeout=1.0) as ranks:
        ranks.wait_for_line(0, "step 2")
        ranks.kill(1, signal.SIGSTOP)
        found = ranks.outcomes(timeout=15, stop_at_failure=True)
    assert "all_reduce" in found[0].error
    assert not found[1].returned
    assert found[1].error is None


def _environment(rank, world):
    return os.environ["GREETING"], os.environ["RANK"]


def test_environment_variables_reach_the_ranks_only():
    assert run_ranks(_environment, 2, env={"GREETING": "hello"}) == [("hello", "0"), ("hello", "1")]
    assert "GREETING" not in os.environ

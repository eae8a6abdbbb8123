# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop, fail, diverge or are slow: one test for each fault."""

from __future__ import annotations

import re
import signal
import socket
import time
from functools import partial

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from megatron.training import train_steps
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.planted_faults import on_microbatch, run_with
from tests.functional_tests.small_run import (
    flags,
    run_on,
    running,
)

#: Too many iterations to end before the test stops the run.
LONG = "--train-iters 3000 --lr-decay-iters 40 --eval-interval 0"


@pytest.mark.covers("hang diagnosis")
@pytest.mark.parametrize(
    ("number", "minutes", "state"),
    [(signal.SIGSTOP, 0.1, "is stopped"), (signal.SIGKILL, 10.0, "is dead")],
)
@pytest.mark.covers("hang diagnosis")
def test_dead_rank_is_named_with_step_collective_and_stacks(
    prefix, tmp_path, number, minutes, state
):
    save = tmp_path / "save"
    options = f"{LONG} --save {save} --save-interval 2 --distributed-timeout-minutes {minutes}"
    with running(3, flags(prefix, f"{options} --global-batch-size 12")) as ranks:
        ranks.wait_for_line(2, "iteration        3/", timeout=60)
        pid = ranks.processes[0].pid
        ranks.kill(0, number)
        start = time.monotonic()
        while f"rank 0 (process {pid}" not in ranks.log(1) + ranks.log(2):
            assert time.monotonic() - start < 60.0 * 0.1 + 10.0, ranks.log(1)
            time.sleep(0.02)
        for rank in (1, 2):
            ranks.processes[rank].join(10)
        if number == signal.SIGSTOP:
            ranks.kill(0, signal.SIGKILL)
        outcomes = ranks.outcomes(timeout=20)
        text = ranks.log(1) + ranks.log(2)
    assert [outcomes[rank].exit_code for rank in (1, 2)] == [ExitCode.PEER_LOST] * 2, text
    assert f"rank 0 (process {pid} on {socket.gethostname()}) {state}" in text
    assert "; the others wait in all_reduce (sum) of float" in text
    assert " of iteration " in text
    assert "Traceback" not in text
    for rank in (1, 2):
        stacks = (save / "stacks" / f"attempt_0_rank_{rank}.txt").read_text()
        assert "collectives.py" in stacks, "the collective that it waited in"
        assert "in _send_heartbeats" in stacks, "every thread"
    report = (save / "hang_report_attempt_0.txt").read_text()
    assert f"\nrank 0 (process {pid} on " in report
    assert re.search(rf"^0 +\S+ +{pid} +{state.split()[-1]} ", report, re.M), report
    verify_checkpoint(latest_checkpoint(save))


def plant_error(rank: int, *, error: Exception) -> None:
    def fail(batch):
        raise error

    if rank == 1:
        on_microbatch(6, fail)


@pytest.mark.parametrize(
    ("error", "code", "num_tracebacks", "line"),
    [
        (KeyError("the sixth"), ExitCode.CRASH, 1, "KeyError: 'the sixth'"),
        (
            ValueError("the sixth is bad:\n mend it"),
            ExitCode.USER_ERROR,
            0,
            "pretrain_gpt: error: the sixth is bad: mend it",
        ),
    ],
)
def test_error_is_printed_once_and_peers_exit_soon(prefix, error, code, num_tracebacks, line):
    outcomes, logs = run_with(partial(plant_error, error=error), flags(prefix, LONG))
    assert [o.exit_code for o in outcomes] == [ExitCode.PEER_LOST, code], logs
    text = "".join(logs)
    assert text.count("Traceback (most recent call last)") == num_tracebacks
    assert text.splitlines().count(line) == 1, text
    assert abs(outcomes[0].at - outcomes[1].at) < 5.0


def plant_skipped_collective(rank: int) -> None:
    """Skip the gradient reductions of the sixth microbatch's step on rank 1."""
    from megatron.core.comm import Pending
    from megatron.core.distributed import gradient_bucket

    all_reduce_async = gradient_bucket.all_reduce_async
    is_skipping = [False]

    def skip_after_fault(x, group, *, out=None, **options):
        if rank == 1 and is_skipping[0]:
            return Pending(x)
        return all_reduce_async(x, group, out=out, **options)

    def start_skipping(batch):
        is_skipping[0] = True

    gradient_bucket.all_reduce_async = skip_after_fault
    on_microbatch(6, start_skipping)


def plant_shape_mismatch(rank: int) -> None:
    """Reduce one control flag less on rank 1 in its third step."""
    from megatron.training.fault_tolerance.stopping import StopRequests

    control_flags, count = StopRequests.control_flags, [0]

    def shortened_flags(self):
        count[0] += 1
        return control_flags(self)[: 2 if rank == 1 and count[0] == 3 else 3]

    StopRequests.control_flags = shortened_flags


@pytest.mark.parametrize(
    ("plant", "ops"),
    [
        (
            plant_skipped_collective,
            (
                r"all_reduce (sum) of float32 [",
                r"all_reduce (sum) of float64 [4] over world in iteration 3",
            ),
        ),
        (
            plant_shape_mismatch,
            (
                r"rank 0: all_reduce (sum) of float64 [4] over world in iteration 3",
                r"rank 1: all_reduce (sum) of float64 [3] over world in iteration 3",
            ),
        ),
    ],
)
def test_mismatched_collectives_are_reported_with_both_calls(prefix, plant, ops):
    start = time.monotonic()
    outcomes, logs = run_with(plant, flags(prefix, f"{LONG} --check-collectives"))
    assert {o.exit_code for o in outcomes} <= {ExitCode.COLLECTIVES_DIFFER, ExitCode.PEER_LOST}, (
        logs
    )
    assert ExitCode.COLLECTIVES_DIFFER in {o.exit_code for o in outcomes}
    text = "".join(logs)
    for op in ops:
        assert op in text, text
    assert "Traceback" not in text
    assert time.monotonic() - start < 30.0, "the timeout of collectives is ten minutes"


def test_matching_collectives_pass_the_check(prefix):
    layout = "--tensor-model-parallel-size 2 --train-iters 3 --eval-interval 2 --log-straggler"
    run_on(2, flags(prefix, f"{layout} --check-collectives"))


def plant_slow_rank(rank: int) -> None:
    if rank == 1:
        take_batch = train_steps.take

        def slow(*args, **kwargs):
            time.sleep(0.25)
            return take_batch(*args, **kwargs)

        train_steps.take = slow


@pytest.mark.covers("straggler detection")
@pytest.mark.covers("straggler detection")
def test_a_slow_rank_is_named(prefix, tmp_path):
    options = "--tensor-model-parallel-size 2 --train-iters 6 --eval-interval 0 --log-interval 3"
    metrics = tmp_path / "metrics.jsonl"
    options += f" --metrics-file {metrics} --log-straggler --straggler-factor 2"
    argv = flags(prefix, options)
    outcomes, logs = run_with(plant_slow_rank, argv)
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    straggler_lines = [line for line in logs[1].splitlines() if line.startswith("straggler: ")]
    assert len(straggler_lines) == 2, logs[1]
    assert all(f"rank 1 on {socket.gethostname()} computes " in line for line in straggler_lines)
    assert "straggler" not in logs[0]
    events = [event for event in read_metrics(metrics) if event["kind"] == "straggler"]
    assert [(event["iteration"], event["slow_ranks"]) for event in events] == [(3, 1.0), (6, 1.0)]
    for event in events:
        ((rank, (seconds, median)),) = event["seconds_and_median_by_rank"].items()
        assert rank == "1"
        assert seconds > 2.0 * median > 0.0

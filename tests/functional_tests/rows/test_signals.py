# SPDX-License-Identifier: Apache-2.0
"""Runs that end by SIGTERM, Ctrl-C or a time limit save a checkpoint that resumes exactly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import (
    digests,
    flags,
    rank_process,
    run_in_process,
    run_on,
    running,
    timeless,
)
from tests.functional_tests.torchrun_job import torchrun, wait_for_iteration
from tests.support.ranks import start_ranks

#: Too many iterations to end before the test stops the run.
LONG = "--train-iters 3000 --lr-decay-iters 40 --eval-interval 7"


def _stopped_at(text: str) -> int:
    match = re.search(r"stopped at iteration (\d+) because a signal asks", text)
    assert match, text
    return int(match[1])


@pytest.mark.covers("graceful stop with a save")
@pytest.mark.covers("bit-identical resume")
def test_sigterm_to_one_rank_saves_and_run_resumes_bit_exactly(prefix, tmp_path):
    layout = "--tensor-model-parallel-size 2"
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with running(2, flags(prefix, f"{LONG} {layout} --save {cut}")) as ranks:
        ranks.wait_for_line(1, "iteration        3/", timeout=60)
        start = time.monotonic()
        ranks.kill(0, signal.SIGTERM)
        outcomes = ranks.outcomes(timeout=60)
        logs = [ranks.log(rank) for rank in range(2)]
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    assert time.monotonic() - start < 25.0, "longer than the grace"
    iteration = _stopped_at(logs[1])
    assert (
        "SIGTERM: stopping after this step with a save; a second signal ends the run at once"
        in logs[0]
    )
    assert latest_checkpoint(cut) == cut / f"iter_{iteration:07d}"
    # The resumed run and an uninterrupted run.
    run_on(
        2,
        flags(prefix, f"{LONG} {layout} --save {cut} --load {cut} --exit-interval {iteration + 2}"),
    )
    run_on(2, flags(prefix, f"{LONG} {layout} --save {whole} --exit-interval {iteration + 2}"))
    name = f"iter_{iteration + 2:07d}"
    assert digests(cut / name) == digests(whole / name)
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")


def _slow_rank(rank: int, world: int, port: int, argv: list[str]) -> None:
    """Run a rank whose steps are slow: rank 0 sleeps when it reads a batch."""
    from megatron.training import train_steps

    take_batch = train_steps.take

    def slow(*args, **kwargs):
        if rank == 0:
            print("sleeping", flush=True)
            time.sleep(30)
        return take_batch(*args, **kwargs)

    train_steps.take = slow
    rank_process(rank, world, port, argv)


def _start_sleeping_ranks(prefix: Path, tmp_path: Path, options: str):
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = flags(prefix, f"{LONG} --eval-interval 0 --save {tmp_path / 'save'} {options}")
    return server, start_ranks(_slow_rank, 2, server.port, argv, init=False)


@pytest.mark.slow
def test_second_sigterm_ends_the_run_at_once(prefix, tmp_path):
    server, starting = _start_sleeping_ranks(prefix, tmp_path, "")
    with starting as ranks:
        ranks.wait_for_line(0, "sleeping", timeout=60)
        ranks.kill(0, signal.SIGTERM)
        ranks.wait_for_line(0, "a second signal ends the run at once", timeout=10)
        ranks.kill(0, signal.SIGTERM)
        time.sleep(1.2)
        assert ranks.processes[0].is_alive(), "signals within a second are one request"
        start = time.monotonic()
        ranks.kill(0, signal.SIGTERM)
        outcomes = ranks.outcomes(timeout=20)
    assert outcomes[0].exit_code == ExitCode.TERMINATED
    assert outcomes[1].exit_code == ExitCode.PEER_LOST
    assert outcomes[0].at - start < 5.0
    assert latest_checkpoint(tmp_path / "save") is None
    del server


def test_run_ends_when_a_step_outlasts_the_grace_period(prefix, tmp_path):
    server, starting = _start_sleeping_ranks(prefix, tmp_path, "--exit-grace-seconds 1")
    with starting as ranks:
        ranks.wait_for_line(0, "sleeping", timeout=60)
        ranks.kill(0, signal.SIGTERM)
        outcomes = ranks.outcomes(timeout=20)
        text = ranks.log(0)
    assert outcomes[0].exit_code == ExitCode.TERMINATED
    assert "the run did not end within --exit-grace-seconds 1" in text
    del server


@pytest.mark.parametrize("options", ["--no-exit-signal-handler --save {save}", ""])
def test_first_signal_ends_the_run_without_a_handler(prefix, tmp_path, options):
    argv = flags(prefix, f"{LONG} {options.format(save=tmp_path / 'save')}")
    with running(1, argv) as ranks:
        ranks.wait_for_line(0, "iteration        2/", timeout=60)
        ranks.kill(0, signal.SIGTERM)
        outcomes = ranks.outcomes(timeout=20)
        text = ranks.log(0)
    assert outcomes[0].exit_code == ExitCode.TERMINATED
    assert text.count("pretrain_gpt: ") == 1
    assert "pretrain_gpt: ended by SIGTERM\n" in text


@pytest.mark.parametrize(
    ("number", "options", "code"),
    [
        (signal.SIGHUP, "", ExitCode.HUNG_UP),
        (signal.SIGUSR1, "--exit-signal SIGUSR1", ExitCode.USER_SIGNAL_1),
        (signal.SIGUSR2, "--exit-signal SIGUSR2", ExitCode.USER_SIGNAL_2),
    ],
)
@pytest.mark.covers("graceful stop with a save")
def test_other_signals_save_and_stop_or_end_at_once(prefix, tmp_path, number, options, code):
    save = tmp_path / "save"
    with running(1, flags(prefix, f"{LONG} {options} --save {save}")) as ranks:
        ranks.wait_for_line(0, "iteration        2/", timeout=60)
        ranks.kill(0, number)
        outcomes = ranks.outcomes(timeout=20)
        iteration = _stopped_at(ranks.log(0))
    assert outcomes[0].exit_code == 0
    verify_checkpoint(save / f"iter_{iteration:07d}")
    with running(1, flags(prefix, f"{LONG} {options}")) as ranks:
        ranks.wait_for_line(0, "iteration        2/", timeout=60)
        ranks.kill(0, number)
        outcomes = ranks.outcomes(timeout=20)
        text = ranks.log(0)
    assert outcomes[0].exit_code == code, text


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.covers("graceful stop with a save")
def test_ctrl_c_saves_and_stops_or_interrupts(prefix, tmp_path, saves):
    save = f"--save {tmp_path / 'save'}" if saves else ""
    with running(1, flags(prefix, f"{LONG} {save}")) as ranks:
        ranks.wait_for_line(0, "iteration        2/", timeout=60)
        ranks.kill(0, signal.SIGINT)
        outcomes = ranks.outcomes(timeout=20)
        text = ranks.log(0)
    lines = [line for line in text.splitlines() if line.startswith("pretrain_gpt: ")]
    assert "Traceback" not in text
    if saves:
        assert outcomes[0].exit_code == 0, text
        assert lines == [
            "pretrain_gpt: SIGINT: stopping after this step with a save; a second signal ends the "
            "run at once"
        ]
        verify_checkpoint(latest_checkpoint(tmp_path / "save"))
    else:
        assert outcomes[0].exit_code == ExitCode.INTERRUPTED, text
        assert lines == ["pretrain_gpt: interrupted"]


def _workers(job: subprocess.Popen) -> list[int]:
    """Return the process ids of a launcher's ranks."""
    return [int(p) for p in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow(seconds=15))]
)
@pytest.mark.covers("graceful stop with a save")
def test_signal_to_launcher_saves_and_leaves_no_processes(prefix, tmp_path, number):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    save = tmp_path / "save"
    job = torchrun(
        flags(prefix, f"{LONG} --save {save}"),
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        processes=2,
    )
    wait_for_iteration(save / "metrics.jsonl", 3, job)
    workers = _workers(job)
    assert len(workers) == 2
    os.killpg(job.pid, number)
    output, _ = job.communicate(timeout=60)
    iteration = _stopped_at(output)
    assert latest_checkpoint(save) == save / f"iter_{iteration:07d}"
    lines = [line for line in output.splitlines() if "pretrain_gpt: " in line]
    assert len(lines) == 1, output
    # torchrun's exit code is 1 after a signal, independent of the ranks' exit codes.
    assert job.returncode != 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "a rank is left"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))  # raises if a process still listens on the port


@pytest.mark.covers("elastic restart")
def test_launcher_restart_resumes_from_the_last_save(prefix, tmp_path):
    """The command has no --load."""
    options = "--train-iters 5 --eval-interval 0 --save-interval 1 --use-distributed-optimizer"
    uninterrupted, cut = tmp_path / "whole", tmp_path / "cut"
    run_on(2, flags(prefix, f"{options} --save {uninterrupted}"))
    job = torchrun(
        flags(prefix, f"{options} --save {cut}"),
        "--standalone",
        "--max-restarts=2",
        module="tests.functional_tests.rows.crashing_run",
        processes=2,
    )
    output, _ = job.communicate(timeout=90)
    assert job.returncode == 0, output
    assert "restart 1 by the launcher" in output
    assert f"loaded {cut / 'iter_0000002'}; resuming at iteration 2" in output
    assert digests(cut / "iter_0000005") == digests(uninterrupted / "iter_0000005")
    events = read_metrics(cut / "metrics.jsonl")
    assert [e for e in events if e["kind"] == "start"] == [
        {"kind": "start", "iteration": 2, "restarts": 1.0}
    ]
    events_without_start = [e for e in timeless(cut / "metrics.jsonl") if e["kind"] != "start"]
    assert events_without_start == timeless(uninterrupted / "metrics.jsonl")


@pytest.mark.slow(seconds=10)
def test_launcher_fails_if_its_ranks_fail(prefix):
    job = torchrun(
        flags(prefix, "--train-iters 5 --eval-interval 0"),
        "--standalone",
        module="tests.functional_tests.rows.crashing_run",
        processes=2,
    )
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0, output
    assert "iteration        2/" in output
    assert "iteration        4/" not in output


@pytest.mark.slow
@pytest.mark.covers("graceful stop with a save")
def test_exit_duration_limit_includes_a_save(prefix, tmp_path):
    save = tmp_path / "save"
    start = time.monotonic()
    code = run_in_process(flags(prefix, f"{LONG} --save {save} --exit-duration-in-mins 0.1"))
    seconds = time.monotonic() - start
    assert code == 0
    # The limit is 6 s and all iterations would take minutes. On a busy machine a step or the save
    # may take seconds longer than the previous one.
    assert 3.0 < seconds < 20.0
    verify_checkpoint(latest_checkpoint(save))
    assert latest_checkpoint(save) != save / "iter_0000001"


def _rank_with_skewed_clock(rank: int, world: int, port: int, argv: list[str]) -> None:
    """Run a rank whose clock expires in step 5 on rank 1, and never on rank 0."""
    from megatron.training.fault_tolerance.stopping import StopRequests

    control_flags = StopRequests.control_flags
    count = [0]

    def planted(self):
        count[0] += 1
        signals, _, launchers = control_flags(self)
        return signals, float(rank == 1 and count[0] == 5), launchers

    StopRequests.control_flags = planted
    rank_process(rank, world, port, argv)


@pytest.mark.slow
@pytest.mark.covers("graceful stop with a save")
def test_ranks_with_different_clocks_stop_together(prefix, tmp_path):
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = flags(prefix, f"{LONG} --tensor-model-parallel-size 2 --save {tmp_path / 'save'}")
    with start_ranks(_rank_with_skewed_clock, 2, server.port, argv, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=60)
        text = ranks.log(1)
    assert [o.exit_code for o in outcomes] == [0, 0]
    assert "stopped at iteration 5 because --exit-duration-in-mins asks" in text
    assert latest_checkpoint(tmp_path / "save") == tmp_path / "save" / "iter_0000005"

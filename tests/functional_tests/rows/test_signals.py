# SPDX-License-Identifier: Apache-2.0
"""Runs that are asked to end: SIGTERM, Ctrl-C, a limit of time; what is saved goes on exactly."""

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
    run_here,
    run_on,
    running,
    timeless,
    write_tokens,
)
from tests.functional_tests.torchrun_job import torchrun, wait_for_iteration
from tests.support.ranks import start_ranks

#: Long enough not to end by itself.
LONG = "--train-iters 3000 --lr-decay-iters 40 --eval-interval 7"


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def _stopped_at(text: str) -> int:
    found = re.search(r"stopped at iteration (\d+) as a signal asks", text)
    assert found, text
    return int(found[1])


@pytest.mark.covers("stopped with a save", runs="saves")
@pytest.mark.covers("resumed to the same bits", runs="loads")
def test_sigterm_to_one_rank_saves_and_run_resumes_bit_exactly(prefix, tmp_path):
    layout = "--tensor-model-parallel-size 2"
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with running(2, flags(prefix, f"{LONG} {layout} --save {cut}")) as ranks:
        ranks.wait_for_line(1, "iteration        3/", timeout=60)
        start = time.monotonic()
        ranks.kill(0, signal.SIGTERM)
        found = ranks.outcomes(timeout=60)
        logs = [ranks.log(rank) for rank in range(2)]
    assert [o.exit_code for o in found] == [0, 0], logs
    assert time.monotonic() - start < 25.0, "longer than the grace"
    at = _stopped_at(logs[1])
    assert "SIGTERM: stopping after this step with a save; a second one ends at once" in logs[0]
    assert latest_checkpoint(cut) == cut / f"iter_{at:07d}"
    # The continuation, and the same without a break.
    run_on(2, flags(prefix, f"{LONG} {layout} --save {cut} --load {cut} --exit-interval {at + 2}"))
    run_on(2, flags(prefix, f"{LONG} {layout} --save {whole} --exit-interval {at + 2}"))
    name = f"iter_{at + 2:07d}"
    assert digests(cut / name) == digests(whole / name)
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")


def _slow_rank(rank: int, world: int, port: int, argv: list[str]) -> None:
    """Be a rank whose every step takes long: it sleeps where it reads its data."""
    from megatron.training import session

    whole = session.take

    def slow(*arguments, **more):
        if rank == 0:
            print("sleeping", flush=True)
            time.sleep(30)
        return whole(*arguments, **more)

    session.take = slow
    rank_process(rank, world, port, argv)


def _sleeping(prefix: Path, tmp_path: Path, more: str):
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = flags(prefix, f"{LONG} --eval-interval 0 --save {tmp_path / 'save'} {more}")
    return server, start_ranks(_slow_rank, 2, server.port, argv, init=False)


def test_a_second_sigterm_ends_at_once(prefix, tmp_path):
    server, started = _sleeping(prefix, tmp_path, "")
    with started as ranks:
        ranks.wait_for_line(0, "sleeping", timeout=60)
        ranks.kill(0, signal.SIGTERM)
        ranks.wait_for_line(0, "a second one ends at once", timeout=10)
        ranks.kill(0, signal.SIGTERM)
        time.sleep(1.2)
        assert ranks.processes[0].is_alive(), "signals of the same moment are one request"
        start = time.monotonic()
        ranks.kill(0, signal.SIGTERM)
        found = ranks.outcomes(timeout=20)
    assert found[0].exit_code == ExitCode.TERMINATED
    assert found[1].exit_code == ExitCode.PEER_LOST
    assert found[0].at - start < 5.0
    assert latest_checkpoint(tmp_path / "save") is None
    del server


def test_a_step_longer_than_the_grace_is_not_waited_for(prefix, tmp_path):
    server, started = _sleeping(prefix, tmp_path, "--exit-grace-seconds 1")
    with started as ranks:
        ranks.wait_for_line(0, "sleeping", timeout=60)
        ranks.kill(0, signal.SIGTERM)
        found = ranks.outcomes(timeout=20)
        text = ranks.log(0)
    assert found[0].exit_code == ExitCode.TERMINATED
    assert "no end within --exit-grace-seconds 1" in text
    del server


@pytest.mark.parametrize("more", ["--no-exit-signal-handler --save {save}", ""])
def test_without_orderly_stopping_the_first_signal_ends_at_once(prefix, tmp_path, more):
    argv = flags(prefix, f"{LONG} {more.format(save=tmp_path / 'save')}")
    with running(1, argv) as ranks:
        ranks.wait_for_line(0, "iteration        2/", timeout=60)
        ranks.kill(0, signal.SIGTERM)
        found = ranks.outcomes(timeout=20)
        text = ranks.log(0)
    assert found[0].exit_code == ExitCode.TERMINATED
    assert text.count("pretrain_gpt: ") == 1
    assert "pretrain_gpt: ended by SIGTERM\n" in text


@pytest.mark.parametrize(
    ("number", "more", "code"),
    [
        (signal.SIGHUP, "", ExitCode.HUNG_UP),
        (signal.SIGUSR1, "--exit-signal SIGUSR1", ExitCode.USER_SIGNAL_1),
        (signal.SIGUSR2, "--exit-signal SIGUSR2", ExitCode.USER_SIGNAL_2),
    ],
)
@pytest.mark.covers("stopped with a save", runs="saves")
def test_other_signals_save_and_stop_or_end_at_once(prefix, tmp_path, number, more, code):
    save = tmp_path / "save"
    with running(1, flags(prefix, f"{LONG} {more} --save {save}")) as ranks:
        ranks.wait_for_line(0, "iteration        2/", timeout=60)
        ranks.kill(0, number)
        found = ranks.outcomes(timeout=20)
        at = _stopped_at(ranks.log(0))
    assert found[0].exit_code == 0
    verify_checkpoint(save / f"iter_{at:07d}")
    with running(1, flags(prefix, f"{LONG} {more}")) as ranks:
        ranks.wait_for_line(0, "iteration        2/", timeout=60)
        ranks.kill(0, number)
        found = ranks.outcomes(timeout=20)
        text = ranks.log(0)
    assert found[0].exit_code == code, text


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.covers("stopped with a save")
def test_ctrl_c_in_a_single_process(prefix, tmp_path, saves):
    save = f"--save {tmp_path / 'save'}" if saves else ""
    with running(1, flags(prefix, f"{LONG} {save}")) as ranks:
        ranks.wait_for_line(0, "iteration        2/", timeout=60)
        ranks.kill(0, signal.SIGINT)
        found = ranks.outcomes(timeout=20)
        text = ranks.log(0)
    said = [line for line in text.splitlines() if line.startswith("pretrain_gpt: ")]
    assert "Traceback" not in text
    if saves:
        assert found[0].exit_code == 0, text
        assert said == [
            "pretrain_gpt: SIGINT: stopping after this step with a save; a second one ends at once"
        ]
        verify_checkpoint(latest_checkpoint(tmp_path / "save"))
    else:
        assert found[0].exit_code == ExitCode.INTERRUPTED, text
        assert said == ["pretrain_gpt: interrupted"]


def _workers(job: subprocess.Popen) -> list[int]:
    """Return the process ids of a launcher's ranks."""
    return [int(p) for p in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow(seconds=15))]
)
@pytest.mark.covers("stopped with a save", runs="saves")
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
    at = _stopped_at(output)
    assert latest_checkpoint(save) == save / f"iter_{at:07d}"
    said = [line for line in output.splitlines() if "pretrain_gpt: " in line]
    assert len(said) == 1, output
    # torchrun's own code is 1 after a signal, whatever its ranks did; theirs are in row 37.
    assert job.returncode != 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "a rank is left"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))  # raises if somebody still listens there


@pytest.mark.covers("elastic restart", runs="loads ranks")
def test_a_restart_by_the_launcher_goes_on_from_what_it_saved(prefix, tmp_path):
    """Without --load."""
    more = "--train-iters 5 --eval-interval 0 --save-interval 1 --use-distributed-optimizer"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_on(2, flags(prefix, f"{more} --save {whole}"))
    job = torchrun(
        flags(prefix, f"{more} --save {cut}"),
        "--standalone",
        "--max-restarts=2",
        module="tests.functional_tests.rows.crashing_run",
        processes=2,
    )
    output, _ = job.communicate(timeout=90)
    assert job.returncode == 0, output
    assert "restart 1 by the launcher" in output
    assert f"loaded {cut / 'iter_0000002'}; resuming at iteration 2" in output
    assert digests(cut / "iter_0000005") == digests(whole / "iter_0000005")
    events = read_metrics(cut / "metrics.jsonl")
    assert [e for e in events if e["kind"] == "start"] == [
        {"kind": "start", "iteration": 2, "restarts": 1.0}
    ]
    rest = [e for e in timeless(cut / "metrics.jsonl") if e["kind"] != "start"]
    assert rest == timeless(whole / "metrics.jsonl")


@pytest.mark.slow(seconds=10)
def test_the_launcher_fails_with_its_ranks(prefix):
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


@pytest.mark.covers("stopped with a save", runs="saves")
def test_exit_duration_limit_includes_a_save(prefix, tmp_path):
    save = tmp_path / "save"
    begun = time.monotonic()
    code = run_here(flags(prefix, f"{LONG} --save {save} --exit-duration-in-mins 0.1"))
    took = time.monotonic() - begun
    assert code == 0
    # Stopping at once would be before the limit of 6 s, too; all iterations take minutes. On a
    # busy machine a step, or the save, may take seconds more than the one before it.
    assert 3.0 < took < 20.0
    verify_checkpoint(latest_checkpoint(save))
    assert latest_checkpoint(save) != save / "iter_0000001"


def _other_clocks(rank: int, world: int, port: int, argv: list[str]) -> None:
    """Be a rank whose clock says that time is up in step 5 of rank 1, and never on rank 0."""
    from megatron.training.failures.stopping import StopRequests

    control_flags = StopRequests.control_flags
    count = [0]

    def planted(self):
        count[0] += 1
        signals, _, launchers = control_flags(self)
        return signals, float(rank == 1 and count[0] == 5), launchers

    StopRequests.control_flags = planted
    rank_process(rank, world, port, argv)


@pytest.mark.covers("stopped with a save", runs="saves")
def test_ranks_agree_although_their_clocks_do_not(prefix, tmp_path):
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = flags(prefix, f"{LONG} --tensor-model-parallel-size 2 --save {tmp_path / 'save'}")
    with start_ranks(_other_clocks, 2, server.port, argv, init=False) as ranks:
        found = ranks.outcomes(timeout=60)
        text = ranks.log(1)
    assert [o.exit_code for o in found] == [0, 0]
    assert "stopped at iteration 5 as --exit-duration-in-mins asks" in text
    assert latest_checkpoint(tmp_path / "save") == tmp_path / "save" / "iter_0000005"

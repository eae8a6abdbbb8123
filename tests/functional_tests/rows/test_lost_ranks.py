# SPDX-License-Identifier: Apache-2.0
"""All kinds of rank loss: the other ranks end, name the lost rank and write reports; saved
checkpoints survive."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import signal
import socket
import threading
import time

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.datasets import GPTBatches
from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from megatron.core.dist_checkpointing.save_plan import SaveSteps
from megatron.training.fault_tolerance.peers import PeerWatch
from tests.functional_tests.planted_faults import on_microbatch, run_with, running_with
from tests.functional_tests.small_run import flags, write_tokens

LONG = "--train-iters 3000 --lr-decay-iters 40 --eval-interval 0 --global-batch-size 12"
SHORT_TIMEOUT = "--distributed-timeout-minutes 0.25"
BEAT_SECONDS = 0.3
HOST = socket.gethostname()


def hold_the_interpreter() -> None:
    """Never release the GIL, like a library that waits with the lock held."""
    ctypes.PyDLL(None).sleep(1000)


def fail_from_outside() -> None:
    """Raise an exception in the main thread from another thread."""
    main = threading.main_thread().ident
    thread = threading.Thread(
        target=ctypes.pythonapi.PyThreadState_SetAsyncExc,
        args=(ctypes.c_ulong(main), ctypes.py_object(KeyError)),
    )
    thread.start()
    thread.join()


def fail() -> None:
    raise KeyError("planted")


def send_signal(number: int) -> None:
    os.kill(os.getpid(), number)


def fail_in_a_thread() -> None:
    """Make the prefetch thread fail from now on."""

    def read(self, samples):
        assert threading.current_thread() is not threading.main_thread()
        raise KeyError("planted")

    GPTBatches.read = read


FAULTS = {
    "error": fail,
    "error from outside": fail_from_outside,
    "error in a thread": fail_in_a_thread,
    "abort": os.abort,
    "bad address": functools.partial(ctypes.string_at, 0),
    "held interpreter": hold_the_interpreter,
    "SIGINT": functools.partial(send_signal, signal.SIGINT),
    "SIGTERM": functools.partial(send_signal, signal.SIGTERM),
    "SIGKILL": functools.partial(send_signal, signal.SIGKILL),
    "SIGSTOP": functools.partial(send_signal, signal.SIGSTOP),
}


def plant(rank: int, *, kind: str) -> None:
    """Plant a fault in rank 1's fifth iteration, with torch's flight recorder enabled."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "64"
    PeerWatch.__init__.__kwdefaults__["heartbeat_seconds"] = BEAT_SECONDS

    def fault(batch) -> None:
        time.sleep(3.0 * BEAT_SECONDS)  # let a heartbeat report this iteration
        FAULTS[kind]()

    if rank == 1:
        on_microbatch(9, fault)


def lose_rank(tmp_path, kind: str, options: str = ""):
    """Lose rank 1 of three; return its exit code, all logs, and the save folder."""
    save = tmp_path / "save"
    argv = flags(
        write_tokens(tmp_path / "tokens"), f"{LONG} --save {save} --save-interval 2 {options}"
    )
    with running_with(functools.partial(plant, kind=kind), argv, world=3) as ranks:
        for rank in (0, 2):
            ranks.processes[rank].join(60)
        stands = ranks.processes[1].is_alive()
        ranks.processes[1].join(0.0 if "STOP" in kind or "held" in kind else 10.0)
        codes = [process.exitcode for process in ranks.processes]
        logs = [ranks.log(rank) for rank in range(3)]
    assert [codes[rank] for rank in (0, 2)] == [ExitCode.PEER_LOST] * 2, (stands, codes, logs)
    # A signal ends a process with a delay: another step may complete before.
    assert latest_checkpoint(save).name >= "iter_0000004"
    verify_checkpoint(latest_checkpoint(save))
    assert "Traceback" not in logs[0] + logs[2]
    return codes[1], logs, save


@pytest.mark.covers("hang diagnosis")
def test_rank_holding_the_gil_is_named_and_its_stacks_written(tmp_path):
    code, logs, save = lose_rank(tmp_path, "held interpreter", SHORT_TIMEOUT)
    assert code is None, "the rank must still hang"
    text = logs[0] + logs[2]
    assert "rank 1 is silent since iteration 5; the others wait in " in text
    report = (save / "hang_report_attempt_0.txt").read_text()
    (row,) = re.findall(r"^1 .*$", report, flags=re.MULTILINE)
    assert re.match(rf"1 +{re.escape(HOST)} +\d+ +silent +5 +\d+\.\d s ago ", row), report
    assert re.search(r"^Ranks? [02, ]+ waits? in .* and rank 1 had not come to it", report, re.M)
    assert f"; see {save}/hang_report_attempt_0.txt" in text
    frozen = (save / "stacks" / "attempt_0_rank_1_frozen.txt").read_text()
    assert "in hold_the_interpreter" in frozen
    for rank in (0, 2):
        collectives = json.loads(
            (save / "stacks" / f"attempt_0_rank_{rank}_collectives.json").read_text()
        )
        failed = [entry for entry in collectives["last"] if entry["state"] == "failed"]
        assert failed[0]["iteration"] == 5
        assert failed[0]["waited_seconds"] > 1.0, "later failures have not waited"
        assert collectives["last"][0]["state"] == "returned"
        torch_record = save / "stacks" / f"attempt_0_rank_{rank}_torch.json"
        entries = json.loads(torch_record.read_text())["entries"]
        assert entries[-1]["profiling_name"] == "gloo:all_reduce"


@pytest.mark.covers("hang diagnosis")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "message"),  # message: in the lost rank's log, or None
    [
        ("error", ExitCode.CRASH, "KeyError: 'planted'"),
        ("error from outside", ExitCode.CRASH, "\nKeyError\n"),
        ("error in a thread", ExitCode.CRASH, "KeyError: 'planted'"),
        ("abort", -signal.SIGABRT, None),
        ("bad address", -signal.SIGSEGV, None),
        ("SIGKILL", -signal.SIGKILL, None),
        ("SIGSTOP", None, None),
        ("SIGINT", ExitCode.INTERRUPTED, "pretrain_gpt: interrupted"),
        ("SIGTERM", ExitCode.TERMINATED, None),
    ],
)
def test_other_ranks_end_after_any_kind_of_rank_loss(tmp_path, kind, code, message):
    options = SHORT_TIMEOUT if kind == "SIGSTOP" else "--no-exit-signal-handler"
    exit_code, logs, save = lose_rank(tmp_path, kind, options)
    assert exit_code == code, logs
    text = logs[0] + logs[2]
    report = save / "hang_report_attempt_0.txt"
    if message is not None:
        assert message in logs[1]
        assert "pretrain_gpt" not in text, "other ranks must not repeat the error"
        assert not report.exists(), "an error needs no hang report"
    else:
        assert "rank 1 " in text
        assert "this run cannot continue" in text
        assert re.search(r"^1 .* (dead|stopped) +[5-9] ", report.read_text(), re.M)
    assert (save / "stacks" / "attempt_0_rank_0.txt").exists()


def plant_in_save(rank: int) -> None:
    """Kill rank 1 in its third save."""
    write, count = SaveSteps.write, [0]

    def dying(*args, **kwargs):
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args, **kwargs)

    if rank == 1:
        SaveSteps.write = dying


@pytest.mark.covers("hang diagnosis")
@pytest.mark.slow
def test_rank_death_during_save_agreement_is_detected_at_once(tmp_path):
    """Ranks agree through the store during a save, so that no collective fails."""
    folder = tmp_path / "save"
    options = f"{LONG} --save {folder} --save-interval 2"
    outcomes, logs = run_with(
        plant_in_save, flags(write_tokens(tmp_path / "tokens"), options), world=3
    )
    assert [o.exit_code for o in outcomes] == [4, -signal.SIGKILL, 4], logs
    (line,) = re.findall("pretrain_gpt: .*", logs[0] + logs[2])
    assert re.search(r"rank 1 \(process \d+ on .*\) is dead; the others wait for it to agree", line)
    assert latest_checkpoint(folder).name == "iter_0000004"
    verify_checkpoint(latest_checkpoint(folder))

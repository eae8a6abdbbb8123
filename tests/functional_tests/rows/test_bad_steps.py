# SPDX-License-Identifier: Apache-2.0
"""Steps that go wrong: a NaN loss on one rank, an Inf gradient, a spike; one test a fault."""

from __future__ import annotations

import json
import math
import socket

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, read_extra, verify_checkpoint
from megatron.training import session
from megatron.training.failures import session_faults
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.planted_faults import on_microbatch, run_with
from tests.functional_tests.small_run import (
    digests,
    flags,
    run_here,
    run_on,
    timeless,
    write_tokens,
)


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def _make_nan(batch):
    batch.loss_mask.mul_(float("nan"))


def plant_nan_data(rank: int) -> None:
    """The sixth microbatch of rank 1, in step 3, is NaN however often it is computed."""
    if rank == 1:
        on_microbatch(6, _make_nan)


def _nan_loss_in(forward: int, rank: int) -> None:
    """Make the model's n-th loss on rank 1 NaN; computed again it is not."""
    from megatron.core.models.gpt import GPTModel

    whole, count = GPTModel.loss, [0]

    def glitch(self, *arguments, **named):
        loss, nll = whole(self, *arguments, **named)
        count[0] += 1
        return (loss * float("nan") if rank == 1 and count[0] == forward else loss), nll

    GPTModel.loss = glitch


def plant_nan_once_dp(rank: int) -> None:
    _nan_loss_in(3, rank)


def plant_nan_once_tp(rank: int) -> None:
    """Only one of two ranks with the same data has it: they must not disagree."""
    _nan_loss_in(5, rank)


SIX = "--train-iters 6 --eval-interval 0"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--use-distributed-optimizer", marks=pytest.mark.slow),
        "--tensor-model-parallel-size 2",
    ],
)
@pytest.mark.covers("bad step computed again")
def test_transient_nan_loss_is_recomputed_bit_exactly(prefix, tmp_path, layout):
    glitched, whole = tmp_path / "glitched", tmp_path / "whole"
    argv = flags(prefix, f"{SIX} {layout} --global-batch-size 4 --save {glitched}")
    plant = plant_nan_once_tp if "tensor" in layout else plant_nan_once_dp
    found, logs = run_with(plant, argv)
    assert [o.exit_code for o in found] == [0, 0], logs
    run_on(2, flags(prefix, f"{SIX} {layout} --global-batch-size 4 --save {whole}"))
    assert digests(glitched / "iter_0000006") == digests(whole / "iter_0000006")
    line = f"iteration 3: NaN or Inf loss of rank 1 on {socket.gethostname()}; "
    assert line + "the step computed once more is sound" in logs[1]
    events = read_metrics(glitched / "metrics.jsonl")
    faults = [e for e in events if e["kind"] == "fault"]
    assert faults == [
        {"kind": "fault", "iteration": 3, "nan": 1.0, "transient": 1.0, "first_rank": 1.0}
    ]
    rest = [e for e in timeless(glitched / "metrics.jsonl") if e["kind"] != "fault"]
    assert rest == timeless(whole / "metrics.jsonl")


@pytest.mark.covers("bad step computed again")
def test_a_loss_that_is_nan_every_time_is_skipped_by_all_ranks(prefix, tmp_path):
    save = tmp_path / "save"
    argv = flags(prefix, f"{SIX} --save {save} --use-distributed-optimizer")
    found, logs = run_with(plant_nan_data, argv)
    assert [o.exit_code for o in found] == [0, 0], logs
    line = f"iteration 3: NaN or Inf loss of rank 1 on {socket.gethostname()}; "
    assert line + "the step computed once more gives it again: reproduced" in logs[1]
    events = [e for e in read_metrics(save / "metrics.jsonl") if e["kind"] == "train"]
    assert [e["num_skipped"] for e in events] == [0, 0, 1, 0, 0, 0]
    assert [e["num_nan"] for e in events] == [0, 0, 1, 0, 0, 0]
    assert "lm_loss" not in events[2]
    rates = [e["learning_rate"] for e in events]
    assert rates[3] == rates[2], "a skipped step does not move the schedule"
    assert events[-1]["consumed_samples"] == 48
    verify_checkpoint(latest_checkpoint(save))


@pytest.mark.covers("bad step computed again")
def test_exit_16_asks_for_other_machines_and_17_blames_the_data(
    prefix, tmp_path, monkeypatch, capsys
):
    here, save = socket.gethostname(), tmp_path / "save"
    note = save / "suspect_step.json"
    more = f"--save {save} --load {save} --save-interval 1 --on-reproduced-fault restart"

    def run(microbatch: int, *, host: str = here) -> tuple[int, str]:
        with monkeypatch.context() as context:
            context.setattr(socket, "gethostname", lambda: host)
            context.setattr(session, "microbatch", session.microbatch)
            on_microbatch(microbatch, _make_nan)
            code = run_here(flags(prefix, f"--global-batch-size 2 {SIX} {more}"))
        return code, capsys.readouterr().err

    code, text = run(3)
    assert code == ExitCode.RESTART_ELSEWHERE == 16
    assert f"the loss of iteration 3 is NaN or Inf, computed twice on {here}" in text
    assert latest_checkpoint(save) == save / "iter_0000002"
    noted = {"iteration": 3, "hosts": {"0": here}, "kind": "nan", "values": ["nan", "nan"]}
    assert json.loads(note.read_text()) == noted
    code, text = run(1)
    assert code == 16
    assert "keep the run off that machine" in text
    code, text = run(1, host="elsewhere")
    assert code == ExitCode.FAILED_VALIDATION == 17
    said = f"on elsewhere and before that on {here}, with the same bits: the data or the settings"
    assert said in text
    assert not note.exists()
    assert not (save / "faulty_hosts.json").exists()


def _scaled_losses(monkeypatch, factors):
    """Multiply the model's loss in some of this process's steps, however often it is computed."""
    from megatron.core.models.gpt import GPTModel

    whole, take, count = GPTModel.loss, session.SessionSteps.take_step, [0]

    def scaled(self, *arguments, **named):
        loss, nll = whole(self, *arguments, **named)
        return loss * factors.get(count[0], 1.0), nll

    def counted(self, *arguments, **named):
        count[0] += 1
        return take(self, *arguments, **named)

    monkeypatch.setattr(GPTModel, "loss", scaled)
    monkeypatch.setattr(session.SessionSteps, "take_step", counted)


ONE = "--global-batch-size 4 --train-iters 8 --eval-interval 0 --save-interval 1"


@pytest.mark.covers("bad step computed again")
def test_an_inf_gradient_is_skipped_and_counted(prefix, tmp_path, monkeypatch, capsys):
    from megatron.core.optimizer import Optimizer

    whole, count = Optimizer.grad_norm, [0]

    def norm(self):
        count[0] += 1
        return math.inf if count[0] in (3, 4) else whole(self)

    monkeypatch.setattr(Optimizer, "grad_norm", norm)
    assert run_here(flags(prefix, f"{ONE} --save {tmp_path}")) == 0
    line = f"iteration 3: NaN or Inf gradient norm of rank 0 on {socket.gethostname()}; the step "
    assert f"{line}computed once more gives it again: reproduced" in capsys.readouterr().out
    events = [e for e in read_metrics(tmp_path / "metrics.jsonl") if e["kind"] == "train"]
    assert [e["num_skipped"] for e in events] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert digests(tmp_path / "iter_0000003") == digests(tmp_path / "iter_0000002")
    assert digests(tmp_path / "iter_0000004") != digests(tmp_path / "iter_0000003")
    assert read_extra(tmp_path / "iter_0000008")["progress"]["skipped_iterations"] == 1


SPIKES = "--loss-spike-factor 3 --loss-spike-window 4"


def test_loss_spike_is_skipped_after_resume_too(prefix, tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _scaled_losses(monkeypatch, {4: 10.0, 7: 10.0})
    assert run_here(flags(prefix, f"{ONE} {SPIKES} --save {whole}")) == 0
    out = capsys.readouterr().out
    assert out.count("the limit of --loss-spike-factor, with a part of rank 0 on ") == 2
    assert out.count("; the step computed once more gives it again: reproduced") == 2
    assert "iteration 4: loss" in out
    assert "iteration 7: loss" in out
    progress = read_extra(whole / "iter_0000008")["progress"]
    assert (progress["spiked_iterations"], progress["skipped_iterations"]) == (2, 2)
    assert len(progress["recent_losses"]) == 4
    assert digests(whole / "iter_0000004") == digests(whole / "iter_0000003")
    # The losses that tell a spike come back from the checkpoint.
    _scaled_losses(monkeypatch, {4: 10.0})
    run_here(flags(prefix, f"{ONE} {SPIKES} --save {cut} --exit-interval 5"))
    monkeypatch.undo()
    _scaled_losses(monkeypatch, {2: 10.0})
    run_here(flags(prefix, f"{ONE} {SPIKES} --save {cut} --load {cut}"))
    assert digests(cut / "iter_0000008") == digests(whole / "iter_0000008")


def test_bad_steps_in_a_row_roll_back_and_go_on_with_later_data(
    prefix, tmp_path, monkeypatch, capsys
):
    """Step 4 is a bad update that is applied; 5 and 6 show it; the weights of 3 come back."""
    more = f"{SPIKES} --rollback-after-bad-steps 2 --save {tmp_path / 'save'} --log-interval 4"
    load = session_faults.load_newest
    asked = []

    def third(folder, *arguments, **options):
        asked.append(folder)
        return load(str(tmp_path / "save" / "iter_0000003"), *arguments, **options)

    monkeypatch.setattr(session_faults, "load_newest", third)
    _scaled_losses(monkeypatch, {5: 10.0, 6: 10.0})
    assert run_here(flags(prefix, f"{ONE} {more}")) == 0
    assert asked == [str(tmp_path / "save")]
    out = capsys.readouterr().out
    assert "iteration 6: 2 bad steps in a row" in out
    assert "rolled back to the weights of iteration 3, going on with the data behind sample 24" in (
        out
    )
    saved = {n: tmp_path / "save" / f"iter_{n:07d}" for n in (3, 4, 6, 8)}
    assert digests(saved[6]) == digests(saved[3]) != digests(saved[4])
    third_progress, last = (read_extra(saved[n])["progress"] for n in (3, 8))
    assert last["rollbacks"] == 1
    events = [e for e in read_metrics(tmp_path / "save" / "metrics.jsonl") if e["kind"] == "train"]
    assert [e["num_skipped"] for e in events] == [0, 2], "the log line goes on"
    assert last["consumed_samples"] == 32, "no sample is read twice"
    assert last["update_samples"] == third_progress["update_samples"] + 2 * 4


def test_without_a_checkpoint_there_is_no_rollback(prefix, tmp_path, monkeypatch, capsys):
    _scaled_losses(monkeypatch, {5: 10.0, 6: 10.0})
    more = f"{SPIKES} --rollback-after-bad-steps 2 --save {tmp_path} --save-interval 7"
    assert run_here(flags(prefix, f"{ONE} {more}")) == ExitCode.BAD_STEPS
    assert "there is no checkpoint to roll back to yet" in capsys.readouterr().err

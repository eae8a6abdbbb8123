# SPDX-License-Identifier: Apache-2.0
"""Bad steps: a NaN loss on one rank, an Inf gradient, a loss spike; one test for each fault."""

from __future__ import annotations

import json
import math
import socket

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, read_extra, verify_checkpoint
from megatron.training import failure_hooks, train_steps
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.planted_faults import on_microbatch, run_with
from tests.functional_tests.small_run import (
    digests,
    flags,
    run_in_process,
    run_on,
    timeless,
)


def _make_nan(batch):
    batch.loss_mask.mul_(float("nan"))


def plant_nan_data(rank: int) -> None:
    """Make the sixth microbatch of rank 1, in step 3, NaN; a recomputed step is NaN again."""
    if rank == 1:
        on_microbatch(6, _make_nan)


def _nan_loss_in(forward: int, rank: int) -> None:
    """Make the model's loss number `forward` on rank 1 NaN; the recomputed loss is finite."""
    from megatron.core.models import GPTModel

    loss_of, count = GPTModel.loss, [0]

    def glitch(self, *args, **kwargs):
        loss, nll = loss_of(self, *args, **kwargs)
        count[0] += 1
        return (loss * float("nan") if rank == 1 and count[0] == forward else loss), nll

    GPTModel.loss = glitch


def plant_nan_once_dp(rank: int) -> None:
    _nan_loss_in(3, rank)


def plant_nan_once_tp(rank: int) -> None:
    """Make the loss NaN on one of two ranks with the same data; both must decide alike."""
    _nan_loss_in(5, rank)


SIX_STEPS = "--train-iters 6 --eval-interval 0"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--use-distributed-optimizer", marks=pytest.mark.slow),
        "--tensor-model-parallel-size 2",
    ],
)
@pytest.mark.covers("recomputed bad steps")
def test_transient_nan_loss_is_recomputed_bit_exactly(prefix, tmp_path, layout):
    glitched, uninterrupted = tmp_path / "glitched", tmp_path / "whole"
    argv = flags(prefix, f"{SIX_STEPS} {layout} --global-batch-size 4 --save {glitched}")
    plant = plant_nan_once_tp if "tensor" in layout else plant_nan_once_dp
    outcomes, logs = run_with(plant, argv)
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    run_on(2, flags(prefix, f"{SIX_STEPS} {layout} --global-batch-size 4 --save {uninterrupted}"))
    assert digests(glitched / "iter_0000006") == digests(uninterrupted / "iter_0000006")
    line = f"iteration 3: NaN or Inf loss of rank 1 on {socket.gethostname()}; "
    assert line + "the step computed once more is sound" in logs[1]
    events = read_metrics(glitched / "metrics.jsonl")
    faults = [e for e in events if e["kind"] == "fault"]
    assert faults == [
        {"kind": "fault", "iteration": 3, "nan": 1.0, "transient": 1.0, "first_rank": 1.0}
    ]
    remaining = [e for e in timeless(glitched / "metrics.jsonl") if e["kind"] != "fault"]
    assert remaining == timeless(uninterrupted / "metrics.jsonl")


@pytest.mark.covers("recomputed bad steps")
def test_persistent_nan_loss_is_skipped_by_all_ranks(prefix, tmp_path):
    save = tmp_path / "save"
    argv = flags(prefix, f"{SIX_STEPS} --save {save} --use-distributed-optimizer")
    outcomes, logs = run_with(plant_nan_data, argv)
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    line = f"iteration 3: NaN or Inf loss of rank 1 on {socket.gethostname()}; "
    assert line + "the step computed once more yields it again: reproduced" in logs[1]
    events = [e for e in read_metrics(save / "metrics.jsonl") if e["kind"] == "train"]
    assert [e["num_skipped"] for e in events] == [0, 0, 1, 0, 0, 0]
    assert [e["num_nan"] for e in events] == [0, 0, 1, 0, 0, 0]
    assert "lm_loss" not in events[2]
    rates = [e["learning_rate"] for e in events]
    assert rates[3] == rates[2], "a skipped step does not move the schedule"
    assert events[-1]["consumed_samples"] == 48
    verify_checkpoint(latest_checkpoint(save))


@pytest.mark.covers("recomputed bad steps")
def test_exit_16_requests_other_hosts_and_17_blames_data(prefix, tmp_path, monkeypatch, capsys):
    hostname, save = socket.gethostname(), tmp_path / "save"
    note = save / "suspect_step.json"
    options = f"--save {save} --load {save} --save-interval 1 --on-reproduced-fault restart"

    def run(microbatch: int, *, host: str = hostname) -> tuple[int, str]:
        with monkeypatch.context() as context:
            context.setattr(socket, "gethostname", lambda: host)
            context.setattr(train_steps, "microbatch", train_steps.microbatch)
            on_microbatch(microbatch, _make_nan)
            code = run_in_process(flags(prefix, f"--global-batch-size 2 {SIX_STEPS} {options}"))
        return code, capsys.readouterr().err

    code, text = run(3)
    assert code == ExitCode.RESTART_ELSEWHERE == 16
    assert f"the loss of iteration 3 is NaN or Inf, computed twice on {hostname}" in text
    assert latest_checkpoint(save) == save / "iter_0000002"
    expected = {"iteration": 3, "hosts": {"0": hostname}, "kind": "nan", "values": ["nan", "nan"]}
    assert json.loads(note.read_text()) == expected
    code, text = run(1)
    assert code == 16
    assert "keep the run off that machine" in text
    code, text = run(1, host="elsewhere")
    assert code == ExitCode.FAILED_VALIDATION == 17
    message = (
        f"on elsewhere and before that on {hostname}, with the same bits: the data or the settings"
    )
    assert message in text
    assert not note.exists()
    assert not (save / "faulty_hosts.json").exists()


def _scaled_losses(monkeypatch, factors):
    """Scale the model's loss in the steps `factors`, also when a step is recomputed."""
    from megatron.core.models import GPTModel

    loss_of, take_step, count = GPTModel.loss, train_steps.SessionSteps.take_step, [0]

    def scaled(self, *args, **kwargs):
        loss, nll = loss_of(self, *args, **kwargs)
        return loss * factors.get(count[0], 1.0), nll

    def counted(self, *args, **kwargs):
        count[0] += 1
        return take_step(self, *args, **kwargs)

    monkeypatch.setattr(GPTModel, "loss", scaled)
    monkeypatch.setattr(train_steps.SessionSteps, "take_step", counted)


EIGHT_STEPS = "--global-batch-size 4 --train-iters 8 --eval-interval 0 --save-interval 1"


@pytest.mark.covers("recomputed bad steps")
def test_an_inf_gradient_is_skipped_and_counted(prefix, tmp_path, monkeypatch, capsys):
    from megatron.core.optimizer import Optimizer

    grad_norm, count = Optimizer.grad_norm, [0]

    def norm(self):
        count[0] += 1
        return math.inf if count[0] in (3, 4) else grad_norm(self)

    monkeypatch.setattr(Optimizer, "grad_norm", norm)
    assert run_in_process(flags(prefix, f"{EIGHT_STEPS} --save {tmp_path}")) == 0
    line = f"iteration 3: NaN or Inf gradient norm of rank 0 on {socket.gethostname()}; the step "
    assert f"{line}computed once more yields it again: reproduced" in capsys.readouterr().out
    events = [e for e in read_metrics(tmp_path / "metrics.jsonl") if e["kind"] == "train"]
    assert [e["num_skipped"] for e in events] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert digests(tmp_path / "iter_0000003") == digests(tmp_path / "iter_0000002")
    assert digests(tmp_path / "iter_0000004") != digests(tmp_path / "iter_0000003")
    assert read_extra(tmp_path / "iter_0000008")["progress"]["skipped_iterations"] == 1


SPIKES = "--loss-spike-factor 3 --loss-spike-window 4"


def test_loss_spike_is_skipped_after_resume_too(prefix, tmp_path, monkeypatch, capsys):
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "cut"
    _scaled_losses(monkeypatch, {4: 10.0, 7: 10.0})
    assert run_in_process(flags(prefix, f"{EIGHT_STEPS} {SPIKES} --save {uninterrupted}")) == 0
    out = capsys.readouterr().out
    spike_text = "the limit of --loss-spike-factor, with a large contribution of rank 0 on "
    assert out.count(spike_text) == 2
    assert out.count("; the step computed once more yields it again: reproduced") == 2
    assert "iteration 4: loss" in out
    assert "iteration 7: loss" in out
    progress = read_extra(uninterrupted / "iter_0000008")["progress"]
    assert (progress["spiked_iterations"], progress["skipped_iterations"]) == (2, 2)
    assert len(progress["recent_losses"]) == 4
    assert digests(uninterrupted / "iter_0000004") == digests(uninterrupted / "iter_0000003")
    # The losses that define a spike are restored from the checkpoint.
    _scaled_losses(monkeypatch, {4: 10.0})
    run_in_process(flags(prefix, f"{EIGHT_STEPS} {SPIKES} --save {resumed} --exit-interval 5"))
    monkeypatch.undo()
    _scaled_losses(monkeypatch, {2: 10.0})
    run_in_process(flags(prefix, f"{EIGHT_STEPS} {SPIKES} --save {resumed} --load {resumed}"))
    assert digests(resumed / "iter_0000008") == digests(uninterrupted / "iter_0000008")


def test_consecutive_bad_steps_roll_back_past_their_data(prefix, tmp_path, monkeypatch, capsys):
    """Steps 5 and 6 are bad after the update of step 4; the weights of step 3 are restored."""
    rollback_flags = (
        f"{SPIKES} --rollback-after-bad-steps 2 --save {tmp_path / 'save'} --log-interval 4"
    )
    load = failure_hooks.load_newest
    load_folders = []

    def load_iteration_3(folder, *args, **kwargs):
        load_folders.append(folder)
        return load(str(tmp_path / "save" / "iter_0000003"), *args, **kwargs)

    monkeypatch.setattr(failure_hooks, "load_newest", load_iteration_3)
    _scaled_losses(monkeypatch, {5: 10.0, 6: 10.0})
    assert run_in_process(flags(prefix, f"{EIGHT_STEPS} {rollback_flags}")) == 0
    assert load_folders == [str(tmp_path / "save")]
    out = capsys.readouterr().out
    assert "iteration 6: 2 bad steps in a row" in out
    assert (
        "rolled back to the weights of iteration 3, continuing with the data after sample 24"
        in (out)
    )
    saved = {n: tmp_path / "save" / f"iter_{n:07d}" for n in (3, 4, 6, 8)}
    assert digests(saved[6]) == digests(saved[3]) != digests(saved[4])
    progress_at_3, final_progress = (read_extra(saved[n])["progress"] for n in (3, 8))
    assert final_progress["rollbacks"] == 1
    events = [e for e in read_metrics(tmp_path / "save" / "metrics.jsonl") if e["kind"] == "train"]
    assert [e["num_skipped"] for e in events] == [0, 2], "the log line goes on"
    assert final_progress["consumed_samples"] == 32, "no sample is read twice"
    assert final_progress["update_samples"] == progress_at_3["update_samples"] + 2 * 4


def test_rollback_without_checkpoint_ends_the_run(prefix, tmp_path, monkeypatch, capsys):
    _scaled_losses(monkeypatch, {5: 10.0, 6: 10.0})
    options = f"{SPIKES} --rollback-after-bad-steps 2 --save {tmp_path} --save-interval 7"
    assert run_in_process(flags(prefix, f"{EIGHT_STEPS} {options}")) == ExitCode.BAD_STEPS
    assert "there is no checkpoint yet to roll back to" in capsys.readouterr().err

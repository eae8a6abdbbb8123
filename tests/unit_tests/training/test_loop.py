# SPDX-License-Identifier: Apache-2.0
"""The loop over a played step: what is counted, logged, validated and saved, and when it stops."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import pytest

from megatron.cli.errors import ExitCode, RunStopped
from megatron.core.optimizer.loss_scaler import (
    ConstantLossScaler,
    DynamicLossScaler,
    DynamicLossScalerConfig,
)
from megatron.core.optimizer.schedule import LearningRateSchedule, WeightDecaySchedule
from megatron.training.config.resolve import resolve
from megatron.training.failures.faults import FaultLog, Faults
from megatron.training.failures.replay import StepAnomaly
from megatron.training.failures.stopping import StopRequests
from megatron.training.hooks import TrainingHooks
from megatron.training.loop import TrainingLoop
from megatron.training.monitoring.log_line import LogPart, Plain
from megatron.training.monitoring.metrics import Metrics
from megatron.training.monitoring.step_window import Speedometer, StepWindow
from megatron.training.progress_state import Progress
from tests.unit_tests.training.small_config import small_config


@dataclass(frozen=True)
class Outcome:
    loss: float
    applied: bool = True
    grad_norm: float = 1.0
    num_zeros: int | None = None
    control_flags: tuple[float, ...] = ()
    anomaly: StepAnomaly | None = None
    spiked: bool = False


class Listener:
    """A metrics writer that keeps what it is given."""

    def __init__(self):
        self.events = []

    def write(self, kind, iteration, values):
        self.events.append((kind, iteration, dict(values)))

    def close(self):
        pass


class Played:
    """A run whose steps come from a list, one per iteration; the last one repeats."""

    lr = LearningRateSchedule(max_lr=1.0, decay_samples=60, style="linear")
    weight_decay = WeightDecaySchedule(start=0.1, end=0.1)

    def __init__(
        self,
        flags="",
        outcomes=(Outcome(2.0),),
        scaler=None,
        progress=None,
        window=None,
        hooks=(),
    ):
        self.run = resolve(small_config(f"--global-batch-size 6 {flags}"), 1)
        self.outcomes, self.scaler = outcomes, scaler or ConstantLossScaler()
        self.rates, self.saves, self.validations = [], [], []
        self.finished, self.hooks = [], hooks
        self.listener, self.out = Listener(), io.StringIO()
        self.progress = progress or Progress()
        speed = Speedometer.of(self.run, padded_vocab_size=128, peak_flops=None)
        self.window = StepWindow(self.run, speed)
        if window:
            self.window.restore(window)
        self.stop = StopRequests(pytest.fail)

    def take_step(self, samples, *, update_samples, loss_limit):
        self.rates.append(self.lr.lr(update_samples))
        outcome = self.outcomes[min(self.progress.iteration, len(self.outcomes) - 1)]
        self.scaler.update(not outcome.applied)
        return outcome

    def loss_on(self, split):
        if split == "test" or not self.run.config.evaluation.eval_interval:
            return None
        self.validations.append(self.progress.iteration)
        return 3.0

    def params_norm(self):
        return None

    def begin(self, progress):
        self.stop.note("save", 0.0)
        self.saves.append((progress.iteration, self.window.to_json()))

    def finish(self, progress):
        self.begin(progress)
        self.finished.append(progress.iteration)

    def train(self):
        saves = self if self.run.config.checkpoint.save else None
        metrics = Metrics({"listener": lambda: self.listener}, pytest.fail)
        display = Plain(self.out)
        faults = Faults(
            config=self.run.config,
            say=display.log,
            log=FaultLog(None, record=metrics.write, warn=pytest.fail),
            host_of=lambda rank: f"host{rank}",
            save=None if saves is None else self.finish,
        )
        TrainingLoop(
            self.run,
            self,
            hooks=[faults, *self.hooks],
            saves=saves,
            stop=self.stop,
            display=display,
            metrics=metrics,
        ).train(self.progress)
        return self

    def records(self, kind="train"):
        return [(i, v) for k, i, v in self.listener.events if k == kind]


def test_a_whole_run():
    losses = [Outcome(float(i)) for i in range(1, 11)]
    played = Played("--save s --save-interval 4 --eval-interval 5 --log-interval 5", losses).train()
    assert played.progress.iteration == 10
    assert played.progress.consumed_samples == 60
    assert played.validations == [0, 5, 10]
    assert [i for i, _ in played.saves] == [4, 8, 10]
    assert played.finished == [10], "others may go on in the background"
    assert [(i, v["lm_loss"]) for i, v in played.records()] == [(5, 3.0), (10, 8.0)]
    assert [i for i, _ in played.records("validation")] == [0, 5, 10]
    assert played.rates == pytest.approx([1.0 - i / 10 for i in range(10)])
    lines = played.out.getvalue().splitlines()
    assert sum(" validation loss at iteration " in line for line in lines) == 3
    assert sum("] iteration        5/      10 |" in line for line in lines) == 1


class Recorder(TrainingHooks):
    """Keeps which hooks are called, with the iteration that each is given."""

    def __init__(self):
        self.calls = []

    def on_step_begin(self, iteration):
        self.calls.append(("begin", iteration))

    def on_step_computed(self, progress, outcome, loss_limit):
        self.calls.append(("computed", progress.iteration))

    def on_step_end(self, progress, outcome):
        self.calls.append(("end", progress.iteration))

    def log_parts(self):
        self.calls.append(("parts",))
        return [LogPart("spin: 7", {"spin": 7.0})]

    def on_log(self):
        self.calls.append(("log",))

    def on_evaluate(self, iteration, evaluate):
        self.calls.append(("evaluate", iteration))
        return {"half": evaluate() / 2.0}

    def on_train_end(self, progress):
        self.calls.append(("train end", progress.iteration))


def test_hooks_are_called_at_their_moments():
    hooks = Recorder()
    flags = "--train-iters 2 --eval-interval 2 --log-interval 2"
    played = Played(flags, hooks=[hooks]).train()
    first = [("begin", 1), ("computed", 0), ("end", 1)]
    second = [("begin", 2), ("computed", 1), ("parts",), ("log",), ("end", 2), ("evaluate", 2)]
    assert hooks.calls == [("evaluate", 0), *first, *second, ("train end", 2)]
    assert played.validations == [0, 0, 2, 2], "once for the loop, once for the hook"
    assert played.records("validation")[1] == (2, {"lm_loss": 3.0, "half_lm_loss": 1.5})
    assert played.records()[0][1]["spin"] == 7.0
    text = played.out.getvalue()
    assert " spin: 7 |" in text
    assert " validation loss at iteration 2 on half | lm loss value: 1.500000E+00 |" in text


def test_hooks_know_when_a_run_stops_early_but_not_when_it_fails():
    hooks = Recorder()
    Played("--save s --exit-interval 4 --eval-interval 0", hooks=[hooks]).train()
    assert hooks.calls[-1] == ("train end", 4)
    hooks, bad = Recorder(), Outcome(2.0, applied=False, grad_norm=math.inf)
    with pytest.raises(RunStopped):
        Played("--max-consecutive-bad-steps 1 --eval-interval 0", [bad], hooks=[hooks]).train()
    assert hooks.calls == [("begin", 1), ("computed", 0)]


def test_without_validation_and_saving():
    played = Played("--eval-interval 0 --log-interval 3").train()
    assert played.validations == []
    assert [i for i, _ in played.records()] == [3, 6, 9, 10]


def test_speed_is_what_the_step_did():
    played = Played("--eval-interval 0 --log-interval 10 --log-throughput").train()
    (_, values) = played.records()[0]
    tokens = values["tokens_per_second"] * values["seconds_per_iteration"]
    assert tokens == pytest.approx(6 * 20)
    assert values["tflops"] > 0
    assert "mfu" not in values


def test_exit_interval_saves_stops_and_resumes():
    first = Played("--save s --exit-interval 4 --eval-interval 0 --log-interval 3").train()
    assert first.progress.iteration == 4
    assert [i for i, _ in first.saves] == [4]
    assert "stopped at iteration 4" in first.out.getvalue()
    flags = "--save s --exit-interval 4 --eval-interval 2 --log-interval 3"
    second = Played(flags, progress=first.progress).train()
    assert second.progress.iteration == 8
    assert second.validations == [6, 8], "a resumed run does not validate before its first step"


def test_a_log_line_cut_by_a_save_is_the_same_after_resuming():
    losses = [Outcome(float(i) / 3) for i in range(1, 11)]
    flags = "--save s --save-interval 5 --eval-interval 0 --log-interval 4"
    whole = Played(flags, losses).train()
    counters = Progress(iteration=5, consumed_samples=30, update_samples=30)
    window = dict(whole.saves)[5]
    resumed = Played(flags, losses, progress=counters, window=window).train()
    assert [(i, v["lm_loss"]) for i, v in resumed.records()] == [
        (i, v["lm_loss"]) for i, v in whole.records() if i > 5
    ]


def test_skipped_steps_are_counted_and_keep_learning_rate():
    bad = Outcome(math.nan, applied=False, grad_norm=math.nan)
    good = Outcome(4.0)
    outcomes = [good, bad, bad, good, Outcome(4.0, applied=False, grad_norm=math.inf), good]
    played = Played("--eval-interval 0 --log-interval 5", outcomes).train()
    assert played.progress.consumed_samples == 60
    assert played.progress.update_samples == 42
    assert (played.progress.skipped_iterations, played.progress.nan_iterations) == (3, 2)
    assert played.rates[:4] == pytest.approx([1.0, 0.9, 0.9, 0.9])
    _, first = played.records()[0]
    assert (first["lm_loss"], first["num_skipped"], first["num_nan"]) == (4.0, 3, 2)
    assert first["learning_rate"] == pytest.approx(played.rates[4]) == pytest.approx(0.8)
    _, second = played.records()[1]
    assert (second["num_skipped"], second["num_nan"]) == (0, 0)


def test_too_many_bad_steps_in_a_row_stop_the_run():
    bad = Outcome(2.0, applied=False, grad_norm=math.inf)
    good = Outcome(2.0)
    flags = "--max-consecutive-bad-steps 3 --eval-interval 0 --save s"
    played = Played(flags, [bad, bad, good, bad, bad, bad, good])
    with pytest.raises(RunStopped, match="stopped at iteration 6: 3 steps in a row") as caught:
        played.train()
    assert caught.value.code == ExitCode.BAD_STEPS
    assert played.saves == [], "a broken state is not saved"


def test_fp16_scale_search_is_not_bad_until_minimum_scale():
    overflow = Outcome(2.0, applied=False, grad_norm=math.inf)
    config = DynamicLossScalerConfig(initial_scale=2.0**6, hysteresis=1)
    flags = "--fp16 --max-consecutive-bad-steps 2 --train-iters 40 --eval-interval 0"
    played = Played(flags, [overflow], scaler=DynamicLossScaler(config))
    with pytest.raises(RunStopped):
        played.train()
    assert played.progress.iteration == 6 + 2


def test_a_run_of_skipped_steps_logs_no_loss():
    bad = Outcome(math.inf, applied=False, grad_norm=math.inf)
    played = Played("--eval-interval 0 --log-interval 2 --train-iters 4", [bad]).train()
    assert "lm_loss" not in played.records()[0][1]
    assert "number of nan iterations:   2 |" in played.out.getvalue()


def test_progress_survives_json_and_refuses_damage():
    progress = Progress(iteration=3, consumed_samples=18, update_samples=12, skipped_iterations=1)
    assert Progress.from_json(progress.to_json()) == progress
    with pytest.raises(ValueError, match="lacks iteration"):
        Progress.from_json({**progress.to_json(), "iteration": None})


SIGNAL, CLOCK = (2.0, 0.0, 0.0), (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("control_flags", "why"), [(SIGNAL, "a signal asks"), (CLOCK, "--exit-duration-in-mins asks")]
)
def test_stop_flag_saves_after_step_and_defers_validation(control_flags, why):
    flags = "--save s --eval-interval 4 --log-interval 3"
    outcomes = [Outcome(2.0)] * 3 + [Outcome(2.0, control_flags=control_flags)]
    first = Played(flags, outcomes).train()
    assert first.progress.iteration == 4
    assert [i for i, _ in first.saves] == [4]
    assert first.validations == [0]
    assert f"stopped at iteration 4 as {why}" in first.out.getvalue()
    saved = Progress.from_json(first.progress.to_json())
    assert saved.validation_pending == 1
    second = Played(flags, progress=saved).train()
    assert second.validations == [4, 8, 10]
    assert second.progress.validation_pending == 0


def test_votes_in_the_last_step_leave_its_validation_too():
    outcomes = [Outcome(2.0)] * 9 + [Outcome(2.0, control_flags=SIGNAL)]
    first = Played("--save s --eval-interval 4", outcomes).train()
    assert [i for i, _ in first.saves] == [10]
    assert first.validations == [0, 4, 8]
    second = Played("--save s --eval-interval 4", progress=first.progress).train()
    assert second.validations == [10]
    assert second.saves == []


def test_without_votes_and_with_none_in_favour_a_run_goes_on():
    played = Played(
        "--save s --eval-interval 0", [Outcome(2.0), Outcome(2.0, control_flags=(0.0, 0.0, 0.0))]
    )
    assert played.train().progress.iteration == 10


def test_stop_timer_is_notified_of_steps_saves_and_validations():
    played = Played("--save s --save-interval 5 --eval-interval 5")
    told = []
    played.stop.note = lambda kind, seconds: told.append(kind)
    played.train()
    five = ["step"] * 5
    assert told == ["validation", *five, "validation", "save", *five, "validation", "save"]


def test_a_spike_is_skipped_and_its_loss_is_not_remembered():
    limits = []

    class Spiky(Played):
        def take_step(self, samples, *, update_samples, loss_limit):
            limits.append(loss_limit)
            outcome = super().take_step(
                samples, update_samples=update_samples, loss_limit=loss_limit
            )
            if outcome.loss <= loss_limit:
                return outcome
            twice = StepAnomaly(
                "spike", "reproduced", (1,), (outcome.loss, outcome.loss), same=True
            )
            return Outcome(outcome.loss, False, anomaly=twice, spiked=True)

    losses = [Outcome(x) for x in (2.0, 2.0, 4.0, 50.0, 4.0, 5.0)]
    flags = "--loss-spike-factor 2 --loss-spike-window 3 --eval-interval 0 --train-iters 6"
    played = Spiky(flags, losses).train()
    assert limits == [math.inf, 4.0, 4.0, 4.0, 4.0, 8.0]
    assert played.progress.spiked_iterations == played.progress.skipped_iterations == 1
    assert played.progress.recent_losses == [4.0, 4.0, 5.0]
    assert "iteration 4: loss 50 is above 4" in played.out.getvalue()
    assert [v for k, i, v in played.listener.events if k == "fault"] == [
        {"spike": 1.0, "reproduced": 1.0, "first_rank": 1.0, "loss": 50.0, "limit": 4.0}
    ]


def test_spikes_in_a_row_are_bad_steps():
    outcome = Outcome(9.0, applied=False, grad_norm=math.nan, spiked=True)
    played = Played("--max-consecutive-bad-steps 3 --eval-interval 0", [outcome])
    with pytest.raises(RunStopped, match=r"3 steps in a row had .* or a spike"):
        played.train()


def test_progress_of_earlier_checkpoints_is_read():
    old = Progress(iteration=3).to_json()
    for name in ("spiked_iterations", "rollbacks", "validation_pending", "recent_losses"):
        del old[name]
    assert Progress.from_json(old) == Progress(iteration=3)
    with pytest.raises(ValueError, match="lacks recent_losses"):
        Progress.from_json({**old, "recent_losses": "many"})
    for lengths in ([9], {"train": -1}, {"train": True}, {"train": "9"}):
        with pytest.raises(ValueError, match="lacks order_lengths"):
            Progress.from_json({**old, "order_lengths": lengths})

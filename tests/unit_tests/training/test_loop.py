# SPDX-License-Identifier: Apache-2.0
"""The training loop over scripted steps: counters, logs, validation, saves and stops."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import pytest

from megatron.cli.errors import ExitCode, RunStopped
from megatron.core.optimizer import (
    ConstantLossScaler,
    DynamicLossScaler,
    DynamicLossScalerConfig,
    LearningRateSchedule,
    WeightDecaySchedule,
)
from megatron.training.config.resolve import resolve
from megatron.training.fault_tolerance.faults import FaultLog, Faults
from megatron.training.fault_tolerance.stopping import StopRequests
from megatron.training.hooks import LogPart, Progress, StepAnomaly, TrainingHooks
from megatron.training.loop import TrainingLoop
from megatron.training.monitoring.log_line import Plain, Speedometer, StepWindow
from megatron.training.monitoring.metrics import Metrics
from tests.unit_tests.training.small_config import small_config


@dataclass(frozen=True)
class Outcome:
    loss: float = 2.0
    applied: bool = True
    grad_norm: float = 1.0
    num_zeros: int | None = None
    control_flags: tuple[float, ...] = ()
    anomaly: StepAnomaly | None = None
    spiked: bool = False


class RecordingWriter:
    """A metrics writer that records its events."""

    def __init__(self):
        self.events = []

    def write(self, kind, iteration, values):
        self.events.append((kind, iteration, dict(values)))

    def close(self):
        pass


class FakeLoop:
    """A run whose step outcomes come from a list, one per iteration; the last one repeats."""

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
        self.listener, self.out = RecordingWriter(), io.StringIO()
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


def test_run_logs_validates_and_saves_at_its_intervals():
    losses = [Outcome(float(i)) for i in range(1, 11)]
    loop = FakeLoop("--save s --save-interval 4 --eval-interval 5 --log-interval 5", losses).train()
    assert loop.progress.iteration == 10
    assert loop.progress.consumed_samples == 60
    assert loop.validations == [0, 5, 10]
    assert [i for i, _ in loop.saves] == [4, 8, 10]
    assert loop.finished == [10], "earlier saves may finish in the background"
    assert [(i, v["lm_loss"]) for i, v in loop.records()] == [(5, 3.0), (10, 8.0)]
    assert [i for i, _ in loop.records("validation")] == [0, 5, 10]
    assert loop.rates == pytest.approx([1.0 - i / 10 for i in range(10)])
    lines = loop.out.getvalue().splitlines()
    assert sum(" validation loss at iteration " in line for line in lines) == 3
    assert sum("] iteration        5/      10 |" in line for line in lines) == 1


class Recorder(TrainingHooks):
    """Record the calls of hooks, each with its iteration."""

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


def test_hooks_are_called_in_order():
    hooks = Recorder()
    flags = "--train-iters 2 --eval-interval 2 --log-interval 2"
    loop = FakeLoop(flags, hooks=[hooks]).train()
    iteration1 = [("begin", 1), ("computed", 0), ("end", 1)]
    iteration2 = [("begin", 2), ("computed", 1), ("parts",), ("log",), ("end", 2), ("evaluate", 2)]
    assert hooks.calls == [("evaluate", 0), *iteration1, *iteration2, ("train end", 2)]
    assert loop.validations == [0, 0, 2, 2], "once for the loop, once for the hook"
    assert loop.records("validation")[1] == (2, {"lm_loss": 3.0, "half_lm_loss": 1.5})
    assert loop.records()[0][1]["spin"] == 7.0
    text = loop.out.getvalue()
    assert " spin: 7 |" in text
    assert " validation loss at iteration 2 on half | lm loss value: 1.500000E+00 |" in text


def test_train_end_hook_runs_on_early_stop_but_not_on_failure():
    hooks = Recorder()
    FakeLoop("--save s --exit-interval 4 --eval-interval 0", hooks=[hooks]).train()
    assert hooks.calls[-1] == ("train end", 4)
    hooks, bad = Recorder(), Outcome(2.0, applied=False, grad_norm=math.inf)
    with pytest.raises(RunStopped):
        FakeLoop("--max-consecutive-bad-steps 1 --eval-interval 0", [bad], hooks=[hooks]).train()
    assert hooks.calls == [("begin", 1), ("computed", 0)]


def test_run_without_validation_and_saving_logs_its_windows():
    loop = FakeLoop("--eval-interval 0 --log-interval 3").train()
    assert loop.validations == []
    assert [i for i, _ in loop.records()] == [3, 6, 9, 10]


def test_logged_speed_matches_tokens_and_time():
    loop = FakeLoop("--eval-interval 0 --log-interval 10 --log-throughput").train()
    (_, values) = loop.records()[0]
    tokens = values["tokens_per_second"] * values["seconds_per_iteration"]
    assert tokens == pytest.approx(6 * 20)
    assert values["tflops"] > 0
    assert "mfu" not in values


def test_exit_interval_saves_stops_and_resumes():
    stopped = FakeLoop("--save s --exit-interval 4 --eval-interval 0 --log-interval 3").train()
    assert stopped.progress.iteration == 4
    assert [i for i, _ in stopped.saves] == [4]
    assert "stopped at iteration 4" in stopped.out.getvalue()
    flags = "--save s --exit-interval 4 --eval-interval 2 --log-interval 3"
    resumed = FakeLoop(flags, progress=stopped.progress).train()
    assert resumed.progress.iteration == 8
    assert resumed.validations == [6, 8], "a resumed run does not validate before its first step"


def test_log_window_interrupted_by_a_save_resumes_unchanged():
    losses = [Outcome(float(i) / 3) for i in range(1, 11)]
    flags = "--save s --save-interval 5 --eval-interval 0 --log-interval 4"
    uninterrupted = FakeLoop(flags, losses).train()
    counters = Progress(iteration=5, consumed_samples=30, update_samples=30)
    window = dict(uninterrupted.saves)[5]
    resumed = FakeLoop(flags, losses, progress=counters, window=window).train()
    assert [(i, v["lm_loss"]) for i, v in resumed.records()] == [
        (i, v["lm_loss"]) for i, v in uninterrupted.records() if i > 5
    ]


def test_skipped_steps_are_counted_and_keep_learning_rate():
    bad = Outcome(math.nan, applied=False, grad_norm=math.nan)
    good = Outcome(4.0)
    outcomes = [good, bad, bad, good, Outcome(4.0, applied=False, grad_norm=math.inf), good]
    loop = FakeLoop("--eval-interval 0 --log-interval 5", outcomes).train()
    assert loop.progress.consumed_samples == 60
    assert loop.progress.update_samples == 42
    assert (loop.progress.skipped_iterations, loop.progress.nan_iterations) == (3, 2)
    assert loop.rates[:4] == pytest.approx([1.0, 0.9, 0.9, 0.9])
    _, window1 = loop.records()[0]
    assert (window1["lm_loss"], window1["num_skipped"], window1["num_nan"]) == (4.0, 3, 2)
    assert window1["learning_rate"] == pytest.approx(loop.rates[4]) == pytest.approx(0.8)
    _, window2 = loop.records()[1]
    assert (window2["num_skipped"], window2["num_nan"]) == (0, 0)


def test_too_many_bad_steps_in_a_row_stop_the_run():
    bad = Outcome(2.0, applied=False, grad_norm=math.inf)
    good = Outcome(2.0)
    flags = "--max-consecutive-bad-steps 3 --eval-interval 0 --save s"
    loop = FakeLoop(flags, [bad, bad, good, bad, bad, bad, good])
    with pytest.raises(RunStopped, match="stopped at iteration 6: 3 steps in a row") as caught:
        loop.train()
    assert caught.value.code == ExitCode.BAD_STEPS
    assert loop.saves == [], "a broken state is not saved"


def test_fp16_scale_search_is_not_bad_until_minimum_scale():
    overflow = Outcome(2.0, applied=False, grad_norm=math.inf)
    config = DynamicLossScalerConfig(initial_scale=2.0**6, hysteresis=1)
    flags = "--fp16 --max-consecutive-bad-steps 2 --train-iters 40 --eval-interval 0"
    loop = FakeLoop(flags, [overflow], scaler=DynamicLossScaler(config))
    with pytest.raises(RunStopped):
        loop.train()
    assert loop.progress.iteration == 6 + 2


def test_window_of_only_skipped_steps_logs_no_loss():
    bad = Outcome(math.inf, applied=False, grad_norm=math.inf)
    loop = FakeLoop("--eval-interval 0 --log-interval 2 --train-iters 4", [bad]).train()
    assert "lm_loss" not in loop.records()[0][1]
    assert "number of nan iterations:   2 |" in loop.out.getvalue()


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
    stopped = FakeLoop(flags, outcomes).train()
    assert stopped.progress.iteration == 4
    assert [i for i, _ in stopped.saves] == [4]
    assert stopped.validations == [0]
    assert f"stopped at iteration 4 because {why}" in stopped.out.getvalue()
    saved = Progress.from_json(stopped.progress.to_json())
    assert saved.validation_pending == 1
    resumed = FakeLoop(flags, progress=saved).train()
    assert resumed.validations == [4, 8, 10]
    assert resumed.progress.validation_pending == 0


def test_stop_flag_in_the_last_step_defers_its_validation():
    outcomes = [Outcome(2.0)] * 9 + [Outcome(2.0, control_flags=SIGNAL)]
    stopped = FakeLoop("--save s --eval-interval 4", outcomes).train()
    assert [i for i, _ in stopped.saves] == [10]
    assert stopped.validations == [0, 4, 8]
    resumed = FakeLoop("--save s --eval-interval 4", progress=stopped.progress).train()
    assert resumed.validations == [10]
    assert resumed.saves == []


def test_run_continues_without_a_raised_stop_flag():
    loop = FakeLoop(
        "--save s --eval-interval 0", [Outcome(2.0), Outcome(2.0, control_flags=(0.0, 0.0, 0.0))]
    )
    assert loop.train().progress.iteration == 10


def test_stop_timer_is_notified_of_steps_saves_and_validations():
    loop = FakeLoop("--save s --save-interval 5 --eval-interval 5")
    events = []
    loop.stop.note = lambda kind, seconds: events.append(kind)
    loop.train()
    five_steps = ["step"] * 5
    assert events == [
        "validation",
        *five_steps,
        "validation",
        "save",
        *five_steps,
        "validation",
        "save",
    ]


def test_spike_is_skipped_and_its_loss_not_remembered():
    limits = []

    class Spiky(FakeLoop):
        def take_step(self, samples, *, update_samples, loss_limit):
            limits.append(loss_limit)
            outcome = super().take_step(
                samples, update_samples=update_samples, loss_limit=loss_limit
            )
            if outcome.loss <= loss_limit:
                return outcome
            spike = StepAnomaly(
                "spike", "reproduced", (1,), (outcome.loss, outcome.loss), same=True
            )
            return Outcome(outcome.loss, False, anomaly=spike, spiked=True)

    losses = [Outcome(x) for x in (2.0, 2.0, 4.0, 50.0, 4.0, 5.0)]
    flags = "--loss-spike-factor 2 --loss-spike-window 3 --eval-interval 0 --train-iters 6"
    loop = Spiky(flags, losses).train()
    assert limits == [math.inf, 4.0, 4.0, 4.0, 4.0, 8.0]
    assert loop.progress.spiked_iterations == loop.progress.skipped_iterations == 1
    assert loop.progress.recent_losses == [4.0, 4.0, 5.0]
    assert "iteration 4: loss 50 is above 4" in loop.out.getvalue()
    assert [v for k, i, v in loop.listener.events if k == "fault"] == [
        {"spike": 1.0, "reproduced": 1.0, "first_rank": 1.0, "loss": 50.0, "limit": 4.0}
    ]


def test_consecutive_spikes_count_as_bad_steps():
    outcome = Outcome(9.0, applied=False, grad_norm=math.nan, spiked=True)
    loop = FakeLoop("--max-consecutive-bad-steps 3 --eval-interval 0", [outcome])
    with pytest.raises(RunStopped, match=r"3 steps in a row had .* or a spike"):
        loop.train()


def test_progress_of_older_checkpoints_is_read():
    old = Progress(iteration=3).to_json()
    for name in ("spiked_iterations", "rollbacks", "validation_pending", "recent_losses"):
        del old[name]
    assert Progress.from_json(old) == Progress(iteration=3)
    with pytest.raises(ValueError, match="lacks recent_losses"):
        Progress.from_json({**old, "recent_losses": "many"})
    for lengths in ([9], {"train": -1}, {"train": True}, {"train": "9"}):
        with pytest.raises(ValueError, match="lacks order_lengths"):
            Progress.from_json({**old, "order_lengths": lengths})

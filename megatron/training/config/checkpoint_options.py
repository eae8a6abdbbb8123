# SPDX-License-Identifier: Apache-2.0
"""Options of checkpoints and of failure handling, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = None
    """Folder to save checkpoints in; None = do not save."""
    load: str | None = None
    """Folder to load the latest checkpoint from, or one iter_ folder; if the folder is empty or
    missing, training starts from scratch."""
    save_interval: int | None = None
    """Iterations between checkpoints; None = only at the end."""
    async_save: bool = False
    """Save checkpoints of --save-interval in the background: the state is copied to host memory
    after the next forward pass, and a separate process writes it; a failed save is logged, counted
    and retried at the next interval."""
    on_failed_save: Literal["continue", "stop"] = "continue"
    """What to do if a save at --save-interval fails: log it, count it and continue training, or
    exit with 5. The last save of a run must always succeed."""
    save_keep_last: int | None = None
    """Number of newest checkpoints to keep; older ones are deleted after a save. None = 1 with
    --save-retain-interval, else all."""
    save_retain_interval: int | None = None
    """Keep checkpoints at multiples of this many iterations permanently, and of the others only the
    newest (--save-keep-last); None = none permanently."""
    load_fallback: bool = True
    """Fall back to an older checkpoint in --load if the newest ones are damaged (with
    --no-load-fallback that is an error)."""
    save_optim: bool = True
    """Save optimizer state (a checkpoint of --no-save-optim can only be resumed with
    --no-load-optim)."""
    load_optim: bool = True
    """Load optimizer state (--no-load-optim: weights and data position only)."""
    schedule_on_load: Literal["auto", "continue", "restart"] = "auto"
    """Where a resumed run starts in its schedules of learning rate and weight decay: continue at
    the checkpoint's position, restart at the beginning, warm-up included; auto continues with the
    optimizer state, and restarts with --no-load-optim."""
    use_checkpoint_args: bool = False
    """Read the model's shape and the tokenizer from the checkpoint in --load, else in
    --pretrained-checkpoint, and also the data, the length of the run and required options if none
    are given; explicit options win."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Read learning rate, warm-up, decay and weight decay from the checkpoint in --load, overriding
    explicit options; no effect without a checkpoint there, or with --finetune or
    --no-load-optim."""
    pretrained_checkpoint: str | None = None
    """Folder of checkpoints, or one iter_ folder, to load weights from if --load has no checkpoint
    yet; the run starts at iteration 0."""
    load_hf: str | None = None
    """Hugging Face folder of a supported architecture to load model, weights and tokenizer from if
    --load has no checkpoint yet; the run starts at iteration 0."""
    hf_export_check: bool = False
    """Report at the start whether the model can be exported to Hugging Face format, and if not,
    which flags prevent it."""
    finetune: bool = False
    """Load weights only and start at iteration 0 with the first sample."""

    @property
    def resumes_schedule(self) -> bool:
        """Whether a resumed run continues in its schedules at the checkpoint's position."""
        if self.schedule_on_load == "auto":
            return self.load_optim
        return self.schedule_on_load == "continue"

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "save_interval", "save_keep_last", "save_retain_interval"),
            lambda: require(
                not self.async_save or self.save_interval is not None,
                "--async-save needs --save-interval: the last save of a run is never in the "
                "background",
            ),
            lambda: require(
                self.on_failed_save == "continue" or self.save_interval is not None,
                "--on-failed-save stop needs --save-interval: the last save of a run always has to "
                "succeed",
            ),
            lambda: require(
                self.save is not None
                or (self.save_keep_last is None and self.save_retain_interval is None),
                "--save-keep-last and --save-retain-interval need --save: name a folder",
            ),
            lambda: require(
                self.load_fallback or (self.load or self.pretrained_checkpoint) is not None,
                "--no-load-fallback needs --load or --pretrained-checkpoint: name a folder",
            ),
            lambda: require(
                self.load_hf is None or self.pretrained_checkpoint is None,
                "--load-hf and --pretrained-checkpoint are mutually exclusive: keep one",
            ),
            lambda: require(
                not self.use_checkpoint_args
                or self.load is not None
                or self.pretrained_checkpoint is not None,
                "--use-checkpoint-args needs --load or --pretrained-checkpoint: name a checkpoint",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """Signals, time limits, bad steps, slow and diverging ranks."""

    exit_signal_handler: bool = True
    """On SIGTERM, SIGHUP or Ctrl-C, finish the step on all ranks, save a checkpoint and exit with
    0; requires --save. A second signal exits at once (with --no-exit-signal-handler the first one
    does)."""
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """Additional signal that is handled like SIGTERM: SIGUSR1 for a scheduler that sends it before
    it ends a job."""
    exit_grace_seconds: float = 25.0
    """Seconds that an exit by signal may take before the process is terminated; torchrun kills
    after 30 (its --shutdown-timeout)."""
    exit_duration_in_mins: float | None = None
    """Save and exit before the process has run for this many minutes, with a margin for one step
    and a save."""
    rerun_mode: Literal["disabled", "validate_results", "report_determinism_stats"] = (
        "validate_results"
    )
    """validate_results computes a suspicious step (NaN or Inf loss or gradient norm, a spike) a
    second time in place: a sound second result is used, and the first is recorded with rank and
    host. report_determinism_stats also computes steps twice that look sound, compares them bit by
    bit, and takes the majority of three computations if they differ; this doubles the step time."""
    rerun_interval: int = 1
    """With report_determinism_stats, compare every N-th step."""
    on_reproduced_fault: Literal["skip", "restart"] = "skip"
    """What to do if the second result is suspicious too: skip the step, or save and exit with 16 to
    be restarted on other machines, where repeating the step tells bad data (exit 17) from a bad
    machine."""
    loss_spike_factor: float | None = None
    """Skip a step whose loss exceeds the median of recent losses by this factor; None = apply every
    finite loss."""
    loss_spike_window: int = 100
    """Number of recent applied losses whose median --loss-spike-factor uses."""
    rollback_after_bad_steps: int | None = None
    """After this many consecutive skipped steps, load the last checkpoint in --save and continue
    with the data after them; None = never."""
    check_collectives: bool = False
    """Compare the arguments of every collective between its ranks before it starts, and report both
    if they differ; slow, for debugging."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Every so many iterations, compare replicated weights and optimizer state between ranks, and
    exit without saving if they differ; None = never."""
    log_straggler: bool = False
    """At every log line, compare the ranks' computation times and report slow ranks."""
    straggler_factor: float = 1.5
    """A rank is slow if it takes this many times the median rank's time."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(
                self, "exit_grace_seconds", "exit_duration_in_mins", "loss_spike_window"
            ),
            lambda: positive(self, "rerun_interval", "rollback_after_bad_steps"),
            lambda: positive(self, "check_weight_hash_across_dp_replicas_interval"),
            lambda: positive(self, "loss_spike_factor", "straggler_factor"),
        )


def failure_problems(
    failures: FailureConfig, *, checkpoint: CheckpointConfig, max_consecutive_bad_steps: int
) -> Iterator[str]:
    """Yield a message for each failure option that cannot take effect."""
    save = checkpoint.save
    for flag, factor in (
        ("--loss-spike-factor", failures.loss_spike_factor),
        ("--straggler-factor", failures.straggler_factor),
    ):
        if factor is not None and factor <= 1.0:
            yield (
                f"{flag} is {factor}: it must be above 1, because half of the values exceed "
                "the median"
            )
    rollback, limit = failures.rollback_after_bad_steps, max_consecutive_bad_steps
    if rollback is not None and save is None:
        yield "--rollback-after-bad-steps needs --save: name a folder to load from"
    if rollback is not None and rollback >= limit:
        yield (
            f"--rollback-after-bad-steps {rollback} is never reached with "
            f"--max-consecutive-bad-steps {limit}: raise that"
        )
    if rollback is not None and not checkpoint.save_optim:
        yield (
            "--rollback-after-bad-steps restores a checkpoint with its optimizer state, but "
            "--no-save-optim saves none: drop one of the two options"
        )
    if failures.on_reproduced_fault == "restart" and save is None:
        yield "--on-reproduced-fault restart needs --save: it records the step there"
    if failures.on_reproduced_fault == "restart" and failures.rerun_mode == "disabled":
        yield (
            "--on-reproduced-fault restart needs --rerun-mode validate_results: without it no step "
            "is computed again"
        )

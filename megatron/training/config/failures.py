# SPDX-License-Identifier: Apache-2.0
"""When a run ends early, and what it does about steps and ranks that go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive, require_all


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """Signals, time limit, bad steps, slow and diverging ranks."""

    exit_signal_handler: bool = True
    """On SIGTERM, SIGHUP or Ctrl-C finish the step on all ranks, save and end with 0; takes effect
    with --save. A second signal ends at once (--no-exit-signal-handler: the first one does)."""
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """A signal that ends the run as SIGTERM does, in addition to it: SIGUSR1 for a scheduler that
    sends it before it ends a job."""
    exit_grace_seconds: float = 25.0
    """How long stopping by a signal may take before the process ends at once; torchrun kills after
    30 (its --shutdown-timeout)."""
    exit_duration_in_mins: float | None = None
    """Save and stop before the process has run for this many minutes, leaving time for a step and
    a save."""
    rerun_mode: Literal["disabled", "validate_results", "report_determinism_stats"] = (
        "validate_results"
    )
    """validate_results computes a suspicious step (NaN or Inf loss or gradient norm, a spike) once
    more in place: a second result that is sound is used, and the first one recorded with rank and
    host. report_determinism_stats also computes steps twice that look sound, compares the bits, and
    goes by the majority of three computations where they differ; that takes twice the time."""
    rerun_interval: int = 1
    """Compare every N-th step with report_determinism_stats."""
    on_reproduced_fault: Literal["skip", "restart"] = "skip"
    """What to do when the second result is suspicious too: skip the step, or save and exit with 16
    to be restarted on other machines, where the same step tells data (exit 17) from machine."""
    loss_spike_factor: float | None = None
    """Skip a step whose loss is above this many times the median of the last losses; None = apply
    every finite loss."""
    loss_spike_window: int = 100
    """Losses of applied steps that the median of --loss-spike-factor is taken over."""
    rollback_after_bad_steps: int | None = None
    """After this many skipped bad steps in a row load the last checkpoint in --save and go on with
    the data behind them; None = never."""
    check_collectives: bool = False
    """Compare every collective between its ranks before it starts, and name both where they differ;
    slow, for finding faults."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Every so many iterations compare weights and optimizer state that several ranks hold alike,
    and end the run without saving where they differ; None = never."""
    log_straggler: bool = False
    """At every log line compare the time that each rank computes, and name those that are slow."""
    straggler_factor: float = 1.5
    """How many times the median rank's time makes a rank slow."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(
                self, "exit_grace_seconds", "exit_duration_in_mins", "loss_spike_window"
            ),
            lambda: positive(self, "rerun_interval", "rollback_after_bad_steps"),
            lambda: positive(self, "check_weight_hash_across_dp_replicas_interval"),
            lambda: positive(self, "loss_spike_factor", "straggler_factor"),
        )

# SPDX-License-Identifier: Apache-2.0
"""The options of checkpoints, failures, logs, profiles and experiments.

When a run ends early, and what it does about steps and ranks that go wrong.

What a run prints and records.

Profiles of a few iterations, and the history of the GPU's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import not_negative, positive, require, require_all


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


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run prints and records."""

    log_interval: int = 100
    """Iterations between log lines."""
    log_throughput: bool = False
    """Show TFLOP/s per device in the log line, and the share of its peak where that is known."""
    log_num_zeros_in_grad: bool = False
    """Show how many gradient elements are exactly zero."""
    log_params_norm: bool = False
    """Show the L2 norm of all weights."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard scalars."""
    wandb_project: str | None = None
    """Project to record in at Weights & Biases; the key comes from its own WANDB_API_KEY."""
    wandb_exp_name: str | None = None
    """Name of the run there."""
    wandb_entity: str | None = None
    """User or team there; None = the key's own."""
    wandb_save_dir: str | None = None
    """Folder for its local files; None = ./wandb."""
    mlflow_experiment: str | None = None
    """Experiment to record in at MLflow; user and password come from its own variables."""
    mlflow_run_name: str | None = None
    """Name of the run there."""
    mlflow_tracking_uri: str | None = None
    """Address of its server or file store; None = its own default."""
    metrics_file: str | None = None
    """File for one JSON line per logged step; derived: metrics.jsonl in --save, else in
    --tensorboard-dir, else in a new folder runs/START-TIME."""
    progress: Literal["auto", "plain", "live"] = "auto"
    """Live progress bar or plain lines; auto is live on a terminal."""

    def __post_init__(self) -> None:
        positive(self, "log_interval")
        for tracker, needed in (("wandb", "wandb_project"), ("mlflow", "mlflow_experiment")):
            for name, value in vars(self).items():
                idle = name.startswith(f"{tracker}_") and value is not None
                require(
                    not idle or vars(self)[needed] is not None,
                    f"--{name.replace('_', '-')} has no effect without "
                    f"--{needed.replace('_', '-')}: add that",
                )


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiles of a few iterations, and the history of the GPU's memory."""

    profile: bool = False
    """Profile some iterations: for Nsight Systems (nsys profile --capture-range=cudaProfilerApi),
    or by torch with --use-pytorch-profiler."""
    use_pytorch_profiler: bool = False
    """Let --profile write a Chrome trace per rank by torch's own profiler; the only kind on a
    CPU."""
    profile_step_start: int = 10
    """Profile from the end of this iteration on."""
    profile_step_end: int = 12
    """Profile up to the end of this iteration."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that profile and that keep a memory history."""
    profile_dir: str | None = None
    """Folder for traces and snapshots; derived: profile in --save, else in --tensorboard-dir, else
    in runs."""
    record_memory_history: bool = False
    """Keep the history of GPU allocations, and write it at the end or at an error, running out of
    memory included; for https://pytorch.org/memory_viz."""
    memory_snapshot_path: str | None = None
    """File for that history, the rank is added to its name; derived: memory_snapshot.pickle in
    --profile-dir."""

    def __post_init__(self) -> None:
        require_all(
            lambda: not_negative(self, "profile_step_start"),
            lambda: require(
                self.profile_step_end > self.profile_step_start,
                f"--profile-step-end {self.profile_step_end} is not above --profile-step-start "
                f"{self.profile_step_start}: raise it",
            ),
            lambda: require(
                self.profile or not self.use_pytorch_profiler,
                "--use-pytorch-profiler has no effect without --profile: add that",
            ),
            lambda: require(
                self.record_memory_history or self.memory_snapshot_path is None,
                "--memory-snapshot-path has no effect without --record-memory-history: add that",
            ),
            lambda: require(
                all(rank >= 0 for rank in self.profile_ranks),
                f"--profile-ranks {min(self.profile_ranks)}: ranks start at 0",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = None
    """Folder to save checkpoints in; None = save none."""
    load: str | None = None
    """Folder to load the latest checkpoint from, or one iter_ folder; an empty or absent root
    starts anew."""
    save_interval: int | None = None
    """Iterations between saves; None = only at the end."""
    async_save: bool = False
    """Save at --save-interval while training goes on: the state is copied to host memory behind the
    next forward pass, and a process of its own writes it; what fails is logged, counted and tried
    again at the next interval."""
    on_failed_save: Literal["continue", "stop"] = "continue"
    """What to do when a save at --save-interval fails: log it, count it and train on to the next,
    or end the run (exit 5). The last save of a run always has to succeed."""
    save_keep_last: int | None = None
    """How many of the newest checkpoints to keep; older ones are removed after a save. None = 1
    with --save-retain-interval, else all."""
    save_retain_interval: int | None = None
    """Keep checkpoints at multiples of this many iterations for good, and of the others only the
    newest (--save-keep-last); None = none for good."""
    load_fallback: bool = True
    """Go on from an older checkpoint in --load where the newest ones are damaged
    (--no-load-fallback: that is an error)."""
    save_optim: bool = True
    """Save optimizer state too (--no-save-optim: a run goes on from such a checkpoint with
    --no-load-optim alone)."""
    load_optim: bool = True
    """Load optimizer state too (--no-load-optim: weights and data position only)."""
    schedule_on_load: Literal["auto", "continue", "restart"] = "auto"
    """Where a run that goes on from a checkpoint begins in its schedules of learning rate and
    weight decay: continue is where the checkpoint is, restart their beginning, warm-up included;
    auto continues with the optimizer state, and restarts with --no-load-optim."""
    use_checkpoint_args: bool = False
    """Take the model's shape and the tokenizer from the checkpoint in --load, else in
    --pretrained-checkpoint, and where none are given the data, the length of the run and what is
    required; what is given wins."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Take learning rate, warm-up, decay and weight decay from the checkpoint in --load, whatever
    is given; without a checkpoint there, or with --finetune or --no-load-optim, as given."""
    pretrained_checkpoint: str | None = None
    """Folder of checkpoints, or one iter_ folder, to take weights from while --load holds no
    checkpoint yet; the run starts at iteration 0."""
    load_hf: str | None = None
    """Hugging Face folder of a known architecture to take model, weights and tokenizer from
    while --load holds no checkpoint yet; the run starts at iteration 0."""
    hf_export_check: bool = False
    """Say at the start whether the model can be exported to Hugging Face, else which flags keep it
    from that."""
    finetune: bool = False
    """Load weights only and start again at iteration 0 with the first sample."""

    @property
    def goes_on_in_schedule(self) -> bool:
        """Whether a run that goes on takes its place in the schedule from the checkpoint."""
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
                "--load-hf and --pretrained-checkpoint exclude each other: keep one",
            ),
            lambda: require(
                not self.use_checkpoint_args
                or self.load is not None
                or self.pretrained_checkpoint is not None,
                "--use-checkpoint-args needs --load or --pretrained-checkpoint: name a checkpoint",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Ideas on trial, in a checkout of the repository only."""

    experiment: tuple[str, ...] | None = None
    """NAME ...: train with these folders of experimental/; the README.md of each says what it
    changes."""
    experiment_option: tuple[str, ...] | None = None
    """NAME.KEY=VALUE ...: options of the experiments that --experiment names."""

    def __post_init__(self) -> None:
        names = self.experiment or ()
        for name in names:
            require(
                name.isidentifier(),
                f"--experiment {name!r} is no name of a folder in experimental/: use one",
            )
        require(
            len(set(names)) == len(names), f"--experiment {' '.join(names)}: name each only once"
        )
        experiment_words = {word for name in names for word in self.words_of(name)}
        for word in self.experiment_option or ():
            require(
                word in experiment_words and "=" in word,
                f"--experiment-option {word}: use NAME.KEY=VALUE with a NAME of --experiment",
            )
        keys = [word.partition("=")[0] for word in self.experiment_option or ()]
        for key in dict.fromkeys(keys):
            require(keys.count(key) == 1, f"--experiment-option {key}: give it only once")

    def words_of(self, name: str) -> list[str]:
        """Return the words NAME.KEY=VALUE of one experiment."""
        return [word for word in self.experiment_option or () if word.startswith(f"{name}.")]

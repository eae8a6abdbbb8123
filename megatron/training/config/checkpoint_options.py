# SPDX-License-Identifier: Apache-2.0
"""Options of failure handling, logging, profiling, checkpoints and experiments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import not_negative, positive, require, require_all


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


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: int = 100
    """Iterations between log lines."""
    log_throughput: bool = False
    """Log TFLOP/s per device, and the share of the device's peak if it is known."""
    log_num_zeros_in_grad: bool = False
    """Log the number of zero elements of the gradient."""
    log_params_norm: bool = False
    """Log the L2 norm of all weights."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project to log to; the API key is read from WANDB_API_KEY."""
    wandb_exp_name: str | None = None
    """Name of the Weights & Biases run."""
    wandb_entity: str | None = None
    """Weights & Biases user or team; None = the API key's own."""
    wandb_save_dir: str | None = None
    """Folder for local files of Weights & Biases; None = ./wandb."""
    mlflow_experiment: str | None = None
    """MLflow experiment to log to; user and password are read from MLflow's environment
    variables."""
    mlflow_run_name: str | None = None
    """Name of the MLflow run."""
    mlflow_tracking_uri: str | None = None
    """Address of the MLflow server or file store; None = MLflow's default."""
    metrics_file: str | None = None
    """File for metrics, one JSON line per logged step; derived: metrics.jsonl in --save, else in
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
    """Profiles of a few iterations, and the history of GPU memory."""

    profile: bool = False
    """Profile a few iterations: for Nsight Systems (nsys profile --capture-range=cudaProfilerApi),
    or with torch's profiler by --use-pytorch-profiler."""
    use_pytorch_profiler: bool = False
    """Let --profile write one Chrome trace per rank with torch's profiler; the only profiler on a
    CPU."""
    profile_step_start: int = 10
    """Start the profile at the end of this iteration."""
    profile_step_end: int = 12
    """Stop the profile at the end of this iteration."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks to profile and to record the memory history of."""
    profile_dir: str | None = None
    """Folder for traces and memory snapshots; derived: profile in --save, else in
    --tensorboard-dir, else in runs."""
    record_memory_history: bool = False
    """Record the history of GPU allocations, and write it at the end of the run or at an error, out
    of memory included; for https://pytorch.org/memory_viz."""
    memory_snapshot_path: str | None = None
    """File for the memory history; the rank is added to its name; derived: memory_snapshot.pickle
    in --profile-dir."""

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
class ExperimentConfig:
    """Experiments, available only in a checkout of the repository."""

    experiment: tuple[str, ...] | None = None
    """NAME ...: enable these experiments, folders of experimental/; the README.md of each describes
    what it changes."""
    experiment_option: tuple[str, ...] | None = None
    """NAME.KEY=VALUE ...: options of the experiments in --experiment."""

    def __post_init__(self) -> None:
        names = self.experiment or ()
        for name in names:
            require(
                name.isidentifier(),
                f"--experiment {name!r} is not the name of a folder in experimental/: use one",
            )
        require(
            len(set(names)) == len(names), f"--experiment {' '.join(names)}: list each name once"
        )
        experiment_words = {word for name in names for word in self.option_arguments(name)}
        for word in self.experiment_option or ():
            require(
                word in experiment_words and "=" in word,
                f"--experiment-option {word}: use NAME.KEY=VALUE with a NAME of --experiment",
            )
        keys = [word.partition("=")[0] for word in self.experiment_option or ()]
        for key in dict.fromkeys(keys):
            require(keys.count(key) == 1, f"--experiment-option {key}: give it only once")

    def option_arguments(self, name: str) -> list[str]:
        """Return the NAME.KEY=VALUE arguments of one experiment."""
        return [word for word in self.experiment_option or () if word.startswith(f"{name}.")]

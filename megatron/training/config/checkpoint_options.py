# SPDX-License-Identifier: Apache-2.0
"""Options of checkpoints."""

from __future__ import annotations

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

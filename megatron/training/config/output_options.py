# SPDX-License-Identifier: Apache-2.0
"""Checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive, require, require_all


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
    load_optim: bool = True
    """Load optimizer state and schedule too (--no-load-optim: weights and data position only)."""
    use_checkpoint_args: bool = False
    """Take the model's shape and the tokenizer from the checkpoint in --load, else in
    --pretrained-checkpoint, and where none are given the data, the length of the run and what is
    required; what is given wins."""
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

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "save_interval", "save_keep_last", "save_retain_interval"),
            lambda: require(
                self.save_interval is None or self.save is not None,
                "--save-interval needs --save: name a folder to save in",
            ),
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

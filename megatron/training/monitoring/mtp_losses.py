# SPDX-License-Identifier: Apache-2.0
"""What is logged about multi-token prediction: the mean loss of each depth."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from megatron.core.models.multi_token import take_mean_losses
from megatron.training.monitoring.log_line import LogPart


def mtp_losses(model: GPTModel) -> LogPart:
    """Return what a log line says of the depths, counted from 1, since the line before.

    Every rank calls this.
    """
    losses = dict(enumerate(take_mean_losses(model), start=1))
    words = " | ".join(f"mtp {depth} loss: {loss:.6E}" for depth, loss in losses.items())
    return LogPart(words, {f"mtp_{depth}_loss": loss for depth, loss in losses.items()})

# SPDX-License-Identifier: Apache-2.0
"""The line of a run's log on a kernel that its options keep it from."""

from __future__ import annotations

import torch

from megatron.training.config import Config
from megatron.training.config.layer_pattern import has_attention


def kernel_line(config: Config, device: torch.device) -> str | None:
    """Return why attention on a GPU is not the kernel's; None where it is, or on a CPU."""
    dropout = config.attention.attention_dropout
    asked = config.parallel.attention_backend == "auto"
    if device.type != "cuda" or not (asked and dropout and has_attention(config)):
        return None
    return (
        f"attention runs in plain torch, since its kernel has no dropout: --attention-dropout 0 "
        f"instead of {dropout} is quicker and takes less memory"
    )

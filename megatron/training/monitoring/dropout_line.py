# SPDX-License-Identifier: Apache-2.0
"""The line of a run's log on dropout, which Megatron's defaults turn on, and on what it costs."""

from __future__ import annotations

import torch

from megatron.training.config import Config
from megatron.training.config.layer_pattern import has_attention


def dropout_line(config: Config, device: torch.device) -> str | None:
    """Return which dropout is on, what it costs and how to turn it off; None where all is off."""
    rates = {
        "attention": config.attention.attention_dropout if has_attention(config) else 0.0,
        "hidden": config.model.hidden_dropout,
    }
    on = {name: rate for name, rate in rates.items() if rate}
    if not on:
        return None
    costs = ["a mask for every value in forward and backward"]
    if "attention" in on and device.type == "cuda" and config.parallel.attention_backend == "auto":
        length, cp = config.training.seq_length, config.parallel.context_parallel_size
        costs.append(
            "attention in plain torch instead of its kernel, which has no dropout, with scores of "
            f"{length // cp:,} x {length:,} for each head"
        )
    return (
        f"dropout: {', '.join(f'{name} {rate:g}' for name, rate in on.items())} (Megatron's "
        f"default is 0.1); costs {'; '.join(costs)}; most models are pretrained without: "
        f"{' '.join(f'--{name}-dropout 0' for name in on)}"
    )

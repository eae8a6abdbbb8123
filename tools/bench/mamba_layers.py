# SPDX-License-Identifier: Apache-2.0
"""Our Mamba-2 layer and that of transformers at several chunk sizes, with the same weights."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.ssm import Mamba2Config
from megatron.core.ssm.mamba2 import Mamba2
from tools.bench.recurrences import HIDDEN, OurLayer, Results, TheirLayer

HEADS, HEAD_CHANNELS = 8, 64
#: Theirs are raced at each; its memory grows with the square.
CHUNKS = (32, 64, 128, 256)


def mamba(state: int) -> tuple[OurLayer, dict[str, TheirLayer]]:
    """Make a Mamba-2 layer with one group of N = `state`, and those of transformers."""
    from transformers import Mamba2Config as TheirConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(num_heads=HEADS, head_channels=HEAD_CHANNELS, state_channels=state)
    ours = OurLayer(Mamba2, config)
    weights = ours.weights()
    inner = config.inner_channels
    gate = weights["m.input.weight"].shape[0] - inner  # our gates come last, theirs first
    given = {
        "in_proj.weight": torch.cat(weights["m.input.weight"].split([gate, inner])[::-1]),
        "conv1d.weight": weights["m.conv.weight"],
        "conv1d.bias": weights["m.conv.bias"],
        "A_log": weights["m.A_log"],
        "dt_bias": weights["m.dt_bias"],
        "D": weights["m.D"],
        "norm.weight": weights["m.output_norm.weight"],
        "out_proj.weight": weights["m.output.weight"],
    }

    def named(module: nn.Module) -> Results:
        found = {name: weight.grad for name, weight in module.named_parameters()}
        return {
            "m.input.weight": torch.cat(found["in_proj.weight"].split([inner, gate])[::-1]),
            "m.conv.weight": found["conv1d.weight"],
            "m.conv.bias": found["conv1d.bias"],
            "m.A_log": found["A_log"],
            "m.dt_bias": found["dt_bias"],
            "m.D": found["D"],
            "m.output_norm.weight": found["norm.weight"],
            "m.output.weight": found["out_proj.weight"],
        }

    peers = {}
    for chunk in CHUNKS:
        shape = TheirConfig(
            hidden_size=HIDDEN,
            num_heads=HEADS,
            head_dim=HEAD_CHANNELS,
            expand=inner // HIDDEN,
            state_size=state,
            n_groups=1,
            chunk_size=chunk,
            layer_norm_epsilon=1e-6,
        )
        module = Mamba2Mixer(shape, 0)
        module.load_state_dict(given)
        peers[f"Mamba-2, chunks of {chunk}"] = TheirLayer(module, ours, named)
    return ours, peers

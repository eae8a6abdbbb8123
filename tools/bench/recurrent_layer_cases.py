# SPDX-License-Identifier: Apache-2.0
"""Cases of recurrent layers, forward and backward, on a CPU: the sizes of their blocks and chunks
are chosen by these times.

2,048 tokens, 256 hidden features. There is no peer: without the CUDA libraries, transformers runs a
reference path that is several times slower.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba2 import Mamba2
from megatron.core.transformer import NormConfig
from tools.bench.cases import CPU, Case, register
from tools.bench.harness import Bench
from tools.bench.layer_steps import McoreLayer

TOKENS, HIDDEN = 2048, 256


@register("recurrent layers", CPU)
def layers(bench: Bench) -> Iterator[Case]:
    """Gated delta nets with K = V = 64, and Mamba-2 layers with one group of N = `state`."""
    mixers: dict[str, tuple[type[nn.Module], object]] = {}
    for heads in ((2, 4), (4, 4)):
        config = GatedDeltaNetConfig(
            num_key_heads=heads[0], num_value_heads=heads[1], key_channels=64, value_channels=64
        )
        mixers["gated delta net layer, {}/{} heads of 64".format(*heads)] = GatedDeltaNet, config
    for state in (64, 128):
        config = Mamba2Config(num_heads=8, head_channels=64, state_channels=state)
        mixers[f"Mamba-2 layer, N {state}"] = Mamba2, config
    norm = NormConfig(epsilon=1e-6)
    for name, (mixer, config) in mixers.items():

        def declare(build, mixer=mixer, config=config):
            return mixer("m", config=config, norm=norm, build=build)

        layer = McoreLayer(declare, (TOKENS, HIDDEN), dtype=bench.dtype)
        yield Case(name=f"{name}, {TOKENS} tokens, forward + backward", mcore=layer)

# SPDX-License-Identifier: Apache-2.0
"""Cases of recurrent layers, forward and backward, against transformers' torch path, on a CPU.

2,048 tokens, 256 hidden features, fp32. Both sides have the same weights and inputs; their outputs
and all gradients are compared first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba2 import Mamba2
from megatron.core.transformer import NormConfig
from tools.bench.cases import CPU, Case, register
from tools.bench.harness import Bench
from tools.bench.layer_steps import McoreLayer, PeerLayer, Results, check

TOKENS, HIDDEN = 2048, 256
#: Largest difference over largest value, in fp32. transformers' gradients of strong decays, and so
#: of A_log, are off by up to 4e-4: it takes differences of large sums. All others agree to 1e-5.
BOUND = 1e-3
MAMBA_HEADS, MAMBA_HEAD_CHANNELS = 8, 64
#: Chunk sizes of transformers' Mamba-2, whose memory grows with their square.
MAMBA_CHUNKS = (32, 64, 128, 256)


def layer_of(mixer: type[nn.Module], config: object) -> McoreLayer:
    """Return one of our mixers.

    Args:
        mixer: the class.
        config: its shape.
    """
    norm = NormConfig(epsilon=1e-6)
    return McoreLayer(
        lambda build: mixer("m", config=config, norm=norm, build=build), (TOKENS, HIDDEN)
    )


def delta(key_heads: int, value_heads: int) -> tuple[McoreLayer, dict[str, PeerLayer]]:
    """Make a gated delta net with K = V = 64, and the Qwen3-Next layer of transformers."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = GatedDeltaNetConfig(
        num_key_heads=key_heads, num_value_heads=value_heads, key_channels=64, value_channels=64
    )
    mcore = layer_of(GatedDeltaNet, config)
    module = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=HIDDEN,
            linear_num_key_heads=key_heads,
            linear_num_value_heads=value_heads,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
        0,
    )
    order = _DeltaRows(key_heads, value_heads // key_heads)
    module.load_state_dict(order.to_peer(mcore.weights()))

    def named(module: nn.Module) -> Results:
        return order.to_mcore({name: weight.grad for name, weight in module.named_parameters()})

    return mcore, {"Qwen3-Next": PeerLayer(module, mcore, named)}


class _DeltaRows:
    """How rows of weights lie in Qwen3-Next and in our fused ones, for K = V = 64."""

    def __init__(self, heads: int, shared: int) -> None:
        self.heads, self.section_sizes = heads, [64, 64, 64 * shared]
        # Where betas and alphas stand among the rows of a head.
        self.begin = sum(self.section_sizes)
        self.end = self.begin + 2 * shared

    def to_peer(self, results: Results) -> Results:
        """Return our weights by transformers' names."""
        fused = results["m.input.weight"].view(self.heads, -1, HIDDEN)
        qkvz = torch.cat([fused[:, : self.begin], fused[:, self.end :]], 1)
        by_head = (
            results["m.conv.weight"].unflatten(0, (self.heads, -1)).split(self.section_sizes, 1)
        )
        return {
            "in_proj_qkvz.weight": qkvz.flatten(0, 1),
            "in_proj_ba.weight": fused[:, self.begin : self.end].flatten(0, 1),
            "conv1d.weight": torch.cat([head_rows.flatten(0, 1) for head_rows in by_head]),
            "A_log": results["m.A_log"],
            "dt_bias": results["m.dt_bias"],
            "norm.weight": results["m.output_norm.weight"],
            "out_proj.weight": results["m.output.weight"],
        }

    def to_mcore(self, results: Results) -> Results:
        """Undo `theirs`."""
        qkvz = results["in_proj_qkvz.weight"].view(self.heads, -1, HIDDEN)
        ba = results["in_proj_ba.weight"].view(self.heads, -1, HIDDEN)
        by_part = results["conv1d.weight"].split([self.heads * size for size in self.section_sizes])
        by_head = [head_rows.unflatten(0, (self.heads, -1)) for head_rows in by_part]
        return {
            "m.input.weight": torch.cat([qkvz[:, : self.begin], ba, qkvz[:, self.begin :]], 1),
            "m.conv.weight": torch.cat(by_head, 1).flatten(0, 1),
            "m.A_log": results["A_log"],
            "m.dt_bias": results["dt_bias"],
            "m.output_norm.weight": results["norm.weight"],
            "m.output.weight": results["out_proj.weight"],
        }


def mamba(state: int) -> tuple[McoreLayer, dict[str, PeerLayer]]:
    """Make a Mamba-2 layer with one group of N = `state`, and the layers of transformers."""
    from transformers import Mamba2Config as TheirConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        num_heads=MAMBA_HEADS, head_channels=MAMBA_HEAD_CHANNELS, state_channels=state
    )
    mcore = layer_of(Mamba2, config)
    weights = mcore.weights()
    inner = config.inner_channels
    gate = weights["m.input.weight"].shape[0] - inner  # our gates come last, theirs first
    peer_weights = {
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
        gradients = {name: weight.grad for name, weight in module.named_parameters()}
        return {
            "m.input.weight": torch.cat(gradients["in_proj.weight"].split([inner, gate])[::-1]),
            "m.conv.weight": gradients["conv1d.weight"],
            "m.conv.bias": gradients["conv1d.bias"],
            "m.A_log": gradients["A_log"],
            "m.dt_bias": gradients["dt_bias"],
            "m.D": gradients["D"],
            "m.output_norm.weight": gradients["norm.weight"],
            "m.output.weight": gradients["out_proj.weight"],
        }

    peers = {}
    for chunk in MAMBA_CHUNKS:
        shape = TheirConfig(
            hidden_size=HIDDEN,
            num_heads=MAMBA_HEADS,
            head_dim=MAMBA_HEAD_CHANNELS,
            expand=inner // HIDDEN,
            state_size=state,
            n_groups=1,
            chunk_size=chunk,
            layer_norm_epsilon=1e-6,
        )
        module = Mamba2Mixer(shape, 0)
        module.load_state_dict(peer_weights)
        peers[f"Mamba-2, chunks of {chunk}"] = PeerLayer(module, mcore, named)
    return mcore, peers


def _case(name: str, mcore: McoreLayer, peers: dict[str, PeerLayer], *, least_ratio: float) -> Case:
    """Return the case of one layer."""
    for peer in peers.values():
        check(mcore, peer, BOUND)
    return Case(
        name=f"{name}, {TOKENS} tokens, forward + backward",
        mcore=mcore,
        peers=peers,
        targets=[f"{peer} >= {least_ratio}" for peer in peers],
    )


@register("recurrent layers", CPU)
def layers(bench: Bench) -> Iterator[Case]:
    """Gated delta nets and Mamba-2 layers, in fp32 alone."""
    if bench.dtype != torch.float32:
        return
    for heads in ((2, 4), (4, 4)):
        title = "{}/{} heads of 64".format(*heads)
        yield _case(f"gated delta net layer, {title}", *delta(*heads), least_ratio=2.5)
    for state in (64, 128):
        yield _case(f"Mamba-2 layer, N {state}", *mamba(state), least_ratio=2.0)

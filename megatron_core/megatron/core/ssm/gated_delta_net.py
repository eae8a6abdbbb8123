# SPDX-License-Identifier: Apache-2.0
"""GatedDeltaNet: the mixer of Yang et al. 2024 (arXiv 2412.06464) as Qwen3-Next has it.

Per key head: query, key, r values, r betas, r alphas, r gates, with r = Hv / Hk. Queries, keys and
values go through a causal convolution and SiLU, queries and keys are normalised to length 1. Per
value head, with state S [K, V]:

    S ← e^g S;  S ← S + k β (v − Sᵀ k)ᵀ;  o = Sᵀ q / √K,    g = −e^A_log softplus(alpha + dt_bias)

and out = RMSNorm(o) · SiLU(gate), one norm weight for all heads.
"""

from __future__ import annotations

import torch

from megatron.core.backend import LayerBuild
from megatron.core.context_parallel.all_to_all import RecurrenceOutput
from megatron.core.initialize import InitSpec
from megatron.core.ops.recurrence import (
    NORM_FIRST,
    OutputNorm,
    UnitLayout,
    delta_recurrence,
    gated_rms_norm,
)
from megatron.core.ops.recurrence.interface import ProjectionSlice, slice_of
from megatron.core.ssm.mixer import LinearRecurrentMixer, RecurrentCache, UnitShard
from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, linear_shape
from megatron.core.transformer.norm import NormConfig
from megatron.core.weight_sharding import WeightSharding


class GatedDeltaNet(LinearRecurrentMixer):
    """The gated delta net of one block; heads are sharded over tp.

    Args:
        name: prefix of its weights.
        config: its shape.
        norm: config of the output norm, for its epsilon.
        build: the backend, weight store and process groups.

    Raises:
        ValueError: heads that do not divide over the ranks.
    """

    def __init__(
        self,
        name: str,
        *,
        config: GatedDeltaNetConfig,
        norm: NormConfig,
        build: LayerBuild,
    ) -> None:
        group, context = build.region.group, build.context
        problems = config.problems(group.size, cp=context.group.size, mode=context.linear_mode)
        if problems:
            raise ValueError("; ".join(problems))
        ratio = config.num_value_heads // config.num_key_heads
        super().__init__(
            name,
            shape=linear_shape(config, group.size),
            unit=UnitLayout.delta(ratio, config.key_channels, config.value_channels),
            recurrence=delta_recurrence(),
            build=build,
        )
        self.config, self.epsilon = config, norm.epsilon
        self._declare(build)

    def _declare(self, build: LayerBuild) -> None:
        """Declare the weights."""
        name, config, heads = self.name, self.config, self.config.num_key_heads
        keys, values = heads * config.key_channels, config.num_value_heads * config.value_channels
        self.input = build.column_linear(
            f"{name}.input",
            [
                (f"{name}.query", keys, None),
                (f"{name}.key", keys, None),
                (f"{name}.value", values, None),
                (f"{name}.beta", config.num_value_heads, None),
                (f"{name}.alpha", config.num_value_heads, None),
                (f"{name}.gate", values, None),
            ],
            interleave=heads,
        )
        self.conv = self.declare_convolution(
            "weight",
            {"query": (keys, None), "key": (keys, None), "value": (values, None)},
            units=heads,
            width=config.conv_width,
        )
        a_log_init = InitSpec.log_of_uniform(1.0, 16.0)
        self.a_log = self.declare_per_head("A_log", config.num_value_heads, a_log_init)
        ones_init = InitSpec.constant(1.0)
        self.dt_bias = self.declare_per_head("dt_bias", config.num_value_heads, ones_init)
        # All heads share this weight, so each tp rank has a partial gradient.
        norm_sharding = WeightSharding.of(
            f"{name}.output_norm.weight",
            (config.value_channels,),
            gradient={"tp": "partial"},
            weight_decay=False,
        )
        self.norm_weight = build.store.declare(norm_sharding, ones_init)
        self.output = build.row_linear(f"{name}.output", values)

    def norm_and_gate(
        self, out: RecurrenceOutput, gate: torch.Tensor | ProjectionSlice
    ) -> torch.Tensor:
        """Return [s, b, H V], see `RecurrentMixer.norm_and_gate`."""
        gate, gradient = slice_of(gate)
        heads = out.split_head_shards(gate).unflatten(-1, (self.unit_layout.heads, -1))
        outputs = gated_rms_norm(
            out.rows,
            ProjectionSlice(heads, gradient),
            self.norm_weight.stored(),
            eps=self.epsilon,
            order=NORM_FIRST,
            row_index=out.order,
        )  # [s · b · parts, u/parts, r, V]
        return outputs.reshape(*gate.shape[:2], -1)

    def decode_tokens(
        self, units: torch.Tensor, gate: torch.Tensor, slots: torch.Tensor, cache: RecurrentCache
    ) -> torch.Tensor:
        """Return [b, H V], see `RecurrentMixer.decode_tokens`."""
        norm = OutputNorm(gate, self.norm_weight.get(), self.epsilon)
        return self.decode_recurrence(units, slots, cache, norm).flatten(1)

    def convolution(self, shard: UnitShard) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight [u, c, W] and no bias, for a shard of the units."""
        weight = self.conv.read_only().view(self.units, -1, self.config.conv_width)
        return shard.of(weight), None

# SPDX-License-Identifier: Apache-2.0
"""Mamba2: the mixer of Dao & Gu 2024 (arXiv 2405.21060).

Per group: the channels x of its heads, B, C, a step dt for each head, gates. x, B and C go through
a causal convolution and SiLU. Per head, with state S [N, P] and A = −e^A_log:

    S ← e^(dt A) S + dt B xᵀ;  y = Sᵀ C + D x,    dt = softplus(dt + dt_bias), clamped to its limits

and out = RMSNorm(y · SiLU(gate)), normalised in groups of channels, one weight a channel.

With fewer groups than tp ranks each B and C is replicated on the consecutive ranks whose heads use
it; the gradient plan sums their gradients. Headwise context parallelism replicates B and C in the
same way.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from megatron.core.backend import LayerBuild
from megatron.core.comm.conjugates import copy_to_group, reduce_from_group
from megatron.core.context_parallel.all_to_all import RecurrenceOutput
from megatron.core.initialize import InitSpec
from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.recurrence import (
    GATE_FIRST,
    OutputNorm,
    RecurrenceInputs,
    UnitLayout,
    add_skip,
    gated_rms_norm,
    state_space_recurrence,
)
from megatron.core.ops.recurrence.interface import ProjectionSlice, slice_of
from megatron.core.ssm.mixer import LinearRecurrentMixer, RecurrentCache, UnitShard
from megatron.core.ssm.mixer_config import Mamba2Config, linear_shape
from megatron.core.transformer.norm import NormConfig
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_sharding import Shard, WeightSharding

#: Initial steps dt are log-uniform between these.
INITIAL_DT = (1e-3, 0.1)


class Mamba2(LinearRecurrentMixer):
    """The Mamba-2 mixer of one block; heads are sharded over tp.

    Args:
        name: prefix of its weights.
        config: its shape.
        norm: config of the output norm, for its epsilon.
        build: the backend, weight store and process groups.

    Raises:
        ValueError: heads or groups that do not divide over the ranks.
    """

    def __init__(
        self, name: str, *, config: Mamba2Config, norm: NormConfig, build: LayerBuild
    ) -> None:
        group, context = build.region.group, build.context
        problems = config.problems(group.size, cp=context.group.size, mode=context.linear_mode)
        if problems:
            raise ValueError("; ".join(problems))
        groups, heads = config.num_groups, config.num_heads
        shape = linear_shape(config, group.size)
        heads_per_unit = heads // group.size // shape.units  # on this rank
        sizes = (config.state_channels, config.head_channels)
        super().__init__(
            name,
            shape=shape,
            unit=UnitLayout.state_space(heads_per_unit, *sizes, config.dt_limit),
            recurrence=state_space_recurrence(),
            build=build,
        )
        self.config, self.epsilon = config, norm.epsilon
        inner, shared = config.inner_channels, groups * config.state_channels
        num_blocks = min(groups, group.size)
        self.input = build.column_linear(
            f"{name}.input",
            [
                (f"{name}.x", inner, None),
                (f"{name}.B", shared, num_blocks),
                (f"{name}.C", shared, num_blocks),
                (f"{name}.dt", heads, None),
                (f"{name}.gate", inner, None),
            ],
            bias=config.bias,
            interleave=groups,
        )
        segment_shapes = {"x": (inner, None), "B": (shared, num_blocks), "C": (shared, num_blocks)}
        depthwise = {"units": groups, "width": config.conv_width}
        self.conv = self.declare_convolution("weight", segment_shapes, **depthwise)
        if config.conv_bias:
            self.conv_bias = self.declare_convolution("bias", segment_shapes, **depthwise)
        a_log_init = InitSpec.log_of_uniform(1.0, 16.0)
        self.a_log = self.declare_per_head("A_log", heads, a_log_init)
        self.dt_bias = self.declare_per_head("dt_bias", heads, InitSpec.step_bias(*INITIAL_DT))
        ones_init = InitSpec.constant(1.0)
        self.skip = self.declare_per_head("D", heads, ones_init)
        self.norm_weight: WeightHandle | None = None
        if config.norm:
            norm_sharding = WeightSharding.of(
                f"{name}.output_norm.weight", (inner,), Shard(axis="tp", dim=0), weight_decay=False
            )
            self.norm_weight = build.store.declare(norm_sharding, ones_init)
        if config.multipliers is not None:
            gate, *factors = config.multipliers
            values, state = heads_per_unit * config.head_channels, config.state_channels
            counts = [values, state, state, heads_per_unit, values]
            pairs = zip((*factors, gate), counts, strict=True)
            columns = [factor for factor, count in pairs for _ in range(count)]
            self.column_factors = torch.tensor(columns, device=build.store.device)
        self.output = build.row_linear(f"{name}.output", inner, bias=config.bias)

    def norm_and_gate(
        self, out: RecurrenceOutput, gate: torch.Tensor | ProjectionSlice
    ) -> torch.Tensor:
        """Return [s, b, H P], see `RecurrentMixer.norm_and_gate`."""
        gate, gradient = slice_of(gate)
        if self.norm_weight is None:
            outputs = out.joined().flatten(1) * functional.silu(gate.flatten(2).flatten(0, 1))
            return outputs.reshape(*gate.shape[:2], -1)
        size = self._group_size
        if size is None or out.head_shards > 1 or gate.shape[-1] % size:
            flat_gate = gate.flatten(2).flatten(0, 1)
            outputs = self._apply_norm(out.joined().flatten(1), flat_gate)
        else:
            weight = self.norm_weight.stored()
            outputs = gated_rms_norm(
                out.rows.flatten(2),
                ProjectionSlice(out.split_head_shards(gate), gradient),
                weight._replace(value=weight.value.view(self.units, -1)),
                eps=self.epsilon,
                order=GATE_FIRST,
                group_size=size,
                row_index=out.order,
            )  # [s · b, u, hP]
        return outputs.reshape(*gate.shape[:2], -1)

    def decode_tokens(
        self, units: torch.Tensor, gate: torch.Tensor, slots: torch.Tensor, cache: RecurrentCache
    ) -> torch.Tensor:
        """Return [b, H P], see `RecurrentMixer.decode_tokens`."""
        if (size := self._group_size) is None or self.norm_weight is None:
            absent = slots < 0
            gate = gate.masked_fill(absent[:, None, None], 0)  # padding rows may be NaN
            return self._apply_norm(
                self.decode_recurrence(units, slots, cache, None).flatten(1), gate.flatten(1)
            )
        norm = OutputNorm(gate, self.norm_weight.get(), self.epsilon, GATE_FIRST, size)
        return self.decode_recurrence(units, slots, cache, norm).flatten(1)

    @property
    def _group_size(self) -> int | None:
        """Channels of a norm group; None if a group spans several ranks."""
        groups, ranks = self.config.normed_groups, self._tp.size
        return self.config.inner_channels // groups if groups >= ranks else None

    def _apply_norm(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm(out · SiLU(gate)) [..., d] of out and gate [..., d]."""
        if self.norm_weight is None:
            return out * functional.silu(gate)
        weight = self.norm_weight.read_only(torch.float32)
        if (size := self._group_size) is not None:
            return gated_rms_norm(
                out, gate, weight, eps=self.epsilon, order=GATE_FIRST, group_size=size
            )
        # A norm group spans several tp ranks: all-reduce the sums of squares, one slot per group.
        dtype_acc = accumulation_dtype(out.dtype)
        gated_out = out.to(dtype_acc) * functional.silu(gate.to(dtype_acc))
        groups, ranks = self.config.normed_groups, self._tp.size
        local_group = self._tp.rank * groups // ranks
        squares = gated_out.square().sum(-1, keepdim=True)  # [s, b, 1]
        squares = functional.pad(squares, (local_group, groups - 1 - local_group))
        squares = copy_to_group(reduce_from_group(squares, self._tp), self._tp)  # [s, b, groups]
        mean = squares[..., local_group : local_group + 1] * (groups / self.config.inner_channels)
        return (gated_out * (mean + self.epsilon).rsqrt() * weight).to(out.dtype)

    def convolution(self, shard: UnitShard) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight [u, c, W] and bias [u, c], for a shard of the units."""
        weight = self.conv.read_only().view(self.units, -1, self.config.conv_width)
        bias = None if self.conv_bias is None else self.conv_bias.read_only().view(self.units, -1)
        if self.units % shard.count:
            copies = shard.count // self.units
            weight = self.replicate_shared(weight.movedim(-1, 0), copies).movedim(0, -1)
            bias = None if bias is None else self.replicate_shared(bias, copies)
        return shard.of(weight), None if bias is None else shard.of(bias)

    def apply_skip(
        self, out: torch.Tensor, inputs: RecurrenceInputs, shard: UnitShard
    ) -> torch.Tensor:
        """Return y [t, H, P] = out + D x."""
        assert self.skip is not None
        return add_skip(out, inputs.value, shard.of(self.skip.read_only(torch.float32)))

    def replicate_shared(self, units: torch.Tensor, copies: int) -> torch.Tensor:
        """Split units [..., u, w] by heads, [..., u · copies, w'], with copies of B and C.

        Heads and steps are split, B and C are repeated, for consecutive ranks.
        """
        config = self.config
        values, state = self.unit_layout.heads * config.head_channels, config.state_channels
        num_steps = units.shape[-1] - values - 2 * state  # one step per head, or none
        sizes = [values, 2 * state, num_steps]
        x, shared, dt = units.split(sizes, dim=-1)
        shards = [columns.unflatten(-1, (copies, -1)) for columns in (x, dt) if columns.shape[-1]]
        shards.insert(1, shared.unsqueeze(-2).expand(*shared.shape[:-1], copies, 2 * state))
        return torch.cat(shards, dim=-1).flatten(-3, -2)

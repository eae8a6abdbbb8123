# SPDX-License-Identifier: Apache-2.0
"""The configs of recurrent mixers, and the choice of their context-parallel mode. Pure arithmetic.

The mode is chosen by communication volume. Per layer and rank, forward and backward, with t = s/cp
local tokens of b rows, these bytes are sent:

    headwise  (cp-1)/cp of the input features and of the outputs, and their gradients
    segments  to each of cp - 1 ranks a state and its transition, fp32, for each summary,
              and a state again backward; W - 1 tokens for each summary to one rank, and back

A rank sends a summary for each run of its tokens that another rank continues: 2 per row in zigzag
order, 1 in contiguous order, for any number of documents, times the number of separately split
sequences. So the volume of headwise grows with the tokens, the volume of segments with the
sequences. If a document ends within a run, the real volume is smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.core.context_parallel.sequence_sharding import ZIGZAG

if TYPE_CHECKING:
    from megatron.core.context_parallel import SequenceLayout

HEADWISE, SEGMENTS, AUTO = "headwise", "segments", "auto"

#: Context-parallel modes of a recurrence.
LINEAR_MODES = (HEADWISE, SEGMENTS, AUTO)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Shape of a gated delta net (Yang et al. 2024, arXiv 2412.06464).

    Args:
        num_key_heads: heads Hk of queries and keys.
        num_value_heads: heads Hv of values, gates and states; Hv / Hk share a key head.
        key_channels: features K of a query or key head.
        value_channels: features V of a value head.
        conv_width: taps W of the causal convolution.
    """

    num_key_heads: int
    num_value_heads: int
    key_channels: int
    value_channels: int
    conv_width: int = 4

    def problems(self, tp: int = 1, *, cp: int = 1, mode: str = AUTO) -> list[str]:
        """List the problems of this shape on tp and cp ranks.

        Args:
            tp, cp: tensor and context parallel sizes.
            mode: one of `LINEAR_MODES`.
        """
        sizes = {
            "linear-num-key-heads": self.num_key_heads,
            "linear-num-value-heads": self.num_value_heads,
            "linear-key-head-dim": self.key_channels,
            "linear-value-head-dim": self.value_channels,
            "linear-conv-kernel-dim": self.conv_width,
        }
        problems = [f"{name} {size}: use 1 or more" for name, size in sizes.items() if size < 1]
        if problems:
            return problems
        if self.num_value_heads % self.num_key_heads:
            problems.append(
                f"linear-num-key-heads {self.num_key_heads} must divide linear-num-value-heads "
                f"{self.num_value_heads}"
            )
        if self.num_key_heads % tp:
            problems.append(
                f"linear-num-key-heads {self.num_key_heads} must be divisible by "
                f"tensor-model-parallel-size {tp}"
            )
        return problems or mode_problems(mode, self.shard_problem(tp, cp))

    def shard_problem(self, tp: int, cp: int) -> str | None:
        """Return why a tp rank's heads cannot be sharded over cp ranks, or None."""
        heads = self.num_key_heads // tp
        if heads % cp:
            return f"{heads} key heads of a rank do not divide over {cp} context parallel ranks"
        return None


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Shape of a Mamba-2 mixer (Dao & Gu 2024, arXiv 2405.21060).

    Args:
        num_heads: heads H, of P channels each.
        head_channels: P.
        state_channels: N, of a head's state [N, P].
        num_groups: G; the H / G heads of a group share B and C.
        conv_width: taps W of the causal convolution.
        conv_bias, bias: whether the convolution, and the projections, have biases.
        norm_groups: number of channel groups of the norm after the gate; None is G.
        dt_limit: [minimum, maximum] of the step dt.
        norm: whether the gated output is normalised.
        multipliers: factors on the projected gate, x, B, C and dt; None is 1 for all.
    """

    num_heads: int
    head_channels: int
    state_channels: int
    num_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm_groups: int | None = None
    dt_limit: tuple[float, float] = (0.0, math.inf)
    norm: bool = True
    multipliers: tuple[float, ...] | None = None

    @property
    def inner_channels(self) -> int:
        """H · P."""
        return self.num_heads * self.head_channels

    @property
    def normed_groups(self) -> int:
        """Number of channel groups of the norm."""
        return self.num_groups if self.norm_groups is None else self.norm_groups

    def problems(self, tp: int = 1, *, cp: int = 1, mode: str = AUTO) -> list[str]:
        """List the problems of this shape on tp and cp ranks.

        Args:
            tp, cp: tensor and context parallel sizes.
            mode: one of `LINEAR_MODES`.
        """
        sizes = {
            "mamba-num-heads": self.num_heads,
            "mamba-head-dim": self.head_channels,
            "mamba-state-dim": self.state_channels,
            "mamba-num-groups": self.num_groups,
            "mamba-conv-kernel-dim": self.conv_width,
            "mamba-norm-groups": self.normed_groups,
        }
        problems = [f"{name} {size}: use 1 or more" for name, size in sizes.items() if size < 1]
        low, high = self.dt_limit
        if not 0.0 <= low < high:
            problems.append(f"mamba-dt-limit {low} {high}: use 0 <= least < most")
        factors = self.multipliers or (1.0,) * 5
        if len(factors) != 5 or not all(0.0 < factor < math.inf for factor in factors):
            problems.append(
                f"mamba-projection-multipliers {' '.join(map(str, factors))}: give five positive "
                "numbers, for the gate, x, B, C and dt"
            )
        if problems:
            return problems
        heads, groups = self.num_heads, self.num_groups
        if heads % groups:
            problems.append(f"mamba-num-groups {groups} must divide mamba-num-heads {heads}")
        if heads % self.normed_groups:
            problems.append(f"mamba-norm-groups {self.normed_groups} must divide the {heads} heads")
        if heads % tp:
            problems.append(
                f"mamba-num-heads {heads} must be divisible by tensor-model-parallel-size {tp}"
            )
        for name, count in (("groups", groups), ("norm-groups", self.normed_groups)):
            if count % tp and tp % count:
                problems.append(
                    f"mamba-num-{name} {count} must divide tensor-model-parallel-size {tp} or be a "
                    "multiple of it"
                )
        return problems or mode_problems(mode, self.shard_problem(tp, cp))

    def shard_problem(self, tp: int, cp: int) -> str | None:
        """Return why a tp rank's heads cannot be sharded over cp ranks, or None.

        A group can be split by heads; each rank then has a copy of its B and C.
        """
        groups, heads = max(1, self.num_groups // tp), self.num_heads // tp
        if heads % cp:
            return f"{heads} heads of a rank do not divide over {cp} context parallel ranks"
        if groups % cp and (cp % groups or heads // groups % (cp // groups)):
            return f"{groups} groups of a rank do not divide over {cp} context parallel ranks"
        return None


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """Shape of a gated short convolution over the hidden size, as LFM2 has it.

    Args:
        conv_width: taps W of the causal convolution.
        bias: whether the convolution and both projections have biases.
    """

    conv_width: int = 3
    bias: bool = False

    def problems(self, tp: int = 1, *, hidden_size: int) -> list[str]:
        """List the problems of this shape for h channels on tp ranks."""
        if self.conv_width < 1:
            return [f"short-conv-kernel-dim {self.conv_width}: use 1 or more"]
        if hidden_size % tp:
            return [
                f"hidden-size {hidden_size}: the channels of short convolutions must be divisible "
                f"by tensor-model-parallel-size {tp}"
            ]
        return []


def mode_problems(mode: str, shard_problem: str | None) -> list[str]:
    """List the problems of a context-parallel mode, with the fix.

    Args:
        mode: one of `LINEAR_MODES`.
        shard_problem: why heads cannot be sharded over the ranks.
    """
    if mode not in LINEAR_MODES:
        return [f"linear-cp-mode {mode!r}: use {', '.join(LINEAR_MODES)}"]
    if mode == HEADWISE and shard_problem is not None:
        return [f"linear-cp-mode headwise: {shard_problem}: use segments"]
    return []


_STATE_BYTES = 4  # states travel in fp32


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """Sizes of one recurrent layer on one rank, and of its tokens.

    Args:
        units: number of units (key heads, or groups) on this rank; headwise does not split a unit.
        features_in: input features of the convolution and the recurrence per token, of all units.
        features_out: output features per token.
        heads: number of heads with a state.
        key_channels, value_channels: K, V of a state.
        transition: K if M is a matrix, 1 if it is a scalar.
        conv_channels: channels of the convolution.
        conv_width: W.
        shared_features: number of `features_in` that the heads of a unit share. If there are fewer
            units than ranks, headwise splits units by heads and replicates the shared features. 0:
            units cannot be split.
        tokens: local tokens of a row, s/cp, including padding.
        rows: b.
        sequences: number of sequences of a row that are split separately.
        order: "zigzag" or "contiguous".
        element_bytes: bytes of an activation element.
    """

    units: int
    features_in: int
    features_out: int
    heads: int
    key_channels: int
    value_channels: int
    transition: int
    conv_channels: int
    conv_width: int
    shared_features: int = 0
    tokens: int = 0
    rows: int = 1
    sequences: int = 1
    order: str = ZIGZAG
    element_bytes: int = 2

    def with_tokens(self, layout: SequenceLayout, rows: int, *, element_bytes: int) -> LinearShape:
        """Return the shape with the tokens of a layout.

        Args:
            layout: the layout of a microbatch, split over ranks.
            rows: b.
            element_bytes: bytes of an activation element.

        Raises:
            ValueError: a layout without a split.
        """
        cut = layout.sharding
        if cut is None:
            raise ValueError(
                "this layout is not sharded over ranks: make it with SequenceLayout.make"
            )
        return replace(
            self,
            tokens=cut.local_length,
            rows=rows,
            sequences=len(set(cut.bounds)) - 1,  # empty ones are none
            order=cut.order,
            element_bytes=element_bytes,
        )

    def copies(self, cp: int) -> int:
        """Return the number of ranks that share a unit in headwise mode."""
        return 1 if self.units % cp == 0 else cp // self.units

    def summaries(self, cp: int) -> int:
        """Return the maximum number of summaries that a rank sends."""
        runs = 2 if self.order == ZIGZAG and cp > 2 else 1  # two zigzag ranks: the runs join
        return self.rows * self.sequences * runs

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one summary."""
        return self.heads * self.key_channels * self.value_channels * _STATE_BYTES

    @property
    def transition_bytes(self) -> int:
        """Bytes of the transitions M of one summary."""
        return self.heads * self.transition**2 * _STATE_BYTES


def linear_shape(config: GatedDeltaNetConfig | Mamba2Config, tp: int) -> LinearShape:
    """Return the sizes of a recurrent block on each of `tp` ranks, without tokens."""
    if isinstance(config, GatedDeltaNetConfig):
        heads = config.num_value_heads // tp
        keys = 2 * config.num_key_heads // tp * config.key_channels
        values = heads * config.value_channels
        return LinearShape(
            units=config.num_key_heads // tp,
            features_in=keys + values + 2 * heads,
            features_out=values,
            heads=heads,
            key_channels=config.key_channels,
            value_channels=config.value_channels,
            transition=config.key_channels,
            conv_channels=keys + values,
            conv_width=config.conv_width,
        )
    heads, units = config.num_heads // tp, max(1, config.num_groups // tp)
    values, shared = heads * config.head_channels, units * 2 * config.state_channels
    return LinearShape(
        units=units,
        features_in=values + shared + heads,
        features_out=values,
        heads=heads,
        key_channels=config.state_channels,
        value_channels=config.head_channels,
        transition=1,
        conv_channels=values + shared,
        conv_width=config.conv_width,
        shared_features=shared,
    )


@dataclass(frozen=True)
class LinearModeChoice:
    """A mode and the reason for it.

    Args:
        mode: "headwise" or "segments".
        why: one line.
    """

    mode: str
    why: str


def head_problem(shape: LinearShape, cp: int) -> str | None:
    """Return why heads cannot be sharded over cp ranks, with the fix, or None."""
    if shape.units % cp == 0:
        return None
    if shape.shared_features and cp % shape.units == 0 and shape.heads % cp == 0:
        return None
    return (
        f"{shape.units} units of {shape.heads} heads do not divide over {cp} context parallel "
        "ranks: use segments"
    )


def sent_bytes(mode: str, shape: LinearShape, cp: int) -> int:
    """Return the bytes that leave a rank in forward and backward of one layer.

    Raises:
        ValueError: an unknown mode.
    """
    if cp == 1:
        return 0
    if mode == HEADWISE:
        shared = shape.shared_features * (shape.copies(cp) - 1)
        features = shape.features_in + shared + shape.features_out
        tokens = shape.tokens * shape.rows
        return 2 * tokens * features * shape.element_bytes * (cp - 1) // cp
    if mode == SEGMENTS:
        # Two ranks transfer a document's state once: the first rank starts from zero, without M.
        is_single_transfer = cp == 2 and shape.order != ZIGZAG
        summary = 2 * shape.state_bytes + (0 if is_single_transfer else shape.transition_bytes)
        halo = 2 * (shape.conv_width - 1) * shape.conv_channels * shape.element_bytes
        return shape.summaries(cp) * ((cp - 1) * summary + halo)
    raise ValueError(f"linear-cp-mode {mode!r}: use {', '.join(LINEAR_MODES)}")


def choose_mode(mode: str, shape: LinearShape, cp: int) -> LinearModeChoice:
    """Return the requested mode; for "auto" the mode with the least volume.

    Raises:
        ValueError: an unknown mode, or heads that do not divide for headwise.
    """
    reason = head_problem(shape, cp)
    if mode != AUTO:
        sent_bytes(mode, shape, cp)
        if mode == HEADWISE and reason is not None:
            raise ValueError(f"linear-cp-mode headwise: {reason}")
        return LinearModeChoice(mode, f"{mode} was requested")
    modes = [name for name in (HEADWISE, SEGMENTS) if name != HEADWISE or reason is None]
    volumes = {name: sent_bytes(name, shape, cp) for name in modes}
    best = min(modes, key=lambda name: volumes[name])  # headwise if both send as much
    listing = ", ".join(
        f"{m} {volumes[m] / 1e6:,.2f} MB" for m in sorted(modes, key=lambda m: volumes[m])
    )
    why = f"fewest bytes sent per rank and layer: {listing}"
    return LinearModeChoice(best, why if reason is None else f"{why}; not headwise: {reason}")


def explain(mode: str, shape: LinearShape, cp: int) -> str:
    """Return one line with the mode and the reason for it."""
    choice = choose_mode(mode, shape, cp)
    return f"recurrences over context parallel {cp} by {choice.mode}: {choice.why}"

# SPDX-License-Identifier: Apache-2.0
"""Choice of the context-parallel mode of a recurrence by communication volume. Pure arithmetic.

Volume per layer and rank, forward and backward, with t = s/cp local tokens of b rows:

    headwise  (cp-1)/cp of the input features and of the outputs, and their gradients
    segments  to each of cp - 1 ranks a state and its transition, fp32, for each summary,
              and a state again backward; W - 1 tokens for each summary to one rank, and back

A rank sends a summary for each run of its tokens that another rank continues: 2 per row in zigzag
order, 1 in contiguous order, for any number of documents, times the number of separately split
sequences. So the volume of headwise grows with the tokens, the volume of segments with the
sequences. If a document ends within a run, the real volume is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.sequence_sharding import ZIGZAG
from megatron.core.ssm.mixer_config import (
    AUTO,
    HEADWISE,
    LINEAR_MODES,
    SEGMENTS,
    GatedDeltaNetConfig,
    Mamba2Config,
)

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

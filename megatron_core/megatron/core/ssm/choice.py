# SPDX-License-Identifier: Apache-2.0
"""How a recurrence gets the tokens of other ranks, chosen by communication volume. Pure arithmetic.

Per layer and rank, forward and backward, with t = s/cp local tokens of b rows:

    headwise  (cp-1)/cp of the input features and of the outputs, and their gradients
    segments  to each of cp - 1 ranks a state and its transition, fp32, for each summary,
              and a state again backward; W - 1 tokens for each summary to one rank, and back

A rank sends a summary for each of its runs that another rank continues: 2 of a row in zigzag order,
1 of a contiguous one, however many documents it holds; as many again for each sequence that is
split separately. So the volume of headwise grows with the tokens, that of segments with the
sequences. Where a document ends within a run, less is sent than is counted here.
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
    """One recurrent layer of one rank, and its tokens.

    Args:
        units: of heads that headwise keeps together: key heads, or groups; of this rank.
        features_in: of a token that go into the convolution and the recurrence, of all units.
        features_out: of a token that come out.
        heads: that have a state.
        key_channels, value_channels: K, V of a state.
        transition: K where a state is multiplied by a matrix, 1 where by a number.
        conv_channels: that are convolved.
        conv_width: W.
        shared_features: of `features_in`, those that several heads of a unit share: where there are
            fewer units than ranks, heads are sharded, and of these every rank gets a copy. 0 is of
            units that cannot be sharded.
        tokens: local ones of a row, s/cp, padding included.
        rows: b.
        sequences: of a row that are split separately.
        order: "zigzag" or "contiguous".
        element_bytes: of an activation.
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
            layout: of a microbatch, split over ranks.
            rows: b.
            element_bytes: of an activation.

        Raises:
            ValueError: a layout without a split.
        """
        cut = layout.sharding
        if cut is None:
            raise ValueError("this layout is not cut over ranks: make it by SequenceLayout.make")
        return replace(
            self,
            tokens=cut.local_length,
            rows=rows,
            sequences=len(set(cut.bounds)) - 1,  # empty ones are none
            order=cut.order,
            element_bytes=element_bytes,
        )

    def copies(self, cp: int) -> int:
        """Return how many ranks share a unit under headwise."""
        return 1 if self.units % cp == 0 else cp // self.units

    def summaries(self, cp: int) -> int:
        """Return how many summaries the rank that sends most of them does."""
        runs = 2 if self.order == ZIGZAG and cp > 2 else 1  # of two ranks, runs meet in the middle
        return self.rows * self.sequences * runs

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one summary."""
        return self.heads * self.key_channels * self.value_channels * _STATE_BYTES

    @property
    def transition_bytes(self) -> int:
        """Bytes of what the states of one summary are multiplied by."""
        return self.heads * self.transition**2 * _STATE_BYTES


def linear_shape(config: GatedDeltaNetConfig | Mamba2Config, tp: int) -> LinearShape:
    """Return what decides how much a recurrent block sends, without its tokens, on each of so many
    tensor parallel ranks."""
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
    """A mode, and why.

    Args:
        mode: "headwise" or "segments".
        why: one line.
    """

    mode: str
    why: str


def head_problem(shape: LinearShape, cp: int) -> str | None:
    """Return why heads cannot be sharded over cp ranks, with the fix; None if they can."""
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
        # A document on two ranks is handed over once: nothing is multiplied.
        once = cp == 2 and shape.order != ZIGZAG
        summary = 2 * shape.state_bytes + (0 if once else shape.transition_bytes)
        halo = 2 * (shape.conv_width - 1) * shape.conv_channels * shape.element_bytes
        return shape.summaries(cp) * ((cp - 1) * summary + halo)
    raise ValueError(f"linear-cp-mode {mode!r}: use {', '.join(LINEAR_MODES)}")


def choose_mode(mode: str, shape: LinearShape, cp: int) -> LinearModeChoice:
    """Return the mode that is asked for, or with "auto" the one that sends least.

    Raises:
        ValueError: an unknown mode, or heads that do not divide for headwise.
    """
    reason = head_problem(shape, cp)
    if mode != AUTO:
        sent_bytes(mode, shape, cp)
        if mode == HEADWISE and reason is not None:
            raise ValueError(f"linear-cp-mode headwise: {reason}")
        return LinearModeChoice(mode, f"{mode} was asked for")
    fitting = [one for one in (HEADWISE, SEGMENTS) if one != HEADWISE or reason is None]
    sent = {one: sent_bytes(one, shape, cp) for one in fitting}
    best = min(fitting, key=lambda one: sent[one])  # headwise, where both send as much
    shown = ", ".join(f"{one} {sent[one] / 1e6:,.2f} MB" for one in sorted(fitting, key=sent.get))
    why = f"least of what leaves a rank per layer: {shown}"
    return LinearModeChoice(best, why if reason is None else f"{why}; not headwise: {reason}")


def explain(mode: str, shape: LinearShape, cp: int) -> str:
    """Say in one line which mode is used and why."""
    choice = choose_mode(mode, shape, cp)
    return f"recurrences over context parallel {cp} by {choice.mode}: {choice.why}"

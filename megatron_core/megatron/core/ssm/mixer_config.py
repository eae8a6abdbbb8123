# SPDX-License-Identifier: Apache-2.0
"""The configs of recurrent mixers: their shapes, without ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

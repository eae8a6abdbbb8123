# SPDX-License-Identifier: Apache-2.0
"""MoEConfig and RouterConfig: configuration of a mixture of experts, independent of ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.transformer.mlp import MLPConfig, activation_problems, activation_settings

SCORES = ("softmax", "sigmoid")
BALANCES = ("none", "aux_loss", "seq_aux_loss")
DROP_POLICIES = ("probs", "position")
DISPATCHERS = ("auto", "allgather", "alltoall")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Routing of tokens to experts, computed in fp32.

    Args:
        topk: experts of a token, k.
        score_function: "softmax" over all experts (Shazeer et al. 2017) or "sigmoid" of each
            (DeepSeek-AI 2024, section 2.1.2).
        normalize: divide the scores of the chosen experts by their sum. With softmax this equals
            the softmax over the chosen logits.
        norm_min: lower bound of that sum; 0 for none.
        scaling_factor: factor on the chosen scores, after normalization.
        num_groups, group_topk: choose only within the best `group_topk` of `num_groups` groups of
            experts (DeepSeek-AI 2024, section 2.1.2); both None disables the limit.
        group_candidates: a group's score is the sum of this many of its best expert scores.
        expert_bias: add a bias to each expert's score for the choice of experts, but not for the
            weights (Wang et al. 2024, arXiv 2408.15664).
        bias_update_rate: number added in a step to the bias of an expert with fewer tokens than the
            mean, and subtracted from the bias of an expert with more.
        balance: "aux_loss" balances the load of the experts over the tokens of a microbatch (Fedus
            et al. 2021, equation 4), "seq_aux_loss" over the tokens of each sequence. Both count
            the tokens of all cp and tp ranks.
        aux_loss_coeff: coefficient of the auxiliary loss; 0 disables it.
        z_loss_coeff: coefficient of the mean squared log-sum-exp of the logits (Zoph et al. 2022,
            equation 5), over the same tokens as "aux_loss".
        bias: add a learned bias to the logits.
        jitter: in training, multiply the router's input by uniform numbers in
            [1 - jitter, 1 + jitter], a function of sample and position.
    """

    topk: int = 2
    score_function: str = "softmax"
    normalize: bool = True
    norm_min: float = 0.0
    scaling_factor: float = 1.0
    num_groups: int | None = None
    group_topk: int | None = None
    group_candidates: int = 2
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    balance: str = "none"
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    jitter: float = 0.0
    bias: bool = False

    def problems(self, num_experts: int) -> list[str]:
        """Return the problems of this config with a number of experts."""
        problems = []
        if not 1 <= self.topk <= num_experts:
            problems.append(
                f"moe-router-topk {self.topk} must be in 1 … {num_experts}, the number of experts"
            )
        for name, value, choices in (
            ("moe-router-score-function", self.score_function, SCORES),
            ("moe-router-load-balancing-type", self.balance, BALANCES),
        ):
            if value not in choices:
                problems.append(f"{name} {value!r}: use one of {', '.join(choices)}")
        if min(self.aux_loss_coeff, self.z_loss_coeff, self.bias_update_rate) < 0:
            problems.append("coefficients of auxiliary losses and rates must not be negative")
        if not 0.0 <= self.norm_min < math.inf:
            problems.append(f"moe-norm-min {self.norm_min} must be 0 or more")
        if self.norm_min and not self.normalize:
            problems.append("moe-norm-min has no effect with moe-router-pre-softmax: drop one")
        if not 0.0 <= self.jitter < 1.0:
            problems.append(f"moe-input-jitter-eps {self.jitter} must be in [0, 1)")
        return problems + self._group_problems(num_experts)

    def _group_problems(self, num_experts: int) -> list[str]:
        groups, group_topk = self.num_groups, self.group_topk
        if (groups is None) != (group_topk is None):
            return [
                ("moe-router-num-groups and moe-router-group-topk require each other: give both")
            ]
        if groups is None or group_topk is None:
            return []
        if groups < 1 or num_experts % groups:
            return [f"moe-router-num-groups {groups} must divide the {num_experts} experts"]
        group_size = num_experts // groups
        if not 1 <= group_topk <= groups or group_topk * group_size < self.topk:
            return [
                f"moe-router-group-topk {group_topk} of {groups} groups of {group_size} experts"
                f" must hold the {self.topk} experts of a token"
            ]
        if not 1 <= self.group_candidates <= group_size:
            return [f"{self.group_candidates} candidates of a group of {group_size} experts"]
        return []


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shape of a mixture of experts.

    Args:
        num_experts: E.
        ffn_hidden_size: inner features f of each expert.
        router: routing of tokens to experts.
        gated, activation, clamp, linear_offset: as in `MLPConfig`, for each expert and the shared
            expert.
        bias: whether the projections of the experts have biases; the shared expert has none.
        capacity_factor: an expert processes at most ceil(factor · tokens · k / E) of a rank's
            tokens in a microbatch and drops all others; None drops none.
        drop_policy: an expert keeps the tokens of the highest weight ("probs") or the first tokens
            ("position").
        shared_ffn_hidden_size: inner features of the shared expert, an MLP for every token; None
            disables it.
        shared_gate: multiply the shared expert's output by the sigmoid of a learned linear function
            of the token.
    """

    num_experts: int
    ffn_hidden_size: int
    router: RouterConfig = field(default_factory=RouterConfig)
    gated: bool = True
    activation: str = "silu"
    capacity_factor: float | None = None
    drop_policy: str = "probs"
    shared_ffn_hidden_size: int | None = None
    shared_gate: bool = False
    bias: bool = False
    clamp: float | None = None
    linear_offset: float = 0.0

    def problems(self, *, tp: int = 1, etp: int = 1, ep: int = 1) -> list[str]:
        """Return the problems of this config on a number of ranks.

        Args:
            tp: ranks that shard the weights of the shared expert.
            etp, ep: ranks that shard each expert's weights, and ranks that shard the experts.
        """
        problems = []
        if self.num_experts < 1 or self.num_experts % ep:
            problems.append(
                f"num-experts {self.num_experts} must be a positive multiple of "
                f"expert-model-parallel-size {ep}"
            )
        if self.ffn_hidden_size < 1 or self.ffn_hidden_size % etp:
            problems.append(
                f"moe-ffn-hidden-size {self.ffn_hidden_size} must be a positive multiple of "
                f"expert-tensor-parallel-size {etp}"
            )
        problems += activation_problems(self)
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            problems.append(f"moe-expert-capacity-factor {self.capacity_factor} must be positive")
        if self.drop_policy not in DROP_POLICIES:
            problems.append(
                f"moe-token-drop-policy {self.drop_policy!r}: use {' or '.join(DROP_POLICIES)}"
            )
        if self.shared is not None:
            problems += [f"shared expert: {problem}" for problem in self.shared.problems(tp)]
        elif self.shared_gate:
            problems.append("a shared expert gate needs a shared expert: give its size")
        return problems + self.router.problems(self.num_experts)

    @property
    def shared(self) -> MLPConfig | None:
        """Config of the shared expert, or None."""
        if self.shared_ffn_hidden_size is None:
            return None
        return MLPConfig(ffn_hidden_size=self.shared_ffn_hidden_size, **activation_settings(self))

    def to_json(self) -> dict[str, Any]:
        """Return the config as plain JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> MoEConfig:
        """Rebuild a config from `to_json`.

        Raises TypeError for an unknown or missing field, KeyError without "router".
        """
        return MoEConfig(**{**data, "router": RouterConfig(**data["router"])})

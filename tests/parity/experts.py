# SPDX-License-Identifier: Apache-2.0
"""The experts of a parity row: their shape, the reference's capacity, and margins of routes.

Capacity is per rank: it limits the tokens that an expert takes from a rank. The single process
routes the tokens of several ranks at once, so it applies the limit to each rank's tokens. A route
that rounding could change would prove nothing: `Margins` has the smallest difference between a
chosen and a rejected value.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from megatron.core.models.gpt_config import Multipliers
from megatron.core.moe import MoEConfig, RouterConfig, RouterLoad, router
from megatron.core.moe import router as routing
from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    RopeConfig,
    WindowAttentionConfig,
)
from tests.parity.recurrent import LAYERS, pattern_of
from tests.parity.sequences import SEQUENCE, cut_of
from tests.support.closeness import assert_all_close
from tests.support.covering_array import Row

if TYPE_CHECKING:
    from tests.parity.training import Run

NUM_EXPERTS, TOPK, EXPERT_FFN, SHARED_FFN = 8, 2, 20, 12
AUX_LOSS, Z_LOSS, BIAS_RATE, JITTER = 0.3, 0.2, 0.05, 0.1
CAPACITY_FACTOR = 1.0

#: Smallest allowed margin of a route; the compared values differ between ranks by about 1e-6.
MARGIN = 1e-5


#: Limit of a clamped gate's inputs. None reaches it: the gradient jumps there, so rounding would
#: decide between two gradients. The tests of the op and of the MoE layer have smaller limits.
CLAMP = 50.0


def activation_settings(row: Row) -> dict[str, Any]:
    """Return the activation of a row's MLPs and experts."""
    if not row["gated"]:
        return {"gated": False, "activation": "gelu"}
    if row["gate"] == "clamped":
        return {"activation": "quick_gelu", "clamp": CLAMP, "linear_offset": 1.0}
    return {"activation": "silu"}


def moe_config(row: Row) -> MoEConfig | None:
    """Return the experts of a row."""
    if row["experts"] is None:
        return None
    shared = {"topk": TOPK, "aux_loss_coeff": AUX_LOSS, "jitter": JITTER if row["dropout"] else 0.0}
    shared["bias"] = row["expert_bias"]
    if row["experts"] == "softmax":
        router = RouterConfig(balance="aux_loss", z_loss_coeff=Z_LOSS, **shared)
    else:
        router = RouterConfig(
            score_function="sigmoid",
            scaling_factor=1.5,
            num_groups=4,
            group_topk=2,
            expert_bias=True,
            bias_update_rate=BIAS_RATE,
            balance="seq_aux_loss",
            **shared,
        )
    return MoEConfig(
        num_experts=NUM_EXPERTS,
        ffn_hidden_size=64 if row.get("aligned") else EXPERT_FFN,
        router=router,
        **activation_settings(row),
        bias=row["expert_bias"],
        capacity_factor=None if row["capacity"] is None else CAPACITY_FACTOR,
        drop_policy=row["capacity"] or "probs",
        shared_ffn_hidden_size=None if row["shared"] == "none" else SHARED_FFN,
        shared_gate=row["shared"] == "gated",
    )


def attention_config(row: Row, *, heads: int, channels: int) -> object:
    """Return the attention of a row."""
    if row["attention"] == "latent":
        return LatentAttentionConfig(
            num_attention_heads=heads,
            q_lora_rank=14,
            kv_lora_rank=10,
            nope_channels=channels - 1,
            rope_channels=4,
            value_channels=channels,
            dropout=row["dropout"],
        )
    return AttentionConfig(
        num_attention_heads=heads,
        num_query_groups=row["groups"],
        kv_channels=channels,
        qkv_bias=row["bias"] != "none",
        output_bias=row["bias"] == "all",
        qk_norm=bool(row["qk_norm"]),
        qk_norm_scope="projection" if row["qk_norm"] == "projection" else "head",
        dropout=row["dropout"],
        window=row["window"],
        sinks=row["sinks"],
        output_gate=row["attention_gate"],
        second=_window_attention(row),
        softmax_scale=SOFTMAX_SCALE if row["multipliers"] else None,
        softcap=SOFTCAP if row["softcaps"] else None,
    )


#: Factors of a row with multipliers: on embeddings, outputs of blocks and logits, and on attention
#: logits, far from 1 / sqrt(d).
MULTIPLIERS = Multipliers(
    embedding=1.7,
    residual=1.3,
    logits=1.9,
    attention=0.6,
    mamba=1.6,
    mlp=0.8,
)
SOFTMAX_SCALE = 0.6


#: Bounds of attention logits and of logits with soft caps.
SOFTCAP, FINAL_SOFTCAP = 0.8, 1.5


def multipliers_of(row: Row) -> Multipliers:
    """Return the factors of a row's model, and the bound of its logits."""
    factors = MULTIPLIERS if row["multipliers"] else Multipliers()
    return replace(factors, logits_softcap=FINAL_SOFTCAP if row["softcaps"] else None)


def plain_multipliers(row: Row) -> dict[str, float | None]:
    """Return the factors and bounds of a row's plain model."""
    factors = multipliers_of(row)
    return {
        "embedding_multiplier": factors.embedding,
        "residual_multiplier": factors.residual,
        "logit_scale": factors.logits,
        "softmax_scale": SOFTMAX_SCALE if row["multipliers"] else None,
        "softcap": SOFTCAP if row["softcaps"] else None,
        "final_softcap": factors.logits_softcap,
        "attention_multiplier": factors.attention,
        "mlp_multiplier": factors.mlp,
        "recurrent_multiplier": factors.mamba if row["mixer"] == "mamba" else 1.0,
    }


#: YaRN's factor, original context, and rotations of features that are not and that are scaled: the
#: ramp between them begins and ends within features.
YARN = (4.0, 64, 4.0, 0.01)

#: β and L of the factor on queries.
QUERY_SCALE = (0.7, 3)


def rope_config(row: Row) -> RopeConfig | None:
    """Return the rotary embedding of a row; None without one."""
    if row["positions"] != "rope":
        return None
    if row["rotary"] == "yarn":
        factor, original, fast, slow = YARN
        scaling = RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=fast,
            beta_slow=slow,
            truncate=False,
        )
        return RopeConfig(scaling=scaling)
    if row["rotary"] == "query_scale":
        return RopeConfig(query_scale_beta=QUERY_SCALE[0], query_scale_length=QUERY_SCALE[1])
    return RopeConfig()


#: Window and rotary base of the first attention block with `second_attention`.
SECOND_WINDOW, SECOND_BASE = 3, 500.0


def _window_attention(row: Row) -> WindowAttentionConfig | None:
    """Return how the first attention block of a row differs from the others; None if it does
    not."""
    if row["second_attention"] is None:
        return None
    pattern = "" if row["mixer"] or row["parallel"] else pattern_of(row, LAYERS)[::2]
    shared = {"sinks": not row["sinks"], "pattern": pattern}
    if row["second_attention"] == "no positions":
        return WindowAttentionConfig(window=row["window"], rotary=False, **shared)
    rope = rope_config(row)
    rope = None if rope is None else replace(rope, base=SECOND_BASE)
    return WindowAttentionConfig(window=SECOND_WINDOW, rope=rope, **shared)


def second_attention(row: Row) -> tuple[int | None, float | None] | None:
    """Return the window and rotary base of a row's `PlainGPT.second`."""
    second = _window_attention(row)
    if second is None:
        return None
    return second.window, SECOND_BASE if second.rotary else None


@dataclass
class Margins:
    """The smallest differences that decided routes.

    Args:
        smallest: smallest difference of scores and of weights.
        dropped: number of routes beyond an expert's capacity.
    """

    smallest: float = math.inf
    dropped: int = 0

    def note(self, ordered: torch.Tensor, chosen: int) -> None:
        """Record the margin after the first `chosen` of values [..., n] in descending order."""
        if chosen < ordered.shape[-1]:
            gap = ordered[..., chosen - 1] - ordered[..., chosen]
            self.smallest = min(self.smallest, float(gap.min()))


@contextlib.contextmanager
def watched_routes(row: Row) -> Iterator[Margins]:
    """Record margins, and apply the capacity of the ranks of a row."""
    margins = Margins()
    choose, fit = router.choose_experts, router.within_capacity

    def chosen(scores, config, *, bias=None):
        choice = choose(scores, config, bias=bias)
        _note_choice(margins, scores if bias is None else scores + bias, config)
        return choice

    def within(experts, weights, *, capacity, policy, real=None):
        assert real is None, "the single process has no padding"
        keep_mask = torch.zeros_like(experts, dtype=torch.bool)
        for numbers, rows in _tokens_of_ranks(row, batch=len(experts) // SEQUENCE):
            room = math.ceil(CAPACITY_FACTOR * rows * TOPK / NUM_EXPERTS)
            local = experts[numbers], weights[numbers]
            keep_mask[numbers] = fit(*local, capacity=room, policy=policy)
            if policy == "probs":
                _note_room(margins, *local, room=room)
        margins.dropped += int((~keep_mask).sum())
        return keep_mask

    with (
        mock.patch.object(routing, "choose_experts", chosen),
        mock.patch.object(routing, "within_capacity", within),
    ):
        yield margins


def _note_choice(margins: Margins, scores: torch.Tensor, config: RouterConfig) -> None:
    """Record the margins of chosen experts; for softmax in logits, whose errors do not shrink with
    the scores."""
    if config.score_function == "softmax":
        scores = scores.log()
    if config.num_groups is not None:
        grouped = scores.view(len(scores), config.num_groups, -1)
        best = grouped.topk(config.group_candidates).values.sum(-1)
        order = best.argsort(descending=True)
        margins.note(best.gather(1, order), config.group_topk)
        allowed = order[:, : config.group_topk].unsqueeze(-1).expand(-1, -1, grouped.shape[-1])
        scores = grouped.gather(1, allowed).flatten(1)
    margins.note(scores.sort(descending=True).values, config.topk)


def _note_room(
    margins: Margins, experts: torch.Tensor, weights: torch.Tensor, *, room: int
) -> None:
    for expert in range(NUM_EXPERTS):
        ranked = weights[experts == expert].sort(descending=True).values
        margins.note(ranked, room)


def _tokens_of_ranks(row: Row, batch: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield, for every rank that shares samples, the indices [t] of its tokens in [s, b], in the
    rank's order, and their number, without padding."""
    cp, tp = row["cp"], row["tp"]
    cut = cut_of(row)
    for rank in range(cp):
        whole = cp == 1 and row["documents"] == "whole"
        positions = torch.arange(SEQUENCE) if whole else torch.tensor(cut.row_indices(rank))
        numbers = (positions.unsqueeze(1) * batch + torch.arange(batch)).flatten()
        numbers[positions.repeat_interleave(batch) < 0] = -1
        rows = -(-len(numbers) // tp)
        for token_ids in numbers.split(rows):
            yield token_ids[token_ids >= 0], int((token_ids >= 0).sum())


def same_loads(runs: Sequence[Run], expected: Run) -> None:
    """Assert that all ranks report the loads of the single process and have its biases."""
    for rank, run in enumerate(runs):
        for load, ref in zip(run.loads, expected.loads, strict=True):
            if (load.name, load.tokens) != (ref.name, ref.tokens):
                raise AssertionError(
                    f"{load.name} on {rank} routed {load.tokens}, not {ref.tokens}"
                )
            assert_all_close(_measures(load, ref), _measures(ref, ref))
        for name, state in run.states.items():
            if not torch.equal(state, expected.states[name]):
                raise AssertionError(f"{name} is {state} on {rank}, not {expected.states[name]}")


def _measures(load: RouterLoad, ref: RouterLoad) -> dict[str, torch.Tensor]:
    """Return the statistics of a router; statistics that are 0 on both sides are left out."""
    measures = {}
    for name, expected in vars(ref).items():
        value = getattr(load, name)
        if isinstance(expected, float) and (expected or value):
            measures[name] = torch.tensor(value)
    return measures

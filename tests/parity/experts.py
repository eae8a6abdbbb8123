# SPDX-License-Identifier: Apache-2.0
"""The experts of a parity row: their shape, what the reference must know, and how sure routes are.

Capacity is a rank's: an expert takes so many of the tokens that a rank routes. The single process
routes the tokens of a lane at once, so there the choice is made part by part, as the ranks have
them. A route that rounding could turn would prove nothing: `Margins` keeps the smallest difference
between what was chosen and what was not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

import torch

from megatron.core.moe import MoEConfig, RouterConfig, RouterLoad, router
from megatron.core.moe import router as routing
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig
from tests.parity.sequences import SEQUENCE, cut_of
from tests.support.closeness import assert_all_close
from tests.support.covering_array import Row

if TYPE_CHECKING:
    from tests.parity.training import Run

NUM_EXPERTS, TOPK, EXPERT_FFN, SHARED_FFN = 8, 2, 20, 12
AUX_LOSS, Z_LOSS, BIAS_RATE, JITTER = 0.3, 0.2, 0.05, 0.1
CAPACITY_FACTOR = 1.0

#: Smallest allowed margin of a route; what ranks compare differs by about a millionth.
MARGIN = 1e-5


def moe_config(row: Row) -> MoEConfig | None:
    """Return the experts of a row."""
    if row["experts"] is None:
        return None
    shared = {"topk": TOPK, "aux_loss_coeff": AUX_LOSS, "jitter": JITTER if row["dropout"] else 0.0}
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
        gated=row["gated"],
        activation="silu" if row["gated"] else "gelu",
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
        qk_norm=row["qk_norm"],
        dropout=row["dropout"],
        window=row["window"],
        sinks=row["sinks"],
        output_gate=row["attention_gate"],
    )


@dataclass
class Margins:
    """The smallest differences that chose.

    Args:
        smallest: of scores and of weights.
        dropped: places that an expert had no room for.
    """

    smallest: float = math.inf
    dropped: int = 0

    def note(self, ordered: torch.Tensor, chosen: int) -> None:
        """Note the margin behind the first `chosen` of values [..., n] in falling order."""
        if chosen < ordered.shape[-1]:
            gap = ordered[..., chosen - 1] - ordered[..., chosen]
            self.smallest = min(self.smallest, float(gap.min()))


@contextlib.contextmanager
def watched_routes(row: Row) -> Iterator[Margins]:
    """Note margins inside, and give experts the room that the ranks of a row would give them."""
    margins = Margins()
    choose, fit = router.choose_experts, router.within_capacity

    def chosen(scores, config, *, bias=None):
        found = choose(scores, config, bias=bias)
        _note_choice(margins, scores if bias is None else scores + bias, config)
        return found

    def within(experts, weights, *, capacity, policy, real=None):
        assert real is None, "the single process has no padding"
        kept = torch.zeros_like(experts, dtype=torch.bool)
        for numbers, rows in _parts(row, batch=len(experts) // SEQUENCE):
            room = math.ceil(CAPACITY_FACTOR * rows * TOPK / NUM_EXPERTS)
            own = experts[numbers], weights[numbers]
            kept[numbers] = fit(*own, capacity=room, policy=policy)
            if policy == "probs":
                _note_room(margins, *own, room=room)
        margins.dropped += int((~kept).sum())
        return kept

    with (
        mock.patch.object(routing, "choose_experts", chosen),
        mock.patch.object(routing, "within_capacity", within),
    ):
        yield margins


def _note_choice(margins: Margins, scores: torch.Tensor, config: RouterConfig) -> None:
    """Note how far the experts of tokens are from others: of softmax in logits, whose errors do not
    shrink with the scores."""
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
        wanted = weights[experts == expert].sort(descending=True).values
        margins.note(wanted, room)


def _parts(row: Row, batch: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield for every rank of a lane the numbers [t] of its tokens among the lane's [s, b], in its
    own order, and how many these are, without padding."""
    cp, tp = row["cp"], row["tp"]
    cut = cut_of(row)
    for rank in range(cp):
        whole = cp == 1 and row["documents"] == "whole"
        places = torch.arange(SEQUENCE) if whole else torch.tensor(cut.row_indices(rank))
        numbers = (places.unsqueeze(1) * batch + torch.arange(batch)).flatten()
        numbers[places.repeat_interleave(batch) < 0] = -1
        rows = -(-len(numbers) // tp)
        for part in numbers.split(rows):
            yield part[part >= 0], int((part >= 0).sum())


def same_loads(runs: Sequence[Run], expected: Run) -> None:
    """Fail unless all ranks report what the single process does, and have its biases."""
    for rank, run in enumerate(runs):
        for own, ref in zip(run.loads, expected.loads, strict=True):
            if (own.name, own.tokens) != (ref.name, ref.tokens):
                raise AssertionError(f"{own.name} on {rank} routed {own.tokens}, not {ref.tokens}")
            assert_all_close(_measures(own, ref), _measures(ref, ref))
        for name, state in run.states.items():
            if not torch.equal(state, expected.states[name]):
                raise AssertionError(f"{name} is {state} on {rank}, not {expected.states[name]}")


def _measures(load: RouterLoad, ref: RouterLoad) -> dict[str, torch.Tensor]:
    """Return what a router measured; what is 0 in the reference has to be, and tells no error."""
    found = {}
    for name, wanted in vars(ref).items():
        value = getattr(load, name)
        if isinstance(wanted, float) and (wanted or value):
            found[name] = torch.tensor(value)
    return found

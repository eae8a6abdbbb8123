# SPDX-License-Identifier: Apache-2.0
"""Formulas for the collectives of a row's recurrent mixers, compared with its trace.

Headwise, there are four exchanges per layer for any documents. By segments, the traffic depends on
the documents that continue from one rank's tokens to another rank's tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from tests.parity.recurrent import (
    DELTA_NET,
    HEAD_CHANNELS,
    MAMBA_HEADS,
    SHORT_CONV_WIDTH,
    STATE_CHANNELS,
    mamba_config,
)
from tests.parity.sequences import SEQUENCE, cut_of
from tests.parity.stages import StageBlocks
from tests.parity.training import BATCH, HIDDEN, data_of_rank
from tests.support.covering_array import Row
from tests.support.inputs import Microbatch

FLOAT = 4  # bytes


class Sent(Counter[str]):
    """Bytes by kind of collective; the key `kind+` has the number of collectives."""

    def note(self, kind: str, size: float, *, times: int = 1) -> None:
        """Add `times` collectives of `size` bytes each."""
        self[f"{kind}+"] += times
        self[kind] += round(size * times)


def sent_by_mixers(row: Row, stage: StageBlocks, rank: int, step: int) -> Sent:
    """Return the traffic of a rank's recurrent mixers over cp in a step.

    Args:
        row: row with cp above 1.
        stage: blocks of the model on the rank.
        rank: global rank; tp varies fastest, then gtp, cp, dp, pp.
        step: number of the step.
    """
    sent = Sent()
    blocks = stage.recurrent
    if not blocks.count:
        return sent
    outer_rank, over_gtp = divmod(rank // row["tp"], row["gtp"])
    cp_rank = outer_rank % row["cp"]
    samples = outer_rank // row["cp"] % row["dp"] * row["gtp"] + over_gtp
    forward = blocks.count + blocks.again
    for batch in data_of_rank(row, samples, step):
        if row["linear_mode"] == "headwise" and row["mixer"] != "short_conv":
            _by_heads(row, sent, forward, blocks.count)
        else:
            _by_segments(row, sent, _ids(batch), cp_rank, forward, blocks.count)
    return sent


def _by_heads(row: Row, sent: Sent, forward: int, backward: int) -> None:
    """Add inputs and outputs of the recurrence for all tokens, and their gradients."""
    tp, cp = row["tp"], row["cp"]
    tokens = cut_of(row).local_length * BATCH * FLOAT
    if row["mixer"] == "delta":
        keys, values = DELTA_NET.num_key_heads // tp, DELTA_NET.num_value_heads // tp
        before = 2 * keys * DELTA_NET.key_channels + values * (DELTA_NET.value_channels + 2)
        behind = values * DELTA_NET.value_channels
    else:  # groups are copied if there are fewer groups than ranks
        heads, groups = MAMBA_HEADS // tp, max(1, row["mamba_groups"] // tp)
        groups = max(groups, cp)
        before = heads * (HEAD_CHANNELS + 1) + 2 * groups * STATE_CHANNELS
        behind = heads * HEAD_CHANNELS
    for features in (before, behind):
        sent.note("all_to_all", tokens * features, times=forward + backward)


def _by_segments(
    row: Row, sent: Sent, ids: torch.Tensor, rank: int, forward: int, backward: int
) -> None:
    """Add the rows that convolutions need from other ranks, and states, of continued documents; a
    short convolution has no state."""
    owners = _owners(row)
    crossings = [list(_crossings(owners, row_ids)) for row_ids in ids.tolist()]
    if not any(crossings):
        return
    width, channels, heads, state, transition = _sizes(row)
    lent = borrowed = 0
    for row_ids, boundaries in zip(ids.tolist(), crossings, strict=True):
        for boundary in boundaries:
            needed = [
                before
                for before in range(max(0, boundary - width), boundary)
                if row_ids[before] == row_ids[boundary]
            ]
            lent += sum(owners[before] == rank for before in needed)
            borrowed += len(needed) * (owners[boundary] == rank)
    sent.note("all_to_all", lent * channels * FLOAT, times=forward)
    sent.note("all_to_all", borrowed * channels * FLOAT, times=backward)
    if not heads:
        return
    exports = max(
        sum(owners[boundary - 1] == r for boundaries in crossings for boundary in boundaries)
        for r in range(row["cp"])
    )
    entries = max(
        sum(owners[boundary] == r for boundaries in crossings for boundary in boundaries)
        for r in range(row["cp"])
    )
    chained = any(
        sum(row_ids[candidate] == row_ids[boundary] for candidate in boundaries) > 1
        for row_ids, boundaries in zip(ids.tolist(), crossings, strict=True)
        for boundary in boundaries
    )
    message = state + transition if chained else state
    sent.note("all_gather", row["cp"] * exports * heads * message * FLOAT, times=forward)
    sent.note("all_gather", row["cp"] * entries * heads * state * FLOAT, times=backward)


def _owners(row: Row) -> list[int]:
    """Return the rank of each position of a row."""
    owners = [-1] * SEQUENCE
    for rank in range(row["cp"]):
        for position in cut_of(row).row_indices(rank):
            if position >= 0:
                owners[position] = rank
    return owners


def _crossings(owners: list[int], ids: list[int]) -> Iterator[int]:
    """Yield the positions where another rank continues the same document."""
    for position in range(1, SEQUENCE):
        if owners[position] != owners[position - 1] and ids[position] == ids[position - 1]:
            yield position


def _ids(batch: Microbatch) -> torch.Tensor:
    """Return the documents [b, s] of a microbatch."""
    if batch.document_ids is not None:
        return batch.document_ids
    return torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)


def _sizes(row: Row) -> tuple[int, int, int, int, int]:
    """Return tokens and channels of a halo, heads, elements of a state and its transition."""
    tp = row["tp"]
    if row["mixer"] == "short_conv":
        return SHORT_CONV_WIDTH - 1, HIDDEN // tp, 0, 0, 0
    if row["mixer"] == "delta":
        keys, values = DELTA_NET.num_key_heads // tp, DELTA_NET.num_value_heads // tp
        key, value = DELTA_NET.key_channels, DELTA_NET.value_channels
        channels = 2 * keys * key + values * value
        return DELTA_NET.conv_width - 1, channels, values, key * value, key * key
    heads, groups = MAMBA_HEADS // tp, max(1, row["mamba_groups"] // tp)
    channels = heads * HEAD_CHANNELS + 2 * groups * STATE_CHANNELS
    width = mamba_config(row).conv_width - 1
    return width, channels, heads, STATE_CHANNELS * HEAD_CHANNELS, 1

# SPDX-License-Identifier: Apache-2.0
"""What the recurrent mixers of a row send: the formulas that its trace is held to.

By heads it is four exchanges a layer, whatever the documents. By segments it follows from the
documents: which of them go on over the place where one rank's tokens end and another's begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from tests.parity.recurrent import (
    DELTA_NET,
    HEAD_CHANNELS,
    MAMBA_HEADS,
    STATE_CHANNELS,
    mamba_config,
)
from tests.parity.sequences import SEQUENCE, cut_of
from tests.parity.stages import StagePart
from tests.parity.training import BATCH, data_of_rank
from tests.support.covering_array import Row
from tests.support.inputs import Microbatch

FLOAT = 4  # bytes


class Sent(Counter[str]):
    """Bytes by kind of collective, and how many there were under the kind and a plus sign."""

    def note(self, kind: str, size: float, *, times: int = 1) -> None:
        """Note so many collectives of so many bytes each."""
        self[f"{kind}+"] += times
        self[kind] += round(size * times)


def sent_by_mixers(row: Row, part: StagePart, rank: int, step: int) -> Sent:
    """Return what the recurrent mixers of a rank send over cp in a step.

    Args:
        row: of a cp above 1.
        part: what of the model the rank has.
        rank: global; ranks are numbered tp, gtp, cp, dp, pp, the first fastest.
        step: its number.
    """
    sent = Sent()
    blocks = part.recurrent
    if not blocks.count:
        return sent
    rest, over_gtp = divmod(rank // row["tp"], row["gtp"])
    place = rest % row["cp"]
    samples = rest // row["cp"] % row["dp"] * row["gtp"] + over_gtp
    forward = blocks.count + blocks.again
    for batch in data_of_rank(row, samples, step):
        if row["linear_mode"] == "headwise":
            _by_heads(row, sent, forward, blocks.count)
        else:
            _by_segments(row, sent, _ids(batch), place, forward, blocks.count)
    return sent


def _by_heads(row: Row, sent: Sent, forward: int, backward: int) -> None:
    """Features of all tokens before the recurrence, what comes out behind it, gradients of both."""
    tp, cp = row["tp"], row["cp"]
    tokens = cut_of(row).local_length * BATCH * FLOAT
    if row["mixer"] == "delta":
        keys, values = DELTA_NET.num_key_heads // tp, DELTA_NET.num_value_heads // tp
        before = 2 * keys * DELTA_NET.key_channels + values * (DELTA_NET.value_channels + 2)
        behind = values * DELTA_NET.value_channels
    else:  # groups fewer than the ranks travel in copies
        heads, groups = MAMBA_HEADS // tp, max(1, row["mamba_groups"] // tp)
        groups = max(groups, cp)
        before = heads * (HEAD_CHANNELS + 1) + 2 * groups * STATE_CHANNELS
        behind = heads * HEAD_CHANNELS
    for features in (before, behind):
        sent.note("all_to_all", tokens * features, times=forward + backward)


def _by_segments(
    row: Row, sent: Sent, ids: torch.Tensor, rank: int, forward: int, backward: int
) -> None:
    """The rows before each run that the convolution needs, and states, where documents go on."""
    owners = _owners(row)
    crossings = [list(_crossings(owners, row_ids)) for row_ids in ids.tolist()]
    if not any(crossings):
        return
    width, channels, heads, state, transition = _sizes(row)
    lent = borrowed = 0
    for row_ids, places in zip(ids.tolist(), crossings, strict=True):
        for place in places:
            needed = [
                before
                for before in range(max(0, place - width), place)
                if row_ids[before] == row_ids[place]
            ]
            lent += sum(owners[before] == rank for before in needed)
            borrowed += len(needed) * (owners[place] == rank)
    sent.note("all_to_all", lent * channels * FLOAT, times=forward)
    sent.note("all_to_all", borrowed * channels * FLOAT, times=backward)
    exports = max(
        sum(owners[place - 1] == r for places in crossings for place in places)
        for r in range(row["cp"])
    )
    entries = max(
        sum(owners[place] == r for places in crossings for place in places)
        for r in range(row["cp"])
    )
    chained = any(
        sum(row_ids[other] == row_ids[place] for other in places) > 1
        for row_ids, places in zip(ids.tolist(), crossings, strict=True)
        for place in places
    )
    message = state + transition if chained else state
    sent.note("all_gather", row["cp"] * exports * heads * message * FLOAT, times=forward)
    sent.note("all_gather", row["cp"] * entries * heads * state * FLOAT, times=backward)


def _owners(row: Row) -> list[int]:
    """Return the rank of each place of a row."""
    found = [-1] * SEQUENCE
    for rank in range(row["cp"]):
        for place in cut_of(row).row_indices(rank):
            if place >= 0:
                found[place] = rank
    return found


def _crossings(owners: list[int], ids: list[int]) -> Iterator[int]:
    """Yield the places where another rank goes on with the same document."""
    for place in range(1, SEQUENCE):
        if owners[place] != owners[place - 1] and ids[place] == ids[place - 1]:
            yield place


def _ids(batch: Microbatch) -> torch.Tensor:
    """Return the documents [b, s] of a microbatch."""
    if batch.document_ids is not None:
        return batch.document_ids
    return torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)


def _sizes(row: Row) -> tuple[int, int, int, int, int]:
    """Return tokens and channels of a halo; heads, elements of a state and of what it is multiplied
    by."""
    tp = row["tp"]
    if row["mixer"] == "delta":
        keys, values = DELTA_NET.num_key_heads // tp, DELTA_NET.num_value_heads // tp
        key, value = DELTA_NET.key_channels, DELTA_NET.value_channels
        channels = 2 * keys * key + values * value
        return DELTA_NET.conv_width - 1, channels, values, key * value, key * key
    heads, groups = MAMBA_HEADS // tp, max(1, row["mamba_groups"] // tp)
    channels = heads * HEAD_CHANNELS + 2 * groups * STATE_CHANNELS
    width = mamba_config(row).conv_width - 1
    return width, channels, heads, STATE_CHANNELS * HEAD_CHANNELS, 1

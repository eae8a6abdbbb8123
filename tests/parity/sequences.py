# SPDX-License-Identifier: Apache-2.0
"""The rows of tokens of a parity row: their documents, and each context-parallel rank's part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.sequence_sharding import SequenceSharding
from megatron.core.models.gpt import MTPTargets, shift_targets
from tests.support.covering_array import Row
from tests.support.inputs import Microbatch

#: Tokens of a row; with padding, of its two documents alike, 24 places.
SEQUENCE = 16
BORDERS, PADDED = (0, 5, SEQUENCE), (0, 8, 24)


@dataclass(frozen=True)
class Part(Microbatch):
    """A context-parallel rank's part of a microbatch, [b, s/cp]."""

    layout: SequenceLayout = field(kw_only=True)


def with_documents(row: Row, batch: Microbatch, index: int) -> Microbatch:
    """Return a microbatch whose rows hold the documents that the row asks for, with what further
    predictions read and predict."""
    made = _with_documents(row, batch, index)
    if row["capacity"] == "probs":
        made = _begun_apart(made, row["vocabulary"])
    if not row["predictions"]:
        return made
    texts = made.tokens, made.labels, made.loss_mask
    ids = made.document_ids
    return replace(
        made, mtp_targets=shift_targets(*texts, num_layers=row["predictions"], document_ids=ids)
    )


def _with_documents(row: Row, batch: Microbatch, index: int) -> Microbatch:
    if row["documents"] == "whole":
        return batch
    rows, length = batch.tokens.shape
    places = torch.arange(length).expand(rows, -1)  # [b, s]
    if row["documents"] == "padded":
        borders = torch.full((rows, 1), BORDERS[1])
    else:  # two or three documents of any length, other ones in every row
        first = torch.arange(rows) + 2 + index % 5
        borders = torch.stack([first, torch.where(first % 2 == 0, first + 7, length)], dim=1)
    after = places[:, :, None] >= borders[:, None, :]  # [b, s, borders]
    starts = torch.where(after, borders[:, None, :], 0).amax(-1)
    return replace(batch, document_ids=after.sum(-1), positions=places - starts)


def _begun_apart(batch: Microbatch, vocabulary: int) -> Microbatch:
    """Return a microbatch in which no two documents begin with the same token.

    What has the same history has the same weights. Where an expert takes the tokens of the highest
    weights, rounding would choose between two that are equal: no other draw would help, as one in
    few microbatches has such a pair at the border of an expert's room.
    """
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    tokens, labels, used = batch.tokens.clone(), batch.labels.clone(), set()
    for where in (positions == 0).nonzero().tolist():
        token = int(tokens[*where])
        while token in used:
            token = (token + 1) % vocabulary
        used.add(token)
        tokens[*where] = token
    labels[:, :-1] = tokens[:, 1:]
    return replace(batch, tokens=tokens, labels=labels)


def with_bounds(batch: Microbatch, device: torch.device) -> Microbatch:
    """Return whole rows with a layout that says where their documents begin: a recurrence needs
    to know that, ids are for masks."""
    if batch.document_ids is None:
        return batch
    layout = SequenceLayout.make(
        SequenceSharding.of(SEQUENCE, 1),
        0,
        rows=batch.tokens.shape[0],
        positions=batch.positions,
        document_ids=batch.document_ids,
        sample_ids=batch.sample_ids,
        masks_by_ids=True,
        device=device,
    )
    columns = batch.tokens, batch.labels, batch.loss_mask
    return Part(*columns, batch.sample_ids, layout=layout, mtp_targets=batch.mtp_targets)


def cut_of(row: Row) -> SequenceSharding:
    """Return how rows of tokens lie over the ranks."""
    padded = row["documents"] == "padded"
    return SequenceSharding.of(
        SEQUENCE,
        row["cp"],
        order=row["order"],
        cu_seqlens=BORDERS if padded else None,
        padded_cu_seqlens=PADDED if padded else None,
    )


def part_of(row: Row, batch: Microbatch, rank: int, device: torch.device) -> Microbatch:
    """Return a rank's part of a microbatch; the microbatch itself where nothing is to be cut.

    Args:
        device: of its layout; the rest is on the host.
    """
    if row["cp"] == 1 and row["documents"] == "whole":
        return batch
    layout = SequenceLayout.make(
        cut_of(row),
        rank,
        rows=batch.tokens.shape[0],
        positions=batch.positions,
        document_ids=batch.document_ids,
        sample_ids=batch.sample_ids,
        device=device,
    )
    columns = (layout.local(x) for x in (batch.tokens, batch.labels, batch.loss_mask))
    mtp_targets = batch.mtp_targets
    if mtp_targets is not None:
        tensors = (x for x in vars(mtp_targets).values() if x is not None)
        depths = ([layout.local(depth) for depth in x] for x in tensors)
        mtp_targets = MTPTargets(*(torch.stack(parts) for parts in depths))
    return Part(*columns, batch.sample_ids, layout=layout, mtp_targets=mtp_targets)


def in_rows(row: Row, local: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's numbers [b, s/cp] at their places [b, s], 0 where other ranks have them."""
    if row["cp"] == 1 and row["documents"] == "whole":
        return local
    places = torch.tensor(cut_of(row).row_indices(rank))
    kept = places >= 0
    whole = local.new_zeros(local.shape[0], SEQUENCE)
    whole[:, places[kept]] = local[:, kept]
    return whole

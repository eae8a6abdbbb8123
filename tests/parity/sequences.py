# SPDX-License-Identifier: Apache-2.0
"""The token rows of a parity row: their documents, and their sharding over cp."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.models.gpt import MTPTargets, shift_targets
from tests.support.covering_array import Row
from tests.support.inputs import Microbatch

#: Tokens of a row; padding of its two documents extends the row to 24 positions.
SEQUENCE = 16
BOUNDARIES, PADDED = (0, 5, SEQUENCE), (0, 8, 24)


@dataclass(frozen=True)
class LocalMicrobatch(Microbatch):
    """A context-parallel rank's shard of a microbatch, [b, s/cp]."""

    layout: SequenceLayout = field(kw_only=True)


def with_documents(row: Row, batch: Microbatch, index: int) -> Microbatch:
    """Return a microbatch with the documents and MTP targets of the row."""
    documents = _with_documents(row, batch, index)
    if row["capacity"] == "probs":
        documents = _begun_apart(documents, row["vocabulary"])
    if not row["predictions"]:
        return documents
    texts = documents.tokens, documents.labels, documents.loss_mask
    ids = documents.document_ids
    return replace(
        documents,
        mtp_targets=shift_targets(*texts, num_layers=row["predictions"], document_ids=ids),
    )


def _with_documents(row: Row, batch: Microbatch, index: int) -> Microbatch:
    if row["documents"] == "whole":
        return batch
    rows, length = batch.tokens.shape
    positions = torch.arange(length).expand(rows, -1)  # [b, s]
    if row["documents"] == "padded":
        boundaries = torch.full((rows, 1), BOUNDARIES[1])
    else:  # two or three documents of varying lengths
        first_boundary = torch.arange(rows) + 2 + index % 5
        boundaries = torch.stack(
            [first_boundary, torch.where(first_boundary % 2 == 0, first_boundary + 7, length)],
            dim=1,
        )
    after = positions[:, :, None] >= boundaries[:, None, :]  # [b, s, borders]
    starts = torch.where(after, boundaries[:, None, :], 0).amax(-1)
    return replace(batch, document_ids=after.sum(-1), positions=positions - starts)


def _begun_apart(batch: Microbatch, vocabulary: int) -> Microbatch:
    """Return a microbatch whose documents begin with distinct tokens.

    Tokens with equal prefixes have equal routing weights. If an expert drops the tokens of the
    lowest weights, rounding would choose between equal ones; other seeds would not help, since
    many microbatches have such a pair at an expert's capacity.
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
    """Return whole rows with a layout that has document boundaries, which recurrences need; ids
    are only for masks."""
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
    return LocalMicrobatch(*columns, batch.sample_ids, layout=layout, mtp_targets=batch.mtp_targets)


def cut_of(row: Row) -> SequenceSharding:
    """Return the sharding of token rows over cp."""
    padded = row["documents"] == "padded"
    return SequenceSharding.of(
        SEQUENCE,
        row["cp"],
        order=row["order"],
        cu_seqlens=BOUNDARIES if padded else None,
        padded_cu_seqlens=PADDED if padded else None,
    )


def local_microbatch(row: Row, batch: Microbatch, rank: int, device: torch.device) -> Microbatch:
    """Return a rank's shard of a microbatch; the microbatch itself if nothing is sharded.

    Args:
        device: device of the layout; the other tensors are on the host.
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
        mtp_targets = MTPTargets(*(torch.stack(shards) for shards in depths))
    return LocalMicrobatch(*columns, batch.sample_ids, layout=layout, mtp_targets=mtp_targets)


def in_rows(row: Row, local: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's values [b, s/cp] at their positions in [b, s], 0 elsewhere."""
    if row["cp"] == 1 and row["documents"] == "whole":
        return local
    positions = torch.tensor(cut_of(row).row_indices(rank))
    is_local = positions >= 0
    whole = local.new_zeros(local.shape[0], SEQUENCE)
    whole[:, positions[is_local]] = local[:, is_local]
    return whole

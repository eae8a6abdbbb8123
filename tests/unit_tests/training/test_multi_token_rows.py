# SPDX-License-Identifier: Apache-2.0
"""Targets of multi-token prediction, computed on whole rows before context parallelism splits."""

from __future__ import annotations

import pytest
import torch

from megatron.core import Group
from megatron.core.datasets import GPTBatch
from megatron.core.models.gpt import shift_targets
from megatron.training.layouts import Layouts
from megatron.training.train_steps import microbatch

CPU = torch.device("cpu")
#: Columns of 12 that each of two ranks has, in zigzag order.
COLUMNS = ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8])


def batch(documents: bool) -> GPTBatch:
    """Return two rows of 12 tokens."""
    source = torch.Generator().manual_seed(4)
    document_fields = {}
    if documents:
        ids = torch.zeros(2, 12, dtype=torch.int32)
        ids[1, 5:] = 1
        positions = torch.arange(12).repeat(2, 1)
        positions[1, 5:] -= 5
        padding = torch.zeros(2, 12, dtype=torch.bool)
        padding[1, 9:] = True
        document_fields = {"document_ids": ids, "positions": positions, "padding": padding}
    return GPTBatch(
        tokens=torch.randint(1, 50, (2, 13), generator=source),
        loss_mask=(torch.rand(2, 12, generator=source) > 0.2).float(),
        sample_ids=torch.arange(2),
        **document_fields,
    )


@pytest.mark.parametrize("documents", [False, True])
def test_mtp_targets_are_shifted_before_rows_are_sharded(documents):
    rows = batch(documents)
    layouts = Layouts(Group.single("cp"), CPU)
    full = microbatch(rows, CPU, layouts=layouts, mtp_num_layers=3)
    row_fields = (rows.input_ids, rows.labels, rows.loss_mask)
    expected = shift_targets(
        *row_fields, num_layers=3, document_ids=rows.document_ids, padding=rows.padding
    )
    assert expected.tokens.shape == (3, 2, 12)
    fields = {name: x for name, x in vars(expected).items() if x is not None}
    assert len(fields) == 3 + documents
    assert all(torch.equal(getattr(full.mtp_targets, name), x) for name, x in fields.items())
    for rank, columns in enumerate(COLUMNS):
        local = microbatch(
            rows,
            CPU,
            layouts=Layouts(Group("cp", (0, 1), rank, handle=object()), CPU),
            mtp_num_layers=3,
        )
        for name, x in fields.items():
            assert torch.equal(getattr(local.mtp_targets, name), x[..., columns]), name
        if documents:
            assert torch.equal(local.layout.padding.t(), rows.padding[:, columns])
        # The token after the last token of a rank's chunk belongs to the other rank.
        edge = columns.index(2) if rank == 0 else columns.index(8)
        assert torch.equal(
            local.mtp_targets.tokens[0, :, edge], rows.input_ids[:, columns[edge] + 1]
        )
    assert microbatch(rows, CPU, layouts=layouts).mtp_targets is None

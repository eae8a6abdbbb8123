# SPDX-License-Identifier: Apache-2.0
"""What multi-token prediction reads of batches: found in whole rows, before they are cut."""

from __future__ import annotations

import pytest
import torch

from megatron.core.datasets.samplers import GPTBatch
from megatron.core.models.gpt import shift_targets
from megatron.core.process_groups import Group
from megatron.training.layouts import Layouts
from megatron.training.session import microbatch

CPU = torch.device("cpu")
#: Columns of 12 that each of two ranks has, in zigzag order.
COLUMNS = ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8])


def batch(documents: bool) -> GPTBatch:
    """Return two rows of 12 tokens."""
    source = torch.Generator().manual_seed(4)
    more = {}
    if documents:
        ids = torch.zeros(2, 12, dtype=torch.int32)
        ids[1, 5:] = 1
        positions = torch.arange(12).repeat(2, 1)
        positions[1, 5:] -= 5
        padding = torch.zeros(2, 12, dtype=torch.bool)
        padding[1, 9:] = True
        more = {"document_ids": ids, "positions": positions, "padding": padding}
    return GPTBatch(
        tokens=torch.randint(1, 50, (2, 13), generator=source),
        loss_mask=(torch.rand(2, 12, generator=source) > 0.2).float(),
        sample_ids=torch.arange(2),
        **more,
    )


@pytest.mark.parametrize("documents", [False, True])
def test_each_rank_takes_its_columns_of_what_is_ahead_in_the_row(documents):
    rows = batch(documents)
    alone = Layouts(Group.single("cp"), CPU)
    whole = microbatch(rows, CPU, layouts=alone, mtp_num_layers=3)
    parts = (rows.input_ids, rows.labels, rows.loss_mask)
    wanted = shift_targets(
        *parts, num_layers=3, document_ids=rows.document_ids, padding=rows.padding
    )
    assert wanted.tokens.shape == (3, 2, 12)
    fields = {name: x for name, x in vars(wanted).items() if x is not None}
    assert len(fields) == 3 + documents
    assert all(torch.equal(getattr(whole.mtp_targets, name), x) for name, x in fields.items())
    for rank, own in enumerate(COLUMNS):
        made = microbatch(
            rows,
            CPU,
            layouts=Layouts(Group("cp", (0, 1), rank, handle=object()), CPU),
            mtp_num_layers=3,
        )
        for name, x in fields.items():
            assert torch.equal(getattr(made.mtp_targets, name), x[..., own]), name
        if documents:
            assert torch.equal(made.layout.padding.t(), rows.padding[:, own])
        # What follows the last token of a rank's chunk is another rank's.
        edge = own.index(2) if rank == 0 else own.index(8)
        assert torch.equal(made.mtp_targets.tokens[0, :, edge], rows.input_ids[:, own[edge] + 1])
    assert microbatch(rows, CPU, layouts=alone).mtp_targets is None

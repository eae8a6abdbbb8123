# SPDX-License-Identifier: Apache-2.0
"""Layouts of microbatches: columns of each rank, maps to rows and back, documents, cached plans."""

from __future__ import annotations

import random
import re

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.blockwise import attention_blocks
from megatron.core.context_parallel.sequence_sharding import TokenRange
from tests.unit_tests.core.context_parallel.random_cuts import random_case

CASES = [random_case(random.Random(seed)) for seed in range(1000, 1100)]
META = torch.device("meta")


def layouts(sharding: SequenceSharding, rows: int = 2, **options) -> list[SequenceLayout]:
    """Return the layout of each rank."""
    return [
        SequenceLayout.make(sharding, rank, rows=rows, **options) for rank in range(sharding.size)
    ]


def random_rows(seed: int, rows: int, length: int, *shape: int) -> torch.Tensor:
    """Return a random permutation of 1, 2, ... as [rows, length, ...]."""
    count = rows * length * torch.tensor(shape).prod().long() if shape else rows * length
    order = torch.randperm(int(count), generator=torch.Generator().manual_seed(seed))
    return (order + 1).view(rows, length, *shape)


def test_layouts_select_the_columns_of_each_rank():
    padded = 0
    for seed, case in enumerate(CASES):
        positions = random_rows(seed, 3, case.total)
        x = random_rows(seed + 1, 3, case.total, 2)
        rank_layouts = layouts(
            case.sharding(), rows=3, positions=positions, sample_ids=torch.tensor([7, 5, 9])
        )
        for layout, column in zip(rank_layouts, case.row_indices(), strict=True):
            row_indices = torch.tensor(column)
            real = row_indices >= 0
            assert torch.equal(layout.row_indices, row_indices), case
            assert layout.positions.shape == (len(column), 3), case
            assert torch.equal(layout.positions[real], positions.t()[row_indices[real]]), case
            equal = bool((layout.positions[~real] == 0).all())
            assert equal, case
            assert layout.sample_ids.tolist() == [7, 5, 9]
            local = layout.local(x, fill=-9)
            assert local.shape == (3, len(column), 2), case
            assert torch.equal(local[:, real], x[:, row_indices[real]]), case
            equal = bool((local[:, ~real] == -9).all())
            assert equal, case
            padded += int((~real).sum())
    assert padded > 50


def test_positions_default_to_token_indices():
    for case in CASES:
        for layout, column in zip(layouts(case.sharding()), case.row_indices(), strict=True):
            assert layout.positions.tolist() == [max(0, row_index) for row_index in column], case


def test_to_rows_restores_rows_from_all_ranks():
    num_reordered = 0
    for seed, case in enumerate(CASES):
        sharding = case.sharding()
        rows = random_rows(seed, case.total, 2, 3)  # [s, b, d]
        rank_layouts = layouts(sharding)
        shards = [layout.local(rows.transpose(0, 1)).transpose(0, 1) for layout in rank_layouts]
        gathered = torch.cat(shards)  # [cp · s/cp, b, d]
        num_reordered += not torch.equal(gathered, rows)
        for layout in rank_layouts:
            assert torch.equal(layout.to_rows(gathered), rows), case
            assert torch.equal(layout.to_ranks(rows), gathered), case  # padding is zero
    assert num_reordered > 30


def test_rows_in_order_are_not_copied():
    x, gathered = torch.arange(16).view(2, 8), torch.arange(8.0)
    for sharding in (
        SequenceSharding.of(8, 1, cu_seqlens=[0, 3, 8]),
        SequenceSharding.of(8, 2, order="contiguous"),
    ):
        layout = SequenceLayout.make(sharding, 0, rows=2)
        assert layout.to_rows(gathered) is gathered
        assert layout.to_ranks(gathered) is gathered
        assert (layout.local(x) is x) == (sharding.size == 1)
    assert (
        SequenceLayout.make(SequenceSharding.of(8, 2), 0, rows=2).to_rows(gathered) is not gathered
    )


def test_document_bounds_are_derived_from_ids():
    ids = torch.tensor([[0, 0, 0, 1, 1, 4, 4, 4], [0] * 8, [0, 1, 2, 3, 4, 5, 6, 7]])
    layout = SequenceLayout.make(SequenceSharding.of(8, 2), 1, rows=3, document_ids=ids.int())
    assert layout.documents == ((0, 3, 5, 8), (0, 8), tuple(range(9)))
    assert layout.document_ids is None  # no mask needs the ids
    unsigned = SequenceLayout.make(SequenceSharding.of(8, 2), 1, rows=3, document_ids=ids.byte())
    assert unsigned.documents == layout.documents


def test_separately_sharded_sequences_are_documents():
    sharding = SequenceSharding.of(12, 2, cu_seqlens=[0, 4, 4, 12])
    assert SequenceLayout.make(sharding, 0, rows=2).documents == ((0, 4, 4, 12),) * 2
    assert SequenceLayout.make(SequenceSharding.of(12, 1), 0, rows=2).documents is None
    finer = torch.tensor([[0] * 4 + [1] * 3 + [2] * 5])
    layout = SequenceLayout.make(sharding, 0, rows=1, document_ids=finer)
    assert layout.documents == ((0, 4, 7, 12),)


def test_document_ids_remain_if_a_mask_needs_them():
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
    sharding = SequenceSharding.of(8, 2)
    layout = SequenceLayout.make(sharding, 0, rows=2, document_ids=ids, masks_by_ids=True)
    assert layout.document_ids.t().tolist() == [[0, 0, 2, 2], [0, 1, 1, 1]]
    sharding = SequenceSharding.of(5, 2, cu_seqlens=[0, 2, 2, 5], padded_cu_seqlens=[0, 4, 4, 8])
    rank0, rank1 = layouts(sharding, masks_by_ids=True)
    assert rank0.document_ids.t().tolist() == [[0, -1, 2, -1]] * 2
    assert rank1.document_ids.t().tolist() == [[0, -1, 2, 2]] * 2
    assert (
        SequenceLayout.make(SequenceSharding.of(8, 2), 0, rows=2, masks_by_ids=True).documents
        is None
    )


def test_blocks_match_the_token_ranges_and_documents():
    ids = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    documents = [[0, 5, 16], [0, 16]]
    sharding = SequenceSharding.of(16, 2)
    whole = (TokenRange(0, 16, 0),)
    for layout in layouts(sharding, document_ids=ids):
        queries = sharding.runs(layout.rank)
        for window in (None, 3):
            options = {"rows": 2, "documents": documents, "window": window}
            for key_rank in range(2):
                expected = attention_blocks(queries, sharding.runs(key_rank), **options)
                assert layout.blocks(key_rank, window) == expected
            assert layout.blocks(None, window) == attention_blocks(queries, whole, **options)
            assert layout.row_blocks(window) == attention_blocks(whole, whole, **options)
    dense = SequenceLayout.make(sharding, 0, rows=2)
    assert len(dense.blocks(1)) == 1
    unjoined = SequenceLayout.make(SequenceSharding.of(16, 4), 1, rows=2)
    assert (len(unjoined.blocks(0)), len(unjoined.blocks(0, joined=True))) == (2, 1)


def test_plans_are_built_once_for_all_layers():
    layout = SequenceLayout.make(SequenceSharding.of(16, 2), 0, rows=2)
    assert layout.num_plans == 0
    blocks = [layout.blocks(rank) for rank in (0, 1)]
    for _ in range(5):
        repeated = [layout.blocks(rank) for rank in (0, 1)]
        assert all(a is b for a, b in zip(blocks, repeated, strict=True))
    assert layout.num_plans == 2
    for num_plans, build in enumerate(
        [
            lambda: layout.blocks(0, 4),
            lambda: layout.blocks(None),
            lambda: layout.blocks(0, joined=True),
            lambda: layout.row_blocks(),
            lambda: layout.row_blocks(4),
        ],
        start=3,
    ):
        assert build() is build()
        assert layout.num_plans == num_plans
    equal_layout = SequenceLayout.make(SequenceSharding.of(16, 2), 0, rows=2)
    assert equal_layout.num_plans == 0  # plans are cached in the layout only


def test_layouts_of_other_samples_share_plans():
    layout = SequenceLayout.make(
        SequenceSharding.of(16, 2), 1, rows=2, sample_ids=torch.tensor([4, 6])
    )
    blocks = layout.blocks(0)
    copy = layout.with_samples(torch.tensor([1, 2]))
    assert (layout.sample_ids.tolist(), copy.sample_ids.tolist()) == ([4, 6], [1, 2])
    assert copy.blocks(0) is blocks
    assert copy.row_blocks() is layout.row_blocks()
    assert layout.num_plans == copy.num_plans == 2
    assert copy.row_indices is layout.row_indices


def test_nothing_is_read_back_from_the_device():
    """The meta device has no values: reading one raises."""
    sharding = SequenceSharding.of(10, 2, cu_seqlens=[0, 4, 10], padded_cu_seqlens=[0, 4, 12])
    ids = torch.tensor([[0] * 4 + [1] * 6] * 2)
    layout = SequenceLayout.make(
        sharding,
        1,
        rows=2,
        positions=torch.arange(20).view(2, 10),
        document_ids=ids,
        sample_ids=torch.arange(2),
        masks_by_ids=True,
        device=META,
    )
    tensors = (
        layout.positions,
        layout.document_ids,
        layout.sample_ids,
        layout.row_indices,
        layout.inverse,
    )
    assert {tensor.device for tensor in tensors} == {META}
    assert [tuple(tensor.shape) for tensor in tensors] == [(6, 2), (6, 2), (2,), (6,), (10,)]
    assert layout.columns.tolist() == [1, 2, 6, 7, 8, 9]
    assert layout.blocks(0)
    assert layout.blocks(None)
    assert layout.row_blocks()
    assert layout.to_rows(torch.empty(12, 2, 3, device=META)).shape == (10, 2, 3)


def test_unsharded_layout_keeps_whole_rows():
    layout = SequenceLayout.of_rows(8, sample_ids=torch.arange(2))
    x = torch.arange(16).view(2, 8)
    assert layout.local(x) is x
    assert (layout.sharding, layout.rank, layout.positions.tolist()) == (None, 0, list(range(8)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "rank 2 of 2 context-parallel ranks"),
        ({"positions": torch.zeros(2, 4)}, "positions (2, 4) must be (2, 8): all columns of each"),
        ({"document_ids": torch.zeros(3, 8)}, "document_ids (3, 8) must be (2, 8)"),
        ({"sample_ids": torch.zeros(3)}, "sample_ids (3,) must be (2,)"),
        ({"positions": torch.zeros(2, 8, device=META)}, "positions are on meta: pass them on"),
        ({"document_ids": torch.tensor([[0] * 8, [0, 0, 3, 3, 1, 1, 2, 2]])},
         "document_ids of row 1 decrease from 3 to 1 at column 4: number documents"),
        ({"sharding": SequenceSharding.of(8, 2, cu_seqlens=[0, 4, 8]),
          "document_ids": torch.tensor([[0] * 4 + [1] * 4, [0] * 6 + [1] * 2])},
         "a document of row 1 continues across position 4, where cu_seqlens separates sequences"),
    ],
)  # fmt: skip
def test_mismatched_shapes_are_reported(options, message):
    options = {"sharding": SequenceSharding.of(8, 2), "rank": 0, "rows": 2, **options}
    sharding, rank = options.pop("sharding"), options.pop("rank")
    with pytest.raises(ValueError, match=re.escape(message)):
        SequenceLayout.make(sharding, rank, **options)


def test_tensors_of_wrong_length_are_reported():
    layout = SequenceLayout.make(SequenceSharding.of(6, 2, padded_cu_seqlens=[0, 8]), 0, rows=2)
    with pytest.raises(ValueError, match=re.escape("rows (2, 4) must be (2, 6)")):
        layout.local(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=re.escape("rows of shape (6,): give [b, 6]")):
        layout.local(torch.zeros(6))
    with pytest.raises(ValueError, match="rows are on meta: pass them on the host"):
        layout.local(torch.zeros(2, 6, device=META))
    with pytest.raises(ValueError, match=re.escape("6 tokens in (6, 1), but the layout has 8")):
        layout.to_rows(torch.zeros(6, 1))
    with pytest.raises(ValueError, match=re.escape("8 tokens in (8, 1), but the layout has 6")):
        layout.to_ranks(torch.zeros(8, 1))


@pytest.mark.parametrize("method", ["blocks", "row_blocks", "to_rows", "to_ranks"])
def test_missing_sharding_is_reported(method):
    layout = SequenceLayout.of_rows(8)
    argument = {"blocks": 0, "row_blocks": None}.get(method, torch.zeros(8))
    with pytest.raises(ValueError, match=r"SequenceLayout\.make"):
        getattr(layout, method)(argument)


def test_blocks_from_document_ids_alone_are_refused():
    layout = SequenceLayout.of_rows(8, document_ids=torch.zeros(2, 8, dtype=torch.int32))
    with pytest.raises(
        ValueError, match=re.escape("documents only by their ids: blocks need their")
    ):
        layout.blocks(0)

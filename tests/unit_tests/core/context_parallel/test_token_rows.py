# SPDX-License-Identifier: Apache-2.0
"""Tokens packed for recurrences, in both directions, against an order built token by token."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.context_parallel import PackedTokens, SequenceLayout, SequenceSharding
from tests.unit_tests.core.context_parallel.random_cuts import random_case

CASES = [random_case(random.Random(seed)) for seed in range(2000, 2080)]
ROWS = 3


class OpNames(TorchDispatchMode):
    """Record the name of every op."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch._dynamo, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def random_document_lengths(case, rng: random.Random) -> list[list[int]]:
    """Draw the document lengths of each row; no document spans two sequences."""
    documents = []
    for _ in range(ROWS):
        lengths: list[int] = []
        for remaining in case.lengths:
            while remaining:
                lengths.append(rng.randint(1, remaining))
                remaining -= lengths[-1]
        documents.append(lengths)
    return documents


def make_document_ids(documents: list[list[int]]) -> torch.Tensor:
    """Return [b, s], the number of each token's document."""
    return torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in documents])


def test_whole_rows_are_packed_by_row_then_by_document():
    num_reordered = uneven = padded = 0
    for case in CASES:
        documents = random_document_lengths(case, random.Random(case.total))
        sharding, columns = case.sharding(), case.row_indices()
        ids = make_document_ids(documents)
        for rank in {0, case.size - 1}:
            layout = SequenceLayout.make(sharding, rank, rows=ROWS, document_ids=ids)
            rows = layout.whole_rows(ROWS)
            lengths = [n for row in documents for n in row]
            assert rows.sequences.lengths == tuple(lengths), case
            # Gathered tokens, rank after rank; each value encodes the token's row and row index.
            row_indices = torch.tensor([row_index for indices in columns for row_index in indices])
            gathered = torch.stack([row_indices] * ROWS, 1) + 1000 * torch.arange(1, ROWS + 1)
            gathered[row_indices < 0] = -5
            packed = rows.pack(gathered[..., None] * torch.tensor([1, 2]))
            expected = 1000 * torch.arange(1, ROWS + 1)[:, None] + torch.arange(case.total)
            expected = expected.reshape(-1, 1) * torch.tensor([1, 2])
            assert torch.equal(packed, expected), case
            unpacked = rows.unpack(packed)
            gathered[row_indices < 0] = 0
            assert torch.equal(unpacked[..., 0], gathered), case
            num_reordered += not torch.equal(row_indices, torch.arange(len(row_indices)))
        uneven += len({len(row) for row in documents}) > 1
        padded += sharding.is_padded
    assert min(num_reordered, uneven, padded) > 20


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_each_dense_row_is_one_sequence(size, order):
    sharding = SequenceSharding.of(24, size, order=order)
    rows = SequenceLayout.make(sharding, 0, rows=2).whole_rows(2)
    assert rows.sequences.bounds == (0, 24, 48)
    row_indices = torch.tensor(
        [row_index for rank in range(size) for row_index in sharding.row_indices(rank)]
    )
    assert rows.pack(torch.stack([row_indices, row_indices + 50], 1)).tolist() == [
        *range(24),
        *range(50, 74),
    ]


def test_zigzag_row_matches_a_handwritten_example():
    # Two ranks, chunks of 2: rank 0 holds places 0 1 6 7, rank 1 holds 2 3 4 5.
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    layout = SequenceLayout.make(SequenceSharding.of(8, 2), 0, rows=1, document_ids=ids)
    rows = layout.whole_rows(1)
    packed = rows.pack(torch.tensor([10, 11, 16, 17, 12, 13, 14, 15])[:, None])
    assert packed.tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert rows.unpack(packed)[:, 0].tolist() == [10, 11, 16, 17, 12, 13, 14, 15]
    assert rows.sequences.bounds == (0, 3, 7, 8)


def test_unsharded_layout_packs_each_row_as_one_document():
    layout = SequenceLayout.of_rows(5)
    x = torch.arange(10).view(5, 2)
    assert layout.whole_rows(2).pack(x).tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert layout.whole_rows(2).sequences.bounds == (0, 5, 10)
    packed = SequenceLayout.of_rows(5, positions=torch.arange(10).view(2, 5))
    assert packed.whole_rows(2).sequences.bounds == (0, 5, 10)


def gradients(rows: PackedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ((gradient of pack, unpack), (gradient of unpack, pack)) of random tensors."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows.length, rows.batch, 2, generator=generator, requires_grad=True)
    y = torch.randn(rows.sequences.tokens, 2, generator=generator, requires_grad=True)
    (d_x,) = torch.autograd.grad(rows.pack(x), x, y.detach())
    (d_y,) = torch.autograd.grad(rows.unpack(y), y, x.detach())
    with torch.no_grad():
        return (d_x, rows.unpack(y)), (d_y, rows.pack(x))


@pytest.mark.parametrize("padded", [False, True])
def test_gather_and_scatter_are_gradients_of_each_other(padded):
    bounds = {"cu_seqlens": [0, 8, 16], "padded_cu_seqlens": [0, 8, 24]} if padded else {}
    rows = SequenceLayout.make(SequenceSharding.of(16, 4, **bounds), 0, rows=2).whole_rows(2)
    with OpNames() as ops:
        for actual, expected in gradients(rows):
            assert torch.equal(actual, expected)
    moving = {name for name in ops.names if any(w in name for w in ("index", "scatter", "copy"))}
    fills = {"aten.index_fill_.int_Scalar"} if padded else set()
    assert moving == {"aten.index_select.default", *fills}
    assert not any("zeros" in name for name in ops.names)


def test_tokens_in_order_are_not_copied():
    layout = SequenceLayout.make(SequenceSharding.of(8, 2, order="contiguous"), 0, rows=1)
    rows, x = layout.whole_rows(1), torch.randn(8, 1, 3)
    assert rows.pack(x).data_ptr() == rows.unpack(rows.pack(x)).data_ptr() == x.data_ptr()
    for actual, expected in gradients(rows):
        assert torch.equal(actual, expected)
    zigzag = SequenceLayout.make(SequenceSharding.of(8, 2), 0, rows=1).whole_rows(1)
    assert zigzag.pack(x).data_ptr() != x.data_ptr()


def test_all_layers_share_one_map():
    layout = SequenceLayout.make(SequenceSharding.of(8, 2), 1, rows=2)
    rows = layout.whole_rows(2)
    assert layout.num_maps == 1
    assert layout.with_samples(torch.arange(2)).whole_rows(2) is rows
    padding = torch.ones(4, 2, dtype=torch.bool)
    assert layout.with_padding(padding).whole_rows(2) is rows
    assert (layout.num_maps, layout.num_plans) == (1, 0)


def test_padding_tokens_are_left_out_of_packing():
    # Rows that begin with padding, as in a batch of prompts: 2 of 3 tokens are real, and none.
    rows = PackedTokens(np.array([2, 4]), [0, 2, 2], length=3, batch=2)
    x = torch.arange(1.0, 7.0).view(3, 2)
    assert rows.pack(x).tolist() == [3, 5]
    assert rows.unpack(rows.pack(x)).tolist() == [[0, 0], [3, 0], [5, 0]]
    assert rows.unpack(torch.full((2,), torch.nan))[0].tolist() == [0, 0]
    empty = PackedTokens(np.array([], dtype=np.int64), [0, 0, 0], length=3, batch=2)
    assert empty.pack(x).shape == (0,)
    assert empty.unpack(empty.pack(x)).tolist() == [[0, 0]] * 3


def test_documents_given_only_by_ids_are_refused():
    ids = torch.tensor([[0, 0, 1, 1]])
    for layout in (
        SequenceLayout.of_rows(4, document_ids=ids),
        SequenceLayout(torch.arange(4), ids.t()),
    ):
        with pytest.raises(ValueError, match="only by their ids: a recurrence needs their"):
            layout.whole_rows(1)
    sharding = SequenceSharding.of(4, 1)
    from_host = SequenceLayout.make(sharding, 0, rows=1, document_ids=ids, masks_by_ids=True)
    assert from_host.document_ids is not None
    assert from_host.whole_rows(1).sequences.lengths == (2, 2)


def test_tokens_that_do_not_fit_are_refused():
    layout = SequenceLayout.make(SequenceSharding.of(8, 2), 0, rows=2)
    with pytest.raises(ValueError, match="3 rows of tokens, but the layout has 2"):
        layout.whole_rows(3)
    rows = layout.whole_rows(2)
    with pytest.raises(ValueError, match=r"\(4, 2\).*\(8, 2\)"):
        rows.pack(torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"\(8, 2\).*\(16,\)"):
        rows.unpack(torch.ones(8, 2))
    with pytest.raises(ValueError, match="bounds end at 3, but there are 2 tokens"):
        PackedTokens(np.arange(2), [0, 3], length=2, batch=1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sequence_not_divisible_by_twice_cp_is_named(size):
    bounds = [0, 4 * size, 7 * size, 11 * size]  # the second has 3 cp tokens: chunks of 1.5
    with pytest.raises(ValueError, match=rf"sequence 1 has {3 * size} tokens, .* by {2 * size}"):
        SequenceSharding.of(bounds[-1], size, cu_seqlens=bounds)
    even = [2 * bound for bound in bounds]
    rows = SequenceLayout.make(SequenceSharding.of(even[-1], size, cu_seqlens=even), 0, rows=1)
    lengths = tuple(end - start for start, end in pairwise(even))
    assert rows.whole_rows(1).sequences.lengths == lengths

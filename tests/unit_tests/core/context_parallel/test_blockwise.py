# SPDX-License-Identifier: Apache-2.0
"""Attention by any blocks of any cut is the attention of the whole: outputs and all gradients."""

import dataclasses
import math
import random
from itertools import pairwise

import pytest
import torch

from megatron.core.context_parallel import blockwise
from megatron.core.context_parallel.blockwise import AttentionBlock, Blocks, attention_blocks
from megatron.core.context_parallel.sequence_sharding import SequenceSharding
from megatron.core.ops.attention import attention, reference
from megatron.core.ops.dropout import AttentionDropout
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import assert_close, maker, naive_attention

LENGTH, ROWS, HEADS, FEATURES, SCALE = 24, 3, 4, 6, 0.3
#: Of each row; the last two agree and share blocks.
DOCUMENTS = ((0, 5, 6, 19, 24), (0, 9, 24), (0, 9, 24))
SITE = AttentionDropout(rate=0.4, key=5, sample_ids=torch.tensor([8, 3, 1]), head_offset=2)


@pytest.fixture
def make():
    """Make fp64 tensors from a fixed seed."""
    return maker()


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


def identities(documents=DOCUMENTS):
    """Number the documents of every token, [s, b]."""
    rows = []
    for bounds in documents:
        numbers = [torch.full((b - a,), i) for i, (a, b) in enumerate(pairwise(bounds))]
        rows.append(torch.cat(numbers))
    return torch.stack(rows, -1)


def tensors(make, groups=2, dtype=torch.float64):
    """Make query, key, value and the gradient of the output."""
    shapes = [HEADS, groups, groups, HEADS]
    return [make(LENGTH, ROWS, heads, FEATURES).to(dtype) for heads in shapes]


def by_ranks(parts, cut, *, sinks=None, documents=DOCUMENTS, **options):
    """Attend on every rank to the keys of one rank after the other, and differentiate.

    Returns:
        (out, lse, dq, dk, dv) in the order of places, and the gradient of sinks if there are any.
    """
    query, key, value, _ = parts
    ranks = [torch.tensor(cut.row_indices(rank)) for rank in range(cut.size)]
    local = [[x[places.clamp(min=0)] for x in parts] for places in ranks]
    window = options.get("window")
    out, lse = torch.zeros_like(query), torch.zeros(ROWS, HEADS, LENGTH, dtype=torch.float64)
    sums = [torch.zeros_like(x, dtype=torch.float64) for x in (query, key, value)]
    d_sinks = None if sinks is None else torch.zeros_like(sinks)
    for rank, places in enumerate(ranks):
        real = places >= 0
        result, plans = None, []
        for other in range(cut.size):
            blocks = attention_blocks(
                cut.runs(rank), cut.runs(other), rows=ROWS, documents=documents, window=window
            )
            plans.append(blocks)
            pair = local[other][1:3]
            result = blockwise.forward(
                local[rank][0], *pair, blocks, scale=SCALE, into=result, **options
            )
        equal = bool((result[0][~real] == 0).all())
        assert equal, "padding"
        equal = bool((result[1][..., ~real] == -math.inf).all())
        assert equal, "padding"
        result = blockwise.finish(*result, sinks, dtype=query.dtype)
        out[places[real]], lse[..., places[real]] = result[0][real], result[1][..., real].double()
        mine = local[rank][3]
        for other, blocks in enumerate(plans):
            arguments = (mine, local[rank][0], *local[other][1:3], *result, blocks)
            found = blockwise.backward(*arguments, scale=SCALE, **options)
            for total, x, owner in zip(sums, found, (rank, other, other), strict=True):
                real = ranks[owner] >= 0
                equal = bool((x[~real] == 0).all())
                assert equal, "padding"
                total[ranks[owner][real]] += x[real]
        if sinks is not None:
            d_sinks += reference.sink_gradient(mine, *result, sinks)  # out is 0 in padding
    return out, lse, *sums, *([] if sinks is None else [d_sinks])


def whole(parts, sinks=None, *, documents=DOCUMENTS, window=None, dropout=None):
    """Compute the same from the definition in fp64."""
    leaves = [
        x.double().requires_grad_() for x in (*parts[:3], *([] if sinks is None else [sinks]))
    ]
    keep = None
    if dropout is not None:
        places = torch.arange(LENGTH)
        keep = dropout.keep(HEADS, places, 0, LENGTH).double() * dropout.scale
    ids = None if documents is None else identities(documents)
    out, lse = naive_attention(
        *leaves, causal=True, scale=SCALE, window=window, documents=ids, keep=keep
    )
    return out.detach(), lse, *torch.autograd.grad(out, leaves, parts[3].double())


CUTS = {
    "one rank": SequenceSharding.of(LENGTH, 1),
    "zigzag 2": SequenceSharding.of(LENGTH, 2),
    "zigzag 3": SequenceSharding.of(LENGTH, 3),
    "contiguous 4": SequenceSharding.of(LENGTH, 4, order="contiguous"),
    "sequences, padded": SequenceSharding.of(
        LENGTH, 2, cu_seqlens=[0, 9, 24], padded_cu_seqlens=[0, 12, 28]
    ),
}
OPTIONS = {
    "documents": {},
    "dense": {"documents": None},
    "window": {"window": 4},
    "dense, window": {"window": 7, "documents": None},
    "dropout": {"dropout": SITE},
    "all": {"window": 4, "dropout": SITE},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cut", CUTS)
def test_ranks_compute_what_one_computes(make, cut, options):
    parts, sinks = tensors(make), make(HEADS) if options in ("documents", "all") else None
    found = by_ranks(parts, CUTS[cut], sinks=sinks, **OPTIONS[options])
    expected = whole(parts, sinks, **OPTIONS[options])
    for index, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert_close(x, y, torch.float64, f"{index}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_low_precision_merges_in_fp32(make, dtype, groups):
    parts, sinks = tensors(make, groups, dtype), make(HEADS).to(dtype)
    found = by_ranks(parts, CUTS["zigzag 3"], sinks=sinks)
    assert found[0].dtype == dtype
    for index, (x, y) in enumerate(zip(found, whole(parts, sinks), strict=True)):
        assert_close(x, y, dtype, f"{index}")


def shattered(blocks, chance):
    """Cut blocks at random, squares into two squares and a rectangle, and shuffle them."""
    done, todo = [], list(blocks)
    while todo:
        block = todo.pop()
        queries, keys = block.q1 - block.q0, block.k1 - block.k0
        kind = chance.choice(["keep", "rows", "queries", "keys"])
        if kind == "rows" and block.row1 - block.row0 > 1:
            row = chance.randrange(block.row0 + 1, block.row1)
            todo += [dataclasses.replace(block, **x) for x in ({"row1": row}, {"row0": row})]
        elif kind in ("queries", "keys") and block.causal and queries > 1:
            n = chance.randrange(1, queries)
            q, k = block.q0 + n, block.k0 + n
            above = {
                "q0": q,
                "k0": k,
                "q_row_start": block.q_row_start + n,
                "k_row_start": block.k_row_start + n,
            }
            beside = {"q0": q, "q_row_start": block.q_row_start + n, "k1": k, "causal": False}
            changes = ({"q1": q, "k1": k}, above, beside)
            todo += [dataclasses.replace(block, **x) for x in changes]
        elif kind == "queries" and queries > 1:
            n = chance.randrange(1, queries)
            after = {"q0": block.q0 + n, "q_row_start": block.q_row_start + n}
            todo += [dataclasses.replace(block, **x) for x in ({"q1": block.q0 + n}, after)]
        elif kind == "keys" and keys > 1:
            n = chance.randrange(1, keys)
            after = {"k0": block.k0 + n, "k_row_start": block.k_row_start + n}
            todo += [dataclasses.replace(block, **x) for x in ({"k1": block.k0 + n}, after)]
        else:
            done.append(block)
    chance.shuffle(done)
    return done


@pytest.mark.parametrize("seed", range(6))
def test_any_partition_of_the_pairs(make, seed):
    parts, chance = tensors(make), random.Random(seed)
    runs = CUTS["one rank"].runs(0)
    options = {"window": chance.choice([None, 5]), "dropout": chance.choice([None, SITE])}
    few = attention_blocks(runs, runs, rows=ROWS, documents=DOCUMENTS)
    blocks = shattered(few, chance)
    assert len(blocks) > 2 * len(few)
    out, lse = blockwise.forward(*parts[:3], blocks, scale=SCALE, **options)
    grads = blockwise.backward(parts[3], *parts[:3], out, lse, blocks, scale=SCALE, **options)
    for index, (x, y) in enumerate(zip((out, lse, *grads), whole(parts, **options), strict=True)):
        assert_close(x, y, torch.float64, f"{index}")


def test_dropout_drops_what_the_unsplit_op_drops(make):
    query = torch.zeros(LENGTH, ROWS, HEADS, LENGTH)
    value = torch.eye(LENGTH)[:, None, None].expand(LENGTH, ROWS, 2, LENGTH)  # out is the weights
    key = torch.zeros(LENGTH, ROWS, 2, LENGTH)
    unsplit, _ = attention(query, key, value, document_ids=identities(), dropout=SITE)
    found = by_ranks([query, key, value, query], CUTS["zigzag 3"], dropout=SITE)[0]
    equal = bool(((found == 0) == (unsplit == 0)).all())
    assert equal
    seen, _ = attention(query, key, value, document_ids=identities())
    dropped = float((unsplit[seen > 0] == 0).float().mean())
    assert 0.2 < dropped < 0.6


def test_one_block_of_everything_is_the_op_itself(make, monkeypatch):
    monkeypatch.setattr(Blocks, "tile_list", None)
    parts = tensors(make, dtype=torch.float32)
    runs = CUTS["one rank"].runs(0)
    blocks = attention_blocks(runs, runs, rows=ROWS)
    assert blocks == (AttentionBlock(0, ROWS, 0, LENGTH, 0, LENGTH, 0, 0, True),)
    leaves = [x.requires_grad_() for x in parts[:3]]
    expected = attention(*leaves, scale=SCALE)
    found = blockwise.forward(*parts[:3], blocks, scale=SCALE)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    grads = blockwise.backward(parts[3], *parts[:3], *found, blocks, scale=SCALE)
    wanted = torch.autograd.grad(expected[0], leaves, parts[3])
    assert all(torch.equal(x, y) for x, y in zip(grads, wanted, strict=True))


def test_window_covering_whole_block_uses_plain_kernel(make, monkeypatch):
    masks = []
    plain = reference.attention_forward
    monkeypatch.setattr(
        reference,
        "attention_forward",
        lambda *args, **options: masks.append(args[5]) or plain(*args, **options),
    )
    runs = CUTS["contiguous 4"].runs(1)  # places 6 to 11, documents from 5, 6 and 0 or 9 on
    blocks = attention_blocks(runs, runs, rows=ROWS, documents=DOCUMENTS, window=4)
    query, key, value, _ = (x[:6] for x in tensors(make))
    blockwise.forward(query, key, value, blocks, scale=SCALE, window=4)
    lengths = [block.q1 - block.q0 for block in blocks]
    assert sorted(lengths) == [3, 3, 6]
    assert [mask.window for mask in masks] == [4 if n == 6 else None for n in lengths]


@pytest.mark.parametrize("cut", ["one rank", "zigzag 2"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_document_changes_no_other_by_a_bit(make, cut, window):
    parts = tensors(make, dtype=torch.float32)
    before = by_ranks(parts, CUTS[cut], window=window)
    changed = [x.clone() for x in parts]
    touched = torch.zeros(LENGTH, ROWS, dtype=torch.bool)
    touched[6:19, 0] = True  # the third document of the first row
    for x in changed:
        x[touched] = math.nan
    after = by_ranks(changed, CUTS[cut], window=window)
    for x, y in zip(before[:5], after[:5], strict=True):
        x, y = (z.permute(2, 0, 1) if z.shape[0] == ROWS else z for z in (x, y))
        assert torch.equal(x[~touched], y[~touched])
        assert (x != y)[touched].all()


def test_merging_with_what_saw_nothing_is_exact(make):
    out, lse = make(4, 2, 3, 5).float(), make(2, 3, 4).float()
    nothing, blind = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for x, y in (((out, lse), (nothing, blind)), ((nothing, blind), (out, lse))):
        kept = [z.clone() for z in x]
        blockwise.merge(*kept, *y)
        assert torch.equal(kept[0], out)
        assert torch.equal(kept[1], lse)
    blockwise.merge(nothing, blind, nothing.clone(), blind.clone())
    equal = bool((nothing == 0).all())
    assert equal
    equal = bool((blind == -math.inf).all())
    assert equal


def test_merging_attention_far_apart_does_not_overflow():
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 300.0)
    blockwise.merge(out, lse, 3 * out, lse - 600)
    assert torch.equal(out, torch.ones(1, 1, 1, 2))
    blockwise.merge(out, lse, 3 * out, lse.clone())
    assert torch.equal(out, torch.full((1, 1, 1, 2), 2.0))
    assert lse.item() == pytest.approx(300 + math.log(2))


def test_no_blocks_at_all(make):
    parts = tensors(make, dtype=torch.bfloat16)
    out, lse = blockwise.forward(*parts[:3], (), scale=SCALE)
    assert out.dtype == torch.float32
    equal = bool((out == 0).all())
    assert equal
    equal = bool((lse == -math.inf).all())
    assert equal
    grads = blockwise.backward(parts[3], *parts[:3], out, lse, (), scale=SCALE, fp32_sums=True)
    assert all((x == 0).all() and x.dtype == torch.float32 for x in grads)


def test_wide_gradients_are_the_sums_before_they_are_rounded(make):
    parts = tensors(make, dtype=torch.bfloat16)
    runs = CUTS["one rank"].runs(0)
    blocks = attention_blocks(runs, runs, rows=ROWS, documents=DOCUMENTS)
    out, lse = blockwise.forward(*parts[:3], blocks, scale=SCALE)
    wide, rounded = (
        blockwise.backward(parts[3], *parts[:3], out, lse, blocks, scale=SCALE, fp32_sums=wide)
        for wide in (True, False)
    )
    for x, y in zip(wide, rounded, strict=True):
        assert (x.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(x.bfloat16(), y)


def test_blockwise_attention_pays_off_unless_documents_are_tiny():
    shape = {"rows": 4, "length": 256, "heads": 8}
    assert blockwise.worth_blocks(4 * 256 // 16, **shape)
    assert not blockwise.worth_blocks(4 * 256 // 2, **shape)
    assert not blockwise.worth_blocks(4 * 256 // 16, **(shape | {"heads": 1}))

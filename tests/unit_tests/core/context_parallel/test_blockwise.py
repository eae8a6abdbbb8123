# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention of any sharding against unsharded attention: outputs and all gradients."""

import dataclasses
import math
import random
from itertools import pairwise

import pytest
import torch

from megatron.core.context_parallel import SequenceSharding, blockwise
from megatron.core.context_parallel.blockwise import AttentionBlock, Blocks, attention_blocks
from megatron.core.ops.attention import attention, cpu
from megatron.core.ops.attention.naive import attention as naive_attention
from megatron.core.ops.dropout import AttentionDropout
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import CPU_BOUND
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

LENGTH, ROWS, HEADS, FEATURES, SCALE = 24, 3, 4, 6, 0.3
#: cu_seqlens of each row; the last two rows are equal and share blocks.
DOCUMENTS = ((0, 5, 6, 19, 24), (0, 9, 24), (0, 9, 24))
SITE = AttentionDropout(rate=0.4, key=5, sample_ids=torch.tensor([8, 3, 1]), head_offset=2)


@pytest.fixture
def make():
    """Make fp64 tensors from a fixed seed."""
    source = generator(1234)
    return lambda *shape: torch.randn(shape, generator=source, dtype=torch.float64)


def assert_close(actual, expected, dtype, name):
    """Compare with a reference that is not all zero."""
    assert expected.any(), f"{name}: the reference is all zero, so comparing it proves nothing"
    assert_close_by_metric(name, actual, expected, bound=CPU_BOUND[dtype])


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


def identities(documents=DOCUMENTS):
    """Number the documents of every token, [s, b]."""
    rows = []
    for bounds in documents:
        ids = [torch.full((b - a,), i) for i, (a, b) in enumerate(pairwise(bounds))]
        rows.append(torch.cat(ids))
    return torch.stack(rows, -1)


def tensors(make, groups=2, dtype=torch.float64):
    """Make query, key, value and the gradient of the output."""
    shapes = [HEADS, groups, groups, HEADS]
    return [make(LENGTH, ROWS, heads, FEATURES).to(dtype) for heads in shapes]


def attend_by_ranks(inputs, sharding, *, sinks=None, documents=DOCUMENTS, **options):
    """Attend on every rank to the keys of one rank after the other, and differentiate.

    Returns:
        (out, lse, dq, dk, dv) in row order, and the gradient of the sinks if there are any.
    """
    query, key, value, _ = inputs
    ranks = [torch.tensor(sharding.row_indices(rank)) for rank in range(sharding.size)]
    local = [[x[row_indices.clamp(min=0)] for x in inputs] for row_indices in ranks]
    window = options.get("window")
    out, lse = torch.zeros_like(query), torch.zeros(ROWS, HEADS, LENGTH, dtype=torch.float64)
    sums = [torch.zeros_like(x, dtype=torch.float64) for x in (query, key, value)]
    d_sinks = None if sinks is None else torch.zeros_like(sinks)
    for rank, row_indices in enumerate(ranks):
        real = row_indices >= 0
        output, plans = None, []
        for key_rank in range(sharding.size):
            blocks = attention_blocks(
                sharding.runs(rank),
                sharding.runs(key_rank),
                rows=ROWS,
                documents=documents,
                window=window,
            )
            plans.append(blocks)
            key_value = local[key_rank][1:3]
            output = blockwise.forward(
                local[rank][0], *key_value, blocks, scale=SCALE, into=output, **options
            )
        equal = bool((output[0][~real] == 0).all())
        assert equal, "padding"
        equal = bool((output[1][..., ~real] == -math.inf).all())
        assert equal, "padding"
        output = blockwise.finish(*output, sinks, dtype=query.dtype)
        out[row_indices[real]] = output[0][real]
        lse[..., row_indices[real]] = output[1][..., real].double()
        grad_out = local[rank][3]
        for key_rank, blocks in enumerate(plans):
            arguments = (grad_out, local[rank][0], *local[key_rank][1:3], *output, blocks)
            grads = blockwise.backward(*arguments, scale=SCALE, **options)
            for total, x, owner in zip(sums, grads, (rank, key_rank, key_rank), strict=True):
                real = ranks[owner] >= 0
                equal = bool((x[~real] == 0).all())
                assert equal, "padding"
                total[ranks[owner][real]] += x[real]
        if sinks is not None:
            d_sinks += cpu.sink_gradient(grad_out, *output, sinks)  # out is 0 in padding
    return out, lse, *sums, *([] if sinks is None else [d_sinks])


def attend_reference(inputs, sinks=None, *, documents=DOCUMENTS, window=None, dropout=None):
    """Compute the results of `attend_by_ranks` from the definition in fp64."""
    leaves = [
        x.double().requires_grad_() for x in (*inputs[:3], *([] if sinks is None else [sinks]))
    ]
    keep = None
    if dropout is not None:
        positions = torch.arange(LENGTH)
        keep = dropout.keep(HEADS, positions, 0, LENGTH).double() * dropout.scale
    ids = None if documents is None else identities(documents)
    out, lse = naive_attention(
        *leaves, causal=True, scale=SCALE, window=window, documents=ids, keep=keep
    )
    return out.detach(), lse, *torch.autograd.grad(out, leaves, inputs[3].double())


SHARDINGS = {
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
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharded_attention_matches_the_reference(make, sharding, options):
    inputs, sinks = tensors(make), make(HEADS) if options in ("documents", "all") else None
    actual = attend_by_ranks(inputs, SHARDINGS[sharding], sinks=sinks, **OPTIONS[options])
    expected = attend_reference(inputs, sinks, **OPTIONS[options])
    for index, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert_close(x, y, torch.float64, f"{index}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_low_precision_merges_in_fp32(make, dtype, groups):
    inputs, sinks = tensors(make, groups, dtype), make(HEADS).to(dtype)
    actual = attend_by_ranks(inputs, SHARDINGS["zigzag 3"], sinks=sinks)
    assert actual[0].dtype == dtype
    for index, (x, y) in enumerate(zip(actual, attend_reference(inputs, sinks), strict=True)):
        assert_close(x, y, dtype, f"{index}")


def split_randomly(blocks, rng):
    """Split blocks at random, squares into two squares and a rectangle, and shuffle them."""
    finished, pending = [], list(blocks)
    while pending:
        block = pending.pop()
        queries, keys = block.q1 - block.q0, block.k1 - block.k0
        kind = rng.choice(["keep", "rows", "queries", "keys"])
        if kind == "rows" and block.row1 - block.row0 > 1:
            row = rng.randrange(block.row0 + 1, block.row1)
            pending += [dataclasses.replace(block, **x) for x in ({"row1": row}, {"row0": row})]
        elif kind in ("queries", "keys") and block.causal and queries > 1:
            n = rng.randrange(1, queries)
            q, k = block.q0 + n, block.k0 + n
            lower_square = {
                "q0": q,
                "k0": k,
                "q_row_start": block.q_row_start + n,
                "k_row_start": block.k_row_start + n,
            }
            rectangle = {"q0": q, "q_row_start": block.q_row_start + n, "k1": k, "causal": False}
            changes = ({"q1": q, "k1": k}, lower_square, rectangle)
            pending += [dataclasses.replace(block, **x) for x in changes]
        elif kind == "queries" and queries > 1:
            n = rng.randrange(1, queries)
            second_half = {"q0": block.q0 + n, "q_row_start": block.q_row_start + n}
            pending += [
                dataclasses.replace(block, **x) for x in ({"q1": block.q0 + n}, second_half)
            ]
        elif kind == "keys" and keys > 1:
            n = rng.randrange(1, keys)
            second_half = {"k0": block.k0 + n, "k_row_start": block.k_row_start + n}
            pending += [
                dataclasses.replace(block, **x) for x in ({"k1": block.k0 + n}, second_half)
            ]
        else:
            finished.append(block)
    rng.shuffle(finished)
    return finished


@pytest.mark.parametrize("seed", range(6))
def test_any_partition_of_the_pairs_gives_the_same_result(make, seed):
    inputs, rng = tensors(make), random.Random(seed)
    runs = SHARDINGS["one rank"].runs(0)
    options = {"window": rng.choice([None, 5]), "dropout": rng.choice([None, SITE])}
    unsplit = attention_blocks(runs, runs, rows=ROWS, documents=DOCUMENTS)
    blocks = split_randomly(unsplit, rng)
    assert len(blocks) > 2 * len(unsplit)
    out, lse = blockwise.forward(*inputs[:3], blocks, scale=SCALE, **options)
    grads = blockwise.backward(inputs[3], *inputs[:3], out, lse, blocks, scale=SCALE, **options)
    for index, (x, y) in enumerate(
        zip((out, lse, *grads), attend_reference(inputs, **options), strict=True)
    ):
        assert_close(x, y, torch.float64, f"{index}")


def test_dropout_mask_matches_the_unsharded_op(make):
    query = torch.zeros(LENGTH, ROWS, HEADS, LENGTH)
    value = torch.eye(LENGTH)[:, None, None].expand(
        LENGTH, ROWS, 2, LENGTH
    )  # the output is the softmax weights
    key = torch.zeros(LENGTH, ROWS, 2, LENGTH)
    unsharded, _ = attention(query, key, value, document_ids=identities(), dropout=SITE)
    sharded = attend_by_ranks([query, key, value, query], SHARDINGS["zigzag 3"], dropout=SITE)[0]
    equal = bool(((sharded == 0) == (unsharded == 0)).all())
    assert equal
    weights, _ = attention(query, key, value, document_ids=identities())
    dropped = float((unsharded[weights > 0] == 0).float().mean())
    assert 0.2 < dropped < 0.6


def test_single_full_block_equals_the_plain_op(make, monkeypatch):
    monkeypatch.setattr(Blocks, "tile_list", None)
    inputs = tensors(make, dtype=torch.float32)
    runs = SHARDINGS["one rank"].runs(0)
    blocks = attention_blocks(runs, runs, rows=ROWS)
    assert blocks == (AttentionBlock(0, ROWS, 0, LENGTH, 0, LENGTH, 0, 0, True),)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    expected = attention(*leaves, scale=SCALE)
    actual = blockwise.forward(*inputs[:3], blocks, scale=SCALE)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    grads = blockwise.backward(inputs[3], *inputs[:3], *actual, blocks, scale=SCALE)
    expected_grads = torch.autograd.grad(expected[0], leaves, inputs[3])
    assert all(torch.equal(x, y) for x, y in zip(grads, expected_grads, strict=True))


def test_window_covering_whole_block_uses_plain_kernel(make, monkeypatch):
    masks = []
    original = cpu.attention_forward
    monkeypatch.setattr(
        cpu,
        "attention_forward",
        lambda *args, **options: masks.append(args[5]) or original(*args, **options),
    )
    runs = SHARDINGS["contiguous 4"].runs(1)  # tokens 6 to 11; documents start at 5, 6 and 0 or 9
    blocks = attention_blocks(runs, runs, rows=ROWS, documents=DOCUMENTS, window=4)
    query, key, value, _ = (x[:6] for x in tensors(make))
    blockwise.forward(query, key, value, blocks, scale=SCALE, window=4)
    lengths = [block.q1 - block.q0 for block in blocks]
    assert sorted(lengths) == [3, 3, 6]
    assert [mask.window for mask in masks] == [4 if n == 6 else None for n in lengths]


@pytest.mark.parametrize("sharding", ["one rank", "zigzag 2"])
@pytest.mark.parametrize("window", [None, 4])
def test_documents_do_not_affect_each_other_by_a_bit(make, sharding, window):
    inputs = tensors(make, dtype=torch.float32)
    before = attend_by_ranks(inputs, SHARDINGS[sharding], window=window)
    changed = [x.clone() for x in inputs]
    touched = torch.zeros(LENGTH, ROWS, dtype=torch.bool)
    touched[6:19, 0] = True  # the third document of the first row
    for x in changed:
        x[touched] = math.nan
    after = attend_by_ranks(changed, SHARDINGS[sharding], window=window)
    for x, y in zip(before[:5], after[:5], strict=True):
        x, y = (z.permute(2, 0, 1) if z.shape[0] == ROWS else z for z in (x, y))
        assert torch.equal(x[~touched], y[~touched])
        assert (x != y)[touched].all()


def test_merging_with_fully_masked_attention_is_exact(make):
    out, lse = make(4, 2, 3, 5).float(), make(2, 3, 4).float()
    empty_out, empty_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for x, y in (((out, lse), (empty_out, empty_lse)), ((empty_out, empty_lse), (out, lse))):
        merged = [z.clone() for z in x]
        blockwise.merge(*merged, *y)
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    blockwise.merge(empty_out, empty_lse, empty_out.clone(), empty_lse.clone())
    equal = bool((empty_out == 0).all())
    assert equal
    equal = bool((empty_lse == -math.inf).all())
    assert equal


def test_merging_distant_lse_values_does_not_overflow():
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 300.0)
    blockwise.merge(out, lse, 3 * out, lse - 600)
    assert torch.equal(out, torch.ones(1, 1, 1, 2))
    blockwise.merge(out, lse, 3 * out, lse.clone())
    assert torch.equal(out, torch.full((1, 1, 1, 2), 2.0))
    assert lse.item() == pytest.approx(300 + math.log(2))


def test_no_blocks_give_zero_outputs_and_gradients(make):
    inputs = tensors(make, dtype=torch.bfloat16)
    out, lse = blockwise.forward(*inputs[:3], (), scale=SCALE)
    assert out.dtype == torch.float32
    equal = bool((out == 0).all())
    assert equal
    equal = bool((lse == -math.inf).all())
    assert equal
    grads = blockwise.backward(inputs[3], *inputs[:3], out, lse, (), scale=SCALE, fp32_sums=True)
    assert all((x == 0).all() and x.dtype == torch.float32 for x in grads)


def test_fp32_gradients_are_the_sums_before_rounding(make):
    inputs = tensors(make, dtype=torch.bfloat16)
    runs = SHARDINGS["one rank"].runs(0)
    blocks = attention_blocks(runs, runs, rows=ROWS, documents=DOCUMENTS)
    out, lse = blockwise.forward(*inputs[:3], blocks, scale=SCALE)
    fp32_sums, rounded = (
        blockwise.backward(
            inputs[3], *inputs[:3], out, lse, blocks, scale=SCALE, fp32_sums=fp32_sums
        )
        for fp32_sums in (True, False)
    )
    for x, y in zip(fp32_sums, rounded, strict=True):
        assert (x.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(x.bfloat16(), y)


def test_blockwise_attention_pays_off_unless_documents_are_tiny():
    shape = {"rows": 4, "length": 256, "heads": 8}
    assert blockwise.worth_blocks(4 * 256 // 16, **shape)
    assert not blockwise.worth_blocks(4 * 256 // 2, **shape)
    assert not blockwise.worth_blocks(4 * 256 // 16, **(shape | {"heads": 1}))

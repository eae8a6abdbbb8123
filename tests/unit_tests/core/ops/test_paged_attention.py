# SPDX-License-Identifier: Apache-2.0
"""The paged attention reference against dense attention and closed forms."""

from dataclasses import replace

import pytest
import torch

from megatron.core.ops.attention import attention
from megatron.core.ops.attention.naive import attention as naive_attention
from megatron.core.ops.paged_attention import (
    JointPages,
    PagedBatch,
    paged_attention,
    write_and_attend,
    write_to_pages,
)
from megatron.core.ops.paged_attention.triton import (
    MAX_SPLIT_TOKENS,
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    num_splits,
)
from tests.support.closeness import relative_error
from tests.support.nan_memory import nan_memory
from tests.support.paged_rows import paged_rows

FP64 = torch.float64
# decode, draft tokens, whole prompt, prompt chunk, draft tokens, padding row, waiting row
NEW, CONTEXTS = (1, 4, 37, 20, 3, 1, 0), (50, 23, 37, 61, 16, 0, 9)


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_paged_attention_matches_dense_attention(window, with_sinks):
    rows = paged_rows(NEW, CONTEXTS, heads=(6, 2), features=8, padding=4, window=window)
    sinks = torch.randn(6, dtype=FP64) if with_sinks else None
    out, lse = paged_attention(
        rows.query, *rows.caches, batch=rows.batch, scale=0.3, window=window, sinks=sinks
    )
    begin = 0
    for new, context, key, value in zip(NEW, CONTEXTS, rows.keys, rows.values, strict=True):
        tokens = slice(begin, begin + new)
        begin += new
        if not new:
            continue
        if not context:
            assert not out[tokens].any()
            assert lse[tokens].isneginf().all()
            continue
        arguments = (rows.query[tokens, None], key[:, None], value[:, None], sinks)
        options = {"scale": 0.3, "window": window}
        references = (
            naive_attention(*arguments, causal=True, **options),
            attention(*arguments[:3], sinks=sinks, **options),
        )
        for expected, expected_lse in references:
            assert relative_error(out[tokens], expected[:, 0]) < 1e-12
            assert relative_error(lse[tokens], expected_lse[0].t()) < 1e-12
    assert not out[begin:].any()
    assert lse[begin:].isneginf().all()


@pytest.mark.parametrize("window", [None, 5])
def test_zero_queries_give_the_mean_of_visible_values(window):
    rows = paged_rows([4, 1], [21, 18], heads=(2, 1), features=8, window=window)
    for with_sinks in (False, True):
        sinks = torch.zeros(2, dtype=FP64) if with_sinks else None
        out, lse = paged_attention(
            torch.zeros_like(rows.query),
            *rows.caches,
            batch=rows.batch,
            window=window,
            sinks=sinks,
        )
        for token, (row, end) in enumerate([(0, 18), (0, 19), (0, 20), (0, 21), (1, 18)]):
            begin = max(end - window, 0) if window else 0
            count = end - begin + with_sinks
            mean = rows.values[row][begin:end].sum(0) / count
            assert torch.allclose(out[token], mean.expand(2, 8), rtol=1e-12, atol=1e-14)
            assert torch.allclose(lse[token].exp(), torch.full((2,), count, dtype=FP64))


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7, 16, 1, 13, 3]])
def test_chunked_prefill_matches_whole_prompt(chunks):
    q, k, v = (torch.randn(40, 1, n, 8, dtype=FP64) for n in (6, 2, 2))
    expected, expected_lse = naive_attention(q, k, v, causal=True, scale=8**-0.5)
    key_cache, value_cache = (torch.full((9, 16, 2, 8), torch.nan, dtype=FP64) for _ in range(2))
    table = torch.tensor([[7, 2, 5]]).int()
    num_computed = 0
    for chunk in chunks:
        positions = torch.arange(num_computed, num_computed + chunk)
        num_computed += chunk
        slots = table[0, positions // 16].long() * 16 + positions % 16
        write_to_pages(
            k[positions, 0],
            v[positions, 0],
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=slots,
        )
        batch = PagedBatch(
            block_table=table,
            query_bounds=torch.tensor([0, chunk]).int(),
            context_lengths=torch.tensor([num_computed]).int(),
            max_query=64,
            max_context=48,
        )
        out, lse = paged_attention(q[positions, 0], key_cache, value_cache, batch=batch)
        assert relative_error(out, expected[positions, 0]) < 1e-12
        assert relative_error(lse, expected_lse[0].t()[positions]) < 1e-12


@pytest.mark.parametrize("table", [(2, 3, 4), (2, 0, 4)])
def test_decode_follows_the_block_table_in_any_order(table):
    # In the second table the first and last pages lie as in three consecutive pages.
    source, contexts = torch.Generator().manual_seed(3), torch.tensor([40], dtype=torch.int32)
    pages = torch.randn(6, 16, 4, 5, generator=source, dtype=torch.float64)
    query, new_latents = (
        torch.randn(1, 4, 5, generator=source, dtype=torch.float64) for _ in range(2)
    )
    actual = write_and_attend(
        query,
        new_latents,
        JointPages(pages),
        batch=PagedBatch(
            block_table=torch.tensor([table], dtype=torch.int32),
            query_bounds=torch.tensor([0, 1], dtype=torch.int32),
            context_lengths=contexts,
            max_query=1,
            max_context=40,
        ),
        slot_mapping=torch.tensor([table[2] * 16 + 7]),
        scale=0.4,
    )
    keys, values = pages[list(table)].flatten(0, 1)[:40].chunk(2, 1)  # [40, g, d] each
    weights = torch.einsum("ngd,kgd->gnk", query.view(2, 2, 5).transpose(0, 1), keys) * 0.4
    expected = torch.einsum("gnk,kgd->gnd", weights.softmax(-1), values)  # [g, n/g, d]
    torch.testing.assert_close(actual.view(2, 2, 5), expected, rtol=0, atol=1e-12)


def test_write_changes_only_slots_of_the_mapping():
    fused = torch.randn(5, 2, 24)
    key, value = fused[..., :8], fused[..., 8:16]  # views that are not dense
    caches = {name: torch.randn(4, 16, 2, 8) for name in ("key_cache", "value_cache")}
    expected = {name: x.clone() for name, x in caches.items()}
    slots = [37, -1, 0, 63, -1]
    for name, x in (("key_cache", key), ("value_cache", value)):
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[name][slot // 16, slot % 16] = x[token]
    write_to_pages(key, value, **caches, slot_mapping=torch.tensor(slots))
    assert all(torch.equal(caches[name], expected[name]) for name in caches)


def valid_arguments(**changes):
    """Return the arguments of a valid call with some changed."""
    rows = paged_rows([3, 1], [20, 5], heads=(4, 2), features=8)
    arguments = {
        "query": rows.query,
        "key_cache": rows.caches[0],
        "value_cache": rows.caches[1],
        "batch": rows.batch,
    }
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return arguments


BAD_CALLS = {
    "no heads": ({"query": lambda x: x[0]}, "must be .t, heads, d. and twice"),
    "another cache": ({"value_cache": lambda x: x[:1]}, "must be .t, heads, d. and twice"),
    "features": ({"query": lambda x: x[..., :4]}, "agree in the features of a head, at most 256"),
    "ratio": ({"query": lambda x: x[:, :3]}, "3 query heads must be a multiple of the cache's 2"),
    "dtype": ({"query": lambda x: x.float()}, "must have one dtype"),
    "strides": (
        {"key_cache": lambda x: x.mT.contiguous().mT},
        "contiguous in the caches, whose strides are .* make the last one 1",
    ),
    "gradient": ({"query": lambda x: x.clone().requires_grad_()}, "has no backward"),
    "window": ({"window": 0}, "window=0 must be at least 1, or None"),
    "sinks": ({"sinks": torch.zeros(3)}, "one logit for each of the 4 heads"),
    "table": (
        {"batch": lambda x: replace(x, max_context=33)},
        "max_context=33 is over the 32 slots",
    ),
    "too many new": ({"batch": lambda x: replace(x, max_query=2)}, "row 0 has 3 new .* raise"),
    "too long": ({"batch": lambda x: replace(x, max_context=19)}, "context of 20, over"),
    "too short": (
        {"batch": lambda x: replace(x, context_lengths=torch.tensor([2, 5]).int())},
        "3 new tokens but a context of only 2: context_lengths include the new",
    ),
    "bounds": (
        {"batch": lambda x: replace(x, query_bounds=torch.tensor([0, 3, 9]).int())},
        "never fall and end within the 4 tokens",
    ),
    "triton": ({"implementation": "triton"}, "has no float64"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_invalid_calls_name_the_problem(case):
    changes, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=message):
        paged_attention(**valid_arguments(**changes))


@pytest.mark.parametrize("size", [8, 24])
def test_block_size_must_be_a_power_of_two_from_16(size):
    caches = [torch.zeros(3, size, 2, 8, dtype=FP64) for _ in range(2)]
    with pytest.raises(ValueError, match=f"block_size {size} .* power of two from 16 on"):
        paged_attention(**valid_arguments(key_cache=caches[0], value_cache=caches[1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.zeros(3, 2).int()}, r"block_table \(3, 2\) .* \[b, blocks\], b = 2"),
        ({"block_table": torch.zeros(2, 2)}, "float32 on cpu must be int32"),
        ({"query_bounds": torch.zeros(2).int()}, r"query_bounds \(2,\) .* \[b \+ 1\], b = 2"),
        ({"context_lengths": torch.zeros(1, 2).int()}, r"context_lengths \(1, 2\) .* \[b\]"),
        ({"max_query": 0}, "max_query=0 and max_context=20 must be at least 1"),
    ],
)
def test_inconsistent_batches_name_the_problem(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(valid_arguments()["batch"], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": torch.zeros(4, 2, 8)}, "must be .t, g, d. with the heads and features"),
        ({"value": torch.zeros(5, 2, 8, dtype=FP64)}, "must have one dtype"),
        ({"slot_mapping": torch.zeros(5).int()}, "must be int64 .t. = .5."),
    ],
)
def test_inconsistent_writes_name_the_problem(changes, message):
    key_cache, value_cache = torch.zeros(2, 3, 16, 2, 8)
    arguments = {
        "key": torch.zeros(5, 2, 8),
        "value": torch.zeros(5, 2, 8),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.zeros(5, dtype=torch.int64),
    } | changes
    with pytest.raises(ValueError, match=message):
        write_to_pages(**arguments)


@pytest.mark.parametrize("programs", [1, 2, 3, 8, 40, 100, 131, 200, 263])
def test_few_rows_split_contexts_to_fill_the_device(programs):
    resident, context = 264, 1 << 15
    count = num_splits(programs, context, resident)
    assert 2 <= count <= MAX_SPLITS
    waves = -(-programs * count // resident)
    assert programs * count >= 0.7 * min(waves * resident, programs * MAX_SPLITS)
    assert count * MIN_SPLIT_TOKENS <= context


def test_context_is_split_only_if_long_or_rows_are_few():
    assert num_splits(8, 2 * MIN_SPLIT_TOKENS - 1, 264) == 1
    assert num_splits(8, 2 * MIN_SPLIT_TOKENS, 264) == 2
    assert num_splits(264, MAX_SPLIT_TOKENS, 264) == 1
    assert num_splits(1000, MAX_SPLIT_TOKENS + 1, 264) == 2
    assert num_splits(1000, 5 * MAX_SPLIT_TOKENS, 264) == 5
    assert num_splits(0, 1 << 17, 264) == 1

# SPDX-License-Identifier: Apache-2.0
"""Naive fp64 formulas of the ops, and the comparison that outputs and gradients must pass."""

import math

import torch

from megatron.core.ops.dropout import AttentionDropout
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.rope import HeadRotation, rotary_table, split_heads
from tests.support.closeness import assert_close_by_metric

# bf16 keeps 8 bits: each rounding moves a value by at most 2^-9 of itself. The bound allows the
# rounding of the result and that of the inputs of the last step (grad_out, x, w), with a margin
# of two; fp32 paths differ from fp64 by the sum's rounding only.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float64: 1e-12}


def assert_close(actual, expected, dtype, what, *, scale=1.0):
    """Hold PROOF's metric: the largest difference over the largest reference value."""
    assert actual is not None, f"{what}: no gradient"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    assert expected.any(), f"{what}: the reference is all zero, so comparing it proves nothing"
    assert_close_by_metric(what, actual, expected, bound=TOLERANCE[dtype], scale=scale)


def compare(function, naive, inputs, dtype):
    """Compare outputs and gradients of `function` in `dtype` with `naive` in fp64."""
    mine = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    true = [x.detach().to(torch.float64, copy=True).requires_grad_() for x in mine]
    outputs, expected = function(*mine), naive(*true)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    generator = torch.Generator().manual_seed(7)
    pull = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in expected]
    pull = [g.to(y.dtype) for g, y in zip(pull, outputs, strict=True)]
    for index, (y, z) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(y, z, dtype, f"output {index}")
    torch.autograd.backward(outputs, pull)
    torch.autograd.backward(expected, [g.double() for g in pull])
    for index, (x, z) in enumerate(zip(mine, true, strict=True)):
        assert x.grad.dtype == x.dtype
        assert_close(x.grad, z.grad, dtype, f"gradient of input {index}")


def maker():
    """Return a function that makes fp64 tensors, from a fixed seed."""
    generator = torch.Generator().manual_seed(1234)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return randn


def naive_rms(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def naive_rope(x, angles, interleaved):
    """Rotate by complex multiplication."""
    rotated = 2 * angles.shape[-1]
    part = x[..., :rotated]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat([turned, x[..., rotated:]], -1)


def naive_attention(
    query,
    key,
    value,
    sinks=None,
    *,
    causal,
    scale,
    window=None,
    documents=None,
    keep=None,
    **places,
):
    """Softmax attention from its definition, all heads and pairs at once.

    Args:
        places: query_start, key_start and query_document_ids.
    """
    queries, keys, heads = query.shape[0], key.shape[0], query.shape[2]
    key_start = places.get("key_start", 0)
    query_start = places.get("query_start", key_start + keys - queries)
    repeat = heads // key.shape[2]
    key, value = (x.repeat_interleave(repeat, 2) for x in (key, value))
    logits = torch.einsum("qbnd,kbnd->bnqk", query, key) * scale
    q = torch.arange(queries)[:, None] + query_start
    k = torch.arange(keys) + key_start
    visible = torch.ones(logits.shape, dtype=torch.bool)
    if causal:
        visible &= k <= q
    if window is not None:
        visible &= q - k < window
    if documents is not None:
        first = query_start - key_start
        mine = places.get("query_document_ids", documents[first : first + queries])
        mine = mine.t()[:, None, :, None]
        visible &= mine == documents.t()[:, None, None, :]
    logits = logits.masked_fill(~visible, -math.inf)
    if sinks is not None:
        extra = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, extra], -1)
    lse = logits.logsumexp(-1)
    shift = lse.masked_fill(lse == -math.inf, 0)  # of a query that sees nothing
    weights = (logits - shift[..., None]).exp()[..., :keys]
    if keep is not None:
        weights = weights * keep
    return torch.einsum("bnqk,kbnd->qbnd", weights, value), lse.detach()


ATTENTION_CASES = {
    "causal": {},
    "grouped": {"groups": 2},
    "one key head": {"groups": 1},
    "bidirectional": {"causal": False},
    "cross": {"causal": False, "queries": 9, "keys": 5},
    "cached": {"queries": 3, "keys": 11},
    "one query": {"queries": 1, "keys": 11, "groups": 2},
    "long": {"queries": 150, "keys": 301, "window": 40, "groups": 2},
    "tiles": {"queries": 70, "keys": 141, "window": 40, "groups": 2},
    "window": {"window": 3, "groups": 2},
    "window, bidirectional": {"window": 3, "causal": False},
    "documents": {"documents": True, "groups": 2},
    "documents, bidirectional": {"documents": True, "causal": False},
    "documents, cached": {"documents": True, "queries": 4, "keys": 11},
    "sinks": {"sinks": True, "groups": 2},
    "all": {"sinks": True, "groups": 2, "window": 5, "documents": True, "scale": 0.3},
    "dropout": {"dropout": True, "groups": 2, "queries": 5, "keys": 11},
    # Queries and keys at places of their own. Some queries see no key, so these have sinks.
    "amid the keys": {"queries": 5, "keys": 11, "query_start": 9, "key_start": 7, "groups": 2},
    "as many, behind": {"queries": 11, "keys": 11, "query_start": 9, "key_start": 5, "groups": 2},
    "ahead of keys": {"queries": 7, "keys": 5, "query_start": 3, "key_start": 6, "sinks": True},
    "out of reach": {"queries": 7, "keys": 9, "query_start": 8, "window": 4, "sinks": True},
    "tiles amid": {"queries": 70, "keys": 141, "query_start": 65, "key_start": 3, "window": 40},
    "long ahead": {
        "queries": 300,
        "keys": 150,
        "query_start": 10,
        "key_start": 150,
        "window": 20,
        "sinks": True,
        "groups": 2,
    },
    "documents of queries": {
        "queries": 6,
        "keys": 11,
        "query_start": 8,
        "documents": True,
        "query_documents": True,
        "sinks": True,
    },
    "documents amid": {"queries": 6, "keys": 11, "query_start": 5, "key_start": 2, "documents": 1},
    "dropout by place": {
        "dropout": True,
        "queries": 5,
        "keys": 11,
        "query_start": 29,
        "key_start": 9,
    },
}


def make_attention(make, case):
    """Build tensors and options of one case: (inputs, options)."""
    case = dict(case)
    keys = case.pop("keys", 11)
    queries, groups = case.pop("queries", keys), case.pop("groups", 4)
    batch, heads, features = 2, 4, 6
    inputs = [make(queries, batch, heads, features)]
    inputs += [make(keys, batch, groups, features) for _ in range(2)]
    if case.pop("sinks", False):
        inputs.append(make(heads))
    options = {"causal": True, "scale": features**-0.5, **case}
    if options.pop("documents", False):
        rows = torch.arange(keys)
        options["document_ids"] = torch.stack([rows // 4, (rows + 1) // 3], -1)
    if options.pop("query_documents", False):
        rows = torch.arange(queries) + 4
        options["query_document_ids"] = torch.stack([rows // 4, (rows + 1) // 3], -1)
    if options.pop("dropout", False):
        options["dropout"] = AttentionDropout(
            rate=0.3, key=5, sample_ids=torch.tensor([8, 3]), head_offset=2
        )
    return inputs, options


# tokens, copies, rows that have no copy
PERMUTATIONS = {
    "one copy": (7, 1, 0),
    "two copies": (11, 2, 0),
    "two copies, dropped": (13, 2, 9),
    "three copies, dropped": (9, 3, 5),
    "eight copies": (5, 8, 0),
}


def make_permutation(case: str) -> Permutation:
    """Build a permutation in which rows and places are in different orders."""
    tokens, copies, missing = PERMUTATIONS[case]
    source = torch.Generator().manual_seed(tokens)
    places = torch.randperm(tokens * copies, generator=source)
    return Permutation.of(places[missing:], tokens, copies)


def naive_sum_rows(y, slots, weights=None):
    """Add up the rows of every token, one at a time."""
    sums = []
    for token, row in enumerate(slots.tolist()):
        rows = [
            y[slot] * (1 if weights is None else weights[token, copy])
            for copy, slot in enumerate(row)
            if slot >= 0
        ]
        sums.append(torch.stack([torch.zeros_like(y[0]), *rows]).sum(0))
    return torch.stack(sums)


def compare_with_padding(make, implementation):
    """Compare copies and sums with rows of padding, as many rows as places, more and fewer."""
    tokens, copies, features = 5, 2, 37
    every = torch.tensor([7, 2, 9, 0, 4, 3])  # places that have a row
    for rows, count in ((3, 0), (8, 6), (tokens * copies, 6), (13, 6)):
        order = every[:count]
        places = torch.full((rows,), 6)  # of padding, which is no place of a row
        where = torch.tensor([1, 0, 3, 4, 6, 7])[:count]
        places[where] = order
        present = torch.zeros(rows, dtype=torch.bool)
        present[where] = True
        permutation = Permutation.with_padding(places, present, tokens=tokens, copies=copies)
        options = {"implementation": implementation}
        x, pull = make(tokens, features), make(rows, features)
        pull[~present] = torch.nan
        leaf = x.float().requires_grad_()
        out = take_rows(leaf, permutation, **options)
        out.backward(pull.float())
        if not count:
            assert not leaf.grad.any()
            assert not sum_rows(pull.float(), permutation, **options).any()
            continue
        assert_close(out[where], x[order // copies], torch.float32, "copies")
        grad = torch.zeros_like(x).index_add_(0, order // copies, pull[where])
        assert_close(leaf.grad, grad, torch.float32, "gradient of tokens")
        weights, back = make(tokens, copies), make(tokens, features)
        y, w = (t.float().requires_grad_() for t in (pull, weights))
        sums = sum_rows(y, permutation, weights=w, **options)
        sums.backward(back.float())
        factors = weights.flatten()[order].unsqueeze(1)
        wanted = torch.zeros_like(x).index_add_(0, order // copies, factors * pull[where])
        assert_close(sums, wanted, torch.float32, "sums")
        d_rows = factors * back[order // copies]
        assert_close(y.grad[where], d_rows, torch.float32, "gradient of rows")
        d_weights = torch.zeros_like(weights).flatten()
        d_weights[order] = (back[order // copies] * pull[where]).sum(1)
        assert_close(w.grad.flatten(), d_weights, torch.float32, "gradient of weights")


def head_splits(rotated, interleaved, gates, implementation=None):
    """Return `split_heads` and its formula for a projection [7, 2, 8 + gates, d]."""
    positions = torch.stack([torch.arange(7) + 3, torch.arange(7) * 2], -1)
    sizes = [4, 2, 2] + [4] * bool(gates)
    rotation = HeadRotation(*rotary_table(positions, dim=rotated), interleaved) if rotated else None
    frequencies = 10000.0 ** (-torch.arange(0, rotated, 2) / max(rotated, 1))
    angles = (positions[..., None].double() * frequencies)[:, :, None]

    def naive(x):
        query, key, *rest = x.split(sizes, dim=2)
        if rotated:
            query, key = (naive_rope(heads, angles, interleaved) for heads in (query, key))
        return query, key, *rest

    def split(x):
        return tuple(split_heads(x, sizes, rotation, implementation=implementation))

    return split, naive

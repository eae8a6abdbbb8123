# SPDX-License-Identifier: Apache-2.0
"""Naive fp64 formulas of the ops, and the comparison of outputs and gradients with them."""

import torch

from megatron.core.ops.dropout import AttentionDropout
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.rope import HeadRotation, rotary_table, split_heads
from megatron.core.ops.rope.naive import apply_rope as naive_rope
from tests.support.closeness import assert_close_by_metric

# bf16 has 8 bits: each rounding has a relative error of at most 2^-9. The bound allows rounding
# the output and the inputs of the last step (grad_out, x, w), with a margin of two. fp32 paths
# differ from fp64 only by the rounding of sums.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float64: 1e-12}


def assert_close(actual, expected, dtype, what, *, scale=1.0):
    """Compare by the metric of PROOF: the largest difference over the largest reference value."""
    assert actual is not None, f"{what}: no gradient"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    assert expected.any(), f"{what}: the reference is all zero, so comparing it proves nothing"
    assert_close_by_metric(what, actual, expected, bound=TOLERANCE[dtype], scale=scale)


def compare(function, naive, inputs, dtype):
    """Compare outputs and gradients of `function` in `dtype` with `naive` in fp64."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    fp64_leaves = [x.detach().to(torch.float64, copy=True).requires_grad_() for x in leaves]
    outputs, expected = function(*leaves), naive(*fp64_leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    generator = torch.Generator().manual_seed(7)
    grad_outputs = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in expected
    ]
    grad_outputs = [g.to(y.dtype) for g, y in zip(grad_outputs, outputs, strict=True)]
    for index, (y, z) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(y, z, dtype, f"output {index}")
    torch.autograd.backward(outputs, grad_outputs)
    torch.autograd.backward(expected, [g.double() for g in grad_outputs])
    for index, (x, z) in enumerate(zip(leaves, fp64_leaves, strict=True)):
        assert x.grad.dtype == x.dtype
        assert_close(x.grad, z.grad, dtype, f"gradient of input {index}")


def maker():
    """Return a function that draws fp64 tensors from a fixed seed."""
    generator = torch.Generator().manual_seed(1234)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return randn


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
    # Queries and keys at separate positions. Cases with queries that see no key have sinks.
    "queries within keys": {
        "queries": 5,
        "keys": 11,
        "query_start": 9,
        "key_start": 7,
        "groups": 2,
    },
    "equal lengths, queries later": {
        "queries": 11,
        "keys": 11,
        "query_start": 9,
        "key_start": 5,
        "groups": 2,
    },
    "queries before keys": {
        "queries": 7,
        "keys": 5,
        "query_start": 3,
        "key_start": 6,
        "sinks": True,
    },
    "beyond the window": {"queries": 7, "keys": 9, "query_start": 8, "window": 4, "sinks": True},
    "tiles within keys": {
        "queries": 70,
        "keys": 141,
        "query_start": 65,
        "key_start": 3,
        "window": 40,
    },
    "long, before keys": {
        "queries": 300,
        "keys": 150,
        "query_start": 10,
        "key_start": 150,
        "window": 20,
        "sinks": True,
        "groups": 2,
    },
    "query documents": {
        "queries": 6,
        "keys": 11,
        "query_start": 8,
        "documents": True,
        "query_documents": True,
        "sinks": True,
    },
    "documents within keys": {
        "queries": 6,
        "keys": 11,
        "query_start": 5,
        "key_start": 2,
        "documents": 1,
    },
    "dropout by position": {
        "dropout": True,
        "queries": 5,
        "keys": 11,
        "query_start": 29,
        "key_start": 9,
    },
}


def make_attention(make, case):
    """Return (inputs, options) of a case."""
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


# tokens, copies, number of dropped rows
PERMUTATIONS = {
    "one copy": (7, 1, 0),
    "two copies": (11, 2, 0),
    "two copies, dropped": (13, 2, 9),
    "three copies, dropped": (9, 3, 5),
    "eight copies": (5, 8, 0),
}


def make_permutation(case: str) -> Permutation:
    """Return a permutation whose rows are in a different order than the token copies."""
    tokens, copies, missing = PERMUTATIONS[case]
    source = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(tokens * copies, generator=source)
    return Permutation.of(slots[missing:], tokens, copies)


def compare_with_padding(make, implementation):
    """Compare take_rows and sum_rows with padding, for fewer, as many and more rows than slots."""
    tokens, copies, features = 5, 2, 37
    slots_with_row = torch.tensor([7, 2, 9, 0, 4, 3])
    for rows, count in ((3, 0), (8, 6), (tokens * copies, 6), (13, 6)):
        row_slots = slots_with_row[:count]
        slots = torch.full((rows,), 6)  # the slot of padding rows, which no token row uses
        row_index = torch.tensor([1, 0, 3, 4, 6, 7])[:count]
        slots[row_index] = row_slots
        present = torch.zeros(rows, dtype=torch.bool)
        present[row_index] = True
        permutation = Permutation.with_padding(slots, present, tokens=tokens, copies=copies)
        options = {"implementation": implementation}
        x, d_rows_in = make(tokens, features), make(rows, features)
        d_rows_in[~present] = torch.nan
        leaf = x.float().requires_grad_()
        out = take_rows(leaf, permutation, **options)
        out.backward(d_rows_in.float())
        if not count:
            assert not leaf.grad.any()
            assert not sum_rows(d_rows_in.float(), permutation, **options).any()
            continue
        assert_close(out[row_index], x[row_slots // copies], torch.float32, "copies")
        grad = torch.zeros_like(x).index_add_(0, row_slots // copies, d_rows_in[row_index])
        assert_close(leaf.grad, grad, torch.float32, "gradient of tokens")
        weights, d_sums = make(tokens, copies), make(tokens, features)
        y, w = (t.float().requires_grad_() for t in (d_rows_in, weights))
        sums = sum_rows(y, permutation, weights=w, **options)
        sums.backward(d_sums.float())
        factors = weights.flatten()[row_slots].unsqueeze(1)
        expected_sums = torch.zeros_like(x).index_add_(
            0, row_slots // copies, factors * d_rows_in[row_index]
        )
        assert_close(sums, expected_sums, torch.float32, "sums")
        d_rows = factors * d_sums[row_slots // copies]
        assert_close(y.grad[row_index], d_rows, torch.float32, "gradient of rows")
        d_weights = torch.zeros_like(weights).flatten()
        d_weights[row_slots] = (d_sums[row_slots // copies] * d_rows_in[row_index]).sum(1)
        assert_close(w.grad.flatten(), d_weights, torch.float32, "gradient of weights")


def head_splits(rotated, interleaved, gates, implementation=None):
    """Return `split_heads` and its formula for a projection [7, 2, 8 + gates, d]."""
    positions = torch.stack([torch.arange(7) + 3, torch.arange(7) * 2], -1)
    sizes = [4, 2, 2] + [4] * bool(gates)
    rotation = HeadRotation(*rotary_table(positions, dim=rotated), interleaved) if rotated else None
    frequencies = 10000.0 ** (-torch.arange(0, rotated, 2) / max(rotated, 1))
    angles = (positions[..., None].double() * frequencies)[:, :, None]

    def naive(x):
        query, key, *unrotated = x.split(sizes, dim=2)
        if rotated:
            query, key = (naive_rope(heads, angles, interleaved) for heads in (query, key))
        return query, key, *unrotated

    def split(x):
        return tuple(split_heads(x, sizes, rotation, implementation=implementation))

    return split, naive

# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter against the fp64 formulas, on NaN-filled memory.

Run by `test_triton.py` in a process of its own: TRITON_INTERPRET must be set before the first
import of Triton.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.attention import attention
from megatron.core.ops.attention import reference as attention_reference
from megatron.core.ops.attention import triton as attention_triton
from megatron.core.ops.attention.reference import Mask
from megatron.core.ops.dropout import dropout
from megatron.core.ops.dropout import triton as dropout_triton
from megatron.core.ops.launches import Launches
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.layernorm import triton as layernorm_triton
from megatron.core.ops.linear_cross_entropy import (
    chunk_gradient_,
    chunk_statistics,
    linear_cross_entropy,
)
from megatron.core.ops.linear_cross_entropy import triton as loss_triton
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.permutation import triton as permutation_triton
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rmsnorm import triton as rmsnorm_triton
from megatron.core.ops.rope import Rotation, apply_rope, rotary_table, split_heads
from megatron.core.ops.rope import triton as rope_triton
from megatron.core.ops.swiglu import gated
from megatron.core.ops.swiglu import triton as swiglu_triton
from tests.support.closeness import relative_error
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import (
    ATTENTION_CASES,
    PERMUTATIONS,
    assert_close,
    compare,
    compare_with_padding,
    make_attention,
    make_permutation,
    maker,
    naive_attention,
    naive_rms,
    naive_rope,
    naive_sum_rows,
)

FP32 = torch.float32


@pytest.fixture
def make():
    """Make fp64 tensors from a fixed seed."""
    return maker()


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


def few_programs(monkeypatch, module):
    """Let fewer programs than there are tiles share tiles of a few rows."""
    for name in ("FORWARD", "BACKWARD"):
        launch = getattr(module, name).default | {"TILE": 128, "num_warps": 1}
        launch |= {"PROGRAMS": 2} if "PROGRAMS" in launch else {}
        monkeypatch.setattr(module, name, Launches("few", launch))


def narrow_blocks(monkeypatch, module, *names, size=512):
    """Let a row have several blocks."""
    for name in names:
        launch = {**getattr(module, name).default, "BLOCK": size}
        monkeypatch.setattr(module, name, Launches("narrow", launch))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(make, zero_centered, monkeypatch):
    few_programs(monkeypatch, rmsnorm_triton)
    one = 1 if zero_centered else 0
    options = {"eps": 1e-5, "zero_centered": zero_centered, "implementation": "triton"}
    compare(
        lambda x, r, w: rms_norm(x, w, residual=r, **options),
        lambda x, r, w: (naive_rms(x + r, w + one), x + r),
        (make(5, 3, 37), make(5, 3, 37), make(37)),
        FP32,
    )
    compare(
        lambda x, w: rms_norm(x, w, **options),
        lambda x, w: naive_rms(x, w + one),
        (make(3, 130), make(130)),
        FP32,
    )


def test_rms_norm_of_heads_that_are_slices_of_a_projection(make, monkeypatch):
    """Two strides say where rows begin; where they do not, and where a row is all, it works too."""
    few_programs(monkeypatch, rmsnorm_triton)
    options = {"eps": 1e-5, "implementation": "triton"}
    for shape, cut in (
        ((5, 3, 9, 20), lambda x: x[:, :, 2:6]),  # heads
        ((5, 3, 9, 40), lambda x: x[:, 1:, :, 20:]),  # a gate beside each head
        ((5, 3, 40), lambda x: x[..., :20]),
        ((5, 3, 20), lambda x: x.transpose(0, 1)),
        ((5, 1, 20), lambda x: x[3]),
        ((20, 7), lambda x: x.t()),
    ):
        compare(
            lambda x, w, cut=cut: rms_norm(cut(x), w, **options),
            lambda x, w, cut=cut: naive_rms(cut(x), w),
            (make(*shape), make(20)),
            FP32,
        )


def test_rms_norm_of_rows_far_apart(tmp_path):
    """Places in x beyond 2^31, of a file that takes no room where nothing is written."""
    shape, strides = (2, 3, 16), (16, 1_100_000_000, 1)
    size = 2 * strides[1] + 32
    x = torch.from_file(str(tmp_path / "x"), shared=True, size=size, dtype=FP32)
    x = x.as_strided(shape, strides).copy_(torch.randn(shape)).requires_grad_()
    weight, pull = torch.randn(16), torch.randn(shape)
    y = rms_norm(x, weight, eps=1e-5, implementation="triton")
    (grad,) = torch.autograd.grad(y, x, pull)
    near = x.detach().clone(memory_format=torch.contiguous_format).double().requires_grad_()
    true = rms_norm(near, weight.double(), eps=1e-5, implementation="reference")
    assert relative_error(y, true) < 1e-5
    assert relative_error(grad, *torch.autograd.grad(true, near, pull.double())) < 1e-5


@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(make, with_bias, monkeypatch):
    few_programs(monkeypatch, layernorm_triton)
    compare(
        lambda x, r, w, b=None: layer_norm(
            x, w, b, eps=1e-5, residual=r, zero_centered=True, implementation="triton"
        ),
        lambda x, r, w, b=None: (F.layer_norm(x + r, (37,), w + 1, b, 1e-5), x + r),
        [make(5, 3, 37), make(5, 3, 37), make(37)] + [make(37)] * with_bias,
        FP32,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("features", "rotated"), [(6, 6), (10, 4)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rope(make, interleaved, features, rotated, per_sample, monkeypatch):
    # Four tokens a program, and fourteen of them.
    launch = {**rope_triton.ROTATE.default, "TILE": 256 if features == 10 else 128}
    monkeypatch.setattr(rope_triton, "ROTATE", Launches("few", launch))
    tile = rope_triton.head_tile(launch, 3, features, rotated // 2)
    assert tile["TOKENS"] == 4
    positions = torch.arange(7) + 3
    if per_sample:
        positions = torch.stack([positions, positions * 2], -1)
    cos, sin = rotary_table(positions, dim=rotated)
    angles = positions[..., None].double() * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    angles = angles[:, :, None] if per_sample else angles[:, None, None]
    compare(
        lambda x: apply_rope(x, cos, sin, interleaved=interleaved, implementation="triton"),
        lambda x: naive_rope(x, angles, interleaved),
        (make(7, 2, 3, features),),
        FP32,
    )


@pytest.mark.parametrize(
    ("features", "rotated", "interleaved", "gates"),
    [(6, 6, False, 0), (10, 4, True, 4), (6, 0, False, 4)],
)
def test_heads_of_a_projection(make, interleaved, features, rotated, gates, monkeypatch):
    launch = {**rope_triton.ROTATE.default, "TILE": 128}
    monkeypatch.setattr(rope_triton, "ROTATE", Launches("few", launch))
    x = make(7, 2, 4 + 2 + 2 + gates, features)
    positions = torch.stack([torch.arange(7) + 3, torch.arange(7) * 2], -1)
    sizes = [4, 2, 2] + [4] * bool(gates)
    rotation = Rotation(*rotary_table(positions, dim=rotated), interleaved) if rotated else None
    frequencies = 10000.0 ** (-torch.arange(0, rotated, 2) / max(rotated, 1))
    angles = (positions[..., None].double() * frequencies)[:, :, None]

    def naive(x):
        query, key, *rest = x.split(sizes, dim=2)
        if rotated:
            query, key = (
                naive_rope(query, angles, interleaved),
                naive_rope(key, angles, interleaved),
            )
        return query, key, *rest

    def parts(x):
        query, key, value, *gate = split_heads(x, sizes, rotation, implementation="triton")
        return query, key, value, *gate

    compare(parts, naive, (x,), FP32)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated(make, activation, monkeypatch):
    narrow_blocks(monkeypatch, swiglu_triton, "FORWARD", "BACKWARD")

    def naive(x):
        gate, up = x.chunk(2, -1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    compare(
        lambda x: gated(x, activation, implementation="triton"),
        naive,
        (make(2, 3, 2 * 1030),),
        FP32,
    )


@pytest.mark.parametrize("offset", [0, 5])
def test_dropout_drops_what_the_reference_drops(make, offset, monkeypatch):
    narrow_blocks(monkeypatch, dropout_triton, "DROP")
    x = make(6, 3, 1030).float()
    grad = make(6, 3, 1030).float()
    results = []
    for implementation in ("reference", "triton"):
        leaf = x.clone().requires_grad_()
        y = dropout(
            leaf,
            rate=0.3,
            key=-(1 << 61) + 5,
            sample_ids=torch.tensor([9, 0, 4]),
            position_ids=torch.arange(6) * 3,
            feature_offset=offset,
            implementation=implementation,
        )
        y.backward(grad)
        results.append((y.detach(), leaf.grad))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


UNCOVERED = ("dropout", "dropout by place", "long", "long ahead")  # not drawn; too long here


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, FP32) for name in ATTENTION_CASES if name not in UNCOVERED),
        *((name, torch.bfloat16) for name in ("tiles", "all", "bidirectional")),
    ],
)
def test_attention(make, name, dtype):
    inputs, options = make_attention(make, ATTENTION_CASES[name])
    seen = []

    def mine(q, k, v, sinks=None):
        out, lse = attention(q, k, v, sinks=sinks, implementation="triton", **options)
        assert not lse.requires_grad
        seen.append(lse)
        return out

    def naive(q, k, v, sinks=None):
        rest = {x: y for x, y in options.items() if x != "document_ids"}
        documents = options.get("document_ids")
        out, lse = naive_attention(q, k, v, sinks, documents=documents, **rest)
        seen.append(lse)
        return out

    compare(mine, naive, inputs, dtype)
    assert_close(seen[0], seen[1], dtype, "lse")


@pytest.mark.parametrize(("features", "rows"), [(136, 32), (272, 16)])
def test_attention_of_wide_heads(make, features, rows):
    tile = attention_triton.tile_shape(features)
    assert tile["BLOCK"] == rows
    assert tile["FEATURES"] >= features
    # More than two tiles of queries and of keys, the last of each in part, with a window amid.
    inputs = [make(rows * n + 5, 1, heads, features) for n, heads in ((2, 4), (3, 2), (3, 2))]
    compare(
        lambda *x: attention(*x, scale=0.1, window=rows + 7, implementation="triton")[0],
        lambda *x: naive_attention(*x, causal=True, scale=0.1, window=rows + 7)[0],
        inputs,
        FP32,
    )


def test_queries_that_see_no_key(make):
    query, grad = make(70, 1, 2, 6).float(), make(70, 1, 2, 6).float()
    key, value = make(70, 1, 1, 6).float(), make(70, 1, 1, 6).float()
    for start in (5, 100, 300):  # before some, amid, behind all of the keys at 40 to 109
        mask = Mask(window=5, query_start=start, key_start=40)
        arguments = (query, key, value, None, 0.4, mask)
        found = attention_triton.attention_forward(*arguments)
        expected = attention_reference.attention_forward(*arguments)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        arguments = (grad, query, key, value, *found)
        found = attention_triton.attention_backward(*arguments, scale=0.4, mask=mask)
        expected = attention_reference.attention_backward(*arguments, scale=0.4, mask=mask)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_attention_writes_an_output_that_is_merged_unrounded(make):
    parts = [make(20, 2, 4, 6).bfloat16() for _ in range(3)]
    out, _ = attention_triton.attention_forward(*parts, None, 0.4, Mask(), dtype=FP32)
    expected, _ = naive_attention(*(x.double() for x in parts), causal=True, scale=0.4)
    assert out.dtype == FP32
    assert not torch.equal(out, out.bfloat16().float())
    assert relative_error(out, expected) < 2**-7  # of the weights, which are multiplied in bf16


def test_attention_takes_slices_of_a_fused_projection(make):
    fused = make(70, 2, 2, 3 * 24).float()
    parts = fused.split(24, dim=-1)
    out, lse = attention(*parts, implementation="triton")
    expected, expected_lse = attention(*(x.contiguous() for x in parts))
    assert_close(out, expected, FP32, "out")
    assert_close(lse, expected_lse, FP32, "lse")


def test_attention_backward_takes_the_lse_of_more_keys(make):
    query, grad = make(5, 2, 4, 6).float(), make(5, 2, 4, 6).float()
    key, value = make(9, 2, 2, 6).float(), make(9, 2, 2, 6).float()
    out, lse = attention(query, key, value, causal=False)
    mask = Mask(causal=False)
    for part in (slice(0, 4), slice(4, 9)):
        arguments = (grad, query, key[part], value[part], out, lse)
        mine = attention_triton.attention_backward(*arguments, scale=0.4, mask=mask)
        other = attention_reference.attention_backward(*arguments, scale=0.4, mask=mask)
        for x, y in zip(mine, other, strict=True):
            assert_close(x, y, FP32, "gradient")


def test_vocabulary_slices(make, monkeypatch):
    narrow_blocks(monkeypatch, loss_triton, "STATISTICS", "GRADIENT", size=16)
    full = make(6, 37).float()
    targets, weights = torch.tensor([0, 3, 4, 9, 7, 8]), torch.rand(6)
    for start, valid in ((0, 37), (4, 7), (3, 33), (0, 0)):
        logits = full.clone()
        logits[:, valid:] = float("nan")  # padding is never looked at
        columns = {"vocab_start": start, "valid_columns": valid}
        pieces = [
            chunk_statistics(logits, targets, **columns, implementation=name)
            for name in ("reference", "triton")
        ]
        for mine, other in zip(*pieces, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        lse = full.logsumexp(-1)
        grads = [
            chunk_gradient_(logits.clone(), targets, lse, weights, **columns, implementation=name)
            for name in ("reference", "triton")
        ]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_linear_cross_entropy(make, monkeypatch):
    narrow_blocks(monkeypatch, loss_triton, "STATISTICS", "GRADIENT", size=16)
    targets, weights = torch.arange(11) * 5 % 19, torch.linspace(0, 2, 11)

    def mine(h, w):
        return linear_cross_entropy(
            h, w, targets, weights, chunk_tokens=4, valid_columns=19, implementation="triton"
        )[0]

    def naive(h, w):
        return (F.cross_entropy(h @ w[:19].t(), targets, reduction="none") * weights).sum()

    compare(mine, naive, (make(11, 7), make(2100, 7)[:23]), FP32)


@pytest.mark.parametrize(
    ("case", "features"),
    [*((case, 37) for case in PERMUTATIONS), ("two copies, dropped", 1030)],
)
def test_permutations(make, case, features, monkeypatch):
    narrow_blocks(monkeypatch, permutation_triton, "TAKE")
    permutation = make_permutation(case)
    (tokens, copies), rows = permutation.slots.shape, len(permutation.places)
    compare(
        lambda x: take_rows(x, permutation, implementation="triton"),
        lambda x: x[permutation.places // copies],
        (make(tokens, features),),
        FP32,
    )
    for weights in ([], [make(tokens, copies)]):
        compare(
            lambda y, w=None: sum_rows(y, permutation, weights=w, implementation="triton"),
            lambda y, w=None: naive_sum_rows(y, permutation.slots, w),
            [make(rows, features), *weights],
            FP32,
        )


def test_permutations_with_rows_of_padding(make):
    compare_with_padding(make, "triton")


@pytest.mark.parametrize("tokens", [0, 3])
def test_permutations_of_nothing(tokens):
    permutation = Permutation.of(torch.empty(0, dtype=torch.int64), tokens, 2)
    x = torch.ones(tokens, 5, requires_grad=True)
    weights = torch.ones(tokens, 2, requires_grad=True)
    rows = take_rows(x, permutation, implementation="triton")
    assert rows.shape == (0, 5)
    out = sum_rows(rows, permutation, weights=weights, implementation="triton")
    out.sum().backward()
    for found, shape in ((out, (tokens, 5)), (x.grad, (tokens, 5)), (weights.grad, (tokens, 2))):
        assert torch.equal(found, torch.zeros(shape))

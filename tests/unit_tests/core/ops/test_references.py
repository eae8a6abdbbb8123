# SPDX-License-Identifier: Apache-2.0
"""The reference of every op against a naive fp64 formula: outputs and all gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.attention import attention
from megatron.core.ops.attention.naive import attention as naive_attention
from megatron.core.ops.layernorm import cpu as layernorm_cpu
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.layernorm.naive import layer_norm as naive_layer_norm
from megatron.core.ops.linear_cross_entropy import (
    chunk_gradient_,
    chunk_statistics,
    linear_cross_entropy,
)
from megatron.core.ops.linear_cross_entropy import cpu as cross_entropy_cpu
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rmsnorm.naive import rms_norm as naive_rms
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.rope.naive import apply_rope as naive_rope
from megatron.core.ops.swiglu import activate, gated
from megatron.core.ops.swiglu.naive import gated as naive_gated
from tests.support.closeness import assert_close_by_metric
from tests.unit_tests.core.ops.formulas import (
    ATTENTION_CASES,
    assert_close,
    compare,
    head_splits,
    make_attention,
    maker,
)


@pytest.fixture
def make():
    """Make fp64 tensors from a fixed seed."""
    return maker()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)


@DTYPES
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 37), (7, 3), (2, 3, 2, 130)])
def test_rms_norm_matches_formula(make, dtype, zero_centered, shape):
    x, weight = make(*shape), make(shape[-1])
    offset = 1 if zero_centered else 0
    compare(
        lambda x, w: rms_norm(x, w, eps=1e-5, zero_centered=zero_centered),
        lambda x, w: naive_rms(x, w + offset, eps=1e-5),
        (x, weight),
        dtype,
    )


@DTYPES
def test_rms_norm_with_residual_matches_formula(make, dtype):
    x, residual, weight = make(5, 3, 37), make(5, 3, 37), make(37)
    compare(
        lambda x, r, w: rms_norm(x, w, eps=1e-5, residual=r),
        lambda x, r, w: (naive_rms(x + r, w, eps=1e-5), x + r),
        (x, residual, weight),
        dtype,
    )


def test_rms_norm_weight_may_have_its_own_dtype(make):
    x, weight = make(4, 9).bfloat16().requires_grad_(), make(9).float().requires_grad_()
    rms_norm(x, weight, eps=1e-6).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16


@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm_matches_formula(make, dtype, with_bias, zero_centered):
    inputs = [make(5, 3, 37), make(5, 3, 37), make(37)] + [make(37)] * with_bias
    offset = 1 if zero_centered else 0
    compare(
        lambda x, r, w, b=None: layer_norm(
            x, w, b, eps=1e-5, residual=r, zero_centered=zero_centered
        ),
        lambda x, r, w, b=None: (naive_layer_norm(x + r, w + offset, b, eps=1e-5), x + r),
        inputs,
        dtype,
    )
    compare(
        lambda x, w: layer_norm(x, w, None, eps=1e-5),
        lambda x, w: naive_layer_norm(x, w, None, eps=1e-5),
        (inputs[0], inputs[2]),
        dtype,
    )


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norm_weight_gradients_are_summed_in_fp32(make, norm):
    x, grad = make(4096, 37).bfloat16(), make(4096, 37).bfloat16()
    inputs = [x, make(37).bfloat16(), make(37).bfloat16()][: 2 + (norm == "layer")]

    def gradients(function, values):
        leaves = [v.clone().requires_grad_() for v in values]
        return torch.autograd.grad(function(*leaves), leaves, grad.to(leaves[0].dtype))

    if norm == "rms":
        norm_op, formula = rms_norm, lambda x, w: F.rms_norm(x, (37,), w, 1e-5)
    else:
        norm_op, formula = layer_norm, lambda x, w, b: naive_layer_norm(x, w, b, eps=1e-5)
    actual = gradients(lambda *leaves: norm_op(*leaves, eps=1e-5), inputs)
    expected = gradients(formula, [v.double() for v in inputs])
    for name, g, w in zip(("x", "weight", "bias"), actual, expected, strict=False):
        # One rounding to bf16; sums in bf16 would be off by 8 %.
        assert_close_by_metric(name, g, w, bound=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_row_blocks_match_one_block(make, has_bias, dtype, monkeypatch):
    """Compare 21 rows in blocks of 5, the last one partial, with one block."""
    x, residual, weight, bias = (
        make(*shape).to(dtype) for shape in ((7, 3, 74), (7, 3, 74), (74,), (74,))
    )
    bias = bias if has_bias else None

    def outputs_and_gradients():
        leaves = [v.clone().requires_grad_() for v in (x, residual, weight, bias) if v is not None]
        outputs = layer_norm(
            leaves[0], leaves[2], *(leaves[3:] or [None]), eps=1e-5, residual=leaves[1]
        )
        grad_outputs = [(v.detach() * 0.7 + 0.1) for v in outputs]
        grads = torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True)
        return [v for v in (*outputs, *grads) if v is not None]

    one_block = outputs_and_gradients()
    monkeypatch.setattr(layernorm_cpu, "BLOCK_ELEMENTS", 5 * 74)
    for i, (actual, expected) in enumerate(zip(outputs_and_gradients(), one_block, strict=True)):
        assert actual.dtype is expected.dtype
        bound = 2**-7 if dtype is torch.bfloat16 else 1e-6  # one rounding or two
        assert_close_by_metric(str(i), actual, expected.double(), bound=bound)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("features", "rotated"), [(6, 6), (10, 4)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rope_matches_complex_multiplication(
    make, dtype, interleaved, features, rotated, per_sample
):
    x = make(7, 2, 3, features)
    positions = torch.arange(7) + 3
    if per_sample:
        positions = torch.stack([positions, positions * 2], -1)
    cos, sin = rotary_table(positions, dim=rotated)
    angles = positions[..., None].double() * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    angles = angles[:, :, None] if per_sample else angles[:, None, None]
    compare(
        lambda x: apply_rope(x, cos, sin, interleaved=interleaved),
        lambda x: naive_rope(x, angles, interleaved),
        (x,),
        torch.float32 if dtype == torch.float64 else dtype,  # the table itself is fp32
    )


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("features", "rotated", "gates"), [(6, 6, 0), (10, 4, 4), (6, 0, 4), (6, 0, 0)]
)
def test_split_heads_matches_formula(make, dtype, interleaved, features, rotated, gates):
    x = make(7, 2, 4 + 2 + 2 + gates, features)
    split, naive = head_splits(rotated, interleaved, gates)
    compare(split, naive, (x,), torch.float32 if dtype == torch.float64 else dtype)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_activation_matches_formula(make, dtype, activation):
    compare(
        lambda x: gated(x, activation),
        lambda x: naive_gated(x, activation),
        (make(5, 3, 26),),
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "squared_relu", "silu"])
def test_activation_matches_torch(make, dtype, kind):
    naive = {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "squared_relu": lambda x: F.relu(x) ** 2,
        "silu": F.silu,
    }[kind]
    compare(lambda x: activate(x, kind), naive, (make(5, 3, 13),), dtype)


@DTYPES
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_matches_formula(make, name, dtype):
    inputs, options = make_attention(make, ATTENTION_CASES[name])
    queries, keys = inputs[0].shape[0], inputs[1].shape[0]
    keep = None
    if "dropout" in options:
        site, first_key = options["dropout"], options.get("key_start", 0)
        first_query = options.get("query_start", keys - queries)
        keep = (
            site.keep(4, torch.arange(queries) + first_query, first_key, keys).double() * site.scale
        )
        dropped = float((keep == 0).double().mean())
        assert 0.1 < dropped < 0.5

    def checked_attention(q, k, v, sinks=None):
        out, lse = attention(q, k, v, sinks=sinks, **options)
        assert lse.shape == (2, 4, queries)
        assert not lse.requires_grad
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        lses.append(lse)
        return out

    def naive(q, k, v, sinks=None):
        mask_options = {x: y for x, y in options.items() if x not in ("document_ids", "dropout")}
        documents = options.get("document_ids")
        out, lse = naive_attention(q, k, v, sinks, documents=documents, keep=keep, **mask_options)
        lses.append(lse)
        return out

    lses = []
    compare(checked_attention, naive, inputs, dtype)
    assert_close(lses[0], lses[1], torch.float32 if dtype != torch.float64 else dtype, "lse")


@DTYPES
@pytest.mark.parametrize("valid", [23, 19])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("rows", [11, 3])
def test_linear_cross_entropy_matches_torch(make, dtype, valid, chunk, rows, monkeypatch):
    """The last block of rows is partial."""
    monkeypatch.setattr(cross_entropy_cpu, "BLOCK_ELEMENTS", rows * 23)
    hidden, weight = make(11, 7), make(23, 7)
    targets = torch.arange(11) * 5 % valid
    weights = torch.linspace(0, 2, 11)
    weights = weights.double() if dtype == torch.float64 else weights

    def checked_attention(h, w):
        loss, nll = linear_cross_entropy(
            h, w, targets, weights, chunk_tokens=chunk, valid_columns=valid
        )
        assert not nll.requires_grad
        return loss

    def naive(h, w):
        nll = F.cross_entropy(h @ w[:valid].t(), targets, reduction="none")
        return (nll * weights).sum()

    compare(checked_attention, naive, (hidden, weight), dtype)


def test_linear_cross_entropy_without_gradients(make):
    hidden, weight = make(11, 7).float(), make(23, 7).float().requires_grad_()
    targets, weights = torch.arange(11), torch.ones(11)
    with torch.no_grad():
        loss, nll = linear_cross_entropy(hidden, weight, targets, weights)
    assert not loss.requires_grad
    assert_close(
        nll, F.cross_entropy(hidden @ weight.t(), targets, reduction="none"), loss.dtype, ""
    )
    loss, _ = linear_cross_entropy(hidden, weight, targets, weights)
    (3 * loss).backward()
    assert hidden.grad is None
    expected = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum") * 3
    assert_close(weight.grad, torch.autograd.grad(expected, weight)[0], loss.dtype, "")


@DTYPES
def test_vocabulary_shards_combine_to_full_cross_entropy(make, dtype):
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    logits = make(6, 12).to(dtype)
    logits[:, 10:] = 1e4  # padding, which must be ignored
    targets, weights = torch.tensor([0, 3, 4, 9, 7, 8]), torch.rand(6, dtype=weight_dtype)
    valid = [4, 4, 2, 0]
    shards = [logits[:, :4], logits[:, 4:8], logits[:, 8:], logits[:, :4]]
    statistics = [
        chunk_statistics(shard, targets, vocab_start=4 * i, valid_columns=n)
        for i, (shard, n) in enumerate(zip(shards, valid, strict=True))
    ]
    top = torch.stack([m for m, _, _ in statistics]).amax(0)
    lse = top + sum(e * (m - top).exp() for m, e, _ in statistics).log()
    target = sum(x for _, _, x in statistics)
    fp64_logits = logits[:, :10].double().requires_grad_()
    nll = F.cross_entropy(fp64_logits, targets, reduction="none")
    assert_close(lse - target, nll, torch.float32, "nll")
    (expected,) = torch.autograd.grad((nll * weights).sum(), fp64_logits)
    gradients = [
        chunk_gradient_(shard.clone(), targets, lse, weights, vocab_start=4 * i, valid_columns=n)
        for i, (shard, n) in enumerate(zip(shards, valid, strict=True))
    ]
    gradient = torch.cat(gradients[:3], -1)
    assert gradient.dtype == dtype
    assert_close(gradient[:, :10], expected, dtype, "gradient")
    equal = bool((gradient[:, 10:] == 0).all())
    assert equal
    equal = bool((gradients[3] == 0).all())
    assert equal


@DTYPES
def test_queries_without_keys_have_zero_output_and_gradient(make, dtype):
    inputs, options = make_attention(make, {"queries": 300, "keys": 150, "window": 20})
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out, lse = attention(*leaves, query_start=0, key_start=150, **options)
    equal = bool((lse[..., :150] == -math.inf).all())
    assert equal
    above = bool((lse[..., 150:] > -math.inf).all())
    assert above
    equal = bool((out[:150] == 0).all())
    assert equal
    out.backward(torch.ones_like(out))
    equal = bool((leaves[0].grad[:150] == 0).all())
    assert equal
    assert all(torch.isfinite(x.grad).all() for x in leaves)

# SPDX-License-Identifier: Apache-2.0
"""Every op's reference path against a naive fp64 formula: outputs and all gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.attention import attention
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.linear_cross_entropy import (
    chunk_gradient_,
    chunk_statistics,
    linear_cross_entropy,
)
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.rope import apply_rope, rotary_table
from megatron.core.ops.swiglu import activate, gated

# bf16 keeps 8 bits: each rounding moves a value by at most 2^-9 of itself. The bound allows the
# rounding of the result and that of the inputs of the last step (grad_out, x, w), with a margin
# of two; fp32 paths differ from fp64 by the sum's rounding only.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float64: 1e-12}


def assert_close(actual, expected, dtype, what):
    """Hold PROOF's metric: the largest difference over the largest reference value."""
    assert actual is not None, f"{what}: no gradient"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    error = (actual.double() - expected.double()).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype], f"{what}: {error:.2e} > {TOLERANCE[dtype]:.2e}"


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


@pytest.fixture
def make():
    """Make fp64 tensors from a fixed seed."""
    generator = torch.Generator().manual_seed(1234)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return randn


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)


def naive_rms(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@DTYPES
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 37), (7, 3), (2, 3, 2, 130)])
def test_rms_norm(make, dtype, zero_centered, shape):
    x, weight = make(*shape), make(shape[-1])
    one = 1 if zero_centered else 0
    compare(
        lambda x, w: rms_norm(x, w, eps=1e-5, zero_centered=zero_centered),
        lambda x, w: naive_rms(x, w + one),
        (x, weight),
        dtype,
    )


@DTYPES
def test_rms_norm_with_residual(make, dtype):
    x, residual, weight = make(5, 3, 37), make(5, 3, 37), make(37)
    compare(
        lambda x, r, w: rms_norm(x, w, eps=1e-5, residual=r),
        lambda x, r, w: (naive_rms(x + r, w), x + r),
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
def test_layer_norm(make, dtype, with_bias, zero_centered):
    inputs = [make(5, 3, 37), make(5, 3, 37), make(37)] + [make(37)] * with_bias
    one = 1 if zero_centered else 0
    compare(
        lambda x, r, w, b=None: layer_norm(
            x, w, b, eps=1e-5, residual=r, zero_centered=zero_centered
        ),
        lambda x, r, w, b=None: (F.layer_norm(x + r, (37,), w + one, b, 1e-5), x + r),
        inputs,
        dtype,
    )
    compare(
        lambda x, w: layer_norm(x, w, None, eps=1e-5),
        lambda x, w: F.layer_norm(x, (37,), w, None, 1e-5),
        (inputs[0], inputs[2]),
        dtype,
    )


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


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("features", "rotated"), [(6, 6), (10, 4)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rope(make, dtype, interleaved, features, rotated, per_sample):
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
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated(make, dtype, activation):
    def naive(x):
        gate, up = x.chunk(2, -1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    compare(lambda x: gated(x, activation), naive, (make(5, 3, 26),), dtype)


@DTYPES
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "squared_relu", "silu"])
def test_activate(make, dtype, kind):
    naive = {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "squared_relu": lambda x: F.relu(x) ** 2,
        "silu": F.silu,
    }[kind]
    compare(lambda x: activate(x, kind), naive, (make(5, 3, 13),), dtype)


def naive_attention(
    query, key, value, sinks=None, *, causal, scale, window=None, documents=None, keep=None
):
    """Softmax attention from its definition, all heads and pairs at once."""
    queries, keys, heads = query.shape[0], key.shape[0], query.shape[2]
    repeat = heads // key.shape[2]
    key, value = (x.repeat_interleave(repeat, 2) for x in (key, value))
    logits = torch.einsum("qbnd,kbnd->bnqk", query, key) * scale
    q = torch.arange(queries)[:, None] + keys - queries
    k = torch.arange(keys)
    visible = torch.ones(logits.shape, dtype=torch.bool)
    if causal:
        visible &= k <= q
    if window is not None:
        visible &= q - k < window
    if documents is not None:
        mine = documents[keys - queries :].t()[:, None, :, None]
        visible &= mine == documents.t()[:, None, None, :]
    logits = logits.masked_fill(~visible, -math.inf)
    if sinks is not None:
        extra = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, extra], -1)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp()[..., :keys]
    if keep is not None:
        weights = weights * keep
    return torch.einsum("bnqk,kbnd->qbnd", weights, value), lse.detach()


CASES = {
    "causal": {},
    "grouped": {"groups": 2},
    "one key head": {"groups": 1},
    "bidirectional": {"causal": False},
    "cross": {"causal": False, "queries": 9, "keys": 5},
    "cached": {"queries": 3, "keys": 11},
    "one query": {"queries": 1, "keys": 11, "groups": 2},
    "long": {"queries": 150, "keys": 301, "window": 40, "groups": 2},
    "window": {"window": 3, "groups": 2},
    "window, bidirectional": {"window": 3, "causal": False},
    "documents": {"documents": True, "groups": 2},
    "documents, bidirectional": {"documents": True, "causal": False},
    "documents, cached": {"documents": True, "queries": 4, "keys": 11},
    "sinks": {"sinks": True, "groups": 2},
    "all": {"sinks": True, "groups": 2, "window": 5, "documents": True, "scale": 0.3},
    "dropout": {"dropout": True, "groups": 2, "queries": 5, "keys": 11},
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
    if options.pop("dropout", False):
        options["dropout"] = AttentionDropout(
            rate=0.3, key=5, sample_ids=torch.tensor([8, 3]), head_offset=2
        )
    return inputs, options


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_attention(make, name, dtype):
    inputs, options = make_attention(make, CASES[name])
    queries, keys = inputs[0].shape[0], inputs[1].shape[0]
    keep = None
    if "dropout" in options:
        site = options["dropout"]
        keep = site.keep(4, torch.arange(queries) + keys - queries, 0, keys).double() * site.scale
        assert 0.1 < (keep == 0).double().mean() < 0.5

    def mine(q, k, v, sinks=None):
        out, lse = attention(q, k, v, sinks=sinks, **options)
        assert lse.shape == (2, 4, queries)
        assert not lse.requires_grad
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        seen.append(lse)
        return out

    def naive(q, k, v, sinks=None):
        rest = {x: y for x, y in options.items() if x not in ("document_ids", "dropout")}
        documents = options.get("document_ids")
        out, lse = naive_attention(q, k, v, sinks, documents=documents, keep=keep, **rest)
        seen.append(lse)
        return out

    seen = []
    compare(mine, naive, inputs, dtype)
    assert_close(seen[0], seen[1], torch.float32 if dtype != torch.float64 else dtype, "lse")


@DTYPES
@pytest.mark.parametrize("valid", [23, 19])
@pytest.mark.parametrize("chunk", [None, 4])
def test_linear_cross_entropy(make, dtype, valid, chunk):
    hidden, weight = make(11, 7), make(23, 7)
    targets = torch.arange(11) * 5 % valid
    weights = torch.linspace(0, 2, 11)
    weights = weights.double() if dtype == torch.float64 else weights

    def mine(h, w):
        loss, nll = linear_cross_entropy(
            h, w, targets, weights, chunk_tokens=chunk, valid_columns=valid
        )
        assert not nll.requires_grad
        return loss

    def naive(h, w):
        nll = F.cross_entropy(h @ w[:valid].t(), targets, reduction="none")
        return (nll * weights).sum()

    compare(mine, naive, (hidden, weight), dtype)


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
def test_vocabulary_slices_make_the_whole(make, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = make(6, 12).to(dtype)
    logits[:, 10:] = 1e4  # padding must take no part
    targets, weights = torch.tensor([0, 3, 4, 9, 7, 8]), torch.rand(6, dtype=wide)
    valid = [4, 4, 2, 0]
    pieces = [logits[:, :4], logits[:, 4:8], logits[:, 8:], logits[:, :4]]
    statistics = [
        chunk_statistics(piece, targets, 4 * i, n)
        for i, (piece, n) in enumerate(zip(pieces, valid, strict=True))
    ]
    top = torch.stack([m for m, _, _ in statistics]).amax(0)
    lse = top + sum(e * (m - top).exp() for m, e, _ in statistics).log()
    target = sum(x for _, _, x in statistics)
    true = logits[:, :10].double().requires_grad_()
    nll = F.cross_entropy(true, targets, reduction="none")
    assert_close(lse - target, nll, torch.float32, "nll")
    (expected,) = torch.autograd.grad((nll * weights).sum(), true)
    gradients = [
        chunk_gradient_(piece.clone(), targets, lse, weights, 4 * i, n)
        for i, (piece, n) in enumerate(zip(pieces, valid, strict=True))
    ]
    gradient = torch.cat(gradients[:3], -1)
    assert gradient.dtype == dtype
    assert_close(gradient[:, :10], expected, dtype, "gradient")
    assert (gradient[:, 10:] == 0).all()
    assert (gradients[3] == 0).all()

# SPDX-License-Identifier: Apache-2.0
"""RMS norm and layer norm against their equations: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.layernorm import cpu as layernorm_cpu
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.layernorm import naive as layernorm_naive
from megatron.core.ops.rmsnorm import naive as rmsnorm_naive
from megatron.core.ops.rmsnorm import rms_norm
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import (
    BOUND,
    DTYPES,
    agree,
    assert_refused,
    random_tensor,
    sized,
    use_launches,
)
from tests.support.launch_kernels import assert_launches

KERNELS = pytest.mark.gpu
SEQUENCE, BATCH = sized((1021, 3), (5, 2))
QUERIES, KEYS, FEATURES = sized((16, 2, 128), (3, 1, 20))
SHAPES = sized(
    [(2048, 2, 2048), *((1021, 1, h) for h in (1, 96, 2560, 5120, 8192))],
    [(5, 3, 37), (7, 3), (2, 3, 2, 130)],
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Use tiles of a few rows and fewer programs than tiles."""
    for op in ("rmsnorm", "layernorm"):
        use_launches(monkeypatch, op, ("FORWARD", "BACKWARD"), TILE=128, PROGRAMS=2, num_warps=1)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_matches_the_equation(backend, shape, zero_centered):
    options = {"eps": 1e-5, "zero_centered": zero_centered}

    def equation(x, weight, residual=None):
        x = x if residual is None else x + residual
        y = rmsnorm_naive.rms_norm(x, weight + 1 if zero_centered else weight, eps=1e-5)
        return y if residual is None else (y, x)

    x, residual, weight = backend.random(shape, shape, shape[-1:])
    for inputs in ((x, weight), (x, weight, residual)):
        backend.agree(
            lambda x, weight, residual=None, **o: rms_norm(
                x, weight, residual=residual, **options, **o
            ),
            equation,
            inputs,
        )


#: Shapes and views; a kernel addresses rows by two strides.
VIEWS = {
    "heads": ((5, 3, 9, 20), lambda x: x[:, :, 2:6]),
    "a gate next to each head": ((5, 3, 9, 40), lambda x: x[:, 1:, :, 20:]),
    "columns": ((5, 3, 40), lambda x: x[..., :20]),
    "transposed rows": ((5, 3, 20), lambda x: x.transpose(0, 1)),
    "one row": ((5, 1, 20), lambda x: x[3]),
    "transposed": ((20, 7), lambda x: x.t()),
}


@pytest.mark.parametrize("view", VIEWS)
def test_rms_norm_of_views_matches_the_equation(backend, view):
    shape, view_of = VIEWS[view]
    backend.agree(
        lambda x, w, **options: rms_norm(view_of(x), w, eps=1e-5, **options),
        lambda x, w: rmsnorm_naive.rms_norm(view_of(x), w, eps=1e-5),
        backend.random(shape, (20,)),
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm_matches_the_equation(backend, with_bias, zero_centered):
    shape = sized((2048, 2, 2048), (5, 3, 37))
    x, residual, weight, bias = backend.random(shape, shape, shape[-1:], shape[-1:])
    options = {"eps": 1e-5, "zero_centered": zero_centered}

    def equation(x, r, w, b=None):
        return layernorm_naive.layer_norm(x + r, w + zero_centered, b, eps=1e-5), x + r

    backend.agree(
        lambda x, r, w, b=None, **o: layer_norm(x, w, b, residual=r, **options, **o),
        equation,
        [x, residual, weight, *[bias] * with_bias],
    )
    backend.agree(
        lambda x, w, **o: layer_norm(x, w, None, eps=1e-5, **o),
        lambda x, w: layernorm_naive.layer_norm(x, w, None, eps=1e-5),
        [x, weight],
    )


def test_weight_may_have_another_dtype_than_rows(backend):
    x, weight = backend.random((4, 9), (9,))
    x, weight = x.bfloat16().requires_grad_(), weight.float().requires_grad_()
    rms_norm(x, weight, eps=1e-6, implementation=backend.implementation).sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


NORMS = {
    "rms": (rms_norm, rmsnorm_naive.rms_norm, 1),
    "layer": (layer_norm, layernorm_naive.layer_norm, 2),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norm_weight_gradients_are_summed_in_fp32(norm):
    """Gradients are rounded once to bf16; sums in bf16 would be off by 8 %."""
    op, equation, weights = NORMS[norm]
    inputs = [torch.randn(4096, 37), *torch.randn(weights, 37)]
    agree(
        lambda *leaves, **options: op(*leaves, eps=1e-5, **options),
        inputs,
        torch.bfloat16,
        equation=lambda *leaves: equation(*leaves, eps=1e-5),
        implementation="reference",
        bounds={torch.bfloat16: 2**-8},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_in_row_blocks_matches_the_equation(has_bias, dtype, monkeypatch):
    """21 rows in blocks of 5; the last one is partial."""
    monkeypatch.setattr(layernorm_cpu, "BLOCK_ELEMENTS", 5 * 74)
    x, residual = torch.randn(2, 7, 3, 74)
    weight, bias = torch.randn(2, 74)
    agree(
        lambda x, r, w, b=None, **o: layer_norm(x, w, b, eps=1e-5, residual=r, **o),
        [x, residual, weight, *[bias] * has_bias],
        dtype,
        equation=lambda x, r, w, b=None: (
            layernorm_naive.layer_norm(x + r, w, b, eps=1e-5),
            x + r,
        ),
        implementation="reference",
    )


@KERNELS
@pytest.mark.parametrize("gates", [False, True])
def test_norms_of_projected_heads_are_one_kernel_each(device, gates):
    """Queries are next to keys and values, or each query is next to its gate."""
    width = 2 * FEATURES if gates else FEATURES
    mixed = random_tensor(device, SEQUENCE, BATCH, QUERIES + 2 * KEYS, width)
    weight = random_tensor(device, FEATURES)

    def normed(mixed, w, v, **options):
        query, key, _ = mixed[..., -FEATURES:].split([QUERIES, KEYS, KEYS], dim=2)
        options |= {"eps": 1e-6, "zero_centered": True}
        return rms_norm(query, w, **options), rms_norm(key, v, **options)

    for dtype in DTYPES:
        agree(normed, (mixed, weight, weight.flip(0)), dtype)
        x, w = mixed.to(dtype), weight.to(dtype)
        assert_launches(
            lambda x=x, w=w: normed(x, w, w, implementation="triton"),
            {"rms_norm_forward_kernel": 2},
        )


@KERNELS
def test_layer_norm_is_one_kernel_each_way(device):
    shapes = (sized(512, 3), 74), (74,), (74,)
    leaves = [random_tensor(device, *shape).requires_grad_() for shape in shapes]
    grad_out = random_tensor(device, *shapes[0])

    def gradients():
        y = layer_norm(*leaves, eps=1e-5, implementation="triton")
        return torch.autograd.grad(y, leaves, grad_out)

    expected = {"layer_norm_forward_kernel": 1, "layer_norm_backward_kernel": 1}
    assert_launches(gradients, expected, allowed=("sum", "copy"))


@KERNELS
def test_offsets_beyond_32_bits_match_the_equation(device, tmp_path):
    """Offsets in x exceed 2^31; on a CPU x is a sparse file."""
    shape, strides = (2, 3, 16), (16, 1_100_000_000, 1)
    size = 2 * strides[1] + 32
    if device.type == "cpu":
        x = torch.from_file(str(tmp_path / "x"), shared=True, size=size, dtype=torch.float32)
    else:
        x = torch.empty(size, device=device)
    x = x.as_strided(shape, strides).copy_(torch.randn(shape)).requires_grad_()
    weight, grad_out = random_tensor(device, 16), random_tensor(device, *shape)
    y = rms_norm(x, weight, eps=1e-5, implementation="triton")
    (grad,) = torch.autograd.grad(y, x, grad_out)
    dense = x.detach().clone(memory_format=torch.contiguous_format).double().requires_grad_()
    expected = rmsnorm_naive.rms_norm(dense, weight.double(), eps=1e-5)
    bound = BOUND[torch.float32]
    assert_close_by_metric("output", y, expected, bound=bound)
    (expected_grad,) = torch.autograd.grad(expected, dense, grad_out.double())
    assert_close_by_metric("gradient", grad, expected_grad, bound=bound)


X = torch.ones(5, 2, 4, 6)
BAD = {
    "weight": (lambda: rms_norm(X, torch.ones(5), eps=1e-5), r"\(5,\) must have the shape"),
    "eps": (lambda: rms_norm(X, torch.ones(6), eps=-1.0), r"eps=-1\.0"),
    "residual": (
        lambda: rms_norm(X, torch.ones(6), eps=0.0, residual=X[:4]),
        r"residual \(4, 2, 4, 6\)",
    ),
    "bias": (lambda: layer_norm(X, torch.ones(6), torch.ones(4), eps=0.0), r"bias \(4,\)"),
    "implementation": (
        lambda: rms_norm(X, torch.ones(6), eps=0.0, implementation="cuda"),
        "implementation='cuda' is unknown",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_errors(name):
    assert_refused(*BAD[name])

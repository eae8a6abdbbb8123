# SPDX-License-Identifier: Apache-2.0
"""Activations, gated and plain, against their equations: outputs and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.swiglu import activate, gated, naive
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import (
    BOUND,
    DTYPES,
    assert_refused,
    random_tensor,
    sized,
    use_launches,
)
from tests.support.launch_kernels import assert_launches

KERNELS = pytest.mark.gpu


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Use blocks so small that a row has several."""
    use_launches(monkeypatch, "swiglu", ("FORWARD", "BACKWARD"), BLOCK=512)


#: (activation, clamp, offset); the clamps cut a part of normal inputs.
GATES = [
    ("silu", None, 0.0),
    ("gelu", None, 0.0),
    ("quick_gelu", None, 0.0),
    ("quick_gelu", 0.7, 1.0),
    ("silu", 0.4, 0.0),
    ("gelu", 0.9, 0.5),
]


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize(
    "shape", sized([(2048, 2, 11008)], [(5, 3, 26), (2, 3, 2 * 1030)]), ids=str
)
def test_gated_activation_matches_the_equation(backend, gate, shape):
    activation, clamp, offset = gate
    backend.agree(
        lambda x, **options: gated(x, activation, clamp=clamp, offset=offset, **options),
        lambda x: naive.gated(x, activation, clamp=clamp, offset=offset),
        backend.random(shape),
    )


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_matches_torch(backend, kind):
    backend.agree(
        lambda x, implementation: activate(x, kind), ACTIVATIONS[kind], backend.random((5, 3, 13))
    )


@KERNELS
def test_gate_is_one_kernel_each_way(device):
    x = random_tensor(device, sized(512, 3), 74).requires_grad_()
    grad_out = random_tensor(device, *gated(x, "gelu").shape)
    assert_launches(
        lambda: torch.autograd.grad(gated(x, "gelu", implementation="triton"), x, grad_out),
        {"gated_forward_kernel": 1, "gated_backward_kernel": 1},
    )


@KERNELS
def test_offsets_beyond_32_bits_match_the_equation(device):
    """The last rows of a tensor beyond 2^31 elements equal the rows computed separately."""
    rows, width = sized(((1 << 20) + 11, 2048), (11, 40))
    x = torch.ones(rows, width, dtype=DTYPES[-1], device=device)
    x[-5:] = random_tensor(device, 5, width).to(x.dtype)
    actual = gated(x, "silu", implementation="triton")[-5:]
    expected = naive.gated(x[-5:].double(), "silu")
    assert_close_by_metric("gated", actual, expected, bound=BOUND[x.dtype])


def test_gated_saves_only_its_input():
    x = torch.randn(4, 10, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


X = torch.ones(5, 2, 4, 6)
BAD = {
    "odd gate": (lambda: gated(X[..., :5]), r"\(5, 2, 4, 5\) must be even"),
    "gate kind": (lambda: gated(X, "relu"), "activation='relu' is unknown"),
    "activation": (lambda: activate(X, "tanh"), "kind='tanh' is unknown"),
    "fp64": (
        lambda: gated(X.double(), implementation="triton"),
        r"needs the triton package|has no float64",
    ),
    "CPU": (
        lambda: gated(X, implementation="triton"),
        r"needs the triton package|TRITON_INTERPRET=1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_errors(name):
    assert_refused(*BAD[name])

# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iterations against the polynomial on singular values in fp64, and against torch."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.optimizer.muon import orthogonalize, update_scale
from tests.support.closeness import relative_error
from tests.support.inputs import generator

SHAPES = [(5, 7), (7, 5), (1, 9), (9, 1), (64, 64), (33, 130), (130, 33)]


def random_gradients(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=generator(5, rows, cols))


def by_singular_values(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Apply the quintic polynomial to the singular values of x, in fp64."""
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_iterations_apply_the_polynomial_to_singular_values(shape: tuple[int, int], steps: int):
    x = random_gradients(*shape)
    for scale in (1.0, 1e-6, 1e6):
        output = orthogonalize(x * scale, steps=steps, dtype=torch.float32)
        assert output.dtype is torch.float32
        assert relative_error(output, by_singular_values(x, steps)) < 1e-5
    bf16_output = orthogonalize(x, steps=steps, dtype=torch.bfloat16)
    assert bf16_output.dtype is torch.bfloat16
    assert relative_error(bf16_output, by_singular_values(x, steps)) < 0.1


def test_singular_values_approach_one_and_vectors_stay():
    """With the published coefficients, the singular values end between 0.68 and 1.21."""
    left, _, right = torch.linalg.svd(random_gradients(40, 60).double(), full_matrices=False)
    values = torch.linspace(0.02, 1.0, 40, dtype=torch.float64)
    x = left @ torch.diag(values) @ right
    assert (values / values.square().sum().sqrt()).min() > 0.002
    core = left.T @ orthogonalize(x.float(), steps=5, dtype=torch.float32).double() @ right.T
    singular_values = core.diagonal()
    assert 0.68 < singular_values.min() < singular_values.max() < 1.21
    assert (core - torch.diag(singular_values)).abs().max() < 1e-4
    zeros = orthogonalize(torch.zeros(3, 4), steps=5, dtype=torch.float32)
    assert torch.equal(zeros, torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("mode", "adjust"), [("shape_scaling", "original"), ("rms", "match_rms_adamw")]
)
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)], ids=str)
def test_scaled_update_matches_torch_muon(shape: tuple[int, int], mode: str, adjust: str):
    """torch.optim.Muon computes in bf16, so the updates are close but not equal."""
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = random_gradients(*shape)
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn=adjust).step()
    update = orthogonalize(random_gradients(*shape), steps=5, dtype=torch.float32)
    assert relative_error(-update_scale(mode, *shape) * update, weight) < 0.05


def test_update_scales_match_their_formulas():
    assert update_scale("spectral", 3, 12) == update_scale("spectral", 12, 3) == math.sqrt(12)
    assert update_scale("shape_scaling", 3, 12) == 1.0
    assert update_scale("shape_scaling", 12, 3) == 2.0
    assert update_scale("unit_rms_norm", 3, 12) == 0.5
    assert update_scale("rms", 100, 9) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="'linear'"):
        update_scale("linear", 3, 3)

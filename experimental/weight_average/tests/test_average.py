# SPDX-License-Identifier: Apache-2.0
"""The average equals the closed form in fp64, and the weights are restored bitwise."""

from __future__ import annotations

import pytest
import torch

from experimental.weight_average.average import WeightAverage
from megatron.core.weight_gather import OwnedRange

NUMEL = (35, 13)
SAMPLES = (3, 5, 2, 7)
HALF_LIFE = 6.0


def weights_at(step: int, numel: int) -> torch.Tensor:
    """Return the weights [numel] after `step` steps."""
    return torch.sin(torch.arange(numel, dtype=torch.float32) * 0.7 + step)


def ranges(dtype: torch.dtype = torch.float32) -> list[OwnedRange]:
    """Return ranges with the initial weights."""
    return [
        OwnedRange(
            weights=weights_at(0, numel).to(dtype),
            gradients=torch.zeros(numel),
            decayed=(),
            undecayed=(),
            counted=(),
            boxes=(),
            norm_group="model",
        )
        for numel in NUMEL
    ]


def closed_form(numel: int) -> torch.Tensor:
    """Return the average [numel] in fp64: step k weighs (1 - d_k) times all later d."""
    total = torch.zeros(numel, dtype=torch.float64)
    decays = [1.0] + [0.5 ** (n / HALF_LIFE) for n in SAMPLES]
    for step, decay in enumerate(decays):
        share = 1.0 if step == 0 else 1.0 - decay
        for later in decays[step + 1 :]:
            share *= later
        total += share * weights_at(step, numel).double()
    return total


def test_average_matches_the_closed_form() -> None:
    owned = ranges()
    average = WeightAverage(owned, half_life_samples=HALF_LIFE)
    for step, samples in enumerate(SAMPLES, start=1):
        for owned_range in owned:
            owned_range.weights.copy_(weights_at(step, owned_range.weights.numel()))
        average.update(samples=samples)
    for actual in average.ranges:
        torch.testing.assert_close(actual.double(), closed_form(actual.numel()), rtol=0, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_restored_bitwise(dtype: torch.dtype) -> None:
    owned = ranges(dtype)
    average = WeightAverage(owned, half_life_samples=HALF_LIFE)
    for owned_range in owned:
        owned_range.weights.mul_(-1.5)
    before = [owned_range.weights.clone() for owned_range in owned]
    with average.in_place_of_weights():
        for owned_range, mean in zip(owned, average.ranges, strict=True):
            assert torch.equal(owned_range.weights, mean.to(dtype))
    assert all(torch.equal(a.weights, b) for a, b in zip(owned, before, strict=True))


def test_zero_half_life_is_refused() -> None:
    with pytest.raises(ValueError, match="half-life of 0 samples"):
        WeightAverage(ranges(), half_life_samples=0)

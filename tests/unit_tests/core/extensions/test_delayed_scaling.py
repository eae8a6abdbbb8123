# SPDX-License-Identifier: Apache-2.0
"""Scales of delayed scaling, against TransformerEngine's own update and across ranks."""

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.extensions import QuantizationConfig
from megatron.core.extensions.quantization import DelayedScaling
from megatron.core.weight_gather import WeightStore
from tests.support import te_extension, te_wheel
from tests.support.ranks import run_ranks

#: The amax of input, weight and output gradient in five steps: unknown, ordinary, tiny, large.
STEPS = [(0.0, 1.5, 1e-6), (3.0, 1.4, 2e-6), (0.5, 1.3, 1e-39), (700.0, 0.0, 3e-6), (2.0, 1.0, 5.0)]


def _make_scaling(**changes):
    config = QuantizationConfig(recipe="delayed", hybrid=True, **changes)
    groups = ProcessGroupCollection.single()
    scaling = DelayedScaling(config)
    scales = scaling.scales_of("w", store=WeightStore(groups))
    return scaling, scales, groups


def _te_scales(rank, world, algorithm, margin, length):
    """Return the scales after each step, as TE's Python code updates them."""
    te_extension.install(te_wheel.tree())
    from transformer_engine.common.recipe import DelayedScaling as Recipe
    from transformer_engine.pytorch.quantization import _amax_and_scale_update

    recipe = Recipe(amax_history_len=length, amax_compute_algo=algorithm, margin=margin)
    history, scale = torch.zeros(length, 3), torch.ones(3)
    scales = []
    for amax in STEPS:
        history[0] = torch.tensor(amax)
        for tensor, max_value in enumerate((448.0, 448.0, 57344.0)):
            column, column_scale = history[:, tensor : tensor + 1], scale[tensor : tensor + 1]
            _amax_and_scale_update(column, column_scale, max_value, recipe)
        scales.append(scale.clone())
    return scales


@pytest.mark.skipif(not te_wheel.is_there(), reason="run make te-wheels")
@pytest.mark.parametrize(
    ("algorithm", "length"),
    [
        ("max", 3),
        pytest.param("most_recent", 3, marks=pytest.mark.slow),
        pytest.param("max", 1, marks=pytest.mark.slow),
    ],
)
def test_scales_match_transformer_engine_update(algorithm, length):
    (expected,) = run_ranks(_te_scales, 1, algorithm, 1, length)
    scaling, scales, groups = _make_scaling(
        amax_compute_algo=algorithm, margin=1, amax_history_len=length
    )
    for amax, scale in zip(STEPS, expected, strict=True):
        scaling.begin()
        scales.amax.copy_(torch.tensor(amax))
        scaling.finish(groups)
        # TE multiplies by a reciprocal, which can differ by one bit.
        assert torch.allclose(scales.scale, scale, rtol=3e-7, atol=0.0), (scales.scale, scale)


def test_overflow_step_does_not_change_scales():
    scaling, scales, groups = _make_scaling(amax_compute_algo="max", amax_history_len=2)
    for amax in (2.0, float("inf"), float("nan")):
        scales.amax.fill_(amax)
        scaling.finish(groups)
    assert scales.scale.tolist() == [224.0, 224.0, 28672.0]


def test_evaluation_does_not_change_scales():
    scaling, scales, groups = _make_scaling()
    scales.amax.fill_(1000.0)
    scaling.begin()
    scales.amax.fill_(2.0)
    scaling.finish(groups)
    assert scales.scale[0] == 224.0


def _scale_on_rank(rank, world):
    grid = RankGrid(world_size=world, tp=2)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    scaling = DelayedScaling(QuantizationConfig(recipe="delayed"))
    scales = scaling.scales_of("w", store=WeightStore(groups))
    scales.amax.copy_(torch.tensor([1.0 + rank, 8.0 - rank, 2.0]))
    scaling.finish(groups)
    return scales.scale


def test_all_ranks_of_a_stage_use_scale_of_largest_amax():
    for scale in run_ranks(_scale_on_rank, 4):
        assert scale.tolist() == [448.0 / 4.0, 448.0 / 8.0, 224.0]

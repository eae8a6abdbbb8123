# SPDX-License-Identifier: Apache-2.0
"""Optimizers on a GPU: bf16 Muon is close to fp32 Muon; offloaded state changes nothing."""

from __future__ import annotations

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.optimizer import MuonConfig, OptimizerConfig
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.unit_tests.core.optimizer.gradient_steps import SHAPES, Training, random_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.machine]

STEPS = 3
MATRICES = ("q", "k", "down", "experts")


def train(config: OptimizerConfig, device: torch.device | str, **options) -> Training:
    training = Training(ProcessGroupCollection.single(), config, device=device, **options)
    for step in range(STEPS):
        assert training.step(random_gradients(step), lr=0.05, weight_decay=0.1).applied
    return training


def test_bf16_muon_is_close_to_fp32_on_the_cpu(device):
    config = OptimizerConfig(kind="muon", muon=MuonConfig(adam_names=("table",)))
    start = Training(ProcessGroupCollection.single(), config).logical()
    expected, actual = train(config, "cpu").logical(), train(config, device).logical()
    for name in SHAPES:
        bound = 0.1 if name in MATRICES else 1e-5
        moved = expected[name] - start[name]
        assert_close_by_metric(name, actual[name], expected[name], bound=bound, whole=moved)


def test_offloaded_state_updates_like_state_on_the_gpu(device):
    for dtype in (torch.float32, torch.bfloat16):
        trainings = [
            train(OptimizerConfig(offload_fraction=share), device, dtype=dtype)
            for share in (0.0, 0.5, 1.0)
        ]
        plain = trainings[0].logical()
        for share, training in zip((0.5, 1.0), trainings[1:], strict=True):
            optimizer = training.optimizer
            assert any(state.on_host for state in optimizer.ranges)
            for state in optimizer.ranges:
                device_type = "cpu" if state.on_host else "cuda"
                assert {t.device.type for t in (state.master, *state.moments.values())} == {
                    device_type
                }
                assert state.master.is_pinned() == state.on_host
            assert (optimizer.state_bytes(on_host=False) == 0) == (share == 1.0)
            bound = 1e-5 if dtype is torch.float32 else 2.0**-8
            assert_all_close(training.logical(), plain, bound=bound)


def test_offloaded_update_copies_every_weight_back(device):
    training = train(OptimizerConfig(offload_fraction=1.0), device)
    host = training.optimizer.host
    before = host.bytes_to_host, host.bytes_to_device
    elements = sum(len(state.master) for state in host.states)
    training.step(random_gradients(STEPS), lr=0.05, weight_decay=0.1)
    assert host.bytes_to_host - before[0] == host.bytes_to_device - before[1] == 4 * elements
    torch.cuda.synchronize(device)
    for state in host.states:
        assert torch.equal(state.owned.weights.cpu(), state.master)

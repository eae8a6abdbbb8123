# SPDX-License-Identifier: Apache-2.0
"""Streams, events, pinned memory and memory figures of a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron.core import device as devices
from megatron.core.comm.collectives import _RankSum


@pytest.mark.gpu
@pytest.mark.machine
def test_streams_events_and_memory_on_a_gpu(device):
    gpu = device
    side = devices.new_stream(gpu, priority=-1)
    start, end = (devices.new_event(gpu, timing=True) for _ in range(2))
    source = devices.pin(torch.arange(1 << 20, dtype=torch.float32), gpu)
    assert source.is_pinned()
    with devices.on_stream(side):
        assert devices.current_stream(gpu) == side
        start.record(side)
        copy = source.to(gpu, non_blocking=True)
        end.record(side)
    devices.current_stream(gpu).wait_event(end)
    devices.record_use(copy, devices.current_stream(gpu))
    assert copy.sum().item() == source.sum().item()
    torch.cuda.synchronize(gpu)
    assert start.elapsed_time(end) > 0.0
    assert devices.peak_memory_bytes(gpu) >= copy.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 8])
def test_parts_of_bf16_are_summed_in_fp32_in_the_order_of_ranks(device, ranks):
    """The sum of a reduce-scatter that accumulates in fp32: the CPU's bits."""

    class Done:
        def wait(self):
            pass

    generator = torch.Generator().manual_seed(ranks)
    parts = torch.randn(ranks, 1000, 3, generator=generator).bfloat16()
    expected, out = torch.zeros(1000, 3), torch.empty(1000, 3, device=device)
    for part in parts:
        expected += part
    _RankSum(Done(), parts.to(device).flatten(0, 1), out).wait()
    assert torch.equal(out.cpu(), expected)

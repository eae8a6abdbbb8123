# SPDX-License-Identifier: Apache-2.0
"""Streams, events, pinned memory and memory figures of a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron.core import device as devices
from megatron.core.comm.collectives import _RankSum


@pytest.mark.gpu
@pytest.mark.machine
def test_streams_events_and_memory_figures_work(device):
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
def test_bf16_shards_are_summed_in_fp32_in_rank_order(device, ranks):
    """The sum of a reduce-scatter with fp32 accumulation equals the CPU's bit for bit."""

    class FinishedWork:
        def wait(self):
            pass

    generator = torch.Generator().manual_seed(ranks)
    shards = torch.randn(ranks, 1000, 3, generator=generator).bfloat16()
    expected, out = torch.zeros(1000, 3), torch.empty(1000, 3, device=device)
    for shard in shards:
        expected += shard
    _RankSum(FinishedWork(), shards.to(device).flatten(0, 1), out).wait()
    assert torch.equal(out.cpu(), expected)

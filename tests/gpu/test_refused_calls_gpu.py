# SPDX-License-Identifier: Apache-2.0
"""Calls that CUDA refuses, on a GPU and on the null device."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from megatron.core.device import CudaRecorder

pytestmark = [pytest.mark.gpu, pytest.mark.machine, pytest.mark.refused]


@triton.jit
def fill_kernel(out, value, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, value)


def captured(device: torch.device, run) -> CudaRecorder:
    recorder = CudaRecorder(device, "the test")
    recorder.capture(run)
    return recorder


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().query(),
        lambda x: x.to("cpu"),
        lambda x: torch.ones(3).to(x.device),
    ],
    ids=["item", "device", "stream", "query", "to the host", "from the host"],
)
def test_synchronization_is_refused_in_a_capture(device, call):
    x = torch.ones(1000, device=device)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError):
        captured(device, lambda: call(x + 1))
    assert int(torch.ones(3, device=device).sum()) == 3  # the device still works


def test_work_of_a_joined_stream_is_captured(device):
    x, side = torch.zeros(1000, device=device), torch.cuda.Stream(device)

    def run():
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.add_(1)
        main.wait_stream(side)
        x.mul_(2)

    recorder = captured(device, run)
    assert not x.any()
    recorder.replay()
    assert int(x[0]) == 2


def test_unjoined_stream_is_refused(device):
    x, side = torch.zeros(1000, device=device), torch.cuda.Stream(device)

    def run():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="unjoined"):
        captured(device, run)


def test_capture_cannot_wait_for_an_outside_event(device):
    event = torch.cuda.Event()
    torch.ones(1000, device=device)
    event.record()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError):
        captured(device, lambda: torch.cuda.current_stream().wait_event(event))


def test_event_of_a_capture_cannot_be_synchronized(device):
    events = []

    def run():
        torch.ones(1000, device=device)
        events.append(torch.cuda.Event())
        events[0].record()

    captured(device, run)
    with pytest.raises(RuntimeError):
        events[0].synchronize()


def test_allocation_beyond_total_memory_is_refused(device):
    total = torch.cuda.get_device_properties(device).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device=device)
    allocated = torch.empty(total // 2, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_allocated(device) >= allocated.nbytes


def test_invalid_launches_are_refused(device):
    out = torch.empty(64, device=device)
    fill_kernel[(1,)](out, 1.0, BLOCK=64)
    with pytest.raises(RuntimeError):
        fill_kernel[(1, 65536)](out, 1.0, BLOCK=64)
    with pytest.raises(ValueError, match="cpu tensor"):
        fill_kernel[(1,)](torch.empty(64), 2.0, BLOCK=32)

# SPDX-License-Identifier: Apache-2.0
"""Requirements of symmetric memory, each removed in turn.

core/ops/interpreted_nvls.py runs collectives over symmetric memory.
"""

from __future__ import annotations

import sys

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection
from megatron.core.comm import symmetric_memory
from megatron.core.comm.symmetric_memory import (
    Arena,
    SequenceParallelComm,
    SymmetricBuffers,
    TorchMemory,
)

CUDA = torch.device("cuda", 0)


def test_cpu_has_no_symmetric_memory() -> None:
    assert TorchMemory(torch.device("cpu")).problem() == "the model is on cpu, not on a CUDA device"


def test_torch_without_symmetric_memory_names_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    assert "has no symmetric memory" in TorchMemory(CUDA).problem()


def test_symmetric_memory_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "triton_is_installed", lambda: False)
    assert TorchMemory(CUDA).problem() == "Triton is not installed"
    monkeypatch.setattr(symmetric_memory, "triton_is_installed", lambda: True)
    assert TorchMemory(CUDA).problem() == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have multicast")
def test_device_without_multicast_names_the_problem() -> None:
    assert TorchMemory(CUDA).multicast_problem() == "the device has no NVLink SHARP multicast"


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_one_rank_uses_no_symmetric_memory(mode: symmetric_memory.Mode) -> None:
    group = ProcessGroupCollection.single()["tp"]
    comm = SequenceParallelComm.create(group, TorchMemory(CUDA), max_bytes=64, mode=mode)
    assert comm.explain() == "torch.distributed (one rank)"
    assert not comm.fuses(torch.zeros(2, 8))


def test_spin_limit_traps_the_kernel_and_names_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailedStream:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    pads = torch.zeros(2, dtype=torch.int64)
    buffers = SymmetricBuffers(torch.zeros(16, dtype=torch.uint8), pads, pads, 256, 0)
    arena = Arena(Group("tp", (4, 6), 0, handle=object()), (buffers, buffers), "p2p")
    arena.limit_tries(9)
    assert not arena._peers(buffers).traps  # a CPU has no kernel to trap
    arena.device = CUDA
    monkeypatch.setattr(symmetric_memory, "pin", lambda tensor, device: tensor)
    monkeypatch.setattr(symmetric_memory, "current_stream", lambda device: FailedStream())
    arena.limit_tries(0)
    assert arena._peers(buffers).kernel_args()["TRAP"] is False
    arena.check()
    arena.limit_tries(9)
    assert arena._peers(buffers).kernel_args()["TRAP"] is True
    with pytest.raises(RuntimeError, match="launch failure"):
        arena.check()
    arena.status.fill_(2)
    with pytest.raises(RuntimeError, match="rank 6 did not reach"):
        arena.check()

# SPDX-License-Identifier: Apache-2.0
"""The device layer: the choice and its errors, no-ops on a CPU, memory figures that move."""

import contextlib
import subprocess
import sys
import weakref

import pytest
import torch

from megatron.core import device as devices

CPU = torch.device("cpu")


def test_auto_follows_what_torch_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device("auto") == CPU
    assert devices.choose_device("cpu") == CPU
    with pytest.raises(ValueError, match="torch sees no GPU: use cpu or auto"):
        devices.choose_device("cuda")


def test_each_local_rank_gets_its_own_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert devices.choose_device("auto", 3) == torch.device("cuda", 3)
    assert chosen == [torch.device("cuda", 3)]
    assert devices.choose_device("cpu", 3) == CPU
    with pytest.raises(ValueError, match="local rank 4 needs GPU 4, but this machine shows 4"):
        devices.choose_device("cuda", 4)


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        devices.choose_device("tpu")


def test_streams_and_events_are_no_ops_on_a_cpu():
    side, main = devices.new_stream(CPU), devices.current_stream(CPU)
    start, end = (devices.new_event(CPU, timing=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="both events"):
        start.elapsed_time(end)
    start.record(side)
    with devices.on_stream(side):
        total = sum(range(20_000))
    end.record(side)
    main.wait_event(end)
    main.wait_stream(side)
    side.synchronize()
    end.wait(main)
    end.synchronize()
    devices.record_use(torch.zeros(1), side)
    assert total == 199_990_000
    assert end.query()
    assert 0.0 < start.elapsed_time(end) < 10_000.0


def test_pin_does_not_copy_on_a_cpu():
    tensor = torch.ones(3)
    assert devices.pin(tensor, CPU) is tensor


def test_peak_memory_is_this_process_alone():
    """A child of a large parent starts small, and its peak stays after the memory is given back."""
    script = (
        "import torch; from megatron.core.device import peak_memory_bytes as peak\n"
        "cpu = torch.device('cpu'); before = peak(cpu)\n"
        "big = torch.ones(64 << 18); del big\n"  # 64 MiB, touched
        "print(before, peak(cpu))"
    )
    ballast = torch.ones(192 << 18)  # 192 MiB in this process
    here = devices.peak_memory_bytes(CPU)
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    before, after = map(int, done.stdout.split())
    assert here > ballast.nbytes
    assert 56 << 20 < after - before < 128 << 20


class Pools:
    """What torch does about pools of CUDA graphs: one that has lost its last graph is dead."""

    def __init__(self, monkeypatch):
        self.graphs_in, self.captured, self.streams = {}, [], []
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.handle)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {}))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def handle(self):
        return (0, len(self.graphs_in) + 1)

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        assert pool not in self.graphs_in or self.graphs_in[pool], "the pool is dead"
        self.graphs_in.setdefault(pool, weakref.WeakSet()).add(graph)
        self.captured.append(pool)
        self.streams.append(stream)
        yield


def test_graphs_share_a_pool_until_the_last_of_them_is_gone(monkeypatch):
    pools, memory = Pools(monkeypatch), devices.GraphMemory()
    gpu = torch.device("cuda", 0)

    def captured(memory):
        recorder = devices.CudaRecorder(gpu, "graphs", memory=memory)
        recorder.capture(lambda: None)
        return recorder

    graphs = [captured(memory) for _ in range(3)]
    assert len(set(pools.captured)) == 1
    del graphs[0]
    graphs.append(captured(memory))
    assert len(set(pools.captured)) == 1
    graphs.clear()
    graphs = [captured(memory) for _ in range(2)]
    assert len(set(pools.captured)) == 2
    graphs.append(captured(None))
    assert len(set(pools.captured)) == 3
    # torch has a workspace of cuBLAS for each stream.
    assert len(set(pools.streams)) == 2
    assert pools.streams[-1] is not pools.streams[0]

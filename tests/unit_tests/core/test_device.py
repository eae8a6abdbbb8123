# SPDX-License-Identifier: Apache-2.0
"""The device layer: device choice and its errors, no-ops on a CPU, peak memory, graph pools."""

import contextlib
import subprocess
import sys
import weakref

import pytest
import torch

from megatron.core import device as devices

CPU = torch.device("cpu")


def test_auto_falls_back_to_cpu_without_a_gpu(monkeypatch):
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
    with pytest.raises(ValueError, match="local rank 4 needs GPU 4, but this machine has 4"):
        devices.choose_device("cuda", 4)


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'tpu'"):
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


def test_peak_memory_excludes_the_parent_process():
    """The child of a large parent starts with a small peak, which stays after memory is freed."""
    script = (
        "import torch; from megatron.core.device import peak_memory_bytes as peak\n"
        "cpu = torch.device('cpu'); before = peak(cpu)\n"
        "big = torch.ones(64 << 18); del big\n"  # 64 MiB, touched
        "print(before, peak(cpu))"
    )
    ballast = torch.ones(192 << 18)  # 192 MiB in this process
    parent_peak = devices.peak_memory_bytes(CPU)
    child = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    before, after = map(int, child.stdout.split())
    assert parent_peak > ballast.nbytes
    assert 56 << 20 < after - before < 128 << 20


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemFree: 7 kB\nMemAvailable:    90 kB\n", None, 90 << 10),
        ("MemAvailable: 90 kB\n", "max", 90 << 10),
        ("MemAvailable: 90 kB\n", "30000", 30000 - 10000),
        ("MemAvailable: 90 kB\n", "9000", 0),
        (None, "30000", 20000),
        (None, None, None),
    ],
)
def test_available_memory_is_bounded_by_the_control_group(meminfo, limit, expected, tmp_path):
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo, encoding="utf-8")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit, encoding="utf-8")
        (tmp_path / "memory.current").write_text("10000\n", encoding="utf-8")
    assert devices.available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected


class FakeGraphPools:
    """Imitate torch's pools of CUDA graphs: a pool that lost its last graph must not be reused."""

    def __init__(self, monkeypatch):
        self.graphs_in, self.pools_used, self.streams = {}, [], []
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
        self.pools_used.append(pool)
        self.streams.append(stream)
        yield


def test_graphs_share_a_pool_until_the_last_graph_is_freed(monkeypatch):
    pools, memory = FakeGraphPools(monkeypatch), devices.GraphMemory()
    gpu = torch.device("cuda", 0)

    def capture_graph(memory):
        recorder = devices.CudaRecorder(gpu, "graphs", memory=memory)
        recorder.capture(lambda: None)
        return recorder

    graphs = [capture_graph(memory) for _ in range(3)]
    assert len(set(pools.pools_used)) == 1
    del graphs[0]
    graphs.append(capture_graph(memory))
    assert len(set(pools.pools_used)) == 1
    graphs.clear()
    graphs = [capture_graph(memory) for _ in range(2)]
    assert len(set(pools.pools_used)) == 2
    graphs.append(capture_graph(None))
    assert len(set(pools.pools_used)) == 3
    # torch allocates a cuBLAS workspace for each stream: graphs that share memory share a stream.
    assert len(set(pools.streams)) == 2
    assert pools.streams[-1] is not pools.streams[0]

# SPDX-License-Identifier: Apache-2.0
"""Registered memory and the memory of communicators, with fakes for NCCL and torch's pools."""

import contextlib

import pytest
import torch

from megatron.core import Group, InitSpec, ProcessGroupCollection, RankGrid, WeightSharding
from megatron.core.comm.symmetric_memory import RegisteredMemory, communicator_bytes
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.weight_gather import BufferPool, WeightStore
from megatron.core.weight_gather import gatherer as gatherer_module
from tests.support.pretended_groups import pretended_groups

GPU = torch.device("cuda", 0)


class Communicator:
    """A fake communicator as strict as NCCL: each pool is registered once, while it is empty."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self, name: str = "nccl") -> None:
        self._name, self.pools = name, []

    def name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> "Communicator":
        assert device == GPU
        return self

    def register_mem_pool(self, pool: "Pool") -> None:
        assert pool not in self.pools, "registered twice"
        assert not pool.sizes, "allocations would be registered twice"
        self.pools.append(pool)


class Pool:
    """A fake memory pool of torch's allocator."""

    current: "Pool | None" = None

    def __init__(self, allocator: object) -> None:
        self.allocator, self.sizes = allocator, []


@pytest.fixture
def pools(monkeypatch):
    """Replace torch's memory pools by fakes; a "GPU" tensor is allocated on the CPU."""
    created_pools: list[Pool] = []
    empty = torch.empty

    def pool(allocator):
        created_pools.append(Pool(allocator))
        return created_pools[-1]

    @contextlib.contextmanager
    def use(pool_in_use, device):
        assert device == GPU
        monkeypatch.setattr(Pool, "current", pool_in_use)
        yield
        monkeypatch.setattr(Pool, "current", None)

    def allocate(size, *, dtype, device):
        assert device == GPU
        assert Pool.current is not None, "allocated outside of a registered pool"
        Pool.current.sizes.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "MemPool", pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch, "empty", allocate)
    return created_pools


def group(name: str, handle: object | None) -> Group:
    return Group(name, (0, 1) if handle else (0,), 0, handle)  # type: ignore[arg-type]


def test_every_communicator_registers_pool_before_allocation(pools):
    shared, separate = Communicator(), Communicator()
    groups = [group("a", shared), group("b", shared), group("c", separate), group("d", None)]
    memory = RegisteredMemory(groups, GPU)
    assert memory.empty(48, torch.bfloat16).numel() == 48
    memory.empty(16, torch.float32)
    (pool,) = pools
    assert pool.allocator == Communicator.mem_allocator
    assert shared.pools == separate.pools == [pool]
    assert pool.sizes == [48, 16]


def test_buffer_pool_allocates_in_registered_memory(pools, monkeypatch):
    communicator = Communicator()
    memory = RegisteredMemory([group("a", communicator)], GPU)
    pool = BufferPool("cpu", memory=memory)
    buffer = pool.acquire(40, torch.float32)
    pool.release(buffer)
    assert pool.acquire(40, torch.float32).data_ptr() == buffer.data_ptr()
    assert len(pools[0].sizes) == 1


def test_registered_memory_refuses_gloo_and_cpu():
    with pytest.raises(ValueError, match=r"--use-nccl-ub.*NCCL"):
        RegisteredMemory([group("a", Communicator("gloo"))], GPU)
    with pytest.raises(ValueError, match=r"--use-nccl-ub.*NCCL"):
        RegisteredMemory([group("a", Communicator())], torch.device("cpu"))


def test_cpu_engine_refuses_registered_memory():
    groups = ProcessGroupCollection.single()
    config = DataParallelConfig(strategy="optim_grads_params", use_nccl_ub=True)
    store = WeightStore(groups)
    store.declare(WeightSharding.of("a", (8, 4)), InitSpec.normal(0.1))
    store.materialize(config.storage())
    with pytest.raises(ValueError, match=r"--use-nccl-ub.*NCCL"):
        DataParallel(store, groups, config=config)


def test_engine_registers_gathers_and_reductions_separately(monkeypatch):
    groups = pretended_groups(RankGrid(world_size=4), 1)
    config = DataParallelConfig(strategy="optim_grads_params", use_nccl_ub=True)
    store = WeightStore(groups)
    for name in ("a", "b"):
        store.declare(WeightSharding.of(name, (8, 4)), InitSpec.normal(0.1))
    store.materialize(config.storage())
    registered = []

    def memory(chosen_groups, device):
        registered.append({g.name for g in chosen_groups if g.size > 1})

    monkeypatch.setattr(gatherer_module, "RegisteredMemory", memory)
    monkeypatch.setattr("megatron.core.distributed.data_parallel.RegisteredMemory", memory)
    DataParallel(store, groups, config=config)
    assert registered == [{"dense_dp"}, {"shard_gather"}]


def test_communicator_bytes_follow_nccl_variables():
    mib = 1 << 20
    assert communicator_bytes({}) == 16 * 2 * (4 * mib + 512 * 1024 + 4800 * 1024)
    assert communicator_bytes({"NCCL_BUFFSIZE": str(8 * mib)}) - communicator_bytes({}) == 128 * mib
    assert communicator_bytes({"NCCL_MAX_NCHANNELS": "4"}) * 4 == communicator_bytes({})
    assert communicator_bytes({"NCCL_BUFFSIZE": "large"}) == communicator_bytes({})


def test_shared_communicators_are_counted_once():
    shared, separate = object(), object()
    groups = {
        name: group(name, handle)
        for name, handle in (("a", shared), ("b", shared), ("c", separate), ("d", None))
    }
    assert ProcessGroupCollection(RankGrid(world_size=2), 0, groups).num_communicators == 3
    assert ProcessGroupCollection.single().num_communicators == 0

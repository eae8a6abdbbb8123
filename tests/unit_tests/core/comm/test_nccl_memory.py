# SPDX-License-Identifier: Apache-2.0
"""Registered memory and what communicators take, with stand-ins for NCCL and for torch's pools."""

import contextlib

import pytest
import torch

from megatron.core.comm.nccl_memory import RegisteredMemory, communicator_bytes
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_gather import gatherer as gatherer_module
from megatron.core.weight_gather.gatherer import BufferPool
from megatron.core.weight_sharding import WeightSharding
from tests.support.pretended_groups import pretended_groups

GPU = torch.device("cuda", 0)


class Communicator:
    """A communicator as strict as NCCL's: it takes a pool once, and only an empty one."""

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
    """A pool of torch's allocator."""

    current: "Pool | None" = None

    def __init__(self, allocator: object) -> None:
        self.allocator, self.sizes = allocator, []


@pytest.fixture
def pools(monkeypatch):
    """Stand-ins for torch's pools; a tensor "of the GPU" lies in the pool in use, on the CPU."""
    made: list[Pool] = []
    empty = torch.empty

    def pool(allocator):
        made.append(Pool(allocator))
        return made[-1]

    @contextlib.contextmanager
    def use(chosen, device):
        assert device == GPU
        monkeypatch.setattr(Pool, "current", chosen)
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
    return made


def group(name: str, handle: object | None) -> Group:
    return Group(name, (0, 1) if handle else (0,), 0, handle)  # type: ignore[arg-type]


def test_every_communicator_registers_pool_before_allocation(pools):
    shared, other = Communicator(), Communicator()
    groups = [group("a", shared), group("b", shared), group("c", other), group("d", None)]
    memory = RegisteredMemory(groups, GPU)
    assert memory.empty(48, torch.bfloat16).numel() == 48
    memory.empty(16, torch.float32)
    (pool,) = pools
    assert pool.allocator == Communicator.mem_allocator
    assert shared.pools == other.pools == [pool]
    assert pool.sizes == [48, 16]


def test_buffers_that_are_leased_lie_in_registered_memory(pools, monkeypatch):
    communicator = Communicator()
    memory = RegisteredMemory([group("a", communicator)], GPU)
    pool = BufferPool("cpu", memory=memory)
    first = pool.acquire(40, torch.float32)
    pool.release(first)
    assert pool.acquire(40, torch.float32).data_ptr() == first.data_ptr()
    assert len(pools[0].sizes) == 1


def test_memory_is_registered_with_nccl_alone():
    with pytest.raises(ValueError, match=r"--use-nccl-ub needs NCCL.* group a talks by gloo"):
        RegisteredMemory([group("a", Communicator("gloo"))], GPU)
    with pytest.raises(ValueError, match=r"--use-nccl-ub needs NCCL.* computes on the cpu"):
        RegisteredMemory([group("a", Communicator())], torch.device("cpu"))


def test_an_engine_on_a_cpu_refuses_registered_memory():
    groups = ProcessGroupCollection.single()
    config = DataParallelConfig(strategy="optim_grads_params", use_nccl_ub=True)
    store = WeightStore(groups)
    store.declare(WeightSharding.of("a", (8, 4)), InitSpec.normal(0.1))
    store.materialize(config.storage())
    with pytest.raises(ValueError, match=r"--use-nccl-ub needs NCCL.* computes on the cpu"):
        DataParallel(store, groups, config=config)


def test_engine_registers_gathers_and_reductions_in_own_groups(monkeypatch):
    groups = pretended_groups(RankGrid(world_size=4), 1)
    config = DataParallelConfig(strategy="optim_grads_params", use_nccl_ub=True)
    store = WeightStore(groups)
    for name in ("a", "b"):
        store.declare(WeightSharding.of(name, (8, 4)), InitSpec.normal(0.1))
    store.materialize(config.storage())
    registered = []

    def memory(chosen, device):
        registered.append({one.name for one in chosen if one.size > 1})

    monkeypatch.setattr(gatherer_module, "RegisteredMemory", memory)
    monkeypatch.setattr("megatron.core.distributed.data_parallel.RegisteredMemory", memory)
    DataParallel(store, groups, config=config)
    assert registered == [{"dense_dp"}, {"shard_gather"}]


def test_memory_of_a_communicator():
    mib = 1 << 20
    assert communicator_bytes({}) == 16 * 2 * (4 * mib + 512 * 1024 + 4800 * 1024)
    assert communicator_bytes({"NCCL_BUFFSIZE": str(8 * mib)}) - communicator_bytes({}) == 128 * mib
    assert communicator_bytes({"NCCL_MAX_NCHANNELS": "4"}) * 4 == communicator_bytes({})
    assert communicator_bytes({"NCCL_BUFFSIZE": "large"}) == communicator_bytes({})


def test_communicators_are_counted_once_each():
    shared, other = object(), object()
    made = {
        name: group(name, handle)
        for name, handle in (("a", shared), ("b", shared), ("c", other), ("d", None))
    }
    assert ProcessGroupCollection(RankGrid(world_size=2), 0, made).num_communicators == 3
    assert ProcessGroupCollection.single().num_communicators == 0

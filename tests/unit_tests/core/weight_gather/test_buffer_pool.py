# SPDX-License-Identifier: Apache-2.0
"""The buffer pool: disjoint storage, reuse, invalid releases, poison and byte counts."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.core.comm.collectives import poison_
from megatron.core.weight_gather import BufferPool
from megatron.core.weight_gather.gatherer import size_class


def spans(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel()
    )


def test_live_buffers_never_share_storage():
    rng = random.Random(7)
    pool, live = BufferPool("cpu"), []
    pointers = set()
    for _ in range(400):
        if live and rng.random() < 0.5:
            pool.release(live.pop(rng.randrange(len(live))))
        else:
            dtype = rng.choice((torch.float32, torch.bfloat16))
            live.append(pool.acquire(rng.choice((0, 1, 15, 16, 100, 1000, 5000)), dtype))
            pointers.add(live[-1].data_ptr())
        flat = [edge for span in spans(live) for edge in span]
        assert flat == sorted(flat)
        assert pool.live_bytes == sum(t.numel() * t.element_size() for t in live)
    assert len(pointers) < 200  # storage is reused


def test_released_buffer_is_reused_within_its_size_class():
    pool = BufferPool("cpu")
    released = pool.acquire(1000, torch.float32)
    pointer = released.data_ptr()
    pool.release(released)
    reused = pool.acquire(1001, torch.float32)
    assert size_class(1001) == size_class(1000) == 1008
    assert reused.data_ptr() == pointer
    assert tuple(reused.shape) == (1001,)
    assert pool.acquire(1000, torch.bfloat16).data_ptr() != pointer


def test_buffer_is_released_once_and_only_by_its_own_tensor():
    pool = BufferPool("cpu")
    buffer = pool.acquire(8, torch.float32)
    for foreign in (torch.empty(8), buffer[:4], buffer.view(2, 4), buffer.clone()):
        with pytest.raises(ValueError, match="not a buffer in use"):
            pool.release(foreign)
    pool.release(buffer)
    with pytest.raises(ValueError, match="not a buffer in use"):
        pool.release(buffer)
    # The previous tensor of a reused buffer cannot release it.
    reused = pool.acquire(8, torch.float32)
    assert reused.data_ptr() == buffer.data_ptr()
    with pytest.raises(ValueError, match="not a buffer in use"):
        pool.release(buffer)


def test_buffers_are_poisoned_at_allocation_and_release():
    pool = BufferPool("cpu", poison=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        buffer = pool.acquire(100, dtype)
        assert buffer.float().isnan().all()
        buffer.fill_(1.0)
        pool.release(buffer)
        assert buffer.float().isnan().all()
    codes = pool.acquire(4, torch.uint8)
    assert codes.tolist() == [255] * 4
    assert poison_(torch.zeros(2, dtype=torch.bool)).all()


def test_without_poison_buffers_keep_their_content():
    pool = BufferPool("cpu")
    buffer = pool.acquire(10, torch.float32).fill_(3.0)
    pool.release(buffer)
    assert torch.equal(buffer, torch.full((10,), 3.0))


def test_autograd_refuses_a_saved_buffer_after_release():
    pool = BufferPool("cpu", poison=True)
    x = torch.ones(3, requires_grad=True)
    buffer = pool.acquire(3, torch.float32)
    with torch.no_grad():
        buffer.fill_(2.0)
    y = (x * buffer).sum()
    pool.release(buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_requested_bytes_and_held_memory_are_counted():
    pool = BufferPool("cpu")
    a, b = pool.acquire(100, torch.float32), pool.acquire(100, torch.bfloat16)
    assert (pool.live_bytes, pool.peak_bytes) == (600, 600)
    pool.release(a)
    assert (pool.live_bytes, pool.peak_bytes) == (200, 600)
    pool.release(pool.acquire(100, torch.float32))
    pool.release(pool.acquire(1, torch.float32))
    assert (pool.live_bytes, pool.peak_bytes) == (200, 600)
    pool.reset_peak()
    assert pool.peak_bytes == 200
    assert pool.reserved_bytes == 112 * 6 + 16 * 4
    pool.trim()
    assert pool.reserved_bytes == 112 * 2
    pool.release(b)
    pool.trim()
    assert pool.reserved_bytes == pool.live_bytes == 0


def test_size_classes_waste_at_most_a_64th():
    for numel in (0, 1, 16, 17, 1023, 1024, 1025, 99_999, 12_345_678):
        rounded = size_class(numel)
        assert numel <= rounded <= max(numel + 15, numel * 65 / 64)
        assert rounded % 16 == 0
        assert size_class(rounded) == rounded


def test_detached_buffers_are_never_reused():
    pool = BufferPool("cpu")
    buffers = [pool.acquire(n, torch.float32) for n in (1000, 1000, 40)]
    with pytest.raises(ValueError, match="3 buffers of the pool are in use"):
        pool.take_free_buffers()
    for buffer in buffers:
        pool.release(buffer)
    detached = pool.take_free_buffers()
    assert sorted(t.numel() for t in detached) == [48, 1008, 1008]
    assert pool.reserved_bytes == 0
    detached_pointers = {t.data_ptr() for t in detached}
    assert pool.acquire(1000, torch.float32).data_ptr() not in detached_pointers

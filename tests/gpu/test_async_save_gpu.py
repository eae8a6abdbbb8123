# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves of state on a GPU: pinned copies on a separate stream."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing import AsyncSaver, CheckpointReader, Solo, save_checkpoint
from tests.functional_tests.small_run import digests, flags, run_on, write_tokens
from tests.unit_tests.core.dist_checkpointing.layouts import full_chunks, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.machine]


def test_changes_after_settle_are_not_saved(tmp_path):
    device = torch.device("cuda")
    tensors = {f"w{i}": torch.randn(1 << 22, device=device) for i in range(8)}
    tensors["strided"] = torch.randn(512, 512, device=device)[:, ::2]
    tensors["on_host"] = torch.randn(1000)
    before = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    chunks = full_chunks(tensors)
    save_checkpoint(tmp_path / "sync", 1, chunks, {}, coordinator=Solo())
    saver = AsyncSaver(tmp_path / "async", chunks, coordinator=Solo())
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(20):  # queue the copies behind pending work
        busy = busy @ busy * 1e-3
    saver.save(1, {})
    saver.synchronize_staging()
    for tensor in tensors.values():
        tensor.zero_()
    saver.wait()
    (report,) = saver.finished()
    saver.close()
    assert report.error is None
    for name in ("manifest.json", "shard-00000.safetensors"):
        files = [tmp_path / mode / "iter_0000001" / name for mode in ("sync", "async")]
        assert files[0].read_bytes() == files[1].read_bytes()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    with CheckpointReader(tmp_path / "async" / "iter_0000001") as reader:
        reader.read(full_chunks(loaded))
    assert all(same_bits(loaded[name], before[name]) for name in before)


def test_staging_memory_is_pinned(tmp_path):
    saver = AsyncSaver(
        tmp_path, full_chunks({"w": torch.ones(9, device="cuda")}), coordinator=Solo()
    )
    assert saver.staging._memory.is_pinned()
    saver.close()


def test_async_save_of_a_gpu_run_equals_sync_save(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    common = "--device cuda --bf16 --train-iters 5 --save-interval 1 --eval-interval 0"
    run_on(1, flags(prefix, f"{common} --save {tmp_path / 'waits'}"))
    run_on(1, flags(prefix, f"{common} --async-save --save {tmp_path / 'goes_on'}"))
    for iteration in range(1, 6):
        name = f"iter_{iteration:07d}"
        assert digests(tmp_path / "goes_on" / name) == digests(tmp_path / "waits" / name)

# SPDX-License-Identifier: Apache-2.0
"""A synchronous save streams from the tensors: no copy of the state, and no other process."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megatron.core.dist_checkpointing import Solo, save_checkpoint
from tests.support.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import full_chunks

#: Host memory that a save of 88 MiB in 2,024 tensors may add: the plan, the manifest and a scratch
#: buffer. It adds 6,600 to 6,700 KiB alone, up to 7,360 after other tests on a busy machine. A copy
#: of one 4 MiB tensor at a time adds 14,000.
MAX_GROWTH_KIB = 8000


def memory_kib(name: str) -> int:
    """Return a field of this process's memory status."""
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None
    return int(match[1])


def measure_save(rank: int, world: int, root: str) -> tuple[int, int]:
    """Return the peak growth of memory during a save in KiB, and the number of child processes."""
    tensors = {f"large.{i}": torch.ones(4, 256, 1024) for i in range(16)}
    tensors |= {f"columns.{i}": torch.ones(768, 1024).t() for i in range(8)}
    tensors |= {f"small.{i}": torch.ones(i % 9 + 1) for i in range(2000)}
    chunks = full_chunks(tensors)
    save_checkpoint(root, 1, chunks[-16:], {}, coordinator=Solo())  # imports modules
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory_kib("VmRSS")
    save_checkpoint(root, 2, chunks, {}, coordinator=Solo())
    children = Path("/proc/self/task").glob("*/children")
    return memory_kib("VmHWM") - before, sum(len(path.read_text().split()) for path in children)


def test_synchronous_save_copies_no_state(tmp_path: Path) -> None:
    ((growth_kib, children),) = run_ranks(measure_save, 1, str(tmp_path))
    assert growth_kib < MAX_GROWTH_KIB
    assert children == 0

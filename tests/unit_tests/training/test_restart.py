# SPDX-License-Identifier: Apache-2.0
"""What a launcher's restart goes on from: what its own job has saved, and nothing else."""

from __future__ import annotations

import torch.distributed as dist

from megatron.training.config.resolve import resolve
from megatron.training.failures.restart import RestartNote, going_on
from megatron.training.launch import Launch
from tests.unit_tests.training.small_config import small_config


def _note(port: int, attempt: int, *, serves: bool = True) -> RestartNote:
    launch = Launch(address="127.0.0.1", port=port, launcher_serves=serves, attempt=attempt)
    return RestartNote(launch, timeout_seconds=10.0)


def test_only_a_later_start_of_a_job_that_has_saved_goes_on():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = _note(server.port, 0)
    assert not first.going_on
    assert not _note(server.port, 1).going_on, "it crashed before its first save"
    first.saved()
    assert not _note(server.port, 0).going_on
    assert _note(server.port, 1).going_on
    assert _note(server.port, 2).going_on
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not _note(other.port, 1).going_on, "of another job"


def test_without_a_launcher_that_serves_a_store_nothing_is_noted():
    note = RestartNote(Launch(), timeout_seconds=1.0)
    note.saved()
    assert not note.going_on


def test_a_run_that_goes_on_loads_all_of_what_it_saved():
    run = resolve(small_config("--save s --load other --finetune --no-load-optim"), 1)
    chosen = going_on(run).config.checkpoint
    assert (chosen.load, chosen.finetune, chosen.load_optim) == ("s", False, True)

# SPDX-License-Identifier: Apache-2.0
"""What is read from torchrun's environment."""

from __future__ import annotations

import pytest

from megatron.training.launch import Launch

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_a_single_process():
    assert Launch.from_environment({}) == Launch(rank=0, world_size=1, local_rank=0)


def test_torchrun():
    assert Launch.from_environment(TORCHRUN) == Launch(
        rank=3,
        world_size=4,
        local_rank=1,
        address="host",
        port=29500,
        launcher_serves=True,
        attempt=2,
    )


def test_a_broken_environment_is_one_line():
    with pytest.raises(ValueError, match="MASTER_PORT not: start the run with torchrun"):
        Launch.from_environment({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"})
    with pytest.raises(ValueError, match="environment is broken"):
        Launch.from_environment({**TORCHRUN, "RANK": "x"})


def test_a_single_process_has_a_store_of_its_own():
    store = Launch().open_store(timeout_seconds=1.0, first=True)
    store.set("a", "b")
    assert store.get("a") == b"b"

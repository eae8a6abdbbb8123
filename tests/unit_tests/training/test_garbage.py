# SPDX-License-Identifier: Apache-2.0
"""Scheduled garbage collection: at its interval, disabled in between, restored afterwards."""

from __future__ import annotations

import gc

import pytest

from megatron.training.observation import scheduled_collection


@pytest.fixture
def collections():
    """Count the full collections."""
    counted: list[int] = []

    def count(phase: str, event: dict[str, int]) -> None:
        if phase == "start" and event["generation"] == 2:
            counted.append(1)

    gc.freeze()  # collections of the test then visit only its own objects
    gc.callbacks.append(count)
    yield counted
    gc.callbacks.remove(count)
    gc.unfreeze()


def test_gc_runs_at_its_interval_and_never_in_between(collections):
    assert gc.isenabled()
    with scheduled_collection(True, 3) as begin:
        assert not gc.isenabled()
        collections.clear()
        for iteration in range(1, 10):
            begin(iteration)
            assert len(collections) == iteration // 3
    assert gc.isenabled()


def test_gc_interval_zero_never_collects_and_off_keeps_gc_on(collections):
    with scheduled_collection(True, 0) as begin:
        collections.clear()
        begin(1)
        assert not collections
        assert not gc.isenabled()
    with scheduled_collection(False, 1) as begin:
        collections.clear()
        begin(1)
        assert not collections
        assert gc.isenabled()

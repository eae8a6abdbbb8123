# SPDX-License-Identifier: Apache-2.0
"""Which rank prints an error, and that no rank ends before it is printed."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megatron.cli import error_reports
from megatron.cli.error_reports import Claims, ErrorReports

TEXT = "error: --lr is -1"


def of_rank(rank: int, store: dist.Store | None = None, *, world_size: int = 1) -> ErrorReports:
    reports = ErrorReports({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    if store is not None:
        reports.share(store, world_size=world_size)
    return reports


def test_a_silent_rank_ends_after_the_text_is_printed():
    """A launcher ends the rank that prints as soon as the silent rank has ended."""
    store, printing, may_end = dist.HashStore(), threading.Event(), threading.Event()
    printed: list[bool] = []

    def be_rank(rank: int) -> None:
        with of_rank(rank, store).report(TEXT) as prints:
            printed.append(prints)
            if prints:
                printing.set()
                may_end.wait()

    slow, silent = (threading.Thread(target=be_rank, args=(rank,)) for rank in (0, 1))
    slow.start()
    printing.wait()
    silent.start()
    silent.join(timeout=0.2)
    waits = silent.is_alive()
    may_end.set()
    assert waits
    silent.join()
    slow.join()
    assert printed == [True, False]


def test_every_rank_prints_what_no_other_rank_has():
    store = dist.HashStore()
    texts: list[tuple[int, str]] = []

    def be_rank(rank: int) -> None:
        text = f"error: {rank // 2 * 100} bytes"
        with of_rank(rank, store, world_size=4).report(text) as prints:
            if prints:
                texts.append((rank, text))

    threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in (3, 2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = dict(texts)
    assert sorted(text for _, text in texts) == ["error: 0 bytes", "error: 100 bytes"]
    assert found[0] == "error: 0 bytes", "rank 0 prints what another rank has as well"


def test_a_rank_waits_for_the_errors_of_the_others(monkeypatch):
    monkeypatch.setattr(error_reports, "OTHERS_SECONDS", 60.0)
    store = dist.HashStore()

    def be_rank_0() -> None:
        with of_rank(0, store, world_size=2).report("error: of rank 0"):
            pass

    first = threading.Thread(target=be_rank_0, daemon=True)
    first.start()
    first.join(timeout=0.2)
    assert first.is_alive()
    Claims(store).wait_for_others(2)
    first.join()


@pytest.mark.parametrize(
    ("environment", "prints", "waits"),
    [
        ({}, True, False),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, True, True),
        ({"RANK": "9", "LOCAL_RANK": "1"}, False, True),
        ({"RANK": "x", "LOCAL_RANK": "1"}, True, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, True, False),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, False, True),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "1"}, True, False),
    ],
)
def test_before_there_is_a_store_rank_0_comes_first(monkeypatch, environment, prints, waits):
    waited: list[float] = []
    monkeypatch.setattr(error_reports.time, "sleep", waited.append)
    with ErrorReports(environment).report(TEXT) as found:
        assert found is prints
    assert bool(waited) is waits


def test_what_keeps_a_rank_from_joining_is_its_own(monkeypatch):
    monkeypatch.setattr(error_reports, "PATIENCE_SECONDS", 0.0)
    reports = of_rank(3)
    reports.join()
    with reports.report(TEXT) as prints:
        assert prints


def test_a_store_that_is_gone_leaves_every_rank_to_print():
    class Gone:
        def __getattr__(self, name: str):
            raise dist.DistNetworkError("gone")

    for rank in range(2):
        with of_rank(rank, Gone(), world_size=2).report(TEXT) as prints:
            assert prints
